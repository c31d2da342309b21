package slotlayout

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// Memory is a mapped slot table. Offsets are multiples of the size of the access, below len(m).
type Memory []byte

// Load32 reads four bytes atomically.
func (m Memory) Load32(at uint64) uint32 { return atomic.LoadUint32((*uint32)(unsafe.Pointer(&m[at]))) }

// Load64 reads eight bytes atomically.
func (m Memory) Load64(at uint64) uint64 { return atomic.LoadUint64((*uint64)(unsafe.Pointer(&m[at]))) }

// Store32 writes four bytes atomically.
func (m Memory) Store32(at uint64, v uint32) {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&m[at])), v)
}

// Store64 writes eight bytes atomically.
func (m Memory) Store64(at, v uint64) { atomic.StoreUint64((*uint64)(unsafe.Pointer(&m[at])), v) }

// Word returns a pointer to four bytes, for futex(2).
func (m Memory) Word(at uint64) unsafe.Pointer { return unsafe.Pointer(&m[at]) }

// Header returns a copy of the header. The copy is consistent only in its constant fields. len(m) is at least
// HeaderSize.
func (m Memory) Header() (h Header) {
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&h)), HeaderSize), m)
	return h
}

// SetHeader writes the header of a file that is not published yet.
func (m Memory) SetHeader(h *Header) {
	copy(m, unsafe.Slice((*byte)(unsafe.Pointer(h)), HeaderSize))
}

// Bytes16 reads 16 bytes as two words.
func (m Memory) Bytes16(at uint64) (b [16]byte) {
	binary.NativeEndian.PutUint64(b[:8], m.Load64(at))
	binary.NativeEndian.PutUint64(b[8:], m.Load64(at+8))
	return b
}

// SetBytes16 writes 16 bytes as two words.
func (m Memory) SetBytes16(at uint64, b [16]byte) {
	m.Store64(at, binary.NativeEndian.Uint64(b[:8]))
	m.Store64(at+8, binary.NativeEndian.Uint64(b[8:]))
}

// Word returns the slot as the eight bytes of its record.
func (s Slot) Word() uint64 {
	var b [SlotSize]byte
	binary.NativeEndian.PutUint32(b[unsafe.Offsetof(s.Share):], s.Share)
	binary.NativeEndian.PutUint16(b[unsafe.Offsetof(s.SubPort):], s.SubPort)
	b[unsafe.Offsetof(s.Plane)], b[unsafe.Offsetof(s.Flags)] = s.Plane, s.Flags
	return binary.NativeEndian.Uint64(b[:])
}

// SlotOf is the inverse of Slot.Word.
func SlotOf(word uint64) (s Slot) {
	var b [SlotSize]byte
	binary.NativeEndian.PutUint64(b[:], word)
	s.Share = binary.NativeEndian.Uint32(b[unsafe.Offsetof(s.Share):])
	s.SubPort = binary.NativeEndian.Uint16(b[unsafe.Offsetof(s.SubPort):])
	s.Plane, s.Flags = b[unsafe.Offsetof(s.Plane)], b[unsafe.Offsetof(s.Flags)]
	return s
}

// Word returns the range as the eight bytes of its record.
func (r Range) Word() uint64 {
	var b [RangeSize]byte
	binary.NativeEndian.PutUint32(b[unsafe.Offsetof(r.Protocol):], r.Protocol)
	binary.NativeEndian.PutUint16(b[unsafe.Offsetof(r.First):], r.First)
	binary.NativeEndian.PutUint16(b[unsafe.Offsetof(r.Last):], r.Last)
	return binary.NativeEndian.Uint64(b[:])
}

// RangeOf is the inverse of Range.Word.
func RangeOf(word uint64) (r Range) {
	var b [RangeSize]byte
	binary.NativeEndian.PutUint64(b[:], word)
	r.Protocol = binary.NativeEndian.Uint32(b[unsafe.Offsetof(r.Protocol):])
	r.First, r.Last = binary.NativeEndian.Uint16(b[unsafe.Offsetof(r.First):]), binary.NativeEndian.Uint16(b[unsafe.Offsetof(r.Last):])
	return r
}
