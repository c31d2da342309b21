package fare

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
)

// TestDrainsAgainstTwin checks in random sequences of events, most of whose routes have zero bandwidth, which groups a
// drain would strand and the end of a drain would free, by a twin that carries them out; and that the questions change
// nothing.
func TestDrainsAgainstTwin(t *testing.T) {
	stranded, freed := 0, 0
	for seed := range uint64(50) {
		g := newGenerator(seed)
		table, err := NewTable(g.config)
		if err != nil {
			t.Fatal(err)
		}
		dumb := newTwin(g.config)
		events := g.start()
		for range 60 {
			e := g.event()
			if u, ok := e.(RouteUpdate); ok && u.Attrs != nil && g.IntN(3) > 0 {
				u.Attrs.Communities, u.Attrs.Extended = []Community{Codec{}.Encode(0, netip.Addr{})}, IPv6Community{}
			}
			events = append(events, e)
			if g.IntN(2) == 0 {
				events = append(events, Avoid{pick(g, testPrefixes), g.IntN(len(g.config.Planes)), true})
			}
			if g.IntN(20) == 0 {
				drain := g.drain()
				drain.On = true
				events = append(events, drain)
			}
		}
		for i, e := range events {
			table.Step(e)
			dumb.step(e)
			if i%3 != 0 {
				continue
			}
			for _, drain := range append(dumb.ends(), g.drain()) {
				want := dumb.suppose(table, drain)
				before := stateOf(table)
				strands, frees := table.Strands(drain), table.Frees(drain)
				if drain.On && (!slices.Equal(strands, want) || frees != nil) || !drain.On && (!slices.Equal(frees, want) || strands != nil) {
					t.Fatalf("seed %d, after event %d: %+v strands %v, frees %v, want %v", seed, i, drain, strands, frees, want)
				}
				if after := stateOf(table); after != before {
					t.Fatalf("seed %d, after event %d: the question about %+v changed\n%s\nto\n%s", seed, i, drain, before, after)
				}
				if drain.On {
					stranded += len(want)
				} else {
					freed += len(want)
				}
			}
		}
	}
	if stranded < 100 || freed < 20 {
		t.Errorf("only %d stranded groups and %d freed ones: this test shows little", stranded, freed)
	}
	table, _ := bigTable(t, 1, 1, 1)
	for _, drain := range []Drain{{Scope: DrainPlane, Index: 1}, {Scope: DrainSubPort, Index: 1}, {Scope: DrainNode}} {
		if frees := table.Frees(drain); frees != nil {
			t.Errorf("the end of %+v frees %v", drain, frees)
		}
		drain.On = true
		if strands := table.Strands(drain); strands != nil {
			t.Errorf("%+v strands %v", drain, strands)
		}
	}
}

// ends returns the ends of all current drains.
func (w *twin) ends() (out []Drain) {
	for i := range w.config.Planes {
		if w.drainedP[i] {
			out = append(out, Drain{Scope: DrainPlane, Index: i})
		}
	}
	for i := range w.config.SubPorts {
		if w.drainedS[i] {
			out = append(out, Drain{Scope: DrainSubPort, Index: i})
		}
	}
	for _, node := range testNodes {
		if w.drainedN[node] {
			out = append(out, Drain{Scope: DrainNode, Node: node})
		}
	}
	return out
}

// suppose returns the table's groups whose destinations lose their last path, or their last path with bandwidth and
// without signals, by a drain, or whose destinations with zero bandwidth alone get one by its end.
func (w *twin) suppose(table *Table, drain Drain) []GroupID {
	found := map[GroupID]bool{}
	planes, subPorts, nodes := maps.Clone(w.drainedP), maps.Clone(w.drainedS), maps.Clone(w.drainedN)
	now := map[netip.Prefix]twinView{}
	for _, prefix := range testPrefixes {
		now[prefix] = w.view(prefix)
	}
	w.step(drain)
	for _, prefix := range testPrefixes {
		before, after := now[prefix], w.view(prefix)
		zero := before.rule == RuleAllZeroEqual || before.rule == RuleAllZeroUnreachable
		if id, known := table.Destination(prefix); known && (drain.On && before.reachable && (!after.reachable || before.lasting && !after.lasting) ||
			!drain.On && zero && after.lasting) {
			found[id] = true
		}
	}
	w.drainedP, w.drainedS, w.drainedN = planes, subPorts, nodes
	return slices.Sorted(maps.Keys(found))
}

// stateOf returns everything about a table that a drain may change.
func stateOf(table *Table) string {
	out := fmt.Sprintln(table.Sessions(nil), table.Stats(), table.drained, table.AvoidedBy())
	for i := range table.subPorts {
		out += fmt.Sprintln(table.SubPort(i))
	}
	for i := range table.planes {
		out += fmt.Sprintln(table.Plane(i))
	}
	for id, view := range table.Groups {
		out += fmt.Sprintln(id, view)
	}
	return out
}
