package daemon

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
)

// services returns the services of a daemon that does not run: the test is the loop's goroutine.
func services(t *testing.T, l *loop) *status.Service {
	t.Helper()
	here := func(_ context.Context, fn func()) error { fn(); return nil }
	s, err := status.NewService(status.ServiceConfig{Reader: l.builder.Reader(here), Explain: l.explain, Drain: noDrain, ClearSession: noClear, Reload: noReload})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// row returns a destination's weights in the status, "2?:1" when those of the first plane are not in effect.
func row(t *testing.T, l *loop, d int) string {
	t.Helper()
	l.builder.Commit()
	resp, err := services(t, l).Weights().GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: destination(d).Addr().String()})
	if err != nil {
		return err.Error()
	}
	var out []string
	for _, p := range resp.Weights[0].Planes {
		mark := "?"
		if p.InEffect {
			mark = ""
		}
		out = append(out, fmt.Sprint(p.Weight, mark))
	}
	return strings.ReplaceAll(strings.Join(out, ":"), " ", "")
}

// declared returns the number of the last change of every declared object.
func declared(l *loop) map[dpclient.Object]uint64 {
	all := map[dpclient.Object]uint64{}
	for o, x := range l.shown.objects {
		all[o] = x.change
	}
	for key, d := range l.shown.destinations.All() {
		all[dpclient.Object{Kind: dpclient.KindDestination, Destination: dpclient.Destination{Prefix: key.Prefix, Source: key.Group}}] = d.change
	}
	return all
}

// acknowledge acknowledges all requested changes as in effect.
func acknowledge(l *loop) {
	for o, change := range declared(l) {
		l.plane(&dpclient.Event{Kind: dpclient.InEffect, Object: o, Change: change})
	}
}

// forwarding returns a daemon with all sessions up, n destinations at 400G, and everything in effect.
func forwarding(t *testing.T, s shape, n int) *loop {
	t.Helper()
	l := idle(t, s.Text())
	for i := range s.Planes * s.SubPorts {
		establish(l, s, i)
		for _, d := range coretest.Destinations(n) {
			l.bgp(oneRoute(i, 1, d, attributes(400e9*fare.Bandwidth(s.SubPorts), s.PeerAS(i), 65001)))
		}
	}
	l.plane(&dpclient.Event{Kind: dpclient.Connected, Name: "a test"})
	l.deliver()
	acknowledge(l)
	return l
}

// TestWeightsAreNotInEffectBeforeTheirAcknowledgement checks that weights that the same destinations get after a
// failure, and all those of a plane whose sub-port's state is not acknowledged, are shown immediately, and as not in
// effect until the data plane has acknowledged all of them.
func TestWeightsAreNotInEffectBeforeTheirAcknowledgement(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 2}
	l := forwarding(t, s, 1)
	shows := func(what, want string) {
		t.Helper()
		if got := row(t, l, 0); got != want {
			t.Errorf("%s: weights %s, want %s", what, got, want)
		}
	}
	shows("all acknowledged", "1:1")
	l.link(&LinkEvent{SubPort: 3, Reason: "no carrier", Transitions: 2})
	l.deliver()
	shows("a failed link", "2?:1?")
	for o, change := range declared(l) {
		if o.Kind == dpclient.KindVector {
			l.plane(&dpclient.Event{Kind: dpclient.InEffect, Object: o, Change: change})
		}
	}
	shows("the weights acknowledged, the sub-port not", "2:1?")
	acknowledge(l)
	shows("the sub-port too", "2:1")
	l.plane(&dpclient.Event{Kind: dpclient.Pending, Object: dpclient.Object{Kind: dpclient.KindSubPort, SubPort: "p0.1"}})
	shows("a sub-port's state that the data plane lost", "2?:1")
	acknowledge(l)
	shows("sent again", "2:1")
	vector := l.shown.destination(l.key(0, destination(0))).vector
	l.plane(&dpclient.Event{Kind: dpclient.Pending, Object: dpclient.Object{Kind: dpclient.KindVector, Vector: vector}})
	shows("weights that the data plane lost", "2?:1?")
	acknowledge(l)
	shows("sent again", "2:1")
	l.plane(&dpclient.Event{Kind: dpclient.Pending, Object: dpclient.Object{Kind: dpclient.KindDestination, Destination: l.key(0, destination(0))}})
	shows("a destination that the data plane lost", "2?:1?")
	acknowledge(l)
	shows("sent again", "2:1")
	for i := range 4 {
		l.bgp(oneWithdrawal(i, 1, destination(0)))
	}
	l.deliver()
	if got := row(t, l, 0); !strings.Contains(got, "NotFound") {
		t.Errorf("a destination that is gone: %s", got)
	}
}

