package status

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
)

// replica is the state of a client of WatchWeights. It verifies the rules of the stream.
type replica struct {
	state     map[string]*farev1.DestinationWeights
	complete  bool // the last message was complete
	since     uint64
	instance  string
	messages  int
	snapshots int
}

// Send makes a replica a weightSender.
func (r *replica) Send(m *farev1.WatchWeightsResponse) error {
	m = proto.Clone(m).(*farev1.WatchWeightsResponse)
	r.messages++
	if m.Snapshot {
		if r.messages > 1 && !r.complete {
			return errors.New("a snapshot inside a revision")
		}
		r.snapshots++
		r.state = map[string]*farev1.DestinationWeights{}
	}
	if len(m.Weights)+len(m.Removed) > watchChunk {
		return fmt.Errorf("%d destinations in a message", len(m.Weights)+len(m.Removed))
	}
	for _, p := range m.Removed {
		delete(r.state, rowName(p.Destination, p.Sources))
	}
	for _, w := range m.Weights {
		if !m.Snapshot && r.complete && w.Revision <= r.since || w.Revision > m.Revision {
			return fmt.Errorf("%s of revision %d in an update from %d to %d", w.Destination, w.Revision, r.since, m.Revision)
		}
		w.Revision = 0
		r.state[rowName(w.Destination, w.Sources)] = w
	}
	if r.complete = m.Complete; r.complete {
		r.since, r.instance = m.Revision, m.Instance
	}
	return nil
}

func (r *replica) compare(t *testing.T, want map[string]*farev1.DestinationWeights) {
	t.Helper()
	if !r.complete {
		t.Fatal("the last message is not complete")
	}
	if len(r.state) == len(want) {
		equal := true
		for k, w := range want {
			if equal = proto.Equal(r.state[k], w); !equal {
				break
			}
		}
		if equal {
			return
		}
	}
	t.Fatalf("the client's state differs (-want +got):\n%s", cmp.Diff(want, r.state, protocmp.Transform()))
}

func randomFilter(rng *rand.Rand, l *fakeLoop) *farev1.WeightFilter {
	f := &farev1.WeightFilter{OmitPairs: rng.IntN(3) == 0}
	for range rng.IntN(4) {
		p := prefixAt(rng.IntN(l.space))
		f.Destinations = append(f.Destinations, netip.PrefixFrom(p.Addr(), p.Bits()-rng.IntN(p.Bits())).Masked().String())
	}
	if rng.IntN(2) == 0 {
		all := l.layout.sources()
		f.Sources = []string{all[rng.IntN(len(all))].String()}
	}
	return f
}

// TestWatchReplay checks that deltas, applied by clients that read every revision, some, or hardly any, equal the whole
// list each time.
func TestWatchReplay(t *testing.T) {
	seeds := uint64(gate.Count(t, gate.Models, 2, 10))
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			l := newFake(seed, 200)
			if seed%2 == 1 {
				l.two()
			}
			reader := l.builder.Reader(here)
			type client struct {
				replica
				f    *filter
				lazy int
			}
			var clients []*client
			for i := range 8 {
				f, err := parseFilter("filter", randomFilter(l.rng, l), nil, &l.layout)
				if err != nil {
					t.Fatal(err)
				}
				if i == 0 {
					f = &filter{}
				}
				clients = append(clients, &client{f: f, lazy: 1 + i*i})
			}
			for step := range 120 {
				before := l.builder.Revision()
				if after := l.step(12); after != before+1 {
					t.Fatalf("revision %d after %d", after, before)
				}
				if step == 70 { // a reload renames a plane and removes a loopback
					l.layout.Groups = slices.Clone(l.layout.Groups)
					g := &l.layout.Groups[0]
					g.Planes = []LayoutPlane{{"p0", []string{"p0a", "p0b"}}, {"blue", []string{"p1a", "p1b"}}}
					g.Sources = g.Sources[:2]
					l.builder.SetLayout(l.layout)
					l.builder.Commit()
				}
				if step == 90 { // a reload changes the structure: the destinations have other keys from now on
					l.builder.Restructure(l.layout)
					for key := range l.destinations {
						l.builder.MarkDestination(key)
					}
					l.builder.Commit()
				}
				for _, c := range clients {
					if l.rng.IntN(c.lazy) > 0 {
						continue
					}
					v, err := reader.View(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					if v.Revision() != l.builder.Revision() {
						t.Fatalf("view of %d at revision %d", v.Revision(), l.builder.Revision())
					}
					if err := v.sendChanges(c, "fake", c.f, c.since, c.messages == 0); err != nil {
						t.Fatal(err)
					}
					c.compare(t, l.picture(c.f))
					c.since = v.Revision()
				}
			}
			for i, c := range clients {
				if c.snapshots > 3 { // the first, and those of the reloads, which rename rows
					t.Errorf("client %d was sent %d snapshots", i, c.snapshots)
				}
			}
		})
	}
}

