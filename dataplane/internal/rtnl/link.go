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

// Next waits for news. ErrOverrun: some were lost, read all links again; news of before are thrown away, so that what comes
// next is newer than what is then read. After Close it returns os.ErrClosed.
func (w *Watch) Next() (events []LinkEvent, err error) {
	var failed error
	err = w.raw.Read(func(fd uintptr) bool {
		for {
			n, from, err := unix.Recvfrom(int(fd), w.rx, unix.MSG_TRUNC)
			switch {
			case err == unix.EAGAIN:
				return failed != nil
			case err == unix.EINTR:
				continue
			case err == unix.ENOBUFS || err == nil && n > len(w.rx):
				// Until the buffer is empty the kernel does not say again that it loses more.
				failed = ErrOverrun
				continue
			case failed == ErrOverrun && err == nil:
				continue
			case err != nil:
				failed = fmt.Errorf("netlink: receive: %w", err)
				return true
			}
			if sender, ok := from.(*unix.SockaddrNetlink); ok && sender.Pid == 0 {
				events = parseLinkEvents(w.rx[:n])
				return true
			}
		}
	})
	if err != nil {
		return nil, fmt.Errorf("netlink: %w: %w", os.ErrClosed, err)
	}
	return events, failed
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
