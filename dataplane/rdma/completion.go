package rdma

import (
	"context"
	"sync"
)

// Opcode says what a work request does, or which completion it is.
type Opcode uint8

// The opcodes.
const (
	Send           Opcode = iota // to the receive that the peer has posted next
	SendImmediate                // with 32 bits for its completion
	Write                        // RDMA WRITE
	WriteImmediate               // and consumes a receive of the peer, whose completion has 32 bits
	Read                         // RDMA READ
	CompareSwap                  // 8 bytes
	FetchAdd                     // 8 bytes
	Recv                         // completions of receives only: a SEND has come
	RecvWrite                    // completions of receives only: a WRITE with immediate has come
)

var opcodeNames = [...]string{"SEND", "SEND with immediate", "RDMA WRITE", "RDMA WRITE with immediate", "RDMA READ", "compare and swap", "fetch and add", "receive", "receive of RDMA WRITE with immediate"}

// String names the operation in the words of the verbs.
func (o Opcode) String() string {
	if int(o) < len(opcodeNames) {
		return opcodeNames[o]
	}
	return "unknown"
}

// Completion says that a work request is done.
type Completion struct {
	Set    *Set
	ID     uint64 // of the work request
	Opcode Opcode
	// Err is nil, or one of this package's errors, perhaps wrapped. The first of a set that is not nil ends it: everything
	// posted after completes with ErrFlushed.
	Err error
	// Bytes is how many came in (receives, READs and atomics), or were sent.
	Bytes int
	// Immediate is the 32 bits of SendImmediate and WriteImmediate; meaningful when HasImmediate.
	Immediate    uint32
	HasImmediate bool
}

// CQ is a completion queue. It cannot overflow: a work request counts as outstanding, and its set takes no more than so many,
// until its completion has been polled.
type CQ struct {
	mu     sync.Mutex
	queue  []queued
	taken  int // entries of queue before it have been polled
	notify chan struct{}
}

type queued struct {
	Completion
	send bool // of the send queue, not the receive queue
}

// CreateCQ makes a completion queue. One queue may serve any number of sets.
func (d *Device) CreateCQ() *CQ { return &CQ{notify: make(chan struct{}, 1)} }

// Poll moves completions into out, oldest first, and returns how many.
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

// Wait polls, and if there is nothing, waits for something. The error is the context's. For one waiter, as Notify.
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

// Notify has an element once completions have come since it was last received from. For one waiter.
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
