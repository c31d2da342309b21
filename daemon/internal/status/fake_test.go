package status

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errLoopStopped = errors.New("the loop has stopped")

// fakeLoop is a loop that decides at random. Its fields belong to its goroutine (or to the test, before start).
type fakeLoop struct {
	rng          *rand.Rand
	destinations map[Key]Destination
	vectors      map[uint32]Vector
	planes       []Plane
	sessions     []Session
	process      Process
	layout       Layout
	builder      *Builder
	original     []LayoutGroup // at the start, when filters are created
	space        int           // destinations are drawn from this many

	calls   chan func()
	stopped chan struct{}
}

func newFake(seed uint64, space int) *fakeLoop {
	l := &fakeLoop{
		rng:          rand.New(rand.NewPCG(seed, 1)),
		destinations: map[Key]Destination{}, vectors: map[uint32]Vector{}, space: space,
		calls: make(chan func()), stopped: make(chan struct{}),
	}
	l.layout = Layout{
		Groups: []LayoutGroup{{
			Sources: []netip.Prefix{
				netip.MustParsePrefix("10.255.0.1/32"), netip.MustParsePrefix("10.255.0.9/32"), netip.MustParsePrefix("fd00::1/128"),
			},
			Planes: []LayoutPlane{{"p0", []string{"p0a", "p0b"}}, {"p1", []string{"p1a", "p1b"}}},
		}},
		Ports: func(to FlowService, src, dst netip.Addr, v *Vector, buf []uint16) ([]uint16, string) {
			ports, placement := fakePorts(src, dst, v, buf)
			if to != (FlowService{}) {
				placement = "asked"
			}
			for i := range ports {
				ports[i] ^= to.Port & 0xff // another port for each service
			}
			return ports, placement
		},
		Services: []ServiceRange{{17, 4791, 4791}, {17, 4444, 4444}, {6, 4793, 4793}, {6, 4800, 5055}},
	}
	l.planes = []Plane{
		{Name: "p0", Up: true, SubPorts: []SubPort{
			{Device: "p0a", Carrier: true, Speed: 400e9, SpeedSource: "config", Sessions: []string{"p0/p0a"}},
			{Device: "p0b", Carrier: true, Speed: 400e9, SpeedSource: "config", Reason: "slower than configured", Persistent: true, DampedUntil: time.Unix(0, 77), HeldRises: 3},
		}},
		{Name: "p1", Drained: true},
	}
	l.sessions = []Session{
		{Name: "p0/p0a", Plane: "p0", Device: "p0a", Peer: "10.0.0.1", PeerAS: 65001, PeerID: netip.MustParseAddr("10.1.1.1"),
			State: StateEstablished, Since: time.Unix(1000, 0), Generation: 3, Flaps: 2, Received: 7, Used: 4,
			Ignored: []Count{{"looped", 2}, {"not-host", 1}}, Advertised: 8, Dropped: []Count{{"bad-marker", 5}}, EndOfRIB: true,
			BFD: "up", BFDDetection: 300 * time.Millisecond},
		{Name: "p0/p0b", Plane: "p0", Device: "p0b", State: StateIdle, Reason: "no carrier", Dropped: []Count{{"bad-marker", 1}, {"too-long", 2}}},
	}
	l.process = Process{
		Avoided: []Count{{"p0", 2}, {"p1", 0}},
		Role:    "server", RouterID: netip.MustParseAddr("10.255.0.1"), AS: 65100, Converged: true,
		Dataplane: Dataplane{Connected: true, Name: "memory", Address: "memory:", Pending: 1, Approximate: 2, Refused: 3, Damage: "a route is gone", Repairs: 4, Limitations: []Limitation{{"rp-filter", "strict on eth0", "set it to 2"}}, Operations: []Operations{
			{"sub-port", 1, 1, 0}, {"group", 5, 4, 1}, {"destination", 9, 8, 0},
		}},
		Faults: []Fault{{Kind: FaultBandwidthIgnored, Plane: "p0", Session: "p0/p0a", Reason: "below-minimum", Routes: 3,
			Example: netip.MustParsePrefix("10.0.0.0/32"), Remedy: "upgrade it"},
			{Kind: FaultRoutesDropped, Plane: "p0", Session: "p0/p0a", Reason: "route_next_hop", Routes: 2, Example: netip.MustParsePrefix("10.0.0.7/32"), Remedy: "set the next hop"}},
		Ignored: []Count{{"old-generation", 3}}, Queues: []Count{{"speaker", 2}},
	}
	l.original = l.layout.Groups
	l.builder = NewBuilder(l, l.layout, "fake")
	close(l.builder.started)
	return l
}

