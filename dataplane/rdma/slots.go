package rdma

import (
	"fmt"
	"slices"
	"sync/atomic"
)

// Slot is a queue pair slot as fared gives it (fare.v1.Slot).
type Slot struct {
	Slot   int
	Plane  string
	Device string // the sub-port's netdev; "" where the plane sprays
	Port   uint16 // UDP source port, 49152-65535
	Share  uint32 // of the pair's traffic, parts per billion; 0: parked
}

// SlotStatus is a slot and what has gone by it.
type SlotStatus struct {
	Slot
	// Sent counts payload bytes of first transmissions, Again those of retransmissions.
	Sent, Again uint64
	// Due is how many payload bytes the shares of the time gave it, of those handed to channels.
	Due uint64
}

// slot is a slot of a set.
type slot struct {
	Slot
	transport   Transport
	elsewhere   bool // has moved to a plane of another transport
	sent, again atomic.Uint64
	due         float64
}

func checkSlots(slots []Slot) error {
	if len(slots) == 0 {
		return fmt.Errorf("no slots")
	}
	for i, s := range slots {
		if s.Slot != i || s.Port == 0 {
			return fmt.Errorf("slot %d of %d has number %d and source port %d: slots are numbered from 0 and have ports", i, len(slots), s.Slot, s.Port)
		}
	}
	return nil
}

// SetSlots gives the set new slots, of the same number: planes, ports and shares may differ. A slot that has moved to a plane of another
// transport is parked where it was until it returns, for its channel cannot follow; the others carry its part by their shares. A set
// of a device with Config.Weights gets its slots from fared by itself.
func (s *Set) SetSlots(slots []Slot) (err error) {
	s.device.Do(func() { err = s.setSlots(slots) })
	return err
}

func (s *Set) setSlots(slots []Slot) error {
	if err := checkSlots(slots); err != nil {
		return err
	}
	if len(slots) != len(s.slots) {
		return fmt.Errorf("%d slots for a set that has %d: connect again", len(slots), len(s.slots))
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

// share brings lanes in line with the slots.
func (s *Set) share() {
	shares := make([]int64, len(s.lanes))
	s.keyShares = s.keyShares[:0]
	for i, l := range s.lanes {
		for _, at := range l.slots {
			shares[i] += int64(s.slots[at].Share)
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
	s.device.stir(s)
}

// pathsOf is what a lane may send by. One whose slots are all parked is lent a slot that lives, each another one as far as they
// go, so that it can finish.
func (s *Set) pathsOf(number int, l *lane) []Path {
	paths := make([]Path, 0, len(l.slots))
	for _, at := range l.slots {
		o := s.slots[at]
		paths = append(paths, o.path(o.Share))
	}
	if l.share > 0 {
		return paths
	}
	var living []*slot
	for _, o := range s.slots {
		if o.Share > 0 && o.transport == l.transport {
			living = append(living, o)
		}
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

// booked counts bytes that a channel has taken toward what the shares give each slot.
func (s *Set) booked(n int) {
	sum := 0.0
	for _, o := range s.slots {
		sum += float64(o.Share)
	}
	for _, o := range s.slots {
		if o.Share > 0 {
			o.due += float64(n) * float64(o.Share) / sum
		}
	}
}

// Slots are the set's slots and what has gone by each.
func (s *Set) Slots() (out []SlotStatus) {
	s.device.Do(func() {
		for _, o := range s.slots {
			out = append(out, SlotStatus{Slot: o.Slot, Sent: o.sent.Load(), Again: o.again.Load(), Due: uint64(o.due)})
		}
	})
	return out
}

// SlotFor is the slot that transactions on an address (Strong) or with an OrderKey (Partial) use; -1: nothing lives, or the set
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

// layout says which slots each lane of a set has: a lane for every slot, but one for all slots of a transport that spreads by
// itself, where no order is kept.
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
