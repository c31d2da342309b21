package mailbox

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/transport/internal/memfile"
)

// Size is the number of bytes that a mailbox takes at the beginning of its memory.
const Size = 2 * halfSize

// foreign is the first word of memory that transport/nupa uses.
const foreign = "NUPAfare"

// File is an end of a mailbox in a file.
type File struct {
	*End
	fd  int
	mem []byte
}

// flusher flushes the lines of a machine's cache. Both functions take the address of the first line and the number of
// lines, as writeBack and invalidate of memory do.
type flusher struct {
	name                  string
	writeBack, invalidate func(first unsafe.Pointer, lines int)
}

// mapped is mapped memory.
type mapped struct {
	b []byte
	flusher
}

func (m mapped) store(at int, b []byte) { copy(m.b[at:at+len(b)], b) }
func (m mapped) load(at int, b []byte)  { copy(b, m.b[at:at+len(b)]) }
func (m mapped) writeBack(at, n int) {
	m.flusher.writeBack(unsafe.Pointer(&m.b[at:][:n*lineSize][0]), n)
}
func (m mapped) invalidate(at, n int) {
	m.flusher.invalidate(unsafe.Pointer(&m.b[at:][:n*lineSize][0]), n)
}

// Open opens end 0 or 1 of the mailbox at the beginning of a file: the memory of a device, such as ivshmem's resource2
// or /dev/dax0.0, or an ordinary file, which Open makes if it is missing or empty. A lock of the file keeps other
// processes of this machine from being the same end. Errors: the processor cannot flush its cache, the memory is too
// small, in use, or of transport/nupa.
func Open(path string, number int) (_ *File, err error) {
	fl, err := newFlusher()
	if err != nil {
		return nil, err
	}
	fd, err := memfile.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	f := &File{fd: fd}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w", path, err)
			f.close()
		}
	}()
	_, size, err := memfile.Kind(fd)
	if err != nil {
		return nil, err
	}
	if size == 0 {
		// Pages that are missing later, on a full tmpfs, would kill the process. If both ends do this at once, neither
		// changes what the other one has written.
		size = Size
		if err := unix.Fallocate(fd, 0, 0, size); err != nil {
			return nil, fmt.Errorf("%d bytes: %w", size, err)
		}
	}
	if size < Size || size > 1<<40 {
		return nil, fmt.Errorf("it has %d bytes, not %d or more", size, Size)
	}
	// All of it, because a DAX device with large pages has no smaller mapping.
	if f.mem, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", size, err)
	}
	if err := f.lock(number); err != nil {
		return nil, err
	}
	m := mapped{f.mem[:Size], fl}
	var first [len(foreign)]byte
	m.invalidate(0, 1)
	if m.load(0, first[:]); string(first[:]) == foreign {
		return nil, errors.New("it has the tables of NUPA: end its processes and zero the first 8 bytes")
	}
	f.End = newEnd(m, number, halfSize, ringLines, newRun)
	return f, nil
}

// lock claims an end on this machine until the file is closed, or the process ends. transport/nupa locks other bytes.
func (f *File) lock(number int) error {
	err := unix.FcntlFlock(uintptr(f.fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 1<<62 + int64(number), Len: 1})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("another process on this machine is end %d", number)
	}
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	return nil
}

// newRun returns a random number that is not 0.
func newRun() uint64 {
	var b [8]byte
	for {
		rand.Read(b[:])
		if v := binary.LittleEndian.Uint64(b[:]); v != 0 {
			return v
		}
	}
}

// Close stops the end and unmaps the memory. No other method may run or follow.
func (f *File) Close() {
	f.Leave()
	f.close()
}

func (f *File) close() {
	if f.mem != nil {
		unix.Munmap(f.mem)
	}
	unix.Close(f.fd)
}
