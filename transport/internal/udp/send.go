package udp

import (
	"encoding/binary"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netns"
)

const (
	// maxSockets is the maximum number of open sockets for sending.
	maxSockets = 1024
	// idle is how long an unused socket stays open.
	idle = time.Minute
	// tryAgain is the pause before the next attempt to open a socket.
	tryAgain = 100 * time.Millisecond
	// writeMessages is the maximum number of messages per system call.
	writeMessages = 64
)

// sourcePort is a source port in use, and its socket.
type sourcePort struct {
	port       uint16
	fd         int           // -1 without a socket
	used       time.Duration // time of the last datagram
	retry      time.Duration // earliest time of the next attempt to open a socket
	newer, old *sourcePort   // neighbors in the order of use
}

// sender owns the sockets for sending. The device's lock and Endpoint.mu guard it.
type sender struct {
	e         *Endpoint
	space     netns.Namespace
	receiveFD int // also sends datagrams whose source port is the receiving port
	lastDrops uint32
	ports     map[uint16]*sourcePort
	newest    *sourcePort
	oldest    *sourcePort
	open      int // sockets

	messages []mmsghdr
	names    []address
	controls []controls
	batches  []int32 // batch of each message
	iovs     []unix.Iovec
	labels   bool // datagrams have flow labels (Config.FlowLabels)
}

func (s *sender) init(e *Endpoint, space netns.Namespace, receiveFD int) {
	*s = sender{
		e: e, space: space, receiveFD: receiveFD, labels: e.config.FlowLabels && e.family == unix.AF_INET6,
		ports:    make(map[uint16]*sourcePort),
		messages: make([]mmsghdr, writeMessages),
		names:    make([]address, writeMessages),
		controls: make([]controls, writeMessages),
		batches:  make([]int32, 0, writeMessages),
		iovs:     make([]unix.Iovec, 0, 3*maxQueued),
	}
	for i := range s.messages {
		s.messages[i].Name = (*byte)(unsafe.Pointer(&s.names[i]))
	}
}

// send sends all queued datagrams, one source port after the other.
func (s *sender) send(q *queue) {
	now := s.e.config.Now()
	for i := range q.ports {
		l := &q.ports[i]
		fd := s.socket(l.port, now)
		for b := l.first; b != none; {
			b = s.gather(q, b, l.port)
			if fd < 0 {
				for _, i := range s.batches {
					s.e.count.noSocket += uint64(q.batches[i].count)
				}
			} else {
				s.write(fd, q)
			}
			clear(s.iovs) // payloads are memory of the application
			s.iovs, s.batches = s.iovs[:0], s.batches[:0]
		}
	}
	for s.oldest != nil && (len(s.ports) > maxSockets || s.oldest.used+idle < now) {
		s.forget(s.oldest)
	}
}

// gather creates messages from batches of a source port, starting at b, and returns the first batch that did not fit,
// or none.
func (s *sender) gather(q *queue, b int32, port uint16) int32 {
	for ; b != none && len(s.batches) < writeMessages; b = q.batches[b].next {
		batch := &q.batches[b]
		i := len(s.batches)
		s.batches = append(s.batches, b)
		first := len(s.iovs)
		for d := batch.first; d != none; d = q.datagrams[d].next {
			s.gatherDatagram(q, &q.datagrams[d], first)
		}
		m := &s.messages[i]
		m.Namelen = s.e.family.name(&s.names[i], batch.to)
		if s.labels {
			s.names[i].Flowinfo = binary.NativeEndian.Uint32([]byte{0, 0, byte(port >> 8), byte(port)})
		}
		m.Iov = nil
		if len(s.iovs) > first {
			m.Iov = &s.iovs[first]
		}
		m.SetIovlen(len(s.iovs) - first)
		s.control(i, batch)
	}
	return b
}

// control sets the control messages of message i.
func (s *sender) control(i int, b *batch) {
	m, segment := &s.messages[i], 0
	if b.count > 1 {
		segment = b.segment
	}
	m.Control = nil
	n := s.controls[i].set(s.e.family, b.class, segment)
	m.SetControllen(n * int(unsafe.Sizeof(control{})))
	if n > 0 {
		m.Control = (*byte)(unsafe.Pointer(&s.controls[i]))
	}
}

// gatherDatagram appends iovecs for a datagram. Iovecs from index first on belong to the same message.
func (s *sender) gatherDatagram(q *queue, d *datagram, first int) {
	head, tail := q.arena[d.at:][:d.head], q.arena[d.at+d.head:][:d.tail]
	s.append(head, first)
	s.append(d.payload, first)
	s.append(tail, first)
}

// append appends bytes, merged into the previous iovec if they follow it in memory, like a tail and the next datagram's
// head in the arena.
func (s *sender) append(b []byte, first int) {
	if len(b) == 0 {
		return
	}
	base := unsafe.SliceData(b)
	if n := len(s.iovs); n > first {
		v := &s.iovs[n-1]
		// Compare numbers, not pointers: a pointer past the end of v may not refer to an allocation. The queue keeps
		// both buffers alive.
		if uintptr(unsafe.Pointer(v.Base))+uintptr(v.Len) == uintptr(unsafe.Pointer(base)) {
			v.SetLen(int(v.Len) + len(b))
			return
		}
	}
	v := unix.Iovec{Base: base}
	v.SetLen(len(b))
	s.iovs = append(s.iovs, v)
}

