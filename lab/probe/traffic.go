package probe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// rocePort is the destination port of the traffic: RoCEv2's, which the data plane steers.
const rocePort = 4791

// The payload of a packet: a mark, the number of its tally, its pair, and its number in its server's ledger.
const (
	payloadMark  = 0xfa4ed1ab
	payloadBytes = 64
	payloadUsed  = 16
)

// Traffic is the packet traffic of a fabric. Each server sends UDP from each of its loopbacks to every other server's
// loopbacks, from every slot's source port in proportion to the slot's share, like its queue pairs would. Receivers
// count the packets that arrive. A packet socket on each leaf counts the packets from servers by cable, so that each
// packet's sub-port is known.
type Traffic struct {
	*topo.Fabric
	loopbacks int // number of loopbacks in the fabric
	lanes     int // the maximum number of cables of a source group
	rate      int
	cancel    context.CancelFunc
	done      sync.WaitGroup
	closers   []func() error
	readers   []syscall.Conn // sockets of receivers and leaves
	// carried is true if queue pairs use the slots' source ports and RoCEv2's port: then this traffic only follows
	// weights and sends nothing.
	carried bool
	moved   atomic.Uint64
	senders []*sender
	gauge   *gauge
	epoch   time.Time     // epoch of packets' times
	backlog time.Duration // bounds Gather

	mu  sync.RWMutex // held for reading by senders while they send and count; guards now
	now *Tally
	// all holds the tallies whose packets may still arrive, by number.
	all sync.Map
}

// Tally counts the packets of one span of time. A pair is source loopback * loopbacks + destination loopback.
type Tally struct {
	number uint32
	sent   []atomic.Uint64 // by pair
	// received counts each packet once; duplicated and late packets have separate counters.
	received         []atomic.Uint64 // by pair
	seen             []atomic.Uint64 // at the leaves, by pair and cable of its source group: see traffic.lane
	astray           []atomic.Uint64 // at the leaves, by pair: packets that arrived on the cable of another source group
	duplicated, late atomic.Uint64

	mu     sync.Mutex // guards the fields below
	losses map[Lane]loss
}

func (t *Traffic) newTally(number uint32) *Tally {
	pairs := t.loopbacks * t.loopbacks
	n := &Tally{number: number, sent: make([]atomic.Uint64, pairs), received: make([]atomic.Uint64, pairs), losses: map[Lane]loss{},
		seen: make([]atomic.Uint64, pairs*t.lanes), astray: make([]atomic.Uint64, pairs)}
	t.all.Store(number, n)
	return n
}

// sum returns the sum of counters.
func sum(counters []atomic.Uint64) (n uint64) {
	for i := range counters {
		n += counters[i].Load()
	}
	return n
}

func (t *Tally) passed() uint64 { return sum(t.seen) + sum(t.astray) }

// Roll starts a new tally and returns the previous one, for which nothing more is sent.
func (t *Traffic) Roll() *Tally {
	t.mu.Lock()
	defer t.mu.Unlock()
	last := t.now
	t.now = t.newTally(last.number + 1)
	t.all.Delete(last.number - 3) // by now all its packets have arrived or are lost
	return last
}

// quiet is the time without an arrival after which the missing packets of a tally count as lost; a cable's queue holds
// a packet for 50 ms at most.
const quiet = 150 * time.Millisecond

// backlog is the value of Traffic.backlog: the time without an arrival after which they are lost even if sockets have
// unread packets: those of later tallies, on a machine that is never done with them. A full socket is read in less.
const backlog = 20 * time.Second

// Gather waits until every packet of a tally has arrived or is lost, and settles them.
func (t *Traffic) Gather(ctx context.Context, n *Tally) {
	defer func() {
		for _, o := range t.senders {
			o.mu.Lock()
			o.ledger.settle(n)
			o.mu.Unlock()
		}
	}()
	sent := sum(n.sent)
	last, since, arrival := uint64(0), time.Now(), time.Now()
	for {
		received, witnessed := sum(n.received), n.passed()
		if received >= sent && witnessed >= sent {
			return
		}
		if received+witnessed != last {
			last, since, arrival = received+witnessed, time.Now(), time.Now()
		}
		if time.Since(since) > quiet {
			if !t.unread() || time.Since(arrival) > t.backlog {
				return
			}
			since = time.Now()
		}
		if backend.Sleep(ctx, 2*time.Millisecond) != nil {
			return
		}
	}
}

