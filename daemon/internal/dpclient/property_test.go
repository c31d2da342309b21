package dpclient

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// twin is the owner's wanted state in the simplest form.
type twin struct {
	subPorts     map[string]bool
	vectors      map[uint32]*farev1.Vector
	destinations map[Destination]uint32
	changes      map[Object]uint64 // number of each object's last change
	sources      []netip.Prefix    // of the source groups; empty if there is only one
}

func newTwin(sources []netip.Prefix) *twin {
	return &twin{map[string]bool{}, map[uint32]*farev1.Vector{}, map[Destination]uint32{}, map[Object]uint64{}, sources}
}

// twoSources are the names of the source groups of twoSourceGroups. The second has no p0s0.
var twoSources = []netip.Prefix{netip.MustParsePrefix("10.255.0.1/32"), netip.MustParsePrefix("10.255.0.2/32")}

func twoSourceGroups(c *Config) {
	c.Forwarding.Loopbacks = []string{"10.255.0.1/32", "10.255.0.2/32"}
	c.Forwarding.SourceGroups = []*farev1.SourceGroup{
		{Loopbacks: []string{"10.255.0.1/32"}, Devices: []string{"p0s0", "p0s1", "p1s0", "p1s1"}},
		{Loopbacks: []string{"10.255.0.2/32"}, Devices: []string{"p0s1", "p1s0", "p1s1"}},
	}
}

// source returns the source group that a vector serves.
func (w *twin) source(id uint32) netip.Prefix {
	if len(w.sources) == 0 {
		return netip.Prefix{}
	}
	return w.sources[id%2]
}

// step makes one random change, like an owner: no destination without a vector, no deletion of a vector in use.
func (w *twin) step(random *rand.Rand, client *Client) {
	note := func(o Object, change uint64) {
		if change > 0 {
			w.changes[o] = change
		}
	}
	id := uint32(1 + random.IntN(8))
	to := dst(random.IntN(40))
	to.Source = w.source(id)
	switch random.IntN(8) {
	case 0:
		device := device(random.IntN(2), random.IntN(2))
		w.subPorts[device] = random.IntN(2) == 0
		note(Object{Kind: KindSubPort, SubPort: device}, client.SetSubPort(device, w.subPorts[device]))
	case 1, 2:
		g := vector(id, uint32(random.IntN(3)), uint32(random.IntN(3)), uint32(random.IntN(2)), uint32(random.IntN(2)))
		if g.Source = wireSource(w.source(id)); len(w.sources) > 0 && id%2 == 1 {
			g.Members = slices.DeleteFunc(g.Members, func(m *farev1.VectorMember) bool { return m.Device == "p0s0" })
		}
		w.vectors[id] = g
		note(Object{Kind: KindVector, Vector: id}, client.SetVector(g))
	case 3:
		if !slices.Contains(slices.Collect(maps.Values(w.destinations)), id) {
			delete(w.vectors, id)
			note(Object{Kind: KindVector, Vector: id}, client.DeleteVector(id))
		}
	case 4:
		delete(w.destinations, to)
		note(Object{Kind: KindDestination, Destination: to}, client.DeleteDestination(to))
	default:
		if w.vectors[id] != nil {
			w.destinations[to] = id
			note(Object{Kind: KindDestination, Destination: to}, client.SetDestination(to, id))
		}
	}
}

// contents returns the state that determines forwarding: sub-ports, each destination's weights, and the number of
// vectors.
func contents(state *farev1.SnapshotResponse) (down []string, weights map[string]string, vectors []string) {
	text := map[uint32]string{}
	for _, g := range state.Vectors {
		text[g.Id] = describe(g)
		vectors = append(vectors, text[g.Id])
	}
	weights = map[string]string{}
	for _, d := range state.Destinations {
		weights[d.Prefix+" "+d.Source] = text[d.Vector]
	}
	for _, s := range state.SubPorts {
		if !s.Up {
			down = append(down, s.Device)
		}
	}
	slices.Sort(vectors)
	return down, weights, vectors
}

func describe(g *farev1.Vector) string {
	s := "-" + g.Source
	for _, m := range g.Members {
		s += fmt.Sprintf(" %s:%d", m.Device, m.Weight)
	}
	return s
}

