package traffic

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/wecmp"
)

// Limits of a run.
const (
	maxMessage     = 64 << 20
	maxOutstanding = 8192
	maxPairMemory  = 1 << 30 // outstanding bytes
	minInterval    = time.Millisecond
)

// run is a node's part of a run.
type run struct {
	node        *Node
	id          uint64
	op          farev1.TrafficOp
	ordering    wecmp.Ordering
	outstanding uint32
	messages    uint64
	duration    time.Duration
	interval    time.Duration
	stall       time.Duration
	drain       time.Duration
	content     *content

	domains map[*rdma.Device]*rdma.PD
	blocks  map[*rdma.Device]*rdma.MR
	regions []*rdma.MR
	ends    []*end
	before  map[netip.Addr]map[string]map[string]uint64 // counters at the start
	// wired maps the devices that slots have named to their planes; wireBefore has the devices' counters at the start.
	wired      map[string]string
	wireBefore map[string]uint64
	started    time.Time

	mu    sync.Mutex // guards the fields below
	sets  []*rdma.Set
	conns []*grpc.ClientConn
	ended bool
}

// now is the time since start.
func (r *run) now() time.Duration { return time.Since(r.started) }

// newRun creates the ends and their memory. With an error it returns the partial run, which must be
// closed.
func (n *Node) newRun(p *farev1.PrepareTraffic) (*run, error) {
	r := &run{node: n, id: p.GetRun(), op: p.GetOp(), ordering: orderingOf(p.GetOrdering()), outstanding: p.GetOutstanding(), messages: p.GetMessages(),
		duration: time.Duration(p.GetDurationNs()), interval: time.Duration(p.GetIntervalNs()), stall: time.Duration(p.GetStallNs()),
		drain: time.Duration(p.GetDrainNs()), domains: map[*rdma.Device]*rdma.PD{}, blocks: map[*rdma.Device]*rdma.MR{},
		before: map[netip.Addr]map[string]map[string]uint64{}, wired: map[string]string{}}
	if err := checkPrepare(p); err != nil {
		return r, &invalid{err}
	}
	r.content = newContent(p.GetSeed(), int(p.GetMessageBytes()))
	for _, d := range n.devices {
		r.domains[d] = d.AllocPD()
		r.before[d.Address()] = d.Counters()
	}
	sinks := map[uint32]*end{}
	for _, pair := range p.GetPairs() {
		for _, destination := range []bool{false, true} {
			e, err := r.newEnd(pair, destination)
			if err != nil {
				return r, err
			}
			if e == nil {
				continue
			}
			r.ends = append(r.ends, e)
			if destination {
				sinks[pair.GetPair()] = e
			}
		}
	}
	for _, e := range r.ends {
		if e.schedule.step == 0 || e.destination {
			continue
		}
		before := sinks[e.pair.GetAfter()]
		if before == nil || before.device != e.device || before.opens != nil {
			return r, &invalid{fmt.Errorf("pair %d waits for pair %d, which must end at %s and precede only one pair", e.pair.GetPair(), e.pair.GetAfter(), e.pair.GetSource())}
		}
		e.gate = &ringGate{ready: make(chan struct{}, 1)}
		before.opens = e.gate
	}
	for _, e := range r.ends {
		if err := e.role.prepare(); err != nil {
			return r, fmt.Errorf("pair %d: %w", e.pair.GetPair(), err)
		}
	}
	return r, nil
}

// invalid marks an error in the coordinator's request.
type invalid struct{ error }

func checkPrepare(p *farev1.PrepareTraffic) error {
	switch {
	case p.GetOp() < farev1.TrafficOp_TRAFFIC_OP_WRITE || p.GetOp() > farev1.TrafficOp_TRAFFIC_OP_READ:
		return fmt.Errorf("op %v is not known", p.GetOp())
	case p.GetOrdering() < farev1.MemoryOrdering_MEMORY_ORDERING_WEAK || p.GetOrdering() > farev1.MemoryOrdering_MEMORY_ORDERING_STRONG:
		return fmt.Errorf("ordering %v is not known", p.GetOrdering())
	case p.GetMessageBytes() < 1 || p.GetMessageBytes() > maxMessage:
		return fmt.Errorf("messages of %d bytes: use 1 to %d", p.GetMessageBytes(), maxMessage)
	case p.GetOutstanding() < 1 || p.GetOutstanding() > maxOutstanding:
		return fmt.Errorf("%d messages outstanding: use 1 to %d", p.GetOutstanding(), maxOutstanding)
	case p.GetMessageBytes()*uint64(p.GetOutstanding()) > maxPairMemory:
		return fmt.Errorf("%d messages of %d bytes outstanding: together at most %d bytes", p.GetOutstanding(), p.GetMessageBytes(), maxPairMemory)
	case p.GetMessages() == 0 && p.GetDurationNs() == 0:
		return errors.New("neither messages nor duration_ns limits the run")
	case p.GetIntervalNs() < uint64(minInterval) || p.GetIntervalNs() > uint64(time.Hour):
		return fmt.Errorf("interval_ns %d: use 1 ms to 1 h", p.GetIntervalNs())
	case p.GetStallNs() == 0 || p.GetDrainNs() == 0 || max(p.GetStallNs(), p.GetDrainNs(), p.GetDurationNs()) > uint64(365*24*time.Hour):
		return errors.New("stall_ns and drain_ns must not be 0, and no time may exceed a year")
	}
	seen := map[uint32]bool{}
	for _, pair := range p.GetPairs() {
		switch n := pair.GetPair(); {
		case seen[n]:
			return fmt.Errorf("pair %d is named twice", n)
		case pair.GetSource() == pair.GetDestination():
			return fmt.Errorf("pair %d goes from %s to itself", n, pair.GetSource())
		case pair.GetStepMessages() > 0 && (pair.GetRingRanks() < 2 || pair.GetRingRank() >= pair.GetRingRanks() || pair.GetRingRanks() > 1<<16):
			return fmt.Errorf("pair %d: rank %d in a ring of %d", n, pair.GetRingRank(), pair.GetRingRanks())
		}
		seen[pair.GetPair()] = true
	}
	return nil
}

