package bpf

import (
	"math/bits"

	farev1 "github.com/fared/fared/api/fare/v1"
)

const (
	whole     = 1 << 32 // flows are 32-bit numbers
	slotNone  = 0xff    // SLOT_NONE
	slotPlane = 0x80    // SLOT_PLANE
	shareNone = 1<<32 - 1
)

// member is a sub-port of a group's source group.
type member struct {
	place, plane int
	weight       uint64
	width        uint64 // out of whole
	from, upto   uint64 // home in per-flow mode
}

// members returns the sub-ports of the source group, in its order, with their weights in the group; the widths sum to
// whole.
func (l *source) members(g *farev1.Vector) []member {
	weights := make(map[string]uint32, len(g.Members))
	var sum uint64
	for _, m := range g.Members {
		if _, ok := l.place[m.Device]; ok && l.planeOf[m.Device] == m.Plane {
			weights[m.Device] = m.Weight
			sum += uint64(m.Weight)
		}
	}
	out := make([]member, 0, len(weights))
	var before uint64
	share := func(w, of uint64) uint64 { // exact fraction of whole
		hi, lo := bits.Mul64(w, whole)
		q, _ := bits.Div64(hi, lo, of)
		return q
	}
	n := uint64(len(l.order))
	for i, device := range l.order {
		w := uint64(weights[device])
		m := member{
			place: l.place[device], plane: l.plane[l.planeOf[device]], weight: w,
			from: share(uint64(i), n), upto: share(uint64(i)+1, n),
		}
		if w > 0 {
			m.width = share(before+w, sum) - share(before, sum)
			before += w
		}
		out = append(out, m)
	}
	if before == 0 {
		return nil
	}
	return out
}

// value returns a group in the form of the program.
func (l *source) value(g *farev1.Vector) steerGroup {
	v := steerGroup{Id: g.Id, Source: uint32(l.number)}
	for i := range v.Slot {
		v.Slot[i], v.Share[i] = slotNone, shareNone
	}
	for _, s := range g.Slots {
		if s.Slot >= maxSlots {
			continue // validated before
		}
		v.Share[s.Slot] = s.SharePpb
		if s.DrainBeforeMove {
			v.Drain[s.Slot/64] |= 1 << (s.Slot % 64)
		}
		if place, ok := l.place[s.Device]; ok {
			v.Slot[s.Slot] = uint8(place)
		} else if plane, ok := l.plane[s.Plane]; ok && s.Device == "" {
			v.Slot[s.Slot] = slotPlane | uint8(plane)
		}
	}
	members := l.members(g)
	v.Count = uint32(len(members))
	for i, m := range members {
		v.Width[i], v.Member[i], v.Weight[i] = uint32(min(m.width, whole-1)), uint8(m.place), uint32(m.weight)
		if m.weight > 0 {
			v.Members |= 1 << m.place
		}
	}
	var segments segments
	if l.perPacket {
		l.byPlane(&v, members, &segments)
	} else {
		homes(members, &segments)
	}
	last := uint8(0)
	for i := range v.Upto {
		v.Upto[i] = whole - 1
		if i < segments.n {
			v.Upto[i], last = uint32(segments.upto[i]-1), segments.place[i]
		}
		v.Place[i] = last
	}
	return v
}

// segments are consecutive runs of flows.
type segments struct {
	n     int
	upto  [128]uint64 // exclusive
	place [128]uint8
}

func (s *segments) add(upto uint64, place int) {
	switch {
	case s.n > 0 && s.upto[s.n-1] == upto: // empty
	case s.n > 0 && s.place[s.n-1] == uint8(place):
		s.upto[s.n-1] = upto
	default:
		s.upto[s.n], s.place[s.n] = upto, uint8(place)
		s.n++
	}
}

// byPlane lays the members out one after the other. Members of a plane are adjacent in Forwarding, so each plane is one
// run.
func (l *source) byPlane(v *steerGroup, members []member, s *segments) {
	at := uint64(0)
	for _, m := range members {
		if m.weight == 0 {
			continue
		}
		run := &v.Run[m.plane]
		if run.Width == 0 {
			run.First = uint32(at)
		}
		at += m.width
		run.Width = uint32(min(at-uint64(run.First), whole-1))
		s.add(at, m.place)
	}
}

// homes lays the members out so that few flows move when weights change: every sub-port of the source group has an
// equal home. A member with less keeps the end of its home; a member with more keeps all of it and receives released
// flows, in order. settle in steer.bpf.c does the same for a group with members that are down.
func homes(members []member, s *segments) {
	taker, taken := 0, uint64(0) // the member that receives next, and how much it has received
	for _, m := range members {
		home := m.upto - m.from
		for at, free := m.from, home-min(m.width, home); free > 0; {
			for {
				t := members[taker]
				if more := t.width - min(t.width, t.upto-t.from); more > taken {
					n := min(more-taken, free)
					at, free, taken = at+n, free-n, taken+n
					s.add(at, t.place)
					break
				}
				taker, taken = taker+1, 0
			}
		}
		if m.width > 0 {
			s.add(m.upto, m.place)
		}
	}
}
