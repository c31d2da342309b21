package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
)

func statusCommand(e *cli.Env) *cobra.Command {
	var all bool
	c := repeatable(e, cli.ReadFlags(e, &cobra.Command{
		Use: "status", Short: "Show the daemon's state at a glance", Args: cli.NoArgs,
		Example: "  fared status\n  fared status --watch\n  fared status --all\n  fared status -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := e.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			st, err := farev1.NewFabricServiceClient(conn).GetStatus(c.Context(), &farev1.GetStatusRequest{})
			if err != nil {
				return e.Explain(err, "see fared status --help")
			}
			return e.Print(st, func(w *tabwriter.Writer) { statusTable(w, st, all) })
		},
	}))
	c.Flags().BoolVarP(&all, "all", "a", false, "also the counters of this server's own routes that leaves send back, which every fabric has")
	return c
}

// expectedCounters count routes to this server's loopbacks that leaves send back. Where they are a fault (servers that
// share an AS, a loopback that another AS announces), the faults and conflicts have it.
var expectedCounters = []string{`guard_dropped{reason="route_as_loop"}`, `inputs_ignored{reason="own-loopback"}`}

// statusTable draws the status; all includes the expected counters.
func statusTable(w *tabwriter.Writer, st *farev1.GetStatusResponse, all bool) {
	cli.Row(w, "role", st.Role)
	cli.Row(w, "version", st.Version)
	cli.Row(w, "router ID", fmt.Sprintf("%s  AS %d", st.RouterId, st.AsNumber))
	cli.Row(w, "uptime", cli.Age(st.UptimeNs))
	cli.Row(w, "revision", fmt.Sprint(st.Revision))
	cli.Row(w, "converged", cli.YesNo(st.Converged))
	cli.Row(w, "sessions", fmt.Sprintf("%d of %d established", st.SessionsEstablished, st.SessionsConfigured))
	cli.Row(w, "destinations", fmt.Sprintf("%d reachable of %d, in %d vectors", st.DestinationsReachable, st.Destinations, st.Vectors))
	if len(st.Loopbacks) > 0 {
		cli.Row(w, "loopbacks", strings.Join(st.Loopbacks, " "))
	}
	if dp := st.Dataplane; dp != nil {
		state := "connected"
		if !dp.Connected {
			state = "NOT CONNECTED"
		}
		cli.Row(w, "data plane", fmt.Sprintf("%s %s at %s: %d operations sent, %d in effect, %d refused, %d pending",
			state, cli.Dash(dp.Name), dp.Address, dp.OperationsSent, dp.OperationsInEffect, dp.OperationsRefused, dp.OperationsPending))
		if dp.Damage != "" {
			cli.Row(w, "", "DAMAGED, nothing is in effect until the repair: "+dp.Damage)
		}
		if dp.Approximate > 0 {
			cli.Row(w, "", cli.Several(int(dp.Approximate), "vector")+" held approximately: 'fared weights' names the shares")
		}
		if dp.Refused > 0 {
			cli.Row(w, "", cli.Several(int(dp.Refused), "object")+" refused: 'fared weights' and 'fared watch --events' show the reasons")
		}
		if dp.LastError != "" {
			cli.Row(w, "", dp.LastError)
		}
		for _, x := range dp.Limitations {
			cli.Row(w, "FAULT", "host, "+x.Reason+": "+x.Text)
			cli.Row(w, "", x.Remedy)
		}
	}
	switch {
	case st.SlotTableError != "":
		cli.Row(w, "slot table", fmt.Sprintf("NOT PUBLISHED after %s: %s", cli.Several(int(st.SlotTableFailures), "failure"), st.SlotTableError))
	case st.SlotTableFailures > 0:
		cli.Row(w, "slot table", "published, after "+cli.Several(int(st.SlotTableFailures), "failure"))
	}
	if st.DrainsError != "" {
		cli.Row(w, "drains", "NOT SAFE: "+st.DrainsError)
	}
	faultRows(w, st.Faults)
	proofRows(w, st.Proof)
	for _, d := range st.Drains {
		cli.Row(w, "drain", drainState(d))
		if d.SinceNs != 0 {
			cli.Row(w, "", drainOrigin(d))
		}
		for _, reason := range d.WaitsFor {
			cli.Row(w, "", reason)
		}
	}
	for _, c := range st.Counters {
		if c.Value != 0 && (all || !slices.Contains(expectedCounters, c.Name)) {
			cli.Row(w, c.Name, fmt.Sprint(c.Value))
		}
	}
}

