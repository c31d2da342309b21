package lab

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// rocePort is the UDP port that traffic goes to: RoCEv2's, which the data plane steers.
const rocePort = 4791

// The payload of a packet: a mark, the number of the tally it is counted in, its pair, and its number in its server's ledger.
const (
	payloadMark  = 0xfa4ed1ab
	payloadBytes = 64
	payloadUsed  = 16
)

// traffic is the packets of a fabric of namespaces. Each server sends UDP to every other's loopbacks, from every slot's source
// port as much as the slot's share, as its queue pairs would; receivers count what arrives, and a witness on each leaf what
// comes in from servers, so that each packet's plane is known.
type traffic struct {
	*plan
	loopbacks int // of the fabric
	rate      int
	ready     func(context.Context) // waits for what weights do not tell of before packets are judged; nil: nothing
	cancel    context.CancelFunc
	done      sync.WaitGroup
	closers   []func() error
	// carried says that queue pairs use the slots' source ports and RoCEv2's: nothing is sent here, only heard.
	carried bool
	moved   atomic.Uint64
	senders []*sender
	gauge   *gauge
	epoch   time.Time // packets' times count from it

	mu  sync.RWMutex // senders hold it for reading while they send and count; guards now
	now *tally
	// all are the tallies that packets may still come in for, by number.
	all sync.Map
}

// tally counts the packets of one span of time. A pair is source loopback * loopbacks + destination loopback.
type tally struct {
	number uint32
	sent   []atomic.Uint64 // by pair
	// received counts packets once; what arrived again, and what arrived when it counted as lost, is counted beside.
	received         []atomic.Uint64   // by pair
	seen             [][]atomic.Uint64 // by plane and pair, at the leaf
	duplicated, late atomic.Uint64

	mu     sync.Mutex // guards what follows
	losses map[lane]loss
}

func (t *traffic) newTally(number uint32) *tally {
	pairs := t.loopbacks * t.loopbacks
	n := &tally{number: number, sent: make([]atomic.Uint64, pairs), received: make([]atomic.Uint64, pairs), losses: map[lane]loss{}}
	for range t.Planes {
		n.seen = append(n.seen, make([]atomic.Uint64, pairs))
	}
	t.all.Store(number, n)
	return n
}

// sum adds counters up.
func sum(counters []atomic.Uint64) (n uint64) {
	for i := range counters {
		n += counters[i].Load()
	}
	return n
}

func (t *tally) witnessed() (n uint64) {
	for _, plane := range t.seen {
		n += sum(plane)
	}
	return n
}

// roll begins a new tally and returns the one before, for which nothing more is sent.
func (t *traffic) roll() *tally {
	t.mu.Lock()
	defer t.mu.Unlock()
	last := t.now
	t.now = t.newTally(last.number + 1)
	t.all.Delete(last.number - 3) // by now everything has arrived or is lost
	return last
}

// quiet is how long nothing may have come in of a tally until what is missing counts as lost; the queue of a cable holds a
// packet for 50 ms at most.
const quiet = 150 * time.Millisecond

// gather waits until every packet of a tally has arrived or is lost, and settles them.
func (t *traffic) gather(ctx context.Context, n *tally) {
	defer func() {
		for _, o := range t.senders {
			o.mu.Lock()
			o.ledger.settle(n)
			o.mu.Unlock()
		}
	}()
	sent := sum(n.sent)
	last, since := uint64(0), time.Now()
	for {
		received, witnessed := sum(n.received), n.witnessed()
		if received >= sent && witnessed >= sent {
			return
		}
		if received+witnessed != last {
			last, since = received+witnessed, time.Now()
		}
		if time.Since(since) > quiet || sleep(ctx, 2*time.Millisecond) != nil {
			return
		}
	}
}

func (t *traffic) pair(src, srcGPU, dst, dstGPU int) int {
	return (src*t.GPUs+srcGPU)*t.loopbacks + dst*t.GPUs + dstGPU
}

