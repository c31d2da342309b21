package nupa

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/transport/internal/memfile"
)

// file is the machine for endpoints on one kernel: a file that all of them map.
//
// Its locks are open file description locks (fcntl(2), F_OFD_SETLK) on single bytes: byte 0 for the tables, byte 1+i
// for the claim of endpoint i. The kernel releases them when the process ends in any way. Unlike process ids they
// cannot be reused, and they work across containers.
type file struct {
	fd       int
	mem      []byte
	locks    int64 // offset of the locked bytes
	patience time.Duration
	mine     atomic.Int32 // the local endpoint, plus 1

	tables sync.Mutex // the lock of byte 0 belongs to the file, not to a goroutine: this excludes other goroutines
}

const (
	lockTables  = 0
	lockClaims  = 1
	maxSize     = 1 << 40
	spins       = 64 // number of yields before pause sleeps
	pauseLength = 100 * time.Microsecond
)

// mapFile opens and maps the file of a configuration. If it does not exist or is empty, mapFile makes it.
func mapFile(cfg Config) (machine, *area, error) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return nil, nil, errors.New("the words of the file are little endian, but this machine is big endian")
	}
	fd, err := memfile.Open(cfg.File)
	if err != nil {
		return nil, nil, fmt.Errorf("open: %w", err)
	}
	f := &file{fd: fd, patience: cfg.Timing.GiveUp}
	device, size, err := memfile.Kind(fd)
	if err != nil {
		f.close()
		return nil, nil, err
	}
	if device || cfg.Shared {
		return f.mapShared(cfg, device, size)
	}
	a, err := f.mapLocal(cfg)
	if err != nil {
		f.close()
		return nil, nil, err
	}
	return f, a, nil
}

// mapLocal maps a file whose endpoints run on this kernel.
func (f *file) mapLocal(cfg Config) (*area, error) {
	unlock, err := f.lock()
	if err != nil {
		return nil, err
	}
	defer unlock()
	_, size, err := memfile.Kind(f.fd) // once more: another process may have made it
	if err != nil {
		return nil, err
	}
	fresh := size == 0
	if fresh {
		size = cfg.Size
	}
	if err := f.allocate(fresh, size, cfg.Channels); err != nil {
		return nil, err
	}
	if err := f.mmap(size); err != nil {
		return nil, err
	}
	if fresh {
		return format(f.mem, cfg.Channels, newID())
	}
	a, err := open(f.mem, false)
	if err != nil {
		return nil, fmt.Errorf("%w; end the processes that use the file and remove it, or set Config.File to another file", err)
	}
	return a, nil
}

// allocate allocates the memory of a fresh file now: if a tmpfs is full later, access to a missing page kills the
// process (SIGBUS).
func (f *file) allocate(fresh bool, size int64, rings int) error {
	if !fresh {
		return nil
	}
	if _, err := geometry(size, rings); err != nil {
		return err
	}
	if err := unix.Fallocate(f.fd, 0, 0, size); err != nil {
		return errors.Join(fmt.Errorf("%d bytes (Config.Size): %w", size, err), unix.Ftruncate(f.fd, 0))
	}
	return nil
}

func (f *file) mmap(size int64) (err error) {
	if size < headerSize || size > maxSize {
		return fmt.Errorf("%w: %d bytes: the size is from %d to %d", ErrFile, size, headerSize, int64(maxSize))
	}
	// Any process with write permission could truncate the file, unless it is a memfd, which can be sealed.
	unix.FcntlInt(uintptr(f.fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	if f.mem, err = unix.Mmap(f.fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map %d bytes: %w", size, err)
	}
	return nil
}

func newID() uint64 {
	var id [8]byte
	rand.Read(id[:])
	return binary.LittleEndian.Uint64(id[:])
}

// close unmaps and closes the file, which releases all locks.
func (f *file) close() {
	if f.mem != nil {
		unix.Munmap(f.mem)
	}
	unix.Close(f.fd)
}

func (f *file) fcntl(cmd int, kind int16, at int) (unix.Flock_t, error) {
	l := unix.Flock_t{Type: kind, Start: f.locks + int64(at), Len: 1}
	for {
		err := unix.FcntlFlock(uintptr(f.fd), cmd, &l)
		if !errors.Is(err, unix.EINTR) {
			return l, err
		}
	}
}

func (f *file) lock() (unlock func(), err error) {
	f.tables.Lock()
	if _, err := f.fcntl(unix.F_OFD_SETLKW, unix.F_WRLCK, lockTables); err != nil {
		f.tables.Unlock()
		return nil, fmt.Errorf("lock: %w", err)
	}
	return func() {
		f.fcntl(unix.F_OFD_SETLK, unix.F_UNLCK, lockTables)
		f.tables.Unlock()
	}, nil
}

func (f *file) claim(endpoint int) (bool, error) {
	_, err := f.fcntl(unix.F_OFD_SETLK, unix.F_WRLCK, lockClaims+endpoint)
	switch {
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EACCES):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("claim: %w", err)
	}
	f.mine.Store(int32(endpoint + 1))
	return true, nil
}

func (f *file) release(endpoint int) {
	f.mine.Store(0)
	f.fcntl(unix.F_OFD_SETLK, unix.F_UNLCK, lockClaims+endpoint)
}

func (f *file) alive(endpoint int) bool {
	if f.mine.Load() == int32(endpoint+1) {
		return true
	}
	l, err := f.fcntl(unix.F_OFD_GETLK, unix.F_WRLCK, lockClaims+endpoint)
	return err != nil || l.Type != unix.F_UNLCK // on errors assume that the endpoint is alive
}

// A process that has ended does not hold the lock, and nothing else ends an endpoint.
func (f *file) ended(endpoint int) bool { return !f.alive(endpoint) }

func (f *file) decide([16]byte)                  {}
func (f *file) identity() (b [identitySize]byte) { return b }
func (f *file) start(int)                        {}
func (f *file) stop()                            {}

func (f *file) pause(n int) bool {
	if n < spins {
		runtime.Gosched()
		return true
	}
	time.Sleep(pauseLength)
	return time.Duration(n-spins)*pauseLength < f.patience
}

// The futex operations without FUTEX_PRIVATE_FLAG: other processes use the word too, at other addresses.
const (
	futexWait = 0
	futexWake = 1
)

func (f *file) wake(word *atomic.Uint32) {
	unix.RawSyscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWake, 1, 0, 0, 0)
}

func (f *file) sleep(word *atomic.Uint32, value uint32, most time.Duration) {
	ts := unix.NsecToTimespec(int64(most))
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(value), uintptr(unsafe.Pointer(&ts)), 0, 0)
}
