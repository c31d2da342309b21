package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// Exit codes. They are part of the command line's contract (docs/operations.md).
const (
	exitOK          = 0
	exitFailed      = 1 // it ran, and what was asked for did not come true
	exitUsage       = 2 // a wrong flag, argument or configuration
	exitUnreachable = 3 // the daemon does not answer
	exitNotFound    = 4 // the daemon answers, and knows no such thing
)

// exitError carries an exit code to the end of the program, and what would help.
type exitError struct {
	code   int
	err    error
	remedy string
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

// env is what a command may touch of its surroundings.
type env struct {
	in       io.Reader
	out, err io.Writer
	socket   string
	output   string
}

// execute runs one command line and returns the exit code.
func execute(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	e := &env{in: in, out: out, err: errOut}
	root := newRoot(e)
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	var coded *exitError
	if !errors.As(err, &coded) {
		coded = &exitError{code: exitUsage, err: err, remedy: "see fared --help"}
	}
	if text := coded.Error(); text != "" {
		fmt.Fprintf(errOut, "fared: %s\n", strings.TrimRight(text, "\n"))
	}
	if coded.remedy != "" {
		fmt.Fprintf(errOut, "  %s\n", coded.remedy)
	}
	return coded.code
}

func newRoot(e *env) *cobra.Command {
	root := &cobra.Command{
		Use:   "fared",
		Short: "Control plane for multi-plane GPU scale-up networks",
		Long: `fared learns over BGP how much bandwidth each network plane still has toward every
other GPU, turns that into exact weights per plane, sub-port and queue pair, and
programs them into the data plane (draft-xu-rtgwg-fare-in-sun).

  fared lab                 watch weights follow failures: no root, no configuration
  fared run --config FILE   the daemon on a GPU server
  fared weights             what traffic to each GPU is split by, right now

Exit codes: 0 done; 1 it ran and did not come true; 2 wrong usage or configuration;
3 the daemon does not answer; 4 no such thing.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&e.socket, "socket", defaultSocket, "where the daemon answers: a unix socket's path, or host:port")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return &exitError{exitUsage, err, "see " + c.CommandPath() + " --help"}
	})
	root.AddCommand(
		runCommand(e), leafCommand(e), labCommand(e), checkCommand(e), replayCommand(e),
		statusCommand(e), sessionsCommand(e), planesCommand(e), weightsCommand(e), watchCommand(e),
		drainCommand(e), undrainCommand(e), reloadCommand(e), versionCommand(e),
	)
	return root
}

// readFlags adds -o to a command that prints data.
func readFlags(e *env, c *cobra.Command) *cobra.Command {
	c.Flags().StringVarP(&e.output, "output", "o", "table", "table, json or yaml")
	_ = c.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json", "yaml"}, cobra.ShellCompDirectiveNoFileComp))
	pre := c.PreRunE
	c.PreRunE = func(c *cobra.Command, args []string) error {
		switch e.output {
		case "table", "json", "yaml":
		default:
			return &exitError{exitUsage, fmt.Errorf("--output %q: no such format", e.output), "use table, json or yaml"}
		}
		if pre != nil {
			return pre(c, args)
		}
		return nil
	}
	return c
}
