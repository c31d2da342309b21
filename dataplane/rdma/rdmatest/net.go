package rdmatest

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/fared/fared/dataplane/internal/wire"
	"github.com/fared/fared/dataplane/rdma"
)

// Core is a transport that sends by wire.Out: what roce.NewCore and superp.NewCore return.
type Core interface {
	rdma.Transport
	wire.Core
}

// Constructor makes a core that sends by out.
type Constructor func(out wire.Out) Core

// Plane is how one plane of a Net carries datagrams. The zero value carries everything at once, in order.
type Plane struct {
	// Delay is the least a datagram takes; Jitter is the most that chance adds. Within a plane datagrams of one pair of hosts
	// stay in order all the same, unless Reorder picks one.
	Delay, Jitter time.Duration
	// Reorder, Loss, Duplicate and Corrupt are probabilities, each datagram's own. A reordered datagram takes up to Late longer
	// and may be overtaken; a corrupt one arrives with one to three bits flipped.
	Reorder, Loss, Duplicate, Corrupt float64
	// Late is the most that a reordered or duplicated datagram is late; 0: four times Delay plus Jitter.
	Late time.Duration
	// Rate is what each host may send by the plane, bytes per second; 0: no limit. Queue is how many bytes may wait for that,
	// and what exceeds it is dropped; 0: no limit.
	Rate, Queue int64
}

// NetConfig is what a Net consists of.
type NetConfig struct {
	// Seed of everything random: equal seeds and equal calls give equal runs.
	Seed uint64
	// Planes, at least one.
	Planes []Plane
	// PlaneOf is the plane that a UDP source port's datagrams take; nil: the port modulo the number of planes.
	PlaneOf func(port uint16) int
	// MTU is the longest UDP payload; longer datagrams are dropped and are a fault. 0: 65,507.
	MTU int
	// IPv6: Virtual gives its hosts addresses of that.
	IPv6 bool
	// Fate, if set, decides about each datagram instead of chance. Planes that are down lose it all the same.
	Fate func(Datagram) Fate
	// Trace, if set, is shown each datagram as it is sent.
	Trace func(Datagram)
}

// Datagram is one that is on its way.
type Datagram struct {
	From, To netip.AddrPort
	Plane    int
	// ID is its IPv4 identification (wire.Out.Next).
	ID      uint16
	Payload []byte // valid during the call only
}

// Fate is what happens to a datagram. The zero value delivers it after the plane's Delay.
type Fate struct {
	Drop, Duplicate bool
	// Late is added to the delay; above 0 others may overtake it.
	Late time.Duration
}

// NetStats are a Net's counters. Sent + Duplicated + Injected = Delivered + Lost + Dropped + Unreachable + those on their way.
type NetStats struct {
	Sent, Injected, Delivered, Duplicated, Corrupted, Reordered uint64
	// Lost by chance or on a plane that was down; Dropped by a full queue; Unreachable: nobody has the address.
	Lost, Dropped, Unreachable uint64
	// Changed counts payloads that were not the same at the flush as at Send. wire.Out forbids it, and an ICRC made at Send is wrong.
	Changed uint64
	// Bytes of UDP payload sent.
	Bytes uint64
}

// Net is a network of planes in virtual time. It has no goroutine: Step delivers what comes next. Not for concurrent use.
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
	epoch uint32              // counts outages: what was on its way in an earlier one is lost
	mute  map[netip.Addr]bool // hosts whose datagrams are lost
}

type datagram struct {
	from, to netip.AddrPort
	id       uint16
	plane    int
	epoch    uint32
	bytes    []byte
	payload  []byte // where payload comes from, until the flush
	begin    int    // where it goes in bytes
	sum      uint32 // of payload at Send
}

// NewNet makes a network whose time is 1 s, so that 0 is never a time.
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

// Now is the virtual time.
func (n *Net) Now() time.Duration { return n.now }

// Stats are the counters so far.
func (n *Net) Stats() NetStats { return n.stats }

// Err is the first misuse of the network: a datagram that is too long or an unmapped source port.
func (n *Net) Err() error { return n.fault }

// SetPlane takes a plane down or up. Down: what is on its way there is lost, and what is sent there; nobody is told.
func (n *Net) SetPlane(plane int, up bool) {
	p := &n.planes[plane]
	if !up && !p.down {
		p.epoch++
	}
	p.down = !up
}

// Up says whether a plane is up.
func (n *Net) Up(plane int) bool { return !n.planes[plane].down }

// SetSender loses, or no longer loses, what one host sends by a plane: it still receives there.
func (n *Net) SetSender(from netip.Addr, plane int, up bool) { n.planes[plane].mute[from] = !up }

// SetQuality replaces how a plane carries what is sent from now on.
func (n *Net) SetQuality(plane int, p Plane) {
	if p.Late == 0 {
		p.Late = 4 * (p.Delay + p.Jitter)
	}
	n.planes[plane].Plane = p
}

// After calls f when d has passed, outside any host's turn.
func (n *Net) After(d time.Duration, f func()) { n.events.push(event{at: n.now + max(d, 0), call: f}) }

// Inject delivers bytes as a datagram that nobody sent, after the plane's delay.
func (n *Net) Inject(from, to netip.AddrPort, plane int, b []byte) {
	n.stats.Injected++
	d := n.datagram()
	d.from, d.to, d.plane, d.epoch = from, to, plane, n.planes[plane].epoch
	d.bytes = append(d.bytes[:0], b...)
	n.deliverAt(n.now+n.planes[plane].Delay, d)
}

// Step goes to the next event and lets it happen; false: there is none. Datagrams that reach a host at one time are one turn:
// they are received, then the host flushes.
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

// Run steps until done or until the time, and says whether it is done.
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

// Stall lets time pass in which nobody runs, as when all processes are stopped: what is due meanwhile happens afterwards, late.
func (n *Net) Stall(d time.Duration) { n.now += d }

// maxTurn is how many datagrams a host takes in one turn: about what a recvmmsg returns.
const maxTurn = 64

// arrive puts a datagram into its host's inbox, and returns the host if there is one and the plane stood.
func (n *Net) arrive(d *datagram) *End {
	end := n.find(d.to)
	switch p := &n.planes[d.plane]; {
	case p.down || p.epoch != d.epoch:
		n.stats.Lost++
	case end == nil:
		n.stats.Unreachable++
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

// carry takes a datagram from a host's flush and decides what becomes of it.
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
	at, ok := from.serialise(d, p)
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
		// In order: not before what the host sent here earlier.
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

// release takes a datagram back. Its bytes change at once, so that a core which keeps what Receive lent it reads something else.
func (n *Net) release(d *datagram) {
	copy(d.bytes, poison)
	d.payload = nil
	n.free = append(n.free, d)
}

var poison = bytes.Repeat([]byte{0xdb}, maxDatagram)

func (d *datagram) public() Datagram {
	return Datagram{From: d.from, To: d.to, Plane: d.plane, ID: d.id, Payload: d.bytes}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)
