package bfd

import (
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Config is what a session is to do. Its neighbour is the only one behind its addresses (RFC 5881, Section 3).
type Config struct {
	// Interval is how often control packets are sent at most, and taken at most, while the session is up: whole microseconds,
	// more than 0. A session that is not up sends one a second.
	Interval time.Duration
	// Multiplier is how many packets in a row may be missing, 1 to 255.
	Multiplier int
	// Local and Remote are the two ends of the link, of one family. Zones are not looked at.
	Local, Remote netip.Addr
	// Device is the netdev that packets leave and enter by. It must be there if the addresses are IPv6 link-local. Otherwise a
	// device that this kernel does not have is not asked for, and packets go where routes lead.
	Device string
	// Netns is the name or path of the network namespace; empty: this one.
	Netns string
	// Changed is called, from one goroutine, with every change of state. It must not call the session. Nil: nobody is told.
	Changed func(Change)
}

// Change is a change of a session's state.
type Change struct {
	Before State
	Status
	// Silence is the detection time that was over, 0 if it was not.
	Silence time.Duration
}

// Failed says whether the path to the neighbour has failed: the session was up and is not, and neither end's operator took it
// down (RFC 5882, Section 3.2).
func (c Change) Failed() bool {
	return c.Before == Up && c.State != Up && c.State != AdminDown && c.RemoteState != AdminDown
}

// Session is one end of a BFD session with its sockets. It is started by Responder.Start.
type Session struct {
	c        Config
	receiver *receiver
	conn     *net.UDPConn // what is sent leaves here, from a port of the session's own
	to       netip.AddrPort
	wake     chan struct{} // one slot: there is something to do before the timer fires
	stop     chan struct{}
	done     chan struct{}
	once     sync.Once

	mu      sync.Mutex // guards what follows
	machine *Machine
	armed   time.Time // when the timer fires; zero: never
	untold  []Change
}

func newSession(c Config, r *receiver, conn *net.UDPConn) *Session {
	return &Session{
		c: c, receiver: r, conn: conn, to: netip.AddrPortFrom(c.Remote, port), wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
		machine: NewMachine(MachineConfig{
			// Hard to guess, as RFC 5880, Section 6.8.1, recommends.
			Discriminator: 1 + rand.Uint32N(1<<32-1), Interval: c.Interval, Multiplier: uint8(c.Multiplier), Random: rand.Int64N,
		}),
	}
}

// Status returns a picture of the session.
func (s *Session) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.machine.Status()
}

// Close ends the session and returns when nothing of it is left. A neighbour that hears us is told AdminDown, once; what it then
// loses is not a failure.
func (s *Session) Close() {
	s.once.Do(func() { close(s.stop) })
	<-s.done
}

// run carries the machine until Close.
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
		if next := s.turn(); next.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(next))
		}
	}
}

// turn does what is due and returns when the next turn is; zero: when something is received.
func (s *Session) turn() time.Time {
	now := time.Now()
	s.mu.Lock()
	late := s.machine.Expired(now)
	s.mu.Unlock()
	if late {
		// Nothing was heard, or we did not listen: everything that came until now is in the socket.
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
	next, untold := s.armed, s.untold
	s.untold = nil
	s.mu.Unlock()
	for _, c := range untold {
		if s.c.Changed != nil {
			s.c.Changed(c)
		}
	}
	return next
}

// changedLocked notes a change of state, if there was one, for the session's goroutine to tell. The caller holds mu.
func (s *Session) changedLocked(before State, silence time.Duration) {
	if s.machine.state != before {
		s.untold = append(s.untold, Change{Before: before, Status: s.machine.Status(), Silence: silence})
	}
}

// sendLocked sends what is due. What cannot be sent is lost, as on the link: the other end notices. The caller holds mu.
func (s *Session) sendLocked(now time.Time) {
	var b [PacketLen]byte
	for p, ok := s.machine.Output(now); ok; p, ok = s.machine.Output(now) {
		_, _ = s.conn.WriteToUDPAddrPort(p.AppendTo(b[:0]), s.to)
	}
}

// receive takes a packet from the session's neighbour. The receiver calls it, under its lock.
func (s *Session) receive(p Packet, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.machine.state
	if !s.machine.Receive(p, now) {
		return
	}
	s.changedLocked(before, 0)
	if next := s.machine.Next(); !next.IsZero() && (s.armed.IsZero() || next.Before(s.armed)) {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

// end says goodbye to a neighbour that hears us and releases what the session has.
func (s *Session) end() {
	s.receiver.leave(s)
	s.mu.Lock()
	if s.machine.state == Init || s.machine.state == Up {
		s.machine.Disable()
		s.sendLocked(time.Now())
	}
	s.mu.Unlock()
	s.conn.Close()
}
