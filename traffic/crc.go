package traffic

import "hash/crc32"

// CRCs of a stream are made from CRCs of its messages, and those from CRCs of the block's beginnings, so that nobody reads bytes for a
// hash that have been compared already. The CRC is linear (zlib's crc32_combine rests on the same): the CRC of A followed by B is that
// of A, shifted by B's length, added to that of B; and addition is exclusive or.

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crcs knows the CRC32C of every window of a block.
type crcs struct {
	block  []byte
	length int            // of a window
	starts []uint32       // CRCs of the block's first stride*i bytes
	shift  [4][256]uint32 // what a CRC becomes when length zeros follow, by its four bytes
}

// stride is how far apart starts are: bytes. What lies between is taken from the block itself.
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

// start is the CRC of the block's first n bytes.
func (c *crcs) start(n int) uint32 {
	return crc32.Update(c.starts[n/stride], castagnoli, c.block[n&^(stride-1):n])
}

// after shifts a CRC by a window.
func (c *crcs) after(crc uint32) uint32 {
	return c.shift[0][byte(crc)] ^ c.shift[1][byte(crc>>8)] ^ c.shift[2][byte(crc>>16)] ^ c.shift[3][crc>>24]
}

// add is the CRC of a stream that the window at an offset has been added to.
func (c *crcs) add(crc uint32, offset int) uint32 {
	return c.after(crc^c.start(offset)) ^ c.start(offset+c.length)
}

// matrix is a linear map of 32 bits: what each bit becomes.
type matrix [32]uint32

func (m *matrix) times(v uint32) (out uint32) {
	for i := 0; v != 0; i, v = i+1, v>>1 {
		if v&1 != 0 {
			out ^= m[i]
		}
	}
	return out
}

// of is m after n.
func (m *matrix) of(n *matrix) (out matrix) {
	for i, v := range n {
		out[i] = m.times(v)
	}
	return out
}

// zeros is what n bytes of 0 make of a CRC.
func zeros(n int) (out matrix) {
	var step matrix
	for i := range out {
		out[i] = 1 << i
		// Update inverts what it is given and what it returns.
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