// proofRows draws the results of probes.
func proofRows(w *tabwriter.Writer, p *farev1.ProofStatus) {
	if p == nil {
		return
	}
	if p.Inactive != "" {
		cli.Row(w, "proof", "none: "+p.Inactive)
		return
	}
	cli.Row(w, "proof", fmt.Sprintf("%d of %s answer probes", p.Answering, cli.Several(int(p.Destinations), "destination")))
	for _, f := range p.Findings {
		text := f.Text
		if f.Cause != "" {
			text += "; " + f.Cause
		}
		cli.Row(w, "FAULT", text)
		cli.Row(w, "", f.Remedy)
	}
}

// faultRows draws faults, grouped by kind, reason and remedy, with the remedy below.
func faultRows(w *tabwriter.Writer, faults []*farev1.Fault) {
	const most = 4 // sessions named
	type key struct{ kind, reason, remedy string }
	var order []key
	of := map[key][]*farev1.Fault{}
	for _, f := range faults {
		k := key{f.Kind, f.Reason, f.Remedy}
		if of[k] == nil {
			order = append(order, k)
		}
		of[k] = append(of[k], f)
	}
	for _, k := range order {
		var names []string
		routes := 0
		for _, f := range of[k] {
			names = append(names, f.Session)
			routes += int(f.Routes)
		}
		text := strings.Join(names[:min(most, len(names))], ", ")
		if len(names) > most {
			text += fmt.Sprintf(" and %d more", len(names)-most)
		}
		cli.Row(w, "FAULT", fmt.Sprintf("%s, %s: %s of %s, such as %s", k.kind, k.reason, cli.Several(routes, "route"), text, of[k][0].Example))
		cli.Row(w, "", k.remedy)
	}
}

func sessionsCommand(e *cli.Env) *cobra.Command {
	var plane string
	c := repeatable(e, cli.ReadFlags(e, &cobra.Command{
		Use: "sessions", Short: "List the BGP sessions", Args: cli.NoArgs,
		Example: "  fared sessions\n  fared sessions --plane p0 -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := e.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			list, err := farev1.NewFabricServiceClient(conn).ListSessions(c.Context(), &farev1.ListSessionsRequest{})
			if err != nil {
				return e.Explain(err, "see fared sessions --help")
			}
			if plane != "" {
				list.Sessions = slices.DeleteFunc(list.Sessions, func(s *farev1.Session) bool { return s.Plane != plane })
				if len(list.Sessions) == 0 {
					return cli.NotFound(fmt.Errorf("no plane %q has a session", plane), "'fared planes' lists the planes")
				}
			}
			return e.Print(list, func(w *tabwriter.Writer) {
				cli.Row(w, "SESSION", "PLANE", "DEVICE", "PEER", "AS", "STATE", "FOR", "BFD", "RECEIVED", "USED", "SENT", "REASON")
				for _, s := range list.Sessions {
					cli.Row(w, s.Name, s.Plane, s.Device, s.PeerAddress, fmt.Sprint(s.PeerAs), s.State, cli.Age(s.StateAgeNs), bfd(s),
						fmt.Sprint(s.RoutesReceived), fmt.Sprint(s.RoutesUsed), fmt.Sprint(s.RoutesAdvertised), cli.Dash(s.PresentReason()))
				}
			})
		},
	}))
	c.Flags().StringVar(&plane, "plane", "", "list only the sessions of this plane")
	completePlanes(e, c)
	return c
}

