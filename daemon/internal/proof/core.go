package proof

import (
	"cmp"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/fared/fared/internal/prefixmap"
)

const (
	// quantum is the grid at which a process sends regular probes, reads those of others with their answers, and
	// answers: one wake-up serves all. quickQuantum is the grid if lost ways are avoided, and of the reading if a peer
	// avoids lost ways.
	quantum, quickQuantum = 500 * time.Millisecond, 250 * time.Millisecond
	// fastest is the least interval of the probes of a sub-port.
	fastest = 500 * time.Millisecond
	// Timeout is the time after which a probe without an answer that is handled at once is lost.
	Timeout = 250 * time.Millisecond
	// grace is the time for which a regular probe may be late: it is suspected a quantum, in which a peer that has
	// processor time answers, and a grace after it was sent.
	grace = 50 * time.Millisecond
	// slack lets the regular wake-up at a point of the grid serve what was sent at the point before it.
	slack = 5 * time.Millisecond
	// serviceEvery is the interval at which a packet to a service leaves by each sub-port.
	serviceEvery = 3 * quantum
	// Late is the time for which an answer after the timeout still counts.
	Late = 3 * time.Second
	// tardy is the lateness of a wake-up from which on the process was starved: nothing has expired meanwhile.
	tardy = 100 * time.Millisecond
	// idle is the interval of probes to peers that do not answer, for all of them together.
	idle = time.Second
	// reserve is the part of a second's probes that is kept for slots that change.
	reserve = 4
	// maxUrgent bounds the queue of slots that have changed.
	maxUrgent = 64
	// sample bounds the peers among which the next one is sought.
	sample = 64
	// recent is the number of probes of a plane and peer after which earlier ones count half.
	recent = 128
	// loyalty is the time for which probes of a peer show that it runs.
	loyalty = 3 * time.Second
)

// SubPort is a local sub-port.
type SubPort struct {
	Device string
	Plane  int // index of Config.Planes
}

// Config configures a core.
type Config struct {
	Planes   []string
	SubPorts []SubPort
	// Rate is the number of probes a second.
	Rate float64
	// Avoid is the time for which all probes of a plane toward a peer are lost until the plane is avoided; 0: never.
	Avoid time.Duration
	// Direct means that packets may leave by a sub-port without a slot.
	Direct bool
	// Services is the number of services whose packets are sent in the place of queue pairs.
	Services int
	// Phase is the offset of the grid at which Tick is called, which differs between servers.
	Phase time.Duration
	// Random drives the order, Nonce makes nonces that no other host can guess.
	Random *rand.Rand
	Nonce  func() uint64
}

// ID names a peer as seen from a source group.
type ID struct {
	Group   int
	Address netip.Addr
}

// Path is a slot that carries a share. SubPort is an index of Config.SubPorts, or -1 if packets are sprayed over the
// plane.
type Path struct{ Slot, Plane, SubPort int }

// Peer is a destination. Peers may share Paths, which never changes. Without Paths no packet is sent.
type Peer struct {
	ID
	Paths []Path
}

// Send is a probe to send.
type Send struct {
	Packet
	ID
	Source netip.Addr
	Path   Path
	// Big means that the probe has the MTU.
	Big bool
	// Service is not a probe, but a packet to a service, counted from 1, that ends at the first router.
	Service int
}

// unit is the subject of a judgment: a slot toward a peer, with small or with big packets, or with those of a service,
// counted from 1. group and slot determine its path.
type unit struct {
	ID
	source  netip.Addr
	slot    int
	big     bool
	service int
}

// role is the purpose of a probe.
type role uint8

const (
	regular role = iota
	recheck      // of a failing unit
	roleP        // of a trial, see doc.go
	roleF
	roleR
	roleC
	asked // for a person
	local // a packet of a service
	roleQ // of a trial
	cure  // by an avoided way
)

