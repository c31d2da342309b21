package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/daemon"
)

func replayCommand(e *env) *cobra.Command {
	var timeline bool
	c := &cobra.Command{
		Use: "replay FILE", Short: "Replay a recording (record.file) and show the weights it ends with",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return &exitError{exitUsage, fmt.Errorf("replay takes one recording, not %d", len(args)), "name a file written by record.file, or - for standard input"}
			}
			return nil
		},
		Long: `Runs every recorded event through the same deciding core and prints the weights at the end.
Digests in the recording are verified: a replay that comes to another state than the
recording daemon had exits with 1. "-" reads standard input.

--timeline prints what happened before the table; with -o json or yaml to standard error.`,
		RunE: func(_ *cobra.Command, args []string) error {
			in := e.in
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return &exitError{exitUsage, err, "name a file written by record.file"}
				}
				defer f.Close()
				in = f
			}
			return e.replay(in, args[0], timeline)
		},
	}
	c.Flags().BoolVar(&timeline, "timeline", false, "also print every event and the weights that it changed")
	return readFlags(e, c)
}

func (e *env) replay(in io.Reader, name string, timeline bool) error {
	var each func(daemon.Replayed)
	if timeline {
		to := e.out
		if e.output != "table" {
			to = e.err
		}
		var first int64
		each = func(r daemon.Replayed) {
			if first == 0 {
				first = r.TimeNS
			}
			fmt.Fprintf(to, "%6d  +%-14s %s\n", r.Line, time.Duration(r.TimeNS-first), r.Text)
			for _, change := range r.Changed {
				fmt.Fprintf(to, "        %s\n", change)
			}
		}
	}
	core, err := daemon.Replay(in, each)
	if err != nil {
		return &exitError{exitFailed, fmt.Errorf("%s: %w", name, err), "replay it with the version that recorded, and unchanged: the first line names that version"}
	}
	if timeline && e.output == "table" {
		fmt.Fprintln(e.out)
	}
	all, err := core.Weights()
	if err != nil {
		return &exitError{code: exitFailed, err: err}
	}
	list := &weightList{destinations: all}
	for _, d := range list.destinations {
		list.revision = max(list.revision, d.Revision)
	}
	return e.printWeights(list)
}
