package rdmatest

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/wecmp"
)

// SetOptions are the parameters of a run over sets. In the embedded Options, Ops counts work requests, Channels is
// unused, and Window is the maximum number of outstanding work requests per side.
type SetOptions struct {
	Options
	// Ordering is the memory ordering of the sets.
	Ordering wecmp.Ordering
	// Slots is the number of slots of each pair: two per plane by default.
	Slots int
	// SegmentSize is the segment size of the sets in bytes: 2 KiB by default, so that most long messages are cut.
	SegmentSize int
	// Receives is the number of posted receives: by default two for each work request of Window. With fewer than
	// Window, messages wait for receives.
	Receives int
}

// Sets runs the model over two devices with a core each on a simulated network, through the public API of package rdma.
func Sets(t testing.TB, construct Constructor, o SetOptions) Result {
	t.Helper()
	result, err := RunSets(construct, o)
	if err != nil {
		t.Fatalf("%v\noptions: %+v", err, o)
	}
	return result
}

// setModel is the model on sets. Its ends have work requests instead of operations: a task's op describes its work
// request. Completions arrive in the order of posting, whatever the order of execution, so the ends are those of an
// ordered channel.
type setModel struct {
	*model
	o       SetOptions
	net     *Net
	devices [2]*rdma.Device
	sides   [2]*setSide
	polled  []rdma.Completion
}

// setSide is one side's set, with the messages that its peer sends it.
type setSide struct {
	*end
	set          *rdma.Set
	send, recv   *rdma.CQ
	local        *rdma.MR // buffers for Local, slotSize bytes each
	receives     *rdma.MR // buffers of receives
	slots        []rdma.Slot
	moved        []int // number of moves of each slot
	expected     []letter
	first        uint64 // the number of expected[0], and the ID of the receive that it consumes
	posted       uint64 // receives
	holding      int    // receives that are to be posted later
	messages     uint64 // number of received messages
	batch        []rdma.SendWR
	receiveDepth int
}

// letter is a message in flight.
type letter struct {
	id        uint64 // of the work request; determines the contents
	n         int
	opcode    rdma.Opcode // Recv or RecvWrite
	immediate uint32
	has       bool
	task      *task // RecvWrite: the task whose bytes must be in memory
}

// RunSets is like Sets but returns the error.
func RunSets(construct Constructor, o SetOptions) (result Result, err error) {
	m, err := newSetModel(construct, o)
	if err != nil {
		return result, err
	}
	begin := m.net.Now()
	for _, s := range m.sides {
		m.receive(s)
	}
	if m.o.Flap > 0 {
		m.flapLater()
	}
	if err := m.play(); err != nil {
		return result, err
	}
	result = Result{Ops: m.done, Time: m.net.Now() - begin, Flaps: m.flaps, Net: m.net.Stats()}
	for _, s := range m.sides {
		for _, slot := range s.set.Slots() {
			result.Stalls += slot.Stalls
		}
	}
	for i, d := range m.devices {
		for name, c := range d.Counters() {
			if name != "rdma" {
				result.Counters[i] = c
			}
		}
	}
	return result, m.end()
}

func newSetModel(construct Constructor, o SetOptions) (*setModel, error) {
	o.Options = o.Options.withDefaults()
	o.Slots = cmp.Or(o.Slots, 2*o.Planes)
	o.SegmentSize = cmp.Or(o.SegmentSize, 2<<10)
	o.Receives = cmp.Or(o.Receives, 2*o.Window)
	n := NewNet(o.net())
	bed := &virtual{Net: n}
	m := &setModel{model: bareModel(bed, o.Options), o: o, net: n, polled: make([]rdma.Completion, 64)}
	m.model.planeLearned = m.applyBeliefs
	for i := range m.devices {
		end := n.Transport(netip.AddrPortFrom(n.address(i), 0), construct)
		var err error
		if m.devices[i], err = rdma.Open(rdma.Config{Address: n.address(i), Transports: []rdma.Transport{end}, Clock: n.Now}); err != nil {
			return nil, err
		}
	}
	configs := [2]rdma.SetConfig{}
	for i, d := range m.devices {
		pd := d.AllocPD()
		s, err := m.newSide(i, pd)
		if err != nil {
			return nil, err
		}
		m.sides[i] = s
		configs[i] = rdma.SetConfig{PD: pd, SendCQ: s.send, RecvCQ: s.recv, Ordering: o.Ordering, SegmentSize: o.SegmentSize,
			SendDepth: m.o.Window, RecvDepth: s.receiveDepth}
	}
	a, b := m.sides[0], m.sides[1]
	var err error
	a.set, b.set, err = connect(m.devices, configs, [2][]rdma.Slot{a.slots, b.slots})
	return m, err
}

