package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
)

// leastRepeat is the least interval of --every: each repetition is a call of the daemon.
const leastRepeat = 100 * time.Millisecond

// repeatable adds --watch to a command that prints the present state. In a terminal each state replaces the previous
// one, elsewhere an empty line separates them. An error, such as a daemon that restarts, is shown in place of the
// state.
func repeatable(e *cli.Env, c *cobra.Command) *cobra.Command {
	var watch bool
	var every time.Duration
	c.Flags().BoolVarP(&watch, "watch", "w", false, "show the state again and again, until Ctrl-C")
	c.Flags().DurationVar(&every, "every", time.Second, "with --watch: the interval")
	once := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		if every < leastRepeat {
			return cli.Usage(fmt.Errorf("--every %s is below %s", every, leastRepeat), "for example --every 1s")
		}
		if !watch {
			return once(c, args)
		}
		out := e.Out
		defer func() { e.Out = out }()
		for first := true; ; first = false {
			var b bytes.Buffer
			e.Out = &b
			err := once(c, args)
			var coded *cli.Error
			if errors.As(err, &coded) && coded.Code == cli.ExitUsage {
				return err // it would never end
			}
			if c.Context().Err() != nil {
				return nil // the user ended the watch
			}
			if err != nil {
				fmt.Fprintf(&b, "fared: %v\n", err)
			}
			if _, err := io.WriteString(out, frameOf(e, b.String(), first)); err != nil {
				return err
			}
			if cli.Wait(c.Context(), every); c.Context().Err() != nil {
				return nil
			}
		}
	}
	return c
}

// frameOf returns what shows a state in place of the previous one. In a terminal it is cut to the terminal's present
// size, because a line that wraps, or one too many, would scroll the head away.
func frameOf(e *cli.Env, text string, first bool) string {
	switch {
	case e.Terminal == nil && first:
		return text
	case e.Terminal == nil:
		return "\n" + text
	}
	columns, rows := e.Screen()
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if hidden := len(lines) - (rows - 1); hidden > 0 { // the last row is the cursor's
		lines = append(lines[:max(0, rows-2)], fmt.Sprintf("... and %d more lines, without --watch", hidden+1))
		lines = lines[:min(len(lines), rows-1)]
	}
	begin := cli.Home
	if first {
		begin = "\x1b[2J" + cli.Home // the first state begins on an empty screen
	}
	var b strings.Builder
	b.WriteString(begin)
	for _, line := range lines {
		b.WriteString(cli.Fit(line, columns) + cli.ClearLine + "\n")
	}
	b.WriteString(cli.ClearBelow)
	return b.String()
}
