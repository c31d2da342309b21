package bfd

import (
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Config configures a session. The neighbor is the only one at its address (RFC 5881, Section 3).
type Config struct {
	// Interval is both DesiredMinTxInterval and RequiredMinRxInterval while the session is up: whole microseconds, more
	// than 0. A session that is not up sends one packet per second, without a neighbor
	// one in four seconds.
	Interval time.Duration
	// Multiplier is the number of consecutive packets that may be missing, 1 to 255.
	Multiplier int
	// Local and Remote are the two ends of the link, of one family. Zones are ignored.
	Local, Remote netip.Addr
	// Device is the netdev that packets use in both directions. It must exist if the addresses are IPv6 link-local.
	// Otherwise a device that this kernel does not have is ignored, and packets follow the routes.
	Device string
	// Netns is the name or path of the network namespace; empty means the current one.
	Netns string
	// Auth is the authentication, the same at both ends; the zero value disables it.
	Auth Auth
	// Counters counts discarded packets; successive sessions may share it. nil disables counting.
	Counters *Counters
	// Changed is called, from one goroutine, with every change of state. It must not call the session. nil disables
	// notification.
	Changed func(Change)
}

// Change is a change of a session's state.
type Change struct {
	Before State
	Status
	// Silence is the expired detection time, 0 if none expired.
	Silence time.Duration
	// UpSince is when the session last came up; zero if it never did.
	UpSince time.Time
}

// Failed reports whether the path to the neighbor has failed: the session was up and is not, or the neighbor fell
// silent while the session was coming up, and neither end's operator disabled it (RFC 5882, Section 3.2).
func (c Change) Failed() bool {
	ended := c.Before == Up || c.Before == Init && c.Silence > 0
	return ended && c.State != Up && c.State != AdminDown && c.RemoteState != AdminDown
}

// Session is one end of a BFD session with its sockets. Responder.Start starts it.
type Session struct {
	c        Config
	receiver *receiver
	conn     *net.UDPConn // sends packets, from a source port of this session alone
	to       netip.AddrPort
	wake     chan struct{} // one slot: work is due before the timer fires
	stop     chan struct{}
	done     chan struct{}
	once     sync.Once
	parted   chan struct{} // closed by cut
	partOnce sync.Once
	gone     chan struct{} // closed when AdminDown is no longer signaled

	mu         sync.Mutex // guards the fields below
	machine    *Machine
	armed      time.Time // when the timer fires; zero before the first time
	unreported []Change
}

func newSession(c Config, r *receiver, conn *net.UDPConn, discriminator uint32) *Session {
	return &Session{
		c: c, receiver: r, conn: conn, to: netip.AddrPortFrom(c.Remote, port), wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
		parted: make(chan struct{}), gone: make(chan struct{}),
		machine: NewMachine(MachineConfig{
			Discriminator: discriminator, Interval: c.Interval, Multiplier: uint8(c.Multiplier), Auth: c.Auth, Random: rand.Int64N, Meeting: &r.responder.meeting,
		}),
	}
}

// Status returns a snapshot of the session.
func (s *Session) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.machine.Status()
}

// SetKeys replaces the keys of the authentication; the session goes on. The error is that of Responder.Start for such
// keys, and nothing is changed then.
func (s *Session) SetKeys(keys []Key) error {
	auth := Auth{Type: s.c.Auth.Type, Keys: keys}
	if err := auth.Validate(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.machine.SetKeys(keys)
	return nil
}

// Close ends the session: no packet is received and no change reported after it. A neighbor that receives our packets
// receives AdminDown, immediately and until a detection time has passed, a session between the same two ends is
// started, or the Responder is closed; for the neighbor the subsequent silence is not a failure.
func (s *Session) Close() {
	s.once.Do(func() { close(s.stop) })
	<-s.done
}

// run drives the machine until Close.
func (s *Session) run() {
	defer close(s.done)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-s.stop:
			s.end()
			return
		case <-s.wake:
		case <-timer.C:
		}
		timer.Reset(time.Until(s.turn()))
	}
}

// turn performs the due work and returns when the next turn is due. There always is one: a machine that is not disabled
// sends, or waits for the detection time to expire.
func (s *Session) turn() time.Time {
	now := time.Now()
	s.mu.Lock()
	late := s.machine.Expired(now)
	s.mu.Unlock()
	if late {
		// No packet was read in time; those that arrived until now are in the socket.
		s.receiver.drain()
	}
	s.mu.Lock()
	silence, before := time.Duration(0), s.machine.state
	if s.machine.Expired(now) {
		silence = s.machine.DetectionTime()
	}
	s.machine.Advance(now)
	s.changedLocked(before, silence)
	s.sendLocked(now)
	s.armed = s.machine.Next()
	next, unreported := s.armed, s.unreported
	s.unreported = nil
	s.mu.Unlock()
	for _, c := range unreported {
		if s.c.Changed != nil {
			s.c.Changed(c)
		}
	}
	return next
}

// changedLocked queues a change of state, if there was one, for the session's goroutine to report. The caller holds mu.
func (s *Session) changedLocked(before State, silence time.Duration) {
	if s.machine.state != before {
		s.unreported = append(s.unreported, Change{Before: before, Status: s.machine.Status(), Silence: silence, UpSince: s.machine.upSince})
	}
}

// sendLocked sends the due packets. It ignores errors, as if the link had dropped the packet: the other end detects the
// loss. The caller holds mu.
func (s *Session) sendLocked(now time.Time) {
	var b [MaxPacketLen]byte
	for p, ok := s.machine.Output(now); ok; p, ok = s.machine.Output(now) {
		_, _ = s.conn.WriteToUDPAddrPort(p.AppendTo(b[:0]), s.to)
	}
}

// receive processes a packet for the session, and returns why it was discarded, or Accepted. The receiver calls it,
// under its lock.
func (s *Session) receive(p Packet, from netip.AddrPort, now time.Time) Drop {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.machine.state
	if drop := s.machine.Receive(p, from, now); drop != Accepted {
		return drop
	}
	s.changedLocked(before, 0)
	if s.machine.Next().Before(s.armed) {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
	return Accepted
}

// end stops reception and, if the neighbor receives our packets, begins to signal AdminDown.
func (s *Session) end() {
	s.receiver.leave(s)
	s.mu.Lock()
	receiving := s.machine.state == Init || s.machine.state == Up
	if receiving {
		now := time.Now()
		s.machine.Disable(now)
		s.sendLocked(now)
	}
	s.mu.Unlock()
	r, at := s.receiver.responder, pair{s.receiver.place, s.c.Remote}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !receiving {
		s.releaseLocked()
		return
	}
	r.parting[at] = s
	go s.part(at)
}

// part signals AdminDown until its time is over or cut is called.
func (s *Session) part(at pair) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for over := false; !over; {
		select {
		case <-s.parted:
			over = true
		case now := <-timer.C:
			s.mu.Lock()
			s.sendLocked(now)
			next := s.machine.Next()
			s.mu.Unlock()
			over = next.IsZero()
			timer.Reset(time.Until(next))
		}
	}
	r := s.receiver.responder
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.parting[at] == s {
		delete(r.parting, at)
	}
	s.releaseLocked()
}

// cut stops the AdminDown signaling.
func (s *Session) cut() { s.partOnce.Do(func() { close(s.parted) }) }

// releaseLocked closes the socket and frees the discriminator. The caller holds the responder's mu.
func (s *Session) releaseLocked() {
	s.conn.Close()
	delete(s.receiver.responder.discriminators, s.machine.c.Discriminator)
	close(s.gone)
}
