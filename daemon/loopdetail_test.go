package daemon

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/testbed"
)

// recentEvents is a WatchEvents stream that ends after the remembered events.
type recentEvents struct {
	farev1.FabricService_WatchEventsServer
	ctx   context.Context
	lines []string
}

func (r *recentEvents) Context() context.Context { return r.ctx }
func (r *recentEvents) Send(ev *farev1.FabricEvent) error {
	r.lines = append(r.lines, ev.Kind+", "+ev.Subject+": "+ev.Detail)
	return nil
}

// remembered returns the events of a daemon that does not run, as WatchEvents sends them.
func remembered(t *testing.T, l *loop) []string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r := &recentEvents{ctx: ctx}
	if err := services(t, l).Fabric().WatchEvents(&farev1.WatchEventsRequest{Recent: 1000}, r); err == nil {
		t.Fatal("the stream has not ended")
	}
	return r.lines
}

// TestEventsAreRemembered checks that link events, changes of weights and ignored bandwidth are events of WatchEvents,
// not only lines of the log.
func TestEventsAreRemembered(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1, Extra: bounds}
	l := forwarding(t, s, 3)
	l.reweighed.since = l.reweighed.since.Add(-reweighedFor)
	l.reportWeights()
	l.bgp(oneRoute(1, 1, destination(0), attributes(1e9, s.PeerAS(1), 65001)))
	l.markIgnored()
	l.reportFaults()
	l.link(&LinkEvent{SubPort: 1, Reason: "no carrier", Transitions: 2})
	got := remembered(t, l)
	for _, want := range []string{
		"link-up, p0.0: ", "session-up, p1/p1.0: node 10.1.0.2", "weights, weights: none to 1:1 for 3 destinations",
		"fault, p1/p1.0: bandwidth of 1 routes ignored, below-minimum", "link-down, p1.0: no carrier",
	} {
		if !slices.ContainsFunc(got, func(line string) bool { return strings.HasPrefix(line, want) }) {
			t.Errorf("no event %q in\n%s", want, strings.Join(got, "\n"))
		}
	}
}

// TestOrderOfAStep checks that a step applies the loss of a failed link before the due timers, and these before the
// events beyond the allowances: each is a separate change of the weights.
func TestOrderOfAStep(t *testing.T) {
	s := shape{Planes: 3, SubPorts: 1, Extra: "drain_delay: 1h\n"}
	l := forwarding(t, s, 1)
	links := newTestLinks(3, 400e9)
	links.Take(nil)
	l.d.links = links
	target := core.DrainTarget{Plane: "p0"}
	l.step(core.DrainRequest{Target: target, On: true})
	l.step(core.DrainRequest{Target: target, On: false})
	l.deliver()
	l.armDrains()
	declared := func() uint64 {
		key := dpclient.Destination{Prefix: destination(0)}
		return l.shown.of(dpclient.Object{Kind: dpclient.KindVector, Vector: l.shown.vector(key)}).change
	}
	before := declared()
	links.change(2, func(ev *LinkEvent) { ev.Up = false })
	l.wokenAt = l.wokenAt.Add(time.Hour)
	l.bulkEvents = append(l.bulkEvents, oneRoute(1, 1, destination(0), attributes(100e9, s.PeerAS(1), 65001)))
	l.turn()
	if v, _ := coretest.VectorFrom(l.core, 0, destination(0)); fmt.Sprint(v.Weights) != "[4 1 0]" || declared()-before != 4 {
		t.Errorf("weights %v after %d changes, want [4 1 0] after 4: sub-port p2.0, and the vector without p2, with p0, with less of p1", v.Weights, declared()-before)
	}
	if got := stages(l.core); len(got)+len(l.drainTimers) != 0 {
		t.Errorf("drains %v, timers %v", got, l.drainTimers)
	}
}

// TestLostSessionIsDeclaredAtOnce checks that a closed session's sub-port is declared down before later events are
// processed.
func TestLostSessionIsDeclaredAtOnce(t *testing.T) {
	l := forwarding(t, shape{Planes: 2, SubPorts: 1}, 1)
	object := dpclient.Object{Kind: dpclient.KindSubPort, SubPort: "p1.0"}
	if !l.shown.inEffect(object) {
		t.Fatal("the sub-port is not in effect")
	}
	l.bgp(speaker.SessionDown{Session: 1, Generation: 1})
	if l.shown.inEffect(object) {
		t.Error("its state of before is in effect still")
	}
}

