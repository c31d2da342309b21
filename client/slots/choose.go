package slots

import "github.com/fared/fared/wecmp"

// Chooser chooses slots by their shares, exactly over time: while the shares stay, each slot's number of choices
// differs from its share of all choices by less than the number of slots, and is exact after every period (10^9 choices
// divided by the shares' greatest common divisor). It is smooth weighted round robin. The zero value is ready to use. A
// chooser is not safe for concurrent use; each sender has a separate one.
type Chooser struct{ credit []int64 }

// Next returns the index of the slot for the next packet, message or queue pair, or -1 if every share is 0. Slots may
// differ from those of the last call: parked slots lose their credit.
func (c *Chooser) Next(slots []Slot) int {
	for len(c.credit) < len(slots) {
		c.credit = append(c.credit, 0)
	}
	best, total := -1, int64(0)
	for i := range slots {
		share := int64(slots[i].Share)
		if share == 0 {
			c.credit[i] = 0
			continue
		}
		total += share
		c.credit[i] += share
		if best < 0 || c.credit[i] > c.credit[best] {
			best = i
		}
	}
	if best >= 0 {
		c.credit[best] -= total
	}
	return best
}

// ForKey returns the index of the slot for a memory address or a hash key, or -1 if every share is 0: equal keys use
// equal slots while the shares stay, and a changed share moves only the keys that must move. It is wecmp.Rendezvous.
func ForKey(slots []Slot, key uint64) int {
	var buf [64]uint32
	shares := buf[:0]
	for i := range slots {
		shares = append(shares, slots[i].Share)
	}
	return wecmp.Rendezvous(shares, key)
}