// startTraffic subscribes to every server's weights and begins to send by them.
func startTraffic(ctx context.Context, b *real, fail func(error)) (*traffic, error) {
	ctx, cancel := context.WithCancel(ctx)
	t := &traffic{plan: b.plan, loopbacks: b.Servers * b.GPUs, rate: b.rate, carried: b.options.Transport != "", cancel: cancel, epoch: time.Now()}
	t.ready = b.leavesForward
	t.now = t.newTally(0)
	for s := range t.Servers { // receivers know them all
		t.senders = append(t.senders, newSender(t, s, b.namespace(t.Server[s].Name)))
	}
	ends := func() error {
		for _, leaf := range t.Leaf {
			w, err := newWitness(b.namespace(leaf.Name), t.serverPorts(leaf))
			if err != nil {
				return fmt.Errorf("watch packets on %s: %w", leaf.Name, err)
			}
			t.closers = append(t.closers, w.Close)
			t.spawn(ctx, fail, "witness of "+leaf.Name, func() error { return t.witness(w, leaf.Plane) })
		}
		for s := range t.Servers {
			for g := range t.GPUs {
				conn, err := listenUDP(b.namespace(t.Server[s].Name), netip.AddrPortFrom(t.Loopback(s, g).Addr(), rocePort))
				if err != nil {
					return fmt.Errorf("receive on %s: %w", t.Server[s].Name, err)
				}
				t.closers = append(t.closers, conn.Close)
				t.spawn(ctx, fail, "receiver of "+t.Server[s].Name, func() error { return t.receive(conn) })
			}
		}
		return nil
	}
	open := func() error {
		if !t.carried {
			if err := ends(); err != nil {
				return err
			}
		}
		var err error
		if t.gauge, err = newGauge(b); err != nil {
			return err
		}
		t.closers = append(t.closers, t.gauge.close)
		t.spawn(ctx, fail, "gauge", func() error { return t.gauge.run(ctx, t) })
		for s, o := range t.senders {
			t.spawn(ctx, fail, "subscription to "+o.name, func() error { return o.follow(ctx, b.clients[b.Server[s]]) })
			t.spawn(ctx, fail, "sender of "+o.name, func() error { return o.send(ctx) })
		}
		return nil
	}
	if err := open(); err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

// spawn runs f until it ends, which it does after t.cancel. A panic ends the lab as an error does: what runs in the namespaces
// would outlive this process.
func (t *traffic) spawn(ctx context.Context, fail func(error), name string, f func() error) {
	t.done.Go(func() {
		defer func() {
			if r := recover(); r != nil {
				fail(fmt.Errorf("%s: panic: %v\n%s", name, r, debug.Stack()))
			}
		}()
		if err := f(); err != nil && ctx.Err() == nil {
			fail(fmt.Errorf("%s: %w", name, err))
		}
	})
}

// mute keeps a server from sending, or lets it begin anew.
func (t *traffic) mute(server int, on bool) {
	o := t.senders[server]
	o.mu.Lock()
	defer o.mu.Unlock()
	o.muted = on
	o.outlets, o.order, o.slots = map[int]*outlet{}, nil, map[netip.Addr][]string{}
	o.weights.forget()
}

func (t *traffic) close() {
	t.cancel()
	for _, c := range t.closers {
		_ = c() // nothing is written that could be lost
	}
	t.done.Wait()
	for _, o := range t.senders {
		o.close()
	}
}

// socketBytes holds what arrives while this process does not get to read.
const socketBytes = 8 << 20

// listenUDP opens a UDP socket in a namespace.
func listenUDP(ns namespace, at netip.AddrPort) (conn *net.UDPConn, err error) {
	err = ns.do(func() error {
		var inner error
		conn, inner = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
		return inner
	})
	if err != nil {
		return nil, err
	}
	if err := enlarge(conn); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// enlarge gives a socket a larger buffer than net.core.rmem_max, which root may do.
func enlarge(conn *net.UDPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = raw.Control(func(fd uintptr) {
		inner = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBytes)
	})
	return errors.Join(err, inner)
}

// receive counts what arrives at a loopback until the socket is closed.
func (t *traffic) receive(conn *net.UDPConn) error {
	buf := make([]byte, 2*payloadBytes)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return err
		}
		c, pair := t.counted(buf[:n])
		if c == nil {
			continue
		}
		src, _ := t.ends(pair)
		switch t.senders[src].ledger.arrive(binary.BigEndian.Uint32(buf[12:])) {
		case firstTime:
			c.received[pair].Add(1)
		case duplicate:
			c.duplicated.Add(1)
		case late:
			c.late.Add(1)
		}
	}
}

