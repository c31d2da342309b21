package linux

import (
	"errors"
	"os"
	"slices"
	"time"

	"github.com/fared/fared/dataplane/internal/neighbour"
	"github.com/fared/fared/dataplane/internal/rtnl"
)

// listen acts on news of links until Close.
func (p *Plane) listen() {
	for p.watch.Wait() == nil {
		p.mu.Lock()
		p.hear()
		if len(p.staleGroups) > 0 || len(p.staleRoutes) > 0 {
			p.report(p.sync())
		}
		p.mu.Unlock()
	}
}

// hear takes the news of links that there are. The caller holds mu, and calls sync.
func (p *Plane) hear() {
	events, err := p.watch.Poll()
	if err == nil {
		p.takeLinks(events)
		return
	}
	if errors.Is(err, os.ErrClosed) {
		return
	}
	p.stats.Overruns++
	if !errors.Is(err, rtnl.ErrOverrun) {
		p.log.Error("linux data plane: news of links are lost", "error", err)
	}
	// Buckets too: the kernel may have moved some before it carried out what this Plane sent last.
	if err := p.reread(true); err != nil {
		p.log.Error("linux data plane: cannot read back what the kernel has", "error", err)
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
			p.report(p.sync())
			p.mu.Unlock()
		case <-audit.C:
			p.audit()
		}
	}
}

func (p *Plane) report(failures []failure) {
	for _, f := range failures {
		p.log.Error("linux data plane: the kernel refused a change; trying again", "error", f.err)
	}
}

// audit compares everything with the kernel and repairs what differs.
func (p *Plane) audit() {
	var changed int
	var seed uint32
	var seeded bool
	p.mu.Lock()
	forwarding := p.forwarding // nil before the first Hello: what else is to be set is not known
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
		p.log.Error("linux data plane: settings of the kernel are not as they must be", "error", err)
	}
	p.stats.Differences += uint64(changed)
	if hash := p.capabilities.FlowHash; hash.GetAlgorithm() == computed && seeded && seed != p.hash.Seed {
		p.log.Error("linux data plane: net.ipv4.fib_multipath_hash_seed was changed; source ports land elsewhere until the next Hello",
			"was", p.hash.Seed, "is", seed)
	}
	if err := errors.Join(p.reread(true), p.setUpRules()); err != nil {
		p.log.Error("linux data plane: cannot read back what the kernel has", "error", err)
		return
	}
	for _, sp := range p.subPorts {
		for _, q := range sp.pools {
			if q != nil && q.broken != nil {
				q.broken = nil // perhaps it is taken now
				p.stale(sp)
			}
		}
	}
	p.report(p.sync())
}

// takeLinks brings what depends on links in line with news of them. The caller holds mu and calls sync.
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
			p.lose(e.Index)
			p.dark[e.Index] = true
		}
		if had && !e.Gone && old.Usable() == e.Usable() && old.Name == e.Name {
			continue // of no importance to nexthops, e.g. the MTU
		}
		p.linkNews++
		for _, sp := range p.subPorts {
			if sp.device == e.Name || had && sp.device == old.Name {
				p.relink(sp)
			}
		}
	}
}

// relink brings a sub-port in line with its device.
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

// abandon drops the packets that wait for next hops on devices without a carrier, once no group may send more of them there: an
// IPv6 socket keeps to such a device until its group is replaced. The caller holds mu.
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
		if err := neighbour.Abandon(p.handle, device); err != nil {
			p.log.Warn("linux data plane: connections may stand still for some seconds", "error", err)
		}
	}
	clear(p.dark)
}

// lose does here what the kernel does when a device goes down, loses its carrier or leaves: its nexthop objects are gone,
// from their groups too, and the other members have their buckets.
func (p *Plane) lose(device int) {
	lost := map[uint32]*pool{}
	for q := range p.pools {
		if q.device == device && q.subPort != nil || q.loopback && p.loopback() == device {
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
		// Members without a bucket go, and nothing moves.
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
			g.moved, g.movedAt, g.segments = true, now, nil
			p.stats.MovedByKernel++
		}
		for _, m := range g.members {
			if q := lost[m.ID]; q != nil && q.subPort != nil && q.subPort.index < len(g.weights) {
				g.weights[q.subPort.index] = 0
			}
		}
		if key.family == v6 && !slices.ContainsFunc(g.weights, func(w uint32) bool { return w > 0 }) {
			g.rejecting = true
		}
		p.staleGroups[key] = true
	}
}
