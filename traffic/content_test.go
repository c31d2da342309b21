package traffic

import (
	"bytes"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// TestContentFollowsFromSeed verifies that both ends generate the same content, and that it differs by
// seed, pair and message.
func TestContentFollowsFromSeed(t *testing.T) {
	a, b, other := newContent(7, 1000), newContent(7, 1000), newContent(8, 1000)
	if !bytes.Equal(a.block, b.block) || bytes.Equal(a.block, other.block) {
		t.Fatal("blocks do not follow from seeds")
	}
	seen := map[int]int{}
	for pair := range uint32(50) {
		for m := range uint64(200) {
			s := schedule{pair: pair}
			w := a.window(s, m)
			if len(w) != 1000 || !bytes.Equal(w, b.window(s, m)) {
				t.Fatalf("pair %d, message %d differs between ends", pair, m)
			}
			seen[a.offset(s, m)]++
		}
	}
	// 10,000 of 2^20 offsets: about 48 collide by chance, three almost never.
	if len(seen) < 9800 {
		t.Errorf("10,000 messages begin at %d offsets", len(seen))
	}
}

// TestOffsetsReachEverywhere verifies that windows begin in all parts of the block, and end within it.
func TestOffsetsReachEverywhere(t *testing.T) {
	c := newContent(1, 12345)
	var parts [16]int
	for m := range uint64(16000) {
		at := c.offset(schedule{pair: 3}, m)
		if at < 0 || at+c.message > len(c.block) {
			t.Fatalf("message %d begins at %d of %d", m, at, len(c.block))
		}
		parts[at*16/offsets]++
	}
	for i, n := range parts {
		if n < 800 || n > 1200 {
			t.Errorf("%d of 16,000 messages begin in part %d of 16", n, i)
		}
	}
}

func TestWrongCountsBytes(t *testing.T) {
	c := newContent(9, 4096)
	s := schedule{pair: 1}
	r := rand.New(rand.NewPCG(1, 1))
	for m := range uint64(100) {
		got := bytes.Clone(c.window(s, m))
		if n := c.wrong(s, m, got); n != 0 {
			t.Fatalf("a message that is right has %d wrong bytes", n)
		}
		flips := map[int]bool{}
		for range 1 + r.IntN(5) {
			at := r.IntN(len(got))
			if !flips[at] {
				flips[at] = true
				got[at] ^= byte(1 << r.IntN(8))
			}
		}
		if n := c.wrong(s, m, got); n != uint64(len(flips)) {
			t.Errorf("%d bytes changed, %d wrong", len(flips), n)
		}
	}
	if n := c.wrong(s, 0, c.window(s, 0)[:4000]); n != 96 {
		t.Errorf("96 bytes missing, %d wrong", n)
	}
	if n := c.wrong(s, 0, c.window(s, 1)); n < 4000 {
		t.Errorf("another message has only %d wrong bytes", n)
	}
	if n := c.wrong(schedule{pair: 2}, 0, c.window(s, 0)); n < 4000 {
		t.Errorf("another pair's message has only %d wrong bytes", n)
	}
}

// TestStreamCRC verifies that the CRC computed from CRCs of the block equals the CRC of the stream's
// bytes.
func TestStreamCRC(t *testing.T) {
	for _, size := range []int{1, 7, 8, 63, 64, 65, 3001, 65536, 1<<20 + 3} {
		c := newContent(uint64(size), size)
		want, got := uint32(0), uint32(0)
		for m := range uint64(40) {
			s := schedule{pair: uint32(m % 3)}
			want = crc32.Update(want, castagnoli, c.window(s, m))
			if got = c.crcs.add(got, c.offset(s, m)); got != want {
				t.Fatalf("messages of %d bytes: %08x after %d, want %08x", size, got, m+1, want)
			}
		}
		for _, at := range []int{0, offsets - 1} {
			if got, want := c.crcs.add(0, at), crc32.Checksum(c.block[at:at+size], castagnoli); got != want {
				t.Errorf("%d bytes at %d: %08x, want %08x", size, at, got, want)
			}
		}
	}
}

func BenchmarkVerify(b *testing.B) {
	c := newContent(1, 64<<10)
	s := schedule{pair: 1}
	got := bytes.Clone(c.window(s, 5))
	b.SetBytes(int64(len(got)))
	crc := uint32(0)
	for b.Loop() {
		if c.wrong(s, 5, got) != 0 {
			b.Fatal("wrong")
		}
		crc = c.crcs.add(crc, c.offset(s, 5))
	}
}
