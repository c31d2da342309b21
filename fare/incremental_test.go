package fare

import (
	"bytes"
	"fmt"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

// follower applies changes as a consumer would, and finds impossible ones.
type follower struct {
	groups       map[GroupID]GroupView
	destinations map[netip.Prefix]GroupID
	readvertised map[netip.Prefix]string
}

func (f *follower) apply(t *testing.T, table *Table, changes []Change) {
	t.Helper()
	for _, c := range changes {
		switch c.Kind {
		case GroupSet:
			f.groups[c.Group] = copyView(table.Group(c.Group))
		case GroupDelete:
			for d, g := range f.destinations {
				if g == c.Group {
					t.Fatalf("group %d deleted under %s", g, d)
				}
			}
			if _, ok := f.groups[c.Group]; !ok {
				t.Fatalf("group %d deleted twice", c.Group)
			}
			delete(f.groups, c.Group)
		case DestinationSet:
			if _, ok := f.groups[c.Group]; !ok {
				t.Fatalf("%s moved to group %d, which is not set", c.Destination, c.Group)
			}
			f.destinations[c.Destination] = c.Group
		case DestinationDelete:
			if _, ok := f.destinations[c.Destination]; !ok {
				t.Fatalf("%s deleted twice", c.Destination)
			}
			delete(f.destinations, c.Destination)
		case Readvertise:
			now := readvertisedText(table, c.Destination)
			if f.readvertised[c.Destination] == now {
				t.Fatalf("%s readvertised without a change: %s", c.Destination, now)
			}
			f.readvertised[c.Destination] = now
		}
	}
}

func readvertisedText(table *Table, prefix netip.Prefix) string {
	if b, path, ok := table.Readvertise(prefix); ok {
		communities, wide := table.ReadvertisedCommunities(prefix)
		return fmt.Sprint(b, path, communities, wide, table.ReadvertisedSignals(prefix))
	}
	return ""
}

func copyView(v GroupView) GroupView {
	v.Planes = slices.Clone(v.Planes)
	for i := range v.Planes {
		v.Planes[i].SubPorts = slices.Clone(v.Planes[i].SubPorts)
	}
	return v
}

func TestIncrementalIsFullRecompute(t *testing.T) {
	sequences := gate.Count(t, gate.Models, 300, 2000)
	base := rand.Uint64()
	for n := range sequences {
		seed := base + uint64(n)
		if !t.Run("", func(t *testing.T) { checkSequence(t, seed) }) {
			t.Fatalf("seed %d", seed)
		}
	}
}

func checkSequence(t *testing.T, seed uint64) {
	g := newGenerator(seed)
	table, err := NewTable(g.config)
	if err != nil {
		t.Fatal(err)
	}
	dumb := newTwin(g.config)
	f := &follower{map[GroupID]GroupView{}, map[netip.Prefix]GroupID{}, map[netip.Prefix]string{}}
	events := g.start()
	for range 60 {
		events = append(events, g.event())
	}
	for i, e := range events {
		f.apply(t, table, table.Step(e))
		dumb.step(e)
		for _, prefix := range testPrefixes {
			compare(t, table, f, dumb.view(prefix), prefix)
		}
		if i%8 == 0 || i == len(events)-1 {
			checkTotals(t, table, dumb, f)
		}
		if t.Failed() {
			t.Fatalf("seed %d, after event %d: %#v", seed, i, e)
		}
	}
}

func compare(t *testing.T, table *Table, f *follower, want twinView, prefix netip.Prefix) {
	t.Helper()
	id, known := f.destinations[prefix]
	if now, ok := table.Destination(prefix); ok != known || now != id {
		t.Fatalf("%s: told group %d %v, is %d %v", prefix, id, known, now, ok)
	}
	if !known {
		if want.exists {
			t.Fatalf("%s: unknown", prefix)
		}
		return
	}
	v := f.groups[id]
	if prefix != testPrefixes[0] { // one explained destination is enough
	} else if d := table.Describe(prefix); d.Group != id || d.Rule != v.Rule || d.Reachable != v.Reachable || len(d.String()) == 0 {
		t.Fatalf("%s: described as %v", prefix, d)
	}
	if v.Reachable != want.reachable || v.Rule != want.rule || v.Origins != want.origins || v.Reachable == (v.Reason != ReasonUsed) {
		t.Fatalf("%s: %+v, want %v %v, %d origins", prefix, v, want.reachable, want.rule, want.origins)
	}
	var ignored []string
	for _, x := range v.Ignored {
		ignored = append(ignored, fmt.Sprint(x.Session, " ", x.Reason))
	}
	if slices.Sort(ignored); !slices.Equal(ignored, want.ignored) {
		t.Fatalf("%s: ignored bandwidth %q, want %q", prefix, ignored, want.ignored)
	}
	for i, p := range v.Planes {
		if rat(uint64(p.Bandwidth)).Cmp(want.bandwidth[i]) != 0 || rat(p.Capacity).Cmp(want.capacity[i]) != 0 ||
			(p.Capacity == 0) != (p.Reason != ReasonUsed) || len(p.SubPorts) != len(want.subPorts[i]) {
			t.Fatalf("%s plane %d: %+v, want %v %v %v", prefix, i, p, want.bandwidth[i], want.capacity[i], want.subPorts[i])
		}
		if spared := p.Reason == ReasonAvoided; spared != want.spared[i] {
			t.Fatalf("%s plane %d: %s, avoided: %v", prefix, i, p.Reason, want.spared[i])
		}
		var sum, common uint64
		for k, w := range p.SubPorts {
			sum += w.Weight
			common = gcd(common, w.Weight)
			if k > 0 && p.SubPorts[k-1].SubPort >= w.SubPort {
				t.Fatalf("%s plane %d: sub-ports out of order: %v", prefix, i, p.SubPorts)
			}
		}
		if common > 1 {
			t.Fatalf("%s plane %d: not in lowest terms: %v", prefix, i, p.SubPorts)
		}
		for _, w := range p.SubPorts {
			part := new(big.Rat).Quo(rat(w.Weight), rat(sum))
			if exact := want.subPorts[i][w.SubPort]; exact == nil || part.Cmp(exact) != 0 && (!nearly(part, exact) || fits(want.subPorts[i])) {
				t.Fatalf("%s plane %d: %v, want %v", prefix, i, p.SubPorts, want.subPorts[i])
			}
		}
	}
	if table.config.Role == RoleLeaf {
		readvertised := ""
		if want.reachable {
			readvertised = fmt.Sprint(Bandwidth(want.total.Num().Uint64()), want.path, want.communities, want.wide, want.signals)
		}
		if f.readvertised[prefix] != readvertised || readvertisedText(table, prefix) != readvertised {
			t.Fatalf("%s: readvertised %q, is %q, want %q", prefix, f.readvertised[prefix], readvertisedText(table, prefix), readvertised)
		}
	}
}

// nearly allows the error of splitNearly, 2^-40 of the plane; only weights that
// do not fit 64 bits have one.
func nearly(a, b *big.Rat) bool {
	diff := new(big.Rat).Sub(a, b)
	return diff.Abs(diff).Cmp(big.NewRat(1, 1<<40)) < 0
}

// fits reports whether the exact weights are small enough that no intermediate
// result can have overflowed.
func fits(parts map[int]*big.Rat) bool {
	common := big.NewInt(1)
	for _, p := range parts {
		d := p.Denom()
		common.Mul(common, new(big.Int).Div(d, new(big.Int).GCD(nil, nil, common, d)))
	}
	return common.BitLen() <= 32
}

func checkTotals(t *testing.T, table *Table, dumb *twin, f *follower) {
	t.Helper()
	stats := table.Stats()
	for _, tally := range []Tally{stats.Events, stats.Communities} {
		checkTally(t, tally)
	}
	counted := map[string]uint64{}
	for _, prefix := range testPrefixes {
		for _, x := range dumb.view(prefix).ignored {
			counted[x]++
		}
	}
	for _, x := range table.Ignored() {
		key := fmt.Sprint(x.Session, " ", x.Reason)
		if counted[key] != x.Routes || !slices.Contains(dumb.view(x.Example).ignored, key) {
			t.Fatalf("%s: %d routes such as %s, want %d", key, x.Routes, x.Example, counted[key])
		}
		delete(counted, key)
	}
	if len(counted) > 0 {
		t.Fatalf("ignored bandwidth that is not counted: %v", counted)
	}
	avoided := make([]int, len(table.planes))
	for _, id := range f.destinations {
		for p, plane := range f.groups[id].Planes {
			if plane.Reason == ReasonAvoided {
				avoided[p]++
			}
		}
	}
	if got := table.AvoidedBy(); !slices.Equal(got, avoided) {
		t.Fatalf("planes are avoided toward %v destinations, want %v", got, avoided)
	}
	live := 0
	for i, v := range table.Sessions(nil) {
		checkTally(t, v.Routes)
		checkTally(t, v.Communities)
		if int(v.Routes.Received) != len(dumb.routes[i]) {
			t.Fatalf("session %d has %d routes, want %d", i, v.Routes.Received, len(dumb.routes[i]))
		}
		live += len(dumb.routes[i])
	}
	if stats.Routes != live || stats.Groups != len(f.groups) || stats.Destinations != len(f.destinations) {
		t.Fatalf("%+v, want %d routes, %d groups, %d destinations", stats, live, len(f.groups), len(f.destinations))
	}
	leftovers, refs, members := 0, 0, 0
	seen := map[string]bool{}
	table.Groups(func(id GroupID, _ GroupView) bool {
		g := table.groups.get(id)
		if key := fmt.Sprint(g.entries); seen[key] {
			t.Fatalf("two groups of %s", key)
		} else {
			seen[key] = true
		}
		for i := range g.entries {
			refs += g.size
			if !table.alive(&g.entries[i]) {
				leftovers += g.size
			}
		}
		for d := g.members; d != nil; d = d.next {
			if members++; len(d.sets) != len(g.entries) {
				t.Fatalf("%s has %d sets of %d", d.prefix, len(d.sets), len(g.entries))
			}
		}
		return true
	})
	for _, head := range table.pool.set.buckets {
		for a := head; a != nil; a = a.next {
			refs -= a.refs
		}
	}
	if stats.Leftovers != leftovers || refs != 0 || members != stats.Destinations {
		t.Fatalf("leftovers %d, want %d; references off by %d; %d members of %d", stats.Leftovers, leftovers, refs, members, stats.Destinations)
	}
}

func checkTally(t *testing.T, tally Tally) {
	t.Helper()
	sum := tally.Used
	for r := range Reasons {
		sum += tally.Reason(r)
	}
	if sum != tally.Received {
		t.Fatalf("received %d is not the sum %d: %+v", tally.Received, sum, tally)
	}
}

// TestSameEventsSameBytes replays the same events twice, the second time from a
// recording.
func TestSameEventsSameBytes(t *testing.T) {
	for seed := range uint64(50) {
		g := newGenerator(seed)
		events := g.start()
		for range 300 {
			events = append(events, g.event())
		}
		run := func(pass func(Event) Event) []byte {
			table, err := NewTable(g.config)
			if err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			for _, e := range events {
				for _, c := range table.Step(pass(e)) {
					fmt.Fprintln(&out, c, table.Group(c.Group), readvertisedText(table, c.Destination))
				}
			}
			for p, id := range table.Destinations {
				fmt.Fprintln(&out, p, id, table.Describe(p))
			}
			fmt.Fprintln(&out, table.Stats(), table.Sessions(nil))
			return out.Bytes()
		}
		first := run(func(e Event) Event { return e })
		second := run(func(e Event) Event {
			line, err := MarshalEvent(e)
			if err != nil {
				t.Fatal(err)
			}
			if e, err = UnmarshalEvent(line); err != nil {
				t.Fatal(err)
			}
			return e
		})
		if !bytes.Equal(first, second) {
			t.Fatalf("seed %d: two runs differ", seed)
		}
	}
}
