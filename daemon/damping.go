package daemon

import (
	"fmt"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/status"
)

// damping counts the failures in a row of a sub-port's link, and holds the rises of a link with many of them. Its
// decisions reach the core as the recorded link state: a fall at once, a rise after its hold. The zero value has no
// failures.
type damping struct {
	failures int       // in a row: each less than quiet after the one before
	last     time.Time // of the last failure
	held     uint64    // rises held since the start
	reported bool      // a held rise was reported since the link last counted
}

// fail records n failures at one time.
func (d *damping) fail(c *config.Damping, n int, now time.Time) {
	if n == 0 {
		return
	}
	if now.Sub(d.last) >= c.Quiet {
		d.failures = 0
	}
	d.failures, d.last = d.failures+n, now
}

// hold returns the time for which a link that rises now must stay up without interruption before it counts; 0 means
// that it counts at once.
func (d *damping) hold(c *config.Damping, now time.Time) time.Duration {
	if c.Failures == 0 || d.failures < c.Failures || now.Sub(d.last) >= c.Quiet {
		return 0
	}
	hold := c.Hold
	for i := c.Failures; i < d.failures && hold < c.Longest; i++ {
		hold *= 2
	}
	return min(hold, c.Longest)
}

// failures returns how often a link failed between two of its states.
func failures(before, after *LinkEvent) int {
	changes := after.Transitions - before.Transitions
	if before.Up {
		changes++ // the first change is a failure
	}
	n := int(changes / 2)
	if before.Up && !after.Up {
		n = max(n, 1) // of a source that counts no transitions
	}
	return n
}

// holdRise holds a rise for a time, and shows why the link does not count meanwhile. damped reports that damping is the
// reason. A link that flaps is reported once, with its first held rise.
func (l *loop) holdRise(ev *LinkEvent, hold time.Duration, damped bool) {
	cur := &l.links[ev.SubPort]
	cur.held, cur.damped, cur.holdUntil, cur.rising = true, damped, l.wokenAt.Add(hold), *ev
	if !cur.Up {
		cur.Reason, cur.Persistent = "link up again, held down by increase_hold_up", false
	}
	if damped {
		cur.Reason = fmt.Sprintf("damped until %s after %d failures", cur.holdUntil.Format("15:04:05.000"), cur.damping.failures)
		cur.damping.held++
	}
	if damped && !cur.damping.reported {
		cur.damping.reported = true
		l.event(status.EventFault, l.core.Layout().SubPorts[ev.SubPort].Device,
			fmt.Sprintf("link flaps: rises are damped after %d failures, this one for %v", cur.damping.failures, hold))
	}
	l.admitSubPort(ev.SubPort)
	l.builder.MarkFabric()
}