// TestCarriersAreCoveredByTheDataPlane checks that the source of links is notified where a data plane announces
// carriers, as long as it is connected.
func TestCarriersAreCoveredByTheDataPlane(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1}.Text())
	links := l.d.links.(*testLinks)
	for _, c := range []struct {
		event dpclient.Event
		want  string
	}{
		{dpclient.Event{Kind: dpclient.Connected, Capabilities: &farev1.Capabilities{CarriersAnnounced: "a/1"}}, "a/1"},
		{dpclient.Event{Kind: dpclient.Disconnected}, ""},
		{dpclient.Event{Kind: dpclient.Connected, Capabilities: &farev1.Capabilities{CarriersAnnounced: "a/2"}}, "a/2"},
		{dpclient.Event{Kind: dpclient.Connected}, ""},
	} {
		if l.plane(&c.event); links.cover.Load() != c.want {
			t.Errorf("%v: %q is covered, want %q", c.event.Kind, links.cover.Load(), c.want)
		}
	}
}

// TestFirstConnectionHandsOut checks that the sessions get their routes before those that wait for the data plane may
// connect.
func TestFirstConnectionHandsOut(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1}.Text())
	due := func() { l.step(core.Reload{Config: l.core.Config().Text()}) }
	left := func() (n int) { // takes the routes that are still due
		l.core.Advertise(func(int, []core.Route) { n++ })
		return n
	}
	due()
	if l.deliver(); left() != 2 {
		t.Error("routes are handed out without a data plane")
	}
	if l.plane(&dpclient.Event{Kind: dpclient.Connected}); left() != 0 {
		t.Error("nothing is handed out")
	}
	due()
	if l.plane(&dpclient.Event{Kind: dpclient.Connected}); left() != 2 {
		t.Error("the second connection is taken for the first")
	}
}

// TestStartEndsAtItsDeadline checks that the start ends at its deadline, once.
func TestStartEndsAtItsDeadline(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1}.Text())
	began := l.wokenAt
	l.deadline = began.Add(time.Minute)
	for _, step := range []struct {
		after time.Duration
		over  bool
	}{{0, false}, {59 * time.Second, false}, {time.Minute, true}, {time.Hour, true}} {
		l.wokenAt = began.Add(step.after)
		l.timers()
		l.deliver()
		if l.core.Converged() != step.over || l.deadline.IsZero() != step.over {
			t.Errorf("after %v: converged %v, deadline %v", step.after, l.core.Converged(), l.deadline)
		}
	}
}

// TestSecondLeafIsNoticedAtItsSession checks that a session that comes up with the identifier of another leaf of its
// plane has a fault that names it.
func TestSecondLeafIsNoticedAtItsSession(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 2}
	l := idle(t, s.Text())
	establish(l, s, 0)
	another := speaker.SessionUp{Session: 1, Generation: 1, Node: leafNode(0), PeerAS: 64999, Families: speaker.FamilySet(speaker.IPv4)}
	shown := during(l, func() { l.bgp(another) })
	if want := "the leaf of session p0/p0.0, AS 65100, has the BGP identifier 10.1.0.1 too"; !strings.HasPrefix(l.faults[1], want) || !strings.Contains(shown, "fault, p0/p0.1: "+want) {
		t.Errorf("fault %q, events %q", l.faults[1], shown)
	}
	l.bgp(speaker.SessionDown{Session: 0, Generation: 1})
	another.Generation = 2
	if l.bgp(another); l.faults[1] != "" {
		t.Errorf("alone: %q", l.faults[1])
	}
}