// newSide registers a side's memory.
func (m *setModel) newSide(side int, pd *rdma.PD) (*setSide, error) {
	d := m.devices[side]
	s := &setSide{send: d.CreateCQ(), recv: d.CreateCQ(), receiveDepth: m.o.Receives}
	cell := (m.o.MaxSize + 7) &^ 7
	size := (m.o.Window + 4) * cell
	s.end = &end{m: m.model, side: side, ordered: true, cell: cell, begin: gap}
	switch m.o.Ordering {
	case wecmp.Weak:
		s.apart, s.users = true, make([]int, m.o.Window+4)
	case wecmp.Partial:
		s.parts = 6
		size = s.parts * (cell + 64)
	case wecmp.Strong:
		size = 2*cell + 64
	}
	area, err := pd.Alloc(size+2*gap, rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead|rdma.RemoteAtomic)
	if err != nil {
		return nil, err
	}
	counters, err := pd.Alloc(8*words, rdma.RemoteAtomic)
	if err != nil {
		return nil, err
	}
	m.memory[side], m.words[side] = area.Bytes(), counters.Bytes()
	m.remote[side] = remote{area.Address(), counters.Address(), area.Key(), counters.Key()}
	copy(m.memory[side], bytes.Repeat([]byte{gapByte}, size+2*gap))
	copy(m.memory[side][gap:gap+size], bytes.Repeat(m.pattern[:4096], size/4096+1)) // both areas start with the same contents
	s.shadow = append([]byte(nil), m.memory[side][gap:gap+size]...)
	if s.receives, err = pd.Alloc(s.receiveDepth*m.o.MaxSize, rdma.LocalWrite); err != nil {
		return nil, err
	}
	// One buffer more than can be outstanding: a buffer that has just completed is reused soon, so late accesses show.
	slots := m.o.Window + 1
	if s.local, err = pd.Alloc(slots*m.slotSize(), rdma.LocalWrite); err != nil {
		return nil, err
	}
	for i := range slots {
		at := i * m.slotSize()
		s.spare = append(s.spare, &task{slot: i, cell: -1, buf: s.local.Bytes()[at : at : at+m.slotSize()]})
	}
	for i := range m.o.Slots {
		s.slots = append(s.slots, rdma.Slot{Slot: i})
	}
	s.moved = make([]int, m.o.Slots)
	m.reshare(s)
	m.ends[side] = []*end{s.end}
	return s, nil
}

func (m *setModel) slotSize() int { return (m.o.MaxSize + gap + 7) &^ 7 }

// play posts and polls until all work requests have completed.
func (m *setModel) play() error {
	last, since := m.done, m.net.Now()
	for m.busy() {
		m.poll()
		for _, s := range m.sides {
			m.post(s)
		}
		if err := m.wrong(); err != nil {
			return err
		}
		if m.done != last {
			last, since = m.done, m.net.Now()
		}
		if m.net.Now() > since+m.o.Idle {
			return fmt.Errorf("no operation has completed for %v: %s", m.o.Idle, m.describeSets())
		}
		if !m.net.Step() {
			m.poll()
			if m.busy() && m.done == last && m.net.events.len() == 0 {
				return fmt.Errorf("no event is pending: %s", m.describeSets())
			}
		}
	}
	m.net.Run(func() bool { return false }, m.net.Now()+m.o.Settle)
	m.poll()
	if err := m.wrong(); err != nil {
		return err
	}
	for _, s := range m.sides {
		if len(s.expected) > 0 {
			return fmt.Errorf("host %d: message %d and %d others have not been received", s.side, s.first, len(s.expected)-1)
		}
	}
	if err := m.compare(); err != nil {
		return err
	}
	return m.compareSlots()
}

