package rdma

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Config is the configuration of a device.
type Config struct {
	// Address is the loopback: the GPU's own address.
	Address netip.Addr
	// Transports are the device's transports, at least one; the first carries every plane that Planes does not name.
	// The device starts and stops them.
	Transports []Transport
	// Planes maps planes that the first transport does not carry to the name of their transport, such as "nupa" for a
	// shared-memory plane.
	Planes map[string]string
	// Weights is the fared that provides slots. With nil, the application provides them to Offer, Answer and
	// Set.SetSlots.
	Weights farev1.WeightServiceClient
	// Clock returns the time since a fixed moment; nil means the system's clock.
	Clock func() time.Duration
	// Log receives messages for operators; nil disables logging.
	Log *slog.Logger
}

// Device is an endpoint on one loopback: the context in verbs terms. Its methods may be called from any goroutine.
type Device struct {
	address    netip.Addr
	transports []Transport
	planes     map[string]Transport
	clock      func() time.Duration
	log        *slog.Logger
	weights    *follower // nil: the application provides slots
	count      counters

	mu       sync.Mutex
	regions  regions
	channels map[Channel]*Set
	sets     map[*Set]bool
	dirty    []*Set
	closed   bool
	// tunneled are datagrams that arrived through tunnels and still have to be delivered.
	tunneled []tunneled
}

type counters struct {
	malformed atomic.Uint64 // messages with an invalid header
}

var errClosed = errors.New("the device is closed")

