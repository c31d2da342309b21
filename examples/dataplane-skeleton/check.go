package main

import (
	"cmp"
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// topology is the part of Forwarding that operations are checked against.
type topology struct {
	devices map[string]place
	sources []source
}

// place is the place of a device in Forwarding.
type place struct {
	plane string
	index int
}

// source is a source group; a Forwarding without source groups has one, whose name is the zero value.
type source struct {
	name            netip.Prefix
	devices, planes map[string]bool
}

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

// checkForwarding validates the Forwarding of a Hello.
func checkForwarding(f *farev1.Forwarding) (*topology, error) {
	if len(f.GetPlanes()) == 0 {
		return nil, invalid("forwarding: no planes; list at least one")
	}
	if f.Mode != farev1.Mode_MODE_PER_FLOW && f.Mode != farev1.Mode_MODE_PER_PACKET {
		return nil, invalid("forwarding: mode %v; use per-flow or per-packet", f.Mode)
	}
	t := &topology{devices: map[string]place{}}
	var devices []string // in the order of Forwarding
	all := source{devices: map[string]bool{}, planes: map[string]bool{}}
	for _, plane := range f.Planes {
		if plane.Plane == "" || all.planes[plane.Plane] {
			return nil, invalid("forwarding: plane %q is empty or listed twice", plane.Plane)
		}
		all.planes[plane.Plane] = true
		for _, subPort := range plane.SubPorts {
			if subPort.Device == "" || all.devices[subPort.Device] {
				return nil, invalid("forwarding: device %q is empty or listed twice", subPort.Device)
			}
			if !isAddress(subPort.NextHopV4, netip.Addr.Is4) || !isAddress(subPort.NextHopV6, netip.Addr.Is6) {
				return nil, invalid("forwarding: device %s: the next hop is not an address of its family", subPort.Device)
			}
			all.devices[subPort.Device] = true
			t.devices[subPort.Device] = place{plane.Plane, len(devices)}
			devices = append(devices, subPort.Device)
		}
	}
	for _, port := range slices.Concat(f.UdpPorts, f.TcpPorts) {
		if port == 0 || port > 65535 {
			return nil, invalid("forwarding: %d is not a port; use 1 to 65535", port)
		}
	}
	for _, loopback := range f.Loopbacks {
		if _, err := hostPrefix(loopback); err != nil {
			return nil, err
		}
	}
	if len(f.SourceGroups) == 0 {
		t.sources = []source{all}
		return t, nil
	}
	return t, t.partition(f, devices)
}

// partition checks that the source groups are at least two, divide the loopbacks, and keep the order of Forwarding: of
// groups by their first loopbacks, of loopbacks, and of devices.
func (t *topology) partition(f *farev1.Forwarding, devices []string) error {
	var divided, first []string
	for i, group := range f.SourceGroups {
		if !ordered(group.Loopbacks, f.Loopbacks) || !ordered(group.Devices, devices) {
			return invalid("forwarding: source group %d: list loopbacks and devices of Forwarding, each once and in its order", i)
		}
		s := source{name: netip.MustParsePrefix(group.Loopbacks[0]), devices: map[string]bool{}, planes: map[string]bool{}}
		for _, device := range group.Devices {
			s.devices[device], s.planes[t.devices[device].plane] = true, true
		}
		t.sources = append(t.sources, s)
		divided, first = append(divided, group.Loopbacks...), append(first, group.Loopbacks[0])
	}
	slices.Sort(divided)
	if len(f.SourceGroups) < 2 || !ordered(first, f.Loopbacks) || !slices.Equal(divided, slices.Sorted(slices.Values(f.Loopbacks))) {
		return invalid("forwarding: source groups: use at least two, list each loopback in one, and keep the order of the first loopbacks")
	}
	return nil
}

// ordered reports whether part is not empty and a subsequence of all.
func ordered(part, all []string) bool {
	rest := part
	for _, s := range all {
		if len(rest) > 0 && rest[0] == s {
			rest = rest[1:]
		}
	}
	return len(part) > 0 && len(rest) == 0
}

// isAddress reports whether text is empty or an address of a family.
func isAddress(text string, family func(netip.Addr) bool) bool {
	a, err := netip.ParseAddr(text)
	return text == "" || err == nil && family(a) && !a.Is4In6() && a.Zone() == ""
}

// hostPrefix parses a unicast /32 or /128.
func hostPrefix(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil || !p.IsSingleIP() || p.Addr().Is4In6() || p.Addr().IsMulticast() {
		return netip.Prefix{}, invalid("%q is not a unicast host prefix such as 10.255.0.2/32", text)
	}
	return p, nil
}

// nameText returns the name of a source group as in messages: empty for the zero value.
func nameText(name netip.Prefix) string {
	if !name.IsValid() {
		return ""
	}
	return name.String()
}

// parseKey parses the key of a destination.
func parseKey(name, prefix string) (k key, err error) {
	if k.prefix, err = hostPrefix(prefix); err == nil && name != "" {
		k.source, err = hostPrefix(name)
	}
	return k, err
}

// rank returns the position of a source group in Forwarding; unknown ones come last.
func (t *topology) rank(name netip.Prefix) int {
	if i := slices.IndexFunc(t.sources, func(s source) bool { return s.name == name }); i >= 0 {
		return i
	}
	return len(t.sources)
}

// find returns the source group with a name.
func (t *topology) find(name netip.Prefix) (*source, error) {
	if i := t.rank(name); i < len(t.sources) {
		return &t.sources[i], nil
	}
	return nil, status.Errorf(codes.NotFound, "source %q is not the first loopback of a source group of Forwarding", nameText(name))
}

// sort puts members in the order of Forwarding, those that are not part of it last, and slots in the order of their
// numbers.
func (t *topology) sort(g *farev1.Vector) {
	index := func(m *farev1.VectorMember) int {
		if at, ok := t.devices[m.Device]; ok {
			return at.index
		}
		return len(t.devices)
	}
	slices.SortStableFunc(g.Members, func(a, b *farev1.VectorMember) int { return cmp.Compare(index(a), index(b)) })
	slices.SortFunc(g.Slots, func(a, b *farev1.VectorSlot) int { return cmp.Compare(a.Slot, b.Slot) })
}

// checkPlace checks that a source group has a plane, and that a device, unless it is empty, is one of the group's
// sub-ports there.
func (t *topology) checkPlace(s *source, plane, device string) error {
	if device == "" && s.planes[plane] || device != "" && s.devices[device] && t.devices[device].plane == plane {
		return nil
	}
	return status.Errorf(codes.NotFound, "plane %q, sub-port %q: not part of Forwarding, or not for these sources", plane, device)
}

// checkGroup validates a group and sets the canonical name of its source group. The caller holds mu.
func (t *table) checkGroup(g *farev1.Vector) error {
	if g.GetId() == 0 {
		return invalid("group 0 does not exist; use 1 or higher")
	}
	var name netip.Prefix
	if g.Source != "" {
		var err error
		if name, err = hostPrefix(g.Source); err != nil {
			return err
		}
	}
	s, err := t.topology.find(name)
	if err != nil {
		return err
	}
	g.Source = nameText(name)
	devices := map[string]bool{}
	for _, m := range g.Members {
		if m.Device == "" || m.Weight == 0 || devices[m.Device] {
			return invalid("group %d: member %q: a device, once, and a weight of 1 or higher are required", g.Id, m.Device)
		}
		if err := t.topology.checkPlace(s, m.Plane, m.Device); err != nil {
			return err
		}
		devices[m.Device] = true
	}
	slots, sum := map[uint32]bool{}, uint64(0)
	for _, slot := range g.Slots {
		if slots[slot.Slot] {
			return invalid("group %d: slot %d is listed twice", g.Id, slot.Slot)
		}
		if err := t.topology.checkPlace(s, slot.Plane, slot.Device); err != nil {
			return err
		}
		slots[slot.Slot] = true
		sum += uint64(slot.SharePpb)
	}
	want := uint64(1_000_000_000)
	if len(g.Members) == 0 || len(g.Slots) == 0 {
		want = 0
	}
	if sum != want {
		return invalid("group %d: the shares of its slots sum to %d ppb, want %d", g.Id, sum, want)
	}
	if before := t.groups[g.Id]; before != nil && before.Source != g.Source {
		return status.Errorf(codes.FailedPrecondition, "group %d serves source %q; delete it first", g.Id, before.Source)
	}
	return nil
}

// checkDestination validates a destination. The caller holds mu.
func (t *table) checkDestination(d *farev1.Destination) (key, error) {
	k, err := parseKey(d.GetSource(), d.GetPrefix())
	if err != nil {
		return k, err
	}
	if _, err := t.topology.find(k.source); err != nil {
		return k, err
	}
	if len(d.Pairs) > 0 {
		return k, status.Error(codes.Unimplemented, "flow pins are not supported; omit pairs")
	}
	if g := t.groups[d.Vector]; g == nil || g.Source != nameText(k.source) {
		return k, status.Errorf(codes.FailedPrecondition, "group %d does not exist, or serves another source group; set the group first", d.Vector)
	}
	return k, nil
}
