package locate

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/topo"
)

// calm is the time after which a cable that has returned counts as healthy: reports of its failure may be under way.
const calm = time.Second

// weather is a fabric in virtual time whose cables flap: a carrier is lost for up to four seconds, and the session
// returns up to three seconds after it. Nodes report with different delays, and servers learn bandwidths meanwhile.
type weather struct {
	t      *testing.T
	f      *topo.Fabric
	random *rand.Rand
	sim    *topo.Simulation
	leaves bool // report
	now    time.Duration
	queue  []change
	state  []State         // the truth, by cable
	last   []time.Duration // when a cable was last not up; negative: never
	views  map[*topo.Node]*View
}

// change is an event of the queue.
type change struct {
	at time.Duration
	do func()
}

func (w *weather) after(d time.Duration, do func()) {
	c := change{w.now + d, do}
	i, _ := slices.BinarySearchFunc(w.queue, c, func(a, b change) int {
		if a.at <= b.at {
			return -1
		}
		return 1
	})
	w.queue = slices.Insert(w.queue, i, c)
}

func (w *weather) upTo(d time.Duration) time.Duration {
	return time.Duration(w.random.Int64N(int64(d)))
}

// become changes a cable, and lets all nodes report it later.
func (w *weather) become(c *topo.Cable, s State) {
	before := w.state[c.Index]
	w.state[c.Index] = s
	name := c.Down.Node.Name + "/" + c.Down.Device
	switch {
	case before == Up:
		_, err := w.sim.Fail(name)
		w.must(err)
	case s == Up:
		w.last[c.Index] = w.now
		_, err := w.sim.Heal(name)
		w.must(err)
	}
	for _, end := range []*topo.End{&c.Down, &c.Up} {
		n := end.Node
		if w.views[n] == nil {
			continue
		}
		i := slices.Index(w.f.At(n), c)
		w.after(w.upTo(200*time.Millisecond), func() {
			w.report(n, func(v *View) { v.Ports[i] = Port{State: w.state[c.Index], Since: begun.Add(w.now)} })
		})
	}
	for _, n := range w.f.Server {
		w.after(w.upTo(300*time.Millisecond), func() {
			paths := (&truth{w.f, w.sim, nil, make([]bool, len(w.f.Cables))}).view(n).Paths
			w.report(n, func(v *View) { v.Paths = paths })
		})
	}
}

// report replaces the view of a node by a changed one.
func (w *weather) report(n *topo.Node, change func(*View)) {
	v := *w.views[n]
	v.Ports = slices.Clone(v.Ports)
	change(&v)
	w.views[n] = &v
}

func (w *weather) must(err error) {
	if err != nil {
		w.t.Fatal(err)
	}
}

// flap lets a cable that is up lose its carrier, now and then.
func (w *weather) flap() {
	c := w.f.Cables[w.random.IntN(len(w.f.Cables))]
	if w.state[c.Index] == Up {
		w.become(c, Dark)
		w.after(50*time.Millisecond+w.upTo(4*time.Second), func() {
			w.become(c, Silent)
			w.after(10*time.Millisecond+w.upTo(3*time.Second), func() { w.become(c, Up) })
		})
	}
	w.after(time.Duration(w.random.ExpFloat64()*float64(2*time.Second)), w.flap)
}

// bad returns the cables that are not up, or were not a moment ago.
func (w *weather) bad() (all []bool) {
	for i, s := range w.state {
		all = append(all, s != Up || w.last[i] >= 0 && w.now-w.last[i] < calm)
	}
	return all
}

// guilty reports whether at least half of the cables of a part are bad.
func (w *weather) guilty(part string, bad []bool) bool {
	cables, err := w.f.Find(part)
	w.must(err)
	n := 0
	for _, c := range cables {
		if bad[c.Index] {
			n++
		}
	}
	return 2*n >= len(cables)
}

// TestFlaps lets links flap for an hour: one each two seconds. Every named part is one whose cables are bad, or have
// been within the last second; while none has been, nothing is named.
func TestFlaps(t *testing.T) {
	span := time.Duration(gate.Count(t, gate.Models, 60, 3600)) * time.Second
	for name, spec := range fabrics {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := number(t, spec)
			w := &weather{t: t, f: f, random: rand.New(rand.NewPCG(37, 0)), sim: topo.Simulate(f), leaves: spec.Leaf == "", state: make([]State, len(f.Cables)), last: make([]time.Duration, len(f.Cables))}
			for i := range w.state {
				w.state[i], w.last[i] = Up, -1
			}
			w.views = newTruth(t, f, w.sim, nil).views(w.leaves)
			l, memory, named, quiet := New(f), Memory{}, 0, 0
			w.after(0, w.flap)
			var decide func()
			decide = func() {
				bad := w.bad()
				parts, _ := memory.Settle(begun.Add(w.now), l.Locate(w.views))
				for _, g := range parts {
					named++
					if !slices.ContainsFunc(append([]string{g.Part}, g.Alternatives...), func(part string) bool { return w.guilty(part, bad) }) {
						t.Errorf("after %s the innocent part %s is named: %s, %q", w.now, g.Part, g.Fault, g.Evidence)
					}
				}
				if !slices.Contains(bad, true) {
					quiet++
				}
				w.after(100*time.Millisecond, decide)
			}
			w.after(0, decide)
			for len(w.queue) > 0 && w.queue[0].at < span && !t.Failed() {
				next := w.queue[0]
				w.queue = w.queue[1:]
				w.now = next.at
				next.do()
			}
			if named == 0 || quiet == 0 {
				t.Errorf("%d parts named, %d moments without a fault: this test has lost its subject", named, quiet)
			}
			t.Logf("%d parts named in %s, %d moments without a fault", named, w.now.Round(time.Second), quiet)
		})
	}
}

// TestMemory holds a part back that no node reports itself, gives it the time when it was found, and forgets it.
func TestMemory(t *testing.T) {
	var m Memory
	inferred, reported := Guilty{Part: "spine0-1", Fault: FaultCapacity}, Guilty{Part: "leaf0", Fault: FaultDark, Since: begun}
	named, wait := m.Settle(begun, []Guilty{inferred, reported})
	if len(named) != 1 || named[0].Part != "leaf0" || wait != hold {
		t.Errorf("at first %v, wait %s", named, wait)
	}
	if named, wait = m.Settle(begun.Add(hold), []Guilty{inferred}); len(named) != 1 || !named[0].Since.Equal(begun) || wait != 0 {
		t.Errorf("later %v, wait %s", named, wait)
	}
	m.Settle(begun.Add(2*hold), nil)
	if named, _ = m.Settle(begun.Add(3*hold), []Guilty{inferred}); named != nil {
		t.Errorf("found again: %v", named)
	}
}
