package main

import (
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
)

func TestCommands(t *testing.T) {
	clitest.Commands(t, clitest.Expected{Hidden: []string{"supervise", "netsetup", "podsetup", "man"}, NoPages: cli.LabPages(), Examples: 20})
}
