package fare

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
)

// Event is an input of a [Table]. The set of events is closed. [MarshalEvent]
// writes every event as one line of JSON and [UnmarshalEvent] parses it, so
// that a recording replays to the same state.
type Event interface{ fareEvent() }

// SessionUp reports that a session was established. Generation numbers the
// incarnations of one session: it must exceed every earlier one of that session
// (so it is at least 1). A session that is still up is taken down first.
type SessionUp struct {
	Session    int        `json:"session"`
	Generation uint64     `json:"generation"`
	Node       netip.Addr `json:"node"`    // the neighbor's BGP identifier
	PeerAS     uint32     `json:"peer_as"` // the neighbor's AS number
}

// SessionDown reports that this incarnation of the session ended. Its routes no
// longer count from this event on.
type SessionDown struct {
	Session    int    `json:"session"`
	Generation uint64 `json:"generation"`
	// Closed reports that the peer closed the connection without a NOTIFICATION: its host is alive, and may make
	// another one.
	Closed bool `json:"closed,omitempty"`
}

// EndOfRIB reports that the session's peer has sent its whole table, in every
// address family of the session (RFC 4724, Section 2). Routes of an earlier
// incarnation that this one did not repeat are removed.
type EndOfRIB struct {
	Session    int    `json:"session"`
	Generation uint64 `json:"generation"`
}

// RouteUpdate reports the session's new route to Prefix. The table keeps Attrs,
// so the caller must not modify it afterwards. Nil Attrs means an update with
// unreadable attributes, and is treated as a withdrawal (RFC 7606), never as a
// route without bandwidth.
type RouteUpdate struct {
	Session    int          `json:"session"`
	Generation uint64       `json:"generation"`
	Prefix     netip.Prefix `json:"prefix"`
	Attrs      *Attributes  `json:"attrs"`
}

// RouteWithdraw reports that the session no longer has a route to Prefix.
type RouteWithdraw struct {
	Session    int          `json:"session"`
	Generation uint64       `json:"generation"`
	Prefix     netip.Prefix `json:"prefix"`
}

// LinkState reports the carrier and speed of a sub-port. Every sub-port starts
// down, with the speed of its configuration. Speed 0 keeps the previous speed
// unless Unknown is set.
type LinkState struct {
	SubPort int       `json:"sub_port"`
	Up      bool      `json:"up"`
	Speed   Bandwidth `json:"speed,omitempty"`
	// Unknown, with Speed 0, invalidates the previous speed.
	Unknown bool `json:"unknown,omitempty"`
}

// Drain takes a plane, node or sub-port out of use or, with On false, puts it
// back into use. The three scopes are independent: a sub-port that is drained
// in two scopes must be undrained in both.
type Drain struct {
	Scope DrainScope `json:"scope"`
	Index int        `json:"index"` // index of the plane or sub-port
	Node  netip.Addr `json:"node"`  // BGP identifier; scope node only
	On    bool       `json:"on"`
}

// Avoid takes a plane out of use toward one destination or, with On false, puts it back into use. While
// [Config.Unproved] is [UnprovedAvoid] its routes are not used, unless no other plane reaches the destination: then the
// avoidance has no effect until another one does. It lasts until its end, with and without routes; a table has at most
// [MaxAvoided] destinations with avoided planes.
type Avoid struct {
	Prefix netip.Prefix `json:"prefix"`
	Plane  int          `json:"plane"` // index
	On     bool         `json:"on"`
}

// PolicyChange replaces all policies.
type PolicyChange struct {
	Missing    MissingPolicy    `json:"missing"`
	AllMissing AllMissingPolicy `json:"all_missing,omitempty"`
	AllZero    ZeroPolicy       `json:"all_zero"`
	Conflict   ConflictPolicy   `json:"conflict,omitempty"`
	// LeastPreferred are the signals that have an effect.
	LeastPreferred Signals        `json:"least_preferred,omitempty"`
	Unproved       UnprovedPolicy `json:"unproved,omitempty"`
}

