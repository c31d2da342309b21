package nupa

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"sync/atomic"
	"unsafe"

	"github.com/fared/fared/transport/internal/memfile"
)

// The shared file, version 2. All numbers are little endian; words that several endpoints change are aligned to their
// size and changed atomically. Offsets in bytes.
//
//	header    4096                          the fields below; constant once the file is made
//	endpoints 64 entries of 320             processes that map the file
//	regions   4096 entries of 64            memory that peers may access directly
//	rings     N of 295040                   one per channel and direction: header, 128 slots of 256, 262144 of staging
//	pages     4 per page of the heap        owners
//	heap      to the end, pages of 4096     memory regions
//
//	header    0 magic; while a shared file is made: "make" and a counter  8 version  12 CRC-32C of bytes 0-11 and 16-63  16 size
//	          24 id  32 rings  36 slots  40 staging  44 endpoints  48 regions  52 kernels (0: one, 1: several)  56 heap
//	endpoint  0 generation (odd: claimed)  8 process id, 0: stopped  16 loopback, 16 bytes  32 version of its regions
//	          40 boot id of its kernel, 16 bytes  56 inode of the file there
//	          64 doorbell (futex)  68 asleep  |  128 region it copies from or to, plus 1  136 beat  144 heartbeat
//	          152 offered channel: first sequence number << 10 | ring; 0: none  160 loopback of its peer, 16 bytes  |
//	          192 bitmap of rings to check
//	region    0 word (odd: valid; grows with each change)  8 key  12 access  16 address  24 offset in the file  32 length
//	          40 endpoint, plus 1; 0: free
//	ring      0 sender, plus 1  8 sender's generation  16 receiver: generation << 8 | endpoint << 1 | 1; first sequence number << 1: none
//	          24 first sequence number, 0: closed  64 first sequence number of the use that the receiver left  72 the same while the
//	          receiver is not ready
//	slot      0 sequence number << 8 | state  8 kind  9 length of head  10 place of the data  12 key  16 address  24 length
//	          32 offset of the data in the file  40 compare  48 swap  |  64 status  72 previous value  |  128 head  160 data in place
//	page      bits 0-15 endpoint, plus 1; 0 free; 65535 lost   bit 31: first page of an allocation
const (
	magic      = "NUPAfare"
	version    = 2
	pageSize   = 4096
	headerSize = pageSize
	kernelsAt  = 52

	endpointCount = 64
	endpointSize  = 320
	regionCount   = 4096
	regionSize    = 64
	ringBits      = 10
	maxRings      = 1 << ringBits

	slotCount   = 128
	slotSize    = 256
	stagingSize = 256 << 10
	ringHeader  = 128
	ringSize    = ringHeader + slotCount*slotSize + stagingSize

	endpointsAt = headerSize
	regionsAt   = endpointsAt + endpointCount*endpointSize
	ringsAt     = regionsAt + regionCount*regionSize
)

// MaxOp is Limits.MaxOp in bytes: a quarter of a ring's staging, so that copies in and out overlap.
const MaxOp = 64 << 10

// ErrFile is wrapped by errors of Start if this version cannot use the file.
var ErrFile = memfile.Err

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// area is the mapped file and its geometry. The geometry is read from the header once, when the file is opened, so that
// offsets stay in bounds whatever peers write.
type area struct {
	mem     []byte
	shared  bool   // between kernels; see shared.go
	id      uint64 // random; must be the same at both ends of a channel
	rings   int
	pagesAt int // offset of the table of pages
	heapAt  int
	pages   int // number of pages of the heap
}

// geometry returns the geometry of a file of the given size, or an error if the size is too small.
func geometry(size int64, rings int) (*area, error) {
	if rings < 1 || rings > maxRings {
		return nil, fmt.Errorf("%w: %d rings: use 1 to %d (Config.Channels)", ErrFile, rings, maxRings)
	}
	a := &area{rings: rings, pagesAt: (ringsAt + rings*ringSize + pageSize - 1) &^ (pageSize - 1)}
	a.pages = int((size - int64(a.pagesAt)) / (pageSize + 4))
	a.heapAt = (a.pagesAt + 4*max(a.pages, 0) + pageSize - 1) &^ (pageSize - 1)
	// Where the table ends at the end of a page, the rest of the file may hold one page more than the table.
	a.pages = min(int((size-int64(a.heapAt))/pageSize), (a.heapAt-a.pagesAt)/4)
	if a.pages < 1 {
		return nil, fmt.Errorf("%w: %d bytes: %d channels need more than %d", ErrFile, size, rings, a.heapAt)
	}
	return a, nil
}

