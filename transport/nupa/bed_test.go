package nupa

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/fared/fared/transport/rdma"
)

// bed has endpoints on one area of ordinary memory. It has no goroutine and no clock: only calls of the test have
// effects. It replaces the kernel's knowledge about processes.
type bed struct {
	t      testing.TB
	area   *area
	dead   [endpointCount]bool
	paused [endpointCount]bool // not alive, but not ended
	now    time.Duration
}

func newBed(t testing.TB, rings, heap int) *bed {
	t.Helper()
	size := ringsAt + rings*ringSize + (heap+2+heap/1024)*pageSize
	a, err := format(make([]byte, (size+pageSize-1)&^(pageSize-1)), rings, 42)
	if err != nil {
		t.Fatal(err)
	}
	return &bed{t: t, area: a}
}

func (b *bed) lock() (func(), error)     { return func() {}, nil }
func (b *bed) claim(i int) (bool, error) { b.dead[i] = false; return true, nil }
func (b *bed) release(i int)             { b.dead[i] = true }
func (b *bed) alive(i int) bool          { return !b.ended(i) && !b.paused[i] }
func (b *bed) ended(i int) bool          { return b.dead[i] || !b.area.endpoint(i).claimed() }
func (b *bed) wake(*atomic.Uint32)       {}
func (b *bed) decide([16]byte)           {}
func (b *bed) start(int)                 {}
func (b *bed) stop()                     {}
func (b *bed) close()                    {}

func (b *bed) identity() (id [identitySize]byte)           { return id }
func (b *bed) sleep(*atomic.Uint32, uint32, time.Duration) {}
func (b *bed) pause(n int) bool                            { return n < 100 }

var (
	addressA = netip.MustParseAddr("192.0.2.1")
	addressB = netip.MustParseAddr("2001:db8::2")
)

// join makes an endpoint on the bed.
func (b *bed) join(address netip.Addr) *host {
	b.t.Helper()
	h := newHost(b.t, address)
	h.bed = b
	h.tr = New(Config{}).(*transport)
	if err := h.tr.attach(h, b, b.area); err != nil {
		b.t.Fatal(err)
	}
	return h
}

// settle runs all endpoints until none has work left.
func settle(hosts ...*host) {
	for again := true; again; {
		again = false
		for _, h := range hosts {
			if !h.tr.self.quiet() {
				again = true
				h.Do(h.tr.serve)
			}
		}
	}
}

// host is an rdma.Host that records all calls and checks them.
type host struct {
	t       testing.TB
	mu      sync.Mutex
	address netip.Addr
	bed     *bed // nil: real time
	tr      *transport
	begin   time.Time
	lean    *echo // receives messages and completions instead

	memory    map[uint32]memory
	receives  int // number of SENDs that it admits
	refuse    bool
	body      []byte
	accepted  bool
	delivered [][]byte // head, body
	onDeliver func(ch rdma.Channel)

	posted    map[*rdma.Op]bool
	completed []*rdma.Op
	errs      map[*rdma.Op]error
	returned  []*rdma.Op
	rooms     int
	failed    map[rdma.Channel]error
}

type memory struct {
	b      []byte
	access rdma.Access
}

func newHost(t testing.TB, address netip.Addr) *host {
	return &host{
		t: t, address: address, begin: time.Now(), memory: map[uint32]memory{}, posted: map[*rdma.Op]bool{},
		errs: map[*rdma.Op]error{}, failed: map[rdma.Channel]error{},
	}
}

func (h *host) Address() netip.Addr { return h.address }

func (h *host) Now() time.Duration {
	if h.bed != nil {
		return h.bed.now
	}
	return time.Since(h.begin)
}

