package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// leastRepeat is the least interval of --every: each repetition is a call of the daemon.
const leastRepeat = 100 * time.Millisecond

// repeatable adds --watch to a command that prints the present state. In a terminal each state replaces the previous one, elsewhere an empty line
// separates them. An error, such as a daemon that restarts, is shown in place of the state.
func repeatable(e *env, c *cobra.Command) *cobra.Command {
	var watch bool
	var every time.Duration
	c.Flags().BoolVarP(&watch, "watch", "w", false, "show the state again and again, until Ctrl-C")
	c.Flags().DurationVar(&every, "every", time.Second, "with --watch: the interval")
	once := c.RunE
	c.RunE = func(c *cobra.Command, args []string) error {
		if every < leastRepeat {
			return &exitError{exitUsage, fmt.Errorf("--every %s is below %s", every, leastRepeat), "for example --every 1s"}
		}
		if !watch {
			return once(c, args)
		}
		out := e.out
		defer func() { e.out = out }()
		for first := true; ; first = false {
			var b bytes.Buffer
			e.out = &b
			err := once(c, args)
			var coded *exitError
			if errors.As(err, &coded) && coded.code == exitUsage {
				return err // it would never end
			}
			if c.Context().Err() != nil {
				return nil // the user ended the watch
			}
			if err != nil {
				fmt.Fprintf(&b, "fared: %v\n", err)
			}
			if _, err := io.WriteString(out, e.frameOf(b.String(), first)); err != nil {
				return err
			}
			if wait(c.Context(), every); c.Context().Err() != nil {
				return nil
			}
		}
	}
	return c
}

// frameOf returns what shows a state in place of the previous one. In a terminal it is cut to the terminal's present size, because a line that wraps, or one
// too many, would scroll the head away.
func (e *env) frameOf(text string, first bool) string {
	switch {
	case e.terminal == nil && first:
		return text
	case e.terminal == nil:
		return "\n" + text
	}
	columns, rows := e.screen()
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if hidden := len(lines) - (rows - 1); hidden > 0 { // the last row is the cursor's
		lines = append(lines[:max(0, rows-2)], fmt.Sprintf("... and %d more lines, without --watch", hidden+1))
		lines = lines[:min(len(lines), rows-1)]
	}
	begin := home
	if first {
		begin = "\x1b[2J" + home // the first state begins on an empty screen
	}
	var b strings.Builder
	b.WriteString(begin)
	for _, line := range lines {
		b.WriteString(fit(line, columns) + clearLine + "\n")
	}
	b.WriteString(clearBelow)
	return b.String()
}
