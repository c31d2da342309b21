package fare

import (
	"hash/maphash"
	"math"
	"net/netip"
	"slices"
)

// ChangeKind is the kind of a [Change].
type ChangeKind uint8

// The kinds.
const (
	GroupSet          ChangeKind = iota + 1 // Group is new or its [GroupView] changed
	GroupDelete                             // Group is deleted; its number may be assigned later to another group
	DestinationSet                          // Destination is new or moved to Group
	DestinationDelete                       // Destination is deleted
	Readvertise                             // role leaf: [Table.Readvertise] of Destination has changed
)

var changeNames = []string{"none", "group-set", "group-delete", "destination-set", "destination-delete", "readvertise"}

// String returns the word used in logs and tests.
func (k ChangeKind) String() string { return enumName(changeNames, k) }

// Change is one consequence of an event. Changes are ordered so that they can
// be applied one by one: a group is set before a destination moves to it, and
// deleted after its last destination left.
type Change struct {
	Kind        ChangeKind
	Group       GroupID      // GroupSet, GroupDelete, DestinationSet
	Destination netip.Prefix // DestinationSet, DestinationDelete, Readvertise
}

// Table is the path-bandwidth table: it holds the routes of every session and
// the resulting views. It is not safe for concurrent use.
type Table struct {
	config    Config
	order     []int // session index by rank
	sessions  []session
	subPorts  []subPort
	planes    []plane
	drained   []netip.Addr            // nodes
	avoided   map[netip.Prefix]uint64 // one bit per plane, at least one
	seed      maphash.Seed
	pool      attributePool
	groups    groups
	byPrefix  prefixes[*destination]
	free      []*destination
	sorted    []netip.Prefix // keys of byPrefix in order, unless resort is set
	resort    bool
	live      int // number of routes of the sessions' current generations
	leftovers int // number of routes of earlier generations that are not yet removed
	events    Tally

	changes  []Change
	entries  []entry         // scratch
	sets     []*attributeSet // scratch, one per entry
	verdicts []Verdict       // scratch
	work     computation     // scratch
	places   []uint16        // scratch of origins
}

type session struct {
	rank        uint16
	subPort     int
	codec       Codec
	up          bool
	generation  uint64 // generation of the current or last incarnation
	node        netip.Addr
	peerAS      uint32
	leader      int    // lowest session of the plane that is up to the same node: same AS and identifier (RFC 6286)
	reason      Reason // why its routes do not count
	routes      int    // number of routes of the current generation
	communities Tally
}

type subPort struct {
	plane   int
	up      bool
	speed   Bandwidth
	drained bool
	ranks   rankRange
}

type plane struct {
	drained bool
	ranks   rankRange
	speeds  []Bandwidth // the different speeds of its sub-ports
}

// NewTable returns a table in which every sub-port and session is down. Errors
// wrap [ErrConfig] and list every mistake.
func NewTable(c Config) (*Table, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	c.Planes, c.SubPorts, c.Sessions = slices.Clone(c.Planes), slices.Clone(c.SubPorts), slices.Clone(c.Sessions)
	t := &Table{
		config:   c,
		order:    c.ranks(),
		sessions: make([]session, len(c.Sessions)),
		subPorts: make([]subPort, len(c.SubPorts)),
		planes:   make([]plane, len(c.Planes)),
		seed:     maphash.MakeSeed(),
		avoided:  make(map[netip.Prefix]uint64),
	}
	for i, sp := range c.SubPorts {
		t.subPorts[i] = subPort{plane: sp.Plane, speed: sp.Speed}
	}
	for i := range t.planes {
		t.noteSpeeds(i)
	}
	for rank, i := range t.order {
		cfg := c.Sessions[i]
		t.sessions[i] = session{rank: uint16(rank), subPort: cfg.SubPort, codec: cfg.Codec, reason: ReasonLinkDown}
		t.subPorts[cfg.SubPort].ranks.add(uint16(rank))
		t.planes[c.SubPorts[cfg.SubPort].Plane].ranks.add(uint16(rank))
	}
	return t, nil
}