// TestFlowHashIsAnEvent checks that the first flow hash of a data plane is an event, and that the event of another hash
// names the previous one and the remedy.
func TestFlowHashIsAnEvent(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1}.Text())
	connect := func(seed uint32) string {
		return during(l, func() {
			l.plane(&dpclient.Event{Kind: dpclient.Connected, Name: "a", Capabilities: &farev1.Capabilities{
				FlowHash: &farev1.FlowHash{Algorithm: "linux-l4", Seed: seed, Buckets: 1024, LastingBuckets: 16}}})
		})
	}
	for _, step := range []struct {
		seed uint32
		want string
	}{
		{7, "dataplane, a: connected; dataplane, a: flow hash linux-l4 (seed 7, 16 lasting of 1024 buckets)"},
		{7, "dataplane, a: connected"},
		{8, "dataplane, a: connected; WARN dataplane, a: flow hash linux-l4 (seed 8, 16 lasting of 1024 buckets), before linux-l4 (seed 7, 16 lasting of 1024 buckets): " +
			"source ports have changed; reconnect queue pairs, because packets with the previous ports may leave over other sub-ports than their slots'"},
	} {
		got, _, _ := strings.Cut(connect(step.seed), "; WARN the data plane places flows by a hash") // a line without an event
		if got != step.want {
			t.Errorf("seed %d: events %q, want %q", step.seed, got, step.want)
		}
	}
}

// revises reports whether a function gives the status a new revision.
func revises(l *loop, f func()) bool {
	before := l.builder.Commit()
	f()
	return l.builder.Commit() > before
}

// TestRevisions checks that each change of what the status shows has a new revision, and that nothing else has.
func TestRevisions(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 1h\n"}
	l := forwarding(t, s, 1)
	target := core.DrainTarget{Plane: "p1"}
	for _, step := range []struct {
		what string
		do   func()
		want bool
	}{
		{"nothing", func() {}, false},
		{"a link that fails", func() { l.link(&LinkEvent{SubPort: 1, Reason: "no carrier", Transitions: 2}) }, true},
		{"with another reason", func() { l.link(&LinkEvent{SubPort: 1, Reason: "not present", Transitions: 2}) }, true},
		{"a drain, whose caller has an event", func() {
			l.step(core.DrainRequest{Target: target, On: true})
			l.step(core.DrainStep{Target: target, Confirmed: true})
			l.step(core.RoutesWritten{Session: 1, Generation: 1, Mark: l.core.Mark(1)})
			l.armDrains()
		}, false},
		{"its delay is not over", func() { l.timers() }, false},
		{"it is over", func() { l.wokenAt = l.wokenAt.Add(time.Hour); l.timers() }, true},
		{"a landing", func() {
			l.ports.news = []landed{{pair: pair{src: own.Addr(), dst: destination(0).Addr()}, table: []byte{1}}}
			l.landed()
		}, true},
		{"a landing that was taken", func() { l.landed() }, false},
		{"a landing of what is gone", func() {
			l.ports.news = []landed{{pair: pair{src: own.Addr(), dst: destination(7).Addr()}, table: []byte{1}}}
			l.landed()
		}, false},
	} {
		if got := revises(l, step.do); got != step.want {
			t.Errorf("%s: a new revision %v, want %v", step.what, got, step.want)
		}
	}
}

// TestDrainsOfALeafAreConfirmed checks that without a data plane a drain passes its first stage at once, which changes
// the status and starts the drain delay, and that later stages need no confirmation.
func TestDrainsOfALeafAreConfirmed(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1, Leaf: true, Extra: "drain_delay: 1h\n"}.Text())
	l.recorder = &recorder{f: &fullDisk{room: 1 << 20}, keep: 1 << 20, left: 1 << 40}
	defer func() { l.recorder = nil }()
	target := core.DrainTarget{Plane: "p1"}
	l.step(core.DrainRequest{Target: target, On: true})
	if !revises(l, l.confirmDrains) {
		t.Error("the status has no new revision")
	}
	if got := stages(l.core); !slices.Equal(got, []core.DrainStage{core.DrainRoutes}) || len(l.drainTimers) != 1 || l.drainTimers[0].stage != core.DrainRoutes {
		t.Errorf("drains %v, timers %v", got, l.drainTimers)
	}
	events := l.recorder.events
	if l.confirmDrains(); l.recorder.events != events {
		t.Error("confirmed again")
	}
}

