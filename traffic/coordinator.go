package traffic

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Server is a node in the coordinator's view.
type Server struct {
	// Name is used for display.
	Name   string
	Client farev1.TrafficServiceClient
}

// phasePatience is the time limit for answers that depend on local work only.
const phasePatience = 30 * time.Second

// Coordinate plays a run over nodes and returns its report. Ranks are the first loopback of each node, then the second
// of each, and so on; pairs inside one node are left out. observe, if not nil, receives every interval that all nodes
// have reported, in order. An error means that there is no report, because a node failed or could not take part; the
// nodes can run again. A report may describe a failed run: see TrafficReport.ok.
func Coordinate(ctx context.Context, cfg Config, servers []Server, observe func(*farev1.TrafficInterval)) (*farev1.TrafficReport, error) {
	cfg = cfg.withDefaults()
	prepare, err := cfg.prepare()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	c := &coordinator{cfg: cfg, servers: servers, events: make(chan event), streams: make([]runStream, len(servers)), gone: make(chan struct{}, len(servers))}
	defer c.end(cancel)
	if err := c.describe(ctx); err != nil {
		return nil, err
	}
	if c.pairs, err = c.plan(prepare.GetMessages()); err != nil {
		return nil, err
	}
	prepare.Run = rand.Uint64()
	c.tally = newTally(cfg.Interval, len(c.pairs), len(servers))
	c.observe = observe
	for i := range servers {
		if err := c.open(ctx, i); err != nil {
			return nil, err
		}
		mine := &farev1.PrepareTraffic{Run: prepare.Run, Seed: prepare.Seed, Op: prepare.Op, Ordering: prepare.Ordering, MessageBytes: prepare.MessageBytes,
			Outstanding: prepare.Outstanding, Messages: prepare.Messages, DurationNs: prepare.DurationNs, IntervalNs: prepare.IntervalNs,
			StallNs: prepare.StallNs, DrainNs: prepare.DrainNs, Pairs: c.pairsOf(i)}
		c.send(i, &farev1.RunTrafficRequest{Message: &farev1.RunTrafficRequest_Prepare{Prepare: mine}})
	}
	if err := c.await(ctx, "prepare", phasePatience, func(m *farev1.RunTrafficResponse) bool { return m.GetPrepared() != nil }); err != nil {
		return nil, err
	}
	c.sendAll(&farev1.RunTrafficRequest{Message: &farev1.RunTrafficRequest_Connect{Connect: &farev1.ConnectTraffic{}}})
	if err := c.await(ctx, "connect", connectPatience+phasePatience, func(m *farev1.RunTrafficResponse) bool { return m.GetConnected() != nil }); err != nil {
		return nil, err
	}
	c.sendAll(&farev1.RunTrafficRequest{Message: &farev1.RunTrafficRequest_Start{Start: &farev1.StartTraffic{}}})
	finish := &farev1.FinishTraffic{}
	// Nodes themselves detect pairs without progress; keepalive detects a node that does not respond at all.
	if err := c.await(ctx, "send", 0, func(m *farev1.RunTrafficResponse) bool {
		finish.Posted = append(finish.Posted, m.GetSent().GetPosted()...)
		return m.GetSent() != nil
	}); err != nil {
		return nil, err
	}
	c.sendAll(&farev1.RunTrafficRequest{Message: &farev1.RunTrafficRequest_Finish{Finish: finish}})
	results := make([]*farev1.TrafficResult, 0, len(servers))
	if err := c.await(ctx, "report", 0, func(m *farev1.RunTrafficResponse) bool {
		if m.GetResult() != nil {
			results = append(results, m.GetResult())
		}
		return m.GetResult() != nil
	}); err != nil {
		return nil, err
	}
	c.part(ctx)
	return makeReport(cfg, c.transport, c.pairs, c.tally, results), nil
}

type runStream = grpc.BidiStreamingClient[farev1.RunTrafficRequest, farev1.RunTrafficResponse]

