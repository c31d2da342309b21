package rdma

import (
	"context"
	"sync"
)

// Opcode is the operation of a work request, or the kind of a completion.
type Opcode uint8

// The opcodes.
const (
	Send           Opcode = iota // to the next receive that the peer has posted
	SendImmediate                // SEND with 32 bits for the peer's completion
	Write                        // RDMA WRITE
	WriteImmediate               // RDMA WRITE that also consumes a receive of the peer, whose completion has 32 bits
	Read                         // RDMA READ
	CompareSwap                  // 8 bytes
	FetchAdd                     // 8 bytes
	Recv                         // completions of receives only: a SEND has arrived
	RecvWrite                    // completions of receives only: a WRITE with immediate has arrived
)

var opcodeNames = [...]string{"SEND", "SEND with immediate", "RDMA WRITE", "RDMA WRITE with immediate", "RDMA READ", "compare and swap", "fetch and add", "receive", "receive of RDMA WRITE with immediate"}

// consumes reports whether a work request consumes a receive of the peer.
func (o Opcode) consumes() bool { return o == Send || o == SendImmediate || o == WriteImmediate }

// String returns the name of the operation in verbs terminology.
func (o Opcode) String() string {
	if int(o) < len(opcodeNames) {
		return opcodeNames[o]
	}
	return "unknown"
}

// Completion reports that a work request is complete.
type Completion struct {
	Set    *Set
	ID     uint64 // of the work request
	Opcode Opcode
	// Err is nil, or an error of this package, possibly wrapped. The first error of a set ends the set: all later work
	// requests complete with ErrFlushed.
	Err error
	// Bytes is the number of bytes received (receives, READs and atomics) or sent.
	Bytes int
	// Immediate is the 32 bits of SendImmediate and WriteImmediate; valid if HasImmediate is true.
	Immediate    uint32
	HasImmediate bool
}

// CQ is a completion queue. It cannot overflow: a work request counts as outstanding until the application has polled
// its completion, and a set limits the number of outstanding work requests.
type CQ struct {
	mu     sync.Mutex
	queue  []queued
	taken  int // number of polled entries at the head of queue
	notify chan struct{}
}

type queued struct {
	Completion
	send bool // true: of the send queue; false: of the receive queue
}

// CreateCQ makes a completion queue. A queue may serve any number of sets.
func (d *Device) CreateCQ() *CQ { return &CQ{notify: make(chan struct{}, 1)} }

// Poll moves completions into out, oldest first, and returns their number.
func (c *CQ) Poll(out []Completion) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for n < len(out) && c.taken < len(c.queue) {
		q := &c.queue[c.taken]
		out[n] = q.Completion
		q.Set.polled(q.send)
		*q = queued{}
		c.taken++
		n++
	}
	if c.taken == len(c.queue) {
		c.queue, c.taken = c.queue[:0], 0
	} else if c.taken > len(c.queue)/2 && c.taken > 64 {
		c.queue, c.taken = c.queue[:copy(c.queue, c.queue[c.taken:])], 0
	}
	return n
}

// Wait polls, and if the queue is empty waits for a completion or for ctx, whose error it returns. Only one goroutine
// may wait (see Notify).
func (c *CQ) Wait(ctx context.Context, out []Completion) (int, error) {
	for {
		if n := c.Poll(out); n > 0 || len(out) == 0 {
			return n, nil
		}
		select {
		case <-c.notify:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// Notify returns a channel that becomes readable when completions arrive. The channel has room for one notification, so
// it serves one receiver.
func (c *CQ) Notify() <-chan struct{} { return c.notify }

func (c *CQ) push(q queued) {
	c.mu.Lock()
	c.queue = append(c.queue, q)
	c.mu.Unlock()
	select {
	case c.notify <- struct{}{}:
	default:
	}
}