// TestRecordingIsWrittenWhenIdle checks that recorded events are in the file as soon as the daemon is idle, not only
// when a buffer is full: after a crash the events before it are the relevant ones.
func TestRecordingIsWrittenWhenIdle(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording")
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "record: {file: " + path + "}\n"}, rigOptions{leaves: announceAll(400e9, 1)})
	r.wait(destination(0), "1:1")
	recorded := func(text string) func() bool {
		return func() bool {
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			return bytes.Contains(b, []byte(text))
		}
	}
	eventually(t, "the route is recorded", recorded(destination(0).String()))
	r.drain("p1", true)
	eventually(t, "the drain is recorded", recorded(`{"type":"drain",`))
}

// TestTheLoopWakesForWhatIsDue checks that the loop wakes for the earliest pending action, whatever else it waits for;
// without pending actions it sleeps.
func TestTheLoopWakesForWhatIsDue(t *testing.T) {
	now := time.Now()
	never, past, later := time.Time{}, now.Add(-time.Minute), now.Add(time.Hour)
	waits := []struct {
		what string
		set  func(*loop, time.Time)
	}{
		{"deadline of the start", func(l *loop, at time.Time) { l.deadline = at }},
		{"hold-up of a link", func(l *loop, at time.Time) { l.links[1].held, l.links[1].holdUntil = !at.IsZero(), at }},
		{"drain delay", func(l *loop, at time.Time) {
			l.drainTimers = nil
			if !at.IsZero() {
				l.drainTimers = []drainTimer{{at: at}}
			}
		}},
		{"recording that is tried again", func(l *loop, at time.Time) {
			l.recorder = &recorder{retry: at}
			if !at.IsZero() {
				l.recorder.failure = os.ErrClosed
			}
		}},
		{"event about weights", func(l *loop, at time.Time) {
			l.reweighed = reweighed{}
			if !at.IsZero() {
				l.reweighed = reweighed{since: at.Add(-reweighedFor)}
			}
		}},
		{"judgment of a session's dropped routes", func(l *loop, at time.Time) { l.settleAt = at }},
		{"report of ignored bandwidth", func(l *loop, at time.Time) {
			l.faultReport.dirty, l.faultReport.last = !at.IsZero(), at.Add(-faultsEvery)
		}},
	}
	l := idle(t, shape{Planes: 1, SubPorts: 2}.Text())
	defer func() { l.recorder = nil }()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for i := range waits {
		for _, others := range []time.Time{never, later} {
			for k := range waits {
				waits[k].set(l, others)
			}
			l.arm(timer)
			if armed := timer.Stop(); armed != !others.IsZero() {
				t.Errorf("nothing due, others at %v: the timer is set: %v", others, armed)
			}
			waits[i].set(l, past)
			l.arm(timer)
			select {
			case <-timer.C:
			case <-time.After(waitLimit):
				t.Errorf("%s is due, and the loop does not wake", waits[i].what)
			}
			waits[i].set(l, later)
			if l.arm(timer); !timer.Stop() {
				t.Errorf("%s: the loop is not to wake", waits[i].what)
			}
			waits[i].set(l, never)
		}
	}
	// A source of work that has nothing to report sets no timer.
	for i := range waits {
		waits[i].set(l, never)
	}
	l.faultReport.dirty, l.faultReport.last = true, past
	l.reportFaults()
	if l.arm(timer); timer.Stop() {
		t.Error("after a report of nothing the loop wakes again")
	}
}

