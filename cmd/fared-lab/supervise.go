package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/internal/supervise"
)

func superviseCommand(e *cli.Env) *cobra.Command {
	c := &cobra.Command{
		Use: "supervise -- COMMAND [-- COMMAND ...]", Short: "Keep commands running: PID 1 of a container",
		Long: `Runs commands side by side and restarts each command that ends: at once the first time, then
after 100ms and growing delays of at most 5s while the command ends within a second of its start.

Each COMMAND is run, dataplane or leaf with its flags, or a program's path with a slash in it.
Each line of output gets the command's name as a prefix. SIGHUP is passed on to all commands.
SIGTERM and SIGINT end the commands, and then the supervisor; a command that has not ended
after 8s is killed.

A container's network devices exist as long as its PID 1. Under this PID 1 a control plane can
be killed or replaced while cables, addresses and routes stay. Orphans are reaped.`,
		Example: `  fared supervise -- dataplane --driver linux -- run --config /etc/fared/fared.yaml`,
		RunE: func(c *cobra.Command, args []string) error {
			commands, err := superviseCommands(args, c.ArgsLenAtDash())
			if err != nil {
				return err
			}
			err = supervise.Run(c.Context(), supervise.Config{Commands: commands, Output: e.Err, Log: cli.NewLogger(e.Err, slog.LevelInfo)})
			if err != nil {
				return cli.Failed(err, "see the messages above")
			}
			return nil
		},
	}
	return c
}

// supervised are the commands of fared that run until they receive a signal.
var supervised = []string{"run", "dataplane", "leaf"}

// superviseCommands splits words into commands; the first dash precedes words[at].
func superviseCommands(words []string, at int) ([]supervise.Command, error) {
	const remedy = "for example: fared supervise -- dataplane -- run --config /etc/fared/fared.yaml"
	if at != 0 {
		return nil, cli.Usage(errors.New("supervise needs commands, each after a --"), remedy)
	}
	var commands []supervise.Command
	for rest := true; rest; {
		var command []string
		if n := slices.Index(words, "--"); n >= 0 {
			command, words = words[:n], words[n+1:]
		} else {
			command, rest = words, false
		}
		if len(command) == 0 {
			return nil, cli.Usage(fmt.Errorf("command %d is empty", len(commands)+1), remedy)
		}
		c := supervise.Command{Name: filepath.Base(command[0]), Args: append([]string{"fared"}, command...)}
		var err error
		switch {
		case strings.Contains(command[0], "/"):
			if c.Path, err = exec.LookPath(command[0]); err != nil {
				return nil, cli.Usage(err, "name an existing program, or a command of fared")
			}
			c.Args = command
		case !slices.Contains(supervised, command[0]):
			return nil, cli.Usage(fmt.Errorf("command %d: %q is not a command that runs until a signal", len(commands)+1, command[0]),
				"use "+strings.Join(supervised, ", ")+", or a program's path")
		}
		commands = append(commands, c)
	}
	for i, c := range commands {
		if c.Path == "" {
			fared, err := cli.Program("fared")
			if err != nil {
				return nil, err
			}
			commands[i].Path = fared
		}
	}
	return commands, nil
}
