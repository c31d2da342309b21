package tcpqp

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	maxFrames = 64        // that a connection has cut and not sent
	maxBatch  = 512 << 10 // bytes that go to one system call
	maxPieces = 512       // in one; the kernel takes 1,024 (UIO_MAXIOV)
	// maxRefusals is how many channels may wait to be told that there is none here. Nobody may be left out: it would wait in vain.
	maxRefusals = 4096
)

// edge is what carries a connection: a socket, or a simulated stream. Its methods are called with the device's lock held.
type edge interface {
	// kick says that fill may have something.
	kick()
	// settle returns when no system call reads or writes memory that want or fill gave.
	settle()
	// close ends the connection at once, with a reset; nothing is called after it, but what is under way.
	close()
}

// half is what a connection carries frames for.
type half interface {
	emit(f *frame) bool
	data(f *frame) ([]byte, bool)
}

// source is a half in a connection's queue of those that may have something to send.
type source struct {
	half
	queued bool
}

// frame is a frame on its way out.
type frame struct {
	op     opcode
	msn    uint32
	length int // of its data
	from   *source
	put    [maxHeader]byte
	putN   int
	sent   int // bytes
	piece  int // longest segment it is cut for; 0: whatever TCP makes of it
	// What the option says of it.
	address uint64
	key     uint32
}

func (f *frame) set(h *header) {
	f.op, f.msn, f.length, f.sent = h.op, h.msn, h.data(), 0
	f.putN = h.put(f.put[:])
	f.address, f.key = uint64(h.length), h.channel
	if h.op == opWrite || h.op == opRead || h.op == opCompareSwap || h.op == opFetchAdd {
		f.address, f.key = h.address, h.key
	}
}

// batch is what a system call is given: bufs[:ends[0]] is the first piece, and so on. Pieces are not joined into one segment.
type batch struct {
	bufs [][]byte
	ends []int
	size int
	// apart: pieces must be segments of their own.
	apart bool
}

// marker writes down where messages lie in a connection's stream, for the option.
type marker interface {
	// piece is how long a segment may be that carries the option: bytes; 0: no option.
	piece() int
	// mark says that a message begins at the stream's offset. data is all of its data, or nil if that may change.
	mark(offset uint64, f *frame, data []byte)
}

// conn is one connection: what comes in is cut into frames for channels, what goes out is taken from channels in turn.
type conn struct {
	e      *endpoint
	flow   *flow // nil: the peer dialled
	edge   edge
	parser parser
	begun  time.Duration
	dead   error

	frames      [maxFrames]frame // a ring
	first, nOut int
	queue       []*source // a ring in the slice's capacity
	offset      uint64    // bytes of frames that have been cut
	out         batch
	marks       marker // nil: none
	optional    bool   // the peer wants the option
	refusals    []uint32

	in []*channel // that execute what the peer's channels send here
	// The frame that is coming in, and its channel's epoch when it began.
	h       header
	to      *channel
	toEpoch uint32
}

func newConn(e *endpoint, f *flow, x edge) *conn {
	return &conn{e: e, flow: f, edge: x, begun: e.host.Now(), parser: parser{buf: make([]byte, bufferSize)}}
}

// ready queues a half that may have something to send.
func (k *conn) ready(s *source) {
	if !s.queued {
		s.queued = true
		k.queue = append(k.queue, s)
	}
	k.e.dirty(k)
}

// settle waits until the edge does not touch anybody's memory.
func (k *conn) settle() { k.edge.settle() }

// detach forgets a half. Frames of its that have been cut and not sent end the connection: what they carry may not be there any
// more, and the peer must not take other bytes for it.
func (k *conn) detach(s *source) {
	if s.queued {
		s.queued = false
		k.queue = slices.DeleteFunc(k.queue, func(q *source) bool { return q == s })
	}
	for j := range k.nOut {
		if k.frames[(k.first+j)%maxFrames].from == s {
			k.fail(errors.New("tcpqp: a channel left while its frames were under way"))
			return
		}
	}
}

// refuse tells a channel of the peer's that there is none here.
func (k *conn) refuse(channel uint32) {
	if len(k.refusals) == maxRefusals {
		k.fail(errors.New("tcpqp: the peer does not read what it is refused"))
		return
	}
	k.refusals = append(k.refusals, channel)
	k.e.dirty(k)
}

// fail ends the connection. Channels go on by the next.
func (k *conn) fail(err error) {
	if k.dead != nil {
		return
	}
	k.dead = err
	k.edge.settle()
	k.edge.close()
	k.e.gone(k)
}

// want and got are the parser's.
func (k *conn) want() (a, b []byte) { return k.parser.want(k) }

func (k *conn) got(n int) error {
	if k.dead != nil {
		return k.dead
	}
	if err := k.parser.got(n, k); err != nil && k.dead == nil {
		k.e.stats.malformed++
		k.fail(err)
	}
	return k.dead
}

