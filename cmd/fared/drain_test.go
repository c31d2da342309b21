package main

import (
	"strings"
	"testing"
)

// TestDrainTimeout checks that a drain that exceeds its timeout ends with exit code 1 and its pending conditions, and that a drain in time ends with 0.
func TestDrainTimeout(t *testing.T) {
	socket, f := startFake(t)
	f.hangs = true
	o := fared(t, "--socket", socket, "drain", "plane", "p0", "--wait", "--timeout", "2s")
	if o.code != 1 || !strings.Contains(o.err, "not done after 2s") || !strings.Contains(o.err, "vector 4 was refused: table full") {
		t.Errorf("exit code %d: %s", o.code, o.err)
	}
	if o := fared(t, "--socket", socket, "drain", "plane", "p0", "--wait", "--timeout", "1m", "--force", "--reason", "kept"); o.code != 0 || !strings.Contains(o.out, "plane p0: drained") {
		t.Errorf("exit code %d: %s%s", o.code, o.out, o.err)
	}
}

// TestDrainNotKept checks that a drain that is not on the disk ends with exit code 1 and the reason, with and without --wait, although it is in force.
func TestDrainNotKept(t *testing.T) {
	socket, _ := startFake(t)
	for _, args := range [][]string{{"drain", "plane", "p0"}, {"drain", "plane", "p0", "--wait"}, {"undrain", "leaf", "10.1.0.1", "--wait"}} {
		o := fared(t, append([]string{"--socket", socket}, args...)...)
		if o.code != 1 || !strings.Contains(o.err, "read-only file system") || !strings.Contains(o.err, "the change is in force, but not on the disk") || !strings.Contains(o.out, "sessions") {
			t.Errorf("%q: exit code %d: %s%s", args, o.code, o.out, o.err)
		}
	}
	if o := fared(t, "--socket", socket, "drain", "plane", "p0", "--reason", "kept"); o.code != 0 || o.err != "" {
		t.Errorf("on the disk: exit code %d: %s", o.code, o.err)
	}
}

// TestDrainGivenUp checks that a drain that the daemon gives up ends with exit code 1, the reason and the remedy.
func TestDrainGivenUp(t *testing.T) {
	socket, f := startFake(t)
	f.givenUp = true
	o := fared(t, "--socket", socket, "drain", "plane", "p0", "--wait", "--reason", "kept")
	if o.code != 1 || !strings.Contains(o.err, "the drain of plane p0 was given up: the other end drains too") || !strings.Contains(o.err, "drain again once") {
		t.Errorf("exit code %d: %s%s", o.code, o.out, o.err)
	}
}
