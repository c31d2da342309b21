package daemon

import (
	"testing"
	"time"

	"github.com/fared/fared/daemon/internal/status"
)

// TestOperationsAreCountedByClass checks that operations in effect are counted in the class in which they were sent.
func TestOperationsAreCountedByClass(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 5)})
	r.settled(5)
	r.leaves[0].announce(100e9, destination(3))
	r.wait(destination(3), "1:4")
	// The first states of sub-ports may have been read back instead of sent.
	r.links.change(1, func(e *LinkEvent) { e.Up = false })
	r.wait(destination(3), "1:0")
	want := map[string]bool{"sub-port": true, "vector set": true, "destination set": true}
	eventually(t, "everything is in effect", func() bool {
		st := r.d.client.Status()
		return st.InFlight == 0 && st.Queued == 0
	})
	var operations []status.Operations
	r.inside(func(l *loop) { operations = source{l}.Process().Dataplane.Operations })
	for _, o := range operations {
		if o.InEffect != o.Sent || o.Refused != 0 || o.Sent > 0 != (want[o.Level] || o.Level == "vector delete") && o.Level != "vector delete" {
			t.Errorf("%+v; want as many in effect as sent", o)
		}
		delete(want, o.Level)
	}
	if len(want) > 0 {
		t.Errorf("no operations of the classes %v", want)
	}
}

// TestWeightsAreEvents checks that a change of weights is an event, and that thousands of changes are at most one event per second.
func TestWeightsAreEvents(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 5)})
	r.settled(5)
	began := time.Now()
	r.inside(func(l *loop) {
		l.reweighed.last = time.Time{}
		for range 1000 {
			l.reweighed.vectors++
			l.reportWeights()
		}
		if l.reweighed.vectors < 999-int(time.Since(began)/reweighedEvery) {
			t.Errorf("%d changes wait for an event; want all but those that began a second", l.reweighed.vectors)
		}
	})
	r.leaves[0].announce(100e9, destination(3))
	r.wait(destination(3), "1:4")
	eventually(t, "the change is an event", func() bool {
		waits := false
		r.inside(func(l *loop) { waits = l.reweighed.any() })
		return !waits
	})
}
