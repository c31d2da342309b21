package tcpqp

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	maxFrames = 64        // limit of cut, unsent frames per connection
	maxBatch  = 512 << 10 // limit of bytes per system call
	maxPieces = 512       // limit of pieces per system call; the kernel's limit is 1,024 (UIO_MAXIOV)
	// maxRefusals is the maximum number of queued refusals. A connection that exceeds it fails: a dropped refusal would
	// leave a channel of the peer waiting.
	maxRefusals = 4096
)

// edge carries a connection: it is a socket or a simulated stream. The caller holds the device's lock in all methods.
type edge interface {
	// kick reports that fill may return data.
	kick()
	// settle returns once no system call accesses memory that want or fill returned.
	settle()
	// close ends the connection at once, with a reset. Apart from calls in progress, it is the last call.
	close()
}

// half is a half of a channel, whose frames a connection carries.
type half interface {
	emit(f *frame) bool
	data(f *frame) ([]byte, bool)
}

// source is a half with its place in a connection's queue of halves that may have frames to send.
type source struct {
	half
	queued bool
}

// frame is an outgoing frame.
type frame struct {
	op     opcode
	msn    uint32
	length int // length of its data
	from   *source
	put    [maxHeader]byte
	putN   int
	sent   int // bytes sent
	piece  int // maximum length of its segments; 0: TCP decides, and they have no option
	// Contents of the option.
	start     uint64 // position in the stream
	number    uint16 // in the stream
	immediate uint32
}

func (f *frame) set(h *header) {
	f.op, f.msn, f.length, f.sent, f.immediate = h.op, h.msn, h.data(), 0, h.immediate
	f.putN = h.put(f.put[:])
}

// piece is a part of a frame that becomes one segment.
type piece struct {
	bufs      [][]byte
	copy      []byte // the same, in one buffer, once the batch is staged
	size      int
	start     uint64 // position in the stream
	limit     int    // frame.piece
	op        opcode
	number    uint16
	offset    int // in the message
	total     int // length of the message
	immediate uint32
}

// batch is the data of a system call.
type batch struct {
	bufs   [][]byte
	pieces []piece
	size   int
	// apart: pieces must be separate segments, with the option.
	apart bool
}

// marker determines the length of a connection's segments with the option.
type marker interface {
	// piece returns the maximum length of a segment with the option, in bytes.
	piece() int
}

// conn is a connection: it cuts incoming data into frames for channels, and sends frames of its channels in turn.
type conn struct {
	e      *endpoint
	flow   *flow // nil: dialed by the peer
	edge   edge
	parser parser
	begun  time.Duration
	dead   error
	moved  time.Duration // time of the latest transfer of bytes

	frames      [maxFrames]frame // circular buffer
	first, nOut int
	queue       []*source // circular queue in the slice's capacity
	offset      uint64    // length of all frames cut so far
	messages    uint16    // their number
	out         batch
	marks       marker // nil: no option
	optional    bool   // the peer has requested the option
	refusals    []uint32

	in []*channel // channels whose responders are attached to this connection
	// The incoming frame, and its channel's epoch at the start of the frame.
	h       header
	to      *channel
	toEpoch uint32
}

func newConn(e *endpoint, f *flow, x edge) *conn {
	return &conn{e: e, flow: f, edge: x, begun: e.host.Now(), parser: parser{buf: make([]byte, bufferSize)}}
}

// ready queues a half that may have frames to send.
func (k *conn) ready(s *source) {
	if !s.queued {
		s.queued = true
		k.queue = append(k.queue, s)
	}
	k.e.dirty(k)
}

// settle waits until the edge accesses no memory of channels' operations.
func (k *conn) settle() { k.edge.settle() }

// detach removes a half. If frames of the half have been cut but not completely sent, the connection fails: their data
// may be gone, and the peer must not receive other bytes in its place.
func (k *conn) detach(s *source) {
	if s.queued {
		s.queued = false
		k.queue = slices.DeleteFunc(k.queue, func(q *source) bool { return q == s })
	}
	for j := range k.nOut {
		if k.frames[(k.first+j)%maxFrames].from == s {
			k.fail(errors.New("tcpqp: a channel was detached while its frames were in transit"))
			return
		}
	}
}

