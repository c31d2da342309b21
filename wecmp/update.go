package wecmp

import "net/netip"

// UpdateKind says what to program.
type UpdateKind uint8

// The kinds of updates, in the order in which Updates returns them: what destinations need comes before them, what they
// no longer need is deleted after them.
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

// Update is one thing to program.
type Update struct {
	Kind        UpdateKind
	Vector      uint32       // all but DestinationDelete
	Destination netip.Prefix // DestinationSet, DestinationDelete
	// SlotsMoved counts slots whose plane or sub-port differs from what was last reported for this vector (VectorSet) or for
	// this destination (DestinationSet). Always 0 for something new, and under Reweight.
	SlotsMoved int
	// Drain are the slots that have to be drained against what was last reported, ascending; see Slot.Drain. For a
	// destination it is what its change of vectors demands. nil under Weak ordering. It belongs to the engine.
	Drain []uint16
}

// Updates returns what changed since the last call, merged to the last state and in the order to program it: vectors set,
// destinations set, destinations deleted, vectors deleted. Within each kind the order is that of the inputs. The slice is
// valid until the next input or call.
func (e *Engine) Updates() []Update {
	e.updates, e.drains = e.updates[:0], e.drains[:0]
	for _, id := range e.dirtyVectors {
		v := e.vectors[id]
		if !v.dirty {
			continue // deleted again
		}
		v.dirty = false
		u := Update{Kind: VectorSet, Vector: id}
		if v.told {
			u.SlotsMoved, u.Drain = e.compare(v, v)
			for _, s := range u.Drain {
				v.slots[s].Drain = true
			}
		}
		e.updates = append(e.updates, u)
	}
	e.dirtyVectors = e.dirtyVectors[:0]
	set := len(e.updates)
	for _, i := range e.dirtyDests {
		d := &e.destinations[i]
		if d.vector == 0 || d.vector == d.told {
			continue
		}
		u := Update{Kind: DestinationSet, Vector: d.vector, Destination: d.prefix}
		if d.told != 0 {
			u.SlotsMoved, u.Drain = e.compare(e.vectors[d.told], e.vectors[d.vector])
		}
		e.updates = append(e.updates, u)
		d.told = d.vector
	}
	for _, i := range e.dirtyDests {
		d := &e.destinations[i]
		d.dirty = false
		if d.vector != 0 {
			continue
		}
		if d.told != 0 {
			e.updates = append(e.updates, Update{Kind: DestinationDelete, Destination: d.prefix})
		}
		delete(e.index, d.prefix)
		*d = destination{}
		e.freeDests = append(e.freeDests, i)
	}
	e.dirtyDests = e.dirtyDests[:0]
	for _, id := range e.deleted {
		e.updates = append(e.updates, Update{Kind: VectorDelete, Vector: id})
		e.vectors[id].told = false
		e.freeVectors = append(e.freeVectors, id)
	}
	e.deleted = e.deleted[:0]
	for i := range e.updates[:set] {
		e.remember(e.vectors[e.updates[i].Vector])
	}
	return e.updates
}

// remember keeps of a reported vector what the next report is compared with.
func (e *Engine) remember(v *vector) {
	v.told = true
	if e.cfg.Policy == Remap || e.cfg.Ordering != Weak {
		copy(v.toldSlots, v.slots)
	}
	if e.cfg.Ordering != Weak {
		copy(v.toldCapacity, e.groups[v.group].capacity)
		copy(v.toldLive, v.live)
	}
}

// compare returns the slots that moved, and those to drain, between what was last reported of a vector and another's
// present state.
func (e *Engine) compare(was, is *vector) (moved int, drain []uint16) {
	if e.cfg.Policy == Remap {
		for s := range is.slots {
			if a, b := &was.toldSlots[s], &is.slots[s]; a.Plane != b.Plane || a.SubPort != b.SubPort {
				moved++
			}
		}
	}
	if e.cfg.Ordering != Weak {
		drain = e.drain(was, is)
	}
	return moved, drain
}
