package endpoint

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/superp"
)

var _ rdma.FlatHost = (*Endpoint)(nil)

// Address implements rdma.Host.
func (e *Endpoint) Address() netip.Addr { return e.cfg.Address }

// Now implements rdma.Host.
func (e *Endpoint) Now() time.Duration { return time.Since(e.start) }

// Do implements rdma.Host.
func (e *Endpoint) Do(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
	for {
		for len(e.later) > 0 {
			call := e.later[0]
			e.later = e.later[1:]
			call()
		}
		e.transport.Flush()
		if len(e.later) == 0 {
			e.later = nil
			return
		}
	}
}

// Memory implements rdma.Host. Only atomics, private opcodes of package superp, name memory by key and address.
func (e *Endpoint) Memory(ch rdma.Channel, key uint32, address uint64, n int, need rdma.Access) ([]byte, error) {
	return e.FlatMemory(ch, rdma.FlatAddress(key, address), n, need)
}

// FlatMemory implements rdma.FlatHost.
func (e *Endpoint) FlatMemory(_ rdma.Channel, address uint64, n int, _ rdma.Access) ([]byte, error) {
	offset := address - e.first
	if offset > uint64(len(e.memory)) || uint64(n) > uint64(len(e.memory))-offset {
		return nil, fmt.Errorf("%w: %d bytes at %#x", rdma.ErrRemoteAccess, n, address)
	}
	return e.memory[offset : offset+uint64(n) : offset+uint64(n)], nil
}

// Atomic implements rdma.Host.
func (e *Endpoint) Atomic(ch rdma.Channel, kind rdma.OpKind, key uint32, address, compare, swap uint64) (uint64, error) {
	b, err := e.Memory(ch, key, address, 8, rdma.RemoteAtomic)
	if err != nil {
		return 0, err
	}
	if address%8 != 0 {
		return 0, fmt.Errorf("%w: atomic at %#x, which is no multiple of 8", rdma.ErrRemoteAccess, address)
	}
	was := binary.NativeEndian.Uint64(b)
	switch {
	case kind == rdma.OpFetchAdd:
		binary.NativeEndian.PutUint64(b, was+swap)
	case was == compare:
		binary.NativeEndian.PutUint64(b, swap)
	}
	return was, nil
}

// maxInbox is the number of messages that a connection keeps for ReceiveSuperp. Further ones wait at the peer, whose
// transaction window fills.
const maxInbox = 16

// inbox has the messages of a connection.
type inbox struct {
	messages [][]byte
	arriving []byte // admitted and incomplete; nil: none. Messages have no heads, so Deliver can only mean the single one
	admitted bool
	waiting  bool          // a message was not admitted for lack of room
	changed  chan struct{} // closed and replaced when messages arrive, and when the connection fails
}

func (e *Endpoint) inboxOf(ch rdma.Channel) *inbox {
	b := e.inbox[ch]
	if b == nil {
		b = &inbox{changed: make(chan struct{})}
		e.inbox[ch] = b
	}
	return b
}

func (b *inbox) notify() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// Admit implements rdma.Host. The length is known once the last packet has arrived; the transport then asks again.
func (e *Endpoint) Admit(ch rdma.Channel, _ []byte, n int) ([]byte, rdma.Verdict) {
	b := e.inboxOf(ch)
	if n < 0 {
		return nil, rdma.NotReady
	}
	if b.admitted || len(b.messages) == maxInbox {
		b.waiting = true
		return nil, rdma.NotReady
	}
	b.arriving, b.admitted = make([]byte, n), true
	return b.arriving, rdma.Accepted
}

// Deliver implements rdma.Host.
func (e *Endpoint) Deliver(ch rdma.Channel, _ []byte) {
	b := e.inboxOf(ch)
	b.messages = append(b.messages, b.arriving)
	b.arriving, b.admitted = nil, false
	b.notify()
	e.ready(ch, b)
}

// ready notifies the channel of room for a message that waits.
func (e *Endpoint) ready(ch rdma.Channel, b *inbox) {
	if b.waiting && len(b.messages) < maxInbox {
		b.waiting = false
		e.later = append(e.later, ch.Ready)
	}
}

// Complete implements rdma.Host.
func (e *Endpoint) Complete(op *rdma.Op, err error) {
	e.posts.done[op] <- err
	delete(e.posts.done, op)
}

// Return implements rdma.Host. SUPERp returns no operation.
func (e *Endpoint) Return(op *rdma.Op) { e.Complete(op, rdma.ErrFlushed) }

// Room implements rdma.Host.
func (e *Endpoint) Room(rdma.Channel) { e.posts.wake() }

// Stalled implements rdma.Host.
func (e *Endpoint) Stalled(ch rdma.Channel, slot int, stalled bool) {
	e.cfg.Log.Info("a path has changed", "connection", describe(ch), "slot", slot, "stalled", stalled)
}

// violated logs a protocol error: all that come, but at most one in a second, with the number of others.
func (e *Endpoint) violated(v superp.ProtocolError) {
	if e.logged != 0 && v.At-e.logged < time.Second {
		e.unlogged++
		return
	}
	e.cfg.Log.Warn("protocol error", "connection", fmt.Sprintf("cid %d with %v", v.CID, v.Remote), "error", v.Error(), "others_before", e.unlogged)
	e.logged, e.unlogged = v.At, 0
}

// replaced moves the messages of a connection to the one that has replaced it: their sender knows that they have
// arrived. An incomplete one is dropped.
func (e *Endpoint) replaced(old, restarted *superp.Connection) {
	b := e.inbox[old]
	if b == nil {
		return
	}
	delete(e.inbox, old)
	e.inboxOf(restarted).messages = b.messages
	b.notify()
	e.posts.wake()
}

// Failed implements rdma.Host.
func (e *Endpoint) Failed(ch rdma.Channel, err error) {
	level := slog.LevelWarn
	if errors.Is(err, superp.ErrShutdown) {
		level = slog.LevelInfo
	}
	e.cfg.Log.Log(context.Background(), level, "a connection has ended", "connection", describe(ch), "reason", err)
	if b := e.inbox[ch]; b != nil {
		b.notify()
	}
}
