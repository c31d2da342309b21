package proof

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"
)

const (
	// direct is the slot of the path of packets without a slot: they leave by a sub-port whatever the weights.
	direct = -2
	// holdFirst is the time for which all probes have to return before a plane has its weight again. Each time that it
	// is lost again within relapse, the time is twice as long, at most holdLast.
	holdFirst, holdLast, relapse = 2 * time.Second, time.Minute, 10 * time.Minute
	// cureProofs is the least number of these probes, and cureEvery their least interval; all of them together have one
	// part of cureShare of the rate.
	cureProofs, cureEvery, cureShare = 4, 500 * time.Millisecond, 4
	// wide is the number of peers toward which a plane is lost from which on, without any proof of it meanwhile, it is
	// lost toward all.
	wide = 3
	// maxPast bounds the planes whose relapse is noticed.
	maxPast = 1024
)

// Direct reports whether the packets of a path leave by its sub-port whatever the weights, because it has no slot.
func (p Path) Direct() bool { return p.Slot == direct }

// Avoidance is the begin, or the end, of an avoidance: packets toward a peer leave a plane, or return to it.
type Avoidance struct {
	ID
	Plane int
	On    bool
}

// way is a plane toward a peer.
type way struct {
	ID
	plane int
}

// avoidance is a way without weight. own means that its probes show that it is lost, and will show that it works again;
// the others depend on those of their plane.
type avoidance struct {
	verdict
	source netip.Addr // of an example
	own    bool
	since  time.Time
	hold   time.Duration
	next   time.Time // of the next probe
	turn   int       // of sub-ports
	first  time.Time // of the answers in a row
	proofs int
}

// losing is a way whose probes are lost, which is not avoided yet.
type losing struct {
	verdict
	since time.Time
}

// past is an avoidance that has ended.
type past struct {
	ended time.Time
	hold  time.Duration
}

// SetAvoid sets Config.Direct and Config.Avoid. Without both of them all avoidances end.
func (c *Core) SetAvoid(now time.Time, directly bool, after time.Duration) {
	if directly == c.c.Direct && after == c.c.Avoid {
		return
	}
	if c.c.Direct, c.c.Avoid = directly, after; directly && after > 0 {
		return
	}
	clear(c.losing)
	for _, w := range c.waysAvoided() {
		c.unavoid(now, w)
	}
	c.wake = time.Time{}
}

// avoids reports whether lost ways are avoided: losses are sought and judged faster then, at the expense of the rate.
func (c *Core) avoids() bool { return c.c.Avoid > 0 && c.c.Direct }

// TakeAvoidances returns the changes since the last call.
func (c *Core) TakeAvoidances() []Avoidance {
	out := c.avoidances
	c.avoidances = nil
	return out
}

// waysAvoided returns the avoided ways in a fixed order.
func (c *Core) waysAvoided() []way {
	return slices.SortedFunc(maps.Keys(c.avoided), func(a, b way) int {
		return cmp.Or(compareIDs(a.ID, b.ID), cmp.Compare(a.plane, b.plane))
	})
}

// lose notes that a way is lost in our direction, on all its sub-ports.
func (c *Core) lose(w way, v verdict, since time.Time) {
	if c.avoids() && v.direction != Theirs && c.losing[w].since.IsZero() && c.avoided[w] == nil {
		c.losing[w] = losing{v, since}
	}
}

// avoid begins the avoidances that are due, and sends probes by those that exist.
func (c *Core) avoid(now time.Time) {
	for w, l := range c.losing {
		p := c.peers.of(w.ID)
		switch {
		case p == nil || !p.answering || p.planes[w.plane].proved.After(l.since):
			delete(c.losing, w)
		case now.Sub(l.since) >= c.c.Avoid:
			delete(c.losing, w)
			c.begin(now, p, w.plane, l.verdict, true)
		}
	}
	if len(c.avoided) == 0 {
		return
	}
	for plane := range c.c.Planes {
		c.avoidWide(now, plane)
	}
	c.probeAvoided(now)
}

// begin avoids a plane toward a peer, unless it is the last one that works, or another one is avoided.
func (c *Core) begin(now time.Time, p *peer, plane int, v verdict, own bool) {
	other := false
	for _, path := range p.paths() {
		other = other || path.Plane != plane && !c.fails(p.ID, path)
	}
	for i := range c.c.Planes {
		if c.avoided[way{p.ID, i}] != nil {
			return
		}
	}
	source, ok := c.sourceOf(p)
	if !other || !ok {
		return
	}
	w := way{p.ID, plane}
	a := &avoidance{verdict: v, source: source, own: own, since: now, hold: holdFirst, next: now.Add(cureEvery)}
	if before, ok := c.past[w]; ok && now.Sub(before.ended) < relapse {
		a.hold = min(2*before.hold, holdLast)
	}
	delete(c.past, w)
	c.avoided[w] = a
	c.avoidances = append(c.avoidances, Avoidance{p.ID, plane, true})
}

