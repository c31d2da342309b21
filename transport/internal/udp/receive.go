package udp

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/transport/internal/wire"
)

const (
	// readMessages is the maximum number of messages per system call: 32 messages of 64 KiB fit a level-2 cache.
	readMessages = 32
	// readBytes is the buffer size of a message; coalesced datagrams stay below 64 KiB.
	readBytes = 1 << 16
)

// receiver reads messages and passes datagrams to the core. It belongs to one goroutine.
type receiver struct {
	e        *Endpoint
	messages [readMessages]mmsghdr
	iovs     [readMessages]unix.Iovec
	names    [readMessages]address
	controls [readMessages]received
	marked   func(netip.AddrPort, []byte) // wire.Marked.ReceiveMarked, or Receive of a core that does not distinguish
	buffers  []byte                       // readBytes each
	n        int                          // number of messages of the last call
	errno    unix.Errno
}

func newReceiver(e *Endpoint) *receiver {
	r := &receiver{e: e, buffers: make([]byte, readMessages*readBytes), marked: e.config.Core.Receive}
	if m, ok := e.config.Core.(wire.Marked); ok {
		r.marked = m.ReceiveMarked
	}
	for i := range r.messages {
		r.iovs[i].Base = &r.buffers[i*readBytes]
		r.iovs[i].SetLen(readBytes)
		m := &r.messages[i]
		m.Iov = &r.iovs[i]
		m.SetIovlen(1)
		m.Name = (*byte)(unsafe.Pointer(&r.names[i]))
		m.Control = (*byte)(unsafe.Pointer(&r.controls[i]))
	}
	r.prepare(readMessages)
	return r
}

// prepare resets the lengths that the kernel has overwritten with the used lengths.
func (r *receiver) prepare(n int) {
	for i := range r.messages[:n] {
		m := &r.messages[i]
		m.Namelen = uint32(unsafe.Sizeof(r.names[i]))
		m.SetControllen(int(unsafe.Sizeof(r.controls[i])))
		m.Flags = 0
	}
}

// run reads until the socket is closed.
func (r *receiver) run() {
	// Created once, because closures would be allocated for every call.
	read, deliver := r.read, r.deliver
	for {
		r.n, r.errno = 0, 0
		if r.e.raw.Read(read) != nil {
			return // closed
		}
		if r.errno != 0 {
			// This is the error of a datagram sent earlier from this socket. Reading the error has cleared it.
			r.e.config.Do(func() { r.e.count.refused++ })
			continue
		}
		r.e.config.Do(deliver)
		r.prepare(r.n)
	}
}

// read reports whether it received messages or an error; otherwise the caller must wait.
func (r *receiver) read(fd uintptr) bool {
	for {
		n, errno := recvmmsg(int(fd), r.messages[:])
		switch errno {
		case 0:
			r.n = n
			return true
		case unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			r.errno = errno
			return true
		}
	}
}

// deliver passes the received datagrams to the core. It is called with the device's lock held.
func (r *receiver) deliver() {
	e := r.e
	e.count.reads++
	for i := range r.messages[:r.n] {
		m := &r.messages[i]
		from, ok := source(&r.names[i], int(m.Namelen))
		switch {
		case !ok:
			e.count.strange++
			continue
		case m.Flags&unix.MSG_TRUNC != 0 || m.n > readBytes:
			e.count.truncated++
			continue
		}
		e.count.receivedBatches++
		e.count.receivedBytes += uint64(m.n)
		b := r.buffers[i*readBytes:][:m.n:m.n]
		each, marked := r.controls[i].parse(int(m.Controllen))
		to := e.config.Core.Receive
		if marked {
			to = r.marked
		}
		e.count.received += uint64(split(b, each, from, to))
	}
}

// split calls to for the coalesced datagrams in b, of each bytes, and for the rest. It returns their number. A datagram
// that was not coalesced (each is 0) may be empty.
func split(b []byte, each int, from netip.AddrPort, to func(netip.AddrPort, []byte)) int {
	if each <= 0 || each >= len(b) {
		to(from, b)
		return 1
	}
	n := 0
	for ; len(b) > each; n++ {
		to(from, b[:each:each])
		b = b[each:]
	}
	to(from, b)
	return n + 1
}

// source returns the sender of a datagram.
func source(name *address, size int) (netip.AddrPort, bool) {
	switch {
	case name.Family == unix.AF_INET && size >= unix.SizeofSockaddrInet4:
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(name))
		return netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), ntohs(v4.Port)), true
	case name.Family == unix.AF_INET6 && size >= unix.SizeofSockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(name.Addr), ntohs(name.Port)), true
	}
	return netip.AddrPort{}, false
}

// ntohs and htons convert a port between the byte order of a socket address and host byte order.
func ntohs(p uint16) uint16 {
	b := (*[2]byte)(unsafe.Pointer(&p))
	return uint16(b[0])<<8 | uint16(b[1])
}

func htons(p uint16) uint16 { return ntohs(p) }
