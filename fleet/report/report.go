package report

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/client"
	"github.com/fared/fared/internal/waits"
)

const (
	// pace is the least time between two reads of the daemon, quiet the greatest one.
	pace  = 100 * time.Millisecond
	quiet = 2 * time.Second
	// glance is the time between reads of the probes alone: their losses are no events.
	glance = 500 * time.Millisecond
	// retry is the time between attempts to reach the daemon, and with soon at first a worker.
	soon, retry = 20 * time.Millisecond, 500 * time.Millisecond
	// home is the time after which a worker that is not the first is left.
	home = time.Hour
	// patience limits a read.
	patience = 10 * time.Second
	// absence is the time without an answer of the daemon after which the node no longer reports: its last state would
	// be taken for the present one. Restarts and upgrades take less.
	absence = 2 * time.Second
)

// Config is the configuration of Run.
type Config struct {
	// Daemon is a connection to the daemon's API.
	Daemon grpc.ClientConnInterface
	// Workers are the addresses of the workers, host:port.
	Workers []string
	// Credentials are those of the connections to workers.
	Credentials credentials.TransportCredentials
	Log         *slog.Logger
}

// reporter is the state of Run.
type reporter struct {
	Config
	wake   chan struct{} // the daemon may have changed
	change chan struct{} // the state has changed

	mu     sync.Mutex // guards the fields below
	node   *farev1.GetStatusResponse
	now    sections
	weight table
	wanted *fleetv1.NodeDrains // of the fleet; nil: not known
}

// Run reports until ctx ends. Failures of the daemon and of workers are repeated; an error is one that lasts, such as a
// node that is not of the workers' fabric.
func Run(ctx context.Context, c Config) error {
	r := &reporter{Config: c, wake: make(chan struct{}, 1), change: make(chan struct{}, 1), weight: table{rows: map[client.Key]row{}}}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var done sync.WaitGroup
	done.Go(func() { r.follow(ctx) })
	done.Go(func() { r.weights(ctx) })
	done.Go(func() { r.read(ctx) })
	err := r.send(ctx)
	cancel()
	done.Wait()
	return err
}

// complaint logs each error once until the work succeeds, at most maxSaid of them. Each goroutine has its own.
type complaint struct{ said []string }

// maxSaid bounds the errors of a complaint: a refused certificate alone has four texts in turn.
const maxSaid = 10

// ownAddress is this end of a connection in errors of package net. Its port differs at each attempt.
var ownAddress = regexp.MustCompile(`\S+->`)

func (c *complaint) note(log *slog.Logger, text string, err error, args ...any) {
	if err == nil {
		c.said = nil
		return
	}
	if now := ownAddress.ReplaceAllString(err.Error(), ""); len(c.said) < maxSaid && !slices.Contains(c.said, now) {
		c.said = append(c.said, now)
		log.Warn(text, append(args, "error", status.Convert(err).Message())...)
	}
}

// follow wakes the reader after every event of the daemon.
func (r *reporter) follow(ctx context.Context) {
	for ctx.Err() == nil {
		stream, err := farev1.NewFabricServiceClient(r.Daemon).WatchEvents(ctx, &farev1.WatchEventsRequest{}, grpc.WaitForReady(true))
		for err == nil {
			waits.Ring(r.wake)
			_, err = stream.Recv()
		}
		waits.For(ctx, retry)
	}
}

// weights follows the paths.
func (r *reporter) weights(ctx context.Context) {
	for ctx.Err() == nil {
		err := client.Watch(ctx, r.Daemon, client.Options{Filter: &farev1.WeightFilter{OmitPairs: true}}, func(u *client.Update) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.weight.apply(u)
			r.now.paths = r.weight.paths()
			waits.Ring(r.change)
			return nil
		})
		if err != nil {
			r.Log.Warn("the daemon refuses to report weights", "error", err)
		}
		waits.For(ctx, quiet)
	}
}

// read reads the daemon after events, and now and then.
func (r *reporter) read(ctx context.Context) {
	var silent complaint
	var whole time.Time // of the last read of all
	answered := time.Now()
	for all := true; ctx.Err() == nil; {
		begun := time.Now()
		err := r.readOnce(ctx, all)
		if ctx.Err() != nil {
			return
		}
		if silent.note(r.Log, "the daemon does not answer, and is asked again", err); err != nil {
			all = true
			if time.Since(answered) >= absence {
				r.forget()
			}
			waits.For(ctx, retry)
			continue
		}
		answered = time.Now()
		if all {
			whole = begun
		}
		waits.For(ctx, pace)
		select {
		case <-r.wake:
			all = true
		case <-ctx.Done():
		case <-time.After(glance - pace):
			all = time.Since(whole) >= quiet
		}
	}
}

// forget ends the report until the daemon answers again.
func (r *reporter) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.node = nil
	waits.Ring(r.change)
}

