package rdmatest

import (
	"cmp"
	"time"

	"github.com/fared/fared/dataplane/rdma"
)

// Options say what a model run is like. The zero value of each field means its default.
type Options struct {
	// Seed of everything random; a run says it when it fails.
	Seed uint64
	// Ops is how many operations are posted in all: 1,000.
	Ops int
	// Channels is how many channels connect the hosts, both ends of which post: 2. Window is how many operations each end has
	// outstanding at most: 16.
	Channels, Window int
	// MaxSize is the longest operation, bytes: the least of 64 KiB and Limits.MaxOp; at most 1 MiB. Most are far shorter; one in
	// forty is as long.
	MaxSize int
	// Head is how long the head of every SEND is: 20, and between that and rdma.MaxHead.
	Head int
	// Ordered asks for channels that execute in order, and checks that they do. Channels of transports that always do are
	// checked all the same.
	Ordered bool
	// Apart keeps operations of ordered channels from overlapping in memory: for transports that write to memory without the lock.
	Apart bool
	// Kinds are the kinds of operations: all. The more often one is in it the more often it is posted.
	Kinds []rdma.OpKind
	// NotReady is the probability that a message is not admitted at once.
	NotReady float64
	// Flap, if above 0, is the mean time between changes: planes go down or up, or shares change. Channels are told up to
	// Notice later, each host by itself: 20 ms. Outage is the longest time that a plane is down. 0: four times Flap, and now
	// and then up to 5 s; all are down for at most Flap. Otherwise one always is up.
	Flap, Notice, Outage time.Duration
	// Idle is how long nothing may complete while something is outstanding: 60 s.
	Idle time.Duration
	// Settle is how long the network goes on after the last completion, before memory is compared: 3 s. Late duplicates come then.
	Settle time.Duration

	// The rest is for networks in virtual time. Planes is how many planes there are: 4. They differ in delay.
	Planes int
	// Loss, Duplicate, Reorder and Corrupt are probabilities for each datagram: Plane says more.
	Loss, Duplicate, Reorder, Corrupt float64
	// MTU is the longest UDP payload that is let through: 65,507.
	MTU int
	// Rate is what each host may send by a plane, bytes per second, and Queue how many bytes wait for that: Plane says more.
	Rate, Queue int64
	// IPv6 gives the hosts addresses of that.
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

// net is the network that the options ask for. Planes differ in delay, so that they reorder against each other.
func (o Options) net() NetConfig {
	c := NetConfig{Seed: o.Seed, MTU: o.MTU, IPv6: o.IPv6}
	for i := range o.Planes {
		c.Planes = append(c.Planes, Plane{Delay: time.Duration(5+3*i) * time.Microsecond, Jitter: 10 * time.Microsecond,
			Loss: o.Loss, Duplicate: o.Duplicate, Reorder: o.Reorder, Corrupt: o.Corrupt, Late: time.Millisecond,
			Rate: o.Rate, Queue: o.Queue})
	}
	return c
}
