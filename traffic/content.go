package traffic

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
)

// offsets is the number of windows in a block: a message begins at one of the first offsets bytes.
const offsets = 1 << 20

// content generates messages.
type content struct {
	seed    uint64
	message int // size of a message in bytes
	block   []byte
	crcs    *crcs
}

// newContent generates the block of a seed, for messages of the given size.
func newContent(seed uint64, message int) *content {
	c := &content{seed: seed, message: message, block: make([]byte, blockSize(message))}
	r := rand.NewPCG(seed, 0x66617265) // an arbitrary constant, the same at both ends
	for i := 0; i+8 <= len(c.block); i += 8 {
		binary.LittleEndian.PutUint64(c.block[i:], r.Uint64())
	}
	c.crcs = newCRCs(c.block, message)
	return c
}

// blockSize returns the size of a block in bytes, a multiple of 8.
func blockSize(message int) int { return (offsets + message + 7) &^ 7 }

// offset returns the start of a pair's message in the block.
func (c *content) offset(of schedule, m uint64) int {
	stream, m := of.stream(m)
	return int(mix(mix(c.seed^stream<<24)+m) % offsets)
}

// window returns a pair's message.
func (c *content) window(of schedule, m uint64) []byte {
	at := c.offset(of, m)
	return c.block[at : at+c.message : at+c.message]
}

// wrong returns the number of bytes in which got differs from a pair's message; missing and surplus bytes count.
func (c *content) wrong(of schedule, m uint64, got []byte) (n uint64) {
	want := c.window(of, m)
	if bytes.Equal(got, want) {
		return 0
	}
	both := min(len(got), len(want))
	for i := range both {
		if got[i] != want[i] {
			n++
		}
	}
	return n + uint64(max(len(got), len(want))-both)
}

// mix is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators"): every
// bit of x affects every bit of the result.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
