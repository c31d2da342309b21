package dpclient

import (
	"cmp"
	"maps"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// wanted holds the objects: declared ones, and undeclared ones that the data plane has. Invariants:
//
//   - vectors[v].wanters are the destinations that want vector v, each at its index object.place. So a vector with
//     wanters exists, declared or not.
//   - Numbers of changes grow: change is the number of the last one, and the largest of any object.
//   - object.done is a change that was in effect on the present stream, at most object.change; 0 means none.
//   - blocked counts the objects with blocked set; moved contains exactly those with moved set.
//   - An object that is not wanted exists until its withdrawal is settled, the data plane does not have it, no
//     operation on it is in flight, and no destination wants it.
type wanted struct {
	news         *news
	connected    bool // a stream is open and was read back, so sent and effect of the objects describe the data plane
	subPorts     map[string]*object
	vectors      map[uint32]*object // by the owner's number
	destinations destinations
	change       uint64
	blocked      int           // destinations refused because their vector is missing
	moved        fifo[*object] // destinations that the open transaction has declared
}

// subPort returns the object of a device, a new one if there is none.
func (w *wanted) subPort(device string) *object {
	o := w.subPorts[device]
	if o == nil {
		o = &object{Kind: KindSubPort, few: &few{SubPort: device}}
		w.subPorts[device] = o
	}
	return o
}

// vector returns the object of a vector, a new one if there is none.
func (w *wanted) vector(id uint32) *object {
	o := w.vectors[id]
	if o == nil {
		o = &object{Kind: KindVector, few: &few{Vector: id}}
		w.vectors[id] = o
	}
	return o
}

// destination returns the object of a destination, a new one if there is none.
func (w *wanted) destination(key Destination) *object {
	o := w.destinations.get(key)
	if o == nil {
		o = newDestination(key)
		w.destinations.add(o)
	}
	return o
}

// touch records another change of o and returns its number.
func (w *wanted) touch(o *object) uint64 {
	w.change++
	o.change, o.refusal, o.again = w.change, nil, nil
	w.block(o, false)
	return o.change
}

// want assigns a destination to a vector, which need not be declared yet; 0 means none.
func (w *wanted) want(o *object, vector uint32) {
	if g := w.vectors[o.wantTo]; g != nil {
		last := len(g.wanters) - 1
		g.wanters[o.place] = g.wanters[last]
		g.wanters[o.place].place = o.place
		g.wanters[last] = nil
		g.wanters = g.wanters[:last]
		w.drop(g)
	}
	o.wantTo, o.wanted = vector, vector != 0
	if vector != 0 {
		g := w.vector(vector)
		o.place = uint32(len(g.wanters))
		g.wanters = append(g.wanters, o)
	}
}

// move records that the open transaction has declared a destination.
func (w *wanted) move(o *object) {
	if !o.moved {
		o.moved = true
		w.moved.push(o)
	}
}

// target returns the place on the wire that a wanted destination is to use; nil if its vector does not exist (yet).
func (w *wanted) target(o *object) *wire {
	if g := w.vectors[o.wantTo]; g != nil && g.wanted {
		return g.wire
	}
	return nil
}

// settle reports o if its wanted state has come into effect since the last report.
func (w *wanted) settle(o *object) {
	if o.drain != nil && w.connected && w.obeyed(o) {
		o.drain = nil // in effect already: no slot moves
	}
	if !w.connected || o.change == 0 || o.done == o.change || o.refusal != nil || !w.obeyed(o) {
		return
	}
	o.done, o.again = o.change, nil
	w.news.report(o)
}

// obeyed reports whether the effective state equals the wanted state.
func (w *wanted) obeyed(o *object) bool {
	switch o.Kind {
	case KindSubPort:
		return o.effect.known && o.effect.up == o.wantUp && o.effect == o.sent
	case KindVector:
		if o.wanted {
			return o.wire != nil && sameVector(o.wire.effect, o.wantVector) && sameVector(o.wire.content, o.wantVector)
		}
		return o.formers == 0
	}
	if !o.wanted {
		return o.effect.to == 0 && o.sent.to == 0
	}
	at := w.target(o)
	return at != nil && o.effect.to == at.id && o.effect == o.sent
}

// block records whether a destination waits for its vector.
func (w *wanted) block(o *object, on bool) {
	if o.blocked != on {
		o.blocked = on
		if on {
			w.blocked++
		} else {
			w.blocked--
		}
	}
}

// drop removes an object that is not wanted, unless the data plane has it or a destination wants it.
func (w *wanted) drop(o *object) {
	if o.wanted || !w.obeyed(o) || len(o.wanters) > 0 {
		return
	}
	// An operation of an object that was dropped before may be acknowledged after its number was declared again: remove
	// only the object itself, not its successor.
	switch o.Kind {
	case KindVector:
		if w.vectors[o.Vector] == o {
			delete(w.vectors, o.Vector)
		}
	case KindDestination:
		if key := o.key(); w.destinations.get(key) == o {
			w.destinations.Delete(key.Source, key.Prefix)
		}
	}
}

// adopt sets the state of sub-ports and destinations to the state that was read back. pinning has declared destinations
// recompute their ports.
func (w *wanted) adopt(have State, pinning bool) {
	for device, o := range w.subPorts {
		up, known := have.SubPorts[device]
		o.sent = value{known: known, up: up}
		o.effect = o.sent
	}
	for o := range w.destinations.all() {
		o.sent, o.effect, o.repin = value{}, value{}, pinning && o.wanted
	}
	for key, to := range have.Destinations {
		o := w.destination(key)
		o.sent = value{to: to, pins: have.Pins[key]}
		o.effect = o.sent
	}
}

// state returns the wanted state of the data plane, in numbers of the wire, with the given pins.
func (w *wanted) state(pins map[Destination]uint64) State {
	want := State{
		SubPorts: map[string]bool{}, Vectors: map[uint32]*farev1.Vector{},
		Destinations: map[Destination]uint32{}, Pins: pins,
	}
	for device, o := range w.subPorts {
		want.SubPorts[device] = o.wantUp
	}
	for _, o := range w.vectors {
		if o.wire != nil {
			want.Vectors[o.wire.id] = o.wantVector
		}
	}
	for o := range w.destinations.all() {
		if !o.wanted {
			continue
		}
		key := o.key()
		want.Destinations[key] = 0 // its vector is missing: it counts as different, and is reported when its turn comes
		if at := w.target(o); at != nil {
			want.Destinations[key] = at.id
		}
	}
	return want
}

// sorted lists all objects: sub-ports, vectors, destinations.
func (w *wanted) sorted() []*object {
	all := slices.SortedFunc(maps.Values(w.subPorts), func(x, y *object) int { return cmp.Compare(x.SubPort, y.SubPort) })
	all = append(all, w.sortedVectors()...)
	return append(all, slices.SortedFunc(w.destinations.all(), byDestination)...)
}

func (w *wanted) sortedVectors() []*object {
	return slices.SortedFunc(maps.Values(w.vectors), func(x, y *object) int { return cmp.Compare(x.Vector, y.Vector) })
}

func byDestination(x, y *object) int { return x.key().Compare(y.key()) }
