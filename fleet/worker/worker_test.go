package worker

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/fleet/drain"
	"github.com/fared/fared/fleet/report"
	"github.com/fared/fared/internal/inprocess"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/waits"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// patience is for machines under load.
const patience = time.Minute

func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

func number(t testing.TB, s topo.Spec) *topo.Fabric {
	t.Helper()
	f, err := topo.New(s)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// listen returns a listener on a free port.
func listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// serve runs a worker until the returned function or the test's end.
func serve(t testing.TB, f *topo.Fabric, l net.Listener, peers ...string) (w *Worker, stop func()) {
	t.Helper()
	return serveConfig(t, l, Config{Fabric: f, Peers: peers})
}

func serveConfig(t testing.TB, l net.Listener, c Config) (w *Worker, stop func()) {
	t.Helper()
	c.Credentials = insecure.NewCredentials()
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	w = New(c)
	w.begun = w.begun.Add(-trust) // silent servers have had their time
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.Serve(ctx, l) }()
	stopped := false
	stop = func() {
		if cancel(); !stopped {
			stopped = true
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(stop)
	return w, stop
}

func ask(t testing.TB, address string) fleetv1.FleetServiceClient {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return fleetv1.NewFleetServiceClient(conn)
}

func faults(t testing.TB, c fleetv1.FleetServiceClient) (names []string) {
	t.Helper()
	m, err := c.GetFleet(t.Context(), &fleetv1.GetFleetRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range m.Faults {
		names = append(names, f.Part+" "+f.Fault)
	}
	return names
}

// daemons starts a fabric of real daemons in this process, and a reporter for each node.
func daemons(t testing.TB, f *topo.Fabric, workers ...string) backend.Backend {
	t.Helper()
	free := listen(t)
	port := free.Addr().(*net.TCPAddr).Port
	free.Close()
	b := backend.NewInProcess(&backend.Plan{Fabric: f, Site: topo.Site{AssumeUp: true, Port: port, Quick: true, Dataplane: func(node string) string {
		return map[topo.Kind]string{topo.KindServer: "memory:"}[f.Node(node).Kind]
	}}}, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { b.Close(false) })
	ctx := t.Context()
	if err := b.Build(ctx, func(err error) { t.Error(err) }); err != nil {
		t.Fatal(err)
	}
	if err := b.Start(ctx); err != nil {
		t.Fatal(err)
	}
	for _, n := range f.Nodes() {
		conn := inprocess.New()
		farev1.RegisterFabricServiceServer(conn, b.API(n).(farev1.FabricServiceServer))
		farev1.RegisterWeightServiceServer(conn, b.API(n).(farev1.WeightServiceServer))
		ctx, cancel := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() {
			done <- report.Run(ctx, report.Config{Daemon: conn, Workers: workers, Credentials: insecure.NewCredentials(), Log: slog.New(slog.DiscardHandler)})
		}()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
			conn.Close()
		})
	}
	return b
}

// TestRealDaemons names the failures of a fabric of daemons, with sessions over the loopback interface: half a cable, a
// leaf, a server; and nothing once they are over.
func TestRealDaemons(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 3, Underlay: netip.MustParsePrefix("127.0.0.0/8")})
	l := listen(t)
	serve(t, f, l)
	c := ask(t, l.Addr().String())
	b := daemons(t, f, l.Addr().String())
	until(t, "all nodes report, and all pairs have both planes", func() bool {
		m, err := c.GetFleet(t.Context(), &fleetv1.GetFleetRequest{}, grpc.WaitForReady(true))
		pairs, perr := c.ListPairs(t.Context(), &fleetv1.ListPairsRequest{})
		return err == nil && perr == nil && m.ServersReporting == 3 && m.SwitchesReporting == 2 && len(m.Faults) == 0 && slices.Equal(pairs.PairsByPlanes, []uint64{0, 0, 6})
	})
	for name, want := range map[string]string{"server2/p1.0": "server2/p1.0 dark", "leaf0": "leaf0 dark", "server3": "server3 dark"} {
		found, err := f.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		set := func(connected bool) {
			var all []backend.Cable
			for _, cable := range found {
				all = append(all, backend.Cable{Cable: cable, Connected: connected})
			}
			if err := b.SetCables(t.Context(), all); err != nil {
				t.Fatal(err)
			}
		}
		set(false)
		until(t, want, func() bool { return slices.Equal(faults(t, c), []string{want}) })
		if name == "leaf0" {
			until(t, "pairs with one plane", func() bool {
				pairs, err := c.ListPairs(t.Context(), &fleetv1.ListPairsRequest{Count: 1})
				return err == nil && slices.Equal(pairs.PairsByPlanes, []uint64{0, 6, 0}) && pairs.Pairs[0].Planes == 1
			})
			what, err := whatIf(t, c, &fleetv1.WhatIfRequest{Fail: []string{"server1/p1"}})
			if err != nil || !slices.Equal(what.Cases[0].PairsByPlanes, []uint64{4, 2, 0}) {
				t.Errorf("server1/p1 in addition to leaf0: %v %v", what, err)
			}
		}
		set(true)
		until(t, "nothing after the end of "+name, func() bool { return len(faults(t, c)) == 0 })
	}
}

