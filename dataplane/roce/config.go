package roce

import (
	"fmt"
	"math/rand/v2"

	"github.com/fared/fared/dataplane/rdma"
)

// DefaultPort is RoCEv2's UDP destination port (IANA).
const DefaultPort = 4791

// maxRead is the longest READ that a responder executes, and so the longest operation: bytes. A request of one packet makes it send
// as much.
const maxRead = 1 << 20

// Config says how a transport works. The zero value of each field means its default.
type Config struct {
	// Port is the UDP port that packets go to, ours and the peers': 4791.
	Port uint16
	// MTU is the path MTU: payload bytes of a packet: 256, 512, 1024 (the default), 2048 or 4096. A queue pair takes the lower of both
	// ends'. IP packets are up to 84 bytes longer, in IPv6.
	MTU int
	// MaxOp is rdma.Limits.MaxOp: 64 KiB, at most 1 MiB.
	MaxOp int
	// Window bounds the bytes of a queue pair's operations between Post and completion, READs' included: 512 KiB, at least MaxOp.
	// When nothing is outstanding any operation is taken.
	Window int
	// Depth bounds their number: 256, at most 65,536; rounded up to a power of two.
	Depth int
	// MaxReadAtomic is how many READs and atomics a queue pair has outstanding, and how many results of atomics it keeps for its
	// peer to ask again: 16, at most 128. A queue pair takes the lower of both ends'.
	MaxReadAtomic int
	// HeadSize is how long rdma.Op.Head of every SEND is: rdma.HeadSize bytes, at most rdma.MaxHead. Both ends must agree: nothing in a
	// packet says where the head ends.
	HeadSize int
	// AnyID accepts packets over IPv4 whatever their identification, as NICs send them. A socket does not show it, so it is taken
	// from the difference of the ICRCs. This costs the ICRC half of its strength: 1 in 2^16 corrupted packets passes (then the UDP
	// checksum is left, where the peer sets it), instead of 1 in 2^25 with identifications 0 to 127, which sockets' packets have.
	// IPv6 is checked in full.
	AnyID  bool
	Timing rdma.Timing
	// Random gives 32 random bits, for queue pair numbers and first PSNs: math/rand/v2's Uint32.
	Random func() uint32
}

// withDefaults fills in defaults. It panics on values out of range: they are the program's, not a user's.
func (c Config) withDefaults() Config {
	set := func(v *int, to int) {
		if *v == 0 {
			*v = to
		}
	}
	if c.Port == 0 {
		c.Port = DefaultPort
	}
	set(&c.MTU, 1024)
	set(&c.MaxOp, 64<<10)
	set(&c.Window, 512<<10)
	set(&c.Depth, 256)
	set(&c.MaxReadAtomic, 16)
	set(&c.HeadSize, rdma.HeadSize)
	c.Timing = c.Timing.WithDefaults()
	if c.Random == nil {
		c.Random = rand.Uint32
	}
	switch {
	case !validMTU(c.MTU):
		panic(fmt.Sprintf("roce: MTU %d", c.MTU))
	case c.MaxOp < 1 || c.MaxOp > maxRead || c.Window < c.MaxOp || c.Window > 64<<20:
		panic(fmt.Sprintf("roce: MaxOp %d, window %d", c.MaxOp, c.Window))
	case c.Depth < 1 || c.Depth > 1<<16 || c.MaxReadAtomic < 1 || c.MaxReadAtomic > 128:
		panic(fmt.Sprintf("roce: depth %d, READs and atomics %d", c.Depth, c.MaxReadAtomic))
	case c.HeadSize < 1 || c.HeadSize > rdma.MaxHead:
		panic(fmt.Sprintf("roce: heads of %d bytes", c.HeadSize))
	}
	depth := 1
	for depth < c.Depth {
		depth *= 2
	}
	c.Depth = depth
	return c
}

func validMTU(n int) bool {
	return n == 256 || n == 512 || n == 1024 || n == 2048 || n == 4096
}
