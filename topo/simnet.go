package topo

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// network is the set of simulated nodes: two servers of each class, or its only one, and all leaves and spines. Each
// source group of a server is a separate node, with a table and an engine, as in the daemon.
type network struct {
	fabric  *Fabric
	classOf []int // by server
	classes []class
	dests   []dest               // those of a server are consecutive
	destOf  map[netip.Prefix]int // by loopback
	nodes   []*simNode
	links   []simLink
	cost    *Cost // cost of the change in progress
}

// class is a class of servers that are alike.
type class struct {
	size int
	reps []int // first destinations of the simulated members
}

// dest is a simulated source group as a destination; one loopback represents all of its GPUs.
type dest struct {
	node   *simNode
	group  *Group
	prefix netip.Prefix
	// stands is the number of class members that its server represents: the first server itself alone, the second all
	// others.
	stands int
	// receives is the number of members that its received messages represent: for the first server all of them, so that
	// nothing counts twice.
	receives int
}

// simLink is a simulated cable.
type simLink struct {
	*Cable
	ends [2]simEnd // down, up
}

type simEnd struct {
	node    *simNode
	session int // also the index of the sub-port
}

// simNode is one speaker.
type simNode struct {
	*Node
	software string
	sessions []*simSession
	uplinks  fare.Bandwidth // number of sessions over uplinks
	dest     int            // index of a source group's destination; otherwise -1
	lanes    [][]int        // of a source group: the sessions of each plane of the fabric

	table  *fare.Table // nil without fared
	engine *wecmp.Engine
	index  []int            // of a source group: the table's index of each plane of the fabric; -1: none
	planes []wecmp.Capacity // scratch memory of setGroup
	rib    *rib             // nil with fared

	adverts []advert // by destination, of leaves and spines: last advertisement
	dirty   []bool   // by destination: may have changed
	any     bool     // some element of dirty is set
	inbox   []message
}

// simSession is one end of a BGP session; each cable has one session.
type simSession struct {
	peer   simEnd
	cable  *Cable
	plane  int // index in the node's table
	sub    int // of a source group: index among the plane's sub-ports
	uplink bool
	// override makes a leaf replace the server's AS by its own: servers share one, and FRR and fared are configured for
	// it.
	override bool
	up       bool
	fresh    bool // the whole table is to be sent
	gen      uint64
	drained  bool             // of a server: drained
	advert   fare.Bandwidth   // of a server: bandwidth to advertise
	silent   bool             // of a server: it withdraws its routes instead
	said     *fare.Attributes // of a server: last advertisement
}

// message is one route, its withdrawal (nil attrs), or End-of-RIB (dest -1).
type message struct {
	session int
	dest    int
	attrs   *fare.Attributes
}

// newNetwork returns a network that is up, in a state of the cables. of is the class of each server.
func newNetwork(f *Fabric, of []int, state []cableState) *network {
	n := &network{fabric: f, classOf: of, destOf: map[netip.Prefix]int{}, cost: &Cost{}}
	at := map[*Node]*simNode{}
	hosts := map[*Group]*simNode{}
	for i := range f.Server {
		c := of[i]
		if c == len(n.classes) {
			n.classes = append(n.classes, class{})
		}
		n.classes[c].size++
		if len(n.classes[c].reps) == 2 {
			continue
		}
		n.classes[c].reps = append(n.classes[c].reps, len(n.dests))
		for _, g := range f.groups[i*f.owners() : (i+1)*f.owners()] {
			hosts[g] = n.addGroup(g)
		}
	}
	for _, c := range n.classes {
		for owner := range f.owners() {
			n.dests[c.reps[0]+owner].stands, n.dests[c.reps[0]+owner].receives = 1, c.size
			if len(c.reps) == 2 {
				n.dests[c.reps[1]+owner].stands = c.size - 1
			}
		}
	}
	for _, node := range append(slices.Clone(f.Leaf), f.Spine...) {
		at[node] = &simNode{Node: node, software: f.Software(node), dest: -1}
		n.nodes = append(n.nodes, at[node])
	}
	for _, c := range f.Cables {
		down, up := at[c.Down.Node], at[c.Up.Node]
		if c.Group != nil {
			down = hosts[c.Group]
		}
		if down == nil {
			continue
		}
		n.connect(c, down, up, state[c.Index])
	}
	for _, node := range n.nodes {
		node.make(n)
	}
	for i := range n.links {
		if l := &n.links[i]; state[l.Index]&dark == 0 {
			n.light(l, true)
		}
	}
	n.converge()
	return n
}

