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
	if len(c.peers) == 0 {
		return
	}
	if !now.Before(c.idleDue) {
		c.idleDue = now.Add(idle)
		c.probeSilent(now)
	}
	if len(c.answering) == 0 {
		return
	}
	ran := false
	first := c.c.Random.IntN(len(c.due)) // none is always the last one
	for k := range c.due {
		i := (first + k) % len(c.due)
		if now.Before(c.due[i]) || c.tokens < 1 {
			continue
		}
		ran = true
		step := c.interval()
		c.due[i] = c.grid(now.Add(step - time.Duration(c.c.Random.Int64N(int64(quantum)))))
		c.probeSubPort(now, i, 0)
	}
	if ran && c.c.Services > 0 && c.tokens >= c.c.Rate/reserve {
		c.probeServices(now)
	}
	switch { // the rotation has the rest
	case !c.avoids():
		if ran && c.tokens >= c.c.Rate/reserve {
			c.rotate(now)
		}
	case now.Before(c.turnDue):
	case len(c.answering) <= sample:
		c.turnDue = c.grid(now)
		c.probeOldest(now)
	default:
		c.turnDue = c.grid(now)
		for n := 0; n < sample && c.tokens >= c.c.Rate/reserve; n++ {
			c.rotate(now)
		}
	}
}

// grid returns the next point of this server's grid.
func (c *Core) grid(t time.Time) time.Time {
	return t.Round(0).Add(-c.c.Phase).Truncate(quantum).Add(quantum + c.c.Phase)
}

// probeSilent sends a probe to a random peer that does not answer.
func (c *Core) probeSilent(now time.Time) {
	if len(c.answering) == len(c.order) {
		return
	}
	for range 32 {
		p := c.order[c.c.Random.IntN(len(c.order))]
		if !p.answering && len(p.Paths) > 0 {
			c.probePeer(now, p)
			return
		}
	}
}

// probePeer sends a probe by the next slot of a peer.
func (c *Core) probePeer(now time.Time, p *peer) {
	source, ok := c.sourceOf(p)
	if !ok || len(p.Paths) == 0 {
		return
	}
	path := p.Paths[p.next%len(p.Paths)]
	p.next++
	c.send(now, unit{ID: p.ID, source: source, slot: path.Slot}, path, path.Plane, regular)
}

// probeServices sends a packet to a random service by the next sub-port; by more if there are more than six.
func (c *Core) probeServices(now time.Time) {
	n := len(c.c.SubPorts)
	for range (n + 5) / 6 {
		c.probeSubPort(now, c.turn%n, 1+c.c.Random.IntN(c.c.Services))
		c.turn++
	}
}

// probeSubPort sends a probe, or a packet to a service, by a sub-port to a random peer that answers and has a share
// there.
func (c *Core) probeSubPort(now time.Time, subPort, service int) {
	n := len(c.answering)
	start := c.c.Random.IntN(n)
	var best *peer
	for i := range min(n, sample) {
		p := c.answering[(start+i)%n]
		plane := c.c.SubPorts[subPort].Plane
		if best != nil && !p.planes[plane].probed.Before(best.planes[plane].probed) || !slices.ContainsFunc(p.Paths, c.uses(subPort)) {
			continue
		}
		best = p
		if service > 0 || !c.avoids() {
			break
		}
	}
	if best == nil {
		return
	}
	chosen := c.random(best.Paths, c.uses(subPort))
	source, ok := c.sourceOf(best)
	switch {
	case !ok:
	case service > 0:
		c.toService(now, unit{ID: best.ID, source: source, slot: chosen.Slot, service: service}, chosen)
	default:
		u := unit{ID: best.ID, source: source, slot: chosen.Slot, big: true}
		u.big = c.known(chosen, u) < enoughUnits // else large ones would hide that small ones are lost, too
		c.send(now, u, chosen, chosen.Plane, regular)
	}
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
			if now.Sub(p.planes[plane].probed) >= quantum-slack && slices.ContainsFunc(p.Paths, func(x Path) bool { return x.Plane == plane }) {
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
		path := c.random(w.peer.Paths, func(x Path) bool { return x.Plane == w.plane })
		c.send(now, unit{ID: w.peer.ID, source: source, slot: path.Slot}, path, w.plane, regular)
	}
}
