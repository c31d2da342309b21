package daemon

import (
	"testing"
	"time"

	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/fare"
)

// TestAllowance checks that 256 routes of a session are prompt in a burst and 256 in each second, and that unused ones
// do not accumulate beyond a burst.
func TestAllowance(t *testing.T) {
	var a allowance
	now := time.Unix(1000, 0)
	for _, step := range []struct {
		pause  time.Duration
		prompt int
	}{{0, 256}, {0, 0}, {500 * time.Millisecond, 128}, {125 * time.Millisecond, 32}, {time.Hour, 256}, {2 * time.Second, 256}, {0, 0}} {
		now = now.Add(step.pause)
		prompt := 0
		for _, n := range []int{0, 1, 100, 99, 100} {
			prompt += a.spend(now, n)
		}
		if prompt != step.prompt {
			t.Errorf("after a pause of %v: %d of 300 are prompt, want %d", step.pause, prompt, step.prompt)
		}
	}
}

// TestBulkKeepsOrder checks that after a bulk route each later event of the same session in this step is bulk too, that
// a batch of routes is divided where the allowance ends, and that events of other sessions and of the next step are
// prompt.
func TestBulkKeepsOrder(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1}.Text())
	sizes := func(ev speaker.Event) (routes, others int) {
		switch ev := ev.(type) {
		case nil:
			return 0, 0
		case speaker.Routes:
			return len(ev.Changes), 0
		}
		return 0, 1
	}
	next := 0
	check := func(what string, ev speaker.Event, prompt, bulk int) {
		t.Helper()
		p, b := l.divide(ev)
		promptRoutes, promptOthers := sizes(p)
		bulkRoutes, bulkOthers := sizes(b)
		if promptRoutes+promptOthers != prompt || bulkRoutes+bulkOthers != bulk {
			t.Errorf("%s: %d prompt and %d bulk, want %d and %d", what, promptRoutes+promptOthers, bulkRoutes+bulkOthers, prompt, bulk)
		}
		for _, part := range []speaker.Event{p, b} {
			if r, ok := part.(speaker.Routes); ok && r.Session == 0 {
				for _, c := range r.Changes {
					if c.Prefix != destination(next) {
						t.Fatalf("%s: %v, want %v", what, c.Prefix, destination(next))
					}
					next++
				}
			}
		}
	}
	given := 0
	routes := func(n int) speaker.Routes {
		r := speaker.Routes{}
		for range n {
			r.Changes = append(r.Changes, speaker.Change{Prefix: destination(given)})
			given++
		}
		return r
	}
	end := speaker.EndOfRIB{}
	check("within the allowance", routes(promptRoutes-2), promptRoutes-2, 0)
	check("End-of-RIB after prompt routes", end, 1, 0)
	check("a batch in which the allowance ends", routes(5), 2, 3)
	check("End-of-RIB after it", end, 0, 1)
	check("more of the session", routes(1), 0, 1)
	check("End-of-RIB of another session", speaker.EndOfRIB{Session: 1}, 1, 0)
	check("a route of another session", oneWithdrawal(1, 1, destination(0)), 1, 0)
	l.wokenAt = l.wokenAt.Add(time.Microsecond)
	check("End-of-RIB in the next step", end, 1, 0)
	check("a route in the next step", routes(1), 0, 1)
}

// TestBulkEventsAreTakenOnce checks that the events beyond the allowances are applied at the end of the step, and that
// none of them is kept.
func TestBulkEventsAreTakenOnce(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := forwarding(t, s, 1)
	l.bulkEvents = append(l.bulkEvents, oneRoute(1, 1, destination(1), attributes(400e9, s.PeerAS(1), 65001)))
	l.bulk()
	if l.shown.destination(l.key(0, destination(1))) == nil {
		t.Error("the destination of a bulk route is not declared")
	}
	if len(l.bulkEvents) != 0 || l.bulkEvents[:1][0] != nil {
		t.Errorf("kept: %v", l.bulkEvents[:1])
	}
}

// TestBurstIsOneTransaction checks that the data plane gets one operation for the routes of a burst beyond the
// allowance, also if another session has changed something in the same step: never one for each of 2,001 destinations.
func TestBurstIsOneTransaction(t *testing.T) {
	const n = 2000
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, n+1)})
	r.settled(n + 1)
	r.uniform("1:1", n+1)
	all := coretest.Destinations(n + 1)
	for i, other := range []bool{false, true, false} {
		value, want := []fare.Bandwidth{200e9, 400e9}[i%2], []string{"1:2", "1:1"}[i%2]
		r.settled(n + 1) // operations of the change before are not counted
		before := r.d.client.Status().Counters.Sent
		r.inside(func(l *loop) {
			l.wokenAt, l.allowances[0] = time.Now(), allowance{}
			events := []speaker.Event{burst(r, value, all)}
			if other {
				events = append(events, speaker.EndOfRIB{Session: 1, Generation: 1, Family: speaker.IPv4})
			}
			l.sessions(events)
			l.builder.Commit()
		})
		r.wait(destination(n), want)
		after := r.d.client.Status().Counters.Sent
		vectors, moves := after[dpclient.VectorSet]-before[dpclient.VectorSet], after[dpclient.DestinationSet]-before[dpclient.DestinationSet]
		// The sender may be quick enough to send the prompt routes before the others join them.
		if !other && (vectors < 1 || vectors > 2 || moves > promptRoutes) || other && moves > 2*promptRoutes {
			t.Errorf("another session changed %v: %d vectors and %d destinations set", other, vectors, moves)
		}
	}
}
