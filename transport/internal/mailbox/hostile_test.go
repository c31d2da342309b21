package mailbox

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

// attacker writes anything to the memory while the other end works, among it frames and states that are valid.
type attacker struct {
	*common
	number int
	victim *End
	run    uint64
	forged map[string]bool // the valid frames
}

func (a *attacker) attack() {
	rng, half, e := a.rng, a.number*a.half, a.victim
	at := func(position uint64) []byte { return a.mem[half+ringAt+int(position%a.lines)*lineSize:] }
	extreme := func(v uint64) uint64 {
		return [...]uint64{v, v, v, v - 1, v + 1, 0, a.lines, ^uint64(0), rng.Uint64()}[rng.IntN(9)]
	}
	put := func(b []byte, l line) { copy(b, l[:]) }
	switch rng.IntN(12) {
	case 0: // any bytes
		b := a.mem[half+rng.IntN(a.half):][:1]
		b[0] = byte(rng.Uint32())
	case 1: // a bit of a line in use
		b := at(e.read + uint64(rng.IntN(2)))
		if rng.IntN(8) == 0 { // also of the victim
			b = a.mem[a.used[rng.IntN(len(a.used))]*lineSize:]
		}
		b[rng.IntN(lineSize)] ^= 1 << rng.IntN(8)
	case 2: // a state with any fields
		put(a.mem[half:], state{extreme(a.run), extreme(e.run), rng.Uint64(), extreme(e.head)}.line())
	case 3, 4, 5, 6: // the right state
		put(a.mem[half:], state{a.run, e.run, rng.Uint64(), e.head}.line())
	case 7: // a header with any fields
		put(at(e.read), header{extreme(e.peer), extreme(e.run), extreme(e.read), uint32(extreme(64)), rng.Uint32()}.line())
	default: // a valid frame, which may be damaged afterwards
		b := make([]byte, 1+rng.IntN(3*lineSize))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		a.forged[string(b)] = true
		for i := 0; i < len(b); i += lineSize {
			copy(at(e.read + 1 + uint64(i/lineSize))[:lineSize], b[i:min(len(b), i+lineSize)])
		}
		put(at(e.read), header{e.peer, e.run, e.read, uint32(len(b)), crc32.Checksum(b, castagnoli)}.line())
	}
}

// TestHostileLines has a peer that writes anything at any time. The end receives only frames whose CRC is right, and
// works with an honest peer afterwards.
func TestHostileLines(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	arrived, sentFrames := 0, 0
	for seed := range seeds(t, gate.Count(t, gate.Models, 10, 200)) {
		c := newCommon(seed, 12+seed%30, fault{})
		number := c.rng.IntN(2)
		e := c.newEnd(0, number)
		a := &attacker{common: c, number: 1 - number, victim: e, run: c.rng.Uint64() | 1, forged: map[string]bool{}}
		c.machines[0].pause = func() {
			c.wander()
			if c.rng.IntN(3) == 0 {
				a.attack()
			}
		}
		for range 3000 {
			switch c.rng.IntN(8) {
			case 0:
				_ = e.Beat()
			case 1, 2:
				if ok, _ := e.Send(frame(c.rng, number, 0, 200)); ok {
					sentFrames++
				}
			default:
				a.attack()
				e.Receive(func(b []byte) {
					arrived++
					if !a.forged[string(b)] || e.peer == 0 {
						t.Fatalf("seed %d: a frame of %d bytes has arrived that is not valid", seed, len(b))
					}
				})
			}
			if e.head-e.tail > c.lines {
				t.Fatalf("seed %d: head %d, tail %d of %d lines", seed, e.head, e.tail, c.lines)
			}
		}
		if c.broken != nil {
			t.Fatalf("seed %d: %v", seed, c.broken)
		}
		c.machines[0].pause = c.wander
		honest := c.newEnd(1, 1-number)
		for beats, up := 0, false; !up; beats++ {
			why, whyNot := e.Beat(), honest.Beat()
			if up = why == nil && whyNot == nil; !up && beats > 3*Beats {
				t.Fatalf("seed %d: no session with an honest peer: %v, %v", seed, why, whyNot)
			}
		}
		for _, way := range [][2]*End{{e, honest}, {honest, e}} {
			want := frame(c.rng, 0, 0, 200)
			way[0].Send(want)
			var got []byte
			if way[1].Receive(func(b []byte) { got = bytes.Clone(b) }) != 1 || !bytes.Equal(got, want) {
				t.Fatalf("seed %d: got %x, want %x", seed, got, want)
			}
		}
	}
	t.Logf("%d frames arrived, %d sent", arrived, sentFrames)
	if arrived < 1000 || sentFrames < 1000 {
		t.Error("too few frames: this test has lost its subject")
	}
}

