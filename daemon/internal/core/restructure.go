package core

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// restructure applies a configuration with other planes, sub-ports, sessions or source groups. It builds a new core and
// gives it the state of the parts that have remained. A source group whose part of the layout is the same keeps its
// table and its engine; the vectors of the others keep their numbers, and slots their places (wecmp.Rehome).
func (c *Core) restructure(next *config.Config, layout Layout, m Succession, homes [][]wecmp.Place) error {
	c.endAvoidances() // no packet has proved the other planes and sub-ports yet
	n := &Core{
		cfg: next, layout: layout, ready: c.ready, flowHash: c.flowHash, marks: c.marks, converged: c.converged, faults: c.faults,
		ownLoopbacks: c.ownLoopbacks, limits: c.limits, held: c.held, gone: c.gone, advertDirty: true, updates: c.updates,
	}
	n.inheritLanes(c)
	n.inheritSessions(c, m)
	n.inheritDrains(c)
	h := heritage{was: c, n: n, m: m, homes: homes, starting: slices.ContainsFunc(c.sources, func(s sourceGroup) bool { return s.start != nil })}
	h.own()
	for i := range n.sources {
		if err := h.source(i); err != nil {
			return err
		}
	}
	h.landings()
	h.claims()
	if h.starting {
		h.start()
	}
	h.vectors()
	n.restage()
	n.checkConverged()
	*c = *n
	return nil
}

// inheritLanes gives every source group the lane that it had, and others one that no source group had, if there is one.
func (c *Core) inheritLanes(was *Core) {
	c.stride = was.stride
	if len(c.layout.Sources) > int(c.stride) {
		c.stride = config.MaxSourceGroups
	}
	c.sources = make([]sourceGroup, len(c.layout.Sources))
	used := map[uint32]bool{}
	former := was.sourcesByName()
	if c.stride == was.stride {
		for i := range c.layout.Sources {
			if at, ok := former[c.layout.Sources[i].Name]; ok {
				c.sources[i].lane = was.sources[at].lane
				used[c.sources[i].lane] = true
			}
		}
	} else {
		former = nil
	}
	fresh := func(i int, busy func(lane uint32) bool) bool {
		for lane := range c.stride {
			if !used[lane] && !busy(lane) {
				c.sources[i].lane, used[lane] = lane, true
				return true
			}
		}
		return false
	}
	for i := range c.layout.Sources {
		if _, ok := former[c.layout.Sources[i].Name]; ok {
			continue
		}
		had := func(lane uint32) bool {
			return slices.ContainsFunc(was.sources, func(s sourceGroup) bool { return s.lane == lane })
		}
		_ = fresh(i, had) || fresh(i, func(uint32) bool { return false })
	}
}

// sourcesByName returns the indexes of the source groups.
func (c *Core) sourcesByName() map[netip.Prefix]int {
	out := map[netip.Prefix]int{}
	for i := range c.layout.Sources {
		out[c.layout.Sources[i].Name] = i
	}
	return out
}

// inheritSessions takes over the state of the sub-ports and sessions that have remained.
func (c *Core) inheritSessions(was *Core, m Succession) {
	c.subPorts = make([]subPort, len(c.layout.SubPorts))
	for i := range c.subPorts {
		p, speed := &c.subPorts[i], c.layout.SubPorts[i].Speed
		if at := m.SubPorts[i]; at >= 0 {
			*p = was.subPorts[at]
			if speed == 0 && was.layout.SubPorts[at].Speed == 0 {
				speed = p.speed
			}
		}
		p.speed, p.established = speed, 0
	}
	c.sessions, c.advertOf = make([]session, len(c.layout.Sessions)), make([]uint64, len(c.layout.Sessions))
	for i := range c.sessions {
		s, l := &c.sessions[i], &c.layout.Sessions[i]
		if at := m.Sessions[i]; at >= 0 {
			*s, c.advertOf[i] = was.sessions[at], was.advertOf[at]
		} else {
			s.nextHop = l.Peer
		}
		if s.subPort = l.SubPort; s.up {
			c.subPorts[s.subPort].established++
		}
	}
}

