package fare

import (
	"fmt"
	"net/netip"
	"testing"
)

// bigTable returns a server of planes x subPorts with every session up to one
// leaf per plane and the same 400G route to n destinations on each session.
func bigTable(t testing.TB, planes, subPorts, n int) (*Table, []netip.Prefix) {
	c := Config{}
	for p := range planes {
		c.Planes = append(c.Planes, fmt.Sprint("p", p))
		for range subPorts {
			c.Sessions = append(c.Sessions, Session{Name: fmt.Sprint("s", len(c.Sessions)), SubPort: len(c.SubPorts)})
			c.SubPorts = append(c.SubPorts, SubPort{Device: fmt.Sprint("d", len(c.SubPorts)), Plane: p, Speed: 400e9})
		}
	}
	table, err := NewTable(c)
	if err != nil {
		t.Fatal(err)
	}
	prefixes := make([]netip.Prefix, n)
	for i := range prefixes {
		prefixes[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 128, byte(i >> 8), byte(i)}), 32)
	}
	for i := range c.Sessions {
		leaf := byte(i / subPorts)
		table.Step(LinkState{SubPort: i, Up: true})
		table.Step(SessionUp{i, 1, netip.AddrFrom4([4]byte{10, 0, 0, leaf}), 65000})
		attrs := route(Bandwidth(subPorts) * 400e9)
		for _, p := range prefixes {
			table.Step(RouteUpdate{i, 1, p, attrs})
		}
	}
	return table, prefixes
}

func route(b Bandwidth) *Attributes {
	return &Attributes{Communities: []Community{Codec{}.Encode(b, netip.Addr{})}, ASPath: []uint32{65000, 64000}}
}

// TestLocalFailureCostsGroups verifies that no change of a local failure names
// a destination, whatever their number.
func TestLocalFailureCostsGroups(t *testing.T) {
	const destinations, values = 16384, 5
	table, prefixes := bigTable(t, 4, 2, destinations)
	for i, p := range prefixes {
		table.Step(RouteUpdate{0, 1, p, route(Bandwidth(i%values+1) * 100e9)})
	}
	if n := table.Stats().Groups; n != values {
		t.Fatalf("%d groups, want %d", n, values)
	}
	for _, e := range []Event{
		LinkState{SubPort: 0}, LinkState{SubPort: 0, Up: true},
		Drain{Scope: DrainPlane, Index: 1, On: true}, Drain{Scope: DrainPlane, Index: 1},
		Drain{Scope: DrainNode, Node: table.sessions[7].node, On: true}, SessionDown{Session: 0, Generation: 1}, SessionDown{Session: 1, Generation: 1},
	} {
		changes := table.Step(e)
		if len(changes) != values {
			t.Errorf("%#v: %d changes, want one for each of %d groups", e, len(changes), values)
		}
		for _, c := range changes {
			if c.Kind != GroupSet {
				t.Errorf("%#v: %v", e, c)
			}
		}
	}
	// Leftovers of both sessions remain until their destination is touched, and
	// are all removed after end-of-RIB.
	if n := table.Stats().Leftovers; n != 2*destinations {
		t.Errorf("%d leftovers", n)
	}
	table.Step(SessionUp{0, 2, netip.MustParseAddr("10.0.0.0"), 65000})
	table.Step(EndOfRIB{0, 2})
	if s := table.Stats(); s.Leftovers != 0 || s.Groups != 1 || s.Destinations != destinations {
		t.Errorf("after end-of-RIB: %+v", s)
	}
}

// TestLeftoversAreBounded verifies that a session that flaps, announces other
// prefixes each time and never sends end-of-RIB does not fill memory.
func TestLeftoversAreBounded(t *testing.T) {
	table, _ := bigTable(t, 2, 1, 1)
	for generation := uint64(2); generation < 40; generation++ {
		table.Step(SessionUp{0, generation, netip.MustParseAddr("10.0.0.0"), 65000})
		for i := range 1000 {
			p := netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(generation), byte(i >> 8), byte(i)}), 32)
			table.Step(RouteUpdate{0, generation, p, route(400e9)})
		}
		if s := table.Stats(); s.Leftovers > s.Routes+leftoversAllowed+1000 || s.Destinations > 2*leftoversAllowed {
			t.Fatalf("generation %d: %+v", generation, s)
		}
	}
}

