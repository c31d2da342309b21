package main

import (
	"strings"
	"testing"
)

// TestDrainTimeout checks that a drain that exceeds its timeout ends with exit code 1 and its pending conditions, and that a drain in time ends with 0.
func TestDrainTimeout(t *testing.T) {
	socket, _ := startFake(t)
	o := fared(t, "--socket", socket, "drain", "plane", "p0", "--wait", "--timeout", "100ms") // done at the third query, each 200 ms after the previous one
	if o.code != 1 || !strings.Contains(o.err, "not done after 100ms") || !strings.Contains(o.err, "vector 4 was refused: table full") {
		t.Errorf("exit code %d: %s", o.code, o.err)
	}
	if o := fared(t, "--socket", socket, "drain", "plane", "p0", "--wait", "--timeout", "1m", "--force"); o.code != 0 || !strings.Contains(o.out, "plane p0: drained") {
		t.Errorf("exit code %d: %s%s", o.code, o.out, o.err)
	}
}
