package wecmp

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sync"
)

// MinPort and MaxPort bound source ports: the dynamic ports of RFC 6335, Section 6, which RoCEv2 uses for entropy.
const (
	MinPort = 49152
	MaxPort = 65535
)

// PortStride is the difference, modulo the 16,384 ports, between the ports of two consecutive slots if the hash is
// unknown. It is odd and near 16,384/golden ratio, so that its multiples visit every port once and spread evenly from
// the first on.
const PortStride = 10127

const portCount = MaxPort - MinPort + 1

// Method is the method by which ports were chosen.
type Method uint8

// The methods.
const (
	MethodUniform Method = iota // unknown hash: ports are spread evenly
	MethodHash                  // each port lands on its slot's place by the configured hash
	MethodNone                  // the addressing needs no distinct ports: all slots share one
	MethodAsked                 // each port lands on its slot's place according to the device (Asked)
)

// String returns "uniform", "hash", "none" or "asked".
func (m Method) String() string { return nameOf(m, []string{"uniform", "hash", "none", "asked"}) }

// Placement describes how ports were chosen, and how well.
type Placement struct {
	Method Method
	Missed int // number of slots for which no port was left that lands on their place
}

// String returns the method's name.
func (p Placement) String() string { return p.Method.String() }

// Planner chooses source ports. Its only state is its configuration, and it is safe for concurrent use. Create it with
// NewPlanner.
//
// Ports are a pure function of the configuration, the pair of addresses and the slots' places. Each slot has a distinct
// port at each place, so a slot that stays keeps its port whatever the other slots do, and a slot that returns gets its
// former port. The ports that land on a place, in the pair's own order, belong first to the slots whose home it is,
// then to each of the other slots. Only if fewer ports land on a place than there are slots, a slot away from home may
// have to share a port with another slot, and its port then depends on whether the other slot is at the same place.
//
// If the hash is unknown, the ports are an arithmetic progression modulo their number: slot s has MinPort + (b +
// s·PortStride) mod 16,384, where b depends on the pair alone. A data plane may rely on this to keep a pair in one
// entry.
type Planner struct {
	cfg     Config
	to      Service
	layout  layout
	rank    []int   // rank of a slot among those with the same home
	count   []int   // number of slots at home per place
	buckets []int16 // the sub-port of each bucket of a LinuxL4 with Lasting, -1: none
	scratch *sync.Pool
}

type portScratch struct {
	want []int32 // per slot: rank of its port among those that land on its place
	next []int32 // per slot: the next slot at its place, by rank
	head []int32 // per place: the unserved slot with the lowest rank; -1: none
	seen []int32 // per place: number of landing ports seen
	used [portCount / 64]uint64
	at   [portCount]int16 // place where the k-th port lands, of those hashed; -1: no place
	land []uint16         // ports that land on one place
}

// NewPlanner returns a planner, or an error with all faults of the configuration.
func NewPlanner(cfg Config) (*Planner, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	p := &Planner{cfg: cfg, to: Service{cfg.Protocol, cfg.Port}}
	if p.to.Protocol == 0 {
		p.to.Protocol = ProtocolUDP
	}
	if p.to.Port == 0 {
		p.to.Port = PortRoCE
	}
	p.layout = newLayout(&p.cfg)
	p.count = make([]int, len(p.layout.ports))
	for _, h := range p.layout.home {
		p.rank = append(p.rank, p.count[h])
		p.count[h]++
	}
	if linux, ok := cfg.Hash.(LinuxL4); ok && linux.overAll() && linux.Buckets <= math.MaxUint16 { // the kernel's limit
		for bucket := range linux.Buckets {
			p.buckets = append(p.buckets, int16(linux.Member(uint32(bucket), len(p.layout.ports))))
		}
	}
	slots, places := len(p.layout.home), len(p.count)
	p.scratch = &sync.Pool{New: func() any {
		return &portScratch{
			want: make([]int32, slots), next: make([]int32, slots), head: make([]int32, places), seen: make([]int32, places),
		}
	}}
	return p, nil
}

// Toward returns the planner of the same configuration for flows to another service. The tables of Asked hold for one
// service: asked replaces such a hash (nil makes ports uniform), and is unused with all other hashes.
func (p *Planner) Toward(to Service, asked Asked) *Planner {
	other := *p
	other.to, other.cfg.Protocol, other.cfg.Port = to, to.Protocol, to.Port
	if _, ok := p.cfg.Hash.(Asked); ok {
		if other.cfg.Hash = nil; asked != nil {
			other.cfg.Hash = asked
		}
	}
	return &other
}

// Service returns the service of the flows for which Ports chooses.
func (p *Planner) Service() Service { return p.to }

