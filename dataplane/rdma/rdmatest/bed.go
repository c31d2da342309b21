package rdmatest

import (
	"net/netip"
	"sync"
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

// Bed is two hosts that reach each other, and their time.
type Bed interface {
	// Open makes host 0 or 1 with hooks.
	Open(i int, hooks Hooks) (*Host, error)
	// Lock is held around everything that looks at both hosts.
	sync.Locker
	// After calls f, with the lock held, in d.
	After(d time.Duration, f func())
	// Now is the hosts' time.
	Now() time.Duration
	// Run lets time pass until done, which is called with the lock held, or until the limit; false: the limit.
	Run(done func() bool, limit time.Duration) bool
	// Planes is how many planes there are; a source port's is the port modulo that. SetPlane takes one down or up.
	Planes() int
	SetPlane(plane int, up bool)
	// Err is what went wrong in the network itself.
	Err() error
	// Close stops both transports.
	Close()
}

// address is that of host 0 or 1 of a Bed in virtual time.
func (n *Net) address(i int) netip.Addr {
	if n.config.IPv6 {
		return netip.AddrFrom16([16]byte{0xfd, 15: byte(1 + i)})
	}
	return netip.AddrFrom4([4]byte{10, 255, 0, byte(1 + i)})
}

// virtual is a Bed on a Net.
type virtual struct {
	*Net
	noLock
	construct Constructor
	ends      []*End
}

// Virtual is two hosts on a simulated network.
func Virtual(config NetConfig, construct Constructor) Bed {
	return &virtual{Net: NewNet(config), construct: construct}
}

func (v *virtual) Open(i int, hooks Hooks) (*Host, error) {
	end := v.Transport(netip.AddrPortFrom(v.address(i), 0), v.construct)
	v.ends = append(v.ends, end)
	return NewHost(v.address(i), end, v.Net.Now, nil, hooks)
}

func (v *virtual) Run(done func() bool, limit time.Duration) bool {
	return v.Net.Run(done, v.Net.now+limit)
}

func (v *virtual) Planes() int { return len(v.planes) }

func (v *virtual) Close() {
	for _, e := range v.ends {
		e.Stop()
	}
}

// realTime is a Bed in real time. Both hosts have one lock, so that each can be looked at from the other's events.
type realTime struct {
	sync.Mutex
	hosts      [2]netip.Addr
	transports [2]rdma.Transport
	planes     int
	setPlane   func(plane int, up bool)
	begin      time.Time
	timers     []*time.Timer
	closed     bool
}

// RealConfig is two transports that reach each other by themselves.
type RealConfig struct {
	Addresses  [2]netip.Addr
	Transports [2]rdma.Transport
	// Planes is how many planes there are, at least 1; SetPlane takes one down or up, nil: nothing goes down, although channels
	// are told so when flaps are asked for.
	Planes   int
	SetPlane func(plane int, up bool)
}

// Real is two hosts with transports that have goroutines and sockets of their own.
func Real(c RealConfig) Bed {
	return &realTime{hosts: c.Addresses, transports: c.Transports, planes: max(1, c.Planes), setPlane: c.SetPlane, begin: time.Now()}
}

func (r *realTime) Open(i int, hooks Hooks) (*Host, error) {
	return NewHost(r.hosts[i], r.transports[i], r.Now, &r.Mutex, hooks)
}

func (r *realTime) Now() time.Duration { return time.Since(r.begin) + time.Second }

func (r *realTime) After(d time.Duration, f func()) {
	r.timers = append(r.timers, time.AfterFunc(d, func() {
		r.Lock()
		defer r.Unlock()
		if !r.closed {
			f()
		}
	}))
}

func (r *realTime) Run(done func() bool, limit time.Duration) bool {
	for until := time.Now().Add(limit); ; time.Sleep(200 * time.Microsecond) {
		r.Lock()
		ok := done()
		r.Unlock()
		if ok || time.Now().After(until) {
			return ok
		}
	}
}

func (r *realTime) Planes() int { return r.planes }

func (r *realTime) SetPlane(plane int, up bool) {
	if r.setPlane != nil {
		r.setPlane(plane, up)
	}
}

func (r *realTime) Err() error { return nil }

func (r *realTime) Close() {
	r.Lock()
	r.closed = true
	for _, t := range r.timers {
		t.Stop()
	}
	r.Unlock()
	for _, t := range r.transports {
		t.Stop()
	}
}
