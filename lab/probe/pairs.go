package probe

import (
	"slices"
	"time"

	"github.com/fared/fared/topo"
)

// Sends reports whether the traffic sends packets; otherwise it only follows weights.
func (t *Traffic) Sends() bool { return t.rate > 0 }

// SlotsMoved returns the number of slots that have changed their place since the start, over all servers.
func (t *Traffic) SlotsMoved() uint64 { return t.moved.Load() }

// Followers returns the followers of the servers' daemons, by server.
func (t *Traffic) Followers() (all []*Follower) {
	for _, o := range t.senders {
		all = append(all, o.weights)
	}
	return all
}

// Time returns the moment of a packet's sending from its time since the start of the traffic, nanoseconds.
func (t *Traffic) Time(sent int64) time.Time { return t.epoch.Add(time.Duration(sent)) }

// Left returns the time and plane of a server's last packet toward a source group from a slot that it no longer uses,
// or false if there was none.
func (t *Traffic) Left(server, dst int) (at time.Time, plane int, found bool) {
	last, in := t.senders[server].left(dst)
	return t.Time(last), in.Plane, last >= 0
}

// Ended returns the tally that ended before the last back ones, 0 to 2, or nil if there is none.
func (t *Traffic) Ended(back uint32) *Tally {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if n, known := t.all.Load(t.now.number - 1 - back); known {
		return n.(*Tally)
	}
	return nil
}

// ScaleShares multiplies the shares of a server's slots by factors of their sub-ports until its next change of weights.
// It makes a faulty sender, which counters must notice.
func (t *Traffic) ScaleShares(server int, factors map[string]int64) {
	o := t.senders[server]
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, out := range o.order {
		for i := range out.slots {
			out.slots[i].share *= factors[out.slots[i].device]
		}
	}
}

// Gap returns the time between two packets of a pair of loopbacks while all of them are reachable.
func (t *Traffic) Gap() time.Duration {
	return time.Duration(float64((t.Servers-1)*t.GPUs*t.GPUs) / float64(t.rate) * float64(time.Second))
}

// Covered reports whether each server has sent n packets or more to each of its reachable destinations since the last
// Roll. A muted server counts as done.
func (t *Traffic) Covered(n uint64) bool {
	t.mu.RLock()
	now := t.now
	t.mu.RUnlock()
	return !slices.ContainsFunc(t.senders, func(o *sender) bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return !o.muted && slices.ContainsFunc(o.order, func(out *outlet) bool { return now.sent[out.pair].Load() < n })
	})
}

// Ends returns the source groups of a pair of loopbacks.
func (t *Traffic) Ends(pair int) (src, dst int) {
	return t.groupOf(pair / t.loopbacks), t.groupOf(pair % t.loopbacks)
}

// PairsOf returns the pairs of loopbacks of two source groups.
func (t *Traffic) PairsOf(src, dst int) (all []int) {
	from, to := t.Groups()[src], t.Groups()[dst]
	for a := range from.GPUs {
		for b := range to.GPUs {
			all = append(all, t.pair(from.Server.Index, from.GPU+a, to.Server.Index, to.GPU+b))
		}
	}
	return all
}

// PortsPending reports whether some sending slots have source ports that were chosen to land on the slots' places, and
// others do not have them yet. Where the data plane steers by slots' ports, whatever they are, none is pending.
func (t *Traffic) PortsPending() bool {
	var placed, unplaced bool
	for _, o := range t.senders {
		o.mu.Lock()
		for _, out := range o.order {
			placed, unplaced = placed || out.placed, unplaced || !out.placed
		}
		o.mu.Unlock()
	}
	return placed && unplaced
}

// Between returns the numbers of packets sent from one source group to another, and of those that arrived.
func (t *Traffic) Between(n *Tally, src, dst int) (sent, received uint64) {
	for _, pair := range t.PairsOf(src, dst) {
		sent += n.sent[pair].Load()
		received += n.received[pair].Load()
	}
	return sent, received
}

// Sent returns the number of packets of a tally.
func (n *Tally) Sent() uint64 { return sum(n.sent) }

// Duplicated returns the number of packets that arrived more than once.
func (n *Tally) Duplicated() uint64 { return n.duplicated.Load() }

// Late returns the number of packets that arrived after they were counted as lost.
func (n *Tally) Late() uint64 { return n.late.Load() }

// Astray returns the number of a pair's packets that arrived at leaves on cables of another source group.
func (n *Tally) Astray(pair int) uint64 { return n.astray[pair].Load() }

// Lost returns the number of packets that have not arrived. It is final after [Traffic.Gather].
func (n *Tally) Lost() (lost uint64) {
	for pair := range n.sent {
		if sent, received := n.sent[pair].Load(), n.received[pair].Load(); sent > received {
			lost += sent - received
		}
	}
	return lost
}

// Counts returns the number of packets from one source group to another that the leaves have seen, by cable of the
// source group.
func (t *Traffic) Counts(n *Tally, src, dst int) []uint64 {
	counts := make([]uint64, len(t.Groups()[src].Cables))
	for i := range counts {
		for _, pair := range t.PairsOf(src, dst) {
			counts[i] += n.seen[pair*t.lanes+i].Load()
		}
	}
	return counts
}

// Slack returns the number of packets by which the counts of a source group may differ from the shares of its slots,
// for a plane and for a sub-port: see sender.slack.
func (t *Traffic) Slack(src int) (inPlane, inLane float64) {
	g := t.Groups()[src]
	return t.senders[g.Server.Index].slack(g)
}

// slack returns the tolerance of a plane's packet count, and of a sub-port's, within a span of time: two packets for
// each of its slots, because one may be due at either end of the span, and one for rounding. A sub-port has no more
// slots than its plane.
func (o *sender) slack(g *topo.Group) (inPlane, inLane float64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	plane, device := 0, 0
	for _, out := range o.order {
		inPlane, onDevice := map[int]int{}, map[string]int{}
		for _, s := range out.slots {
			inPlane[s.lane.Plane]++
			onDevice[s.device]++
			plane, device = max(plane, inPlane[s.lane.Plane]), max(device, onDevice[s.device])
		}
	}
	pairs := 2 * g.GPUs * g.GPUs
	return float64(plane*pairs) + 1, float64(device*pairs) + 1
}