// TestSessionEvents checks that events of a session contain its name, and that its state shows a fault until it is
// established again.
func TestSessionEvents(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := idle(t, s.Text())
	polls := func() int64 { return l.d.links.(*testLinks).polls.Load() }
	for _, step := range []struct {
		ev           speaker.Event
		shown, fault string
	}{
		{speaker.Fault{Session: 1, Reason: "wrong AS"}, "fault, p1/p1.0: wrong AS", "wrong AS"},
		{speaker.SessionUp{Session: 1, Generation: 1, Node: leafNode(1), PeerAS: s.PeerAS(1), Families: speaker.FamilySet(speaker.IPv4)}, "session-up, p1/p1.0: node 10.1.0.2, AS 65101, generation 1", ""},
		{oneRoute(1, 1, destination(0), attributes(400e9, s.PeerAS(1), 65001)), "", ""},
		{speaker.EndOfRIB{Session: 1, Generation: 1, Family: speaker.IPv4}, "end-of-rib, p1/p1.0: " + speaker.IPv4.String(), ""},
		{oneWithdrawal(1, 1, destination(0)), "", ""},
		{speaker.Written{Session: 1, Generation: 1}, "", ""},
		{speaker.SessionDown{Session: 1, Generation: 1, Reason: "hold timer expired"}, "session-down, p1/p1.0: hold timer expired", ""},
	} {
		before, revision := polls(), l.builder.Commit()
		turn := func() {
			l.bgp(step.ev)
			l.conclude(time.Now())
		}
		if got := during(l, turn); got != step.shown {
			t.Errorf("%T: events %q, want %q", step.ev, got, step.shown)
		}
		if got := l.faults[1]; got != step.fault || l.faults[0] != "" {
			t.Errorf("%T: the session's fault is %q, want %q", step.ev, got, step.fault)
		}
		if _, down := step.ev.(speaker.SessionDown); polls() > before != down {
			t.Errorf("%T: %d polls of the links", step.ev, polls()-before)
		}
		if l.builder.Commit() == revision {
			t.Errorf("%T: the status has no new revision", step.ev)
		}
	}
}

// TestRefusedEventsAreFaults checks that an event that the core rejects, and a decision that it cannot carry out, is an
// event with its reason.
func TestRefusedEventsAreFaults(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1}.Text())
	if got := during(l, func() { l.step(core.DrainRequest{Target: core.DrainTarget{Plane: "p7"}, On: true}) }); got != `ERROR fault, loop: core.DrainRequest was refused: no plane "p7": the planes are p0, p1` {
		t.Errorf("a drain of nothing: %q", got)
	}
	if got := during(l, func() { l.step(core.DataplaneReady{FlowHash: core.FlowHash{Algorithm: "crc"}}) }); !strings.HasPrefix(got, `fault, the data plane's flow hash: this version of fared does not recognize "crc"`) {
		t.Errorf("an unknown flow hash: %q", got)
	}
}

// TestSlotsMovedAreCounted checks that SlotsMoved is the number of queue pair slots, over all destinations, that have
// moved to another sub-port.
func TestSlotsMovedAreCounted(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 2, Extra: "weights: {policy: remap}\n"}
	l := forwarding(t, s, 3)
	at := func() (out []string) {
		for _, d := range coretest.Destinations(3) {
			for _, slot := range l.group(l.shown.destination(l.key(0, d)).vector).Slots {
				out = append(out, slot.Plane+" "+slot.Device)
			}
		}
		return out
	}
	places, total := at(), l.d.SlotsMoved()
	if total != 0 {
		t.Errorf("%d slots have moved at the start", total)
	}
	moves := 0
	for i, change := range []func(){
		func() { l.link(&LinkEvent{SubPort: 3, Transitions: 2}) }, // the vector that all destinations use changes
		func() { l.link(&LinkEvent{SubPort: 3, Up: true, Speed: 400e9, Transitions: 3}) },
		func() { // one destination gets another vector
			l.bgp(speaker.SessionUp{Session: 3, Generation: 2, Node: leafNode(1), PeerAS: s.PeerAS(3), Families: speaker.FamilySet(speaker.IPv4)})
			for _, d := range coretest.Destinations(3) {
				l.bgp(oneRoute(3, 2, d, attributes(800e9, s.PeerAS(3), 65001)))
			}
		},
		func() {
			for k := range 2 {
				l.bgp(oneRoute(k, 1, destination(1), attributes(200e9, s.PeerAS(k), 65001)))
			}
		},
	} {
		change()
		l.deliver()
		now, moved := at(), uint64(0)
		for k := range now {
			if now[k] != places[k] {
				moved++
			}
		}
		if got := l.d.SlotsMoved() - total; got != moved {
			t.Errorf("change %d: %d slots moved, counted %d", i, moved, got)
		}
		if moved > 0 {
			moves++
		}
		places, total = now, l.d.SlotsMoved()
	}
	if moves < 2 {
		t.Errorf("slots moved in %d changes only: the test does not try what it is for", moves)
	}
}

