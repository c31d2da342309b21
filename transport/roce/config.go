package roce

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/fared/fared/transport/rdma"
)

// DefaultPort is RoCEv2's UDP destination port (IANA).
const DefaultPort = 4791

// maxRead is the longest READ that a responder executes, and so the longest operation, in bytes. It limits the data
// sent in answer to a single request packet.
const maxRead = 1 << 20

// Config is the configuration of a transport. A zero field means its default.
type Config struct {
	// Port is the UDP destination port at both ends: 4791 by default.
	Port uint16
	// MTU limits the path MTU, the maximum payload of a packet in bytes: 256, 512, 1024, 2048 or 4096; 0 means 4096. A
	// queue pair uses the highest of these values that the route to its peer carries, and at most the peer's. Where the
	// carrier of datagrams does not report its routes, 0 means 1024. IP packets are up to 84 bytes longer, with IPv6.
	MTU int
	// MaxOp is rdma.Limits.MaxOp in bytes: 64 KiB by default, at most 1 MiB.
	MaxOp int
	// Window limits the total bytes of a queue pair's operations between Post and completion, including those of READs:
	// 512 KiB by default, at least MaxOp. A queue pair without outstanding operations accepts any operation.
	Window int
	// Depth limits the number of these operations: 256 by default, at most 65,536; rounded up to a power of two.
	Depth int
	// MaxReadAtomic limits the outstanding READ requests and atomics of a queue pair, and the results of atomics that
	// it keeps for repeated requests of its peer: 16 by default, at most 128. A queue pair uses the lower value of both
	// ends.
	MaxReadAtomic int
	// HeadSize is the length of rdma.Op.Head of every SEND, except on plain channels: rdma.HeadSize bytes by default,
	// at most rdma.MaxHead. Both ends must agree, since packets do not contain it.
	HeadSize int
	Timing   rdma.Timing
	// Random returns 32 random bits, for queue pair numbers and first PSNs; nil means math/rand/v2's Uint32.
	Random func() uint32
}

// withDefaults returns c with defaults in place of zero fields. It panics on values out of range: they come from the
// program, not from a user.
func (c Config) withDefaults() Config {
	set := func(v *int, to int) {
		if *v == 0 {
			*v = to
		}
	}
	if c.Port == 0 {
		c.Port = DefaultPort
	}
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
	case c.MTU != 0 && !validMTU(c.MTU):
		panic(fmt.Sprintf("roce: invalid MTU %d", c.MTU))
	case c.MaxOp < 1 || c.MaxOp > maxRead || c.Window < c.MaxOp || c.Window > 64<<20:
		panic(fmt.Sprintf("roce: invalid MaxOp %d or window %d", c.MaxOp, c.Window))
	case c.Depth < 1 || c.Depth > 1<<16 || c.MaxReadAtomic < 1 || c.MaxReadAtomic > 128:
		panic(fmt.Sprintf("roce: invalid depth %d or number of READs and atomics %d", c.Depth, c.MaxReadAtomic))
	case c.HeadSize < 1 || c.HeadSize > rdma.MaxHead:
		panic(fmt.Sprintf("roce: invalid head length %d", c.HeadSize))
	}
	depth := 1
	for depth < c.Depth {
		depth *= 2
	}
	c.Depth = depth
	return c
}

// mtus are the path MTUs of InfiniBand, in bytes.
var mtus = []int{4096, 2048, 1024, 512, 256}

func validMTU(n int) bool { return slices.Contains(mtus, n) }
