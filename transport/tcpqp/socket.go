package tcpqp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

var errStopped = errors.New("tcpqp: the transport has been stopped")

// socket is a connection's edge, with a goroutine that reads and one that writes. Under the device's lock each chooses
// the memory to read to or write from; it then uses the memory without that lock. During that one non-blocking system
// call it holds reads or writes, so waiting for these locks never waits for the peer. settle also revokes a choice
// whose system call has not started. It may be called in the same turn, since the device looks at its sets again after
// it has flushed other transports.
type socket struct {
	t   *Transport
	c   *net.TCPConn
	raw syscall.RawConn
	k   *conn

	kicks    chan struct{}
	done     chan struct{} // closed under the device's lock
	closed   bool
	draining bool
	left     atomic.Int32 // number of goroutines that use c

	reads    sync.Mutex
	readable bool // guarded by reads: a read to a is still to be done
	a, b     []byte
	readN    int
	readErr  error
	readIovs [2]unix.Iovec

	writes    sync.Mutex
	writable  bool // guarded by writes: a write of batch is still to be done
	batch     *batch
	writeN    int
	writeErr  error
	writeIovs []unix.Iovec
	writeMsgs []mmsghdr
	marks     *marks // nil: no option. Set before the first batch that is apart
	release   func() // releases the resources of the option
}

// mmsghdr is Linux's struct mmsghdr.
type mmsghdr struct {
	unix.Msghdr
	n uint32
	_ [4]byte
}

func newSocket(t *Transport, c *net.TCPConn) *socket {
	s := &socket{t: t, c: c, kicks: make(chan struct{}, 1), done: make(chan struct{})}
	s.raw, _ = c.SyscallConn() // never fails for an open connection
	// A connection that is given up ends with a reset: the port is free for the same peer at once, and buffered data is
	// not delivered.
	c.SetLinger(0)
	c.SetNoDelay(true)
	c.SetKeepAlivePeriod(max(time.Second, t.config.Timing.GiveUp/4))
	s.raw.Control(func(fd uintptr) {
		// RFC 5482: the time that sent data may stay unacknowledged by TCP.
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(t.config.Timing.GiveUp.Milliseconds()))
	})
	return s
}

// start starts the goroutines. The caller holds the device's lock.
func (s *socket) start(k *conn) {
	s.k = k
	s.left.Store(2)
	s.t.wg.Add(2)
	go s.reader()
	go s.writer()
}

func (s *socket) kick() {
	select {
	case s.kicks <- struct{}{}:
	default:
	}
}

func (s *socket) settle() {
	s.reads.Lock()
	s.readable = false
	s.reads.Unlock()
	s.writes.Lock()
	s.writable = false
	s.writes.Unlock()
}

// close wakes up the goroutines; the last one to end closes the connection.
func (s *socket) close() {
	if !s.closed {
		s.closed = true
		close(s.done)
		s.c.SetDeadline(time.Unix(1, 0))
	}
}

// drain lets the writer send its data, then ends the connection.
func (s *socket) drain() {
	s.draining = true
	s.c.SetLinger(-1)
	s.c.SetWriteDeadline(time.Now().Add(time.Second))
	s.kick()
}

// leave ends a goroutine.
func (s *socket) leave() {
	if s.left.Add(-1) == 0 {
		s.c.Close()
		if s.release != nil {
			s.release()
		}
	}
	s.t.wg.Done()
}

func (s *socket) reader() {
	defer s.leave()
	ask := func() {
		if s.a, s.b = nil, nil; s.k.dead == nil {
			if s.a, s.b = s.k.want(); s.a != nil {
				s.reads.Lock()
				s.readable = true
				s.reads.Unlock()
			}
		}
	}
	step := func() {
		switch {
		case s.k.dead != nil:
		case s.readErr != nil:
			s.k.fail(fmt.Errorf("tcpqp: read: %w", s.readErr))
		case s.readN > 0:
			s.k.got(s.readN)
		}
		s.readN = 0
		s.t.asking = append(s.t.asking, ask)
	}
	try := func(fd uintptr) bool { return s.readv(fd) || s.a != nil }
	wait := func(fd uintptr) bool { return polled(fd, unix.POLLIN) }
	for {
		s.t.host.Do(step)
		if s.b == nil {
			return
		}
		// A read to the connection's own buffer may wait; a read to memory of the application may not.
		direct := s.a != nil
		if direct {
			if s.reads.Lock(); !s.readable {
				s.reads.Unlock()
				continue
			}
		}
		err := s.raw.Read(try)
		if direct {
			s.reads.Unlock()
		}
		if err == nil && s.readN == 0 && s.readErr == nil {
			err = s.raw.Read(wait)
		}
		if err != nil {
			s.readErr = err
		}
	}
}

