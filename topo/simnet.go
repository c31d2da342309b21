package topo

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// network is the simulated nodes: two servers of each class, or its only one, and all leaves and spines.
type network struct {
	fabric  *Fabric
	classOf []int // by server
	classes []class
	dests   []dest
	destOf  map[netip.Prefix]int // by loopback
	nodes   []*simNode
	links   []simLink
	cost    *Cost // of the change that is going on
}

// class is servers that are alike.
type class struct {
	size  int
	first int   // the first member
	reps  []int // the simulated members' destinations
}

// dest is a simulated server as a destination; one loopback stands for all of its GPUs.
type dest struct {
	node   *simNode
	prefix netip.Prefix
	class  int
	// stands is how many members of the class it stands for: the first for itself, the second for all others.
	stands int
	// receives is how many members receive what it does: all of them the first one, so that nothing counts twice.
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
	uplinks  fare.Bandwidth // how many of the sessions are
	dest     int            // of a server; -1

	table  *fare.Table // with fared
	engine *wecmp.Engine
	planes []wecmp.Capacity // scratch of setGroup
	rib    *rib             // without

	told  []said // by destination, of leaves and spines
	dirty []bool // by destination
	any   bool   // some are
	inbox []message
}

// simSession is one end of a BGP session; there is one on each cable.
type simSession struct {
	peer    simEnd
	cable   *Cable
	plane   int // index in the node's table
	uplink  bool
	up      bool
	fresh   bool // everything has to be said
	gen     uint64
	drained bool             // of a server
	advert  fare.Bandwidth   // of a server: what it wants to say
	silent  bool             // of a server: nothing, rather
	said    *fare.Attributes // of a server: what it has said
}

// message is one route, its withdrawal (nil attrs), or End-of-RIB (dest -1).
type message struct {
	session int
	dest    int
	attrs   *fare.Attributes
}