func (h *host) Do(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
	h.tr.Flush()
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// register makes b a memory region at its address in the process.
func (h *host) register(key uint32, b []byte, access rdma.Access) {
	h.memory[key] = memory{b, access}
	h.tr.Registered(key, addressOf(b), b, access)
}

func (h *host) Memory(_ rdma.Channel, key uint32, address uint64, n int, need rdma.Access) ([]byte, error) {
	m, ok := h.memory[key]
	base := addressOf(m.b)
	if !ok || m.access&need != need || address < base || address-base > uint64(len(m.b)) || uint64(n) > uint64(len(m.b))-(address-base) {
		return nil, fmt.Errorf("%w: key %d", rdma.ErrRemoteAccess, key)
	}
	return m.b[address-base:][:n], nil
}

func (h *host) Atomic(ch rdma.Channel, kind rdma.OpKind, key uint32, address, compare, swap uint64) (uint64, error) {
	b, err := h.Memory(ch, key, address, 8, rdma.RemoteAtomic)
	if err != nil {
		return 0, err
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

func (h *host) Admit(_ rdma.Channel, head []byte, n int) ([]byte, rdma.Verdict) {
	switch {
	case h.lean != nil:
		return h.lean.admit(n), rdma.Accepted
	case h.refuse:
		return nil, rdma.Refused
	case h.receives == 0:
		return nil, rdma.NotReady
	}
	h.receives--
	h.body, h.accepted = make([]byte, n), true
	return h.body, rdma.Accepted
}

func (h *host) Deliver(ch rdma.Channel, head []byte) {
	if h.lean != nil {
		h.lean.deliver()
		return
	}
	if !h.accepted {
		h.t.Error("Deliver without Admit")
	}
	h.accepted = false
	h.delivered = append(h.delivered, slices.Concat(head, h.body))
	if h.onDeliver != nil {
		h.onDeliver(ch)
	}
}

func (h *host) settleOp(op *rdma.Op, what string) {
	if !h.posted[op] {
		h.t.Errorf("%s of an operation that is not outstanding: %+v", what, op)
	}
	delete(h.posted, op)
}

func (h *host) Complete(op *rdma.Op, err error) {
	if h.lean != nil {
		h.lean.complete(err)
		return
	}
	h.settleOp(op, "Complete")
	h.completed = append(h.completed, op)
	h.errs[op] = err
}

func (h *host) Return(op *rdma.Op) {
	h.settleOp(op, "Return")
	h.returned = append(h.returned, op)
}

func (h *host) Room(rdma.Channel) { h.rooms++ }

func (h *host) Stalled(rdma.Channel, int, bool) {}

func (h *host) Failed(ch rdma.Channel, err error) {
	if len(h.posted) != 0 && len(h.tr.channels) == 1 {
		h.t.Errorf("the channel has failed with %d operations outstanding", len(h.posted))
	}
	if h.failed[ch] != nil || err == nil {
		h.t.Errorf("failed with %v after %v", err, h.failed[ch])
	}
	h.failed[ch] = err
}

// post posts an operation, which must be accepted.
func (h *host) post(ch rdma.Channel, op *rdma.Op) *rdma.Op {
	h.t.Helper()
	if !h.tryPost(ch, op) {
		h.t.Fatalf("not taken: %+v", op)
	}
	return op
}

func (h *host) tryPost(ch rdma.Channel, op *rdma.Op) (ok bool) {
	h.Do(func() {
		h.posted[op] = true
		if ok = ch.Post(op); !ok {
			delete(h.posted, op)
		}
	})
	return ok
}

// wants checks the result of an operation.
func (h *host) wants(op *rdma.Op, want error) {
	h.t.Helper()
	err, ended := h.errs[op]
	if !ended || !errors.Is(err, want) || want == nil && err != nil {
		h.t.Errorf("operation of kind %d: ended %v with %v, want %v", op.Kind, ended, err, want)
	}
}

func live() []rdma.Path {
	return []rdma.Path{{Share: 1, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}}
}

// connect connects two hosts with a channel.
func connect(t testing.TB, a, b *host) (ca, cb rdma.Channel) {
	t.Helper()
	make := func(h *host, to netip.Addr) (c rdma.Channel) {
		h.Do(func() {
			var err error
			if c, err = h.tr.Channel(rdma.ChannelConfig{Remote: to, Ordered: true}); err != nil {
				t.Fatal(err)
			}
		})
		return c
	}
	ca, cb = make(a, b.address), make(b, a.address)
	for _, x := range []struct {
		h          *host
		c, partner rdma.Channel
	}{{a, ca, cb}, {b, cb, ca}} {
		x.h.Do(func() {
			if err := x.c.Connect(x.partner.Local(), live()); err != nil {
				t.Fatal(err)
			}
		})
	}
	return ca, cb
}

// shared returns memory of the area.
func (h *host) shared(n int) []byte {
	h.t.Helper()
	b, err := h.tr.Alloc(n)
	if err != nil {
		h.t.Fatal(err)
	}
	return b
}
