package nupa

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// channel is one end of a channel: it sends through its own ring and receives through its peer's.
type channel struct {
	t   *transport
	cfg rdma.ChannelConfig
	out sender
	in  receiver

	peer           endpoint
	peerGeneration uint64
	reachable      map[uint32]reach // the peer's regions by key, as of version
	version        uint64

	path      *rdma.Path // its counters apply to operations; nil: parked
	connected bool
	broken    bool // failed: no operation is carried any longer
	closed    bool
	wantRoom  bool // Post has refused an operation since the latest Room
	holding   bool // the host is not ready for the next operation, and has not called Ready since
	heldUp    bool // ring.held informs the peer of this
	notifying bool // listed in transport.notifying

	outstanding int           // operations in the ring that have not been returned or completed
	progress    time.Duration // time of the latest completion, or of the first post of the outstanding operations
	beat        uint64        // the peer's beat at the latest check
}

// localSize is the length of Local: version, file, endpoint and its generation, ring and its first sequence number.
const localSize = 4 + 8 + 4 + 8 + 4 + 8

// Channel acquires a ring for sending.
func (t *transport) Channel(cfg rdma.ChannelConfig) (rdma.Channel, error) {
	unlock, err := t.m.lock()
	if err != nil {
		return nil, fmt.Errorf("nupa: %w", err)
	}
	defer unlock()
	if !t.member() {
		return nil, errReplaced
	}
	out, ok := t.area.acquire(t.self)
	if !ok {
		t.area.clearEnded(t.m)
		out, ok = t.area.acquire(t.self)
	}
	if !ok {
		return nil, fmt.Errorf("nupa: all %d rings are taken (Config.Channels)", t.area.rings)
	}
	c := &channel{t: t, cfg: cfg, out: out, reachable: make(map[uint32]reach)}
	t.sendOf[out.index] = c
	t.channels = append(t.channels, c)
	return c, nil
}

func (c *channel) Local() []byte {
	le, self := binary.LittleEndian, c.t.self
	b := le.AppendUint32(make([]byte, 0, localSize), version)
	b = le.AppendUint64(b, c.t.area.id)
	b = le.AppendUint32(b, uint32(self.index))
	b = le.AppendUint64(b, self.generation().Load())
	b = le.AppendUint32(b, uint32(c.out.index))
	return le.AppendUint64(b, c.out.start)
}

func (c *channel) Connect(remote []byte, paths []rdma.Path) error {
	le, t := binary.LittleEndian, c.t
	if c.connected {
		return errors.New("nupa: the channel is connected already")
	}
	if len(remote) != localSize || le.Uint32(remote) != version {
		return fmt.Errorf("nupa: the peer's %d bytes are not of version %d", len(remote), version)
	}
	if id := le.Uint64(remote[4:]); id != t.area.id {
		return fmt.Errorf("nupa: the peer maps another file: its id is %016x, the id of %s is %016x (Config.File)", id, t.cfg.File, t.area.id)
	}
	at, generation, ringAt, start := le.Uint32(remote[12:]), le.Uint64(remote[16:]), le.Uint32(remote[24:]), le.Uint64(remote[28:])
	if at >= endpointCount || ringAt >= uint32(t.area.rings) {
		return fmt.Errorf("nupa: endpoint %d, ring %d: not in this file", at, ringAt)
	}
	peer, in := t.area.endpoint(int(at)), t.area.ring(int(ringAt))
	if want := c.cfg.Remote.As16(); peer.generation().Load() != generation || string(peer.address()) != string(want[:]) {
		return fmt.Errorf("nupa: endpoint %d no longer belongs to %v", at, c.cfg.Remote)
	}
	if in.first().Load() != start || in.sender().Load() != at+1 || in.senderGeneration().Load() != generation {
		return fmt.Errorf("nupa: ring %d no longer belongs to the peer", ringAt)
	}
	if t.recvOf[ringAt] != nil {
		return fmt.Errorf("nupa: ring %d belongs to another channel", ringAt)
	}
	if !c.out.receiver().CompareAndSwap(noReceiver(c.out.start), receiverWord(int(at), generation)) {
		return fmt.Errorf("nupa: ring %d no longer belongs to this endpoint", c.out.index)
	}
	c.peer, c.peerGeneration = peer, generation
	c.in = receiver{ring: in, start: start, next: start}
	c.version = peer.version().Load() - 1 // forces a read of the regions
	t.recvOf[ringAt] = c
	c.connected = true
	c.progress = t.host.Now()
	c.usePaths(paths)
	c.offerRoom()
	t.self.notify(c.in.index, t.m) // the peer may have posted before
	return nil
}

// usePaths selects the first path with a share that is not lent. A lent path belongs to another slot, which memory
// cannot use.
func (c *channel) usePaths(paths []rdma.Path) {
	c.path = nil
	for i := range paths {
		if paths[i].Share > 0 && !paths[i].Lent {
			c.path = &paths[i]
			return
		}
	}
}

// SetPaths parks the channel if no path has a share or all are lent: it revokes the operations that the peer has not
// taken, and returns them.
func (c *channel) SetPaths(paths []rdma.Path) {
	c.usePaths(paths)
	switch {
	case c.broken || !c.connected:
	case c.path == nil:
		c.park()
	default:
		c.offerRoom()
	}
	c.t.drain()
}