// avoidWide avoids a plane toward all peers if none has proved it since it was lost toward some.
func (c *Core) avoidWide(now time.Time, plane int) {
	n, since := 0, now
	var v verdict
	for w, a := range c.avoided {
		if w.plane == plane && a.own {
			n++
			if a.since.Before(since) {
				since, v = a.since, a.verdict
			}
		}
	}
	if n < wide || c.proofs[plane].After(since) {
		return
	}
	for _, p := range c.answering {
		if slices.ContainsFunc(p.paths(), func(x Path) bool { return x.Plane == plane }) {
			c.begin(now, p, plane, v, false)
		}
	}
}

// unavoid ends an avoidance.
func (c *Core) unavoid(now time.Time, w way) {
	maps.DeleteFunc(c.past, func(_ way, p past) bool { return now.Sub(p.ended) >= relapse })
	if len(c.past) < maxPast {
		c.past[w] = past{now, c.avoided[w].hold}
	}
	delete(c.avoided, w)
	c.avoidances = append(c.avoidances, Avoidance{w.ID, w.plane, false})
}

// probeAvoided sends the due probes by avoided ways, and ends those of peers that are gone, and those that depend on no
// other any more.
func (c *Core) probeAvoided(now time.Time) {
	own := map[int]int{}
	for w, a := range c.avoided {
		if a.own && c.peers.of(w.ID) != nil {
			own[w.plane]++
		}
	}
	n := 0
	for _, x := range own {
		n += x
	}
	every := max(cureEvery, time.Duration(float64(n*cureShare)/c.c.Rate*float64(time.Second)))
	for _, w := range c.waysAvoided() {
		a, p := c.avoided[w], c.peers.of(w.ID)
		switch {
		case p == nil || !a.own && own[w.plane] == 0:
			c.unavoid(now, w)
		case a.own && !now.Before(a.next):
			a.next = c.grid(now.Add(every - quickQuantum))
			c.probeDirect(now, p, w.plane, a)
		}
	}
}

// probeDirect sends a probe by the next sub-port of a plane that has no weight.
func (c *Core) probeDirect(now time.Time, p *peer, plane int, a *avoidance) {
	var all []int
	for i, sp := range c.c.SubPorts {
		if sp.Plane == plane {
			all = append(all, i)
		}
	}
	source, ok := c.sourceOf(p)
	if !ok || len(all) == 0 {
		return
	}
	a.turn++
	c.send(now, unit{ID: p.ID, source: source, slot: direct}, Path{direct, plane, all[a.turn%len(all)]}, plane, cure)
}

// cureAnswered counts an answer by an avoided way: after enough of them in a row the way has its weight again.
func (c *Core) cureAnswered(now time.Time, s *sent, a *Packet) {
	w := way{s.ID, s.path.Plane}
	x := c.avoided[w]
	if x == nil || a.Flags&FlagOtherReturn != 0 {
		return
	}
	if x.proofs == 0 {
		x.first = s.at
	}
	if x.proofs++; x.proofs >= cureProofs && now.Sub(x.first) >= x.hold {
		c.unavoid(now, w)
		c.wake = time.Time{}
	}
}

// cureLost begins the count again.
func (c *Core) cureLost(s *sent) {
	if x := c.avoided[way{s.ID, s.path.Plane}]; x != nil {
		x.proofs = 0
	}
}

// avoidedFindings returns a finding for each plane that is avoided.
func (c *Core) avoidedFindings() (out []Finding) {
	byPlane := map[int]*Finding{}
	for _, w := range c.waysAvoided() {
		a := c.avoided[w]
		f := byPlane[w.plane]
		if f == nil {
			f = &Finding{
				Problem: Lost, Direction: a.direction, Plane: c.c.Planes[w.plane], Expected: a.expected, Seen: a.seen,
				Source: a.source.String(), Destination: w.Address.String(), Slot: allSlots, Since: a.since, Avoided: true,
			}
			byPlane[w.plane] = f
		}
		f.Pairs++
		if a.since.Before(f.Since) {
			f.Since = a.since
		}
	}
	for _, f := range byPlane {
		out = append(out, *f)
	}
	return out
}
