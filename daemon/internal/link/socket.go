package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netns"

	"github.com/fared/fared/internal/rtnl"
)

// sockets are the open sockets of the watch of one namespace.
type sockets struct {
	events  *os.File        // rtnetlink, subscribed
	raw     syscall.RawConn // of events
	asks    *requests       // rtnetlink, for dumps
	control int             // any socket of the namespace, for ioctl
	id      identity        // of their namespace
	netnsID string          // of their namespace, as netns.ID; "" if unknown
}

// skipStatistics is RTEXT_FILTER_SKIP_STATS.
const skipStatistics = 1 << 3

// groups are the multicast groups to which a watch subscribes.
const groups = unix.RTMGRP_LINK | unix.RTMGRP_TC | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR

// openSockets opens the sockets inside the namespace.
func openSockets(name string, receiveBuffer int) (*sockets, error) {
	id, err := identify(name)
	if err != nil {
		return nil, err
	}
	s := &sockets{control: -1, id: id}
	err = netns.In(name, func() error {
		fd, err := netlinkSocket(unix.SOCK_NONBLOCK, groups)
		if err != nil {
			return err
		}
		// Forcing the size needs CAP_NET_ADMIN; without it the system's limit applies.
		if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
			_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
		}
		s.events = os.NewFile(uintptr(fd), "rtnetlink")
		fd, err = netlinkSocket(0, 0)
		if err != nil {
			return err
		}
		s.asks = &requests{fd: fd, buf: make([]byte, 256<<10)}
		s.netnsID, _ = netns.ID() // without it, carriers are not covered
		s.control, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return os.NewSyscallError("socket", err)
	})
	if err == nil {
		s.raw, err = s.events.SyscallConn()
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func netlinkSocket(flags int, groups uint32) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|flags, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, os.NewSyscallError("rtnetlink socket", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return -1, os.NewSyscallError("rtnetlink bind", err)
	}
	return fd, nil
}

func (s *sockets) close() {
	if s.events != nil {
		s.events.Close()
	}
	if s.asks != nil {
		unix.Close(s.asks.fd)
	}
	if s.control >= 0 {
		unix.Close(s.control)
	}
}

// errOverrun reports that the kernel dropped messages because the queue was full; the whole state must be read.
var errOverrun = errors.New("rtnetlink messages were dropped")

// read fills buf with the next datagram. If wait is set it waits until the deadline of s.events and then returns
// os.ErrDeadlineExceeded; otherwise it returns unix.EAGAIN if there is none. It returns errOverrun if messages were
// dropped.
func (s *sockets) read(buf []byte, wait bool) ([]byte, error) {
	var n, flags int
	var from unix.Sockaddr
	var err error
	receive := func(fd uintptr) bool {
		for {
			n, _, flags, from, err = unix.Recvmsg(int(fd), buf, nil, unix.MSG_DONTWAIT)
			if err != unix.EINTR {
				return err != unix.EAGAIN
			}
		}
	}
	var ready error
	if wait {
		ready = s.raw.Read(receive)
	} else { // regardless of the deadline
		ready = s.raw.Control(func(fd uintptr) { receive(fd) })
	}
	switch {
	case ready != nil:
		return nil, ready
	case err == unix.ENOBUFS:
		return nil, errOverrun
	case err != nil:
		return nil, err
	case flags&unix.MSG_TRUNC != 0:
		return nil, errOverrun
	}
	if sa, ok := from.(*unix.SockaddrNetlink); !ok || sa.Pid != 0 {
		return nil, nil // not from the kernel
	}
	return buf[:n], nil
}

// requests sends rtnetlink queries, one at a time.
type requests struct {
	fd  int
	seq uint32
	buf []byte
}

// dump queries all objects of a kind and passes each answer to f. If the kernel's list changed during the dump, dump
// repeats it, so f must tolerate repetition.
func (r *requests) dump(kind uint16, header []byte, f func(rtnl.Message)) error {
	for range 8 {
		interrupted, err := r.dumpOnce(kind, header, f)
		if err != nil {
			return fmt.Errorf("rtnetlink request %d: %w", kind, err)
		}
		if !interrupted {
			return nil
		}
	}
	return fmt.Errorf("rtnetlink request %d: %w", kind, unix.EINTR)
}

// links queries each device with one of the indexes, without statistics, and passes each answer to f. A device that
// does not exist has no answer.
func (r *requests) links(indexes []int, f func(rtnl.Message)) error {
	const most = 16 // several times as many answers fit into the default receive buffer of a socket
	for chunk := range slices.Chunk(indexes, most) {
		var b []byte
		first := r.seq + 1
		for _, index := range chunk {
			r.seq++
			body := make([]byte, unix.SizeofIfInfomsg, unix.SizeofIfInfomsg+unix.SizeofNlAttr+4)
			binary.NativeEndian.PutUint32(body[4:], uint32(index))
			body = binary.NativeEndian.AppendUint16(body, unix.SizeofNlAttr+4)
			body = binary.NativeEndian.AppendUint16(body, unix.IFLA_EXT_MASK)
			body = binary.NativeEndian.AppendUint32(body, skipStatistics)
			b = rtnl.AppendMessage(b, unix.RTM_GETLINK, unix.NLM_F_REQUEST, r.seq, body)
		}
		if err := unix.Sendto(r.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return fmt.Errorf("rtnetlink request %d: %w", unix.RTM_GETLINK, err)
		}
		for left := len(chunk); left > 0; {
			n, err := unix.Read(r.fd, r.buf)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return fmt.Errorf("rtnetlink request %d: %w", unix.RTM_GETLINK, err)
			}
			for m := range rtnl.Messages(r.buf[:n]) {
				if m.Sequence-first >= uint32(len(chunk)) {
					continue // the rest of an earlier answer
				}
				left--
				if m.Kind != unix.NLMSG_ERROR {
					f(m)
				}
			}
		}
	}
	return nil
}

func (r *requests) dumpOnce(kind uint16, header []byte, f func(rtnl.Message)) (interrupted bool, err error) {
	r.seq++
	b := rtnl.AppendMessage(nil, kind, unix.NLM_F_REQUEST|unix.NLM_F_DUMP, r.seq, header)
	if err := unix.Sendto(r.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return false, err
	}
	for {
		n, err := unix.Read(r.fd, r.buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return false, err
		}
		for m := range rtnl.Messages(r.buf[:n]) {
			if m.Sequence != r.seq {
				continue // the rest of an earlier answer
			}
			interrupted = interrupted || m.Flags&unix.NLM_F_DUMP_INTR != 0
			switch m.Kind {
			case unix.NLMSG_DONE:
				return interrupted, nil
			case unix.NLMSG_ERROR:
				if len(m.Body) < 4 {
					return false, unix.EPROTO
				}
				if e := int32(binary.NativeEndian.Uint32(m.Body)); e != 0 {
					return false, unix.Errno(-e)
				}
				return interrupted, nil
			default:
				f(m)
			}
		}
	}
}
