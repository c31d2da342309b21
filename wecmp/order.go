package wecmp

import "math/bits"

// Rendezvous returns the slot for an address, or for a hash key under Partial ordering, by the slots' shares, as in
// fare.v1.Slot.share_ppb. It returns -1 if every share is 0. Equal addresses use equal slots as long as the shares stay
// (draft-xu-rtgwg-fare-in-sun-02, Section 4, "all transactions targeting the same memory address are hashed to the same
// QP").
//
// It is a weighted rendezvous: every live slot draws an exponentially distributed number from the address, at the rate
// of its share, and the least draw wins. A slot's draw depends only on the address and the share, and comparisons are
// exact. So an address moves between two slots only if one of their shares changes, and if a plane's share falls, no
// more addresses move than the lost share, up to the randomness of the draws.
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

// drawOf returns slot s's exponentially distributed number for a key, below 2^52.
func drawOf(key uint64, s int) uint64 { return minusLog2(mix64(key ^ uint64(s+1)*0xd1342543de82ef95)) }

// drain returns, in ascending order, the slots that have moved or have lost addresses between the last reported state
// of vector was and the present state of vector is. A slot loses addresses if its weight grew by a smaller factor than
// another slot's.
func (e *Engine) drain(was, is *vector) []uint16 {
	from := len(e.drains)
	g := e.groups[is.group]
	// weight(slot) = rate/live, as fractions; gain(slot) = now/then = (rate·thenLive) / (live·thenRate).
	top, appeared := -1, false
	for s := range is.slots {
		a, b := &was.reportedSlots[s], &is.slots[s]
		switch {
		case b.Parked:
		case a.Parked:
			appeared = true // it had no weight, so it takes addresses from all slots
		case top < 0 || e.gains(was, is, g, s, top) > 0:
			top = s
		}
	}
	for s := range is.slots {
		a, b := &was.reportedSlots[s], &is.slots[s]
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

// gains compares the factors by which two slots' weights grew; both are live in both states. The rates of the two
// states may have different units, which cancel out.
func (e *Engine) gains(was, is *vector, g *group, s, t int) int {
	ps, qs := e.placeOf(&was.reportedSlots[s]), is.place[s]
	pt, qt := e.placeOf(&was.reportedSlots[t]), is.place[t]
	if ps == pt && qs == qt {
		return 0
	}
	return mul4(g.rate[qs], uint64(was.reportedLive[ps]), uint64(is.live[qt]), was.reportedRate[pt]).
		cmp(mul4(g.rate[qt], uint64(was.reportedLive[pt]), uint64(is.live[qs]), was.reportedRate[ps]))
}

// placeOf returns the index of a slot's place.
func (e *Engine) placeOf(s *Slot) int {
	if s.SubPort < 0 {
		return s.Plane
	}
	return e.start[s.Plane] + s.SubPort
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

// makeLogTable computes binary logarithms digit by digit, in integers so that every machine gets the same table:
// squaring the mantissa doubles its logarithm, and the next digit is 1 if the square reaches 2.
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

// minusLog2 returns -log2(h/2^64) with logFraction bits after the point, at least 1 and below 2^52. For a uniform h the
// result is exponentially distributed.
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