func (m *setModel) busy() bool {
	return m.left > 0 || len(m.sides[0].pending)+len(m.sides[1].pending) > 0
}

func (m *setModel) wrong() error { return errors.Join(m.err, m.net.Err()) }

func (m *setModel) describeSets() (s string) {
	for i, side := range m.sides {
		s += fmt.Sprintf("\nhost %d: %d outstanding", i, len(side.pending))
		if len(side.pending) > 0 {
			s += fmt.Sprintf(", the oldest %v", side.pending[0])
		}
		s += fmt.Sprintf(", receives posted %d, next to come %d, expected %d; slots %v; counters %v",
			side.posted, side.first, len(side.expected), side.slots, m.devices[i].Counters())
	}
	return s
}

// compareSlots compares the bytes sent on the slots with the posted bytes. Heads of SENDs and answers to the peer may
// count. Under Weak, if nothing was read and no shares have changed, each slot has sent its due bytes, within a few
// segments or batches of packets.
func (m *setModel) compareSlots() error {
	read := m.sides[0].read + m.sides[1].read
	for i, s := range m.sides {
		sent := uint64(0)
		for n, slot := range s.set.Slots() {
			sent += slot.Sent
			off := uint64(max(4*m.o.SegmentSize, 32<<10)) + rdma.MaxHead*s.sends
			if m.o.Ordering == wecmp.Weak && m.flaps == 0 && read == 0 && (slot.Sent+off < slot.Due || slot.Sent > slot.Due+off) {
				return fmt.Errorf("host %d: slot %d has sent %d bytes, and was due %d", i, n, slot.Sent, slot.Due)
			}
		}
		pieces := s.bytes/uint64(m.o.SegmentSize) + 2*s.sends + 2*m.sides[1-i].messages
		if least, most := s.bytes, s.bytes+m.sides[1-i].read+rdma.MaxHead*pieces; sent < least || sent > most {
			return fmt.Errorf("host %d: slots report %d bytes sent, want %d to %d", i, sent, least, most)
		}
	}
	return nil
}

// end closes one set with a work request outstanding, which completes at once, as flushed. Then it closes the other
// set.
func (m *setModel) end() error {
	a, b := m.sides[0], m.sides[1]
	t := a.make(rdma.OpWrite, min(1000, m.o.MaxSize))
	if _, err := a.set.PostSend(m.request(a, t)); err != nil {
		return err
	}
	a.set.Close()
	if n := a.send.Poll(m.polled); n != 1 || m.polled[0].ID != t.id || m.polled[0].Err != nil && !errors.Is(m.polled[0].Err, rdma.ErrFlushed) {
		return fmt.Errorf("closing a set with one work request outstanding gave %d completions: %+v", n, m.polled[:n])
	}
	b.set.Close()
	for _, s := range m.sides {
		flushed := 0
		for n := s.recv.Poll(m.polled); n > 0; n = s.recv.Poll(m.polled) {
			flushed += n
		}
		if want := int(s.posted - s.first); flushed != want {
			return fmt.Errorf("host %d: closing a set flushed %d receives, %d were posted", s.side, flushed, want)
		}
	}
	for _, d := range m.devices {
		d.Close()
	}
	return m.wrong()
}

