package worker

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/fleet/drain"
	"github.com/fared/fared/internal/grpcserve"
	"github.com/fared/fared/internal/waits"
	"github.com/fared/fared/topo"
	"github.com/fared/fared/topo/locate"
)

const (
	// settle is the time between a change and a decision: reports of one failure arrive together.
	settle = 100 * time.Millisecond
	// soon and retry are the first and the longest time between attempts to follow another worker.
	soon, retry = 20 * time.Millisecond, 500 * time.Millisecond
	// maxRequest limits a report. 2,048 servers with one path each have 400 KiB.
	maxRequest = 16 << 20
	// buffer is the size of a connection's read and write buffers; gRPC's default is 32 KiB, for bulk data.
	buffer = 4 << 10
)

// Config is the configuration of a worker.
type Config struct {
	Fabric *topo.Fabric
	// Peers are the addresses of the other workers, and Credentials those of connections to them.
	Peers       []string
	Credentials credentials.TransportCredentials
	// Engine keeps the drains; nil refuses drains. Budget is what they must leave.
	Engine drain.Engine
	Budget drain.Budget
	Log    *slog.Logger
}

// Worker is one worker. Use New.
type Worker struct {
	fleetv1.UnimplementedFleetServiceServer
	Config
	*store
	locator    *locate.Locator
	found      atomic.Pointer[decision]
	memory     locate.Memory
	told       told
	arrived    map[string]chan struct{} // by peer: a worker has started, perhaps this one; one slot
	whatIf     sync.Mutex               // one simulation at a time
	book       *drain.Book              // nil without an engine
	begun      time.Time
	granted    atomic.Pointer[ledger]
	lists      atomic.Uint64 // how often the drains have changed
	tally      *tally
	pages      pages
	complained atomic.Pointer[time.Time] // the time of the last logged refusal
}

// decision is the named faults of a revision.
type decision struct {
	revision uint64
	faults   []*fleetv1.Fault
}

// New returns a worker of a fabric.
func New(c Config) *Worker {
	w := &Worker{Config: c, store: newStore(c.Fabric), locator: locate.New(c.Fabric), tally: newTally(c.Peers), begun: time.Now(), arrived: map[string]chan struct{}{}}
	w.found.Store(&decision{})
	for _, p := range c.Peers {
		w.arrived[p] = make(chan struct{}, 1)
	}
	if c.Engine != nil {
		w.book = &drain.Book{Engine: c.Engine, Fabric: c.Fabric, Budget: c.Budget, Now: time.Now, Present: func() []string {
			views, _ := w.views()
			failed, drained := w.present(views)
			for _, name := range drained {
				failed = append(failed, drainPrefix+name)
			}
			return failed
		}}
	}
	return w
}

// Serve answers on a listener until ctx ends, and follows the other workers. options are those of
// grpcserve.Open.
func (w *Worker) Serve(ctx context.Context, l net.Listener, options ...grpc.ServerOption) error {
	s := grpc.NewServer(append(options,
		grpc.MaxRecvMsgSize(maxRequest), grpc.ReadBufferSize(buffer), grpc.WriteBufferSize(buffer), grpc.ConnectionTimeout(10*time.Second),
		// A vanished node is noticed after 13 s.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	)...)
	fleetv1.RegisterFleetServiceServer(s, w)
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() { w.decide(ctx) })
	done.Go(func() { w.followDrains(ctx) })
	for _, peer := range w.Peers {
		done.Go(func() { w.followPeer(ctx, peer) })
	}
	stop := context.AfterFunc(ctx, s.Stop)
	err := s.Serve(l)
	if !stop() {
		err = nil // asked for
	}
	cancel()
	done.Wait()
	return err
}

// decide names the parts at fault after changes.
func (w *Worker) decide(ctx context.Context) {
	expiry := time.NewTicker(time.Second)
	defer expiry.Stop()
	var held <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-held:
		case <-expiry.C:
			before := w.found.Load().revision
			if w.expire(); before == w.now() {
				continue
			}
		case <-w.changed:
			if !waits.For(ctx, settle) {
				return
			}
		}
		begun := time.Now()
		held = nil
		if wait := w.decideOnce(begun); wait > 0 {
			held = time.After(wait)
		}
		w.tally.decision.Observe(time.Since(begun).Seconds())
		if !waits.For(ctx, time.Since(begun)) { // at most half of a processor
			return
		}
	}
}

// now returns the revision of the view.
func (s *store) now() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.revision
}

