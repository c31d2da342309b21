package rdma

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/fared/fared/wecmp"
)

// Slot is a queue pair slot from fared (fare.v1.Slot).
type Slot struct {
	Slot   int
	Plane  string
	Device string // the sub-port's netdev; "" if the plane sprays
	Port   uint16 // UDP source port, 49152-65535
	Share  uint32 // share of the pair's traffic, parts per billion; 0: parked
}

// SlotStatus is a slot with its counters.
type SlotStatus struct {
	Slot
	// Sent counts payload bytes of first transmissions, Again those of retransmissions.
	Sent, Again uint64
	// Due is the slot's part, by the shares in force at each time, of the payload bytes posted on channels. While a
	// slot is stalled, the other slots get its share.
	Due uint64
	// Stalls counts the slot's stalls: intervals of Timing.Stall in which the peer acknowledged none of the data in
	// flight. Stalled reports a stall in progress.
	Stalls  uint64
	Stalled bool
	// Fell reports that the share has fallen by more than 1 %, relative to the largest share of the set, or to 0
	// because the plane's transport has changed: the slot's sub-port or plane has failed. Packets sent before that may
	// have left by another one.
	Fell bool
}

// slot is a slot of a set.
type slot struct {
	Slot
	transport   Transport
	elsewhere   bool // moved to a plane of another transport
	sent, again atomic.Uint64
	due         float64
	part        uint32 // share of new operations: Share, or 0 while this slot is stalled and another is not
	stalled     bool
	stalls      uint64
	fell        bool
}

// lanes are a set's channels, with the slots and their shares, which spread the operations.
type lanes struct {
	*common
	tunnels *tunnels
	all     []*lane
	slots   []*slot
	stripe  stripe
	// keyShares are the lanes' shares in the form that wecmp.Rendezvous takes. displaced: queued operations need a new
	// lane.
	keyShares []uint32
	displaced bool
	stalls    bool // a slot has stalled or has recovered: share must run
}

// lane is a channel and its queue.
type lane struct {
	Channel
	transport Transport
	limits    Limits
	ordered   bool
	slots     []int
	paths     []Path // the last argument of SetPaths
	share     int64  // share of new operations: the sum over slots that are neither parked nor stalled
	backlog   []*Op  // assigned to this lane, not yet posted
	closed    bool
}

func checkSlots(slots []Slot) error {
	if len(slots) == 0 {
		return fmt.Errorf("no slots")
	}
	for i, s := range slots {
		if s.Slot != i || s.Port == 0 {
			return fmt.Errorf("slot %d of %d has number %d and source port %d: slots must be numbered from 0 and have ports", i, len(slots), s.Slot, s.Port)
		}
	}
	return nil
}

// setSlots replaces the slots, as Set.SetSlots. The caller calls share afterwards.
func (ls *lanes) setSlots(slots []Slot) error {
	if err := checkSlots(slots); err != nil {
		return err
	}
	if len(slots) != len(ls.slots) {
		return fmt.Errorf("%d slots for a set that has %d: reconnect", len(slots), len(ls.slots))
	}
	before, after := 0.0, 0.0 // the largest shares; products of shares exceed 64 bits
	for i, is := range slots {
		before, after = max(before, float64(ls.slots[i].Share)), max(after, float64(is.Share))
	}
	for i, is := range slots {
		o := ls.slots[i]
		o.fell = o.fell || float64(is.Share)*before < 0.99*float64(o.Share)*after
		if t := ls.device.transportOf(is.Plane); t != o.transport {
			if !o.elsewhere {
				ls.device.log.Warn("a slot has moved to a plane of another transport: parked until it returns", "destination", ls.remote,
					"slot", i, "plane", is.Plane, "carried_by", t.Name(), "channel", o.transport.Name())
			}
			o.elsewhere, o.fell, o.Share = true, true, 0
			continue
		}
		o.elsewhere, o.Slot = false, is
	}
	return nil
}

// stalled handles a report that a channel's path has stalled or has recovered. It ignores reports on a lent path: the
// slot belongs to another channel, and only that channel can detect when the path works again.
func (ls *lanes) stalled(ch Channel, slot int, stalled bool) {
	own := slices.ContainsFunc(ls.all, func(l *lane) bool { return l.Channel == ch && slices.Contains(l.slots, slot) })
	if !own || ls.slots[slot].stalled == stalled {
		return
	}
	o := ls.slots[slot]
	o.stalled = stalled
	if stalled {
		o.stalls++
	}
	ls.stalls = true
	ls.stir()
}