// addGroup adds a source group of a server.
func (n *network) addGroup(g *Group) *simNode {
	sn := &simNode{Node: g.Server, software: Fared, dest: len(n.dests), lanes: make([][]int, n.fabric.Planes)}
	prefix := n.fabric.Loopback(g.Server.Index, g.GPU)
	n.destOf[prefix] = sn.dest
	n.dests = append(n.dests, dest{node: sn, group: g, prefix: prefix})
	n.nodes = append(n.nodes, sn)
	return sn
}

// connect adds a cable between two nodes.
func (n *network) connect(c *Cable, down, up *simNode, state cableState) {
	l := simLink{Cable: c, ends: [2]simEnd{{down, len(down.sessions)}, {up, len(up.sessions)}}}
	for i, e := range l.ends {
		s := &simSession{peer: l.ends[1-i], cable: c, uplink: c.Uplink() && i == 0, advert: c.Speed}
		s.override = n.fabric.SharedAS == SharedServers && c.Group != nil && i == 1 && e.node.software != BIRD
		if e.node.Kind == KindServer {
			s.sub = len(e.node.lanes[c.Plane])
			e.node.lanes[c.Plane] = append(e.node.lanes[c.Plane], e.session)
			s.drained = state&drained != 0
			if s.silent = s.drained; s.drained {
				s.advert = 0
			}
		}
		if e.node.sessions = append(e.node.sessions, s); s.uplink {
			e.node.uplinks++
		}
	}
	n.links = append(n.links, l)
}

// make creates a node's table and engine, or its rib.
func (sn *simNode) make(n *network) {
	if sn.Kind != KindServer {
		sn.adverts, sn.dirty = make([]advert, len(n.dests)), make([]bool, len(n.dests))
	}
	if sn.software != Fared {
		sn.rib = newRIB(len(sn.sessions), len(n.dests))
		return
	}
	c := fare.Config{Role: fare.RoleLeaf, Planes: []string{"p"}}
	if sn.Kind == KindServer {
		c.Role, c.Planes = fare.RoleServer, nil
		for p, lanes := range sn.lanes {
			sn.index = append(sn.index, -1)
			if len(lanes) > 0 { // a plane without a port does not exist in the source group
				sn.index[p] = len(c.Planes)
				c.Planes = append(c.Planes, n.fabric.PlaneName(p))
			}
			for _, i := range lanes {
				sn.sessions[i].plane = sn.index[p]
			}
		}
	}
	w := wecmp.Config{Planes: make([]wecmp.Plane, len(c.Planes))}
	for p, name := range c.Planes {
		w.Planes[p].Name = name
	}
	for i, s := range sn.sessions {
		here, _ := s.cable.At(sn.Node)
		c.SubPorts = append(c.SubPorts, fare.SubPort{Device: here.Device, Plane: s.plane, Speed: s.cable.Speed, Uplink: s.uplink})
		c.Sessions = append(c.Sessions, fare.Session{Name: here.Device, SubPort: i, Codec: fare.Codec{AS: sn.AS}})
		w.Planes[s.plane].SubPorts = append(w.Planes[s.plane].SubPorts, wecmp.SubPort{Name: here.Device})
	}
	// A valid Spec results in valid configurations; the simulation cannot continue without them.
	var err error
	if sn.table, err = fare.NewTable(c); err != nil {
		panic(fmt.Sprintf("topo: %s: %v", sn.Name, err))
	}
	if sn.Kind != KindServer {
		return
	}
	spec := &n.fabric.Spec
	for _, text := range []struct {
		of  interface{ UnmarshalText([]byte) error }
		say string
	}{{&w.Mode, spec.Mode}, {&w.Policy, spec.Policy}, {&w.Ordering, spec.Ordering}} {
		if err := text.of.UnmarshalText([]byte(text.say)); err != nil {
			panic(fmt.Sprintf("topo: %s: %v", sn.Name, err))
		}
	}
	if sn.engine, err = wecmp.NewEngine(w); err != nil {
		panic(fmt.Sprintf("topo: %s: %v", sn.Name, err))
	}
	for _, p := range w.Planes {
		sn.planes = append(sn.planes, wecmp.Capacity{SubPorts: make([]uint64, len(p.SubPorts))})
	}
	for i, s := range sn.sessions {
		if s.drained {
			sn.step(n, fare.Drain{Scope: fare.DrainSubPort, Index: i, On: true})
		}
	}
}