// TestDrainedDevices checks that a drain covers each device that leads to its target, once.
func TestDrainedDevices(t *testing.T) {
	l := idle(t, `
as: 4200001000
loopbacks: [10.255.0.9/32]
accept: [10.255.0.0/16]
router_id: 10.9.0.1
dataplane: {address: "memory:"}
planes:
- name: p0
  sub_ports:
  - {device: a, speed: 400G, sessions: [{peer: 192.0.2.1}, {peer: 192.0.2.3}]}
  - {device: b, speed: 400G, sessions: [{peer: 192.0.2.5}]}
- name: p1
  sub_ports:
  - {device: c, speed: 400G, sessions: [{peer: 192.0.2.7}]}
`)
	for target, want := range map[core.DrainTarget][]string{{Plane: "p0"}: {"a", "b"}, {Plane: "p1"}: {"c"}, {SubPort: "a"}: {"a"}} {
		if got := l.drainedDevices(target); !slices.Equal(got, want) {
			t.Errorf("%v: devices %v, want %v", target, got, want)
		}
	}
}

// TestDrainNamesThreeSessions checks that the status of a drain names three of the sessions that it waits for and
// counts the others.
func TestDrainNamesThreeSessions(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 5}
	l := idle(t, s.Text())
	for i := range 5 {
		establish(l, s, i)
	}
	target := core.DrainTarget{Plane: "p0"}
	waitsFor := func(what, routes string, sessions []int, more ...string) {
		t.Helper()
		var want []string
		for _, i := range sessions {
			want = append(want, fmt.Sprintf("session p0/p0.%d: %s not acknowledged by the leaf's TCP yet", i, routes))
		}
		if got := l.drains()[0].WaitsFor; !slices.Equal(got, append(want, more...)) {
			t.Errorf("%s: it waits for %q, want %q", what, got, append(want, more...))
		}
	}
	written := func(sessions ...int) {
		for _, i := range sessions {
			l.step(core.RoutesWritten{Session: i, Generation: 1, Mark: l.core.Mark(i)})
		}
	}
	l.step(core.DrainRequest{Target: target, On: true})
	waitsFor("shares", "", nil)
	l.step(core.DrainStep{Target: target, Confirmed: true})
	waitsFor("routes", "zero bandwidth", []int{0, 1, 2}, "and 2 more sessions")
	written(1)
	waitsFor("four", "zero bandwidth", []int{0, 2, 3}, "and 1 more sessions")
	written(0)
	waitsFor("three", "zero bandwidth", []int{2, 3, 4})
	l.step(core.DrainStep{Target: target})
	waitsFor("withdrawing", "withdrawals", []int{0, 1, 2}, "and 2 more sessions")
	written(0, 1, 2, 3)
	waitsFor("one", "withdrawals", []int{4})
	written(4)
	waitsFor("drained", "", nil)
}

// TestEqualLinkIsNotHeldUp checks that the hold-up delays increases only: a report of the same speed counts at once.
func TestEqualLinkIsNotHeldUp(t *testing.T) {
	l := idle(t, shape{Planes: 1, SubPorts: 1, NoSpeed: true, Extra: "path_bandwidth: {increase_hold_up: 1h}\n"}.Text())
	for _, step := range []struct {
		speed fare.Bandwidth
		held  bool
	}{{100e9, false}, {100e9, false}, {400e9, true}, {100e9, false}, {50e9, false}} {
		l.link(&LinkEvent{Up: true, Speed: step.speed, Transitions: 1})
		if l.links[0].held != step.held {
			t.Errorf("%v: held up %v, want %v", step.speed, l.links[0].held, step.held)
		}
	}
}

