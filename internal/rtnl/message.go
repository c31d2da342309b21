package rtnl

import (
	"encoding/binary"
	"iter"

	"golang.org/x/sys/unix"
)

// Message is one message of a datagram of netlink. Its body aliases the datagram.
type Message struct {
	Kind, Flags uint16
	Sequence    uint32
	Body        []byte // after the header
}

// Messages yields the messages of a datagram, and stops at the first one whose length does not fit.
func Messages(b []byte) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for len(b) >= headerSize {
			size := int(binary.NativeEndian.Uint32(b))
			if size < headerSize || size > len(b) {
				return
			}
			m := Message{binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]), b[headerSize:size]}
			if !yield(m) {
				return
			}
			b = b[min(align(size), len(b)):]
		}
	}
}

// AppendMessage appends a message. Its body must be a multiple of four bytes.
func AppendMessage(b []byte, kind, flags uint16, sequence uint32, body []byte) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(unix.SizeofNlMsghdr+len(body)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, sequence)
	b = binary.NativeEndian.AppendUint32(b, 0) // port ID: the kernel fills it in
	return append(b, body...)
}

// Attributes yields the type, without the flags of nesting and byte order, and the value of each attribute, and stops
// at the first one whose length does not fit.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= attrSize {
			size := int(binary.NativeEndian.Uint16(b))
			if size < attrSize || size > len(b) || !yield(binary.NativeEndian.Uint16(b[2:])&typeMask, b[attrSize:size]) {
				return
			}
			b = b[min(align(size), len(b)):]
		}
	}
}

// Text returns a value that is a text, without its terminating zero.
func Text(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