// Ports appends the slots' source ports between a source and a destination to buf[:0]. Under loopback addressing they
// are unique. Under port addressing they are unique in each plane; if the network's hash is known, src and dst are the
// addresses of one plane's ports, and the result is valid for that plane's slots. Under sub-port addressing one port
// serves all slots (draft-xu-rtgwg-fare-in-sun-02, Section 3.1). Both addresses must be of one family; the flows are
// toward Service. Places that the configuration does not have, of slots from before a reload, get uniform ports.
func (p *Planner) Ports(src, dst netip.Addr, places []Place, buf []uint16) ([]uint16, Placement) {
	base := pairBase(src, dst)
	buf = buf[:0]
	for s := range places {
		if p.cfg.Addressing == SubPortAddress {
			s = 0
		}
		buf = append(buf, nthPort(base, s))
	}
	hash := p.cfg.Hash
	switch {
	case p.cfg.Addressing == SubPortAddress:
		return buf, Placement{Method: MethodNone}
	case hash == nil, len(places) > len(p.layout.home), !p.has(places),
		p.cfg.Addressing == PortAddress && p.cfg.Mode == PerPacket: // any port of the plane will do, because packets are sprayed over its sub-ports
		return buf, Placement{Method: MethodUniform}
	}
	placement := Placement{Method: MethodHash}
	if asked, ok := hash.(Asked); ok {
		table := asked(src, dst) // one call, because the result may change between two calls
		hash = Asked(func(netip.Addr, netip.Addr) []byte { return table })
		placement.Method = MethodAsked
	}
	f := newFlows(hash, src, dst, p.to)
	if _, ok := f.value(MinPort); !ok {
		return buf, Placement{Method: MethodUniform}
	}
	x := p.scratch.Get().(*portScratch)
	defer p.scratch.Put(x)
	if p.cfg.Addressing == PortAddress && !overAll(hash) {
		for plane := range p.cfg.Planes {
			placement.Missed += p.land(x, base, &f, places, plane, buf)
		}
		return buf, placement
	}
	placement.Missed = p.land(x, base, &f, places, -1, buf)
	return buf, placement
}

// has reports whether the configuration has all places.
func (p *Planner) has(places []Place) bool {
	return !slices.ContainsFunc(places, func(at Place) bool { return p.cfg.placeIndex(p.layout.start, at) < 0 })
}

// Service is the destination of flows.
type Service struct {
	Protocol uint8  // ProtocolUDP or ProtocolTCP
	Port     uint16 // destination port
}

// String returns the service in the form "UDP 4791".
func (s Service) String() string {
	name := fmt.Sprintf("protocol %d,", s.Protocol)
	switch s.Protocol {
	case ProtocolTCP:
		name = "TCP"
	case ProtocolUDP:
		name = "UDP"
	}
	return fmt.Sprintf("%s %d", name, s.Port)
}

// flows are the flows of one pair.
type flows struct {
	hash     Hasher
	src, dst netip.Addr
	to       Service
	linux    linuxFlows // of the same pair, if words is not 0
}

func newFlows(hash Hasher, src, dst netip.Addr, to Service) flows {
	f := flows{hash: hash, src: src, dst: dst, to: to}
	if linux, ok := hash.(LinuxL4); ok {
		f.linux, _ = linux.flows(src, dst, to.Protocol, to.Port)
	}
	return f
}

// value returns the hash of the flow from a source port.
func (f *flows) value(port uint16) (uint32, bool) {
	if f.linux.words > 0 {
		return f.linux.hash(port), true
	}
	return f.hash.Hash(f.src, f.dst, f.to.Protocol, port, f.to.Port)
}

// land chooses ports by the hash for the slots of one plane, or of all planes (-1), and returns the number of slots
// without a landing port.
func (p *Planner) land(x *portScratch, base uint64, f *flows, places []Place, plane int, ports []uint16) (missed int) {
	from, to := 0, len(p.layout.ports)
	if plane >= 0 {
		from, to = p.layout.start[plane], p.layout.start[plane+1]
	}
	for i := range x.head {
		x.head[i], x.seen[i] = -1, 0
	}
	left := 0
	for s, at := range places {
		if plane >= 0 && at.Plane != plane {
			continue
		}
		b := p.at(at)
		x.want[s] = int32(p.rankAt(s, b))
		link := &x.head[b]
		for *link >= 0 && x.want[*link] <= x.want[s] {
			link = &x.next[*link]
		}
		x.next[s], *link = *link, int32(s)
		left++
	}
	clear(x.used[:])
	for k := 0; k < portCount && left > 0; k++ {
		port := nthPort(base, k)
		b := p.landing(f, port, from, to)
		x.at[k] = int16(b)
		if b < 0 {
			continue
		}
		s := x.head[b]
		if s >= 0 && x.seen[b] == x.want[s] {
			ports[s] = port
			x.take(port)
			x.head[b] = x.next[s]
			left--
		}
		x.seen[b]++
	}
	if left == 0 {
		return 0
	}
	// Every port was hashed, and too few land on some places. All slots with a distinct port have it now.
	for b := range x.head {
		if x.head[b] >= 0 {
			p.shareLanding(x, base, b, ports)
		}
	}
	for b := range x.head {
		for s := x.head[b]; s >= 0; s = x.next[s] {
			p.astray(x, base, int(s), ports)
			missed++
		}
	}
	return missed
}

