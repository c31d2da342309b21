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
func (d *Driver) Guard(report func(*farev1.Integrity)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.onIntegrity = report
}

// attend repairs changes that other programs make to the Driver's objects, until Close. After each repair it pauses for as
// long as the repair took, so that a program that keeps removing objects costs at most half a processor.
func (d *Driver) attend() {
	for d.news.Wait() == nil {
		began := time.Now()
		d.mu.Lock()
		if d.disturbed() {
			d.stats.Disturbances++
			d.mend()
		}
		d.mu.Unlock()
		select {
		case <-d.stop:
			return
		case <-time.After(time.Since(began)):
		}
	}
}

// disturbed drains the pending object events and reports whether any of them concerns the Driver. The caller holds mu.
func (d *Driver) disturbed() (concerned bool) {
	events, err := d.news.Poll()
	if errors.Is(err, rtnl.ErrOverrun) {
		d.stats.Overruns++
		return true
	}
	for _, e := range events {
		concerned = d.concerns(e) || concerned
	}
	return concerned
}

// concerns reports whether an event concerns an object that the Driver depends on, and records what it changes.
func (d *Driver) concerns(e rtnl.ObjectEvent) bool {
	switch {
	case e.Nexthop != nil:
		return d.touchedNexthop(*e.Nexthop)
	case e.Route != nil:
		return d.concernsRoute(*e.Route)
	case e.Rule != nil:
		return e.Rule.Table == d.config.Table || d.config.ofSource(e.Rule.Table)
	default:
		return d.concernsAddress(e)
	}
}

// touchedNexthop reports whether a nexthop object that another program changed is the Driver's. If it is a group, the owners
// of its buckets are unknown afterwards: the kernel deals them again even for equal members.
func (d *Driver) touchedNexthop(n rtnl.Nexthop) bool {
	ours := n.Protocol == d.config.Protocol || d.have.owners[n.ID] != nil
	for key, g := range d.have.groups {
		if g.id == n.ID && g.exists {
			ours = true
			d.differs("group %d was changed", g.id)
			g.moved, g.weights, g.segments = true, nil, nil
			d.staleGroups[key] = true
		}
	}
	return ours
}

// concernsRoute reports whether a route has the Driver's mark, or occupies the place of one of its routes.
func (d *Driver) concernsRoute(r rtnl.Route) bool {
	if r.Table != d.config.Table && !d.config.ofSource(r.Table) {
		return false
	}
	_, wanted := d.want.wantedAt(routeKey{r.Prefix, r.Table})
	return r.Protocol == d.config.Protocol || wanted && r.Metric == d.config.Metric
}

// mend compares the Driver's state with the kernel and repairs the differences. The caller holds mu.
func (d *Driver) mend() {
	if d.readBack() {
		d.report(d.sync())
	}
}

// readBack reads back the kernel state, except for buckets, and restores rules. It returns false if that failed; a retry is
// then scheduled.
func (d *Driver) readBack() bool {
	// Pending events are covered by this read-back; if they stayed, attend would repair a state that is already correct.
	d.disturbed()
	err := errors.Join(d.reread(false), d.setUpRules())
	if err != nil {
		d.log.Error("linux data plane: cannot read the kernel's objects back", "error", err)
		d.tear(fmt.Sprintf("the kernel cannot be read back: %v", err))
		d.unread = true
		d.repair.Reset(retryDelay)
	}
	return err == nil
}

// differs counts a difference between the kernel and the acknowledged state, and reports the first one.
func (d *Driver) differs(format string, args ...any) {
	d.stats.Differences++
	if d.torn == "" {
		d.tear(fmt.Sprintf(format, args...))
	}
}

// tear reports that packets do not follow the acknowledged state.
func (d *Driver) tear(what string) {
	d.torn = what
	d.integrity(false, what)
}

// mended reports that packets follow the acknowledged state again, after a sync without failures.
func (d *Driver) mended(failures []failure) {
	if d.torn == "" || len(failures) > 0 || d.unread {
		return
	}
	d.log.Warn("linux data plane: another program changed objects of the agent; they are repaired", "what", d.torn)
	d.integrity(true, d.torn)
	d.torn = ""
}

func (d *Driver) integrity(intact bool, message string) {
	if d.onIntegrity != nil {
		d.onIntegrity(&farev1.Integrity{Intact: intact, Message: message, Repairs: d.stats.Differences})
	}
}
