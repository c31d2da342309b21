package linux

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/internal/beat"
	"github.com/fared/fared/internal/hostcheck"
	"github.com/fared/fared/internal/rtnl"
)

// listen handles link events until Close.
func (d *Driver) listen() {
	for d.links.watch.Wait() == nil {
		d.mu.Lock()
		d.pollLinks()
		d.follow() // before Ask: every event makes Ask due, which takes a tenth of a millisecond
		d.handleLinks(d.links.watch.Ask(d.links.carriers()))
		d.follow()
		d.mu.Unlock()
	}
}

// follow brings the kernel in line after link events, if they concern any group or route. The caller holds mu.
func (d *Driver) follow() {
	if len(d.state.staleGroups) > 0 || len(d.state.staleRoutes) > 0 { // Ask is due often, and a plan visits all groups while nexthops are retired
		d.report(d.sync())
	}
}

// settingsInterval is the pause between two looks at the sysctls that forwarding depends on: the kernel does not notify
// of their changes.
const settingsInterval = time.Second

// keep repairs and audits until Close.
func (d *Driver) keep() {
	audit := time.NewTicker(d.state.config.AuditInterval)
	defer audit.Stop()
	settings := time.NewTimer(beat.Until(time.Now(), settingsInterval))
	defer settings.Stop()
	defer d.repair.Stop()
	defer d.search.Stop()
	defer d.reach.timer.Stop()
	for {
		select {
		case <-d.stop:
			return
		case <-d.repair.C:
			d.mu.Lock()
			if d.integrity.unread {
				d.mend()
			} else {
				d.report(d.sync())
			}
			d.mu.Unlock()
		case <-d.search.C:
			d.look()
		case <-d.reach.timer.C:
			d.mu.Lock()
			d.reach.sync()
			d.mu.Unlock()
		case <-settings.C:
			d.restore()
			settings.Reset(beat.Until(time.Now(), settingsInterval))
		case <-d.links.fresh:
			d.resolveSoon()
		case <-audit.C:
			d.audit()
			d.lookInAudit()
		}
	}
}

// attend repairs changes that other programs make to the Driver's objects, until Close. After each repair it pauses for
// as long as the repair took, so that a program that keeps removing objects costs at most half a processor.
func (d *Driver) attend() {
	for d.others.news.Wait() == nil {
		began := time.Now()
		d.mu.Lock()
		concerned, leads := d.others.disturbed()
		if concerned {
			d.mendAfter(true)
		}
		if concerned || leads {
			d.lookSoon()
		}
		d.mu.Unlock()
		select {
		case <-d.stop:
			return
		case <-time.After(time.Since(began)):
		}
	}
}

// pollLinks handles pending link events. The caller holds mu and calls sync.
func (d *Driver) pollLinks() { d.handleLinks(d.links.watch.Poll()) }

// handleLinks handles link events, or the error of reading them.
func (d *Driver) handleLinks(events []rtnl.LinkEvent, err error) {
	if err == nil {
		if before := d.links.changes; len(events) > 0 {
			if d.links.takeLinks(events); d.links.changes != before {
				d.occupied.freeAll() // the kernel removes IPv4 routes of a failed link without a notification
			}
		}
		return
	}
	if errors.Is(err, os.ErrClosed) {
		return
	}
	d.state.stats.Overruns++
	if !errors.Is(err, rtnl.ErrOverrun) {
		d.state.log.Error("linux data plane: cannot receive link events", "error", err)
	}
	// Buckets too: the kernel may have moved some before it executed the last messages of this Driver.
	if err := d.reader.reread(true); err != nil {
		d.state.log.Error("linux data plane: cannot read the kernel's objects back", "error", err)
	}
}

// complain logs refusals that are tried again: one line for all of a sync, and none if the first one has the reason
// of the line before, until a sync without any. A device that is down is no error: its event follows, or the namespace
// of a pod ends, whose loopback device the runtime sets down first.
func (d *Driver) complain(failures []failure) {
	if len(failures) == 0 {
		return
	}
	f, level := failures[0], slog.LevelError
	if errors.Is(f.err, unix.ENETDOWN) {
		level = slog.LevelInfo
	}
	var number unix.Errno
	errors.As(f.err, &number)
	if reason := fmt.Sprint(f.op.kind, number); reason != d.complaint {
		d.complaint = reason
		d.state.log.Log(context.Background(), level, "linux data plane: the kernel refused a change; retrying", "error", f.err, "others", len(failures)-1)
	}
}

func (d *Driver) report(failures []failure) {
	d.complain(failures)
	if len(failures) > 0 {
		d.integrity.tear(status.Convert(failures[0].refusal()).Message())
	}
}

