package bpf

import (
	"errors"
	"net/netip"

	"github.com/fared/fared/dataplane/internal/contract"
)

// touched is what changes may have changed.
type touched struct {
	subPorts bool
	groups   map[uint32]bool
	dests    map[netip.Prefix]bool
	pairs    map[steerPair]bool
}

func (t *touched) group(id uint32)          { mark(&t.groups, id) }
func (t *touched) dest(prefix netip.Prefix) { mark(&t.dests, prefix) }
func (t *touched) pair(key steerPair)       { mark(&t.pairs, key) }

func mark[K comparable](set *map[K]bool, k K) {
	if *set == nil {
		*set = map[K]bool{}
	}
	(*set)[k] = true
}

// do changes what is wanted.
func (s *Steering) do(c contract.Change, t *touched) {
	switch c.Kind {
	case contract.SubPortChange:
		t.subPorts = true
		delete(s.inherited, c.Device)
		if c.Up {
			delete(s.down, c.Device)
		} else {
			s.down[c.Device] = true
		}
	case contract.GroupChange:
		t.group(c.Group)
		if c.After == nil {
			delete(s.groups, c.Group)
		} else {
			s.groups[c.Group] = c.After
		}
	case contract.DestinationChange:
		t.dest(c.Prefix)
		for _, d := range []contract.Destination{c.From, c.To} {
			for _, pair := range d.Pairs {
				if key, ok := pairKey(pair.Source, c.Prefix); ok {
					t.pair(key)
				}
			}
		}
		if c.To.Group == 0 {
			delete(s.dests, c.Prefix)
		} else {
			s.dests[c.Prefix] = c.To
		}
	}
}

// sync makes the kernel have what is wanted of what was touched: what a packet reads last is made first, and removed last.
func (s *Steering) sync(t *touched) error {
	if t.subPorts {
		if err := s.refresh(); err != nil {
			return err
		}
	}
	groups := make(map[uint32]steerGroup, len(t.groups))
	var oldGroups []uint32
	for id := range t.groups {
		if g, ok := s.groups[id]; ok {
			groups[id] = s.layout.value(g)
		} else {
			oldGroups = append(oldGroups, id)
		}
	}
	dests := make(map[steerAddress]steerDestination, len(t.dests))
	routes, oldRoutes := make(map[netip.Prefix]netip.Addr, len(t.dests)), map[netip.Prefix]netip.Addr{}
	var oldDests []steerAddress
	pins, tables := make(map[steerPair]steerPins, len(t.pairs)), map[steerPair]steerTable{}
	for prefix := range t.dests {
		d, ok := s.dests[prefix]
		if !ok {
			oldDests = append(oldDests, addressOf(prefix.Addr()))
			oldRoutes[prefix] = netip.Addr{}
			continue
		}
		dests[addressOf(prefix.Addr())] = steerDestination{Group: d.Group}
		routes[prefix] = s.source(prefix.Addr())
		for _, pair := range d.Pairs {
			key, ok := pairKey(pair.Source, prefix)
			if !ok || len(pair.UdpSourcePorts) == 0 {
				continue
			}
			entry, table := pinsOf(pair.UdpSourcePorts)
			entry.Group = d.Group
			s.counters(key, &entry, uint32(len(pair.UdpSourcePorts)))
			pins[key] = entry
			if table != nil {
				tables[key] = *table
			}
		}
	}
	var oldPins, oldTables []steerPair
	for key := range t.pairs {
		if _, ok := pins[key]; !ok {
			oldPins = append(oldPins, key)
		}
		if _, ok := tables[key]; !ok {
			oldTables = append(oldTables, key)
		}
	}
	if !s.pinned.switched {
		routes, oldRoutes = nil, nil // they would lead to a program that knows nothing of them
	}
	// Counters of pairs that get others, or end.
	var back []span
	for key := range t.pairs {
		old, had := s.havePins.have[key]
		if now, ok := pins[key]; had && old.Counters != notCounted && (!ok || now.Counters != old.Counters) {
			back = append(back, span{old.Counters, old.Slots})
		}
	}
	err := errors.Join(s.haveGroup.set(groups), s.haveTable.set(tables))
	if err == nil {
		err = s.havePins.set(pins)
	}
	if err == nil {
		err = s.haveDest.set(dests)
	}
	if err == nil {
		err = s.routes.add(routes)
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
	return nil
}

// counters gives a pair's entry its counters: those that it has, if they are as many, else others.
func (s *Steering) counters(key steerPair, entry *steerPins, slots uint32) {
	if old, ok := s.havePins.have[key]; ok && old.Counters != notCounted && old.Slots == slots {
		entry.Counters, entry.Slots = old.Counters, old.Slots
	} else if from, ok := s.slots.take(slots); ok {
		entry.Counters, entry.Slots = from, slots
	}
}

// recount finds out which counters are in use after something failed half-way.
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

// source is the preferred source address toward a destination, if one is wanted and ours to use.
func (s *Steering) source(to netip.Addr) netip.Addr {
	if to.Is4() {
		return s.prefer[0]
	}
	return s.prefer[1]
}

// addressOf is an address as the program reads it.
func addressOf(a netip.Addr) steerAddress {
	return words(a.As16())
}

// pairKey is a pair's key; false: they are of two families, or the source is no host prefix, so that no packet is theirs.
func pairKey(source string, destination netip.Prefix) (steerPair, bool) {
	p, err := netip.ParsePrefix(source)
	if err != nil || p.Addr().Is4() != destination.Addr().Is4() {
		return steerPair{}, false
	}
	return steerPair{Source: addressOf(p.Addr()), Destination: addressOf(destination.Addr())}, true
}
