package mailbox

import (
	"fmt"
	"math/rand/v2"
)

// common is memory that is not coherent between two machines. Each machine works on copies of lines in its cache.
// Besides the flushes that the machines ask for, the caches write dirty lines back, drop clean ones and fetch others in
// any order at any time, or never.
type common struct {
	rng      *rand.Rand
	lines    uint64 // of a ring
	half     int
	mem      []byte
	machines [2]*machine
	used     []int // lines that ends use
	broken   error // the first store of an end outside its half
}

// cached is a line of a cache. The cache neither drops a line that it keeps nor writes it back, unless it is flushed.
type cached struct {
	present, dirty, keep bool
	b                    line
}

// machine is the memory as one machine sees it.
type machine struct {
	c      *common
	number int
	end    *End
	cache  []cached
	pause  func() // runs the rest of the world; does not return if the machine is killed
	fault  fault
	before []byte // the common memory before the last load
}

// fault is a flush of the protocol that has no effect.
type fault struct {
	site string // of the flush: see siteOf
	kind string // dropped; late: at any time later; early: before the load in front of it
}

var faults = []fault{
	{"write back data", "dropped"}, {"write back data", "late"},
	{"write back header", "dropped"}, {"write back header", "late"},
	{"write back the state", "dropped"}, {"write back the state", "late"},
	{"invalidate data", "dropped"}, {"invalidate data", "late"}, {"invalidate data", "early"},
	{"invalidate header", "dropped"}, {"invalidate header", "late"}, {"invalidate header", "early"},
	{"invalidate the peer's state", "dropped"}, {"invalidate the peer's state", "late"}, {"invalidate the peer's state", "early"},
	{"invalidate the state", "dropped"}, {"invalidate the state", "late"},
}

func newCommon(seed uint64, lines uint64, f fault) *common {
	c := &common{rng: rand.New(rand.NewPCG(seed, 1)), lines: lines, half: ringAt + int(lines)*lineSize}
	c.mem = make([]byte, 2*c.half)
	if seed%2 == 0 { // memory may have any contents
		for i := range c.mem {
			c.mem[i] = byte(c.rng.Uint32())
		}
	}
	for half := range 2 {
		for range 4 { // state lines are more interesting
			c.used = append(c.used, half*c.half/lineSize)
		}
		for i := range int(lines) {
			c.used = append(c.used, (half*c.half+ringAt)/lineSize+i)
		}
	}
	for i := range c.machines {
		c.machines[i] = &machine{c: c, number: i, cache: make([]cached, len(c.mem)/lineSize), fault: f, before: make([]byte, len(c.mem)), pause: c.wander}
	}
	return c
}

// newEnd makes an end on a machine, whose runs are unique.
func (c *common) newEnd(machine, number int) *End {
	m := c.machines[machine]
	m.number = number
	m.end = newEnd(m, number, c.half, c.lines, func() uint64 { return c.rng.Uint64() | 1 })
	return m.end
}

// wander lets the caches do something.
func (c *common) wander() {
	for range c.rng.IntN(3) {
		m := c.machines[c.rng.IntN(2)]
		at := c.used[c.rng.IntN(len(c.used))]
		switch l := &m.cache[at]; {
		case !l.present:
			m.fill(at)
		case l.keep:
		case l.dirty:
			m.clean(at)
		default:
			l.present = false
		}
	}
}

// fill fetches a line that is not in the cache.
func (m *machine) fill(at int) *cached {
	l := &m.cache[at]
	if !l.present {
		*l = cached{present: true, keep: m.c.rng.IntN(2) == 0}
		copy(l.b[:], m.c.mem[at*lineSize:])
	}
	return l
}

// clean writes a dirty line back.
func (m *machine) clean(at int) {
	if l := &m.cache[at]; l.dirty {
		copy(m.c.mem[at*lineSize:], l.b[:])
		l.dirty = false
	}
}

// loseCache is a loss of power.
func (m *machine) loseCache() { clear(m.cache) }

// words calls f for the parts of [at, at+n) within words, in an order that a compiler or processor may choose.
func (m *machine) words(at, n int, f func(from, to int)) {
	words := (at+n+7)/8 - at/8
	first := m.c.rng.IntN(words)
	for i := range words {
		w := at/8 + (first+i)%words
		if m.c.rng.IntN(4) == 0 {
			m.pause()
		}
		f(max(at, w*8), min(at+n, w*8+8))
	}
}

func (m *machine) store(at int, b []byte) {
	if at < m.number*m.c.half || at+len(b) > (m.number+1)*m.c.half {
		m.c.broken = fmt.Errorf("end %d stores %d bytes at %d, outside its half", m.number, len(b), at)
		return
	}
	m.words(at, len(b), func(from, to int) {
		l := m.fill(from / lineSize)
		if !l.dirty {
			l.dirty, l.keep = true, m.c.rng.IntN(2) == 0
		}
		copy(l.b[from%lineSize:], b[from-at:to-at])
	})
}

func (m *machine) load(at int, b []byte) {
	if m.fault.kind == "early" {
		copy(m.before, m.c.mem)
		for range m.c.rng.IntN(20) { // the load takes its time
			m.pause()
		}
	}
	m.words(at, len(b), func(from, to int) {
		copy(b[from-at:to-at], m.fill(from / lineSize).b[from%lineSize:])
	})
}

// siteOf names the place of a flush in the protocol.
func (m *machine) siteOf(what string, at int) string {
	slot := func(position uint64) int { return ringAt + int(position%m.c.lines)*lineSize }
	switch mine, peers := m.number*m.c.half, (1-m.number)*m.c.half; at {
	case mine:
		return what + " the state"
	case peers:
		return what + " the peer's state"
	case mine + slot(m.end.head), peers + slot(m.end.read):
		return what + " header"
	}
	return what + " data"
}

func (m *machine) writeBack(at, n int) {
	m.flush(at, n, m.fault.site == m.siteOf("write back", at), func(at int) {
		m.clean(at)
		if m.c.rng.IntN(2) == 0 { // CLFLUSHOPT drops the line, too
			m.cache[at].present = false
		}
	})
}

func (m *machine) invalidate(at, n int) {
	m.flush(at, n, m.fault.site == m.siteOf("invalidate", at), func(at int) {
		m.clean(at)
		m.cache[at].present = false
	})
}

func (m *machine) flush(at, n int, faulty bool, flush func(at int)) {
	for i := range n {
		at := at/lineSize + i
		if m.c.rng.IntN(4) == 0 {
			m.pause()
		}
		switch l := &m.cache[at]; {
		case !faulty:
			flush(at)
		case m.fault.kind == "late":
			l.keep = false
		case m.fault.kind == "early":
			*l = cached{present: true}
			copy(l.b[:], m.before[at*lineSize:])
		}
	}
}