// completePlanes completes the flag --plane by the daemon's planes.
func completePlanes(e *cli.Env, c *cobra.Command) {
	_ = c.RegisterFlagCompletionFunc("plane", e.Completer(func(ctx context.Context, conn *grpc.ClientConn, _ []string) (names []string) {
		list, err := farev1.NewFabricServiceClient(conn).ListPlanes(ctx, &farev1.ListPlanesRequest{})
		if err != nil {
			return nil
		}
		for _, p := range list.Planes {
			names = append(names, p.Plane)
		}
		return names
	}))
}

// bfd draws a session's BFD: its state, and the detection time.
func bfd(s *farev1.Session) string {
	if s.BfdDetectionTimeNs == 0 {
		return cli.Dash(s.BfdState)
	}
	return s.BfdState + " " + time.Duration(s.BfdDetectionTimeNs).String()
}

func planesCommand(e *cli.Env) *cobra.Command {
	return repeatable(e, cli.ReadFlags(e, &cobra.Command{
		Use: "planes", Short: "List the planes and their sub-ports", Args: cli.NoArgs,
		Example: "  fared planes\n  fared planes -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := e.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			list, err := farev1.NewFabricServiceClient(conn).ListPlanes(c.Context(), &farev1.ListPlanesRequest{})
			if err != nil {
				return e.Explain(err, "see fared planes --help")
			}
			return e.Print(list, func(w *tabwriter.Writer) {
				cli.Row(w, "PLANE", "STATE", "BANDWIDTH", "DEVICE", "CARRIER", "SPEED", "FROM", "REASON")
				for _, p := range list.Planes {
					state := "up"
					switch {
					case p.Drained:
						state = "drained"
					case p.Draining:
						state = "draining"
					case !p.Up:
						state = "DOWN"
					}
					cli.Row(w, p.Plane, state, cli.Bandwidth(p.BandwidthBps), "", "", "", "", "")
					for _, sp := range p.SubPorts {
						cli.Row(w, "", "", "", deviceOf(sp), cli.YesNo(sp.Carrier), cli.Bandwidth(sp.SpeedBps), cli.Dash(sp.SpeedSource), cli.Dash(sp.Reason))
					}
				}
			})
		},
	}))
}

func drainCommand(e *cli.Env) *cobra.Command {
	return drainLike(e, "drain", "Take a plane, a leaf or a sub-port out of service: shares first, routes after", true)
}

func undrainCommand(e *cli.Env) *cobra.Command {
	return drainLike(e, "undrain", "Return a plane, a leaf or a sub-port to service: routes first, shares after", false)
}

// drainName returns the kind and the name of a drain's target: "plane p2".
func drainName(d *farev1.DrainStatus) string {
	kind, name := "sub-port", d.Target.GetSubPort()
	switch d.Target.GetTarget().(type) {
	case *farev1.DrainTarget_Plane:
		kind, name = "plane", d.Target.GetPlane()
	case *farev1.DrainTarget_Leaf:
		kind, name = "leaf", d.Target.GetLeaf()
	}
	return kind + " " + name
}

// drainState describes a drain: "plane p2: shares, 3 destinations may still leave over it".
func drainState(d *farev1.DrainStatus) string {
	out := drainName(d) + ": " + d.Stage
	if d.Waiting > 0 {
		out += ", " + cli.Several(int(d.Waiting), "destination") + " may still leave over it"
	}
	return out
}

// drainOrigin describes when, by whom and why a target was drained.
func drainOrigin(d *farev1.DrainStatus) string {
	out := "since " + time.Unix(0, int64(d.SinceNs)).UTC().Format(time.RFC3339)
	if d.By != "" {
		out += " by " + d.By
	}
	if d.Reason != "" {
		out += ": " + d.Reason
	}
	return out
}

