package nupa

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// Config is the configuration of an endpoint. Size and Channels apply to the file if the endpoint makes it; an existing
// file keeps its values.
type Config struct {
	// File is the path of the file that all endpoints of the plane map. It is on tmpfs (/dev/shm), hugetlbfs, or a DAX
	// device's file system; "/proc/self/fd/N" opens a memfd. Start makes it, accessible to its user only, if it does
	// not exist. It may also be the memory of a device: the resource file of a PCI device in sysfs, such as ivshmem's
	// resource2, or a DAX device, /dev/daxX.Y. Files are not made in /dev.
	File string
	// Shared declares that endpoints on several kernels map the memory behind File, which must be coherent between
	// their processors. The memory of a device is always shared.
	Shared bool
	// DeadAfter is the time for which the heartbeat of an endpoint in shared memory stands still before its peers take
	// it for dead: 2 s by default.
	DeadAfter time.Duration
	// Size is the size of a new file, in bytes: 256 MiB by default, at most 1 TiB. It is allocated completely. The
	// memory of a device has its size.
	Size int64
	// Channels is the maximum number of concurrent channel ends of all endpoints: 64 by default, at most 1024. Each
	// takes 288 KiB of Size.
	Channels int
	// Spin is the maximum time that the endpoint polls for work before it sleeps: 20 µs by default; below 0 it sleeps
	// at once.
	Spin time.Duration
	// Timing: only GiveUp applies. The end of a peer's process is detected earlier.
	Timing rdma.Timing

	boot [16]byte // tests: in place of the kernel's boot id
}

const (
	defaultSize     = 256 << 20
	defaultChannels = 64
	defaultSpin     = 20 * time.Microsecond
	defaultDead     = 2 * time.Second

	// tickEvery is the interval at which the endpoint increments its beat and checks its peers.
	tickEvery = 100 * time.Millisecond
	// budget is the number of operations of one ring that are executed before other rings have their turn.
	budget = 64
)

// transport is an endpoint. The device's lock guards all fields except those that run and Stop share.
type transport struct {
	cfg  Config
	host rdma.Host
	m    machine
	area *area
	self endpoint
	was  uint64 // generation of self

	sendOf, recvOf []*channel // by ring
	channels       []*channel // in order of creation
	lingering      []ring     // closed, but their receivers still work on an operation
	published      map[uint32]int

	events    []event // for the host, from at on
	at        int
	notifying []*channel // Flush notifies their peers

	count counters

	stopping       atomic.Bool
	ended          chan struct{}
	sleeps, wakeup atomic.Uint64
	service, tick  func() // for Host.Do; stored method values
}

var (
	_ rdma.Transport = (*transport)(nil)
	_ rdma.Allocator = (*transport)(nil)
	_ rdma.Registrar = (*transport)(nil)
)

type counters struct {
	posted, direct, executed, revoked, notReady, refused, damaged, peersLost, published, private, lost, wakes uint64
}

// New makes an endpoint, which is also an rdma.Allocator and an rdma.Registrar. Start opens the file.
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
	if cfg.DeadAfter == 0 {
		cfg.DeadAfter = defaultDead
	}
	cfg.Timing = cfg.Timing.WithDefaults()
	return &transport{cfg: cfg}
}

func (t *transport) Name() string { return "nupa" }

// Limits returns MaxOp, and Ordered, since a ring keeps the order.
func (t *transport) Limits() rdma.Limits { return rdma.Limits{MaxOp: MaxOp, Ordered: true} }

// Start maps the file and claims an entry for the host's address. If the file is the cause, the error wraps ErrFile and
// suggests a remedy.
func (t *transport) Start(host rdma.Host) error {
	m, a, err := mapFile(t.cfg)
	if err != nil {
		return fmt.Errorf("nupa: %s: %w", t.cfg.File, err)
	}
	if err := t.attach(host, m, a); err != nil {
		m.close()
		return fmt.Errorf("nupa: %s: %w", t.cfg.File, err)
	}
	m.start(t.self.index)
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
	t.host, t.m, t.area, t.was = host, m, a, t.self.generation().Load()
	t.sendOf, t.recvOf = make([]*channel, a.rings), make([]*channel, a.rings)
	t.published = make(map[uint32]int)
	return nil
}

