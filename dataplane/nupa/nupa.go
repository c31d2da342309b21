package nupa

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

// Config is what an endpoint is made of. Size and Channels are the file's: who finds it made takes it as it is.
type Config struct {
	// File is the plane: every endpoint maps it. On tmpfs (/dev/shm), hugetlbfs, or a DAX device's file system; "/proc/self/fd/N"
	// opens a memfd. Made, for its user alone, if it is not there.
	File string
	// Size of the file to make, bytes: 256 MiB. All of it is taken at once.
	Size int64
	// Channels is how many channel ends there may be at a time, of all endpoints: 64, at most 1024. Each takes 288 KiB of Size.
	Channels int
	// Spin is the longest that the endpoint looks for work before it sleeps: 20 µs; less than zero: it sleeps at once.
	Spin time.Duration
	// Timing: only GiveUp matters. A peer whose process has ended is known to be gone before that.
	Timing rdma.Timing
}

const (
	defaultSize     = 256 << 20
	defaultChannels = 64
	defaultSpin     = 20 * time.Microsecond

	// tickEvery is how often the endpoint shows that it lives, and looks whether its peers do.
	tickEvery = 100 * time.Millisecond
	// budget is how many operations of one ring are executed before others have their turn.
	budget = 64
)

// transport is an endpoint. Everything is guarded by the device's lock but for what run and Stop share.
type transport struct {
	cfg  Config
	host rdma.Host
	m    machine
	file *file
	area *area
	self endpoint

	sendOf, recvOf []*channel // by ring
	channels       []*channel // in order of making
	lingering      []ring     // closed, but their receivers still work on an operation
	published      map[uint32]int

	events  []event // for the host, from at on
	at      int
	telling []*channel // Flush knocks at their peers

	count counters

	stopping       atomic.Bool
	ended          chan struct{}
	sleeps, wakeup atomic.Uint64
	service, tick  func() // for Host.Do, made once
}

var (
	_ rdma.Transport = (*transport)(nil)
	_ rdma.Allocator = (*transport)(nil)
	_ rdma.Registrar = (*transport)(nil)
)

type counters struct {
	posted, direct, executed, revoked, notReady, refused, damaged, peersLost, published, private, lost, wakes uint64
}

// New makes an endpoint. It is an rdma.Allocator and an rdma.Registrar too. The file is opened by Start.
func New(cfg Config) rdma.Transport {
	if cfg.Size == 0 {
		cfg.Size = defaultSize
	}
	if cfg.Channels == 0 {
		cfg.Channels = defaultChannels
	}
	if cfg.Spin == 0 {
		cfg.Spin = defaultSpin
	}
	cfg.Timing = cfg.Timing.WithDefaults()
	return &transport{cfg: cfg}
}

func (t *transport) Name() string { return "nupa" }

// Limits: a ring is in order.
func (t *transport) Limits() rdma.Limits { return rdma.Limits{MaxOp: MaxOp, Ordered: true} }

// Start maps the file and claims an entry for the host's address. An error wraps ErrFile when it is the file's fault, and says
// what to do.
func (t *transport) Start(host rdma.Host) error {
	f, a, err := mapFile(t.cfg.File, t.cfg.Size, t.cfg.Channels, t.cfg.Timing.GiveUp)
	if err != nil {
		return fmt.Errorf("nupa: %s: %w", t.cfg.File, err)
	}
	if err := t.attach(host, f, a); err != nil {
		f.close()
		return fmt.Errorf("nupa: %s: %w", t.cfg.File, err)
	}
	t.file = f
	t.ended = make(chan struct{})
	t.service, t.tick = t.serve, t.check
	go t.run()
	return nil
}

// attach joins an area.
func (t *transport) attach(host rdma.Host, m machine, a *area) (err error) {
	if t.self, err = a.join(m, host.Address(), os.Getpid()); err != nil {
		return err
	}
	t.host, t.m, t.area = host, m, a
	t.sendOf, t.recvOf = make([]*channel, a.rings), make([]*channel, a.rings)
	t.published = make(map[uint32]int)
	return nil
}

