package proof

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

const (
	// rounds is the number of rounds of a trial, and least of those in which C must be answered and P not.
	rounds = 4
	least  = 3
	// pace is the time between rounds, settle that between P and C of a round.
	// If lost ways are avoided rounds have quickPace: a trial takes a third of a second, longer than a fabric needs to
	// leave a failed plane.
	pace      = 150 * time.Millisecond
	quickPace = 90 * time.Millisecond
	settle    = 60 * time.Millisecond
	// repeats is the number of equal wrong results, one after the other, that are a finding.
	repeats = 3
	// cured is the number of proofs, one after the other, that end a finding.
	cured = 2
	// recheckEvery is the interval at which one failing slot is probed.
	recheckEvery = 250 * time.Millisecond
	// maxFailing bounds the failing slots, enoughUnits those of one sub-port after which no others are tried.
	maxFailing, enoughUnits = 64, 2
	maxTrials               = 16
	// enoughProbes is the number of probes, and of the peer's probes after them, after which a peer that sends probes
	// and does not answer is a finding.
	enoughProbes = 4
	allSlots     = -1
)

// everyPath is the path of a unit that stands for all slots of a peer.
var everyPath = Path{Slot: allSlots, Plane: allSlots, SubPort: allSlots}

// Fault is why a probe could not be sent.
type Fault uint8

// Faults.
const (
	None    Fault = iota
	Busy          // another program has the source port
	Refused       // by a rule of a firewall
	TooBig        // larger than the MTU of the route
	NoRoute
	Failed // for another reason
)

// Problem is the kind of a finding.
type Problem string

// Problems.
const (
	// Lost: packets are lost, those with the MTU if Finding.Big.
	Lost Problem = "lost"
	// WrongPlane: packets arrive by another plane, or by a device that is no sub-port.
	WrongPlane Problem = "wrong-plane"
	// WrongSubPort: packets leave by another device than their slot's.
	WrongSubPort Problem = "wrong-sub-port"
	// NotSent: the kernel refuses to send packets.
	NotSent Problem = "not-sent"
)

// Direction is the direction in which packets go wrong.
type Direction string

// Directions. Ours is toward the peer.
const (
	Ours    Direction = "ours"
	Theirs  Direction = "theirs"
	Both    Direction = "both"
	Unknown Direction = "unknown"
)

// verdict is the fault of a slot.
type verdict struct {
	problem        Problem
	direction      Direction
	fault          Fault
	expected, seen string
}

// failure is a failing unit. count and proofs are the equal results in a row; it is a finding once decided.
type failure struct {
	verdict
	path          Path
	since, last   time.Time
	count, proofs int
	decided       bool
}

// compare returns the fault of an answered probe, or nil.
func (c *Core) compare(s *sent, a *Packet, device string, subPort int) *verdict {
	if s.leftElsewhere {
		return nil // Left has judged it, and its plane is not the slot's
	}
	plane := c.c.Planes[s.path.Plane]
	if a.Flags&FlagForeignPlane == 0 && a.ArrivedPlane != NameOf(plane) {
		return &verdict{problem: WrongPlane, direction: Ours, expected: "arrival by plane " + plane, seen: arrival(a.ArrivedPlane.String(), a.ArrivedDevice.String()) + " of the peer"}
	}
	if a.Flags&FlagForeignPlane != 0 {
		return nil
	}
	arrived := ""
	if subPort >= 0 {
		arrived = c.c.Planes[c.c.SubPorts[subPort].Plane]
	}
	if device != "" && a.Return != NameOf(arrived) {
		return &verdict{problem: WrongPlane, direction: Theirs, expected: "arrival of the answer by plane " + a.Return.String(), seen: arrival(arrived, device)}
	}
	return nil
}

func arrival(plane, device string) string {
	if plane == "" {
		return "device " + device + ", no sub-port,"
	}
	return "plane " + plane + " (" + device + ")"
}