func (w *twin) contents() (down []string, weights map[string]string, vectors []string) {
	for device, up := range w.subPorts {
		if !up {
			down = append(down, device)
		}
	}
	slices.Sort(down)
	weights = map[string]string{}
	for key, id := range w.destinations {
		weights[key.Prefix.String()+" "+wireSource(key.Source)] = describe(w.vectors[id])
	}
	for _, g := range w.vectors {
		vectors = append(vectors, describe(g))
	}
	slices.Sort(vectors)
	return down, weights, vectors
}

func (r *rig) equals(w *twin) bool {
	down, weights, vectors := contents(r.dp.State())
	wantDown, wantWeights, wantVectors := w.contents()
	return slices.Equal(down, wantDown) && maps.Equal(weights, wantWeights) && slices.Equal(vectors, wantVectors)
}

// late lists the objects whose last event is not that their last change is in effect.
func (r *rig) late(w *twin) []string {
	last := map[Object]Event{}
	for _, e := range r.events {
		last[e.Object] = e
	}
	var late []string
	for o, change := range w.changes {
		if e := last[o]; e.Kind != InEffect || e.Change != change {
			late = append(late, fmt.Sprintf("change %d of %s, last event %+v", change, o, e))
		}
	}
	return late
}

// touched reports whether the owner has ever declared a destination, named as in contents.
func touched(w *twin, name string) bool {
	for o := range w.changes {
		if o.Kind == KindDestination && o.Destination.Prefix.String()+" "+wireSource(o.Destination.Source) == name {
			return true
		}
	}
	return false
}

func TestDesiredIsReached(t *testing.T) {
	for _, mode := range []struct {
		name                     string
		breaks, delays, refusals bool
	}{
		{"calm", false, false, false}, {"breaks", true, false, false}, {"delays", true, true, false}, {"refusals", true, true, true},
	} {
		t.Run(mode.name, func(t *testing.T) {
			for seed := range uint64(6) {
				sources := seed % 3 // none, two, two after the restart
				t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { reach(t, seed, sources, mode.breaks, mode.delays, mode.refusals) })
			}
		})
	}
}

func reach(t *testing.T, seed, sources uint64, breaks, delays, refusals bool) {
	random := rand.New(rand.NewPCG(seed, 1))
	var names []netip.Prefix
	tune := func(c *Config) {
		c.Window = 1 + random.IntN(20)
		if sources == 1 {
			names = twoSources
			twoSourceGroups(c)
		}
		if sources == 2 {
			sources = 1 // after the restart
		}
	}
	r := newRig(t, tune)
	want := newTwin(names)
	for run := range 2 { // the second one is a restarted control plane
		if run > 0 {
			_, before, _ := contents(r.dp.State())
			down := want.subPorts
			r.restart(tune)
			want = newTwin(names)
			r.connected()
			for range 150 {
				want.step(random, r.client)
			}
			r.quiet()
			_, after, _ := contents(r.dp.State())
			for prefix, weights := range before {
				if after[prefix] != weights {
					t.Fatalf("%s: %q was in effect, %q is, while removals were held", prefix, weights, after[prefix])
				}
			}
			r.client.Transaction(func(t *Transaction) { t.ReleaseChanges() })
			for range 150 {
				want.step(random, r.client)
			}
			r.quiet()
			_, after, _ = contents(r.dp.State())
			_, declared, _ := want.contents()
			for prefix, weights := range declared {
				if after[prefix] != weights {
					t.Fatalf("%s: %q is in effect, %q was declared, and changes are released", prefix, after[prefix], weights)
				}
			}
			for prefix, weights := range before {
				if !touched(want, prefix) && after[prefix] != weights {
					t.Fatalf("%s: %q was in effect, %q is, and it was never declared", prefix, weights, after[prefix])
				}
				if _, there := after[prefix]; !there {
					t.Fatalf("%s was removed while removals were held", prefix)
				}
			}
			for device, up := range down { // undeclared sub-ports stay unchanged, so declare them
				if _, ok := want.subPorts[device]; !ok {
					want.subPorts[device] = up
					want.changes[Object{Kind: KindSubPort, SubPort: device}] = r.client.SetSubPort(device, up)
				}
			}
		}
		r.client.ReleaseRemovals(true)
		for range 400 {
			want.step(random, r.client)
			switch n := random.IntN(100); {
			case breaks && n == 0:
				r.dp.BreakStream()
			case breaks && n == 1:
				r.dp.Reset()
			case delays && n == 2:
				r.dp.DelayAcks(time.Duration(random.IntN(300)) * time.Microsecond)
			case refusals && n == 3:
				r.dp.RefuseNext(random.IntN(4), codes.Internal, "injected")
			case n < 12: // give the other side time
				r.until("progress", func() bool { return r.client.Status().Queued < 20 })
			}
			r.take()
		}
		r.dp.RefuseNext(0, codes.OK, "")
		if refusals {
			r.connected()
			r.dp.BreakStream() // refused operations are retried
		}
		r.until(fmt.Sprintf("desired state (run %d, seed %d)", run, seed), func() bool { return r.equals(want) })
		var late []string
		defer func() {
			if t.Failed() {
				t.Log("late: ", strings.Join(late, "\n"))
			}
		}()
		r.until(fmt.Sprintf("events (run %d, seed %d)", run, seed), func() bool {
			r.take()
			late = r.late(want)
			return len(late) == 0
		})
		r.quiet()
		r.dp.DelayAcks(0)
	}
	if c := r.dp.Tally(); !refusals && c.Refused > 0 {
		t.Errorf("%d operations were refused, though none had to be: wrong order", c.Refused)
	}
}