// TestVectorsThatAreGoneAreNotCounted checks that the status counts the current destinations and distinct weight
// vectors.
func TestVectorsThatAreGoneAreNotCounted(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := forwarding(t, s, 2)
	counts := func(what string, destinations, vectors uint32) {
		t.Helper()
		l.deliver()
		l.builder.Commit()
		got, err := services(t, l).Fabric().GetStatus(t.Context(), &farev1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if got.Destinations != destinations || got.Vectors != vectors {
			t.Errorf("%s: %d destinations and %d vectors, want %d and %d", what, got.Destinations, got.Vectors, destinations, vectors)
		}
	}
	counts("two alike", 2, 1)
	l.bgp(oneRoute(1, 1, destination(1), attributes(100e9, s.PeerAS(1), 65001)))
	counts("one with less bandwidth", 2, 2)
	l.bgp(oneRoute(1, 1, destination(1), attributes(400e9, s.PeerAS(1), 65001)))
	counts("alike again", 2, 1)
	for d := range 2 {
		for i := range 2 {
			l.bgp(oneWithdrawal(i, 1, destination(d)))
		}
		counts("withdrawn", uint32(1-d), uint32(1-d))
	}
}

// TestReloadShowsLoopbacks checks that after a reload with another loopback each destination's weights are shown for it
// too, with its queue pairs.
func TestReloadShowsLoopbacks(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := forwarding(t, s, 1)
	sources := func() []string {
		l.builder.Commit()
		resp, err := services(t, l).Weights().GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: destination(0).Addr().String()})
		if err != nil {
			t.Fatal(err)
		}
		w := resp.Weights[0]
		if len(w.Pairs) != len(w.Sources) {
			t.Errorf("%d pairs of the sources %q", len(w.Pairs), w.Sources)
		}
		return w.Sources
	}
	if got := fmt.Sprint(sources()); got != "[10.255.0.1/32]" {
		t.Errorf("before: %s", got)
	}
	s.Loopbacks = []string{"10.255.0.1/32", "10.255.0.9/32"}
	l.reload(s.Config(t))()
	if got := fmt.Sprint(sources()); got != "[10.255.0.1/32 10.255.0.9/32]" {
		t.Errorf("after the reload: %s", got)
	}
	pins := l.pairPorts(dpclient.Destination{Prefix: destination(0)}, l.shown.destination(l.key(0, destination(0))).vector)
	if len(pins) != 2 || pins[1].Source != "10.255.0.9/32" || len(pins[1].SourcePorts) == 0 {
		t.Errorf("the data plane is given the pairs %v", pins)
	}
}

// TestStepsAreTimed checks that fared_loop_step_seconds has one observation for each step of the loop, of the time
// since its inputs were drained.
func TestStepsAreTimed(t *testing.T) {
	l := idle(t, shape{Planes: 1, SubPorts: 1}.Text())
	answering(t, l)
	const name = "fared_loop_step_seconds"
	before := gathered(t, l.d.registry, name)
	l.turn()
	l.turn()
	if got := gathered(t, l.d.registry, name) - before; got != 2 {
		t.Errorf("%d observations of 2 steps", got)
	}
}
