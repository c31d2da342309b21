package rtnl

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

const (
	headerSize = 16 // struct nlmsghdr
	attrSize   = 4  // struct nlattr
	typeMask   = 1<<14 - 1
)

func align(n int) int { return (n + 3) &^ 3 }

// writer appends messages to a buffer.
type writer struct{ buf []byte }

// begin starts a message: its header and a zeroed family header, whose first byte is the address family.
func (w *writer) begin(kind, flags uint16, family uint8, size int) (at int) {
	at = len(w.buf)
	w.buf = append(w.buf, make([]byte, headerSize+size)...)
	binary.NativeEndian.PutUint16(w.buf[at+4:], kind)
	binary.NativeEndian.PutUint16(w.buf[at+6:], flags|unix.NLM_F_REQUEST)
	w.buf[at+headerSize] = family
	return at
}

// end completes the message that starts at offset at.
func (w *writer) end(at int) {
	binary.NativeEndian.PutUint32(w.buf[at:], uint32(len(w.buf)-at))
}

func (w *writer) attr(kind uint16, value ...byte) {
	w.buf = binary.NativeEndian.AppendUint16(w.buf, uint16(attrSize+len(value)))
	w.buf = binary.NativeEndian.AppendUint16(w.buf, kind)
	w.buf = append(w.buf, value...)
	w.pad()
}

func (w *writer) pad() {
	for len(w.buf)%4 != 0 {
		w.buf = append(w.buf, 0)
	}
}

func (w *writer) u16(kind, v uint16) {
	w.attr(kind, 0, 0)
	binary.NativeEndian.PutUint16(w.buf[len(w.buf)-4:], v)
}

func (w *writer) u32(kind uint16, v uint32) {
	w.attr(kind, 0, 0, 0, 0)
	binary.NativeEndian.PutUint32(w.buf[len(w.buf)-4:], v)
}

// port writes a port in network byte order.
func (w *writer) port(kind, v uint16) { w.attr(kind, byte(v>>8), byte(v)) }

// addr writes an address; an invalid address is omitted.
func (w *writer) addr(kind uint16, a netip.Addr) {
	switch {
	case a.Is4():
		b := a.As4()
		w.attr(kind, b[:]...)
	case a.Is6():
		b := a.As16()
		w.attr(kind, b[:]...)
	}
}

// nest starts a nested attribute that endNest completes.
func (w *writer) nest(kind uint16) (at int) {
	at = len(w.buf)
	w.attr(kind | unix.NLA_F_NESTED)
	return at
}

func (w *writer) endNest(at int) {
	binary.NativeEndian.PutUint16(w.buf[at:], uint16(len(w.buf)-at))
}

// The value readers accept any length, and return zero for values that are too short.

func readU8(b []byte) uint8 {
	if len(b) < 1 {
		return 0
	}
	return b[0]
}

func readU16(b []byte) uint16 {
	if len(b) < 2 {
		return 0
	}
	return binary.NativeEndian.Uint16(b)
}

func readU32(b []byte) uint32 {
	if len(b) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(b)
}

func readAddr(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a
}

// readPrefix returns the prefix of an address attribute; an empty attribute is the unspecified address of the family.
func readPrefix(family uint8, b []byte, bits uint8) netip.Prefix {
	a := readAddr(b)
	if !a.IsValid() {
		a = netip.IPv4Unspecified()
		if family == unix.AF_INET6 {
			a = netip.IPv6Unspecified()
		}
	}
	return netip.PrefixFrom(a, int(bits))
}

func familyOf(a netip.Addr) uint8 {
	switch {
	case a.Is4():
		return unix.AF_INET
	case a.Is6():
		return unix.AF_INET6
	default:
		return unix.AF_UNSPEC
	}
}