// inheritDrains takes over the drains whose targets exist.
func (c *Core) inheritDrains(was *Core) {
	for _, d := range was.drains {
		if t := d.target; t.Plane != "" && !slices.Contains(c.layout.Planes, t.Plane) || t.SubPort != "" && c.layout.subPortByDevice(t.SubPort) < 0 {
			continue
		}
		c.drains = append(c.drains, d)
	}
}

// heritage is the transfer of one core's state to another.
type heritage struct {
	was, n   *Core
	m        Succession
	homes    [][]wecmp.Place // by source group, if they are given
	starting bool
	rebuilt  []int          // source groups with a new table and engine
	prefixes []netip.Prefix // of all routes, sorted; nil before the first use
}

// own moves the routes to loopbacks of this node that remain its own, or have become its own.
func (h *heritage) own() {
	index := invert(h.m.Sessions, len(h.was.sessions))
	for key, ev := range h.was.own {
		if i := index[key.session]; i >= 0 && slices.Contains(h.n.cfg.Loopbacks, key.prefix) {
			ev.Session = i
			h.n.keepOwn(ev)
		}
	}
	for _, lo := range h.n.cfg.Loopbacks {
		for i, at := range h.m.Sessions {
			if at < 0 || h.n.own[ownRoute{i, lo}].Attrs != nil {
				continue
			}
			if attrs := h.was.route(at, lo); attrs != nil {
				h.n.keepOwn(fare.RouteUpdate{Session: i, Generation: h.n.sessions[i].generation, Prefix: lo, Attrs: attrs})
			}
		}
	}
}

// source gives a source group the table and the engine that it had, or new ones.
func (h *heritage) source(i int) error {
	n, l := h.n, &h.n.layout.Sources[i]
	lane := n.sources[i].lane
	at, named := h.was.sourcesByName()[l.Name]
	if named {
		if l.homes = h.was.layout.Sources[at].homes; h.homes != nil {
			l.homes = h.homes[i]
		}
		if !h.starting && n.stride == h.was.stride && h.same(i, at) {
			n.sources[i] = h.was.sources[at]
			return nil
		}
	}
	if h.homes == nil {
		h.rehome(i)
	}
	s, err := newSourceGroup(n.cfg, l)
	if err != nil {
		return err
	}
	s.lane = lane
	n.sources[i] = s
	h.rebuilt = append(h.rebuilt, i)
	if s.engine != nil && n.ready {
		n.limit(&n.sources[i])
	}
	if named {
		sessions := absent(len(l.Sessions))
		for whole, local := range l.at.sessions {
			if local >= 0 && h.m.Sessions[whole] >= 0 {
				sessions[local] = h.was.layout.Sources[at].at.sessions[h.m.Sessions[whole]]
			}
		}
		s.table.Continue(h.was.sources[at].table, sessions)
	}
	h.state(i)
	h.routes(i)
	h.weights(i)
	return nil
}

// same reports whether a source group has the same part of the layout, and the same policies, as one before.
func (h *heritage) same(i, at int) bool {
	l, o := &h.n.layout.Sources[i], &h.was.layout.Sources[at]
	if !slices.Equal(h.n.cfg.Loopbacks, h.was.cfg.Loopbacks) || !reflect.DeepEqual(l.fareConfig(h.n.cfg), o.fareConfig(h.was.cfg)) ||
		!reflect.DeepEqual(l.EngineConfig(h.n.cfg), o.EngineConfig(h.was.cfg)) {
		return false
	}
	for whole, local := range l.at.sessions {
		if local >= 0 && (h.m.Sessions[whole] < 0 || o.at.sessions[h.m.Sessions[whole]] != local) {
			return false
		}
	}
	for whole, local := range l.at.subPorts {
		if local >= 0 && (h.m.SubPorts[whole] < 0 || o.at.subPorts[h.m.SubPorts[whole]] != local) {
			return false
		}
	}
	return true
}

// predecessor returns the source group before that served the first loopback of a source group that it has; -1 means
// that all its loopbacks are new.
func (h *heritage) predecessor(i int) int {
	of := h.was.layout.SourceOfLoopback()
	for _, lo := range h.n.layout.Sources[i].Loopbacks {
		if at, ok := of[lo.Addr()]; ok {
			return at
		}
	}
	return -1
}

