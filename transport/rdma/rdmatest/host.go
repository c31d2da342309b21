package rdmatest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// Hooks receive the calls of a transport to its host. They run with the lock held and must not call a channel, except
// through Host.Later. All hooks but Admit are optional.
type Hooks struct {
	// Admit returns the destination of an incoming message.
	Admit func(ch rdma.Channel, head []byte, n int) ([]byte, rdma.Verdict)
	// Deliver receives a message that is in place, with the body that Admit returned.
	Deliver func(ch rdma.Channel, head, body []byte)
	// Complete receives an operation as it was posted, and its error.
	Complete func(op *rdma.Op, err error)
	Return   func(op *rdma.Op)
	Room     func(ch rdma.Channel)
	Stalled  func(ch rdma.Channel, slot int, stalled bool)
	Failed   func(ch rdma.Channel, err error)
}

// Host is an rdma.Host for one transport, for driving channels without sets: it has memory regions and the hooks, and
// it checks the contract. Err returns the first breach by the transport. As in a device, calls from the transport do
// not call back into a channel before the end of the turn.
type Host struct {
	Hooks
	address   netip.Addr
	transport rdma.Transport
	now       func() time.Duration
	lock      sync.Locker
	regions   map[uint32]region
	posted    map[*rdma.Op]rdma.Channel
	admitted  map[message][]byte
	vain      map[rdma.Channel]int // consecutive Rooms without a successful Post
	stalled   map[stallOf]bool
	later     []func()
	running   []func()
	err       error
	forged    bool // forged datagrams have arrived: messages may be delivered twice, and unknown messages delivered
}

type region struct {
	address uint64
	b       []byte
	access  rdma.Access
}

// stallOf is a channel and a slot of its paths.
type stallOf struct {
	ch   rdma.Channel
	slot int
}

type message struct {
	ch   rdma.Channel
	head string
}

// maxVain is the number of consecutive Rooms without a successful Post that counts as a storm.
const maxVain = 10000

var _ rdma.FlatHost = (*Host)(nil)

// NewHost makes a host at an address and starts a transport on it. now is the clock of the transport; lock corresponds
// to the device's lock, and nil is for virtual time, which has no concurrency.
func NewHost(address netip.Addr, transport rdma.Transport, now func() time.Duration, lock sync.Locker, hooks Hooks) (*Host, error) {
	if lock == nil {
		lock = noLock{}
	}
	h := &Host{Hooks: hooks, address: address, transport: transport, now: now, lock: lock, regions: map[uint32]region{},
		posted: map[*rdma.Op]rdma.Channel{}, admitted: map[message][]byte{}, vain: map[rdma.Channel]int{}, stalled: map[stallOf]bool{}}
	return h, transport.Start(h)
}

type noLock struct{}

func (noLock) Lock()   {}
func (noLock) Unlock() {}

// Register makes b a memory region at an address under a key, and notifies a transport that is a Registrar.
func (h *Host) Register(key uint32, address uint64, b []byte, access rdma.Access) {
	h.Do(func() {
		h.regions[key] = region{address, b, access}
		if r, ok := h.transport.(rdma.Registrar); ok {
			r.Registered(key, address, b, access)
		}
	})
}

// Alloc returns n bytes of memory, from the transport if it is an Allocator.
func (h *Host) Alloc(n int) (b []byte, err error) {
	a, ok := h.transport.(rdma.Allocator)
	if !ok {
		return make([]byte, n), nil
	}
	h.Do(func() { b, err = a.Alloc(n) })
	return b, err
}

// Later schedules f for the end of the turn, before the flush, where calls to channels are allowed. The caller holds
// the lock.
func (h *Host) Later(f func()) { h.later = append(h.later, f) }

// Err returns the first breach of the contract by the transport.
func (h *Host) Err() error { return h.err }

// Outstanding returns the number of posted operations that have not completed.
func (h *Host) Outstanding() int { return len(h.posted) }

// Post posts on a channel of the host's transport. The caller holds the lock.
func (h *Host) Post(ch rdma.Channel, op *rdma.Op) bool {
	// Registered before the call, since the channel may complete the operation inside it.
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

// Channel makes a channel. The caller holds the lock.
func (h *Host) Channel(c rdma.ChannelConfig) (rdma.Channel, error) { return h.transport.Channel(c) }

// Close closes a channel. The caller holds the lock. Operations left outstanding are a breach of the contract.
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

// settle runs the functions passed to Later, then flushes.
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

// FlatMemory implements rdma.FlatHost.
func (h *Host) FlatMemory(_ rdma.Channel, address uint64, n int, need rdma.Access) ([]byte, error) {
	if n < 0 {
		h.blame("FlatMemory was asked for %d bytes", n)
		return nil, fmt.Errorf("%w: %d bytes", rdma.ErrRemoteAccess, n)
	}
	for key, r := range h.regions {
		offset := address - rdma.FlatAddress(key, r.address)
		if offset > uint64(len(r.b)) || uint64(n) > uint64(len(r.b))-offset {
			continue
		}
		if r.access&need != need {
			return nil, fmt.Errorf("%w: key %#x lacks a right", rdma.ErrRemoteAccess, key)
		}
		return r.b[offset : offset+uint64(n) : offset+uint64(n)], nil
	}
	return nil, fmt.Errorf("%w: %d bytes at %#x", rdma.ErrRemoteAccess, n, address)
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

// Complete implements rdma.Host. It overwrites the operation at once: the transport must not access it any longer.
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
		h.blame("Room was called %d times in a row, but no operation could be posted", maxVain)
	}
	if h.Hooks.Room != nil {
		h.Hooks.Room(ch)
	}
}

// Stalled implements rdma.Host.
func (h *Host) Stalled(ch rdma.Channel, slot int, stalled bool) {
	of := stallOf{ch, slot}
	if h.stalled[of] == stalled {
		h.blame("Stalled was called twice with %v for slot %d", stalled, slot)
	}
	h.stalled[of] = stalled
	if h.Hooks.Stalled != nil {
		h.Hooks.Stalled(ch, slot, stalled)
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
