package rdmatest

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
)

// Core is a transport that sends through wire.Out, such as the results of roce.NewCore and superp.NewCore.
type Core interface {
	rdma.Transport
	wire.Core
}

// Constructor makes a core that sends through out.
type Constructor func(out wire.Out) Core

// Plane is the quality of one plane of a Net. The zero value carries all datagrams without delay, in order.
type Plane struct {
	// Delay is the minimum delay of a datagram; Jitter is the maximum of an additional random delay. Within a plane
	// datagrams between two hosts still stay in order, except those that Reorder picks.
	Delay, Jitter time.Duration
	// Reorder, Loss, Duplicate and Corrupt are independent probabilities for each datagram. A reordered datagram takes
	// up to Late longer and may be overtaken; a corrupt one arrives with one to three flipped bits.
	Reorder, Loss, Duplicate, Corrupt float64
	// Late is the maximum additional delay of a reordered or duplicated datagram; 0 means four times Delay plus Jitter.
	Late time.Duration
	// Rate is the bandwidth of each host on the plane, in bytes per second; 0 means no limit. Queue is the length of
	// the queue in front of it, in bytes, beyond which datagrams are dropped; 0 means no limit.
	Rate, Queue int64
	// Inbound is the link from the plane to each host, which all senders share.
	Inbound Link
}

// Link is a link with a queue in front of it. The zero value has no limit.
type Link struct {
	Rate  int64 // bytes per second; 0 means no limit
	Queue int64 // length of the queue in bytes, beyond which datagrams are dropped; 0 means no limit
	Mark  int64 // length above which datagrams are marked with "congestion experienced"; 0 means never
}

// NetConfig is the configuration of a Net.
type NetConfig struct {
	// Seed is the seed of all random choices: equal seeds and equal calls give equal runs.
	Seed uint64
	// Planes has at least one element.
	Planes []Plane
	// PlaneOf returns the plane of a UDP source port's datagrams; nil means the port modulo the number of planes.
	PlaneOf func(port uint16) int
	// MTU is the maximum UDP payload in bytes; longer datagrams are dropped and reported as an error. 0 means 65,507.
	MTU int
	// IPv6 gives the hosts of Virtual IPv6 addresses.
	IPv6 bool
	// Fate, if not nil, decides about each datagram instead of random choices. Planes that are down lose datagrams
	// regardless.
	Fate func(Datagram) Fate
	// Trace, if not nil, receives each datagram as it is sent.
	Trace func(Datagram)
}

// Datagram is a datagram in flight.
type Datagram struct {
	From, To netip.AddrPort
	Plane    int
	// ID is its IPv4 identification (wire.Out.Next).
	ID      uint16
	Class   uint8  // traffic class, without ECN; 0 unless sent by wire.Classes
	Payload []byte // valid only during the call
}

// Fate is the treatment of a datagram. The zero value delivers it after the plane's Delay.
type Fate struct {
	Drop, Duplicate bool
	// Late is added to the delay; if above 0, other datagrams may overtake this one.
	Late time.Duration
}

// NetStats are a Net's counters. Sent + Duplicated + Injected = Delivered + Lost + Dropped + Unreachable + datagrams in
// flight.
type NetStats struct {
	Sent, Injected, Delivered, Duplicated, Corrupted, Reordered, Marked uint64
	// Lost: by chance or on a plane that was down; Dropped: by a full queue; Unreachable: no host has the address.
	Lost, Dropped, Unreachable uint64
	// Changed counts payloads that differ between Send and flush. wire.Out forbids such changes, and an ICRC computed
	// at Send would be wrong.
	Changed uint64
	// Bytes counts bytes of UDP payload sent.
	Bytes uint64
}

// Net is a network of planes in virtual time. It has no goroutine: Step executes the next event. Not safe for
// concurrent use.
type Net struct {
	config NetConfig
	now    time.Duration
	rng    *rand.Rand
	events events
	ends   map[netip.AddrPort]*End
	planes []planeState
	free   []*datagram
	stats  NetStats
	fault  error
}

type planeState struct {
	Plane
	down  bool
	epoch uint32              // counts outages: a datagram sent before an outage is lost in it
	mute  map[netip.Addr]bool // hosts whose datagrams are lost
}

type datagram struct {
	from, to netip.AddrPort
	id       uint16
	class    uint8
	plane    int
	epoch    uint32
	bytes    []byte
	payload  []byte // source of the payload, until the flush
	begin    int    // offset of the payload in bytes
	sum      uint32 // checksum of payload at Send
	queued   bool   // has passed the queue of Plane.Inbound
	marked   bool   // with "congestion experienced"
}

