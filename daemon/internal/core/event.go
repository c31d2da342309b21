package core

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/fared/fared/fare"
)

// Event is an input of the Core. The type is sealed and covers all its inputs, so a list of events is a complete
// account of a run, and replaying it gives the same state.
type Event interface{ event() string }

// Fabric is an input of the path-bandwidth table: a route, a session or a link.
type Fabric struct{ fare.Event }

// EndOfRIB reports that a session has sent all its routes of one address family (RFC 4724, Section 2).
type EndOfRIB struct {
	Session    int    `json:"session"`
	Generation uint64 `json:"generation"`
	IPv6       bool   `json:"ipv6,omitempty"`
}

// StartDeadline ends the wait for End-of-RIB.
type StartDeadline struct{}

// DataplaneReady reports that a data plane has connected, its limits, and its flow hash. Zero limits are unknown.
type DataplaneReady struct {
	MaxWeight    uint32   `json:"max_weight,omitempty"`
	MaxWeightSum uint32   `json:"max_weight_sum,omitempty"`
	FlowHash     FlowHash `json:"flow_hash,omitzero"`
	// Down and Held are what the data plane forwards since before this process: the sub-ports that are down there, by
	// index, and its vectors. Only those of the first connection count.
	Down []int  `json:"down,omitempty"`
	Held []Held `json:"held,omitempty"`
	// Slots are, by source group, the sub-ports of the slots in its vectors, by index, or in mode per-packet the
	// planes; -1 for one that the configuration does not have. Only those of the first connection count.
	Slots [][]int `json:"slots,omitempty"`
}

// DrainRequest takes a target out of service (On) or returns it to service.
type DrainRequest struct {
	Target DrainTarget `json:"target"`
	On     bool        `json:"on"`
}

// DrainRestored puts a target out of service again that an earlier process has drained. It comes before any session, so
// that no routes are advertised over the target.
type DrainRestored struct {
	Target DrainTarget `json:"target"`
}

// DrainStep advances a waiting drain: with Confirmed because the data plane has put the zero shares in effect,
// otherwise because the drain delay has passed.
type DrainStep struct {
	Target    DrainTarget `json:"target"`
	Confirmed bool        `json:"confirmed,omitempty"`
}

// RoutesWritten reports that a session's connection to the leaf has carried the routes to which the core assigned this
// mark (Core.Mark), and everything before them.
type RoutesWritten struct {
	Session    int    `json:"session"`
	Generation uint64 `json:"generation"`
	Mark       uint64 `json:"mark"`
}

// NextHop reports the address of a session's neighbor, which the configuration need not contain.
type NextHop struct {
	Session int        `json:"session"`
	Address netip.Addr `json:"address"`
}

// Landing reports the data plane's answer about the flows of a pair of addresses.
type Landing struct {
	Source      netip.Addr `json:"source"`
	Destination netip.Addr `json:"destination"`
	// Table is the landing place of each source port, as in wecmp.Asked. It is empty if the answer no longer applies.
	Table LandingTable `json:"table,omitempty"`
}

// Avoid reports that probes by a plane toward a destination are lost (On), or answered again. proof.unproved
// decides about the effect.
type Avoid struct {
	Source      int          `json:"source,omitempty"` // index of the source group
	Destination netip.Prefix `json:"destination"`
	Plane       int          `json:"plane"` // index in the configuration
	On          bool         `json:"on"`
}

// Reload replaces the configuration; the text is the whole file, already accepted by config.Diff.
type Reload struct {
	Config string `json:"config"`
}

func (Fabric) event() string         { return "fabric" }
func (EndOfRIB) event() string       { return "end-of-rib" }
func (StartDeadline) event() string  { return "start-deadline" }
func (DataplaneReady) event() string { return "dataplane-ready" }
func (DrainRequest) event() string   { return "drain" }
func (DrainRestored) event() string  { return "drain-restored" }
func (DrainStep) event() string      { return "drain-step" }
func (RoutesWritten) event() string  { return "routes-written" }
func (NextHop) event() string        { return "next-hop" }
func (Landing) event() string        { return "landing" }
func (Avoid) event() string          { return "avoid" }
func (Reload) event() string         { return "reload" }

// DrainTarget names the target of a drain. Exactly one field is set.
type DrainTarget struct {
	Plane string `json:"plane,omitempty"`
	// Leaf is the leaf's router ID.
	Leaf netip.Addr `json:"leaf,omitzero"`
	// SubPort is the sub-port's device.
	SubPort string `json:"sub_port,omitempty"`
}

// String returns the target in the form of the command line: "plane p0", "leaf 10.0.0.1", "sub-port eth0".
func (t DrainTarget) String() string {
	switch {
	case t.Plane != "":
		return "plane " + t.Plane
	case t.Leaf.IsValid():
		return "leaf " + t.Leaf.String()
	default:
		return "sub-port " + t.SubPort
	}
}

type taggedEvent struct {
	Type  string          `json:"type"`
	Event json.RawMessage `json:"event,omitempty"`
}

// MarshalEvent encodes an event as one JSON object.
func MarshalEvent(ev Event) ([]byte, error) {
	var body []byte
	var err error
	if f, ok := ev.(Fabric); ok {
		body, err = fare.MarshalEvent(f.Event)
	} else {
		body, err = json.Marshal(ev)
	}
	if err != nil {
		return nil, err
	}
	return json.Marshal(taggedEvent{ev.event(), body})
}

// unmarshalEvent decodes the output of marshalEvent.
func unmarshalEvent(b []byte) (Event, error) {
	var tagged taggedEvent
	if err := json.Unmarshal(b, &tagged); err != nil {
		return nil, err
	}
	decode := func(into any) error { return json.Unmarshal(tagged.Event, into) }
	switch tagged.Type {
	case "fabric":
		ev, err := fare.UnmarshalEvent(tagged.Event)
		return Fabric{ev}, err
	case "end-of-rib":
		var ev EndOfRIB
		err := decode(&ev)
		return ev, err
	case "start-deadline":
		return StartDeadline{}, nil
	case "dataplane-ready":
		var ev DataplaneReady
		err := decode(&ev)
		return ev, err
	case "drain":
		var ev DrainRequest
		err := decode(&ev)
		return ev, err
	case "drain-restored":
		var ev DrainRestored
		err := decode(&ev)
		return ev, err
	case "drain-step":
		var ev DrainStep
		err := decode(&ev)
		return ev, err
	case "routes-written":
		var ev RoutesWritten
		err := decode(&ev)
		return ev, err
	case "next-hop":
		var ev NextHop
		err := decode(&ev)
		return ev, err
	case "landing":
		var ev Landing
		err := decode(&ev)
		return ev, err
	case "avoid":
		var ev Avoid
		err := decode(&ev)
		return ev, err
	case "reload":
		var ev Reload
		err := decode(&ev)
		return ev, err
	}
	return nil, fmt.Errorf("%w %q", errUnknownEvent, tagged.Type)
}

// errUnknownEvent is the error of a recording made by a version that has more events.
var errUnknownEvent = errors.New("unknown event type")
