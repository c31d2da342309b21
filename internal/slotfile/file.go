package slotfile

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/slotlayout"
)

// errFull reports that a file has no room for another record.
var errFull = errors.New("the slot table is full")

// file is one mapped file. Its size never changes, because readers have it mapped.
type file struct {
	mem slotlayout.Memory
	h   slotlayout.Header // the constant fields, and the numbers of used records
	id  fileID
	// deleted counts the index entries of removed pairs.
	deleted uint32
	vectors freeList
}

// fileID identifies a file while it exists.
type fileID struct{ dev, ino uint64 }

func idOf(st *unix.Stat_t) fileID { return fileID{st.Dev, st.Ino} }

// freeList has the free records of a section: the released ones, and those from next on.
type freeList struct {
	released []uint32
	next     uint32
}

// take returns a free record below limit, the most recently released first.
func (l *freeList) take(limit uint32) (uint32, error) {
	if n := len(l.released); n > 0 {
		r := l.released[n-1]
		l.released = l.released[:n-1]
		return r, nil
	}
	if l.full(limit) {
		return 0, errFull
	}
	l.next++
	return l.next - 1, nil
}

// full reports whether no record below limit is free.
func (l *freeList) full(limit uint32) bool { return len(l.released) == 0 && l.next == limit }

// place returns a free record for a pair: its home, or the next one, cyclically.
func (f *file) place(key PairKey) (uint32, error) {
	if f.h.UsedPairs == f.h.Pairs {
		return 0, errFull
	}
	n := f.h.Home(f.hash(key))
	for f.used(n) {
		n = (n + 1) % f.h.Pairs
	}
	return n, nil
}

