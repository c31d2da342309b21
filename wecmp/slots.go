package wecmp

// Slot is one queue pair of every (source, destination) pair that uses the vector.
type Slot struct {
	Plane    int    // index of Config.Planes
	SubPort  int    // index of Plane.SubPorts; -1: sprayed over the plane's sub-ports (per-packet)
	SharePPB uint32 // parts per billion of the pair's traffic; over all slots they sum to exactly Parts, or 0 when unreachable
	Parked   bool   // its place carries nothing: send nothing, the share is 0
	// Drain: against what was last reported, the slot has lost addresses to other slots or has itself moved. They may go on
	// only when every transaction outstanding on this slot is complete. Never set under Weak ordering.
	Drain bool
}

// Place is where a slot is: a sub-port (per-flow), or a plane with SubPort -1 (per-packet).
type Place struct{ Plane, SubPort int }

// homes deals slots to places like cards: the first sub-port of every plane in turn, then the second of every plane, and
// again from the start, so that any number of slots is spread over planes as evenly as it can be. In per-packet mode the
// places are the planes themselves. The order depends on the configuration alone.
func homes(cfg *Config, start []int) (home []uint16) {
	var order []uint16
	if cfg.Mode == PerPacket {
		for p := range cfg.Planes {
			order = append(order, uint16(p))
		}
	} else {
		for s := range MaxSubPorts {
			for p := range cfg.Planes {
				if s < len(cfg.Planes[p].SubPorts) {
					order = append(order, uint16(start[p]+s))
				}
			}
		}
	}
	slots := cfg.Slots
	if slots == 0 {
		slots = len(order)
	}
	for i := range slots {
		home = append(home, order[i%len(order)])
	}
	return home
}

// quotas says how many slots each place is to hold under Remap: one for each live place, the rest by Webster's divisor
// method on the places' capacities, ties to the earlier in the order of homes. A divisor method is population monotone:
// when one place's capacity falls no other place loses a slot.
//
// Comparisons are exact: on the whole member weights when these are exact, else on the fractions they stand for.
func (e *Engine) quotas(g *group, planes, sub []uint64, exactMembers bool) {
	left := len(e.home)
	for i, live := range g.live {
		g.quota[i] = 0
		if live {
			g.quota[i] = 1
			left--
		}
	}
	// The capacity of a place is whole[i] or, when those are not exact, planes[p]·sub[i]/sums[p].
	whole := e.memberScratch
	if e.cfg.Mode == PerPacket {
		whole, exactMembers = planes, true
	}
	for ; left > 0; left-- {
		best := -1
		for _, at := range e.order {
			i := int(at)
			if !g.live[i] {
				continue
			}
			if best < 0 {
				best = i
				continue
			}
			// i is ahead when capacity(i)/(2·quota(i)+1) > capacity(best)/(2·quota(best)+1).
			di, db := 2*uint64(g.quota[i])+1, 2*uint64(g.quota[best])+1
			ahead := false
			if exactMembers {
				ahead = mul64(whole[i], db).cmp(mul64(whole[best], di)) > 0
			} else {
				pi, pb := e.ports[i].plane, e.ports[best].plane
				// sub and sums fit 32 and 38 bits, the divisors 14: each pair of them fits one factor.
				ahead = mul4(planes[pi], sub[i], e.sums[pb], db).cmp(mul4(planes[pb], sub[best], e.sums[pi], di)) > 0
			}
			if ahead {
				best = i
			}
		}
		g.quota[best]++
	}
}

// remap moves slots between places until each holds its quota: only from places above their quota to places below it, one
// move a slot, so exactly half the sum of |quota - held| moves. A slot whose home has room goes home; those away from home
// leave before those at home; the rest go to the place that lacks most, ties to the earlier in the order of homes.
//
// When the quotas are those of full health every slot goes home, whatever happened before: recovery restores exactly what
// was. (That is the same number of moves unless a single step took from one place while another returned.)
func (e *Engine) remap(place []uint16, g *group) {
	if !g.reachable {
		return // nothing better to move to: slots are parked where they are
	}
	atHome := true
	for i, q := range g.quota {
		e.lacks[i] = int(q)
		atHome = atHome && q == e.homeCount[i]
	}
	if atHome {
		copy(place, e.home)
		return
	}
	for _, p := range place {
		e.lacks[p]--
	}
	for s, p := range place {
		if h := e.home[s]; h != p && e.lacks[p] < 0 && e.lacks[h] > 0 {
			e.moveSlot(place, s, h)
		}
	}
	for _, home := range [2]bool{false, true} {
		for s := len(place) - 1; s >= 0; s-- {
			if p := place[s]; e.lacks[p] < 0 && (p == e.home[s]) == home {
				to := e.order[0]
				for _, i := range e.order {
					if e.lacks[i] > e.lacks[to] {
						to = i
					}
				}
				e.moveSlot(place, s, to)
			}
		}
	}
}

func (e *Engine) moveSlot(place []uint16, slot int, to uint16) {
	e.lacks[place[slot]]++
	e.lacks[to]--
	place[slot] = to
}

// share fills a vector's slots: the traffic of a plane is shared evenly by the live slots on it
// (draft-xu-rtgwg-fare-in-sun-02, Section 3.1), to the part: the first slots of a plane take what does not divide.
func (e *Engine) share(v *vector, g *group) {
	clear(v.live)
	for _, p := range v.place {
		if g.live[p] {
			v.live[e.placePlane[p]]++
		}
	}
	var each, extra [MaxPlanes]uint32
	for p, n := range v.live {
		if n != 0 {
			each[p], extra[p] = g.shares[p]/uint32(n), g.shares[p]%uint32(n)
		}
	}
	slots := v.slots[:len(v.place)]
	for s, place := range v.place {
		p, live, slot := e.placePlane[place], g.live[place], &slots[s]
		slot.Plane, slot.SubPort, slot.SharePPB = int(p), e.placeSub[place], 0
		slot.Parked, slot.Drain = !live, false
		if live {
			slot.SharePPB = each[p]
			if extra[p] > 0 {
				slot.SharePPB++
				extra[p]--
			}
		}
	}
}