// NewNet makes a network whose time starts at 1 s, so that 0 is never a valid time.
func NewNet(config NetConfig) *Net {
	if len(config.Planes) == 0 {
		panic("rdmatest: a network without planes")
	}
	if config.MTU == 0 {
		config.MTU = maxDatagram
	}
	n := &Net{config: config, now: time.Second, rng: rand.New(rand.NewPCG(config.Seed, 0x6e6574)), ends: map[netip.AddrPort]*End{}}
	for _, p := range config.Planes {
		if p.Late == 0 {
			p.Late = 4 * (p.Delay + p.Jitter)
		}
		n.planes = append(n.planes, planeState{Plane: p, mute: map[netip.Addr]bool{}})
	}
	return n
}

// Now returns the virtual time.
func (n *Net) Now() time.Duration { return n.now }

// Stats returns the counters.
func (n *Net) Stats() NetStats { return n.stats }

// Err returns the first misuse of the network: a datagram that is too long or an unmapped source port.
func (n *Net) Err() error { return n.fault }

// SetPlane takes a plane down or up. A plane that goes down loses its datagrams in flight and all later ones; hosts are
// not notified.
func (n *Net) SetPlane(plane int, up bool) {
	p := &n.planes[plane]
	if !up && !p.down {
		p.epoch++
	}
	p.down = !up
}

// Up reports whether a plane is up.
func (n *Net) Up(plane int) bool { return !n.planes[plane].down }

// SetSender starts (up false) or stops losing all datagrams that a host sends on a plane. The host still receives
// there.
func (n *Net) SetSender(from netip.Addr, plane int, up bool) { n.planes[plane].mute[from] = !up }

// SetQuality replaces the quality of a plane for datagrams sent from now on.
func (n *Net) SetQuality(plane int, p Plane) {
	if p.Late == 0 {
		p.Late = 4 * (p.Delay + p.Jitter)
	}
	n.planes[plane].Plane = p
}

// After calls f after d, outside any host's turn.
func (n *Net) After(d time.Duration, f func()) { n.events.push(event{at: n.now + max(d, 0), call: f}) }

// Inject delivers bytes as a datagram that no host has sent, after the plane's delay.
func (n *Net) Inject(from, to netip.AddrPort, plane int, b []byte) {
	n.stats.Injected++
	d := n.datagram()
	d.from, d.to, d.plane, d.epoch = from, to, plane, n.planes[plane].epoch
	d.bytes = append(d.bytes[:0], b...)
	n.deliverAt(n.now+n.planes[plane].Delay, d)
}

// Step advances to the next event and executes it; it returns false if there is none. Datagrams that reach a host at
// the same time form one turn: the host receives them, then flushes.
func (n *Net) Step() bool {
	if n.events.len() == 0 {
		return false
	}
	e := n.events.pop()
	n.now = max(n.now, e.at)
	switch {
	case e.call != nil:
		e.call()
	case e.arrives == nil:
		e.end.wakeUp(e.at)
	default:
		end := n.arrive(e.arrives)
		if end == nil {
			break
		}
		for len(end.inbox) < maxTurn && n.events.len() > 0 {
			if next := n.events.first(); next.at > n.now || next.arrives == nil || n.find(next.arrives.to) != end {
				break
			}
			n.arrive(n.events.pop().arrives)
		}
		end.receive()
	}
	return true
}

// Run steps until done returns true or the time is reached, and reports whether it is done.
func (n *Net) Run(done func() bool, until time.Duration) bool {
	for !done() {
		if n.events.len() == 0 || n.events.first().at > until {
			n.now = max(n.now, until)
			return false
		}
		n.Step()
	}
	return true
}

// Stall advances time while no process runs, as if all were stopped: events due meanwhile happen afterwards, late.
func (n *Net) Stall(d time.Duration) { n.now += d }

// maxTurn is the maximum number of datagrams that a host receives in one turn, similar to recvmmsg.
const maxTurn = 64

