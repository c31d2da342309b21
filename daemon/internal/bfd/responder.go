package bfd

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Responder starts sessions. Those with one address of ours share what listens there.
type Responder struct {
	enter func(netns string, f func() error) error

	mu        sync.Mutex // guards what follows; taken before any lock of a receiver or session
	receivers map[place]*receiver
}

// place is where a receiver listens.
type place struct {
	local         netip.Addr
	device, netns string
}

// NewResponder returns a Responder without sessions. enter runs f inside a network namespace, by name or path, which is not
// empty, and returns f's error.
func NewResponder(enter func(netns string, f func() error) error) *Responder {
	return &Responder{enter: enter, receivers: make(map[place]*receiver)}
}

// Start opens a session's sockets and starts it. The session must be closed.
func (r *Responder) Start(c Config) (*Session, error) {
	c.Local, c.Remote = c.Local.Unmap().WithZone(""), c.Remote.Unmap().WithZone("")
	if c.Interval < time.Microsecond || c.Multiplier < 1 || c.Multiplier > 255 {
		return nil, fmt.Errorf("bfd: interval %v and multiplier %d: use at least 1µs, and 1 to 255", c.Interval, c.Multiplier)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	at := place{c.Local, c.Device, c.Netns}
	in, there := r.receivers[at]
	if there && in.sessions[c.Remote] != nil {
		return nil, fmt.Errorf("bfd: there is a session from %v to %v already; of two BGP sessions between the same addresses one is protected", c.Local, c.Remote)
	}
	var conn *net.UDPConn
	open := func() (err error) {
		if conn, err = dial(c); err != nil || there {
			return err
		}
		in, err = listen(at)
		return err
	}
	err := error(nil)
	if c.Netns == "" {
		err = open()
	} else {
		err = r.enter(c.Netns, open)
	}
	if err != nil {
		if conn != nil {
			conn.Close()
		}
		return nil, fmt.Errorf("bfd: %v to %v: %w", c.Local, c.Remote, err)
	}
	if !there {
		in.responder, r.receivers[at] = r, in
		go in.run()
	}
	s := newSession(c, in, conn)
	in.mu.Lock()
	in.sessions[c.Remote] = s
	in.mu.Unlock()
	go s.run()
	return s, nil
}

// receiver reads what arrives on port 3784 of one address of ours.
type receiver struct {
	responder *Responder
	place     place
	conn      *net.UDPConn
	raw       syscall.RawConn
	done      chan struct{}

	// mu guards sessions, and reading: what was read is told before another may read.
	mu       sync.Mutex
	sessions map[netip.Addr]*Session // by the neighbour's address; changed under the responder's lock, too
}

// run reads until the socket is closed.
func (r *receiver) run() {
	defer close(r.done)
	_ = r.raw.Read(func(fd uintptr) bool {
		r.read(int(fd))
		return false // wait for more
	})
}

// drain takes in what waits in the socket.
func (r *receiver) drain() {
	_ = r.raw.Control(func(fd uintptr) { r.read(int(fd)) }) // an error: closed, and nothing waits
}

// read takes in what waits in the socket.
func (r *receiver) read(fd int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b, control [256]byte
	for {
		n, m, _, from, err := unix.Recvmsg(fd, b[:], control[:], unix.MSG_DONTWAIT)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return // EAGAIN, or what an ICMP message left behind
		}
		// RFC 5881, Section 5: without authentication what has crossed a router is discarded.
		if hopLimit(control[:m]) != 255 {
			continue
		}
		s := r.sessions[address(from)]
		if s == nil {
			continue
		}
		if p, err := ParsePacket(b[:n]); err == nil {
			s.receive(p, time.Now())
		}
	}
}

// leave removes a session, and with the last one the receiver.
func (r *receiver) leave(s *Session) {
	r.responder.mu.Lock()
	defer r.responder.mu.Unlock()
	r.mu.Lock()
	delete(r.sessions, s.c.Remote)
	empty := len(r.sessions) == 0
	r.mu.Unlock()
	if empty {
		delete(r.responder.receivers, r.place)
		r.conn.Close()
		<-r.done
	}
}