// sent is a probe on its way.
type sent struct {
	unit
	nonce         uint64
	role          role
	path          Path
	back          int       // plane of the answer
	counted       bool      // the peer answered when it was sent
	at, departed  time.Time // departed is that of the kernel's timestamp
	deadline      time.Time
	expired       bool
	trial         *trial
	round         int
	ask           *Ask
	left          string // device by which it left, "" if unknown
	leftElsewhere bool
}

// planeState is the results of probes of a plane toward a peer.
type planeState struct {
	proved, probed time.Time
	lost, answered uint32 // of recent probes
	rtt            time.Duration
}

// peer is a destination with the knowledge about it.
type peer struct {
	ID
	last   []Path // paths, or the ones before if there are none now
	planes []planeState
	// theirs is the time of the peer's last probe, heard that of the last probe of ours that it had received then.
	theirs, heard moment
	// unheard counts the probes that were sent without an answer since silentSince, receipts those of the peer's probes
	// that came after enough of them.
	silentSince, enough moment
	received            moment // of the last receipt
	urged               moment
	unheard, receipts   int32
	next                uint32 // place of the rotation in paths
	pathless            bool   // there are no paths now
	asked               bool   // since received
	answering           bool
}

// paths returns the slots that carry a share now.
func (p *peer) paths() []Path {
	if p.pathless {
		return nil
	}
	return p.last
}

// moment is a time of a core, in nanoseconds; 0 is never. There may be 131,072 peers, and a moment has a third of the
// size of a time.Time.
type moment int64

// moment returns the moment of a time.
func (c *Core) moment(t time.Time) moment {
	if c.began.IsZero() {
		c.began = t.Add(-time.Hour) // so that no time that is noted is 0, not even an earlier one
	}
	return moment(t.Sub(c.began))
}

// since returns the time from a moment, which is very long from never.
func (c *Core) since(now time.Time, m moment) time.Duration {
	if m == 0 {
		return math.MaxInt64
	}
	return time.Duration(c.moment(now) - m)
}

// Core schedules probes and judges their answers.
type Core struct {
	c       Config
	began   time.Time      // of moments; zero before the first one
	sources [][]netip.Addr // by source group
	peers   peerMap
	// order is the rotation: a random permutation of the peers, of which the first cursor have had their turn.
	order  []*peer
	cursor int
	// answering lists the peers that answer; silent counts the others.
	answering []*peer
	due       []time.Time // of each sub-port
	visits    []int       // of each sub-port: place of its rotation, which begins again after answering
	turnDue   time.Time   // of the rotation, if lost ways are avoided
	services  time.Time   // of the next packets to services
	owed      int         // sub-ports from the first one on by which such packets are still due
	idleDue   time.Time
	found     int // peers that have begun to answer, since others were searched for
	urgent    []urgent
	tokens    float64
	refilled  time.Time
	out       map[uint64]*sent
	queue     []*sent // by time of sending
	wake      time.Time
	heard     time.Time // of the last probe of any peer
	hurried   time.Time // of the last one whose answer is wanted soon
	trials    []*trial  // the first one runs
	failing   map[unit]*failure
	recheckAt time.Time
	asks      []*Ask
	// losing are ways that are lost and not avoided yet, avoided those without weight, and past are former ones.
	losing     map[way]losing
	avoided    map[way]*avoidance
	past       map[way]past
	avoidances []Avoidance // since TakeAvoidances
	proofs     []time.Time // of each plane, the last one toward any peer
	counters   []Counters
	sends      []Send
}

// Counters count the probes of a plane since the start. Late answers are not lost.
type Counters struct{ Sent, Answered, Lost uint64 }

// New returns a core without peers.
func New(c Config) *Core {
	visits := make([]int, len(c.SubPorts))
	for i := range visits {
		visits[i] = c.Random.IntN(1 << 20)
	}
	return &Core{
		visits: visits, c: c, out: map[uint64]*sent{}, failing: map[unit]*failure{}, due: make([]time.Time, len(c.SubPorts)),
		losing: map[way]losing{}, avoided: map[way]*avoidance{}, past: map[way]past{}, proofs: make([]time.Time, len(c.Planes)),
		counters: make([]Counters, len(c.Planes)), tokens: c.Rate,
	}
}