// placeIn returns the translation of the places of a source group before to those of one now; Plane is -1 for a place
// that it does not have.
func (h *heritage) placeIn(i, at int) func(wecmp.Place) wecmp.Place {
	l, o := &h.n.layout.Sources[i], &h.was.layout.Sources[at]
	return func(p wecmp.Place) wecmp.Place {
		none := wecmp.Place{Plane: -1, SubPort: -1}
		if p.Plane < 0 || p.Plane >= len(o.Planes) {
			return none
		}
		plane := slices.Index(l.Planes, o.Planes[p.Plane])
		if p.SubPort < 0 || plane < 0 {
			return wecmp.Place{Plane: plane, SubPort: -1}
		}
		device := l.subPortByDevice(o.Device(p.Plane, p.SubPort))
		if device < 0 || l.SubPorts[device].Plane != plane {
			return none
		}
		return wecmp.Place{Plane: plane, SubPort: l.SubPorts[device].inPlane}
	}
}

// rehome determines the homes of a source group's slots.
func (h *heritage) rehome(i int) {
	l, at := &h.n.layout.Sources[i], h.predecessor(i)
	l.homes = nil
	if at < 0 || h.was.sources[at].engine == nil {
		return
	}
	was, place := h.was.layout.Sources[at].EngineConfig(h.was.cfg), h.placeIn(i, at)
	homes := was.HomePlaces()
	for s := range homes {
		homes[s] = place(homes[s])
	}
	l.homes = l.homesFrom(h.n.cfg, homes)
}

// homesFrom returns the homes of the slots of a source group after those before, nil for homes in turn. Plane is -1 for
// a place that the source group does not have.
func (l *SourceLayout) homesFrom(cfg *config.Config, before []wecmp.Place) []wecmp.Place {
	engine := l.EngineConfig(cfg)
	engine.Homes = nil
	homes := wecmp.Rehome(engine, before)
	if slices.Equal(homes, engine.HomePlaces()) {
		return nil
	}
	return homes
}

// continueSlots lets the slots keep the places that they have in the data plane, which an earlier process with other
// reloads has programmed. Under the policy remap a place may be that of a failure, so slots begin in turn.
func (c *Core) continueSlots(slots [][]int) error {
	if len(slots) != len(c.sources) || c.cfg.Weights.Policy != wecmp.Reweight || !c.cfg.Forwards() {
		return nil
	}
	homes, others := make([][]wecmp.Place, len(slots)), false
	for i := range slots {
		l := &c.layout.Sources[i]
		if homes[i] = l.homes; len(slots[i]) == 0 {
			continue
		}
		places := make([]wecmp.Place, len(slots[i]))
		for s, at := range slots[i] {
			places[s] = wecmp.Place{Plane: -1, SubPort: -1}
			if c.cfg.Weights.Mode == wecmp.PerPacket {
				if at >= 0 {
					places[s].Plane = l.at.planes[at]
				}
			} else if at >= 0 && l.at.subPorts[at] >= 0 {
				sp := &l.SubPorts[l.at.subPorts[at]]
				places[s] = wecmp.Place{Plane: sp.Plane, SubPort: sp.inPlane}
			}
		}
		homes[i] = l.homesFrom(c.cfg, places)
		others = others || !slices.Equal(homes[i], l.homes)
	}
	if !others {
		return nil
	}
	layout := NewLayout(c.cfg)
	return c.restructure(c.cfg, layout, Succeed(&c.layout, &layout), homes)
}

// checkSlots returns an error for slots of a data plane that refer to an index outside the configuration.
func (c *Core) checkSlots(slots [][]int) error {
	most := len(c.subPorts)
	if c.cfg.Weights.Mode == wecmp.PerPacket {
		most = len(c.layout.Planes)
	}
	for _, list := range slots {
		for _, at := range list {
			if at < -1 || at >= most {
				return fmt.Errorf("a slot at %d: the configuration has %d", at, most)
			}
		}
	}
	return nil
}