// decideOnce names the parts at fault; there is more to name or to tell after wait, unless that is 0.
func (w *Worker) decideOnce(now time.Time) (wait time.Duration) {
	views, revision := w.views()
	d := &decision{revision: revision}
	named, wait := w.memory.Settle(now, w.locator.Locate(views))
	for _, g := range named {
		d.faults = append(d.faults, &fleetv1.Fault{
			Part: g.Part, Kind: g.Kind, Fault: g.Fault, Side: g.Side, Alternatives: g.Alternatives, Evidence: g.Evidence,
			ConfidencePpb: uint32(g.Confidence * 1e9), SinceNs: uint64(g.Since.UnixNano()), LossPpb: uint32(g.Rate * 1e9),
		})
	}
	w.found.Store(d)
	if later := w.tell(d.faults, now); wait == 0 || later > 0 && later < wait {
		wait = later
	}
	w.pages.changed()
	return wait
}

const (
	// calm is the time for which the parts at fault stay the same before the log and the timeline have them: the
	// reports of a leaf's failure name a cable first, then some, then the leaf.
	calm = 500 * time.Millisecond
	// overdue is the time after which they have them in any case.
	overdue = 5 * time.Second
)

// told is the parts at fault that the log has, and those of the last decision.
type told struct {
	log, last      []*fleetv1.Fault
	since, pending time.Time // of last; of the first difference between both
}

// tell logs the differences to the faults of the log; if it is too early, it returns the time to wait.
func (w *Worker) tell(faults []*fleetv1.Fault, now time.Time) (wait time.Duration) {
	t := &w.told
	begun, ended := without(faults, t.log), without(t.log, faults)
	if len(begun)+len(ended) == 0 {
		*t = told{log: t.log}
		return 0
	}
	if t.pending.IsZero() {
		t.pending = now
	}
	if t.since.IsZero() || len(without(faults, t.last))+len(without(t.last, faults)) > 0 {
		t.last, t.since = faults, now
	}
	if wait := min(t.since.Add(calm).Sub(now), t.pending.Add(overdue).Sub(now)); wait > 0 {
		return wait
	}
	for _, f := range begun {
		w.Log.Warn("a part is at fault", "part", f.Part, "fault", f.Fault, "evidence", f.Evidence)
	}
	for _, f := range ended {
		w.Log.Info("a part is no longer at fault", "part", f.Part, "fault", f.Fault)
	}
	w.pages.note(t.log, faults, now)
	*t = told{log: faults}
	return 0
}

// without returns the faults that others do not have.
func without(faults, others []*fleetv1.Fault) []*fleetv1.Fault {
	return slices.DeleteFunc(slices.Clone(faults), func(f *fleetv1.Fault) bool {
		return slices.ContainsFunc(others, func(o *fleetv1.Fault) bool { return o.Part == f.Part && o.Fault == f.Fault })
	})
}

