package rdma

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
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

// Memory regions are numbered. A region's key is its number and a tag that changes with each use of the number, so the key of a
// deregistered region is refused.
const (
	tagBits    = 12
	maxRegions = 1<<(32-tagBits) - 1
	// firstAddress and pageSize: addresses belong to the device and are not virtual addresses of the process. At least one page separates
	// two regions, so no byte beyond the end of a region belongs to another.
	firstAddress = 1 << 40
	pageSize     = 4096
)

// regions are a device's memory regions by number; number 0 is unused.
type regions struct {
	all  []*MR
	tags []uint32 // tag of the number's latest key
	free []uint32
	next uint64 // first unassigned address
}

// AllocPD makes a protection domain.
func (d *Device) AllocPD() *PD { return &PD{d} }

// Register makes b a memory region until Deregister. b may be empty.
func (p *PD) Register(b []byte, access Access) (*MR, error) { return p.register(b, access, nil) }

// Alloc makes a memory region of n bytes in memory that suits the device's transports: shared memory if a transport is an Allocator.
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
		number := uint32(len(r.all))
		if k := len(r.free); k > 0 {
			number, r.free = r.free[k-1], r.free[:k-1]
		} else if number > maxRegions {
			err = fmt.Errorf("%d memory regions are registered, which is the limit: deregister some", maxRegions)
			return
		} else {
			r.all, r.tags = append(r.all, nil), append(r.tags, rand.Uint32N(1<<tagBits))
		}
		r.tags[number] = (r.tags[number] + 1) % (1 << tagBits)
		// A region starts at the same offset into a page as its bytes, so that alignment is the same in both address spaces.
		inside := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))) % pageSize)
		m = &MR{pd: p, b: b, address: r.next + inside, key: number<<tagBits | r.tags[number], access: access, owner: owner}
		r.next = (m.address+uint64(len(b))+pageSize-1)&^(pageSize-1) + pageSize
		r.all[number] = m
		for _, t := range p.device.transports {
			if t, ok := t.(Registrar); ok {
				t.Registered(m.key, m.address, b, access)
			}
		}
	})
	return m, err
}

// Deregister ends the region: its key is refused from now on. Work requests that use it must have completed. A second call does nothing.
func (m *MR) Deregister() {
	d := m.pd.device
	d.Do(func() {
		number := m.key >> tagBits
		if d.regions.all[number] != m {
			return
		}
		d.regions.all[number] = nil
		d.regions.free = append(d.regions.free, number)
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

// Bytes returns the region's memory. Reading bytes that a peer may be writing is a data race, as on any RDMA device: wait for a completion
// first.
func (m *MR) Bytes() []byte { return m.b }

// Address returns the start address of the region, which peers use.
func (m *MR) Address() uint64 { return m.address }

// Key returns the region's R_Key, by which peers name it.
func (m *MR) Key() uint32 { return m.key }

// find returns the n bytes at an address of a region of the domain.
func (r *regions) find(pd *PD, key uint32, address uint64, n int, need Access) ([]byte, error) {
	number := key >> tagBits
	if int(number) >= len(r.all) || r.all[number] == nil || r.all[number].key != key || r.all[number].pd != pd {
		return nil, fmt.Errorf("%w: key %#x belongs to no memory region of this device", ErrRemoteAccess, key)
	}
	m := r.all[number]
	if m.access&need != need {
		return nil, fmt.Errorf("%w: key %#x lacks a right", ErrRemoteAccess, key)
	}
	offset := address - m.address
	if n == 0 {
		return nil, nil
	}
	if address < m.address || offset > uint64(len(m.b)) || uint64(n) > uint64(len(m.b))-offset {
		return nil, fmt.Errorf("%w: %d bytes at %#x are not inside key %#x", ErrRemoteAccess, n, address, key)
	}
	return m.b[offset : offset+uint64(n) : offset+uint64(n)], nil
}

// atomically executes an atomic operation. The device's lock serializes all atomics of a device; sync/atomic makes them atomic for readers
// in the application and in processes that share the memory.
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