// TestReloadWhileHeldUp checks that a held-up link counts afterwards with the speed of the new configuration, or with
// that of the device if none is configured.
func TestReloadWhileHeldUp(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 1, NoSpeed: true, Extra: "path_bandwidth: {increase_hold_up: 1h}\n"}
	device := s.Text()
	configured := strings.Replace(device, "- device: p0.0\n", "- device: p0.0\n        speed: 200G\n", 1)
	for _, c := range []struct {
		from, to, source string
		want             fare.Bandwidth
	}{{device, configured, "config", 200e9}, {configured, device, "ethtool", 400e9}, {device, device, "ethtool", 400e9}} {
		l := idle(t, c.from)
		l.link(&LinkEvent{Up: true, Speed: 400e9, SpeedSource: "ethtool", Transitions: 1})
		l.link(&LinkEvent{Speed: 400e9, SpeedSource: "ethtool", Transitions: 2})
		l.link(&LinkEvent{Up: true, Speed: 400e9, SpeedSource: "ethtool", Transitions: 3})
		if !l.links[0].held {
			t.Fatal("the link is not held up")
		}
		next, err := config.Parse("next", []byte(strings.Replace(c.to, "as:", "drain_delay: 7s\nas:", 1)))
		if err != nil {
			t.Fatal(err)
		}
		l.reload(next)()
		l.wokenAt = l.wokenAt.Add(time.Hour)
		l.timers()
		if got := l.links[0]; !got.Up || got.Speed != c.want || got.SpeedSource != c.source || l.core.SubPort(0).Speed != c.want {
			t.Errorf("%v of %s, the core has %v; want %v of %s", got.Speed, got.SpeedSource, l.core.SubPort(0).Speed, c.want, c.source)
		}
	}
}

// TestReloadForgetsLandings checks that the removal of a loopback by a reload discards its landings.
func TestReloadForgetsLandings(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1, Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}}
	l := idle(t, s.Text())
	l.ports.connected(true)
	for _, lo := range l.core.Config().Loopbacks {
		l.ports.asked(lo.Addr(), destination(0).Addr())
	}
	s.Loopbacks = s.Loopbacks[:1]
	l.reload(s.Config(t))()
	if _, kept := l.ports.pairs[pair{src: own.Addr(), dst: destination(0).Addr()}]; !kept || len(l.ports.pairs) != 1 {
		t.Errorf("%d landings, that of the loopback that is left: %v", len(l.ports.pairs), kept)
	}
}

// TestReasonsOfPlanes checks that a plane without weight has a reason and one with weight has none, that an unreachable
// destination has a reason, and that a session counts its unused routes by reason.
func TestReasonsOfPlanes(t *testing.T) {
	l := forwarding(t, shape{Planes: 2, SubPorts: 1}, 1)
	id := l.shown.destination(l.key(0, destination(0))).vector
	l.step(core.DrainRequest{Target: core.DrainTarget{Plane: "p1"}, On: true})
	v, ok := (source{l}).Vector(id)
	if !ok || !v.Reachable || v.Reason != "" || v.Planes[0].Reason != "" || v.Planes[1].Reason != "drained" {
		t.Errorf("one plane is drained: %+v", v)
	}
	for i, x := range (source{l}).Sessions() {
		var got []string
		for _, c := range x.Ignored {
			got = append(got, fmt.Sprint(c.Name, " ", c.Value))
		}
		if want := [][]string{nil, {"drained 1"}}[i]; !slices.Equal(got, want) {
			t.Errorf("session %d: routes that are not used: %q, want %q", i, got, want)
		}
	}
	l.link(&LinkEvent{SubPort: 0, Reason: "no carrier", Transitions: 2})
	if v, ok = (source{l}).Vector(id); !ok || v.Reachable || v.Reason == "" || v.Planes[0].Reason != "link-down" {
		t.Errorf("no plane: %+v", v)
	}
}

// TestNextHopsAreLearnedFromSessions checks that the next hop of a session is its neighbor's address, and that the loop
// keeps no event of an earlier step.
func TestNextHopsAreLearnedFromSessions(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.settled(1)
	r.inside(func(l *loop) { l.step(core.NextHop{Session: 1, Address: l.core.SessionState(0).NextHop}) })
	r.leaves[1].drop()
	eventually(t, "the next hop is learned", func() (learned bool) {
		r.inside(func(l *loop) { learned = l.core.SessionState(1).NextHop == r.s.There(1) })
		return learned
	})
	r.inside(func(l *loop) {
		taken, answers := l.speakerEvents[:cap(l.speakerEvents)], l.planeEvents[:cap(l.planeEvents)]
		if len(taken) == 0 || len(answers) == 0 {
			t.Error("nothing was taken: the test does not try what it is for")
		}
		for _, ev := range taken {
			if ev != nil {
				t.Errorf("kept: %v", ev)
			}
		}
		for _, ev := range answers {
			if !reflect.ValueOf(ev).IsZero() {
				t.Errorf("kept: %v", ev)
			}
		}
	})
}

