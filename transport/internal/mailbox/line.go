package mailbox

import (
	"encoding/binary"
	"hash/crc32"
)

// lineSize is the size of a line in bytes, the unit of flushes.
const lineSize = 64

// The kinds of lines; the last byte is the version.
const (
	stateKind  = "fareMBs1"
	headerKind = "fareMBh1"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type line [lineSize]byte

// seal returns a line of a kind with the fields from byte 8 on.
func seal(kind string, fields ...uint64) (l line) {
	copy(l[:], kind)
	for i, v := range fields {
		binary.LittleEndian.PutUint64(l[8+8*i:], v)
	}
	binary.LittleEndian.PutUint32(l[60:], crc32.Checksum(l[:60], castagnoli))
	return l
}

// is reports whether the line is a valid one of a kind.
func (l *line) is(kind string) bool {
	return string(l[:8]) == kind && binary.LittleEndian.Uint32(l[60:]) == crc32.Checksum(l[:60], castagnoli)
}

func (l *line) field(i int) uint64 { return binary.LittleEndian.Uint64(l[8+8*i:]) }

// state is the content of an end's state line.
type state struct {
	run, peer, beat, read uint64
}

func (s state) line() line { return seal(stateKind, s.run, s.peer, s.beat, s.read) }

func parseState(l *line) (s state, ok bool) {
	if !l.is(stateKind) {
		return state{}, false
	}
	return state{run: l.field(0), peer: l.field(1), beat: l.field(2), read: l.field(3)}, true
}

// header is the content of a frame's header line.
type header struct {
	from, to uint64 // runs
	position uint64
	length   uint32
	sum      uint32 // CRC-32C of the data
}

func (h header) line() line {
	return seal(headerKind, h.from, h.to, h.position, uint64(h.sum)<<32|uint64(h.length))
}

// parseHeader parses a header. Its length is within the limits of frames.
func parseHeader(l *line) (h header, ok bool) {
	if !l.is(headerKind) {
		return header{}, false
	}
	size := l.field(3)
	h = header{from: l.field(0), to: l.field(1), position: l.field(2), length: uint32(size), sum: uint32(size >> 32)}
	if h.length < 1 || h.length > MaxFrame {
		return header{}, false
	}
	return h, true
}

// linesOf returns the number of lines of a frame with n bytes of data.
func linesOf(n int) uint64 { return 1 + uint64(n+lineSize-1)/lineSize }
