package rdmatest

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// gapBytes are the contents of gaps, junk those of buffers before an answer arrives.
var (
	gapBytes = bytes.Repeat([]byte{gapByte}, gap)
	junk     = bytes.Repeat([]byte{junkByte}, 4096)
)

// make makes the next operation of an end.
func (e *end) make(kind rdma.OpKind, n int) *task {
	m := e.m
	t := e.newTask()
	r := &m.remote[1-e.side]
	m.nextID++
	*t = task{id: m.nextID, end: e, buf: t.buf, body: t.body, slot: t.slot, word: -1, cell: -1}
	atomically := kind == rdma.OpCompareSwap || kind == rdma.OpFetchAdd
	if atomically {
		n = 8
	}
	t.op = rdma.Op{Kind: kind, Key: r.areasKey}
	if need := n + gap; cap(t.buf) < need {
		t.buf = make([]byte, need)
	}
	t.buf = t.buf[:n+gap]
	t.op.Local = t.buf[:n:n]
	if kind == rdma.OpSend || kind == rdma.OpWrite {
		copy(t.op.Local, m.contents(t.id))
		e.bytes += uint64(n)
	} else {
		e.read += uint64(n)
		for rest := t.op.Local; len(rest) > 0; {
			rest = rest[copy(rest, junk):]
		}
	}
	copy(t.buf[n:], gapBytes)
	if kind == rdma.OpSend {
		e.sends++
		t.op.Key = 0
		t.head = [rdma.MaxHead]byte{}
		binary.BigEndian.PutUint64(t.head[:], t.id)
		binary.BigEndian.PutUint32(t.head[8:], uint32(n))
		binary.BigEndian.PutUint32(t.head[12:], uint32(e.index))
		t.op.Head = t.head[:m.o.Head]
		return t
	}
	if kind == rdma.OpFetchAdd && m.rng.IntN(2) == 0 {
		t.word = m.rng.IntN(words)
		t.op.Key, t.op.Remote, t.op.Swap = r.wordsKey, r.words+8*uint64(t.word), 1+m.rng.Uint64N(1000)
		return t
	}
	t.at = e.place(t, n)
	if atomically {
		t.at &^= 7
		t.op.Swap = m.rng.Uint64()
		t.op.Compare = binary.NativeEndian.Uint64(e.shadow[t.at:]) // correct, unless an operation in between changes the word
		if m.rng.IntN(4) == 0 {
			t.op.Compare++
		}
	}
	t.op.Remote = r.areas + uint64(e.begin+t.at)
	return t
}

// contents returns bytes of which the SEND or WRITE with an id carries a prefix.
func (m *model) contents(id uint64) []byte { return m.pattern[id*7919%(1<<20):] }

// place chooses the offset of an operation in the area: in a free cell if operations are apart, otherwise anywhere.
func (e *end) place(t *task, n int) int {
	rng, room := e.m.rng, max(n, 8)
	if !e.apart {
		size := len(e.shadow) / max(1, e.parts) &^ 7
		t.part = rng.IntN(max(1, e.parts))
		return t.part*size + rng.IntN(size-room+1)
	}
	t.cell = rng.IntN(len(e.users))
	if e.want > 0 {
		t.cell = e.want - 1
		e.users[t.cell]++
		return t.cell*e.cell + rng.IntN(e.cell-room+1)
	}
	for e.users[t.cell] > 0 {
		t.cell = (t.cell + 1) % len(e.users) // there are more cells than operations in flight
	}
	e.users[t.cell]++
	return t.cell*e.cell + rng.IntN(e.cell-room+1)
}

// newTask reuses the oldest spare task, so that a transport that still reads a task after its completion reads unused
// memory.
func (e *end) newTask() *task {
	if len(e.spare) <= e.idle {
		return &task{}
	}
	t := e.spare[0]
	e.spare = slices.Delete(e.spare, 0, 1)
	return t
}

// rest puts a completed task on the spare list.
func (e *end) rest(t *task) {
	if t.cell >= 0 {
		e.users[t.cell]--
	}
	t.op.Local = nil
	e.spare = append(e.spare, t)
}

