package linux

import (
	"errors"
	"fmt"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/rtnl"
)

// Guard implements contract.Guardian. report is called when acknowledged state is found missing or changed in the kernel,
// and when it is restored. Guard must be called before all other methods.
func (p *Plane) Guard(report func(*farev1.Integrity)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tell = report
}

// attend repairs changes that other programs make to the Plane's objects, until Close. After each repair it pauses for as
// long as the repair took, so that a program that keeps removing objects costs at most half a processor.
func (p *Plane) attend() {
	for p.news.Wait() == nil {
		began := time.Now()
		p.mu.Lock()
		if p.disturbed() {
			p.stats.Disturbances++
			p.mend()
		}
		p.mu.Unlock()
		select {
		case <-p.stop:
			return
		case <-time.After(time.Since(began)):
		}
	}
}

// disturbed drains the pending object events and reports whether any of them concerns the Plane. The caller holds mu.
func (p *Plane) disturbed() (concerned bool) {
	events, err := p.news.Poll()
	if errors.Is(err, rtnl.ErrOverrun) {
		p.stats.Overruns++
		return true
	}
	for _, e := range events {
		concerned = p.concerns(e) || concerned
	}
	return concerned
}

// concerns reports whether an event concerns an object that the Plane depends on, and records what it changes.
func (p *Plane) concerns(e rtnl.ObjectEvent) bool {
	switch {
	case e.Nexthop != nil:
		return p.touchedNexthop(*e.Nexthop)
	case e.Route != nil:
		return p.concernsRoute(*e.Route)
	case e.Rule != nil:
		return e.Rule.Table == p.config.Table || p.config.ofSource(e.Rule.Table)
	default:
		return p.concernsAddress(e)
	}
}

// touchedNexthop reports whether a nexthop object that another program changed is the Plane's. If it is a group, the owners
// of its buckets are unknown afterwards: the kernel deals them again even for equal members.
func (p *Plane) touchedNexthop(n rtnl.Nexthop) bool {
	ours := n.Protocol == p.config.Protocol || p.owners[n.ID] != nil
	for key, g := range p.groups {
		if g.id == n.ID && g.exists {
			ours = true
			p.differs("group %d was changed", g.id)
			g.moved, g.movedAt, g.weights, g.segments = true, time.Time{}, nil, nil
			p.staleGroups[key] = true
		}
	}
	return ours
}

// concernsRoute reports whether a route has the Plane's mark, or occupies the place of one of its routes.
func (p *Plane) concernsRoute(r rtnl.Route) bool {
	if r.Table != p.config.Table && !p.config.ofSource(r.Table) {
		return false
	}
	_, wanted := p.wantedAt(routeKey{r.Prefix, r.Table})
	return r.Protocol == p.config.Protocol || wanted && r.Metric == p.config.Metric
}

// mend compares the Plane's state with the kernel and repairs the differences. The caller holds mu.
func (p *Plane) mend() {
	if p.readBack() {
		p.report(p.sync())
	}
}

// readBack reads back the kernel state, except for buckets, and restores rules. It returns false if that failed; a retry is
// then scheduled.
func (p *Plane) readBack() bool {
	// Pending events are covered by this read-back; if they stayed, attend would repair a state that is already correct.
	p.disturbed()
	err := errors.Join(p.reread(false), p.setUpRules())
	if err != nil {
		p.log.Error("linux data plane: cannot read the kernel's objects back", "error", err)
		p.tear(fmt.Sprintf("the kernel cannot be read back: %v", err))
		p.unread = true
		p.repair.Reset(retryDelay)
	}
	return err == nil
}

// differs counts a difference between the kernel and the acknowledged state, and reports the first one.
func (p *Plane) differs(format string, args ...any) {
	p.stats.Differences++
	if p.torn == "" {
		p.tear(fmt.Sprintf(format, args...))
	}
}

// tear reports that packets do not follow the acknowledged state.
func (p *Plane) tear(what string) {
	p.torn = what
	p.integrity(false, what)
}

// mended reports that packets follow the acknowledged state again, after a sync without failures.
func (p *Plane) mended(failures []failure) {
	if p.torn == "" || len(failures) > 0 || p.unread {
		return
	}
	p.log.Warn("linux data plane: another program changed objects of the agent; they are repaired", "what", p.torn)
	p.integrity(true, p.torn)
	p.torn = ""
}

func (p *Plane) integrity(intact bool, message string) {
	if p.tell != nil {
		p.tell(&farev1.Integrity{Intact: intact, Message: message, Repairs: p.stats.Differences})
	}
}
