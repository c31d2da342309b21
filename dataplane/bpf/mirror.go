package bpf

import (
	"errors"
	"net/netip"

	"github.com/fared/fared/internal/rtnl"
)

// mirror is the state of the kernel as known to Steering. Executed ops, events and read-backs change it.
type mirror struct {
	cookie   uint64 // number of the network namespace
	settings arrayMap[steerSettings]
	ports    arrayMap[uint64]
	names    arrayMap[steerSource]
	live     arrayMap[steerLive]
	places   arrayMap[steerPlace]
	planes   arrayMap[steerPlane]
	devices  hashMap[steerDevice, steerDevicePlaces]
	sources  hashMap[steerAddress, uint32]
	groups   hashMap[uint32, steerGroup]
	dests    hashMap[steerTarget, steerDestination]
	pins     hashMap[steerPair, steerPins]
	tables   hashMap[steerPair, steerTable]
	slots    *slotCounters

	pinned    *pinned           // the program, its maps and pins
	routes    *routes           // to the anchor
	neighbors *neighbors        // nil without SUNH
	links     map[int]rtnl.Link // by index
}

// compared is a map of the kernel that can be compared with the mirror.
type compared interface {
	read() error
	repair(*findings) error
}

// words returns the maps that all packets depend on.
func (m *mirror) words() []compared { return []compared{&m.live, &m.settings, &m.names} }

// entries returns the other maps, in the order of their repair.
func (m *mirror) entries() []compared {
	return []compared{&m.ports, &m.places, &m.planes, &m.devices, &m.sources, &m.groups, &m.tables, &m.pins, &m.dests}
}

// readMaps reads the state written by an earlier process.
func (m *mirror) readMaps() (err error) {
	o := &m.pinned.objects
	m.settings.kernel, m.ports.kernel, m.live.kernel = o.FaredSettings, o.FaredPorts, o.FaredLive
	m.places.kernel, m.planes.kernel, m.names.kernel = o.FaredPlaces, o.FaredPlanes, o.FaredNames
	m.devices.kernel, m.sources.kernel, m.groups.kernel = o.FaredDevices, o.FaredSources, o.FaredGroups
	m.dests.kernel, m.pins.kernel, m.tables.kernel = o.FaredDests, o.FaredPins, o.FaredTables
	for _, all := range [][]compared{m.words(), m.entries()} {
		for _, one := range all {
			err = errors.Join(err, one.read())
		}
	}
	m.slots = newSlotCounters(o.FaredSlots, m.pinned.adopted, m.usedCounters())
	return err
}

// usedCounters returns the counters of pairs.
func (m *mirror) usedCounters() (used []span) {
	for _, p := range m.pins.have {
		if p.Counters != notCounted {
			used = append(used, span{p.Counters, p.Slots})
		}
	}
	return used
}

// setDown returns the devices that the control plane had set down for an earlier process.
func (m *mirror) setDown() map[string]bool {
	down := map[string]bool{}
	for _, p := range m.places.have {
		if p.Flags&placeDown != 0 {
			down[text(p.Device[:])] = true
		}
	}
	return down
}

// sourceNumbers returns the numbers of source groups.
func (m *mirror) sourceNumbers() map[netip.Prefix]int {
	have := map[netip.Prefix]int{}
	for i, n := range m.names.have {
		if n.Used != 0 {
			have[n.name()] = i
		}
	}
	return have
}

// applyLinks applies link events. It returns the devices that have lost their carrier, and the names of those whose
// carrier came or went.
func (m *mirror) applyLinks(events []rtnl.LinkEvent) (dark []int, changed map[string]bool) {
	changed = map[string]bool{}
	for _, e := range events {
		old := m.links[e.Index]
		if e.Gone || e.Usable() != old.Usable() || e.Name != old.Name || e.AltNames != old.AltNames {
			for _, name := range append(old.Names(), e.Names()...) {
				changed[name] = true
			}
		}
		if old.Usable() && !e.Gone && !e.Usable() {
			dark = append(dark, e.Index)
		} else { // a lost carrier changes no address, and a request of the address would wait for the kernel's work on the loss
			m.neighbors.forget(e.Index)
		}
		if e.Gone {
			delete(m.links, e.Index)
		} else {
			m.links[e.Index] = e.Link
		}
	}
	return dark, changed
}

// linksByName returns the links by their names and alternative names.
func (m *mirror) linksByName() map[string]rtnl.Link {
	byName := make(map[string]rtnl.Link, len(m.links))
	for _, l := range m.links {
		for _, name := range l.Names() {
			byName[name] = l
		}
	}
	return byName
}

// subPortLinks returns the links of the desired sub-ports that have a device.
func (m *mirror) subPortLinks(want *desired) []rtnl.Link {
	known := make([]rtnl.Link, 0, len(want.subPorts))
	for _, l := range m.links {
		for _, name := range l.Names() {
			if want.subPorts[name] != nil {
				known = append(known, l)
				break
			}
		}
	}
	return known
}

// unresolved returns the next hops of sub-ports without a known MAC address, or all.
func (m *mirror) unresolved(want *desired, all bool) map[hop]bool {
	hops := map[hop]bool{}
	for _, l := range want.layout.sources {
		for device, i := range l.place {
			p := m.places.have[l.at(i)]
			if p.Ifindex == 0 || p.Flags&placeResolved != 0 && !all {
				continue
			}
			for _, text := range []string{want.subPorts[device].NextHopV4, want.subPorts[device].NextHopV6} {
				if addr, err := netip.ParseAddr(text); err == nil {
					hops[hop{int(p.Ifindex), addr}] = true
				}
			}
		}
	}
	return hops
}
