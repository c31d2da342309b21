package wecmp

import "slices"

// Slot is one queue pair of every (source, destination) pair that uses the vector.
type Slot struct {
	Plane    int    // index of Config.Planes
	SubPort  int    // index of Plane.SubPorts; -1: sprayed over the plane's sub-ports (per-packet)
	SharePPB uint32 // parts per billion of the pair's traffic; over all slots they sum to exactly Parts, or to 0 if unreachable
	Parked   bool   // the place carries nothing: the slot must not send, and its share is 0
	// Drain means that the slot has moved or has lost addresses to other slots since the last report. Those addresses
	// may continue only after every transaction outstanding on this slot has completed. It is never set under Weak
	// ordering.
	Drain bool
}

// Place is the place of a slot: a sub-port (per-flow), or a plane with SubPort -1 (per-packet).
type Place struct{ Plane, SubPort int }

// placesInTurn returns the places in the order in which they get slots: the first sub-port of every plane, then the
// second of every plane, and so on. In per-packet mode the places are the planes themselves. The order depends on the
// configuration alone.
func placesInTurn(cfg *Config, start []int) (order []uint16) {
	if cfg.Mode == PerPacket {
		for p := range cfg.Planes {
			order = append(order, uint16(p))
		}
		return order
	}
	for s := range MaxSubPorts {
		for p := range cfg.Planes {
			if s < len(cfg.Planes[p].SubPorts) {
				order = append(order, uint16(start[p]+s))
			}
		}
	}
	return order
}

// homes assigns slots to places: those of Config.Homes, otherwise in turn, and then from the start, so that any number
// of slots is spread over planes as evenly as possible. It returns nil if Config.Homes is not valid.
func homes(cfg *Config, start []int, order []uint16) (home []uint16) {
	if cfg.Homes == nil {
		for i := range cfg.slots() {
			home = append(home, order[i%len(order)])
		}
		return home
	}
	used := make([]bool, len(order))
	for _, h := range cfg.Homes {
		at := cfg.placeIndex(start, h)
		if at < 0 {
			return nil
		}
		used[at] = true
		home = append(home, uint16(at))
	}
	if slices.Contains(used, false) {
		return nil
	}
	return home
}

// placeIndex returns the index of a place, or -1 if the configuration does not have it.
func (c *Config) placeIndex(start []int, p Place) int {
	switch {
	case p.Plane < 0 || p.Plane >= len(c.Planes):
		return -1
	case c.Mode == PerPacket && p.SubPort == -1:
		return p.Plane
	case c.Mode == PerPacket || p.SubPort < 0 || p.SubPort >= len(c.Planes[p.Plane].SubPorts):
		return -1
	}
	return start[p.Plane] + p.SubPort
}

// Rehome returns the homes of the slots after a change of planes or sub-ports. was has the previous home of each slot
// by its place in cfg; Plane is -1 if cfg does not have it. Every place gets as many slots as in turn, and a slot keeps
// its home unless the home has become too small for all of its slots: then the slots with the highest numbers leave.
func Rehome(cfg Config, was []Place) []Place {
	cfg.Homes = nil
	l := newLayout(&cfg)
	room := make([]int, len(l.order))
	for _, h := range l.home {
		room[h]++
	}
	out := make([]Place, len(l.home))
	for s := range out {
		out[s].Plane = -1
		if s < len(was) {
			if at := cfg.placeIndex(l.start, was[s]); at >= 0 && room[at] > 0 {
				room[at]--
				out[s] = was[s]
			}
		}
	}
	for s := range out {
		for i := 0; out[s].Plane < 0; i++ {
			if at := l.order[i]; room[at] > 0 {
				room[at]--
				out[s] = l.place(&cfg, at)
			}
		}
	}
	return out
}

// place returns a place by its index.
func (l *layout) place(cfg *Config, at uint16) Place {
	if cfg.Mode == PerPacket {
		return Place{int(at), -1}
	}
	return Place{int(l.ports[at].plane), int(l.ports[at].sub)}
}

// quotas sets the number of slots that each place holds under Remap: one for each live place, and the rest by Webster's
// divisor method on the places' capacities, ties to the earlier in the order of homes. A divisor method is population
// monotone: if one place's capacity falls, no other place loses a slot.
//
// Comparisons are exact: on the integer member weights if these are exact, otherwise on the fractions that they
// approximate.
func (e *Engine) quotas(g *group, planes, sub []uint64, exactMembers bool) {
	left := len(e.home)
	for i, live := range g.live {
		g.quota[i] = 0
		if live {
			g.quota[i] = 1
			left--
		}
	}
	// The capacity of a place is whole[i] or, if those are not exact, planes[p]·sub[i]/sums[p].
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
			// i is ahead if capacity(i)/(2·quota(i)+1) > capacity(best)/(2·quota(best)+1).
			di, db := 2*uint64(g.quota[i])+1, 2*uint64(g.quota[best])+1
			ahead := false
			if exactMembers {
				ahead = mul64(whole[i], db).cmp(mul64(whole[best], di)) > 0
			} else {
				pi, pb := e.ports[i].plane, e.ports[best].plane
				// sub and sums fit 32 and 38 bits, the divisors 14, so the products below fit.
				ahead = mul4(planes[pi], sub[i], e.sums[pb], db).cmp(mul4(planes[pb], sub[best], e.sums[pi], di)) > 0
			}
			if ahead {
				best = i
			}
		}
		g.quota[best]++
	}
}

// remap moves slots between places until each holds its quota: only from places above their quota to places below it,
// each slot at most once, so exactly half the sum of |quota - held| slots move. A slot whose home has room moves home.
// Slots away from home leave a place before those at home; they move to the place that lacks most, ties to the earlier
// in the order of homes.
//
// If the quotas are those of full health, every slot moves home, whatever its history: recovery restores the original
// assignment. (The number of moves is the same, unless a single step took capacity from one place while another
// recovered.)
func (e *Engine) remap(place []uint16, g *group) {
	if !g.reachable {
		return // no place is better: slots are parked where they are
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

// share fills a vector's slots: the share of a place is divided evenly among its slots, and the first of them take the
// remainder. A plane's slots have equal shares (draft-xu-rtgwg-fare-in-sun-02, Section 3.1.1) if its sub-ports have
// equal weights and equal numbers of slots. Otherwise equal slots would overload the slower sub-ports, or those with
// more slots, so the sub-ports' weights decide.
func (e *Engine) share(v *vector, g *group) {
	clear(v.live)
	for _, p := range v.place {
		if g.live[p] {
			v.live[p]++
		}
	}
	rank := e.rankScratch // slots seen so far per place
	clear(rank)
	slots := v.slots[:len(v.place)]
	for s, place := range v.place {
		live, slot := g.live[place], &slots[s]
		slot.Plane, slot.SubPort, slot.SharePPB = int(e.placePlane[place]), e.placeSub[place], 0
		slot.Parked, slot.Drain = !live, false
		if live {
			n, parts := uint32(v.live[place]), g.placeShares[place]
			slot.SharePPB = parts / n
			if rank[place] < parts%n {
				slot.SharePPB++
			}
			rank[place]++
		}
	}
}

// HomePlaces returns the places of the slots in full health.
func (c *Config) HomePlaces() []Place {
	l := newLayout(c)
	out := make([]Place, len(l.home))
	for i, h := range l.home {
		out[i] = l.place(c, h)
	}
	return out
}
