package rdmatest

import "time"

// event is the arrival of a datagram, a host's wake-up, or a call.
type event struct {
	at      time.Duration
	seq     uint64 // of equal times, the event that was pushed first comes first
	arrives *datagram
	end     *End
	call    func()
}

func (e *event) before(o *event) bool { return e.at < o.at || e.at == o.at && e.seq < o.seq }

// events is a binary heap by time.
type events struct {
	heap []event
	seq  uint64
}

func (h *events) len() int      { return len(h.heap) }
func (h *events) first() *event { return &h.heap[0] }

func (h *events) push(e event) {
	h.seq++
	e.seq = h.seq
	h.heap = append(h.heap, e)
	for i := len(h.heap) - 1; i > 0; {
		up := (i - 1) / 2
		if !h.heap[i].before(&h.heap[up]) {
			break
		}
		h.heap[i], h.heap[up] = h.heap[up], h.heap[i]
		i = up
	}
}

func (h *events) pop() event {
	e := h.heap[0]
	last := len(h.heap) - 1
	h.heap[0] = h.heap[last]
	h.heap[last] = event{}
	h.heap = h.heap[:last]
	for i := 0; ; {
		down := 2*i + 1
		if down >= last {
			return e
		}
		if down+1 < last && h.heap[down+1].before(&h.heap[down]) {
			down++
		}
		if !h.heap[down].before(&h.heap[i]) {
			return e
		}
		h.heap[i], h.heap[down] = h.heap[down], h.heap[i]
		i = down
	}
}