// create makes a file at a path that does not exist, from a header with the numbers of records. All bytes are
// allocated, because an access to a page that the file system has no room for ends the process.
func create(path string, mode os.FileMode, h slotlayout.Header) (f *file, err error) {
	h.Place()
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", path, err)
	}
	defer unix.Close(fd)
	defer func() {
		if err != nil {
			unix.Unlink(path)
		}
	}()
	if err := ignoringEINTR(func() error { return unix.Fallocate(fd, 0, 0, int64(h.Size)) }); err != nil {
		return nil, fmt.Errorf("reserve %d bytes for %s: %w", h.Size, path, err)
	}
	if err := unix.Fchmod(fd, uint32(mode.Perm())); err != nil {
		return nil, fmt.Errorf("set the mode of %s: %w", path, err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("inspect %s: %w", path, err)
	}
	mem, err := unix.Mmap(fd, 0, int(h.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	f = &file{mem: mem, h: h, id: idOf(&st)}
	f.mem.SetHeader(&h)
	return f, nil
}

func ignoringEINTR(fn func() error) error {
	for {
		if err := fn(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (f *file) close() error { return unix.Munmap(f.mem) }

// Offsets of records.
func (f *file) vector(n uint32) uint64 {
	return f.h.VectorsAt + uint64(n)*uint64(f.h.VectorSize)
}
func (f *file) pair(n uint32) uint64 { return f.h.PairsAt + uint64(n)*uint64(f.h.PairSize) }
func (f *file) subPort(n uint32) uint64 {
	return f.h.SubPortsAt + uint64(n)*uint64(f.h.SubPortSize)
}
func (f *file) entry(n uint64) uint64 { return f.h.IndexAt + 4*n }

// Offsets of fields that change.
const (
	headerState       = uint64(unsafe.Offsetof(slotlayout.Header{}.State))
	headerWake        = uint64(unsafe.Offsetof(slotlayout.Header{}.Wake))
	headerRevision    = uint64(unsafe.Offsetof(slotlayout.Header{}.Revision))
	headerStatus      = uint64(unsafe.Offsetof(slotlayout.Header{}.StatusRevision))
	headerHeartbeat   = uint64(unsafe.Offsetof(slotlayout.Header{}.Heartbeat))
	headerUsedPairs   = uint64(unsafe.Offsetof(slotlayout.Header{}.UsedPairs))
	headerUsedVectors = uint64(unsafe.Offsetof(slotlayout.Header{}.UsedVectors))

	subPortRDMAPort   = uint64(unsafe.Offsetof(slotlayout.SubPort{}.RDMAPort))
	subPortRDMADevice = uint64(unsafe.Offsetof(slotlayout.SubPort{}.RDMADevice))

	vectorSlots    = uint64(unsafe.Offsetof(slotlayout.Vector{}.Slots))
	vectorRevision = uint64(unsafe.Offsetof(slotlayout.Vector{}.Revision))
	vectorFlags    = uint64(unsafe.Offsetof(slotlayout.Vector{}.Flags))
	vectorID       = uint64(unsafe.Offsetof(slotlayout.Vector{}.ID))

	pairVector      = uint64(unsafe.Offsetof(slotlayout.Pair{}.Vector))
	pairRevision    = uint64(unsafe.Offsetof(slotlayout.Pair{}.Revision))
	pairSource      = uint64(unsafe.Offsetof(slotlayout.Pair{}.Source))
	pairDestination = uint64(unsafe.Offsetof(slotlayout.Pair{}.Destination))
	pairFlags       = uint64(unsafe.Offsetof(slotlayout.Pair{}.Flags))
	pairPlacements  = uint64(unsafe.Offsetof(slotlayout.Pair{}.Placements))
)

// change runs fn while the record's sequence is odd: readers that overlap with it retry. The sequence is the first
// field of each record that changes.
func (f *file) change(record uint64, fn func()) {
	seq := f.mem.Load32(record)
	f.mem.Store32(record, seq|1)
	fn()
	f.mem.Store32(record, (seq|1)+1)
}

// Vector is the state that the pairs of many destinations share.
type Vector struct {
	Flags uint32 // slotlayout.VectorReachable, VectorInEffect
	Slots []slotlayout.Slot
}

// samePlaces reports whether the slots have equal planes and sub-ports, so that source ports for one are right for the
// other.
func samePlaces(a, b []slotlayout.Slot) bool {
	return slices.EqualFunc(a, b, func(a, b slotlayout.Slot) bool { return a.Plane == b.Plane && a.SubPort == b.SubPort })
}

// samePlaces reports whether the vectors of two records have the same places.
func (f *file) samePlaces(a, b uint32) bool {
	if a == b {
		return true
	}
	v, _ := f.vectorAt(a)
	w, _ := f.vectorAt(b)
	return samePlaces(v.Slots, w.Slots)
}

// vectorAt reads a record.
func (f *file) vectorAt(n uint32) (v Vector, id uint32) {
	at := f.vector(n)
	v.Flags = f.mem.Load32(at + vectorFlags)
	v.Slots = make([]slotlayout.Slot, f.mem.Load32(at+vectorSlots))
	for i := range v.Slots {
		v.Slots[i] = slotlayout.SlotOf(f.mem.Load64(at + slotlayout.VectorSize + 8*uint64(i)))
	}
	return v, f.mem.Load32(at + vectorID)
}

// setVector writes a record, unless it has the value already.
func (f *file) setVector(n, id uint32, v *Vector, revision uint64) {
	if old, oldID := f.vectorAt(n); oldID == id && old.Flags == v.Flags && slices.Equal(old.Slots, v.Slots) {
		return
	}
	at := f.vector(n)
	f.change(at, func() {
		f.mem.Store32(at+vectorSlots, uint32(len(v.Slots)))
		f.mem.Store64(at+vectorRevision, revision)
		f.mem.Store32(at+vectorFlags, v.Flags)
		f.mem.Store32(at+vectorID, id)
		for i, s := range v.Slots {
			f.mem.Store64(at+slotlayout.VectorSize+8*uint64(i), s.Word())
		}
	})
}

// newVector takes a free record.
func (f *file) newVector() (uint32, error) {
	n, err := f.vectors.take(f.h.Vectors)
	if err == nil {
		f.count(headerUsedVectors, &f.h.UsedVectors, 1)
	}
	return n, err
}

// freeVector releases a record to which no pair points.
func (f *file) freeVector(n uint32) {
	at := f.vector(n)
	f.change(at, func() {
		f.mem.Store32(at+vectorSlots, 0)
		f.mem.Store32(at+vectorFlags, 0)
		f.mem.Store32(at+vectorID, 0)
	})
	f.vectors.released = append(f.vectors.released, n)
	f.count(headerUsedVectors, &f.h.UsedVectors, -1)
}

func (f *file) count(at uint64, n *uint32, by int) {
	*n += uint32(by)
	f.mem.Store32(at, *n)
}

// find returns the record of a pair and its index entry, or false and the entry to insert the pair at.
func (f *file) find(key PairKey) (record uint32, entry uint64, ok bool) {
	mask := uint64(f.h.IndexEntries - 1)
	free, none := uint64(0), true // the first entry of a removed pair
	hash := f.hash(key)
	i := hash & mask
	for ; ; i = (i + 1) & mask {
		switch n := f.mem.Load32(f.entry(i)); n {
		case 0:
			if none {
				free = i
			}
			return 0, free, false
		case slotlayout.IndexDeleted:
			if none {
				free, none = i, false
			}
		default:
			if r := f.h.Record(hash, n); r != 0 && f.keyOf(r-1) == key {
				return r - 1, i, true
			}
		}
	}
}

// hash returns the hash of a pair's addresses.
func (f *file) hash(key PairKey) uint64 {
	return slotlayout.Hash(f.h.Seed, &key.Source, &key.Destination)
}

// setEntry points an entry of the index to the record of a pair.
func (f *file) setEntry(entry uint64, key PairKey, record uint32) {
	f.mem.Store32(f.entry(entry), f.h.Entry(f.hash(key), record))
}

// keyOf reads the addresses of a pair.
func (f *file) keyOf(n uint32) PairKey {
	at := f.pair(n)
	return PairKey{f.mem.Bytes16(at + pairSource), f.mem.Bytes16(at + pairDestination)}
}

// used reports whether a record of a pair is in use.
func (f *file) used(n uint32) bool {
	return f.mem.Load32(f.pair(n)+pairFlags)&slotlayout.PairUsed != 0
}

// vectorOf returns the vector's record of a pair, or false if the pair has none.
func (f *file) vectorOf(n uint32) (uint32, bool) {
	v := f.mem.Load32(f.pair(n) + pairVector)
	return v - 1, v != 0
}

// pairState is the content of a pair's record.
type pairState struct {
	vector     uint32 // record number plus 1; 0: none
	flags      uint32
	placements uint32
	drain      []uint64 // bitmap
	ports      []uint16 // for each service, MaxSlots of them in whole words
}

func (s *pairState) equal(t *pairState) bool {
	return s.vector == t.vector && s.flags == t.flags && s.placements == t.placements && slices.Equal(s.drain, t.drain) && slices.Equal(s.ports, t.ports)
}

// newState returns an empty state with room for all slots.
func (f *file) newState() pairState {
	return pairState{drain: make([]uint64, slotlayout.DrainWords(f.h.MaxSlots)), ports: make([]uint16, f.portsOf(max(f.h.Services, 1)))}
}

// portsOf returns the index in pairState.ports of a service's first port.
func (f *file) portsOf(service uint32) uint64 {
	return (slotlayout.PortsAt(f.h.MaxSlots, service) - slotlayout.PortsAt(f.h.MaxSlots, 0)) / 2
}

// state reads a pair's record.
func (f *file) state(n uint32, s *pairState) {
	at := f.pair(n)
	s.vector, s.flags, s.placements = f.mem.Load32(at+pairVector), f.mem.Load32(at+pairFlags), f.mem.Load32(at+pairPlacements)
	for i := range s.drain {
		s.drain[i] = f.mem.Load64(at + slotlayout.PairSize + 8*uint64(i))
	}
	at += slotlayout.PortsAt(f.h.MaxSlots, 0)
	var b [8]byte
	for i := 0; i < len(s.ports); i += 4 {
		binary.NativeEndian.PutUint64(b[:], f.mem.Load64(at+2*uint64(i)))
		for j := range 4 {
			s.ports[i+j] = binary.NativeEndian.Uint16(b[2*j:])
		}
	}
}

// setState writes a pair's record.
func (f *file) setState(n uint32, key PairKey, s *pairState, revision uint64) {
	at := f.pair(n)
	f.change(at, func() {
		f.mem.Store32(at+pairVector, s.vector)
		f.mem.Store64(at+pairRevision, revision)
		f.mem.SetBytes16(at+pairSource, key.Source)
		f.mem.SetBytes16(at+pairDestination, key.Destination)
		f.mem.Store32(at+pairFlags, s.flags)
		f.mem.Store32(at+pairPlacements, s.placements)
		for i, word := range s.drain {
			f.mem.Store64(at+slotlayout.PairSize+8*uint64(i), word)
		}
		at := at + slotlayout.PortsAt(f.h.MaxSlots, 0)
		var b [8]byte
		for i := 0; i < len(s.ports); i += 4 {
			for j := range 4 {
				binary.NativeEndian.PutUint16(b[2*j:], s.ports[i+j])
			}
			f.mem.Store64(at+2*uint64(i), binary.NativeEndian.Uint64(b[:]))
		}
	})
}

// insert adds a pair that find has not found, at the entry that it returned.
func (f *file) insert(key PairKey, entry uint64, s *pairState, revision uint64) error {
	// At least a quarter of the index is 0, so that probes are short and end.
	reused := f.mem.Load32(f.entry(entry)) == slotlayout.IndexDeleted
	if !reused && uint64(f.h.UsedPairs+f.deleted+1)*4 > uint64(f.h.IndexEntries)*3 {
		return errFull
	}
	n, err := f.place(key)
	if err != nil {
		return err
	}
	f.setState(n, key, s, revision)
	f.setEntry(entry, key, n)
	if reused {
		f.deleted--
	}
	f.count(headerUsedPairs, &f.h.UsedPairs, 1)
	return nil
}

// remove removes a pair.
func (f *file) remove(n uint32, entry uint64, revision uint64) {
	// Entries before a 0 are not needed to continue a probe.
	mask := uint64(f.h.IndexEntries - 1)
	if f.mem.Load32(f.entry((entry+1)&mask)) != 0 {
		f.mem.Store32(f.entry(entry), slotlayout.IndexDeleted)
		f.deleted++
	} else {
		f.mem.Store32(f.entry(entry), 0)
		for i := (entry - 1) & mask; f.mem.Load32(f.entry(i)) == slotlayout.IndexDeleted; i = (i - 1) & mask {
			f.mem.Store32(f.entry(i), 0)
			f.deleted--
		}
	}
	empty := f.newState()
	f.setState(n, PairKey{}, &empty, revision)
	f.count(headerUsedPairs, &f.h.UsedPairs, -1)
}

// copyFrom copies the records of a file with the same sizes of records and no more of them, and makes the index.
func (f *file) copyFrom(old *file) error {
	// The sections are not published: plain copies are enough.
	copy(f.mem[f.h.PlanesAt:][:uint64(f.h.Planes)*uint64(f.h.PlaneSize)], old.mem[old.h.PlanesAt:])
	copy(f.mem[f.h.SourcesAt:][:uint64(f.h.Sources)*uint64(f.h.SourceSize)], old.mem[old.h.SourcesAt:])
	copy(f.mem[f.h.ServicesAt:][:uint64(f.h.Services)*uint64(f.h.ServiceSize)], old.mem[old.h.ServicesAt:])
	copy(f.mem[f.h.SteeredAt:][:uint64(f.h.Steered)*uint64(f.h.SteeredSize)], old.mem[old.h.SteeredAt:])
	copy(f.mem[f.h.SubPortsAt:][:uint64(f.h.SubPorts)*uint64(f.h.SubPortSize)], old.mem[old.h.SubPortsAt:])
	copy(f.mem[f.h.VectorsAt:], old.mem[old.h.VectorsAt:][:uint64(old.h.Vectors)*uint64(old.h.VectorSize)])
	f.vectors, f.h.UsedVectors = old.vectors, old.h.UsedVectors
	f.mem.Store32(headerUsedVectors, f.h.UsedVectors)
	f.mem.Store64(headerStatus, old.mem.Load64(headerStatus))
	for from := range old.h.Pairs {
		if !old.used(from) {
			continue
		}
		key := old.keyOf(from)
		_, entry, found := f.find(key)
		if found {
			return fmt.Errorf("the slot table has a pair twice")
		}
		n, err := f.place(key)
		if err != nil {
			return err
		}
		copy(f.mem[f.pair(n):], old.mem[old.pair(from):][:old.h.PairSize])
		f.setEntry(entry, key, n)
		f.count(headerUsedPairs, &f.h.UsedPairs, 1)
	}
	return nil
}

// randomSeed returns the seed of an index. Destinations are announced by leaves, which must not be able to choose
// colliding ones.
func randomSeed() uint64 {
	var b [8]byte
	rand.Read(b[:]) // documented never to fail
	return binary.NativeEndian.Uint64(b[:])
}

// wake changes the futex word and wakes the processes that wait for it. The word is in shared memory, so
// FUTEX_PRIVATE_FLAG is not set.
func (f *file) wake() {
	f.mem.Store32(headerWake, f.mem.Load32(headerWake)+1)
	const futexWake, all = 1, 1<<31 - 1
	unix.Syscall(unix.SYS_FUTEX, uintptr(f.mem.Word(headerWake)), futexWake, all)
}
