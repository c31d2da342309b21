package bfd

import (
	"net/netip"
	"time"
)

// slow is the least transmission interval while a session is not up (RFC 5880, Section 6.8.3).
const slow = time.Second

// lonely is that interval after more than patience packets without one from the neighbor, which may not use BFD. A
// neighbor that appears is answered immediately.
const lonely, patience = 4 * time.Second, 5

// MachineConfig configures a Machine.
type MachineConfig struct {
	// Discriminator is our discriminator of the session, not 0, and unique among our sessions.
	Discriminator uint32
	// Interval is our DesiredMinTxInterval and RequiredMinRxInterval while the session is up; whole microseconds, more
	// than 0.
	Interval time.Duration
	// Multiplier is the number of our packets that may be missing before the other end declares the session down; not
	// 0.
	Multiplier uint8
	// Auth is valid; a Machine does not change it.
	Auth Auth
	// Random returns a number from 0 to n-1, for the jitter and the first sequence number; not nil.
	Random func(n int64) int64
	// Meeting has the slow periodic packets of several sessions sent together; nil sends those of this one alone.
	Meeting *Meeting
}

// Machine is one end of a session (RFC 5880, Section 6.8). It has no clock, socket or goroutine. Its owner calls
// Advance and then Output at the time that Next returns, and after every Receive. It begins in the state Down, in the
// active role.
type Machine struct {
	c     MachineConfig
	state State
	diag  Diagnostic
	// desiredMinTx is Interval while the session is up, otherwise at least slow, or lonely.
	desiredMinTx time.Duration
	unanswered   int // number of packets since the last one of the neighbor, up to patience

	remoteState      State
	remoteDiag       Diagnostic
	remoteDiscr      uint32 // 0 if unknown
	remoteMinTx      time.Duration
	remoteMinRx      time.Duration
	remoteMultiplier uint8
	remoteDemand     bool
	// pinned is the source of the packet with which the session came up; not valid while the session is not up.
	pinned netip.AddrPort

	lastReceived time.Time // when the last accepted packet arrived; zero if none arrived within a detection time
	upSince      time.Time // when the session last came up; zero before the first time
	sent         time.Time // when the last packet was sent that did not answer a poll; zero if there is none
	shorten      int64     // reduction of the subsequent wait, in millionths
	polling      bool      // our poll sequence is under way
	answer       bool      // a poll of the other end must be answered
	changed      bool      // the state has changed since the last packet
	until        time.Time // in AdminDown: end of transmission

	auth authenticator
}

// NewMachine returns a session that has neither sent nor received a packet.
func NewMachine(c MachineConfig) *Machine {
	m := &Machine{c: c, state: Down, desiredMinTx: max(c.Interval, slow), auth: authenticator{conf: c.Auth}}
	if c.Auth.Type != NoAuth {
		m.auth.sent = uint32(c.Random(1 << 32))
	}
	m.forget()
	return m
}

// forget resets the variables of the other end to their initial values (RFC 5880, Section 6.8.1): after the silence of
// a detection time, later packets may come from another session of the neighbor.
func (m *Machine) forget() {
	m.lastReceived, m.remoteState, m.remoteDiscr, m.remoteMinRx, m.remoteDemand = time.Time{}, Down, 0, time.Microsecond, false
}

// SetKeys replaces the keys of the authentication, whose type remains; the new ones are valid for it. Sequence numbers
// continue.
func (m *Machine) SetKeys(keys []Key) { m.auth.conf.Keys = keys }

// Receive processes a packet that arrived from an address and port at a time, and returns Accepted, or the reason why
// the packet was discarded (RFC 5880, Section 6.8.6).
//
// A session comes up by a packet with our discriminator, which a sender that does not receive our packets has to guess.
// While the session is up, packets count only if they have the address, the source port and the discriminator of that
// packet: the neighbor's port and discriminator do not change during a session (RFC 5881, Section 4; RFC 5880, Section
// 6.8.1), and other users of its host cannot bind the port. So they cannot end the session with a packet in state Down,
// which is valid without our discriminator. A neighbor that has restarted is accepted after the detection time, with
// authentication after twice that time.
func (m *Machine) Receive(p Packet, from netip.AddrPort, now time.Time) Drop {
	switch {
	case m.state == AdminDown:
		return Disabled
	case p.YourDiscr != 0 && p.YourDiscr != m.c.Discriminator:
		return UnknownSession
	case m.state != Up:
	case from.Addr() != m.pinned.Addr():
		return OtherAddress
	case from.Port() != m.pinned.Port():
		return OtherPort
	case p.MyDiscr != m.remoteDiscr:
		return OtherDiscriminator
	}
	if drop := m.auth.check(p, now); drop != Accepted {
		return drop
	}
	// In Init a second sender with the neighbor's address may have replaced the neighbor's discriminator. The next
	// packet then goes out at once, so that the neighbor gets its own discriminator back before another packet replaces
	// it (RFC 5880, Section 6.8.7: changed contents).
	m.changed = m.changed || m.state == Init && p.MyDiscr != m.remoteDiscr
	if m.lastReceived = now; m.unanswered > 0 {
		m.unanswered, m.desiredMinTx = 0, max(m.c.Interval, slow)
	}
	m.remoteState, m.remoteDiag, m.remoteDiscr = p.State, p.Diagnostic, p.MyDiscr
	m.remoteMinTx, m.remoteMinRx, m.remoteMultiplier, m.remoteDemand = p.DesiredMinTx, p.RequiredMinRx, p.Multiplier, p.Demand
	m.auth.accept(p, now, m.DetectionTime())
	m.polling = m.polling && !p.Final
	m.answer = m.answer || p.Poll
	switch {
	case p.State == AdminDown || p.State == Down && m.state == Up:
		if m.state != Down {
			m.enter(Down, NeighborDown)
		}
	case p.State == Down && m.state == Down:
		m.enter(Init, m.diag)
	case p.State == Init && m.state != Up, p.State == Up && m.state == Init:
		m.enter(Up, m.diag)
		m.pinned, m.upSince = from, now
	}
	return Accepted
}