// Open makes a device and starts its transports.
func Open(c Config) (*Device, error) {
	d := &Device{address: c.Address.Unmap(), planes: map[string]Transport{}, clock: c.Clock, log: c.Log,
		channels: map[Channel]*Set{}, sets: map[*Set]bool{}}
	d.regions = regions{byKey: map[uint32]*MR{}, flat: map[uint32][]*MR{}, next: firstAddress}
	if !d.address.IsValid() {
		return nil, errors.New("a device needs the address of its loopback")
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if d.clock == nil {
		start := time.Now()
		d.clock = func() time.Duration { return time.Since(start) }
	}
	byName := map[string]Transport{}
	for _, t := range c.Transports {
		if byName[t.Name()] != nil {
			return nil, fmt.Errorf("two transports have the name %s", t.Name())
		}
		byName[t.Name()] = t
	}
	if len(byName) == 0 {
		return nil, errors.New("a device needs a transport")
	}
	for plane, name := range c.Planes {
		t := byName[name]
		if t == nil {
			return nil, fmt.Errorf("plane %s: no transport %q; the transports are %v", plane, name, slices.Sorted(maps.Keys(byName)))
		}
		d.planes[plane] = t
	}
	for i, t := range c.Transports {
		if err := t.Start(host{d}); err != nil {
			for _, started := range c.Transports[:i] {
				started.Stop()
			}
			return nil, fmt.Errorf("transport %s on %v: %w", t.Name(), d.address, err)
		}
		d.mu.Lock()
		d.transports = append(d.transports, t) // Do flushes it from now on
		d.mu.Unlock()
	}
	if c.Weights != nil {
		d.weights = d.follow(c.Weights)
	}
	return d, nil
}

// Close ends every set and every transport. A second call does nothing.
func (d *Device) Close() {
	if d.weights != nil {
		d.weights.stop()
	}
	closed := false
	var sets []*Set
	d.Do(func() {
		closed, d.closed = d.closed, true
		sets = slices.Collect(maps.Keys(d.sets))
	})
	if closed {
		return
	}
	for _, s := range sets {
		s.Close()
	}
	for _, t := range d.transports {
		t.Stop()
	}
}

// Address returns the device's loopback.
func (d *Device) Address() netip.Addr { return d.address }

// Counters returns the transports' counters by transport and name, and the device's own counters under "rdma".
func (d *Device) Counters() map[string]map[string]uint64 {
	out := map[string]map[string]uint64{"rdma": {"malformed": d.count.malformed.Load()}}
	if d.weights != nil {
		out["rdma"]["weight_updates"] = d.weights.updates.Load()
		out["rdma"]["weight_watch_restarts"] = d.weights.restarts.Load()
	}
	d.Do(func() {
		for _, t := range d.transports {
			out[t.Name()] = t.Counters()
		}
	})
	return out
}

// Do calls f with the device's lock held, then lets sets make progress and transports send.
func (d *Device) Do(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
	for again := true; again; again = len(d.dirty)+len(d.tunneled) > 0 { // flushing may complete operations
		for len(d.dirty) > 0 {
			s := d.dirty[len(d.dirty)-1]
			d.dirty = d.dirty[:len(d.dirty)-1]
			s.dirty = false
			s.settle()
		}
		// Datagrams from tunnels reach their transport here, where no other transport is on the call stack.
		for _, a := range d.tunneled {
			a.to.Receive(a.from, a.datagram)
		}
		d.tunneled = d.tunneled[:0]
		for _, t := range d.transports {
			t.Flush()
		}
	}
}

// stir schedules a set for settle before the lock is released.
func (d *Device) stir(s *Set) {
	if !s.dirty {
		s.dirty = true
		d.dirty = append(d.dirty, s)
	}
}

func (d *Device) forget(s *Set) { delete(d.sets, s) }

// transportOf returns the transport of a plane.
func (d *Device) transportOf(plane string) Transport {
	if t := d.planes[plane]; t != nil {
		return t
	}
	return d.transports[0]
}

// host implements Host for a device.
type host struct{ d *Device }

var (
	_ PlainHost = host{}
	_ FlatHost  = host{}
)

func (h host) Address() netip.Addr { return h.d.address }
func (h host) Now() time.Duration  { return h.d.clock() }
func (h host) Do(f func())         { h.d.Do(f) }

func (h host) Memory(ch Channel, key uint32, address uint64, n int, need Access) ([]byte, error) {
	s := h.d.channels[ch]
	if s == nil {
		return nil, fmt.Errorf("%w: the set has ended", ErrRemoteAccess)
	}
	return h.d.regions.find(s.cfg.PD, key, address, n, need)
}

func (h host) FlatMemory(ch Channel, address uint64, n int, need Access) ([]byte, error) {
	s := h.d.channels[ch]
	if s == nil {
		return nil, fmt.Errorf("%w: the set has ended", ErrRemoteAccess)
	}
	return h.d.regions.findFlat(s.cfg.PD, address, n, need)
}

func (h host) Atomic(ch Channel, kind OpKind, key uint32, address, compare, swap uint64) (uint64, error) {
	s := h.d.channels[ch]
	if s == nil {
		return 0, fmt.Errorf("%w: the set has ended", ErrRemoteAccess)
	}
	return h.d.regions.atomically(s.cfg.PD, kind, key, address, compare, swap)
}

func (h host) Admit(ch Channel, head []byte, n int) ([]byte, Verdict) {
	if s := h.d.channels[ch]; s != nil {
		return s.admit(ch, head, n)
	}
	return nil, NotReady
}

func (h host) Deliver(ch Channel, head []byte) {
	if s := h.d.channels[ch]; s != nil {
		s.delivered(head)
	}
}

func (h host) Receive(ch Channel) ([]byte, Verdict) {
	if s := h.d.channels[ch]; s != nil {
		return s.receiver.oldest()
	}
	return nil, NotReady
}

func (h host) Received(ch Channel, m Arrival) {
	if s := h.d.channels[ch]; s != nil {
		s.receiver.received(m)
	}
}

func (h host) Complete(op *Op, err error) { op.Set.completed(op, err) }
func (h host) Return(op *Op)              { op.Set.returned(op) }

func (h host) Room(ch Channel) {
	if s := h.d.channels[ch]; s != nil {
		h.d.stir(s)
	}
}

func (h host) Stalled(ch Channel, slot int, stalled bool) {
	if s := h.d.channels[ch]; s != nil {
		s.lanes.stalled(ch, slot, stalled)
	}
}

func (h host) Failed(ch Channel, err error) {
	if s := h.d.channels[ch]; s != nil {
		s.fail(err)
	}
}
