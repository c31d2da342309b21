package contract

import (
	"cmp"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/prefixmap"
)

// State is the programmed state. Messages in it are replaced, never modified.
type State struct {
	// Forwarding is from the last Hello; nil before the first.
	Forwarding *farev1.Forwarding
	Devices    map[string]Position
	// Sources are the source groups of Forwarding, at least one after the first Hello.
	Sources []SourceGroup
	Groups  map[uint32]*farev1.Vector
	// Destinations are by source group (DestinationKey.Source) and prefix.
	Destinations prefixmap.Map[netip.Prefix, Destination]

	sourceIndex map[netip.Prefix]int // by name
	down        map[string]bool
	users       map[uint32]int // number of destinations of each group
}

// Position is the place of a device in Forwarding.
type Position struct {
	Plane string
	Index int // over all planes, in the order of Forwarding
}

// DestinationKey identifies a destination of a source group.
type DestinationKey struct {
	// Source is the name of the source group, the zero value if Forwarding lists none.
	Source netip.Prefix
	Prefix netip.Prefix
}

// String returns the destination as text for operators.
func (k DestinationKey) String() string {
	if !k.Source.IsValid() {
		return k.Prefix.String()
	}
	return k.Prefix.String() + " from " + k.Source.String()
}

// Destination is a programmed destination; Group 0 means that the destination does not exist.
type Destination struct {
	Group uint32
	Pairs []*farev1.PairPorts
}

// Kind is the kind of a Change.
type Kind uint8

// Kinds of changes.
const (
	SubPortChange Kind = iota + 1
	GroupChange
	DestinationChange
)

// Change is the difference between the states before and after a valid operation.
type Change struct {
	Kind Kind

	// Fields of SubPortChange.
	Device string
	Up     bool

	// Source is the name of the source group of a group or destination, the zero value if Forwarding lists none. If
	// Forwarding does not contain the source group, the entry carries no packets.
	Source netip.Prefix

	// Fields of GroupChange; nil is a group that does not exist.
	Group         uint32
	Before, After *farev1.Vector

	// Fields of DestinationChange.
	Prefix   netip.Prefix
	From, To Destination
}

// Key returns the destination of a DestinationChange.
func (c Change) Key() DestinationKey { return DestinationKey{c.Source, c.Prefix} }

// Raises reports whether c sets a sub-port up.
func (c Change) Raises() bool { return c.Kind == SubPortChange && c.Up }

// Inverse returns the change that undoes c.
func (c Change) Inverse() Change {
	c.Up = !c.Up
	c.Before, c.After = c.After, c.Before
	c.From, c.To = c.To, c.From
	return c
}

// operation returns an operation that makes the change c, for the journal.
func (c Change) operation() *farev1.Operation {
	switch {
	case c.Kind == SubPortChange:
		return &farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: c.Device, Up: c.Up}}}
	case c.Kind == GroupChange && c.After != nil:
		return &farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: c.After}}
	case c.Kind == GroupChange:
		return &farev1.Operation{Op: &farev1.Operation_DeleteVector{DeleteVector: c.Group}}
	case c.To.Group != 0:
		return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: c.To.message(c.Key())}}
	default:
		return &farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{
			Prefix: c.Prefix.String(), Source: sourceText(c.Source),
		}}}
	}
}

func (d Destination) message(key DestinationKey) *farev1.Destination {
	return &farev1.Destination{Prefix: key.Prefix.String(), Source: sourceText(key.Source), Vector: d.Group, Pairs: d.Pairs}
}

func newState() State {
	return State{
		Devices: map[string]Position{}, down: map[string]bool{},
		Groups: map[uint32]*farev1.Vector{}, users: map[uint32]int{},
	}
}

// Up reports whether a device is part of Forwarding and not set down by an operation.
func (s *State) Up(device string) bool {
	_, ok := s.Devices[device]
	return ok && !s.down[device]
}

