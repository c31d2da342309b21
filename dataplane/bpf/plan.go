package bpf

import (
	"maps"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
)

// plan holds the ops that turn the mirror into the desired state. All ops of a stage are executed, in order, and a
// stage only if every op of the earlier ones has succeeded.
type plan struct {
	stages [][]op
	slots  *slotCounters // after the plan; nil if it allocates and frees no counters
}

// planner computes a plan. It changes neither its inputs nor anything that they refer to.
type planner struct {
	plan
	want *desired
	have *mirror
	ops  []op // of the stage in progress
	// The arrays and the anchor's MTU after the ops so far.
	names  overlay[steerSource]
	live   overlay[steerLive]
	places overlay[steerPlace]
	planes overlay[steerPlane]
	ports  overlay[uint64]
	mtu    uint32
	byName map[string]rtnl.Link // nil before the first use
	zero   map[steerPair]uint32 // ends of the new counters that have to be zeroed
}

func newPlanner(want *desired, have *mirror) *planner {
	return &planner{
		want: want, have: have, mtu: have.links[have.routes.anchor].MTU,
		names: overlay[steerSource]{array: &have.names}, live: overlay[steerLive]{array: &have.live}, ports: overlay[uint64]{array: &have.ports},
		places: overlay[steerPlace]{array: &have.places}, planes: overlay[steerPlane]{array: &have.planes},
	}
}

// newPlan plans touched objects: entries that a packet reads last are created first and removed last.
func newPlan(want *desired, have *mirror, t *touched) *plan {
	p := newPlanner(want, have)
	if t.subPorts {
		p.planPlaces()
		p.endStage()
	}
	p.planMTU(false)
	p.endStage()
	p.planEntries(t)
	p.planMTU(true)
	return p.end()
}

func (p *planner) add(o op) { p.ops = append(p.ops, o) }

// endStage begins another stage.
func (p *planner) endStage() {
	if len(p.ops) > 0 {
		p.stages, p.ops = append(p.stages, p.ops), nil
	}
}

func (p *planner) end() *plan {
	p.endStage()
	return &p.plan
}

// overlay is an array as it is after the ops of a plan so far.
type overlay[V comparable] struct {
	array *arrayMap[V]
	next  map[int]V // planned words
}

func (o *overlay[V]) get(i int) V {
	if v, ok := o.next[i]; ok {
		return v
	}
	return o.array.have[i]
}

// set plans a word if it differs.
func (o *overlay[V]) set(p *planner, i int, v V) {
	if o.get(i) == v {
		return
	}
	if o.next == nil {
		o.next = map[int]V{}
	}
	o.next[i] = v
	p.add(setWord[V]{o.array, i, v})
}

// planPut plans the entries that differ, and planRemove the removal of entries.
func planPut[K, V comparable](p *planner, m *hashMap[K, V], want map[K]V) {
	if keys, values := m.missing(want); len(keys) > 0 {
		p.add(putEntries[K, V]{m, keys, values})
	}
}

func planRemove[K, V comparable](p *planner, m *hashMap[K, V], keys []K) {
	if len(keys) > 0 {
		p.add(removeEntries[K, V]{m, keys})
	}
}

// entries is the wanted content of the hash maps for touched objects.
type entries struct {
	groups map[uint32]steerGroup
	dests  map[steerTarget]steerDestination
	pins   map[steerPair]steerPins
	tables map[steerPair]steerTable
}

// planEntries plans groups, destinations, routes and pairs in stages.
func (p *planner) planEntries(t *touched) {
	w := p.wanted(t)
	oldPins := p.have.pins.surplus(w.pins, maps.Keys(t.pairs), t.all)
	p.freeCounters(w.pins, oldPins)
	planPut(p, &p.have.groups, w.groups)
	planPut(p, &p.have.tables, w.tables)
	p.endStage()
	if keys, values := p.have.pins.missing(w.pins); len(keys) > 0 {
		p.add(putPins{putEntries[steerPair, steerPins]{&p.have.pins, keys, values}, p.zero, p.slots})
	}
	p.endStage()
	planPut(p, &p.have.dests, w.dests)
	p.endStage()
	p.planRoutes(t)
	planRemove(p, &p.have.dests, p.have.dests.surplus(w.dests, p.targets(t), t.all))
	p.endStage()
	planRemove(p, &p.have.pins, oldPins)
	p.endStage()
	planRemove(p, &p.have.tables, p.have.tables.surplus(w.tables, maps.Keys(t.pairs), t.all))
	planRemove(p, &p.have.groups, p.have.groups.surplus(w.groups, maps.Keys(t.groups), t.all))
	p.endStage()
}

// wanted computes the wanted entries for touched objects. Entries of source groups that Forwarding lacks are not
// wanted.
func (p *planner) wanted(t *touched) entries {
	w := entries{
		groups: make(map[uint32]steerGroup, len(t.groups)), dests: make(map[steerTarget]steerDestination, len(t.dests)),
		pins: make(map[steerPair]steerPins, len(t.pairs)), tables: map[steerPair]steerTable{},
	}
	for id := range t.groups {
		p.wantGroup(id, w.groups)
	}
	for key := range t.dests {
		d := p.want.dests.Get(key.Source, key.Prefix)
		l := p.want.layout.source(key.Source)
		if d == nil || l == nil {
			continue
		}
		w.dests[steerTarget{Destination: addressOf(key.Prefix.Addr()), Source: uint32(l.number)}] = steerDestination{Group: d.Group}
		p.wantPairs(key, *d, &w)
	}
	return w
}