// restore sets the sysctls that forwarding depends on again, if another program has changed them, for example sysctl
// --system. Until then packets did not follow the weights.
func (d *Driver) restore() {
	d.inspecting.Lock() // until the result is published, so that no earlier one replaces it
	defer d.inspecting.Unlock()
	d.mu.Lock()
	forwarding, query, v6 := d.forwarding, d.query(d.forwarding), false // nil before the first Hello, when the other required sysctls are unknown
	if forwarding != nil {
		v6 = d.state.hopsV6(forwarding)
	}
	d.mu.Unlock()
	var changed []string
	limitations := d.inspect(query)
	err := d.space.Do(func() (err error) {
		if changed, err = setUp(transit(forwarding)); err == nil && forwarding != nil && transit(forwarding) {
			var more []string
			more, err = setUpTransit(v6)
			changed = append(changed, more...)
		}
		return err
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.limitations = d.limits(forwarding, limitations)
	for _, what := range changed {
		d.integrity.restored(what)
	}
	switch text := fmt.Sprint(err); {
	case err == nil:
		d.unsettled = ""
	case text != d.unsettled:
		d.unsettled = text
		d.state.log.Error("linux data plane: cannot restore settings of the kernel", "error", err)
	}
}

// inspect returns the settings and rules of this host with which packets are dropped. The Driver does not change them.
// The caller holds inspecting.
func (d *Driver) inspect(q *hostcheck.Query) (found []hostcheck.Finding) {
	err := d.space.Do(func() error {
		found = d.inspector.Inspect(q)
		return d.inspector.Err()
	})
	if err != nil {
		d.state.log.Debug("linux data plane: the firewall cannot be examined", "error", err)
	}
	return found
}

// SteeredBy names the device by which flows leave above this Driver, for the judgment of firewalls.
func (d *Driver) SteeredBy(device string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.steering = device
}

// Limitations returns the settings of this host with which packets are dropped, as of at most a second ago.
func (d *Driver) Limitations() []hostcheck.Finding {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.limitations
}

// resolveSoon sets the neighbor settings of the sub-ports after one of them got a new device.
func (d *Driver) resolveSoon() {
	d.mu.Lock()
	devices := d.state.have.devices(d.forwarding)
	d.mu.Unlock()
	if err := d.space.Do(func() error { _, err := setUpNeighbors(devices); return err }); err != nil {
		d.state.log.Warn("linux data plane: a sub-port may return a second later than its link", "error", err)
	}
}

// audit compares all state with the kernel and repairs the differences.
func (d *Driver) audit() {
	d.restore()
	var resolving []string
	var seed uint32
	var seeded bool
	d.mu.Lock()
	forwarding, devices := d.forwarding, d.state.have.devices(d.forwarding)
	computes := d.capabilities.FlowHash.GetAlgorithm() == computed
	d.mu.Unlock()
	var err error
	if forwarding != nil {
		err = d.space.Do(func() (err error) {
			resolving, _ = setUpNeighbors(devices) // forwarding does not depend on it; SetForwarding has reported an error
			if computes && !transit(forwarding) {  // otherwise the kernel is queried, because its seed is unknown or could not be set
				seed, seeded, err = setUpSeed(d.state.config.Seed)
			}
			return err
		})
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state.stats.Audits++
	if err != nil && d.unsettled == "" { // else restore has logged it
		d.state.log.Error("linux data plane: cannot restore settings of the kernel", "error", err)
	}
	d.state.stats.Differences += uint64(len(resolving))
	if computes && seeded && seed != d.prober.hash.Seed {
		d.state.log.Error("linux data plane: net.ipv4.fib_multipath_hash_seed was changed; source ports land elsewhere until the next Hello",
			"was", d.prober.hash.Seed, "is", seed)
	}
	if !d.readBack(false) {
		return
	}
	for _, g := range slices.Collect(maps.Values(d.state.have.groups)) {
		d.reader.auditGroup(g)
		d.mu.Unlock() // reading a large group takes milliseconds, and there may be many
		d.mu.Lock()
	}
	for _, sp := range d.state.want.subPorts {
		for _, q := range sp.pools {
			if q != nil && q.broken != nil {
				q.broken = nil // the kernel may accept it now
				d.state.stale(sp)
			}
		}
	}
	d.report(d.sync())
	d.reach.sync()
	d.occupied.freeAll()
}

// mend compares the Driver's state with the kernel and repairs the differences. The caller holds mu.
func (d *Driver) mend() { d.mendAfter(false) }

// mendAfter is mend, with readBack's parameter.
func (d *Driver) mendAfter(disturbed bool) {
	if d.readBack(disturbed) {
		d.report(d.sync())
	}
}

// readBack reads back the kernel state, except for buckets, and restores rules. It returns false if that failed; a
// retry is then scheduled. disturbed is true if events that the caller drained are the reason.
func (d *Driver) readBack(disturbed bool) bool {
	// Pending events are covered by this read-back; if they stayed, attend would repair a state that is already
	// correct.
	concerned, leads := d.others.disturbed()
	if leads {
		d.lookSoon()
	}
	if concerned || disturbed {
		d.state.stats.Disturbances++
	}
	err := errors.Join(d.reader.reread(false), d.rules.setUp())
	if err != nil {
		d.state.log.Error("linux data plane: cannot read the kernel's objects back", "error", err)
		d.integrity.tear(fmt.Sprintf("the kernel cannot be read back: %v", err))
		d.integrity.unread = true
		d.repair.Reset(retryDelay)
	}
	return err == nil
}
