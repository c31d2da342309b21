package bpf

import (
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

const (
	maxSources = 32
	maxPlaces  = 64 // per source group
	maxPlanes  = 64
)

// layout holds the numbers of source groups, and of their sub-ports and planes.
type layout struct {
	sources []source // in the order of Forwarding, then former ones
	planeOf map[string]string
}

// source is a source group with the numbers of its sub-ports and planes. These numbers are per source group: a sub-port
// of several source groups has several numbers.
type source struct {
	name      netip.Prefix
	number    int
	loopbacks []netip.Prefix
	order     []string       // devices in the order of Forwarding
	place     map[string]int // by device
	plane     map[string]int
	planeOf   map[string]string // of all devices
	perPacket bool
	// former means that Forwarding lacks the source group, whose left destinations stay in use until others replace
	// them. The control plane deletes them last: over means that it has begun.
	former, over bool
	left         int
}

// has reports whether packets from an address belong to the source group. If Forwarding lists no source groups, all do,
// whatever its loopbacks.
func (l *source) has(from netip.Prefix) bool {
	return !l.name.IsValid() || slices.Contains(l.loopbacks, from)
}

// at returns the index of a place or plane over all source groups.
func (l *source) at(number int) int { return l.number*maxPlaces + number }

// source returns the source group with a name, or nil if Forwarding has none.
func (l *layout) source(name netip.Prefix) *source {
	for i := range l.sources {
		if l.sources[i].name == name {
			return &l.sources[i]
		}
	}
	return nil
}

// numbered returns the source group with a number, or nil if Forwarding has none.
func (l *layout) numbered(number int) *source {
	for i := range l.sources {
		if l.sources[i].number == number {
			return &l.sources[i]
		}
	}
	return nil
}

// owner returns the first source group to which packets from an address belong, or nil.
func (l *layout) owner(from netip.Prefix) *source {
	for i := range l.sources {
		if s := &l.sources[i]; s.has(from) {
			return s
		}
	}
	return nil
}

// lacksNone reports whether another layout has all source groups.
func (l *layout) lacksNone(other *layout) bool {
	return !slices.ContainsFunc(l.sources, func(s source) bool { return other.source(s.name) == nil })
}

// keep adds the source groups of an earlier layout that have destinations, by their numbers, as former ones.
func (l *layout) keep(earlier *layout, destinations map[netip.Prefix]int) {
	for _, s := range earlier.sources {
		stays := func(device string) bool { return l.planeOf[device] == s.planeOf[device] }
		if l.source(s.name) != nil || destinations[s.name] == 0 || !slices.ContainsFunc(s.order, stays) {
			continue
		}
		s.former, s.left = true, destinations[s.name]
		places := s.place
		s.order, s.place, s.planeOf = slices.DeleteFunc(slices.Clone(s.order), func(d string) bool { return !stays(d) }), map[string]int{}, l.planeOf
		for _, device := range s.order {
			s.place[device] = places[device]
		}
		l.sources = append(l.sources, s)
	}
}

// abandoned returns the layout without the former source groups that have no destination left, or false if it has none
// of them.
func (l *layout) abandoned() (layout, bool) {
	gone := func(s source) bool { return s.former && s.left == 0 }
	if !slices.ContainsFunc(l.sources, gone) {
		return *l, false
	}
	return layout{slices.DeleteFunc(slices.Clone(l.sources), gone), l.planeOf}, true
}

// sameSources reports whether two layouts have the same source groups, with the same loopbacks and numbers.
func (l *layout) sameSources(other *layout) bool {
	return slices.EqualFunc(l.sources, other.sources, func(a, b source) bool {
		return a.name == b.name && a.number == b.number && slices.Equal(a.loopbacks, b.loopbacks)
	})
}

// newLayout assigns numbers to source groups, planes and sub-ports. Existing numbers are kept, also those of an earlier
// process, so that groups keep their meaning; until settled the numbers of removed sub-ports and planes are not free.
func newLayout(f *farev1.Forwarding, have *mirror, settled bool) (layout, error) {
	l := layout{planeOf: map[string]string{}}
	for _, p := range f.Planes {
		for _, sp := range p.SubPorts {
			l.planeOf[sp.Device] = p.Plane
		}
	}
	groups := contract.SourceGroups(f)
	names := make([]netip.Prefix, len(groups))
	for i, g := range groups {
		names[i] = g.Name
	}
	// The number of a removed source group is free once its name is removed, which happens after its entries are
	// deleted.
	taken, ok := numbers(names, have.sourceNumbers(), true, maxSources)
	for _, g := range groups {
		if !ok {
			break
		}
		one := source{
			name: g.Name, number: taken[g.Name], loopbacks: g.Loopbacks, order: g.Devices, planeOf: l.planeOf,
			perPacket: f.Mode == farev1.Mode_MODE_PER_PACKET,
		}
		ok = one.numberPlaces(have, settled)
		l.sources = append(l.sources, one)
	}
	if !ok {
		return l, status.Error(codes.ResourceExhausted, "no number is free for another source group, sub-port or plane until the takeover of the previous state ends; retry")
	}
	return l, nil
}

// numberPlaces assigns numbers to the sub-ports and planes of a source group, or returns false if there are too few.
func (l *source) numberPlaces(have *mirror, settled bool) bool {
	places, planes := map[string]int{}, map[uint64]int{}
	for i := range maxPlaces {
		if name := text(have.places.have[l.at(i)].Device[:]); name != "" {
			places[name] = i
		}
		if hash := have.planes.have[l.at(i)].Name; hash != 0 {
			planes[hash] = i
		}
	}
	var hashes []uint64
	for _, device := range l.order {
		if hash := nameHash(l.planeOf[device]); !slices.Contains(hashes, hash) {
			hashes = append(hashes, hash)
		}
	}
	var okPlaces, okPlanes bool
	l.place, okPlaces = numbers(l.order, places, !settled, maxPlaces)
	byHash, okPlanes := numbers(hashes, planes, !settled, maxPlanes)
	l.plane = map[string]int{}
	for _, device := range l.order {
		l.plane[l.planeOf[device]] = byHash[nameHash(l.planeOf[device])]
	}
	return okPlaces && okPlanes
}

// numbers keeps the existing numbers of names and assigns free ones below most to the others. reserve excludes the
// numbers of removed names from the free ones. It returns false if there are too few.
func numbers[N comparable](names []N, have map[N]int, reserve bool, most int) (map[N]int, bool) {
	used, out := map[int]bool{}, make(map[N]int, len(names))
	if reserve {
		for _, i := range have {
			used[i] = true
		}
	}
	for _, name := range names {
		if i, ok := have[name]; ok {
			out[name], used[i] = i, true
		}
	}
	next := 0
	for _, name := range names {
		if _, ok := out[name]; ok {
			continue
		}
		for used[next] {
			next++
		}
		if next >= most {
			return out, false
		}
		out[name], used[next] = next, true
	}
	return out, true
}

// name returns the name of a source group, the zero value if Forwarding has no source groups.
func (n steerSource) name() netip.Prefix {
	if n.Name == (steerAddress{}) {
		return netip.Prefix{}
	}
	return n.Name.prefix()
}
