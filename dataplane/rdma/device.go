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

// Config says what a device is.
type Config struct {
	// Address is the loopback: a GPU's own address.
	Address netip.Addr
	// Transports are what it sends by, at least one; the first carries every plane that Planes does not name. The device starts
	// and stops them.
	Transports []Transport
	// Planes names the transport of planes that the first does not carry, as "nupa" for a plane of shared memory.
	Planes map[string]string
	// Weights, when not nil, is the fared that slots come from. Without it they are given by Offer, Answer and Set.SetSlots.
	Weights farev1.WeightServiceClient
	// Clock is the time since some fixed moment; nil: the system's.
	Clock func() time.Duration
	// Log is told of what operators want to know; nil: nobody is.
	Log *slog.Logger
}

// Device is an endpoint on one loopback: the verbs' context. Its methods may be called from any goroutine.
type Device struct {
	address    netip.Addr
	transports []Transport
	planes     map[string]Transport
	clock      func() time.Duration
	log        *slog.Logger
	weights    *follower // nil: slots are given by hand
	count      counters

	mu       sync.Mutex
	regions  regions
	channels map[Channel]*Set
	sets     map[*Set]bool
	dirty    []*Set
	closed   bool
	// tunnelled are datagrams that have come through tunnels.
	tunnelled []tunnelled
}

type counters struct {
	malformed atomic.Uint64 // messages whose head made no sense
}

var errClosed = errors.New("the device is closed")

// Open makes a device and starts its transports.
func Open(c Config) (*Device, error) {
	d := &Device{address: c.Address.Unmap(), planes: map[string]Transport{}, clock: c.Clock, log: c.Log,
		channels: map[Channel]*Set{}, sets: map[*Set]bool{}}
	d.regions = regions{all: make([]*MR, 1), tags: make([]uint32, 1), next: firstAddress}
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
			return nil, fmt.Errorf("two transports are called %s", t.Name())
		}
		byName[t.Name()] = t
	}
	if len(byName) == 0 {
		return nil, errors.New("a device needs a transport")
	}
	for plane, name := range c.Planes {
		t := byName[name]
		if t == nil {
			return nil, fmt.Errorf("plane %s: there is no transport %q, only %v", plane, name, slices.Sorted(maps.Keys(byName)))
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
		d.transports = append(d.transports, t) // from now on it is flushed
		d.mu.Unlock()
	}
	if c.Weights != nil {
		d.weights = d.follow(c.Weights)
	}
	return d, nil
}

// Close ends every set and every transport. Closing twice is no error.
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

// Address is the device's loopback.
func (d *Device) Address() netip.Addr { return d.address }

// Counters are the transports' counters by transport and name, and the device's own under "rdma".
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

// Do calls f with the device's lock held, then lets sets go on and transports send.
func (d *Device) Do(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
	for again := true; again; again = len(d.dirty)+len(d.tunnelled) > 0 { // flushing may complete operations
		for len(d.dirty) > 0 {
			s := d.dirty[len(d.dirty)-1]
			d.dirty = d.dirty[:len(d.dirty)-1]
			s.dirty = false
			s.settle()
		}
		// What came through a tunnel is given to its transport here, where no other is at work.
		for _, a := range d.tunnelled {
			a.to.Receive(a.from, a.datagram)
		}
		d.tunnelled = d.tunnelled[:0]
		for _, t := range d.transports {
			t.Flush()
		}
	}
}

// stir has a set looked at before the lock is let go.
func (d *Device) stir(s *Set) {
	if !s.dirty {
		s.dirty = true
		d.dirty = append(d.dirty, s)
	}
}

func (d *Device) forget(s *Set) { delete(d.sets, s) }

// transportOf is what carries a plane.
func (d *Device) transportOf(plane string) Transport {
	if t := d.planes[plane]; t != nil {
		return t
	}
	return d.transports[0]
}

// host is the device as its transports see it.
type host struct{ d *Device }

var _ Host = host{}

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

func (h host) Complete(op *Op, err error) { op.Set.completed(op, err) }
func (h host) Return(op *Op)              { op.Set.returned(op) }

func (h host) Room(ch Channel) {
	if s := h.d.channels[ch]; s != nil {
		h.d.stir(s)
	}
}

func (h host) Failed(ch Channel, err error) {
	if s := h.d.channels[ch]; s != nil {
		s.fail(err)
	}
}