// Stop lets go of the file. Memory from Alloc that has not been freed stays mapped, and its pages stay taken until the process
// ends: somebody may still use it.
func (t *transport) Stop() {
	t.stopping.Store(true)
	t.self.doorbell().Add(1)
	t.m.wake(t.self.doorbell())
	<-t.ended
	if t.detach() {
		t.file.close()
	}
}

// detach leaves the area; false when memory of it is still in use.
func (t *transport) detach() bool {
	unlock, err := t.m.lock()
	if err != nil {
		return false // the claim ends with the process, and who joins then clears up
	}
	defer unlock()
	t.unpublish()
	inUse := t.area.owns(t.self.index)
	for _, r := range t.lingering {
		inUse = !r.release(t.m) || inUse
	}
	if !inUse && t.area.clear(t.m, t.self.index) {
		t.m.release(t.self.index)
		return true
	}
	clear(t.self.address()) // the loopback may come again, by another entry
	t.self.generation().Add(2)
	return false
}

// Alloc returns memory that peers reach without anybody's help once it is registered: pages of the file.
func (t *transport) Alloc(n int) ([]byte, error) {
	if t.area == nil {
		return nil, errors.New("nupa: not started")
	}
	unlock, err := t.m.lock()
	if err != nil {
		return nil, fmt.Errorf("nupa: %w", err)
	}
	defer unlock()
	b, err := t.area.alloc(t.self.index, n)
	if err != nil {
		t.area.clearDead(t.m)
		b, err = t.area.alloc(t.self.index, n)
	}
	if err != nil {
		return nil, fmt.Errorf("nupa: %w", err)
	}
	return b, nil
}

// Free gives memory of Alloc back. Others' is left alone.
func (t *transport) Free(b []byte) {
	if t.area == nil {
		return
	}
	if unlock, err := t.m.lock(); err == nil {
		defer unlock()
		t.area.free(t.self.index, b)
	}
}

// Registered publishes a region of shared memory. Peers reach any other through this endpoint, as they do when the table of
// regions is full.
func (t *transport) Registered(key uint32, address uint64, b []byte, access rdma.Access) {
	if t.area == nil || access&(rdma.RemoteWrite|rdma.RemoteRead) == 0 {
		return
	}
	at, ok := t.area.offset(b)
	if ok {
		unlock, err := t.m.lock()
		if ok = err == nil; ok {
			defer unlock()
			var index int
			if index, ok = t.area.publish(t.self.index, key, address, at, len(b), uint32(access)); ok {
				t.published[key] = index
				t.count.published++
			}
		}
	}
	if !ok {
		t.count.private++
	}
}

// Deregistered waits until no peer copies from the region or to it. Should one be stuck there for Timing.GiveUp, the region's
// pages are never used again.
func (t *transport) Deregistered(key uint32) {
	index, ok := t.published[key]
	if !ok {
		return
	}
	delete(t.published, key)
	if r := t.area.region(index); !r.withdraw(t.m, t.self.index) {
		r.lose()
		t.count.lost++
	}
}

// unpublish ends every region.
func (t *transport) unpublish() {
	for key := range t.published {
		t.Deregistered(key)
	}
}

// Counters are by name: operations posted, of them executed by this endpoint itself (direct), revoked; peers' operations
// executed, refused (remote errors), not ready; damaged: what peers wrote that cannot be; peers lost; regions published, private
// (reached through the endpoint) and lost; wakes of others, own sleeps and wake-ups.
func (t *transport) Counters() map[string]uint64 {
	c := &t.count
	return map[string]uint64{
		"posted": c.posted, "direct": c.direct, "executed": c.executed, "revoked": c.revoked, "not_ready": c.notReady,
		"refused": c.refused, "damaged": c.damaged, "peers_lost": c.peersLost, "regions_published": c.published,
		"regions_private": c.private, "regions_lost": c.lost, "wakes": c.wakes, "sleeps": t.sleeps.Load(), "wakeups": t.wakeup.Load(),
	}
}