// TestBurstIsNotKept verifies that the records of a burst of destinations, each with its own group and attributes, are
// kept for new ones up to a bound.
func TestBurstIsNotKept(t *testing.T) {
	table, prefixes := bigTable(t, 1, 1, 2*recycled)
	for i, p := range prefixes {
		table.Step(RouteUpdate{0, 1, p, route(Bandwidth(i+1) * 1e9)})
	}
	if n := table.Stats().Groups; n != len(prefixes) {
		t.Fatalf("%d groups of %d destinations", n, len(prefixes))
	}
	for _, p := range prefixes {
		table.Step(RouteWithdraw{0, 1, p})
	}
	if d, g, a := len(table.free), len(table.groups.free), len(table.pool.free); d != recycled || g != recycled || a != recycled {
		t.Errorf("%d destinations, %d groups and %d attributes are kept, want %d of each", d, g, a, recycled)
	}
}

// TestAvoidedAreBounded verifies the bound of destinations with avoided planes, and that an end makes room.
func TestAvoidedAreBounded(t *testing.T) {
	table, _ := bigTable(t, 2, 1, 1)
	prefix := func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}), 32)
	}
	for i := range MaxAvoided + 1 {
		table.Step(Avoid{prefix(i), 0, true})
	}
	table.Step(Avoid{prefix(0), 1, true})
	stats := table.Stats()
	if got := stats.Events.Reason(ReasonFull); got != 1 || table.Avoided(prefix(MaxAvoided), 0) || !table.Avoided(prefix(0), 1) {
		t.Errorf("%d events refused, the last destination avoided: %v, the first by two planes: %v", got, table.Avoided(prefix(MaxAvoided), 0), table.Avoided(prefix(0), 1))
	}
	for _, plane := range []int{0, 1} {
		table.Step(Avoid{prefix(0), plane, false})
	}
	if table.Step(Avoid{prefix(MaxAvoided), 1, true}); !table.Avoided(prefix(MaxAvoided), 1) {
		t.Error("an end made no room")
	}
}

func TestSteadyStateAllocatesNothing(t *testing.T) {
	table, prefixes := bigTable(t, 8, 4, 1024)
	low, high := route(400e9), route(1600e9)
	flip := 0
	for name, step := range map[string]func(){
		"route": func() {
			attrs := low
			if flip++; flip%2 == 0 {
				attrs = high
			}
			for _, p := range prefixes[:16] {
				table.Step(RouteUpdate{3, 1, p, attrs})
			}
		},
		"link": func() {
			flip++
			table.Step(LinkState{SubPort: 5, Up: flip%2 == 0})
		},
		"drain": func() {
			flip++
			table.Step(Drain{Scope: DrainPlane, Index: 2, On: flip%2 == 0})
		},
		"avoid": func() {
			flip++
			table.Step(Avoid{prefixes[5], 3, flip%2 == 0})
		},
		"withdraw and back": func() {
			table.Step(RouteWithdraw{9, 1, prefixes[7]})
			table.Step(RouteUpdate{9, 1, prefixes[7], high})
		},
	} {
		for range 4 {
			step()
		}
		if n := testing.AllocsPerRun(200, step); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkRouteUpdate(b *testing.B) {
	for _, n := range []int{1, 16384} {
		b.Run(fmt.Sprintf("planes=8/sub-ports=4/destinations=%d", n), func(b *testing.B) {
			table, prefixes := bigTable(b, 8, 4, n)
			routes := [2]*Attributes{route(400e9), route(1600e9)}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				table.Step(RouteUpdate{3, 1, prefixes[0], routes[i&1]})
			}
		})
	}
}

func BenchmarkLocalFailure(b *testing.B) {
	for _, n := range []int{1, 1024, 16384, 131072} {
		b.Run(fmt.Sprintf("planes=8/sub-ports=4/destinations=%d", n), func(b *testing.B) {
			table, _ := bigTable(b, 8, 4, n)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if len(table.Step(LinkState{SubPort: 5, Up: i&1 == 1})) != 1 {
					b.Fatal("not one change")
				}
			}
		})
	}
}

func BenchmarkLoad(b *testing.B) {
	for b.Loop() {
		bigTable(b, 4, 2, 16384)
	}
}
