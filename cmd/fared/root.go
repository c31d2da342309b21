package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/fared/fared/daemon/config"
)

// Exit codes. They are part of the command line's contract (docs/operations.md).
const (
	exitOK          = 0
	exitFailed      = 1 // the command failed, such as an unmet expectation or a rejected reload
	exitUsage       = 2 // a wrong flag, argument or configuration
	exitUnreachable = 3 // the daemon does not answer
	exitNotFound    = 4 // the daemon answers, and does not have the object
	// exitConfig ends run and leaf on an invalid configuration (EX_CONFIG of sysexits.h): the unit's RestartPreventExitStatus. It differs
	// from exitUsage, which is also the status of a Go program that panics or is aborted by a watchdog, and has to be restarted.
	exitConfig = 78
)

// exitError carries an exit code and a remedy to the end of the program.
type exitError struct {
	code   int
	err    error
	remedy string
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

// env is a command's environment: its streams and common flags.
type env struct {
	in       io.Reader
	out, err io.Writer
	terminal *os.File // the terminal that out writes to, nil if out is no terminal
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
		err = &exitError{exitFailed, fmt.Errorf("standard output: %w", written.err), "the output is incomplete"}
	}
	if err == nil {
		return exitOK
	}
	var program programExit
	if errors.As(err, &program) {
		return int(program)
	}
	var coded *exitError
	if !errors.As(err, &coded) {
		coded = &exitError{code: exitUsage, err: err, remedy: "see fared --help"}
	}
	if inJournal(errOut) {
		errOut = &prioritized{errOut, priorityError}
	}
	var list config.Errors
	if errors.As(coded.err, &list) { // for programs: each line begins with file:line:column, and the last one with a space
		fmt.Fprintln(errOut, coded.Error())
		coded.remedy = strings.TrimSuffix(several(len(list), "error")+": "+coded.remedy, ": ")
	} else {
		fmt.Fprintf(errOut, "fared: %s\n", strings.TrimRight(coded.Error(), "\n"))
	}
	if coded.remedy != "" {
		fmt.Fprintf(errOut, "  %s\n", coded.remedy)
	}
	return coded.code
}

