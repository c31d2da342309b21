package proof

import (
	"slices"
	"time"
)

// busy reports whether there is something to send or read at the next point of the grid.
func (c *Core) busy(now time.Time) bool {
	return len(c.answering)+len(c.asks)+len(c.urgent)+len(c.failing)+len(c.avoided) > 0 || !c.heard.IsZero() && now.Sub(c.heard) < loyalty
}

// regular sends the probes of sub-ports, of silent peers, and of the rotation.
func (c *Core) regular(now time.Time) {
	if c.peers.Len() == 0 {
		return
	}
	if !now.Before(c.idleDue) {
		c.idleDue = c.grid(now.Add(idle - c.quantum()))
		c.probeSilent(now)
	}
	if len(c.answering) == 0 {
		return
	}
	point := c.grid(now).Add(-c.quantum())
	first := c.c.Random.IntN(len(c.due)) // none is always the last one
	for k := range c.due {
		i := (first + k) % len(c.due)
		if now.Before(c.due[i]) || c.tokens < 1 {
			continue
		}
		c.due[i] = c.grid(point.Add(c.interval() - 1 - time.Duration(c.c.Random.Int64N(int64(c.quantum())))))
		c.probeSubPort(now, i)
	}
	for range min(c.found, len(c.due)) { // where some answer, others do
		if c.tokens >= c.c.Rate/reserve {
			c.probeSilent(now)
		}
	}
	c.found = 0
	if c.c.Services > 0 {
		c.probeServices(now)
	}
	if c.avoids() && !now.Before(c.turnDue) {
		c.turnDue = c.grid(now)
		c.probeWays(now)
	}
}

// probeWays gives the rest of the rate to the planes and peers that have had no probe for the longest time.
func (c *Core) probeWays(now time.Time) {
	if len(c.answering) <= sample {
		c.probeOldest(now)
		return
	}
	for n := 0; n < sample && c.tokens >= c.c.Rate/reserve; n++ {
		c.rotate(now)
	}
}

// quantum returns the interval of this server's grid.
func (c *Core) quantum() time.Duration {
	if c.avoids() {
		return quickQuantum
	}
	return quantum
}

// reading returns the interval at which packets are read.
func (c *Core) reading(now time.Time) time.Duration {
	if !c.hurried.IsZero() && now.Sub(c.hurried) < loyalty {
		return quickQuantum
	}
	return c.quantum()
}

// grid returns the next point of this server's grid.
func (c *Core) grid(t time.Time) time.Time { return c.nextPoint(t, c.quantum()) }

// nextPoint returns the next point of a grid.
func (c *Core) nextPoint(t time.Time, step time.Duration) time.Time {
	return t.Round(0).Add(-c.c.Phase).Truncate(step).Add(step + c.c.Phase)
}

// probeSilent sends a probe to a random peer that does not answer.
func (c *Core) probeSilent(now time.Time) {
	if len(c.answering) == len(c.order) {
		return
	}
	for range 32 {
		p := c.order[c.c.Random.IntN(len(c.order))]
		if !p.answering && len(p.paths()) > 0 {
			c.probePeer(now, p)
			return
		}
	}
}

// probePeer sends a probe by the next slot of a peer.
func (c *Core) probePeer(now time.Time, p *peer) {
	source, ok := c.sourceOf(p)
	if !ok || len(p.paths()) == 0 {
		return
	}
	path := p.paths()[int(p.next)%len(p.paths())]
	p.next++
	c.send(now, unit{ID: p.ID, source: source, slot: path.Slot}, path, path.Plane, regular)
}

// probeServices sends a packet to a random service by each sub-port: together, because the first one costs as much as
// some others.
func (c *Core) probeServices(now time.Time) {
	if !now.Before(c.services) {
		c.services, c.owed = c.grid(now.Add(serviceEvery-c.quantum())), len(c.c.SubPorts)
	}
	for ; c.owed > 0 && c.tokens >= 1; c.owed-- {
		if p := c.answerer(c.owed-1, c.c.Random.IntN(len(c.answering)), false); p != nil {
			c.probeService(now, p, c.owed-1)
		}
	}
}