// add extends the range by rank, which follows the last rank of the range.
func (r *rankRange) add(rank uint16) {
	if r.lo == r.hi {
		r.lo = rank
	}
	r.hi = rank + 1
}

func (t *Table) everything() rankRange { return rankRange{0, uint16(len(t.order))} }

// Step applies one event and returns the resulting changes, which are valid
// until the next Step. An unusable event changes nothing and is counted by its
// [Reason] (see [Table.Stats]).
func (t *Table) Step(e Event) []Change {
	t.changes = t.changes[:0]
	t.events.count(t.step(e), 1)
	return t.changes
}

func (t *Table) step(e Event) Reason {
	switch e := e.(type) {
	case SessionUp:
		return t.sessionUp(e)
	case SessionDown:
		s, reason := t.current(e.Session, e.Generation)
		if s != nil {
			t.sessionDown(s)
		}
		return reason
	case EndOfRIB:
		s, reason := t.current(e.Session, e.Generation)
		if s != nil {
			t.sweep(rankRange{s.rank, s.rank + 1})
		}
		return reason
	case RouteUpdate:
		return t.routeUpdate(e)
	case RouteWithdraw:
		return t.routeWithdraw(e)
	case LinkState:
		return t.linkState(e)
	case Drain:
		return t.drain(e)
	case Avoid:
		return t.avoid(e)
	case PolicyChange:
		return t.policy(e)
	}
	return ReasonInvalidEvent
}

// current returns the session if it is up in that generation.
func (t *Table) current(index int, generation uint64) (*session, Reason) {
	if index < 0 || index >= len(t.sessions) {
		return nil, ReasonInvalidEvent
	}
	s := &t.sessions[index]
	if !s.up || s.generation != generation {
		return nil, ReasonOldGeneration
	}
	return s, ReasonUsed
}

func (t *Table) sessionUp(e SessionUp) Reason {
	if e.Session < 0 || e.Session >= len(t.sessions) || !e.Node.IsValid() {
		return ReasonInvalidEvent
	}
	s := &t.sessions[e.Session]
	if e.Generation <= s.generation {
		return ReasonOldGeneration
	}
	if s.up {
		t.sessionDown(s)
	}
	s.up, s.generation, s.node, s.peerAS = true, e.Generation, e.Node.Unmap(), e.PeerAS
	// No group changes, because a new generation has no routes yet.
	t.refresh(t.planes[t.subPorts[s.subPort].plane].ranks)
	return ReasonUsed
}

func (t *Table) sessionDown(s *session) {
	s.up = false
	t.live -= s.routes
	t.leftovers += s.routes
	s.routes = 0
	t.refresh(t.planes[t.subPorts[s.subPort].plane].ranks)
	t.recompute(rankRange{s.rank, s.rank + 1})
}

func (t *Table) linkState(e LinkState) Reason {
	if e.SubPort < 0 || e.SubPort >= len(t.subPorts) || e.Speed > MaxBandwidth {
		return ReasonInvalidEvent
	}
	sp := &t.subPorts[e.SubPort]
	speed := e.Speed
	if speed == 0 && !e.Unknown {
		speed = sp.speed
	}
	if sp.up != e.Up || sp.speed != speed {
		sp.up = e.Up
		touched := sp.ranks
		if sp.speed != speed { // the plane's suspect bandwidths depend on it
			sp.speed = speed
			t.noteSpeeds(sp.plane)
			touched = t.planes[sp.plane].ranks
		}
		t.refresh(sp.ranks)
		t.recompute(touched)
	}
	return ReasonUsed
}

func (t *Table) drain(e Drain) Reason {
	touched, ok := t.markDrain(e)
	if !ok {
		return ReasonInvalidEvent
	}
	t.refresh(touched)
	t.recompute(touched)
	return ReasonUsed
}