// share applies the slots to the lanes. The other slots share the traffic of a stalled slot in proportion to their
// shares. If all slots have stalled, the weights hold unchanged, since the peer or this host is the likelier cause.
func (ls *lanes) share() {
	shares := make([]int64, len(ls.all))
	ls.keyShares = ls.keyShares[:0]
	all := !slices.ContainsFunc(ls.slots, func(o *slot) bool { return o.Share > 0 && !o.stalled })
	for _, o := range ls.slots {
		if o.part = o.Share; o.stalled && !all {
			o.part = 0
		}
	}
	for i, l := range ls.all {
		for _, at := range l.slots {
			shares[i] += int64(ls.slots[at].part)
		}
		ls.keyShares = append(ls.keyShares, uint32(shares[i]))
	}
	changed := false
	for i, l := range ls.all {
		changed = changed || l.share != shares[i]
		l.share = shares[i]
	}
	for i, l := range ls.all {
		paths := ls.pathsOf(i, l)
		if !slices.Equal(paths, l.paths) {
			l.paths = paths
			if ls.state == connected {
				l.SetPaths(slices.Clone(paths))
			}
		}
	}
	if changed {
		ls.stripe.set(shares)
		ls.displaced = true
	}
}

// parked reports whether every slot of a lane is parked.
func (ls *lanes) parked(l *lane) bool {
	return !slices.ContainsFunc(l.slots, func(at int) bool { return ls.slots[at].Share > 0 })
}

// pathsOf returns the paths a lane may send on. A lane whose slots are all parked borrows a live slot (a different one
// per lane, as far as possible) to finish its outstanding operations.
func (ls *lanes) pathsOf(number int, l *lane) []Path {
	paths := make([]Path, 0, len(l.slots))
	for _, at := range l.slots {
		o := ls.slots[at]
		paths = append(paths, o.path(o.Share))
	}
	if !ls.parked(l) {
		return paths
	}
	var living, stalled []*slot
	for _, o := range ls.slots {
		switch {
		case o.transport != l.transport:
		case o.part > 0:
			living = append(living, o)
		case o.Share > 0:
			stalled = append(stalled, o)
		}
	}
	if len(living) == 0 {
		living = stalled
	}
	if len(living) == 0 {
		return ls.tunnels.pathsFor(number, l, paths)
	}
	lent := living[number%len(living)].path(0)
	lent.Lent = true
	return []Path{lent}
}

func (o *slot) path(share uint32) Path {
	return Path{Slot: o.Slot.Slot, Plane: o.Plane, Device: o.Device, Port: o.Port, Share: share, Sent: &o.sent, Again: &o.again}
}

// booked adds n bytes that a channel has accepted to the due bytes of each slot, in proportion to their shares.
func (ls *lanes) booked(n int) {
	sum := 0.0
	for _, o := range ls.slots {
		sum += float64(o.part)
	}
	for _, o := range ls.slots {
		if o.part > 0 {
			o.due += float64(n) * float64(o.part) / sum
		}
	}
}

// status returns the slots with their counters.
func (ls *lanes) status() (out []SlotStatus) {
	for _, o := range ls.slots {
		out = append(out, SlotStatus{Slot: o.Slot, Sent: o.sent.Load(), Again: o.again.Load(), Due: uint64(o.due), Stalls: o.stalls, Stalled: o.stalled, Fell: o.fell})
	}
	return out
}

// offer posts a lane's backlog on its channel.
func (ls *lanes) offer(l *lane) {
	for len(l.backlog) > 0 && l.share > 0 {
		op := l.backlog[0]
		n := len(op.Local)
		if op.work == nil {
			n = 0 // operation of a tunnel: its bytes belong to no message
		}
		if !l.Post(op) {
			return
		}
		// The operation may have completed already: shared memory completes inside Post.
		l.backlog = slices.Delete(l.backlog, 0, 1)
		ls.booked(n)
	}
}

// offerAll posts the backlog of all lanes.
func (ls *lanes) offerAll() {
	for _, l := range ls.all {
		ls.offer(l)
	}
}

func (ls *lanes) enqueue(lane int, op *Op) {
	l := ls.all[lane]
	op.lane = lane
	l.backlog = append(l.backlog, op)
	ls.offer(l)
}

// of returns the lane of a key, -1 if no slot is live.
func (ls *lanes) of(key uint64) int {
	if i := wecmp.Rendezvous(ls.keyShares, key); i >= 0 {
		return i
	}
	return -1
}

// close closes the channels.
func (ls *lanes) close() {
	for _, l := range ls.all {
		if !l.closed {
			l.closed = true
			l.Close()
		}
		delete(ls.device.channels, l.Channel)
	}
}

// layout assigns slots to lanes: one lane per slot, but without order a single lane for all slots of a transport that
// spreads packets itself.
func layout(slots []*slot, keyed bool) (out [][]int) {
	spread := map[Transport]int{}
	for i, o := range slots {
		if o.transport.Limits().Spread && !keyed {
			if lane, ok := spread[o.transport]; ok {
				out[lane] = append(out[lane], i)
				continue
			}
			spread[o.transport] = len(out)
		}
		out = append(out, []int{i})
	}
	return out
}
