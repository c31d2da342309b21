package rdmatest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// The keys of each host's memory regions: areas, one for each channel end of the peer, and words that all ends add to.
const (
	areaKey    = 0x5ca1ab1e
	wordsKey   = 0x00c0ffee
	areaBegin  = 0x7fed_0000_0000
	wordsBegin = 0x0000_0000_1000
	words      = 4
	// gap separates areas and surrounds Local of operations: no operation writes there.
	gap      = 64
	gapByte  = 0xa5
	junkByte = 0x5a
)

// model is two hosts with channels between them, and the expected contents of their memory. It posts operations, checks
// each completion and delivery, and compares all memory in the end.
type model struct {
	o            Options
	bed          Bed
	rng          *rand.Rand
	hosts        [2]*Host
	ends         [2][]*end
	of           map[rdma.Channel]*end
	tasks        map[*rdma.Op]*task
	memory       [2][]byte // areas of each host, which its peer's ends use
	words        [2][]byte
	adds         [2][words]map[uint64]uint64 // per word: previous value -> addend
	left         int                         // operations to post
	done         uint64                      // operations completed
	nextID       uint64
	pattern      []byte
	remote       [2]remote // addresses and keys under which peers use each host's memory
	beliefs      [2][]bool // each host's belief about which planes are up
	down         []bool    // planes that are down
	shares       []uint32
	flaps        int
	refuse       func() bool    // decides about each message whether to delay its admission; nil: random
	planeLearned func(side int) // called when a host has learned about a plane
	lenient      bool           // after a forgery: contents and errors are not checked
	err          error
}

// remote is a host's memory as seen by its peer.
type remote struct {
	areas, words       uint64
	areasKey, wordsKey uint32
}

// end is one end of a channel: its posted operations and its area in the peer's memory.
type end struct {
	m       *model
	side    int
	index   int
	ch      rdma.Channel
	ordered bool
	begin   int     // of the area in the peer's memory
	shadow  []byte  // expected contents of the area after the completed operations
	apart   bool    // operations use free cells only
	cell    int     // size of a cell in bytes, a multiple of 8
	want    int     // the cell of the next operation, plus 1; 0 means any
	users   []int   // per cell: number of operations in flight
	parts   int     // number of parts of the area, if order is kept only within a part; 0 means one part
	spare   []*task // completed tasks, for reuse by make
	idle    int     // number of tasks in spare that are not reused yet
	pending []*task
	back    []*task // returned by the channel, oldest first: posted before any new operation
	next    *task   // made, but refused by the channel
	full    bool    // the channel has refused an operation and has not called Room since
	parked  bool
	paused  bool
	closed  bool
	sent    []*atomic.Uint64 // Path.Sent per plane
	again   []*atomic.Uint64
	bytes   uint64 // bytes of SENDs and WRITEs made
	read    uint64 // bytes of READs and atomics made
	sends   uint64 // SENDs made
}

// task is an operation in flight.
type task struct {
	op   rdma.Op
	id   uint64
	end  *end
	head [rdma.MaxHead]byte
	buf  []byte // Local followed by a gap
	word int    // index of the shared word; -1: the operation works in the area
	at   int    // offset in the area
	cell int    // -1: none
	part int
	// For sets: the place of buf in the end's memory region, the posted work request, and the number of the message in
	// its direction.
	slot      int
	opcode    rdma.Opcode
	silent    bool
	message   bool
	number    uint64
	delivered bool
	body      []byte
}

// maxSize bounds Options.MaxSize.
const maxSize = 1 << 20

// pattern returns random bytes, which operations carry pieces of.
var pattern = sync.OnceValue(func() []byte {
	b := make([]byte, 1<<20+maxSize)
	rng := rand.NewPCG(1, 2)
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
	}
	return b
})