// begin has the header of a frame.
func (k *conn) begin(h *header) error {
	if k.dead != nil {
		return k.dead
	}
	k.h, k.to = *h, nil
	c := k.e.channels[h.channel]
	if k.flow != nil {
		if c == nil || c.out0.conn != k {
			return nil
		}
		if h.op == opAccept && h.epoch == c.out0.epoch {
			k.wants(h.features)
		}
		k.to, k.toEpoch = c, c.out0.epoch
		switch h.op {
		case opAccept, opRefuse, opAck, opReadAnswer, opAtomicAnswer, opError, opHold, opResume:
			return c.out0.begin(h)
		}
		return fmt.Errorf("tcpqp: opcode %#x in an answer", uint8(h.op))
	}
	switch h.op {
	case opOpen:
		if c == nil || c.ended || c.local.nonce != h.nonce {
			k.e.stats.refused++
			k.refuse(h.from)
			return nil
		}
		k.wants(h.features)
		return c.opened(k, h)
	case opSend, opWrite, opRead, opCompareSwap, opFetchAdd:
		if c == nil || c.in0.conn != k {
			return nil // moved to another connection
		}
		k.to, k.toEpoch = c, c.in0.epoch
		return c.in0.begin(h)
	}
	return fmt.Errorf("tcpqp: opcode %#x in a request", uint8(h.op))
}

// current says whether the channel of the frame that is coming in is still attached as it was when the frame began.
func (k *conn) current() bool {
	switch {
	case k.to == nil || k.dead != nil:
		return false
	case k.flow != nil:
		return k.to.out0.conn == k && k.to.out0.epoch == k.toEpoch
	}
	return k.to.in0.conn == k && k.to.in0.epoch == k.toEpoch
}

func (k *conn) place(left int) []byte {
	switch {
	case !k.current():
		return nil
	case k.flow != nil:
		return k.to.out0.place(&k.h, left)
	}
	return k.to.in0.place(&k.h, left)
}

func (k *conn) end() error {
	switch {
	case k.dead != nil:
		return k.dead
	case !k.current():
	case k.flow != nil:
		k.to.out0.end(&k.h)
	default:
		k.to.in0.end(&k.h)
	}
	return k.dead
}

// wants notes what the peer understands.
func (k *conn) wants(features uint32) {
	if features&featureOption != 0 && !k.optional {
		k.optional = true
		k.marks = k.e.marker(k)
	}
}

// fill cuts frames and gives what is to be written now; nil: nothing is.
func (k *conn) fill() *batch {
	if k.dead != nil {
		return nil
	}
	k.cut()
	b := &k.out
	b.bufs, b.ends, b.size, b.apart = b.bufs[:0], b.ends[:0], 0, k.marks != nil
	for j := 0; j < k.nOut && b.size < maxBatch && len(b.ends) < maxPieces; j++ {
		f := &k.frames[(k.first+j)%maxFrames]
		var data []byte
		if f.length > 0 {
			var ok bool
			if data, ok = f.from.data(f); !ok || len(data) != f.length {
				k.fail(errors.New("tcpqp: the data of a frame is gone"))
				return nil
			}
		}
		b.add(f, data)
	}
	if b.size == 0 {
		return nil
	}
	return b
}

// add puts what is left of a frame into the batch, cut into pieces.
func (b *batch) add(f *frame, data []byte) {
	at, all := f.sent, f.putN+f.length
	for at < all && b.size < maxBatch && len(b.ends) < maxPieces {
		end := all
		if f.piece > 0 {
			end = min(all, at-at%f.piece+f.piece)
		} else if over := b.size + end - at - maxBatch; over > 0 {
			end -= over
		}
		if at < f.putN {
			k := min(end, f.putN)
			b.bufs = append(b.bufs, f.put[at:k])
			b.size += k - at
			at = k
		}
		if at < end {
			b.bufs = append(b.bufs, data[at-f.putN:end-f.putN])
			b.size += end - at
			at = end
		}
		b.ends = append(b.ends, len(b.bufs))
	}
}

// cut takes frames from the halves in turn while there is room.
func (k *conn) cut() {
	bytes := 0
	for j := range k.nOut {
		f := &k.frames[(k.first+j)%maxFrames]
		bytes += f.putN + f.length - f.sent
	}
	n := 0
	for ; n < len(k.refusals) && k.nOut < maxFrames; n++ {
		f := &k.frames[(k.first+k.nOut)%maxFrames]
		f.set(&header{op: opRefuse, status: statusGone, channel: k.refusals[n]})
		f.from = nil
		k.push(f)
	}
	k.refusals = k.refusals[:copy(k.refusals, k.refusals[n:])]
	for len(k.queue) > 0 && k.nOut < maxFrames && bytes < maxBatch {
		s := k.queue[0]
		k.queue = k.queue[:copy(k.queue, k.queue[1:])]
		f := &k.frames[(k.first+k.nOut)%maxFrames]
		if !s.emit(f) {
			s.queued = false
			continue
		}
		k.queue = append(k.queue, s)
		f.from = s
		bytes += f.putN + f.length
		k.push(f)
	}
}

func (k *conn) push(f *frame) {
	k.nOut++
	f.piece = 0
	if k.marks != nil {
		f.piece = k.marks.piece()
		var data []byte
		if f.length > 0 && f.op != opReadAnswer && f.putN+f.length <= f.piece {
			data, _ = f.from.data(f)
		}
		k.marks.mark(k.offset, f, data)
	}
	k.offset += uint64(f.putN + f.length)
}

// wrote says that n bytes of what fill gave last have been written.
func (k *conn) wrote(n int) {
	k.e.stats.bytesSent += uint64(n)
	for n > 0 && k.nOut > 0 {
		f := &k.frames[k.first]
		d := min(n, f.putN+f.length-f.sent)
		f.sent += d
		n -= d
		if f.sent == f.putN+f.length {
			f.from = nil
			k.first = (k.first + 1) % maxFrames
			k.nOut--
		}
	}
}