// message returns a whole state of a node.
func message(f *topo.Fabric, n *topo.Node, connection, revision uint64) *fleetv1.ReportRequest {
	m := &fleetv1.ReportRequest{RouterId: n.ID.String(), ConnectionNs: connection, Revision: revision, Ports: &fleetv1.Ports{}}
	for _, c := range f.At(n) {
		here, _ := c.At(n)
		m.Ports.Ports = append(m.Ports.Ports, &fleetv1.Port{Device: here.Device, State: "up", SinceNs: 1})
	}
	if n.Kind != topo.KindServer {
		return m
	}
	m.Paths = &fleetv1.Paths{}
	for p := range f.Planes {
		m.Paths.Planes = append(m.Paths.Planes, f.PlaneName(p))
	}
	learned := make([]uint64, f.Planes)
	for p := range learned {
		learned[p] = uint64(f.Speed) * uint64(f.SubPorts)
	}
	path := &fleetv1.Path{Source: f.LoopbacksAt(n.Index, 0)[0].Addr().String(), BandwidthBps: learned}
	add := func(from, to int) {
		if from < to {
			path.Destinations = append(path.Destinations, &fleetv1.Range{First: f.LoopbacksAt(from, 0)[0].Addr().String(), Count: uint32((to - from) * f.GPUs)})
		}
	}
	add(0, n.Index)
	add(n.Index+1, f.Servers)
	m.Paths.Paths = append(m.Paths.Paths, path)
	return m
}

// simulated is a daemon that reports a fixed state, and connects again if its worker is lost.
func simulated(ctx context.Context, f *topo.Fabric, n *topo.Node, workers []string, options ...grpc.DialOption) {
	for ctx.Err() == nil {
		for _, w := range report.Order(workers, n.ID.String()) {
			conn, err := grpc.NewClient("passthrough:///"+w, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
			if err != nil {
				continue
			}
			if stream, err := fleetv1.NewFleetServiceClient(conn).Report(ctx); err == nil {
				for err = stream.Send(message(f, n, uint64(time.Now().UnixNano()), 1)); err == nil; {
					_, err = stream.Recv()
				}
			}
			conn.Close()
		}
		waits.For(ctx, 100*time.Millisecond)
	}
}

// reports returns the states whose streams are open.
func (s *store) reports() map[string]*fleetv1.ReportRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[string]*fleetv1.ReportRequest{}
	for n, now := range s.states {
		if now.ended.IsZero() {
			all[n.ID.String()] = now.report
		}
	}
	return all
}

// whole reports whether all workers have the states of all servers.
func whole(f *topo.Fabric, all []*Worker) func() bool {
	return func() bool {
		first := all[0].reports()
		for _, w := range all {
			got := w.reports()
			if len(got) != f.Servers {
				return false
			}
			for id, m := range got {
				if !proto.Equal(m, first[id]) {
					return false
				}
			}
		}
		return true
	}
}

