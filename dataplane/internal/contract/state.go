package contract

import (
	"cmp"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// State is what is programmed. Its messages are replaced, never modified, once they are part of it.
type State struct {
	// Forwarding is what the last Hello brought; nil: none came yet.
	Forwarding   *farev1.Forwarding
	Devices      map[string]Position
	Groups       map[uint32]*farev1.Group
	Destinations map[netip.Prefix]Destination

	planes map[string]bool
	down   map[string]bool
	users  map[uint32]int // destinations of each group
}

// Position says where a device stands in Forwarding.
type Position struct {
	Plane string
	Index int // over all planes, in the order of Forwarding
}

// Destination is a programmed destination; Group 0: not there.
type Destination struct {
	Group uint32
	Pairs []*farev1.PairPorts
}

// Kind says what a Change changes.
type Kind uint8

// The kinds.
const (
	SubPortChange Kind = iota + 1
	GroupChange
	DestinationChange
)

// Change is one valid difference between the state before an operation and after it.
type Change struct {
	Kind Kind

	// SubPortChange.
	Device string
	Up     bool

	// GroupChange: nil is a group that is not there.
	Group         uint32
	Before, After *farev1.Group

	// DestinationChange.
	Prefix   netip.Prefix
	From, To Destination
}

// Inverse returns the change that undoes c.
func (c Change) Inverse() Change {
	c.Up = !c.Up
	c.Before, c.After = c.After, c.Before
	c.From, c.To = c.To, c.From
	return c
}

// operation returns what would bring c about, for the journal.
func (c Change) operation() *farev1.Operation {
	switch {
	case c.Kind == SubPortChange:
		return &farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: c.Device, Up: c.Up}}}
	case c.Kind == GroupChange && c.After != nil:
		return &farev1.Operation{Op: &farev1.Operation_SetGroup{SetGroup: c.After}}
	case c.Kind == GroupChange:
		return &farev1.Operation{Op: &farev1.Operation_DeleteGroup{DeleteGroup: c.Group}}
	case c.To.Group != 0:
		return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: c.To.message(c.Prefix)}}
	default:
		return &farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: c.Prefix.String()}}
	}
}

func (d Destination) message(prefix netip.Prefix) *farev1.Destination {
	return &farev1.Destination{Prefix: prefix.String(), Group: d.Group, Pairs: d.Pairs}
}

func newState() State {
	return State{
		Devices: map[string]Position{}, planes: map[string]bool{}, down: map[string]bool{},
		Groups: map[uint32]*farev1.Group{}, users: map[uint32]int{}, Destinations: map[netip.Prefix]Destination{},
	}
}

// Up says whether a device is part of Forwarding and no operation holds it down.
func (s *State) Up(device string) bool {
	_, ok := s.Devices[device]
	return ok && !s.down[device]
}

// order compares members by their place in Forwarding; those that are not part of it come last.
func (s *State) order(a, b *farev1.GroupMember) int {
	index := func(m *farev1.GroupMember) int {
		if at, ok := s.Devices[m.Device]; ok {
			return at.Index
		}
		return len(s.Devices)
	}
	return cmp.Compare(index(a), index(b))
}

// arrange puts the members of all groups in the order of a new Forwarding.
func (s *State) arrange() {
	for id, group := range s.Groups {
		if !slices.IsSortedFunc(group.Members, s.order) {
			group = proto.CloneOf(group)
			slices.SortStableFunc(group.Members, s.order)
			s.Groups[id] = group
		}
	}
}

// do makes a change true.
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
			s.Destinations[c.Prefix] = c.To
		} else {
			delete(s.Destinations, c.Prefix)
		}
	}
}

// Snapshot returns the state in the order of the contract, around the messages of the state.
func (s *State) Snapshot() *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{
		SubPorts:     make([]*farev1.SubPortState, 0, len(s.Devices)),
		Groups:       make([]*farev1.Group, 0, len(s.Groups)),
		Destinations: make([]*farev1.Destination, 0, len(s.Destinations)),
	}
	for device := range s.Devices {
		all.SubPorts = append(all.SubPorts, &farev1.SubPortState{Device: device, Up: !s.down[device]})
	}
	slices.SortFunc(all.SubPorts, func(a, b *farev1.SubPortState) int { return cmp.Compare(a.Device, b.Device) })
	for _, group := range s.Groups {
		all.Groups = append(all.Groups, group)
	}
	slices.SortFunc(all.Groups, func(a, b *farev1.Group) int { return cmp.Compare(a.Id, b.Id) })
	prefixes := make([]netip.Prefix, 0, len(s.Destinations))
	for prefix := range s.Destinations {
		prefixes = append(prefixes, prefix)
	}
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	for _, prefix := range prefixes {
		all.Destinations = append(all.Destinations, s.Destinations[prefix].message(prefix))
	}
	return all
}

// operations returns what would build a snapshot from nothing, in an order in which all are valid.
func operations(all *farev1.SnapshotResponse) []*farev1.Operation {
	var ops []*farev1.Operation
	for _, subPort := range all.SubPorts {
		if !subPort.Up {
			ops = append(ops, &farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: subPort}})
		}
	}
	for _, group := range all.Groups {
		ops = append(ops, &farev1.Operation{Op: &farev1.Operation_SetGroup{SetGroup: proto.CloneOf(group)}})
	}
	for _, destination := range all.Destinations {
		ops = append(ops, &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: proto.CloneOf(destination)}})
	}
	return ops
}