// state gives a new table the state of links, sessions and drains.
func (h *heritage) state(i int) {
	n, l, table := h.n, &h.n.layout.Sources[i], h.n.sources[i].table
	for whole, local := range l.at.subPorts {
		if p := &n.subPorts[whole]; local >= 0 && p.known {
			table.Step(fare.LinkState{SubPort: local, Up: p.link, Speed: p.speed, Unknown: p.speed == 0})
		}
	}
	for whole, local := range l.at.sessions {
		if s := &n.sessions[whole]; local >= 0 && s.up {
			table.Step(fare.SessionUp{Session: local, Generation: s.generation, Node: s.node, PeerAS: s.peerAS})
		}
	}
	for _, d := range n.drains {
		if ev := l.localize(n.tableDrain(d.target, true)); ev != nil {
			table.Step(ev)
		}
	}
}

// routes gives a new table the routes of the sessions that have remained.
func (h *heritage) routes(i int) {
	n, l := h.n, &h.n.layout.Sources[i]
	prefer, named := h.was.sourcesByName()[l.Name]
	var heirs []fare.Heir
	more := map[netip.Prefix][]fare.InheritedRoute{}
	for whole, local := range l.at.sessions {
		at := h.m.Sessions[whole]
		if local < 0 || at < 0 || !n.sessions[whole].up {
			continue
		}
		heir := fare.Heir{Session: local}
		for k := range h.was.sources {
			if of := h.was.layout.Sources[k].at.sessions[at]; of >= 0 && (heir.Was == nil || named && k == prefer) {
				heir.Was, heir.At = h.was.sources[k].table, of
			}
		}
		heirs = append(heirs, heir)
		for key, ev := range h.was.own {
			if key.session == at && ev.Attrs != nil {
				more[key.prefix] = append(more[key.prefix], fare.InheritedRoute{Session: local, Attrs: ev.Attrs})
			}
		}
	}
	n.sources[i].table.Inherit(h.allPrefixes(), heirs, more)
}

// allPrefixes returns the prefixes of all routes that are no loopbacks of this node now, sorted.
func (h *heritage) allPrefixes() []netip.Prefix {
	if h.prefixes != nil {
		return h.prefixes
	}
	var all []netip.Prefix
	for i := range h.was.sources {
		var more []netip.Prefix
		for prefix := range h.was.sources[i].table.Destinations {
			more = append(more, prefix)
		}
		all = union(all, more)
	}
	own := map[netip.Prefix]bool{}
	for key := range h.was.own {
		own[key.prefix] = true
	}
	all = union(all, slices.SortedFunc(maps.Keys(own), netip.Prefix.Compare))
	h.prefixes = slices.DeleteFunc(all, func(p netip.Prefix) bool { return slices.Contains(h.n.cfg.Loopbacks, p) })
	return h.prefixes
}

// union merges two sorted lists.
func union(a, b []netip.Prefix) []netip.Prefix {
	if len(a) == 0 {
		return b
	}
	out := make([]netip.Prefix, 0, max(len(a), len(b)))
	for len(a) > 0 && len(b) > 0 {
		order := a[0].Compare(b[0])
		if order <= 0 {
			out, a = append(out, a[0]), a[1:]
		} else {
			out = append(out, b[0])
		}
		if order >= 0 {
			b = b[1:]
		}
	}
	return append(append(out, a...), b...)
}

// weights passes the content of a new table to its engine.
func (h *heritage) weights(i int) {
	n := h.n
	s, l := &n.sources[i], &n.layout.Sources[i]
	if s.engine == nil {
		return
	}
	for id := range s.table.Groups {
		n.fault("weight engine", s.setGroup(l, id))
	}
	s.engine.Expect(len(h.prefixes))
	for prefix, id := range s.table.Destinations {
		n.fault("weight engine", s.engine.SetDestination(prefix, tableGroup(id)))
	}
}

// landings drops the data plane's answers, which refer to sub-ports by their index, of changed source groups.
func (h *heritage) landings() {
	n := h.n
	of := n.layout.SourceOfLoopback()
	for key, place := range h.was.landings {
		if i, ok := of[key.src]; ok && !slices.Contains(h.rebuilt, i) {
			n.land(Landing{Source: key.src, Destination: key.dst, Table: place.table})
		}
	}
	for _, i := range h.rebuilt {
		if n.flowHash != (FlowHash{}) {
			_, err := n.flowHash.hasher(len(n.layout.Sources[i].SubPorts), nil)
			n.fault("the data plane's flow hash", err)
		}
	}
}