func drainLike(e *cli.Env, verb, short string, on bool) *cobra.Command {
	var wait, force bool
	var reason string
	var timeout time.Duration
	example := fmt.Sprintf("  fared %s plane p0 --wait\n  fared %s leaf 10.1.0.1\n  fared %s sub-port eth3", verb, verb, verb)
	if on {
		example += " --reason 'new cable, ticket 4711'"
	}
	command := &cobra.Command{
		Use: verb + " plane|leaf|sub-port NAME", Short: short,
		Example: example,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 2 {
				return cli.Usage(fmt.Errorf("%s needs the kind and the name of its target", verb), "for example: fared "+verb+" plane p0")
			}
			return nil
		},
		ValidArgsFunction: e.Completer(drainTargets(on)),
		RunE: func(c *cobra.Command, args []string) error {
			target, err := drainTarget(args[0], args[1])
			if err != nil {
				return err
			}
			conn, err := e.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			client := farev1.NewFabricServiceClient(conn)
			var sessions []string
			if on {
				resp, rerr := client.Drain(c.Context(), &farev1.DrainRequest{Target: target, Force: force, Reason: reason})
				target, sessions, err = resp.GetTarget(), resp.GetSessions(), rerr
			} else {
				resp, rerr := client.Undrain(c.Context(), &farev1.UndrainRequest{Target: target})
				target, sessions, err = resp.GetTarget(), resp.GetSessions(), rerr
			}
			if err != nil {
				return e.Explain(err, "'fared planes' lists planes and sub-ports, 'fared sessions -o json' each leaf's peer_router_id")
			}
			fmt.Fprintf(e.Out, "%s %s %s: %s (%s)\n", verb, args[0], args[1], cli.Several(len(sessions), "session"), strings.Join(sessions, ", "))
			ctx := c.Context()
			if timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout)
				defer cancel()
			}
			return followDrain(ctx, e, client, target, on, wait, timeout)
		},
	}
	end := "drained"
	if !on {
		end = "back in service"
	}
	command.Flags().BoolVar(&wait, "wait", false, "wait until the target is "+end+", and show the pending conditions")
	command.Flags().DurationVar(&timeout, "timeout", 0, "with --wait: fail after this time, and name the pending conditions; 0 means no limit")
	if on {
		command.Flags().StringVar(&reason, "reason", "", "why, one line; 'fared status' shows it")
		command.Flags().BoolVar(&force, "force", false, "drain even if a destination is left without any plane")
	}
	return command
}

// drainPoll is the pause between two queries of a drain.
const drainPoll = 200 * time.Millisecond

// followDrain prints the progress of a drain or of its reversal, and its pending conditions: once, or with wait on each
// change until its end. A change that is not on the disk is an error then.
func followDrain(ctx context.Context, e *cli.Env, client farev1.FabricServiceClient, target *farev1.DrainTarget, on, wait bool, timeout time.Duration) error {
	late := func(state string) error {
		return cli.Failed(fmt.Errorf("not done after %s: %s", timeout, cmp.Or(strings.Join(strings.Fields(state), " "), "its state is unknown")), "the daemon continues; 'fared status' shows drains")
	}
	for shown := ""; ; {
		st, err := client.GetStatus(ctx, &farev1.GetStatusRequest{})
		if deadline, limited := ctx.Deadline(); limited && status.Code(err) == codes.DeadlineExceeded && time.Until(deadline) < drainPoll {
			<-ctx.Done() // the server's clock of the call ended it first
		}
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return late(shown)
		}
		if err != nil {
			return e.Explain(err, "'fared status' shows drains")
		}
		i := slices.IndexFunc(st.Drains, func(d *farev1.DrainStatus) bool { return proto.Equal(d.Target, target) })
		state, done := "", true // without a drain the wait is over
		if i >= 0 {
			d := st.Drains[i]
			state = "  " + strings.Join(append([]string{drainState(d)}, d.WaitsFor...), "\n    ") + "\n"
			if on && d.Stage == "given-up" {
				return cli.Failed(fmt.Errorf("the drain of %s was given up: %s", drainName(d), strings.Join(d.WaitsFor, ", ")),
					"drain again once the other end has ended its drain, or force it (fared drain --force)")
			}
			done = on && d.Stage == "drained"
		}
		if state != shown {
			fmt.Fprint(e.Out, state)
			shown = state
		}
		switch {
		case !done && wait:
		case st.DrainsError != "":
			return cli.Failed(errors.New(st.DrainsError), "the change is in force, but not on the disk: remove the cause, then repeat the command")
		default:
			return nil
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return late(shown)
			}
			return e.Explain(ctx.Err(), "'fared status' shows drains")
		case <-time.After(drainPoll):
		}
	}
}