// TestViewsAreImmutable checks that views do not change while the loop continues.
func TestViewsAreImmutable(t *testing.T) {
	l := newFake(5, 400).two()
	type kept struct {
		view *View
		want map[string]*farev1.DestinationWeights
	}
	var all []kept
	for range 60 {
		l.step(40)
		all = append(all, kept{l.builder.build(), l.picture(&filter{})})
	}
	for _, k := range all {
		var got replica
		if err := k.view.sendChanges(&got, "", &filter{}, 0, true); err != nil {
			t.Fatal(err)
		}
		got.compare(t, k.want)
	}
}

// TestWatchTombstonesOverflow makes more removals than tombstones: an earlier client receives a snapshot, a later one
// receives the remaining removals individually.
func TestWatchTombstonesOverflow(t *testing.T) {
	l := newFake(1, 0)
	const n = maxTombstones + 100
	for i := range n {
		l.destinations[prefixAt(i)] = Destination{Reason: "r"}
		l.builder.MarkDestination(prefixAt(i))
	}
	l.builder.Commit()
	var early replica
	if err := l.builder.build().sendChanges(&early, "", &filter{}, 0, true); err != nil {
		t.Fatal(err)
	}
	var late replica
	for i := range n - 1 {
		delete(l.destinations, prefixAt(i))
		l.builder.MarkDestination(prefixAt(i))
		l.builder.Commit()
		if v := l.builder.build(); i == 200 {
			if err := v.sendChanges(&late, "", &filter{}, 0, true); err != nil {
				t.Fatal(err)
			}
		}
	}
	v := l.builder.build()
	if len(v.tombstones) != maxTombstones {
		t.Errorf("%d tombstones, want %d", len(v.tombstones), maxTombstones)
	}
	for _, c := range []struct {
		name      string
		client    *replica
		snapshots int
	}{{"early", &early, 2}, {"late", &late, 1}} {
		if err := v.sendChanges(c.client, "", &filter{}, c.client.since, false); err != nil {
			t.Fatal(err)
		}
		if c.client.snapshots != c.snapshots {
			t.Errorf("%s: %d snapshots, want %d", c.name, c.client.snapshots, c.snapshots)
		}
		c.client.compare(t, l.picture(&filter{}))
	}
}

// fakeStream is the server's side of a watch. Send waits for the gate.
type fakeStream struct {
	grpc.ServerStream
	ctx  context.Context
	gate chan struct{}

	mu  sync.Mutex
	got replica
}

func (s *fakeStream) Context() context.Context { return s.ctx }

func (s *fakeStream) Send(m *farev1.WatchWeightsResponse) error {
	<-s.gate
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.got.Send(m)
}

func (s *fakeStream) read(fn func(*replica)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn(&s.got)
}

