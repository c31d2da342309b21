package rdma

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// weights is a WeightService with scripted messages; it can also break its watches.
type weights struct {
	farev1.UnimplementedWeightServiceServer
	mu       sync.Mutex
	watches  []chan *farev1.WatchWeightsResponse // nil breaks the watch
	requests []*farev1.WatchWeightsRequest
	arrived  chan struct{}
}

func (w *weights) WatchWeights(r *farev1.WatchWeightsRequest, stream grpc.ServerStreamingServer[farev1.WatchWeightsResponse]) error {
	ch := make(chan *farev1.WatchWeightsResponse, 16)
	w.mu.Lock()
	w.watches, w.requests = append(w.watches, ch), append(w.requests, r)
	w.mu.Unlock()
	w.arrived <- struct{}{}
	for {
		select {
		case m := <-ch:
			if m == nil {
				return status.Error(codes.Unavailable, "the daemon stops")
			}
			if err := stream.Send(m); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

// say sends on the newest watch.
func (w *weights) say(m *farev1.WatchWeightsResponse) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.watches[len(w.watches)-1] <- m
}

// serve runs a gRPC server in memory and returns a connection to it.
func serve(t *testing.T, register func(*grpc.Server)) *grpc.ClientConn {
	t.Helper()
	lis := bufconn.Listen(1 << 16)
	s := grpc.NewServer()
	register(s)
	var done sync.WaitGroup
	done.Go(func() {
		if err := s.Serve(lis); err != nil {
			t.Error(err)
		}
	})
	conn, err := grpc.NewClient("passthrough:///memory", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		s.Stop()
		done.Wait()
	})
	return conn
}

func weightsOf(dst, src string, shares ...uint32) *farev1.DestinationWeights {
	pair := &farev1.PairSlots{Source: src + "/32"}
	for _, s := range fourPlanes(shares...) {
		pair.Slots = append(pair.Slots, &farev1.Slot{Slot: uint32(s.Slot), Plane: s.Plane, Device: s.Device, SourcePort: uint32(s.Port), SharePpb: s.Share})
	}
	return &farev1.DestinationWeights{Destination: dst + "/32", Pairs: []*farev1.PairSlots{pair}}
}

// eventually waits for a condition that another goroutine brings about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, func() error {
		if !ok() {
			return errors.New(what)
		}
		return nil
	})
}

func sharesOf(s *Set) (out [4]uint32) {
	for i, is := range s.Slots() {
		out[i] = is.Share
	}
	return out
}