// unread reports whether a receiver or a counter has unread packets in its socket: a busy machine may delay its
// goroutine for longer than quiet.
func (t *Traffic) unread() bool {
	for _, c := range t.readers {
		raw, err := c.SyscallConn()
		if err != nil {
			continue // closed
		}
		waiting := 0
		_ = raw.Control(func(fd uintptr) { waiting, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // SIOCINQ: size of the next packet
		if waiting > 0 {
			return true
		}
	}
	return false
}

func (t *Traffic) pair(src, srcGPU, dst, dstGPU int) int {
	return (src*t.GPUs+srcGPU)*t.loopbacks + dst*t.GPUs + dstGPU
}

// Config describes a fabric's packet traffic.
type Config struct {
	*topo.Fabric
	Hosts   backend.Hosts
	API     func(*topo.Node) backend.API
	Rate    int  // packets per second of each server
	Carried bool // queue pairs send
}

// Start subscribes to every server's weights and starts sending by them.
func Start(ctx context.Context, c Config, fail func(error)) (*Traffic, error) {
	ctx, cancel := context.WithCancel(ctx)
	t := &Traffic{Fabric: c.Fabric, loopbacks: c.Servers * c.GPUs, rate: c.Rate, carried: c.Carried, cancel: cancel, epoch: time.Now(), backlog: backlog}
	for _, g := range c.Groups() {
		t.lanes = max(t.lanes, len(g.Cables))
	}
	t.now = t.newTally(0)
	for s := range t.Servers { // receivers use all of them
		t.senders = append(t.senders, newSender(t, s, c.Hosts.Namespace(t.Server[s].Name)))
	}
	ends := func() error {
		for _, leaf := range t.Leaf {
			w, err := newCounterSocket(c.Hosts.Namespace(leaf.Name), serverCables(t.Fabric, leaf))
			if err != nil {
				return fmt.Errorf("watch packets on %s: %w", leaf.Name, err)
			}
			t.closers, t.readers = append(t.closers, w.Close), append(t.readers, w)
			t.spawn(ctx, fail, "counter of "+leaf.Name, func() error { return t.countAtLeaf(ctx, w) })
		}
		for s := range t.Servers {
			for g := range t.GPUs {
				conn, err := newReceiver(c.Hosts.Namespace(t.Server[s].Name), t.Loopback(s, g).Addr())
				if err != nil {
					return fmt.Errorf("receive on %s: %w", t.Server[s].Name, err)
				}
				t.closers, t.readers = append(t.closers, conn.Close), append(t.readers, conn)
				t.spawn(ctx, fail, "receiver of "+t.Server[s].Name, func() error { return t.receive(conn) })
			}
		}
		return nil
	}
	open := func() error {
		var err error
		if t.gauge, err = newGauge(c.Fabric, c.Hosts); err != nil { // before the counters, which count in it
			return err
		}
		if !t.carried {
			if err := ends(); err != nil {
				return err
			}
		}
		t.closers = append(t.closers, t.gauge.close)
		t.spawn(ctx, fail, "gauge", func() error { return t.gauge.run(ctx) })
		for s, o := range t.senders {
			t.spawn(ctx, fail, "subscription to "+o.name, func() error { return o.follow(ctx, c.API(c.Server[s])) })
			t.spawn(ctx, fail, "sender of "+o.name, func() error { return o.send(ctx) })
		}
		return nil
	}
	if err := open(); err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// spawn runs f until it ends, which it does after t.cancel. A panic ends the lab like an error, because the processes
// in the namespaces would outlive this process.
func (t *Traffic) spawn(ctx context.Context, fail func(error), name string, f func() error) {
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

// Mute stops a server's sending, or lets it start with empty state.
func (t *Traffic) Mute(server int, on bool) {
	o := t.senders[server]
	o.mu.Lock()
	defer o.mu.Unlock()
	o.muted = on
	o.outlets, o.order, o.slots = map[int]*outlet{}, nil, map[topo.Way][]string{}
	o.weights.forget()
}

// Close stops senders, counters and followers, and waits for them.
func (t *Traffic) Close() {
	t.cancel()
	for _, c := range t.closers {
		_ = c() // nothing is written, so nothing can be lost
	}
	t.done.Wait()
	for _, o := range t.senders {
		o.close()
	}
}

// socketBytes is the size of socket buffers, which hold packets while this process is not scheduled.
const socketBytes = 8 << 20

// newSource opens a UDP socket that sends from an address and port of a namespace. It shares the port with programs
// that send from it, too.
func newSource(ns backend.Namespace, from netip.AddrPort) (conn *net.UDPConn, err error) {
	share := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var inner error
		err := c.Control(func(fd uintptr) { inner = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
		return errors.Join(err, inner)
	}}
	err = ns.Do(func() error {
		c, err := share.ListenPacket(context.Background(), "udp4", from.String())
		if err == nil {
			conn = c.(*net.UDPConn)
		}
		return err
	})
	return conn, err
}

// receive counts the packets that arrive at a loopback until the socket is closed.
func (t *Traffic) receive(conn *os.File) error {
	buf := make([]byte, countedBytes)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			if errors.Is(err, os.ErrClosed) {
				return nil
			}
			return err
		}
		payload := payloadOf(buf[:n])
		c, pair := t.counted(payload)
		if c == nil {
			continue
		}
		src, _ := t.Ends(pair)
		switch t.senders[t.Host(src)].ledger.arrive(binary.BigEndian.Uint32(payload[12:])) {
		case firstTime:
			c.received[pair].Add(1)
		case duplicate:
			c.duplicated.Add(1)
		case late:
			c.late.Add(1)
		}
	}
}

// counted returns the tally and the pair of a payload, or nil for packets that are foreign or too old.
func (t *Traffic) counted(payload []byte) (*Tally, int) {
	if len(payload) < payloadUsed || binary.BigEndian.Uint32(payload) != payloadMark {
		return nil, 0
	}
	n, ok := t.all.Load(binary.BigEndian.Uint32(payload[4:]))
	pair := int(binary.BigEndian.Uint32(payload[8:]))
	if !ok || pair >= t.loopbacks*t.loopbacks {
		return nil, 0
	}
	return n.(*Tally), pair
}

// sender sends a server's traffic.
type sender struct {
	*Traffic
	name   string
	server int
	ns     backend.Namespace

	sockets map[netip.AddrPort]*net.UDPConn // by source; used by follow alone, and by close after follow has ended

	weights *Follower
	ledger  *ledger

	mu      sync.Mutex            // guards the fields below, and the sender's part of the ledger
	slots   map[topo.Way][]string // last known place of each slot
	outlets map[int]*outlet       // by pair
	order   []*outlet
	uses    map[use]*int64 // time of the last packet by use, ns since the epoch; -1: never
	muted   bool
}

// outlet holds the sending slots from one of a server's loopbacks to a destination.
type outlet struct {
	pair  int
	to    netip.AddrPort
	slots []flow
	// placed is true if the source ports were chosen to land where the slots are.
	placed bool
}

// unplaced is the value of WatchWeights for source ports that are not chosen by the data plane's hash, which is not
// (yet) known.
const unplaced = "uniform"

// flow is a sending slot: its credit grows by its share with every packet of the pair, and the slot with the most
// credit sends.
type flow struct {
	lane          Lane
	device        string // device of the sub-port; "" if packets are sprayed over a plane's
	conn          *net.UDPConn
	share, credit int64
	last          *int64 // element of sender.uses
}

// use identifies the sending of a pair's packets from a source port.
type use struct {
	lane Lane
	conn *net.UDPConn
}

func newSender(t *Traffic, server int, ns backend.Namespace) *sender {
	return &sender{Traffic: t, name: t.Server[server].Name, server: server, ns: ns, weights: NewFollower(t.Fabric, server), ledger: newLedger(t.rate),
		sockets: map[netip.AddrPort]*net.UDPConn{},
		slots:   map[topo.Way][]string{}, outlets: map[int]*outlet{}, uses: map[use]*int64{}}
}

func (o *sender) close() {
	for _, c := range o.sockets {
		c.Close()
	}
}

// follow applies the weights and slots of the server's daemon.
func (o *sender) follow(ctx context.Context, daemon backend.API) error {
	return daemon.Follow(ctx, &farev1.WatchWeightsRequest{}, func(message *farev1.WatchWeightsResponse) error {
		at := time.Now()
		return eachRow(message, func(d *farev1.DestinationWeights) error {
			ways, err := WaysOf(o.Fabric, o.server, d)
			for _, to := range ways {
				err = errors.Join(err, o.take(to, d, at))
			}
			return err
		})
	})
}

// take makes the slots of a row, received at a moment, the sending slots of a way.
func (o *sender) take(toward topo.Way, d *farev1.DestinationWeights, at time.Time) error {
	to, group := o.index(toward.Destination), o.Groups()[toward.Source]
	if to < 0 || to/o.GPUs == o.server {
		return nil
	}
	if o.carried {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.countMoves(toward, d)
		o.weights.note(toward, d, at, time.Time{})
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
			return fmt.Errorf("slots of the source %s, which is not a GPU of the fabric", source)
		}
		if o.groupOf(from) != group.Index {
			continue // the row covers several source groups
		}
		pair := from*o.loopbacks + to
		if known := o.outlet(pair); known != nil && known.placed && p.PortPlacement == unplaced {
			outlets[pair] = known // queue pairs are not recreated just because the daemon has yet to query its data plane
			continue
		}
		out := &outlet{pair: pair, to: netip.AddrPortFrom(toward.Destination, rocePort), placed: p.PortPlacement != unplaced}
		for _, s := range p.Slots {
			if s.SharePpb == 0 {
				continue
			}
			conn, err := o.socket(netip.AddrPortFrom(source.Addr(), uint16(s.SourcePort)))
			if err != nil {
				return err
			}
			plane := o.planeIndex(s.Plane)
			if plane < 0 {
				return fmt.Errorf("a slot in plane %q, which the fabric does not have", s.Plane)
			}
			out.slots = append(out.slots, flow{lane: Lane{pair, plane}, device: s.Device, conn: conn, share: int64(s.SharePpb)})
		}
		outlets[out.pair] = out
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	var adopted time.Time
	o.countMoves(toward, d)
	for gpu := range group.GPUs {
		pair := (o.server*o.GPUs+group.GPU+gpu)*o.loopbacks + to
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
	o.weights.note(toward, d, at, adopted)
	return nil
}

// same reports whether two outlets send from the same slots; nil has none.
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

// remember links an outlet's slots to the times of their last use, possibly by another outlet. The caller holds mu.
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

// left returns the time and lane of the last packet toward a source group from a slot that is no longer used; -1 if
// there was none.
func (o *sender) left(dst int) (last int64, in Lane) {
	last = -1
	o.mu.Lock()
	defer o.mu.Unlock()
	for u, at := range o.uses {
		if _, to := o.Ends(u.lane.Pair); to != dst || *at < last || *at == last && !u.lane.before(in) {
			continue
		}
		if out := o.outlets[u.lane.Pair]; out == nil || !slices.ContainsFunc(out.slots, func(s flow) bool { return s.conn == u.conn && s.lane == u.lane }) {
			last, in = *at, u.lane
		}
	}
	return last, in
}

// outlet returns the present outlet of a pair, or nil if nothing is sent.
func (o *sender) outlet(pair int) *outlet {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.outlets[pair]
}

// countMoves counts slots whose place differs from the last known one. The caller holds mu.
func (o *sender) countMoves(to topo.Way, d *farev1.DestinationWeights) {
	if len(d.Pairs) == 0 || len(d.Pairs[0].Slots) == 0 {
		return // unreachable: when it comes back, its slots are compared with their previous places
	}
	places := make([]string, len(d.Pairs[0].Slots)) // the same for every source
	for i, s := range d.Pairs[0].Slots {
		places[i] = s.Plane + " " + s.Device
	}
	if before := o.slots[to]; len(before) == len(places) {
		for i := range places {
			if places[i] != before[i] {
				o.moved.Add(1)
			}
		}
	}
	o.slots[to] = places
}

// planeIndex returns a plane's number, or -1.
func (t *Traffic) planeIndex(name string) int {
	for i := range t.Planes {
		if t.PlaneName(i) == name {
			return i
		}
	}
	return -1
}

// groupOf returns the source group of a loopback, given by its number in the fabric.
func (t *Traffic) groupOf(loopback int) int { return t.GroupOf(loopback/t.GPUs, loopback%t.GPUs).Index }

// index returns a loopback's number in the fabric, or -1.
func (t *Traffic) index(a netip.Addr) int {
	for s := range t.Servers {
		for g := range t.GPUs {
			if t.Loopback(s, g).Addr() == a {
				return s*t.GPUs + g
			}
		}
	}
	return -1
}

// socket returns the socket that sends from a source; it stays open, because the port is likely to be used again.
func (o *sender) socket(source netip.AddrPort) (*net.UDPConn, error) {
	if c := o.sockets[source]; c != nil {
		return c, nil
	}
	c, err := newSource(o.ns, source)
	if err == nil {
		o.sockets[source] = c
	}
	return c, err
}

// beat is the period of a sender: short enough that planes are used evenly, long enough to leave the processor to
// others.
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
			// Packets missed because the machine was busy are not made up for in one burst.
			due = min(due+float64(o.rate)*now.Sub(last).Seconds(), float64(o.rate)/20+1)
			last = now
			due -= float64(o.burst(payload, int(due), &turn))
		}
	}
}

// burst sends n packets and returns n. All of them belong to one tally.
func (o *sender) burst(payload []byte, n int, turn *int) int {
	o.Traffic.mu.RLock()
	defer o.Traffic.mu.RUnlock()
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
		// A packet that the kernel refuses (no route at the moment) is lost, and counted as such.
		_, _ = slot.conn.WriteToUDPAddrPort(payload, out.to)
	}
	return n
}

// next returns the slot whose turn it is: slots take turns in proportion to their shares, as evenly as possible.
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