// headerBytes returns the contents of the header.
func (a *area) headerBytes(size int64) []byte {
	b := make([]byte, 64)
	le := binary.LittleEndian
	copy(b, magic)
	le.PutUint32(b[8:], version)
	le.PutUint64(b[16:], uint64(size))
	le.PutUint64(b[24:], a.id)
	for i, v := range []int{a.rings, slotCount, stagingSize, endpointCount, regionCount} {
		le.PutUint32(b[32+4*i:], uint32(v))
	}
	if a.shared {
		le.PutUint32(b[kernelsAt:], 1)
	}
	le.PutUint64(b[56:], uint64(a.heapAt))
	le.PutUint32(b[12:], headerSum(b))
	return b
}

func headerSum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:12], castagnoli), castagnoli, b[16:64])
}

// format makes mem, which is all zero, a valid file. It writes the magic last: without it a file is incomplete.
func format(mem []byte, rings int, id uint64) (*area, error) {
	a, err := geometry(int64(len(mem)), rings)
	if err != nil {
		return nil, err
	}
	a.mem, a.id = mem, id
	h := a.headerBytes(int64(len(mem)))
	copy(mem[8:], h[8:])
	a.u64(0).Store(binary.LittleEndian.Uint64(h))
	return a, nil
}

// open checks the header of mem, of a file of one kernel or shared between several, and returns its area.
func open(mem []byte, shared bool) (*area, error) {
	if len(mem) < headerSize {
		return nil, fmt.Errorf("%w: %d bytes, less than a header", ErrFile, len(mem))
	}
	le, h := binary.LittleEndian, mem[:64]
	if string(h[:8]) != magic {
		return nil, fmt.Errorf("%w: magic %q at byte 0 instead of %q: the file has another format", ErrFile, h[:8], magic)
	}
	if v := le.Uint32(h[8:]); v != version {
		return nil, fmt.Errorf("%w: version %d at byte 8 instead of %d", ErrFile, v, version)
	}
	if got, want := le.Uint32(h[12:]), headerSum(h); got != want {
		return nil, fmt.Errorf("%w: checksum %08x at byte 12 instead of %08x: the header is damaged", ErrFile, got, want)
	}
	if size := le.Uint64(h[16:]); size != uint64(len(mem)) {
		return nil, fmt.Errorf("%w: size %d at byte 16, but the file has %d bytes", ErrFile, size, len(mem))
	}
	a, err := geometry(int64(len(mem)), int(min(le.Uint32(h[32:]), maxRings+1)))
	if err != nil {
		return nil, err
	}
	a.id, a.shared = le.Uint64(h[24:]), shared
	want := a.headerBytes(int64(len(mem)))
	if got := le.Uint32(h[kernelsAt:]); got != le.Uint32(want[kernelsAt:]) {
		kinds := map[bool]string{false: "one kernel", true: "several kernels"}
		return nil, fmt.Errorf("%w: made for endpoints on %s, this endpoint is configured for %s (Config.Shared)",
			ErrFile, kinds[got == 1], kinds[shared])
	}
	for i := 32; i < 64; i += 4 {
		if le.Uint32(h[i:]) != le.Uint32(want[i:]) {
			return nil, fmt.Errorf("%w: %d at byte %d, where version %d has %d",
				ErrFile, le.Uint32(h[i:]), i, version, le.Uint32(want[i:]))
		}
	}
	a.mem = mem
	return a, nil
}

// u64 and u32 return words in the file. sync/atomic orders copies before a store before reads after the load that
// observes it (the Go memory model's synchronized-before relation); between processes the processor guarantees this, by
// the same instructions.
func (a *area) u64(at int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&a.mem[at : at+8][0]))
}
func (a *area) u32(at int) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Pointer(&a.mem[at : at+4][0]))
}

// heapEnd returns the end of the heap.
func (a *area) heapEnd() int { return a.heapAt + a.pages*pageSize }

// offset returns the offset of b in the file, or false if b is not completely inside the heap.
func (a *area) offset(b []byte) (int, bool) {
	if len(b) == 0 {
		return 0, false
	}
	at := uintptr(unsafe.Pointer(unsafe.SliceData(b))) - uintptr(unsafe.Pointer(unsafe.SliceData(a.mem)))
	if at < uintptr(a.heapAt) || at >= uintptr(a.heapEnd()) || len(b) > a.heapEnd()-int(at) {
		return 0, false
	}
	return int(at), true
}

// inHeap reports whether n bytes at an offset from a peer are inside the heap.
func (a *area) inHeap(at, n uint64) bool {
	return at >= uint64(a.heapAt) && at <= uint64(a.heapEnd()) && n <= uint64(a.heapEnd())-at
}
