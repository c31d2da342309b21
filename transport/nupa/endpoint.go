package nupa

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"
)

// machine is the interface of the shared file to the system: file.go implements it for one kernel, shared.go for
// several.
type machine interface {
	// lock excludes changes of the tables by other endpoints on this kernel until unlock. The lock ends with the
	// process.
	lock() (unlock func(), err error)
	// decide prepares to join as a loopback: it waits until alive and ended are known of entries of that loopback.
	decide(loopback [16]byte)
	// claim claims an entry in the table of endpoints for the lifetime of the process; it returns false if another
	// process on this kernel holds it.
	claim(endpoint int) (bool, error)
	release(endpoint int)
	// identity returns the bytes that identify the kernel in a claimed entry.
	identity() [identitySize]byte
	// alive reports whether the owner of a claimed entry runs.
	alive(endpoint int) bool
	// ended reports whether the owner of a claimed entry cannot write to the file any longer. An endpoint that is not
	// alive may not have ended.
	ended(endpoint int) bool
	// start makes the endpoint alive for others, and stop ends that.
	start(endpoint int)
	stop()
	// sleep sleeps until a wake-up, at most for the given duration; it returns at once if the word does not have the
	// value.
	sleep(word *atomic.Uint32, value uint32, most time.Duration)
	// wake wakes up the process that sleeps on a word, after a change of the word.
	wake(word *atomic.Uint32)
	// pause yields the processor for a moment; n counts the calls, from 0. It returns false once the maximum wait is
	// over.
	pause(n int) bool
	// close unmaps the file.
	close()
}

// identitySize is the size of a kernel's identity in an endpoint's entry.
const identitySize = 24

// endpoint is an entry in the table of endpoints.
type endpoint struct {
	*area
	index, at int
}

func (a *area) endpoint(i int) endpoint {
	return endpoint{a, i, endpointsAt + i*endpointSize}
}

func (e endpoint) generation() *atomic.Uint64 { return e.u64(e.at) }
func (e endpoint) process() *atomic.Uint32    { return e.u32(e.at + 8) }
func (e endpoint) address() []byte            { return e.mem[e.at+16 : e.at+32] }
func (e endpoint) version() *atomic.Uint64    { return e.u64(e.at + 32) }
func (e endpoint) identity() []byte           { return e.mem[e.at+40 : e.at+40+identitySize] }
func (e endpoint) doorbell() *atomic.Uint32   { return e.u32(e.at + 64) }
func (e endpoint) asleep() *atomic.Uint32     { return e.u32(e.at + 68) }
func (e endpoint) touching() *atomic.Uint64   { return e.u64(e.at + 128) }
func (e endpoint) beat() *atomic.Uint64       { return e.u64(e.at + 136) }
func (e endpoint) heart() *atomic.Uint64      { return e.u64(e.at + 144) }
func (e endpoint) offer() *atomic.Uint64      { return e.u64(e.at + 152) }
func (e endpoint) offeredTo() []byte          { return e.mem[e.at+160 : e.at+176] }

// pending returns a word of the bitmap of rings to check.
func (e endpoint) pending(word int) *atomic.Uint64 { return e.u64(e.at + 192 + 8*word) }

func (e endpoint) claimed() bool { return e.generation().Load()&1 == 1 }

// notify notifies the endpoint of work in a ring, and wakes it up if it sleeps. The caller that sets the bit is
// responsible for waking. No wake-up is lost, since the endpoint first sets asleep, then checks the bits once more, and
// sleeps only if none is set.
func (e endpoint) notify(ring int, m machine) (woken bool) {
	bit := uint64(1) << (ring % 64)
	if e.pending(ring/64).Or(bit)&bit != 0 || e.asleep().Load() == 0 {
		return false
	}
	e.doorbell().Add(1)
	m.wake(e.doorbell())
	return true
}

// quiet reports whether no ring has to be checked.
func (e endpoint) quiet() bool {
	for w := range (e.rings + 63) / 64 {
		if e.pending(w).Load() != 0 {
			return false
		}
	}
	return true
}

// join claims an entry for a loopback. It first cleans up after ended endpoints, including a previous one of this
// loopback.
func (a *area) join(m machine, loopback netip.Addr, process int) (endpoint, error) {
	want := loopback.As16()
	m.decide(want)
	unlock, err := m.lock()
	if err != nil {
		return endpoint{}, err
	}
	defer unlock()
	for i := range endpointCount {
		e := a.endpoint(i)
		switch {
		case !e.claimed():
		case m.ended(i):
			a.clear(m, i)
		case string(e.address()) == string(want[:]) && e.process().Load() != 0 && m.alive(i):
			return endpoint{}, fmt.Errorf("%w: %v is in use by process %d (entry %d at byte %d)",
				ErrFile, loopback, e.process().Load(), i, e.at)
		}
	}
	for i := range endpointCount {
		e := a.endpoint(i)
		generation := e.generation().Load()
		if generation&1 == 1 {
			continue
		}
		if ok, err := m.claim(i); err != nil {
			return endpoint{}, err
		} else if !ok {
			continue
		}
		if !e.generation().CompareAndSwap(generation, generation+1) { // an endpoint on another kernel has claimed it
			m.release(i)
			continue
		}
		identity := m.identity()
		copy(e.identity(), identity[:])
		e.process().Store(uint32(process))
		copy(e.address(), want[:])
		e.touching().Store(0)
		e.offer().Store(0)
		e.asleep().Store(0)
		for w := range maxRings / 64 {
			e.pending(w).Store(0)
		}
		e.version().Add(1)
		return e, nil
	}
	return endpoint{}, fmt.Errorf("%w: all %d endpoints are claimed", ErrFile, endpointCount)
}