// record counts equal results of a unit, and returns whether they have become a finding.
func (c *Core) record(now time.Time, u unit, path Path, v verdict) *failure {
	f := c.failing[u]
	if f == nil {
		if len(c.failing) >= maxFailing || u.slot != allSlots && c.known(path, u) >= enoughUnits {
			return nil
		}
		f = &failure{verdict: v, path: path, since: now}
		c.failing[u] = f
		if c.recheckAt.IsZero() || len(c.failing) == 1 {
			c.recheckAt = now.Add(pace)
		}
	}
	if f.verdict != v {
		f.verdict, f.count, f.decided, f.since = v, 0, false, now
	}
	f.count++
	f.proofs, f.last = 0, now
	f.decided = f.decided || f.count >= repeats
	return f
}

// wrong handles an answered probe that went wrong: it counts, and is repeated soon.
func (c *Core) wrong(now time.Time, s *sent, v *verdict) {
	if s.role == roleF || s.role == roleR || s.role == roleC || s.role == roleQ {
		return // those have another way back
	}
	u := s.unit
	u.big = false
	c.record(now, u, s.path, *v)
}

// local handles a probe that was not sent, or left by another device.
func (c *Core) local(now time.Time, s *sent, fault Fault, text string) {
	v := verdict{problem: NotSent, direction: Ours, fault: fault, expected: "packets leave by " + c.deviceOf(s.path), seen: text}
	if fault == None {
		v.problem, v.seen = WrongSubPort, "they leave by "+s.left
	}
	u := s.unit
	u.big = fault == TooBig && u.big
	c.record(now, u, s.path, v)
}

func (c *Core) deviceOf(p Path) string {
	if p.SubPort < 0 {
		return "plane " + c.c.Planes[p.Plane]
	}
	return c.c.SubPorts[p.SubPort].Device
}

// proved handles a probe that has gone its way.
func (c *Core) proved(_ time.Time, s *sent) {
	small := s.unit
	small.big = false
	for _, u := range []unit{small, s.unit}[:1+btoi(s.big)] { // a large one proves small ones, too
		f := c.failing[u]
		if f == nil || s.back != s.path.Plane || s.leftElsewhere || s.path != f.path {
			continue
		}
		if f.proofs++; f.proofs >= cured || !f.decided {
			delete(c.failing, u)
		}
	}
}

// left handles a probe that has left as it should: the cure of a local fault.
func (c *Core) left(s *sent) {
	f := c.failing[s.unit]
	if f == nil || s.path != f.path || f.problem != NotSent && (f.problem != WrongSubPort || s.left == "") {
		return
	}
	if f.proofs++; f.proofs >= cured || !f.decided {
		delete(c.failing, s.unit)
	}
}

// recheck probes one failing unit, in turns.
func (c *Core) recheck(now time.Time) {
	if len(c.failing) == 0 || now.Before(c.recheckAt) {
		return
	}
	c.recheckAt = now.Add(recheckEvery)
	var next *failure
	var which unit
	for _, u := range c.units() {
		f := c.failing[u]
		if !f.decided && c.known(f.path, u) >= enoughUnits {
			delete(c.failing, u)
			continue
		}
		// One that is not decided yet has precedence, the one with most results first.
		if u.slot != allSlots && (next == nil || !f.decided && next.decided || f.decided == next.decided &&
			(!f.decided && f.count > next.count || (f.decided || f.count == next.count) && f.last.Before(next.last))) {
			next, which = f, u
		}
	}
	if next == nil {
		return
	}
	if !next.decided {
		c.recheckAt = now.Add(settle)
	}
	if next.last = now; which.service > 0 {
		c.toService(now, which, next.path)
		return
	}
	c.sendAtOnce(now, which, next.path, next.path.Plane, recheck)
}

