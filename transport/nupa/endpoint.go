package nupa

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync/atomic"
)

// machine is the interface of the shared file to the system; file.go implements it.
type machine interface {
	// lock excludes changes of the tables by other endpoints until unlock. The lock ends with the process.
	lock() (unlock func(), err error)
	// claim claims an entry in the table of endpoints for the lifetime of the process; it returns false if another process holds it.
	claim(endpoint int) (bool, error)
	release(endpoint int)
	// alive reports whether an entry is claimed.
	alive(endpoint int) bool
	// wake wakes up the process that sleeps on a word.
	wake(word *atomic.Uint32)
	// pause yields the processor for a moment; n counts the calls, from 0. It returns false once the maximum wait is over.
	pause(n int) bool
}

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
func (e endpoint) doorbell() *atomic.Uint32   { return e.u32(e.at + 64) }
func (e endpoint) asleep() *atomic.Uint32     { return e.u32(e.at + 68) }
func (e endpoint) touching() *atomic.Uint64   { return e.u64(e.at + 128) }
func (e endpoint) beat() *atomic.Uint64       { return e.u64(e.at + 136) }

// pending returns a word of the bitmap of rings to check.
func (e endpoint) pending(word int) *atomic.Uint64 { return e.u64(e.at + 192 + 8*word) }

func (e endpoint) claimed() bool { return e.generation().Load()&1 == 1 }

// notify notifies the endpoint of work in a ring, and wakes it up if it sleeps. The caller that sets the bit is responsible for waking. No
// wake-up is lost, since the endpoint first sets asleep, then checks the bits once more, and sleeps only if none is set.
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

// join claims an entry for a loopback. It first cleans up after dead endpoints, including a previous one of this loopback.
func (a *area) join(m machine, loopback netip.Addr, process int) (endpoint, error) {
	unlock, err := m.lock()
	if err != nil {
		return endpoint{}, err
	}
	defer unlock()
	want := loopback.As16()
	for i := range endpointCount {
		e := a.endpoint(i)
		if !e.claimed() {
			continue
		}
		if m.alive(i) {
			if string(e.address()) == string(want[:]) {
				return endpoint{}, fmt.Errorf("%w: %v is in use by process %d (entry %d at byte %d)",
					ErrFile, loopback, e.process().Load(), i, e.at)
			}
			continue
		}
		a.clear(m, i)
	}
	for i := range endpointCount {
		e := a.endpoint(i)
		if e.claimed() {
			continue
		}
		if ok, err := m.claim(i); err != nil {
			return endpoint{}, err
		} else if !ok {
			continue
		}
		copy(e.address(), want[:])
		e.process().Store(uint32(process))
		e.touching().Store(0)
		e.asleep().Store(0)
		for w := range maxRings / 64 {
			e.pending(w).Store(0)
		}
		e.version().Add(1)
		e.generation().Store((e.generation().Load() + 1) | 1)
		return e, nil
	}
	return endpoint{}, fmt.Errorf("%w: all %d endpoints are claimed", ErrFile, endpointCount)
}

// clear ends an endpoint that is dead, or the local one: peers of its channels see another generation, and its regions, rings and pages
// become free. Memory that a live peer still accesses stays taken, and the next endpoint that needs it tries again. The caller holds the
// file's lock.
func (a *area) clear(m machine, i int) bool {
	e := a.endpoint(i)
	for r := range regionCount {
		if region := a.region(r); region.word().Load()&1 == 1 && region.owner().Load() == uint32(i) {
			if !region.withdraw(m, i) {
				region.lose()
			}
		}
	}
	for r := range a.rings {
		if ring := a.ring(r); ring.sender().Load() == uint32(i+1) && !ring.release(m) {
			return false
		}
	}
	a.freeAll(i)
	clear(e.address())
	e.generation().Store((e.generation().Load() + 1) &^ 1)
	return true
}

// clearDead clears all dead endpoints, to recover their rings and pages. The caller holds the file's lock.
func (a *area) clearDead(m machine) {
	for i := range endpointCount {
		if a.endpoint(i).claimed() && !m.alive(i) {
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

// publish makes b accessible to peers. It returns false if the table is full. The caller holds the file's lock.
func (a *area) publish(owner int, key uint32, address uint64, at, n int, access uint32) (index int, ok bool) {
	for i := range regionCount {
		r := a.region(i)
		if r.word().Load()&1 == 1 {
			continue
		}
		b, le := r.mem[r.at:r.at+regionSize], binary.LittleEndian
		le.PutUint32(b[8:], key)
		le.PutUint32(b[12:], access)
		le.PutUint64(b[16:], address)
		le.PutUint64(b[24:], uint64(at))
		le.PutUint64(b[32:], uint64(n))
		r.owner().Store(uint32(owner))
		r.word().Add(1)
		a.endpoint(owner).version().Add(1)
		return i, true
	}
	return 0, false
}

// withdraw ends a region, and waits until no peer copies from it or to it: an endpoint first stores the region in touching and then checks
// that the region is valid, and withdraw does both in the opposite order. Dead endpoints do not count. It returns false if a peer copies
// for longer than the maximum wait.
func (r region) withdraw(m machine, me int) bool {
	if w := r.word(); w.Load()&1 == 1 {
		w.Add(1)
	}
	if owner := int(r.owner().Load()); owner < endpointCount {
		r.endpoint(owner).version().Add(1)
	}
	for i := range endpointCount {
		e := r.endpoint(i)
		for n := 0; i != me && e.touching().Load() == uint64(r.index+1) && m.alive(i); n++ {
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
		if word&1 == 0 || r.owner().Load() != uint32(owner) {
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
