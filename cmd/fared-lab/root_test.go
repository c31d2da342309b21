package main

import (
	"io"
	"slices"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
)

func TestCommands(t *testing.T) {
	clitest.Commands(t, clitest.Expected{Hidden: []string{"supervise", "netsetup", "podsetup", "man"}, NoPages: []string{"fared", "fared-version"}, Examples: 15})
}

// TestCommandsOfFared checks that fared lists and executes exactly the commands of this program, in the same groups and
// with the same texts.
func TestCommandsOfFared(t *testing.T) {
	var own []cli.LabCommand
	for _, c := range newRoot(&cli.Env{Out: io.Discard, Err: io.Discard}).Commands() {
		if c.Name() != "version" && c.Name() != "man" {
			own = append(own, cli.LabCommand{Name: c.Name(), Group: c.GroupID, Short: c.Short})
		}
	}
	if len(own) != len(cli.LabCommands) {
		t.Errorf("%d commands, and fared has %d of them", len(own), len(cli.LabCommands))
	}
	for _, c := range own {
		if !slices.Contains(cli.LabCommands, c) {
			t.Errorf("fared does not list %+v", c)
		}
	}
}