// SetPeers replaces the peers, and the local loopbacks by source group. The slots that have changed are probed first.
func (c *Core) SetPeers(now time.Time, sources [][]netip.Addr, peers []Peer) {
	c.sources = sources
	before := c.peers
	c.peers, c.order, c.answering, c.cursor = peerMap{}, make([]*peer, 0, len(peers)), nil, 0
	for _, n := range peers {
		p := before.of(n.ID)
		if p == nil {
			p = &peer{ID: n.ID, pathless: true}
		}
		c.setPaths(p, n.Paths)
		at, _ := c.peers.Add(n.Group, hostOf(n.Address))
		*at = p
		c.order = append(c.order, p)
		if p.answering {
			c.answering = append(c.answering, p)
		}
	}
	c.shuffle()
	for u, f := range c.failing {
		if path, ok := c.pathOf(u); !ok || path != f.path {
			delete(c.failing, u)
		}
	}
	c.trials = slices.DeleteFunc(c.trials, func(t *trial) bool {
		path, ok := c.pathOf(t.unit)
		return !ok || path != t.path
	})
	c.wake = time.Time{}
}

// setPaths replaces a peer's paths, and has those probed that have changed.
func (c *Core) setPaths(p *peer, paths []Path) {
	differ, old := !slices.Equal(p.paths(), paths), p.last
	if p.pathless = len(paths) == 0; p.pathless {
		return
	}
	if p.last = paths; differ {
		c.changed(p, old)
	}
}

// peerMap holds the peers by source group and address.
type peerMap struct{ prefixmap.Map[int, *peer] }

// of returns a peer, or nil if there is none.
func (m *peerMap) of(id ID) *peer {
	if p := m.Get(id.Group, hostOf(id.Address)); p != nil {
		return *p
	}
	return nil
}