// TestDiff checks for random pairs of states that the steps turn one into the other, that no step leaves a destination
// without its vector, and that there are no more steps than differences.
func TestDiff(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 2))
		have, want := randomState(random), randomState(random)
		differences := 0
		for device, up := range want.SubPorts {
			if was, ok := have.SubPorts[device]; !ok || was != up {
				differences++
			}
		}
		for id := uint32(1); id < 10; id++ {
			if !sameVector(have.Vectors[id], want.Vectors[id]) {
				differences++
			}
		}
		for n := range 40 {
			if have.Destinations[dst(n)] != want.Destinations[dst(n)] {
				differences++
			}
		}
		steps := Diff(have, want)
		if len(steps) != differences {
			t.Fatalf("seed %d: %d steps for %d differences: %v", seed, len(steps), differences, steps)
		}
		for _, step := range steps {
			switch step.Class {
			case SubPortSet:
				have.SubPorts[step.SubPort] = want.SubPorts[step.SubPort]
			case VectorSet:
				have.Vectors[step.Vector] = want.Vectors[step.Vector]
			case DestinationSet:
				have.Destinations[step.Destination] = want.Destinations[step.Destination]
			case DestinationDelete:
				delete(have.Destinations, step.Destination)
			case VectorDelete:
				delete(have.Vectors, step.Vector)
			}
			for destination, vector := range have.Destinations {
				if have.Vectors[vector] == nil {
					t.Fatalf("seed %d: after %v, %v has no vector", seed, step, destination)
				}
			}
		}
		for device, up := range want.SubPorts {
			if have.SubPorts[device] != up {
				t.Fatalf("seed %d: sub-port %s ended %v", seed, device, !up)
			}
		}
		if again := Diff(have, want); len(again) != 0 {
			t.Fatalf("seed %d: after all steps %v are left", seed, again)
		}
	}
}

func randomState(random *rand.Rand) State {
	s := State{SubPorts: map[string]bool{}, Vectors: map[uint32]*farev1.Vector{}, Destinations: map[Destination]uint32{}}
	for n := range 4 {
		if random.IntN(3) > 0 {
			s.SubPorts[device(n/2, n%2)] = random.IntN(2) == 0
		}
	}
	for id := uint32(1); id < 10; id++ {
		if random.IntN(3) > 0 {
			s.Vectors[id] = vector(id, uint32(random.IntN(2)), uint32(random.IntN(2)))
		}
	}
	for n := range 40 {
		if id := uint32(1 + random.IntN(14)); s.Vectors[id] != nil {
			s.Destinations[dst(n)] = id
		}
	}
	return s
}