// markDrain records a drain and returns the ranks of the sessions that it
// affects, or false for an event that names no object.
func (t *Table) markDrain(e Drain) (touched rankRange, ok bool) {
	switch {
	case e.Scope == DrainPlane && e.Index >= 0 && e.Index < len(t.planes):
		p := &t.planes[e.Index]
		p.drained, touched = e.On, p.ranks
	case e.Scope == DrainSubPort && e.Index >= 0 && e.Index < len(t.subPorts):
		sp := &t.subPorts[e.Index]
		sp.drained, touched = e.On, sp.ranks
	case e.Scope == DrainNode && e.Node.IsValid():
		node := e.Node.Unmap()
		at, found := slices.BinarySearchFunc(t.drained, node, netip.Addr.Compare)
		if e.On && !found {
			t.drained = slices.Insert(t.drained, at, node)
		} else if !e.On && found {
			t.drained = slices.Delete(t.drained, at, at+1)
		}
		touched = t.everything()
	default:
		return touched, false
	}
	return touched, true
}

func (t *Table) policy(e PolicyChange) Reason {
	if int(e.Missing) >= len(missingNames) || int(e.AllMissing) >= len(allMissingNames) || int(e.AllZero) >= len(zeroNames) ||
		int(e.Conflict) >= len(conflictNames) || e.LeastPreferred&^AllSignals != 0 || int(e.Unproved) >= len(unprovedNames) {
		return ReasonInvalidEvent
	}
	c := &t.config
	if c.Missing != e.Missing || c.AllMissing != e.AllMissing || c.AllZero != e.AllZero || c.Conflict != e.Conflict || c.LeastPreferred != e.LeastPreferred || c.Unproved != e.Unproved {
		c.Missing, c.AllMissing, c.AllZero, c.Conflict, c.LeastPreferred = e.Missing, e.AllMissing, e.AllZero, e.Conflict, e.LeastPreferred
		c.Unproved = e.Unproved
		t.recompute(t.everything())
	}
	return ReasonUsed
}

// refresh recomputes leader and reason of the sessions in r. Leaders are
// correct only if r covers whole planes or no session came up or went down.
func (t *Table) refresh(r rankRange) {
	for rank := r.lo; rank < r.hi; rank++ {
		s := &t.sessions[t.order[rank]]
		sp := &t.subPorts[s.subPort]
		p := &t.planes[sp.plane]
		s.leader = t.order[rank]
		if s.up {
			for _, i := range t.order[p.ranks.lo:rank] {
				if other := &t.sessions[i]; other.up && other.node == s.node && other.peerAS == s.peerAS {
					s.leader = other.leader
					break
				}
			}
		}
		switch _, nodeDrained := slices.BinarySearchFunc(t.drained, s.node, netip.Addr.Compare); {
		case p.drained, sp.drained, s.up && nodeDrained:
			s.reason = ReasonDrained
		case !sp.up:
			s.reason = ReasonLinkDown
		case sp.speed == 0:
			s.reason = ReasonSpeedUnknown
		case !s.up:
			s.reason = ReasonSessionDown
		default:
			s.reason = ReasonUsed
		}
	}
}

// recompute recomputes every group that has an entry in r: O(groups).
func (t *Table) recompute(r rankRange) {
	for _, g := range t.groups.byID {
		if g != nil && g.touches(r) {
			t.compute(g, false)
		}
	}
	if t.config.Role == RoleLeaf {
		t.tellTouched(r)
	}
}

// compute updates g.view and appends a [Change] if it differs or g is new.
func (t *Table) compute(g *group, isNew bool) {
	if t.work.run(t, g) || isNew {
		t.changes = append(t.changes, Change{Kind: GroupSet, Group: g.id})
	}
}

func (t *Table) routeUpdate(e RouteUpdate) Reason {
	s, reason := t.current(e.Session, e.Generation)
	if s == nil {
		return reason
	}
	if !canonical(e.Prefix) {
		return ReasonInvalidEvent
	}
	if e.Attrs == nil {
		t.withdraw(s, e.Prefix)
		return ReasonNoAttributes
	}
	own, set := t.entryOf(s, e.Prefix, e.Attrs)
	for i := range t.verdicts {
		s.communities.count(t.verdicts[i].Reason, 1)
	}

	d, _ := t.byPrefix.get(e.Prefix)
	if d == nil {
		d = t.newDestination(e.Prefix)
	}
	replaces := false
	if d.group != nil {
		if i, found := find(d.group.entries, s.rank); found && d.group.entries[i].generation == s.generation {
			if d.sets[i] == set {
				t.pool.release(set)
				return ReasonUsed
			}
			replaces = true
		}
	}
	if !replaces {
		s.routes++
		t.live++
	}
	own.origin = t.originOrder(d, s, e.Attrs.ASPath)
	t.keepLive(d, s.rank)
	at, _ := find(t.entries, s.rank)
	t.entries = slices.Insert(t.entries, at, own)
	t.sets = slices.Insert(t.sets, at, set)
	t.place(d)
	if t.leftovers > t.live+leftoversAllowed {
		t.sweep(t.everything())
	}
	return ReasonUsed
}

