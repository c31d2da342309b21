package traffic

import (
	"context"
	"fmt"
	"hash/crc32"
	"net/netip"
	"sync/atomic"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
)

// posting is the part of a queue pair set that an end uses.
type posting interface {
	PostSend(...rdma.SendWR) (int, error)
	PostRecv(...rdma.RecvWR) (int, error)
}

// end is one end of a pair. Its goroutine owns it from serve until done is closed; the fields that other goroutines
// read are atomic.
type end struct {
	run         *run
	pair        *farev1.TrafficPair
	schedule    schedule
	peer        netip.Addr // loopback of the other end
	destination bool       // true for the sink
	initiator   bool       // posts the operations, and connects
	role        role

	device *rdma.Device
	cq     *rdma.CQ
	set    *rdma.Set // nil until connected or accepted
	qp     posting
	remote region // initiator: target of the operations

	gate   *ringGate     // rings: limits this pair's source
	opens  *ringGate     // rings: opened by this pair's sink
	bytes  atomic.Uint64 // sink: verified bytes
	last   time.Duration // sink: time at which the last message was verified
	finish chan uint64   // sink: receives the number of posted messages, at the end
	done   chan struct{}
	err    error
}

// role is the behavior of an end.
type role interface {
	// prepare allocates memory.
	prepare() error
	// exposed returns the memory for the peer's operations, or nil.
	exposed() *rdma.MR
	// setUp posts receives once the set exists. The peer cannot send before.
	setUp() error
	// handle processes a completion without error.
	handle(c *rdma.Completion, now time.Duration) error
	// advance posts all requests that can be posted now.
	advance(now time.Duration) error
	// idle reports whether nothing is left to do until the run's end.
	idle() bool
	// wake returns the time at which advance must be called in any case; 0 means never.
	wake() time.Duration
	// waits reports whether a lack of progress is an error.
	waits() bool
	// report adds the role's results.
	report(*farev1.TrafficEnd)
}

// polled is the number of completions per poll.
const polled = 64

// serve works until the role is idle, an error occurs or the run ends.
func (e *end) serve(ctx context.Context) {
	defer close(e.done)
	if err := e.loop(ctx); err != nil && ctx.Err() == nil {
		e.err = err
	}
}

func (e *end) loop(ctx context.Context) error {
	var batch [polled]rdma.Completion
	var ready <-chan struct{}
	if e.gate != nil {
		ready = e.gate.ready
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
		case <-ready:
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

// drain receives the missing ones of posted messages: as long as any arrives, and then for the run's drain time.
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

// result returns the end's part of the report. It must be called after serve has returned.
func (e *end) result() *farev1.TrafficEnd {
	out := &farev1.TrafficEnd{Pair: e.pair.GetPair(), Destination: e.destination}
	if e.err != nil {
		out.Error = e.err.Error()
	}
	e.role.report(out)
	if e.set != nil {
		for _, s := range e.set.Slots() {
			out.Slots = append(out.Slots, &farev1.TrafficSlot{Slot: uint32(s.Slot.Slot), Plane: s.Plane, Sent: s.Sent, Again: s.Again, Due: s.Due, Stalls: s.Stalls, Fell: s.Fell})
		}
	}
	return out
}

// verify compares a message with its expected content and counts it. A message that has arrived before is only counted,
// because its buffer may already belong to another message.
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

// ringGate passes the number of messages that have arrived over the previous pair of a ring to the next pair.
type ringGate struct {
	arrived atomic.Uint64
	ready   chan struct{} // capacity 1
}

func (g *ringGate) open(arrived uint64) {
	g.arrived.Store(arrived)
	select {
	case g.ready <- struct{}{}:
	default:
	}
}

// limit returns the number of messages that the source may send by the ring's order.
func (e *end) limit() uint64 {
	if e.gate == nil {
		return ^uint64(0)
	}
	return e.schedule.granted(e.gate.arrived.Load())
}
