package main

import (
	"strings"
	"testing"
)

// TestDrainTimeout checks that a drain that exceeds its timeout ends with exit code 1 and its pending conditions, and
// that a drain in time ends with 0.
func TestDrainTimeout(t *testing.T) {
	socket, f := startFake(t)
	f.hangs = true
	o := fared(t, "--socket", socket, "drain", "plane", "p0", "--wait", "--timeout", "2s")
	if o.Code != 1 || !strings.Contains(o.Err, "not done after 2s") || !strings.Contains(o.Err, "vector 4 was refused: table full") {
		t.Errorf("exit code %d: %s", o.Code, o.Err)
	}
	if o := fared(t, "--socket", socket, "drain", "plane", "p0", "--wait", "--timeout", "1m", "--force", "--reason", "kept"); o.Code != 0 || !strings.Contains(o.Out, "plane p0: drained") {
		t.Errorf("exit code %d: %s%s", o.Code, o.Out, o.Err)
	}
}

// TestDrainNotKept checks that a drain that is not on the disk ends with exit code 1 and the reason, with and without
// --wait, although it is in force.
func TestDrainNotKept(t *testing.T) {
	socket, _ := startFake(t)
	for _, args := range [][]string{{"drain", "plane", "p0"}, {"drain", "plane", "p0", "--wait"}, {"undrain", "leaf", "10.1.0.1", "--wait"}} {
		o := fared(t, append([]string{"--socket", socket}, args...)...)
		if o.Code != 1 || !strings.Contains(o.Err, "read-only file system") || !strings.Contains(o.Err, "the change is in force, but not on the disk") || !strings.Contains(o.Out, "sessions") {
			t.Errorf("%q: exit code %d: %s%s", args, o.Code, o.Out, o.Err)
		}
	}
	if o := fared(t, "--socket", socket, "drain", "plane", "p0", "--reason", "kept"); o.Code != 0 || o.Err != "" {
		t.Errorf("on the disk: exit code %d: %s", o.Code, o.Err)
	}
}

// TestDrainGivenUp checks that a drain that the daemon gives up ends with exit code 1, the reason and the remedy.
func TestDrainGivenUp(t *testing.T) {
	socket, f := startFake(t)
	f.givenUp = true
	o := fared(t, "--socket", socket, "drain", "plane", "p0", "--wait", "--reason", "kept")
	if o.Code != 1 || !strings.Contains(o.Err, "the drain of plane p0 was given up: the other end drains too") || !strings.Contains(o.Err, "drain again once") {
		t.Errorf("exit code %d: %s%s", o.Code, o.Out, o.Err)
	}
}
