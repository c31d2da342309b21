package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/dataplane/agent"
	"github.com/fared/fared/internal/plainjson"
)

// dialDataplane connects to the agent.
func dialDataplane(e *cli.Env, o *dataplaneOptions) (*grpc.ClientConn, error) {
	e.Socket = o.config.Socket
	return e.Dial()
}

// explainDataplane turns an RPC's error into an exit code and a remedy.
func explainDataplane(e *cli.Env, err error) error {
	st, _ := status.FromError(err)
	switch st.Code() {
	case codes.Unavailable:
		why := cli.Reason(st.Message())
		remedy := "is the agent running? systemctl status fared-dataplane; start it with 'fared dataplane', or name its socket with --socket"
		if e.Socket == defaultDataplane && cli.UnitInstalled("/", "fared-dataplane") {
			remedy = cli.UnitRemedy("fared-dataplane")
		}
		if strings.Contains(why, "permission denied") {
			remedy = "use sudo, or join the group that 'ls -l " + e.Socket + "' shows"
		}
		return cli.Unreachable(fmt.Errorf("no data plane answers at %s: %s", e.Socket, why), remedy)
	case codes.DeadlineExceeded:
		return cli.Unreachable(fmt.Errorf("the data plane at %s does not answer within %s", e.Socket, e.Patience), "see the agent's log; under systemd the watchdog restarts an agent that hangs")
	case codes.Unimplemented:
		return cli.Failed(errors.New(st.Message()), "'fared dataplane show' names the running driver; only --driver bpf counts")
	case codes.NotFound:
		return cli.NotFound(errors.New(st.Message()), "'fared dataplane show' lists the destinations")
	default:
		return e.Explain(err, "see fared dataplane --help")
	}
}

// dataplaneView is the content of `fared dataplane show`.
type dataplaneView struct {
	address     string
	description *farev1.HelloResponse
	health      string
	state       *farev1.SnapshotResponse
}

func dataplaneShowCommand(e *cli.Env, o *dataplaneOptions) *cobra.Command {
	c := &cobra.Command{
		Use: "show", Short: "Show the data plane's capabilities and the programmed vectors and destinations", Args: cli.NoArgs,
		Long: `Shows the running agent's driver, its health and capabilities, and all
programmed objects: sub-ports, vectors with their weights, destinations. It changes nothing.`,
		Example: "  fared dataplane show\n  fared dataplane show -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := dialDataplane(e, o)
			if err != nil {
				return err
			}
			defer conn.Close()
			ctx, cancel := context.WithTimeout(c.Context(), e.Patience)
			defer cancel()
			view, err := readDataplane(ctx, conn)
			if err != nil {
				return explainDataplane(e, err)
			}
			view.address = e.Socket
			if e.Output != "table" {
				return cli.PrintJSON(e.Out, e.Output, view.json())
			}
			w := tabwriter.NewWriter(e.Out, 0, 0, 2, ' ', 0)
			view.table(w)
			return w.Flush()
		},
	}
	return cli.ReadFlags(e, c)
}

func readDataplane(ctx context.Context, conn *grpc.ClientConn) (*dataplaneView, error) {
	view := &dataplaneView{state: &farev1.SnapshotResponse{}}
	stream, err := farev1.NewDataplaneServiceClient(conn).Snapshot(ctx, &farev1.SnapshotRequest{})
	if err != nil {
		return nil, err
	}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		proto.Merge(view.state, part)
	}
	header, err := stream.Header()
	if err != nil {
		return nil, err
	}
	// A foreign data plane has no description, and may have no health service.
	if view.description, err = agent.Describe(header); err != nil {
		view.description = &farev1.HelloResponse{}
	}
	view.health = "UNKNOWN"
	answer, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{Service: farev1.DataplaneService_ServiceDesc.ServiceName})
	if err == nil {
		view.health = answer.Status.String()
	} else if status.Code(err) != codes.Unimplemented {
		return nil, err
	}
	return view, nil
}

// json has the keys of the .proto files: health, then the answer to Hello, then the programmed state.
func (v *dataplaneView) json() []byte {
	b := fmt.Appendf(nil, `{"health":%q,`, v.health) // health is the name of an enum value, so it needs no quoting
	b = append(b, bytes.TrimSuffix(plainjson.Append(nil, v.description.ProtoReflect())[1:], []byte("}"))...)
	b = append(b, ',')
	return append(b, plainjson.Append(nil, v.state.ProtoReflect())[1:]...)
}

func (v *dataplaneView) table(w *tabwriter.Writer) {
	d := v.description
	cli.Row(w, "data plane", strings.TrimSpace(cli.Dash(d.Name)+" "+d.Version)+" at "+v.address)
	cli.Row(w, "health", v.health)
	cli.Row(w, "capabilities", cli.Dash(strings.Join(capabilityWords(d.Capabilities), ", ")))
	fmt.Fprintln(w)
	cli.Row(w, "SUB-PORT", "STATE")
	for _, s := range v.state.SubPorts {
		state := "up"
		if !s.Up {
			state = "down"
		}
		cli.Row(w, s.Device, state)
	}
	users := map[uint32]int{}
	for _, d := range v.state.Destinations {
		users[d.Vector]++
	}
	fmt.Fprintln(w)
	cli.Row(w, "GROUP", "DESTINATIONS", "SLOTS", "WEIGHTS")
	for _, g := range v.state.Vectors {
		cli.Row(w, fmt.Sprint(g.Id), fmt.Sprint(users[g.Id]), fmt.Sprint(len(g.Slots)), memberWeights(g))
	}
	fmt.Fprintln(w)
	cli.Row(w, "DESTINATION", "GROUP", "PAIRS")
	for _, d := range v.state.Destinations {
		cli.Row(w, d.Prefix, fmt.Sprint(d.Vector), fmt.Sprint(len(d.Pairs)))
	}
}

