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
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/internal/beat"
	"github.com/fared/fared/wecmp"
)

const (
	// maxLandings bounds the number of pairs whose landing is kept, 16 KiB each, and separately that of landings for
	// other services, which readers ask for. None is evicted for another pair, because its ports would change.
	maxLandings = 4096
	// landingTimeout limits the data plane's answer for one pair; some tens of milliseconds are usual.
	landingTimeout = 5 * time.Second
	// landingRetry is the longest pause before failed queries are retried.
	landingRetry = time.Second
)

// sourcePorts chooses source ports, on any goroutine. If the data plane must be queried for its flow hash, a separate
// goroutine (run) sends the queries: until an answer has arrived, a pair's ports are uniform, and their placement
// reports that.
type sourcePorts struct {
	log     *slog.Logger
	client  landingClient // nil if no data plane is configured
	first   wecmp.Service // the service of pairs without one
	devices [][]string    // by source group, in the order of Forwarding

	work  chan struct{} // one slot: the queue is not empty
	ready chan struct{} // one slot: take has something to return

	mu       sync.Mutex         // guards all fields below
	planners []*wecmp.Planner   // by source group
	sources  map[netip.Addr]int // source group of each loopback
	asking   bool               // the data plane must be queried for its hash
	pins     bool               // the data plane steers by the ports of the first service, whatever the service
	round    uint64             // counts connections: an older answer is requested again
	pairs    map[pair]*landing
	services map[pair][]wecmp.Service // the other services that pairs or missed may have, by pair without a service
	others   int                      // number of services in services
	landings int                      // number of pairs with another service
	queue    []pair
	failed   map[pair]bool // to be retried after landingRetry
	news     []landed
	lastCode codes.Code   // code of the last failed query in this round
	full     bool         // a pair was rejected because of maxLandings
	missed   map[pair]int // number of slots without a landing port, for pairs that have any
	misses   int          // their sum
	probed   map[pair]probed
}

// probed are the ports of a pair's places, by the present planners.
type probed struct {
	places []wecmp.Place
	ports  []uint16
	ok     bool
}

// maxProbed bounds the pairs whose ports are kept. With more of them probes seldom come back to one.
const maxProbed = 512

// landed is a changed landing of a pair, for a source group. A nil table means that the landing was dropped.
type landed struct {
	pair
	source int
	table  []byte
}

type landingClient interface {
	Landing(ctx context.Context, in *farev1.LandingRequest, opts ...grpc.CallOption) (*farev1.LandingResponse, error)
}

// pair is a pair of addresses, and the service of its flows. The zero service means that of the configuration
// (sourcePorts.first).
type pair struct {
	src, dst netip.Addr
	to       wecmp.Service
}

// other reports whether the service is another one than that of the configuration.
func (p pair) other() bool { return p.to != wecmp.Service{} }

// landing is the data plane's answer for a pair.
type landing struct {
	table []byte        // as in wecmp.Asked, replaced and never modified; nil before the answer
	round uint64        // connection of the answer
	open  chan struct{} // closed when the pending query is answered; nil if none is pending
}

func newSourcePorts(cfg *config.Config, l *core.Layout, log *slog.Logger) *sourcePorts {
	p := &sourcePorts{
		log: log, work: make(chan struct{}, 1), ready: make(chan struct{}, 1),
		pairs: map[pair]*landing{}, failed: map[pair]bool{}, missed: map[pair]int{}, services: map[pair][]wecmp.Service{},
		sources: l.SourceOfLoopback(),
	}
	for i := range l.Sources {
		p.devices = append(p.devices, l.Sources[i].Devices())
	}
	p.first.Protocol, p.first.Port = cfg.Dataplane.Flows()
	return p
}

func ring(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// choose calls Ports of the current planner of src's source group, for the flows to a service; the zero service is that
// of the configuration.
func (p *sourcePorts) choose(to wecmp.Service, src, dst netip.Addr, places []wecmp.Place, buf []uint16) ([]uint16, wecmp.Placement) {
	p.mu.Lock()
	source := p.sources[src] // a view may still show a removed loopback; its ports may come from any planner
	planner := p.planners[source]
	key := p.pair(to, src, dst)
	p.mu.Unlock()
	toward := planner
	if key.other() {
		toward = planner.Toward(to, func(src, dst netip.Addr) []byte { return p.lands(pair{src, dst, to}) })
	}
	ports, placement := toward.Ports(src, dst, places, buf)
	p.mu.Lock()
	defer p.mu.Unlock()
	if planner == p.planners[source] && placement.Missed != p.missed[key] && p.track(key) {
		p.misses += placement.Missed - p.missed[key]
		p.missed[key] = placement.Missed
		if placement.Missed == 0 {
			delete(p.missed, key)
		}
	}
	return ports, placement
}

// toward returns the source ports of a pair's slots for the flows to a service, or false if they are not known to land
// on the places. Unlike choose it keeps nothing of the pair but the result, if that depends on the planner alone.
func (p *sourcePorts) toward(to wecmp.Service, src, dst netip.Addr, places []wecmp.Place, buf []uint16) ([]uint16, bool) {
	p.mu.Lock()
	planner, pins := p.planners[p.sources[src]], p.pins
	key := p.pair(to, src, dst)
	k, found := p.probed[pair{src, dst, to}]
	p.mu.Unlock()
	if found && slices.Equal(k.places, places) {
		return append(buf, k.ports...), k.ok
	}
	toward := planner
	if key.other() {
		toward = planner.Toward(to, nil)
	}
	ports, placement := toward.Ports(src, dst, places, buf)
	lands := placement.Method == wecmp.MethodHash || placement.Method == wecmp.MethodAsked
	ok := pins && placement.Method != wecmp.MethodNone || lands && placement.Missed == 0
	if placement.Method != wecmp.MethodAsked {
		p.record(pair{src, dst, to}, planner, pins, probed{slices.Clone(places), slices.Clone(ports), ok})
	}
	return ports, ok
}

// record keeps the ports of a pair if the planner is still in use.
func (p *sourcePorts) record(key pair, planner *wecmp.Planner, pins bool, k probed) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.planners[p.sources[key.src]] != planner || p.pins != pins {
		return
	}
	if p.probed == nil || len(p.probed) >= maxProbed {
		p.probed = map[pair]probed{}
	}
	p.probed[key] = k
}

