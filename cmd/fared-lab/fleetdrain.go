package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/cmd/internal/cli"
)

// onePart accepts one part of a fabric.
func onePart(c *cobra.Command, args []string) error {
	if len(args) != 1 {
		return cli.Usage(fmt.Errorf("%d parts, %s needs one", len(args), c.Name()), "for example "+c.CommandPath()+" leaf1")
	}
	return nil
}

func fleetDrainCommand(e *cli.Env) *cobra.Command {
	var reason, until string
	var queue bool
	c := &cobra.Command{
		Use: "drain PART", Short: "Take a leaf, a plane, a server's port or a sub-port out of service at all servers", Args: onePart,
		Long: `Grants a drain of a part if every pair of servers keeps the planes and the bandwidth of the worker's
--keep-planes and --keep-share, with all present failures and drains counted, and lets the servers'
daemons drain their sub-ports there. 'fared fleet drains' shows the progress. Of two operators who
ask at once for the last plane one is refused. With --queue a refused drain waits, and is granted
once it fits, the oldest first. Repeated, a drain takes a new --reason and --until; without them it
keeps its own, and with --until never it no longer ends by itself. A part is named as in 'fared fleet whatif'.

Exit code 1: refused, with the pairs that would suffer.`,
		Example: "  fared fleet drain leaf1 --reason 'new optics' --until 2h\n  fared fleet drain server17/p2 --queue",
	}
	c.Flags().StringVar(&reason, "reason", "", "why, for people")
	c.Flags().BoolVar(&queue, "queue", false, "wait for the budget where it refuses the drain")
	c.Flags().StringVar(&until, "until", "", "the drain ends by itself after this duration (2h), at this time (2026-12-01T12:00:00Z), or never (the default)")
	return asking(e, c, func(ctx context.Context, client fleetv1.FleetServiceClient, args []string) error {
		req := &fleetv1.DrainRequest{Part: args[0], Reason: reason, Queue: queue, By: caller(), Never: until == "never"}
		if until != "" && !req.Never {
			end, err := endOf(until, time.Now())
			if err != nil {
				return err
			}
			req.UntilNs = uint64(end.UnixNano())
		}
		e.Patience = 10 * time.Minute // the simulation of a large fabric takes long
		m, err := client.Drain(ctx, req)
		if err != nil {
			return err
		}
		return e.Print(m, func(w *tabwriter.Writer) {
			until := ""
			if m.UntilNs > 0 {
				until = " until " + at(m.UntilNs)
			}
			if m.Queued {
				fmt.Fprintf(w, "%s: queued: %s\n", args[0], m.Reason)
				return
			}
			fmt.Fprintf(w, "%s: granted%s; 'fared fleet drains' shows the progress\n", args[0], until)
		})
	})
}

// caller returns the user and the host of this program.
func caller() string {
	name, host := "uid "+strconv.Itoa(os.Getuid()), "localhost"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	if h, err := os.Hostname(); err == nil {
		host = h
	}
	return name + "@" + host
}

// at returns a Unix time in nanoseconds as text.
func at(ns uint64) string { return time.Unix(0, int64(ns)).UTC().Format(time.RFC3339) }

// endOf parses --until.
func endOf(text string, now time.Time) (time.Time, error) {
	if d, err := time.ParseDuration(text); err == nil && d > 0 {
		return now.Add(d), nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil && at.After(now) {
		return at, nil
	}
	return time.Time{}, cli.Usage(fmt.Errorf("--until %q is no duration and no time to come", text), "write 2h, 2026-12-01T12:00:00Z, or never")
}

func fleetUndrainCommand(e *cli.Env) *cobra.Command {
	c := &cobra.Command{
		Use: "undrain PART", Short: "End a drain of the fleet", Args: onePart,
		Long:    "Ends a drain of 'fared fleet drain' at all servers. Drains of 'fared drain' at a server stay.",
		Example: "  fared fleet undrain leaf1",
	}
	return asking(e, c, func(ctx context.Context, client fleetv1.FleetServiceClient, args []string) error {
		m, err := client.Undrain(ctx, &fleetv1.UndrainRequest{Part: args[0]})
		if err != nil {
			return err
		}
		return e.Print(m, func(w *tabwriter.Writer) {
			fmt.Fprintf(w, "%s: the drain has ended; servers use it again within seconds\n", args[0])
		})
	})
}

func fleetDrainsCommand(e *cli.Env) *cobra.Command {
	c := &cobra.Command{
		Use: "drains", Short: "List the drains of the fleet, and how far the servers are", Args: cli.NoArgs,
		Long: `Lists the granted and queued drains. DRAINED counts the servers' sub-ports that carry no traffic and
advertise no routes any more. While etcd or Kubernetes does not answer, lists those that the worker
has read last, and when.`,
		Example: "  fared fleet drains\n  fared fleet drains -o json",
	}
	return asking(e, c, func(ctx context.Context, client fleetv1.FleetServiceClient, _ []string) error {
		m, err := client.ListDrains(ctx, &fleetv1.ListDrainsRequest{})
		if err != nil {
			return err
		}
		return e.Print(m, func(w *tabwriter.Writer) {
			if m.Stale != "" {
				fmt.Fprintf(w, "As of %s, still in force; since then: %s\n\n", at(m.ReadNs), m.Stale)
			}
			if len(m.Drains) == 0 {
				fmt.Fprintln(w, "No part is drained by the fleet.")
				return
			}
			cli.Row(w, "PART", "DRAINED", "BY", "REASON", "AGE", "UNTIL")
			for _, d := range m.Drains {
				end := "-"
				if d.UntilNs > 0 {
					end = at(d.UntilNs)
				}
				progress := fmt.Sprintf("%d of %d", d.Drained, d.SubPorts)
				if d.Queued {
					progress = "queued"
				}
				cli.Row(w, d.Part, progress, cli.Dash(d.By), cli.Dash(d.Reason),
					cli.Age(uint64(max(0, time.Now().UnixNano()-int64(d.GrantedNs)))), end)
			}
		})
	})
}

// budgetError returns an error of the budget of a worker.
func budgetError(keep, planes int, share float64) error {
	if keep < 0 || keep > planes || !(share >= 0 && share <= 1) {
		return cli.Usage(errors.New("--keep-planes or --keep-share is out of range"), fmt.Sprintf("use 0 to %d planes, and a share from 0 to 1", planes))
	}
	return nil
}
