package core

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
)

// drainWorld is the test's own view of a server: three planes with two sub-ports each to one leaf a plane, and three
// destinations.
type drainWorld struct {
	s       shape
	c       *Core
	serves  [6]string
	down    [6]bool
	routes  [6][3]drainRoute
	drained map[DrainTarget]bool
}

// drainRoute is a route of a session to a destination.
type drainRoute struct {
	present, marked bool
	value           fare.Bandwidth
}

// newDrainWorld returns random routes, signals and failures.
func newDrainWorld(t *testing.T, seed uint64, random *rand.Rand) *drainWorld {
	w := &drainWorld{drained: map[DrainTarget]bool{}}
	for i := range w.serves {
		w.serves[i] = []string{"10.255.0.1/32", "10.255.0.2/32", "10.255.0.1/32, 10.255.0.2/32"}[(i+int(seed))%3]
	}
	w.s = shape{Planes: 3, SubPorts: 2, Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}, Serves: func(i int) string { return w.serves[i] }}
	w.c = coreOf(t, w.s.Text())
	for i := range 6 {
		do(t, w.c, up(i, 400e9), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i / 2), PeerAS: w.s.PeerAS(i)}})
		for d := range 3 {
			if random.IntN(3) > 0 {
				r := drainRoute{present: true, marked: random.IntN(4) == 0, value: 400e9}
				if random.IntN(4) == 0 {
					r.value = 0
				}
				w.announce(t, i, d, r)
			}
		}
		if w.down[i] = random.IntN(4) == 0; w.down[i] {
			do(t, w.c, down(i))
		}
	}
	return w
}

func (w *drainWorld) announce(t *testing.T, session, d int, r drainRoute) {
	t.Helper()
	w.routes[session][d] = r
	attrs := *attributes(r.value, w.s.PeerAS(session), 65001)
	if r.marked {
		attrs.Signals = fare.SignalGracefulShutdown
	}
	do(t, w.c, Fabric{fare.RouteUpdate{Session: session, Generation: 1, Prefix: destination(d), Attrs: &attrs}})
}

// target returns a random target.
func (w *drainWorld) target(random *rand.Rand) DrainTarget {
	return []DrainTarget{{Plane: fmt.Sprint("p", random.IntN(3))}, {SubPort: w.s.Device(random.IntN(6))}, {Leaf: leafNode(random.IntN(3))}}[random.IntN(3)]
}

// bandwidth returns the greatest of the leaves' bandwidths of a destination for a source group, and whether there is a
// usable route; with signals, routes that carry them count too.
func (w *drainWorld) bandwidth(source, d int, signals bool) (most fare.Bandwidth, usable bool) {
	for leaf := range 3 {
		least, found := fare.Bandwidth(0), false
		for i := 2 * leaf; i < 2*leaf+2; i++ {
			r := w.routes[i][d]
			out := w.drained[DrainTarget{Plane: fmt.Sprint("p", leaf)}] || w.drained[DrainTarget{Leaf: leafNode(leaf)}] || w.drained[DrainTarget{SubPort: w.s.Device(i)}]
			if out || w.down[i] || !r.present || r.marked && !signals || !strings.Contains(w.serves[i], fmt.Sprintf("10.255.0.%d/32", source+1)) {
				continue
			}
			if !found || r.value < least {
				least, found = r.value, true
			}
		}
		most, usable = max(most, least), usable || found
	}
	return most, usable
}

// state is "lasting" if a leaf without signals has bandwidth, "zero" if all leaves have zero bandwidth, "marked" if
// only leaves with signals have bandwidth, and otherwise empty.
func (w *drainWorld) state(source, d int) string {
	if most, _ := w.bandwidth(source, d, false); most > 0 {
		return "lasting"
	}
	switch most, usable := w.bandwidth(source, d, true); {
	case most > 0:
		return "marked"
	case usable:
		return "zero"
	}
	return ""
}

// states returns the state of every source group and destination that has a route.
func (w *drainWorld) states() map[string]string {
	out := map[string]string{}
	for source := range 2 {
		for d := range 3 {
			out[fmt.Sprint(source, destination(d))] = w.state(source, d)
		}
	}
	return out
}

// reachable returns the core's reachable destinations of each source group.
func (w *drainWorld) reachable() map[string]bool {
	out := map[string]bool{}
	for i := range w.c.sources {
		for prefix, id := range w.c.sources[i].table.Destinations {
			out[fmt.Sprint(i, prefix)] = w.c.sources[i].table.Group(id).Reachable
		}
	}
	return out
}

// TestStrandedIsWhatADrainDoes checks, for random routes, signals, failures and drains of a server with own ports, that
// a drain is refused exactly when it makes a reachable destination of some source group unreachable, or leaves one that
// has bandwidth only paths of zero bandwidth or with signals; and that the other end is named exactly where a
// destination's paths all have zero bandwidth, and the end of the drain would return one that has bandwidth.
func TestStrandedIsWhatADrainDoes(t *testing.T) {
	refused, freed := 0, 0
	for seed := range uint64(400) {
		random := rand.New(rand.NewPCG(seed, 1))
		w := newDrainWorld(t, seed, random)
		for range 5 {
			target := w.target(random)
			if w.drained[target] {
				continue
			}
			before, shown := w.states(), w.reachable()
			err := w.c.CheckStranded(target)
			if now := w.reachable(); fmt.Sprint(now) != fmt.Sprint(shown) {
				t.Fatalf("seed %d: the check of %v changed %v to %v", seed, target, shown, now)
			}
			w.drained[target] = true
			do(t, w.c, DrainRequest{Target: target, On: true})
			now, lost := w.reachable(), 0
			for key, after := range w.states() {
				if before[key] == "lasting" && after != "lasting" || shown[key] && !now[key] {
					lost++
				}
			}
			if (err != nil) != (lost > 0) || err != nil && !strings.Contains(err.Error(), fmt.Sprintf("leave %d destinations", lost)) {
				t.Fatalf("seed %d: drain of %v takes %d destinations, the check returns %v", seed, target, lost, err)
			}
			if lost > 0 {
				refused++
			}
			session, d := random.IntN(6), random.IntN(3)
			w.announce(t, session, d, drainRoute{present: true})
			freed += w.checkOtherEnd(t, target)
		}
	}
	if refused < 100 || freed < 100 {
		t.Errorf("only %d drains took a destination, and %d met one of the other end: this test shows little", refused, freed)
	}
}

// checkOtherEnd checks CheckOtherEnd of a drain, and returns the number of destinations that its end would give a path.
func (w *drainWorld) checkOtherEnd(t *testing.T, target DrainTarget) (n int) {
	t.Helper()
	before, shown := w.states(), w.reachable()
	err := w.c.CheckOtherEnd(target)
	if now := w.reachable(); fmt.Sprint(now) != fmt.Sprint(shown) {
		t.Fatalf("the check of the other end changed %v to %v", shown, now)
	}
	delete(w.drained, target)
	for key, after := range w.states() {
		if before[key] == "zero" && after == "lasting" {
			n++
		}
	}
	w.drained[target] = true
	if (err != nil) != (n > 0) || err != nil && !strings.Contains(err.Error(), fmt.Sprintf("planes of %d destinations", n)) {
		t.Fatalf("the end of the drain of %v would return %d destinations, the check says %v", target, n, err)
	}
	return n
}
