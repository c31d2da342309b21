package mailbox

import (
	"errors"
	"hash/crc32"
	"sync"
)

const (
	// MaxFrame is the greatest length of a frame in bytes.
	MaxFrame = 64<<10 + lineSize
	// Beats is the number of calls of Beat after which a peer whose heartbeat stands still is dead. Counting the local
	// beats instead of time keeps peers alive for an end that was paused.
	Beats = 10

	halfSize  = 1 << 20
	ringAt    = 4096
	ringLines = (halfSize - ringAt) / lineSize
)

// The reasons for which an end has no session.
var (
	errNoPeer   = errors.New("no peer answers")
	errSilent   = errors.New("the heartbeat of the peer stands still")
	errStuck    = errors.New("the peer reads no frames")
	errConflict = errors.New("another writer changes the line of this end: does the other end have the same number? Is the device enabled?")
)

// memory is the common memory as one machine sees it through its cache.
type memory interface {
	store(at int, b []byte)
	load(at int, b []byte)
	// writeBack writes the n lines from at on back from the cache. They are in the common memory when it returns,
	// before anything that this machine stores later.
	writeBack(at, n int)
	// invalidate drops n lines from the cache. Later loads have what is in the common memory when invalidate is called,
	// or what is there later.
	invalidate(at, n int)
}

// End is one end of a mailbox. Send may be called at any time. Receive, Beat and Leave belong to one goroutine.
type End struct {
	mem         memory
	mine, peers int    // offsets of the halves
	lines       uint64 // of a ring
	newRun      func() uint64

	mu        sync.Mutex // for changes of run, peer and up, and for head and tail
	run, peer uint64     // the session; peer is 0 without one
	up        bool       // the peer reads the session's frames
	head      uint64     // lines that the session has sent
	tail      uint64     // lines of these that the peer has read

	read uint64 // lines that the session has received
	in   [MaxFrame]byte
	torn uint64

	published line // the state line, as it must be
	beat      uint64
	seen      uint64 // heartbeat of the peer
	silent    int    // beats since it has changed
	tailSeen  uint64
	stuck     int // beats since frames wait and tail has not changed
}

func newEnd(mem memory, number int, half int, lines uint64, newRun func() uint64) *End {
	return &End{mem: mem, mine: number * half, peers: (1 - number) * half, lines: lines, newRun: newRun, run: newRun()}
}

// Send sends a frame. It reports whether the frame was sent, and whether a later attempt may succeed if it was not:
// false without a peer, or if b has not 1 to MaxFrame bytes; true if the ring is full.
func (e *End) Send(b []byte) (sent, up bool) {
	n := linesOf(len(b))
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.up || len(b) < 1 || len(b) > MaxFrame {
		return false, false
	}
	if e.head+n-e.tail > e.lines {
		if s, ok := e.peerState(); ok {
			e.advance(s)
		}
		if e.head+n-e.tail > e.lines {
			return false, true
		}
	}
	h := header{from: e.run, to: e.peer, position: e.head, length: uint32(len(b)), sum: crc32.Checksum(b, castagnoli)}.line()
	e.put(e.head+1, b)
	e.put(e.head, h[:])
	e.head += n
	return true, true
}

// put stores b in this end's ring from a position on, and writes its lines back.
func (e *End) put(position uint64, b []byte) {
	e.parts(e.mine, position, b, func(at int, b []byte) {
		e.mem.store(at, b)
		e.mem.writeBack(at, lineCount(b))
	})
}

// get loads b from the peer's ring from a position on, as it is in the common memory.
func (e *End) get(position uint64, b []byte) {
	e.parts(e.peers, position, b, func(at int, b []byte) {
		e.mem.invalidate(at, lineCount(b))
		e.mem.load(at, b)
	})
}

// parts calls f for the one or two parts of b at a position of the ring in a half.
func (e *End) parts(half int, position uint64, b []byte, f func(at int, b []byte)) {
	i := position % e.lines
	first := min(len(b), int(e.lines-i)*lineSize)
	f(half+ringAt+int(i)*lineSize, b[:first])
	if first < len(b) {
		f(half+ringAt, b[first:])
	}
}

