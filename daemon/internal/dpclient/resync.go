package dpclient

// disconnect drops the state of the stream; the wanted state and the last confirmed state remain.
func (b *book) disconnect() {
	b.wanted.connected = false
	for f := range b.flights.unanswered() { // it is unknown whether these arrived, so their drains are repeated
		if f.object != nil {
			f.object.drains(f.drain)
		}
	}
	b.flights.reset()
	b.places.taken = b.places.taken[:0]
	b.retries.reset()
	b.queues.reset()
}

// resync starts a stream to a data plane with the given state: it queues the difference.
func (b *book) resync(have State) {
	defer func(bulk bool) { b.queues.bulk = bulk }(b.queues.bulk)
	b.disconnect()
	b.queues.bulk = true // later changes do not wait behind the difference
	b.wanted.connected = true
	b.adoptState(have)
	for _, step := range Diff(have, b.wanted.state(have.Pins)) {
		switch step.Class {
		case SubPortSet:
			b.mark(b.wanted.subPorts[step.SubPort])
		case VectorSet:
			b.mark(b.places.wires[step.Vector].owner)
		case DestinationSet, DestinationDelete:
			b.mark(b.wanted.destinations.get(step.Destination))
		case VectorDelete:
			b.markWire(b.places.wires[step.Vector])
		}
	}
	for _, o := range b.wanted.sorted() {
		if o.repin { // whether it differs follows from its computed ports alone
			b.mark(o)
		}
	}
}

// adoptState replaces the state of the previous stream by the state that was read back, assigns the vectors to places
// on the wire, and reports the objects that were in effect and are not.
func (b *book) adoptState(have State) {
	for _, o := range b.wanted.sorted() {
		o.op, o.refusal, o.again, o.queued, o.listed = 0, nil, nil, 0, false
		b.wanted.block(o, false)
	}
	b.wanted.adopt(have, b.pinning)
	vectors := b.wanted.sortedVectors()
	b.places.adopt(have, vectors, b.queues.bulk)
	for _, o := range vectors {
		if o.wanted {
			b.place(o)
		}
	}
	b.takeChanged(true)
	for _, o := range b.wanted.sorted() {
		if o.done != 0 && !b.wanted.obeyed(o) {
			o.done = 0
			b.report(o)
		}
		if o.done != 0 && o.wire != nil && o.wire.approximate != o.approximate {
			b.report(o)
		}
		b.wanted.settle(o)
		b.wanted.drop(o)
	}
}