// memberWeights writes a vector for people: p0.0 2, p1.0 1.
func memberWeights(g *farev1.Vector) string {
	if len(g.Members) == 0 {
		return "unreachable: packets are dropped"
	}
	var words []string
	for _, m := range g.Members {
		words = append(words, fmt.Sprintf("%s %d", m.Device, m.Weight))
	}
	return strings.Join(words, ", ")
}

// capabilityWords describes a data plane's capabilities and limits.
func capabilityWords(c *farev1.Capabilities) (words []string) {
	for _, can := range []struct {
		yes  bool
		word string
	}{
		{c.GetIpv6(), "IPv6"}, {c.GetPerPacket(), "per-packet"}, {c.GetFlowPins(), "flow pins"},
		{c.GetConfirmsInEffect(), "confirms in effect"},
	} {
		if can.yes {
			words = append(words, can.word)
		}
	}
	if h := c.GetFlowHash(); h != nil {
		words = append(words, fmt.Sprintf("hash %s over %d buckets, %d of each sub-port lasting", h.Algorithm, h.Buckets, h.LastingBuckets))
	}
	for _, limit := range []struct {
		most uint32
		of   string
	}{{c.GetMaxVectors(), "vectors"}, {c.GetMaxDestinations(), "destinations"}, {c.GetMaxWeight(), "per weight"}, {c.GetMaxWeightSum(), "per sum of weights"}} {
		if limit.most > 0 {
			words = append(words, fmt.Sprintf("at most %d %s", limit.most, limit.of))
		}
	}
	return words
}

func dataplaneCountersCommand(e *cli.Env, o *dataplaneOptions) *cobra.Command {
	var destination string
	c := &cobra.Command{
		Use: "counters", Short: "Show the packets sent over each sub-port and slot", Args: cli.NoArgs,
		Long: `Shows packets and bytes of the steered flows: for each sub-port, and for each queue pair slot.
DIVERTED packets left over another sub-port because the slot's sub-port was down.`,
		Example: "  fared dataplane counters\n  fared dataplane counters --destination 10.255.0.2/32",
		RunE: func(c *cobra.Command, _ []string) error {
			conn, err := dialDataplane(e, o)
			if err != nil {
				return err
			}
			defer conn.Close()
			ctx, cancel := context.WithTimeout(c.Context(), e.Patience)
			defer cancel()
			if destination != "" && !strings.Contains(destination, "/") {
				destination += map[bool]string{true: "/128", false: "/32"}[strings.Contains(destination, ":")]
			}
			all := &farev1.CountersResponse{}
			stream, err := farev1.NewDataplaneServiceClient(conn).Counters(ctx, &farev1.CountersRequest{Destination: destination})
			if err != nil {
				return explainDataplane(e, err)
			}
			for {
				part, err := stream.Recv()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					return explainDataplane(e, err)
				}
				proto.Merge(all, part)
			}
			return e.Print(all, func(w *tabwriter.Writer) { countersTable(w, all) })
		},
	}
	c.Flags().StringVarP(&destination, "destination", "d", "", "only the slots toward this destination")
	_ = c.RegisterFlagCompletionFunc("destination", func(c *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return dataplaneDestinations(e, c, o), cobra.ShellCompDirectiveNoFileComp
	})
	return cli.ReadFlags(e, c)
}

// dataplaneDestinations completes the programmed destinations.
func dataplaneDestinations(e *cli.Env, c *cobra.Command, o *dataplaneOptions) (out []string) {
	conn, err := dialDataplane(e, o)
	if err != nil {
		return nil
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(c.Context(), cli.CompleteTimeout)
	defer cancel()
	view, err := readDataplane(ctx, conn)
	if err != nil {
		return nil
	}
	for _, d := range view.state.Destinations {
		out = append(out, d.Prefix)
	}
	slices.Sort(out)
	return out
}

func countersTable(w *tabwriter.Writer, all *farev1.CountersResponse) {
	cli.Row(w, "SUB-PORT", "PLANE", "PACKETS", "BYTES")
	for _, s := range all.SubPorts {
		cli.Row(w, s.Device, s.Plane, fmt.Sprint(s.Packets), fmt.Sprint(s.Bytes))
	}
	if len(all.Slots) == 0 {
		return
	}
	fmt.Fprintln(w)
	cli.Row(w, "SOURCE", "DESTINATION", "SLOT", "PACKETS", "BYTES", "DIVERTED")
	for _, s := range all.Slots {
		cli.Row(w, s.Source, s.Destination, fmt.Sprint(s.Slot), fmt.Sprint(s.Packets), fmt.Sprint(s.Bytes), fmt.Sprint(s.DivertedPackets))
	}
}
