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
func (d *Driver) listen() {
	for d.watch.Wait() == nil {
		d.mu.Lock()
		d.pollLinks()
		d.follow() // before Ask: every event makes Ask due, which takes a tenth of a millisecond
		d.handleLinks(d.watch.Ask(d.carriers()))
		d.follow()
		d.mu.Unlock()
	}
}

// follow brings the kernel in line after link events, if they concern any group or route. The caller holds mu.
func (d *Driver) follow() {
	if len(d.staleGroups) > 0 || len(d.staleRoutes) > 0 { // Ask is due often, and a plan visits all groups while nexthops are retired
		d.report(d.sync())
	}
}

// carriers returns the interface indexes of the sub-ports that have a device.
func (d *Driver) carriers() []int {
	indexes := make([]int, 0, len(d.want.subPorts))
	for _, sp := range d.want.subPorts {
		if index, ok := d.have.names[sp.device]; ok {
			indexes = append(indexes, index)
		}
	}
	return indexes
}

// pollLinks handles pending link events. The caller holds mu and calls sync.
func (d *Driver) pollLinks() { d.handleLinks(d.watch.Poll()) }

// handleLinks handles link events, or the error of reading them.
func (d *Driver) handleLinks(events []rtnl.LinkEvent, err error) {
	if err == nil {
		d.takeLinks(events)
		return
	}
	if errors.Is(err, os.ErrClosed) {
		return
	}
	d.stats.Overruns++
	if !errors.Is(err, rtnl.ErrOverrun) {
		d.log.Error("linux data plane: cannot receive link events", "error", err)
	}
	// Buckets too: the kernel may have moved some before it executed the last messages of this Driver.
	if err := d.reread(true); err != nil {
		d.log.Error("linux data plane: cannot read the kernel's objects back", "error", err)
	}
}

// keep repairs and audits until Close.
func (d *Driver) keep() {
	audit := time.NewTicker(d.config.AuditInterval)
	defer audit.Stop()
	defer d.repair.Stop()
	for {
		select {
		case <-d.stop:
			return
		case <-d.repair.C:
			d.mu.Lock()
			if d.unread {
				d.mend()
			} else {
				d.report(d.sync())
			}
			d.mu.Unlock()
		case <-audit.C:
			d.audit()
		}
	}
}

func (d *Driver) report(failures []failure) {
	for _, f := range failures {
		d.log.Error("linux data plane: the kernel refused a change; retrying", "error", f.err)
	}
	if len(failures) > 0 {
		d.tear(status.Convert(failures[0].refusal()).Message())
	}
}

