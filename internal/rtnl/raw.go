package rtnl

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// These system calls never block, so they need not be known to the runtime. If they were, each wait that ends by its
// deadline would wake the runtime's monitor thread, which sleeps while no goroutine runs: that took as much processor
// time as the rest of the wait.

// epollReady reports whether a descriptor of an epoll is ready.
func epollReady(epoll int) (ready bool, err error) {
	var event unix.EpollEvent
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epoll), uintptr(unsafe.Pointer(&event)), 1, 0, 0, 0)
		switch errno {
		case 0:
			return n > 0, nil
		case unix.EINTR:
		default:
			return false, errno
		}
	}
}

// receiveNow receives a datagram from a netlink socket, if there is one; EAGAIN means that there is none. Without an
// error, size is that of the datagram, which may exceed the buffer's, port that of its sender, 0 for the kernel.
func receiveNow(socket int, buf []byte) (size int, port uint32, errno unix.Errno) {
	var from unix.RawSockaddrNetlink
	length := uint32(unix.SizeofSockaddrNetlink)
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(socket), uintptr(unsafe.Pointer(unsafe.SliceData(buf))), uintptr(len(buf)),
		unix.MSG_TRUNC|unix.MSG_DONTWAIT, uintptr(unsafe.Pointer(&from)), uintptr(unsafe.Pointer(&length)))
	return int(n), from.Pid, errno
}

// setTimer sets a timerfd to a relative time; the zero value stops it.
func setTimer(timer int, spec *unix.ItimerSpec) error {
	if _, _, errno := unix.RawSyscall6(unix.SYS_TIMERFD_SETTIME, uintptr(timer), 0, uintptr(unsafe.Pointer(spec)), 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}