// move applies a change of all cables and returns its cost.
func (n *network) move(after []cableState) Cost {
	n.cost = &Cost{}
	before := n.vectors()
	for i := range n.links {
		l := &n.links[i]
		s := l.ends[0].node.sessions[l.ends[0].session]
		if up := after[l.Index]&dark == 0; up != s.up {
			n.light(l, up)
		}
	}
	n.converge()
	// A drain takes the shares first, then advertises zero, then withdraws; its end advertises everything first, then
	// restores shares.
	type lane struct {
		*simNode
		session int
	}
	var begin, end []lane
	for i := range n.links {
		e, s := n.links[i].ends[0], n.links[i].ends[0].node.sessions[n.links[i].ends[0].session]
		if e.node.Kind != KindServer {
			continue
		}
		switch is := after[n.links[i].Index]&drained != 0; {
		case is && !s.drained:
			begin = append(begin, lane{e.node, e.session})
			e.node.step(n, fare.Drain{Scope: fare.DrainSubPort, Index: e.session, On: true})
			s.drained, s.advert = true, 0
		case !is && s.drained:
			end = append(end, lane{e.node, e.session})
			s.drained, s.advert, s.silent = false, s.cable.Speed, false
		}
	}
	n.converge()
	for _, l := range begin {
		l.sessions[l.session].silent = true
	}
	for _, l := range end {
		l.step(n, fare.Drain{Scope: fare.DrainSubPort, Index: l.session})
	}
	n.converge()
	n.cost.compare(n, before, n.vectors())
	return *n.cost
}

// light takes a cable down or up: at both ends the link first, then the session.
func (n *network) light(l *simLink, up bool) {
	for _, e := range l.ends {
		s := e.node.sessions[e.session]
		s.up, s.fresh, s.said = up, up, nil
		if up {
			s.gen++
		}
		if e.node.rib != nil {
			e.node.rib.forget(e.session)
			e.node.touchAll()
			continue
		}
		e.node.step(n, fare.LinkState{SubPort: e.session, Up: up})
		if up {
			peer := s.peer.node
			e.node.step(n, fare.SessionUp{Session: e.session, Generation: s.gen, Node: peer.ID, PeerAS: peer.AS})
		} else {
			e.node.step(n, fare.SessionDown{Session: e.session, Generation: s.gen})
		}
	}
}

// converge exchanges messages until no node has any left.
func (n *network) converge() {
	for {
		for _, sn := range n.nodes {
			sn.speak(n)
		}
		quiet := true
		for _, sn := range n.nodes {
			if len(sn.inbox) > 0 {
				quiet = false
				sn.listen(n)
			}
		}
		if quiet {
			return
		}
		n.cost.Rounds++
	}
}

