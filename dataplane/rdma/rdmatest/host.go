package rdmatest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

// Hooks are told what a transport tells its host. They run with the lock held and must not call a channel: Host.Later does. All
// are optional but Admit.
type Hooks struct {
	// Admit says where an incoming message goes.
	Admit func(ch rdma.Channel, head []byte, n int) ([]byte, rdma.Verdict)
	// Deliver gets a message that is in place, with the body that Admit gave.
	Deliver func(ch rdma.Channel, head, body []byte)
	// Complete gets an operation as it was posted, and its error.
	Complete func(op *rdma.Op, err error)
	Return   func(op *rdma.Op)
	Room     func(ch rdma.Channel)
	Failed   func(ch rdma.Channel, err error)
}

// Host is a rdma.Host for one transport, for driving channels without sets: memory regions, the hooks, and a judge of the contract.
// What a transport does wrong is kept; Err tells the first. As with a device, nothing that it is told calls back into a channel
// before the turn is over.
type Host struct {
	Hooks
	address   netip.Addr
	transport rdma.Transport
	now       func() time.Duration
	lock      sync.Locker
	regions   map[uint32]region
	posted    map[*rdma.Op]rdma.Channel
	admitted  map[message][]byte
	vain      map[rdma.Channel]int // Rooms in a row since the last Post that succeeded
	later     []func()
	running   []func()
	err       error
	forged    bool // bytes have come that the peer did not send: messages may be delivered twice, or what is none
}

type region struct {
	address uint64
	b       []byte
	access  rdma.Access
}

type message struct {
	ch   rdma.Channel
	head string
}

// maxVain is how many Rooms without a Post that succeeds are a storm.
const maxVain = 10000

var _ rdma.Host = (*Host)(nil)

// NewHost makes a host at an address and starts a transport on it. now is the time for the transport; lock is what the device's
// lock would be, nil in virtual time, where nothing is concurrent.
func NewHost(address netip.Addr, transport rdma.Transport, now func() time.Duration, lock sync.Locker, hooks Hooks) (*Host, error) {
	if lock == nil {
		lock = noLock{}
	}
	h := &Host{Hooks: hooks, address: address, transport: transport, now: now, lock: lock, regions: map[uint32]region{},
		posted: map[*rdma.Op]rdma.Channel{}, admitted: map[message][]byte{}, vain: map[rdma.Channel]int{}}
	return h, transport.Start(h)
}

type noLock struct{}

func (noLock) Lock()   {}
func (noLock) Unlock() {}

// Register makes b a memory region at an address under a key. Transports that publish regions are told.
func (h *Host) Register(key uint32, address uint64, b []byte, access rdma.Access) {
	h.Do(func() {
		h.regions[key] = region{address, b, access}
		if r, ok := h.transport.(rdma.Registrar); ok {
			r.Registered(key, address, b, access)
		}
	})
}

// Alloc is n bytes of memory, the transport's if it has memory of its own.
func (h *Host) Alloc(n int) (b []byte, err error) {
	a, ok := h.transport.(rdma.Allocator)
	if !ok {
		return make([]byte, n), nil
	}
	h.Do(func() { b, err = a.Alloc(n) })
	return b, err
}

// Later has f called at the end of the turn, before the flush, where channels may be called. The lock must be held.
func (h *Host) Later(f func()) { h.later = append(h.later, f) }

// Err is the first breach of the contract by the transport.
func (h *Host) Err() error { return h.err }

// Outstanding is how many operations have been posted and have not completed.
func (h *Host) Outstanding() int { return len(h.posted) }

// Post posts on a channel of the host's transport. The lock must be held.
func (h *Host) Post(ch rdma.Channel, op *rdma.Op) bool {
	// Known before the channel is: it may complete the operation at once.
	h.posted[op] = ch
	if ch.Post(op) {
		h.vain[ch] = 0
		return true
	}
	if h.posted[op] != ch {
		h.blame("an operation that was refused has completed")
	}
	delete(h.posted, op)
	return false
}

// Channel makes a channel. The lock must be held.
func (h *Host) Channel(c rdma.ChannelConfig) (rdma.Channel, error) { return h.transport.Channel(c) }

// Close closes a channel; the lock must be held. Operations left over are a breach of the contract.
func (h *Host) Close(ch rdma.Channel) {
	ch.Close()
	for op, of := range h.posted {
		if of == ch {
			h.blame("an operation (kind %d, %d bytes) has not completed although its channel is closed", op.Kind, len(op.Local))
			delete(h.posted, op)
		}
	}
	for m := range h.admitted {
		if m.ch == ch {
			delete(h.admitted, m)
		}
	}
}

// Address implements rdma.Host.
func (h *Host) Address() netip.Addr { return h.address }

// Now implements rdma.Host.
func (h *Host) Now() time.Duration { return h.now() }

// Do implements rdma.Host.
func (h *Host) Do(f func()) {
	h.lock.Lock()
	defer h.lock.Unlock()
	f()
	h.settle()
}