// audit compares all state with the kernel and repairs the differences.
func (d *Driver) audit() {
	var changed int
	var seed uint32
	var seeded bool
	d.mu.Lock()
	forwarding := d.forwarding // nil before the first Hello, when the other required sysctls are unknown
	d.mu.Unlock()
	err := d.space.Do(func() (err error) {
		if changed, err = setUp(); err != nil || forwarding == nil {
			return err
		}
		if transit(forwarding) {
			more, err := setUpTransit(d.hopsV6(forwarding))
			changed += more
			return err
		}
		seed, seeded, err = setUpSeed(d.config.Seed)
		return err
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.stats.Audits++
	if err != nil {
		d.log.Error("linux data plane: cannot restore settings of the kernel", "error", err)
	}
	d.stats.Differences += uint64(changed)
	if hash := d.capabilities.FlowHash; hash.GetAlgorithm() == computed && seeded && seed != d.hash.Seed {
		d.log.Error("linux data plane: net.ipv4.fib_multipath_hash_seed was changed; source ports land elsewhere until the next Hello",
			"was", d.hash.Seed, "is", seed)
	}
	if !d.readBack() {
		return
	}
	for _, g := range slices.Collect(maps.Values(d.have.groups)) {
		d.auditGroup(g)
		d.mu.Unlock() // reading a large group takes milliseconds, and there may be many
		d.mu.Lock()
	}
	for _, sp := range d.want.subPorts {
		for _, q := range sp.pools {
			if q != nil && q.broken != nil {
				q.broken = nil // the kernel may accept it now
				d.stale(sp)
			}
		}
	}
	d.report(d.sync())
}

// auditGroup compares the buckets of a group with the kernel. The caller holds mu and calls sync.
func (d *Driver) auditGroup(g *group) {
	if !g.exists || d.have.groups[g.key] != g {
		return
	}
	same, err := d.sameBuckets(g)
	if err == nil && same {
		return
	}
	if err != nil {
		d.log.Error("linux data plane: cannot read the buckets of a group; replacing its buckets", "error", err)
	}
	d.differs("group %d has other buckets", g.id)
	g.moved, g.weights, g.segments = true, nil, nil
	d.staleGroups[g.key] = true
}

// takeLinks applies link events to all state that depends on links. The caller holds mu and calls sync.
func (d *Driver) takeLinks(events []rtnl.LinkEvent) {
	for _, e := range events {
		old, had := d.have.links[e.Index]
		if had && d.have.names[old.Name] == e.Index {
			delete(d.have.names, old.Name)
		}
		if e.Gone {
			delete(d.have.links, e.Index)
		} else {
			d.have.links[e.Index] = e.Link
			d.have.names[e.Name] = e.Index
		}
		if had && old.Usable() && (e.Gone || !e.Usable()) {
			lost := d.lose(e.Index)
			if e.Asked {
				d.remove(lost)
			}
			d.dark[e.Index] = true
		}
		if had && !e.Gone && old.Usable() == e.Usable() && old.Name == e.Name {
			continue // irrelevant to nexthops, e.g. the MTU
		}
		d.linkNews++
		for _, sp := range d.want.subPorts {
			if sp.device == e.Name || had && sp.device == old.Name {
				d.relink(sp)
			}
		}
	}
}

// relink updates a sub-port after a change of its device.
func (d *Driver) relink(sp *subPort) {
	for f := range sp.pools {
		if d.setHop(sp, family(f)) {
			d.want.generation++
		}
		if q := sp.pools[f]; q != nil {
			q.broken = nil
		}
	}
	d.stale(sp)
}

// abandon drops the packets that are queued for next hops on devices without a carrier, once no group sends packets there:
// an IPv6 socket keeps using such a device until its group is replaced. The caller holds mu.
func (d *Driver) abandon() {
	if len(d.dark) == 0 {
		return
	}
	for _, g := range d.have.groups {
		if g.moved {
			return // its repair is due
		}
	}
	for device := range d.dark {
		if err := neighbor.Abandon(d.handle, device); err != nil {
			d.log.Warn("linux data plane: connections may stall for some seconds", "error", err)
		}
	}
	clear(d.dark)
}

// remove deletes nexthop objects, as the kernel does when it handles the event of a lost carrier, which may take a second.
// The other members then receive their buckets immediately.
func (d *Driver) remove(nexthops map[uint32]*pool) {
	b := d.conn.Begin()
	for id := range nexthops {
		b.DelNexthop(id)
	}
	for _, err := range d.conn.Do(b) {
		if err != nil && !errors.Is(err, unix.ENOENT) { // the kernel has already removed it
			d.log.Warn("linux data plane: packets go to a device without a carrier until the kernel processes the lost carrier", "error", err)
		}
	}
}

// lose applies the effect in the kernel of a device that is set down, loses its carrier or disappears: its nexthop objects
// are deleted and removed from their groups, and the other members have their buckets. It returns these objects.
func (d *Driver) lose(device int) map[uint32]*pool {
	lost := map[uint32]*pool{}
	for _, q := range d.pools() {
		if q.device == device || q.loopback && d.have.loopback() == device {
			for _, id := range q.ids {
				lost[id] = q
			}
			d.have.forget(q, func(uint32) bool { return true })
		}
	}
	for id, n := range d.have.loose {
		if n.Device == device {
			lost[id] = nil
			delete(d.have.loose, id)
		}
	}
	has := func(members []rtnl.Member) bool {
		return slices.ContainsFunc(members, func(m rtnl.Member) bool { _, is := lost[m.ID]; return is })
	}
	for id, s := range d.have.strays {
		if has(s.Members) {
			s.segments = nil
			d.have.strays[id] = s
		}
	}
	for key, g := range d.have.groups {
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
			g.moved, g.segments = true, nil
			d.stats.MovedByKernel++
		}
		for _, m := range g.members {
			if q := lost[m.ID]; q != nil && q.subPort != nil {
				if i := d.want.sourceOf(g.source).index(q.subPort); i >= 0 && i < len(g.weights) {
					g.weights[i] = 0
				}
			}
		}
		if key.family == v6 && !slices.ContainsFunc(g.weights, func(w uint32) bool { return w > 0 }) {
			g.rejecting = true
		}
		d.staleGroups[key] = true
	}
	return lost
}