// write sends messages. Failed ones are dropped and counted, because protocols retransmit.
func (s *sender) write(fd int, q *queue) {
	refused := false
	for i := 0; i < len(s.batches); {
		n, errno := sendmmsg(fd, s.messages[i:len(s.batches)])
		if errno == 0 {
			for _, b := range s.batches[i : i+n] {
				s.sent(&q.batches[b])
			}
			i += n
			continue
		}
		if errno == unix.EINTR {
			continue
		}
		// This is the socket's pending error, of a datagram that was sent earlier. It is reported once, and the current
		// message was not sent.
		if errno == unix.ECONNREFUSED && !refused {
			refused = true
			s.e.count.refused++
			continue
		}
		if errno == unix.EINVAL && s.labels {
			s.labels = false
			for j := range s.names {
				s.names[j].Flowinfo = 0
			}
			continue
		}
		s.failed(fd, i, q, errno)
		i++
	}
}

func (s *sender) sent(b *batch) {
	c := &s.e.count
	c.sentBatches++
	c.sent += uint64(b.count)
	c.sentBytes += uint64(b.bytes)
}

// failed drops message i, which failed with errno.
func (s *sender) failed(fd, i int, q *queue, errno unix.Errno) {
	b := &q.batches[s.batches[i]]
	c, n := &s.e.count, uint64(b.count)
	switch errno {
	case unix.EAGAIN, unix.ENOBUFS, unix.ENOMEM:
		c.full += n
	case unix.EMSGSIZE:
		c.tooBig += n
	case unix.ENETUNREACH, unix.EHOSTUNREACH, unix.ENETDOWN, unix.EHOSTDOWN:
		c.unreachable += n
	case unix.EINVAL, unix.EIO:
		// EIO: the path encrypts or cannot checksum. EINVAL: no UDP_SEGMENT before Linux 4.18, or longer than the MTU
		// before 6.10; sending the first datagram distinguishes the two.
		if b.count > 1 {
			s.first(fd, i, q)
			return
		}
		c.failed += n
	default:
		c.failed += n
	}
}

// first sends the first datagram of message i separately. The others are dropped: their identifications would differ
// from Next.
func (s *sender) first(fd, i int, q *queue) {
	b := &q.batches[s.batches[i]]
	rest := *b
	b.count, b.bytes = 1, b.segment
	rest.count--
	m := &s.messages[i]
	left := b.segment
	var iovs [3]unix.Iovec // head, payload, and a tail merged with the next head
	from := unsafe.Slice(m.Iov, int(m.Iovlen))
	n := 0
	for ; left > 0 && n < len(iovs); n++ {
		iovs[n] = from[n]
		size := min(left, int(from[n].Len))
		iovs[n].SetLen(size)
		left -= size
	}
	m.Iov = &iovs[0]
	m.SetIovlen(n)
	s.control(i, b)
	_, errno := sendmmsg(fd, s.messages[i:i+1])
	m.Iov = nil
	if errno != 0 {
		s.failed(fd, i, q, errno)
		s.failedRest(&rest, errno)
		return
	}
	s.sent(b)
	q.whole = true
	s.e.count.noGSO += uint64(rest.count)
}

// failedRest drops the datagrams of a batch whose first one could not be sent separately either.
func (s *sender) failedRest(rest *batch, errno unix.Errno) {
	if errno == unix.EMSGSIZE {
		s.e.count.tooBig += uint64(rest.count)
		return
	}
	s.e.count.failed += uint64(rest.count)
}

// socket returns the socket of a source port, or -1.
func (s *sender) socket(port uint16, now time.Duration) int {
	if port == s.e.port {
		return s.receiveFD
	}
	p := s.ports[port]
	if p == nil {
		p = &sourcePort{port: port, fd: -1}
		s.ports[port] = p
	} else {
		s.unlink(p)
	}
	s.link(p)
	p.used = now
	if p.fd >= 0 || now < p.retry {
		return p.fd
	}
	for o := s.oldest; o != nil && s.open >= maxSockets; o = o.newer {
		s.shut(o)
	}
	fd := -1
	err := s.space.Do(func() (err error) {
		fd, err = s.e.family.sender(&s.e.config, port)
		return err
	})
	if err != nil {
		p.retry = now + tryAgain
		return -1
	}
	p.fd = fd
	s.open++
	s.e.count.socketsOpened++
	s.e.count.socketsUp = uint64(s.open)
	return fd
}

// shut closes a port's socket, if it has one.
func (s *sender) shut(p *sourcePort) {
	if p.fd < 0 {
		return
	}
	unix.Close(p.fd)
	p.fd = -1
	s.open--
	s.e.count.socketsUp = uint64(s.open)
}

func (s *sender) forget(p *sourcePort) {
	s.shut(p)
	s.unlink(p)
	delete(s.ports, p.port)
}

func (s *sender) link(p *sourcePort) {
	p.newer, p.old = nil, s.newest
	if s.newest != nil {
		s.newest.newer = p
	} else {
		s.oldest = p
	}
	s.newest = p
}

func (s *sender) unlink(p *sourcePort) {
	if p.newer != nil {
		p.newer.old = p.old
	} else {
		s.newest = p.old
	}
	if p.old != nil {
		p.old.newer = p.newer
	} else {
		s.oldest = p.newer
	}
}

// readDrops adds the kernel drops since the last call.
func (s *sender) readDrops() {
	now := drops(s.receiveFD)
	s.e.count.kernelDrops += uint64(now - s.lastDrops)
	s.lastDrops = now
}

func (s *sender) close() {
	s.readDrops()
	for s.oldest != nil {
		s.forget(s.oldest)
	}
	s.space.Close()
}
