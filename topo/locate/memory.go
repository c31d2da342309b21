package locate

import "time"

// hold is the time for which a part is found before it is named, if no node reports it itself: bandwidths that servers
// learn change before the server at the cable has reported.
const hold = 500 * time.Millisecond

// Memory keeps since when parts have been found. The zero value knows none.
type Memory struct{ first map[found]time.Time }

type found struct{ part, fault string }

// Settle returns the parts to name among those of Locate now: all have a time. Parts that have not been found for long
// enough are left out; then wait is the time until the next one may be named, else 0.
func (m *Memory) Settle(now time.Time, all []Guilty) (named []Guilty, wait time.Duration) {
	first := map[found]time.Time{}
	for _, g := range all {
		key := found{g.Part, g.Fault}
		at, known := m.first[key]
		if !known {
			at = now
		}
		first[key] = at
		inferred := g.Since.IsZero() && g.Fault != FaultLoss && g.Fault != FaultCommunity
		if left := hold - now.Sub(at); inferred && left > 0 {
			if wait == 0 || left < wait {
				wait = left
			}
			continue
		}
		if g.Since.IsZero() {
			g.Since = at
		}
		named = append(named, g)
	}
	m.first = first
	return named, wait
}
