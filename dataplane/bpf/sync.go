package bpf

import (
	"errors"
	"maps"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// touched collects the objects that changes may affect.
type touched struct {
	subPorts bool
	groups   map[uint32]bool
	dests    map[contract.DestinationKey]bool
	pairs    map[steerPair]bool
	// all includes every entry in the kernel, also of an earlier process.
	all bool
}

func (t *touched) group(id uint32)                  { mark(&t.groups, id) }
func (t *touched) dest(key contract.DestinationKey) { mark(&t.dests, key) }
func (t *touched) pair(key steerPair)               { mark(&t.pairs, key) }

func mark[K comparable](set *map[K]bool, k K) {
	if *set == nil {
		*set = map[K]bool{}
	}
	(*set)[k] = true
}

// touchAll touches all wanted objects and, once settled, all entries in the kernel.
func (s *Steering) touchAll(t *touched) {
	for id := range s.groups {
		t.group(id)
	}
	for key, d := range s.dests.All() {
		s.touchDestination(contract.DestinationKey{Source: key.Group, Prefix: key.Prefix}, *d, t)
	}
	t.all = s.settled
}

// touchDestination touches a destination and its pairs, which may move between destinations of different source groups.
func (s *Steering) touchDestination(key contract.DestinationKey, d contract.Destination, t *touched) {
	t.dest(key)
	for _, pair := range d.Pairs {
		k, ok := pairKey(pair.Source, key.Prefix)
		if !ok {
			continue
		}
		t.pair(k)
		if owner, ok := s.layout.owner(k.Source.prefix()); ok && owner != key.Source {
			t.dest(contract.DestinationKey{Source: owner, Prefix: key.Prefix})
		}
	}
}

// do applies a change to the wanted state.
func (s *Steering) do(c contract.Change, t *touched) {
	switch c.Kind {
	case contract.SubPortChange:
		t.subPorts = true
		delete(s.inherited, c.Device)
		if c.Up {
			delete(s.down, c.Device)
		} else {
			s.down[c.Device] = true
			s.watch.StartAfterChange() // the control plane may learn of a failure before the kernel's event arrives
		}
	case contract.GroupChange:
		t.group(c.Group)
		s.countCarrying(s.groups[c.Group], -1)
		s.countCarrying(c.After, 1)
		if c.After == nil {
			delete(s.groups, c.Group)
		} else {
			s.groups[c.Group] = c.After
		}
	case contract.DestinationChange:
		s.touchDestination(c.Key(), c.From, t)
		s.touchDestination(c.Key(), c.To, t)
		if c.To.Group == 0 {
			s.dests.Delete(c.Source, c.Prefix)
		} else {
			d, _ := s.dests.Add(c.Source, c.Prefix)
			*d = c.To
		}
	}
}

// wish is the wanted kernel state for touched objects.
type wish struct {
	groups map[uint32]steerGroup
	dests  map[steerTarget]steerDestination
	routes map[netip.Prefix]netip.Addr // preferred source by prefix
	pins   map[steerPair]steerPins
	tables map[steerPair]steerTable
}

// want computes the wanted kernel state for touched objects. Entries of source groups that Forwarding lacks are not wanted.
func (s *Steering) want(t *touched) wish {
	w := wish{
		groups: make(map[uint32]steerGroup, len(t.groups)), dests: make(map[steerTarget]steerDestination, len(t.dests)),
		routes: make(map[netip.Prefix]netip.Addr, len(t.dests)),
		pins:   make(map[steerPair]steerPins, len(t.pairs)), tables: map[steerPair]steerTable{},
	}
	for id := range t.groups {
		if g, ok := s.groups[id]; ok {
			if value, ok := s.groupValue(g); ok {
				w.groups[id] = value
			}
		}
	}
	for key := range t.dests {
		if s.routed(key.Prefix) {
			w.routes[key.Prefix] = s.source(key.Prefix.Addr())
		}
		d := s.dests.Get(key.Source, key.Prefix)
		l := s.layout.source(key.Source)
		if d == nil || l == nil {
			continue
		}
		w.dests[steerTarget{Destination: addressOf(key.Prefix.Addr()), Source: uint32(l.number)}] = steerDestination{Group: d.Group}
		s.wantPairs(key, *d, &w)
	}
	return w
}

func (s *Steering) wantPairs(to contract.DestinationKey, d contract.Destination, w *wish) {
	for _, pair := range d.Pairs {
		key, ok := pairKey(pair.Source, to.Prefix)
		if !ok || len(pair.SourcePorts) == 0 {
			continue
		}
		if owner, ok := s.layout.owner(key.Source.prefix()); !ok || owner != to.Source {
			continue
		}
		entry, table := pinsOf(pair.SourcePorts)
		entry.Group = d.Group
		s.counters(key, &entry, uint32(len(pair.SourcePorts)))
		w.pins[key] = entry
		if table != nil {
			w.tables[key] = *table
		}
	}
}

// routed reports whether a source group of Forwarding has a destination.
func (s *Steering) routed(prefix netip.Prefix) bool {
	for i := range s.layout.sources {
		if s.dests.Get(s.layout.sources[i].name, prefix) != nil {
			return true
		}
	}
	return false
}

// surplus returns the touched keys that are not wanted; with all, every unwanted key in the kernel.
func surplus[K comparable, V any](have, want map[K]V, touched []K, all bool) (gone []K) {
	if all {
		touched = slices.Collect(maps.Keys(have))
	}
	for _, k := range touched {
		if _, ok := want[k]; !ok {
			gone = append(gone, k)
		}
	}
	return gone
}

// targets returns the kernel's keys of touched destinations, under the number of their source group in the kernel.
func (s *Steering) targets(t *touched) (all []steerTarget) {
	have := s.sourceNumbers()
	for key := range t.dests {
		if number, ok := have[key.Source]; ok {
			all = append(all, steerTarget{Destination: addressOf(key.Prefix.Addr()), Source: uint32(number)})
		}
	}
	return all
}

// sync updates the kernel for touched objects: entries that a packet reads last are created first and removed last.
func (s *Steering) sync(t *touched) error {
	if t.subPorts {
		if err := s.refresh(); err != nil {
			return err
		}
	}
	if err := s.setMTU(false); err != nil {
		return err
	}
	w := s.want(t)
	pairs := slices.Collect(maps.Keys(t.pairs))
	prefixes := make([]netip.Prefix, 0, len(t.dests))
	for key := range t.dests {
		prefixes = append(prefixes, key.Prefix)
	}
	oldRoutes := map[netip.Prefix]netip.Addr{}
	if t.all {
		prefixes = prefixes[:0]
		for key := range s.routes.have.All() {
			prefixes = append(prefixes, key.Prefix)
		}
	}
	for _, prefix := range prefixes {
		if _, ok := w.routes[prefix]; !ok {
			oldRoutes[prefix] = netip.Addr{}
		}
	}
	if !s.pinned.switched {
		w.routes, oldRoutes = nil, nil // they would lead to a program without these entries
	}
	oldGroups := surplus(s.haveGroup.have, w.groups, slices.Collect(maps.Keys(t.groups)), t.all)
	oldDests := surplus(s.haveDest.have, w.dests, s.targets(t), t.all)
	oldPins := surplus(s.havePins.have, w.pins, pairs, t.all)
	oldTables := surplus(s.haveTable.have, w.tables, pairs, t.all)
	// Counters of pairs that get other counters, or are removed.
	var back []span
	for _, key := range slices.Concat(oldPins, slices.Collect(maps.Keys(w.pins))) {
		old, had := s.havePins.have[key]
		if now, ok := w.pins[key]; had && old.Counters != notCounted && (!ok || now.Counters != old.Counters) {
			back = append(back, span{old.Counters, old.Slots})
		}
	}
	err := errors.Join(s.haveGroup.set(w.groups), s.haveTable.set(w.tables))
	if err == nil {
		err = s.havePins.set(w.pins)
	}
	if err == nil {
		err = s.haveDest.set(w.dests)
	}
	if err == nil {
		err = s.routes.add(w.routes)
	}
	if err == nil {
		err = s.routes.remove(oldRoutes)
	}
	if err == nil {
		err = errors.Join(s.haveDest.remove(oldDests), s.havePins.remove(oldPins), s.haveTable.remove(oldTables), s.haveGroup.remove(oldGroups))
	}
	if err != nil {
		s.recount()
		return err
	}
	for _, b := range back {
		s.slots.give(b)
	}
	return s.setMTU(true)
}

// countCarrying adds n to carrying for each weight and slot of a group, which may be nil.
func (s *Steering) countCarrying(g *farev1.Vector, n int) {
	for _, m := range g.GetMembers() {
		if m.Weight > 0 {
			s.carrying[m.Device] += n
		}
	}
	for _, slot := range g.GetSlots() {
		s.carrying[slot.Device] += n
	}
}

// counters assigns counters to a pair's entry: the existing ones if their number matches, otherwise new ones.
func (s *Steering) counters(key steerPair, entry *steerPins, slots uint32) {
	if old, ok := s.havePins.have[key]; ok && old.Counters != notCounted && old.Slots == slots {
		entry.Counters, entry.Slots = old.Counters, old.Slots
	} else if from, ok := s.slots.take(slots); ok {
		entry.Counters, entry.Slots = from, slots
	}
}

// recount recomputes the used counters after a partial failure.
func (s *Steering) recount() {
	var used []span
	for _, p := range s.havePins.have {
		if p.Counters != notCounted {
			used = append(used, span{p.Counters, p.Slots})
		}
	}
	clean := s.slots.clean
	s.slots = newSlotCounters(s.slots.kernel, false, used)
	s.slots.clean = clean
}

// source returns the preferred source address toward a destination, if one is wanted and local.
func (s *Steering) source(to netip.Addr) netip.Addr {
	if to.Is4() {
		return s.prefer[0]
	}
	return s.prefer[1]
}

// addressOf returns an address in the form of the program.
func addressOf(a netip.Addr) steerAddress {
	return words(a.As16())
}

// pairKey returns a pair's key. It returns false if the families differ or the source is invalid, so that no packet belongs
// to the pair.
func pairKey(source string, destination netip.Prefix) (steerPair, bool) {
	p, err := netip.ParsePrefix(source)
	if err != nil || p.Addr().Is4() != destination.Addr().Is4() {
		return steerPair{}, false
	}
	return steerPair{Source: addressOf(p.Addr()), Destination: addressOf(destination.Addr())}, true
}
