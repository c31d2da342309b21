package pods

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// shareSum is the sum of the shares of a vector's slots.
const shareSum = 1_000_000_000

// restriction is the part of the host's state that concerns an attachment, with the names of the namespace.
type restriction struct {
	forwarding *farev1.Forwarding
	devices    map[string]string // devices in the namespace by the host's sub-ports
	sources    map[string]string // source groups in the namespace by those of the host
	addresses  map[netip.Addr]bool
}

// equalNames reports whether two restrictions give objects the same names.
func (r *restriction) equalNames(other *restriction) bool {
	return maps.Equal(r.devices, other.devices) && maps.Equal(r.sources, other.sources) && maps.Equal(r.addresses, other.addresses)
}

// restrict returns the part of a forwarding that uses the given sub-ports, nil if it has none of them. Source groups of
// the host without such a sub-port are left out. If several remain, an address that is a loopback of the host belongs
// to the source group of the loopback, all others belong to the first one; those without an address are left out too.
func restrict(host *farev1.Forwarding, devices map[string]string, addresses []netip.Prefix) *restriction {
	groups := slices.DeleteFunc(contract.SourceGroups(host), func(g contract.SourceGroup) bool {
		return !slices.ContainsFunc(g.Devices, func(device string) bool { return devices[device] != "" })
	})
	if len(groups) == 0 || len(addresses) == 0 {
		return nil
	}
	of := make([][]string, len(groups))
	for _, address := range addresses {
		at := max(slices.IndexFunc(groups, func(g contract.SourceGroup) bool { return slices.Contains(g.Loopbacks, address) }), 0)
		of[at] = append(of[at], address.String())
	}
	r := &restriction{
		forwarding: &farev1.Forwarding{Mode: farev1.Mode_MODE_PER_FLOW, UdpPorts: host.UdpPorts, TcpPorts: host.TcpPorts, SlotProbePort: host.SlotProbePort},
		devices:    map[string]string{}, sources: map[string]string{}, addresses: map[netip.Addr]bool{},
	}
	for _, address := range addresses {
		r.addresses[address.Addr()] = true
	}
	serves := func(string) bool { return false }
	for i, g := range groups {
		if len(of[i]) == 0 {
			continue
		}
		name := ""
		if g.Name.IsValid() {
			name = g.Name.String()
		}
		r.sources[name] = of[i][0]
		before := serves
		serves = func(device string) bool { return before(device) || g.Serves(device) }
		r.forwarding.Loopbacks = append(r.forwarding.Loopbacks, of[i]...)
		r.forwarding.SourceGroups = append(r.forwarding.SourceGroups, &farev1.SourceGroup{Loopbacks: of[i]})
		for _, device := range g.Devices {
			if devices[device] != "" {
				r.forwarding.SourceGroups[len(r.forwarding.SourceGroups)-1].Devices = append(r.forwarding.SourceGroups[len(r.forwarding.SourceGroups)-1].Devices, devices[device])
			}
		}
	}
	if len(r.forwarding.SourceGroups) == 1 {
		r.forwarding.SourceGroups = nil
		for name := range r.sources {
			r.sources[name] = ""
		}
	}
	for _, plane := range host.Planes {
		out := &farev1.ForwardingPlane{Plane: plane.Plane}
		for _, sp := range plane.SubPorts {
			if device := devices[sp.Device]; device != "" && serves(sp.Device) {
				out.SubPorts = append(out.SubPorts, &farev1.ForwardingSubPort{Device: device, NextHopV4: sp.NextHopV4, NextHopV6: sp.NextHopV6})
				r.devices[sp.Device] = device
			}
		}
		if len(out.SubPorts) > 0 {
			r.forwarding.Planes = append(r.forwarding.Planes, out)
		}
	}
	return r
}

// vector returns the part of a vector that uses the restriction's sub-ports, nil if the vector serves another source
// group. The shares of the remaining slots keep their ratios and sum to shareSum.
func (r *restriction) vector(v *farev1.Vector) *farev1.Vector {
	source, ok := r.sources[v.Source]
	if !ok {
		return nil
	}
	out := &farev1.Vector{Id: v.Id, Source: source}
	for _, m := range v.Members {
		if device, ok := r.devices[m.Device]; ok {
			out.Members = append(out.Members, &farev1.VectorMember{Plane: m.Plane, Device: device, Weight: m.Weight})
		}
	}
	var sum uint64
	for _, s := range v.Slots {
		if device, ok := r.devices[s.Device]; ok {
			sum += uint64(s.SharePpb)
			out.Slots = append(out.Slots, &farev1.VectorSlot{
				Slot: uint32(len(out.Slots)), Plane: s.Plane, Device: device, SharePpb: s.SharePpb, DrainBeforeMove: s.DrainBeforeMove,
			})
		}
	}
	switch {
	case len(out.Members) == 0:
		for _, s := range out.Slots {
			s.SharePpb = 0
		}
	case sum == 0:
		out.Slots = nil // packets follow the members
	default:
		normalize(out.Slots, sum)
	}
	return out
}

// normalize makes shares sum to shareSum, by largest remainder; among equal remainders the first slots get the missing
// units.
func normalize(slots []*farev1.VectorSlot, sum uint64) {
	left := uint64(shareSum)
	remainders := make([]uint64, len(slots))
	order := make([]int, len(slots))
	for i, s := range slots {
		high, low := bits.Mul64(uint64(s.SharePpb), shareSum)
		share, remainder := bits.Div64(high, low, sum)
		s.SharePpb, remainders[i], order[i] = uint32(share), remainder, i
		left -= share
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(remainders[b], remainders[a]) })
	for _, i := range order[:left] {
		slots[i].SharePpb++
	}
}

// destination returns the operation for a destination whose vector is a group of the host; 0 deletes it. nil means that
// the destination does not concern the attachment.
func (r *restriction) destination(key contract.DestinationKey, group uint32) *farev1.Operation {
	name := ""
	if key.Source.IsValid() {
		name = key.Source.String()
	}
	source, ok := r.sources[name]
	if !ok || r.addresses[key.Prefix.Addr()] {
		return nil
	}
	if group == 0 {
		return &farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: key.Prefix.String(), Source: source}}}
	}
	return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: key.Prefix.String(), Source: source, Vector: group}}}
}

// hostPrefixes parses addresses or host prefixes.
func hostPrefixes(texts []string) (out []netip.Prefix, err error) {
	for _, text := range texts {
		address, err := netip.ParseAddr(text)
		if err != nil {
			prefix, err := netip.ParsePrefix(text)
			if err != nil || !prefix.IsSingleIP() {
				return nil, fmt.Errorf("%q is neither an address nor a host prefix", text)
			}
			address = prefix.Addr()
		}
		if address = address.Unmap(); address.Zone() != "" || address.IsUnspecified() || address.IsMulticast() || address.IsLinkLocalUnicast() {
			return nil, fmt.Errorf("%q cannot be a source address", text)
		}
		if prefix := netip.PrefixFrom(address, address.BitLen()); !slices.Contains(out, prefix) {
			out = append(out, prefix)
		}
	}
	return out, nil
}
