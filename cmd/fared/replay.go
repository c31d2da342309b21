package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/daemon"
)

func replayCommand(e *env) *cobra.Command {
	var timeline bool
	c := &cobra.Command{
		Use: "replay FILE", Short: "Replay a recording (record.file) and show the weights it ends with",
		Example: "  fared replay /var/log/fared/record.jsonl",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return &exitError{exitUsage, fmt.Errorf("replay takes one recording, not %d", len(args)), "name a file written by record.file, or - for standard input"}
			}
			return nil
		},
		Long: `Runs every recorded event through the daemon's core and prints the weights at the end.
Digests in the recording are verified: a replay that reaches another state than the
recording daemon exits with 1. "-" reads standard input.
A gap (events that the daemon could not write) is reported; digests after it are not verified.
A recording that spans several files (FILE.2, FILE.1, FILE) is read from the file in which it
begins; name FILE.1 for the recording before the last start.

--timeline prints the events before the table; with -o json or yaml, to standard error.`,
		RunE: func(_ *cobra.Command, args []string) error {
			in := e.in
			if args[0] != "-" {
				f, err := daemon.OpenRecording(args[0])
				if err != nil {
					return &exitError{exitUsage, err, "name a file written by record.file"}
				}
				defer f.Close()
				in = f
			}
			return e.replay(in, args[0], timeline)
		},
	}
	c.Flags().BoolVar(&timeline, "timeline", false, "also print every event with the weights that it changed")
	return readFlags(e, c)
}

func (e *env) replay(in io.Reader, name string, timeline bool) error {
	var missing uint64
	each := func(r daemon.Replayed) { missing += r.Missing }
	if timeline {
		to := e.out
		if e.output != "table" {
			to = e.err
		}
		var first int64
		each = func(r daemon.Replayed) {
			missing += r.Missing
			if r.Missing > 0 {
				fmt.Fprintf(to, "%6d  %s\n", r.Line, r.Text)
				return
			}
			if first == 0 {
				first = r.TimeNS
			}
			fmt.Fprintf(to, "%6d  +%-14s %s\n", r.Line, time.Duration(r.TimeNS-first), r.Text)
			for _, change := range r.Changed {
				fmt.Fprintf(to, "        %s\n", change)
			}
		}
	}
	final, err := daemon.Replay(in, each)
	if err != nil {
		return &exitError{exitFailed, fmt.Errorf("%s: %w", name, err), "replay the unmodified recording with the version that wrote it: the first line names that version"}
	}
	if missing > 0 {
		fmt.Fprintf(e.err, "the recording has gaps: %s could not be written, and later digests were not verified\n", several(int(missing), "event"))
	}
	if timeline && e.output == "table" {
		fmt.Fprintln(e.out)
	}
	all, err := daemon.Weights(final)
	if err != nil {
		return &exitError{code: exitFailed, err: err}
	}
	list := &weightList{destinations: all}
	for _, d := range list.destinations {
		list.revision = max(list.revision, d.Revision)
	}
	return e.printWeights(list, true)
}
