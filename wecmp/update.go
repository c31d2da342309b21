package wecmp

import (
	"net/netip"
	"slices"
)

// UpdateKind is the kind of an Update.
type UpdateKind uint8

// The kinds of updates, in the order in which Updates returns them: a vector is set before destinations use it, and
// deleted after they have left it.
const (
	VectorSet UpdateKind = iota
	DestinationSet
	DestinationDelete
	VectorDelete
)

// String returns "vector-set", "destination-set", "destination-delete" or "vector-delete".
func (k UpdateKind) String() string {
	return nameOf(k, []string{"vector-set", "destination-set", "destination-delete", "vector-delete"})
}

// Update is one object to program.
type Update struct {
	Kind        UpdateKind
	Vector      uint32       // all kinds except DestinationDelete
	Destination netip.Prefix // DestinationSet, DestinationDelete
	// SlotsMoved counts slots whose plane or sub-port differs from the last report for this vector (VectorSet) or for
	// this destination (DestinationSet). It is 0 for a new object, and under Reweight.
	SlotsMoved int
	// Drain lists the slots to be drained relative to the last report, in ascending order; see Slot.Drain. For a
	// destination they follow from its change of vectors. It is nil under Weak ordering. The slice belongs to the
	// engine.
	Drain []uint16
}

// Updates returns the changes since the last call, merged to the last state and in the order to program them: vectors
// set, destinations set, destinations deleted, vectors deleted. Within each kind the order is that of the inputs. The
// slice is valid until the next input or call.
func (e *Engine) Updates() []Update {
	e.updates, e.drains = emptied(e.updates), emptied(e.drains)
	e.updates = slices.Grow(e.updates, len(e.dirtyVectors)+len(e.dirtyDests)+len(e.deleted))
	for _, id := range e.dirtyVectors {
		v := e.vectors[id]
		if !v.dirty {
			continue // deleted in the meantime
		}
		v.dirty = false
		u := Update{Kind: VectorSet, Vector: id}
		if v.reported {
			u.SlotsMoved, u.Drain = e.compare(v, v)
		} else if v.legacy != nil {
			u.SlotsMoved, u.Drain = v.legacy.moved, v.legacy.drain
		}
		for _, s := range u.Drain {
			v.slots[s].Drain = true
		}
		e.updates = append(e.updates, u)
	}
	e.dirtyVectors = emptied(e.dirtyVectors)
	set := len(e.updates)
	for _, i := range e.dirtyDests {
		d := &e.destinations[i]
		if d.vector == 0 || d.vector == d.reported {
			continue
		}
		u := Update{Kind: DestinationSet, Vector: d.vector, Destination: d.prefix}
		if was := e.vectors[d.reported]; was.reported {
			u.SlotsMoved, u.Drain = e.compare(was, e.vectors[d.vector])
		} else if l, ok := e.inherited[i]; ok {
			u.SlotsMoved, u.Drain = l.moved, l.drain
		}
		e.updates = append(e.updates, u)
		d.reported = d.vector
	}
	e.inherited = nil
	for _, i := range e.dirtyDests {
		d := &e.destinations[i]
		d.dirty = false
		if d.vector != 0 {
			continue
		}
		if d.reported != 0 {
			e.updates = append(e.updates, Update{Kind: DestinationDelete, Destination: d.prefix})
		}
		delete(e.index, d.prefix)
		e.freeDests = append(e.freeDests, i)
	}
	e.dirtyDests = emptied(e.dirtyDests)
	for _, id := range e.deleted {
		e.updates = append(e.updates, Update{Kind: VectorDelete, Vector: id})
		e.freeVectors = append(e.freeVectors, id)
	}
	e.deleted = emptied(e.deleted)
	for i := range e.updates[:set] {
		e.remember(e.vectors[e.updates[i].Vector])
	}
	for i := max(e.dropped, recycled); i < len(e.freeVectors); i++ {
		e.vectors[e.freeVectors[i]] = nil
	}
	e.dropped = len(e.freeVectors)
	return e.updates
}

// burst is the number of elements from which on the memory of a list is not kept for the next step.
const burst = 1 << 12

// emptied returns a list without elements, with its memory unless that is a burst's.
func emptied[T any](list []T) []T {
	if cap(list) > burst {
		return nil
	}
	return list[:0]
}

// remember stores the parts of a reported vector with which the next report is compared.
func (e *Engine) remember(v *vector) {
	v.reported, v.legacy = true, nil
	if e.cfg.Policy == Remap || e.cfg.Ordering != Weak {
		copy(v.reportedSlots, v.slots)
	}
	if e.cfg.Ordering != Weak {
		copy(v.reportedRate, e.groups[v.group].rate)
		copy(v.reportedLive, v.live)
	}
}

// compare returns the number of slots that moved, and the slots to drain, between the last reported state of vector was
// and the present state of vector is.
func (e *Engine) compare(was, is *vector) (moved int, drain []uint16) {
	if e.cfg.Policy == Remap {
		for s := range is.slots {
			if a, b := &was.reportedSlots[s], &is.slots[s]; a.Plane != b.Plane || a.SubPort != b.SubPort {
				moved++
			}
		}
	}
	if e.cfg.Ordering != Weak {
		drain = e.drain(was, is)
	}
	return moved, drain
}
