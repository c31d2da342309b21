package linux

import (
	"slices"

	"github.com/fared/fared/dataplane/internal/rtnl"
)

// segment is consecutive buckets on one nexthop object.
type segment struct {
	id   uint32
	size int
}

// scaling turns numbers of buckets into weights such that the kernel deals exactly those numbers, and one more member of
// weight 1 gets none: with a scale of at least 2 all rounding errors stay below half a bucket.
type scaling struct {
	scale   int
	longest int // buckets of one member
}

// newScaling returns the scaling for groups of buckets when a weight may be at most maxWeight.
func newScaling(buckets, maxWeight int) scaling {
	scale := max(2, maxWeight/buckets)
	return scaling{scale, maxWeight / scale}
}

// dealt is what brings a resilient group from one division of its buckets to another.
type dealt struct {
	members  []rtnl.Member // as the kernel must be told
	segments []segment     // what the kernel then has
	moved    int           // buckets that change their nexthop
}

// deal plans to give the buckets of a group, divided as current says, to the owners that target says. It uses how the
// kernel replaces a group: a member that stays with its weight keeps its buckets; those of members that are gone go, in the
// order of the buckets, to the new members, the last of them in the list first.
//
// owner says whose a nexthop is, -1: nobody's any more. fresh returns a nexthop of a sub-port that the group does not
// have, neither in current nor by an earlier call. No current divides all buckets anew.
func (s scaling) deal(current []segment, target []run, owner func(id uint32) int, fresh func(subPort int) uint32) dealt {
	leaves := map[uint32]bool{}
	if len(current) == 0 {
		for _, r := range target {
			current = append(current, segment{0, r.size})
		}
		leaves[0] = true
	}
	overlaps(current, target, func(c segment, subPort, _ int) {
		if !leaves[c.id] && owner(c.id) != subPort {
			leaves[c.id] = true
		}
	})
	type newcomer struct {
		segment
		subPort int
	}
	var out dealt
	var newcomers []newcomer
	stay := map[uint32]int{}
	var order []uint32 // of those that stay
	overlaps(current, target, func(c segment, subPort, size int) {
		id := c.id
		if leaves[id] {
			n := len(newcomers)
			if n == 0 || newcomers[n-1].subPort != subPort || newcomers[n-1].size+size > s.longest {
				for size > s.longest { // only from nothing: no segment is longer
					id = fresh(subPort)
					newcomers = append(newcomers, newcomer{segment{id, s.longest}, subPort})
					out.add(id, s.longest)
					out.moved += s.longest
					size -= s.longest
				}
				newcomers = append(newcomers, newcomer{segment{fresh(subPort), 0}, subPort})
				n = len(newcomers)
			}
			newcomers[n-1].size += size
			id = newcomers[n-1].id
			out.moved += size
		} else {
			if stay[id] == 0 {
				order = append(order, id)
			}
			stay[id] += size
		}
		out.add(id, size)
	})
	for _, n := range slices.Backward(newcomers) {
		out.members = append(out.members, rtnl.Member{ID: n.id, Weight: uint32(n.size * s.scale)})
	}
	for _, id := range order {
		out.members = append(out.members, rtnl.Member{ID: id, Weight: uint32(stay[id] * s.scale)})
	}
	return out
}

func (d *dealt) add(id uint32, size int) {
	if n := len(d.segments); n > 0 && d.segments[n-1].id == id {
		d.segments[n-1].size += size
		return
	}
	d.segments = append(d.segments, segment{id, size})
}

// overlaps calls f for each stretch of buckets that has one nexthop in current and one owner in target.
func overlaps(current []segment, target []run, f func(c segment, subPort, size int)) {
	used := 0 // of current[0]
	for _, r := range target {
		for left := r.size; left > 0 && len(current) > 0; {
			size := min(left, current[0].size-used)
			f(current[0], r.subPort, size)
			left -= size
			if used += size; used == current[0].size {
				current, used = current[1:], 0
			}
		}
	}
}

// segmentsOf compresses what the kernel says of a group's buckets.
func segmentsOf(buckets []uint32) []segment {
	var d dealt
	for _, id := range buckets {
		d.add(id, 1)
	}
	return d.segments
}