// entryOf returns the entry of a route, without the position of its origin, and its attributes. t.verdicts are those of
// its communities.
func (t *Table) entryOf(s *session, prefix netip.Prefix, attrs *Attributes) (entry, *attributeSet) {
	var advertised Advertised
	advertised, t.verdicts = s.codec.JudgeRoute(attrs, t.verdicts)
	e := entry{
		generation: s.generation, value: advertised.Bandwidth, rank: s.rank, known: advertised.Known,
		originated: t.originated(s, attrs.ASPath), ignored: invalid(t.verdicts), kind: counting(t.verdicts),
		signals: attrs.Signals &^ SignalPrepended, avoided: t.Avoided(prefix, t.subPorts[s.subPort].plane),
	}
	if t.config.Role == RoleServer && prepended(attrs.ASPath, s.peerAS) {
		e.signals |= SignalPrepended
	}
	if t.config.Role == RoleLeaf {
		e.hops = uint16(min(len(attrs.ASPath), math.MaxUint16))
	}
	return e, t.pool.intern(t.seed, attrs)
}

// leftoversAllowed is the number of leftovers allowed in addition to the number
// of live routes. It bounds the memory of sessions that never send end-of-RIB
// or never come back. Every swept route was once learned, so sweeping costs
// O(1) per update in the long run.
const leftoversAllowed = 4096

func (t *Table) routeWithdraw(e RouteWithdraw) Reason {
	s, reason := t.current(e.Session, e.Generation)
	if s == nil {
		return reason
	}
	if !canonical(e.Prefix) {
		return ReasonInvalidEvent
	}
	if !t.withdraw(s, e.Prefix) {
		return ReasonUnknownRoute
	}
	return ReasonUsed
}

// withdraw removes the session's route and reports whether there was one.
func (t *Table) withdraw(s *session, prefix netip.Prefix) bool {
	d, _ := t.byPrefix.get(prefix)
	if d == nil {
		return false
	}
	i, found := find(d.group.entries, s.rank)
	if !found || d.group.entries[i].generation != s.generation {
		return false
	}
	s.routes--
	t.live--
	t.keepLive(d, s.rank)
	if len(t.entries) == 0 {
		t.deleteDestination(d)
	} else {
		t.place(d)
	}
	return true
}

// alive reports whether the route behind e still exists.
func (t *Table) alive(e *entry) bool {
	s := &t.sessions[t.order[e.rank]]
	return s.up && s.generation == e.generation
}

// keepLive fills t.entries and t.sets with d's live routes, except the one with
// rank, and releases all others.
func (t *Table) keepLive(d *destination, rank uint16) {
	t.entries, t.sets = t.entries[:0], t.sets[:0]
	if d.group == nil {
		return
	}
	for i := range d.group.entries {
		e := &d.group.entries[i]
		switch live := t.alive(e); {
		case live && e.rank != rank:
			t.entries, t.sets = append(t.entries, *e), append(t.sets, d.sets[i])
			continue
		case !live:
			t.leftovers--
		}
		t.pool.release(d.sets[i])
	}
	d.sets = d.sets[:0]
}

// place moves d to the group with t.entries, which must not be empty.
func (t *Table) place(d *destination) {
	t.closeOrigins()
	d.sets = append(d.sets[:0], t.sets...)
	old := d.group
	switch g := t.groups.lookup(t.seed, t.entries); {
	case g != nil && g == old:
		// The values are unchanged; at most a leaf's AS path differs.
	case g != nil:
		t.move(d, g)
	case old != nil && old.size == 1:
		// A group with a single destination keeps its number and changes its
		// entries.
		t.groups.set.remove(old)
		t.groups.sign(t.seed, old, t.entries)
		t.compute(old, false)
	default:
		g = t.groups.add(t.seed, t.entries)
		t.compute(g, true)
		t.move(d, g)
	}
	if t.config.Role == RoleLeaf {
		t.updateReadvertisement(d)
	}
}

