package tcpqp

import (
	"hash/crc32"
	"sync/atomic"
)

const (
	streams   = 256  // FLOWS of the program
	markCount = 2048 // MARKS of the program
	minPiece  = 64
	maxPiece  = 1<<16 - 1
	// measureEvery is the number of pieces after which the segment size is read again.
	measureEvery = 256
	// leastSegment is a lower bound of the memory that Linux accounts for a segment in the send buffer: struct sk_buff,
	// the shared info, and the headers.
	leastSegment = 768
	// sendBuffer bounds the unacknowledged segments: the marks of all of them, and of the staged pieces of one system
	// call, exist. The kernel doubles the value of SO_SNDBUF.
	sendBuffer = (markCount - maxPieces - 1) * leastSegment / 2
)

// marks gives the pieces of a stream to TCP, and records their positions and CRCs in memory that the framing program
// reads.
//
// A piece is copied before its CRC is computed, and TCP gets the copy: the application or another channel may change
// the source of a READ answer at any time. The copy stays until TCP has accepted it, so a retry sends the same bytes.
type marks struct {
	stream  *framingStream
	origin  uint32     // sequence number of the stream's first byte
	room    int        // maximum length of the options of a segment other than the kernel's timestamps
	segment func() int // returns socket.segmentSize
	size    atomic.Int32

	// Used by the writer alone, or while it chooses a batch.
	copied []byte // copies of the pieces from base on
	base   uint64 // position in the stream
	marked uint64 // pieces before this position in the stream have been marked
}

// piece implements marker: the payload that fits into a segment, however many SACK blocks the segment has.
func (m *marks) piece() int { return int(m.size.Load()) }

// stage replaces the bufs of the batch's pieces by copies, one for each piece. It drops earlier copies that TCP has
// accepted: those before the batch. The caller holds the device's lock; copies are valid until the next call.
func (m *marks) stage(b *batch) {
	start := b.pieces[0].start
	if start < m.base+uint64(len(m.copied)) {
		m.copied = m.copied[:copy(m.copied, m.copied[start-m.base:])]
	} else {
		m.copied = m.copied[:0]
	}
	m.base = start
	if need := max(b.size, len(m.copied)); cap(m.copied) < need {
		m.copied = append(make([]byte, 0, need), m.copied...)
	}
	at := 0
	for i := range b.pieces {
		p := &b.pieces[i]
		skip := min(len(m.copied)-at, p.size) // copied for an earlier batch, and not accepted
		for _, from := range p.bufs {
			k := min(skip, len(from))
			m.copied = append(m.copied, from[k:]...)
			skip -= k
		}
		p.copy = m.copied[at : at+p.size]
		at += p.size
	}
}

// add marks the pieces of a staged batch that are not marked yet.
func (m *marks) add(b *batch) {
	for i := range b.pieces {
		if p := &b.pieces[i]; p.start >= m.marked {
			m.marked = p.start + uint64(p.size)
			if p.limit > 0 {
				m.mark(p)
			}
		}
	}
}

// mark records a whole piece.
func (m *marks) mark(p *piece) {
	head := m.stream.Head // this goroutine is the only writer
	variants := p.op.variants()
	entry := framingMark{
		Start: m.origin + uint32(p.start), Icrc: crc32.ChecksumIEEE(p.copy), Length: uint16(p.size), Msn: p.number,
		MboSeg: uint32(p.offset)<<8 | uint32(uint8(p.offset/p.limit)),
	}
	end := p.offset+p.size == p.total
	switch {
	case p.offset == 0 && end:
		entry.Opcode = variants[3]
	case end:
		entry.Opcode = variants[2]
	case p.offset == 0:
		entry.Opcode = variants[0]
	default:
		entry.Opcode = variants[1]
	}
	if !end {
		entry.Flags = flagMore
	}
	if hasImmediate(entry.Opcode) {
		entry.Extra, entry.Immediate = 4, p.immediate
	}
	m.stream.Marks[head%markCount] = entry
	atomic.StoreUint32(&m.stream.Head, head+1) // the program sees the mark before the new head
	if head%measureEvery == 0 {
		m.measure()
	}
}

// measure updates the segment size, which changes with the path.
func (m *marks) measure() {
	m.size.Store(int32(min(max(m.segment()-m.room, minPiece), maxPiece)))
}