// member reports whether the entry still belongs to this endpoint. It does not if a peer has taken the endpoint for
// ended.
func (t *transport) member() bool { return t.self.generation().Load() == t.was }

// Stop detaches from the file. Unfreed memory from Alloc stays mapped, and its pages stay allocated until the process
// ends, since the application may still use it.
func (t *transport) Stop() {
	t.stopping.Store(true)
	t.self.doorbell().Add(1)
	t.m.wake(t.self.doorbell())
	<-t.ended
	unused := t.detach()
	t.m.stop()
	if unused {
		t.m.close()
	}
}

// detach leaves the area. It returns false if memory of the area is still in use.
func (t *transport) detach() bool {
	unlock, err := t.m.lock()
	if err != nil {
		return false // the claim ends with the process, and the next endpoint that joins cleans up
	}
	defer unlock()
	if !t.member() {
		return false
	}
	t.unpublish()
	inUse := t.area.owns(t.self.index)
	for _, r := range t.lingering {
		inUse = !r.release(t.m) || inUse
	}
	if !inUse && t.area.clear(t.m, t.self.index) {
		t.m.release(t.self.index)
		return true
	}
	t.self.process().Store(0) // the loopback may join once more, with another entry
	t.self.generation().Add(2)
	return false
}

// Alloc returns pages of the file. Peers access them directly once they are registered.
func (t *transport) Alloc(n int) ([]byte, error) {
	if t.area == nil {
		return nil, errors.New("nupa: not started")
	}
	unlock, err := t.m.lock()
	if err != nil {
		return nil, fmt.Errorf("nupa: %w", err)
	}
	defer unlock()
	if !t.member() {
		return nil, errReplaced
	}
	b, err := t.area.alloc(t.self.index, n)
	if err != nil {
		t.area.clearEnded(t.m)
		b, err = t.area.alloc(t.self.index, n)
	}
	if err != nil {
		return nil, fmt.Errorf("nupa: %w", err)
	}
	return b, nil
}

// Free frees memory from Alloc, and ignores other memory.
func (t *transport) Free(b []byte) {
	if t.area == nil {
		return
	}
	unlock, err := t.m.lock()
	if err != nil {
		return
	}
	defer unlock()
	if t.member() {
		t.area.free(t.self.index, b)
	}
}

// Registered publishes a region of shared memory. If the region is elsewhere, or the table of regions is full, peers
// access it through this endpoint.
func (t *transport) Registered(key uint32, address uint64, b []byte, access rdma.Access) {
	if t.area == nil || access&(rdma.RemoteWrite|rdma.RemoteRead) == 0 || !t.member() {
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

// Deregistered waits until no peer copies from the region or to it. If a peer does so for longer than Timing.GiveUp,
// the region's pages are never reused.
func (t *transport) Deregistered(key uint32) {
	index, ok := t.published[key]
	if !ok {
		return
	}
	delete(t.published, key)
	if t.member() && !t.area.region(index).end(t.m, t.self.index) {
		t.count.lost++
	}
}

// unpublish withdraws every region.
func (t *transport) unpublish() {
	for key := range t.published {
		t.Deregistered(key)
	}
}

// Counters returns these counters by name: operations posted, executed directly by this endpoint, and revoked; peers'
// operations executed, refused (remote errors), and not ready; damaged: invalid data from peers; lost peers; regions
// published, private (accessed through the endpoint) and lost; wake-ups of other endpoints, local sleeps and wake-ups.
func (t *transport) Counters() map[string]uint64 {
	c := &t.count
	return map[string]uint64{
		"posted": c.posted, "direct": c.direct, "executed": c.executed, "revoked": c.revoked, "not_ready": c.notReady,
		"refused": c.refused, "damaged": c.damaged, "peers_lost": c.peersLost, "regions_published": c.published,
		"regions_private": c.private, "regions_lost": c.lost, "wakes": c.wakes, "sleeps": t.sleeps.Load(), "wakeups": t.wakeup.Load(),
	}
}