func hostOf(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// shuffle begins another rotation.
func (c *Core) shuffle() {
	c.cursor = 0
	c.c.Random.Shuffle(len(c.order), func(i, j int) { c.order[i], c.order[j] = c.order[j], c.order[i] })
}

// changed queues the slots of a peer that have another place than before.
func (c *Core) changed(p *peer, old []Path) {
	if !p.answering {
		return
	}
	for _, path := range p.paths() {
		if !slices.Contains(old, path) {
			c.urge(p, path, true)
		}
	}
}

// urgent is a unit that is probed first. atOnce means that the peer answers at once, too.
type urgent struct {
	unit
	atOnce bool
}

func (c *Core) urge(p *peer, path Path, atOnce bool) {
	if source, ok := c.sourceOf(p); ok && len(c.urgent) < maxUrgent {
		c.urgent = append(c.urgent, urgent{unit{ID: p.ID, source: source, slot: path.Slot}, atOnce})
		if atOnce {
			c.wake = time.Time{}
		}
	}
}

// sourceOf returns a random loopback of the peer's family.
func (c *Core) sourceOf(p *peer) (netip.Addr, bool) {
	if p.Group >= len(c.sources) {
		return netip.Addr{}, false
	}
	all := c.sources[p.Group]
	for range 4 * len(all) {
		if a := all[c.c.Random.IntN(len(all))]; a.Is4() == p.Address.Is4() {
			return a, true
		}
	}
	i := slices.IndexFunc(all, func(a netip.Addr) bool { return a.Is4() == p.Address.Is4() })
	if i < 0 {
		return netip.Addr{}, false
	}
	return all[i], true
}

// pathOf returns the present path of a unit.
func (c *Core) pathOf(u unit) (Path, bool) {
	p := c.peers.of(u.ID)
	if p == nil || u.Group >= len(c.sources) || !slices.Contains(c.sources[u.Group], u.source) {
		return Path{}, false
	}
	if u.slot == allSlots {
		return everyPath, len(p.paths()) > 0
	}
	i := slices.IndexFunc(p.paths(), func(x Path) bool { return x.Slot == u.slot })
	if i < 0 {
		return Path{}, false
	}
	return p.paths()[i], true
}

// interval returns the interval of the probes of each sub-port: a part of the rate is left for services, and for other
// planes and peers if lost ways are avoided.
func (c *Core) interval() time.Duration {
	part := 0.75
	if c.avoids() {
		part = 0.6
	}
	return max(fastest, time.Duration(float64(len(c.c.SubPorts))/(part*c.c.Rate)*float64(time.Second)))
}

// Tick returns the probes that are due, and the time of the next call; zero means not before an event. Idle means that
// the call may come at any time up to a second later. The result is valid until the next call.
func (c *Core) Tick(now time.Time) (sends []Send, wake time.Time, idling bool) {
	c.sends = c.sends[:0]
	if late := now.Sub(c.wake); !c.wake.IsZero() && late > tardy && len(c.answering) > 0 {
		for _, s := range c.queue { // this process was starved, and maybe has not read their answers yet
			if !s.expired {
				s.deadline = s.deadline.Add(late)
			}
		}
	}
	c.expire(now)
	for u := range c.failing { // a peer that sends no more probes has stopped
		if u.slot == allSlots && c.since(now, c.peers.of(u.ID).theirs) > loyalty {
			delete(c.failing, u)
		}
	}
	if !c.refilled.IsZero() {
		c.tokens = min(c.c.Rate, c.tokens+c.c.Rate*now.Sub(c.refilled).Seconds())
	}
	c.refilled = now
	c.runAsks(now)
	c.runTrial(now)
	c.recheck(now)
	c.avoid(now)
	c.runUrgent(now)
	c.regular(now)
	c.wake = c.nextWake(now)
	return c.sends, c.wake, !c.busy(now)
}

// runUrgent sends the probes of slots that have changed, and as many others as there are sub-ports: thousands of peers
// that begin to answer cost little more than those that do.
func (c *Core) runUrgent(now time.Time) {
	left := len(c.c.SubPorts)
	kept := c.urgent[:0]
	for _, u := range c.urgent {
		least := c.c.Rate / reserve
		if u.atOnce {
			least = -least
		}
		if c.tokens <= least || !u.atOnce && left == 0 {
			kept = append(kept, u)
			continue
		}
		path, ok := c.pathOf(u.unit)
		switch {
		case !ok:
		case u.atOnce:
			c.sendAtOnce(now, u.unit, path, path.Plane, regular)
		default:
			left--
			c.send(now, u.unit, path, path.Plane, regular)
		}
	}
	c.urgent = kept
}

// sendAtOnce sends a probe that is read and answered at once.
func (c *Core) sendAtOnce(now time.Time, u unit, path Path, back int, r role) *sent {
	s := c.send(now, u, path, back, r)
	s.deadline = now.Add(Timeout)
	c.sends[len(c.sends)-1].Flags |= FlagAtOnce
	return s
}

// toService sends a packet to a service. Nobody answers it: Left ends it.
func (c *Core) toService(now time.Time, u unit, path Path) {
	s := &sent{unit: u, nonce: c.c.Nonce(), role: local, path: path, at: now, departed: now}
	c.tokens--
	c.out[s.nonce] = s
	c.sends = append(c.sends, Send{Packet: Packet{Nonce: s.nonce}, ID: u.ID, Source: u.source, Path: path, Service: u.service})
}

// send sends a probe by a path, to be answered by plane back.
func (c *Core) send(now time.Time, u unit, path Path, back int, r role) *sent {
	p := c.peers.of(u.ID)
	s := &sent{unit: u, nonce: c.c.Nonce(), role: r, path: path, back: back, at: now, departed: now, deadline: now.Add(c.quantum() + grace)}
	if c.avoids() && p.planes != nil {
		p.planes[path.Plane].probed = now
	}
	c.tokens--
	c.out[s.nonce] = s
	c.queue = append(c.queue, s)
	packet := Packet{
		Kind: Probe, Nonce: s.nonce, Sent: now.UnixNano(), Heard: NeverHeard, Slot: uint16(max(0, u.slot)),
		Plane: NameOf(c.c.Planes[path.Plane]), Return: NameOf(c.c.Planes[back]),
	}
	if c.avoids() {
		packet.Flags = FlagSoon
	}
	if path.SubPort >= 0 {
		packet.Device = NameOf(c.c.SubPorts[path.SubPort].Device)
	}
	if p.theirs != 0 {
		packet.Heard = uint32(min(c.since(now, p.theirs).Milliseconds(), NeverHeard-1))
	}
	c.sends = append(c.sends, Send{Packet: packet, ID: u.ID, Source: u.source, Path: path, Big: u.big})
	if s.counted = p.answering && r != cure && back == path.Plane; s.counted {
		c.counters[path.Plane].Sent++
	}
	if p.asked = true; !p.answering && !u.big {
		if p.unheard == 0 {
			p.silentSince = c.moment(now)
		}
		if p.unheard++; p.unheard == enoughProbes {
			p.enough = c.moment(now)
		}
	}
	return s
}

// expire handles the probes whose answers are late, and forgets those that are too late.
func (c *Core) expire(now time.Time) {
	for _, s := range c.queue {
		if s.expired || now.Before(s.deadline) {
			continue
		}
		s.expired = true
		if c.out[s.nonce] == nil {
			continue
		}
		if s.counted {
			c.counters[s.path.Plane].Lost++
			if p := c.peers.of(s.ID); p != nil && p.planes != nil {
				p.planes[s.path.Plane].lost++
			}
		}
		switch s.role {
		case regular:
			c.suspect(s)
		case recheck:
			if f := c.failing[s.unit]; f != nil {
				f.proofs = 0
			}
		case asked:
			s.ask.lost(s)
		case cure:
			c.cureLost(s)
		}
	}
	kept := c.queue[:0]
	for _, s := range c.queue {
		if c.out[s.nonce] != nil && now.Sub(s.deadline) < Late {
			kept = append(kept, s)
			continue
		}
		delete(c.out, s.nonce)
	}
	clear(c.queue[len(kept):])
	c.queue = kept
}

// nextWake returns the time of the next action.
func (c *Core) nextWake(now time.Time) time.Time {
	next := time.Time{}
	earlier := func(t time.Time) {
		if !t.IsZero() && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	if len(c.answering) < c.peers.Len() {
		earlier(c.idleDue)
	}
	if c.busy(now) {
		earlier(c.nextPoint(now, c.reading(now)))
	}
	for _, s := range c.queue { // those of peers that do not answer wait for other work
		if !s.expired && (s.counted || s.role != regular) && c.out[s.nonce] == s {
			earlier(s.deadline)
		}
	}
	if slices.ContainsFunc(c.urgent, func(u urgent) bool { return u.atOnce }) {
		earlier(now.Add(time.Duration(float64(time.Second) / c.c.Rate)))
	}
	if len(c.trials) > 0 {
		earlier(c.trials[0].next)
	}
	for _, l := range c.losing {
		earlier(l.since.Add(c.c.Avoid))
	}
	if len(c.failing) > 0 {
		earlier(c.recheckAt)
	}
	for _, a := range c.asks {
		earlier(a.next)
	}
	if !next.IsZero() && next.Before(now.Add(time.Millisecond)) {
		next = now.Add(time.Millisecond)
	}
	return next
}

// compareIDs orders peers.
func compareIDs(a, b ID) int {
	return cmp.Or(cmp.Compare(a.Group, b.Group), a.Address.Compare(b.Address))
}
