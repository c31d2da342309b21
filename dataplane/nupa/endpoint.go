package nupa

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync/atomic"
)

// machine is what the shared file needs of the system: file.go has the real one.
type machine interface {
	// lock keeps other endpoints from changing the tables until unlock. A process that dies with it loses it.
	lock() (unlock func(), err error)
	// claim takes an entry of the table of endpoints for as long as this process lives; false when somebody has it.
	claim(endpoint int) (bool, error)
	release(endpoint int)
	// alive says whether somebody else's claim holds.
	alive(endpoint int) bool
	// wake wakes whoever sleeps on a word.
	wake(word *atomic.Uint32)
	// pause lets others run for a moment, n counts up from 0; false when it has waited for as long as one may.
	pause(n int) bool
}

// endpoint is an entry of the table of endpoints.
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

// pending is a word of the bits of rings to look at.
func (e endpoint) pending(word int) *atomic.Uint64 { return e.u64(e.at + 192 + 8*word) }

func (e endpoint) claimed() bool { return e.generation().Load()&1 == 1 }

// knock tells the endpoint to look at a ring, and wakes it if it sleeps. Who sets the bit first does the waking: the endpoint
// says that it sleeps, then looks at the bits again, and sleeps only if there are none.
func (e endpoint) knock(ring int, m machine) (woken bool) {
	bit := uint64(1) << (ring % 64)
	if e.pending(ring/64).Or(bit)&bit != 0 || e.asleep().Load() == 0 {
		return false
	}
	e.doorbell().Add(1)
	m.wake(e.doorbell())
	return true
}

// quiet says whether there is no ring to look at.
func (e endpoint) quiet() bool {
	for w := range (e.rings + 63) / 64 {
		if e.pending(w).Load() != 0 {
			return false
		}
	}
	return true
}

// join claims an entry for a loopback. What endpoints left that died is cleared away first, the last life of this one too.
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

// clear ends an endpoint that is dead, or that is ours: its channels' peers see another generation, its regions, rings and pages
// are free. What a live peer still touches is not, and is tried again by the next who needs it. Under the file's lock.
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

// clearDead clears every dead endpoint; what there is not enough of may be theirs. Under the file's lock.
func (a *area) clearDead(m machine) {
	for i := range endpointCount {
		if a.endpoint(i).claimed() && !m.alive(i) {
			a.clear(m, i)
		}
	}
}

// region is an entry of the table of regions.
type region struct {
	*area
	index, at int
}

func (a *area) region(i int) region { return region{a, i, regionsAt + i*regionSize} }

func (r region) word() *atomic.Uint64  { return r.u64(r.at) }
func (r region) owner() *atomic.Uint32 { return r.u32(r.at + 40) }

// reach is a region as a peer has read it: checked, and its own copy.
type reach struct {
	index   int
	word    uint64
	access  uint32
	address uint64
	bytes   []byte
}

// publish lets peers reach b; false when the table is full, and they cannot. Under the file's lock.
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

// withdraw ends a region, and returns when nobody copies from it or to it any more: an endpoint says which region it touches
// before it looks whether the region is valid, and we look in the opposite order. The dead touch nothing. False when a peer is
// stuck in there for longer than one may wait.
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

// lose takes the region's pages out of use: somebody may still write there.
func (r region) lose() {
	le, b := binary.LittleEndian, r.mem[r.at:r.at+regionSize]
	if at, n := le.Uint64(b[24:]), le.Uint64(b[32:]); n > 0 && r.inHeap(at, n) {
		r.area.lose(int(at), int(n))
	}
}

// regionsOf reads what an endpoint has published into a map by key, and counts entries that no endpoint of ours would write.
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

// part is n bytes of the region at a peer's address.
func (r *reach) part(address uint64, n int) ([]byte, bool) {
	if address < r.address || address-r.address > uint64(len(r.bytes)) || uint64(n) > uint64(len(r.bytes))-(address-r.address) {
		return nil, false
	}
	return r.bytes[address-r.address:][:n], true
}
