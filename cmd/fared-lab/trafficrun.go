package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/traffic"
)

func trafficRunCommand(e *cli.Env) *cobra.Command {
	var r runFlags
	var nodes []string
	c := &cobra.Command{
		Use: "run", Short: "Start traffic at all nodes together, and print a report", Args: cli.NoArgs,
		Long: `Makes traffic nodes send to each other in a pattern and verify the received bytes. In a terminal
a table follows the traffic, elsewhere a line for each interval; the report comes at the end, also as JSON
(fare.v1.TrafficReport, api/fare/v1/traffic.proto).

Patterns, over the first loopback of each node in the order of --node, then the second of each, and so
on. Pairs inside one node have no slots and are left out:
  all-to-all  each to every other
  incast      all others to the first
  ring        each to the next, in the steps of an all-reduce: a step waits for the previous step
  p2p         first to second, third to fourth, and so on

Operations: write (RDMA WRITE, then a SEND that announces it), write-imm (RDMA WRITE with immediate), send,
read (by the destination). Orderings: those of queue pair sets (draft-xu-rtgwg-fare-in-sun, Section 4).

Exit code 1 if a message was lost, duplicated or wrong, or if a node failed.`,
		Example: "  fared traffic run --node a=192.0.2.1:4795 --node b=192.0.2.2:4795 --size 1G\n  fared traffic run --node a=unix:/run/a.sock --node b=unix:/run/b.sock --pattern p2p --duration 30s --interval 10ms -o json",
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := r.resolve()
			if err != nil {
				return err
			}
			if len(nodes) == 0 {
				return cli.Usage(errors.New("no node is named"), "for example --node a=192.0.2.1:4795 --node b=192.0.2.2:4795")
			}
			var servers []traffic.Server
			seen := map[string]bool{}
			for _, w := range nodes {
				name, control, ok := strings.Cut(w, "=")
				if !ok || name == "" || control == "" || seen[name] {
					return cli.Usage(fmt.Errorf("--node %q is not NAME=CONTROL, or repeats a name", w), "CONTROL is the node's --listen")
				}
				seen[name] = true
				there := *e
				there.Socket = control
				conn, err := there.Dial()
				if err != nil {
					return err
				}
				defer conn.Close()
				servers = append(servers, traffic.Server{Name: name, Client: farev1.NewTrafficServiceClient(conn)})
			}
			return playTraffic(c.Context(), e, cfg, servers)
		},
	}
	c.Flags().StringArrayVar(&nodes, "node", nil, "NAME=CONTROL: a traffic node and its address, host:port or unix:PATH; repeatable")
	cli.Choices(c, "node")
	r.add(e, c)
	return c
}

func trafficLocalCommand(e *cli.Env) *cobra.Command {
	var r runFlags
	var t transportFlags
	var slots []string
	var nodes int
	c := &cobra.Command{
		Use: "local", Short: "Run traffic inside this process: no root, no daemon", Args: cli.NoArgs,
		Long: `Runs traffic nodes inside this process, on addresses of 127.0.0.0/8, and traffic between them as
'fared traffic run' does. Slots are given by hand: one in each of four planes with equal shares, or
--slot. All planes are the same kernel here, so this shows protocols and verification, not a fabric.`,
		Example: "  fared traffic local\n  fared traffic local --transport superp --pattern incast --nodes 8 --duration 5s\n  fared traffic local --slot p0=49152*2 --slot p1=49153 --op read -o json\n  fared traffic local --plane p3=nupa",
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := r.resolve()
			if err != nil {
				return err
			}
			at := traffic.LocalConfig{Nodes: nodes, Transport: t.transport, MTU: t.mtu, Run: cfg, Log: cli.NewLogger(e.Err, slog.LevelError)}
			if at.Planes, err = t.resolve(); err != nil {
				return err
			}
			if at.Slots, err = parseSlots(slots); err != nil {
				return err
			}
			if nodes < 2 || nodes > traffic.MaxLocalNodes {
				return cli.Usage(fmt.Errorf("--nodes %d is not within 2 to %d", nodes, traffic.MaxLocalNodes), "for example --nodes 4")
			}
			local, err := traffic.StartLocal(at)
			if err != nil {
				return cli.Failed(err, "use fewer nodes, or another transport")
			}
			defer local.Close()
			return playTraffic(c.Context(), e, cfg, local.Servers)
		},
	}
	c.Flags().IntVar(&nodes, "nodes", 4, "number of nodes, 2 to 64")
	c.Flags().StringArrayVar(&slots, "slot", nil, "PLANE=PORT or PLANE=PORT*SHARE: a slot of every pair; repeatable")
	cli.Choices(c, "nodes")
	t.add(c)
	r.add(e, c)
	return c
}

// playTraffic plays a run and prints its report.
func playTraffic(ctx context.Context, e *cli.Env, cfg traffic.Config, servers []traffic.Server) error {
	cfg.Notice = func(text string) { fmt.Fprintln(e.Err, text) }
	show := newTrafficShow(e, cfg)
	report, err := traffic.Coordinate(ctx, cfg, servers, show.interval)
	show.close()
	lost, inside := new(traffic.LostError), new(traffic.InsideError)
	switch {
	case ctx.Err() != nil:
		return cli.Interrupted()
	case errors.As(err, &inside):
		return cli.Failed(err, "name a second node with --node, or another pattern with --pattern")
	case errors.As(err, &lost) && lost.Gone:
		return cli.Failed(err, "the other nodes have ended the run and wait for the next; restart the failed node")
	case err != nil:
		return cli.Failed(err, "the nodes have ended the run; see their logs")
	}
	if err := printTraffic(e, report); err != nil {
		return err
	}
	if !report.GetOk() {
		more := ""
		if n := len(report.GetErrors()); n > 1 {
			more = fmt.Sprintf(" (and %d more)", n-1)
		}
		return cli.Failed(errors.New(report.GetErrors()[0]+more), "the report, with -o json, lists the errors of each pair")
	}
	return nil
}