// trial is the repeated attempt to prove a slot after a loss.
type trial struct {
	unit
	path    Path
	other   *Path // another plane's slot, or else another sub-port's; nil if there is none
	next    time.Time
	round   int
	control bool // C of the round is next
	// asked are the P that were sent, by round; done are the rounds with an answer to C, at different times: a process
	// that was stopped answers many rounds at once, and the answers may overtake each other.
	asked          [rounds]*sent
	done           int
	answered       time.Time // of the last one of them
	forward, back  bool      // F or R was answered
	anything, over bool
	// others are slots of the plane's other sub-ports, if ways are avoided; partly means that one works.
	others []Path
	partly bool
	since  time.Time // when both processes should have handled the lost probe
	// large means that a probe with the MTU was lost: if small ones are not, a trial of large ones follows.
	large bool
}

// suspect begins a trial for a lost probe.
func (c *Core) suspect(s *sent) {
	p := c.peers.of(s.ID)
	path, ok := c.pathOf(s.unit)
	small := s.unit
	small.big = false
	if p == nil || !p.answering || !ok || path != s.path || len(c.trials) >= maxTrials || c.failing[s.unit] != nil || c.failing[small] != nil {
		return
	}
	if c.known(path, s.unit) >= enoughUnits || c.known(path, small) >= enoughUnits {
		return
	}
	for _, t := range c.trials {
		if t.path.Plane == path.Plane && t.path.SubPort == path.SubPort && (s.big || !t.big) {
			t.large = t.large || s.big && !t.big
			return
		}
	}
	t := &trial{unit: small, path: path, large: s.big, since: s.at.Add(c.quantum())}
	t.choose(c, p)
	c.trials = append(c.trials, t)
}

// choose chooses the other way of a trial: another plane, that with the last proof, or else another sub-port.
func (t *trial) choose(c *Core, p *peer) {
	if c.c.Avoid > 0 && !t.big {
		for _, x := range p.paths() {
			same := func(y Path) bool { return x.SubPort == y.SubPort }
			if x.Plane == t.path.Plane && !same(t.path) && !slices.ContainsFunc(t.others, same) {
				t.others = append(t.others, x)
			}
		}
	}
	var planes, subPorts []Path
	var last time.Time
	for _, x := range p.paths() {
		switch {
		case c.fails(p.ID, x):
		case x.Plane == t.path.Plane:
			if x.SubPort != t.path.SubPort {
				subPorts = append(subPorts, x)
			}
		case p.planes[x.Plane].proved.After(last):
			last, planes = p.planes[x.Plane].proved, append(planes[:0], x)
		case p.planes[x.Plane].proved.Equal(last):
			planes = append(planes, x)
		}
	}
	if planes == nil {
		planes = subPorts
	}
	if len(planes) > 0 {
		t.other = &planes[c.c.Random.IntN(len(planes))]
	}
}

// known returns the number of units of a sub-port, with the packets of a unit, that are findings.
func (c *Core) known(path Path, like unit) (n int) {
	for u, f := range c.failing {
		if f.decided && f.path.Plane == path.Plane && f.path.SubPort == path.SubPort && u.big == like.big && u.service == like.service {
			n++
		}
	}
	return n
}

// fails reports whether a slot of a peer's path is known to fail.
func (c *Core) fails(id ID, path Path) bool {
	for u, f := range c.failing {
		if u.ID == id && f.decided && u.service == 0 && f.path.Plane == path.Plane && f.path.SubPort == path.SubPort {
			return true
		}
	}
	return false
}