// TestWorkersChaos ends one or two of three workers at random and starts them again, and requires the whole view of all
// after each time.
func TestWorkersChaos(t *testing.T) {
	gate.Slow(t, gate.Models, "a hundred ends of workers")
	f := number(t, topo.Spec{Planes: 2, Servers: 64})
	var addresses []string
	var listeners []net.Listener
	for range 3 {
		l := listen(t)
		listeners, addresses = append(listeners, l), append(addresses, l.Addr().String())
	}
	workers, stops := make([]*Worker, 3), make([]func(), 3)
	begin := func(i int, l net.Listener) {
		workers[i], stops[i] = serve(t, f, l, slices.Delete(slices.Clone(addresses), i, i+1)...)
	}
	for i, l := range listeners {
		begin(i, l)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	defer done.Wait()
	defer cancel()
	for _, n := range f.Server {
		done.Go(func() { simulated(ctx, f, n, addresses) })
	}
	random := rand.New(rand.NewPCG(29, 0))
	var worst time.Duration
	for range 100 {
		ended := random.Perm(3)[:1+random.IntN(2)]
		for _, i := range ended {
			stops[i]()
		}
		time.Sleep(time.Duration(random.IntN(500)) * time.Millisecond) // any moment of the reconnections
		for _, i := range ended {
			l, err := net.Listen("tcp4", addresses[i])
			if err != nil {
				t.Fatal(err)
			}
			begin(i, l)
		}
		back := time.Now()
		until(t, "all workers have the whole view", whole(f, workers))
		worst = max(worst, time.Since(back))
	}
	t.Logf("the whole view at most %s after the return", worst)
}

// TestWorkersAgree loses one of three workers: its nodes spread over the others, and every worker has the whole view.
func TestWorkersAgree(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 24})
	var listeners []net.Listener
	var addresses []string
	for range 3 {
		l := listen(t)
		listeners, addresses = append(listeners, l), append(addresses, l.Addr().String())
	}
	var workers []*Worker
	var stops []func()
	for i, l := range listeners {
		w, stop := serve(t, f, l, slices.Delete(slices.Clone(addresses), i, i+1)...)
		workers, stops = append(workers, w), append(stops, stop)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	defer done.Wait()
	defer cancel()
	for _, n := range f.Server {
		done.Go(func() { simulated(ctx, f, n, addresses) })
	}
	until(t, "three workers have the same view", whole(f, workers))
	for _, w := range workers {
		ours := 0
		for _, n := range f.Server {
			w.mu.Lock()
			if w.states[n].origin == own {
				ours++
			}
			w.mu.Unlock()
		}
		if ours == 0 || ours == f.Servers {
			t.Errorf("%d of %d nodes report to one worker", ours, f.Servers)
		}
	}
	stops[1]()
	until(t, "two workers have the same view", whole(f, []*Worker{workers[0], workers[2]}))
	l, err := net.Listen("tcp4", addresses[1])
	if err != nil {
		t.Fatal(err)
	}
	back, _ := serve(t, f, l, addresses[0], addresses[2])
	until(t, "the restarted worker has the view", whole(f, []*Worker{workers[0], back, workers[2]}))
}

// TestStates merges messages of a node: sections replace sections, a later connection everything, and old messages
// nothing.
func TestStates(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 2})
	s := newStore(f)
	n := f.Server[0]
	device := f.At(n)[0].Down.Device
	ports := func(state string) *fleetv1.Ports {
		return &fleetv1.Ports{Ports: []*fleetv1.Port{{Device: device, State: state}, {Device: "unknown0", State: "dark"}}}
	}
	first := message(f, n, 10, 1)
	if !s.set(n, first, own) {
		t.Fatal("the first message is old")
	}
	if !s.set(n, &fleetv1.ReportRequest{RouterId: n.ID.String(), ConnectionNs: 10, Revision: 2, Ports: ports("dark")}, own) {
		t.Fatal("the second message is old")
	}
	now := s.states[n]
	if now.report.Paths != first.Paths || now.report.Ports.Ports[0].State != "dark" || now.view.Ports[0].State.String() != "dark" || now.view.Ports[1].State.String() != "unknown" || len(now.view.Paths) != 1 {
		t.Errorf("merged %+v", now)
	}
	s.set(n, &fleetv1.ReportRequest{RouterId: n.ID.String(), ConnectionNs: 10, Revision: 1, Ports: ports("up")}, own)
	s.set(n, &fleetv1.ReportRequest{RouterId: n.ID.String(), ConnectionNs: 10, Revision: 9, Ports: ports("up")}, "peer")
	if s.set(n, &fleetv1.ReportRequest{RouterId: n.ID.String(), ConnectionNs: 9, Revision: 9, Ports: ports("up")}, own) || s.states[n].report.Revision != 2 {
		t.Errorf("an old message counts: %v", s.states[n].report)
	}
	s.set(n, &fleetv1.ReportRequest{RouterId: n.ID.String(), ConnectionNs: 11, Revision: 1, Ports: ports("up")}, "peer")
	if now := s.states[n]; now.report.Paths != nil || now.view.Paths != nil || now.origin != "peer" {
		t.Errorf("a later connection keeps %+v", now)
	}
	s.end(n, 10, own) // of the connection before
	s.end(n, 11, own)
	if !s.states[n].ended.IsZero() {
		t.Error("the end of another stream counts")
	}
	s.endAll("peer")
	if s.states[n].ended.IsZero() || !s.expire() {
		t.Error("a state without a stream is gone at once, or never")
	}
	s.states[n].ended = time.Now().Add(-grace)
	if s.expire() || len(s.states) != 0 {
		t.Error("a state without a stream stays")
	}
}

