package tcpqp

import (
	"hash/crc32"
	"sync/atomic"
)

const (
	streams   = 256 // FLOWS of the program
	markCount = 512 // MARKS of the program
	minPiece  = 64
	maxPiece  = 1<<16 - 1
	maxCRC    = 4096
)

// marks records the positions of messages in a stream, in memory that the framing program reads. It keeps the latest 511: segments of
// earlier messages that TCP sends or retransmits later lack the option.
type marks struct {
	s      *socket
	stream *framingStream
	origin uint32 // sequence number of the stream's first byte
	room   int    // size of the option in a segment, in bytes
	size   int
}

// piece implements marker: the payload of a segment with the option, as far as known.
func (m *marks) piece() int { return m.size }

// mark implements marker.
func (m *marks) mark(offset uint64, f *frame, data []byte) {
	length := uint32(f.putN + f.length)
	head := m.stream.Head // this goroutine is the only writer
	entry := &m.stream.Marks[head%markCount]
	*entry = framingMark{
		Address: f.address, Key: f.key, Start: m.origin + uint32(offset), Length: length,
		Msn: uint16(f.msn), Piece: uint16(m.size), Opcode: f.op.variants(),
	}
	if whole := int(length) <= min(m.size, maxCRC); whole && (data != nil || f.length == 0) {
		entry.Icrc = crc32.Update(crc32.ChecksumIEEE(f.put[:f.putN]), crc32.IEEETable, data)
	}
	atomic.StoreUint32(&m.stream.Head, head+1) // the program sees the mark before the new head
	if head%markCount == 0 {
		m.measure()
	}
}

// measure updates the segment size, which changes with the path.
func (m *marks) measure() {
	m.size = min(max(m.s.segmentSize()-m.room, minPiece), maxPiece)
}
