package linux

import (
	"slices"

	"github.com/fared/fared/internal/rtnl"
)

// segment is a sequence of consecutive buckets of one nexthop object.
type segment struct {
	id   uint32
	size int
}

// scaling converts numbers of buckets into member weights for which the kernel deals exactly those numbers, while up to
// spare members of weight 1 get no bucket. Each bucket counts as weight scale, so scale/2 members of weight 1 keep the
// sum of all rounding errors below half a bucket.
type scaling struct {
	scale   int // 2 or more
	longest int // largest number of buckets of one member
	spare   int // members of weight 1 in addition to the loopback member
}

// newScaling returns the scaling for groups of the given size if the largest allowed weight is maxWeight. In groups
// with many buckets long runs are split into several members, which costs members and leaves room for the spare ones.
func newScaling(buckets, maxWeight int) scaling {
	scale := max(2, maxWeight/min(buckets, mostScale))
	return scaling{scale, maxWeight / scale, scale/2 - 1}
}

// mostScale bounds the number of buckets of one member if weights have 16 bits.
const mostScale = 1024

// pieces returns the number of members needed for runs.
func (s scaling) pieces(runs []run) (n int) {
	for _, r := range runs {
		n += (r.size + s.longest - 1) / s.longest
	}
	return n
}

// dealt is the replacement of a resilient group that changes the division of its buckets.
type dealt struct {
	members []rtnl.Member // member list for the kernel
	// witnesses are members of weight 1 that have no bucket afterwards, see deal.
	witnesses []uint32
	segments  []segment // resulting division in the kernel
	moved     int       // number of buckets that change their nexthop
}

// deal plans the replacement of a group whose buckets are divided as in current so that they are divided as in target.
// It relies on how the kernel replaces a group: a remaining member keeps as many buckets as its weight calls for, the
// last ones. The buckets of removed members and the first buckets of members with a reduced weight go, in bucket order,
// to the new members, starting with the last new member in the list.
//
// This is correct only while current is still the division in the kernel. If a device has lost its carrier and the
// event has not arrived, the kernel has removed the device's nexthops and given their buckets away, and must refuse the
// message. It does so if the message names one of those nexthops. The message therefore names one nexthop of every
// device that has buckets in current: a remaining member or else a witness.
//
// owner returns the sub-port of a nexthop, or -1 if it has none. device returns the interface index of a nexthop, or 0
// if it is unknown. fresh returns a nexthop of a sub-port that is not in the group, neither in current nor from an
// earlier call. An empty current redistributes all buckets, which is correct for any state of the kernel.
func (s scaling) deal(current []segment, target []run, owner, device func(id uint32) int, fresh func(subPort int) uint32) dealt {
	if len(current) == 0 || slices.ContainsFunc(current, func(c segment) bool { return device(c.id) == 0 }) {
		return s.dealAll(target, fresh)
	}
	// keeps is the index of the first bucket that a nexthop keeps.
	keeps, at := map[uint32]int{}, 0
	overlaps(current, target, func(c segment, subPort, size int) {
		if at += size; owner(c.id) != subPort {
			keeps[c.id] = at
		}
	})
	var out dealt
	var newcomers []newcomer
	var order []uint32 // ids of remaining members
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
	// The kernel searches the list for the owner of every bucket, from its start.
	for _, id := range slices.Backward(order) {
		out.members = append(out.members, rtnl.Member{ID: id, Weight: uint32(stay[id] * s.scale)})
	}
	out.list(newcomers, s.scale)
	for _, id := range out.witnesses {
		out.members = append(out.members, rtnl.Member{ID: id, Weight: 1})
	}
	return out
}

// dealAll plans the assignment of all buckets to nexthops that are not in the group.
func (s scaling) dealAll(target []run, fresh func(subPort int) uint32) dealt {
	var out dealt
	var newcomers []newcomer
	for _, r := range target {
		// Pieces are equal, so that the last one contains the lasting buckets far from its start.
		for left, pieces := r.size, (r.size+s.longest-1)/s.longest; pieces > 0; pieces-- {
			n := newcomer{segment{fresh(r.subPort), left / pieces}, r.subPort}
			left -= n.size
			newcomers = append(newcomers, n)
			out.segments = append(out.segments, n.segment)
			out.moved += n.size
		}
	}
	out.list(newcomers, s.scale)
	return out
}

// newcomer is a new member of a group.
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
		for left := r.size; left > 0; {
			size := min(left, current[0].size-used)
			f(current[0], r.subPort, size)
			left -= size
			if used += size; used == current[0].size {
				current, used = current[1:], 0
			}
		}
	}
}

// segmentsOf returns the segments of a bucket table as read from the kernel.
func segmentsOf(buckets []uint32) []segment {
	var d dealt
	for _, id := range buckets {
		d.add(id, 1)
	}
	return d.segments
}
