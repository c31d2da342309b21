package nupa

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// shared is the machine for endpoints on several kernels that map the same memory: no lock and no futex of one kernel
// reaches the others.
//
// An endpoint increments its heartbeat; a peer whose heartbeat stands still is dead. A dead endpoint may run again,
// since its machine may only have been paused. Therefore death fails channels, but frees nothing that the dead endpoint
// may still write to. That needs the end of the endpoint, which is known in three cases: it has left; it ran on this
// kernel, and the lock of its process is gone; or it has the loopback of this endpoint and another boot id, which means
// that this machine has restarted since.
//
// The bytes of the locks depend on the boot id, so that the locks of several kernels never meet, whatever the file
// system does with them.
type shared struct {
	*file
	area     *area
	boot     [16]byte
	inode    uint64 // of the file, with its file system: locks do not reach other nodes of the device, nor the sysfs of another network namespace
	loopback [16]byte
	period   time.Duration // of heartbeats

	// Of each entry: its incarnation when it was observed, the heartbeat then, and the number of observations since
	// that heartbeat.
	seen  [endpointCount]atomic.Uint64
	heart [endpointCount]uint64
	stood [endpointCount]atomic.Uint32

	quit, done chan struct{}
}

const (
	// heartbeats is the number of heartbeats in Config.DeadAfter. Counting the local heartbeats instead of time keeps
	// peers alive for an observer that was paused itself.
	heartbeats = 10

	// The sleep between two looks at the doorbell grows from the first to the last value.
	firstSleep = 50 * time.Microsecond
	lastSleep  = 5 * time.Millisecond
)

// mapShared maps memory that several kernels share. size is 0 if it is unknown or the file is empty.
func (f *file) mapShared(cfg Config, device bool, size int64) (_ machine, _ *area, err error) {
	s := &shared{file: f, boot: cfg.boot, period: cfg.DeadAfter / heartbeats}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	if cfg.DeadAfter < 10*time.Millisecond {
		return nil, nil, fmt.Errorf("peers dead after %v (Config.DeadAfter): use 10ms or more", cfg.DeadAfter)
	}
	if s.boot == [16]byte{} {
		if s.boot, err = bootID(); err != nil {
			return nil, nil, err
		}
	}
	f.locks = 1<<40 | int64(binary.LittleEndian.Uint32(s.boot[:]))<<8
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return nil, nil, fmt.Errorf("stat: %w", err)
	}
	s.inode = bits.RotateLeft64(st.Dev, 32) ^ st.Ino
	fresh := size == 0
	if fresh {
		size = cfg.Size
	}
	if err := f.allocate(fresh && !device, size, cfg.Channels); err != nil {
		return nil, nil, err
	}
	if err := f.mmap(size); err != nil {
		return nil, nil, err
	}
	if s.area, err = s.establish(cfg.Channels); err != nil {
		return nil, nil, err
	}
	return s, s.area, nil
}

// bootID returns the kernel's random number of this boot.
func bootID() (id [16]byte, err error) {
	const path = "/proc/sys/kernel/random/boot_id"
	text, err := os.ReadFile(path)
	if err != nil {
		return id, err
	}
	if n, err := hex.Decode(id[:], bytes.ReplaceAll(bytes.TrimSpace(text), []byte("-"), nil)); err != nil || n != len(id) {
		return id, fmt.Errorf("%s: %q is not an id", path, text)
	}
	return id, nil
}

// making is the low half of the magic while an endpoint makes the layout; the high half is a counter, which shows that
// the maker is alive and tells it that another endpoint has taken over.
const making = uint32('m') | 'a'<<8 | 'k'<<16 | 'e'<<24

// establish opens the layout, or makes it if the first word is zero. The first endpoint to change that word is the
// maker; if it dies, a waiting endpoint takes over.
func (s *shared) establish(rings int) (*area, error) {
	magicWord := binary.LittleEndian.Uint64([]byte(magic))
	w := (&area{mem: s.mem}).u64(0)
	before, stood := uint64(0), 0
	for {
		v := w.Load()
		if v != before {
			before, stood = v, 0
		}
		switch {
		case v == 0, uint32(v) == making && stood > heartbeats:
			a, err := geometry(int64(len(s.mem)), rings)
			if err != nil {
				return nil, err // before a change: it may be the wrong device
			}
			claim := uint64(making) | newID()<<32
			if w.CompareAndSwap(v, claim) && s.makeLayout(w, claim, a) {
				return a, nil
			}
		case uint32(v) == making:
			time.Sleep(s.period)
			stood++
		case v == 1<<64-1:
			return nil, fmt.Errorf("%w: it reads as ones only: if it is a PCI device, enable it (echo 1 > enable, in the device's folder)", ErrFile)
		case v != magicWord:
			_, err := open(s.mem, true)
			return nil, fmt.Errorf("%w; if no endpoint uses the memory, zero its first 8 bytes", err)
		default:
			a, err := open(s.mem, true)
			if err != nil {
				return nil, fmt.Errorf("%w; end all endpoints and zero the first 8 bytes of the memory, or use other memory", err)
			}
			return a, nil
		}
	}
}

