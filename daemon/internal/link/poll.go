package link

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/rtnl"
)

// startPolling schedules a poll for now, and wakes the namespace's goroutine for it. Any goroutine may call it.
func (n *namespace) startPolling() {
	n.wakeMu.Lock()
	defer n.wakeMu.Unlock()
	if !n.poll {
		return
	}
	now := time.Now()
	n.schedule.Start(now)
	if n.open != nil {
		_ = n.open.events.SetReadDeadline(now) // an error also ends the next read, which handles it
	}
}

// startAfterEvent is startPolling after a link event, for the goroutine that is about to set the deadline.
func (n *namespace) startAfterEvent() {
	n.wakeMu.Lock()
	defer n.wakeMu.Unlock()
	if n.poll {
		n.schedule.Event(time.Now())
	}
}

// cover sets the identity of the namespace whose carriers are covered. Any goroutine may call it.
func (n *namespace) cover(id string) {
	n.wakeMu.Lock()
	defer n.wakeMu.Unlock()
	n.covered = id
	n.applyCover()
}

// applyCover passes covered to the schedule. The caller holds wakeMu.
func (n *namespace) applyCover() {
	if n.open == nil || !n.poll {
		return
	}
	if now := time.Now(); n.schedule.Cover(n.covered != "" && n.covered == n.open.netnsID, now) {
		_ = n.open.events.SetReadDeadline(now) // as in startPolling
	}
}

// setOpen lets startPolling wake the reader of s, or no reader if s is nil. The whole state was read just before s was
// set.
func (n *namespace) setOpen(s *sockets) {
	n.wakeMu.Lock()
	defer n.wakeMu.Unlock()
	n.open = s
	n.applyCover()
}

// setDeadline lets the next read of events wait until tick, or until a poll is due. A subsequent startPolling brings
// the deadline forward.
func (n *namespace) setDeadline(tick time.Time) error {
	n.wakeMu.Lock()
	defer n.wakeMu.Unlock()
	if next := n.schedule.Next(); !next.IsZero() && next.Before(tick) {
		tick = next
	}
	return n.s.events.SetReadDeadline(tick)
}

// pollIfDue reads the carriers of all present sub-ports if the schedule demands it.
func (n *namespace) pollIfDue(buf []byte) error {
	start := time.Now()
	n.wakeMu.Lock()
	due := n.schedule.Due(start)
	n.wakeMu.Unlock()
	if !due {
		return nil
	}
	err := n.readCarriers(buf)
	n.wakeMu.Lock()
	n.schedule.Done(start, time.Now())
	n.wakeMu.Unlock()
	return err
}

// pollTries bounds how often a poll is repeated because events arrived in the meantime. The next poll comes in any
// case.
const pollTries = 3

// readCarriers queries every present device by its index: since Linux 6.8 such a query, unlike a dump, makes the kernel
// process the device's pending event. An answer is applied only if no event is queued behind it: each queued event may
// be older or newer than the answer, and is applied instead.
func (n *namespace) readCarriers(buf []byte) error {
	n.w.count(func(s *Stats) { s.Polls++ })
	for range pollTries {
		indexes := make([]int, 0, len(n.ports))
		for _, p := range n.ports {
			if p.present {
				indexes = append(indexes, p.link.index)
			}
		}
		n.answers = n.answers[:0]
		err := n.s.asks.links(indexes, func(m rtnl.Message) {
			if l, ok := parseLink(m.Body); ok && m.Kind == unix.RTM_NEWLINK {
				n.answers = append(n.answers, l)
			}
		})
		if err != nil {
			return err
		}
		quiet := true
		lost, err := n.drain(buf, func(datagram []byte) { quiet = false; n.applyAll(datagram) })
		if err != nil {
			return err
		}
		if lost {
			return n.resync(buf)
		}
		if quiet {
			for _, l := range n.answers {
				for _, p := range n.ports {
					if p.present && p.link.index == l.index {
						n.applyLink(p, l, false)
					}
				}
			}
		}
		n.reportAll()
		if n.pending {
			n.readPending()
			n.reportAll()
		}
		if quiet {
			break
		}
	}
	return nil
}
