package bfd

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Responder starts sessions. Sessions with the same local address share a receiver.
type Responder struct {
	enter func(netns string, f func() error) error

	random  func() uint32
	meeting Meeting // of all sessions

	mu             sync.Mutex // guards the fields below; taken before any lock of a receiver or session
	receivers      map[place]*receiver
	discriminators map[uint32]bool   // in use
	parting        map[pair]*Session // closed sessions that signal AdminDown
}

// pair identifies the two ends of a session.
type pair struct {
	place  place
	remote netip.Addr
}

// place identifies a receiver.
type place struct {
	local         netip.Addr
	device, netns string
}

// NewResponder returns a Responder without sessions. enter runs f inside a network namespace, by name or path, which is
// not empty, and returns f's error.
func NewResponder(enter func(netns string, f func() error) error) *Responder {
	return &Responder{enter: enter, random: rand.Uint32, receivers: make(map[place]*receiver),
		discriminators: make(map[uint32]bool), parting: make(map[pair]*Session)}
}

// Close stops the AdminDown signaling of closed sessions. All sessions must be closed before.
func (r *Responder) Close() {
	r.mu.Lock()
	parting := r.parting
	r.parting = make(map[pair]*Session)
	r.mu.Unlock()
	for _, s := range parting {
		s.cut()
		<-s.gone
	}
}

// discriminatorLocked returns a number that no other session uses and that is hard to guess (RFC 5880, Section 6.8.1).
// The caller holds mu.
func (r *Responder) discriminatorLocked() uint32 {
	for {
		if d := r.random(); d != 0 && !r.discriminators[d] {
			r.discriminators[d] = true
			return d
		}
	}
}

// Start opens a session's sockets and starts it. The caller must close the session.
func (r *Responder) Start(c Config) (*Session, error) {
	c.Local, c.Remote = c.Local.Unmap().WithZone(""), c.Remote.Unmap().WithZone("")
	if c.Interval < time.Microsecond || c.Multiplier < 1 || c.Multiplier > 255 {
		return nil, fmt.Errorf("bfd: interval %v and multiplier %d: use at least 1µs, and 1 to 255", c.Interval, c.Multiplier)
	}
	if err := c.Auth.Validate(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.Counters == nil {
		c.Counters = new(Counters)
	}
	at := place{c.Local, c.Device, c.Netns}
	in, there := r.receivers[at]
	if there && in.sessions[c.Remote] != nil {
		return nil, fmt.Errorf("bfd: a session from %v to %v exists already; BFD protects only one of two BGP sessions between the same addresses", c.Local, c.Remote)
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
	s := newSession(c, in, conn, r.discriminatorLocked())
	if before := r.parting[pair{at, c.Remote}]; before != nil {
		before.cut() // its neighbor now receives this session's packets
	}
	in.mu.Lock()
	in.sessions[c.Remote], in.numbered[s.machine.c.Discriminator] = s, s
	in.mu.Unlock()
	go s.run()
	return s, nil
}

// receiver reads the packets that arrive on port 3784 of one local address.
type receiver struct {
	responder *Responder
	place     place
	conn      *net.UDPConn
	raw       syscall.RawConn
	done      chan struct{}

	// mu guards sessions, and reading: a packet is passed to its session before another goroutine may read.
	mu       sync.Mutex
	sessions map[netip.Addr]*Session // by the neighbor's address; also changed under the responder's lock
	numbered map[uint32]*Session     // the same sessions, by our discriminator
}

// run reads until the socket is closed.
func (r *receiver) run() {
	defer close(r.done)
	_ = r.raw.Read(func(fd uintptr) bool {
		r.read(int(fd))
		return false // wait for more
	})
}

// drain reads the packets that wait in the socket.
func (r *receiver) drain() {
	_ = r.raw.Control(func(fd uintptr) { r.read(int(fd)) }) // an error means that the socket is closed, so no packet waits
}

// read reads the packets that wait in the socket.
func (r *receiver) read(fd int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b, control [256]byte
	for {
		n, m, _, from, err := unix.Recvmsg(fd, b[:], control[:], unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return // EAGAIN, or the error of an ICMP message
		}
		r.take(b[:n], hopLimit(control[:m]), source(from))
	}
}

// take passes a received packet to its session, and counts it if it is discarded. Our discriminator alone selects the
// session, or the source address if the neighbor does not know the discriminator yet (RFC 5880, Section 6.8.6; RFC
// 5881, Section 3).
func (r *receiver) take(b []byte, hopLimit int, from netip.AddrPort) {
	s := r.sessions[from.Addr()]
	drop := Accepted
	p, err := ParsePacket(b)
	switch {
	case hopLimit != 255: // RFC 5881, Section 5
		drop = HopLimit
	case err != nil:
		drop = Malformed
	case p.YourDiscr != 0 && r.numbered[p.YourDiscr] == nil:
		drop = UnknownSession
	case p.YourDiscr != 0:
		s = r.numbered[p.YourDiscr]
		drop = s.receive(p, from, time.Now())
	case s == nil:
		drop = UnknownSource
	default:
		drop = s.receive(p, from, time.Now())
	}
	switch {
	case drop == Accepted:
	case s != nil:
		s.c.Counters.dropped[drop].Add(1)
	default:
		for _, s := range r.sessions {
			s.c.Counters.dropped[drop].Add(1)
		}
	}
}

// leave removes a session, and with the last one the receiver.
func (r *receiver) leave(s *Session) {
	r.responder.mu.Lock()
	defer r.responder.mu.Unlock()
	r.mu.Lock()
	delete(r.sessions, s.c.Remote)
	delete(r.numbered, s.machine.c.Discriminator)
	empty := len(r.sessions) == 0
	r.mu.Unlock()
	if empty {
		delete(r.responder.receivers, r.place)
		r.conn.Close()
		<-r.done
	}
}
