package dataplane

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// twin is what the owner wants, kept as simply as can be.
type twin struct {
	subPorts     map[string]bool
	groups       map[uint32]*farev1.Group
	destinations map[netip.Prefix]uint32
	changes      map[Object]uint64 // number of each object's last change
}

func newTwin() *twin {
	return &twin{map[string]bool{}, map[uint32]*farev1.Group{}, map[netip.Prefix]uint32{}, map[Object]uint64{}}
}

// step makes one random change, as an owner does: no destination without a group, no group deleted in use.
func (w *twin) step(random *rand.Rand, client *Client) {
	note := func(o Object, change uint64) {
		if change > 0 {
			w.changes[o] = change
		}
	}
	id := uint32(1 + random.IntN(8))
	to := dst(random.IntN(40))
	switch random.IntN(8) {
	case 0:
		device := device(random.IntN(2), random.IntN(2))
		w.subPorts[device] = random.IntN(2) == 0
		note(Object{Kind: KindSubPort, SubPort: device}, client.SetSubPort(device, w.subPorts[device]))
	case 1, 2:
		g := group(id, uint32(random.IntN(3)), uint32(random.IntN(3)), uint32(random.IntN(2)), uint32(random.IntN(2)))
		w.groups[id] = g
		note(Object{Kind: KindGroup, Group: id}, client.SetGroup(g))
	case 3:
		if !slices.Contains(slices.Collect(maps.Values(w.destinations)), id) {
			delete(w.groups, id)
			note(Object{Kind: KindGroup, Group: id}, client.DeleteGroup(id))
		}
	case 4:
		delete(w.destinations, to)
		note(Object{Kind: KindDestination, Destination: to}, client.DeleteDestination(to))
	default:
		if w.groups[id] != nil {
			w.destinations[to] = id
			note(Object{Kind: KindDestination, Destination: to}, client.SetDestination(to, id))
		}
	}
}

// contents describes what packets obey: sub-ports, each destination's weights, and how many groups there are.
func contents(state *farev1.SnapshotResponse) (down []string, weights map[string]string, groups []string) {
	text := map[uint32]string{}
	for _, g := range state.Groups {
		text[g.Id] = describe(g)
		groups = append(groups, text[g.Id])
	}
	weights = map[string]string{}
	for _, d := range state.Destinations {
		weights[d.Prefix] = text[d.Group]
	}
	for _, s := range state.SubPorts {
		if !s.Up {
			down = append(down, s.Device)
		}
	}
	slices.Sort(groups)
	return down, weights, groups
}

func describe(g *farev1.Group) string {
	s := "-"
	for _, m := range g.Members {
		s += fmt.Sprintf(" %s:%d", m.Device, m.Weight)
	}
	return s
}

func (w *twin) contents() (down []string, weights map[string]string, groups []string) {
	for device, up := range w.subPorts {
		if !up {
			down = append(down, device)
		}
	}
	slices.Sort(down)
	weights = map[string]string{}
	for prefix, id := range w.destinations {
		weights[prefix.String()] = describe(w.groups[id])
	}
	for _, g := range w.groups {
		groups = append(groups, describe(g))
	}
	slices.Sort(groups)
	return down, weights, groups
}

func (r *rig) equals(w *twin) bool {
	down, weights, groups := contents(r.dp.State())
	wantDown, wantWeights, wantGroups := w.contents()
	return slices.Equal(down, wantDown) && maps.Equal(weights, wantWeights) && slices.Equal(groups, wantGroups)
}

// inEffect says whether the last event of every object is that its last change is in effect.
func (r *rig) inEffect(w *twin) bool {
	last := map[Object]Event{}
	for _, e := range r.events {
		last[e.Object] = e
	}
	for o, change := range w.changes {
		if e := last[o]; e.Kind != InEffect || e.Change != change {
			return false
		}
	}
	return true
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
				t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { reach(t, seed, mode.breaks, mode.delays, mode.refusals) })
			}
		})
	}
}

func reach(t *testing.T, seed uint64, breaks, delays, refusals bool) {
	random := rand.New(rand.NewPCG(seed, 1))
	tune := func(c *Config) { c.Window = 1 + random.IntN(20); c.AckTimeout = 2 * time.Second }
	r := newRig(t, tune)
	want := newTwin()
	for run := range 2 { // the second one is a restarted control plane
		if run > 0 {
			_, before, _ := contents(r.dp.State())
			down := want.subPorts
			r.restart(tune)
			want = newTwin()
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
			for device, up := range down { // what nobody declares stays: declare it
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
			case n < 12: // let the other side work
				r.until("progress", func() bool { return r.client.Status().Queued < 20 })
			}
			r.events = r.client.Take(r.events)
		}
		r.dp.RefuseNext(0, codes.OK, "")
		if refusals {
			r.connected()
			r.dp.BreakStream() // what was refused is tried again
		}
		r.until(fmt.Sprintf("desired state (run %d, seed %d)", run, seed), func() bool { return r.equals(want) })
		r.until("events", func() bool {
			r.events = r.client.Take(r.events)
			return r.inEffect(want)
		})
		r.quiet()
		r.dp.DelayAcks(0)
	}
	if c := r.dp.Tally(); !refusals && c.Refused > 0 {
		t.Errorf("%d operations were refused, though none had to be: wrong order", c.Refused)
	}
}

// TestDiff: random pairs of states; the steps turn one into the other, no step leaves a destination without its group,
// and there are no more of them than there are differences.
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
			if !sameGroup(have.Groups[id], want.Groups[id]) {
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
			case GroupSet:
				have.Groups[step.Group] = want.Groups[step.Group]
			case DestinationSet:
				have.Destinations[step.Destination] = want.Destinations[step.Destination]
			case DestinationDelete:
				delete(have.Destinations, step.Destination)
			case GroupDelete:
				delete(have.Groups, step.Group)
			}
			for destination, group := range have.Destinations {
				if have.Groups[group] == nil {
					t.Fatalf("seed %d: after %v, %v has no group", seed, step, destination)
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
	s := State{SubPorts: map[string]bool{}, Groups: map[uint32]*farev1.Group{}, Destinations: map[netip.Prefix]uint32{}}
	for n := range 4 {
		if random.IntN(3) > 0 {
			s.SubPorts[device(n/2, n%2)] = random.IntN(2) == 0
		}
	}
	for id := uint32(1); id < 10; id++ {
		if random.IntN(3) > 0 {
			s.Groups[id] = group(id, uint32(random.IntN(2)), uint32(random.IntN(2)))
		}
	}
	for n := range 40 {
		if id := uint32(1 + random.IntN(14)); s.Groups[id] != nil {
			s.Destinations[dst(n)] = id
		}
	}
	return s
}
