package udp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mmsghdr is the kernel's struct mmsghdr (recvmmsg(2)); Go pads it like C.
type mmsghdr struct {
	unix.Msghdr
	n uint32 // bytes received or sent
}

// sendmmsg and recvmmsg return the number of transferred messages, without waiting for space or messages.
func sendmmsg(fd int, m []mmsghdr) (int, unix.Errno) {
	n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(m))), uintptr(len(m)),
		unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

func recvmmsg(fd int, m []mmsghdr) (int, unix.Errno) {
	n, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(m))), uintptr(len(m)),
		unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

// control is a control message with space for the uint16 of UDP_SEGMENT or the int of UDP_GRO, IP_TOS and IPV6_TCLASS.
type control struct {
	header unix.Cmsghdr
	data   [8]byte
}

// address is a socket address of either family.
type address = unix.RawSockaddrInet6

// setSegment sets the segment size of a batch, in bytes.
func (c *control) setSegment(length int) {
	c.header.Level = unix.IPPROTO_UDP
	c.header.Type = unix.UDP_SEGMENT
	c.header.SetLen(unix.CmsgLen(2))
	*(*uint16)(unsafe.Pointer(&c.data)) = uint16(length)
}

// setClass sets the traffic class of a message, which also selects its priority in the queues of the host.
func (c *control) setClass(f family, k class) {
	o := f.capable()
	c.header.Level, c.header.Type = int32(o.level), int32(o.name)
	c.header.SetLen(unix.CmsgLen(4))
	*(*int32)(unsafe.Pointer(&c.data)) = int32(k &^ classed)
}

// controls has space for the control messages of a sent message. Both have the size of a control.
type controls [2]control

// set fills in the control messages of a batch, in segments of the given length or, with 0, of one datagram. It returns
// their number.
func (c *controls) set(f family, k class, segment int) (n int) {
	if k != 0 {
		c[n].setClass(f, k)
		n++
	}
	if segment > 0 {
		c[n].setSegment(segment)
		n++
	}
	return n
}

// received has space for the control messages of a received message: UDP_GRO, and IP_TOS or IPV6_TCLASS. All have the
// size of a control.
type received [2]control

// parse returns the length in bytes of the datagrams that the kernel has coalesced, 0 without coalescing, and whether
// they are marked with "congestion experienced". size is the length of the received control data.
func (r *received) parse(size int) (each int, marked bool) {
	const congestionExperienced = 3
	for i := range r {
		c := &r[i]
		if size < (i+1)*int(unsafe.Sizeof(*c)) && size < i*int(unsafe.Sizeof(*c))+unix.CmsgLen(1) {
			break
		}
		switch {
		case c.header.Level == unix.IPPROTO_UDP && c.header.Type == unix.UDP_GRO:
			each = int(*(*int32)(unsafe.Pointer(&c.data)))
		case c.header.Level == unix.IPPROTO_IP && c.header.Type == unix.IP_TOS:
			marked = c.data[0]&3 == congestionExperienced
		case c.header.Level == unix.IPPROTO_IPV6 && c.header.Type == unix.IPV6_TCLASS:
			marked = *(*int32)(unsafe.Pointer(&c.data))&3 == congestionExperienced
		}
	}
	return each, marked
}