// park returns the operations that the peer has not taken. Those that it has taken complete, or are put back if the
// peer is not ready; the peer then notifies this end, and park is called once more.
func (c *channel) park() {
	for seq := c.out.revoke(); seq < c.out.next; seq++ {
		if e := c.out.entry(seq); e.op != nil {
			c.t.push(event{kind: giveBack, ch: c, op: e.op})
			e.op = nil
			c.outstanding--
			c.t.count.revoked++
		}
	}
	c.scheduleNotify() // the peer frees the slots by skipping them
}

func (c *channel) Post(op *rdma.Op) bool {
	if len(op.Local) > MaxOp || len(op.Head) > rdma.MaxHead {
		panic(fmt.Sprintf("nupa: an operation of %d bytes with a head of %d: the limits are %d and %d",
			len(op.Local), len(op.Head), MaxOp, rdma.MaxHead))
	}
	if (op.Kind == rdma.OpCompareSwap || op.Kind == rdma.OpFetchAdd) && len(op.Local) != 8 {
		panic(fmt.Sprintf("nupa: an atomic operation on %d bytes: use 8", len(op.Local)))
	}
	if c.path == nil || !c.connected || c.broken || !c.t.member() {
		c.wantRoom = true
		return false
	}
	if c.direct(op) {
		c.t.count.posted++
		c.t.count.direct++
		if op.Kind == rdma.OpWrite { // the bytes of a READ count as sent by the peer, which sends nothing here
			c.path.Sent.Add(uint64(len(op.Local)))
		}
		c.t.host.Complete(op, nil)
		return true
	}
	if !c.out.post(op, c.path.Sent) {
		c.wantRoom = true
		if c.out.damaged {
			c.t.self.notify(c.out.index, c.t.m) // collect fails the channel, outside the host's call
		}
		return false
	}
	c.t.count.posted++
	if c.outstanding == 0 {
		c.progress = c.t.host.Now()
	}
	c.outstanding++
	c.scheduleNotify()
	return true
}

// direct executes a WRITE or READ on the peer's shared memory. It preserves the order only if all earlier operations
// have been executed. Operations that are not allowed go to the peer, which refuses them. So do WRITEs to a peer on
// another kernel: if this machine is paused in the middle of a copy, its peers take it for dead and use the region for
// other things when it goes on.
func (c *channel) direct(op *rdma.Op) bool {
	need := rdma.RemoteWrite
	switch {
	case op.Kind == rdma.OpRead:
		need = rdma.RemoteRead
	case op.Kind != rdma.OpWrite || c.t.area.shared:
		return false
	}
	if len(op.Local) == 0 || !c.out.idle() || c.out.left().Load() == c.out.start || c.peer.generation().Load() != c.peerGeneration {
		return false
	}
	if v := c.peer.version().Load(); v != c.version {
		c.version = v
		c.t.count.damaged += uint64(c.t.area.regionsOf(c.peer.index, c.reachable))
	}
	r, ok := c.reachable[op.Key]
	if !ok || r.access&uint32(need) == 0 {
		return false
	}
	b, ok := r.part(op.Remote, len(op.Local))
	if !ok {
		return false
	}
	touching := c.t.self.touching()
	touching.Store(uint64(r.index + 1))
	valid := func() bool { return c.t.area.region(r.index).word().Load() == r.word } // not deregistered; see region.withdraw
	if !valid() {
		touching.Store(0)
		return false
	}
	if op.Kind == rdma.OpWrite {
		copy(b, op.Local)
	} else {
		copy(op.Local, b)
	}
	touching.Store(0)
	return !c.t.area.shared || valid()
}

// Ready resumes reception. The endpoint's goroutine receives the held message, outside the host's call.
func (c *channel) Ready() {
	if c.connected && !c.broken && c.holding {
		c.holding = false
		c.t.self.notify(c.in.index, c.t.m)
	}
}

func (c *channel) Close() {
	if c.closed {
		return
	}
	t := c.t
	c.end(rdma.ErrFlushed)
	c.closed, c.broken = true, true
	t.drain()
	t.sendOf[c.out.index] = nil
	if c.connected {
		t.recvOf[c.in.index] = nil
	}
	for i, other := range t.channels {
		if other == c {
			t.channels = append(t.channels[:i], t.channels[i+1:]...)
			break
		}
	}
	if t.member() && !c.out.release(t.m) {
		t.lingering = append(t.lingering, c.out.ring)
	}
	if c.connected {
		c.notifyPeer()
	}
}

// push queues an event for the host.
func (t *transport) push(e event) { t.events = append(t.events, e) }

// scheduleNotify schedules a notification of the peer for the next Flush.
func (c *channel) scheduleNotify() {
	if !c.notifying {
		c.notifying = true
		c.t.notifying = append(c.t.notifying, c)
	}
}

// notifyPeer makes the peer check both rings.
func (c *channel) notifyPeer() {
	for _, ring := range [...]int{c.out.index, c.in.index} {
		if c.peer.notify(ring, c.t.m) {
			c.t.count.wakes++
		}
	}
}

// offerRoom calls Host.Room if Post has refused an operation.
func (c *channel) offerRoom() {
	if c.wantRoom && c.path != nil {
		c.wantRoom = false
		c.t.push(event{kind: room, ch: c})
	}
}
