package speaker

import (
	"net/netip"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

// Event is an event on a session. The set of events is sealed: [SessionUp],
// [SessionDown], [Routes], [Refused], [EndOfRIB], [Written] and [Fault].
//
// Session is an index into [Config.Sessions]. Generation numbers the
// incarnations of a session, from 1; an event of an incarnation that has ended
// is never delivered after its SessionDown.
type Event interface{ speakerEvent() }

// SessionUp reports that an incarnation reached Established. Node is the peer's
// BGP identifier (RFC 4271, Section 4.2).
type SessionUp struct {
	Session    int
	Generation uint64
	Node       netip.Addr
	PeerAS     uint32
	Families   FamilySet // negotiated; expect one EndOfRIB for each
}

// SessionDown reports that the incarnation has ended, and with it every route
// that it brought. No withdrawals follow.
type SessionDown struct {
	Session    int
	Generation uint64
	Reason     string
	Closed     bool // the peer closed the connection, without a NOTIFICATION
}

// Routes reports changes of the peer's routes, with at most one change of a
// prefix. Changes is valid until the next call of [Speaker.Take].
type Routes struct {
	Session    int
	Generation uint64
	Changes    []Change
}

// Change is the peer's current announcement of a host route. Attrs must not be
// changed: routes with equal attributes may share it. It is nil if the peer no
// longer announces the prefix, which is only reported for a prefix whose
// announcement the owner has taken.
type Change struct {
	Prefix netip.Prefix
	Attrs  *fare.Attributes
}

// Refused reports the peer's routes that the guard drops now, by reason, where
// that is no routine (see [guard.Refused]). Only the latest pending Refused is
// kept.
type Refused struct {
	Session    int
	Generation uint64
	Routes     []guard.Refused
}

// EndOfRIB reports that the peer has sent all its routes of a family (RFC 4724,
// Section 2).
type EndOfRIB struct {
	Session    int
	Generation uint64
	Family     Family
}

// Written reports that the session's connection has carried the set of the
// latest [Speaker.AdvertiseMarked] call with Mark, and that nothing of an
// earlier set is still under way: the peer's TCP has acknowledged both. Only
// the latest pending Written is kept.
type Written struct {
	Session    int
	Generation uint64
	Mark       uint64
}

// Fault reports a problem of a session that its state alone does not show. Only
// the latest pending Fault is kept.
type Fault struct {
	Session int
	Reason  string
}

func (SessionUp) speakerEvent()   {}
func (SessionDown) speakerEvent() {}
func (Routes) speakerEvent()      {}
func (Refused) speakerEvent()     {}
func (EndOfRIB) speakerEvent()    {}
func (Written) speakerEvent()     {}
func (Fault) speakerEvent()       {}

type (
	// Family is an address family of routes.
	Family = guard.Family
	// FamilySet is a set of families.
	FamilySet = guard.FamilySet
)

// The families that a session can carry.
const (
	IPv4 = guard.IPv4Unicast
	IPv6 = guard.IPv6Unicast
)

// Advertisement is a route to announce on one session. ASPath is empty for an
// own loopback and the received AS path for a route that a leaf passes on; the
// speaker prepends its own AS in both cases.
type Advertisement struct {
	Prefix      netip.Prefix
	Communities []fare.Community
	ASPath      []uint32
	Signals     fare.Signals       // sent as communities of RFC 1997
	Extended    fare.IPv6Community // zero: none
}

// State is the state of a session.
type State uint8

// The states of a session, in the order in which it passes through them.
const (
	Idle        State = iota // waiting for the next attempt, or for the peer to connect
	Connecting               // a TCP connection is being opened
	Opening                  // TCP is up, OPEN messages are being exchanged
	Established              // routes flow
	Held                     // closed by SetAdminState
)

func (s State) String() string {
	switch s {
	case Idle:
		return "idle"
	case Connecting:
		return "connecting"
	case Opening:
		return "opening"
	case Established:
		return "established"
	case Held:
		return "held"
	}
	return "unknown"
}

// Status is a snapshot of one session.
type Status struct {
	State      State
	Since      time.Time // of State
	Reason     string    // why the session is not established, or why it last went down; "" if neither
	Generation uint64    // generation of the newest incarnation; 0 before the first
	PeerID     netip.Addr
	PeerAS     uint32
	Remote     netip.AddrPort
	Received   int  // routes held from the peer
	Advertised int  // routes offered to the peer
	Untaken    bool // a write, or routes followed by a mark, wait for the peer to read or acknowledge
	Flaps      uint64
	Attempts   uint64 // TCP connections attempted or accepted
	BFD        BFDStatus
	// Counters holds named counts of the guard and BFD (dropped units by
	// reason) and the speaker, in a fixed order, without zeros.
	Counters []Counter
}

// BFDStatus is a snapshot of a session's BFD. State is "" without a BFD session (BFD is not configured, or the session
// is held or does not know its peer's address), "failed" when its sockets could not be opened, and otherwise a state
// name of package bfd.
type BFDStatus struct {
	State string
	// DetectionTime is the duration of silence after which the session fails; 0 while no packets of the neighbor
	// arrive.
	DetectionTime time.Duration
}

// Counter is one named count of a session.
type Counter struct {
	Name  string
	Value uint64
}