// probeService sends a packet to a random service of a peer by a sub-port.
func (c *Core) probeService(now time.Time, p *peer, subPort int) {
	if source, ok := c.sourceOf(p); ok {
		chosen := c.random(p.paths(), c.uses(subPort))
		c.toService(now, unit{ID: p.ID, source: source, slot: chosen.Slot, service: 1 + c.c.Random.IntN(c.c.Services)}, chosen)
	}
}

// probeSubPort sends a probe by a sub-port to the next peer of its rotation, by another slot in each rotation.
func (c *Core) probeSubPort(now time.Time, subPort int) {
	n, uses := len(c.answering), c.uses(subPort)
	round := c.visits[subPort] / n
	p := c.answerer(subPort, c.visits[subPort]%n, c.avoids())
	c.visits[subPort]++
	if p == nil {
		return
	}
	source, ok := c.sourceOf(p)
	if !ok {
		return
	}
	var paths []Path
	for _, x := range p.paths() {
		if uses(x) {
			paths = append(paths, x)
		}
	}
	chosen := paths[round%len(paths)]
	u := unit{ID: p.ID, source: source, slot: chosen.Slot, big: true}
	u.big = c.known(chosen, u) < enoughUnits // else large ones would hide that small ones are lost, too
	c.send(now, u, chosen, chosen.Plane, regular)
}

// answerer returns the next peer that answers, from a place on, and has a share at a sub-port, nil if there is none; of
// some of them the one that the plane has not probed for the longest time.
func (c *Core) answerer(subPort, from int, oldest bool) (best *peer) {
	n, plane, uses := len(c.answering), c.c.SubPorts[subPort].Plane, c.uses(subPort)
	for i := range min(n, sample) {
		p := c.answering[(from+i)%n]
		if best != nil && !p.planes[plane].probed.Before(best.planes[plane].probed) || !slices.ContainsFunc(p.paths(), uses) {
			continue
		}
		if best = p; !oldest {
			break
		}
	}
	return best
}

// uses returns whether packets of a path leave by a sub-port.
func (c *Core) uses(subPort int) func(Path) bool {
	return func(path Path) bool {
		return path.SubPort == subPort || path.SubPort < 0 && path.Plane == c.c.SubPorts[subPort].Plane
	}
}

// random returns a random one of the paths that are good; there must be one.
func (c *Core) random(paths []Path, good func(Path) bool) (chosen Path) {
	count := 0
	for _, path := range paths {
		if good(path) {
			if count++; c.c.Random.IntN(count) == 0 {
				chosen = path
			}
		}
	}
	return chosen
}

// rotate sends a probe to the next peer of the rotation that answers.
func (c *Core) rotate(now time.Time) {
	for range min(len(c.order), sample) {
		if c.cursor == len(c.order) {
			c.shuffle()
		}
		p := c.order[c.cursor]
		c.cursor++
		if p.answering {
			c.probePeer(now, p)
			return
		}
	}
}

// probeOldest sends probes by the planes toward peers by which none has been sent for the longest time.
func (c *Core) probeOldest(now time.Time) {
	type way struct {
		peer  *peer
		plane int
	}
	var ways []way
	start := c.c.Random.IntN(len(c.answering))
	for i := range c.answering {
		p := c.answering[(start+i)%len(c.answering)]
		for plane := range c.c.Planes {
			if now.Sub(p.planes[plane].probed) >= quickQuantum-slack && slices.ContainsFunc(p.paths(), func(x Path) bool { return x.Plane == plane }) {
				ways = append(ways, way{p, plane})
			}
		}
	}
	slices.SortStableFunc(ways, func(a, b way) int { return a.peer.planes[a.plane].probed.Compare(b.peer.planes[b.plane].probed) })
	for _, w := range ways {
		source, ok := c.sourceOf(w.peer)
		if !ok {
			continue
		}
		if c.tokens < c.c.Rate/reserve {
			return
		}
		path := c.random(w.peer.paths(), func(x Path) bool { return x.Plane == w.plane })
		c.send(now, unit{ID: w.peer.ID, source: source, slot: path.Slot}, path, w.plane, regular)
	}
}
