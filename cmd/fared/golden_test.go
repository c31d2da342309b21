package main

import (
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/rdmadev/rdmadevtest"
)

// TestGolden plays command lines against a daemon with canned answers. TABLE is a slot table whose daemon has ended,
// OTHERLAYOUT a slot table of another layout, RXE and FOUR are roots of sysfs.
func TestGolden(t *testing.T) {
	table, layout := endedTable(t)
	clitest.Golden(t, func(t *testing.T) string {
		socket, _ := startFake(t)
		return socket
	}, map[string]string{
		"TABLE": table, "OTHERLAYOUT": layout,
		"RXE":  rdmadevtest.Tree(t, "../../internal/rdmadev/testdata/rxe-faults.txt"),
		"FOUR": rdmadevtest.Tree(t, "../../internal/rdmadev/testdata/four.txt"),
	}, func(command string) bool {
		return strings.HasPrefix(command, " watch") || strings.HasPrefix(command, " rdma") || strings.Contains(command, "drain") || strings.HasPrefix(command, " health")
	})
}