// newNetwork brings a fabric up in a state. of is the class of each server.
func newNetwork(f *Fabric, of []int, state []cableState) *network {
	n := &network{fabric: f, classOf: of, destOf: map[netip.Prefix]int{}, cost: &Cost{}}
	at := map[*Node]*simNode{}
	add := func(node *Node, dest int) {
		sn := &simNode{Node: node, software: f.Software(node), dest: dest}
		at[node] = sn
		n.nodes = append(n.nodes, sn)
	}
	for i, server := range f.Server {
		c := of[i]
		if c == len(n.classes) {
			n.classes = append(n.classes, class{first: i})
		}
		n.classes[c].size++
		if len(n.classes[c].reps) == 2 {
			continue
		}
		d := len(n.dests)
		n.classes[c].reps = append(n.classes[c].reps, d)
		add(server, d)
		prefix := f.Loopback(i, 0)
		n.destOf[prefix] = d
		n.dests = append(n.dests, dest{node: at[server], prefix: prefix, class: c})
	}
	for _, c := range n.classes {
		n.dests[c.reps[0]].stands, n.dests[c.reps[0]].receives = 1, c.size
		if len(c.reps) == 2 {
			n.dests[c.reps[1]].stands = c.size - 1
		}
	}
	for _, node := range append(slices.Clone(f.Leaf), f.Spine...) {
		add(node, -1)
	}
	for _, c := range f.Cables {
		down, up := at[c.Down.Node], at[c.Up.Node]
		if down == nil {
			continue
		}
		l := simLink{Cable: c, ends: [2]simEnd{{down, len(down.sessions)}, {up, len(up.sessions)}}}
		for i, e := range l.ends {
			s := &simSession{peer: l.ends[1-i], cable: c, uplink: c.Uplink() && i == 0, advert: c.Speed}
			if e.node.Kind == KindServer {
				s.plane = c.Plane
				s.drained = state[c.Index]&drained != 0
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

// make gives a node what it decides with.
func (sn *simNode) make(n *network) {
	if sn.Kind != KindServer {
		sn.told, sn.dirty = make([]said, len(n.dests)), make([]bool, len(n.dests))
	}
	if sn.software != Fared {
		sn.rib = newRIB(len(sn.sessions), len(n.dests))
		return
	}
	c := fare.Config{Role: fare.RoleLeaf, Planes: []string{"p"}}
	if sn.Kind == KindServer {
		c.Role, c.Planes = fare.RoleServer, nil
		for p := range n.fabric.Planes {
			c.Planes = append(c.Planes, n.fabric.PlaneName(p))
		}
	}
	w := wecmp.Config{Planes: make([]wecmp.Plane, len(c.Planes))}
	for p, name := range c.Planes {
		w.Planes[p].Name = name
	}
	for i, s := range sn.sessions {
		here, _ := s.cable.At(sn.Node)
		c.SubPorts = append(c.SubPorts, fare.SubPort{Device: here.Device, Plane: s.plane, Speed: s.cable.Speed})
		c.Sessions = append(c.Sessions, fare.Session{Name: here.Device, SubPort: i, Codec: fare.Codec{AS: sn.AS}})
		w.Planes[s.plane].SubPorts = append(w.Planes[s.plane].SubPorts, wecmp.SubPort{Name: here.Device})
	}
	// A Spec that is valid makes configurations that are; the simulation cannot go on without them.
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

// move carries out a change of all cables and returns what it cost.
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
	// A drain takes the shares first, then says zero, then nothing; its end says everything first, then gives shares.
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

// light gives a cable light or takes it: at both ends the link first, then the session.
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

// converge exchanges messages until nobody has anything to say.
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

// listen takes what has come in.
func (sn *simNode) listen(n *network) {
	for _, m := range sn.inbox {
		s := sn.sessions[m.session]
		if m.dest < 0 {
			if sn.table != nil {
				sn.step(n, fare.EndOfRIB{Session: m.session, Generation: s.gen})
			}
			continue
		}
		if m.attrs != nil && slices.Contains(m.attrs.ASPath, sn.AS) {
			m.attrs = nil // a loop (RFC 4271, Section 9.1.2): it is no route, and what was one is none any more
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
		sn.engine.Updates() // to a data plane that obeys
	}
}

// step runs the table and carries its changes to the engine, as the daemon does.
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
					out.SubPorts[sp.SubPort%n.fabric.SubPorts] = sp.Weight
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
			panic(fmt.Sprintf("topo: %s: weight engine: %v", sn.Name, err)) // the table never asks for what the engine refuses
		}
	}
}

func (sn *simNode) touch(dest int) { sn.dirty[dest], sn.any = true, true }

func (sn *simNode) touchAll() {
	for d := range sn.dirty {
		sn.touch(d)
	}
}

// speak says what has changed, on all sessions.
func (sn *simNode) speak(n *network) {
	if sn.Kind == KindServer {
		sn.speakServer(n)
		return
	}
	type change struct {
		dest     int
		old, now said
	}
	var changes []change
	if sn.any {
		for d := range sn.dirty {
			if !sn.dirty[d] {
				continue
			}
			sn.dirty[d] = false
			now := sn.say(n, d)
			if !now.equal(sn.told[d]) {
				changes = append(changes, change{d, sn.told[d], now})
				sn.told[d] = now
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
			for d := range sn.told {
				if sn.allowed(i, sn.told[d]) {
					t.announce(d, sn.told[d].on(s), true)
				}
			}
			t.endOfRIB()
		} else {
			for k := range changes {
				c := &changes[k]
				if sn.allowed(i, c.now) {
					t.announce(c.dest, c.now.on(s), false)
				} else if sn.allowed(i, c.old) {
					t.withdraw(c.dest)
				}
			}
		}
		t.close()
	}
}

// speakServer says a server's own loopback with what path_bandwidth.advertise asks for: the session's sub-port, or with leaves
// that pass on one route only all of the node's.
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

// rep is the pair of simulated servers that stands for two servers.
func (n *network) rep(src, dst int) (from, to *dest) {
	a, b := &n.classes[n.classOf[src]], &n.classes[n.classOf[dst]]
	from, to = &n.dests[a.reps[0]], &n.dests[b.reps[0]]
	if a == b {
		to = &n.dests[b.reps[1]]
	}
	return from, to
}

// pairs yields for each kind of pair of servers two that are such, and how many are.
func (n *network) pairs(yield func(src, dst, count int)) {
	for _, a := range n.classes {
		for _, b := range n.classes {
			src, dst := &n.dests[a.reps[0]], &n.dests[b.reps[0]]
			count := a.size * b.size
			if src == dst {
				if a.size == 1 {
					continue
				}
				dst, count = &n.dests[b.reps[1]], a.size*(a.size-1)
			}
			yield(src.node.Index, dst.node.Index, count)
		}
	}
}

// weights are those of planes and of their sub-ports from one server to another.
func (n *network) weights(src, dst int) (planes []uint32, subPorts [][]uint32) {
	if src == dst {
		return nil, nil
	}
	from, to := n.rep(src, dst)
	planes, subPorts = make([]uint32, n.fabric.Planes), make([][]uint32, n.fabric.Planes)
	if id, ok := from.node.engine.Destination(to.prefix); ok {
		if view, ok := from.node.engine.Vector(id); ok && view.Reachable {
			copy(planes, view.Weights)
			for p := range subPorts {
				subPorts[p] = slices.Clone(view.SubPortWeights[p])
			}
		}
	}
	for p := range subPorts {
		if subPorts[p] == nil {
			subPorts[p] = make([]uint32, n.fabric.SubPorts)
		}
	}
	return planes, subPorts
}

// vectors are the weights of each kind of pair, as text, in the order of pairs.
func (n *network) vectors() []string {
	var all []string
	n.pairs(func(src, dst, _ int) {
		planes, subPorts := n.weights(src, dst)
		all = append(all, fmt.Sprint(planes, subPorts))
	})
	return all
}
