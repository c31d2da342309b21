package bpf

import (
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/prefixmap"
)

// desired is the forwarding that the control plane has set: sub-ports, source groups, groups and destinations. Its
// methods change memory alone.
type desired struct {
	sunh       steerSettings      // the subnet and EtherType of SUNH, from Config
	forwarding *farev1.Forwarding // nil before the first
	layout     layout
	subPorts   map[string]*farev1.ForwardingSubPort // by device
	down       map[string]bool                      // devices that the control plane has set down
	inherited  map[string]bool                      // devices that it had set down for an earlier process; until Settle
	groups     map[uint32]*farev1.Vector
	carrying   map[string]int                                    // number of weights and slots of groups, by device
	dests      prefixmap.Map[netip.Prefix, contract.Destination] // by contract.DestinationKey
	turned     bool                                              // former source groups have become over
	prefer     [2]netip.Addr                                     // sources of IPv4 and IPv6; not valid without a preference
	settled    bool                                              // all acknowledged state has been committed again
}

func newDesired(cfg Config) desired {
	return desired{
		sunh: sunhSettings(cfg), down: map[string]bool{}, inherited: map[string]bool{}, groups: map[uint32]*farev1.Vector{}, carrying: map[string]int{},
	}
}

// setForwarding applies a valid forwarding with its layout.
func (w *desired) setForwarding(f *farev1.Forwarding, l layout) {
	w.forwarding, w.layout, w.subPorts = f, l, map[string]*farev1.ForwardingSubPort{}
	for _, plane := range f.Planes {
		for _, sp := range plane.SubPorts {
			w.subPorts[sp.Device] = sp
		}
	}
}

// keepFormer adds the source groups that a layout lacks and that have destinations.
func (w *desired) keepFormer(next *layout) {
	if w.layout.lacksNone(next) {
		return
	}
	destinations := map[netip.Prefix]int{}
	for key := range w.dests.All() {
		destinations[key.Group]++
	}
	next.keep(&w.layout, destinations)
}

// forgetSubPorts removes the states of sub-ports that the forwarding lacks.
func (w *desired) forgetSubPorts() {
	gone := func(device string, _ bool) bool { return w.subPorts[device] == nil }
	maps.DeleteFunc(w.down, gone)
	maps.DeleteFunc(w.inherited, gone)
}

// steered lists the steered ports.
func (w *desired) steered() (ports []port) {
	for _, p := range w.forwarding.UdpPorts {
		ports = append(ports, port{unix.IPPROTO_UDP, uint16(p)})
	}
	for _, p := range w.forwarding.TcpPorts {
		ports = append(ports, port{unix.IPPROTO_TCP, uint16(p)})
	}
	return ports
}

// apply applies a change.
func (w *desired) apply(c contract.Change, t *touched) {
	switch c.Kind {
	case contract.SubPortChange:
		t.subPorts = true
		delete(w.inherited, c.Device)
		if c.Up {
			delete(w.down, c.Device)
		} else {
			w.down[c.Device] = true
		}
	case contract.GroupChange:
		t.group(c.Group)
		w.countCarrying(w.groups[c.Group], -1)
		w.countCarrying(c.After, 1)
		if c.After == nil {
			delete(w.groups, c.Group)
		} else {
			w.groups[c.Group] = c.After
		}
	case contract.DestinationChange:
		w.touchDestination(c.Key(), c.From, t)
		w.touchDestination(c.Key(), c.To, t)
		had := w.dests.Len()
		if c.To.Group == 0 {
			w.dests.Delete(c.Source, c.Prefix)
		} else {
			d, _ := w.dests.Add(c.Source, c.Prefix)
			*d = c.To
		}
		w.countFormer(c.Source, w.dests.Len()-had)
	}
}

// countFormer adds n to the destinations of a former source group: the removal of the first one ends it.
func (w *desired) countFormer(name netip.Prefix, n int) {
	s := w.layout.source(name)
	if s == nil || !s.former {
		return
	}
	s.left += n
	w.turned = w.turned || n < 0 && !s.over
	s.over = s.over || n < 0
}

// countCarrying adds n to carrying for each weight and slot of a group, which may be nil.
func (w *desired) countCarrying(g *farev1.Vector, n int) {
	for _, m := range g.GetMembers() {
		if m.Weight > 0 {
			w.carrying[m.Device] += n
		}
	}
	for _, slot := range g.GetSlots() {
		w.carrying[slot.Device] += n
	}
}

// touched collects the objects that changes may affect.
type touched struct {
	subPorts bool // states, links or next hops of sub-ports
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

// touchAll touches all desired objects and, once settled, all entries in the kernel.
func (w *desired) touchAll(t *touched) {
	for id := range w.groups {
		t.group(id)
	}
	for key, d := range w.dests.All() {
		w.touchDestination(contract.DestinationKey{Source: key.Group, Prefix: key.Prefix}, *d, t)
	}
	t.all = w.settled
}

// touchGroups touches the groups that have members on devices, or all groups.
func (w *desired) touchGroups(devices map[string]bool, all bool, t *touched) {
	for id, g := range w.groups {
		if all || slices.ContainsFunc(g.Members, func(m *farev1.VectorMember) bool { return devices[m.Device] }) {
			t.group(id)
		}
	}
}

// touchDestination touches a destination and its pairs, which may move between destinations of different source groups.
func (w *desired) touchDestination(key contract.DestinationKey, d contract.Destination, t *touched) {
	t.dest(key)
	for _, pair := range d.Pairs {
		k, ok := pairKey(pair.Source, key.Prefix)
		if !ok {
			continue
		}
		t.pair(k)
		for i := range w.layout.sources {
			if s := &w.layout.sources[i]; s.name != key.Source && s.has(k.Source.prefix()) {
				t.dest(contract.DestinationKey{Source: s.name, Prefix: key.Prefix})
			}
		}
	}
}

// owner returns the name of the source group that holds the flow pins of a pair: the first one of its source address
// that has the destination. It returns false if none has it.
func (w *desired) owner(from, to netip.Prefix) (netip.Prefix, bool) {
	for i := range w.layout.sources {
		if s := &w.layout.sources[i]; s.has(from) && w.dests.Get(s.name, to) != nil {
			return s.name, true
		}
	}
	return netip.Prefix{}, false
}

// routed reports whether a source group of Forwarding has a destination.
func (w *desired) routed(prefix netip.Prefix) bool {
	for i := range w.layout.sources {
		if w.dests.Get(w.layout.sources[i].name, prefix) != nil {
			return true
		}
	}
	return false
}

// source returns the preferred source address toward a destination, if one is wanted and local.
func (w *desired) source(to netip.Addr) netip.Addr {
	if to.Is4() {
		return w.prefer[0]
	}
	return w.prefer[1]
}
