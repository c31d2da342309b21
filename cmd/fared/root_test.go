package main

import (
	"io"
	"os"
	"strings"
	"testing"
)

// TestCommandGroups checks that every command is either in a group of the help or hidden, and that operations.md has each one.
func TestCommandGroups(t *testing.T) {
	docs, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	root := newRoot(&env{in: strings.NewReader(""), out: io.Discard, err: io.Discard})
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
	for _, name := range []string{"supervise", "netsetup"} {
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
