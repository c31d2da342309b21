package rdma

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"
)

// PD is a protection domain: a work request may use memory regions only of the PD of its queue pair set.
type PD struct{ device *Device }

// MR is a memory region: bytes that work requests may name, and that peers may access within its rights.
type MR struct {
	pd      *PD
	b       []byte
	address uint64
	key     uint32
	access  Access
	owner   Allocator // of b; nil if the application owns b
}

const (
	maxRegions = 1 << 20
	// firstAddress and pageSize: addresses belong to the device and are not virtual addresses of the process. At least
	// one page separates two regions, so no byte beyond the end of a region belongs to another. No address is used
	// twice.
	firstAddress = 1 << 40
	pageSize     = 4096
)

// regions are a device's memory regions, by key and by flat address. Keys are 32 bits from crypto/rand, not 0: a peer
// that knows one key learns nothing about the others.
type regions struct {
	byKey map[uint32]*MR
	flat  map[uint32][]*MR // by bits 32 to 63 of the flat addresses of their bytes
	next  uint64           // first unassigned address
}

// FlatAddress returns the address of memory for protocols whose requests carry an address without a key: the key is
// added to its upper 32 bits, so that a peer must know it. With key 0 it is the address itself, as for the memory of
// other implementations.
func FlatAddress(key uint32, address uint64) uint64 { return address + uint64(key)<<32 }

// AllocPD makes a protection domain.
func (d *Device) AllocPD() *PD { return &PD{d} }

// Register makes b a memory region until Deregister. b may be empty.
func (p *PD) Register(b []byte, access Access) (*MR, error) { return p.register(b, access, nil) }

// Alloc makes a memory region of n bytes in memory that suits the device's transports: shared memory if a transport is
// an Allocator.
func (p *PD) Alloc(n int, access Access) (*MR, error) {
	if n < 0 {
		return nil, fmt.Errorf("a memory region of %d bytes: use 0 or more", n)
	}
	for _, t := range p.device.transports {
		a, ok := t.(Allocator)
		if !ok {
			continue
		}
		var b []byte
		var err error
		p.device.Do(func() { b, err = a.Alloc(n) })
		if err != nil {
			return nil, fmt.Errorf("memory of transport %s: %w", t.Name(), err)
		}
		m, err := p.register(b, access, a)
		if err != nil {
			p.device.Do(func() { a.Free(b) })
		}
		return m, err
	}
	return p.register(make([]byte, n), access, nil)
}

func (p *PD) register(b []byte, access Access, owner Allocator) (m *MR, err error) {
	if access >= RemoteAtomic<<1 {
		return nil, fmt.Errorf("access %#x: only LocalWrite, RemoteWrite, RemoteRead and RemoteAtomic are known", access)
	}
	p.device.Do(func() {
		r := &p.device.regions
		if len(r.byKey) >= maxRegions {
			err = fmt.Errorf("%d memory regions are registered, which is the limit: deregister some", maxRegions)
			return
		}
		// A region starts at the same offset into a page as its bytes, so that alignment is the same in both address
		// spaces.
		inside := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))) % pageSize)
		m = &MR{pd: p, b: b, address: r.next + inside, access: access, owner: owner}
		r.next = (m.address+uint64(len(b))+pageSize-1)&^(pageSize-1) + pageSize
		for m.key = randomKey(); !r.add(m); {
			m.key = randomKey()
		}
		for _, t := range p.device.transports {
			if t, ok := t.(Registrar); ok {
				t.Registered(m.key, m.address, b, access)
			}
		}
	})
	return m, err
}

// Deregister ends the region: its key is refused from now on. Work requests that use it must have completed. A second
// call does nothing.
func (m *MR) Deregister() {
	d := m.pd.device
	d.Do(func() {
		if d.regions.byKey[m.key] != m {
			return
		}
		d.regions.remove(m)
		for _, t := range d.transports {
			if t, ok := t.(Registrar); ok {
				t.Deregistered(m.key)
			}
		}
		if m.owner != nil {
			m.owner.Free(m.b)
		}
	})
}

// Bytes returns the region's memory. Reading bytes that a peer may be writing is a data race, as on any RDMA device:
// wait for a completion first.
func (m *MR) Bytes() []byte { return m.b }

// Address returns the start address of the region, which peers use.
func (m *MR) Address() uint64 { return m.address }

// Key returns the region's R_Key, by which peers name it.
func (m *MR) Key() uint32 { return m.key }

// FlatAddress returns the start address of the region for protocols whose requests carry no key. The peer needs no
// other name of it.
func (m *MR) FlatAddress() uint64 { return FlatAddress(m.key, m.address) }

func randomKey() uint32 {
	var b [4]byte
	rand.Read(b[:])
	return binary.NativeEndian.Uint32(b[:])
}

// blocks returns the keys of regions.flat under which a region is listed.
func (m *MR) blocks() (first, last uint32) {
	return uint32(m.FlatAddress() >> 32), uint32((m.FlatAddress() + uint64(len(m.b))) >> 32)
}

