package daemon

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/wecmp"
)

// askingPorts returns the source ports of a server with two loopbacks, whose data plane must be queried for landings;
// no query is sent.
func askingPorts(t *testing.T) (*sourcePorts, *core.Core) {
	t.Helper()
	c := coreOf(t, shape{Planes: 2, SubPorts: 1, Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}}.Text())
	p := newSourcePorts(c.Config(), c.Layout(), slog.New(slog.DiscardHandler))
	p.client = fixedLanding{}
	p.use(c.Planners(nil))
	p.connected(true)
	return p, c
}

// TestLandingsEndWithTheQuestion checks that a caller that waits for a landing continues when the next data plane needs
// no queries, and that nothing of the landing is kept.
func TestLandingsEndWithTheQuestion(t *testing.T) {
	p, c := askingPorts(t)
	src, dst := c.Config().Loopbacks[0].Addr(), destination(0).Addr()
	p.asked(src, dst)
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		p.await(t.Context(), wecmp.Service{}, src, dst)
	}()
	p.connected(false)
	<-waited
	if len(p.pairs) != 0 || p.asked(src, dst) != nil || len(p.pairs) != 0 {
		t.Errorf("%d landings are kept", len(p.pairs))
	}
}

// TestForgottenPairsAreNotAsked checks that a destination that is removed before its query was sent is not queried.
func TestForgottenPairsAreNotAsked(t *testing.T) {
	p, c := askingPorts(t)
	src := c.Config().Loopbacks[0].Addr()
	p.asked(src, destination(0).Addr())
	p.asked(src, destination(1).Addr())
	p.forget(destination(0).Addr(), c.Config().Loopbacks)
	if key, l, _ := p.next(); l == nil || key.dst != destination(1).Addr() {
		t.Errorf("the next question is for %v, want the destination that is there", key)
	}
	p.forget(destination(1).Addr(), c.Config().Loopbacks)
	if key, l, _ := p.next(); l != nil {
		t.Errorf("the next question is for %v, want none", key)
	}
}

// TestFailedLandingsAreAskedAgain checks that a pair whose query failed is queried again, and that the answer counts;
// but not a pair that was removed in between, nor one whose destination is not programmed, which is queried once it is
// in effect.
func TestFailedLandingsAreAskedAgain(t *testing.T) {
	p, c := askingPorts(t)
	src := c.Config().Loopbacks[0].Addr()
	log := &lines{}
	p.log = slog.New(slog.NewTextHandler(log, nil))
	for i, code := range []codes.Code{codes.Unavailable, codes.Unavailable, codes.NotFound, codes.Canceled, codes.DeadlineExceeded} {
		p.asked(src, destination(i).Addr())
		key, l, round := p.next()
		p.answered(key, l, round, nil, status.Error(code, "not now"))
	}
	if all, first, second := log.count("WARN"), log.count("code = Unavailable"), log.count("code = DeadlineExceeded"); all != 2 || first != 1 || second != 1 {
		t.Errorf("%d log lines, %d and %d of the two reasons; want one of each", all, first, second)
	}
	for _, i := range []int{1, 4} {
		p.forget(destination(i).Addr(), c.Config().Loopbacks)
	}
	if p.retry(); len(p.failed) != 0 {
		t.Errorf("%d failed questions are kept", len(p.failed))
	}
	key, l, round := p.next()
	if l == nil || key != (pair{src: src, dst: destination(0).Addr()}) {
		t.Fatalf("the next question is for %v, want the pair whose question failed", key)
	}
	p.answered(key, l, round, []byte{1}, nil)
	select {
	case <-p.ready:
	default:
		t.Error("the loop is not notified of the answer")
	}
	if news := p.take(); len(news) != 1 || news[0].dst != destination(0).Addr() {
		t.Errorf("news %v, want the destination of the answer", news)
	}
	if again := p.take(); len(again) != 0 {
		t.Errorf("news %v once more", again)
	}
	p.retry()
	if key, l, _ := p.next(); l != nil {
		t.Errorf("%v is asked for again", key)
	}
}