// wantGroup adds a desired group in the form of the program. A group whose source group Forwarding lacks carries no
// packets.
func (p *planner) wantGroup(id uint32, groups map[uint32]steerGroup) {
	g, ok := p.want.groups[id]
	if !ok {
		return
	}
	if l := p.want.layout.source(sourceName(g.Source)); l != nil {
		groups[id] = l.value(p.alight(g))
	}
}

// alight returns a group without the members that have no carrier, which are the weights that the control plane in most
// cases sets next: the flows of those members then move once. A group with no other members is returned as it is.
func (p *planner) alight(g *farev1.Vector) *farev1.Vector {
	dark := func(m *farev1.VectorMember) bool { return !p.link(m.Device).Usable() }
	left := slices.DeleteFunc(slices.Clone(g.Members), dark)
	if len(left) == 0 || len(left) == len(g.Members) {
		return g
	}
	return &farev1.Vector{Id: g.Id, Source: g.Source, Members: left, Slots: g.Slots}
}

// link returns the link with a name or an alternative name, or the zero value.
func (p *planner) link(name string) rtnl.Link {
	if p.byName == nil {
		p.byName = p.have.linksByName()
	}
	return p.byName[name]
}

func (p *planner) wantPairs(to contract.DestinationKey, d contract.Destination, w *entries) {
	for _, pair := range d.Pairs {
		key, ok := pairKey(pair.Source, to.Prefix)
		if !ok || len(pair.SourcePorts) == 0 {
			continue
		}
		if owner, ok := p.want.owner(key.Source.prefix(), to.Prefix); !ok || owner != to.Source {
			continue
		}
		entry, table := pinsOf(pair.SourcePorts)
		entry.Group = d.Group
		p.assignCounters(key, &entry, uint32(len(pair.SourcePorts)))
		w.pins[key] = entry
		if table != nil {
			w.tables[key] = *table
		}
	}
}

// counters returns the allocation of counters after the plan.
func (p *planner) counters() *slotCounters {
	if p.slots == nil {
		p.slots = p.have.slots.clone()
	}
	return p.slots
}

// assignCounters assigns counters to a pair's entry: the existing ones if their number matches, otherwise new ones.
func (p *planner) assignCounters(key steerPair, entry *steerPins, slots uint32) {
	if old, ok := p.have.pins.have[key]; ok && old.Counters != notCounted && old.Slots == slots {
		entry.Counters, entry.Slots = old.Counters, old.Slots
		return
	}
	from, dirty, ok := p.counters().take(slots)
	if !ok {
		return
	}
	entry.Counters, entry.Slots = from, slots
	if dirty > from {
		if p.zero == nil {
			p.zero = map[steerPair]uint32{}
		}
		p.zero[key] = dirty
	}
}

// freeCounters frees the counters of pairs that get other counters, or are removed.
func (p *planner) freeCounters(want map[steerPair]steerPins, removed []steerPair) {
	free := func(key steerPair) {
		old, had := p.have.pins.have[key]
		if now, ok := want[key]; had && old.Counters != notCounted && (!ok || now.Counters != old.Counters) {
			p.counters().give(span{old.Counters, old.Slots})
		}
	}
	for _, key := range removed {
		free(key)
	}
	for key := range want {
		free(key)
	}
}

// targets yields the kernel's keys of touched destinations, under the number of their source group in the kernel.
func (p *planner) targets(t *touched) func(yield func(steerTarget) bool) {
	have := p.have.sourceNumbers()
	return func(yield func(steerTarget) bool) {
		for key := range t.dests {
			number, ok := have[key.Source]
			if ok && !yield(steerTarget{Destination: addressOf(key.Prefix.Addr()), Source: uint32(number)}) {
				return
			}
		}
	}
}

// planRoutes plans the routes of touched destinations in two stages. While a program of another layout is attached,
// routes would lead to a program without these entries.
func (p *planner) planRoutes(t *touched) {
	if !p.have.pinned.switched {
		return
	}
	add, remove := map[netip.Prefix]netip.Addr{}, map[netip.Prefix]netip.Addr{}
	for key := range t.dests {
		if p.want.routed(key.Prefix) {
			p.wantRoute(key.Prefix, add)
		} else if p.have.routes.have.Get(struct{}{}, key.Prefix) != nil {
			remove[key.Prefix] = netip.Addr{}
		}
	}
	if t.all {
		for key := range p.have.routes.have.All() {
			if !p.want.routed(key.Prefix) {
				remove[key.Prefix] = netip.Addr{}
			}
		}
	}
	if len(add) > 0 {
		p.add(addRoutes(add))
	}
	p.endStage()
	if len(remove) > 0 {
		p.add(removeRoutes(remove))
	}
	p.endStage()
}

// wantRoute adds a route with its preferred source unless the kernel has it.
func (p *planner) wantRoute(prefix netip.Prefix, add map[netip.Prefix]netip.Addr) {
	source := p.want.source(prefix.Addr())
	if now := p.have.routes.have.Get(struct{}{}, prefix); now == nil || *now != source {
		add[prefix] = source
	}
}

// planMTU plans to give the anchor the smallest MTU of the sub-ports that carry packets: usable, and with a weight or a
// slot. It only lowers the MTU if raise is false, before packets may take another sub-port, and before Settle, when not
// all groups are known.
func (p *planner) planMTU(raise bool) {
	w, least := p.want, uint32(0)
	carries := func(name string) bool { return w.carrying[name] > 0 && w.subPorts[name] != nil && !w.down[name] }
	for _, l := range p.have.links {
		if l.Usable() && slices.ContainsFunc(l.Names(), carries) && (least == 0 || l.MTU < least) {
			least = l.MTU
		}
	}
	if p.mtu == 0 || least == 0 || least == p.mtu || least > p.mtu && !(raise && w.settled) {
		return
	}
	p.mtu = least
	p.add(setMTU(least))
}
