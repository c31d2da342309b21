package linux

import (
	"slices"
	"testing"

	"github.com/fared/fared/internal/rtnl"
)

// TestSpareMembers: by the model of the kernel (TestTwinIsTheKernel), the spare members and the one that drops get no
// bucket, and one more member of weight 1 gets one.
func TestSpareMembers(t *testing.T) {
	for _, c := range []struct{ buckets, maxWeight int }{{1024, 65535}, {8192, 65535}, {65535, 65535}} {
		s := newScaling(c.buckets, c.maxWeight)
		lost := func(extra int) (n int) {
			var members []rtnl.Member
			for id, left := uint32(1), c.buckets; left > 0; id++ {
				size := min(left, s.longest)
				members = append(members, rtnl.Member{ID: id, Weight: uint32(size * s.scale)})
				left -= size
				if size*s.scale > c.maxWeight {
					t.Fatalf("%+v: a weight of %d", c, size*s.scale)
				}
			}
			bearing := len(members)
			for i := range extra {
				members = append(members, rtnl.Member{ID: uint32(1000 + i), Weight: 1})
			}
			tb := table{buckets: make([]uint32, c.buckets)}
			tb.replace(members)
			for _, id := range tb.buckets {
				if int(id) > bearing {
					n++
				}
			}
			return n
		}
		if n := lost(s.spare + 1); n != 0 {
			t.Errorf("%+v: %d buckets go to %d members that are to have none", c, n, s.spare+1)
		}
		if n := lost(s.spare + 2); n == 0 {
			t.Errorf("%+v: %d members of weight 1 take nothing; the scaling has room for more", c, s.spare+2)
		}
	}
}

// TestWitnessesHaveRoom: all buckets of a group move when more sub-ports leave it than there are spare members, and not
// otherwise.
func TestWitnessesHaveRoom(t *testing.T) {
	const n = 64
	l, s := layout{65535, n}, newScaling(65535, 65535)
	for gone := 1; gone < n; gone++ {
		next, owner := uint32(0), map[uint32]int{}
		fresh := func(subPort int) uint32 {
			next++
			owner[next] = subPort
			return next
		}
		first := s.dealAll(l.runs(slices.Repeat([]uint32{1}, n)), fresh)
		weights := slices.Concat(slices.Repeat([]uint32{1}, n-gone), make([]uint32, gone))
		d := s.deal(first.segments, l.runs(weights), func(id uint32) int { return owner[id] }, func(id uint32) int { return owner[id] + 1 }, fresh)
		if all := d.moved == 65535; all != (gone > s.scale/2-1) || !all && len(d.witnesses) != gone {
			t.Errorf("%d of %d leave: %d buckets move, %d witnesses; scale %d", gone, n, d.moved, len(d.witnesses), s.scale)
		}
		unknown := s.deal(first.segments, l.runs(weights), func(id uint32) int { return owner[id] }, func(id uint32) int { return owner[id] }, fresh)
		if unknown.moved != 65535 {
			t.Errorf("a nexthop leads to a device that is not known: %d buckets move, want all", unknown.moved)
		}
	}
}

// TestPiecesAsLongAsWeightsAllow: buckets that pass from two nexthops to a sub-port share a new one as long as its
// weight fits.
func TestPiecesAsLongAsWeightsAllow(t *testing.T) {
	s := newScaling(65535, 65535)
	for second, pieces := range map[int]int{s.longest - 500: 1, s.longest - 499: 2} {
		made := 0
		fresh := func(int) uint32 {
			made++
			return uint32(100 + made)
		}
		current := []segment{{1, 500}, {2, second}, {3, 65535 - 500 - second}}
		id := func(id uint32) int { return int(id) }
		d := s.deal(current, []run{{9, 500 + second}, {3, 65535 - 500 - second}}, id, id, fresh)
		if made != pieces || d.moved != 500+second {
			t.Errorf("%d buckets: %d nexthops, want %d; %d buckets move", 500+second, made, pieces, d.moved)
		}
		for _, m := range d.members {
			if m.ID > 100 && m.Weight > 65535 {
				t.Errorf("%d buckets: %+v", 500+second, m)
			}
		}
	}
}