// event is a node's message, or the end of its stream.
type event struct {
	server int
	m      *farev1.RunTrafficResponse
	err    error
}

type coordinator struct {
	cfg       Config
	servers   []Server
	ranks     []string
	owner     []int // server of each rank
	transport string
	pairs     []*farev1.TrafficPair
	streams   []runStream
	opened    int
	gone      chan struct{} // receives an element from every stream's goroutine as it exits
	events    chan event
	tally     *tally
	observe   func(*farev1.TrafficInterval)
}

// end closes every stream, and waits for their goroutines.
func (c *coordinator) end(cancel context.CancelFunc) {
	cancel()
	for range c.opened {
		<-c.gone
	}
}

// part ends every node's run in order: nodes are ready for another run when it returns.
func (c *coordinator) part(ctx context.Context) {
	for _, s := range c.streams {
		s.CloseSend()
	}
	limit := time.NewTimer(phasePatience)
	defer limit.Stop()
	for left := len(c.streams); left > 0; {
		select {
		case e := <-c.events:
			if e.err != nil { // EOF, or a node that failed after its part was complete
				left--
			}
		case <-limit.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// describe queries every node for its loopbacks.
func (c *coordinator) describe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, phasePatience)
	defer cancel()
	seen := map[string]string{}
	loopbacks := make([][]string, len(c.servers))
	for i, s := range c.servers {
		d, err := s.Client.DescribeTraffic(ctx, &farev1.DescribeTrafficRequest{})
		if err != nil {
			return c.lost(i, err)
		}
		if i == 0 {
			c.transport = d.GetTransport()
		}
		for _, loopback := range d.GetLoopbacks() {
			if other, ok := seen[loopback]; ok {
				return fmt.Errorf("loopback %s is at node %s and at node %s", loopback, other, s.Name)
			}
			seen[loopback] = s.Name
		}
		loopbacks[i] = d.GetLoopbacks()
	}
	c.rank(loopbacks)
	return nil
}

// rank numbers the loopbacks of all servers: the first of each server, then the second of each, so that neighbors are
// of different servers.
func (c *coordinator) rank(loopbacks [][]string) {
	for k, left := 0, true; left; k++ {
		left = false
		for server, list := range loopbacks {
			if k < len(list) {
				c.ranks, c.owner, left = append(c.ranks, list[k]), append(c.owner, server), true
			}
		}
	}
}

// plan makes the pattern's pairs between servers. Loopbacks of one server have no slots between them, so their pairs
// are left out; a ring with such a pair is an error, because each rank of a ring waits for the one before.
func (c *coordinator) plan(messages uint64) ([]*farev1.TrafficPair, error) {
	all, err := c.cfg.Pattern.Pairs(len(c.ranks))
	if err != nil {
		return nil, err
	}
	var pairs []Pair
	for _, p := range all {
		if c.owner[p.Source] != c.owner[p.Destination] {
			pairs = append(pairs, p)
		} else if c.cfg.Pattern == Ring && len(c.servers) > 1 {
			return nil, fmt.Errorf("a ring would lead from loopback %s to %s of the same node %s, and there are no slots inside a server: run nodes with equally many loopbacks, or another pattern",
				c.ranks[p.Source], c.ranks[p.Destination], c.servers[c.owner[p.Source]].Name)
		}
	}
	if len(pairs) == 0 {
		return nil, &InsideError{len(all)}
	}
	if n := len(all) - len(pairs); n > 0 && c.cfg.Notice != nil {
		c.cfg.Notice(fmt.Sprintf("%s inside one server left out, because there are no slots inside a server; %d remain", count(n, "pair"), len(pairs)))
	}
	out := make([]*farev1.TrafficPair, 0, len(pairs))
	for i, p := range pairs {
		t := &farev1.TrafficPair{Pair: uint32(i), Source: c.ranks[p.Source], Destination: c.ranks[p.Destination]}
		if c.cfg.Pattern == Ring {
			t.StepMessages = ringStepMessages(len(c.ranks), messages, uint64(c.cfg.Outstanding))
			t.RingRanks, t.RingRank = uint32(len(c.ranks)), uint32(p.Source)
			t.After = uint32(pairTo(pairs, p.Source))
		}
		out = append(out, t)
	}
	return out, nil
}

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// pairsOf returns the pairs that begin or end at a node.
func (c *coordinator) pairsOf(server int) (out []*farev1.TrafficPair) {
	mine := map[string]bool{}
	for rank, loopback := range c.ranks {
		mine[loopback] = c.owner[rank] == server
	}
	for _, p := range c.pairs {
		if mine[p.GetSource()] || mine[p.GetDestination()] {
			out = append(out, p)
		}
	}
	return out
}

// open begins a node's run.
func (c *coordinator) open(ctx context.Context, server int) error {
	stream, err := c.servers[server].Client.RunTraffic(ctx)
	if err != nil {
		return c.lost(server, err)
	}
	c.streams[server] = stream
	c.opened++
	go func() { // end waits for it
		defer func() { c.gone <- struct{}{} }()
		for {
			m, err := stream.Recv()
			select {
			case c.events <- event{server, m, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return nil
}

// send sends to a node. It ignores errors, because Recv returns the reason why the stream has ended.
func (c *coordinator) send(server int, m *farev1.RunTrafficRequest) { _ = c.streams[server].Send(m) }

func (c *coordinator) sendAll(m *farev1.RunTrafficRequest) {
	for i := range c.streams {
		c.send(i, m)
	}
}

// await processes the nodes' messages until answered has returned true for each node. patience 0 means no time limit.
func (c *coordinator) await(ctx context.Context, phase string, patience time.Duration, answered func(*farev1.RunTrafficResponse) bool) error {
	var limit <-chan time.Time
	if patience > 0 {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		limit = timer.C
	}
	done := make([]bool, len(c.servers))
	for left := len(done); left > 0; {
		select {
		case e := <-c.events:
			switch {
			case e.err != nil:
				if ctx.Err() != nil {
					return ctx.Err()
				}
				return c.lost(e.server, e.err)
			case e.m.GetSample() != nil:
				for _, i := range c.tally.sample(e.server, e.m.GetSample()) {
					if c.observe != nil {
						c.observe(i)
					}
				}
			case done[e.server] || !answered(e.m):
				return fmt.Errorf("node %s answers out of turn while nodes %s: does it run another version?", c.servers[e.server].Name, phase)
			default:
				done[e.server] = true
				left--
			}
		case <-limit:
			var missing []string
			for i, ok := range done {
				if !ok {
					missing = append(missing, c.servers[i].Name)
				}
			}
			return fmt.Errorf("no answer to %q within %v from node %s", phase, patience, strings.Join(missing, ", "))
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// InsideError means that all pairs of a pattern are inside one server, where there are no slots. It needs a second
// server or another pattern.
type InsideError struct{ Pairs int }

func (e *InsideError) Error() string {
	return fmt.Sprintf("all %s of the pattern are inside one server, where there are no slots", count(e.Pairs, "pair"))
}

// LostError means that a node could not do its part.
type LostError struct {
	Node string
	// Gone is true if the node does not respond. Otherwise it refused, for the reason in Err.
	Gone bool
	Err  error
}

func (e *LostError) Error() string {
	if e.Gone {
		return fmt.Sprintf("node %s is unreachable: %v", e.Node, e.Err)
	}
	return fmt.Sprintf("node %s: %v", e.Node, e.Err)
}

func (e *LostError) Unwrap() error { return e.Err }

func (c *coordinator) lost(server int, err error) error {
	out := &LostError{Node: c.servers[server].Name, Err: err}
	if st, ok := status.FromError(err); ok {
		out.Err = errors.New(st.Message())
		out.Gone = st.Code() == codes.Unavailable || st.Code() == codes.DeadlineExceeded
	} else {
		out.Gone = true // the stream ended although messages were still expected
	}
	return out
}
