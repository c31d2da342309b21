package main

import (
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
)

// forwards reports whether a command line is one of fared-lab: it runs a command of fared-lab, asks for its help, or
// completes it.
func forwards(args []string) bool {
	if len(args) > 0 && (args[0] == cobra.ShellCompRequestCmd || args[0] == cobra.ShellCompNoDescRequestCmd) {
		args = args[1:max(1, len(args)-1)] // the last word is the one to complete
	}
	for len(args) > 0 {
		switch word := args[0]; {
		case word == "--socket": // the one flag of all commands that has a value
			args = args[min(2, len(args)):]
		case word == "help", strings.HasPrefix(word, "-"):
			args = args[1:]
		default:
			return cli.IsLabCommand(word)
		}
	}
	return false
}

// executeLab makes fared-lab this process's program, so that signals, terminal and exit code are those of fared-lab. It
// returns only on an error.
func executeLab(args []string) error {
	path, err := cli.Program(cli.LabProgram)
	if err != nil {
		return err
	}
	err = syscall.Exec(path, slices.Concat([]string{"fared"}, args), os.Environ())
	return cli.Failed(&os.PathError{Op: "execute", Path: path, Err: err}, "is it a program for this machine? install the package "+cli.LabProgram)
}

// labCommand stands for a command of fared-lab in the help, and has the error where fared-lab is absent.
func labCommand(c cli.LabCommand) *cobra.Command {
	return &cobra.Command{
		Use: c.Name, Short: c.Short, GroupID: c.Group, Hidden: c.Group == "", DisableFlagParsing: true,
		Long: c.Short + ".\n\nThis is a command of the program " + cli.LabProgram + " and its package, which has the full help.",
		RunE: func(c *cobra.Command, args []string) error {
			return executeLab(slices.Concat([]string{c.Name()}, args))
		},
	}
}