// TestStrangers refuses nodes of other fabrics, and pairs beyond the limit.
func TestStrangers(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 2})
	l := listen(t)
	serve(t, f, l)
	c := ask(t, l.Addr().String())
	stream, err := c.Report(t.Context(), grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&fleetv1.ReportRequest{RouterId: "10.9.9.9"}); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a stranger reports: %v", err)
	}
	if _, err := c.ListPairs(t.Context(), &fleetv1.ListPairsRequest{Count: 5000}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("5,000 pairs: %v", err)
	}
	if _, err := whatIf(t, c, &fleetv1.WhatIfRequest{Fail: []string{"leaf9"}}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("an unknown leaf: %v", err)
	}
	m, err := whatIf(t, c, &fleetv1.WhatIfRequest{AllSingle: true})
	alike := uint64(0)
	for _, c := range m.GetCases() {
		alike += c.Alike
	}
	if err != nil || alike != uint64(len(f.Single())) || len(m.Cases) >= len(f.Single()) {
		t.Errorf("all single failures: %d in %d cases, %v", alike, len(m.GetCases()), err)
	}
}

// TestStrangeDaemon ends the reporter of a daemon that is not of the workers' fabric, with the remedy.
func TestStrangeDaemon(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 2})
	l := listen(t)
	serve(t, f, l)
	conn := inprocess.New()
	defer conn.Close()
	farev1.RegisterFabricServiceServer(conn, strange{id: "192.0.2.1"})
	farev1.RegisterWeightServiceServer(conn, farev1.UnimplementedWeightServiceServer{})
	err := report.Run(t.Context(), report.Config{Daemon: conn, Workers: []string{l.Addr().String()}, Credentials: insecure.NewCredentials(), Log: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "compare the worker's fabric file") {
		t.Errorf("the error is %v", err)
	}
}