// TestOldLandingsAreAskedAgain checks that an answer of the data plane before a reconnect counts until the data plane
// has answered after it, and that the query is sent immediately.
func TestOldLandingsAreAskedAgain(t *testing.T) {
	p, c := askingPorts(t)
	src, dst := c.Config().Loopbacks[0].Addr(), destination(0).Addr()
	p.asked(src, dst)
	key, l, round := p.next()
	p.connected(true)
	p.answered(key, l, round, []byte{1}, nil)
	key, l, round = p.next()
	if l == nil {
		t.Fatal("it is not asked for again")
	}
	if got := p.asked(src, dst); len(got) != 1 || got[0] != 1 {
		t.Errorf("the old answer is not used: %v", got)
	}
	p.answered(key, l, round, []byte{2}, nil)
	if _, l, _ = p.next(); l != nil {
		t.Error("asked for without end")
	}
	if news := p.take(); len(news) != 2 || news[0].dst != dst {
		t.Errorf("news %v, want the destination for each answer", news)
	}
	p.connected(true)
	key, l, round = p.next()
	p.answered(key, l, round, []byte{2}, nil)
	if news := p.take(); len(news) != 0 {
		t.Errorf("news %v of an answer that says the same", news)
	}
}

// TestFailedLandingsOfOthersAreNotAskedAgain checks that a failed query is not retried for a loopback that a reload has
// removed.
func TestFailedLandingsOfOthersAreNotAskedAgain(t *testing.T) {
	p, c := askingPorts(t)
	for _, lo := range c.Config().Loopbacks {
		p.asked(lo.Addr(), destination(0).Addr())
		key, l, round := p.next()
		p.answered(key, l, round, nil, status.Error(codes.Unavailable, "not now"))
	}
	one := coreOf(t, shape{Planes: 2, SubPorts: 1, Loopbacks: []string{"10.255.0.1/32"}}.Text())
	p.keep(one.Layout())
	p.retry()
	if key, l, _ := p.next(); l == nil || key.src != c.Config().Loopbacks[0].Addr() {
		t.Errorf("the next question is for %v, want that of the loopback that is left", key)
	}
	if key, l, _ := p.next(); l != nil {
		t.Errorf("then for %v, want none", key)
	}
}

// TestPairsThatReturnAreAskedOnce checks that a destination that is removed and returns while its query is queued is
// queried once.
func TestPairsThatReturnAreAskedOnce(t *testing.T) {
	p, c := askingPorts(t)
	src, dst := c.Config().Loopbacks[0].Addr(), destination(0).Addr()
	p.asked(src, dst)
	p.forget(dst, c.Config().Loopbacks)
	p.asked(src, dst)
	key, l, round := p.next()
	p.answered(key, l, round, []byte{1}, nil)
	if key, l, _ := p.next(); l != nil {
		t.Errorf("%v is asked for twice", key)
	}
}

// TestPortsOfAFormerPlanner checks that ports of a planner that was replaced meanwhile do not count as slots without a
// landing port.
func TestPortsOfAFormerPlanner(t *testing.T) {
	p, c := askingPorts(t)
	engine := c.Layout().Sources[0].EngineConfig(c.Config())
	nowhere := make([]byte, wecmp.MaxPort-wecmp.MinPort+1) // no port lands anywhere
	replace := false
	engine.Hash = wecmp.Asked(func(netip.Addr, netip.Addr) []byte {
		if replace {
			p.use(c.Planners(nil))
		}
		return nowhere
	})
	planner, err := wecmp.NewPlanner(engine)
	if err != nil {
		t.Fatal(err)
	}
	places := []wecmp.Place{{Plane: 0, SubPort: 0}, {Plane: 1, SubPort: 0}}
	for _, replace = range []bool{false, true} {
		p.use([]*wecmp.Planner{planner})
		_, placement := p.choose(wecmp.Service{}, c.Config().Loopbacks[0].Addr(), destination(0).Addr(), places, nil)
		want := placement.Missed
		if replace {
			want = 0
		}
		if placement.Missed != len(places) || p.withoutLanding() != want {
			t.Errorf("planner replaced meanwhile %v: %d of %d slots missed, %d counted", replace, placement.Missed, len(places), p.withoutLanding())
		}
	}
}

// slowLanding answers each query after a delay, some of them with an error.
type slowLanding struct {
	takes time.Duration
	fails func(destination string, times int) bool
	asked map[string]int
	then  func() // called with each answer
}

func (s *slowLanding) Landing(_ context.Context, in *farev1.LandingRequest, _ ...grpc.CallOption) (*farev1.LandingResponse, error) {
	time.Sleep(s.takes)
	s.asked[in.Destination]++
	if s.then != nil {
		s.then()
	}
	if s.fails(in.Destination, s.asked[in.Destination]) {
		return nil, status.Error(codes.Unavailable, "not now")
	}
	return &farev1.LandingResponse{Devices: []string{"p0.0", "p1.0"}, SubPortOfPort: make([]byte, wecmp.MaxPort-wecmp.MinPort+1)}, nil
}