// makeLayout makes the layout of a geometry, while the first word has the value of the claim. It returns false if
// another endpoint has taken over. A maker that was paused and has lost its claim changes nothing: every change is a
// compare-and-swap from what was there before.
func (s *shared) makeLayout(w *atomic.Uint64, claim uint64, a *area) bool {
	a.mem, a.shared = s.mem, true
	zero := func(from, to int) bool { // in steps that take much less than a heartbeat
		for at := from; at < to; at += 8 {
			if (at-from)%pageSize == 0 {
				if !w.CompareAndSwap(claim, claim+1<<32) {
					return false
				}
				claim += 1 << 32
			}
			if v := a.u64(at).Load(); v != 0 {
				if w.Load() != claim { // after the load of v, so that v is not of the next maker
					return false
				}
				a.u64(at).CompareAndSwap(v, 0)
			}
		}
		return true
	}
	ok := zero(8, headerSize) && zero(endpointsAt, ringsAt) && zero(a.pagesAt, a.heapAt)
	for r := 0; ok && r < a.rings; r++ {
		ok = zero(a.ring(r).at, a.ring(r).staging())
	}
	if !ok {
		return false
	}
	a.u64(24).CompareAndSwap(0, newID())
	a.id = a.u64(24).Load()
	h := a.headerBytes(int64(len(s.mem)))
	for at := 8; at < len(h); at += 8 {
		a.u64(at).CompareAndSwap(0, binary.LittleEndian.Uint64(h[at:]))
	}
	return w.CompareAndSwap(claim, binary.LittleEndian.Uint64(h))
}

func (s *shared) decide(loopback [16]byte) {
	s.loopback = loopback
	s.observe()
	var first [endpointCount]uint64
	for i := range first {
		first[i] = s.area.endpoint(i).heart().Load()
	}
	undecided := func() bool {
		for i := range endpointCount {
			e := s.area.endpoint(i)
			if e.claimed() && string(e.address()) == string(loopback[:]) && !s.endedHere(i) && e.heart().Load() == first[i] {
				return true
			}
		}
		return false
	}
	for n := 0; n < heartbeats && undecided(); n++ {
		time.Sleep(s.period)
		s.observe()
	}
}

// observe notes which endpoints' hearts have beaten since the last call.
func (s *shared) observe() {
	for i := range endpointCount {
		e := s.area.endpoint(i)
		generation, heart := e.generation().Load(), e.heart().Load()
		if generation != s.seen[i].Load() || heart != s.heart[i] {
			s.heart[i] = heart
			s.stood[i].Store(0)
			s.seen[i].Store(generation)
		} else {
			s.stood[i].Add(1)
		}
	}
}

func (s *shared) identity() (b [identitySize]byte) {
	copy(b[:], s.boot[:])
	binary.LittleEndian.PutUint64(b[16:], s.inode)
	return b
}

func (s *shared) alive(endpoint int) bool {
	// A new incarnation that has not been observed is alive.
	return s.mine.Load() == int32(endpoint+1) || s.stood[endpoint].Load() < heartbeats ||
		s.seen[endpoint].Load() != s.area.endpoint(endpoint).generation().Load()
}

// endedHere reports whether an endpoint ran on this kernel and its process has ended.
func (s *shared) endedHere(endpoint int) bool {
	want := s.identity()
	return string(s.area.endpoint(endpoint).identity()) == string(want[:]) && s.file.ended(endpoint)
}

func (s *shared) ended(endpoint int) bool {
	e := s.area.endpoint(endpoint)
	if string(e.identity()[:16]) == string(s.boot[:]) {
		return s.endedHere(endpoint)
	}
	return string(e.address()) == string(s.loopback[:]) && !s.alive(endpoint)
}

func (s *shared) start(endpoint int) {
	s.quit, s.done = make(chan struct{}), make(chan struct{})
	generation := s.area.endpoint(endpoint).generation().Load()
	go func() {
		defer close(s.done)
		tick := time.NewTicker(s.period)
		defer tick.Stop()
		for {
			s.live(endpoint, generation)
			select {
			case <-tick.C:
			case <-s.quit:
				return
			}
		}
	}()
}

// live increments the heartbeat of this endpoint, and observes those of its peers. Another endpoint may have taken the
// place: its heart must stand still when it is dead.
func (s *shared) live(endpoint int, generation uint64) {
	if e := s.area.endpoint(endpoint); e.generation().Load() == generation {
		e.heart().Add(1)
	}
	s.observe()
}

func (s *shared) stop() {
	close(s.quit)
	<-s.done
}

// wake does nothing: the sleeper looks at the word.
func (s *shared) wake(*atomic.Uint32) {}

func (s *shared) sleep(word *atomic.Uint32, value uint32, most time.Duration) {
	for d := firstSleep; most > 0 && word.Load() == value; d = min(2*d, lastSleep) {
		time.Sleep(min(d, most))
		most -= d
	}
}
