package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
)

func pingCommand(e *cli.Env) *cobra.Command {
	req := &farev1.PingRequest{}
	var slot string
	c := cli.ReadFlags(e, &cobra.Command{
		Use: "ping ADDRESS", Short: "Send packets to another GPU by each slot, and show their ways",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return cli.Usage(fmt.Errorf("%d addresses, ping needs one", len(args)), "fared ping 10.255.0.2")
			}
			return nil
		},
		Long: `Lets the running daemon send probes to a destination, from the source port of each slot toward it,
as packets of its queue pairs are sent. The peer answers each by a slot of the same plane and
reports by which device it arrived. A row has all probes of a sub-port: the device by which they
left, those of the peer, and the one by which the answers came back.

--plane or --slot choose some slots. --size is that of IP packets, which are not fragmented:
9000 finds a port with a smaller MTU.

Exit code 1: a probe was lost or took another way. 4: no slot toward ADDRESS has a share.`,
		Example: "  fared ping 10.255.0.2\n  fared ping 10.255.0.2 --plane p2 --count 20\n  fared ping 10.255.0.2 --slot 17 --size 9000 -o json",
		RunE: func(c *cobra.Command, args []string) error {
			req.Destination = args[0]
			if slot != "" {
				n, err := strconv.ParseUint(slot, 10, 16)
				if err != nil {
					return cli.Usage(fmt.Errorf("--slot %q is no number", slot), "'fared slots SOURCE DESTINATION' lists the slots")
				}
				s := uint32(n)
				req.Slot = &s
			}
			conn, err := e.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			resp, err := farev1.NewFabricServiceClient(conn).Ping(c.Context(), req)
			if err != nil {
				return e.Explain(err, known)
			}
			if err := e.Print(resp, func(w *tabwriter.Writer) { pingTable(w, resp) }); err != nil {
				return err
			}
			if i := slices.IndexFunc(resp.Replies, func(r *farev1.PingReply) bool { return r.Problem != "" }); i >= 0 {
				r := resp.Replies[i]
				return cli.Failed(fmt.Errorf("%s: slot %d: %s", cmp.Or(r.Device, r.Plane), r.Slot, cmp.Or(r.Text, r.Problem)), "'fared health' has the causes that are known")
			}
			return nil
		},
	})
	c.Flags().StringVarP(&req.Source, "source", "s", "", "local loopback to send from (default the first with slots toward ADDRESS)")
	c.Flags().StringVarP(&req.Plane, "plane", "p", "", "only the slots of this plane")
	c.Flags().StringVar(&slot, "slot", "", "only this slot")
	c.Flags().Uint32Var(&req.Size, "size", 0, "bytes of an IP packet (default the least, 188 or 208)")
	c.Flags().Uint32Var(&req.Count, "count", 3, "probes by each slot, 1 to 100")
	c.MarkFlagsMutuallyExclusive("plane", "slot")
	return c
}

// pingTable draws a row for each sub-port.
func pingTable(w *tabwriter.Writer, resp *farev1.PingResponse) {
	type row struct {
		plane, device  string
		slots          []uint32
		lost, all      int
		sum            time.Duration
		ways, problems []string
	}
	var rows []*row
	for _, r := range resp.Replies {
		i := slices.IndexFunc(rows, func(x *row) bool { return x.plane == r.Plane && x.device == r.Device })
		if i < 0 {
			i, rows = len(rows), append(rows, &row{plane: r.Plane, device: r.Device})
		}
		x := rows[i]
		x.all++
		if !slices.Contains(x.slots, r.Slot) {
			x.slots = append(x.slots, r.Slot)
		}
		add := func(list *[]string, text string) {
			if text != "" && !slices.Contains(*list, text) {
				*list = append(*list, text)
			}
		}
		add(&x.problems, r.Text)
		if r.RoundTripNs == 0 && r.ArrivedBy == "" {
			x.lost++
			continue
		}
		x.sum += time.Duration(r.RoundTripNs)
		add(&x.ways, fmt.Sprintf("%s > %s (%s), %s > %s", cli.Dash(r.LeftBy), cli.Dash(r.ArrivedBy), cli.Dash(r.ArrivedPlane), cli.Dash(r.ReturnedBy), cli.Dash(r.ReturnedTo)))
	}
	slices.SortStableFunc(rows, func(a, b *row) int { return cmp.Or(cmp.Compare(a.plane, b.plane), cmp.Compare(a.device, b.device)) })
	cli.Row(w, "PLANE", "SUB-PORT", "SLOTS", "LOST", "ROUND TRIP", "WAYS", "STATE")
	for _, x := range rows {
		mean, way, state := "-", "-", "proved"
		if n := x.all - x.lost; n > 0 {
			mean = (x.sum / time.Duration(n)).Round(time.Microsecond).String()
		}
		if len(x.ways) > 0 {
			way = x.ways[0]
		}
		if len(x.ways) > 1 {
			way += fmt.Sprintf(" and %d more", len(x.ways)-1)
		}
		if len(x.problems) > 0 {
			state = "WRONG: " + x.problems[0]
		}
		cli.Row(w, x.plane, cli.Dash(x.device), strconv.Itoa(len(x.slots)), fmt.Sprintf("%d of %d", x.lost, x.all), mean, way, state)
	}
}
