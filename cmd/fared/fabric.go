package main

import (
	"fmt"
	"net/netip"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
)

func statusCommand(e *env) *cobra.Command {
	return readFlags(e, &cobra.Command{
		Use: "status", Short: "Show the daemon's state at a glance", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := e.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			st, err := farev1.NewFabricServiceClient(conn).GetStatus(c.Context(), &farev1.GetStatusRequest{})
			if err != nil {
				return e.explain(err, "see fared status --help")
			}
			return e.print(st, func(w *tabwriter.Writer) { statusTable(w, st) })
		},
	})
}

func statusTable(w *tabwriter.Writer, st *farev1.GetStatusResponse) {
	row(w, "role", st.Role)
	row(w, "version", st.Version)
	row(w, "router ID", fmt.Sprintf("%s  AS %d", st.RouterId, st.AsNumber))
	row(w, "uptime", age(st.UptimeNs))
	row(w, "revision", fmt.Sprint(st.Revision))
	row(w, "converged", yesNo(st.Converged))
	row(w, "sessions", fmt.Sprintf("%d of %d established", st.SessionsEstablished, st.SessionsConfigured))
	row(w, "destinations", fmt.Sprintf("%d reachable of %d, in %d groups", st.DestinationsReachable, st.Destinations, st.Groups))
	if len(st.Loopbacks) > 0 {
		row(w, "loopbacks", strings.Join(st.Loopbacks, " "))
	}
	if dp := st.Dataplane; dp != nil {
		state := "connected"
		if !dp.Connected {
			state = "NOT CONNECTED"
		}
		row(w, "data plane", fmt.Sprintf("%s %s at %s: %d operations sent, %d in effect, %d refused, %d pending",
			state, dash(dp.Name), dp.Address, dp.OperationsSent, dp.OperationsInEffect, dp.OperationsRefused, dp.OperationsPending))
		if dp.LastError != "" {
			row(w, "", dp.LastError)
		}
	}
	for _, c := range st.Counters {
		if c.Value != 0 {
			row(w, c.Name, fmt.Sprint(c.Value))
		}
	}
}

func sessionsCommand(e *env) *cobra.Command {
	return readFlags(e, &cobra.Command{
		Use: "sessions", Short: "List the BGP sessions", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := e.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			list, err := farev1.NewFabricServiceClient(conn).ListSessions(c.Context(), &farev1.ListSessionsRequest{})
			if err != nil {
				return e.explain(err, "see fared sessions --help")
			}
			return e.print(list, func(w *tabwriter.Writer) {
				row(w, "SESSION", "PLANE", "DEVICE", "PEER", "AS", "STATE", "FOR", "BFD", "RECEIVED", "USED", "SENT", "REASON")
				for _, s := range list.Sessions {
					row(w, s.Name, s.Plane, s.Device, s.PeerAddress, fmt.Sprint(s.PeerAs), s.State, age(s.StateAgeNs), bfd(s),
						fmt.Sprint(s.RoutesReceived), fmt.Sprint(s.RoutesUsed), fmt.Sprint(s.RoutesAdvertised), dash(s.Reason))
				}
			})
		},
	})
}

// bfd draws a session's BFD: its state, and after how much silence the session is lost.
func bfd(s *farev1.Session) string {
	if s.BfdDetectionTimeNs == 0 {
		return dash(s.BfdState)
	}
	return s.BfdState + " " + time.Duration(s.BfdDetectionTimeNs).String()
}

func planesCommand(e *env) *cobra.Command {
	return readFlags(e, &cobra.Command{
		Use: "planes", Short: "List the planes and their sub-ports", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := e.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			list, err := farev1.NewFabricServiceClient(conn).ListPlanes(c.Context(), &farev1.ListPlanesRequest{})
			if err != nil {
				return e.explain(err, "see fared planes --help")
			}
			return e.print(list, func(w *tabwriter.Writer) {
				row(w, "PLANE", "STATE", "BANDWIDTH", "DEVICE", "CARRIER", "SPEED", "FROM", "REASON")
				for _, p := range list.Planes {
					state := "up"
					switch {
					case p.Drained:
						state = "drained"
					case !p.Up:
						state = "DOWN"
					}
					row(w, p.Plane, state, bandwidth(p.BandwidthBps), "", "", "", "", "")
					for _, sp := range p.SubPorts {
						row(w, "", "", "", sp.Device, yesNo(sp.Carrier), bandwidth(sp.SpeedBps), dash(sp.SpeedSource), dash(sp.Reason))
					}
				}
			})
		},
	})
}

