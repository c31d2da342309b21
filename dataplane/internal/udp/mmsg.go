package udp

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// mmsghdr is the kernel's struct mmsghdr (recvmmsg(2)): the compiler pads it as C does.
type mmsghdr struct {
	unix.Msghdr
	n uint32 // bytes received or sent
}

// sendmmsg and recvmmsg return how many messages were carried, without waiting for room or messages.
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

// control is a control message with room for UDP_SEGMENT's uint16 or UDP_GRO's int.
type control struct {
	header unix.Cmsghdr
	data   [8]byte
}

// address is a socket address of either family.
type address = unix.RawSockaddrInet6

// setSegment makes c ask for batches of length bytes a datagram.
func (c *control) setSegment(length int) {
	c.header.Level = unix.IPPROTO_UDP
	c.header.Type = unix.UDP_SEGMENT
	c.header.SetLen(unix.CmsgLen(2))
	*(*uint16)(unsafe.Pointer(&c.data)) = uint16(length)
}

// segment returns how long the datagrams are that the kernel has joined, or 0 when it has joined none. size is what was received
// of control data.
func (c *control) segment(size int) int {
	if size < unix.CmsgLen(4) || c.header.Level != unix.IPPROTO_UDP || c.header.Type != unix.UDP_GRO {
		return 0
	}
	return int(*(*int32)(unsafe.Pointer(&c.data)))
}
