package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/fared/fared/cmd/internal/cli"
)

// TestCommandGroups checks that every command is either in a group of the help or hidden, and that operations.md has each one.
func TestCommandGroups(t *testing.T) {
	docs, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	root := newRoot(&cli.Env{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard})
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		switch {
		case c.Hidden && c.GroupID != "":
			t.Errorf("fared %s is hidden and in group %q", c.Name(), c.GroupID)
		case !c.Hidden && !root.ContainsGroup(c.GroupID):
			t.Errorf("fared %s is not hidden, and its group is %q", c.Name(), c.GroupID)
		}
		if !strings.Contains(string(docs), "`"+c.Name()+"`") {
			t.Errorf("docs/operations.md does not name the command %s", c.Name())
		}
	}
	for _, name := range []string{"supervise", "netsetup", "man"} {
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

// TestExamples checks that the help of every command that does something has an example, which begins with the command.
func TestExamples(t *testing.T) {
	examples := 0
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" || c.Name() == "completion" {
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
	check(newRoot(&cli.Env{Out: io.Discard, Err: io.Discard}))
	if examples < 20 {
		t.Errorf("only %d examples: this test has lost its subject", examples)
	}
}

// TestManualPages requires a page for every command that a user can call, and that pages of equal SOURCE_DATE_EPOCH are equal.
func TestManualPages(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "1767225600")
	dir := t.TempDir()
	must(t, "man", dir)
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" {
			return
		}
		page, err := os.ReadFile(filepath.Join(dir, strings.ReplaceAll(c.CommandPath(), " ", "-")+".1"))
		if err != nil || !strings.Contains(string(page), "Jan 2026") {
			t.Errorf("%s: %v\n%.300s", c.CommandPath(), err, page)
		}
		for _, sub := range c.Commands() {
			check(sub)
		}
	}
	check(newRoot(&cli.Env{Out: io.Discard, Err: io.Discard}))
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	if code := execute(t.Context(), []string{"man", dir}, strings.NewReader(""), io.Discard, io.Discard); code != cli.ExitUsage {
		t.Errorf("an unusable SOURCE_DATE_EPOCH ends with %d", code)
	}
}
