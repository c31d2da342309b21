package linux

import (
	"cmp"
	"maps"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Recover implements contract.Recoverer. It reconstructs the forwarding of an earlier run from the marked objects in
// the kernel. Weights are numbers of buckets in lowest terms, which yield the same division as the weights that were
// set. Slots, and sub-ports that an operation had set down, are not recovered. Programming the result changes nothing
// in the kernel.
func (d *Driver) Recover() *farev1.SnapshotResponse {
	d.mu.Lock()
	defer d.mu.Unlock()
	ids := map[uint32]uint32{} // contract group id by kernel group id
	found := &farev1.SnapshotResponse{}
	routes := maps.Collect(d.state.have.routes.all())
	for _, at := range slices.SortedFunc(maps.Keys(routes), routeKey.compare) {
		id := routes[at].nexthop
		s, ok := d.state.have.strays[id]
		if !ok || len(d.state.want.claimants[at.table]) == 0 {
			continue
		}
		source := d.state.want.sources[d.state.want.claimants[at.table][0]]
		if ids[id] == 0 {
			ids[id] = uint32(len(ids) + 1)
			found.Vectors = append(found.Vectors, &farev1.Vector{Id: ids[id], Members: d.state.recoverMembers(source, s, d.forwarding), Source: source.text()})
		}
		found.Destinations = append(found.Destinations, &farev1.Destination{Prefix: at.prefix.String(), Vector: ids[id], Source: source.text()})
	}
	if len(found.Destinations) == 0 {
		return nil
	}
	return found
}

// recoverMembers converts the buckets of a group into weights.
func (st *state) recoverMembers(from *source, s stray, forwarding *farev1.Forwarding) (members []*farev1.VectorMember) {
	buckets := map[*subPort]uint32{}
	var all uint32
	for _, segment := range s.segments {
		if q := st.have.owners[segment.id]; q != nil && q.subPort != nil && from.index(q.subPort) >= 0 {
			buckets[q.subPort] += uint32(segment.size)
		}
	}
	for _, n := range buckets {
		all = gcd(all, n)
	}
	for sp, n := range buckets {
		members = append(members, &farev1.VectorMember{Plane: planeOf(forwarding, sp.device), Device: sp.device, Weight: n / all})
	}
	slices.SortFunc(members, func(a, b *farev1.VectorMember) int {
		return cmp.Compare(from.index(st.want.byDevice[a.Device]), from.index(st.want.byDevice[b.Device]))
	})
	return members
}

// planeOf returns the plane of a device, or "".
func planeOf(forwarding *farev1.Forwarding, device string) string {
	for _, plane := range forwarding.GetPlanes() {
		for _, sp := range plane.SubPorts {
			if sp.Device == device {
				return plane.Plane
			}
		}
	}
	return ""
}

func gcd(a, b uint32) uint32 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