// settle runs what is to be done at the end of the turn, then flushes.
func (h *Host) settle() {
	for len(h.later) > 0 {
		h.later, h.running = h.running[:0], h.later
		for i, f := range h.running {
			f()
			h.running[i] = nil
		}
	}
	h.transport.Flush()
}

// Memory implements rdma.Host.
func (h *Host) Memory(_ rdma.Channel, key uint32, address uint64, n int, need rdma.Access) ([]byte, error) {
	r, ok := h.regions[key]
	switch {
	case n < 0:
		h.blame("Memory was asked for %d bytes", n)
		return nil, fmt.Errorf("%w: %d bytes", rdma.ErrRemoteAccess, n)
	case !ok:
		return nil, fmt.Errorf("%w: no region has key %#x", rdma.ErrRemoteAccess, key)
	case r.access&need != need:
		return nil, fmt.Errorf("%w: key %#x lacks a right", rdma.ErrRemoteAccess, key)
	case n == 0:
		return nil, nil
	}
	offset := address - r.address
	if address < r.address || offset > uint64(len(r.b)) || uint64(n) > uint64(len(r.b))-offset {
		return nil, fmt.Errorf("%w: %d bytes at %#x of key %#x", rdma.ErrRemoteAccess, n, address, key)
	}
	return r.b[offset : offset+uint64(n) : offset+uint64(n)], nil
}

// Atomic implements rdma.Host.
func (h *Host) Atomic(ch rdma.Channel, kind rdma.OpKind, key uint32, address, compare, swap uint64) (uint64, error) {
	if kind != rdma.OpCompareSwap && kind != rdma.OpFetchAdd {
		h.blame("Atomic was called with kind %d", kind)
		return 0, errors.New("not an atomic operation")
	}
	b, err := h.Memory(ch, key, address, 8, rdma.RemoteAtomic)
	if err != nil {
		return 0, err
	}
	if address%8 != 0 {
		return 0, fmt.Errorf("%w: atomic at %#x", rdma.ErrRemoteAccess, address)
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

// Admit implements rdma.Host.
func (h *Host) Admit(ch rdma.Channel, head []byte, n int) ([]byte, rdma.Verdict) {
	if len(head) > rdma.MaxHead {
		h.blame("Admit was called with a head of %d bytes", len(head))
		return nil, rdma.Refused
	}
	body, v := h.Hooks.Admit(ch, head, n)
	if v != rdma.Accepted {
		return nil, v
	}
	m := message{ch, string(head)}
	if _, ok := h.admitted[m]; ok && !h.forged {
		h.blame("Admit was called again for a message that had been accepted and not delivered: head %x", head)
	}
	h.admitted[m] = body
	return body, v
}

// Deliver implements rdma.Host.
func (h *Host) Deliver(ch rdma.Channel, head []byte) {
	m := message{ch, string(head)}
	body, ok := h.admitted[m]
	if !ok && h.forged {
		return
	}
	if !ok {
		h.blame("Deliver was called for a message that was not admitted, or was delivered before: head %x", head)
		return
	}
	delete(h.admitted, m)
	if h.Hooks.Deliver != nil {
		h.Hooks.Deliver(ch, head, body)
	}
}

// Complete implements rdma.Host. The operation is given other contents at once: a transport must not look at it any more.
func (h *Host) Complete(op *rdma.Op, err error) {
	if h.leave(op, "completed") && h.Hooks.Complete != nil {
		h.Hooks.Complete(op, err)
		*op = rdma.Op{Kind: 0xff}
	}
}

// Return implements rdma.Host.
func (h *Host) Return(op *rdma.Op) {
	if h.leave(op, "returned") && h.Hooks.Return != nil {
		h.Hooks.Return(op)
	}
}

func (h *Host) leave(op *rdma.Op, how string) bool {
	if _, ok := h.posted[op]; !ok {
		h.blame("an operation was %s twice, or was never posted", how)
		return false
	}
	delete(h.posted, op)
	return true
}

// Room implements rdma.Host.
func (h *Host) Room(ch rdma.Channel) {
	if h.vain[ch]++; h.vain[ch] == maxVain {
		h.blame("Room was called %d times in a row, and nothing could be posted", maxVain)
	}
	if h.Hooks.Room != nil {
		h.Hooks.Room(ch)
	}
}

// Failed implements rdma.Host.
func (h *Host) Failed(ch rdma.Channel, err error) {
	for op, of := range h.posted {
		if of == ch {
			h.blame("Failed was called while an operation (kind %d, %d bytes) had not completed", op.Kind, len(op.Local))
			break
		}
	}
	if h.Hooks.Failed != nil {
		h.Hooks.Failed(ch, err)
	}
}

func (h *Host) blame(format string, args ...any) {
	if h.err == nil {
		h.err = fmt.Errorf("host %v: "+format, append([]any{h.address}, args...)...)
	}
}