// runTrial takes the steps of the first trial that are due.
func (c *Core) runTrial(now time.Time) {
	for len(c.trials) > 0 {
		t := c.trials[0]
		if t.over || t.round == rounds && !now.Before(t.next) {
			c.end(now, t)
			continue
		}
		if now.Before(t.next) {
			return
		}
		if !t.control {
			t.asked[t.round] = c.sendAtOnce(now, t.unit, t.path, t.path.Plane, roleP)
			t.track(t.asked[t.round])
			for _, q := range t.others {
				u := t.unit
				u.slot = q.Slot
				t.track(c.sendAtOnce(now, u, q, q.Plane, roleQ))
			}
			if t.other != nil && t.other.Plane != t.path.Plane {
				t.track(c.sendAtOnce(now, t.unit, t.path, t.other.Plane, roleF))
				t.track(c.sendAtOnce(now, t.through(), *t.other, t.path.Plane, roleR))
				c.sends[len(c.sends)-1].Slot = uint16(t.slot)
			}
			t.control, t.next = true, now.Add(settle)
			return
		}
		if t.other != nil {
			t.track(c.sendAtOnce(now, t.through(), *t.other, t.other.Plane, roleC))
		}
		t.control, t.next = false, now.Add(pace-settle)
		if c.avoids() {
			t.next = now.Add(quickPace - settle)
		}
		if t.round++; t.round == rounds {
			t.next = now.Add(Timeout)
		}
		return
	}
}

// through is the unit by which R and C go. The answers to R and P have the same slot.
func (t *trial) through() unit {
	u := t.unit
	u.slot = t.other.Slot
	return u
}

func (t *trial) track(s *sent) { s.trial, s.round = t, t.round }

// answer counts an answer to a probe of the trial. Right means that both have gone their ways: the peer may be moving
// its slots.
func (t *trial) answer(c *Core, now time.Time, s *sent, a *Packet, right bool) {
	t.anything = true
	switch s.role {
	case roleP:
		t.over = true // the way works: the loss counts, and is no finding
	case roleQ:
		t.partly = true
	case roleF:
		t.forward = t.forward || right
	case roleR:
		t.back = t.back || right && a.Flags&FlagOtherReturn == 0
	case roleC:
		// P must have been sent early enough, and an answer to it must still count.
		if p := t.asked[s.round]; s.at.Sub(p.at) >= settle && c.out[p.nonce] == p && now.Sub(t.answered) >= settle {
			t.done++
			t.answered = now
		}
	}
	if t.over || t.done == rounds {
		c.wake = time.Time{}
		if len(c.trials) > 0 && c.trials[0] == t {
			c.end(now, t)
		}
	}
}

// end judges a trial and removes it.
func (c *Core) end(now time.Time, t *trial) {
	c.trials = slices.DeleteFunc(c.trials, func(x *trial) bool { return x == t })
	p := c.peers.of(t.ID)
	switch {
	case p == nil:
	case t.over && t.large:
		next := &trial{unit: t.unit, path: t.path}
		next.big = true
		next.choose(c, p)
		c.trials = slices.Insert(c.trials, 0, next)
		c.wake = time.Time{}
	case t.over:
	case t.done >= least:
		direction := Unknown
		switch { // done implies other
		case t.other.Plane == t.path.Plane, t.forward && t.back:
		case t.forward:
			direction = Theirs
		case t.back:
			direction = Ours
		default:
			direction = Both
		}
		v := verdict{problem: Lost, direction: direction, expected: "answers by plane " + c.c.Planes[t.path.Plane], seen: "none"}
		if f := c.record(now, t.unit, t.path, v); f != nil {
			f.decided = true
		}
		if !t.big && !t.partly && t.other.Plane != t.path.Plane {
			c.lose(way{t.ID, t.path.Plane}, v, t.since)
		}
	case !t.anything && !t.big:
		c.silences(p)
	}
}

// judgeSilence judges a peer that sends probes and answers none.
func (c *Core) judgeSilence(now time.Time, p *peer) {
	if p.unheard < enoughProbes || c.since(now, p.enough) < settle || len(p.paths()) == 0 {
		return
	}
	if !p.asked || c.since(now, p.received) < quantum { // no probe since the last receipt, or it had no time yet
		return
	}
	p.received, p.asked = c.moment(now), false
	if p.receipts++; p.receipts < enoughProbes || c.since(now, p.enough) < 3*quantum {
		return
	}
	v := verdict{problem: Lost, direction: Ours, expected: "answers", seen: "none by any plane, although the peer sends probes"}
	if p.heard > p.silentSince {
		v.direction, v.seen = Theirs, "none by any plane, although the peer receives probes"
	}
	u := unit{ID: p.ID, slot: allSlots}
	if source, ok := c.sourceOf(p); ok {
		u.source = source
	}
	for other := range c.failing {
		if other.ID == p.ID && other.slot == allSlots {
			u = other
		}
	}
	if f := c.record(now, u, everyPath, v); f != nil {
		f.decided = true
	}
}

