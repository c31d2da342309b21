package dpclient

import (
	"cmp"
	"maps"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// disconnect drops the state of the stream; the wanted state and the last confirmed state remain.
func (b *book) disconnect() {
	b.connected = false
	b.resetStream()
}

func (b *book) resetStream() {
	for i := range b.flights.len() { // it is unknown whether these arrived, so their drains are repeated
		if f := b.flights.at(i); !f.done && f.object != nil {
			f.object.drains(f.drain)
		}
	}
	b.flights.reset()
	b.taken = b.taken[:0]
	b.retries.reset()
	b.paces = [classes]pace{}
	b.base, b.next, b.effect = 1, 1, 0
	for lane := range b.queues {
		for class := range b.queues[lane] {
			for q := &b.queues[lane][class]; q.len() > 0; {
				q.pop().queued = 0
			}
		}
	}
	for b.deletes.len() > 0 {
		b.deletes.pop().queued = false
	}
}

// resync starts a stream to a data plane with the given state: it queues the difference.
func (b *book) resync(have State) {
	defer func(bulk bool) { b.bulk = bulk }(b.bulk)
	b.bulk = true // later changes do not wait behind the difference
	b.resetStream()
	b.connected = true
	objects := b.sorted()
	for _, o := range objects {
		o.op, o.refusal, o.again, o.queued, o.listed = 0, nil, nil, 0, false
		b.block(o, false)
	}
	b.adoptSubPorts(have)
	b.adoptDestinations(have)
	b.adoptVectors(have)
	b.takeAll()
	for _, o := range b.sorted() {
		if o.done != 0 && !b.obeyed(o) {
			o.done = 0
			b.report(o)
		}
		if o.done != 0 && o.wire != nil && o.wire.approximate != o.approximate {
			b.report(o)
		}
		b.settle(o)
		b.drop(o)
	}
	for _, step := range Diff(have, b.wantedState(have)) {
		switch step.Class {
		case SubPortSet:
			b.mark(b.subPorts[step.SubPort])
		case VectorSet:
			b.mark(b.wires[step.Vector].owner)
		case DestinationSet, DestinationDelete:
			b.mark(b.destinations.get(step.Destination))
		case VectorDelete:
			b.markWire(b.wires[step.Vector])
		}
	}
	for _, o := range b.sorted() {
		if o.repin { // only its computed ports tell whether it differs
			b.mark(o)
		}
	}
}

func (b *book) adoptSubPorts(have State) {
	for device, o := range b.subPorts {
		up, known := have.SubPorts[device]
		o.sent = value{known: known, up: up}
		o.effect = o.sent
	}
}

func (b *book) adoptDestinations(have State) {
	for o := range b.destinations.all() {
		o.sent, o.effect = value{}, value{}
	}
	for key, to := range have.Destinations {
		o := b.destination(key)
		o.sent = value{to: to, pins: have.Pins[key]}
		o.effect = o.sent
	}
	for o := range b.destinations.all() {
		o.repin = b.pinning && o.wanted
	}
	b.countCohorts()
}

// adoptVectors assigns a place on the wire to every wanted vector: its previous one, one with the same content, or a new one.
func (b *book) adoptVectors(have State) {
	before := b.wires
	b.wires, b.lowest = make(map[uint32]*wire, len(have.Vectors)), 1
	for id, content := range have.Vectors {
		old := before[id]
		b.wires[id] = &wire{id: id, content: content, effect: content, foreign: old == nil || old.foreign, approximate: have.Approximate[id]}
		if old != nil && old.owner == nil {
			b.setFormer(b.wires[id], old.former)
		}
	}
	for _, w := range before {
		b.setFormer(w, nil)
	}
	for o := range b.destinations.all() {
		if w := b.wires[o.sent.to]; w != nil {
			w.users++
		}
	}
	vectors := slices.SortedFunc(maps.Values(b.vectors), func(x, y *object) int { return cmp.Compare(x.Vector, y.Vector) })
	for _, o := range vectors {
		had := o.wire
		o.wire = nil
		if had == nil || !o.wanted {
			continue
		}
		if w := b.wires[had.id]; w != nil && b.replaceable(w, o) {
			b.own(o, w)
		}
	}
	clear(b.recognized)
	for _, w := range b.sortedWires() {
		if key := contentKey(w.content); w.owner == nil && key != "" {
			if _, taken := b.recognized[key]; !taken {
				b.recognized[key] = w.id
			}
		}
	}
	for _, o := range vectors {
		if o.wanted {
			b.place(o)
		}
	}
}

// wantedState returns the wanted state of the data plane, in numbers of the wire.
func (b *book) wantedState(have State) State {
	want := State{
		SubPorts: map[string]bool{}, Vectors: map[uint32]*farev1.Vector{},
		Destinations: map[Destination]uint32{}, Pins: have.Pins,
	}
	for device, o := range b.subPorts {
		want.SubPorts[device] = o.wantUp
	}
	for id, w := range b.wires {
		if w.owner != nil {
			want.Vectors[id] = w.owner.wantVector
		}
	}
	for o := range b.destinations.all() {
		if !o.wanted {
			continue
		}
		key := o.Destination
		want.Destinations[key] = 0 // its vector is missing: it counts as different, and is reported when its turn comes
		if w := b.target(o); w != nil {
			want.Destinations[key] = w.id
		}
	}
	return want
}

// sorted lists all objects: sub-ports, vectors, destinations.
func (b *book) sorted() []*object {
	all := make([]*object, 0, len(b.subPorts)+len(b.vectors)+b.destinations.Len())
	all = slices.AppendSeq(all, maps.Values(b.subPorts))
	all = slices.AppendSeq(all, maps.Values(b.vectors))
	all = slices.AppendSeq(all, b.destinations.all())
	slices.SortFunc(all, func(x, y *object) int {
		return cmp.Or(cmp.Compare(x.Kind, y.Kind), cmp.Compare(x.SubPort, y.SubPort), cmp.Compare(x.Vector, y.Vector),
			x.Destination.Compare(y.Destination))
	})
	return all
}

func (b *book) sortedWires() []*wire {
	return slices.SortedFunc(maps.Values(b.wires), func(x, y *wire) int { return cmp.Compare(x.id, y.id) })
}