// Report implements fleetv1.FleetServiceServer.
func (w *Worker) Report(stream grpc.BidiStreamingServer[fleetv1.ReportRequest, fleetv1.ReportResponse]) error {
	var n *topo.Node
	var connection uint64
	var done sync.WaitGroup
	defer done.Wait()
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	for {
		m, err := stream.Recv()
		if n != nil && err != nil {
			w.end(n, connection, own)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if n == nil {
			if n, err = w.admit(ctx, m); err != nil {
				return w.refuse(ctx, m.RouterId, err)
			}
			connection = m.ConnectionNs
			wake := w.open(n)
			defer w.close(n, wake)
			done.Go(func() { w.answer(ctx, n, wake, stream) })
		}
		if m.RouterId != n.ID.String() || m.ConnectionNs != connection {
			w.end(n, connection, own)
			return w.refuse(ctx, m.RouterId, status.Errorf(codes.InvalidArgument, "a stream of %s has a message of another node or connection", n.Name))
		}
		kept := w.set(n, m, own)
		w.tally.count(kept)
		if !kept {
			return status.Errorf(codes.Aborted, "%s has connected again", n.Name)
		}
	}
}

// quiet is the time for which one refused report is logged: their nodes start again and again, perhaps all of a fabric.
const quiet = time.Minute

// refuse notes a refused report and returns its error.
func (w *Worker) refuse(ctx context.Context, id string, err error) error {
	w.tally.refused.Add(1)
	w.strange(&fleetv1.RefusedNode{RouterId: id[:min(len(id), maxID)], Address: strings.TrimPrefix(grpcserve.CallerOf(ctx).Client(), "address "),
		Reason: status.Convert(err).Message(), LastNs: uint64(time.Now().UnixNano())})
	if last := w.complained.Load(); (last == nil || time.Since(*last) >= quiet) && w.complained.CompareAndSwap(last, new(time.Now())) {
		w.Log.Warn("a report is refused; others are not logged for a minute", "error", status.Convert(err).Message())
	}
	return err
}

// admit returns the node of the first message of a stream, if its certificate is that of the node.
func (w *Worker) admit(ctx context.Context, m *fleetv1.ReportRequest) (*topo.Node, error) {
	n, err := w.node(m.RouterId)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if caller := grpcserve.CallerOf(ctx); !mayReport(caller, n) {
		return nil, status.Errorf(codes.PermissionDenied, "the certificate of %s may not report for %[2]s: its name must be %[2]s, %[2]s.DOMAIN or %[3]s", caller, n.Name, m.RouterId)
	}
	return n, nil
}

// mayReport reports whether a certificate names a node: by the node's name in the fabric, alone or as the first part of
// a host's name, or by its identifier. A caller without a certificate is on this machine.
func mayReport(caller grpcserve.Caller, n *topo.Node) bool {
	return caller.Names == nil || slices.ContainsFunc(caller.Names, func(name string) bool {
		host, _, _ := strings.Cut(name, ".")
		return strings.EqualFold(host, n.Name) || name == n.ID.String()
	})
}

// answer sends the node's revision and drains whenever they change, until ctx or the stream ends.
func (w *Worker) answer(ctx context.Context, n *topo.Node, wake chan struct{}, stream grpc.BidiStreamingServer[fleetv1.ReportRequest, fleetv1.ReportResponse]) {
	last := &fleetv1.ReportResponse{}
	for {
		m := &fleetv1.ReportResponse{Revision: w.revisionOf(n), Drains: w.drainsOf(n)}
		if !proto.Equal(m, last) && stream.Send(m) != nil {
			return // Recv returns the error
		}
		last = m
		select {
		case <-ctx.Done():
			return
		case <-wake:
		}
	}
}

// Follow implements fleetv1.FleetServiceServer.
func (w *Worker) Follow(_ *fleetv1.FollowRequest, stream grpc.ServerStreamingServer[fleetv1.FollowResponse]) error {
	for _, c := range w.arrived {
		waits.Ring(c)
	}
	f := w.follow()
	defer w.unfollow(f)
	if err := stream.SendHeader(nil); err != nil { // also without nodes
		return err
	}
	for {
		for m := w.drain(f); m != nil; m = w.drain(f) {
			if err := stream.Send(m); err != nil {
				return err
			}
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-f.wake:
		}
	}
}

// followPeer keeps a stream from another worker open. A failure is logged once until that worker answers again.
func (w *Worker) followPeer(ctx context.Context, peer string) {
	failed, pause := false, waits.Pause{First: soon, Most: retry}
	for ctx.Err() == nil {
		begun := time.Now()
		err := w.followOnce(ctx, peer)
		if w.tally.peers[peer].Swap(false) {
			failed = false
		}
		w.endAll(peer)
		if !failed && ctx.Err() == nil {
			w.Log.Warn("another worker does not answer, and is tried again", "worker", peer, "error", status.Convert(err).Message())
		}
		failed = true
		select {
		case <-ctx.Done():
		case <-w.arrived[peer]:
		case <-time.After(pause.Next(time.Since(begun))):
		}
	}
}

func (w *Worker) followOnce(ctx context.Context, peer string) error {
	conn, err := grpc.NewClient("passthrough:///"+peer, grpc.WithTransportCredentials(w.Credentials), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(chunk*maxRequest)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}))
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := fleetv1.NewFleetServiceClient(conn).Follow(ctx, &fleetv1.FollowRequest{})
	if err != nil {
		return err
	}
	if _, err := stream.Header(); err == nil {
		w.tally.peers[peer].Store(true)
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, x := range m.Nodes {
			if n, err := w.node(x.RouterId); err == nil {
				w.tally.count(w.set(n, x, peer))
			}
		}
		for _, x := range m.Refused {
			w.strangeOf(peer, x)
		}
		for _, id := range m.Gone {
			if n, err := w.node(id); err == nil {
				w.end(n, w.connection(n), peer)
			}
		}
	}
}