// TestWatchSlowIsMerged checks that a watcher that does not read misses no state and causes no queue: a thousand
// revisions become one message.
func TestWatchSlowIsMerged(t *testing.T) {
	l := newFake(3, 200)
	l.start(t)
	s := l.service(t, nil)
	l.on(t, func() { l.step(50) })
	ctx, cancel := context.WithCancel(t.Context())
	stream := &fakeStream{ctx: ctx, gate: make(chan struct{})}
	ended := make(chan error, 1)
	go func() { ended <- s.Weights().WatchWeights(&farev1.WatchWeightsRequest{}, stream) }()
	stream.gate <- struct{}{} // the snapshot
	eventually(t, "the snapshot", func() bool {
		done := false
		stream.read(func(r *replica) { done = r.snapshots == 1 })
		return done
	})
	// The watcher may wait in Send with any state since, while a thousand more revisions are committed.
	for range 1000 {
		l.on(t, func() { l.step(5) })
	}
	l.on(t, l.touch)
	close(stream.gate)
	var last uint64
	var want map[string]*farev1.DestinationWeights
	l.on(t, func() { last, want = l.builder.Revision(), l.picture(&filter{}) })
	eventually(t, "the last revision", func() bool {
		done := false
		stream.read(func(r *replica) { done = r.since == last })
		return done
	})
	stream.read(func(r *replica) {
		r.compare(t, want)
		if r.messages > 3 {
			t.Errorf("%d messages for 1,001 revisions behind a closed gate, want at most 3", r.messages)
		}
	})
	cancel()
	if err := <-ended; grpcstatus.Code(err) != codes.Canceled {
		t.Errorf("the watch ended with %v, want CANCELLED", err)
	}
}

