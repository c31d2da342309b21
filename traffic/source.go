package traffic

import (
	"fmt"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/wecmp"
)

// initiation is the common part of ends that start operations: their outstanding messages, and latencies.
type initiation struct {
	next, completed uint64          // numbers of messages posted and completed
	since           []time.Duration // posting time of message m, at m modulo outstanding
	wrs             []rdma.SendWR
	latency         histogram
	over            bool // the time is up: no new messages
}

func (i *initiation) prepare(r *run) {
	i.since = make([]time.Duration, r.outstanding)
	i.wrs = make([]rdma.SendWR, 0, r.outstanding)
}

// bound returns the number of the first message that must not be posted yet under the run's limits.
func (i *initiation) bound(r *run, now time.Duration) uint64 {
	i.over = i.over || r.duration > 0 && now >= r.duration
	if i.over {
		return i.next
	}
	bound := i.completed + uint64(r.outstanding)
	if r.messages > 0 {
		bound = min(bound, r.messages)
	}
	return bound
}

func (i *initiation) finished(r *run) bool {
	return i.completed == i.next && (i.over || r.messages > 0 && i.next == r.messages)
}

func (i *initiation) post(e *end, now time.Duration) error {
	if len(i.wrs) == 0 {
		return nil
	}
	for k := range i.wrs {
		i.since[i.wrs[k].ID%uint64(len(i.since))] = now
	}
	_, err := e.qp.PostSend(i.wrs...)
	return err
}

// complete processes a message's completion. Completions come in the order of posting.
func (i *initiation) complete(id uint64, now time.Duration) error {
	if id != i.completed || id >= i.next {
		return fmt.Errorf("message %d completed when message %d is due", id, i.completed)
	}
	i.completed++
	i.latency.add(uint64(max(0, now-i.since[id%uint64(len(i.since))])))
	return nil
}

func (i *initiation) report(out *farev1.TrafficEnd) {
	out.Posted = i.next
	out.LatencyMaxNs = i.latency.max
	for b, n := range i.latency.counts {
		if n > 0 {
			out.Latency = append(out.Latency, &farev1.TrafficBucket{Bucket: uint32(b), Count: n})
		}
	}
}

// sender is the source of a pair, for WRITEs and SENDs.
type sender struct {
	*end
	initiation
	notes
	block     *rdma.MR
	freed     uint64 // number of messages whose buffers the sink has returned
	announced uint64 // WRITE: number of messages announced to the sink
	crc       uint32
}

func (s *sender) prepare() (err error) {
	s.initiation.prepare(s.run)
	if s.block, err = s.run.blockOf(s.device); err != nil {
		return err
	}
	return s.notes.prepare(s.end, int(s.run.outstanding)+noteDepth)
}

func (s *sender) setUp() error      { return s.notes.setUp(s.end) }
func (s *sender) exposed() *rdma.MR { return nil }

func (s *sender) handle(c *rdma.Completion, now time.Duration) error {
	switch {
	case c.Opcode == rdma.Recv:
		freed, _, err := s.take(s.end, c)
		if err != nil {
			return err
		}
		if freed < s.freed || freed > s.next {
			return fmt.Errorf("the peer reports %d consumed messages, of %d posted and %d reported before", freed, s.next, s.freed)
		}
		s.freed = freed
		return nil
	case c.ID&noteID != 0:
		s.flying--
		return nil
	}
	return s.complete(c.ID, now)
}

func (s *sender) advance(now time.Duration) error {
	r := s.run
	bound := min(s.bound(r, now), s.freed+uint64(r.outstanding), s.limit())
	s.wrs = s.wrs[:0]
	for ; s.next < bound; s.next++ {
		m := s.next
		at := r.content.offset(s.schedule, m)
		s.crc = r.content.crcs.add(s.crc, at)
		wr := rdma.SendWR{ID: m, Local: rdma.SGE{MR: s.block, Offset: at, Length: r.content.message}, OrderKey: m}
		switch r.op {
		case farev1.TrafficOp_TRAFFIC_OP_WRITE:
			wr.Opcode = rdma.Write
		case farev1.TrafficOp_TRAFFIC_OP_WRITE_IMMEDIATE:
			wr.Opcode, wr.Immediate = rdma.WriteImmediate, uint32(m)
		case farev1.TrafficOp_TRAFFIC_OP_SEND:
			wr.Opcode, wr.Immediate = rdma.SendImmediate, uint32(m)
		}
		if wr.Opcode != rdma.SendImmediate {
			wr.RemoteAddress, wr.RemoteKey = s.remote.address+m%uint64(r.outstanding)*uint64(r.content.message), s.remote.key
		}
		s.wrs = append(s.wrs, wr)
	}
	if err := s.post(s.end, now); err != nil {
		return err
	}
	if r.op == farev1.TrafficOp_TRAFFIC_OP_WRITE && s.announced < s.completed && s.room() {
		first := s.announced
		s.announced = s.completed
		return s.send(s.end, first, s.announced-first)
	}
	return nil
}

func (s *sender) idle() bool {
	return s.finished(s.run) && (s.run.op != farev1.TrafficOp_TRAFFIC_OP_WRITE || s.announced == s.completed && s.flying == 0)
}

func (s *sender) wake() time.Duration { return s.run.duration }
func (s *sender) waits() bool         { return true }
func (s *sender) report(out *farev1.TrafficEnd) {
	s.initiation.report(out)
	out.Crc32C = s.crc
}

// granter is the source of READs. In a ring it notifies the sink how far it may read; otherwise it only provides
// memory.
type granter struct {
	*end
	notes
	block *rdma.MR
	told  uint64
}

func (g *granter) prepare() (err error) {
	if g.block, err = g.run.blockOf(g.device); err != nil {
		return err
	}
	return g.notes.prepare(g.end, 0)
}

func (g *granter) setUp() error      { return g.notes.setUp(g.end) }
func (g *granter) exposed() *rdma.MR { return g.block }

func (g *granter) handle(c *rdma.Completion, _ time.Duration) error {
	if c.ID&noteID == 0 || c.Opcode != rdma.Send {
		return fmt.Errorf("%v where only notes are expected", c.Opcode)
	}
	g.flying--
	return nil
}

func (g *granter) advance(time.Duration) error {
	limit := g.limit()
	if g.schedule.step == 0 || limit == g.told || !g.room() {
		return nil
	}
	g.told = limit
	return g.send(g.end, limit, 0)
}

func (g *granter) idle() bool                { return g.schedule.step == 0 }
func (g *granter) wake() time.Duration       { return 0 }
func (g *granter) waits() bool               { return false }
func (g *granter) report(*farev1.TrafficEnd) {}

// orderingOf converts an ordering to wecmp's type.
func orderingOf(o farev1.MemoryOrdering) wecmp.Ordering {
	return wecmp.Ordering(o - farev1.MemoryOrdering_MEMORY_ORDERING_WEAK)
}
