package rdmatest

import (
	"fmt"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/wecmp"
)

// most is the maximum number of work requests in a batch.
const most = 8

// post posts a batch of work requests if there is room.
func (m *setModel) post(s *setSide) {
	if s.paused || m.left == 0 || len(s.pending) >= m.o.Window {
		return
	}
	if m.rng.IntN(50) == 0 {
		s.paused = true
		m.after(time.Duration(m.rng.IntN(int(500*time.Microsecond))), func() { s.paused = false })
		return
	}
	n := min(1+m.rng.IntN(most), m.left, m.o.Window-len(s.pending))
	s.batch = s.batch[:0]
	for i := range n {
		m.left--
		fence := m.rng.IntN(20) == 0
		t := s.fenced(fence, m.o.Kinds[m.rng.IntN(len(m.o.Kinds))], m.size())
		wr := m.request(s, t)
		wr.Fence = fence
		// The last one of a batch is not silent: otherwise no completion might report the free room.
		wr.Silent = i < n-1 && m.rng.IntN(8) == 0
		t.silent, t.opcode = wr.Silent, wr.Opcode
		s.pending = append(s.pending, t)
		s.batch = append(s.batch, wr)
	}
	if posted, err := s.set.PostSend(s.batch...); posted != n || err != nil {
		m.blame("host %d: %d of %d work requests posted, with %d outstanding: %v", s.side, posted, n, len(s.pending)-n, err)
	}
}

// fenced makes a task. A task with a fence may use the cells of outstanding tasks.
func (s *setSide) fenced(fence bool, kind rdma.OpKind, n int) *task {
	if fence && s.apart {
		for _, before := range s.pending {
			if before.cell >= 0 {
				s.want = before.cell + 1
			}
		}
	}
	t := s.make(kind, n)
	s.want = 0
	return t
}

// request returns a task's work request, and adds the message to the peer's expectations.
func (m *setModel) request(s *setSide, t *task) rdma.SendWR {
	peer := m.sides[1-s.side]
	n := len(t.op.Local)
	wr := rdma.SendWR{ID: t.id, Local: rdma.SGE{MR: s.local, Offset: t.slot * m.slotSize(), Length: n},
		RemoteAddress: t.op.Remote, RemoteKey: t.op.Key, Compare: t.op.Compare, OrderKey: uint64(t.part)}
	l := letter{id: t.id, n: n, opcode: rdma.Recv, immediate: m.rng.Uint32(), has: m.rng.IntN(2) == 0, task: t}
	switch t.op.Kind {
	case rdma.OpSend:
		wr.Opcode, t.message = rdma.Send, true
		if l.has {
			wr.Opcode = rdma.SendImmediate
		}
	case rdma.OpWrite:
		wr.Opcode = rdma.Write
		if m.rng.IntN(4) == 0 {
			wr.Opcode, t.message = rdma.WriteImmediate, true
			l.opcode, l.has = rdma.RecvWrite, true
		}
	case rdma.OpRead:
		wr.Opcode = rdma.Read
	case rdma.OpCompareSwap:
		wr.Opcode, wr.Swap = rdma.CompareSwap, t.op.Swap
	case rdma.OpFetchAdd:
		wr.Opcode, wr.Add = rdma.FetchAdd, t.op.Swap
	}
	if t.message {
		wr.Immediate = l.immediate
		t.number = peer.first + uint64(len(peer.expected))
		peer.expected = append(peer.expected, l)
	}
	if (t.op.Kind == rdma.OpSend || t.op.Kind == rdma.OpWrite) && n > 0 && n < 256 && m.rng.IntN(4) == 0 {
		wr.Local, wr.Inline = rdma.SGE{}, append([]byte(nil), t.op.Local...)
	}
	return wr
}

// reshare sets planes, ports and shares of a side's slots according to the host's beliefs. A slot whose plane is down
// is parked, or moves to a plane that is up (reweight and remap in wecmp), and may return to its home plane.
func (m *setModel) reshare(s *setSide) {
	planes := m.bed.Planes()
	beliefs := m.beliefs[s.side]
	for i := range s.slots {
		home := i % planes
		plane := home
		if !beliefs[home] && i%3 == 0 {
			for p := range planes {
				if beliefs[(home+p)%planes] {
					plane = (home + p) % planes
					break
				}
			}
		}
		share := uint32(0)
		if beliefs[plane] {
			share = m.shares[plane] * 1e6
		}
		name := string(rune('A' + plane))
		if s.slots[i].Plane != name || s.slots[i].Port == 0 {
			s.moved[i]++
			first := firstPort / planes * planes
			s.slots[i].Port = uint16(first + (1+i+s.moved[i]%8*len(s.slots))*planes + plane)
		}
		s.slots[i].Plane, s.slots[i].Share = name, share
	}
}

// applyBeliefs applies a host's new beliefs to its set.
func (m *setModel) applyBeliefs(side int) {
	s := m.sides[side]
	m.reshare(s)
	if err := s.set.SetSlots(append([]rdma.Slot(nil), s.slots...)); err != nil {
		m.blame("host %d: %v", side, err)
	}
}

// String returns the name of a run for tables.
func (o SetOptions) String() string {
	return fmt.Sprintf("%v, loss %g%%", [...]string{"weak", "partial", "strong"}[min(o.Ordering, wecmp.Strong)], 100*o.Loss)
}