// counted finds the tally and the pair of a payload; nil for what is not ours, or too old.
func (t *traffic) counted(payload []byte) (*tally, int) {
	if len(payload) < payloadUsed || binary.BigEndian.Uint32(payload) != payloadMark {
		return nil, 0
	}
	n, ok := t.all.Load(binary.BigEndian.Uint32(payload[4:]))
	pair := int(binary.BigEndian.Uint32(payload[8:]))
	if !ok || pair >= t.loopbacks*t.loopbacks {
		return nil, 0
	}
	return n.(*tally), pair
}

// sender is a server's traffic.
type sender struct {
	*traffic
	name   string
	server int
	ns     namespace

	sockets map[netip.AddrPort]*net.UDPConn // by source; used by follow alone, and by close after its end

	weights *follower
	ledger  *ledger

	mu      sync.Mutex              // guards what follows, and what of the ledger is the sender's
	slots   map[netip.Addr][]string // the place of each slot when it was last known
	outlets map[int]*outlet         // by pair
	order   []*outlet
	uses    map[use]*int64 // when packets were last sent so, ns since the epoch; -1: never
	muted   bool
}

// outlet is what a server sends from one of its loopbacks to a destination.
type outlet struct {
	pair  int
	to    netip.AddrPort
	slots []flow
	// placed says that the source ports were chosen to land where the slots are.
	placed bool
}

// unplaced is how WatchWeights says that source ports are not chosen by the data plane's hash, which is not known (yet).
const unplaced = "uniform"

// flow is a slot: its credit grows by its share with every packet of the pair, and the richest sends.
type flow struct {
	lane          lane
	conn          *net.UDPConn
	share, credit int64
	last          *int64 // of sender.uses
}

// use is the sending of a pair's packets from a source port.
type use struct {
	lane lane
	conn *net.UDPConn
}

func newSender(t *traffic, server int, ns namespace) *sender {
	return &sender{traffic: t, name: t.Server[server].Name, server: server, ns: ns, weights: newFollower(), ledger: newLedger(t.rate),
		sockets: map[netip.AddrPort]*net.UDPConn{},
		slots:   map[netip.Addr][]string{}, outlets: map[int]*outlet{}, uses: map[use]*int64{}}
}

func (o *sender) close() {
	for _, c := range o.sockets {
		c.Close()
	}
}

// follow takes what the server's daemon says of weights and slots. A crash that was ordered is survived: what was said before it
// is sent by until more is said, as queue pairs do.
func (o *sender) follow(ctx context.Context, c *client) error {
	for {
		crashes := c.crashes.Load()
		if err := o.listen(ctx, c); c.crashes.Load() == crashes {
			return err
		}
	}
}

// listen takes what the daemon says, for as long as it says it.
func (o *sender) listen(ctx context.Context, c *client) error {
	stream, err := c.weights.WatchWeights(ctx, &farev1.WatchWeightsRequest{})
	if err != nil {
		return err
	}
	for {
		message, err := stream.Recv()
		if err != nil {
			return err
		}
		at := time.Now()
		err = eachDestination(message, func(dst netip.Addr, d *farev1.DestinationWeights) error { return o.take(dst, d, at) })
		if err != nil {
			return err
		}
	}
}