// admit implements Hooks.Admit: the first packet of a message from the peer's end has arrived.
func (m *model) admit(ch rdma.Channel, head []byte, n int) ([]byte, rdma.Verdict) {
	t := m.incoming(ch, head, "Admit")
	if t == nil {
		return nil, rdma.Refused
	}
	if m.lenient && (t.delivered || n >= 0 && n != len(t.op.Local)) {
		return nil, rdma.Refused
	}
	if t.delivered {
		m.blame("%v is admitted again after it was delivered", t)
		return nil, rdma.Refused
	}
	if n >= 0 && n != len(t.op.Local) {
		m.blame("%v is admitted with a length of %d", t, n)
		return nil, rdma.Refused
	}
	if m.o.NotReady > 0 && m.rng.Float64() < m.o.NotReady || m.refuse != nil && m.refuse() {
		e := m.of[ch]
		m.after(time.Duration(m.rng.IntN(int(2*time.Millisecond))), func() {
			if !e.closed {
				e.ch.Ready()
			}
		})
		return nil, rdma.NotReady
	}
	if size := len(t.op.Local); cap(t.body) < size {
		t.body = make([]byte, size)
	} else {
		t.body = t.body[:size]
	}
	return t.body, rdma.Accepted
}

// incoming returns the operation that a head belongs to.
func (m *model) incoming(ch rdma.Channel, head []byte, where string) *task {
	e := m.of[ch]
	if m.lenient && len(head) != m.o.Head {
		return nil
	}
	if e == nil || len(head) != m.o.Head {
		m.blame("%s: a head of %d bytes of an unknown channel or of the wrong length", where, len(head))
		return nil
	}
	from := m.ends[1-e.side][e.index]
	id := binary.BigEndian.Uint64(head)
	for _, t := range from.pending {
		if t.id == id {
			if !bytes.Equal(head, t.op.Head) && !m.lenient {
				m.blame("%s: the head of %v is %x", where, t, head)
			}
			return t
		}
	}
	if !m.lenient {
		m.blame("%s: a SEND with id %d, which is not outstanding on %v", where, id, from)
	}
	return nil
}

// deliver implements Hooks.Deliver.
func (m *model) deliver(ch rdma.Channel, head, body []byte) {
	t := m.incoming(ch, head, "Deliver")
	if t == nil || m.lenient {
		return
	}
	e := t.end
	if !bytes.Equal(body, t.op.Local) {
		m.blame("%v is delivered with different contents", t)
	}
	t.delivered = true
	if !e.ordered {
		return
	}
	last := -1 // the latest WRITE that was posted before it
	for i, before := range e.pending {
		if before == t {
			break
		}
		if before.op.Kind == rdma.OpSend && !before.delivered {
			m.blame("%v is delivered before %v, which was posted first", t, before)
		}
		if before.op.Kind == rdma.OpWrite {
			last = i
		}
	}
	if last >= 0 {
		write := e.pending[last]
		if off := e.differs(write.at, write.op.Local, e.pending[last+1:]); off >= 0 {
			m.blame("%v is delivered before byte %d of %v is in memory, which was posted first", t, off, write)
		}
	}
}

// differs compares the area at an offset with the expected bytes. It returns the index of the first byte that is
// neither as expected nor explained by an operation in maybe, which may have been executed already; -1 if there is
// none.
func (e *end) differs(at int, want []byte, maybe []*task) int {
	got := e.peer()[at:][:len(want)]
	if bytes.Equal(got, want) {
		return -1
	}
	for i := range want {
		if got[i] != want[i] && !explained(at+i, got[i], maybe) {
			return i
		}
	}
	return -1
}

// explained reports whether one of the operations may have written b to the byte of the area.
func explained(at int, b byte, maybe []*task) bool {
	for _, t := range maybe {
		if t.word >= 0 || at < t.at || at >= t.at+len(t.op.Local) {
			continue
		}
		switch t.op.Kind {
		case rdma.OpWrite:
			if t.op.Local[at-t.at] == b {
				return true
			}
		case rdma.OpCompareSwap, rdma.OpFetchAdd:
			return true // its result is not known yet
		}
	}
	return false
}

// complete implements Hooks.Complete.
func (m *model) complete(op *rdma.Op, err error) {
	t := m.tasks[op]
	if t == nil {
		m.blame("an unknown operation has completed")
		return
	}
	delete(m.tasks, op)
	e := t.end
	i := slices.Index(e.pending, t)
	m.done++
	if !m.lenient && !e.closed {
		if err != nil {
			m.blame("%v: %v", t, err)
		}
		if e.ordered && i != 0 {
			m.blame("%v completes before %v, which was posted first", t, e.pending[0])
		}
		if m.err == nil {
			e.check(t, e.pending[i+1:])
		}
	}
	m.checkGap(t)
	e.pending = slices.Delete(e.pending, i, i+1)
	e.rest(t)
	e.pumpLater()
}