// claims determines the conflicts of origins, and reports those that the reload has begun or ended.
func (h *heritage) claims() {
	n, was := h.n, &h.was.claims
	n.claims = claims{own: was.own, news: was.news, more: was.more, known: was.conflicts}
	n.unbelieved.dirty = true
	for i := range n.sources {
		for id := range n.sources[i].table.Groups {
			n.noteIgnored(i, fare.Change{Kind: fare.GroupSet, Group: id})
			n.noteOrigins(i, fare.Change{Kind: fare.GroupSet, Group: id})
		}
	}
	for _, prefix := range slices.SortedFunc(maps.Keys(was.conflicts), netip.Prefix.Compare) {
		if n.claims.conflicts[prefix] == 0 {
			n.claims.report(prefix, "one origin announces it again")
		}
	}
	n.claims.known = nil
	n.noteOwn(append(slices.Clone(h.was.cfg.Loopbacks), n.cfg.Loopbacks...)...)
}

// start continues the keeping of the data plane's state.
func (h *heritage) start() {
	n := h.n
	subPorts, names := invert(h.m.SubPorts, len(h.was.subPorts)), n.sourcesByName()
	var down []int
	for _, i := range n.held.Down {
		if subPorts[i] >= 0 {
			down = append(down, subPorts[i])
		}
	}
	var held []Held
	for _, v := range n.held.Held {
		source, ok := names[h.was.layout.Sources[v.Source].Name]
		if !ok {
			continue
		}
		moved := Held{Source: source, Destinations: v.Destinations}
		for _, member := range v.Members {
			if at := subPorts[member.SubPort]; at >= 0 {
				moved.Members = append(moved.Members, HeldMember{at, member.Weight})
			}
		}
		held = append(held, moved)
	}
	n.held.Down, n.held.Held = down, held
	keeps := make([][2]bool, len(n.sessions))
	for i := range n.sessions {
		keeps[i] = n.sessions[i].keeps
	}
	n.adopt(n.held)
	for i, at := range h.m.Sessions {
		if at >= 0 && !n.converged {
			n.sessions[i].keeps = keeps[i]
		}
	}
	for i := range n.sources {
		if n.sources[i].start != nil && n.keptPlanes(i) {
			n.reweigh(i)
		}
	}
}

// vectors lets new engines continue the numbers of vectors, and lists the objects that the data plane has and no engine
// knows.
func (h *heritage) vectors() {
	n := h.n
	former := h.was.sourcesByName()
	for _, i := range h.rebuilt {
		at, ok := former[n.layout.Sources[i].Name]
		if e := n.sources[i].engine; ok && e != nil && n.stride == h.was.stride {
			e.Inherit(h.was.sources[at].engine, h.placeIn(i, at))
		}
	}
	used := map[uint32]bool{}
	for i := range n.sources {
		if e := n.sources[i].engine; e != nil {
			for id := range e.Vectors {
				used[n.vectorID(i, id)] = true
			}
		}
	}
	now := n.sourcesByName()
	var vectors []Update
	for k := range h.was.sources {
		e, name := h.was.sources[k].engine, h.was.layout.Sources[k].Name
		if e == nil {
			break
		}
		i, ok := now[name]
		if ok && n.sources[i].engine == e {
			continue
		}
		u := Update{Source: -1, Name: name}
		if ok {
			u.Source = i
		}
		if !ok {
			n.gone = slices.Grow(n.gone, len(h.prefixes))
		}
		for prefix := range e.Destinations {
			known := false
			if ok {
				_, known = n.sources[i].engine.Destination(prefix)
			}
			if u.Update = (wecmp.Update{Kind: wecmp.DestinationDelete, Destination: prefix}); !known {
				n.gone = append(n.gone, u)
			}
		}
		for id := range e.Vectors {
			u.Update = wecmp.Update{Kind: wecmp.VectorDelete, Vector: h.was.vectorID(k, id)}
			if !used[u.Vector] {
				vectors = append(vectors, u)
			}
		}
	}
	n.gone = append(n.gone, vectors...)
}