// newEnd creates an end of a pair, or returns nil if the end is at another node.
func (r *run) newEnd(pair *farev1.TrafficPair, destination bool) (*end, error) {
	at, err := netip.ParseAddr(pair.GetSource())
	peer, err2 := netip.ParseAddr(pair.GetDestination())
	if err := errors.Join(err, err2); err != nil {
		return nil, &invalid{fmt.Errorf("pair %d: %w", pair.GetPair(), err)}
	}
	if destination {
		at, peer = peer, at
	}
	i := slices.IndexFunc(r.node.devices, func(d *rdma.Device) bool { return d.Address() == at.Unmap() })
	if i < 0 {
		return nil, nil
	}
	if r.node.static != nil {
		r.node.static.reach(peer.Unmap())
	}
	e := &end{run: r, pair: pair, peer: peer.Unmap(), destination: destination, device: r.node.devices[i], cq: r.node.devices[i].CreateCQ(),
		schedule: schedule{pair: pair.GetPair(), ranks: int(pair.GetRingRanks()), rank: int(pair.GetRingRank()), step: pair.GetStepMessages()},
		finish:   make(chan uint64, 1), done: make(chan struct{})}
	read := r.op == farev1.TrafficOp_TRAFFIC_OP_READ
	e.initiator = destination == read
	switch {
	case read && destination:
		e.role = &reader{end: e}
	case read:
		e.role = &granter{end: e}
	case destination:
		e.role = &receiver{end: e}
	default:
		e.role = &sender{end: e}
	}
	return e, nil
}

// alloc allocates a memory region for the duration of the run. Calls must not overlap.
func (r *run) alloc(pd *rdma.PD, n int, access rdma.Access) (*rdma.MR, error) {
	m, err := pd.Alloc(n, access)
	if err == nil {
		r.regions = append(r.regions, m)
	}
	return m, err
}

// blockOf returns the run's block in memory of a device.
func (r *run) blockOf(d *rdma.Device) (*rdma.MR, error) {
	if m := r.blocks[d]; m != nil {
		return m, nil
	}
	m, err := r.alloc(r.domains[d], len(r.content.block), rdma.RemoteRead)
	if err != nil {
		return nil, err
	}
	copy(m.Bytes(), r.content.block)
	r.blocks[d] = m
	return m, nil
}

// connect connects the queue pairs of every initiator.
func (r *run) connect(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var first error
	var once sync.Once
	var wait sync.WaitGroup
	for _, e := range r.ends {
		if !e.initiator {
			continue
		}
		wait.Go(func() {
			if err := e.connect(ctx); err != nil {
				once.Do(func() {
					first = fmt.Errorf("pair %d, %s to %s: %w", e.pair.GetPair(), e.pair.GetSource(), e.pair.GetDestination(), err)
					cancel() // this error is the cause of the others' errors
				})
			}
		})
	}
	wait.Wait()
	return first
}

// unconnected returns an end without queue pairs, or nil if there is none.
func (r *run) unconnected() *end {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.ends {
		if e.set == nil {
			return e
		}
	}
	return nil
}

// close releases the run's resources.
func (r *run) close() {
	r.mu.Lock()
	r.ended = true
	sets, conns := r.sets, r.conns
	r.mu.Unlock()
	for _, s := range sets {
		s.Close()
	}
	for _, c := range conns {
		c.Close()
	}
	for _, m := range r.regions {
		m.Deregister()
	}
}

// counters returns the increase of the transports' counters since the start, without those that did not
// increase.
func (r *run) counters() (out []*farev1.TrafficCounter) {
	for _, d := range r.node.devices {
		before, now := r.before[d.Address()], d.Counters()
		for _, transport := range slices.Sorted(maps.Keys(now)) {
			for _, name := range slices.Sorted(maps.Keys(now[transport])) {
				// A gauge may have fallen.
				if v, was := now[transport][name], before[transport][name]; v > was {
					out = append(out, &farev1.TrafficCounter{Loopback: d.Address().String(), Transport: transport, Name: name, Value: v - was})
				}
			}
		}
	}
	return out
}
