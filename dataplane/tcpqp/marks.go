package tcpqp

import (
	"hash/crc32"
	"sync/atomic"
)

const (
	streams   = 256 // FLOWS
	markCount = 512 // MARKS
	minPiece  = 64
	maxPiece  = 1<<16 - 1
	maxCRC    = 4096
)

// marks writes down where messages lie in a stream, in memory that the framing program reads. The last 511 are known: segments of
// those before that TCP has not sent, or sends again, go without the option.
type marks struct {
	s      *socket
	stream *framingStream
	origin uint32 // the sequence number of the stream's first byte
	room   int    // bytes of a segment that the option takes
	size   int
}

// piece implements marker: what TCP puts into a segment beside the option, as far as is known.
func (m *marks) piece() int { return m.size }

// mark implements marker.
func (m *marks) mark(offset uint64, f *frame, data []byte) {
	length := uint32(f.putN + f.length)
	head := m.stream.Head // nobody else writes it
	entry := &m.stream.Marks[head%markCount]
	*entry = framingMark{
		Address: f.address, Key: f.key, Start: m.origin + uint32(offset), Length: length,
		Msn: uint16(f.msn), Piece: uint16(m.size), Opcode: f.op.variants(),
	}
	if whole := int(length) <= min(m.size, maxCRC); whole && (data != nil || f.length == 0) {
		entry.Icrc = crc32.Update(crc32.ChecksumIEEE(f.put[:f.putN]), crc32.IEEETable, data)
	}
	atomic.StoreUint32(&m.stream.Head, head+1) // the program sees the mark before it sees that there is one
	if head%markCount == 0 {
		m.measure()
	}
}

// measure asks how long segments may be, which changes with the path.
func (m *marks) measure() {
	m.size = min(max(m.s.segmentSize()-m.room, minPiece), maxPiece)
}
