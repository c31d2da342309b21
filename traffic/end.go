package traffic

import (
	"context"
	"fmt"
	"hash/crc32"
	"net/netip"
	"sync/atomic"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/rdma"
)

// posting is what an end needs of a queue pair set.
type posting interface {
	PostSend(...rdma.SendWR) (int, error)
	PostRecv(...rdma.RecvWR) (int, error)
}

// end is one end of a pair. Its goroutine owns it from serve until done is closed; what others may look at is atomic.
type end struct {
	run         *run
	pair        *farev1.TrafficPair
	schedule    schedule
	peer        netip.Addr // the other end's loopback
	destination bool       // the sink
	initiator   bool       // posts the operations, and connects
	role        role

	device *rdma.Device
	cq     *rdma.CQ
	set    *rdma.Set // nil until connected or accepted
	qp     posting
	remote region // initiator: where operations go

	gate   *gate         // rings: what this pair's source waits for
	opens  *gate         // rings: what this pair's sink opens
	bytes  atomic.Uint64 // sink: verified
	last   time.Duration // sink: when the last message was verified
	finish chan uint64   // sink: how many messages have been posted, at the end
	done   chan struct{}
	err    error
}

// role is what an end does.
type role interface {
	// prepare makes memory.
	prepare() error
	// exposed is the memory that the peer's operations go to; nil: none.
	exposed() *rdma.MR
	// setUp posts receives, once the set is there. The peer cannot send before.
	setUp() error
	// handle takes a completion without error.
	handle(c *rdma.Completion, now time.Duration) error
	// advance posts what can be posted now.
	advance(now time.Duration) error
	// idle says that there is nothing left to do but to wait for the run's end.
	idle() bool
	// wake is when advance has to be called whatever happens; 0: never.
	wake() time.Duration
	// waits says whether no progress means that something is wrong.
	waits() bool
	// report adds what the role knows.
	report(*farev1.TrafficEnd)
}

// polled is how many completions are taken at a time.
const polled = 64

// serve works until the role has nothing left to do, something fails or the run ends.
func (e *end) serve(ctx context.Context) {
	defer close(e.done)
	if err := e.loop(ctx); err != nil && ctx.Err() == nil {
		e.err = err
	}
}

func (e *end) loop(ctx context.Context) error {
	var batch [polled]rdma.Completion
	var knock <-chan struct{}
	if e.gate != nil {
		knock = e.gate.knock
	}
	stall := time.NewTimer(e.run.stall)
	defer stall.Stop()
	wake := time.NewTimer(time.Hour)
	wake.Stop()
	defer wake.Stop()
	if at := e.role.wake(); at > 0 {
		wake.Reset(at - e.run.now())
	}
	progress := e.run.now()
	for {
		n := e.cq.Poll(batch[:])
		now := e.run.now()
		for i := range batch[:n] {
			c := &batch[i]
			if c.Err != nil {
				return fmt.Errorf("%v: %w", c.Opcode, c.Err)
			}
			if err := e.role.handle(c, now); err != nil {
				return err
			}
		}
		if n > 0 {
			progress = now
		}
		if err := e.role.advance(now); err != nil {
			return err
		}
		if e.role.idle() {
			return nil
		}
		if n == len(batch) {
			continue
		}
		select {
		case <-e.cq.Notify():
		case <-knock:
		case <-wake.C:
		case posted := <-e.finish:
			return e.drain(ctx, posted)
		case <-stall.C:
			still := e.run.now() - progress
			if e.role.waits() && still >= e.run.stall {
				return fmt.Errorf("no progress for %v", e.run.stall)
			}
			if !e.role.waits() {
				progress, still = e.run.now(), 0
			}
			stall.Reset(e.run.stall - still)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// drain takes in what is still missing of so many messages: as long as something comes in, and then for a while.
func (e *end) drain(ctx context.Context, posted uint64) error {
	s, ok := e.role.(*receiver)
	if !ok {
		return nil
	}
	var batch [polled]rdma.Completion
	patience := time.NewTimer(e.run.drain)
	defer patience.Stop()
	for s.seq.arrived < posted {
		n := e.cq.Poll(batch[:])
		now := e.run.now()
		for i := range batch[:n] {
			if c := &batch[i]; c.Err != nil {
				return fmt.Errorf("%v: %w", c.Opcode, c.Err)
			} else if err := s.handle(c, now); err != nil {
				return err
			}
		}
		if n > 0 {
			patience.Reset(e.run.drain)
			if err := s.advance(now); err != nil {
				return err
			}
			continue
		}
		select {
		case <-e.cq.Notify():
		case <-patience.C:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// result is the end's part of the report. Call it once serve has returned.
func (e *end) result() *farev1.TrafficEnd {
	out := &farev1.TrafficEnd{Pair: e.pair.GetPair(), Destination: e.destination}
	if e.err != nil {
		out.Error = e.err.Error()
	}
	e.role.report(out)
	if e.set != nil {
		for _, s := range e.set.Slots() {
			out.Slots = append(out.Slots, &farev1.TrafficSlot{Slot: uint32(s.Slot.Slot), Plane: s.Plane, Sent: s.Sent, Again: s.Again, Due: s.Due})
		}
	}
	return out
}

// verify compares a message with what it has to be, and books it. One that has arrived before is only counted: its buffer may be
// another's by now.
func (e *end) verify(seq *sequence, crc *uint32, wrong *uint64, m uint64, got []byte, now time.Duration) {
	if !seq.arrive(m) {
		return
	}
	content := e.run.content
	if n := content.wrong(e.schedule, m, got); n > 0 {
		*wrong += n
		*crc = crc32.Update(*crc, castagnoli, got)
	} else {
		*crc = content.crcs.add(*crc, content.offset(e.schedule, m))
		e.bytes.Add(uint64(len(got)))
	}
	e.last = now
	if e.opens != nil {
		e.opens.open(seq.arrived)
	}
}

// gate tells a ring's pair how many messages of the pair before it have arrived.
type gate struct {
	arrived atomic.Uint64
	knock   chan struct{} // has room for one knock
}

func (g *gate) open(arrived uint64) {
	g.arrived.Store(arrived)
	select {
	case g.knock <- struct{}{}:
	default:
	}
}

// limit is how many messages the source may send by the ring's order.
func (e *end) limit() uint64 {
	if e.gate == nil {
		return ^uint64(0)
	}
	return e.schedule.granted(e.gate.arrived.Load())
}