// take makes a destination's slots, heard of at a moment, what is sent by from now on.
func (o *sender) take(dst netip.Addr, d *farev1.DestinationWeights, at time.Time) error {
	to := o.index(dst)
	if to < 0 || to/o.GPUs == o.server {
		return nil
	}
	if o.carried {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.countMoves(dst, d)
		o.weights.note(dst, d, at, time.Time{})
		return nil
	}
	outlets := map[int]*outlet{}
	for _, p := range d.Pairs {
		source, err := netip.ParsePrefix(p.Source)
		if err != nil {
			return err
		}
		from := o.index(source.Addr())
		if from < 0 {
			return fmt.Errorf("slots of the source %s, which is no GPU of the fabric", source)
		}
		pair := from*o.loopbacks + to
		if known := o.outlet(pair); known != nil && known.placed && p.PortPlacement == unplaced {
			outlets[pair] = known // queue pairs are not set up again because the daemon has yet to ask its data plane
			continue
		}
		out := &outlet{pair: pair, to: netip.AddrPortFrom(dst, rocePort), placed: p.PortPlacement != unplaced}
		for _, s := range p.Slots {
			if s.SharePpb == 0 {
				continue
			}
			conn, err := o.socket(netip.AddrPortFrom(source.Addr(), uint16(s.UdpSourcePort)))
			if err != nil {
				return err
			}
			plane := slices.IndexFunc(d.Planes, func(p *farev1.PlaneWeight) bool { return p.Plane == s.Plane })
			if plane < 0 || plane >= o.Planes {
				return fmt.Errorf("a slot in plane %q, which the fabric does not have", s.Plane)
			}
			out.slots = append(out.slots, flow{lane: lane{pair, plane}, conn: conn, share: int64(s.SharePpb)})
		}
		outlets[out.pair] = out
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	var adopted time.Time
	o.countMoves(dst, d)
	for from := range o.GPUs {
		pair := (o.server*o.GPUs+from)*o.loopbacks + to
		out := outlets[pair]
		if !out.same(o.outlets[pair]) {
			adopted = time.Now()
		}
		if out != nil && len(out.slots) > 0 {
			o.remember(out)
			o.outlets[pair] = out
		} else {
			delete(o.outlets, pair)
		}
	}
	o.order = o.order[:0]
	for pair := range o.loopbacks * o.loopbacks {
		if out := o.outlets[pair]; out != nil {
			o.order = append(o.order, out)
		}
	}
	o.weights.note(dst, d, at, adopted)
	return nil
}

// same says whether two outlets send from the same slots; nil is one without any.
func (o *outlet) same(p *outlet) bool {
	var a, b []flow
	if o != nil {
		a = o.slots
	}
	if p != nil {
		b = p.slots
	}
	return slices.EqualFunc(a, b, func(x, y flow) bool { return x.lane == y.lane && x.conn == y.conn && x.share == y.share })
}

// remember gives an outlet's slots the memory of when they were used last, maybe by another outlet. The caller holds mu.
func (o *sender) remember(out *outlet) {
	for i := range out.slots {
		s := &out.slots[i]
		u := use{s.lane, s.conn}
		if o.uses[u] == nil {
			never := int64(-1)
			o.uses[u] = &never
		}
		s.last = o.uses[u]
	}
}

// left is when the last packet was sent toward a server from a slot that is not used any more, and in which lane; -1: none was.
func (o *sender) left(dst int) (last int64, in lane) {
	last = -1
	o.mu.Lock()
	defer o.mu.Unlock()
	for u, at := range o.uses {
		if _, to := o.ends(u.lane.pair); to != dst || *at < last || *at == last && !u.lane.before(in) {
			continue
		}
		if out := o.outlets[u.lane.pair]; out == nil || !slices.ContainsFunc(out.slots, func(s flow) bool { return s.conn == u.conn && s.lane == u.lane }) {
			last, in = *at, u.lane
		}
	}
	return last, in
}

// outlet is what is sent by for a pair now; nil: nothing is.
func (o *sender) outlet(pair int) *outlet {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.outlets[pair]
}

// countMoves counts slots that are elsewhere than when last heard of. The caller holds mu.
func (o *sender) countMoves(dst netip.Addr, d *farev1.DestinationWeights) {
	if len(d.Pairs) == 0 || len(d.Pairs[0].Slots) == 0 {
		return // unreachable: when it returns, its slots are compared with the places they had
	}
	places := make([]string, len(d.Pairs[0].Slots)) // the same for every source
	for i, s := range d.Pairs[0].Slots {
		places[i] = s.Plane + " " + s.SubPort
	}
	if before := o.slots[dst]; len(before) == len(places) {
		for i := range places {
			if places[i] != before[i] {
				o.moved.Add(1)
			}
		}
	}
	o.slots[dst] = places
}

// index is a loopback's number in the fabric, or -1.
func (t *traffic) index(a netip.Addr) int {
	for s := range t.Servers {
		for g := range t.GPUs {
			if t.Loopback(s, g).Addr() == a {
				return s*t.GPUs + g
			}
		}
	}
	return -1
}

// socket returns the socket that sends from a source; it stays open, for the port is likely to be used again.
func (o *sender) socket(source netip.AddrPort) (*net.UDPConn, error) {
	if c := o.sockets[source]; c != nil {
		return c, nil
	}
	c, err := listenUDP(o.ns, source)
	if err == nil {
		o.sockets[source] = c
	}
	return c, err
}

// beat is how often a sender sends: often enough that planes are used evenly, seldom enough to leave the processor to others.
const beat = 2 * time.Millisecond

// send sends the server's packets at the lab's rate, one to each destination in turn.
func (o *sender) send(ctx context.Context) error {
	if o.rate == 0 {
		return nil
	}
	tick := time.NewTicker(beat)
	defer tick.Stop()
	payload := make([]byte, payloadBytes)
	binary.BigEndian.PutUint32(payload, payloadMark)
	var due float64
	last := time.Now()
	turn := 0
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			// What was missed because the machine was busy is not made up for in one burst.
			due = min(due+float64(o.rate)*now.Sub(last).Seconds(), float64(o.rate)/20+1)
			last = now
			due -= float64(o.burst(payload, int(due), &turn))
		}
	}
}