// add adds a region. It returns false if the region needs another key: the key is 0 or in use, or its flat addresses
// wrap around or overlap those of another region.
func (r *regions) add(m *MR) bool {
	first, last := m.blocks()
	start := m.FlatAddress()
	if m.key == 0 || r.byKey[m.key] != nil || start < m.address || start+uint64(len(m.b)) < start {
		return false
	}
	for i := uint64(first); i <= uint64(last); i++ {
		for _, x := range r.flat[uint32(i)] {
			if at := x.FlatAddress(); start <= at+uint64(len(x.b)) && at <= start+uint64(len(m.b)) {
				return false
			}
		}
	}
	r.byKey[m.key] = m
	for i := uint64(first); i <= uint64(last); i++ {
		r.flat[uint32(i)] = append(r.flat[uint32(i)], m)
	}
	return true
}

func (r *regions) remove(m *MR) {
	delete(r.byKey, m.key)
	first, last := m.blocks()
	for i := uint64(first); i <= uint64(last); i++ {
		rest := slices.DeleteFunc(r.flat[uint32(i)], func(x *MR) bool { return x == m })
		if r.flat[uint32(i)] = rest; len(rest) == 0 {
			delete(r.flat, uint32(i))
		}
	}
}

// find returns the n bytes at an address of a region of the domain.
func (r *regions) find(pd *PD, key uint32, address uint64, n int, need Access) ([]byte, error) {
	m := r.byKey[key]
	if m == nil || m.pd != pd {
		return nil, fmt.Errorf("%w: key %#x belongs to no memory region of this device", ErrRemoteAccess, key)
	}
	if m.access&need != need {
		return nil, fmt.Errorf("%w: key %#x lacks a right", ErrRemoteAccess, key)
	}
	if n == 0 {
		return nil, nil
	}
	b, ok := m.bytes(address-m.address, n)
	if !ok {
		return nil, fmt.Errorf("%w: %d bytes at %#x are not inside key %#x", ErrRemoteAccess, n, address, key)
	}
	return b, nil
}

// findFlat returns the n bytes at a flat address, which must be inside one region of the domain.
func (r *regions) findFlat(pd *PD, address uint64, n int, need Access) ([]byte, error) {
	for _, m := range r.flat[uint32(address>>32)] {
		b, ok := m.bytes(address-m.FlatAddress(), n)
		if !ok || m.pd != pd {
			continue
		}
		if m.access&need != need {
			return nil, fmt.Errorf("%w: the region at %#x lacks a right", ErrRemoteAccess, address)
		}
		return b, nil
	}
	return nil, fmt.Errorf("%w: %d bytes at %#x are not inside a memory region", ErrRemoteAccess, n, address)
}

// bytes returns n bytes of the region from an offset, or false if they are not inside it.
func (m *MR) bytes(offset uint64, n int) ([]byte, bool) {
	if offset > uint64(len(m.b)) || uint64(n) > uint64(len(m.b))-offset {
		return nil, false
	}
	return m.b[offset : offset+uint64(n) : offset+uint64(n)], true
}

// atomically executes an atomic operation. The device's lock serializes all atomics of a device; sync/atomic makes them
// atomic for readers in the application and in processes that share the memory.
func (r *regions) atomically(pd *PD, kind OpKind, key uint32, address, compare, swap uint64) (uint64, error) {
	b, err := r.find(pd, key, address, 8, RemoteAtomic)
	if err != nil {
		return 0, err
	}
	word := (*uint64)(unsafe.Pointer(unsafe.SliceData(b)))
	if address%8 != 0 || uintptr(unsafe.Pointer(word))%8 != 0 {
		return 0, fmt.Errorf("%w: atomic at %#x: not a multiple of 8", ErrRemoteAccess, address)
	}
	switch kind {
	case OpFetchAdd:
		return atomic.AddUint64(word, swap) - swap, nil
	case OpCompareSwap:
		for {
			was := atomic.LoadUint64(word)
			if was != compare || atomic.CompareAndSwapUint64(word, was, swap) {
				return was, nil
			}
		}
	}
	return 0, errors.New("not an atomic operation")
}

// Uint64 decodes the result that an atomic work request has stored in its Local.
func Uint64(b []byte) uint64 { return binary.NativeEndian.Uint64(b) }

// SGE is a scatter-gather element: a piece of a memory region. The zero value has no bytes.
type SGE struct {
	MR             *MR
	Offset, Length int
}

// bytes returns the piece's memory if a work request of the domain may use it.
func (s SGE) bytes(pd *PD, need Access) ([]byte, error) {
	if s.MR == nil {
		if s.Length != 0 {
			return nil, errors.New("bytes without a memory region: set SGE.MR")
		}
		return nil, nil
	}
	if s.MR.pd != pd {
		return nil, errors.New("the memory region and the set belong to different protection domains")
	}
	if s.MR.access&need != need {
		return nil, errors.New("the memory region lacks LocalWrite, which received data needs")
	}
	if s.Offset < 0 || s.Length < 0 || s.Offset > len(s.MR.b) || s.Length > len(s.MR.b)-s.Offset {
		return nil, fmt.Errorf("bytes %d to %d exceed a memory region of %d bytes", s.Offset, s.Offset+s.Length, len(s.MR.b))
	}
	return s.MR.b[s.Offset : s.Offset+s.Length : s.Offset+s.Length], nil
}
