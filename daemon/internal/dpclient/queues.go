package dpclient

// queues hold the objects and vectors that may need an operation, and determine the order of sending. Invariants:
//
//   - An object is in the queue of a lane and class exactly while that bit of object.queued is set (queuedBit), a
//     vector in deletes exactly while wire.queued is set. So a queue contains each at most once.
//   - In one lane no operation precedes one of an earlier class, except that sub-port states precede all of both lanes;
//     within a class the order is that of queuing.
//   - An entry is a hint: whether its operation is still needed is determined when its turn comes.
type queues struct {
	lanes   [2][VectorDelete]fifo[*object] // prompt and bulk; one queue per class that objects have
	deletes fifo[*wire]                    // vectors to delete, all bulk
	paces   [classes]pace                  // of paced classes
	bulk    bool                           // changes declared now join the bulk lane
	turn    bool                           // the bulk lane is next
}

// operation is the next operation to send.
type operation struct {
	id     uint64
	class  Class
	object *object
	wire   *wire
	bulk   bool
}

// queuedBit returns the bit of object.queued for a queue. An object may be in both queues of a class: the second one
// finds nothing to do.
func queuedBit(lane int, c Class) uint8 { return 1 << (lane*int(VectorDelete) + int(c)) }

func laneOf(bulk bool) int {
	if bulk {
		return 1
	}
	return 0
}

// push queues an object for an operation of a class.
func (q *queues) push(o *object, c Class, bulk bool) {
	lane := laneOf(bulk)
	if bit := queuedBit(lane, c); o.queued&bit == 0 {
		o.queued |= bit
		q.lanes[lane][c].push(o)
	}
}

// pushDelete queues a vector's deletion.
func (q *queues) pushDelete(w *wire) {
	if !w.queued {
		w.queued = true
		q.deletes.push(w)
	}
}

// len returns the number of entries.
func (q *queues) len() int {
	n := q.deletes.len()
	for lane := range q.lanes {
		for class := range q.lanes[lane] {
			n += q.lanes[lane][class].len()
		}
	}
	return n
}

// sendable reports whether operations on objects are queued that may be sent now; full means sub-port states alone.
func (q *queues) sendable(full bool) bool {
	for lane := range q.lanes {
		for class := range q.lanes[lane] {
			if q.lanes[lane][class].len() > 0 && (Class(class) == SubPortSet || !full) {
				return true
			}
		}
	}
	return false
}

// pop removes entries up to the first one whose operation is needed, and returns that operation. prepare reports
// whether an operation is needed, and completes it. full means that only sub-port states may be sent.
//
// Sub-port states go first; then the prompt and the bulk lane alternate, bulk operations on vectors only while their
// pace allows, because a prompt operation waits for those in flight.
func (q *queues) pop(full bool, prepare func(operation) (operation, bool)) (operation, bool) {
	for lane := range q.lanes {
		if op, ok := q.popClass(lane, SubPortSet, prepare); ok {
			return op, true
		}
	}
	if full {
		return operation{}, false
	}
	q.turn = !q.turn
	for i := range q.lanes {
		lane := i
		if q.turn {
			lane = 1 - i
		}
		for class := VectorSet; class < VectorDelete; class++ {
			if lane == 1 && paced(class) && q.lanes[lane][class].len() > 0 && !q.paces[class].allows() {
				break // a later class must not overtake this one
			}
			if op, ok := q.popClass(lane, class, prepare); ok {
				return op, true
			}
		}
	}
	for q.deletes.len() > 0 && q.paces[VectorDelete].allows() {
		w := q.deletes.pop()
		w.queued = false
		if op, ok := prepare(operation{class: VectorDelete, wire: w, bulk: true}); ok {
			return op, true
		}
	}
	return operation{}, false
}

// popClass returns the next operation of a queue, or false if there is none.
func (q *queues) popClass(lane int, class Class, prepare func(operation) (operation, bool)) (operation, bool) {
	for queue := &q.lanes[lane][class]; queue.len() > 0; {
		o := queue.pop()
		o.queued &^= queuedBit(lane, class)
		if op, ok := prepare(operation{class: class, object: o, bulk: lane == 1}); ok {
			return op, true
		}
	}
	return operation{}, false
}

// reset empties the queues, and restarts the paces.
func (q *queues) reset() {
	q.paces = [classes]pace{}
	for lane := range q.lanes {
		for class := range q.lanes[lane] {
			for queue := &q.lanes[lane][class]; queue.len() > 0; {
				queue.pop().queued = 0
			}
		}
	}
	for q.deletes.len() > 0 {
		q.deletes.pop().queued = false
	}
}
