package traffic

import "hash/crc32"

// The CRC of a stream is computed from the CRCs of its messages, and these from CRCs of prefixes of the block, so that
// no byte is read for a hash after it has been compared. The CRC is linear (zlib's crc32_combine uses the same
// property): the CRC of A followed by B is that of A, shifted by B's length, added to that of B; and addition is
// exclusive or.

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crcs computes the CRC32C of every window of a block.
type crcs struct {
	block  []byte
	length int            // length of a window
	starts []uint32       // CRCs of the block's first stride*i bytes
	shift  [4][256]uint32 // effect of length zero bytes on a CRC, by its four bytes
}

// stride is the distance between starts in bytes. The bytes in between are read from the block.
const stride = 64

func newCRCs(block []byte, length int) *crcs {
	c := &crcs{block: block, length: length, starts: make([]uint32, len(block)/stride+1)}
	for i := 1; i < len(c.starts); i++ {
		c.starts[i] = crc32.Update(c.starts[i-1], castagnoli, block[(i-1)*stride:i*stride])
	}
	m := zeros(length)
	for i := range c.shift {
		for v := range c.shift[i] {
			c.shift[i][v] = m.times(uint32(v) << (8 * i))
		}
	}
	return c
}

// start returns the CRC of the block's first n bytes.
func (c *crcs) start(n int) uint32 {
	return crc32.Update(c.starts[n/stride], castagnoli, c.block[n&^(stride-1):n])
}

// after shifts a CRC by a window.
func (c *crcs) after(crc uint32) uint32 {
	return c.shift[0][byte(crc)] ^ c.shift[1][byte(crc>>8)] ^ c.shift[2][byte(crc>>16)] ^ c.shift[3][crc>>24]
}

// add returns the CRC of a stream after the window at an offset is appended.
func (c *crcs) add(crc uint32, offset int) uint32 {
	return c.after(crc^c.start(offset)) ^ c.start(offset+c.length)
}

// matrix is a linear map of 32 bits: the image of each bit.
type matrix [32]uint32

func (m *matrix) times(v uint32) (out uint32) {
	for i := 0; v != 0; i, v = i+1, v>>1 {
		if v&1 != 0 {
			out ^= m[i]
		}
	}
	return out
}

// of returns the composition m after n.
func (m *matrix) of(n *matrix) (out matrix) {
	for i, v := range n {
		out[i] = m.times(v)
	}
	return out
}

// zeros returns the effect of n zero bytes on a CRC.
func zeros(n int) (out matrix) {
	var step matrix
	for i := range out {
		out[i] = 1 << i
		// Update inverts its argument and its result.
		step[i] = ^crc32.Update(^uint32(1<<i), castagnoli, []byte{0})
	}
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			out = step.of(&out)
		}
		step = step.of(&step)
	}
	return out
}