func (SessionUp) fareEvent()     {}
func (SessionDown) fareEvent()   {}
func (EndOfRIB) fareEvent()      {}
func (RouteUpdate) fareEvent()   {}
func (RouteWithdraw) fareEvent() {}
func (LinkState) fareEvent()     {}
func (Drain) fareEvent()         {}
func (Avoid) fareEvent()         {}
func (PolicyChange) fareEvent()  {}

// Attributes are the attributes of a route that the table reads. They are
// immutable once passed to the table.
type Attributes struct {
	Communities []Community `json:"communities,omitempty"`
	ASPath      []uint32    `json:"as_path,omitempty"` // as received, nearest AS first
	Signals     Signals     `json:"signals,omitempty"` // those of its communities (RFC 1997)
	// Extended is the lowest extended Link Bandwidth, in addition to Communities.
	Extended IPv6Community `json:"extended,omitzero"`
}

// DrainScope is the kind of object that a [Drain] names.
type DrainScope uint8

// The scopes, in recordings "plane", "node", "sub-port".
const (
	DrainPlane DrainScope = iota
	DrainNode
	DrainSubPort
)

var drainNames = []string{"plane", "node", "sub-port"}

// String returns the word used in recordings.
func (s DrainScope) String() string { return enumName(drainNames, s) }

// MarshalText returns [DrainScope.String], or an error for an undefined value.
func (s DrainScope) MarshalText() ([]byte, error) { return enumText("drain scope", drainNames, s) }

// UnmarshalText parses the word used in recordings.
func (s *DrainScope) UnmarshalText(text []byte) error {
	return enumParse("drain scope", drainNames, text, s)
}

// ErrEvent is wrapped by every error of [UnmarshalEvent].
var ErrEvent = errors.New("not an event of a recording")

type eventLine struct {
	Type  string          `json:"type"`
	Event json.RawMessage `json:"event"`
}

// MarshalEvent returns e as one line of JSON without the newline, tagged with
// its type: {"type":"link-state","event":{"sub_port":3,"up":false}}. Equal
// events yield equal bytes. It returns an error for an undefined enum value.
func MarshalEvent(e Event) ([]byte, error) {
	body, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("record event %T: %w", e, err)
	}
	var name string
	switch e.(type) {
	case SessionUp:
		name = "session-up"
	case SessionDown:
		name = "session-down"
	case EndOfRIB:
		name = "end-of-rib"
	case RouteUpdate:
		name = "route-update"
	case RouteWithdraw:
		name = "route-withdraw"
	case LinkState:
		name = "link-state"
	case Drain:
		name = "drain"
	case Avoid:
		name = "avoid"
	case PolicyChange:
		name = "policy-change"
	default:
		return nil, fmt.Errorf("record event %T: pass one of package fare's event types by value", e)
	}
	return json.Marshal(eventLine{Type: name, Event: body})
}

// UnmarshalEvent parses the output of [MarshalEvent]. It is strict: an unknown
// type or field returns an error that wraps [ErrEvent]. [Table.Step] decides
// whether the event makes sense for a table.
func UnmarshalEvent(line []byte) (Event, error) {
	var l eventLine
	if err := strictJSON(line, &l); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrEvent, err)
	}
	switch l.Type {
	case "session-up":
		return decodeEvent[SessionUp](l)
	case "session-down":
		return decodeEvent[SessionDown](l)
	case "end-of-rib":
		return decodeEvent[EndOfRIB](l)
	case "route-update":
		return decodeEvent[RouteUpdate](l)
	case "route-withdraw":
		return decodeEvent[RouteWithdraw](l)
	case "link-state":
		return decodeEvent[LinkState](l)
	case "drain":
		return decodeEvent[Drain](l)
	case "avoid":
		return decodeEvent[Avoid](l)
	case "policy-change":
		return decodeEvent[PolicyChange](l)
	}
	return nil, fmt.Errorf("%w: unknown type %q", ErrEvent, l.Type)
}

func decodeEvent[E Event](l eventLine) (Event, error) {
	var e E
	if err := strictJSON(l.Event, &e); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrEvent, l.Type, err)
	}
	return e, nil
}

func strictJSON(text []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("text follows the end of the event")
	}
	return nil
}