// TestConnectAndFollow connects two devices over gRPC with slots from WatchWeights. They follow changes, keep their
// slots while fared is away, and say goodbye.
func TestConnectAndFollow(t *testing.T) {
	defer eventually(t, "every goroutine has ended", func() bool { return goleak.Find() == nil })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	t.Run("", func(t *testing.T) {
		l := newLoops(t, 1)
		a, b := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")
		fareds := map[netip.Addr]*weights{a: {arrived: make(chan struct{}, 8)}, b: {arrived: make(chan struct{}, 8)}}
		devices := map[netip.Addr]*Device{}
		for at, w := range fareds {
			conn := serve(t, func(s *grpc.Server) { farev1.RegisterWeightServiceServer(s, w) })
			d, err := Open(Config{Address: at, Transports: []Transport{&loop{net: l, name: "loop", limits: ordered}}, Weights: farev1.NewWeightServiceClient(conn)})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(d.Close)
			devices[at] = d
			<-w.arrived
		}
		config := func(d *Device) SetConfig {
			return SetConfig{PD: d.AllocPD(), SendCQ: d.CreateCQ(), RecvCQ: d.CreateCQ()}
		}
		accepted := make(chan *Set, 1)
		listener := &Listener{Devices: []*Device{devices[b]},
			Accept: func(d *Device, r Request) (SetConfig, []byte, error) {
				if string(r.Private) == "let me in" {
					return config(d), []byte("welcome"), nil
				}
				return SetConfig{}, nil, errors.New("say the word")
			},
			Accepted: func(s *Set, _ Request) { accepted <- s }}
		conn := serve(t, func(s *grpc.Server) { farev1.RegisterConnectionServiceServer(s, listener) })

		short, stop := context.WithTimeout(ctx, 50*time.Millisecond)
		if _, _, err := devices[a].Connect(short, conn, b, config(devices[a]), nil); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "slots from") {
			t.Errorf("before there are slots: %v", err)
		}
		stop()
		fareds[a].say(&farev1.WatchWeightsResponse{Revision: 1, Instance: "x", Snapshot: true, Complete: true, Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.2", "10.255.0.1")}})
		fareds[b].say(&farev1.WatchWeightsResponse{Revision: 1, Instance: "x", Snapshot: true, Complete: true, Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.1", "10.255.0.2")}})
		if _, _, err := devices[a].Connect(ctx, conn, b, config(devices[a]), []byte("hello")); status.Code(errors.Unwrap(err)) != codes.FailedPrecondition || !strings.Contains(err.Error(), "say the word") {
			t.Errorf("refused with %v", err)
		}
		s, reply, err := devices[a].Connect(ctx, conn, b, config(devices[a]), []byte("let me in"))
		if err != nil || string(reply) != "welcome" {
			t.Fatalf("%q, %v", reply, err)
		}
		peer := <-accepted

		fareds[a].say(&farev1.WatchWeightsResponse{Revision: 2, Instance: "x", Complete: true, Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.2", "10.255.0.1", 5e8, 0, 5e8, 0)}})
		eventually(t, "new shares arrive", func() bool { return sharesOf(s) == [4]uint32{5e8, 0, 5e8, 0} })
		if got := sharesOf(peer); got != [4]uint32{even, even, even, even} {
			t.Errorf("the other end has %v", got)
		}
		fareds[a].say(nil) // fared restarts
		<-fareds[a].arrived
		if r := fareds[a].requests[1]; r.GetSinceRevision() != 2 || r.GetInstance() != "x" || r.GetFilter().GetSources()[0] != "10.255.0.1" {
			t.Errorf("the watch goes on with %v", r)
		}
		if got := sharesOf(s); got != [4]uint32{5e8, 0, 5e8, 0} {
			t.Errorf("without fared %v holds", got)
		}
		fareds[a].say(&farev1.WatchWeightsResponse{Revision: 1, Instance: "y", Snapshot: true, Complete: true})
		eventually(t, "what a snapshot does not name is parked", func() bool { return sharesOf(s) == [4]uint32{} })
		fareds[a].say(&farev1.WatchWeightsResponse{Revision: 2, Instance: "y", Complete: true, Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.2", "10.255.0.1")}})
		eventually(t, "and back", func() bool { return sharesOf(s) == [4]uint32{even, even, even, even} })
		fareds[a].say(&farev1.WatchWeightsResponse{Revision: 3, Instance: "y", Complete: true, Removed: []*farev1.WeightKey{{Destination: "10.255.0.2/32", Sources: []string{"10.255.0.1/32"}}}})
		eventually(t, "what is removed is parked", func() bool { return sharesOf(s) == [4]uint32{} })

		s.Close()
		<-peer.Done()
		if err := peer.Err(); !errors.Is(err, ErrFlushed) || !strings.Contains(err.Error(), "10.255.0.1 closed") {
			t.Errorf("the peer ended with %v", err)
		}
	})
}

// TestListenerRefuses checks the refusal of invalid requests.
func TestListenerRefuses(t *testing.T) {
	l := newLoops(t, 1)
	listener := &Listener{Devices: []*Device{l.open("10.255.0.2", ordered)}, Accept: func(*Device, Request) (SetConfig, []byte, error) {
		return SetConfig{}, nil, errors.New("never asked")
	}}
	client := farev1.NewConnectionServiceClient(serve(t, func(s *grpc.Server) { farev1.RegisterConnectionServiceServer(s, listener) }))
	weak := farev1.MemoryOrdering_MEMORY_ORDERING_WEAK
	for _, c := range []struct {
		m    *farev1.ConnectRequest
		code codes.Code
	}{
		{&farev1.ConnectRequest{}, codes.InvalidArgument},
		{&farev1.ConnectRequest{Message: &farev1.ConnectRequest_Goodbye{Goodbye: &farev1.Goodbye{}}}, codes.InvalidArgument},
		{&farev1.ConnectRequest{Message: &farev1.ConnectRequest_Offer{Offer: &farev1.ConnectOffer{Destination: "x"}}}, codes.InvalidArgument},
		{&farev1.ConnectRequest{Message: &farev1.ConnectRequest_Offer{Offer: &farev1.ConnectOffer{Destination: "10.255.0.2", Source: "x"}}}, codes.InvalidArgument},
		{&farev1.ConnectRequest{Message: &farev1.ConnectRequest_Offer{Offer: &farev1.ConnectOffer{Destination: "10.255.0.2", Source: "10.255.0.1"}}}, codes.InvalidArgument},
		{&farev1.ConnectRequest{Message: &farev1.ConnectRequest_Offer{Offer: &farev1.ConnectOffer{Destination: "10.255.0.3", Source: "10.255.0.1", Ordering: weak}}}, codes.NotFound},
		{&farev1.ConnectRequest{Message: &farev1.ConnectRequest_Offer{Offer: &farev1.ConnectOffer{Destination: "10.255.0.2", Source: "10.255.0.1", Ordering: weak}}}, codes.FailedPrecondition},
	} {
		stream, err := client.Connect(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(c.m); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); status.Code(err) != c.code {
			t.Errorf("%v: %v, want %v", c.m, err, c.code)
		}
	}
}

// lasting is a context that counts the registrations for its end.
type lasting struct {
	context.Context
	done    chan struct{}
	waiters *atomic.Int32
}

func (l lasting) Done() <-chan struct{} { return l.done }

func (l lasting) AfterFunc(func()) func() bool {
	l.waiters.Add(1)
	return func() bool { l.waiters.Add(-1); return true }
}

// TestRefusedConnectLeavesNothing checks that repeated failed attempts in one context leak nothing.
func TestRefusedConnectLeavesNothing(t *testing.T) {
	l := newLoops(t, 1)
	listener := &Listener{Devices: []*Device{l.open("10.255.0.2", ordered)}, Accept: func(*Device, Request) (SetConfig, []byte, error) {
		return SetConfig{}, nil, errors.New("no")
	}}
	conn := serve(t, func(s *grpc.Server) { farev1.RegisterConnectionServiceServer(s, listener) })
	w := &weights{arrived: make(chan struct{}, 1)}
	to := serve(t, func(s *grpc.Server) { farev1.RegisterWeightServiceServer(s, w) })
	d, err := Open(Config{Address: netip.MustParseAddr("10.255.0.1"), Transports: []Transport{&loop{net: l, name: "loop", limits: ordered}},
		Weights: farev1.NewWeightServiceClient(to)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	<-w.arrived
	w.say(&farev1.WatchWeightsResponse{Revision: 1, Instance: "x", Snapshot: true, Complete: true, Weights: []*farev1.DestinationWeights{weightsOf("10.255.0.2", "10.255.0.1")}})
	ctx := lasting{context.Background(), make(chan struct{}), new(atomic.Int32)}
	for range 3 {
		cfg := SetConfig{PD: d.AllocPD(), SendCQ: d.CreateCQ(), RecvCQ: d.CreateCQ()}
		if _, _, err := d.Connect(ctx, conn, netip.MustParseAddr("10.255.0.2"), cfg, nil); err == nil || !strings.Contains(err.Error(), "refuses") {
			t.Fatalf("connected: %v", err)
		}
	}
	sets := 0
	d.Do(func() { sets = len(d.sets) })
	if n := ctx.waiters.Load(); n != 0 || sets != 0 {
		t.Errorf("%d still wait for the end of the context, %d sets are there", n, sets)
	}
}

// TestCloseEndsWaiting checks that Close ends a wait for slots with an error.
func TestCloseEndsWaiting(t *testing.T) {
	w := &weights{arrived: make(chan struct{}, 1)}
	conn := serve(t, func(s *grpc.Server) { farev1.RegisterWeightServiceServer(s, w) })
	d, err := Open(Config{Address: netip.MustParseAddr("10.255.0.1"), Transports: []Transport{&idle{}}, Weights: farev1.NewWeightServiceClient(conn)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	got := make(chan error, 1)
	go func() {
		_, _, err := d.Connect(ctx, conn, netip.MustParseAddr("10.255.0.2"), SetConfig{}, nil)
		got <- err
	}()
	<-w.arrived
	d.Close()
	if err := <-got; !errors.Is(err, errClosed) {
		t.Errorf("waiting for slots ended with %v", err)
	}
}

// TestStreamBreaks checks that a set outlasts its stream, unless its peer never received the answer.
func TestStreamBreaks(t *testing.T) {
	p := connectPair(t, 2, SetConfig{Patience: time.Millisecond}, fourPlanes(), ordered)
	broken := func() (*farev1.Goodbye, error) { return nil, errors.New("broken") }
	unsent := func(*farev1.Goodbye) error { return errors.New("broken") }
	awaitGoodbye(p.set[1], broken, unsent) // no message has arrived: the set has received nothing from its peer
	if err := p.set[1].Err(); !errors.Is(err, ErrFlushed) || !strings.Contains(err.Error(), "is not complete") {
		t.Errorf("the set without a peer ended with %v", err)
	}

	p = connectPair(t, 2, SetConfig{Patience: time.Millisecond}, fourPlanes(), ordered)
	p.run(func() bool { return len(p.events) == 0 }) // the ends have connected
	for i, s := range p.set {
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			awaitGoodbye(s, broken, unsent)
		}()
		// The set checks its peer, and the peer's channel must acknowledge that.
		eventually(t, "the set does not ask for its peer", func() (asked bool) {
			s.device.Do(func() { asked = s.receiver.credit != nil })
			return asked
		})
		if err := s.Err(); err != nil {
			t.Errorf("end %d ended with its stream: %v", i, err)
		}
		s.Close()
		<-ended
	}
}
