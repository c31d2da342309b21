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

// control is a control message with space for the uint16 of UDP_SEGMENT or the int of UDP_GRO.
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

// segment returns the length in bytes of the datagrams that the kernel has coalesced, or 0 without coalescing. size is the
// length of the received control data.
func (c *control) segment(size int) int {
	if size < unix.CmsgLen(4) || c.header.Level != unix.IPPROTO_UDP || c.header.Type != unix.UDP_GRO {
		return 0
	}
	return int(*(*int32)(unsafe.Pointer(&c.data)))
}
