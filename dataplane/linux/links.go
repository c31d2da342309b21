package linux

import (
	"github.com/vishvananda/netlink"

	"github.com/fared/fared/dataplane/internal/carrier"
	"github.com/fared/fared/dataplane/internal/neighbor"
	"github.com/fared/fared/internal/rtnl"
)

// links follows the links of the sub-ports.
type links struct {
	state   *state
	kernel  *kernel
	reach   *reach
	watch   *carrier.Watch
	handle  *netlink.Handle // for neighbors
	changes uint64          // number of link changes that affect nexthops
	dark    map[int]bool    // devices without a carrier on which packets may be queued for a next hop
	fresh   chan struct{}   // notifies of a sub-port's new device, whose settings are the kernel's defaults
}

// carriers returns the last known links of the sub-ports that have a device.
func (l *links) carriers() []rtnl.Link {
	known := make([]rtnl.Link, 0, len(l.state.want.subPorts))
	for _, sp := range l.state.want.subPorts {
		if index, ok := l.state.have.names[sp.device]; ok {
			known = append(known, l.state.have.links[index])
		}
	}
	return known
}

// auditGroup compares the buckets of a group with the kernel. The caller holds mu and calls sync.
func (rd *reader) auditGroup(g *group) {
	if !g.exists || rd.state.have.groups[g.key] != g {
		return
	}
	same, err := rd.sameBuckets(g)
	if err == nil && same {
		return
	}
	if err != nil {
		rd.state.log.Error("linux data plane: cannot read the buckets of a group; replacing its buckets", "error", err)
	}
	rd.integrity.differs("group %d has other buckets", g.id)
	g.moved, g.weights, g.segments = true, nil, nil
	rd.state.staleGroups[g.key] = true
}

// takeLinks applies link events to all state that depends on links. The caller holds mu and calls sync.
func (l *links) takeLinks(events []rtnl.LinkEvent) {
	for _, e := range events {
		old, had := l.state.have.links[e.Index]
		if had {
			for _, name := range old.Names() {
				if l.state.have.names[name] == e.Index {
					delete(l.state.have.names, name)
				}
			}
		}
		if e.Gone {
			delete(l.state.have.links, e.Index)
		} else {
			l.state.have.links[e.Index] = e.Link
			for _, name := range e.Names() {
				l.state.have.names[name] = e.Index
				if (!had || old.Name != e.Name || !old.Has(name)) && l.state.want.byDevice[name] != nil {
					select {
					case l.fresh <- struct{}{}:
					default: // the earlier notification covers this device too
					}
				}
			}
		}
		if had && old.Usable() && (e.Gone || !e.Usable()) {
			lost := l.state.lose(e.Index)
			if e.Asked {
				l.kernel.remove(lost)
			}
			l.dark[e.Index] = true
		}
		if had && !e.Gone && old.Usable() == e.Usable() && old.Name == e.Name && old.AltNames == e.AltNames {
			continue // irrelevant to nexthops, e.g. the MTU
		}
		l.changes++
		if !e.Gone { // with its device the kernel removes IPv6 routes, and may remove that of IPv4
			l.reach.soon()
		}
		for _, sp := range l.state.want.subPorts {
			if e.Has(sp.device) || had && old.Has(sp.device) {
				l.state.relink(sp)
			}
		}
	}
}

// abandon drops the packets that are queued for next hops on devices without a carrier, once no group sends packets
// there: an IPv6 socket keeps using such a device until its group is replaced. The caller holds mu.
func (l *links) abandon() {
	if len(l.dark) == 0 {
		return
	}
	for _, g := range l.state.have.groups {
		if g.moved {
			return // its repair is due
		}
	}
	for device := range l.dark {
		if err := neighbor.Abandon(l.handle, device); err != nil {
			l.state.log.Warn("linux data plane: connections may stall for some seconds", "error", err)
		}
	}
	clear(l.dark)
}
