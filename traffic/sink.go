package traffic

import (
	"fmt"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
)

// receiver is the sink of WRITEs and SENDs.
type receiver struct {
	*end
	notes
	buffers  *rdma.MR
	seq      sequence
	returned uint64 // number of messages whose buffers were returned to the source
	crc      uint32
	wrong    uint64
	again    []rdma.RecvWR // receives to be posted
}

func (r *receiver) prepare() (err error) {
	run := r.run
	if r.buffers, err = run.alloc(run.domains[r.device], int(run.outstanding)*run.content.message, rdma.LocalWrite|rdma.RemoteWrite); err != nil {
		return err
	}
	receives := 0
	if run.op == farev1.TrafficOp_TRAFFIC_OP_WRITE {
		receives = int(run.outstanding) + noteDepth
	}
	return r.notes.prepare(r.end, receives)
}

func (r *receiver) exposed() *rdma.MR { return r.buffers }

func (r *receiver) setUp() error {
	if r.run.op == farev1.TrafficOp_TRAFFIC_OP_WRITE {
		return r.notes.setUp(r.end)
	}
	for i := range uint64(r.run.outstanding) {
		r.again = append(r.again, rdma.RecvWR{ID: i, Local: r.place(i)})
	}
	return r.repost()
}

// place returns the place for the data of a buffer's receive; WRITEs need none.
func (r *receiver) place(buffer uint64) rdma.SGE {
	if r.run.op != farev1.TrafficOp_TRAFFIC_OP_SEND {
		return rdma.SGE{}
	}
	return rdma.SGE{MR: r.buffers, Offset: int(buffer) * r.run.content.message, Length: r.run.content.message}
}

func (r *receiver) repost() error {
	_, err := r.qp.PostRecv(r.again...)
	r.again = r.again[:0]
	return err
}

func (r *receiver) handle(c *rdma.Completion, now time.Duration) error {
	size := r.run.content.message
	switch {
	case c.Opcode == rdma.Send: // own note
		r.flying--
		return nil
	case c.ID&noteID != 0: // WRITEs in place
		first, n, err := r.take(r.end, c)
		if err != nil {
			return err
		}
		if n > uint64(r.run.outstanding) {
			return fmt.Errorf("the source reports %d messages in place, but %d have room", n, r.run.outstanding)
		}
		for m := first; m < first+n; m++ {
			r.arrive(m, m%uint64(r.run.outstanding), size, now)
		}
		return nil
	case !c.HasImmediate:
		return fmt.Errorf("%v without immediate", c.Opcode)
	}
	m := r.seq.full(c.Immediate)
	buffer := m % uint64(r.run.outstanding)
	if c.Opcode == rdma.Recv {
		buffer = c.ID
	}
	r.arrive(m, buffer, c.Bytes, now)
	r.again = append(r.again, rdma.RecvWR{ID: c.ID, Local: r.place(c.ID)})
	return nil
}

// arrive verifies the bytes of a message that is in place.
func (r *receiver) arrive(m, buffer uint64, n int, now time.Duration) {
	size := r.run.content.message
	r.verify(&r.seq, &r.crc, &r.wrong, m, r.buffers.Bytes()[int(buffer)*size:][:min(n, size)], now)
}

func (r *receiver) advance(time.Duration) error {
	if len(r.again) > 0 {
		if err := r.repost(); err != nil {
			return err
		}
	}
	free := r.seq.free(uint64(r.run.outstanding))
	if r.returned == free || !r.room() {
		return nil
	}
	r.returned = free
	return r.send(r.end, r.returned, 0)
}

func (r *receiver) idle() bool          { return false }
func (r *receiver) wake() time.Duration { return 0 }
func (r *receiver) waits() bool         { return false }
func (r *receiver) report(out *farev1.TrafficEnd) {
	reportSink(out, r.end, &r.seq, r.crc, r.wrong)
}

func reportSink(out *farev1.TrafficEnd, e *end, seq *sequence, crc uint32, wrong uint64) {
	out.Arrived, out.Duplicated, out.Reordered = seq.arrived, seq.duplicated, seq.reordered
	out.Bytes, out.WrongBytes, out.Crc32C, out.LastNs = e.bytes.Load(), wrong, crc, uint64(e.last)
}

// reader is the sink of READs, which starts them.
type reader struct {
	*end
	initiation
	notes
	buffers *rdma.MR
	allowed uint64 // by the ring's order
	seq     sequence
	crc     uint32
	wrong   uint64
}

func (r *reader) prepare() (err error) {
	r.initiation.prepare(r.run)
	r.allowed = ^uint64(0)
	receives := 0
	if r.schedule.step > 0 {
		r.allowed, receives = 0, 4*noteDepth
	}
	if r.buffers, err = r.run.alloc(r.run.domains[r.device], int(r.run.outstanding)*r.run.content.message, rdma.LocalWrite); err != nil {
		return err
	}
	return r.notes.prepare(r.end, receives)
}

func (r *reader) setUp() error      { return r.notes.setUp(r.end) }
func (r *reader) exposed() *rdma.MR { return nil }

func (r *reader) handle(c *rdma.Completion, now time.Duration) error {
	if c.Opcode == rdma.Recv {
		allowed, _, err := r.take(r.end, c)
		if err != nil {
			return err
		}
		r.allowed = max(r.allowed, allowed)
		return nil
	}
	if err := r.complete(c.ID, now); err != nil {
		return err
	}
	size := r.run.content.message
	at := int(c.ID%uint64(r.run.outstanding)) * size
	r.verify(&r.seq, &r.crc, &r.wrong, c.ID, r.buffers.Bytes()[at:][:min(c.Bytes, size)], now)
	return nil
}

func (r *reader) advance(now time.Duration) error {
	run := r.run
	bound := min(r.bound(run, now), r.allowed)
	r.wrs = r.wrs[:0]
	for ; r.next < bound; r.next++ {
		m, size := r.next, run.content.message
		r.wrs = append(r.wrs, rdma.SendWR{ID: m, Opcode: rdma.Read, Local: rdma.SGE{MR: r.buffers, Offset: int(m%uint64(run.outstanding)) * size, Length: size},
			RemoteAddress: r.remote.address + uint64(run.content.offset(r.schedule, m)), RemoteKey: r.remote.key, OrderKey: m})
	}
	return r.post(r.end, now)
}

func (r *reader) idle() bool          { return r.finished(r.run) }
func (r *reader) wake() time.Duration { return r.run.duration }
func (r *reader) waits() bool         { return true }
func (r *reader) report(out *farev1.TrafficEnd) {
	r.initiation.report(out)
	reportSink(out, r.end, &r.seq, r.crc, r.wrong)
}
