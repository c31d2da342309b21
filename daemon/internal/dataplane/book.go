package dataplane

import (
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// book keeps what is wanted, sent and in effect. It is pure: no I/O, no goroutine, no clock. Not safe for concurrent use.
type book struct {
	order   order
	window  int  // operations in flight, sub-port states excepted
	pinning bool // the data plane wants source ports, and somebody fills them in

	connected bool // read back: there is somebody to send to
	held      bool // removals are held

	subPorts     map[string]*object
	groups       map[uint32]*object // by the owner's number
	destinations map[netip.Prefix]*object
	wires        map[uint32]*wire
	recognised   map[string]uint32    // content of groups that were read back and nobody owned then
	blocked      map[*object]struct{} // destinations refused for want of their group

	change  uint64
	queues  [GroupDelete]fifo[*object] // one per class that objects have
	deletes fifo[*wire]

	flights fifo[flight] // the first is operation base
	base    uint64
	next    uint64 // id of the next operation
	effect  uint64 // highest id acknowledged in effect: must grow

	connection []Event   // at most two: the latest state, and how it came to it
	events     []*object // objects with news

	counters Counters
}

// Counters count since New. Sent = in flight or lost with a stream + InEffect + Refused.
type Counters struct {
	Sent                        [classes]uint64 // by Class
	Accepted, InEffect, Refused uint64
	// Connects and Disconnects of streams; Stalls are disconnects because of a missing acknowledgement.
	Connects, Disconnects, Stalls uint64
}

func newBook(order order, window int) *book {
	return &book{
		order: order, window: window, held: true,
		subPorts: map[string]*object{}, groups: map[uint32]*object{}, destinations: map[netip.Prefix]*object{},
		wires: map[uint32]*wire{}, recognised: map[string]uint32{}, blocked: map[*object]struct{}{},
		base: 1, next: 1,
	}
}

// touch notes a new change of o.
func (b *book) touch(o *object) uint64 {
	b.change++
	o.change, o.refusal = b.change, nil
	delete(b.blocked, o)
	return o.change
}

func (b *book) setSubPort(device string, up bool) uint64 {
	o := b.subPorts[device]
	if o == nil {
		o = &object{Object: Object{Kind: KindSubPort, SubPort: device}}
		b.subPorts[device] = o
	}
	if o.wanted && o.wantUp == up {
		return o.change
	}
	o.wanted, o.wantUp = true, up
	change := b.touch(o)
	b.mark(o)
	return change
}

func (b *book) setGroup(group *farev1.Group) uint64 {
	o := b.groups[group.Id]
	if o == nil {
		o = &object{Object: Object{Kind: KindGroup, Group: group.Id}}
		b.groups[group.Id] = o
	}
	if o.wanted && sameGroup(o.wantGroup, group) {
		return o.change
	}
	group = proto.CloneOf(group)
	b.order.sort(group)
	if o.wanted && sameGroup(o.wantGroup, group) {
		return o.change
	}
	moved := b.pinning && !samePlaces(o.wantGroup, group)
	o.wanted, o.wantGroup = true, group
	change := b.touch(o)
	if b.connected {
		b.place(o)
		b.mark(o)
		b.unblock(o)
		if moved && o.wanters > 0 {
			for _, d := range b.wanting(o) {
				d.repin = true
				b.mark(d)
			}
		}
	}
	return change
}

func (b *book) deleteGroup(id uint32) uint64 {
	o := b.groups[id]
	if o == nil {
		return 0
	}
	if !o.wanted {
		return o.change
	}
	o.wanted, o.wantGroup = false, nil
	change := b.touch(o)
	b.orphan(o)
	b.settle(o)
	return change
}

// orphan gives up a group's place on the wire.
func (b *book) orphan(o *object) {
	w := o.wire
	if w == nil {
		return
	}
	o.wire, w.owner = nil, nil
	if w.content == nil { // never sent, or refused
		b.forget(w)
		return
	}
	if !o.wanted {
		w.former = o
	}
	b.markWire(w)
}

func (b *book) setDestination(prefix netip.Prefix, group uint32, drain ...uint16) uint64 {
	if group == 0 {
		return b.deleteDestination(prefix)
	}
	o := b.destination(prefix)
	if o.wanted && o.wantTo == group {
		if b.pinning { // the owner says that it may have other ports now
			o.repin = true
			b.mark(o)
		}
		return o.change
	}
	b.want(o, group)
	for _, slot := range drain { // beside what an operation that was not sent yet would have drained
		o.drains([]uint32{uint32(slot)})
	}
	o.repin = b.pinning
	change := b.touch(o)
	b.mark(o)
	return change
}

func (b *book) deleteDestination(prefix netip.Prefix) uint64 {
	o := b.destinations[prefix]
	if o == nil {
		return 0
	}
	if !o.wanted && o.change > 0 {
		return o.change
	}
	b.want(o, 0)
	change := b.touch(o)
	b.mark(o)
	return change
}

func (b *book) destination(prefix netip.Prefix) *object {
	o := b.destinations[prefix]
	if o == nil {
		o = &object{Object: Object{Kind: KindDestination, Destination: prefix}}
		b.destinations[prefix] = o
	}
	return o
}

// drains adds slots to those that the object's next operation drains.
func (o *object) drains(slots []uint32) {
	for _, slot := range slots {
		if !slices.Contains(o.drain, slot) {
			o.drain = append(o.drain, slot)
		}
	}
}

// want points a destination to a group and keeps the groups' counts.
func (b *book) want(o *object, group uint32) {
	if g := b.groups[o.wantTo]; g != nil {
		g.wanters--
		b.drop(g)
	}
	o.wantTo, o.wanted, o.repin = group, group != 0, false
	if group == 0 {
		return
	}
	g := b.groups[group]
	if g == nil { // the owner has not declared it yet; count from the beginning
		g = &object{Object: Object{Kind: KindGroup, Group: group}}
		b.groups[group] = g
	}
	g.wanters++
}

// wanting lists the destinations that want a group, sorted.
func (b *book) wanting(g *object) []*object {
	var list []*object
	for _, o := range b.destinations {
		if o.wantTo == g.Group {
			list = append(list, o)
		}
	}
	slices.SortFunc(list, byDestination)
	return list
}

func byDestination(x, y *object) int { return x.Destination.Compare(y.Destination) }

// place gives a wanted group its number on the wire, keeping the one it has where that may be changed in place.
func (b *book) place(o *object) {
	w := o.wire
	if w != nil && (sameGroup(w.content, o.wantGroup) || !b.held || !w.foreign) {
		return
	}
	b.orphan(o)
	w = b.recognise(o)
	if w == nil {
		w = b.allocate(o.Group)
	}
	w.owner, w.former, o.wire = o, nil, w
	if o.wanters > 0 {
		for _, d := range b.wanting(o) {
			b.mark(d)
		}
	}
}

// recognise finds a group on the wire that nobody owns and that is what o wants; nil: none.
func (b *book) recognise(o *object) *wire {
	if w := b.wires[o.Group]; w != nil && w.owner == nil && w.content != nil && sameGroup(w.content, o.wantGroup) {
		return w
	}
	if len(b.recognised) == 0 {
		return nil
	}
	key := contentKey(o.wantGroup)
	w := b.wires[b.recognised[key]]
	delete(b.recognised, key)
	if w != nil && w.owner == nil && w.content != nil && sameGroup(w.content, o.wantGroup) {
		return w
	}
	return nil
}

// allocate returns an unused place on the wire: the owner's own number if that is free, else the lowest.
func (b *book) allocate(wish uint32) *wire {
	free := func(id uint32) bool {
		w := b.wires[id]
		return w == nil || w.owner == nil && w.content == nil
	}
	id := wish
	if !free(id) {
		for id = 1; !free(id); id++ {
		}
	}
	w := b.wires[id]
	if w == nil {
		w = &wire{id: id}
		b.wires[id] = w
	}
	w.foreign, w.refused = false, false
	return w
}

// target is the place on the wire that a wanted destination is to use; nil: its group is not there (yet).
func (b *book) target(o *object) *wire {
	if g := b.groups[o.wantTo]; g != nil && g.wanted {
		return g.wire
	}
	return nil
}

// class says what operation o needs now; classes: none.
func (b *book) class(o *object) Class {
	if !b.connected || o.refusal != nil {
		return classes
	}
	switch o.Kind {
	case KindSubPort:
		if o.wanted && (!o.sent.known || o.sent.up != o.wantUp) {
			return SubPortSet
		}
	case KindGroup:
		if o.wanted && !sameGroup(o.wire.content, o.wantGroup) {
			return GroupSet
		}
	case KindDestination:
		if !o.wanted {
			if o.sent.to != 0 && !b.held {
				return DestinationDelete
			}
			return classes
		}
		w := b.target(o)
		switch {
		case w == nil:
			return DestinationSet // blocks when its turn comes
		case b.held && !o.touched && o.sent.to != 0 && o.sent.to != w.id:
			return classes
		case o.sent.to != w.id || o.repin:
			return DestinationSet
		}
	}
	return classes
}

// mark queues o if it needs an operation, and settles it if it does not.
func (b *book) mark(o *object) {
	c := b.class(o)
	if c == classes {
		b.settle(o)
		return
	}
	if o.queued&(1<<c) == 0 {
		o.queued |= 1 << c
		b.queues[c].push(o)
	}
}

// markWire queues a group's deletion if nothing needs it any more.
func (b *book) markWire(w *wire) {
	if b.connected && !b.held && !w.queued && b.removable(w) {
		w.queued = true
		b.deletes.push(w)
	}
}

func (b *book) removable(w *wire) bool {
	return w.owner == nil && w.content != nil && w.users == 0 && !w.refused
}

// settle reports o when the data plane obeys what is wanted and that is news.
func (b *book) settle(o *object) {
	if o.drain != nil && b.connected && b.obeyed(o) {
		o.drain = nil // it is there already: nothing moves any more
	}
	if !b.connected || o.change == 0 || o.done == o.change || o.refusal != nil || !b.obeyed(o) {
		return
	}
	o.done = o.change
	b.report(o)
}

// obeyed says whether what is in effect is what is wanted.
func (b *book) obeyed(o *object) bool {
	switch o.Kind {
	case KindSubPort:
		return o.effect.known && o.effect.up == o.wantUp && o.effect == o.sent
	case KindGroup:
		if o.wanted {
			return o.wire != nil && sameGroup(o.wire.effect, o.wantGroup) && sameGroup(o.wire.content, o.wantGroup)
		}
		for _, w := range b.wires {
			if w.former == o {
				return false
			}
		}
		return true
	}
	if !o.wanted {
		return o.effect.to == 0 && o.sent.to == 0
	}
	w := b.target(o)
	return w != nil && o.effect.to == w.id && o.effect == o.sent
}

// report queues an event of o's present state.
func (b *book) report(o *object) {
	if !o.reported && o.change > 0 {
		o.reported = true
		b.events = append(b.events, o)
	}
}

// refuse notes that the present change of o cannot be had.
func (b *book) refuse(o *object, code codes.Code, message string) {
	o.refusal = &refusal{code: code, message: message}
	if o.Kind == KindDestination && o.wanted && code == codes.FailedPrecondition {
		b.blocked[o] = struct{}{}
	}
	b.report(o)
}

// unblock tries the destinations again that waited for a group.
func (b *book) unblock(g *object) {
	if len(b.blocked) == 0 {
		return
	}
	var list []*object
	for o := range b.blocked {
		if o.wantTo == g.Group {
			list = append(list, o)
		}
	}
	slices.SortFunc(list, byDestination)
	for _, o := range list {
		delete(b.blocked, o)
		o.refusal = nil
		b.mark(o)
	}
}

// release holds removals, or lets go of them.
func (b *book) release(on bool) {
	if b.held != on {
		return
	}
	b.held = !on
	if !on || !b.connected {
		return
	}
	for _, o := range b.sorted() {
		b.mark(o)
	}
	for _, w := range b.sortedWires() {
		b.markWire(w)
	}
}

// take moves the news into buf.
func (b *book) take(buf []Event) []Event {
	buf = append(buf, b.connection...)
	clear(b.connection)
	b.connection = b.connection[:0]
	for i, o := range b.events {
		event := Event{Kind: InEffect, Object: o.Object, Change: o.done, Op: o.op}
		switch {
		case o.refusal != nil:
			event.Kind, event.Change = Refused, o.change
			event.Code, event.Message = o.refusal.code, o.refusal.message
		case o.done == 0:
			event.Kind, event.Change = Pending, o.change
		}
		buf = append(buf, event)
		o.reported = false
		b.events[i] = nil
	}
	b.events = b.events[:0]
	return buf
}

// announce queues a Connected or Disconnected.
func (b *book) announce(event Event) {
	if len(b.connection) == 2 {
		b.connection = slices.Delete(b.connection, 0, 1)
	}
	b.connection = append(b.connection, event)
}
