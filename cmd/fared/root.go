package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

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
	terminal *os.File // what out writes to, when that is a terminal
	socket   string
	patience time.Duration // for one answer of the daemon
	output   string
}

// execute runs one command line and returns the exit code.
func execute(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	written := &stdout{w: out, stop: cancel}
	e := &env{in: in, out: written, err: errOut, terminal: terminal(out), patience: patience}
	root := newRoot(e)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if written.closed() {
		return exitOK
	}
	if written.err != nil {
		err = &exitError{exitFailed, fmt.Errorf("standard output: %w", written.err), "what was printed is not complete"}
	}
	if err == nil {
		return exitOK
	}
	var coded *exitError
	if !errors.As(err, &coded) {
		coded = &exitError{code: exitUsage, err: err, remedy: "see fared --help"}
	}
	fmt.Fprintf(errOut, "fared: %s\n", strings.TrimRight(coded.Error(), "\n"))
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
  fared dataplane           the agent beside it that makes the kernel forward
  fared weights             what traffic to each GPU is split by, right now

Exit codes: 0 done; 1 it ran and did not come true; 2 wrong usage or configuration;
3 the daemon does not answer; 4 no such thing. Ctrl-C ends run, leaf and watch with 0.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			remedy := "see fared --help"
			if near := c.SuggestionsFor(args[0]); len(near) > 0 {
				remedy = "did you mean 'fared " + strings.Join(near, "' or 'fared ") + "'?"
			}
			return &exitError{exitUsage, fmt.Errorf("unknown command %q", args[0]), remedy}
		},
		RunE:                       func(c *cobra.Command, _ []string) error { return c.Help() },
		SuggestionsMinimumDistance: 2,
	}
	root.SetIn(e.in)
	root.SetOut(e.out)
	root.SetErr(e.err)
	root.PersistentFlags().StringVar(&e.socket, "socket", defaultSocket, "where the daemon answers: a unix socket's path, or host:port")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		text, _, _ := strings.Cut(err.Error(), ": strconv.") // how Go reads numbers does not help
		return &exitError{exitUsage, errors.New(text), "see " + c.CommandPath() + " --help"}
	})
	root.AddCommand(
		runCommand(e), leafCommand(e), dataplaneCommand(e), superviseCommand(e), netsetupCommand(e), labCommand(e), topoCommand(e), checkCommand(e), replayCommand(e),
		statusCommand(e), sessionsCommand(e), planesCommand(e), weightsCommand(e), watchCommand(e),
		drainCommand(e), undrainCommand(e), reloadCommand(e), trafficCommand(e), versionCommand(e),
	)
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			shells(c)
		}
	}
	return root
}

// shells makes `fared completion` without a shell, or with one that is not known, an error.
func shells(c *cobra.Command) {
	var names []string
	for _, s := range c.Commands() {
		names = append(names, s.Name())
	}
	c.Args = nil
	c.RunE = func(_ *cobra.Command, args []string) error {
		return &exitError{exitUsage, errors.New("completion wants the name of a shell"), "one of " + strings.Join(names, ", ")}
	}
}

// noArgs refuses words after the flags.
func noArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return &exitError{exitUsage, fmt.Errorf("%s takes no arguments, but got %q", c.CommandPath(), args[0]), "see " + c.CommandPath() + " --help"}
}

// oneOf refuses a flag's value that is not among the known ones.
func oneOf(flag, value string, known ...string) error {
	if slices.Contains(known, value) {
		return nil
	}
	return &exitError{exitUsage, fmt.Errorf("--%s %q is not known", flag, value), "use " + strings.Join(known, " or ")}
}

// choices completes a flag with fixed words.
func choices(c *cobra.Command, flag string, words ...string) {
	_ = c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

// readFlags adds -o to a command that prints data.
func readFlags(e *env, c *cobra.Command) *cobra.Command {
	c.Flags().StringVarP(&e.output, "output", "o", "table", "table, json or yaml")
	choices(c, "output", "table", "json", "yaml")
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