// plain is memory without a cache.
type plain []byte

func (p plain) store(at int, b []byte) { copy(p[at:at+len(b)], b) }
func (p plain) load(at int, b []byte)  { copy(b, p[at:at+len(b)]) }
func (plain) writeBack(int, int)       {}
func (plain) invalidate(int, int)      {}

// FuzzLines lets the peer write any lines: the state, which is the first 64 bytes, and the ring. Bits of seals give
// lines the right CRC-32C.
func FuzzLines(f *testing.F) {
	const lines, half = 1100, ringAt + 1100*lineSize
	good := state{2, 1, 1, 0}.line()
	data := []byte("the data of a frame")
	h := header{2, 1, 0, uint32(len(data)), crc32.Checksum(data, castagnoli)}.line()
	f.Add(append(append(good[:], h[:]...), data...), uint8(0))
	h = header{2, 1, 0, MaxFrame, 0}.line()
	f.Add(append(good[:], h[:]...), uint8(3))
	h = header{2, 1, 0, 1<<32 - 1, 0}.line()
	f.Add(append(good[:], h[:]...), uint8(3))
	f.Fuzz(func(t *testing.T, b []byte, seals uint8) {
		mem := make(plain, 2*half)
		e := newEnd(mem, 0, half, lines, func() uint64 { return 1 })
		peers, ring := mem[half:], mem[half+ringAt:]
		copy(peers[:lineSize], b)
		if len(b) > lineSize {
			copy(ring, b[lineSize:])
		}
		for i, l := range [][]byte{peers, ring} {
			if seals&(1<<i) != 0 {
				binary.LittleEndian.PutUint32(l[60:], crc32.Checksum(l[:60], castagnoli))
			}
		}
		before := bytes.Clone(peers)
		_ = e.Beat()
		_ = e.Beat()
		e.Receive(func(b []byte) {
			length, sum := binary.LittleEndian.Uint32(ring[32:]), binary.LittleEndian.Uint32(ring[36:])
			if e.read != linesOf(int(length)) {
				return // a later frame
			}
			if uint32(len(b)) != length || crc32.Checksum(b, castagnoli) != sum || crc32.Checksum(ring[:60], castagnoli) != binary.LittleEndian.Uint32(ring[60:]) {
				t.Errorf("a frame of %d bytes with a wrong sum", len(b))
			}
		})
		e.Send(data)
		_ = e.Beat()
		if e.head-e.tail > lines {
			t.Errorf("head %d, tail %d", e.head, e.tail)
		}
		if !bytes.Equal(before, peers) {
			t.Error("the end has written to the half of its peer")
		}
		l := line(peers[:lineSize])
		if s, ok := parseState(&l); ok {
			if again, ok := parseState(new(s.line())); !ok || again != s {
				t.Errorf("the state %v became %v", s, again)
			}
		}
		l = line(ring[:lineSize])
		if h, ok := parseHeader(&l); ok {
			if again, ok := parseHeader(new(h.line())); !ok || again != h {
				t.Errorf("the header %v became %v", h, again)
			}
		}
	})
}

// TestWrongSums flips each bit of a frame and of a state: none is valid afterwards.
func TestWrongSums(t *testing.T) {
	mem := make(plain, 2*halfSize)
	a, b := newEnd(mem, 0, halfSize, ringLines, newRun), newEnd(mem, 1, halfSize, ringLines, newRun)
	for range 3 {
		_, _ = a.Beat(), b.Beat()
	}
	want := frame(rand.New(rand.NewPCG(1, 1)), 0, 0, 150)
	if sent, up := a.Send(want); !sent || !up {
		t.Fatalf("sent %v, up %v", sent, up)
	}
	for i := range 8 * (lineSize + len(want)) {
		mem[ringAt+i/8] ^= 1 << (i % 8)
		if n := b.Receive(func([]byte) {}); n != 0 {
			t.Errorf("a frame whose bit %d is wrong has arrived", i)
		}
		mem[ringAt+i/8] ^= 1 << (i % 8)
	}
	for i := range 8 * lineSize {
		l := line(mem[:lineSize])
		l[i/8] ^= 1 << (i % 8)
		if _, ok := parseState(&l); ok {
			t.Errorf("a state whose bit %d is wrong is valid", i)
		}
	}
	if b.Receive(func(got []byte) {
		if !bytes.Equal(got, want) {
			t.Errorf("got %x, want %x", got, want)
		}
	}) != 1 {
		t.Error("the frame has not arrived")
	}
}