// TestQuestionsAreRepeatedEverySecond checks that a failed query is retried after landingRetry, whether or not other
// queries are queued.
func TestQuestionsAreRepeatedEverySecond(t *testing.T) {
	for _, busy := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			p, c := askingPorts(t)
			src, first := c.Config().Loopbacks[0].Addr(), destination(0).Addr()
			client := &slowLanding{takes: 300 * time.Millisecond, asked: map[string]int{}}
			client.fails = func(destination string, times int) bool { return destination == first.String() && times == 1 }
			n := 0
			if busy {
				client.then = func() { n++; p.asked(src, destination(n).Addr()) }
			}
			p.client = client
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() { ended <- p.run(ctx) }()
			p.asked(src, first)
			time.Sleep(4 * time.Second)
			synctest.Wait()
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("busy %v: run returns %v", busy, err)
			}
			if got := client.asked[first.String()]; got != 2 {
				t.Errorf("busy %v: asked %d times, want twice", busy, got)
			}
		})
	}
}

// TestQuestionsEndWithTheDaemon checks that no query is sent after the daemon has ended, however many are queued.
func TestQuestionsEndWithTheDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, c := askingPorts(t)
		ctx, cancel := context.WithCancel(t.Context())
		client := &slowLanding{takes: time.Millisecond, asked: map[string]int{}, fails: func(string, int) bool { return false }, then: cancel}
		p.client = client
		for i := range 3 {
			p.asked(c.Config().Loopbacks[0].Addr(), destination(i).Addr())
		}
		if err := p.run(ctx); err != nil || len(client.asked) != 1 {
			t.Errorf("%v; %d questions, want the one during which it ended", err, len(client.asked))
		}
	})
}

// TestSlotsWithoutALandingPortOfPairsThatAreGone checks that the count follows the last ports of each pair, and that a
// loopback that a reload removes takes its part along.
func TestSlotsWithoutALandingPortOfPairsThatAreGone(t *testing.T) {
	p, c := askingPorts(t)
	p.connected(false)
	dst := destination(0).Addr()
	first, second := pair{src: c.Config().Loopbacks[0].Addr(), dst: dst}, pair{src: c.Config().Loopbacks[1].Addr(), dst: dst}
	p.missed[first], p.missed[second], p.misses = 3, 4, 7
	p.choose(wecmp.Service{}, first.src, dst, []wecmp.Place{{Plane: 0, SubPort: 0}}, nil) // with uniform ports no slot lacks one
	if n, kept := p.withoutLanding(), len(p.missed); n != 4 || kept != 1 {
		t.Errorf("%d slots of %d pairs, want 4 of 1", n, kept)
	}
	p.missed[first], p.misses = 3, 7
	one := coreOf(t, shape{Planes: 2, SubPorts: 1, Loopbacks: []string{"10.255.0.1/32"}}.Text())
	p.keep(one.Layout())
	if n, kept := p.withoutLanding(), len(p.missed); n != 3 || kept != 1 || p.missed[first] != 3 {
		t.Errorf("%d slots of %d pairs, want the 3 of the loopback that is left", n, kept)
	}
	p.use(one.Planners(nil))
	if n := p.withoutLanding(); n != 0 || len(p.missed) != 0 {
		t.Errorf("%d slots after the planners were replaced", n)
	}
}

// TestNextHopsByFamily checks that for each family the data plane gets the first known next hop of a sub-port, without
// a zone.
func TestNextHopsByFamily(t *testing.T) {
	c := coreOf(t, `
as: 4200001000
loopbacks: [10.255.0.9/32]
accept: [10.255.0.0/16]
dataplane: {address: "memory:"}
planes:
- name: p0
  sub_ports:
  - device: a
    speed: 400G
    sessions: [{peer: 192.0.2.1}, {peer: 192.0.2.3}, {peer: "fd99::1", families: [ipv4]}, {peer: "fd99::3", families: [ipv4]}]
  - {device: b, speed: 400G, sessions: [{peer: "fd99::5", families: [ipv4]}]}
`)
	got := forwardingOf(c).Planes[0].SubPorts
	if got[0].NextHopV4 != "192.0.2.1" || got[0].NextHopV6 != "fd99::1" || got[1].NextHopV4 != "" || got[1].NextHopV6 != "fd99::5" {
		t.Errorf("next hops %v", got)
	}
	do(t, c, core.NextHop{Session: 0}, core.NextHop{Session: 2, Address: netip.MustParseAddr("fe80::1%a")})
	got = forwardingOf(c).Planes[0].SubPorts
	if got[0].NextHopV4 != "192.0.2.3" || got[0].NextHopV6 != "fe80::1" {
		t.Errorf("with one that is not known and a link-local one: next hops %v", got)
	}
}
