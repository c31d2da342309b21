package tcpslots

import (
	"cmp"
	"slices"

	"github.com/fared/fared/client/slots"
)

// Bounds of the BPF program.
const (
	maxSlots  = 128
	maxPlanes = 64
	maxTurns  = 1024
)

// bin is a sub-port, or a plane whose packets are sprayed, with its slots.
type bin struct {
	plane, subPort int
	share          uint64 // parts per billion
	slots          []uint8
}

// binsOf returns the bins of slots that have a share, in the order of their first slots.
func binsOf(list []slots.Slot) (bins []bin) {
	for i, s := range list {
		if s.Share == 0 {
			continue
		}
		at := slices.IndexFunc(bins, func(b bin) bool { return b.plane == s.Plane && b.subPort == s.SubPort })
		if at < 0 {
			at = len(bins)
			bins = append(bins, bin{plane: s.Plane, subPort: s.SubPort})
		}
		bins[at].share += uint64(s.Share)
		bins[at].slots = append(bins[at].slots, uint8(i))
	}
	return bins
}

// dealOf returns the order in which connections are dealt to the slots of a vector. There are at most maxSlots slots,
// on planes below maxPlanes. A turn chooses the plane first, and then the sub-port among those of the plane: both are
// spread evenly.
func dealOf(list []slots.Slot) *connectDeal {
	bins, d := binsOf(list), &connectDeal{}
	if len(bins) == 0 {
		return d
	}
	slices.SortStableFunc(bins, func(a, b bin) int { return cmp.Compare(a.plane, b.plane) })
	weights := turnsOf(bins, uint64(len(list)))
	var ofPlanes []slots.Slot  // the turns of each plane
	var inPlane [][]slots.Slot // those of its bins
	var firstBin []int
	next := 0
	for i, b := range bins {
		d.Bin[i].Own = connectRange{First: uint8(next), Count: uint8(len(b.slots))}
		d.Bin[i].Plane = uint8(b.plane)
		next += copy(d.Slot[next:], b.slots)
		if i == 0 || bins[i-1].plane != b.plane {
			ofPlanes, inPlane, firstBin = append(ofPlanes, slots.Slot{}), append(inPlane, nil), append(firstBin, i)
		}
		last := len(ofPlanes) - 1
		ofPlanes[last].Share += weights[i].Share
		inPlane[last] = append(inPlane[last], weights[i])
	}
	for p, first := range firstBin {
		all := connectRange{First: d.Bin[first].Own.First}
		for i := range inPlane[p] {
			all.Count += d.Bin[first+i].Own.Count
		}
		for i := range inPlane[p] {
			d.Bin[first+i].All = all
		}
		d.Turns += uint16(ofPlanes[p].Share)
	}
	var planes slots.Chooser
	choosers := make([]slots.Chooser, len(inPlane))
	for i := range d.Turns {
		p := planes.Next(ofPlanes)
		d.Turn[i] = uint8(firstBin[p] + choosers[p].Next(inPlane[p]))
	}
	return d
}

// turnsOf returns the number of turns of each bin in a period, as the shares of slots. Shares of n slots that come from
// small integers are rounded by less than n parts per billion in a bin: the shortest period that agrees with them is
// the sum of these integers. Other shares have a period of maxTurns, divided by largest remainder.
func turnsOf(bins []bin, n uint64) []slots.Slot {
	var sum uint64
	for _, b := range bins {
		sum += b.share
	}
	out := make([]slots.Slot, len(bins))
	for period := uint64(1); period <= maxTurns; period++ {
		total := uint64(0)
		fits := true
		for i, b := range bins {
			w := (b.share*period + sum/2) / sum
			fits = fits && w > 0 && max(b.share*period, w*sum)-min(b.share*period, w*sum) <= n*period
			out[i].Share = uint32(w)
			total += w
		}
		if fits && total == period {
			return out
		}
	}
	rest := uint64(maxTurns)
	remainder := make([]uint64, len(bins))
	for i, b := range bins {
		w := b.share * maxTurns / sum
		out[i].Share, remainder[i] = uint32(w), b.share*maxTurns%sum
		rest -= w
	}
	for ; rest > 0; rest-- {
		best := 0
		for i, r := range remainder {
			if r > remainder[best] {
				best = i
			}
		}
		out[best].Share++
		remainder[best] = 0
	}
	return out
}

// portsOf returns the ports of a pair.
func portsOf(p *slots.Pair) *connectPorts {
	out := &connectPorts{Vector: p.Vector}
	for i, s := range p.Slots {
		out.Port[i] = s.SourcePort
	}
	return out
}

// fits reports whether the BPF program has room for a pair's slots.
func fits(p *slots.Pair) bool {
	return len(p.Slots) <= maxSlots && !slices.ContainsFunc(p.Slots, func(s slots.Slot) bool { return s.Plane >= maxPlanes })
}
