package cli

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// Group has the commands below one heading of the help.
type Group struct {
	ID, Title string
	Commands  []*cobra.Command
}

// NewRoot returns the root of a program's commands. It is called fared in each program, because users call the commands
// of all of them by fared.
func NewRoot(e *Env, short, long string, groups []Group, hidden ...*cobra.Command) *cobra.Command {
	var version bool
	root := &cobra.Command{
		Use: "fared", Short: short, Long: long,
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
			return Usage(fmt.Errorf("unknown command %q", args[0]), remedy)
		},
		RunE: func(c *cobra.Command, _ []string) error {
			if version {
				fmt.Fprintln(e.Out, versionLine())
				return nil
			}
			return c.Help()
		},
		SuggestionsMinimumDistance: suggestionDistance,
	}
	// Not cobra's own flag: its template would link text/template, with which the linker keeps every method, 8 MB.
	root.Flags().BoolVarP(&version, "version", "v", false, "print the version")
	root.SetIn(e.In)
	root.SetOut(e.Out)
	root.SetErr(e.Err)
	root.PersistentFlags().StringVar(&e.Socket, "socket", cmp.Or(os.Getenv("FARED_SOCKET"), defaultSocket),
		"address of the daemon: a unix socket's path, or host:port; FARED_SOCKET changes the default")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		text, _, _ := strings.Cut(err.Error(), ": strconv.") // omit Go's error about the number, which does not help users
		return Usage(errors.New(text), "see "+c.CommandPath()+" --help")
	})
	for _, g := range groups {
		root.AddGroup(&cobra.Group{ID: g.ID, Title: g.Title})
		for _, c := range g.Commands {
			c.GroupID = g.ID
			root.AddCommand(c)
		}
	}
	for _, c := range hidden {
		c.Hidden = true // plumbing of containers, generated labs and packages (docs/operations.md, "The command line")
		root.AddCommand(c)
	}
	return root
}

// suggestionDistance is the greatest number of changed letters of a word for which a command is suggested.
const suggestionDistance = 2

// didYouMean suggests subcommands of a command.
func didYouMean(c *cobra.Command, names []string) string {
	return "did you mean '" + c.CommandPath() + " " + strings.Join(names, "' or '"+c.CommandPath()+" ") + "'?"
}

// NoArgs refuses words after the flags. Those that resemble a subcommand get a suggestion.
func NoArgs(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	remedy := "see " + c.CommandPath() + " --help"
	c.SuggestionsMinimumDistance = suggestionDistance
	if near := c.SuggestionsFor(args[0]); len(near) > 0 {
		remedy = didYouMean(c, near)
	}
	return Usage(fmt.Errorf("%s takes no arguments, but got %q", c.CommandPath(), args[0]), remedy)
}

// OneOf refuses a flag's value that is not among the known ones.
func OneOf(flag, value string, known ...string) error {
	if slices.Contains(known, value) {
		return nil
	}
	return Usage(fmt.Errorf("--%s %q is not known", flag, value), "use "+strings.Join(known, " or "))
}
