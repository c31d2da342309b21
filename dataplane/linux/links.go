package linux

import (
	"errors"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/dataplane/internal/neighbor"
	"github.com/fared/fared/internal/rtnl"
)

// listen handles link events until Close.
func (p *Plane) listen() {
	for p.watch.Wait() == nil {
		p.mu.Lock()
		p.hear()
		p.heard(p.watch.Ask(p.carriers()))
		if len(p.staleGroups) > 0 || len(p.staleRoutes) > 0 { // Ask is due often, and a plan visits all groups while nexthops are retired
			p.report(p.sync())
		}
		p.mu.Unlock()
	}
}

// carriers returns the interface indexes of the sub-ports that have a device.
func (p *Plane) carriers() []int {
	indexes := make([]int, 0, len(p.subPorts))
	for _, sp := range p.subPorts {
		if index, ok := p.names[sp.device]; ok {
			indexes = append(indexes, index)
		}
	}
	return indexes
}

// hear handles pending link events. The caller holds mu and calls sync.
func (p *Plane) hear() { p.heard(p.watch.Poll()) }

// heard handles link events, or the error of reading them.
func (p *Plane) heard(events []rtnl.LinkEvent, err error) {
	if err == nil {
		p.takeLinks(events)
		return
	}
	if errors.Is(err, os.ErrClosed) {
		return
	}
	p.stats.Overruns++
	if !errors.Is(err, rtnl.ErrOverrun) {
		p.log.Error("linux data plane: cannot receive link events", "error", err)
	}
	// Buckets too: the kernel may have moved some before it executed the last messages of this Plane.
	if err := p.reread(true); err != nil {
		p.log.Error("linux data plane: cannot read the kernel's objects back", "error", err)
	}
}

// keep repairs and audits until Close.
func (p *Plane) keep() {
	audit := time.NewTicker(p.config.AuditInterval)
	defer audit.Stop()
	defer p.repair.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-p.repair.C:
			p.mu.Lock()
			if p.unread {
				p.mend()
			} else {
				p.report(p.sync())
			}
			p.mu.Unlock()
		case <-audit.C:
			p.audit()
		}
	}
}

func (p *Plane) report(failures []failure) {
	for _, f := range failures {
		p.log.Error("linux data plane: the kernel refused a change; retrying", "error", f.err)
	}
	if len(failures) > 0 {
		p.tear(status.Convert(failures[0].refusal()).Message())
	}
}