// TestWatchWaitsForTheStart checks that a watch waits for the end of the start: it begins with the state at that time,
// and ends during the wait if its client does.
func TestWatchWaitsForTheStart(t *testing.T) {
	l := newFake(3, 5)
	l.builder.started = make(chan struct{})
	l.start(t)
	s := l.service(t, nil)
	watch := func(ctx context.Context) (*fakeStream, chan error) {
		stream, ended := &fakeStream{ctx: ctx, gate: make(chan struct{})}, make(chan error, 1)
		close(stream.gate)
		go func() { ended <- s.Weights().WatchWeights(&farev1.WatchWeightsRequest{}, stream) }()
		return stream, ended
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, ended := watch(ctx)
	cancel()
	if err := <-ended; grpcstatus.Code(err) != codes.Canceled {
		t.Errorf("the watch ended with %v, want CANCELLED", err)
	}
	stream, ended := watch(t.Context())
	l.on(t, func() { l.step(50) })
	stream.read(func(r *replica) {
		if r.messages != 0 {
			t.Errorf("%d messages before the start is over", r.messages)
		}
	})
	var want map[string]*farev1.DestinationWeights
	l.on(t, func() {
		l.builder.Started()
		l.builder.Started()
		l.builder.Commit()
		want = l.picture(&filter{})
	})
	eventually(t, "a message", func() (received bool) {
		stream.read(func(r *replica) { received = r.messages > 0 })
		return received
	})
	stream.read(func(r *replica) {
		r.compare(t, want)
		if r.messages != 1 {
			t.Errorf("%d messages, want a snapshot", r.messages)
		}
	})
	s.stop()
	if err := <-ended; grpcstatus.Code(err) != codes.Unavailable {
		t.Errorf("the watch ended with %v, want UNAVAILABLE", err)
	}
}

// TestWatchOverSocket covers, over a real socket, a snapshot in chunks, deltas, resuming after a gap, and a revision of
// another instance.
func TestWatchOverSocket(t *testing.T) {
	l := newFake(4, 0)
	l.vectors[1] = l.randomVector()
	l.builder.MarkVector(1)
	const n = 1200
	for i := range n {
		l.destinations[prefixAt(i)] = Destination{Vector: 1, InEffect: true}
		l.builder.MarkDestination(prefixAt(i))
	}
	l.builder.Commit()
	l.start(t)
	srv := serve(t, l.service(t, nil), nil)
	var r replica
	receive := func(stream farev1.WeightService_WatchWeightsClient, messages int) {
		t.Helper()
		for range messages {
			m, err := stream.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Send(m); err != nil {
				t.Fatal(err)
			}
		}
		var want map[string]*farev1.DestinationWeights
		l.on(t, func() { want = l.picture(&filter{}) })
		r.compare(t, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := srv.weights.WatchWeights(ctx, &farev1.WatchWeightsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	receive(stream, 3) // 500 + 500 + 200
	l.on(t, func() {   // one destination is removed
		delete(l.destinations, prefixAt(5))
		l.builder.MarkDestination(prefixAt(5))
		l.builder.Commit()
	})
	receive(stream, 1)
	cancel()
	l.on(t, func() { // during the absence: one is removed, one returns, one mark for all others
		delete(l.destinations, prefixAt(6))
		l.destinations[prefixAt(5)] = Destination{Reason: "nothing usable"}
		l.builder.MarkDestination(prefixAt(5))
		l.builder.MarkDestination(prefixAt(6))
		l.builder.Commit()
		l.vectors[1] = Vector{Reason: "all planes are down", Planes: []VectorPlane{{Reason: "down"}, {Reason: "down"}}}
		l.builder.MarkVector(1)
		l.builder.Commit()
	})
	stream, err = srv.weights.WatchWeights(t.Context(), &farev1.WatchWeightsRequest{SinceRevision: r.since, Instance: r.instance})
	if err != nil {
		t.Fatal(err)
	}
	receive(stream, 3) // 1,199 + 1 removed
	if r.snapshots != 1 {
		t.Errorf("resuming sent a snapshot")
	}
	// Without changes an empty, complete message confirms that resuming worked.
	stream, err = srv.weights.WatchWeights(t.Context(), &farev1.WatchWeightsRequest{SinceRevision: r.since, Instance: r.instance})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || m.Snapshot || !m.Complete || len(m.Weights) > 0 || len(m.Removed) > 0 {
		t.Errorf("resuming at the latest revision: %v, %v", m, err)
	}
	for name, req := range map[string]*farev1.WatchWeightsRequest{
		"another instance": {SinceRevision: r.since, Instance: "other"},
		"the future":       {SinceRevision: r.since + 1000, Instance: r.instance},
	} {
		stream, err := srv.weights.WatchWeights(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if m, err := stream.Recv(); err != nil || !m.Snapshot || len(m.Weights) != watchChunk {
			t.Errorf("%s: want a snapshot, got %v, %v", name, m.GetSnapshot(), err)
		}
	}
}

// TestReadersAtOnce runs watchers, listers and reports concurrently over a socket while the loop works; every watcher
// ends with the loop's state.
func TestReadersAtOnce(t *testing.T) {
	l := newFake(9, 500)
	l.start(t)
	srv := serve(t, l.service(t, nil), nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	replicas := make([]replica, 6)
	for i := range replicas {
		stream, err := srv.weights.WatchWeights(ctx, &farev1.WatchWeightsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			for {
				m, err := stream.Recv()
				if err != nil {
					return
				}
				mu.Lock()
				if err := replicas[i].Send(m); err != nil {
					t.Error(err)
				}
				mu.Unlock()
			}
		})
	}
	for range 3 {
		wg.Go(func() {
			for ctx.Err() == nil {
				_, err1 := srv.weights.ListWeights(ctx, &farev1.ListWeightsRequest{PageSize: 50})
				_, err2 := srv.fabric.GetStatus(ctx, &farev1.GetStatusRequest{})
				if err := errors.Join(err1, err2); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	for range 400 {
		l.on(t, func() { l.step(8) })
	}
	l.on(t, l.touch)
	var last uint64
	var want map[string]*farev1.DestinationWeights
	l.on(t, func() { last, want = l.builder.Revision(), l.picture(&filter{}) })
	eventually(t, "every watcher at the last revision", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return !slices.ContainsFunc(replicas, func(r replica) bool { return r.since != last })
	})
	cancel()
	wg.Wait()
	for i := range replicas {
		replicas[i].compare(t, want)
	}
}

// TestBuilderIsBounded checks that many removals and returns leave no marks, tombstones or pages behind beyond their
// limits, even without readers.
func TestBuilderIsBounded(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine")
	l := newFake(2, 0)
	for i := range 10 * maxMarked {
		p := Key{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32)}
		l.destinations[p] = Destination{}
		l.builder.MarkDestination(p)
		l.builder.Commit()
		delete(l.destinations, p)
		l.builder.MarkDestination(p)
		l.builder.Commit()
	}
	if n := l.builder.destinations.Len(); n > maxMarked+1 {
		t.Errorf("%d destinations remembered, none exists", n)
	}
	v := l.builder.build()
	if l.builder.destinations.Len() > 0 || v.count > 0 || len(v.pages) > 0 || len(v.tombstones) > maxTombstones {
		t.Errorf("left: %d marks, %d destinations, %d pages, %d tombstones", l.builder.destinations.Len(), v.count, len(v.pages), len(v.tombstones))
	}
}