// TestAbsentDaemon counts a node as missing while its daemon does not answer, though its reporter runs.
func TestAbsentDaemon(t *testing.T) {
	gate.Needed(t, "no shorter test has a reporter without its daemon: it waits for a restart, the worker for another connection")
	f := number(t, topo.Spec{Planes: 2, Servers: 2})
	l := listen(t)
	serve(t, f, l)
	c := ask(t, l.Addr().String())
	conn := inprocess.New()
	defer conn.Close()
	var absent atomic.Bool
	farev1.RegisterFabricServiceServer(conn, strange{id: f.Node("server1").ID.String(), absent: &absent})
	farev1.RegisterWeightServiceServer(conn, farev1.UnimplementedWeightServiceServer{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- report.Run(ctx, report.Config{Daemon: conn, Workers: []string{l.Addr().String()}, Credentials: insecure.NewCredentials(), Log: slog.New(slog.DiscardHandler)})
	}()
	for _, reporting := range []uint32{1, 0, 1} {
		absent.Store(reporting == 0)
		until(t, "the node reports while its daemon answers", func() bool {
			m, err := c.GetFleet(t.Context(), &fleetv1.GetFleetRequest{}, grpc.WaitForReady(true))
			return err == nil && m.ServersReporting == reporting
		})
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// strange is a daemon with an identifier and no planes, which may not answer.
type strange struct {
	farev1.UnimplementedFabricServiceServer
	id     string
	absent *atomic.Bool // nil: it answers
}

func (s strange) GetStatus(context.Context, *farev1.GetStatusRequest) (*farev1.GetStatusResponse, error) {
	if s.absent != nil && s.absent.Load() {
		return nil, status.Error(codes.Unavailable, "absent")
	}
	return &farev1.GetStatusResponse{RouterId: s.id}, nil
}

func (strange) ListSessions(context.Context, *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error) {
	return &farev1.ListSessionsResponse{}, nil
}

func (strange) ListPlanes(context.Context, *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error) {
	return &farev1.ListPlanesResponse{}, nil
}

// engine keeps a value in this process.
type engine struct {
	mu       sync.Mutex
	value    []byte
	revision int
}

// name returns the revision as text, empty at first.
func (e *engine) name() string {
	if e.revision == 0 {
		return ""
	}
	return strconv.Itoa(e.revision)
}

func (e *engine) Load(context.Context) ([]byte, string, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.value, e.name(), nil
}

func (e *engine) Store(_ context.Context, value []byte, revision string) (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.name() != revision {
		return false, nil
	}
	e.value, e.revision = value, e.revision+1
	return true, nil
}

// TestDrain drains a leaf at all daemons, refuses a second one, and ends the drain; a worker that was restarted
// meanwhile knows it from the engine. A drain of an operator at a daemon counts.
func TestDrain(t *testing.T) {
	f := number(t, topo.Spec{Planes: 3, Servers: 2, SubPorts: 1, Underlay: netip.MustParsePrefix("127.0.0.0/8")})
	l := listen(t)
	address := l.Addr().String()
	c := Config{Fabric: f, Engine: &engine{}, Budget: drain.Budget{Planes: 2}}
	_, stop := serveConfig(t, l, c)
	b := daemons(t, f, address)
	client := ask(t, address)
	drained := func(n int) func() bool {
		return func() bool {
			m, err := client.ListDrains(t.Context(), &fleetv1.ListDrainsRequest{})
			return err == nil && len(m.Drains) > 0 && m.Drains[0].Part == "leaf1" && m.Drains[0].SubPorts == 2 && m.Drains[0].Drained == uint32(n)
		}
	}
	until(t, "all pairs have all planes", func() bool {
		pairs, err := client.ListPairs(t.Context(), &fleetv1.ListPairsRequest{}, grpc.WaitForReady(true))
		return err == nil && slices.Equal(pairs.PairsByPlanes, []uint64{0, 0, 0, 2})
	})
	if _, err := client.Drain(t.Context(), &fleetv1.DrainRequest{Part: "leaf1", Reason: "optics"}); err != nil {
		t.Fatal(err)
	}
	until(t, "both sub-ports are drained", drained(2))
	if _, err := client.Drain(t.Context(), &fleetv1.DrainRequest{Part: "server2/p0"}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a second plane: %v", err)
	}
	if m, err := client.Drain(t.Context(), &fleetv1.DrainRequest{Part: "server2/p0", Queue: true}); err != nil || !m.Queued || !strings.Contains(m.Reason, "server2") {
		t.Errorf("a queued drain: %v %v", m, err)
	}
	if _, err := client.Drain(t.Context(), &fleetv1.DrainRequest{Part: "leaf7"}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("an unknown leaf: %v", err)
	}
	if names := faults(t, client); len(names) != 0 {
		t.Errorf("a drained leaf is at fault: %v", names)
	}
	stop()
	l, err := net.Listen("tcp4", address)
	if err != nil {
		t.Fatal(err)
	}
	serveConfig(t, l, c)
	client = ask(t, address)
	until(t, "the restarted worker knows the drain", drained(2))
	if _, err := client.Undrain(t.Context(), &fleetv1.UndrainRequest{Part: "leaf1"}); err != nil {
		t.Fatal(err)
	}
	until(t, "the queued drain is granted, and carried out", func() bool {
		m, err := client.ListDrains(t.Context(), &fleetv1.ListDrainsRequest{})
		return err == nil && len(m.Drains) == 1 && !m.Drains[0].Queued && m.Drains[0].Drained == 1
	})
	if _, err := client.Undrain(t.Context(), &fleetv1.UndrainRequest{Part: "server2/p0"}); err != nil {
		t.Fatal(err)
	}
	until(t, "all planes are back", func() bool {
		pairs, err := client.ListPairs(t.Context(), &fleetv1.ListPairsRequest{})
		return err == nil && slices.Equal(pairs.PairsByPlanes, []uint64{0, 0, 0, 2})
	})
	if _, err := client.Undrain(t.Context(), &fleetv1.UndrainRequest{Part: "leaf1"}); status.Code(err) != codes.NotFound {
		t.Errorf("the end of no drain: %v", err)
	}
	device := f.At(f.Server[0])[2].Down.Device
	manual := &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: device}}
	if _, err := b.API(f.Server[0]).Drain(t.Context(), &farev1.DrainRequest{Target: manual, Reason: "by hand"}); err != nil {
		t.Fatal(err)
	}
	until(t, "the drain by hand reaches the worker", func() bool {
		m, err := client.GetFleet(t.Context(), &fleetv1.GetFleetRequest{})
		return err == nil && slices.Equal(m.Drained, []string{f.Server[0].Name + "/" + device}) // and no drain of before
	})
	if _, err := client.Drain(t.Context(), &fleetv1.DrainRequest{Part: "leaf0"}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("next to a drain by hand: %v", err)
	}
}

// TestNoEngine refuses drains without an engine.
func TestNoEngine(t *testing.T) {
	w := New(Config{Fabric: number(t, topo.Spec{Planes: 2, Servers: 2})})
	if _, err := w.Drain(t.Context(), &fleetv1.DrainRequest{Part: "leaf0"}); status.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
	if _, err := w.Undrain(t.Context(), &fleetv1.UndrainRequest{Part: "leaf0"}); status.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
	if _, err := w.ListDrains(t.Context(), &fleetv1.ListDrainsRequest{}); status.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
}

// TestTrust judges no drain before all servers report, or have had the time to do so.
func TestTrust(t *testing.T) {
	f := number(t, topo.Spec{Planes: 3, Servers: 2})
	w := New(Config{Fabric: f, Engine: &engine{}, Budget: drain.Budget{Planes: 2}})
	w.set(f.Server[0], message(f, f.Server[0], 1, 1), own)
	if w.settled() {
		t.Error("a new worker is settled without server2")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := w.Drain(ctx, &fleetv1.DrainRequest{Part: "leaf0"}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a drain without the report of server2: %v", err)
	}
	failed := message(f, f.Server[1], 1, 1)
	for _, p := range failed.Ports.Ports[:2] {
		p.State = "dark"
	}
	w.set(f.Server[1], failed, own)
	if _, err := w.Drain(t.Context(), &fleetv1.DrainRequest{Part: "leaf1"}); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "server2") {
		t.Errorf("a drain next to the failure of server2: %v", err)
	}
	w.begun = w.begun.Add(-trust)
	w.end(f.Server[1], 1, own)
	if !w.settled() {
		t.Error("a silent server blocks drains for ever")
	}
}

// TestProofs converts results of probes. A full list of losses may lack some, so the probes toward others do not count.
func TestProofs(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 400})
	s := newStore(f)
	m := &fleetv1.Proofs{Planes: []*fleetv1.ProvedPlane{{Plane: "p0", Probes: 40_000, Peers: 399}, {Plane: "p1", Probes: 40_000, Peers: 399}}}
	add := func(n int) {
		for range n {
			to := f.LoopbacksAt(len(m.Lossy)+1, 0)[0].Addr().String()
			m.Lossy = append(m.Lossy, &fleetv1.LossyPeer{Plane: "p1", Source: f.LoopbacksAt(0, 0)[0].Addr().String(), Destination: to, Probes: 100, Lost: 60})
		}
	}
	for _, want := range []struct{ lossy, probes, peers int }{{255, 40_000, 399}, {256, 25_600, 256}} {
		add(want.lossy - len(m.Lossy))
		sent, lost := s.proofs(f.Server[0], m)
		if len(lost) != want.lossy || sent[0].Probes != 40_000 || sent[1].Probes != float64(want.probes) || sent[1].Peers != want.peers {
			t.Errorf("%d losses of %+v, want %+v", len(lost), sent, want)
		}
	}
}
