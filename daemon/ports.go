package daemon

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/wecmp"
)

const (
	// maxLandings bounds the pairs whose landing is kept, 16 KiB each. None is given up for another: its ports would change.
	maxLandings = 4096
	// landingTimeout is how long the data plane may take for one pair; some tens of milliseconds are usual.
	landingTimeout = 5 * time.Second
)

// sourcePorts chooses source ports for everybody, on any goroutine. Where the data plane's hash has to be asked for, it
// asks on a goroutine of its own (run): until an answer has come a pair's ports are uniform, and their placement says so.
type sourcePorts struct {
	log      *slog.Logger
	client   landingClient // nil: nothing can be asked
	protocol uint8         // of the flows
	port     uint16        // that they are toward
	devices  []string      // in the order of Forwarding

	work  chan struct{} // something to ask
	knock chan struct{} // take has something

	mu      sync.Mutex // guards everything below
	planner *wecmp.Planner
	asking  bool   // the hash has to be asked for
	round   uint64 // counts connections: an older answer is asked for again
	pairs   map[pair]*landing
	queue   []pair
	news    []netip.Addr // destinations with another landing than before
	said    codes.Code   // of the last question that failed in this round
	full    bool         // somebody was turned away
	missed  map[pair]int // slots without a landing port, of pairs that have any
	misses  int          // their sum
}

type landingClient interface {
	Landing(ctx context.Context, in *farev1.LandingRequest, opts ...grpc.CallOption) (*farev1.LandingResponse, error)
}

type pair struct{ src, dst netip.Addr }

// landing is what the data plane said of a pair.
type landing struct {
	table []byte        // as of wecmp.Asked, replaced and never modified; nil: no answer yet
	round uint64        // connection that the answer came from
	open  chan struct{} // closed when the question that waits is answered; nil: none waits
}

func newSourcePorts(cfg *config.Config, l *layout, log *slog.Logger) *sourcePorts {
	p := &sourcePorts{
		log: log, devices: l.devices(), work: make(chan struct{}, 1), knock: make(chan struct{}, 1),
		pairs: map[pair]*landing{}, missed: map[pair]int{},
	}
	p.protocol, p.port = cfg.Dataplane.Flows()
	return p
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// choose is wecmp.Planner.Ports by the present planner.
func (p *sourcePorts) choose(src, dst netip.Addr, places []wecmp.Place, buf []uint16) ([]uint16, wecmp.Placement) {
	p.mu.Lock()
	planner := p.planner
	p.mu.Unlock()
	ports, placement := planner.Ports(src, dst, places, buf)
	p.mu.Lock()
	defer p.mu.Unlock()
	if key := (pair{src, dst}); planner == p.planner && placement.Missed != p.missed[key] {
		p.misses += placement.Missed - p.missed[key]
		p.missed[key] = placement.Missed
		if placement.Missed == 0 {
			delete(p.missed, key)
		}
	}
	return ports, placement
}

// withoutLanding is how many slots were given a port that does not land on their place.
func (p *sourcePorts) withoutLanding() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.misses
}

// use replaces the planner.
func (p *sourcePorts) use(planner *wecmp.Planner) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.planner, p.misses = planner, 0
	clear(p.missed)
}

// connected notes that a data plane said hello, and whether its hash has to be asked for. What an earlier one answered
// counts until this one has.
func (p *sourcePorts) connected(asking bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asking, p.said, p.full = asking && p.client != nil, codes.OK, false
	p.round++
	for key, l := range p.pairs {
		if p.asking {
			p.want(key)
		} else {
			p.drop(key, l)
		}
	}
}

// forget drops a destination's pairs with our loopbacks.
func (p *sourcePorts) forget(dst netip.Addr, loopbacks []netip.Prefix) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, lo := range loopbacks {
		key := pair{lo.Addr(), dst}
		p.misses -= p.missed[key]
		delete(p.missed, key)
		if l := p.pairs[key]; l != nil {
			p.drop(key, l)
		}
	}
}

// keep drops the pairs of all sources but our loopbacks.
func (p *sourcePorts) keep(loopbacks []netip.Prefix) {
	p.mu.Lock()
	defer p.mu.Unlock()
	gone := func(src netip.Addr) bool {
		return !slices.ContainsFunc(loopbacks, func(lo netip.Prefix) bool { return lo.Addr() == src })
	}
	for key, n := range p.missed {
		if gone(key.src) {
			p.misses -= n
			delete(p.missed, key)
		}
	}
	for key, l := range p.pairs {
		if gone(key.src) {
			p.drop(key, l)
		}
	}
}