// pair returns a pair for the flows to a service. The service is omitted if the ports are those of the configured one.
// The caller holds mu.
func (p *sourcePorts) pair(to wecmp.Service, src, dst netip.Addr) pair {
	if p.pins || to == p.first {
		to = wecmp.Service{}
	}
	return pair{src, dst, to}
}

// track records that a pair with another service may be in pairs or missed, and returns false if there are too many.
// The caller holds mu.
func (p *sourcePorts) track(key pair) bool {
	base := pair{src: key.src, dst: key.dst}
	switch {
	case !key.other() || slices.Contains(p.services[base], key.to):
		return true
	case p.others >= maxLandings:
		return false
	}
	p.others++
	p.services[base] = append(p.services[base], key.to)
	return true
}

// untrack undoes track for all services of a pair. The caller holds mu.
func (p *sourcePorts) untrack(base pair) {
	p.others -= len(p.services[base])
	delete(p.services, base)
}

// withoutLanding returns the number of slots whose port does not land on their place.
func (p *sourcePorts) withoutLanding() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.misses
}

// use replaces the planners.
func (p *sourcePorts) use(planners []*wecmp.Planner) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.planners, p.misses, p.probed = planners, 0, nil
	clear(p.missed)
}

// connected records that a data plane has connected, and whether it must be queried for its hash. Answers of the
// previous connection remain valid until the current one has answered.
func (p *sourcePorts) connected(asking bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asking, p.lastCode, p.full = asking, codes.OK, false
	p.round++
	for key, l := range p.pairs {
		if p.asking {
			p.want(key)
		} else {
			p.drop(key, l)
		}
	}
}

// samePorts reports whether all services have the ports of the first one.
func (p *sourcePorts) samePorts() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.pins
}

// pinned records whether the data plane pins flows by source port, and returns whether that has changed.
func (p *sourcePorts) pinned(pins bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	changed := p.pins != pins
	p.pins, p.probed = pins, nil
	return changed
}

// forget drops a destination's pairs with some of our loopbacks.
func (p *sourcePorts) forget(dst netip.Addr, loopbacks []netip.Prefix) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, lo := range loopbacks {
		base := pair{src: lo.Addr(), dst: dst}
		p.forgetPair(base)
		for _, to := range p.services[base] {
			p.forgetPair(pair{base.src, base.dst, to})
		}
		p.untrack(base)
	}
}

func (p *sourcePorts) forgetPair(key pair) {
	delete(p.failed, key)
	p.misses -= p.missed[key]
	delete(p.missed, key)
	if l := p.pairs[key]; l != nil {
		p.drop(key, l)
	}
}

// keep drops the pairs of all sources except our loopbacks, which a reload may have changed.
func (p *sourcePorts) keep(l *core.Layout) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sources, p.probed = l.SourceOfLoopback(), nil
	gone := func(src netip.Addr) bool {
		_, ours := p.sources[src]
		return !ours
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
	for base := range p.services {
		if gone(base.src) {
			p.untrack(base)
		}
	}
}

// restructure replaces the planners by those of other planes, sub-ports or source groups. The landings, which refer to
// sub-ports by index, are requested again.
func (p *sourcePorts) restructure(l *core.Layout, planners []*wecmp.Planner) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.planners, p.misses, p.probed = planners, 0, nil
	clear(p.missed)
	p.sources, p.devices = l.SourceOfLoopback(), nil
	for i := range l.Sources {
		p.devices = append(p.devices, l.Sources[i].Devices())
	}
	for key, landing := range p.pairs {
		p.drop(key, landing)
	}
	clear(p.failed)
	clear(p.services)
	p.others = 0
}

func (p *sourcePorts) drop(key pair, l *landing) {
	delete(p.pairs, key)
	if key.other() {
		p.landings--
	}
	if l.table != nil {
		p.report(landed{pair: key})
	}
	if l.open != nil {
		close(l.open)
	}
}