// clear ends an endpoint that has ended, or the local one: peers of its channels see another generation, and its
// regions, rings and pages become free. Memory that a peer still accesses stays taken, and the next endpoint that needs
// it tries again. The caller holds the file's lock.
func (a *area) clear(m machine, i int) bool {
	e := a.endpoint(i)
	for r := range regionCount {
		if region := a.region(r); region.owner().Load() == uint32(i+1) {
			region.end(m, i)
		}
	}
	for r := range a.rings {
		if ring := a.ring(r); ring.sender().Load() == uint32(i+1) && !ring.release(m) {
			return false
		}
	}
	a.freeAll(i)
	clear(e.address())
	clear(e.identity())
	e.generation().Store((e.generation().Load() + 1) &^ 1)
	return true
}

// clearEnded clears all ended endpoints, to recover their rings and pages. The caller holds the file's lock.
func (a *area) clearEnded(m machine) {
	for i := range endpointCount {
		if a.endpoint(i).claimed() && m.ended(i) {
			a.clear(m, i)
		}
	}
}

// region is an entry in the table of regions.
type region struct {
	*area
	index, at int
}

func (a *area) region(i int) region { return region{a, i, regionsAt + i*regionSize} }

func (r region) word() *atomic.Uint64  { return r.u64(r.at) }
func (r region) owner() *atomic.Uint32 { return r.u32(r.at + 40) }

// reach is a checked copy of a peer's region entry.
type reach struct {
	index   int
	word    uint64
	access  uint32
	address uint64
	bytes   []byte
}

// publish makes b accessible to peers. It returns false if the table is full.
func (a *area) publish(owner int, key uint32, address uint64, at, n int, access uint32) (index int, ok bool) {
	for i := range regionCount {
		r := a.region(i)
		if !r.owner().CompareAndSwap(0, uint32(owner+1)) {
			continue
		}
		b, le := r.mem[r.at:r.at+regionSize], binary.LittleEndian
		le.PutUint32(b[8:], key)
		le.PutUint32(b[12:], access)
		le.PutUint64(b[16:], address)
		le.PutUint64(b[24:], uint64(at))
		le.PutUint64(b[32:], uint64(n))
		r.word().Store((r.word().Load() + 1) | 1)
		a.endpoint(owner).version().Add(1)
		return i, true
	}
	return 0, false
}

// end withdraws a region and frees its entry. If a peer may still write to the region, its pages are lost and end
// returns false.
func (r region) end(m machine, me int) bool {
	unused := r.withdraw(m, me)
	if !unused {
		r.lose()
	}
	r.owner().Store(0)
	return unused
}

// withdraw ends a region, and waits until no peer copies from it or to it: an endpoint first stores the region in
// touching and then checks that the region is valid, and withdraw does both in the opposite order. Ended endpoints do
// not count. It returns false if a peer copies for longer than the maximum wait. It does not wait for endpoints on
// other kernels, which may be paused for any time: they only read, and check the region once more afterwards.
func (r region) withdraw(m machine, me int) bool {
	if w := r.word(); w.Load()&1 == 1 {
		w.Add(1)
	}
	if owner := int(r.owner().Load()); owner > 0 && owner <= endpointCount {
		r.endpoint(owner - 1).version().Add(1)
	}
	for i := range endpointCount {
		e := r.endpoint(i)
		for n := 0; !r.shared && i != me && e.touching().Load() == uint64(r.index+1) && !m.ended(i); n++ {
			if !m.pause(n) {
				return false
			}
		}
	}
	return true
}

// lose takes the region's pages out of use: a peer may still write to them.
func (r region) lose() {
	le, b := binary.LittleEndian, r.mem[r.at:r.at+regionSize]
	if at, n := le.Uint64(b[24:]), le.Uint64(b[32:]); n > 0 && r.inHeap(at, n) {
		r.area.lose(int(at), int(n))
	}
}

// regionsOf copies an endpoint's published regions to a map by key, and returns the number of invalid entries.
func (a *area) regionsOf(owner int, into map[uint32]reach) (damaged int) {
	clear(into)
	le := binary.LittleEndian
	for i := range regionCount {
		r := a.region(i)
		word := r.word().Load()
		if word&1 == 0 || r.owner().Load() != uint32(owner+1) {
			continue
		}
		var b [regionSize]byte
		copy(b[:], r.mem[r.at:])
		at, n := le.Uint64(b[24:]), le.Uint64(b[32:])
		if !a.inHeap(at, n) {
			damaged++
			continue
		}
		into[le.Uint32(b[8:])] = reach{i, word, le.Uint32(b[12:]), le.Uint64(b[16:]), a.mem[at : at+n : at+n]}
	}
	return damaged
}

// part returns the n bytes of the region at a peer's address.
func (r *reach) part(address uint64, n int) ([]byte, bool) {
	if address < r.address || address-r.address > uint64(len(r.bytes)) || uint64(n) > uint64(len(r.bytes))-(address-r.address) {
		return nil, false
	}
	return r.bytes[address-r.address:][:n], true
}