// readv reads once; it returns false if no data has arrived.
func (s *socket) readv(fd uintptr) bool {
	iovs := s.readIovs[:0]
	for _, p := range [2][]byte{s.a, s.b} {
		if len(p) > 0 {
			iovs = append(iovs, iovec(p))
		}
	}
	for {
		n, _, errno := unix.Syscall(unix.SYS_READV, fd, uintptr(unsafe.Pointer(unsafe.SliceData(iovs))), uintptr(len(iovs)))
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			return false
		case errno != 0:
			s.readErr = errno
		case n == 0:
			s.readErr = io.EOF
		}
		if errno == 0 {
			s.readN = int(n)
		}
		return true
	}
}

// polled reports whether a descriptor is ready. Unlike a read that fails with EAGAIN, it needs no memory of the
// application.
func polled(fd uintptr, events int16) bool {
	p := [1]unix.PollFd{{Fd: int32(fd), Events: events}}
	n, err := unix.Poll(p[:], 0)
	return n > 0 || err != nil && err != unix.EINTR
}

func (s *socket) writer() {
	defer s.leave()
	stop := false
	ask := func() {
		if s.batch = nil; s.k.dead == nil {
			if s.batch = s.k.fill(); s.batch != nil {
				if s.batch.apart {
					s.marks.stage(s.batch)
				}
				s.writes.Lock()
				s.writable = true
				s.writes.Unlock()
			} else if s.draining {
				s.k.fail(errStopped)
			}
		}
		stop = s.k.dead != nil
	}
	step := func() {
		switch {
		case s.k.dead != nil:
		case s.writeErr != nil:
			s.k.fail(fmt.Errorf("tcpqp: write: %w", s.writeErr))
		default:
			s.k.wrote(s.writeN)
		}
		s.writeN = 0
		s.t.asking = append(s.t.asking, ask)
	}
	try := func(fd uintptr) bool { s.send(fd); return true }
	wait := func(fd uintptr) bool { return polled(fd, unix.POLLOUT) }
	for {
		s.t.host.Do(step)
		switch {
		case s.batch != nil:
		case stop:
			return
		default:
			select {
			case <-s.kicks:
			case <-s.done:
			}
			continue
		}
		if s.writes.Lock(); !s.writable {
			s.writes.Unlock()
			continue
		}
		err := s.raw.Write(try)
		s.writes.Unlock()
		if err == nil && s.writeN == 0 && s.writeErr == nil {
			err = s.raw.Write(wait)
		}
		if err != nil {
			s.writeErr = err
		}
	}
}

// send writes the batch once, as far as TCP accepts it.
func (s *socket) send(fd uintptr) {
	b := s.batch
	s.writeIovs = s.writeIovs[:0]
	trap, flags := uintptr(unix.SYS_WRITEV), uintptr(0)
	var vec unsafe.Pointer
	var n int
	if b.apart {
		// MSG_EOR: the kernel appends nothing to the last segment of a message.
		trap, flags = unix.SYS_SENDMMSG, unix.MSG_EOR|unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL
		s.writeMsgs = s.writeMsgs[:0]
		s.marks.add(b)
		for i := range b.pieces {
			s.writeIovs = append(s.writeIovs, iovec(b.pieces[i].copy))
		}
		for i := range s.writeIovs {
			m := mmsghdr{}
			m.Iov, m.Iovlen = &s.writeIovs[i], 1
			s.writeMsgs = append(s.writeMsgs, m)
		}
		vec, n = unsafe.Pointer(unsafe.SliceData(s.writeMsgs)), len(s.writeMsgs)
	} else {
		for _, p := range b.bufs {
			s.writeIovs = append(s.writeIovs, iovec(p))
		}
		vec, n = unsafe.Pointer(unsafe.SliceData(s.writeIovs)), len(s.writeIovs)
	}
	for {
		done, _, errno := unix.Syscall6(trap, fd, uintptr(vec), uintptr(n), flags, 0, 0)
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
		case errno != 0:
			s.writeErr = errno
		case !b.apart:
			s.writeN = int(done)
		default:
			for _, m := range s.writeMsgs[:done] {
				s.writeN += int(m.n)
			}
		}
		return
	}
}

func iovec(p []byte) unix.Iovec { return unix.Iovec{Base: unsafe.SliceData(p), Len: uint64(len(p))} }