// shareLanding assigns free landing ports to the remaining slots at a place. Each starts its search at the port of one
// other slot that is not at home there, so that its result depends on few other slots.
func (p *Planner) shareLanding(x *portScratch, base uint64, b int, ports []uint16) {
	x.land = x.land[:0]
	for k := range x.at {
		if int(x.at[k]) == b {
			x.land = append(x.land, nthPort(base, k))
		}
	}
	n, home := len(x.land), min(p.count[b], len(x.land))
	free := 0
	for _, port := range x.land {
		if !x.taken(port) {
			free++
		}
	}
	for ; x.head[b] >= 0 && free > 0; free-- {
		s := x.head[b]
		i := 0
		if n > home {
			i = home + (int(x.want[s])-n)%(n-home)
		}
		for x.taken(x.land[i]) {
			i = (i + 1) % n
		}
		ports[s] = x.land[i]
		x.take(ports[s])
		x.head[b] = x.next[s]
	}
}

// astray assigns a slot a port that does not land on its place: the slot's own among those that land nowhere, otherwise
// any free one.
func (p *Planner) astray(x *portScratch, base uint64, slot int, ports []uint16) {
	nowhere, any := -1, -1
	rank := slot
	for k := 0; k < portCount && nowhere < 0; k++ {
		if port := nthPort(base, k); x.at[k] < 0 {
			if rank == 0 {
				nowhere = k
			}
			rank--
		} else if any < 0 && !x.taken(port) {
			any = k
		}
	}
	if nowhere >= 0 {
		any = nowhere
	}
	ports[slot] = nthPort(base, any)
	x.take(ports[slot])
}

func (x *portScratch) take(port uint16)       { x.used[(port-MinPort)/64] |= 1 << (port % 64) }
func (x *portScratch) taken(port uint16) bool { return x.used[(port-MinPort)/64]>>(port%64)&1 != 0 }

// at returns a place's number: that of its sub-port, or in per-packet mode of its plane.
func (p *Planner) at(place Place) int {
	if p.cfg.Mode == PerPacket {
		return place.Plane
	}
	return p.layout.start[place.Plane] + place.SubPort
}

// rankAt returns a slot's rank among the ports that land on a place: the slots at home come first, then every other
// slot has a separate rank.
func (p *Planner) rankAt(slot, place int) int {
	if int(p.layout.home[slot]) == place {
		return p.rank[slot]
	}
	rank := p.count[place]
	for _, h := range p.layout.home[:slot] {
		if int(h) != place {
			rank++
		}
	}
	return rank
}

// landing returns the number of the place where the hash puts a port, among the sub-ports from..to-1, or -1 if there is
// no lasting one.
func (p *Planner) landing(f *flows, port uint16, from, to int) int {
	hash, _ := f.value(port)
	i := -1
	if n := uint32(len(p.buckets)); n > 0 {
		i = int(p.buckets[hash%n])
	} else {
		i = f.hash.Member(hash, to-from)
	}
	if i < 0 {
		return -1
	}
	if p.cfg.Mode == PerPacket {
		return int(p.layout.ports[from+i].plane)
	}
	return from + i
}

// nthPort returns the k-th port in a pair's order, a permutation of all ports.
func nthPort(base uint64, k int) uint16 {
	return MinPort + uint16((base+uint64(k)*PortStride)%portCount)
}

// pairBase returns the start of a pair's order; pairs are spread over the range.
func pairBase(src, dst netip.Addr) uint64 {
	s, d := src.As16(), dst.As16()
	h := uint64(0x9e3779b97f4a7c15)
	for _, a := range [2]*[16]byte{&s, &d} {
		h = mix64(h ^ binary.BigEndian.Uint64(a[:8]))
		h = mix64(h ^ binary.BigEndian.Uint64(a[8:]))
	}
	return h
}

// Planner returns the planner of the engine's configuration. Any goroutine may use it.
func (e *Engine) Planner() *Planner { return e.planner }