// TestWatchesBeginAtALeaf checks that a watch of weights begins at once at a leaf without a data plane, which has no
// start to wait for.
func TestWatchesBeginAtALeaf(t *testing.T) {
	socket := filepath.Join(testbed.ShortDir(t), "s")
	newRig(t, shape{Planes: 1, SubPorts: 2, Leaf: true, Extra: "api: {socket: " + socket + "}\n"}, rigOptions{deps: func(d *Deps) { d.Embedded = false }})
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	watch, err := farev1.NewWeightServiceClient(dial(t, socket)).WatchWeights(ctx, &farev1.WatchWeightsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if first, err := watch.Recv(); err != nil || !first.Snapshot || !first.Complete {
		t.Errorf("%v, %v", first, err)
	}
}

// TestASecondCloseDoesNothing checks that a second Close closes nothing again.
func TestASecondCloseDoesNothing(t *testing.T) {
	checkLeaks(t)
	text := shape{Planes: 1, SubPorts: 1, Extra: "record: {file: " + filepath.Join(t.TempDir(), "recording") + "}\n"}.Text()
	d, err := New(coretest.Parse(t, text), Deps{Memory: dialMemory, Links: newTestLinks(1, 400e9), Embedded: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(d.closers) == 0 || d.loop.recorder == nil {
		t.Fatal("nothing is open: the test does not try what it is for")
	}
	if err := errors.Join(d.Close(), d.Close()); err != nil {
		t.Error(err)
	}
}

// TestAttend checks when a turn runs in the goroutine of a session: only while run waits for input.
func TestAttend(t *testing.T) {
	l := forwarding(t, shape{Planes: 2, SubPorts: 1}, 1)
	answering(t, l)
	l.timer = time.NewTimer(time.Hour)
	const name = "fared_loop_step_seconds"
	attend := func(what string, want bool) {
		t.Helper()
		before := gathered(t, l.d.registry, name)
		if got := l.attend(); got != want {
			t.Errorf("%s: attends %v, want %v", what, got, want)
		}
		steps := uint64(0)
		if want {
			steps = 1
		}
		if got := gathered(t, l.d.registry, name) - before; got != steps {
			t.Errorf("%s: %v steps, want %v", what, got, steps)
		}
	}
	attend("before run, or after it", false)
	l.running = true
	attend("while run waits", true)
	l.mu.Lock()
	attend("during another turn", false)
	l.mu.Unlock()
	attend("after it", true)
}

// TestAttendedTurnsEndWithTheLoop checks that no turn runs once run has returned, while sessions bring input.
func TestAttendedTurnsEndWithTheLoop(t *testing.T) {
	for range 20 {
		l := forwarding(t, shape{Planes: 2, SubPorts: 1}, 1)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.run(ctx) }()
		for !l.attend() {
			runtime.Gosched()
		}
		var sessions sync.WaitGroup
		for range 3 {
			sessions.Go(func() {
				for ctx.Err() == nil {
					l.attend()
				}
			})
		}
		if err := l.do(ctx, func() {}); err != nil {
			t.Error(err)
		}
		cancel()
		if err := <-ended; err != nil || l.attend() {
			t.Errorf("a turn runs after run has returned, %v", err)
		}
		sessions.Wait()
	}
}

// TestFew checks which events are sent at once.
func TestFew(t *testing.T) {
	routes := func(n int) speaker.Event { return speaker.Routes{Changes: make([]speaker.Change, n)} }
	for _, c := range []struct {
		events []speaker.Event
		want   bool
	}{{nil, true}, {[]speaker.Event{speaker.SessionDown{}, routes(fewEvents - 2)}, true}, {[]speaker.Event{routes(fewEvents)}, false}} {
		if got := few(c.events); got != c.want {
			t.Errorf("few(%d events) = %v, want %v", len(c.events), got, c.want)
		}
	}
}
