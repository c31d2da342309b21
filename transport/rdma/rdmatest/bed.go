package rdmatest

import (
	"net/netip"
	"sync"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// Bed is two connected hosts and their time.
type Bed interface {
	// Open makes host 0 or 1 with hooks.
	Open(i int, hooks Hooks) (*Host, error)
	// Lock protects all accesses to both hosts.
	sync.Locker
	// After calls f after d, with the lock held.
	After(d time.Duration, f func())
	// Now returns the hosts' time.
	Now() time.Duration
	// Run lets time pass until done returns true, or for limit at most; then it returns false. It calls done with the
	// lock held.
	Run(done func() bool, limit time.Duration) bool
	// Planes returns the number of planes; the plane of a source port is the port modulo that number. SetPlane takes a
	// plane down or up.
	Planes() int
	SetPlane(plane int, up bool)
	// Err returns the first error of the network itself.
	Err() error
	// Close stops both transports.
	Close()
}

// address returns the address of host 0 or 1 of a Bed in virtual time.
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

// Virtual returns two hosts on a simulated network.
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

// realTime is a Bed in real time. Both hosts share one lock, so that events of one host may access the other.
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

// RealConfig is the configuration of two transports that have their own network.
type RealConfig struct {
	Addresses  [2]netip.Addr
	Transports [2]rdma.Transport
	// Planes is the number of planes, at least 1. SetPlane takes a plane down or up; with nil, planes stay up, although
	// flaps still change the channels' paths.
	Planes   int
	SetPlane func(plane int, up bool)
}

// Real returns two hosts with transports that have their own goroutines and sockets.
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
