package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/daemon"
)

func replayCommand(e *cli.Env) *cobra.Command {
	var timeline, all bool
	c := &cobra.Command{
		Use: "replay FILE", Short: "Replay a recording (record.file) and show the weights it ends with",
		Example: "  fared replay /var/log/fared/record.jsonl",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return cli.Usage(fmt.Errorf("replay takes one recording, not %d", len(args)), "name a file written by record.file, or - for standard input")
			}
			return nil
		},
		Long: `Runs every recorded event through the daemon's core and prints the weights at the end, as
'fared weights' does, and whether the data plane forwarded by them: the time from the last
change of weights until all were in effect, or what was pending, approximate or refused.
Digests in the recording are verified: a replay that reaches another state than the
recording daemon exits with 1. "-" reads standard input.
A gap (events that the daemon could not write) is reported; digests after it are not verified.
A recording that spans several files (FILE.2, FILE.1, FILE) is read from the file in which it
begins; name FILE.1 for the recording before the last start.

--timeline prints the events before the table. With -o json or yaml, the events and the line about
the data plane go to standard error.`,
		RunE: func(_ *cobra.Command, args []string) error {
			in := e.In
			if args[0] != "-" {
				f, err := daemon.OpenRecording(args[0])
				if err != nil {
					return cli.Usage(err, "name a file written by record.file")
				}
				defer f.Close()
				in = f
			}
			return runReplay(e, in, args[0], timeline, all)
		},
	}
	c.Flags().BoolVarP(&all, "all", "a", false, "on a terminal, a row for each of more than 100 destinations too")
	c.Flags().BoolVar(&timeline, "timeline", false, "also print every event with the weights that it changed")
	return cli.ReadFlags(e, c)
}

func runReplay(e *cli.Env, in io.Reader, name string, timeline, all bool) error {
	to := e.Out
	if e.Output != "table" {
		to = e.Err
	}
	var missing uint64
	var first, changed int64 // times of the first event, and of the last change of weights
	var effect *daemon.Effect
	var took time.Duration // from the last change until all were in effect for the first time
	settled := false
	each := func(r daemon.Replayed) {
		missing += r.Missing
		if first == 0 {
			first = r.TimeNS
		}
		switch {
		case r.Effect != nil:
			if effect = r.Effect; effect.InEffect() && !settled {
				settled, took = true, time.Duration(r.TimeNS-changed)
			}
		case len(r.Changed) > 0:
			effect, changed, settled = nil, r.TimeNS, false
		case r.Missing > 0: // weights may have changed
			effect, changed, settled = nil, 0, false
		}
		switch {
		case !timeline:
		case r.Missing > 0:
			fmt.Fprintf(to, "%6d  %s\n", r.Line, r.Text)
		default:
			fmt.Fprintf(to, "%6d  +%-14s %s\n", r.Line, time.Duration(r.TimeNS-first), r.Text)
			for _, change := range r.Changed {
				fmt.Fprintf(to, "        %s\n", change)
			}
		}
	}
	final, err := daemon.Replay(in, each)
	if err != nil {
		return cli.Failed(fmt.Errorf("%s: %w", name, err), "replay the unmodified recording with the version that wrote it: the first line names that version")
	}
	if missing > 0 {
		fmt.Fprintf(e.Err, "the recording has gaps: %s could not be written, and later digests were not verified\n", cli.Several(int(missing), "event"))
	}
	if timeline && e.Output == "table" {
		fmt.Fprintln(e.Out)
	}
	rows, err := daemon.Weights(final)
	if err != nil {
		return &cli.Error{Code: cli.ExitFailed, Err: err}
	}
	list := &weightList{destinations: rows}
	for _, d := range list.destinations {
		list.revision = max(list.revision, d.Revision)
		for _, p := range d.Planes {
			p.InEffect = effect != nil && effect.InEffect()
		}
	}
	if err := printWeights(e, list, all); err != nil {
		return err
	}
	switch {
	case effect == nil:
		_, err = fmt.Fprintln(to, "the recording ends without an answer of the data plane to the last change of weights")
	case effect.InEffect() && changed != 0:
		_, err = fmt.Fprintf(to, "in effect %s after the last change of weights\n", took.Round(10*time.Microsecond))
	default:
		_, err = fmt.Fprintln(to, effect)
	}
	return err
}