// drainTarget reads the two words of a drain command.
func drainTarget(kind, name string) (*farev1.DrainTarget, error) {
	switch kind {
	case "plane":
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: name}}, nil
	case "leaf":
		if _, err := netip.ParseAddr(name); err != nil {
			return nil, cli.Usage(fmt.Errorf("leaf %q is not a router ID", name), "'fared sessions -o json' shows each peer_router_id")
		}
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_Leaf{Leaf: name}}, nil
	case "sub-port":
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: name}}, nil
	}
	return nil, cli.Usage(fmt.Errorf("%q cannot be drained", kind), "name a plane, a leaf or a sub-port")
}

func clearCommand(e *cli.Env) *cobra.Command {
	return &cobra.Command{
		Use: "clear session NAME", Short: "Close a BGP session, which connects again at once",
		Long: `Closes one established session with Cease, Administrative Reset (RFC 4486). Its routes do not
count until it is established again: drain a leaf or a sub-port first where no packet may be lost.`,
		Example: "  fared clear session p0/eth0",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 2 || args[0] != "session" {
				return cli.Usage(errors.New("clear needs the word session and the name of a session"), "for example: fared clear session p0/eth0; 'fared sessions' lists them")
			}
			return nil
		},
		ValidArgsFunction: e.Completer(func(ctx context.Context, conn *grpc.ClientConn, args []string) (names []string) {
			if len(args) == 0 {
				return []string{"session"}
			}
			list, err := farev1.NewFabricServiceClient(conn).ListSessions(ctx, &farev1.ListSessionsRequest{})
			if err != nil || len(args) > 1 {
				return nil
			}
			for _, s := range list.Sessions {
				if s.Established() {
					names = append(names, cobra.CompletionWithDesc(s.Name, s.PeerAddress))
				}
			}
			return names
		}),
		RunE: func(c *cobra.Command, args []string) error {
			conn, err := e.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			if _, err := farev1.NewFabricServiceClient(conn).ClearSession(c.Context(), &farev1.ClearSessionRequest{Session: args[1]}); err != nil {
				return e.Explain(err, "'fared sessions' lists the sessions and their states")
			}
			fmt.Fprintf(e.Out, "clear session %s: closed, it connects again\n", args[1])
			return nil
		},
	}
}

func reloadCommand(e *cli.Env) *cobra.Command {
	var dry bool
	c := &cobra.Command{
		Use: "reload", Short: "Reload the daemon's configuration file", Args: cli.NoArgs,
		Example: "  fared reload --dry-run\n  fared reload",
		Long:    "The daemon applies the differences, or rejects the whole file with every reason; SIGHUP does the same.",
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := e.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			resp, err := farev1.NewFabricServiceClient(conn).Reload(c.Context(), &farev1.ReloadRequest{DryRun: dry})
			if err != nil {
				return e.Explain(err, "see fared reload --help")
			}
			if len(resp.Changes) == 0 {
				fmt.Fprintln(e.Out, "no differences")
			}
			for _, line := range resp.Changes {
				fmt.Fprintln(e.Out, line)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&dry, "dry-run", false, "only show the changes, and apply nothing")
	return c
}

// deviceOf returns the name of a sub-port, with the present name of its device where that differs.
func deviceOf(s *farev1.SubPort) string {
	if s.Netdev == "" || s.Netdev == s.Device {
		return s.Device
	}
	return s.Device + " (" + s.Netdev + ")"
}
