package linux

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Recover implements contract.Recoverer: from the marked objects of the kernel it tells what an earlier run forwarded by.
// Weights are numbers of buckets in lowest terms, which stand for the same division as the weights that were set; slots
// and the sub-ports that an operation held down are not known any more. Programming the answer changes nothing in the
// kernel.
func (p *Plane) Recover() *farev1.SnapshotResponse {
	p.mu.Lock()
	defer p.mu.Unlock()
	ids := map[uint32]uint32{} // group of the contract by id of the kernel's
	found := &farev1.SnapshotResponse{}
	for _, prefix := range slices.SortedFunc(maps.Keys(p.routes), netip.Prefix.Compare) {
		id := p.routes[prefix]
		s, ok := p.strays[id]
		if !ok {
			continue
		}
		if ids[id] == 0 {
			ids[id] = uint32(len(ids) + 1)
			found.Groups = append(found.Groups, &farev1.Group{Id: ids[id], Members: p.recoverMembers(s)})
		}
		found.Destinations = append(found.Destinations, &farev1.Destination{Prefix: prefix.String(), Group: ids[id]})
	}
	if len(found.Destinations) == 0 {
		return nil
	}
	return found
}

// recoverMembers turns the buckets of a group into weights.
func (p *Plane) recoverMembers(s stray) (members []*farev1.GroupMember) {
	buckets := map[*subPort]uint32{}
	var all uint32
	for _, segment := range s.segments {
		if q := p.owners[segment.id]; q != nil && q.subPort != nil {
			buckets[q.subPort] += uint32(segment.size)
		}
	}
	for _, n := range buckets {
		all = gcd(all, n)
	}
	for sp, n := range buckets {
		members = append(members, &farev1.GroupMember{Plane: p.planeOf(sp.device), Device: sp.device, Weight: n / all})
	}
	slices.SortFunc(members, func(a, b *farev1.GroupMember) int {
		return cmp.Compare(p.byDevice[a.Device].index, p.byDevice[b.Device].index)
	})
	return members
}

func (p *Plane) planeOf(device string) string {
	for _, plane := range p.forwarding.GetPlanes() {
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