// bareModel returns a model without hosts.
func bareModel(bed Bed, o Options) *model {
	o = o.withDefaults()
	m := &model{o: o, bed: bed, rng: rand.New(rand.NewPCG(o.Seed, 0x6d6f64656c)), left: o.Ops,
		of: map[rdma.Channel]*end{}, tasks: map[*rdma.Op]*task{}}
	m.pattern = pattern()
	for i := range m.hosts {
		for w := range words {
			m.adds[i][w] = map[uint64]uint64{}
		}
		m.beliefs[i] = make([]bool, bed.Planes())
		for p := range m.beliefs[i] {
			m.beliefs[i][p] = true
		}
	}
	m.down = make([]bool, bed.Planes())
	for range bed.Planes() {
		m.shares = append(m.shares, 1+uint32(m.rng.IntN(3)))
	}
	return m
}

func newModel(bed Bed, o Options) (*model, error) {
	m := bareModel(bed, o)
	for i := range m.hosts {
		m.remote[i] = remote{areaBegin, wordsBegin, areaKey, wordsKey}
		var err error
		if m.hosts[i], err = bed.Open(i, m.hooks()); err != nil {
			return nil, err
		}
	}
	m.planeLearned = func(side int) {
		for _, e := range m.ends[side] {
			e.retarget()
		}
	}
	return m, m.connect()
}

// connect makes the channels and the memory that their ends use.
func (m *model) connect() error {
	limits := m.hosts[0].transport.Limits()
	if limits.MaxOp < 8 {
		return fmt.Errorf("Limits.MaxOp is %d", limits.MaxOp)
	}
	m.o.MaxSize = min(m.o.MaxSize, limits.MaxOp)
	ordered := m.o.Ordered || limits.Ordered
	cell := (m.o.MaxSize + 7) &^ 7
	cells := m.o.Window + 4
	if ordered && !m.o.Apart {
		cells = 3
	}
	for side, h := range m.hosts {
		size := gap
		for range m.o.Channels {
			size += cells*cell + gap
		}
		var err error
		if m.memory[side], err = h.Alloc(size); err != nil {
			return err
		}
		if m.words[side], err = h.Alloc(8 * words); err != nil {
			return err
		}
		copy(m.memory[side], bytes.Repeat([]byte{gapByte}, size))
		h.Register(areaKey, areaBegin, m.memory[side], rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead|rdma.RemoteAtomic)
		h.Register(wordsKey, wordsBegin, m.words[side], rdma.RemoteAtomic)
	}
	m.bed.Lock()
	defer m.bed.Unlock()
	for i := range m.o.Channels {
		for side, h := range m.hosts {
			ch, err := h.Channel(rdma.ChannelConfig{Remote: m.hosts[1-side].address, Ordered: m.o.Ordered})
			if err != nil {
				return err
			}
			e := &end{m: m, side: side, index: i, ch: ch, ordered: ordered, apart: !ordered || m.o.Apart,
				cell: cell, begin: gap + i*(cells*cell+gap), idle: 64}
			e.shadow = make([]byte, cells*cell)
			m.fill(e.shadow)
			copy(m.memory[1-side][e.begin:], e.shadow)
			e.users = make([]int, cells)
			for range m.bed.Planes() {
				e.sent, e.again = append(e.sent, new(atomic.Uint64)), append(e.again, new(atomic.Uint64))
			}
			m.ends[side] = append(m.ends[side], e)
			m.of[ch] = e
		}
		a, b := m.ends[0][i], m.ends[1][i]
		localA, localB := append([]byte(nil), a.ch.Local()...), append([]byte(nil), b.ch.Local()...)
		if err := a.connect(localB); err != nil {
			return err
		}
		// One end connects before the other; operations may arrive in between.
		if err := b.connect(localA); err != nil {
			return err
		}
	}
	m.settle()
	return nil
}

func (e *end) connect(remote []byte) error {
	var paths []rdma.Path
	paths, e.parked = e.choose()
	return e.ch.Connect(remote, paths)
}

