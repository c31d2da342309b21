package locate

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/topo"
)

// State is the state of a cable at one of its ends.
type State uint8

// The states. The zero value is that of an end that does not report.
const (
	Unknown State = iota
	Up
	Drained // taken out of service on purpose: neither up nor failed
	Silent  // a carrier, but no session
	Dark    // no carrier
)

// String returns the state's name for display.
func (s State) String() string { return [...]string{"unknown", "up", "drained", "silent", "dark"}[s] }

// Port is one end of a cable.
type Port struct {
	State State
	// Since is the time of the state; the zero value if it is unknown.
	Since time.Time
	// Ignored is the reason for which bandwidths of the session's routes do not count, "" without one. Origin is 1 plus
	// the index of the server whose routes alone are concerned, 0 if they are several servers' or unknown.
	Ignored string
	Origin  int
}

// Path is the bandwidth that a source group has learned toward others.
type Path struct {
	From int // source group
	// First and Last are the destinations, source groups.
	First, Last int
	Bandwidth   []fare.Bandwidth // by plane
}

// Direction is the direction in which a probe can have been lost.
type Direction uint8

// The directions.
const (
	RoundTrip Direction = iota // there or back
	Forth
	Back
	directions
)

// Sent is the number of probes that a source group has sent in a plane, evenly to Peers other groups.
type Sent struct {
	From, Plane int
	// Sub is the sub-port by which they left, from 1; 0 means any.
	Sub       int
	Direction Direction
	Peers     int
	Probes    float64
}

// Loss is the part of Sent that went to one group, and the number of lost ones. Groups without losses have none.
type Loss struct {
	From, To, Plane, Sub int
	Direction            Direction
	Probes, Lost         float64
}

// View is the knowledge of one node.
type View struct {
	// Ports are in the order of topo.Fabric.At.
	Ports []Port
	Paths []Path
	Sent  []Sent
	Lost  []Loss
}

// Faults of a part.
const (
	FaultDark      = "dark"      // no carrier
	FaultSilent    = "silent"    // a carrier, but no session
	FaultCapacity  = "capacity"  // less bandwidth is learned
	FaultCommunity = "community" // bandwidths of routes are invalid or missing
	FaultLoss      = "loss"
)

// Guilty is a part at fault.
type Guilty struct {
	// Part is a name of topo.Fabric.Find, or "server1->server2 p0" for a pair in a plane.
	Part string `json:"part"`
	// Kind is half-cable, cable, nic, server, leaf, uplink, spine, plane or pair.
	Kind  string `json:"kind"`
	Fault string `json:"fault"`
	// Side is FromServer or ToServer if only one direction is concerned, "" if both are or it is unknown which.
	Side string `json:"side,omitempty"`
	// Alternatives are parts that explain the views equally well.
	Alternatives []string `json:"alternatives,omitempty"`
	// Evidence is for people.
	Evidence []string `json:"evidence"`
	// Confidence is the probability of this part among all explanations considered, 0 to 1.
	Confidence float64 `json:"confidence"`
	// Since is the earliest time in the views; the zero value if they have none.
	Since time.Time `json:"since,omitzero"`
	// Rate is the loss rate, for FaultLoss.
	Rate float64 `json:"rate,omitempty"`
}

// Locator finds guilty parts of one fabric. It is for one goroutine at a time.
type Locator struct {
	fabric *topo.Fabric
	parts  []part
	of     [][]int                 // parts of each cable
	intact func() *topo.Simulation // without failures; made when it is needed, which takes seconds for a large fabric
	leafOf [][]int                 // by plane and source group: the leaf's index in Fabric.Leaf, -1 if it has none or several there
}

// part is a set of cables that fail together.
type part struct {
	name, kind string
	cables     []int
}

// New returns a Locator of a fabric.
func New(f *topo.Fabric) *Locator {
	l := &Locator{fabric: f, of: make([][]int, len(f.Cables)), intact: sync.OnceValue(func() *topo.Simulation { return topo.Simulate(f) })}
	for _, name := range f.Single() {
		found, _ := f.Find(name) // Single returns names that exist
		p := part{name: name, kind: kindOf(f, name, found)}
		for _, c := range found {
			p.cables = append(p.cables, c.Index)
			l.of[c.Index] = append(l.of[c.Index], len(l.parts))
		}
		l.parts = append(l.parts, p)
	}
	for p := range f.Planes {
		leaves := make([]int, len(f.Groups()))
		for i, g := range f.Groups() {
			leaves[i] = leafOf(g.Planes[p])
		}
		l.leafOf = append(l.leafOf, leaves)
	}
	return l
}

func leafOf(cables []*topo.Cable) int {
	leaf := -1
	for i, c := range cables {
		if i > 0 && c.Up.Node.Index != leaf {
			return -1
		}
		leaf = c.Up.Node.Index
	}
	return leaf
}

// kindOf returns the kind of the part with a name.
func kindOf(f *topo.Fabric, name string, cables []*topo.Cable) string {
	if n := f.Node(name); n != nil {
		return n.Kind.String()
	}
	c := cables[0]
	switch {
	case len(cables) == 1 && c.Uplink():
		return uplink
	case len(cables) == 1 && len(c.Group.Planes[c.Plane]) > 1:
		return halfCable
	case slices.ContainsFunc(cables, func(o *topo.Cable) bool { return o.Down.Node != c.Down.Node }):
		return plane
	case slices.ContainsFunc(cables, func(o *topo.Cable) bool { return o.Plane != c.Plane }):
		return nic
	}
	return oneCable
}

// Fabric returns the fabric.
func (l *Locator) Fabric() *topo.Fabric { return l.fabric }

// Locate returns the guilty parts: the hard ones first, each kind of fault in the order of its importance. Views are by
// node; a node without a view does not report.
func (l *Locator) Locate(views map[*topo.Node]*View) []Guilty {
	found := l.hard(views)
	all := append(found.guilty, l.communities(views, found)...)
	return append(all, l.losses(views, found)...)
}

// earlier returns the earlier time; the zero value is no time.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// sorted returns names without repetitions in their order.
func sorted[T cmp.Ordered](list []T) []T {
	slices.Sort(list)
	return slices.Compact(list)
}