// fakePorts depends on all its arguments, so that a stale result is detected.
func fakePorts(src, dst netip.Addr, v *Vector, buf []uint16) ([]uint16, string) {
	s, d := src.AsSlice(), dst.AsSlice()
	for i := range v.Slots {
		buf = append(buf, 49152+(uint16(s[len(s)-1])<<4^uint16(d[len(d)-1])+uint16(i))%16384)
	}
	return buf, "hash"
}

func (l *fakeLoop) Vector(id uint32) (Vector, bool) { v, ok := l.vectors[id]; return v, ok }
func (l *fakeLoop) Destination(p Key) (Destination, bool) {
	d, ok := l.destinations[p]
	return d, ok
}
func (l *fakeLoop) Planes() []Plane     { return slices.Clone(l.planes) }
func (l *fakeLoop) Sessions() []Session { return slices.Clone(l.sessions) }
func (l *fakeLoop) Process() Process    { return l.process }

// prefixAt returns the nth destination: two of three are IPv4, over several /24, the others IPv6.
func prefixAt(n int) Key {
	if n%3 == 2 {
		return Key{Prefix: netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 13: byte(n >> 16), 14: byte(n >> 8), 15: byte(n)}), 128)}
	}
	return Key{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n >> 10), byte(n >> 2), byte(n)}), 32)}
}

func (l *fakeLoop) randomVector() Vector {
	a, b := l.rng.Uint32N(3), l.rng.Uint32N(3)
	v := Vector{Reachable: a+b > 0, Planes: []VectorPlane{
		{Weight: a, Bandwidth: uint64(a) * 400e9, InEffect: l.rng.IntN(2) == 0, SubPorts: []uint32{1, 1}},
		{Weight: b, Bandwidth: uint64(b) * 400e9, InEffect: true, SubPorts: []uint32{1, l.rng.Uint32N(2)}},
	}}
	if !v.Reachable {
		v.Reason = "no plane has a path"
		v.Slots = []Slot{{Plane: 0}, {Plane: 1, SubPort: 1}}
		return v
	}
	share := uint32(1e9 / (a + b) * a)
	v.Slots = []Slot{{Plane: 0, SubPort: 0, Share: share}, {Plane: 1, SubPort: l.rng.IntN(2), Share: 1e9 - share, Drain: l.rng.IntN(4) == 0}}
	return v
}

// two adds a second source group, with other sub-ports. Call it before the first step.
func (l *fakeLoop) two() *fakeLoop {
	l.layout.Groups = append(l.layout.Groups, LayoutGroup{
		Sources: []netip.Prefix{netip.MustParsePrefix("10.255.0.2/32"), netip.MustParsePrefix("fd00::2/128")},
		Planes:  []LayoutPlane{{"p0", []string{"p0c", "p0d"}}, {"p2", []string{"p2c", "p2d"}}},
	})
	l.original = l.layout.Groups
	l.builder = NewBuilder(l, l.layout, "fake")
	close(l.builder.started)
	return l
}

// pick returns a destination of any source group.
func (l *fakeLoop) pick() Key {
	return Key{prefixAt(l.rng.IntN(l.space)).Prefix, l.rng.IntN(len(l.layout.Groups))}
}

// vectorOf returns the number of a vector of a source group: each group has separate vectors.
func (l *fakeLoop) vectorOf(source int) uint32 {
	n := uint32(len(l.layout.Groups))
	return 1 + n*l.rng.Uint32N(150/n) + uint32(source)
}

// step makes up to n random changes and commits.
func (l *fakeLoop) step(n int) uint64 {
	for range 1 + l.rng.IntN(n) {
		p := l.pick()
		switch l.rng.IntN(6) {
		case 0: // a vector appears or changes; its destinations are not marked
			id := 1 + l.rng.Uint32N(150)
			l.vectors[id] = l.randomVector()
			l.builder.MarkVector(id)
		case 1, 2:
			id := l.vectorOf(p.Source)
			if _, ok := l.vectors[id]; !ok {
				id = 0
			}
			d := Destination{Vector: id, InEffect: l.rng.IntN(2) == 0, SlotsMoved: l.rng.Uint32N(4)}
			if id == 0 {
				d.Reason = "no route is usable"
			}
			l.destinations[p] = d
			l.builder.MarkDestination(p)
		case 3, 4:
			delete(l.destinations, p)
			l.builder.MarkDestination(p)
		case 5: // a vector is removed; its destinations move first
			id := 1 + l.rng.Uint32N(150)
			for _, q := range slices.SortedFunc(maps.Keys(l.destinations), compareKeys) {
				if l.destinations[q].Vector == id {
					l.destinations[q] = Destination{Reason: "its group is gone"}
					l.builder.MarkDestination(q)
				}
			}
			delete(l.vectors, id)
			l.builder.MarkVector(id)
		}
	}
	return l.builder.Commit()
}

// touch makes a change that every watcher without a filter receives.
func (l *fakeLoop) touch() {
	l.destinations[prefixAt(0)] = Destination{Reason: "touched"}
	l.builder.MarkDestination(prefixAt(0))
	l.builder.Commit()
}