// arrive puts a datagram into its host's inbox, after it has passed the queue of the inbound link. It returns the host,
// or nil if the datagram is queued or lost.
func (n *Net) arrive(d *datagram) *End {
	end := n.find(d.to)
	switch p := &n.planes[d.plane]; {
	case p.down || p.epoch != d.epoch:
		n.stats.Lost++
	case end == nil:
		n.stats.Unreachable++
	case p.Inbound.Rate > 0 && !d.queued:
		if at, ok := end.enqueue(d, &p.Inbound); ok {
			n.deliverAt(at, d)
			return nil
		}
		n.stats.Dropped++
	default:
		n.stats.Delivered++
		end.inbox = append(end.inbox, d)
		return end
	}
	n.release(d)
	return nil
}

func (n *Net) find(to netip.AddrPort) *End {
	if end := n.ends[to]; end != nil {
		return end
	}
	return n.ends[netip.AddrPortFrom(to.Addr(), 0)]
}

// carry takes a datagram from a host's flush and decides its fate.
func (n *Net) carry(from *End, d *datagram) {
	n.stats.Sent++
	n.stats.Bytes += uint64(len(d.bytes))
	d.plane = int(d.from.Port()) % len(n.planes)
	if n.config.PlaneOf != nil {
		d.plane = n.config.PlaneOf(d.from.Port())
	}
	if len(d.bytes) > n.config.MTU || d.plane < 0 || d.plane >= len(n.planes) {
		n.blame(fmt.Errorf("a datagram of %d bytes from port %d for plane %d (MTU %d)",
			len(d.bytes), d.from.Port(), d.plane, n.config.MTU))
		n.stats.Lost++
		n.release(d)
		return
	}
	if n.config.Trace != nil {
		n.config.Trace(d.public())
	}
	p := &n.planes[d.plane]
	d.epoch = p.epoch
	if p.down || p.mute[d.from.Addr()] {
		n.stats.Lost++
		n.release(d)
		return
	}
	at, ok := from.serialize(d, p)
	if !ok {
		n.stats.Dropped++
		n.release(d)
		return
	}
	fate := n.fate(d, p)
	if fate.Duplicate {
		n.stats.Duplicated++
		n.deliverAt(at+p.Delay+n.upTo(p.Late), n.copy(d))
	}
	switch {
	case fate.Drop:
		n.stats.Lost++
		n.release(d)
	case fate.Late > 0:
		n.stats.Reordered++
		n.deliverAt(at+p.Delay+fate.Late, d)
	default:
		// In order: not before earlier datagrams of the host on this plane.
		last := from.last(d)
		*last = max(*last, at+p.Delay+n.upTo(p.Jitter))
		n.deliverAt(*last, d)
	}
}

func (n *Net) fate(d *datagram, p *planeState) (f Fate) {
	if n.config.Fate != nil {
		return n.config.Fate(d.public())
	}
	f.Drop = n.chance(p.Loss)
	f.Duplicate = n.chance(p.Duplicate)
	if n.chance(p.Reorder) {
		f.Late = 1 + n.upTo(p.Late)
	}
	if n.chance(p.Corrupt) && len(d.bytes) > 0 {
		n.stats.Corrupted++
		for range 1 + n.rng.IntN(3) {
			d.bytes[n.rng.IntN(len(d.bytes))] ^= 1 << n.rng.IntN(8)
		}
	}
	return f
}

func (n *Net) chance(p float64) bool { return p > 0 && n.rng.Float64() < p }

func (n *Net) upTo(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return time.Duration(n.rng.Int64N(int64(d) + 1))
}

func (n *Net) deliverAt(at time.Duration, d *datagram) { n.events.push(event{at: at, arrives: d}) }

func (n *Net) blame(err error) {
	if n.fault == nil {
		n.fault = err
	}
}

func (n *Net) datagram() *datagram {
	if last := len(n.free) - 1; last >= 0 {
		d := n.free[last]
		n.free = n.free[:last]
		d.queued, d.marked, d.class = false, false, 0
		return d
	}
	return &datagram{}
}

func (n *Net) copy(of *datagram) *datagram {
	d := n.datagram()
	b := append(d.bytes[:0], of.bytes...)
	*d = *of
	d.bytes, d.payload = b, nil
	return d
}

// release puts a datagram on the free list. It overwrites the bytes at once, so that a core that keeps the slice passed
// to Receive reads other contents.
func (n *Net) release(d *datagram) {
	copy(d.bytes, poison)
	d.payload = nil
	n.free = append(n.free, d)
}

var poison = bytes.Repeat([]byte{0xdb}, maxDatagram)

func (d *datagram) public() Datagram {
	return Datagram{From: d.from, To: d.to, Plane: d.plane, ID: d.id, Class: d.class, Payload: d.bytes}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)
