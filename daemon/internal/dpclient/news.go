package dpclient

import "slices"

// news are the events that Take has not returned yet. Invariants: an object is in events exactly while its field
// reported is set; its event is composed when it is taken, so there is one event per object, of its latest state.
type news struct {
	connection []Event // Connected and Disconnected; only the last two are kept
	integrity  *Event  // the last report of the present stream; nil if there is none
	events     fifo[*object]
}

// announce queues a Connected or Disconnected event.
func (n *news) announce(event Event) {
	if len(n.connection) == 2 {
		n.connection = slices.Delete(n.connection, 0, 1)
	}
	n.connection = append(n.connection, event)
}

// report queues an event of o's current state.
func (n *news) report(o *object) {
	if !o.reported && o.change > 0 {
		o.reported = true
		n.events.push(o)
	}
}

// maxTaken is the number of objects whose events are taken at once, so that a flood needs no memory of its size.
const maxTaken = 64

// take appends the news to buf: of objects, the oldest maxTaken.
func (n *news) take(buf []Event) []Event {
	buf = append(buf, n.connection...)
	clear(n.connection)
	n.connection = n.connection[:0]
	if n.integrity != nil {
		buf = append(buf, *n.integrity)
		n.integrity = nil
	}
	for range min(maxTaken, n.events.len()) {
		o := n.events.pop()
		event := Event{Kind: InEffect, Object: o.name(), Change: o.done, Op: o.op}
		switch {
		case o.refused() != nil:
			event.Kind, event.Change = Refused, o.change
			event.Code, event.Message = o.refused().code, o.refused().message
		case o.done == 0:
			event.Kind, event.Change = Pending, o.change
		case o.done == o.change && o.wire != nil:
			if o.approximate = o.wire.approximate; o.approximate != "" {
				event.Kind, event.Message = Approximate, o.approximate
			}
		}
		buf = append(buf, event)
		o.reported = false
	}
	return buf
}