// rowName returns the name of a row in pictures.
func rowName(destination string, sources []string) string {
	return destination + " from " + strings.Join(sources, ",")
}

// picture returns the whole current table, computed without the builder's views: it is the reference model.
func (l *fakeLoop) picture(f *filter) map[string]*farev1.DestinationWeights {
	out := map[string]*farev1.DestinationWeights{}
	for p, d := range l.destinations {
		g := l.layout.Groups[p.Source]
		if len(f.sources) > 0 && !slices.ContainsFunc(l.original[p.Source].Sources, func(s netip.Prefix) bool { return slices.Contains(f.sources, s.Addr()) }) {
			continue
		}
		selected := len(f.destinations) == 0
		for _, c := range f.destinations {
			selected = selected || c.Contains(p.Addr())
		}
		if !selected {
			continue
		}
		v := &View{layout: &l.layout}
		if data, ok := l.vectors[d.Vector]; ok {
			page := new(vectorPage)
			page[d.Vector%vectorPageSize] = &vector{Vector: data}
			v.vectors = make([]*vectorPage, d.Vector/vectorPageSize+1)
			v.vectors[d.Vector/vectorPageSize] = page
		}
		out[rowName(p.String(), g.names())] = v.render(&destination{Destination: d, key: p}, f)
	}
	return out
}

// start runs the loop's goroutine until the test ends.
func (l *fakeLoop) start(t testing.TB) {
	end := make(chan struct{})
	go func() {
		defer close(l.stopped)
		for {
			select {
			case fn := <-l.calls:
				fn()
			case <-end:
				return
			}
		}
	}()
	t.Cleanup(func() {
		close(end)
		<-l.stopped
	})
}

func (l *fakeLoop) do(ctx context.Context, fn func()) error {
	done := make(chan struct{})
	select {
	case l.calls <- func() { defer close(done); fn() }:
	case <-l.stopped:
		return errLoopStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	<-done
	return nil
}

// on runs fn on the loop.
func (l *fakeLoop) on(t testing.TB, fn func()) {
	t.Helper()
	if err := l.do(t.Context(), fn); err != nil {
		t.Fatal(err)
	}
}

// routeOnly has a route, and no weights, like every destination of a leaf without a data plane.
var routeOnly = netip.MustParsePrefix("10.255.1.4/32")

func here(_ context.Context, fn func()) error { fn(); return nil }

func (l *fakeLoop) service(t testing.TB, change func(*ServiceConfig)) *Service {
	t.Helper()
	c := ServiceConfig{
		Reader: l.builder.Reader(l.do), Version: "v1", Started: time.Unix(900, 0), Now: func() time.Time { return time.Unix(1010, 0) },
		Explain: func(p Key) (Explanation, bool) {
			_, ok := l.destinations[p]
			return Explanation{Rules: []string{"explained " + p.String()}}, ok || p.Prefix == routeOnly
		},
		Drain:        func(_ context.Context, r DrainRequest) (DrainTarget, []string, error) { return r.Target, nil, nil },
		ClearSession: func(context.Context, string) error { return nil },
		Reload:       func(context.Context, bool) ([]string, error) { return nil, nil },
		Record:       func(e Event) { _ = l.do(context.Background(), func() { l.builder.Event(e) }) },
		Log:          slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	if change != nil {
		change(&c)
	}
	s, err := NewService(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// address returns the bound TCP address of a server that has one.
func (s *served) address() string {
	return s.server.endpoints[len(s.server.endpoints)-1].Addr().String()
}

// served is a server on a unix socket, with a connected client.
type served struct {
	server  *Server
	conn    *grpc.ClientConn
	weights farev1.WeightServiceClient
	fabric  farev1.FabricServiceClient
	socket  string
	// stop ends the server and returns the result of Serve.
	stop func() error
}

func serve(t testing.TB, s *Service, change func(*ServerConfig)) *served {
	t.Helper()
	c := ServerConfig{Socket: filepath.Join(t.TempDir(), "s")}
	if change != nil {
		change(&c)
	}
	server, err := NewServer(c, s, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan error, 1)
	go func() { result <- server.Serve(ctx) }()
	var ended bool
	out := &served{server: server, socket: c.Socket}
	out.stop = func() error {
		cancel()
		if ended {
			return nil
		}
		ended = true
		return <-result
	}
	t.Cleanup(func() {
		if err := out.stop(); err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	out.conn = dial(t, "unix:"+c.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	out.weights, out.fabric = farev1.NewWeightServiceClient(out.conn), farev1.NewFabricServiceClient(out.conn)
	return out
}

func dial(t testing.TB, target string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(target, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// eventually waits for a condition, which it checks after every tick.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("waited in vain: " + what)
		}
	}
}