// refuse informs a channel of the peer that its other end does not exist.
func (k *conn) refuse(channel uint32) {
	if len(k.refusals) == maxRefusals {
		k.fail(errors.New("tcpqp: the peer does not read refusals"))
		return
	}
	k.refusals = append(k.refusals, channel)
	k.e.dirty(k)
}

// fail ends the connection. Its channels continue on the next one.
func (k *conn) fail(err error) {
	if k.dead != nil {
		return
	}
	k.dead = err
	k.edge.settle()
	k.edge.close()
	k.e.gone(k)
}

// want and got connect the edge's reads to the parser.
func (k *conn) want() (a, b []byte) { return k.parser.want(k) }

func (k *conn) got(n int) error {
	if k.dead != nil {
		return k.dead
	}
	k.moves(n)
	if err := k.parser.got(n, k); err != nil && k.dead == nil {
		k.e.stats.malformed++
		k.fail(err)
	}
	return k.dead
}

// moves notes a transfer of n bytes, which proves that the path works.
func (k *conn) moves(n int) {
	if n == 0 || k.flow == nil {
		return
	}
	k.moved = k.e.host.Now()
	for _, c := range k.flow.channels {
		c.out0.setStalled(false)
	}
}

// begin handles the header of a frame.
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
		return fmt.Errorf("tcpqp: opcode %#x in a response", uint8(h.op))
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
	case opSend, opSendImmediate, opWrite, opRead, opCompareSwap, opFetchAdd:
		if c == nil || c.in0.conn != k {
			return nil // moved to another connection
		}
		k.to, k.toEpoch = c, c.in0.epoch
		return c.in0.begin(h)
	}
	return fmt.Errorf("tcpqp: opcode %#x in a request", uint8(h.op))
}

// current reports whether the channel of the incoming frame is still attached as at the start of the frame.
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

// wants records the peer's features.
func (k *conn) wants(features uint32) {
	if features&featureOption != 0 && !k.optional {
		k.optional = true
		k.marks = k.e.marker(k)
	}
}

// fill cuts frames and returns the data to be written now, or nil.
func (k *conn) fill() *batch {
	if k.dead != nil {
		return nil
	}
	k.cut()
	b := &k.out
	b.bufs, b.pieces, b.size, b.apart = b.bufs[:0], b.pieces[:0], 0, k.marks != nil
	for j := 0; j < k.nOut && b.size < maxBatch && len(b.pieces) < maxPieces; j++ {
		f := &k.frames[(k.first+j)%maxFrames]
		var data []byte
		if f.length > 0 {
			var ok bool
			if data, ok = f.from.data(f); !ok || len(data) != f.length {
				k.fail(errors.New("tcpqp: the data of a frame is no longer available"))
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

// add adds the unsent part of a frame to the batch, cut into pieces.
func (b *batch) add(f *frame, data []byte) {
	at, all := f.sent, f.putN+f.length
	for at < all && b.size < maxBatch && len(b.pieces) < maxPieces {
		end := all
		if f.piece > 0 {
			end = min(all, at-at%f.piece+f.piece)
		} else if over := b.size + end - at - maxBatch; over > 0 {
			end -= over
		}
		p := piece{
			size: end - at, start: f.start + uint64(at), limit: f.piece, op: f.op, number: f.number, offset: at, total: all, immediate: f.immediate,
		}
		first := len(b.bufs)
		if at < f.putN {
			k := min(end, f.putN)
			b.bufs = append(b.bufs, f.put[at:k])
			at = k
		}
		if at < end {
			b.bufs = append(b.bufs, data[at-f.putN:end-f.putN])
			at = end
		}
		p.bufs = b.bufs[first:len(b.bufs):len(b.bufs)]
		b.size += p.size
		b.pieces = append(b.pieces, p)
	}
}

// cut takes frames from the queued halves in turn while there is room.
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
	f.start, f.number, f.piece = k.offset, k.messages, 0
	if k.marks != nil {
		f.piece = k.marks.piece()
	}
	k.offset += uint64(f.putN + f.length)
	k.messages++
}

// wrote accounts for n written bytes of the batch that fill returned.
func (k *conn) wrote(n int) {
	k.e.stats.bytesSent += uint64(n)
	k.moves(n)
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
