package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	// bufferSize is requested for both directions, in bytes.
	bufferSize = 8 << 20
	// pieceSize is the maximum of one sendmsg, in bytes.
	pieceSize = 256 << 10
	// answerSize is the maximum receive buffer space for the answer to one message, in bytes: the kernel charges a page
	// for the answer to a path query.
	answerSize = 8 << 10
	// datagramSize exceeds the largest datagram of a dump (32 KiB).
	datagramSize = 64 << 10
	// answerSeconds is the timeout for an answer, in seconds. The kernel has answered when sendmsg returns; only a dump
	// continues.
	answerSeconds = 10
	// dumpTries is the number of attempts for a dump that is interrupted.
	dumpTries = 64
)

// ErrInterrupted reports that every attempt of a dump was interrupted by changes.
var ErrInterrupted = errors.New("netlink: changes interrupted each attempt to dump; retry when fewer objects change")

// Conn is a socket for requests. It must be used by one goroutine at a time.
type Conn struct {
	fd       int
	kernel   unix.SockaddrNetlink // destination of requests; x/sys writes to it
	sequence uint32
	window   int // maximum number of unanswered messages
	rx       []byte
	spare    []byte // of the previous batch
	starts   []int
	refuse   func(what string) unix.Errno
	unread   func(what string) unix.Errno
}

// Refuse simulates refusals by the kernel, for tests. f is called for every message of every later batch, in order,
// with the text of Error.What, e.g. "set nexthop 7: group [...]". If it returns an error code, the message has no
// effect and the code is its result. nil removes f.
func (c *Conn) Refuse(f func(what string) unix.Errno) { c.refuse = f }

// RefuseDumps simulates refusals of dumps by the kernel, for tests. f is called for every later dump with the text of
// Error.What, e.g. "dump links". If it returns an error code, the request is not sent and the code is its result. nil
// removes f.
func (c *Conn) RefuseDumps(f func(what string) unix.Errno) { c.unread = f }

// Dial opens a socket in the network namespace of the calling thread.
func Dial() (*Conn, error) {
	fd, err := open(0, bufferSize)
	if err != nil {
		return nil, err
	}
	c := &Conn{fd: fd, kernel: unix.SockaddrNetlink{Family: unix.AF_NETLINK}, rx: make([]byte, datagramSize)}
	room, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: answerSeconds})
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: %w", err), unix.Close(fd))
	}
	c.window = max(room/answerSize, 1)
	return c, nil
}

// open creates a socket that is a member of groups (RTMGRP_ bits).
func open(groups uint32, buffer int) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, fmt.Errorf("netlink: open a socket: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer); err != nil {
		// Without CAP_NET_ADMIN, net.core.rmem_max limits the size; the window follows from the actual size.
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer)
		if err != nil {
			return -1, errors.Join(fmt.Errorf("netlink: receive buffer: %w", err), unix.Close(fd))
		}
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, max(buffer, 2*pieceSize)); err != nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 2*pieceSize)
		if err != nil {
			return -1, errors.Join(fmt.Errorf("netlink: send buffer: %w", err), unix.Close(fd))
		}
	}
	for _, option := range []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK, unix.NETLINK_GET_STRICT_CHK} {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, option, 1); err != nil {
			return -1, errors.Join(fmt.Errorf("netlink: socket option %d: %w; Linux 4.20 or later is needed", option, err), unix.Close(fd))
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		return -1, errors.Join(fmt.Errorf("netlink: bind: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// Port returns the port id of the socket, by which the kernel identifies the origin of a change (nlmsg_pid of a
// notification).
func (c *Conn) Port() (uint32, error) {
	address, err := unix.Getsockname(c.fd)
	if err != nil {
		return 0, fmt.Errorf("netlink: port id: %w", err)
	}
	return address.(*unix.SockaddrNetlink).Pid, nil
}

// Close closes the socket.
func (c *Conn) Close() error { return unix.Close(c.fd) }

func (c *Conn) send(b []byte) error {
	for {
		if err := unix.Sendto(c.fd, b, 0, &c.kernel); err != unix.EINTR {
			return err
		}
	}
}

// receive waits for a datagram from the kernel and calls f for its messages, until f returns false.
func (c *Conn) receive(f func(Message) bool) error {
	for {
		n, from, err := unix.Recvfrom(c.fd, c.rx, unix.MSG_TRUNC)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ENOBUFS:
			return ErrOverrun
		case err == unix.EAGAIN:
			return fmt.Errorf("netlink: no answer within %d s", answerSeconds)
		case err != nil:
			return fmt.Errorf("netlink: receive: %w", err)
		case n > len(c.rx):
			return fmt.Errorf("netlink: a datagram of %d bytes, above %d", n, len(c.rx))
		}
		if sender, ok := from.(*unix.SockaddrNetlink); !ok || sender.Pid != 0 {
			continue // any process may write to this socket; only messages of the kernel are accepted
		}
		Messages(c.rx[:n])(f)
		return nil
	}
}

// dump sends a request and calls f for each answer. If the kernel reports a change during the dump, it calls reset and
// starts over.
func (c *Conn) dump(what string, request []byte, reset func(), f func(Message)) error {
	if c.unread != nil {
		if errno := c.unread(what); errno != 0 {
			return &Error{what, errno, ""}
		}
	}
	for range dumpTries {
		reset()
		interrupted, err := c.dumpOnce(what, request, f)
		if err != nil || !interrupted {
			return err
		}
	}
	return fmt.Errorf("%s: %w", what, ErrInterrupted)
}

func (c *Conn) dumpOnce(what string, request []byte, f func(Message)) (interrupted bool, err error) {
	c.sequence++
	sequence := c.sequence
	binary.NativeEndian.PutUint32(request[8:], sequence)
	if err := c.send(request); err != nil {
		return false, fmt.Errorf("%s: %w", what, err)
	}
	var refused error
	for done := false; !done; {
		err := c.receive(func(m Message) bool {
			if m.Sequence != sequence {
				return true // from an abandoned dump
			}
			if m.Flags&unix.NLM_F_DUMP_INTR != 0 {
				interrupted = true
			}
			switch m.Kind {
			case unix.NLMSG_DONE:
				if code := int32(readU32(m.Body)); code < 0 {
					refused = &Error{what, unix.Errno(-code), ""}
				}
				done = true
			case unix.NLMSG_ERROR:
				if errno, text := parseError(m); errno != 0 {
					refused = &Error{what, errno, text}
				}
				done = true
			default:
				f(m)
			}
			return !done
		})
		if err != nil {
			return false, fmt.Errorf("%s: %w", what, err)
		}
	}
	return interrupted, refused
}