// enter changes the state, and with it the transmission interval. The diagnostic stays when a session comes up: it
// explains why the session was last down (RFC 5880, Section 6.8.1).
func (m *Machine) enter(s State, d Diagnostic) {
	m.state, m.diag, m.changed = s, d, true
	interval := max(m.c.Interval, slow)
	if s == Up {
		interval = m.c.Interval
	}
	if interval != m.desiredMinTx {
		m.desiredMinTx, m.polling = interval, true // RFC 5880, Section 6.8.3
	}
}

// Disable takes the session down permanently at a time. Output returns packets that signal this until a detection time
// of the other end has passed, so that one of them arrives (RFC 5880, Section 6.8.16); received packets are discarded.
func (m *Machine) Disable(now time.Time) {
	m.enter(AdminDown, AdministrativelyDown)
	m.polling, m.answer = false, false
	m.until = now.Add(time.Duration(m.c.Multiplier) * max(m.desiredMinTx, m.remoteMinRx))
}

// DetectionTime returns the permitted duration of the other end's silence, or 0 while no packets arrive (RFC 5880,
// Section 6.8.4).
func (m *Machine) DetectionTime() time.Duration {
	if m.lastReceived.IsZero() {
		return 0
	}
	return time.Duration(m.remoteMultiplier) * max(m.c.Interval, m.remoteMinTx)
}

// Expired reports whether the detection time has expired at a time, and Advance has not processed the expiry yet.
func (m *Machine) Expired(now time.Time) bool {
	return !m.lastReceived.IsZero() && !now.Before(m.lastReceived.Add(m.DetectionTime()))
}

// Advance processes an expired detection time.
func (m *Machine) Advance(now time.Time) {
	if !m.Expired(now) || m.state == AdminDown {
		return
	}
	m.forget()
	if m.state == Init || m.state == Up {
		m.enter(Down, DetectionTimeExpired)
	}
}

// periodic reports whether periodic packets are sent (RFC 5880, Section 6.8.7).
func (m *Machine) periodic() bool {
	quiet := m.remoteDemand && m.state == Up && m.remoteState == Up && !m.polling
	over := m.state == AdminDown && m.nextPeriodic().After(m.until)
	return m.remoteMinRx != 0 && !quiet && !over
}

// nextPeriodic returns when the next periodic packet is due.
func (m *Machine) nextPeriodic() time.Time {
	interval := max(m.desiredMinTx, m.remoteMinRx)
	return m.sent.Add(interval - part(interval, m.shorten))
}

// Output returns a packet to send at a time, or false if there is none. Call it until it returns false.
func (m *Machine) Output(now time.Time) (Packet, bool) {
	p := Packet{
		Diagnostic: m.diag, State: m.state, Multiplier: m.c.Multiplier, MyDiscr: m.c.Discriminator, YourDiscr: m.remoteDiscr,
		DesiredMinTx: m.desiredMinTx, RequiredMinRx: m.c.Interval,
	}
	switch {
	case m.answer:
		// Immediately, regardless of the interval (RFC 5880, Section 6.8.7), and never with Poll.
		m.answer, p.Final = false, true
		return m.auth.sign(p, now), true
	case m.changed, m.periodic() && !now.Before(m.nextPeriodic()):
		m.changed, m.sent, p.Poll = false, now, m.polling
		if m.lastReceived.IsZero() && m.state == Down {
			if m.unanswered < patience {
				m.unanswered++
			} else {
				m.desiredMinTx = max(m.c.Interval, lonely)
				p.DesiredMinTx = m.desiredMinTx
			}
		}
		// 75 to 100 % of the interval, at most 90 % if the multiplier is 1 (RFC 5880, Section 6.8.7).
		interval := max(m.desiredMinTx, m.remoteMinRx)
		meets := m.c.Meeting != nil && interval >= slow
		if m.shorten = 1000 * m.c.Random(251); m.c.Multiplier == 1 || meets {
			m.shorten = leastShorter + 1000*m.c.Random(151)
		}
		if meets {
			m.shorten = m.c.Meeting.join(now, interval, m.shorten)
		}
		return m.auth.sign(p, now), true
	}
	return Packet{}, false
}

// Next returns when Advance or Output is due if no packet is received before; zero means never.
func (m *Machine) Next() time.Time {
	if m.answer || m.changed {
		return time.Unix(0, 0) // due now
	}
	var next time.Time
	if m.periodic() {
		next = m.nextPeriodic()
	}
	if !m.lastReceived.IsZero() && m.state != AdminDown {
		if silent := m.lastReceived.Add(m.DetectionTime()); next.IsZero() || silent.Before(next) {
			next = silent
		}
	}
	return next
}

// Status is a snapshot of a session.
type Status struct {
	State       State
	RemoteState State // Down while no packets arrive
	// Diagnostic explains why the session was last down; RemoteDiagnostic is the other end's diagnostic.
	Diagnostic, RemoteDiagnostic Diagnostic
	// DetectionTime is the duration of silence after which the session goes down; 0 while no packets arrive.
	DetectionTime time.Duration
}

// Status returns a snapshot of the session.
func (m *Machine) Status() Status {
	return Status{m.state, m.remoteState, m.diag, m.remoteDiag, m.DetectionTime()}
}