// move makes d a member of g and deletes the previous group if it is empty.
func (t *Table) move(d *destination, g *group) {
	old := d.group
	if old != nil {
		old.detach(d)
	}
	g.attach(d)
	t.changes = append(t.changes, Change{Kind: DestinationSet, Group: g.id, Destination: d.prefix})
	if old != nil {
		t.drop(old)
	}
}

// drop deletes g if it has no members.
func (t *Table) drop(g *group) {
	if g.size == 0 {
		t.changes = append(t.changes, Change{Kind: GroupDelete, Group: g.id})
		t.groups.remove(g)
	}
}

// sweep removes the leftovers of every group that has one in r. A group keeps
// its number unless another group already has the same entries.
func (t *Table) sweep(r rankRange) {
	for _, g := range t.groups.byID {
		if g == nil || !g.touches(r) {
			continue
		}
		found := false
		for i := range g.entries {
			e := &g.entries[i]
			found = found || e.rank >= r.lo && e.rank < r.hi && !t.alive(e)
		}
		if found {
			t.sweepGroup(g)
		}
	}
}

func (t *Table) sweepGroup(g *group) {
	if members := g.members; members != nil {
		// All members have the same leftovers, so t.entries is the same for
		// each.
		for d := members; d != nil; d = d.next {
			t.keepLive(d, noRank)
			d.sets = append(d.sets, t.sets...)
		}
	}
	if len(t.entries) == 0 {
		for g.members != nil {
			t.deleteDestination(g.members) // the last one deletes g
		}
		return
	}
	t.closeOrigins()
	if same := t.groups.lookup(t.seed, t.entries); same != nil {
		for last := false; !last; {
			d := g.members
			last = d.next == nil
			t.move(d, same)
		}
		return
	}
	t.groups.set.remove(g)
	t.groups.sign(t.seed, g, t.entries)
	t.compute(g, false)
}

// noRank is not the rank of any session.
const noRank = MaxSessions

func (t *Table) newDestination(prefix netip.Prefix) *destination {
	var d *destination
	if n := len(t.free); n > 0 {
		d, t.free = t.free[n-1], t.free[:n-1]
	} else {
		d = new(destination)
	}
	d.prefix = prefix
	t.byPrefix.set(prefix, d)
	t.resort = true
	return d
}

// deleteDestination deletes d, whose routes are already released.
func (t *Table) deleteDestination(d *destination) {
	g := d.group
	g.detach(d)
	t.changes = append(t.changes, Change{Kind: DestinationDelete, Destination: d.prefix})
	t.drop(g)
	if d.readvertised != nil {
		t.changes = append(t.changes, Change{Kind: Readvertise, Destination: d.prefix})
	}
	t.byPrefix.delete(d.prefix)
	t.resort = true
	*d = destination{sets: d.sets[:0]}
	t.free = recycle(t.free, d)
}

// canonical reports whether p is valid as the prefix of a route: no host bits,
// no IPv4-mapped IPv6 address, and no multicast, which cannot be a GPU's
// address.
func canonical(p netip.Prefix) bool {
	return p.IsValid() && p == p.Masked() && !p.Addr().Is4In6() && !p.Addr().IsMulticast()
}

// originated reports whether the neighbor itself originated the route, so that
// its value describes the sub-port: at a leaf, over a sub-port toward servers,
// the AS_PATH holds only the neighbor's AS, possibly repeated. A server never
// concludes that: a leaf with as-override or remove-private-AS replaces the
// origin's AS by its own, and then its value is a sum.
func (t *Table) originated(s *session, path []uint32) bool {
	if t.config.Role != RoleLeaf || t.config.SubPorts[s.subPort].Uplink {
		return false
	}
	return len(path) > 0 && !slices.ContainsFunc(path, func(as uint32) bool { return as != s.peerAS })
}
