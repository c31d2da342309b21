package clitest

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
)

// Expected describes the commands of a program.
type Expected struct {
	Hidden   []string // commands that are not in the help
	NoPages  []string // manual pages that another program writes
	Examples int      // the least number of commands with an example
}

// Commands checks the commands of a program: each has a description, and is either in a group of the help or hidden;
// docs/operations.md names each; the help of every command that does something has an example, which begins with the
// command; `man` writes a page for each command that a user can call, and equal pages for an equal SOURCE_DATE_EPOCH.
func Commands(t *testing.T, want Expected) {
	t.Run("groups", func(t *testing.T) { groups(t, want.Hidden) })
	t.Run("help", func(t *testing.T) { help(t, want.Examples) })
	t.Run("pages", func(t *testing.T) { pages(t, want.NoPages) })
}

// root returns the root of the program under test.
func root() *cobra.Command {
	return newRoot(&cli.Env{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard})
}

func groups(t *testing.T, hidden []string) {
	docs, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	root := root()
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		switch {
		case c.Hidden && c.GroupID != "":
			t.Errorf("fared %s is hidden and in group %q", c.Name(), c.GroupID)
		case !c.Hidden && !root.ContainsGroup(c.GroupID):
			t.Errorf("fared %s is not hidden, and its group is %q", c.Name(), c.GroupID)
		}
		if !strings.Contains(string(docs), "`"+c.Name()+"`") {
			t.Errorf("operations.md does not name the command %s", c.Name())
		}
	}
	for _, name := range hidden {
		if c, _, err := root.Find([]string{name}); err != nil || !c.Hidden {
			t.Errorf("fared %s is missing or not hidden", name)
		}
	}
	for _, g := range root.Groups() {
		used := false
		for _, c := range root.Commands() {
			used = used || c.GroupID == g.ID
		}
		if !used {
			t.Errorf("group %q has no command", g.ID)
		}
	}
}

// elsewhere reports whether another program has a command, and its help.
func elsewhere(c *cobra.Command) bool { return c.DisableFlagParsing }

func help(t *testing.T, least int) {
	examples := 0
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		if elsewhere(c) || c.Name() == "help" || c.Name() == "completion" {
			return
		}
		if c.Short == "" {
			t.Errorf("%s has no description", c.CommandPath())
		}
		if out := Must(t, append(strings.Fields(c.CommandPath())[1:], "--help")...); !strings.Contains(out, "Usage:") {
			t.Errorf("%s --help:\n%s", c.CommandPath(), out)
		}
		if c.Hidden {
			return
		}
		if c.HasParent() && c.Args != nil && c.RunE != nil && !c.HasSubCommands() && !strings.Contains(c.Example, c.CommandPath()) {
			t.Errorf("%s: the example is %q", c.CommandPath(), c.Example)
		}
		if c.Example != "" {
			examples++
		}
		for _, sub := range c.Commands() {
			check(sub)
		}
	}
	check(root())
	if examples < least {
		t.Errorf("only %d examples: this test has lost its subject", examples)
	}
}

func pages(t *testing.T, without []string) {
	t.Setenv("SOURCE_DATE_EPOCH", "1767225600")
	dir := t.TempDir()
	Must(t, "man", dir)
	var want []string
	var add func(c *cobra.Command)
	add = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" {
			return
		}
		if name := strings.ReplaceAll(c.CommandPath(), " ", "-"); !slices.Contains(without, name) {
			want = append(want, name+".1")
		}
		for _, sub := range c.Commands() {
			add(sub)
		}
	}
	add(root())
	slices.Sort(want)
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, file := range files {
		got = append(got, file.Name())
		if page, err := os.ReadFile(filepath.Join(dir, file.Name())); err != nil || !strings.Contains(string(page), "Jan 2026") {
			t.Errorf("%s: %v\n%.300s", file.Name(), err, page)
		}
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("pages %q, want %q", got, want)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	if code := Execute(t.Context(), []string{"man", dir}, strings.NewReader(""), io.Discard, io.Discard); code != cli.ExitUsage {
		t.Errorf("an unusable SOURCE_DATE_EPOCH ends with %d", code)
	}
}