// readOnce reads the daemon: all, or its status alone.
func (r *reporter) readOnce(ctx context.Context, all bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	api := farev1.NewFabricServiceClient(r.Daemon)
	state, err := api.GetStatus(ctx, &farev1.GetStatusRequest{})
	if err != nil {
		return err
	}
	s := seen{status: state}
	if all {
		sessions, err := api.ListSessions(ctx, &farev1.ListSessionsRequest{})
		if err != nil {
			return err
		}
		planes, err := api.ListPlanes(ctx, &farev1.ListPlanesRequest{})
		if err != nil {
			return err
		}
		s.sessions, s.planes = sessions.Sessions, planes.Planes
	}
	r.reconcile(ctx, api, state.Drains)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.node, r.now.proofs = state, s.proofs(r.now.proofs)
	if all {
		r.now.ports = s.ports(r.now.ports, time.Now())
	}
	waits.Ring(r.change)
	return nil
}

// state returns the present state, or nil while the daemon is absent.
func (r *reporter) state() (*farev1.GetStatusResponse, sections) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.node, r.now
}

// await returns the node once the daemon answers, or nil at the end of ctx.
func (r *reporter) await(ctx context.Context) *farev1.GetStatusResponse {
	for {
		if node, _ := r.state(); node != nil {
			return node
		}
		select {
		case <-ctx.Done():
			return nil
		case <-r.change:
		}
	}
}

// errAbsent ends a stream whose daemon does not answer.
var errAbsent = errors.New("the daemon does not answer")

// send keeps a stream to a worker open while the daemon answers.
func (r *reporter) send(ctx context.Context) error {
	failed := map[string]*complaint{}
	for _, worker := range r.Workers {
		failed[worker] = new(complaint)
	}
	for pause := (waits.Pause{First: soon, Most: retry}); ; {
		node := r.await(ctx)
		if node == nil {
			return nil
		}
		begun := time.Now()
		for i, worker := range Order(r.Workers, node.RouterId) {
			until := ctx
			cancel := func() {}
			if i > 0 {
				until, cancel = context.WithTimeout(ctx, home)
			}
			answered, err := r.stream(until, worker)
			cancel()
			if answered {
				failed[worker].note(r.Log, "", nil)
			}
			if errors.Is(err, errAbsent) {
				break
			}
			switch code := status.Code(err); {
			case ctx.Err() != nil:
				return nil
			case code == codes.InvalidArgument || code == codes.PermissionDenied || code == codes.Unimplemented:
				return fmt.Errorf("worker %s: %s", worker, status.Convert(err).Message())
			}
			failed[worker].note(r.Log, "no report reaches the worker, and it is tried again", err, "worker", worker)
			if errors.Is(until.Err(), context.DeadlineExceeded) {
				break
			}
		}
		if !waits.For(ctx, pause.Next(time.Since(begun))) {
			return nil
		}
	}
}

// Order returns the workers in the order in which a node tries them (rendezvous hashing).
func Order(workers []string, node string) []string {
	rank := func(worker string) uint64 {
		h := fnv.New64a()
		h.Write([]byte(worker + "\x00" + node)) // a hash returns no error
		x := h.Sum64()                          // the last byte of FNV hardly reaches the upper bits; mix them (MurmurHash3, fmix64)
		x = (x ^ x>>33) * 0xff51afd7ed558ccd
		x = (x ^ x>>33) * 0xc4ceb9fe1a85ec53
		return x ^ x>>33
	}
	return slices.SortedFunc(slices.Values(workers), func(a, b string) int {
		return cmp.Or(cmp.Compare(rank(b), rank(a)), cmp.Compare(a, b))
	})
}

// stream sends the state to a worker until an error, and reports whether the worker has answered.
func (r *reporter) stream(ctx context.Context, worker string) (answered bool, err error) {
	conn, err := grpc.NewClient("passthrough:///"+worker, grpc.WithTransportCredentials(r.Credentials),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second}))
	if err != nil {
		return false, err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := fleetv1.NewFleetServiceClient(conn).Report(ctx)
	if err != nil {
		return false, err
	}
	ended := make(chan error, 1)
	var answers atomic.Bool
	go func() {
		for {
			m, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			answers.Store(true)
			if m.Drains != nil {
				r.mu.Lock()
				r.wanted = m.Drains
				r.mu.Unlock()
				waits.Ring(r.wake)
			}
		}
	}()
	var sent sections
	connection, revision := uint64(time.Now().UnixNano()), uint64(0)
	for {
		node, now := r.state()
		if node == nil {
			return answers.Load(), errAbsent
		}
		if m, changed := now.since(sent); changed {
			revision++
			m.RouterId, m.ConnectionNs, m.Revision = node.RouterId, connection, revision
			if stream.Send(m) != nil {
				err := <-ended
				return answers.Load(), err
			}
			sent = now
		}
		select {
		case err := <-ended:
			return answers.Load(), err
		case <-r.change:
		}
	}
}