// listen processes the received messages.
func (sn *simNode) listen(n *network) {
	for _, m := range sn.inbox {
		s := sn.sessions[m.session]
		if m.dest < 0 {
			if sn.table != nil {
				sn.step(n, fare.EndOfRIB{Session: m.session, Generation: s.gen})
			}
			continue
		}
		loop := m.attrs != nil && slices.Contains(m.attrs.ASPath, sn.AS) && !n.allowsOwnAS(sn)
		if loop || n.dests[m.dest].node.Node == sn.Node {
			// A path with a loop (RFC 4271, Section 9.1.2) or to a loopback of the server itself is not a route, and
			// withdraws a previous one.
			m.attrs = nil
		}
		switch prefix := n.dests[m.dest].prefix; {
		case sn.rib != nil:
			sn.rib.set(m.session, m.dest, m.attrs)
			sn.touch(m.dest)
		case m.attrs == nil:
			sn.step(n, fare.RouteWithdraw{Session: m.session, Generation: s.gen, Prefix: prefix})
		default:
			sn.step(n, fare.RouteUpdate{Session: m.session, Generation: s.gen, Prefix: prefix, Attrs: m.attrs})
		}
	}
	sn.inbox = sn.inbox[:0]
	if sn.engine != nil {
		sn.engine.Updates() // the data plane is assumed to apply all updates
	}
}

// allowsOwnAS reports whether a node accepts a path with its AS: servers that share an AS do behind BIRD, which passes
// it on.
func (n *network) allowsOwnAS(sn *simNode) bool {
	return sn.Kind == KindServer && n.fabric.SharedAS == SharedServers && n.fabric.Spec.Leaf == BIRD
}

// step runs the table and applies its changes to the engine, as the daemon does.
func (sn *simNode) step(n *network, ev fare.Event) {
	for _, ch := range sn.table.Step(ev) {
		var err error
		switch {
		case ch.Kind == fare.Readvertise:
			sn.touch(n.destOf[ch.Destination])
		case sn.engine == nil:
		case ch.Kind == fare.GroupSet:
			view := sn.table.Group(ch.Group)
			for p := range sn.planes {
				in, out := &view.Planes[p], &sn.planes[p]
				out.Capacity, out.Bandwidth = in.Capacity, uint64(in.Bandwidth)
				clear(out.SubPorts)
				for _, sp := range in.SubPorts {
					out.SubPorts[sn.sessions[sp.SubPort].sub] = sp.Weight
				}
			}
			err = sn.engine.SetGroup(uint32(ch.Group), sn.planes)
		case ch.Kind == fare.GroupDelete:
			err = sn.engine.DeleteGroup(uint32(ch.Group))
		case ch.Kind == fare.DestinationSet:
			err = sn.engine.SetDestination(ch.Destination, uint32(ch.Group))
		case ch.Kind == fare.DestinationDelete:
			sn.engine.DeleteDestination(ch.Destination)
		}
		if err != nil {
			panic(fmt.Sprintf("topo: %s: weight engine: %v", sn.Name, err)) // the table never requests a change that the engine rejects
		}
	}
}

func (sn *simNode) touch(dest int) { sn.dirty[dest], sn.any = true, true }

func (sn *simNode) touchAll() {
	for d := range sn.dirty {
		sn.touch(d)
	}
}

// speak advertises the changes on all sessions.
func (sn *simNode) speak(n *network) {
	if sn.Kind == KindServer {
		sn.speakServer(n)
		return
	}
	type change struct {
		dest     int
		old, now advert
	}
	var changes []change
	if sn.any {
		for d := range sn.dirty {
			if !sn.dirty[d] {
				continue
			}
			sn.dirty[d] = false
			now := sn.say(n, d)
			if !now.equal(sn.adverts[d]) {
				changes = append(changes, change{d, sn.adverts[d], now})
				sn.adverts[d] = now
			}
		}
		sn.any = false
	}
	for i, s := range sn.sessions {
		if !s.up {
			continue
		}
		t := teller{n: n, from: sn, session: s}
		if s.fresh {
			s.fresh = false
			for d := range sn.adverts {
				if sn.allowed(i, sn.adverts[d]) {
					t.announce(d, sn.on(s, sn.adverts[d]), true)
				}
			}
			t.endOfRIB()
		} else {
			for k := range changes {
				c := &changes[k]
				if sn.allowed(i, c.now) {
					t.announce(c.dest, sn.on(s, c.now), false)
				} else if sn.allowed(i, c.old) {
					t.withdraw(c.dest)
				}
			}
		}
		t.close()
	}
}

