package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	linkHeader     = 16     // struct ifinfomsg
	skipStatistics = 1 << 3 // RTEXT_FILTER_SKIP_STATS
)

// Link is a network device.
type Link struct {
	Index int
	Name  string
	MTU   uint32
	// Up is IFF_UP: the administrator wants it up.
	Up bool
	// Carrier is IFF_LOWER_UP: the wire is.
	Carrier bool
	// Loopback is IFF_LOOPBACK.
	Loopback bool
}

// Usable says that packets can leave.
func (l Link) Usable() bool { return l.Up && l.Carrier }

// parseLink reads the body of RTM_NEWLINK or RTM_DELLINK.
func parseLink(b []byte) (l Link, ok bool) {
	if len(b) < linkHeader {
		return l, false
	}
	l.Index = int(int32(binary.NativeEndian.Uint32(b[4:])))
	flags := binary.NativeEndian.Uint32(b[8:])
	l.Up, l.Carrier, l.Loopback = flags&unix.IFF_UP != 0, flags&unix.IFF_LOWER_UP != 0, flags&unix.IFF_LOOPBACK != 0
	eachAttr(b[linkHeader:], func(kind uint16, v []byte) {
		switch kind {
		case unix.IFLA_IFNAME:
			l.Name = readText(v)
		case unix.IFLA_MTU:
			l.MTU = readU32(v)
		}
	})
	return l, l.Index > 0
}

// Links returns all devices of the network namespace.
func (c *Conn) Links() ([]Link, error) {
	var w writer
	at := w.begin(unix.RTM_GETLINK, unix.NLM_F_DUMP, unix.AF_UNSPEC, linkHeader)
	w.u32(unix.IFLA_EXT_MASK, skipStatistics)
	w.end(at)
	var all []Link
	err := c.dump("dump links", w.buf, func() { all = all[:0] }, func(m message) {
		if l, ok := parseLink(m.body); ok && m.kind == unix.RTM_NEWLINK {
			all = append(all, l)
		}
	})
	return all, err
}

// LinkEvent is news of a link.
type LinkEvent struct {
	Link
	// Gone: it was deleted, or moved to another network namespace.
	Gone bool
}

// Watch hears of links.
type Watch struct {
	file *os.File
	raw  syscall.RawConn
	rx   []byte
}

// WatchLinks opens a socket in the calling thread's network namespace that hears of every change of a link from now on.
// buffer is its size in bytes; 0: 8 MiB. What does not fit is lost, and Next says so.
func WatchLinks(buffer int) (*Watch, error) {
	if buffer == 0 {
		buffer = bufferSize
	}
	fd, err := open(unix.RTMGRP_LINK, buffer)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: %w", err), unix.Close(fd))
	}
	w := &Watch{file: os.NewFile(uintptr(fd), "netlink"), rx: make([]byte, datagramSize)}
	if w.raw, err = w.file.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("netlink: %w", err), w.file.Close())
	}
	return w, nil
}

// Next waits for news and returns them, as Wait and Poll do.
func (w *Watch) Next() ([]LinkEvent, error) {
	for {
		if err := w.Wait(); err != nil {
			return nil, err
		}
		if events, err := w.Poll(); len(events) > 0 || err != nil {
			return events, err
		}
	}
}

// Wait returns when there may be news. After Close it returns os.ErrClosed.
func (w *Watch) Wait() error {
	err := w.raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 || err != nil && err != unix.EINTR
	})
	if err != nil {
		return fmt.Errorf("netlink: %w: %w", os.ErrClosed, err)
	}
	return nil
}

// Poll returns the news that there are, without waiting. ErrOverrun: some were lost, read all links again; news of before
// are thrown away, so that what comes next is newer than what is then read. One goroutine at a time may call it.
//
// The kernel tells of a link before it carries out the next request of any socket: Poll after Conn.Do returns all
// that happened before the last message of the batch was carried out.
func (w *Watch) Poll() (events []LinkEvent, err error) {
	control := w.raw.Control(func(fd uintptr) {
		for {
			n, from, failed := unix.Recvfrom(int(fd), w.rx, unix.MSG_TRUNC|unix.MSG_DONTWAIT)
			switch {
			case failed == unix.EAGAIN:
				return
			case failed == unix.EINTR:
			case failed == unix.ENOBUFS || failed == nil && n > len(w.rx):
				// Until the buffer is empty the kernel does not say again that it loses more.
				events, err = nil, ErrOverrun
			case failed != nil:
				events, err = nil, fmt.Errorf("netlink: receive: %w", failed)
				return
			case err == nil:
				if sender, ok := from.(*unix.SockaddrNetlink); ok && sender.Pid == 0 {
					events = append(events, parseLinkEvents(w.rx[:n])...)
				}
			}
		}
	})
	if control != nil {
		return nil, fmt.Errorf("netlink: %w: %w", os.ErrClosed, control)
	}
	return events, err
}

func parseLinkEvents(b []byte) (events []LinkEvent) {
	eachMessage(b, func(m message) bool {
		// AF_BRIDGE says RTM_DELLINK when a device leaves a bridge, which is not the end of it.
		gone := m.kind == unix.RTM_DELLINK
		if gone || m.kind == unix.RTM_NEWLINK {
			if l, ok := parseLink(m.body); ok && m.body[0] == unix.AF_UNSPEC {
				events = append(events, LinkEvent{l, gone})
			}
		}
		return true
	})
	return events
}

// Close ends Next and releases the socket.
func (w *Watch) Close() error { return w.file.Close() }
