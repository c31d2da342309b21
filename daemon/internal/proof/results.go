package proof

import (
	"slices"
	"time"
)

// Left reports the device by which a probe has left, "" if unknown, and by which sub-port that is, -1 if it is none. An
// error means that it was not sent. Departed is the time of the kernel, zero if unknown.
func (c *Core) Left(now, departed time.Time, nonce uint64, device string, subPort int, fault Fault, text string) {
	s := c.out[nonce]
	if s == nil {
		return
	}
	if !departed.IsZero() {
		s.departed = departed
	}
	if s.role == local {
		delete(c.out, nonce)
	}
	if s.path.Direct() {
		if fault != None {
			delete(c.out, nonce)
			c.cureLost(s)
		}
		return
	}
	if fault == Busy { // a program has the source port: nothing is proved, and nothing lost
		delete(c.out, nonce)
		if s.counted {
			c.counters[s.path.Plane].Sent--
		}
		if s.role == asked {
			s.ask.refused(s, text)
		}
		return
	}
	s.left = device
	s.leftElsewhere = device != "" && (s.path.SubPort >= 0 && subPort != s.path.SubPort || s.path.SubPort < 0 && (subPort < 0 || c.c.SubPorts[subPort].Plane != s.path.Plane))
	if fault == None && !s.leftElsewhere {
		c.left(s)
		return
	}
	if s.role == asked {
		if fault != None {
			delete(c.out, nonce)
			s.ask.refused(s, text)
		}
		return
	}
	if fault != None {
		delete(c.out, nonce)
		if s.counted {
			c.counters[s.path.Plane].Lost++
		}
	}
	c.local(now, s, fault, text)
}

// Received handles a probe of a peer, which shows that the peer runs, and whether it hears. Arrived is the time of the
// kernel.
func (c *Core) Received(now, arrived time.Time, from ID, probe *Packet) {
	p := c.peers.of(from)
	if p == nil {
		return
	}
	if c.since(now, p.theirs) > loyalty { // it has come back: earlier probes do not count
		p.unheard, p.receipts = 0, 0
	}
	// The kernel's time is of a clock that may be set.
	p.theirs, p.heard, c.heard = c.moment(now)-moment(now.Sub(arrived)), 0, now
	if probe.Flags&FlagSoon != 0 {
		c.hurried = now
	}
	if probe.Heard != NeverHeard {
		p.heard = p.theirs - moment(probe.Heard)*moment(time.Millisecond)
	}
	if p.answering {
		return
	}
	if len(p.paths()) > 0 && c.since(now, p.urged) >= quantum {
		p.urged = c.moment(now)
		c.urge(p, p.paths()[c.c.Random.IntN(len(p.paths()))], false)
	}
	if probe.Flags&FlagAtOnce == 0 { // others may overtake answers
		c.judgeSilence(now, p)
	}
}

// Answered handles an answer that arrived, at a time of the kernel, by a device, which is a sub-port unless subPort is
// -1.
func (c *Core) Answered(now, arrived time.Time, from ID, a *Packet, device string, subPort int) {
	s := c.out[a.Nonce]
	if s == nil || s.ID != from {
		return
	}
	delete(c.out, a.Nonce)
	p := c.peers.of(from)
	if p == nil {
		return
	}
	switch {
	case !s.counted:
		c.counters[s.path.Plane].Sent++
	case s.expired:
		c.counters[s.path.Plane].Lost--
	}
	c.counters[s.path.Plane].Answered++
	if !p.answering {
		c.answers(p, s.path.Plane)
	}
	seen := c.compare(s, a, device, subPort)
	rtt := max(0, arrived.Sub(s.departed)-time.Duration(a.Answered-a.Received))
	if p.planes == nil {
		p.planes = make([]planeState, len(c.c.Planes))
	}
	state := &p.planes[s.path.Plane]
	state.answered++
	if s.counted && s.expired && state.lost > 0 {
		state.lost--
	}
	if state.lost+state.answered > recent {
		state.lost, state.answered = state.lost/2, state.answered/2
	}
	if state.rtt == 0 {
		state.rtt = rtt
	}
	state.rtt += (rtt - state.rtt) / 8
	if seen == nil && s.back == s.path.Plane && s.role != cure {
		state.proved, c.proofs[s.path.Plane] = now, now
	}
	switch {
	case s.role == cure:
		if seen == nil {
			c.cureAnswered(now, s, a)
		} else {
			c.cureLost(s)
		}
	case s.role == asked:
		s.ask.answered(c, s, a, rtt, device, seen)
	case seen != nil:
		c.wrong(now, s, seen)
	default:
		c.proved(now, s)
	}
	if s.trial != nil {
		s.trial.answer(c, now, s, a, seen == nil && !s.leftElsewhere)
	}
}

// answers records that a peer answers by a plane.
func (c *Core) answers(p *peer, by int) {
	p.answering, p.unheard, p.receipts = true, 0, 0
	c.answering = append(c.answering, p)
	c.found++
	for u := range c.failing { // findings of silence
		if u.ID == p.ID && u.slot == allSlots {
			delete(c.failing, u)
		}
	}
	planes := map[int]bool{by: true}
	for _, path := range p.paths() { // each other plane once, soon
		if !planes[path.Plane] {
			planes[path.Plane] = true
			c.urge(p, path, false)
		}
	}
}

// silences records that a peer does not answer on any plane.
func (c *Core) silences(p *peer) {
	if !p.answering {
		return
	}
	p.answering, p.unheard, p.receipts = false, 0, 0
	c.answering = slices.DeleteFunc(c.answering, func(x *peer) bool { return x == p })
	for u := range c.failing {
		if u.ID == p.ID {
			delete(c.failing, u)
		}
	}
	c.trials = slices.DeleteFunc(c.trials, func(t *trial) bool { return t.ID == p.ID })
}