// speakServer advertises a server's own loopback with the bandwidth that path_bandwidth.advertise selects: that of the
// session's sub-port, or with leaves that pass on only one route the sum over the node.
func (sn *simNode) speakServer(n *network) {
	for _, s := range sn.sessions {
		if !s.up {
			continue
		}
		t := teller{n: n, from: sn, session: s}
		var attrs *fare.Attributes
		if !s.silent {
			bandwidth := s.advert
			if n.fabric.Spec.Leaf == BIRD {
				bandwidth = 0
				for _, o := range sn.sessions {
					if o.up && o.peer.node == s.peer.node {
						bandwidth = bandwidth.Add(o.advert)
					}
				}
			}
			attrs = &fare.Attributes{Communities: []fare.Community{fare.Codec{AS: sn.AS}.Encode(bandwidth, sn.ID)}, ASPath: []uint32{sn.AS}}
		}
		switch fresh := s.fresh; {
		case attrs != nil && (s.said == nil || attrs.Communities[0] != s.said.Communities[0]):
			t.announce(sn.dest, attrs, fresh)
		case attrs == nil && s.said != nil:
			t.withdraw(sn.dest)
		}
		if s.said = attrs; s.fresh {
			s.fresh = false
			t.endOfRIB()
		}
		t.close()
	}
}

// rep returns the pair of simulated source groups that represents two source groups of different servers.
func (n *network) rep(src, dst int) (from, to *dest) {
	each := n.fabric.owners()
	a, b := &n.classes[n.classOf[src/each]], &n.classes[n.classOf[dst/each]]
	from, to = &n.dests[a.reps[0]+src%each], &n.dests[b.reps[0]+dst%each]
	if a == b {
		to = &n.dests[b.reps[1]+dst%each]
	}
	return from, to
}

// pairs yields, for each kind of pair of source groups of different servers, two representatives and the number of
// pairs.
func (n *network) pairs(yield func(src, dst, count int)) {
	each := n.fabric.owners()
	for _, a := range n.classes {
		for _, b := range n.classes {
			src, dst := a.reps[0], b.reps[0]
			count := a.size * b.size
			if src == dst {
				if a.size == 1 {
					continue
				}
				dst, count = b.reps[1], a.size*(a.size-1)
			}
			for i := range each {
				for k := range each {
					yield(n.dests[src+i].group.Index, n.dests[dst+k].group.Index, count)
				}
			}
		}
	}
}

// weights returns the weights of planes and of their sub-ports from one source group to another.
func (n *network) weights(src, dst int) (planes []uint32, subPorts [][]uint32) {
	if each := n.fabric.owners(); src/each == dst/each {
		return nil, nil
	}
	from, to := n.rep(src, dst)
	planes, subPorts = make([]uint32, n.fabric.Planes), make([][]uint32, n.fabric.Planes)
	for p, lanes := range from.node.lanes {
		subPorts[p] = make([]uint32, len(lanes))
	}
	if id, ok := from.node.engine.Destination(to.prefix); ok {
		if view, ok := from.node.engine.Vector(id); ok && view.Reachable {
			for p, i := range from.node.index {
				if i >= 0 {
					planes[p] = view.Weights[i]
					copy(subPorts[p], view.SubPortWeights[i])
				}
			}
		}
	}
	return planes, subPorts
}

// vectors returns the weights of each kind of pair, as text, in the order of pairs.
func (n *network) vectors() []string {
	var all []string
	n.pairs(func(src, dst, _ int) {
		planes, subPorts := n.weights(src, dst)
		all = append(all, fmt.Sprint(planes, subPorts))
	})
	return all
}
