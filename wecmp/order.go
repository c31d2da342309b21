package wecmp

import "math/bits"

// SlotFor returns the slot that an address (or a hash key: Partial ordering; or a packet's number: Weak ordering) uses, or
// -1 when the vector is not reachable or not there. Equal addresses use equal slots as long as weights stay
// (draft-xu-rtgwg-fare-in-sun-02, Section 4, "all transactions targeting the same memory address are hashed to the same QP").
//
// It is a weighted rendezvous: every live slot draws an exponentially distributed number from the address whose rate is the
// slot's weight, capacity(plane)/live slots(plane); the least wins. A slot's draw depends on the address and its own weight
// alone, and comparisons are exact, so when a plane's weight falls only addresses of its slots move, and no more of them than
// the share it lost, up to the draw's randomness; when it rises they come from all others alike, and no more than it gained.
func (e *Engine) SlotFor(vector uint32, address uint64) int {
	v := e.vector(vector)
	if v == nil {
		return -1
	}
	g := e.groups[v.group]
	if !g.reachable {
		return -1
	}
	key := keyOf(address)
	best := -1
	var bestDraw, bestCapacity uint64
	for s := range v.slots {
		slot := &v.slots[s]
		if slot.Parked {
			continue
		}
		// draw / (capacity/live), the draw below 2^52 and live at most 2^12.
		draw := drawOf(key, s) * uint64(v.live[slot.Plane])
		capacity := g.capacity[slot.Plane]
		if best < 0 || mul64(draw, bestCapacity).cmp(mul64(bestDraw, capacity)) < 0 {
			best, bestDraw, bestCapacity = s, draw, capacity
		}
	}
	return best
}

// Rendezvous is SlotFor for who knows the slots' shares only, as fare.v1.Slot.share_ppb gives them: the slot that an address or
// hash key uses, or -1 when every share is 0. It gives SlotFor's answer but for addresses (about one in 10^9) where the rounding of shares
// decides. Two slots change places for no address but by their own shares.
func Rendezvous(shares []uint32, address uint64) int {
	key := keyOf(address)
	best := -1
	var bestDraw uint64
	for s, share := range shares {
		if share == 0 {
			continue
		}
		draw := drawOf(key, s)
		if best < 0 || mul64(draw, uint64(shares[best])).cmp(mul64(bestDraw, uint64(share))) < 0 {
			best, bestDraw = s, draw
		}
	}
	return best
}

func keyOf(address uint64) uint64 { return mix64(address + 0x9e3779b97f4a7c15) }

// drawOf is slot s's exponentially distributed number for a key, below 2^52.
func drawOf(key uint64, s int) uint64 { return minusLog2(mix64(key ^ uint64(s+1)*0xd1342543de82ef95)) }

// drain returns, ascending, the slots that have lost addresses between what was last reported of a vector and another's
// present state, and those that have moved. A slot loses addresses when its weight grew by a smaller factor than another's.
func (e *Engine) drain(was, is *vector) []uint16 {
	from := len(e.drains)
	g := e.groups[is.group]
	// weight(slot) = capacity/live, as fractions; gain(slot) = now/then = (capacity·thenLive) / (live·thenCapacity).
	top, appeared := -1, false
	for s := range is.slots {
		a, b := &was.toldSlots[s], &is.slots[s]
		switch {
		case b.Parked:
		case a.Parked:
			appeared = true // from nothing: it takes from all
		case top < 0 || e.gains(was, is, g, s, top) > 0:
			top = s
		}
	}
	for s := range is.slots {
		a, b := &was.toldSlots[s], &is.slots[s]
		if a.Parked {
			continue
		}
		moved := a.Plane != b.Plane || a.SubPort != b.SubPort
		if moved || b.Parked || appeared || e.gains(was, is, g, s, top) < 0 {
			e.drains = append(e.drains, uint16(s))
		}
	}
	if len(e.drains) == from {
		return nil
	}
	return e.drains[from:len(e.drains):len(e.drains)]
}

// gains compares by what factor two slots' weights grew; both are live then and now.
func (e *Engine) gains(was, is *vector, g *group, s, t int) int {
	ps, qs := was.toldSlots[s].Plane, is.slots[s].Plane
	pt, qt := was.toldSlots[t].Plane, is.slots[t].Plane
	if ps == pt && qs == qt {
		return 0
	}
	return mul4(g.capacity[qs], uint64(was.toldLive[ps]), uint64(is.live[qt]), was.toldCapacity[pt]).
		cmp(mul4(g.capacity[qt], uint64(was.toldLive[pt]), uint64(is.live[qs]), was.toldCapacity[ps]))
}

// mix64 is the finalizer of MurmurHash3 with Stafford's constants (variant 13): a permutation of 64-bit integers.
func mix64(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

const (
	logFraction = 46 // bits after the point
	logSteps    = 10 // the table has 2^10 intervals
)

// logTable holds log2(1 + i/2^logSteps).
var logTable = makeLogTable()

// makeLogTable computes binary logarithms digit by digit, in whole numbers so that every machine has the same: squaring
// the mantissa doubles its logarithm, and whether it reaches 2 is the next digit.
func makeLogTable() (table [1<<logSteps + 1]uint64) {
	for i := range 1 << logSteps {
		x := uint64(1)<<63 | uint64(i)<<(63-logSteps) // 1 + i/2^logSteps, 63 bits after the point
		for digit := logFraction - 1; digit >= 0; digit-- {
			hi, _ := bits.Mul64(x, x) // 62 bits after the point
			if hi>>63 != 0 {
				table[i] |= 1 << digit
				x = hi
			} else {
				x = hi << 1
			}
		}
	}
	table[1<<logSteps] = 1 << logFraction
	return table
}

// minusLog2 returns -log2(h/2^64) with logFraction bits after the point, at least 1 and below 2^52: an exponentially
// distributed number of a uniform h.
func minusLog2(h uint64) uint64 {
	zeros := bits.LeadingZeros64(h | 1)
	x := (h | 1) << zeros
	i := x << 1 >> (64 - logSteps)
	const rest = 63 - logSteps
	inside := x & (1<<rest - 1)
	up, _ := bits.Mul64(logTable[i+1]-logTable[i], inside<<(64-rest))
	log := logTable[i] + up
	return min(max(uint64(zeros+1)<<logFraction-log, 1), 1<<52-1)
}