// fill fills an area with random contents.
func (m *model) fill(b []byte) {
	for len(b) > 0 {
		b = b[copy(b, m.pattern[m.rng.IntN(1<<20):]):]
	}
}

// settle ends a turn of both hosts.
func (m *model) settle() {
	for _, h := range m.hosts {
		if h != nil { // runs over sets have devices instead
			h.settle()
		}
	}
}

// after calls f after d, in a separate turn.
func (m *model) after(d time.Duration, f func()) {
	m.bed.After(d, func() {
		f()
		m.settle()
	})
}

func (m *model) blame(format string, args ...any) {
	if m.err == nil {
		m.err = fmt.Errorf("at %v: "+format, append([]any{m.bed.Now()}, args...)...)
	}
}

// failure returns the first error of the model, the hosts and the bed.
func (m *model) failure() error {
	return errors.Join(m.err, m.hosts[0].Err(), m.hosts[1].Err(), m.bed.Err())
}

func (m *model) hooks() Hooks {
	return Hooks{
		Admit:    m.admit,
		Deliver:  m.deliver,
		Complete: m.complete,
		Return:   m.returned,
		Room: func(ch rdma.Channel) {
			e := m.of[ch]
			e.full = false
			e.pumpLater()
		},
		Failed: func(ch rdma.Channel, err error) {
			if e := m.of[ch]; !m.lenient && !e.closed {
				m.blame("%v has failed: %v", e, err)
			}
		},
	}
}

func (e *end) String() string { return fmt.Sprintf("channel %d of host %d", e.index, e.side) }

func (t *task) String() string {
	kind := [...]string{"SEND", "WRITE", "READ", "CAS", "FETCH-ADD"}[t.op.Kind]
	return fmt.Sprintf("%s %d (%v, %d bytes at %d)", kind, t.id, t.end, len(t.op.Local), t.at)
}

func (e *end) host() *Host { return e.m.hosts[e.side] }

// peer returns the end's area in the peer's memory.
func (e *end) peer() []byte { return e.m.memory[1-e.side][e.begin:][:len(e.shadow)] }

func (e *end) pumpLater() { e.host().Later(e.pump) }

// pump posts while operations remain and the channel accepts them.
func (e *end) pump() {
	m := e.m
	for !e.full && !e.parked && !e.paused && !e.closed && m.err == nil {
		if e.next == nil && len(e.back) > 0 {
			e.next, e.back = e.back[0], e.back[1:]
		}
		if e.next == nil {
			if m.left == 0 || len(e.pending) >= m.o.Window {
				return
			}
			if m.rng.IntN(100) == 0 { // applications pause
				e.paused = true
				m.after(time.Duration(m.rng.IntN(int(500*time.Microsecond))), func() { e.paused = false; e.pump() })
				return
			}
			m.left--
			e.next = e.make(m.o.Kinds[m.rng.IntN(len(m.o.Kinds))], m.size())
		}
		if !e.post() {
			return
		}
	}
}

// post posts the next operation.
func (e *end) post() bool {
	t := e.next
	e.pending = append(e.pending, t)
	e.m.tasks[&t.op] = t
	if e.host().Post(e.ch, &t.op) {
		e.next = nil
		return true
	}
	e.pending = e.pending[:len(e.pending)-1]
	delete(e.m.tasks, &t.op)
	e.full = true
	return false
}

// size returns a random length: mostly small, often about a packet or several packets, sometimes near the maximum.
func (m *model) size() int {
	n := 0
	switch r := m.rng.IntN(40); {
	case r == 0:
		n = m.o.MaxSize - m.rng.IntN(9)
	case r < 3:
		n = 0
	case r < 20:
		n = 1 + m.rng.IntN(64)
	case r < 35:
		n = m.rng.IntN(4096)
	default:
		n = m.rng.IntN(16384)
	}
	return max(0, min(n, m.o.MaxSize))
}
