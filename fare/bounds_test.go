package fare

import (
	"math"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// TestExactlyAtTheBounds verifies that a value equal to the minimum or the maximum is accepted and that one bit/s
// beyond is not.
func TestExactlyAtTheBounds(t *testing.T) {
	codec := Codec{Min: 8e9, Max: 80e9, Format: Uint32}
	for value, want := range map[uint32]Reason{
		1e9: ReasonUsed, 1e9 - 1: ReasonBelowMinimum, 1e9 + 1: ReasonUsed, 4e9: ReasonUsed,
	} {
		if _, v := codec.Judge([]Community{linkBandwidth(0, 1, value)}, nil); v[0].Reason != want {
			t.Errorf("%d bytes/s: %s, want %s", value, v[0].Reason, want)
		}
	}
	codec = Codec{Min: 8e9, Max: 32e9, Format: Uint32}
	for value, want := range map[uint32]Reason{4e9: ReasonUsed, 4e9 - 1: ReasonUsed, 4e9 + 1: ReasonAboveMaximum} {
		if _, v := codec.Judge([]Community{linkBandwidth(0, 1, value)}, nil); v[0].Reason != want {
			t.Errorf("%d bytes/s: %s, want %s", value, v[0].Reason, want)
		}
	}
}

// TestBandwidthAloneIsShown verifies that a changed value emits a change even where equal shares keep every weight.
func TestBandwidthAloneIsShown(t *testing.T) {
	table, err := NewTable(Config{
		Planes: []string{"a", "b"}, SubPorts: []SubPort{{Device: "a", Speed: 400e9}, {Device: "b", Plane: 1, Speed: 400e9}},
		Sessions: []Session{{Name: "a"}, {Name: "b", SubPort: 1}}, Missing: MissingEqual,
	})
	if err != nil {
		t.Fatal(err)
	}
	dst := netip.MustParsePrefix("10.255.0.9/32")
	say := func(session int, communities ...Community) []Change {
		return table.Step(RouteUpdate{session, 1, dst, &Attributes{Communities: communities, ASPath: []uint32{65001, 64001}}})
	}
	for i := range 2 {
		table.Step(LinkState{SubPort: i, Up: true})
		table.Step(SessionUp{i, 1, testNodes[i], 65001})
	}
	say(0, Codec{}.Encode(100e9, netip.Addr{}))
	say(1)
	changes := say(0, Codec{}.Encode(200e9, netip.Addr{}))
	if len(changes) != 1 || changes[0].Kind != GroupSet {
		t.Fatalf("changes %v, want the group set", changes)
	}
	v := table.Group(changes[0].Group)
	if v.Planes[0].Bandwidth != 200e9 || v.Planes[0].Capacity != 1 || v.Planes[1].Capacity != 1 {
		t.Errorf("%+v", v)
	}
}

// TestSplitEqualsFractions divides planes of several nodes whose speeds and values have no common divisor, up to the
// highest. The weights of sub-ports must equal those of exact fractions, within the tolerances of simplify and of fixed
// point.
func TestSplitEqualsFractions(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	rate := func() Bandwidth { return max(MaxBandwidth>>r.IntN(30)-Bandwidth(r.IntN(1<<20)), 1) }
	for n := range 2000 {
		c := Config{Planes: []string{"p"}}
		var nodes [][]int
		for range 1 + r.IntN(5) {
			var own []int
			for range 1 + r.IntN(4) {
				own = append(own, len(c.SubPorts))
				c.Sessions = append(c.Sessions, Session{Name: string(rune('a' + len(c.SubPorts))), SubPort: len(c.SubPorts)})
				c.SubPorts = append(c.SubPorts, SubPort{Speed: rate()})
			}
			nodes = append(nodes, own)
		}
		table, err := NewTable(c)
		if err != nil {
			t.Fatal(err)
		}
		dst := netip.MustParsePrefix("10.255.0.9/32")
		want, total := make([]*big.Rat, len(c.SubPorts)), new(big.Rat)
		for k, own := range nodes {
			value, local := rate(), Bandwidth(0)
			for slices.ContainsFunc(c.SubPorts, func(sp SubPort) bool {
				return sp.Speed <= fastest && (Codec{}.wraps(value, sp.Speed, KindLinkBandwidth) || otherScale(value, sp.Speed))
			}) {
				value = rate()
			}
			community := Codec{}.Encode(value, netip.Addr{})
			a, _ := Codec{}.Judge([]Community{community}, nil)
			for _, i := range own {
				local = local.Add(c.SubPorts[i].Speed)
				table.Step(LinkState{SubPort: i, Up: true})
				table.Step(SessionUp{i, 1, netip.AddrFrom4([4]byte{10, 0, 0, byte(k)}), 65001})
				table.Step(RouteUpdate{i, 1, dst, &Attributes{Communities: []Community{community}, ASPath: []uint32{65001, 64001}}})
			}
			speeds := new(big.Int)
			for _, i := range own {
				speeds.Add(speeds, new(big.Int).SetUint64(uint64(c.SubPorts[i].Speed)))
			}
			for _, i := range own {
				part := new(big.Int).Mul(new(big.Int).SetUint64(uint64(min(local, a.Bandwidth))), new(big.Int).SetUint64(uint64(c.SubPorts[i].Speed)))
				want[i] = new(big.Rat).SetFrac(part, speeds)
				total.Add(total, want[i])
			}
		}
		id, _ := table.Destination(dst)
		sum, got := new(big.Rat), make([]*big.Rat, len(want))
		for _, w := range table.Group(id).Planes[0].SubPorts {
			got[w.SubPort] = rat(w.Weight)
			sum.Add(sum, got[w.SubPort])
		}
		for i := range want {
			if got[i] == nil {
				t.Fatalf("case %d: sub-port %d has no weight", n, i)
			}
			g, _ := new(big.Rat).Quo(got[i], sum).Float64()
			w, _ := new(big.Rat).Quo(want[i], total).Float64()
			if math.Abs(g-w) > 2e-6*w+0x1p-48 {
				t.Fatalf("case %d: sub-port %d gets %v of the plane, want %v: %+v", n, i, g, w, table.Group(id))
			}
		}
	}
}

// TestWeightsOfAPlaneFit covers nodes whose weights fit 63 bits each, but not together.
func TestWeightsOfAPlaneFit(t *testing.T) {
	// Values of the nodes: the last one is coprime with the 1501 parts of its two sub-ports.
	values := [][]Community{nil, nil, {Codec{}.Encode(1100000000000001, netip.Addr{})}}
	c := Config{Planes: []string{"p"}}
	for _, speed := range []Bandwidth{1<<52 - 1, 1<<52 - 3, 1217144000000001 / 1501 * 500, 1217144000000001 / 1501 * 1001} {
		c.Sessions = append(c.Sessions, Session{Name: string(rune('a' + len(c.SubPorts))), SubPort: len(c.SubPorts)})
		c.SubPorts = append(c.SubPorts, SubPort{Speed: speed})
	}
	table, err := NewTable(c)
	if err != nil {
		t.Fatal(err)
	}
	dst := netip.MustParsePrefix("10.255.0.9/32")
	for i := range c.Sessions {
		table.Step(LinkState{SubPort: i, Up: true})
		table.Step(SessionUp{i, 1, testNodes[min(i, 2)], 65001})
		table.Step(RouteUpdate{i, 1, dst, &Attributes{ASPath: []uint32{65001, 64001}, Communities: values[min(i, 2)]}})
	}
	id, _ := table.Destination(dst)
	sum := new(big.Int)
	for _, w := range table.Group(id).Planes[0].SubPorts {
		sum.Add(sum, new(big.Int).SetUint64(w.Weight))
	}
	if sum.BitLen() > 63 {
		t.Errorf("weights sum to %d bits: %+v", sum.BitLen(), table.Group(id).Planes[0].SubPorts)
	}
}

// TestOriginsWithoutHistoryShareAGroup verifies that a destination whose origins changed often shares a group with one
// that has had its present origins from the beginning.
func TestOriginsWithoutHistoryShareAGroup(t *testing.T) {
	table, err := NewTable(Config{
		Planes: []string{"a", "b"}, SubPorts: []SubPort{{Speed: 400e9}, {Plane: 1, Speed: 400e9}},
		Sessions: []Session{{Name: "a"}, {Name: "b", SubPort: 1}},
	})
	if err != nil {
		t.Fatal(err)
	}
	say := func(prefix netip.Prefix, session int, origin uint32) {
		table.Step(RouteUpdate{session, 1, prefix, &Attributes{ASPath: []uint32{65001, origin}}})
	}
	for i := range 2 {
		table.Step(LinkState{SubPort: i, Up: true})
		table.Step(SessionUp{i, 1, testNodes[i], 65001})
	}
	say(testPrefixes[0], 0, 64001)
	for origin := range uint32(70_000) { // more origins than an entry can number
		say(testPrefixes[0], 1, 100_000+origin)
	}
	say(testPrefixes[1], 0, 64001)
	say(testPrefixes[1], 1, 64002)
	a, _ := table.Destination(testPrefixes[0])
	b, _ := table.Destination(testPrefixes[1])
	if a != b || table.Group(a).Origins != 2 || table.Stats().Conflicts != 2 {
		t.Errorf("groups %d and %d, %d origins, %d conflicts", a, b, table.Group(a).Origins, table.Stats().Conflicts)
	}
}
