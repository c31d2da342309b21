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

// scaling turns numbers of buckets into weights such that the kernel deals exactly those numbers, and some more members of
// weight 1 get none: with weights of scale a bucket, scale/2 of them keep all rounding errors below half a bucket.
type scaling struct {
	scale   int // 2 or more
	longest int // buckets of one member
	spare   int // members of weight 1 beside the one that drops
}

// newScaling returns the scaling for groups of buckets when a weight may be at most maxWeight.
func newScaling(buckets, maxWeight int) scaling {
	scale := max(2, maxWeight/buckets)
	return scaling{scale, maxWeight / scale, scale/2 - 1}
}

// dealt is what brings a resilient group from one division of its buckets to another.
type dealt struct {
	members []rtnl.Member // as the kernel must be told
	// witnesses are members too, of weight 1, which have no bucket afterwards: see deal.
	witnesses []uint32
	segments  []segment // what the kernel then has
	moved     int       // buckets that change their nexthop
}

// deal plans to give the buckets of a group, divided as current says, to the owners that target says. It uses how the
// kernel replaces a group: a member that stays keeps as many of its buckets as its weight says, the last ones; those of
// members that are gone and the first ones of members with a smaller weight go, in the order of the buckets, to the new
// members, the last of them in the list first.
//
// That comes out right only if the division is still the current one: if a device has lost its carrier unheard, the kernel
// has removed its nexthops and given their buckets away. Then it must refuse the message. It does when the message names
// one of those nexthops, so the message names one nexthop of every device that has buckets now: where no other stays, a witness.
//
// owner says whose a nexthop is, -1: nobody's any more; device where it leads to, 0: not known. fresh returns a nexthop
// of a sub-port that the group does not have, neither in current nor by an earlier call. No current divides all buckets
// anew, which comes out right whatever the kernel has done.
func (s scaling) deal(current []segment, target []run, owner, device func(id uint32) int, fresh func(subPort int) uint32) dealt {
	if len(current) == 0 || slices.ContainsFunc(current, func(c segment) bool { return device(c.id) == 0 }) {
		return s.dealAll(target, fresh)
	}
	// keeps is where the buckets begin that a nexthop keeps.
	keeps, at := map[uint32]int{}, 0
	overlaps(current, target, func(c segment, subPort, size int) {
		if at += size; owner(c.id) != subPort {
			keeps[c.id] = at
		}
	})
	var out dealt
	var newcomers []newcomer
	var order []uint32 // of those that stay
	stay, seen := map[uint32]int{}, map[int]bool{}
	at = 0
	overlaps(current, target, func(c segment, subPort, size int) {
		id := c.id
		if at < keeps[id] {
			if n := len(newcomers); n == 0 || newcomers[n-1].subPort != subPort || newcomers[n-1].size+size > s.longest {
				newcomers = append(newcomers, newcomer{segment{fresh(subPort), 0}, subPort})
			}
			last := &newcomers[len(newcomers)-1]
			last.size += size
			id = last.id
			out.moved += size
		} else {
			if stay[id] == 0 {
				order = append(order, id)
			}
			stay[id] += size
			seen[device(id)] = true
		}
		out.add(id, size)
		at += size
	})
	for _, c := range current {
		if !seen[device(c.id)] {
			seen[device(c.id)] = true
			out.witnesses = append(out.witnesses, c.id)
		}
	}
	if len(out.witnesses) > s.spare {
		return s.dealAll(target, fresh)
	}
	out.list(newcomers, s.scale)
	for _, id := range order {
		out.members = append(out.members, rtnl.Member{ID: id, Weight: uint32(stay[id] * s.scale)})
	}
	for _, id := range out.witnesses {
		out.members = append(out.members, rtnl.Member{ID: id, Weight: 1})
	}
	return out
}

// dealAll plans to give all buckets to nexthops that the group does not have.
func (s scaling) dealAll(target []run, fresh func(subPort int) uint32) dealt {
	var out dealt
	var newcomers []newcomer
	for _, r := range target {
		for left := r.size; left > 0; left -= min(left, s.longest) {
			n := newcomer{segment{fresh(r.subPort), min(left, s.longest)}, r.subPort}
			newcomers = append(newcomers, n)
			out.segments = append(out.segments, n.segment)
			out.moved += n.size
		}
	}
	out.list(newcomers, s.scale)
	return out
}

// newcomer is a member that a group did not have.
type newcomer struct {
	segment
	subPort int
}

func (d *dealt) list(newcomers []newcomer, scale int) {
	for _, n := range slices.Backward(newcomers) {
		d.members = append(d.members, rtnl.Member{ID: n.id, Weight: uint32(n.size * scale)})
	}
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