func drainCommand(e *env) *cobra.Command {
	return drainLike(e, "drain", "Take a plane, a leaf or a sub-port out of service: shares first, routes after", true)
}

func undrainCommand(e *env) *cobra.Command {
	return drainLike(e, "undrain", "Return a plane, a leaf or a sub-port to service: routes first, shares after", false)
}

func drainLike(e *env, verb, short string, on bool) *cobra.Command {
	return &cobra.Command{
		Use: verb + " plane|leaf|sub-port NAME", Short: short,
		Example: fmt.Sprintf("  fared %s plane p0\n  fared %s leaf 10.1.0.1\n  fared %s sub-port eth3", verb, verb, verb),
		Args: func(c *cobra.Command, args []string) error {
			if len(args) != 2 {
				return &exitError{exitUsage, fmt.Errorf("%s takes what to %s and its name", verb, verb), "for example: fared " + verb + " plane p0"}
			}
			return nil
		},
		ValidArgsFunction: e.completer(drainTargets(on)),
		RunE: func(c *cobra.Command, args []string) error {
			target, err := drainTarget(args[0], args[1])
			if err != nil {
				return err
			}
			conn, err := e.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			client := farev1.NewFabricServiceClient(conn)
			var sessions []string
			if on {
				resp, rerr := client.Drain(c.Context(), &farev1.DrainRequest{Target: target})
				sessions, err = resp.GetSessions(), rerr
			} else {
				resp, rerr := client.Undrain(c.Context(), &farev1.UndrainRequest{Target: target})
				sessions, err = resp.GetSessions(), rerr
			}
			if err != nil {
				return e.explain(err, "'fared planes' lists planes and sub-ports, 'fared sessions -o json' each leaf's peer_router_id")
			}
			fmt.Fprintf(e.out, "%s %s %s: %s (%s)\n", verb, args[0], args[1], several(len(sessions), "session"), strings.Join(sessions, ", "))
			return nil
		},
	}
}

// drainTarget reads the two words of a drain command.
func drainTarget(kind, name string) (*farev1.DrainTarget, error) {
	switch kind {
	case "plane":
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: name}}, nil
	case "leaf":
		if _, err := netip.ParseAddr(name); err != nil {
			return nil, &exitError{exitUsage, fmt.Errorf("leaf %q: not a router ID", name), "'fared sessions -o json' shows each peer_router_id"}
		}
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_Leaf{Leaf: name}}, nil
	case "sub-port":
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: name}}, nil
	}
	return nil, &exitError{exitUsage, fmt.Errorf("%q cannot be drained", kind), "name a plane, a leaf or a sub-port"}
}

func reloadCommand(e *env) *cobra.Command {
	var dry bool
	c := &cobra.Command{
		Use: "reload", Short: "Make the daemon read its configuration file again", Args: noArgs,
		Long: "The file is applied as a difference, or refused whole with every reason; SIGHUP does the same.",
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := e.dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			resp, err := farev1.NewFabricServiceClient(conn).Reload(c.Context(), &farev1.ReloadRequest{DryRun: dry})
			if err != nil {
				return e.explain(err, "see fared reload --help")
			}
			if len(resp.Changes) == 0 {
				fmt.Fprintln(e.out, "nothing differs")
			}
			for _, line := range resp.Changes {
				fmt.Fprintln(e.out, line)
			}
			return nil
		},
	}
	c.Flags().BoolVar(&dry, "dry-run", false, "only say what would change")
	return c
}
