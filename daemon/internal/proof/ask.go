package proof

import (
	"net/netip"
	"slices"
	"time"
)

// askPace is the interval of the probes for a person.
const askPace = 20 * time.Millisecond

// Ask are probes for a person: Count by each of Paths.
type Ask struct {
	ID
	Source netip.Addr
	Paths  []Path
	// Size is that of the datagrams.
	Size, Count int
	// Done is called with the last reply.
	Done func()

	replies []Reply
	begun   int
	next    time.Time
}

// Reply is the result of a probe for a person.
type Reply struct {
	Path Path
	// RoundTrip is without the peer's time; 0 without an answer.
	RoundTrip time.Duration
	// Left is the device by which the probe left, "" if unknown. The next are the peer's, and the device of the
	// answer's arrival.
	Left                                      string
	ArrivedPlane, ArrivedDevice, ReturnDevice string
	Returned                                  string
	// Problem is "" if all is as it should be. Text describes it.
	Problem Problem
	Text    string
}

// Ask begins to send an Ask's probes.
func (c *Core) Ask(now time.Time, a *Ask) {
	a.next = now
	c.asks = append(c.asks, a)
	c.wake = time.Time{}
}

// Cancel ends an Ask early: its Done is not called any more.
func (c *Core) Cancel(a *Ask) {
	c.asks = slices.DeleteFunc(c.asks, func(x *Ask) bool { return x == a })
	a.Done = nil
}

// Replies returns the replies so far.
func (a *Ask) Replies() []Reply { return a.replies }

// runAsks sends the probes for persons that are due.
func (c *Core) runAsks(now time.Time) {
	c.asks = slices.DeleteFunc(c.asks, func(a *Ask) bool {
		if a.begun < a.Count*len(a.Paths) && !now.Before(a.next) && c.peers.of(a.ID) != nil {
			path := a.Paths[a.begun%len(a.Paths)]
			s := c.sendAtOnce(now, unit{ID: a.ID, source: a.Source, slot: path.Slot}, path, path.Plane, asked)
			s.ask, s.deadline = a, now.Add(4*Timeout)
			c.sends[len(c.sends)-1].Size = a.Size
			a.begun++
			a.next = now.Add(askPace)
		}
		return a.begun == a.Count*len(a.Paths) || c.peers.of(a.ID) == nil
	})
}

func (a *Ask) add(r Reply) {
	a.replies = append(a.replies, r)
	if len(a.replies) == a.Count*len(a.Paths) && a.Done != nil {
		a.Done()
	}
}

func (a *Ask) lost(s *sent) {
	a.add(Reply{Path: s.path, Left: s.left, Problem: Lost, Text: "no answer"})
}

func (a *Ask) refused(s *sent, text string) {
	a.add(Reply{Path: s.path, Problem: NotSent, Text: text})
}

func (a *Ask) answered(c *Core, s *sent, p *Packet, rtt time.Duration, device string, seen *verdict) {
	if s.expired {
		return // it is lost already
	}
	r := Reply{
		Path: s.path, RoundTrip: rtt, Left: s.left, ArrivedPlane: p.ArrivedPlane.String(), ArrivedDevice: p.ArrivedDevice.String(),
		ReturnDevice: p.ReturnDevice.String(), Returned: device,
	}
	switch {
	case s.leftElsewhere:
		r.Problem, r.Text = WrongSubPort, "expected to leave by "+c.deviceOf(s.path)
	case seen != nil:
		r.Problem, r.Text = seen.problem, "expected "+seen.expected
	}
	a.add(r)
}
