package fare

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// forgeries are the communities that a hostile leaf may put on a route instead
// of the honest one.
var forgeries = map[string][]Community{
	"none":       nil,
	"unrelated":  {{0, 2, 0, 1}},
	"NaN":        {bytesPerSecond(float32(math.NaN()))},
	"negative":   {bytesPerSecond(-1)},
	"infinite":   {bytesPerSecond(float32(math.Inf(1)))},
	"1e38":       {bytesPerSecond(1e38)},
	"highest":    {bytesPerSecond(math.MaxFloat32)},
	"lowest":     {bytesPerSecond(math.SmallestNonzeroFloat32)},
	"zero":       {bytesPerSecond(0)},
	"minus zero": {linkBandwidth(0, 1, 1<<31)},
	"FARE":       {fareCommunity(65535)},
	"both":       {bytesPerSecond(1e38), fareCommunity(1)},
}

// TestHostileLeafHarmsItsOwnPlaneAlone has one leaf of a server's fabric forge
// arbitrary values. The ratio of the other planes must remain that of their
// true values, and the forger's plane must never exceed the links toward it.
// With missing: equal this holds for valid values only, because RFC 10005 lets
// one path without a value make all paths equal.
func TestHostileLeafHarmsItsOwnPlaneAlone(t *testing.T) {
	trueValues := []Bandwidth{800e9, 400e9, 100e9} // planes 0 to 2; plane 3 is the forger's
	const forger, speed = 3, 800e9
	dst := netip.MustParsePrefix("10.255.0.9/32")
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		var raw Community
		binary.BigEndian.PutUint64(raw[:], r.Uint64())
		raw[0], raw[1] = byte(r.IntN(2))*0x40, subTypeLinkBandwidth
		forgeries["random "+raw.String()] = []Community{raw}
	}
	valid := []string{"1e38", "highest", "lowest", "zero", "minus zero", "FARE", "both"}
	for _, policy := range []MissingPolicy{MissingLocal, MissingSkip, MissingEqual} {
		for name, forged := range forgeries {
			if policy == MissingEqual && !slices.Contains(valid, name) {
				continue
			}
			c := Config{Planes: []string{"a", "b", "c", "forger"}, Missing: policy}
			for p := range c.Planes {
				for k := range 2 {
					c.SubPorts = append(c.SubPorts, SubPort{Device: fmt.Sprint("d", p, k), Plane: p, Speed: speed / 2})
					c.Sessions = append(c.Sessions, Session{Name: fmt.Sprint("s", p, k), SubPort: 2*p + k})
				}
			}
			table, err := NewTable(c)
			if err != nil {
				t.Fatal(err)
			}
			for i := range c.Sessions {
				p := i / 2
				table.Step(LinkState{SubPort: i, Up: true})
				table.Step(SessionUp{i, 1, netip.AddrFrom4([4]byte{10, 0, 0, byte(p)}), uint32(65000 + p)})
				communities := forged
				if p != forger {
					communities = []Community{Codec{}.Encode(trueValues[p], netip.Addr{})}
				}
				table.Step(RouteUpdate{i, 1, dst, &Attributes{Communities: communities, ASPath: []uint32{uint32(65000 + p)}}})
			}
			id, _ := table.Destination(dst)
			v := table.Group(id)
			for p := range trueValues {
				// Cross-multiplied, so that common factors cancel.
				if v.Planes[p].Capacity == 0 || v.Planes[p].Capacity*uint64(trueValues[0]) != v.Planes[0].Capacity*uint64(trueValues[p]) {
					t.Errorf("%s, forged %s: plane %d has %d beside %d, honest values are %v", policy, name, p, v.Planes[p].Capacity, v.Planes[0].Capacity, trueValues)
				}
			}
			if v.Planes[forger].Bandwidth > speed || v.Planes[forger].Capacity > v.Planes[0].Capacity {
				t.Errorf("%s, forged %s: %s, and the links carry %d", policy, name, v.Planes[forger].Bandwidth, uint64(speed))
			}
		}
	}
}

// TestForgedIdentifier has a hostile leaf use the BGP identifier of the other
// leaf of its plane. It must remain a separate node, whose value bounds no
// other.
func TestForgedIdentifier(t *testing.T) {
	table, err := NewTable(Config{
		Planes:   []string{"p"},
		SubPorts: []SubPort{{Device: "a", Speed: 400e9}, {Device: "b", Speed: 400e9}},
		Sessions: []Session{{Name: "a"}, {Name: "b", SubPort: 1}},
	})
	if err != nil {
		t.Fatal(err)
	}
	dst, id := netip.MustParsePrefix("10.255.0.9/32"), netip.MustParseAddr("10.0.0.1")
	for i, value := range []Bandwidth{400e9, 1e9} {
		as := uint32(65001 + i)
		table.Step(LinkState{SubPort: i, Up: true})
		table.Step(SessionUp{i, 1, id, as})
		table.Step(RouteUpdate{i, 1, dst, &Attributes{Communities: []Community{Codec{}.Encode(value, netip.Addr{})}, ASPath: []uint32{as, 64001}}})
	}
	g, _ := table.Destination(dst)
	if got := table.Group(g).Planes[0].Bandwidth; got != 401e9 {
		t.Errorf("the plane carries %s, want 401G", got)
	}
}
