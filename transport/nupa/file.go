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
)

// file is the machine for endpoints on one kernel: a file that all of them map.
//
// Its locks are open file description locks (fcntl(2), F_OFD_SETLK) on single bytes: byte 0 for the tables, byte 1+i for the claim of
// endpoint i. The kernel releases them when the process ends in any way. Unlike process ids they cannot be reused, and they work across
// containers.
type file struct {
	fd       int
	mem      []byte
	patience time.Duration
	mine     atomic.Int32 // the local endpoint, plus 1

	tables sync.Mutex // the lock of byte 0 belongs to the file, not to a goroutine: this excludes other goroutines
}

const (
	lockTables  = 0
	lockClaims  = 1
	spins       = 64 // number of yields before pause sleeps
	pauseLength = 100 * time.Microsecond
)

// mapFile opens and maps the file. If the file does not exist or is empty, mapFile makes it with the given size and number of rings.
func mapFile(path string, size int64, rings int, patience time.Duration) (_ *file, _ *area, err error) {
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		return nil, nil, errors.New("the words of the file are little endian, but this machine is big endian")
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("open: %w", err)
	}
	f := &file{fd: fd, patience: patience}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	unlock, err := f.lock()
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, nil, fmt.Errorf("stat: %w", err)
	}
	fresh := st.Size == 0
	if fresh {
		if _, err := geometry(size, rings); err != nil {
			return nil, nil, err
		}
		// Allocate the memory now: if a tmpfs is full later, access to a missing page kills the process (SIGBUS).
		if err := unix.Fallocate(fd, 0, 0, size); err != nil {
			return nil, nil, errors.Join(fmt.Errorf("%d bytes (Config.Size): %w", size, err), unix.Ftruncate(fd, 0))
		}
	} else if st.Size < headerSize || st.Size > 1<<40 {
		return nil, nil, fmt.Errorf("%w: %d bytes", ErrFile, st.Size)
	} else {
		size = st.Size
	}
	// Any process with write permission could truncate the file, unless it is a memfd, which can be sealed.
	unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	if f.mem, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, nil, fmt.Errorf("map %d bytes: %w", size, err)
	}
	if fresh {
		var id [8]byte
		rand.Read(id[:])
		a, err := format(f.mem, rings, binary.LittleEndian.Uint64(id[:]))
		return f, a, err
	}
	a, err := open(f.mem)
	if err != nil {
		return nil, nil, fmt.Errorf("%w; end the processes that use the file and remove it, or set Config.File to another file", err)
	}
	return f, a, nil
}

// close unmaps and closes the file, which releases all locks.
func (f *file) close() {
	if f.mem != nil {
		unix.Munmap(f.mem)
	}
	unix.Close(f.fd)
}

func (f *file) fcntl(cmd int, kind int16, at int) (unix.Flock_t, error) {
	l := unix.Flock_t{Type: kind, Start: int64(at), Len: 1}
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

// sleep sleeps until a wake-up, at most for the given duration; it returns at once if the word does not have the value.
func sleep(word *atomic.Uint32, value uint32, most time.Duration) {
	ts := unix.NsecToTimespec(int64(most))
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWait, uintptr(value), uintptr(unsafe.Pointer(&ts)), 0, 0)
}
