package speaker

import (
	"net/netip"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

// Event is something that happened on a session. The set of events is sealed:
// [SessionUp], [SessionDown], [Route], [Withdraw], [EndOfRIB] and [Fault].
//
// Session is an index into [Config.Sessions]. Generation numbers the
// incarnations of a session, from 1; an event of an incarnation that has ended
// is never delivered after its SessionDown.
type Event interface{ speakerEvent() }

// SessionUp says that an incarnation reached Established. Node is the peer's
// BGP identifier (RFC 4271, Section 4.2).
type SessionUp struct {
	Session    int
	Generation uint64
	Node       netip.Addr
	PeerAS     uint32
	Families   FamilySet // negotiated; an EndOfRIB is to be expected for each
}

// SessionDown says that the incarnation is over and with it every route it
// brought. No Withdraw events follow.
type SessionDown struct {
	Session    int
	Generation uint64
	Reason     string
}

// Route says what the peer now announces for a prefix. Attrs is never nil and
// must not be changed: routes with equal attributes may share it.
type Route struct {
	Session    int
	Generation uint64
	Prefix     netip.Prefix
	Attrs      *fare.Attributes
}

// Withdraw says that the peer no longer announces the prefix. It is only ever
// sent for a prefix whose Route was taken before.
type Withdraw struct {
	Session    int
	Generation uint64
	Prefix     netip.Prefix
}

// EndOfRIB says that the peer has sent all it has of a family (RFC 4724,
// Section 2).
type EndOfRIB struct {
	Session    int
	Generation uint64
	Family     Family
}

// Fault says that something is wrong with a session that its state alone does
// not show. Of several not yet taken, the latest is kept.
type Fault struct {
	Session int
	Reason  string
}

func (SessionUp) speakerEvent()   {}
func (SessionDown) speakerEvent() {}
func (Route) speakerEvent()       {}
func (Withdraw) speakerEvent()    {}
func (EndOfRIB) speakerEvent()    {}
func (Fault) speakerEvent()       {}

// Family is an address family of routes, FamilySet a set of them.
type (
	Family    = guard.Family
	FamilySet = guard.FamilySet
)

// The families a session can carry.
const (
	IPv4 = guard.IPv4Unicast
	IPv6 = guard.IPv6Unicast
)

// Advertisement is a route to announce on one session. ASPath is what stands
// in front of nothing for an own loopback (empty), and the received AS path for
// a route that a leaf passes on; the speaker prepends its own AS in both cases.
type Advertisement struct {
	Prefix      netip.Prefix
	Communities []fare.Community
	ASPath      []uint32
}

// State is where a session is.
type State uint8

// The states of a session, in the order it walks through them.
const (
	Idle        State = iota // waiting for the next attempt, or for the peer to connect
	Connecting               // a TCP connection is being opened
	Opening                  // TCP is up, OPEN messages are being exchanged
	Established              // routes flow
	Held                     // taken down by SetAdminState
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

// Status is a picture of one session.
type Status struct {
	Name       string
	State      State
	Since      time.Time // of State
	Reason     string    // why the session was last down or is held; "" if it never was
	Generation uint64    // of the newest incarnation, 0 before the first
	PeerID     netip.Addr
	PeerAS     uint32
	Local      netip.AddrPort
	Remote     netip.AddrPort
	Received   int // routes held from the peer
	Advertised int // routes offered to the peer
	Flaps      uint64
	Attempts   uint64 // TCP connections tried or accepted
	BFD        BFDStatus
	// Counters by name, from the guard (what was dropped and why) and the
	// speaker; in a fixed order, zeroes left out.
	Counters []Counter
}

// BFDStatus is a picture of a session's BFD. State is "" without a BFD session: it is not configured, or BGP is not up; "failed"
// when its sockets could not be opened, or as package bfd names it.
type BFDStatus struct {
	State string
	// DetectionTime is after how much silence the session is lost; 0 while the neighbour is not heard.
	DetectionTime time.Duration
}

// Counter is one named count of a session.
type Counter struct {
	Name  string
	Value uint64
}