// burst sends n packets and returns n. Everything in it is of one tally.
func (o *sender) burst(payload []byte, n int, turn *int) int {
	o.traffic.mu.RLock()
	defer o.traffic.mu.RUnlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	t := o.now
	binary.BigEndian.PutUint32(payload[4:], t.number)
	for range n {
		if o.muted || len(o.order) == 0 {
			break
		}
		*turn = (*turn + 1) % len(o.order)
		out := o.order[*turn]
		binary.BigEndian.PutUint32(payload[8:], uint32(out.pair))
		slot := out.next()
		t.sent[out.pair].Add(1)
		sent := time.Since(o.epoch).Nanoseconds()
		*slot.last = sent
		binary.BigEndian.PutUint32(payload[12:], o.ledger.send(t, slot.lane, sent))
		// What the kernel refuses (no route at the moment) is lost, and found to be so.
		_, _ = slot.conn.WriteToUDPAddrPort(payload, out.to)
	}
	return n
}

// next is the slot whose turn it is: they take turns as their shares are, as evenly as can be.
func (o *outlet) next() *flow {
	best := 0
	var total int64
	for i := range o.slots {
		s := &o.slots[i]
		s.credit += s.share
		total += s.share
		if s.credit > o.slots[best].credit {
			best = i
		}
	}
	o.slots[best].credit -= total
	return &o.slots[best]
}