// Finding is the faults with the packets of a sub-port, or of a plane where Device is empty, or of all planes
// where Plane is empty too.
type Finding struct {
	Problem        Problem
	Direction      Direction
	Fault          Fault
	Plane, Device  string
	Expected, Seen string
	// Big means that only packets with the MTU are concerned, Service that only those to a service are, counted from 1.
	Big     bool
	Service int
	// Pairs is the number of pairs that are known to fail; Source, Destination and Slot are of one. Slot is -1 for all.
	Pairs               int
	Source, Destination string
	Slot                int
	Since               time.Time
	// Avoided means that the plane has no weight toward the destinations until probes return by it.
	Avoided bool
}

// units returns the failing units in a fixed order.
func (c *Core) units() []unit {
	all := slices.Collect(maps.Keys(c.failing))
	slices.SortFunc(all, func(a, b unit) int {
		return cmp.Or(compareIDs(a.ID, b.ID), cmp.Compare(a.slot, b.slot), a.source.Compare(b.source), cmp.Compare(btoi(a.big), btoi(b.big)), cmp.Compare(a.service, b.service))
	})
	return all
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Findings returns the faults, by plane and sub-port.
func (c *Core) Findings() []Finding {
	if len(c.failing)+len(c.avoided) == 0 {
		return nil
	}
	type key struct {
		problem        Problem
		direction      Direction
		fault          Fault
		plane, subPort int
		big            bool
		service        int
	}
	all := map[key]*Finding{}
	pairs := map[key]map[ID]bool{}
	units := c.units()
	for _, u := range units {
		f := c.failing[u]
		if !f.decided {
			continue
		}
		k := key{f.problem, f.direction, f.fault, f.path.Plane, f.path.SubPort, u.big, u.service}
		x := all[k]
		if x == nil {
			x = &Finding{
				Problem: f.problem, Direction: f.direction, Fault: f.fault, Expected: f.expected, Seen: f.seen, Big: u.big, Service: u.service,
				Source: u.source.String(), Destination: u.Address.String(), Slot: u.slot, Since: f.since,
			}
			if f.path.Plane >= 0 {
				x.Plane = c.c.Planes[f.path.Plane]
			}
			if f.path.SubPort >= 0 {
				x.Device = c.c.SubPorts[f.path.SubPort].Device
			}
			all[k], pairs[k] = x, map[ID]bool{}
		}
		pairs[k][u.ID] = true
		x.Pairs = len(pairs[k])
		if f.since.Before(x.Since) {
			x.Since = f.since
		}
	}
	out := make([]Finding, 0, len(all))
	for _, x := range all {
		// A slot with small probes that fails makes big ones and those of services fail too.
		if (x.Big || x.Service > 0) && slices.ContainsFunc(units, func(u unit) bool {
			f := c.failing[u]
			return !u.big && u.service == 0 && f.decided && f.path.Plane >= 0 && c.c.Planes[f.path.Plane] == x.Plane && (f.path.SubPort < 0 || c.c.SubPorts[f.path.SubPort].Device == x.Device)
		}) {
			continue
		}
		out = append(out, *x)
	}
	out = append(out, c.avoidedFindings()...)
	slices.SortFunc(out, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(a.Plane, b.Plane), cmp.Compare(a.Device, b.Device), cmp.Compare(a.Problem, b.Problem), cmp.Compare(a.Direction, b.Direction), cmp.Compare(a.Fault, b.Fault),
			cmp.Compare(a.Service, b.Service))
	})
	return out
}
