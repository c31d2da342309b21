package daemon

import (
	"testing"
	"time"

	"github.com/fared/fared/daemon/internal/speaker"
)

// TestAllowance checks that 256 routes of a session are prompt in a burst and 256 in each second, and that unused ones do not accumulate beyond
// a burst.
func TestAllowance(t *testing.T) {
	var a allowance
	now := time.Unix(1000, 0)
	for _, step := range []struct {
		pause  time.Duration
		prompt int
	}{{0, 256}, {0, 0}, {500 * time.Millisecond, 128}, {125 * time.Millisecond, 32}, {time.Hour, 256}, {2 * time.Second, 256}, {0, 0}} {
		now = now.Add(step.pause)
		prompt := 0
		for range 300 {
			if a.spend(now) {
				prompt++
			}
		}
		if prompt != step.prompt {
			t.Errorf("after a pause of %v: %d of 300 are prompt, want %d", step.pause, prompt, step.prompt)
		}
	}
}

// TestBulkKeepsOrder checks that after a bulk route each later event of the same session in this step is bulk too, and that events of other
// sessions and of the next step are prompt.
func TestBulkKeepsOrder(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1}.Text())
	prompt := func(what string, ev speaker.Event, want bool) {
		t.Helper()
		if got := l.allows(ev); got != want {
			t.Errorf("%s: prompt %v, want %v", what, got, want)
		}
	}
	route, end := speaker.Route{Prefix: destination(0)}, speaker.EndOfRIB{}
	for range promptRoutes {
		prompt("within the allowance", route, true)
	}
	prompt("End-of-RIB after prompt routes", end, true)
	prompt("a route beyond the allowance", route, false)
	prompt("End-of-RIB after it", end, false)
	prompt("End-of-RIB of another session", speaker.EndOfRIB{Session: 1}, true)
	prompt("a route of another session", speaker.Withdraw{Session: 1, Prefix: destination(0)}, true)
	l.wokenAt = l.wokenAt.Add(time.Microsecond)
	prompt("End-of-RIB in the next step", end, true)
	prompt("a route in the next step", route, false)
}

// TestBulkEventsAreTakenOnce checks that the events beyond the allowances are applied at the end of the step, and that none of them is kept.
func TestBulkEventsAreTakenOnce(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := forwarding(t, s, 1)
	l.bulkEvents = append(l.bulkEvents, speaker.Route{Session: 1, Generation: 1, Prefix: destination(1), Attrs: attributes(400e9, s.PeerAS(1), 65001)})
	l.bulk()
	if _, ok := l.effects.destinations[l.key(0, destination(1))]; !ok {
		t.Error("the destination of a bulk route is not declared")
	}
	if len(l.bulkEvents) != 0 || l.bulkEvents[:1][0] != nil {
		t.Errorf("kept: %v", l.bulkEvents[:1])
	}
}
