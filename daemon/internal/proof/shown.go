package proof

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// Shown is the knowledge about a peer.
type Shown struct {
	// Proved is the number of planes of Planes, those with a share, that are proved and of which nothing fails.
	Proved, Planes int
	// Reason is why nothing is proved, "" if something is.
	Reason string
	// Last is the time of the last proof.
	Last time.Time
	// Loss is the part of the recent probes that were lost, RoundTrip the mean of the planes' round trips.
	Loss      float64
	RoundTrip time.Duration
}

// Show returns the knowledge about a peer.
func (c *Core) Show(id ID) (out Shown) {
	p := c.peers.of(id)
	if p == nil {
		return Shown{Reason: "not in effect"}
	}
	planes := map[int]bool{}
	for _, path := range p.paths() {
		planes[path.Plane] = true
	}
	failing := map[int]bool{}
	for u, f := range c.failing {
		if u.ID == id && f.decided {
			failing[f.path.Plane] = true
		}
	}
	var lost, answered uint32
	n := 0
	for plane := range planes {
		out.Planes++
		if p.planes == nil {
			continue
		}
		s := &p.planes[plane]
		lost, answered = lost+s.lost, answered+s.answered
		if s.rtt > 0 {
			out.RoundTrip += s.rtt
			n++
		}
		if s.proved.After(out.Last) {
			out.Last = s.proved
		}
		if p.answering && !s.proved.IsZero() && !failing[plane] {
			out.Proved++
		}
	}
	if n > 0 {
		out.RoundTrip /= time.Duration(n)
	}
	if lost > 0 {
		out.Loss = float64(lost) / float64(lost+answered)
	}
	if out.Proved == 0 {
		switch {
		case failing[allSlots]:
			out.Reason = "it sends probes and does not answer"
		case !p.answering:
			out.Reason = "it does not answer probes"
		case len(failing) > 0:
			out.Reason = "no plane works"
		default:
			out.Reason = "no probe has returned yet"
		}
	}
	return out
}

// PlaneTally is the state of a plane over all peers.
type PlaneTally struct {
	Counters
	RoundTrip time.Duration // median of the peers', 0 if unknown
	Last      time.Time
	Recent    uint64 // recent probes to peers that answer
}

// PeerLoss is the recent losses of a plane toward a peer that answers.
type PeerLoss struct {
	ID
	Plane        int
	Probes, Lost uint32
}

// Losses returns the planes of peers with recent losses, those with most losses first, at most limit.
func (c *Core) Losses(limit int) (all []PeerLoss) {
	for _, p := range c.answering {
		for i := range p.planes {
			if s := &p.planes[i]; s.lost > 0 {
				all = append(all, PeerLoss{p.ID, i, s.lost + s.answered, s.lost})
			}
		}
	}
	slices.SortFunc(all, func(a, b PeerLoss) int {
		return cmp.Or(cmp.Compare(b.Lost, a.Lost), compareIDs(a.ID, b.ID), cmp.Compare(a.Plane, b.Plane))
	})
	return all[:min(limit, len(all))]
}

// Tally returns the number of peers that answer, of all, and the state of each plane.
func (c *Core) Tally() (answering, all int, planes []PlaneTally) {
	planes = make([]PlaneTally, len(c.c.Planes))
	for i := range planes {
		planes[i].Counters = c.counters[i]
		var sum time.Duration
		n := 0
		for _, p := range c.answering {
			if p.planes == nil {
				continue
			}
			s := &p.planes[i]
			planes[i].Recent += uint64(s.lost + s.answered)
			if s.proved.After(planes[i].Last) {
				planes[i].Last = s.proved
			}
			if s.rtt > 0 {
				sum += s.rtt
				n++
			}
		}
		if n > 0 {
			planes[i].RoundTrip = sum / time.Duration(n)
		}
	}
	return len(c.answering), len(c.order), planes
}

// PathsOf returns the present paths of a peer, and the local loopbacks of its source group.
func (c *Core) PathsOf(id ID) ([]Path, []netip.Addr) {
	p := c.peers.of(id)
	if p == nil || id.Group >= len(c.sources) {
		return nil, nil
	}
	return p.paths(), c.sources[id.Group]
}

// Pending reports whether an event since the last Tick needs one at once.
func (c *Core) Pending() bool { return c.wake.IsZero() }

// Reflect returns the answer to a probe that arrived by a device, which is a sub-port unless subPort is -1, and the
// path by which it leaves; false if there is none. Where packets may leave without a slot, answers to regular probes
// do, out of the sub-port of a slot: own probes prove the slots of this server, and one socket sends all answers.
func (c *Core) Reflect(from ID, probe *Packet, device string, subPort int) (Packet, Path, bool) {
	p := c.peers.of(from)
	if p == nil || len(p.last) == 0 {
		return Packet{}, Path{}, false
	}
	paths := p.last // while they change, most slots lead where they did
	a := *probe
	a.Kind, a.Flags = Answer, probe.Flags&FlagAtOnce
	a.ArrivedDevice, a.ArrivedPlane = NameOf(device), Name{}
	arrived := -1
	if subPort >= 0 {
		arrived = c.c.SubPorts[subPort].Plane
		a.ArrivedPlane = NameOf(c.c.Planes[arrived])
	}
	wanted, claimed := -1, false
	for i, name := range c.c.Planes {
		if NameOf(name) == probe.Return {
			wanted = i
		}
		claimed = claimed || NameOf(name) == probe.Plane
	}
	if !claimed {
		a.Flags |= FlagForeignPlane
	}
	path, ok := pick(paths, wanted, probe.Slot)
	switch {
	case ok || wanted < 0 || !c.c.Direct:
	case wanted == arrived:
		path, ok = Path{direct, arrived, subPort}, true
	case probe.Plane != probe.Return: // of a trial, which asks for the way back alone
		path, ok = c.directPath(wanted, probe.Slot)
	}
	if !ok {
		a.Flags |= FlagOtherReturn
		if path, ok = pick(paths, arrived, probe.Slot); !ok {
			path = paths[int(probe.Slot)%len(paths)]
		}
	}
	a.Return, a.ReturnDevice = NameOf(c.c.Planes[path.Plane]), Name{}
	if path.SubPort >= 0 {
		a.ReturnDevice = NameOf(c.c.SubPorts[path.SubPort].Device)
		if c.c.Direct && !probe.AtOnce() {
			path.Slot = direct
		}
	}
	return a, path, true
}

// directPath returns a way out of a sub-port of a plane.
func (c *Core) directPath(plane int, number uint16) (Path, bool) {
	var paths []Path
	for i, s := range c.c.SubPorts {
		if s.Plane == plane {
			paths = append(paths, Path{direct, plane, i})
		}
	}
	return pick(paths, plane, number)
}

// pick returns one of the paths of a plane.
func pick(paths []Path, plane int, slot uint16) (Path, bool) {
	n := 0
	for _, p := range paths {
		if p.Plane == plane {
			n++
		}
	}
	if n == 0 {
		return Path{}, false
	}
	i := int(slot) % n
	for _, p := range paths {
		if p.Plane == plane {
			if i == 0 {
				return p, true
			}
			i--
		}
	}
	return Path{}, false
}

// Knows reports whether a peer exists.
func (c *Core) Knows(id ID) bool { return c.peers.of(id) != nil }

// SetRate changes the number of probes a second.
func (c *Core) SetRate(rate float64) { c.c.Rate = rate }
