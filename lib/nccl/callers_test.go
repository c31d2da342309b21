package nccl

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/internal/slotfile/slotfiletest"
	"github.com/fared/fared/internal/testkit/cbuild"
	"github.com/fared/fared/internal/testkit/gate"
)

// race has threads of a process exchange messages of 1 B to 600 KB at the same time, each by separate communicators.
// words come before the program.
func race(t *testing.T, words []string, program string, b built, environment ...string) {
	t.Helper()
	x := slotfiletest.New(t, loopback(0), loopback(0))
	x.Set(t, 4, 2, 1, 1)
	callers(t, words, append(environment, "FARED_SLOTS="+x.Path), program, b.plugin(), "threads")
}

// unattended has a process that has called test all the time post messages and never call again.
func unattended(t *testing.T, words []string, program string, b built, environment ...string) {
	t.Helper()
	var paths []string
	for i := range 2 {
		x := slotfiletest.New(t, loopback(i), loopback(1-i))
		x.Set(t, 4, 2, 1, 1)
		paths = append(paths, x.Path)
	}
	callers(t, words, environment, program, b.plugin(), "unattended", paths[0], paths[1])
}

// callers runs testdata/callers.c.
func callers(t *testing.T, words, environment []string, args ...string) {
	t.Helper()
	args = slices.Concat(words, []string{"env"}, environment, args)
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil || !strings.Contains(string(out), "each message has arrived") {
		t.Errorf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// TestCallers checks that messages arrive whoever makes progress: many threads that call test, or none.
func TestCallers(t *testing.T) {
	b, program := release(t), filepath.Join(cbuild.Make(t, "nccl", "callers"), "callers")
	race(t, nil, program, b)
	unattended(t, nil, program, b)
}

// TestVerbsCallers does over verbs what TestCallers does over TCP.
func TestVerbsCallers(t *testing.T) {
	gate.Slow(t, gate.C, "over verbs what the gate does over TCP")
	b, program := release(t), filepath.Join(cbuild.Make(t, "nccl", "callers"), "callers")
	words := []string{"ip", "netns", "exec", newHost(t, 1).ns.Name}
	race(t, words, program, b, append(overVerbs(t), "FARED_SOFT_ADDRESS="+loopback(0).String())...)
	unattended(t, words, program, b, overVerbs(t)...)
}
