package fare

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
)

// Event is everything that can happen to a [Table]. The set is closed; every
// event can be written as one line of JSON by [MarshalEvent] and read back by
// [UnmarshalEvent], so that a recording replays to the same state.
type Event interface{ fareEvent() }

// SessionUp says that a session was established. Generation numbers the
// incarnations of one session: it must be above every earlier one of that
// session (so at least 1). A session that was still up is taken down first.
type SessionUp struct {
	Session    int        `json:"session"`
	Generation uint64     `json:"generation"`
	Node       netip.Addr `json:"node"`    // the neighbour's BGP identifier
	PeerAS     uint32     `json:"peer_as"` // the neighbour's AS number
}

// SessionDown says that this incarnation of the session ended. Its routes
// count no more from this event on.
type SessionDown struct {
	Session    int    `json:"session"`
	Generation uint64 `json:"generation"`
}

// EndOfRIB says that the session's peer has sent everything it has, in every
// address family of the session (RFC 4724, Section 2): routes that an earlier
// incarnation left behind and this one did not repeat are forgotten.
type EndOfRIB struct {
	Session    int    `json:"session"`
	Generation uint64 `json:"generation"`
}

// RouteUpdate says that the session now has this route to Prefix. Attrs is
// kept: nobody may change it afterwards. Nil Attrs is an update whose
// attributes could not be read, and is treated as a withdrawal (RFC 7606),
// never as a route without bandwidth.
type RouteUpdate struct {
	Session    int          `json:"session"`
	Generation uint64       `json:"generation"`
	Prefix     netip.Prefix `json:"prefix"`
	Attrs      *Attributes  `json:"attrs"`
}

// RouteWithdraw says that the session has no route to Prefix any more.
type RouteWithdraw struct {
	Session    int          `json:"session"`
	Generation uint64       `json:"generation"`
	Prefix     netip.Prefix `json:"prefix"`
}

// LinkState is the carrier and speed of a sub-port. Every sub-port starts
// down, with the speed of its configuration. Speed 0 keeps the speed that is
// known.
type LinkState struct {
	SubPort int       `json:"sub_port"`
	Up      bool      `json:"up"`
	Speed   Bandwidth `json:"speed,omitempty"`
}

// Drain takes a plane, node or sub-port out of use, or with On false back into
// it. The three scopes are independent: what is drained twice must be
// undrained twice, once in each scope.
type Drain struct {
	Scope DrainScope `json:"scope"`
	Index int        `json:"index"` // of the plane or sub-port
	Node  netip.Addr `json:"node"`  // BGP identifier; scope node only
	On    bool       `json:"on"`
}

// PolicyChange replaces both policies.
type PolicyChange struct {
	Missing MissingPolicy `json:"missing"`
	AllZero ZeroPolicy    `json:"all_zero"`
}

func (SessionUp) fareEvent()     {}
func (SessionDown) fareEvent()   {}
func (EndOfRIB) fareEvent()      {}
func (RouteUpdate) fareEvent()   {}
func (RouteWithdraw) fareEvent() {}
func (LinkState) fareEvent()     {}
func (Drain) fareEvent()         {}
func (PolicyChange) fareEvent()  {}

// Attributes are what the table reads of a route. They are immutable once
// handed over.
type Attributes struct {
	Communities []Community `json:"communities,omitempty"`
	ASPath      []uint32    `json:"as_path,omitempty"` // as received, nearest AS first
}

// DrainScope is what a [Drain] names.
type DrainScope uint8

// The scopes, in recordings "plane", "node", "sub-port".
const (
	DrainPlane DrainScope = iota
	DrainNode
	DrainSubPort
)

var drainNames = []string{"plane", "node", "sub-port"}

// String is the word used in recordings.
func (s DrainScope) String() string { return enumName(drainNames, s) }

// MarshalText is [DrainScope.String]; an undefined value is an error.
func (s DrainScope) MarshalText() ([]byte, error) { return enumText("drain scope", drainNames, s) }

// UnmarshalText reads the word used in recordings.
func (s *DrainScope) UnmarshalText(text []byte) error {
	return enumParse("drain scope", drainNames, text, s)
}

// ErrEvent is what every error of [UnmarshalEvent] wraps.
var ErrEvent = errors.New("not a recorded event")

type eventLine struct {
	Type  string          `json:"type"`
	Event json.RawMessage `json:"event"`
}

// MarshalEvent is e as one line of JSON without the newline, tagged with its
// type: {"type":"link-state","event":{"sub_port":3,"up":false}}. The same event
// gives the same bytes. An error means a value that no enum defines.
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
	case PolicyChange:
		name = "policy-change"
	default:
		return nil, fmt.Errorf("record event %T: pass one of package fare's event types by value", e)
	}
	return json.Marshal(eventLine{Type: name, Event: body})
}

// UnmarshalEvent reads what [MarshalEvent] wrote. It is strict: an unknown
// type or field is an error that wraps [ErrEvent]. Whether the event makes
// sense for a table is for [Table.Step] to judge.
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
		return errors.New("more text after the end")
	}
	return nil
}