// receive posts receives in the free buffers.
func (m *setModel) receive(s *setSide) {
	for int(s.posted-s.first)+s.holding < s.receiveDepth {
		// The buffer of a receive follows from its number: receives complete in order.
		at := int(s.posted%uint64(s.receiveDepth)) * m.o.MaxSize
		b := s.receives.Bytes()[at:][:m.o.MaxSize]
		for i := range b[:min(len(b), 64)] {
			b[i] = junkByte
		}
		wr := rdma.RecvWR{ID: s.posted, Local: rdma.SGE{MR: s.receives, Offset: at, Length: m.o.MaxSize}}
		if n, err := s.set.PostRecv(wr); n != 1 || err != nil {
			m.blame("host %d: receive %d of at most %d: %v", s.side, s.posted, s.receiveDepth, err)
			return
		}
		s.posted++
	}
}

// poll handles completions, those of receives first: a SEND does not complete before it is received.
func (m *setModel) poll() {
	for _, s := range m.sides {
		for n := s.recv.Poll(m.polled); n > 0; n = s.recv.Poll(m.polled) {
			for i := range m.polled[:n] {
				m.received(s, &m.polled[i])
			}
		}
	}
	for _, s := range m.sides {
		for n := s.send.Poll(m.polled); n > 0; n = s.send.Poll(m.polled) {
			for i := range m.polled[:n] {
				m.completed(s, &m.polled[i])
			}
		}
	}
}

// received checks the completion of a receive: messages arrive in the order of posting, whatever paths their pieces
// took.
func (m *setModel) received(s *setSide, c *rdma.Completion) {
	switch {
	case c.Err != nil:
		m.blame("host %d: receive %d: %v", s.side, c.ID, c.Err)
		return
	case len(s.expected) == 0:
		m.blame("host %d: receive %d completes, but no message was sent", s.side, c.ID)
		return
	}
	l := s.expected[0]
	at := int(c.ID%uint64(s.receiveDepth)) * m.o.MaxSize
	got := s.receives.Bytes()[at:][:m.o.MaxSize]
	switch {
	case c.ID != s.first || c.Opcode != l.opcode || c.Bytes != l.n,
		c.HasImmediate != l.has || l.has && c.Immediate != l.immediate:
		m.blame("host %d: receive %+v, want number %d with %+v", s.side, *c, s.first, l)
	case l.opcode == rdma.Recv && !bytes.Equal(got[:l.n], m.contents(l.id)[:l.n]):
		m.blame("host %d: the contents of receive %d differ from SEND %d", s.side, c.ID, l.id)
	case l.opcode == rdma.RecvWrite:
		from := m.sides[1-s.side]
		for i, t := range from.pending {
			if t == l.task {
				if off := from.differs(t.at, t.op.Local, from.pending[i+1:]); off >= 0 {
					m.blame("host %d: receive %d announces %v, but byte %d is not in memory", s.side, c.ID, t, off)
				}
			}
		}
	}
	s.first++
	s.messages++
	s.expected = s.expected[1:]
	if m.o.NotReady > 0 && m.rng.Float64() < m.o.NotReady {
		s.holding++
		m.after(time.Duration(m.rng.IntN(int(2*time.Millisecond))), func() { s.holding--; m.receive(s) })
	}
	m.receive(s)
}

// completed checks the completion of a work request. Silent ones posted before it have completed too.
func (m *setModel) completed(s *setSide, c *rdma.Completion) {
	for len(s.pending) > 0 {
		t := s.pending[0]
		if t.silent && t.id != c.ID {
			m.over(s, t)
			continue
		}
		if c.Err != nil || c.ID != t.id || c.Opcode != t.opcode || c.Bytes != len(t.op.Local) {
			m.blame("host %d: completion %+v, want %v", s.side, *c, t)
		}
		m.over(s, t)
		return
	}
	m.blame("host %d: completion %+v, but no work request is outstanding", s.side, *c)
}

// over checks a completed work request. All earlier ones have completed.
func (m *setModel) over(s *setSide, t *task) {
	m.done++
	if t.message && m.sides[1-s.side].first <= t.number {
		m.blame("%v completes before the peer has received it as message %d", t, t.number)
	}
	t.delivered = true
	if m.err == nil {
		s.check(t, s.pending[1:])
	}
	m.checkGap(t)
	s.pending = append(s.pending[:0], s.pending[1:]...)
	s.rest(t)
}