// checkGap checks that the gap behind Local is unchanged.
func (m *model) checkGap(t *task) {
	if bytes.Equal(t.buf[len(t.op.Local):], gapBytes) {
		return
	}
	for k, b := range t.buf[len(t.op.Local):] {
		if b != gapByte {
			m.blame("%v: byte %d behind its Local has been written", t, k)
			return
		}
	}
}

// returned implements Hooks.Return: the operation is posted again when the channel has room.
func (m *model) returned(op *rdma.Op) {
	t := m.tasks[op]
	if t.delivered {
		m.blame("%v is given back, but was delivered", t)
	}
	e := t.end
	e.pending = slices.DeleteFunc(e.pending, func(o *task) bool { return o == t })
	e.back = append(e.back, t)
	slices.SortFunc(e.back, func(a, b *task) int { return cmp.Compare(a.id, b.id) })
	delete(m.tasks, op)
	e.pumpLater()
}

// check checks a completed operation. later are operations posted after it that may have been executed.
func (e *end) check(t *task, later []*task) {
	m, local := e.m, t.op.Local
	switch t.op.Kind {
	case rdma.OpSend:
		if !t.delivered {
			m.blame("%v completes and has not been delivered", t)
		}
	case rdma.OpWrite:
		copy(e.shadow[t.at:], local)
		if off := e.differs(t.at, local, later); off >= 0 {
			m.blame("%v completes, but byte %d is not in memory", t, off)
		}
	case rdma.OpRead:
		if bytes.Equal(local, e.shadow[t.at:][:len(local)]) {
			return
		}
		// A duplicate of a READ is executed again, and may return the results of operations in later.
		for i, b := range local {
			if b != e.shadow[t.at+i] && !explained(t.at+i, b, later) {
				m.blame("%v completes, but byte %d is not what memory was", t, i)
				break
			}
		}
	default:
		e.checkAtomic(t, later)
	}
}

func (e *end) checkAtomic(t *task, later []*task) {
	m := e.m
	was := binary.NativeEndian.Uint64(t.op.Local)
	if t.word >= 0 {
		// All channels add to this word: each of its values is the previous value of exactly one addition.
		adds := m.adds[1-e.side][t.word]
		if _, ok := adds[was]; ok {
			m.blame("%v: %d was seen twice", t, was)
		}
		adds[was] = t.op.Swap
		if now := binary.NativeEndian.Uint64(m.words[1-e.side][8*t.word:]); now < was+t.op.Swap {
			m.blame("%v completes: %d was %d, and is %d", t, t.word, was, now)
		}
		return
	}
	word := e.shadow[t.at:][:8]
	if want := binary.NativeEndian.Uint64(word); was != want {
		m.blame("%v: the word was %#x, the completion reports %#x", t, want, was)
	}
	switch {
	case t.op.Kind == rdma.OpFetchAdd:
		binary.NativeEndian.PutUint64(word, was+t.op.Swap)
	case was == t.op.Compare:
		binary.NativeEndian.PutUint64(word, t.op.Swap)
	}
	if off := e.differs(t.at, word, later); off >= 0 {
		m.blame("%v completes, but byte %d is not in memory", t, off)
	}
}

// compare compares all memory with its expected contents. No operation is outstanding.
func (m *model) compare() error {
	for side := range m.hosts {
		want := bytes.Repeat([]byte{gapByte}, len(m.memory[side]))
		for _, e := range m.ends[1-side] {
			copy(want[e.begin:], e.shadow)
		}
		same := bytes.Equal(want, m.memory[side])
		for i := 0; i < len(want) && !same; i++ {
			if want[i] != m.memory[side][i] {
				return fmt.Errorf("memory of host %d: byte %d is %#x, want %#x", side, i, m.memory[side][i], want[i])
			}
		}
		for w, adds := range m.adds[side] {
			sum := uint64(0)
			for range len(adds) {
				add, ok := adds[sum]
				if !ok {
					return fmt.Errorf("word %d of host %d: no operation returned %d", w, side, sum)
				}
				sum += add
			}
			if got := binary.NativeEndian.Uint64(m.words[side][8*w:]); got != sum {
				return fmt.Errorf("word %d of host %d is %d, want %d", w, side, got, sum)
			}
		}
	}
	return nil
}
