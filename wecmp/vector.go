package wecmp

// ReasonUnreachable is VectorView.Reason when no plane has a capacity.
const ReasonUnreachable = "no plane has a capacity toward the destination"

// vector is a group's weights with one assignment of slots.
type vector struct {
	id    uint32
	group uint32 // 0: free, or deleted and not yet reported
	uses  int    // number of destinations that point at it, plus one for the group itself under Reweight
	place []uint16
	slots []Slot
	live  []uint16 // live slots per place

	prev, next uint32 // neighbors in the group's list; 0: none
	hash       uint64 // of (group, place): the key of the intern table
	chain      uint32 // next in the intern table's bucket

	legacy   *legacy // of the previous engine, until the first report; nil if it had no such vector
	dirty    bool
	reported bool // reported to the caller; the fields below hold the last report
	// These are stored only if needed: reportedSlots under Remap or an ordering, reportedRate and reportedLive under an
	// ordering.
	reportedSlots []Slot
	reportedRate  []uint64
	reportedLive  []uint16
}

// VectorView is a view of a vector. Its slices belong to the engine and are valid until its next input.
type VectorView struct {
	ID, Group uint32
	Reachable bool
	Reason    string // why it is not reachable; empty if it is
	// Exact is true if Weights, SubPortWeights and Members equal the ratios of the capacities exactly, and false if
	// they were fitted to a table. The slots' shares are exact in any case.
	Exact          bool
	Weights        []uint32   // per plane, in lowest terms, within Config.MaxWeight and MaxWeightSum
	Bandwidths     []uint64   // per plane, bit/s, as given
	SubPortWeights [][]uint32 // per plane and sub-port, in lowest terms within the plane
	Members        []Member   // sub-ports with a nonzero weight, plane by plane, in lowest terms, within MaxWeight and MaxWeightSum
	Slots          []Slot     // by slot number

	cfg *Config
}

// Places returns a copy of the slots' places, in the form of Planner.Ports.
func (v VectorView) Places() []Place {
	places := make([]Place, len(v.Slots))
	for i, s := range v.Slots {
		places[i] = Place{s.Plane, s.SubPort}
	}
	return places
}

// Vector returns a view of a vector, or false if there is none with that id.
func (e *Engine) Vector(id uint32) (VectorView, bool) {
	v := e.vector(id)
	if v == nil {
		return VectorView{}, false
	}
	g := e.groups[v.group]
	view := VectorView{
		ID: v.id, Group: v.group, Reachable: g.reachable, Exact: g.exact, Weights: g.weights, Bandwidths: g.bandwidth,
		SubPortWeights: g.perPlane, Members: g.members, Slots: v.slots, cfg: &e.cfg,
	}
	if !g.reachable {
		view.Reason = ReasonUnreachable
	}
	return view, true
}

// vector returns a vector in use, or nil.
func (e *Engine) vector(id uint32) *vector {
	if id == 0 || uint64(id) >= uint64(len(e.vectors)) || e.vectors[id] == nil || e.vectors[id].group == 0 {
		return nil
	}
	return e.vectors[id]
}

// newVector takes a free vector, the most recently freed first, and assigns it to the group with the given places.
func (e *Engine) newVector(group uint32, place []uint16) *vector {
	id := uint32(len(e.vectors))
	if n := len(e.freeVectors); n > 0 {
		id = e.freeVectors[n-1]
		e.freeVectors = e.freeVectors[:n-1]
		e.dropped = min(e.dropped, n-1)
	} else {
		e.vectors = append(e.vectors, nil)
	}
	v := e.vectors[id]
	if v == nil {
		slots := len(e.home)
		small := make([]uint16, slots+2*e.places)
		v = &vector{
			id: id, slots: make([]Slot, slots),
			place: cut(&small, slots), live: cut(&small, e.places), reportedLive: small,
		}
		if e.cfg.Policy == Remap || e.cfg.Ordering != Weak {
			v.reportedSlots, v.reportedRate = make([]Slot, slots), make([]uint64, e.places)
		}
		e.vectors[id] = v
	}
	g := e.groups[group]
	v.group, v.uses, v.reported, v.legacy = group, 0, false, nil
	copy(v.place, place)
	v.prev, v.next = 0, g.first
	if g.first != 0 {
		e.vectors[g.first].prev = v.id
	}
	g.first = v.id
	e.share(v, g)
	e.intern(v)
	e.markVector(v)
	return v
}

// release removes one use of a vector; the last one deletes it.
func (e *Engine) release(v *vector) {
	if v.uses--; v.uses > 0 {
		return
	}
	if v.prev != 0 {
		e.vectors[v.prev].next = v.next
	} else {
		e.groups[v.group].first = v.next
	}
	if v.next != 0 {
		e.vectors[v.next].prev = v.prev
	}
	e.forget(v)
	v.group, v.dirty = 0, false
	if v.reported || v.legacy != nil {
		e.deleted = append(e.deleted, v.id) // the id is reused only after the deletion has been reported
	} else {
		e.freeVectors = append(e.freeVectors, v.id)
	}
}

func (e *Engine) markVector(v *vector) {
	if !v.dirty {
		v.dirty = true
		e.dirtyVectors = append(e.dirtyVectors, v.id)
	}
}

// key hashes (group, place) by FNV-1a over 16-bit words.
func key(group uint32, place []uint16) uint64 {
	h := uint64(14695981039346656037) ^ uint64(group)
	h *= 1099511628211
	for _, p := range place {
		h = (h ^ uint64(p)) * 1099511628211
	}
	return mix64(h)
}

// intern enters a vector in the table by which destinations find an equal one. Two vectors that become equal by a
// change of their group remain separate, because merging them would require a report for every destination of one of
// them.
func (e *Engine) intern(v *vector) {
	if e.cfg.Policy != Remap {
		return
	}
	if e.interned >= len(e.buckets) {
		old := e.buckets
		e.buckets = make([]uint32, max(64, 2*len(old)))
		for _, id := range old {
			for id != 0 {
				w := e.vectors[id]
				id = w.chain
				e.link(w)
			}
		}
	}
	v.hash = key(v.group, v.place)
	e.link(v)
	e.interned++
}

func (e *Engine) link(v *vector) {
	b := &e.buckets[v.hash&uint64(len(e.buckets)-1)]
	v.chain = *b
	*b = v.id
}

// forget removes a vector from the table.
func (e *Engine) forget(v *vector) {
	if e.cfg.Policy != Remap {
		return
	}
	at := &e.buckets[v.hash&uint64(len(e.buckets)-1)]
	for *at != v.id {
		at = &e.vectors[*at].chain
	}
	*at = v.chain
	e.interned--
}

// find returns the group's vector with the given places, or nil.
func (e *Engine) find(group uint32, place []uint16) *vector {
	if len(e.buckets) == 0 {
		return nil
	}
	h := key(group, place)
next:
	for id := e.buckets[h&uint64(len(e.buckets)-1)]; id != 0; id = e.vectors[id].chain {
		v := e.vectors[id]
		if v.hash != h || v.group != group {
			continue
		}
		for s, p := range place {
			if v.place[s] != p {
				continue next
			}
		}
		return v
	}
	return nil
}
