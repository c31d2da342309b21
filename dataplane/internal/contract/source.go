package contract

import (
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// SourceGroup is a set of local loopbacks served by the same sub-ports. A Forwarding without source groups has one,
// with all its loopbacks and sub-ports.
type SourceGroup struct {
	// Name is the first loopback; the zero value names the only source group of a Forwarding that lists none.
	Name netip.Prefix
	// Loopbacks are in the order of Forwarding.
	Loopbacks []netip.Prefix
	// Devices are in the order of Forwarding.
	Devices []string

	devices, planes map[string]bool
}

// SourceGroups returns the source groups of a valid Forwarding in its order, at least one.
func SourceGroups(f *farev1.Forwarding) []SourceGroup {
	var groups []SourceGroup
	for _, listed := range f.GetSourceGroups() {
		g := newSourceGroup(f, listed.Loopbacks, func(device string) bool { return slices.Contains(listed.Devices, device) })
		g.Name = g.Loopbacks[0]
		groups = append(groups, g)
	}
	if groups == nil {
		groups = append(groups, newSourceGroup(f, f.GetLoopbacks(), func(string) bool { return true }))
	}
	return groups
}

func newSourceGroup(f *farev1.Forwarding, loopbacks []string, serves func(device string) bool) SourceGroup {
	g := SourceGroup{devices: map[string]bool{}, planes: map[string]bool{}}
	for _, text := range loopbacks {
		if prefix, err := netip.ParsePrefix(text); err == nil {
			g.Loopbacks = append(g.Loopbacks, prefix)
		}
	}
	for _, plane := range f.GetPlanes() {
		for _, subPort := range plane.SubPorts {
			if serves(subPort.Device) {
				g.Devices = append(g.Devices, subPort.Device)
				g.devices[subPort.Device], g.planes[plane.Plane] = true, true
			}
		}
	}
	if len(f.GetSourceGroups()) == 0 { // include planes that have no sub-port yet
		for _, plane := range f.GetPlanes() {
			g.planes[plane.Plane] = true
		}
	}
	return g
}

// Serves reports whether a device is a sub-port of the source group.
func (g *SourceGroup) Serves(device string) bool { return g.devices[device] }

// SourceGroup returns the source group with a name, or nil if Forwarding has none.
func (s *State) SourceGroup(name netip.Prefix) *SourceGroup {
	if i, ok := s.sourceIndex[name]; ok {
		return &s.Sources[i]
	}
	return nil
}

// SourceOf returns the name of the source group for packets from an address: the first source group, unless the address
// is a loopback of another one.
func (s *State) SourceOf(from netip.Addr) netip.Prefix {
	for i := range s.Sources {
		if slices.ContainsFunc(s.Sources[i].Loopbacks, func(p netip.Prefix) bool { return p.Addr() == from }) {
			return s.Sources[i].Name
		}
	}
	if len(s.Sources) == 0 {
		return netip.Prefix{}
	}
	return s.Sources[0].Name
}

// setSources indexes the source groups of a Forwarding.
func (s *State) setSources(groups []SourceGroup) {
	s.Sources, s.sourceIndex = groups, make(map[netip.Prefix]int, len(groups))
	for i, g := range groups {
		s.sourceIndex[g.Name] = i
	}
}

// sourceRank returns the position of a source group in Forwarding; unknown ones come last.
func (s *State) sourceRank(name netip.Prefix) int {
	if i, ok := s.sourceIndex[name]; ok {
		return i
	}
	return len(s.Sources)
}

// sourceText returns the name of a source group in the form used in messages.
func sourceText(name netip.Prefix) string {
	if !name.IsValid() {
		return ""
	}
	return name.String()
}

// parseSource parses the name of a source group; empty text is the zero value.
func parseSource(text string) (netip.Prefix, error) {
	if text == "" {
		return netip.Prefix{}, nil
	}
	return hostPrefix(text)
}

// judgeSource checks that Forwarding has a source group. The caller holds mu.
func (s *Server) judgeSource(text string) (netip.Prefix, error) {
	name, err := parseSource(text)
	switch {
	case err != nil:
		return name, invalid("source: %v", err)
	case s.restoring || s.state.SourceGroup(name) != nil:
		return name, nil // a journal may restore state of a source group that a Hello has removed
	case text == "":
		return name, status.Error(codes.NotFound, "source: it is missing, but the last Hello's forwarding has source groups; set the first loopback of one")
	default:
		return name, status.Errorf(codes.NotFound, "source: %s is not the first loopback of a source group of the last Hello's forwarding; send a Hello with it first", text)
	}
}

// judgeSourceGroups checks that source groups are a partition of the loopbacks, in their order, and list devices in the
// order of planes.
func judgeSourceGroups(f *farev1.Forwarding, devices map[string]Position) error {
	if len(f.SourceGroups) == 1 {
		return invalid("forwarding: source_groups: only one is listed; list at least two, or none if all loopbacks share all sub-ports")
	}
	rank := make(map[netip.Prefix]int, len(f.Loopbacks))
	for i, text := range f.Loopbacks {
		rank[netip.MustParsePrefix(text)] = i // validated before
	}
	seen := make(map[netip.Prefix]bool, len(rank))
	first := -1
	for i, g := range f.SourceGroups {
		last := first
		for j, text := range g.Loopbacks {
			prefix, err := hostPrefix(text)
			at, known := rank[prefix]
			switch {
			case err != nil:
				return invalid("forwarding: source_groups[%d].loopbacks[%d]: %v", i, j, err)
			case !known:
				return invalid("forwarding: source_groups[%d].loopbacks[%d]: %s is not one of the forwarding's loopbacks; add it there", i, j, text)
			case seen[prefix]:
				return invalid("forwarding: source_groups[%d].loopbacks[%d]: %s is listed twice; list each loopback in one source group", i, j, text)
			case at <= last:
				return invalid("forwarding: source_groups[%d].loopbacks[%d]: %s is out of order; use the order of loopbacks", i, j, text)
			}
			seen[prefix], last = true, at
			if j == 0 {
				first = at
			}
		}
		if len(g.Loopbacks) == 0 {
			return invalid("forwarding: source_groups[%d]: no loopbacks; list at least one", i)
		}
		if err := judgeSourceDevices(i, g.Devices, devices); err != nil {
			return err
		}
	}
	if len(f.SourceGroups) > 0 && len(seen) < len(rank) {
		return invalid("forwarding: source_groups: %d of the %d loopbacks are in no source group; list each in one", len(rank)-len(seen), len(rank))
	}
	return nil
}

func judgeSourceDevices(i int, names []string, devices map[string]Position) error {
	if len(names) == 0 {
		return invalid("forwarding: source_groups[%d]: no devices; list at least one", i)
	}
	last := -1
	for j, device := range names {
		at, ok := devices[device]
		if !ok {
			return invalid("forwarding: source_groups[%d].devices[%d]: %q is not a sub-port of a plane; add it to a plane", i, j, device)
		}
		if at.Index <= last {
			return invalid("forwarding: source_groups[%d].devices[%d]: %q is listed twice or out of order; use the order of the planes", i, j, device)
		}
		last = at.Index
	}
	return nil
}
