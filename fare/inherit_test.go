package fare

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/fared/fared/internal/testkit/gate"
)

// TestInheritTogether checks that destinations that a table inherits in one call have the state of destinations that
// are inherited one by one, each with entries of its own, then and after more events.
func TestInheritTogether(t *testing.T) {
	for seed := range uint64(gate.Count(t, gate.Models, 200, 2000)) {
		g := newGenerator(seed)
		var tables [4]*Table // two to inherit from, the heir, its twin
		for i := range tables {
			var err error
			if tables[i], err = NewTable(g.config); err != nil {
				t.Fatal(err)
			}
		}
		together, alone := tables[2], tables[3]
		for _, ev := range g.start() {
			for _, table := range tables {
				table.Step(ev)
			}
		}
		for range 20 + g.IntN(100) {
			ev := g.event()
			switch ev := ev.(type) {
			case RouteUpdate:
				if ev.Attrs != nil && g.IntN(3) > 0 { // another origin, and few different entries
					ev.Attrs = &Attributes{ASPath: append(ev.Attrs.ASPath, 65010+uint32(g.IntN(2)))}
				}
				tables[g.IntN(2)].Step(ev)
			case RouteWithdraw:
				tables[g.IntN(2)].Step(ev)
			case SessionUp, SessionDown, LinkState:
				for _, table := range tables {
					table.Step(ev)
				}
			}
		}
		var heirs []Heir
		for i := range g.config.Sessions {
			if from := g.IntN(8); from < 7 && together.sessions[i].up {
				heirs = append(heirs, Heir{Session: i, Was: tables[from/4%2], At: i})
			}
		}
		more := map[netip.Prefix][]InheritedRoute{}
		if missing := g.IntN(len(g.config.Sessions)); together.sessions[missing].up && !slices.ContainsFunc(heirs, func(h Heir) bool { return h.Session == missing }) {
			more[pick(g, testPrefixes)] = []InheritedRoute{{Session: missing, Attrs: &Attributes{ASPath: []uint32{65000, 65001}}}}
		}
		together.Inherit(testPrefixes, heirs, more)
		for i := range testPrefixes {
			alone.Inherit(testPrefixes[i:i+1], heirs, more)
		}
		for _, events := range []int{0, 30} {
			for range events {
				ev := g.event()
				alone.Step(ev)
				together.Step(ev)
			}
			if want, got := inherited(alone), inherited(together); !slices.Equal(want, got) {
				t.Fatalf("seed %d, %d events later, one by one (-), together (+):\n%s", seed, events, cmp.Diff(want, got))
			}
		}
		for i, table := range tables[:2] {
			for prefix := range table.byPrefix.keys() {
				d, _ := table.byPrefix.get(prefix)
				for _, set := range d.sets {
					if set.heir != nil {
						t.Fatalf("seed %d: table %d retains another table", seed, i)
					}
				}
			}
		}
	}
}

// inherited returns the state of a table.
func inherited(table *Table) (out []string) {
	out = append(out, fmt.Sprint(table.live, table.leftovers, table.pool.set.n, table.Sessions(nil)))
	for i := range table.sessions {
		out = append(out, fmt.Sprint("session ", i, " ", table.sessions[i].routes))
	}
	for id, view := range table.Groups {
		out = append(out, fmt.Sprintf("group %d %+v", id, view))
	}
	for prefix, id := range table.Destinations {
		out = append(out, fmt.Sprintf("%s %d %+v", prefix, id, table.Describe(prefix)))
		for i := range table.sessions {
			out = append(out, fmt.Sprintf("%s over %d: %+v", prefix, i, table.Route(i, prefix)))
		}
	}
	return out
}

// TestInheritOrigins checks that destinations with the same groups in two tables have a group each if their origins,
// which the two tables count alike, are one in one case and two in the other.
func TestInheritOrigins(t *testing.T) {
	c := Config{Planes: []string{"p0", "p1"}}
	for i, plane := range c.Planes {
		c.SubPorts = append(c.SubPorts, SubPort{Device: plane, Plane: i, Speed: 400e9})
		c.Sessions = append(c.Sessions, Session{Name: plane, SubPort: i})
	}
	var tables [3]*Table // the last one inherits
	for i := range tables {
		tables[i], _ = NewTable(c)
		for s := range c.Sessions {
			tables[i].Step(LinkState{SubPort: s, Up: true})
			tables[i].Step(SessionUp{Session: s, Generation: 1, Node: testNodes[s], PeerAS: 65000})
		}
	}
	for d, origins := range [][2]uint32{{65010, 65010}, {65010, 65011}} {
		for s, as := range origins {
			tables[s].Step(RouteUpdate{Session: s, Generation: 1, Prefix: testPrefixes[d], Attrs: &Attributes{ASPath: []uint32{65000, as}}})
		}
	}
	tables[2].Inherit(testPrefixes[:2], []Heir{{0, tables[0], 0}, {1, tables[1], 1}}, nil)
	for d, want := range []int{1, 2} {
		if got := tables[2].Describe(testPrefixes[d]).Origins; got != want {
			t.Errorf("destination %d has %d origins, want %d", d, got, want)
		}
	}
}