// order compares members by their place in Forwarding; members that are not part of it come last.
func (s *State) order(a, b *farev1.VectorMember) int {
	index := func(m *farev1.VectorMember) int {
		if at, ok := s.Devices[m.Device]; ok {
			return at.Index
		}
		return len(s.Devices)
	}
	return cmp.Compare(index(a), index(b))
}

// arrange sorts the members of all groups in the order of a new Forwarding.
func (s *State) arrange() {
	for id, group := range s.Groups {
		if !slices.IsSortedFunc(group.Members, s.order) {
			group = proto.CloneOf(group)
			slices.SortStableFunc(group.Members, s.order)
			s.Groups[id] = group
		}
	}
}

// do applies a change.
func (s *State) do(c Change) {
	switch c.Kind {
	case SubPortChange:
		if c.Up {
			delete(s.down, c.Device)
		} else {
			s.down[c.Device] = true
		}
	case GroupChange:
		if c.After == nil {
			delete(s.Groups, c.Group)
		} else {
			s.Groups[c.Group] = c.After
		}
	case DestinationChange:
		if c.From.Group != 0 {
			if s.users[c.From.Group]--; s.users[c.From.Group] == 0 {
				delete(s.users, c.From.Group)
			}
		}
		if c.To.Group != 0 {
			s.users[c.To.Group]++
			d, _ := s.Destinations.Add(c.Source, c.Prefix)
			*d = c.To
		} else {
			s.Destinations.Delete(c.Source, c.Prefix)
		}
	}
}

// Snapshot returns the state in the order of the contract. The result shares the messages of the state.
func (s *State) Snapshot() *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{
		SubPorts:     make([]*farev1.SubPortState, 0, len(s.Devices)),
		Vectors:      make([]*farev1.Vector, 0, len(s.Groups)),
		Destinations: make([]*farev1.Destination, 0, s.Destinations.Len()),
	}
	for device := range s.Devices {
		all.SubPorts = append(all.SubPorts, &farev1.SubPortState{Device: device, Up: !s.down[device]})
	}
	slices.SortFunc(all.SubPorts, func(a, b *farev1.SubPortState) int { return cmp.Compare(a.Device, b.Device) })
	for _, group := range s.Groups {
		all.Vectors = append(all.Vectors, group)
	}
	slices.SortFunc(all.Vectors, func(a, b *farev1.Vector) int { return cmp.Compare(a.Id, b.Id) })
	for _, key := range s.Keys() {
		all.Destinations = append(all.Destinations, s.Destinations.Get(key.Source, key.Prefix).message(key))
	}
	return all
}

// Destination returns a destination; if it does not exist, one without a group, and false.
func (s *State) Destination(key DestinationKey) (d Destination, exists bool) {
	if found := s.Destinations.Get(key.Source, key.Prefix); found != nil {
		return *found, true
	}
	return Destination{}, false
}

// Keys returns the destinations in the order of Snapshot: by source group, unknown source groups last, then by address.
func (s *State) Keys() []DestinationKey {
	keys := make([]DestinationKey, 0, s.Destinations.Len())
	for key := range s.Destinations.All() {
		keys = append(keys, DestinationKey{key.Group, key.Prefix})
	}
	slices.SortFunc(keys, func(a, b DestinationKey) int {
		if a.Source == b.Source {
			return prefixmap.Compare(a.Prefix, b.Prefix)
		}
		return cmp.Or(cmp.Compare(s.sourceRank(a.Source), s.sourceRank(b.Source)), a.Source.Compare(b.Source))
	})
	return keys
}

// operations returns operations that create a snapshot from an empty state, in an order in which each one is valid.
func operations(all *farev1.SnapshotResponse) []*farev1.Operation {
	var ops []*farev1.Operation
	for _, subPort := range all.SubPorts {
		if !subPort.Up {
			ops = append(ops, &farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: subPort}})
		}
	}
	for _, group := range all.Vectors {
		ops = append(ops, &farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: proto.CloneOf(group)}})
	}
	for _, destination := range all.Destinations {
		ops = append(ops, &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: proto.CloneOf(destination)}})
	}
	return ops
}
