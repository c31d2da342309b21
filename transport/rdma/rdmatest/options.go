package rdmatest

import (
	"cmp"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// Options are the parameters of a model run. A zero field means its default.
type Options struct {
	// Seed is the seed of all random choices. A failed run prints it.
	Seed uint64
	// Ops is the total number of posted operations: 1,000 by default.
	Ops int
	// Channels is the number of channels between the hosts, both ends of which post: 2 by default. Window is the
	// maximum number of outstanding operations per end: 16 by default.
	Channels, Window int
	// MaxSize is the maximum length of an operation, in bytes: by default the smaller of 64 KiB and Limits.MaxOp; at
	// most 1 MiB. Most operations are far shorter; one in forty has about that length.
	MaxSize int
	// Head is the length of the head of every SEND, in bytes: 20 by default, 20 to rdma.MaxHead.
	Head int
	// Ordered requests channels that execute in order, and checks that they do. The check also applies to channels of
	// transports that always keep the order.
	Ordered bool
	// Apart prevents operations of ordered channels from overlapping in memory: for transports that write to memory
	// without the lock.
	Apart bool
	// Kinds are the kinds of operations: all by default. A kind that is listed more often is posted more often.
	Kinds []rdma.OpKind
	// NotReady is the probability that a message is not admitted at once.
	NotReady float64
	// Flap, if above 0, is the mean time between changes: planes go down or up, or shares change. Each host learns of a
	// change separately, up to Notice later: 20 ms by default. Outage is the maximum time for which a plane is down,
	// and with it one plane is always up. With Outage 0 the maximum is four times Flap, and occasionally up to 5 s
	// more, but all planes together are down for at most Flap.
	Flap, Notice, Outage time.Duration
	// Blind hides outages from the hosts: the weights stay, and slots stall.
	Blind bool
	// Idle is the time without a completion after which a run with outstanding operations fails: 60 s by default.
	Idle time.Duration
	// Settle is the time from the last completion to the comparison of memory, in which late duplicates arrive: 3 s by
	// default.
	Settle time.Duration

	// The remaining fields apply to networks in virtual time. Planes is the number of planes: 4 by default. They differ
	// in delay.
	Planes int
	// Loss, Duplicate, Reorder and Corrupt are probabilities for each datagram: see Plane.
	Loss, Duplicate, Reorder, Corrupt float64
	// MTU is the maximum UDP payload that the network carries, in bytes: 65,507 by default.
	MTU int
	// Rate is the bandwidth of each host on a plane, in bytes per second, and Queue the length of its queue in bytes:
	// see Plane.
	Rate, Queue int64
	// IPv6 gives the hosts IPv6 addresses.
	IPv6 bool
}

func (o Options) withDefaults() Options {
	o.Ops = cmp.Or(o.Ops, 1000)
	o.Channels = cmp.Or(o.Channels, 2)
	o.Window = cmp.Or(o.Window, 16)
	o.MaxSize = min(cmp.Or(o.MaxSize, 64<<10), maxSize)
	o.Head = max(20, o.Head)
	if len(o.Kinds) == 0 {
		o.Kinds = []rdma.OpKind{rdma.OpWrite, rdma.OpWrite, rdma.OpWrite, rdma.OpSend, rdma.OpSend, rdma.OpRead,
			rdma.OpCompareSwap, rdma.OpFetchAdd}
	}
	o.Notice = cmp.Or(o.Notice, 20*time.Millisecond)
	o.Idle = cmp.Or(o.Idle, time.Minute)
	o.Settle = cmp.Or(o.Settle, 3*time.Second)
	o.Planes = cmp.Or(o.Planes, 4)
	return o
}

// net returns the configuration of the network. Planes differ in delay, so that they reorder relative to each other.
func (o Options) net() NetConfig {
	c := NetConfig{Seed: o.Seed, MTU: o.MTU, IPv6: o.IPv6}
	for i := range o.Planes {
		c.Planes = append(c.Planes, Plane{Delay: time.Duration(5+3*i) * time.Microsecond, Jitter: 10 * time.Microsecond,
			Loss: o.Loss, Duplicate: o.Duplicate, Reorder: o.Reorder, Corrupt: o.Corrupt, Late: time.Millisecond,
			Rate: o.Rate, Queue: o.Queue})
	}
	return c
}