func lineCount(b []byte) int { return (len(b) + lineSize - 1) / lineSize }

// advance takes the number of lines that the peer has read. e.mu is held.
func (e *End) advance(s state) {
	if s.run == e.peer && s.peer == e.run && s.read-e.tail <= e.head-e.tail {
		e.tail = s.read
	}
}

// Receive calls deliver with the frames that have arrived, up to a quarter of the ring, and returns their number. They
// are valid until deliver returns.
func (e *End) Receive(deliver func([]byte)) (n int) {
	for end := e.read + e.lines/4; e.read <= end; n++ {
		length := e.next()
		if length == 0 {
			break
		}
		e.read += linesOf(length)
		deliver(e.in[:length])
	}
	if n > 0 {
		e.publish()
	}
	return n
}

// next copies the next frame to e.in and returns its length, 0 without one.
func (e *End) next() int {
	var l line
	e.get(e.read, l[:])
	h, ok := parseHeader(&l)
	if !ok || e.peer == 0 || h.from != e.peer || h.to != e.run || h.position != e.read || linesOf(int(h.length)) > e.lines {
		return 0
	}
	b := e.in[:h.length]
	e.get(e.read+1, b)
	if crc32.Checksum(b, castagnoli) != h.sum {
		e.torn++
		return 0
	}
	return len(b)
}

// Torn returns the number of times that a frame had a valid header and wrong data. It stays 0 unless flushes have no
// effect on the memory, a writer breaks the protocol, or this end was paused in the middle of a frame for so long that
// its peer has begun another session.
func (e *End) Torn() uint64 { return e.torn }

// Beat publishes a heartbeat, looks for the peer's, and begins a new session if one of the ends has restarted. It
// returns nil while the peer receives, or the reason for which it does not. It must be called at equal intervals.
func (e *End) Beat() error {
	conflict := e.beat > 0 && e.conflict()
	s, ok := e.peerState()
	e.mu.Lock()
	switch {
	case ok && s.run != e.peer:
		e.enter(e.run, s.run)
		e.seen, e.silent = s.beat, 0
	case ok && s.beat != e.seen:
		e.seen, e.silent = s.beat, 0
	case e.silent < Beats:
		e.silent++
	}
	if ok {
		e.advance(s)
	}
	if e.head == e.tail || e.tail != e.tailSeen {
		e.stuck = 0
	} else {
		e.stuck++
	}
	e.tailSeen = e.tail
	var why error
	switch {
	case conflict:
		why = errConflict
	case e.peer == 0, e.silent == Beats && !e.up, ok && s.peer != e.run, !ok && !e.up:
		why = errNoPeer
	case e.silent == Beats:
		why = errSilent
	case e.stuck == Beats:
		why = errStuck
	}
	if why != nil && e.up {
		e.enter(e.newRun(), e.peer)
	}
	e.up = why == nil
	e.mu.Unlock()
	e.beat++
	e.publish()
	return why
}

// enter begins a session. e.mu is held.
func (e *End) enter(run, peer uint64) {
	e.run, e.peer, e.up = run, peer, false
	e.head, e.tail, e.read, e.stuck = 0, 0, 0, 0
}

// Leave notifies the peer that this end has stopped. Nothing else may be called afterwards.
func (e *End) Leave() {
	e.mu.Lock()
	e.enter(0, 0)
	e.mu.Unlock()
	e.publish()
}

// publish writes the state line.
func (e *End) publish() {
	e.published = state{run: e.run, peer: e.peer, beat: e.beat, read: e.read}.line()
	e.mem.store(e.mine, e.published[:])
	e.mem.writeBack(e.mine, 1)
}

// conflict reports whether the state line is not what this end has published.
func (e *End) conflict() bool { return e.lineAt(e.mine) != e.published }

func (e *End) peerState() (state, bool) {
	l := e.lineAt(e.peers)
	return parseState(&l)
}

// lineAt returns a line as it is in the common memory.
func (e *End) lineAt(at int) (l line) {
	e.mem.invalidate(at, 1)
	e.mem.load(at, l[:])
	return l
}
