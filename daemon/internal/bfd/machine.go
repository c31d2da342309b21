package bfd

import "time"

// slow is the least interval of transmission while a session is not up (RFC 5880, Section 6.8.3).
const slow = time.Second

// MachineConfig is what a Machine is to do.
type MachineConfig struct {
	// Discriminator is our number of the session, not 0, and no other session's.
	Discriminator uint32
	// Interval is how often we want to send at most, and receive at most, while the session is up; whole microseconds, more than 0.
	Interval time.Duration
	// Multiplier is how many of our packets may be missing before the other end finds us silent; not 0.
	Multiplier uint8
	// Random returns a number from 0 to n-1, for the jitter; not nil.
	Random func(n int64) int64
}

// Machine is one end of a session (RFC 5880, Section 6.8). It has no clock, socket or goroutine. Whoever carries it calls Advance
// and then Output at the time that Next says, and after every Receive. It begins in the state Down, in the active role.
type Machine struct {
	c     MachineConfig
	state State
	diag  Diagnostic
	// desiredMinTx is Interval when up, otherwise not below slow.
	desiredMinTx time.Duration

	remoteState      State
	remoteDiag       Diagnostic
	remoteDiscr      uint32 // 0: not known
	remoteMinTx      time.Duration
	remoteMinRx      time.Duration
	remoteMultiplier uint8
	remoteDemand     bool

	heard   time.Time // when the last packet came that was not discarded; zero: none within a detection time
	sent    time.Time // when the last packet went out that was no answer to a poll; zero: none
	shorten int64     // by how many thousandths the wait after it is shortened
	polling bool      // a poll sequence of ours is under way
	answer  bool      // a poll of the other end's is to be answered
	changed bool      // what the last packet said is not so any more
}

// NewMachine returns a session that has heard and said nothing.
func NewMachine(c MachineConfig) *Machine {
	m := &Machine{c: c, state: Down, desiredMinTx: max(c.Interval, slow)}
	m.forget()
	return m
}

// forget returns what is known of the other end to how a session begins (RFC 5880, Section 6.8.1): silent for a detection time,
// it may be another one when it is heard again.
func (m *Machine) forget() {
	m.heard, m.remoteState, m.remoteDiscr, m.remoteMinRx, m.remoteDemand = time.Time{}, Down, 0, time.Microsecond, false
}

// Receive takes a packet that came at a time, and says whether it counts: one for another session of ours does not
// (RFC 5880, Section 6.8.6).
func (m *Machine) Receive(p Packet, now time.Time) bool {
	if p.YourDiscr != 0 && p.YourDiscr != m.c.Discriminator || m.state == AdminDown {
		return false
	}
	m.heard = now
	m.remoteState, m.remoteDiag, m.remoteDiscr = p.State, p.Diagnostic, p.MyDiscr
	m.remoteMinTx, m.remoteMinRx, m.remoteMultiplier, m.remoteDemand = p.DesiredMinTx, p.RequiredMinRx, p.Multiplier, p.Demand
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
	}
	return true
}

// enter changes the state, and with it how often we want to send. The diagnostic stays when a session comes up: it says why it
// was last down (RFC 5880, Section 6.8.1).
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

// Disable takes the session down for good: Output has one more packet, which says so, and nothing is received any more.
func (m *Machine) Disable() {
	m.enter(AdminDown, AdministrativelyDown)
	m.polling, m.answer = false, false
}

// DetectionTime is how long the other end may be silent, 0 when it is (RFC 5880, Section 6.8.4).
func (m *Machine) DetectionTime() time.Duration {
	if m.heard.IsZero() {
		return 0
	}
	return time.Duration(m.remoteMultiplier) * max(m.c.Interval, m.remoteMinTx)
}

// Expired says whether the other end has been silent for too long at a time, and Advance has not been told yet.
func (m *Machine) Expired(now time.Time) bool {
	return !m.heard.IsZero() && !now.Before(m.heard.Add(m.DetectionTime()))
}

// Advance acts on the other end's silence.
func (m *Machine) Advance(now time.Time) {
	if !m.Expired(now) || m.state == AdminDown {
		return
	}
	m.forget()
	if m.state == Init || m.state == Up {
		m.enter(Down, DetectionTimeExpired)
	}
}

// periodic says whether packets are sent in intervals (RFC 5880, Section 6.8.7).
func (m *Machine) periodic() bool {
	quiet := m.remoteDemand && m.state == Up && m.remoteState == Up && !m.polling
	return m.state != AdminDown && m.remoteMinRx != 0 && !quiet
}

// nextPeriodic is when the next one is due.
func (m *Machine) nextPeriodic() time.Time {
	interval := max(m.desiredMinTx, m.remoteMinRx)
	return m.sent.Add(interval - interval/1000*time.Duration(m.shorten))
}

// Output returns a packet that is to be sent at a time, or false when there is none. Call it until there is none.
func (m *Machine) Output(now time.Time) (Packet, bool) {
	p := Packet{
		Diagnostic: m.diag, State: m.state, Multiplier: m.c.Multiplier, MyDiscr: m.c.Discriminator, YourDiscr: m.remoteDiscr,
		DesiredMinTx: m.desiredMinTx, RequiredMinRx: m.c.Interval,
	}
	switch {
	case m.answer:
		// At once, whatever the interval (RFC 5880, Section 6.8.7); and never with Poll.
		m.answer, p.Final = false, true
		return p, true
	case m.changed, m.periodic() && !now.Before(m.nextPeriodic()):
		m.changed, m.sent, p.Poll = false, now, m.polling
		// 75 to 100 % of the interval, to 90 % where a single packet counts (RFC 5880, Section 6.8.7).
		if m.shorten = m.c.Random(251); m.c.Multiplier == 1 {
			m.shorten = 100 + m.c.Random(151)
		}
		return p, true
	}
	return Packet{}, false
}

// Next is when Advance or Output has something to do, if nothing is received before; zero: never.
func (m *Machine) Next() time.Time {
	if m.answer || m.changed {
		return time.Unix(0, 0) // it is due
	}
	var next time.Time
	if m.periodic() {
		next = m.nextPeriodic()
	}
	if !m.heard.IsZero() && m.state != AdminDown {
		if silent := m.heard.Add(m.DetectionTime()); next.IsZero() || silent.Before(next) {
			next = silent
		}
	}
	return next
}

// Status is a picture of a session.
type Status struct {
	State       State
	RemoteState State // Down while nothing is heard
	// Diagnostic says why the session was last down, RemoteDiagnostic what the other end said.
	Diagnostic, RemoteDiagnostic Diagnostic
	// DetectionTime is after how much silence the session goes down; 0 while nothing is heard.
	DetectionTime time.Duration
}

// Status returns a picture of the session.
func (m *Machine) Status() Status {
	return Status{m.state, m.remoteState, m.diag, m.remoteDiag, m.DetectionTime()}
}
