package linux

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/gate"
)

// toyKernel executes ops on maps, by the rules of the kernel. Groups are the model that TestTwinIsTheKernel compares
// with the kernel.
type toyKernel struct {
	d        *Driver
	nexthops map[uint32]rtnl.Nexthop
	groups   map[uint32]*table
	routes   map[routeKey]routeState
	dark     map[int]bool // devices without a carrier
	// refuse returns an error for an op that the kernel refuses for another reason; nil refuses none.
	refuse func(o *op) error
	naked  int // moved IPv4 routes that were the last ones with their group and source address
}

func (k *toyKernel) exchange(ops []op) (errs []error) {
	for i := range ops {
		if k.refuse != nil {
			if err := k.refuse(&ops[i]); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		errs = append(errs, k.do(&ops[i]))
	}
	return errs
}

func (k *toyKernel) do(o *op) error {
	_, isNexthop := k.nexthops[o.id]
	_, isGroup := k.groups[o.id]
	switch o.kind {
	case makeNexthop, changeNexthop:
		n := o.pool.nexthop(k.d.state, o.id)
		switch {
		case (isNexthop || isGroup) && o.kind == makeNexthop:
			return unix.EEXIST
		case !isNexthop && o.kind == changeNexthop:
			return unix.ENOENT
		case k.dark[n.Device]:
			return unix.ENETDOWN
		}
		k.nexthops[o.id] = n
	case setGroup:
		switch {
		case (isNexthop || isGroup) && o.flags == rtnl.Create:
			return unix.EEXIST
		case !isGroup && o.flags == rtnl.Change:
			return unix.ENOENT
		}
		for _, m := range o.members {
			if _, ok := k.nexthops[m.ID]; !ok {
				return unix.EINVAL
			}
		}
		if !isGroup {
			k.groups[o.id] = &table{buckets: make([]uint32, k.d.state.want.size)}
		}
		k.groups[o.id].replace(o.members)
	case setRoute:
		_, there := k.routes[o.at]
		switch {
		case !isNexthop && !isGroup:
			return unix.EINVAL
		case there && o.flags == rtnl.Create:
			return unix.EEXIST
		case !there && o.flags == rtnl.Change:
			return unix.ENOENT
		}
		k.moves(o.at, routeState{o.id, o.source})
		k.routes[o.at] = routeState{o.id, o.source}
	case deleteRoute:
		if _, ok := k.routes[o.at]; !ok {
			return unix.ESRCH
		}
		delete(k.routes, o.at)
	case deleteGroup:
		if !isGroup {
			return unix.ENOENT
		}
		k.removeGroup(o.id)
	case deleteNexthop:
		if !isNexthop {
			return unix.ENOENT
		}
		k.removeNexthop(o.id)
	}
	return nil
}

// moves counts a move of a route in which a sender that has just found the route fails (fib_dead).
func (k *toyKernel) moves(at routeKey, to routeState) {
	before, there := k.routes[at]
	if !there || before == to || !at.prefix.Addr().Is4() || before.source != to.source || k.groups[before.nexthop] == nil || k.groups[to.nexthop] == nil {
		return
	}
	for other, r := range k.routes {
		if other != at && other.table == at.table && r == before {
			return
		}
	}
	k.naked++
}

// removeGroup removes a group with its routes.
func (k *toyKernel) removeGroup(id uint32) {
	delete(k.groups, id)
	maps.DeleteFunc(k.routes, func(_ routeKey, r routeState) bool { return r.nexthop == id })
}

// removeNexthop removes a nexthop from all groups, and the groups that are empty afterwards.
func (k *toyKernel) removeNexthop(id uint32) {
	delete(k.nexthops, id)
	for g, t := range k.groups {
		if len(t.members) == 1 && t.members[0].ID == id {
			k.removeGroup(g)
		} else {
			t.remove([]uint32{id})
		}
	}
	maps.DeleteFunc(k.routes, func(_ routeKey, r routeState) bool { return r.nexthop == id })
}

// lose takes the carrier of a device away.
func (k *toyKernel) lose(device int) {
	k.dark[device] = true
	for _, id := range slices.Sorted(maps.Keys(k.nexthops)) {
		if k.nexthops[id].Device == device {
			k.removeNexthop(id)
		}
	}
}

// planTest drives a Driver by random changes of the desired state, carriers and refusals. It holds the desired state
// separately from the Driver.
type planTest struct {
	t        *testing.T
	random   *rand.Rand
	d        *Driver
	k        *toyKernel
	weights  map[uint32][]uint32 // by vector and sub-port of the source group
	down     map[int]bool        // sub-ports that an operation has set down
	programs map[contract.DestinationKey]uint32
	without  bool             // the host lacks the IPv4 loopback of B
	pending  []rtnl.LinkEvent // not received yet
	inPlace  bool             // no group is swapped
	refuses  bool             // the kernel refuses ops, or carriers are lost unnoticed
	groups   int              // setGroup ops
}

const planSubPorts = 4

// vectorsOf returns the vector ids of a source group of partition.
func vectorsOf(source int) []uint32 {
	return []uint32{uint32(3*source + 1), uint32(3*source + 2), uint32(3*source + 3)}
}

// subPortsOf are the sub-ports of the source groups of partition.
var subPortsOf = [][]int{{0, 1}, {1, 2, 3}, {3}}

func newPlanTest(t *testing.T, random *rand.Rand, inPlace, refuses bool) *planTest {
	p := &planTest{t: t, random: random, inPlace: inPlace, refuses: refuses, weights: map[uint32][]uint32{}, down: map[int]bool{}, programs: map[contract.DestinationKey]uint32{}}
	p.d = p.driver()
	p.k = &toyKernel{d: p.d, nexthops: map[uint32]rtnl.Nexthop{}, groups: map[uint32]*table{}, routes: map[routeKey]routeState{}, dark: map[int]bool{}}
	p.connect()
	return p
}

func (p *planTest) driver() *Driver {
	d := offline(p.t, planSubPorts)
	d.state.config.witnessTime, d.state.config.inPlace = 1, p.inPlace
	d.state.setSources(partition(d, "ABC"))
	for _, s := range d.state.want.order[:2] { // the host lacks the loopbacks of C
		for _, l := range s.loopbacks {
			d.state.have.addresses[l.Addr()] = true
		}
	}
	d.state.settled = true
	return d
}

func (p *planTest) connect() {
	p.k.d = p.d
	p.d.kernel.exchange = func(ops []op) []error {
		p.groups += countOps(ops, setGroup)
		return p.k.exchange(ops)
	}
}

func (p *planTest) link(i int, carrier bool) rtnl.Link {
	return rtnl.Link{Index: 10 + i, Name: fmt.Sprintf("p%d", i), Up: true, Carrier: carrier}
}

// change makes one random change.
func (p *planTest) change() {
	source := p.random.IntN(3)
	vectors := vectorsOf(source)
	switch i := p.random.IntN(planSubPorts); p.random.IntN(11) {
	case 0, 1, 2:
		id := vectors[p.random.IntN(3)]
		weights := make([]uint32, len(subPortsOf[source]))
		for i := range weights {
			weights[i] = uint32(p.random.IntN(4))
		}
		p.setVector(id, source, weights)
	case 3, 4, 5:
		prefix := []string{target4(p.random.IntN(4)), target6(p.random.IntN(4))}[p.random.IntN(2)]
		key := contract.DestinationKey{Source: []netip.Prefix{nameA, nameB, nameC}[source], Prefix: mustPrefix(prefix)}
		to := vectors[p.random.IntN(3)]
		if p.random.IntN(3) == 0 {
			to = 0
		}
		if from := p.programs[key]; from != to {
			p.program(key, from, to)
		}
	case 6:
		p.k.lose(10 + i)
		if p.pending = append(p.pending, rtnl.LinkEvent{Link: p.link(i, false)}); !p.refuses {
			p.receive()
		}
	case 7:
		p.receive()
		p.k.dark[10+i] = false
		p.d.links.takeLinks([]rtnl.LinkEvent{{Link: p.link(i, true)}})
	case 8:
		p.down[i] = !p.down[i]
		p.d.state.want.subPorts[i].down = p.down[i]
		p.d.state.stale(p.d.state.want.subPorts[i])
	case 9:
		sp := p.d.state.want.subPorts[i]
		sp.hops[v4] = netip.AddrFrom4([4]byte{10, 1, byte(i), byte(2 + p.random.IntN(3))})
		if p.d.state.setHop(sp, v4) {
			p.t.Fatal("another gateway is another pool")
		}
	case 10:
		p.without = !p.without
		p.d.state.have.addresses[nameB.Addr()] = !p.without
		p.d.state.staleSources()
	}
}

func (p *planTest) setVector(id uint32, source int, weights []uint32) {
	p.weights[id] = weights
	all := make([]uint32, planSubPorts)
	for i, w := range weights {
		all[subPortsOf[source][i]] = w
	}
	p.d.set(id, all...)
}

func (p *planTest) program(key contract.DestinationKey, from, to uint32) {
	p.d.serves(key.Source, key.Prefix.String(), from, to)
	if p.programs[key] = to; to == 0 {
		delete(p.programs, key)
	}
}

// receive delivers the pending link events.
func (p *planTest) receive() {
	p.d.links.takeLinks(p.pending)
	p.pending = nil
}

// sync plans and executes until a plan is empty, like Driver.sync, and checks that planning changes nothing.
func (p *planTest) sync(refusals int) {
	p.t.Helper()
	undisturbed := refusals == 0 && len(p.pending) == 0
	p.k.refuse = func(o *op) error {
		// A refused changeNexthop is repaired by a read-back, which this test does not have.
		if o.kind == changeNexthop || refusals == 0 || p.random.IntN(4) > 0 {
			return nil
		}
		refusals--
		return []error{unix.EPERM, unix.ENOMEM, unix.EBUSY}[p.random.IntN(3)]
	}
	for range 40 {
		before := p.d.planInputs()
		pl := newPlan(&p.d.state.want, &p.d.state.have, p.d.state.scope())
		if after := p.d.planInputs(); after != before {
			p.t.Fatalf("planning changed its inputs:\n%s\nbefore:\n%s", after, before)
		}
		p.d.state.adoptPlan(pl)
		if pl.empty() && len(p.pending) == 0 {
			p.d.state.await(nil)
			if len(p.d.state.have.strays) > 0 { // a ready group whose removal was refused
				p.k.refuse = nil
				p.d.reader.removeStrays()
			}
			return
		}
		failures := p.d.kernel.execute(pl, false)
		if undisturbed && len(failures) > 0 {
			p.t.Fatalf("the kernel refuses %+v: %v", failures[0].op, failures[0].err)
		}
		for _, f := range failures {
			if f.op.key.wanted != 0 {
				p.d.state.staleGroups[f.op.key] = true
			}
			if f.op.at.prefix.IsValid() {
				p.d.state.staleRoutes[f.op.at] = true
			}
		}
		p.receive()
		p.consistent()
	}
	p.t.Fatal("plans without end")
}

// consistent checks that the mirror equals the kernel, except for devices whose lost carrier is not known yet.
func (p *planTest) consistent() {
	p.t.Helper()
	h := &p.d.state.have
	for at, r := range h.routes.all() {
		// A refused removal of a route stays stale, and its group may take the route along.
		if p.k.routes[at] != r && !p.d.state.staleRoutes[at] {
			p.t.Fatalf("the route at %v is %v, the kernel has %v", at, r, p.k.routes[at])
		}
	}
	for at, r := range h.anchors {
		if p.k.routes[at] != r {
			p.t.Fatalf("the anchor at %v is %v, the kernel has %v", at, r, p.k.routes[at])
		}
	}
	for at := range p.k.routes {
		_, anchor := h.anchors[at]
		if _, ok := h.routes.get(at); !ok && !anchor {
			p.t.Fatalf("the route at %v is not known", at)
		}
	}
	known := map[uint32]bool{}
	for key, g := range h.groups {
		if !g.exists {
			continue
		}
		known[g.id] = true
		t := p.k.groups[g.id]
		if t == nil {
			p.t.Fatalf("the kernel does not have group %v: %+v", key, g)
		}
		if !g.moved && (!maps.Equal(weightsOf(g.members), weightsOf(t.members)) || !g.dropping && !slices.Equal(g.segments, segmentsOf(t.buckets))) {
			p.t.Fatalf("group %v: %+v, the kernel has %v, %v", key, g, t.members, segmentsOf(t.buckets))
		}
	}
	for _, r := range h.ready {
		known[r.id] = true
		t := p.k.groups[r.id]
		if t == nil || !r.moved && !slices.Equal(r.segments, segmentsOf(t.buckets)) {
			p.t.Fatalf("ready group %+v, the kernel has %+v", r, t)
		}
	}
	for id := range h.strays {
		known[id] = true
	}
	if len(known) != len(p.k.groups) {
		p.t.Fatalf("groups %v, the kernel has %v", slices.Sorted(maps.Keys(known)), slices.Sorted(maps.Keys(p.k.groups)))
	}
	for id := range p.k.nexthops {
		if h.owners[id] == nil && !slices.Contains(h.retired, id) {
			p.t.Fatalf("nexthop %d is not known", id)
		}
	}
	for id := range h.owners {
		if _, ok := p.k.nexthops[id]; !ok {
			p.t.Fatalf("the kernel does not have nexthop %d", id)
		}
	}
}

// judge compares the kernel with the desired state.
func (p *planTest) judge() {
	p.t.Helper()
	p.consistent()
	routes := 0
	for key, vector := range p.programs {
		routes++
		at, _ := p.d.state.want.place(key)
		t := p.k.groups[p.k.routes[at].nexthop]
		if t == nil {
			p.t.Fatalf("%v has no group: %v", key, p.k.routes[at])
		}
		sends := key.Source != nameC && (key.Source != nameB || !p.without || !key.Prefix.Addr().Is4())
		if got := p.k.routes[at].source; got.IsValid() != sends {
			p.t.Fatalf("%v has the source address %v", key, got)
		}
		source := int(vector-1) / 3
		weights := make([]uint32, len(subPortsOf[source]))
		for i, w := range p.weights[vector] {
			if sp := subPortsOf[source][i]; !p.down[sp] && !p.k.dark[10+sp] {
				weights[i] = w
			}
		}
		var want []int // device of each bucket, 0 for a bucket that drops
		for _, r := range (layout{p.d.state.want.size, len(weights)}).runs(weights) {
			want = append(want, slices.Repeat([]int{10 + subPortsOf[source][r.subPort]}, r.size)...)
		}
		if want == nil {
			want = make([]int, p.d.state.want.size)
		}
		for bucket, id := range t.buckets {
			n := p.k.nexthops[id]
			gateway := netip.Addr{}
			if want[bucket] != 0 {
				gateway = p.d.state.want.subPorts[want[bucket]-10].hops[familyOf(key.Prefix.Addr())]
			}
			if n.Blackhole != (want[bucket] == 0) || !n.Blackhole && n.Device != want[bucket] || n.Gateway != gateway {
				p.t.Fatalf("%v by weights %v: bucket %d has %+v, want device %d, gateway %v", key, weights, bucket, n, want[bucket], gateway)
			}
		}
	}
	for _, at := range p.d.state.want.closedRoutes() {
		routes++
		if n := p.k.nexthops[p.k.routes[at].nexthop]; !n.Blackhole {
			p.t.Fatalf("%v leads to %+v, want a blackhole", at, n)
		}
	}
	h := &p.d.state.have
	if len(p.k.routes) != routes+len(h.anchors) || len(p.k.groups) != len(p.d.state.want.users)+len(h.ready) {
		p.t.Fatalf("%d routes, want %d and %d anchors; %d groups, want %d and %d ready ones",
			len(p.k.routes), routes, len(h.anchors), len(p.k.groups), len(p.d.state.want.users), len(h.ready))
	}
	if len(h.ready) > mostReady || len(h.ready) > 0 && (p.d.state.config.inPlace || len(p.programs) == 0) {
		p.t.Fatalf("%d ready groups", len(h.ready))
	}
	for at := range h.anchors {
		if !p.d.state.wantedAnchors()[at] && !p.refuses {
			p.t.Fatalf("an anchor without a group at %v", at)
		}
	}
}

// restart replaces the Driver by one that finds the objects in the kernel, and programs the same state. No group may
// change.
func (p *planTest) restart() {
	p.t.Helper()
	old := p.d
	p.d = p.driver()
	p.d.state.have.addresses[nameB.Addr()] = !p.without
	for i := range planSubPorts {
		p.d.links.takeLinks([]rtnl.LinkEvent{{Link: p.link(i, !p.k.dark[10+i])}})
		p.d.state.want.subPorts[i].down = p.down[i]
		p.d.state.want.subPorts[i].hops = old.state.want.subPorts[i].hops
		p.d.state.setHop(p.d.state.want.subPorts[i], v4)
	}
	p.d.state.have.changed = nil
	p.connect()
	h := &p.d.state.have
	routes, anchors := map[routeKey]routeState{}, map[routeKey]routeState{}
	for at, r := range p.k.routes {
		if isAnchor(at) {
			anchors[at] = r
		} else {
			routes[at] = r
		}
	}
	h.replaceRoutes(statesOf(routes), anchors)
	h.loose = maps.Clone(p.k.nexthops)
	for id := range p.k.nexthops {
		h.used[id] = true
	}
	for id, t := range p.k.groups {
		h.used[id] = true
		h.strays[id] = stray{rtnl.Nexthop{ID: id, Members: t.members, Resilient: true, Buckets: uint16(p.d.state.want.size)}, segmentsOf(t.buckets)}
	}
	for _, q := range p.d.state.pools() {
		p.d.state.adopt(q)
	}
	for id := range h.loose {
		h.retired = append(h.retired, id)
	}
	clear(h.loose)
	for id, weights := range p.weights {
		p.setVector(id, int(id-1)/3, weights)
	}
	for key, to := range p.programs {
		p.program(key, 0, to)
	}
	groups := p.groups
	p.sync(0)
	if p.groups != groups {
		p.t.Fatalf("after a restart %d groups were set", p.groups-groups)
	}
	p.d.reader.removeStrays()
	p.judge()
}

// TestPlansReachTheDesiredState applies plans to a toy kernel: from any state, with carriers lost unnoticed and ops
// refused, the kernel reaches the desired state, the mirror stays equal to the kernel, and planning changes none of its
// inputs.
func TestPlansReachTheDesiredState(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	for round := range uint64(gate.Count(t, gate.Models, 15, 200)) {
		p := newPlanTest(t, rand.New(rand.NewPCG(seed, round)), round%3 == 1, round%3 > 0)
		for step := range 60 {
			for range 1 + p.random.IntN(4) {
				p.change()
			}
			refusals := 0
			if p.refuses {
				refusals = p.random.IntN(6)
			}
			p.sync(refusals)
			p.judge()
			if step%20 == 19 {
				p.restart()
			}
		}
		if !p.inPlace && !p.refuses && p.k.naked > 0 {
			t.Fatalf("%d moved routes were the last ones of their groups", p.k.naked)
		}
	}
}