func newRoot(e *env) *cobra.Command {
	var version bool
	root := &cobra.Command{
		Use:   "fared",
		Short: "Control plane for multi-plane GPU scale-up networks",
		Long: `fared learns over BGP how much bandwidth each network plane still has toward every
other GPU, turns that into exact weights per plane, sub-port and queue pair, and
programs them into the data plane (draft-xu-rtgwg-fare-in-sun).

  fared lab                 watch weights follow failures: no root, no configuration
  fared run --config FILE   the daemon on a GPU server
  fared dataplane           the agent that programs the server's kernel
  fared weights             the current split of traffic to each GPU

Containers and generated labs also call 'fared supervise' and 'fared netsetup'; see their --help.

Exit codes: 0 done; 1 the command failed (an expectation of lab, a rejected reload, ...);
2 wrong usage or configuration; 3 the daemon does not answer; 4 no such object; 78 run or
leaf with an unusable configuration. Ctrl-C ends run, leaf and watch with 0.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			remedy := "see fared --help"
			if near := c.SuggestionsFor(args[0]); len(near) > 0 {
				remedy = didYouMean(c, near)
			}
			return &exitError{exitUsage, fmt.Errorf("unknown command %q", args[0]), remedy}
		},
		RunE: func(c *cobra.Command, _ []string) error {
			if version {
				fmt.Fprintln(e.out, versionLine())
				return nil
			}
			return c.Help()
		},
		SuggestionsMinimumDistance: suggestionDistance,
	}
	// Not cobra's own flag: its template would link text/template, with which the linker keeps every method, 8 MB.
	root.Flags().BoolVarP(&version, "version", "v", false, "print the version")
	root.SetIn(e.in)
	root.SetOut(e.out)
	root.SetErr(e.err)
	root.PersistentFlags().StringVar(&e.socket, "socket", cmp.Or(os.Getenv("FARED_SOCKET"), defaultSocket), "address of the daemon: a unix socket's path, or host:port; FARED_SOCKET changes the default")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		text, _, _ := strings.Cut(err.Error(), ": strconv.") // omit Go's error about the number, which does not help users
		return &exitError{exitUsage, errors.New(text), "see " + c.CommandPath() + " --help"}
	})
	for _, g := range []struct {
		id, title string
		commands  []*cobra.Command
	}{
		{"daemon", "Daemons:", []*cobra.Command{runCommand(e), leafCommand(e), dataplaneCommand(e), nupanetCommand(e), initCommand(e), checkCommand(e)}},
		{"inspect", "Inspect a running daemon:", []*cobra.Command{statusCommand(e), healthCommand(e), doctorCommand(e), supportCommand(e), sessionsCommand(e), planesCommand(e), weightsCommand(e), slotsCommand(e), watchCommand(e), rdmaCommand(e), envCommand(e)}},
		{"programs", "Run programs over the planes:", []*cobra.Command{execCommand(e)}},
		{"operate", "Operate a running daemon:", []*cobra.Command{drainCommand(e), undrainCommand(e), clearCommand(e), reloadCommand(e)}},
		{"lab", "Design, test and replay:", []*cobra.Command{labCommand(e), topoCommand(e), trafficCommand(e), superpAgentCommand(e), replayCommand(e)}},
		{"other", "Other commands:", []*cobra.Command{versionCommand(e)}},
	} {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title})
		for _, c := range g.commands {
			c.GroupID = g.id
			root.AddCommand(c)
		}
	}
	root.SetHelpCommandGroupID("other")
	root.SetCompletionCommandGroupID("other")
	for _, c := range []*cobra.Command{superviseCommand(e), netsetupCommand(), manCommand(e)} {
		c.Hidden = true // plumbing of containers, generated labs and packages (docs/operations.md, "The command line")
		root.AddCommand(c)
	}
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() == "completion" {
			shells(c)
		}
	}
	return root
}

// shells makes `fared completion` without a shell, or with an unknown one, an error.
func shells(c *cobra.Command) {
	var names []string
	for _, s := range c.Commands() {
		names = append(names, s.Name())
	}
	c.Args = nil
	c.RunE = func(_ *cobra.Command, args []string) error {
		return &exitError{exitUsage, errors.New("completion needs the name of a shell"), "use one of " + strings.Join(names, ", ")}
	}
}

// suggestionDistance is the greatest number of changed letters of a word for which a command is suggested.
const suggestionDistance = 2

// didYouMean suggests subcommands of a command.
func didYouMean(c *cobra.Command, names []string) string {
	return "did you mean '" + c.CommandPath() + " " + strings.Join(names, "' or '"+c.CommandPath()+" ") + "'?"
}

// noArgs refuses words after the flags. Those that resemble a subcommand get a suggestion.
func noArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	remedy := "see " + c.CommandPath() + " --help"
	c.SuggestionsMinimumDistance = suggestionDistance
	if near := c.SuggestionsFor(args[0]); len(near) > 0 {
		remedy = didYouMean(c, near)
	}
	return &exitError{exitUsage, fmt.Errorf("%s takes no arguments, but got %q", c.CommandPath(), args[0]), remedy}
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

// configFlag adds --config to a command.
func configFlag(c *cobra.Command, file *string) {
	c.Flags().StringVarP(file, "config", "c", defaultConfig, "configuration file")
	_ = c.MarkFlagFilename("config", "yaml", "yml")
}

// levelFlag adds --log-level to a command; parseLevel reads its value.
func levelFlag(c *cobra.Command, level *string, byDefault, more string) {
	c.Flags().StringVar(level, "log-level", byDefault, "debug, info, warn or error"+more)
	choices(c, "log-level", "debug", "info", "warn", "error")
}

// parseLevel parses the value of --log-level.
func parseLevel(text string) (level slog.Level, err error) {
	if level.UnmarshalText([]byte(text)) != nil {
		return level, &exitError{exitUsage, fmt.Errorf("--log-level %q: no such level", text), "use debug, info, warn or error"}
	}
	return level, nil
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