// audit compares all state with the kernel and repairs the differences.
func (p *Plane) audit() {
	var changed int
	var seed uint32
	var seeded bool
	p.mu.Lock()
	forwarding := p.forwarding // nil before the first Hello, when the other required sysctls are unknown
	p.mu.Unlock()
	err := p.space.do(func() (err error) {
		if changed, err = setUp(); err != nil || forwarding == nil {
			return err
		}
		if transit(forwarding) {
			more, err := setUpTransit(p.hopsV6(forwarding))
			changed += more
			return err
		}
		seed, seeded, err = setUpSeed(p.config.Seed)
		return err
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stats.Audits++
	if err != nil {
		p.log.Error("linux data plane: cannot restore settings of the kernel", "error", err)
	}
	p.stats.Differences += uint64(changed)
	if hash := p.capabilities.FlowHash; hash.GetAlgorithm() == computed && seeded && seed != p.hash.Seed {
		p.log.Error("linux data plane: net.ipv4.fib_multipath_hash_seed was changed; source ports land elsewhere until the next Hello",
			"was", p.hash.Seed, "is", seed)
	}
	if !p.readBack() {
		return
	}
	for _, g := range slices.Collect(maps.Values(p.groups)) {
		p.auditGroup(g)
		p.mu.Unlock() // reading a large group takes milliseconds, and there may be many
		p.mu.Lock()
	}
	for _, sp := range p.subPorts {
		for _, q := range sp.pools {
			if q != nil && q.broken != nil {
				q.broken = nil // the kernel may accept it now
				p.stale(sp)
			}
		}
	}
	p.report(p.sync())
}

// auditGroup compares the buckets of a group with the kernel. The caller holds mu and calls sync.
func (p *Plane) auditGroup(g *group) {
	if !g.exists || p.groups[g.key] != g {
		return
	}
	same, err := p.sameBuckets(g)
	if err == nil && same {
		return
	}
	if err != nil {
		p.log.Error("linux data plane: cannot read the buckets of a group; replacing its buckets", "error", err)
	}
	p.differs("group %d has other buckets", g.id)
	g.moved, g.movedAt, g.weights, g.segments = true, time.Time{}, nil, nil
	p.staleGroups[g.key] = true
}

// takeLinks applies link events to all state that depends on links. The caller holds mu and calls sync.
func (p *Plane) takeLinks(events []rtnl.LinkEvent) {
	for _, e := range events {
		old, had := p.links[e.Index]
		if had && p.names[old.Name] == e.Index {
			delete(p.names, old.Name)
		}
		if e.Gone {
			delete(p.links, e.Index)
		} else {
			p.links[e.Index] = e.Link
			p.names[e.Name] = e.Index
		}
		if had && old.Usable() && (e.Gone || !e.Usable()) {
			lost := p.lose(e.Index)
			if e.Asked {
				p.remove(lost)
			}
			p.dark[e.Index] = true
		}
		if had && !e.Gone && old.Usable() == e.Usable() && old.Name == e.Name {
			continue // irrelevant to nexthops, e.g. the MTU
		}
		p.linkNews++
		for _, sp := range p.subPorts {
			if sp.device == e.Name || had && sp.device == old.Name {
				p.relink(sp)
			}
		}
	}
}

// relink updates a sub-port after a change of its device.
func (p *Plane) relink(sp *subPort) {
	for f := range sp.pools {
		if p.setHop(sp, family(f)) {
			p.generation++
		}
		if q := sp.pools[f]; q != nil {
			q.broken = nil
		}
	}
	p.stale(sp)
}

// abandon drops the packets that are queued for next hops on devices without a carrier, once no group sends packets there:
// an IPv6 socket keeps using such a device until its group is replaced. The caller holds mu.
func (p *Plane) abandon() {
	if len(p.dark) == 0 {
		return
	}
	for _, g := range p.groups {
		if g.moved {
			return // its repair is due
		}
	}
	for device := range p.dark {
		if err := neighbor.Abandon(p.handle, device); err != nil {
			p.log.Warn("linux data plane: connections may stall for some seconds", "error", err)
		}
	}
	clear(p.dark)
}

// remove deletes nexthop objects, as the kernel does when it handles the event of a lost carrier, which may take a second.
// The other members then receive their buckets immediately.
func (p *Plane) remove(nexthops map[uint32]*pool) {
	b := p.conn.Begin()
	for id := range nexthops {
		b.DelNexthop(id)
	}
	for _, err := range p.conn.Do(b) {
		if err != nil && !errors.Is(err, unix.ENOENT) { // the kernel has already removed it
			p.log.Warn("linux data plane: packets go to a device without a carrier until the kernel processes the lost carrier", "error", err)
		}
	}
}

// lose applies the effect in the kernel of a device that is set down, loses its carrier or disappears: its nexthop objects
// are deleted and removed from their groups, and the other members have their buckets. It returns these objects.
func (p *Plane) lose(device int) map[uint32]*pool {
	lost := map[uint32]*pool{}
	for _, q := range p.pools() {
		if q.device == device || q.loopback && p.loopback() == device {
			for _, id := range q.ids {
				lost[id] = q
			}
			p.forget(q, func(uint32) bool { return true })
		}
	}
	for id, n := range p.loose {
		if n.Device == device {
			lost[id] = nil
			delete(p.loose, id)
		}
	}
	has := func(members []rtnl.Member) bool {
		return slices.ContainsFunc(members, func(m rtnl.Member) bool { _, is := lost[m.ID]; return is })
	}
	for id, s := range p.strays {
		if has(s.Members) {
			s.segments = nil
			p.strays[id] = s
		}
	}
	now := time.Now()
	for key, g := range p.groups {
		if !g.exists || !has(g.members) {
			continue
		}
		// Members without a bucket leave, and no flow moves.
		idle := func(id uint32) bool {
			q, is := lost[id]
			return is && !(q != nil && q.loopback) && g.segments != nil &&
				!slices.ContainsFunc(g.segments, func(s segment) bool { return s.id == id })
		}
		g.members = slices.DeleteFunc(slices.Clone(g.members), func(m rtnl.Member) bool { return idle(m.ID) })
		g.witnesses = slices.DeleteFunc(slices.Clone(g.witnesses), idle)
		if !has(g.members) {
			continue
		}
		if !g.moved {
			g.moved, g.movedAt, g.answered, g.segments = true, now, false, nil
			p.stats.MovedByKernel++
		}
		for _, m := range g.members {
			if q := lost[m.ID]; q != nil && q.subPort != nil {
				if i := p.sourceOf(g.source).index(q.subPort); i >= 0 && i < len(g.weights) {
					g.weights[i] = 0
				}
			}
		}
		if key.family == v6 && !slices.ContainsFunc(g.weights, func(w uint32) bool { return w > 0 }) {
			g.rejecting = true
		}
		p.staleGroups[key] = true
	}
	return lost
}
