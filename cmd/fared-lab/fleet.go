package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/fleet/worker"
)

// defaultWorker is the address of a worker on this machine.
const defaultWorker = "127.0.0.1:4798"

func fleetCommand(e *cli.Env) *cobra.Command {
	c := &cobra.Command{
		Use: "fleet", Short: "See a fabric as a whole: which part is at fault, and what if",
		Long: `Workers join the reports of all servers and leaves ('fared report'), and name the parts at fault:
a cable or half of one, a server's ports, a leaf, an uplink, a spine, one direction of a cable that
loses packets, a leaf with invalid communities. The other commands ask a worker; every worker has
the whole view. /usr/share/doc/fared/fleet.md is the first five minutes.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return cli.Usage(fmt.Errorf("unknown command %q", "fleet "+args[0]), "see fared fleet --help")
		},
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(fleetWorkerCommand(e), fleetStatusCommand(e), fleetFaultsCommand(e), fleetTopCommand(e), fleetWhatIfCommand(e), fleetDrainCommand(e), fleetUndrainCommand(e), fleetDrainsCommand(e))
	return c
}

// asking is a command that asks a worker.
func asking(e *cli.Env, c *cobra.Command, run func(ctx context.Context, client fleetv1.FleetServiceClient, args []string) error) *cobra.Command {
	address := os.Getenv("FARED_FLEET")
	if address == "" {
		address = defaultWorker
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := hostPort("--worker", address); err != nil {
			return err
		}
		conn, err := e.DialAt(address)
		if err != nil {
			return err
		}
		defer conn.Close()
		return explainWorker(run(c.Context(), fleetv1.NewFleetServiceClient(conn), args), address)
	}
	c.Flags().StringVar(&address, "worker", address, "host:port of a worker; FARED_FLEET is the default")
	return cli.ReadFlags(e, c)
}

// explainWorker gives a worker's error an exit code and a remedy.
func explainWorker(err error, address string) error {
	st, is := status.FromError(err)
	if err == nil || !is {
		return err
	}
	switch st.Code() {
	case codes.Unavailable:
		if !strings.Contains(st.Message(), "Error while dialing") {
			return cli.Unreachable(fmt.Errorf("no worker answers at %s, which takes connections: %s", address, cli.Reason(st.Message())),
				"compare FARED_TLS_CERT, FARED_TLS_KEY and FARED_TLS_CA here and of the worker: both have certificates of one authority, or none")
		}
		return cli.Unreachable(fmt.Errorf("no worker answers at %s: %s", address, cli.Reason(st.Message())), "start one with 'fared fleet worker', or name it with --worker")
	case codes.DeadlineExceeded:
		return cli.Unreachable(fmt.Errorf("the worker at %s does not answer in time", address), "see the worker's log; a large fabric takes long to simulate")
	case codes.InvalidArgument:
		return cli.Usage(errors.New(st.Message()), "'fared topo show' lists the parts of a fabric file")
	case codes.Canceled:
		return cli.Interrupted()
	case codes.NotFound:
		return cli.NotFound(errors.New(st.Message()), "'fared fleet drains' lists them")
	case codes.FailedPrecondition:
		return cli.Failed(errors.New(st.Message()), "'fared fleet whatif drain:PART' lists the present failures and drains; --queue waits for their end")
	case codes.Unimplemented:
		return cli.Failed(errors.New(st.Message()), "start the workers with --etcd or --configmap")
	case codes.Internal:
		return cli.Failed(errors.New(st.Message()), "see the worker's log, and whether etcd or Kubernetes answers")
	}
	return cli.Failed(fmt.Errorf("%s (%s)", st.Message(), st.Code()), "see the worker's log")
}

func fleetStatusCommand(e *cli.Env) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Short: "Show how much of the fabric reports, and how many parts are at fault", Args: cli.NoArgs,
		Long:    "Shows how many servers, leaves and spines report, the parts at fault and in drains in numbers, and nodes\nwhose reports were refused within ten minutes: they are not of the workers' fabric, or have another's certificate.",
		Example: "  fared fleet status\n  fared fleet status --worker fleet1.example:4798 -o json",
	}
	return asking(e, c, func(ctx context.Context, client fleetv1.FleetServiceClient, _ []string) error {
		m, err := client.GetFleet(ctx, &fleetv1.GetFleetRequest{})
		if err != nil {
			return err
		}
		return e.Print(m, func(w *tabwriter.Writer) {
			fmt.Fprintf(w, "%s\n\n", m.Fabric)
			cli.Row(w, "SERVERS", "SWITCHES", "REFUSED", "FAULTS", "DRAINED", "REVISION")
			cli.Row(w, fmt.Sprintf("%d of %d", m.ServersReporting, m.Servers), fmt.Sprintf("%d of %d", m.SwitchesReporting, m.Switches), fmt.Sprint(len(m.Refused)),
				fmt.Sprint(len(m.Faults)), fmt.Sprint(len(m.Drained)), fmt.Sprint(m.Revision))
			for _, problem := range m.Problems {
				fmt.Fprintf(w, "\nNo drain is granted: %s\n", problem)
			}
			if len(m.Unheard) > 0 {
				fmt.Fprintf(w, "\nWithout a report: %s\n", strings.Join(m.Unheard, " "))
			}
			if len(m.Refused) > 0 {
				fmt.Fprintln(w)
				cli.Row(w, "REFUSED", "FROM", "AGE", "REASON")
			}
			for _, x := range m.Refused {
				cli.Row(w, cli.Dash(x.RouterId), x.Address, cli.Age(uint64(max(0, time.Now().UnixNano()-int64(x.LastNs)))), x.Reason)
			}
		})
	})
}

func fleetFaultsCommand(e *cli.Env) *cobra.Command {
	c := &cobra.Command{
		Use: "faults", Short: "Name the parts at fault, with evidence, confidence and since when", Args: cli.NoArgs,
		Long: `Names the fewest parts that explain what all nodes report. SURE is the probability among all
explanations considered. Parts after "or" explain the reports equally well.`,
		Example: "  fared fleet faults\n  fared fleet faults -o json",
	}
	return asking(e, c, func(ctx context.Context, client fleetv1.FleetServiceClient, _ []string) error {
		m, err := client.GetFleet(ctx, &fleetv1.GetFleetRequest{})
		if err != nil {
			return err
		}
		return e.Print(m, func(w *tabwriter.Writer) {
			if len(m.Faults) == 0 {
				fmt.Fprintln(w, "No part is at fault.")
				return
			}
			cli.Row(w, "PART", "KIND", "FAULT", "SURE", "AGE", "EVIDENCE")
			for _, f := range m.Faults {
				fault := f.Fault
				if f.LossPpb > 0 {
					fault = fmt.Sprintf("%s %.2g %%", fault, float64(f.LossPpb)/1e7)
				}
				if f.Side != "" {
					fault += " " + f.Side
				}
				part := strings.Join(append([]string{f.Part}, f.Alternatives...), " or ")
				cli.Row(w, part, f.Kind, fault, fmt.Sprintf("%d %%", f.ConfidencePpb/1e7), cli.Age(uint64(max(0, time.Now().UnixNano()-int64(f.SinceNs)))), strings.Join(f.Evidence, "; "))
			}
		})
	})
}

func fleetTopCommand(e *cli.Env) *cobra.Command {
	var count uint32
	c := &cobra.Command{
		Use: "top", Short: "List the pairs with the fewest planes", Args: cli.NoArgs,
		Long:    "Counts pairs by their planes with bandwidth, and lists those with the fewest planes, of equally many those with the least bandwidth.",
		Example: "  fared fleet top\n  fared fleet top --count 100 -o json",
	}
	c.Flags().Uint32Var(&count, "count", 20, "number of pairs, at most 1000")
	return asking(e, c, func(ctx context.Context, client fleetv1.FleetServiceClient, _ []string) error {
		m, err := client.ListPairs(ctx, &fleetv1.ListPairsRequest{Count: count})
		if err != nil {
			return err
		}
		return e.Print(m, func(w *tabwriter.Writer) {
			cli.Row(w, "PLANES", "PAIRS")
			for planes, n := range m.PairsByPlanes {
				if n > 0 {
					cli.Row(w, fmt.Sprint(planes), fmt.Sprint(n))
				}
			}
			fmt.Fprintln(w)
			cli.Row(w, "FROM", "TO", "PLANES", "BANDWIDTH")
			for _, p := range m.Pairs {
				cli.Row(w, p.Source, p.Destination, fmt.Sprint(p.Planes), cli.Bandwidth(p.BandwidthBps))
			}
		})
	})
}

func fleetWhatIfCommand(e *cli.Env) *cobra.Command {
	var allSingle, allDouble bool
	c := &cobra.Command{
		Use: "whatif [PART...]", Short: "Simulate failures and drains in the present state",
		Long: `Simulates failures in addition to those of now, by the code of 'fared topo simulate', and counts
pairs by their planes with a weight. A part is named as in 'fared topo simulate --fail': leaf1,
server2/p1.0, server17, leaf0-1/up0, p2; drain:leaf1 drains. WORST is the receiver that all-to-all
traffic leaves farthest below its best possible rate.

--all-single simulates every single failure in addition, --all-double every pair of failures, by all
workers. Failures that an exchange of planes, leaves, servers or spines in the same state makes equal
are simulated once: ALIKE counts them. All are counted by the fewest planes that any pair keeps, and
the 100 worst are listed, the worst first.`,
		Example: "  fared fleet whatif leaf1\n  fared fleet whatif drain:leaf0 server17/p1 -o json\n  fared fleet whatif --all-single\n  fared fleet whatif --all-double",
		Args: func(_ *cobra.Command, args []string) error {
			for i, part := range args {
				if slices.Contains(args[:i], part) {
					return cli.Usage(fmt.Errorf("%s is given twice", part), "a part fails once: fared fleet whatif "+part)
				}
			}
			if len(args) == 0 && !allSingle && !allDouble || allSingle && allDouble {
				return cli.Usage(errors.New("no part is given, or both of --all-single and --all-double"), "fared fleet whatif leaf1, or --all-single")
			}
			return nil
		},
	}
	c.Flags().BoolVar(&allSingle, "all-single", false, "simulate every single failure in addition")
	c.Flags().BoolVar(&allDouble, "all-double", false, "simulate every pair of failures in addition")
	return asking(e, c, func(ctx context.Context, client fleetv1.FleetServiceClient, args []string) error {
		stream, err := client.WhatIf(ctx, &fleetv1.WhatIfRequest{Fail: args, AllSingle: allSingle, AllDouble: allDouble})
		if err != nil {
			return err
		}
		begun := time.Now()
		reported := begun
		m, err := worker.Answer(stream, func(done, total uint64) {
			if now := time.Now(); now.Sub(reported) > progressEvery {
				reported = now
				fmt.Fprintf(e.Err, "%d of %d after %s\n", done, total, now.Sub(begun).Round(time.Second))
			}
		})
		if err != nil {
			return err
		}
		return e.Print(m, func(w *tabwriter.Writer) { whatIfTable(w, m) })
	})
}

// whatIfTable draws a row for each case.
func whatIfTable(w *tabwriter.Writer, m *fleetv1.WhatIfResponse) {
	fmt.Fprintf(w, "Present failures and drains: %s\n\n", cli.Dash(strings.Join(m.Present, " ")))
	all := len(m.CasesByPlanes) > 0
	if all {
		cli.Row(w, "FEWEST PLANES", "FAILURES")
		for planes, n := range m.CasesByPlanes {
			if n > 0 {
				cli.Row(w, fmt.Sprint(planes), fmt.Sprint(n))
			}
		}
		fmt.Fprintln(w)
	}
	head := []string{"FAILED", "PAIRS BY PLANES", "WORST RECEIVER", "VIOLATIONS", "ALIKE"}
	if !all {
		head = head[:4]
	}
	cli.Row(w, head...)
	for _, c := range m.Cases {
		var pairs []string
		for planes, n := range c.PairsByPlanes {
			if n > 0 {
				pairs = append(pairs, fmt.Sprintf("%d: %d", planes, n))
			}
		}
		worst := "-"
		if c.Worst != "" {
			worst = c.Worst + " " + percent(float64(c.WorstPpb)/1e9)
		}
		row := []string{cli.Dash(strings.Join(c.Failed, " ")), strings.Join(pairs, ", "), worst, fmt.Sprint(len(c.Violations)), fmt.Sprint(c.Alike)}
		cli.Row(w, row[:len(head)]...)
	}
}