func (p *sourcePorts) drop(key pair, l *landing) {
	delete(p.pairs, key)
	if l.open != nil {
		close(l.open)
		l.open = nil
	}
}

// asked is the wecmp.Asked of the planner. It never waits.
func (p *sourcePorts) asked(src, dst netip.Addr) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l := p.want(pair{src, dst}); l != nil {
		return l.table
	}
	return nil
}

// want returns a pair's landing and has it asked for if it is missing or old; nil: it will not be known. The caller holds mu.
func (p *sourcePorts) want(key pair) *landing {
	if !p.asking {
		return nil
	}
	l := p.pairs[key]
	if l == nil {
		if len(p.pairs) >= maxLandings {
			if !p.full {
				p.full = true
				p.log.Warn("more pairs than landings can be kept: the source ports of the others are spread evenly", "pairs", maxLandings)
			}
			return nil
		}
		l = &landing{}
		p.pairs[key] = l
	}
	if l.open == nil && (l.table == nil || l.round != p.round) {
		l.open = make(chan struct{})
		p.queue = append(p.queue, key)
		ring(p.work)
	}
	return l
}

// await waits until a pair's landing was asked for, where it has to be and is not known.
func (p *sourcePorts) await(ctx context.Context, src, dst netip.Addr) {
	var open chan struct{}
	p.mu.Lock()
	if l := p.want(pair{src, dst}); l != nil && l.table == nil {
		open = l.open
	}
	p.mu.Unlock()
	if open == nil {
		return
	}
	select {
	case <-open:
	case <-ctx.Done():
	}
}

// take returns the destinations whose ports may have changed since the last call.
func (p *sourcePorts) take() []netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	news := p.news
	p.news = nil
	return news
}

// run asks until ctx ends.
func (p *sourcePorts) run(ctx context.Context) error {
	for {
		key, l, round := p.next()
		if l == nil {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-p.work:
			}
			continue
		}
		table, err := p.fetch(ctx, key)
		p.answered(key, l, round, table, err)
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// next returns the next question; nil: there is none.
func (p *sourcePorts) next() (pair, *landing, uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.queue) > 0 {
		key := p.queue[0]
		p.queue = p.queue[1:]
		if l := p.pairs[key]; l != nil && l.open != nil {
			return key, l, p.round
		}
	}
	p.queue = nil
	return pair{}, nil, 0
}

// fetch asks the data plane where a pair's flows land.
func (p *sourcePorts) fetch(ctx context.Context, key pair) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, landingTimeout)
	defer cancel()
	answer, err := p.client.Landing(ctx, &farev1.LandingRequest{
		Source: key.src.String(), Destination: key.dst.String(), Protocol: uint32(p.protocol), UdpDestinationPort: uint32(p.port),
	})
	switch {
	case err != nil:
		return nil, err
	case !slices.Equal(answer.Devices, p.devices):
		return nil, fmt.Errorf("it answered for the sub-ports %q, not for %q", answer.Devices, p.devices)
	case len(answer.SubPortOfPort) != wecmp.MaxPort-wecmp.MinPort+1:
		return nil, fmt.Errorf("it answered for %d source ports, not for all from %d to %d", len(answer.SubPortOfPort), wecmp.MinPort, wecmp.MaxPort)
	}
	return answer.SubPortOfPort, nil
}

// answered files an answer.
func (p *sourcePorts) answered(key pair, l *landing, round uint64, table []byte, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pairs[key] != l {
		return // dropped meanwhile
	}
	close(l.open)
	l.open = nil
	if err != nil {
		// A destination that is not programmed yet is asked for again when it is in effect, and shown again.
		if code := status.Code(err); code != codes.NotFound && code != p.said && code != codes.Canceled {
			p.said = code
			p.log.Warn("the data plane does not say where flows land: their source ports are spread evenly, or remain",
				"source", key.src, "destination", key.dst, "error", err)
		}
		if l.table == nil {
			p.drop(key, l)
		}
		return
	}
	if !bytes.Equal(l.table, table) {
		l.table = table
		p.news = append(p.news, key.dst)
		ring(p.knock)
	}
	if l.round = round; round != p.round {
		p.want(key)
	}
}