// report queues a changed landing for take. The caller holds mu.
func (p *sourcePorts) report(l landed) {
	p.news = append(p.news, l)
	ring(p.ready)
}

// asked implements wecmp.Asked for the planner. It never waits.
func (p *sourcePorts) asked(src, dst netip.Addr) []byte { return p.lands(pair{src: src, dst: dst}) }

// lands returns the landing of a pair, or nil if it is not known yet. It never waits.
func (p *sourcePorts) lands(key pair) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l := p.want(key); l != nil {
		return l.table
	}
	return nil
}

// want returns a pair's landing and queues a query if it is missing or old. It returns nil if the landing will not be
// known. The caller holds mu.
func (p *sourcePorts) want(key pair) *landing {
	if !p.asking {
		return nil
	}
	l := p.pairs[key]
	if l == nil {
		if n := len(p.pairs) - p.landings; key.other() && !p.track(key) || !key.other() && n >= maxLandings {
			if !p.full {
				p.full = true
				p.log.Warn("too many pairs to keep the landings of all: the source ports of further pairs are spread evenly", "pairs", maxLandings)
			}
			return nil
		}
		l = &landing{}
		p.pairs[key] = l
		if key.other() {
			p.landings++
		}
	}
	if l.open == nil && (l.table == nil || l.round != p.round) {
		l.open = make(chan struct{})
		p.queue = append(p.queue, key)
		ring(p.work)
	}
	return l
}

// await waits for the answer to a pair's query, if the pair needs one and its landing is unknown.
func (p *sourcePorts) await(ctx context.Context, to wecmp.Service, src, dst netip.Addr) {
	var open chan struct{}
	p.mu.Lock()
	if l := p.want(p.pair(to, src, dst)); l != nil && l.table == nil {
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

// take returns the landings that have changed since the last call, in the order of the changes.
func (p *sourcePorts) take() []landed {
	p.mu.Lock()
	defer p.mu.Unlock()
	news := p.news
	p.news = nil
	return news
}

// run sends queries until ctx ends, which is not an error.
func (p *sourcePorts) run(ctx context.Context) error {
	timer := time.NewTimer(beat.Until(time.Now(), landingRetry))
	defer timer.Stop()
	retry := func() {
		p.retry()
		timer.Reset(beat.Until(time.Now(), landingRetry))
	}
	for {
		select {
		case <-timer.C:
			retry()
		default:
		}
		key, l, round := p.next()
		if l == nil {
			select {
			case <-ctx.Done():
				return nil
			case <-p.work:
			case <-timer.C:
				retry()
			}
			continue
		}
		table, err := p.fetch(ctx, key)
		p.answered(key, l, round, table, err)
		if ctx.Err() != nil {
			return nil
		}
	}
}

// retry queues the failed queries again.
func (p *sourcePorts) retry() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key := range p.failed {
		if _, ours := p.sources[key.src]; ours {
			p.want(key)
		}
	}
	clear(p.failed)
}

// next returns the next query, or a nil landing if there is none.
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
	return pair{}, nil, 0
}

// fetch queries the data plane for the landing of a pair's flows.
func (p *sourcePorts) fetch(ctx context.Context, key pair) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, landingTimeout)
	defer cancel()
	p.mu.Lock()
	devices, to := p.devices[p.sources[key.src]], key.to
	p.mu.Unlock()
	if !key.other() {
		to = p.first
	}
	answer, err := p.client.Landing(ctx, &farev1.LandingRequest{
		Source: key.src.String(), Destination: key.dst.String(), Protocol: uint32(to.Protocol), DestinationPort: uint32(to.Port),
	})
	switch {
	case err != nil:
		return nil, err
	case !slices.Equal(answer.Devices, devices):
		return nil, fmt.Errorf("it answered for sub-ports %q instead of %q", answer.Devices, devices)
	case len(answer.SubPortOfPort) != wecmp.MaxPort-wecmp.MinPort+1:
		return nil, fmt.Errorf("it answered for %d source ports instead of all from %d to %d", len(answer.SubPortOfPort), wecmp.MinPort, wecmp.MaxPort)
	}
	return answer.SubPortOfPort, nil
}

// answered records an answer.
func (p *sourcePorts) answered(key pair, l *landing, round uint64, table []byte, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pairs[key] != l {
		return // dropped in the meantime
	}
	close(l.open)
	l.open = nil
	if err != nil {
		// A destination that is not programmed yet is queried and shown again when it is in effect.
		code := status.Code(err)
		if code != codes.NotFound && code != codes.Canceled {
			p.failed[key] = true
		}
		if code != codes.NotFound && code != p.lastCode && code != codes.Canceled {
			p.lastCode = code
			p.log.Warn("the data plane does not report where flows land: their source ports are spread evenly, or stay unchanged",
				"source", key.src, "destination", key.dst, "error", err)
		}
		if l.table == nil {
			p.drop(key, l)
		}
		return
	}
	if !bytes.Equal(l.table, table) {
		l.table = table
		p.report(landed{key, p.sources[key.src], table})
	}
	if l.round = round; round != p.round {
		p.want(key)
	}
}
