package rdma

import (
	"fmt"
	"slices"
	"sync/atomic"
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
	// Due is the slot's part, by the shares in force at each time, of the payload bytes posted on channels. While a slot is stalled, the
	// other slots get its share.
	Due uint64
	// Stalls counts the slot's stalls: intervals of Timing.Stall in which the peer acknowledged none of the data in flight. Stalled reports
	// a stall in progress.
	Stalls  uint64
	Stalled bool
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

// SetSlots replaces the slots of the set. Their number must stay the same; planes, ports and shares may differ. A slot that moves to a
// plane of another transport is parked until it returns, since its channel cannot follow; the other slots carry its traffic by their
// shares. A set of a device with Config.Weights gets its slots from fared automatically.
func (s *Set) SetSlots(slots []Slot) (err error) {
	s.device.Do(func() { err = s.setSlots(slots) })
	return err
}

func (s *Set) setSlots(slots []Slot) error {
	if err := checkSlots(slots); err != nil {
		return err
	}
	if len(slots) != len(s.slots) {
		return fmt.Errorf("%d slots for a set that has %d: reconnect", len(slots), len(s.slots))
	}
	for i, is := range slots {
		o := s.slots[i]
		if t := s.device.transportOf(is.Plane); t != o.transport {
			if !o.elsewhere {
				s.device.log.Warn("a slot has moved to a plane of another transport: parked until it returns", "destination", s.remote,
					"slot", i, "plane", is.Plane, "carried_by", t.Name(), "channel", o.transport.Name())
			}
			o.elsewhere, o.Share = true, 0
			continue
		}
		o.elsewhere, o.Slot = false, is
	}
	s.share()
	return nil
}

// stalled handles a report that a channel's path has stalled or has recovered. It ignores reports on a lent path: the slot belongs to
// another channel, and only that channel can detect when the path works again.
func (s *Set) stalled(ch Channel, slot int, stalled bool) {
	own := slices.ContainsFunc(s.lanes, func(l *lane) bool { return l.Channel == ch && slices.Contains(l.slots, slot) })
	if !own || s.slots[slot].stalled == stalled {
		return
	}
	o := s.slots[slot]
	o.stalled = stalled
	if stalled {
		o.stalls++
	}
	s.stalls = true
	s.device.stir(s)
}

// share applies the slots to the lanes. The other slots share the traffic of a stalled slot in proportion to their shares. If all slots
// have stalled, the weights hold unchanged, since the peer or this host is the likelier cause.
func (s *Set) share() {
	shares := make([]int64, len(s.lanes))
	s.keyShares = s.keyShares[:0]
	all := !slices.ContainsFunc(s.slots, func(o *slot) bool { return o.Share > 0 && !o.stalled })
	for _, o := range s.slots {
		if o.part = o.Share; o.stalled && !all {
			o.part = 0
		}
	}
	for i, l := range s.lanes {
		for _, at := range l.slots {
			shares[i] += int64(s.slots[at].part)
		}
		s.keyShares = append(s.keyShares, uint32(shares[i]))
	}
	changed := false
	for i, l := range s.lanes {
		changed = changed || l.share != shares[i]
		l.share = shares[i]
	}
	for i, l := range s.lanes {
		paths := s.pathsOf(i, l)
		if !slices.Equal(paths, l.paths) {
			l.paths = paths
			if s.state == connected {
				l.SetPaths(slices.Clone(paths))
			}
		}
	}
	if changed {
		s.stripe.set(shares)
		s.displaced = true
	}
	if op := s.credits.op; op != nil && s.lanes[op.lane].share == 0 && !s.parked(s.lanes[op.lane]) {
		s.credits.op, s.credits.sentAny = nil, false // the credit waits on a stalled lane: send it by another
	}
	s.device.stir(s)
}

// parked reports whether every slot of a lane is parked.
func (s *Set) parked(l *lane) bool {
	return !slices.ContainsFunc(l.slots, func(at int) bool { return s.slots[at].Share > 0 })
}

// pathsOf returns the paths a lane may send on. A lane whose slots are all parked borrows a live slot (a different one per lane, as far as
// possible) to finish its outstanding operations.
func (s *Set) pathsOf(number int, l *lane) []Path {
	paths := make([]Path, 0, len(l.slots))
	for _, at := range l.slots {
		o := s.slots[at]
		paths = append(paths, o.path(o.Share))
	}
	if !s.parked(l) {
		return paths
	}
	var living, stalled []*slot
	for _, o := range s.slots {
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
		return s.tunnelFor(number, l, paths)
	}
	lent := living[number%len(living)].path(0)
	lent.Lent = true
	return []Path{lent}
}

func (o *slot) path(share uint32) Path {
	return Path{Slot: o.Slot.Slot, Plane: o.Plane, Device: o.Device, Port: o.Port, Share: share, Sent: &o.sent, Again: &o.again}
}

// booked adds n bytes that a channel has accepted to the due bytes of each slot, in proportion to their shares.
func (s *Set) booked(n int) {
	sum := 0.0
	for _, o := range s.slots {
		sum += float64(o.part)
	}
	for _, o := range s.slots {
		if o.part > 0 {
			o.due += float64(n) * float64(o.part) / sum
		}
	}
}

// Slots returns the set's slots with their counters.
func (s *Set) Slots() (out []SlotStatus) {
	s.device.Do(func() {
		for _, o := range s.slots {
			out = append(out, SlotStatus{Slot: o.Slot, Sent: o.sent.Load(), Again: o.again.Load(), Due: uint64(o.due), Stalls: o.stalls, Stalled: o.stalled})
		}
	})
	return out
}

// SlotFor returns the slot of operations on an address (Strong) or with an OrderKey (Partial). It returns -1 if no slot is live or the set
// keeps no order.
func (s *Set) SlotFor(key uint64) (slot int) {
	slot = -1
	s.device.Do(func() {
		if lane := s.laneOf(key &^ s.addressing); s.keyed && lane >= 0 {
			slot = s.lanes[lane].slots[0]
		}
	})
	return slot
}

// layout assigns slots to lanes: one lane per slot, but without order a single lane for all slots of a transport that spreads packets
// itself.
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
