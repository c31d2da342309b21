package fare

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
)

// generator generates events, most of them possible ones.
type generator struct {
	*rand.Rand
	config     Config
	generation uint64
	current    map[int]uint64
}

var (
	testNodes    = []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")}
	testSpeeds   = []Bandwidth{100e9, 400e9, 800e9, 7e9, 399999999999}
	testValues   = []Bandwidth{0, 100e9, 400e9, 800e9, 3e9, 800e6, 4e14, 9726001152, 25122086912, 123456789000, 133333333333, 266666666667}
	testPrefixes = func() (p []netip.Prefix) {
		for i := range 12 {
			p = append(p, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, 0, byte(i)}), 32))
		}
		return p
	}()
)

func pick[T any](g *generator, from []T) T { return from[g.IntN(len(from))] }

func newGenerator(seed uint64) *generator {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 7)), current: map[int]uint64{}}
	c := Config{Role: Role(g.IntN(2)), Missing: MissingPolicy(g.IntN(3)), AllMissing: AllMissingPolicy(g.IntN(2)), AllZero: ZeroPolicy(g.IntN(2)), Conflict: ConflictPolicy(g.IntN(3)), LeastPreferred: Signals(g.IntN(8)), Unproved: UnprovedPolicy(g.IntN(4)/3 ^ 1)}
	for p := range 1 + g.IntN(3) {
		c.Planes = append(c.Planes, fmt.Sprint("p", p))
	}
	for i := range 1 + g.IntN(5) {
		c.SubPorts = append(c.SubPorts, SubPort{Device: fmt.Sprint("d", i), Plane: g.IntN(len(c.Planes)), Speed: pick(g, testSpeeds) * Bandwidth(g.IntN(2)), Uplink: g.IntN(4) == 0})
	}
	for i := range 1 + g.IntN(8) {
		c.Sessions = append(c.Sessions, Session{Name: fmt.Sprint("s", i), SubPort: g.IntN(len(c.SubPorts)), Codec: Codec{Min: 50e9 * Bandwidth(g.IntN(2)), Max: 500e9 * Bandwidth(g.IntN(2))}})
	}
	g.config = c
	return g
}

// start returns the events that bring everything up.
func (g *generator) start() []Event {
	var events []Event
	for i := range g.config.SubPorts {
		events = append(events, LinkState{SubPort: i, Up: true, Speed: pick(g, testSpeeds)})
	}
	for i := range g.config.Sessions {
		events = append(events, g.up(i))
	}
	return events
}

func (g *generator) up(session int) Event {
	g.generation++
	g.current[session] = g.generation
	return SessionUp{session, g.generation, pick(g, testNodes), 65000 + uint32(g.IntN(2))}
}

func (g *generator) event() Event {
	session := g.IntN(len(g.config.Sessions))
	generation := g.current[session] - uint64(g.IntN(20)/19)
	switch n := g.IntN(100); {
	case n < 60:
		attrs := &Attributes{ASPath: []uint32{65000 + uint32(g.IntN(2))}}
		for range g.IntN(3) {
			c := Codec{Encoding: Encoding(g.IntN(8) / 7)}.Encode(pick(g, testValues), netip.Addr{})
			if g.IntN(12) == 0 { // not a number, infinite or negative as Link Bandwidth
				copy(c[4:6], pick(g, [][]byte{{0x7f, 0xc0}, {0x7f, 0x80}, {0xff, 0x80}, {0xc0, 0}}))
				if c[5] == 0x80 {
					c[6], c[7] = 0, 0
				}
			}
			attrs.Communities = append(attrs.Communities, c)
		}
		for range g.IntN(3) {
			attrs.ASPath = append(attrs.ASPath, 65000+uint32(g.IntN(3)))
		}
		if g.IntN(6) == 0 {
			attrs.Extended = IPv6Community{2, 6}
			binary.BigEndian.PutUint64(attrs.Extended[4:], uint64(pick(g, testValues)/8)<<(50*(g.IntN(8)/7)))
		}
		if g.IntN(3) == 0 {
			attrs.Signals = Signals(g.IntN(4))
		}
		if g.IntN(50) == 0 {
			attrs = nil
		}
		return RouteUpdate{session, generation, pick(g, testPrefixes), attrs}
	case n < 66:
		return Avoid{pick(g, testPrefixes), g.IntN(len(g.config.Planes)), g.IntN(3) > 0}
	case n < 72:
		return RouteWithdraw{session, generation, pick(g, testPrefixes)}
	case n < 80:
		return LinkState{SubPort: g.IntN(len(g.config.SubPorts)), Up: g.IntN(3) > 0, Speed: pick(g, testSpeeds) * Bandwidth(g.IntN(2))}
	case n < 85:
		return SessionDown{Session: session, Generation: generation}
	case n < 90:
		return g.up(session)
	case n < 93:
		return EndOfRIB{session, generation}
	case n < 99:
		return g.drain()
	}
	return PolicyChange{MissingPolicy(g.IntN(3)), AllMissingPolicy(g.IntN(2)), ZeroPolicy(g.IntN(2)), ConflictPolicy(g.IntN(3)), Signals(g.IntN(8)), UnprovedPolicy(g.IntN(4)/3 ^ 1)}
}

func (g *generator) drain() Drain {
	d := Drain{Scope: DrainScope(g.IntN(3)), On: g.IntN(3) == 0}
	switch d.Scope {
	case DrainPlane:
		d.Index = g.IntN(len(g.config.Planes))
	case DrainSubPort:
		d.Index = g.IntN(len(g.config.SubPorts))
	case DrainNode:
		d.Node = pick(g, testNodes)
	}
	return d
}
