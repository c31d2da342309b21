package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/internal/journal"
	"github.com/fared/fared/dataplane/internal/naming"
	"github.com/fared/fared/dataplane/internal/pods"
	"github.com/fared/fared/dataplane/internal/returning"
	"github.com/fared/fared/internal/beat"
	"github.com/fared/fared/internal/directstream"
	"github.com/fared/fared/internal/grpcserve"
	"github.com/fared/fared/internal/hostcheck"
	"github.com/fared/fared/internal/inprocess"
	"github.com/fared/fared/internal/sdnotify"
	"github.com/fared/fared/internal/unixsocket"
)

// DescriptionHeader is the header of a Snapshot response that holds a marshaled fare.v1.HelloResponse.
const DescriptionHeader = "fared-description-bin"

const (
	// maxRequestBytes fits a request with the largest number of operations that the contract allows, each with 8
	// sources of 128 slots.
	maxRequestBytes = 16 << 20
	// pulse is the interval of health checks and of retries of the journal.
	pulse = 500 * time.Millisecond
	// hung is the time without a health check after which the driver hangs.
	hung = 10 * time.Second
	// silence is the pause after which a control plane counts as having resent its whole state.
	silence = 5 * time.Second
)

// Agent serves a data plane. Use New, then Run or Close.
type Agent struct {
	c         Config
	log       *slog.Logger
	driver    *driver
	watched   *watched
	namer     *naming.Namer     // nil with the memory driver
	keeper    *returning.Keeper // nil with the memory driver
	claim     *claim            // nil with the memory driver, or if squatted
	squatted  bool              // a process that is not an agent holds claimName
	journal   *journal.Journal  // nil without a journal
	server    *contract.Server
	pods      *pods.Manager
	health    *grpcserve.Health
	endpoints []*endpoint
	conn      *inprocess.Conn // nil unless the agent serves its own process
	metrics   *metricsServer  // nil without metrics
	refusals  grpcserve.Refusals
	policy    *policy
	broken    error // result of the last health check
	// limitations are those of the last look.
	limitations []hostcheck.Finding
	looked      atomic.Int64 // time of the last health check, in nanoseconds of the Unix time

	settled    atomic.Bool // leftovers of earlier runs are removed
	unsettled  error       // why settling failed
	operations uint64
	silent     time.Time // time of the last change of the number of operations
}

// endpoint is a listener with a separate gRPC server, because transport security and access are properties of a server.
type endpoint struct {
	net.Listener
	address string
	grpc    *grpc.Server
	direct  *directstream.Server // of a unix socket, for Program; else nil
	// programs lets every client program. With tls, certificates of clients may program; others may only read.
	programs bool
	tls      bool
	clients  []string
}

// New binds the addresses, opens the driver and restores the state of the journal. It returns when packets follow that
// state. The error is a *ClaimedError, a *unixsocket.InUseError or a *journal.InUseError if another agent is running;
// nothing is changed then. Run or Close must follow.
func New(c Config) (*Agent, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	return start(c, func() (*driver, error) { return openDriver(&c) })
}

func start(c Config, open func() (*driver, error)) (_ *Agent, err error) {
	if c.Socket == "" && c.Listen == "" && !c.InProcess {
		return nil, &FieldError{"Socket", errors.New("both the socket and the listen address are missing")}
	}
	a := &Agent{c: c, log: c.Log}
	a.health = grpcserve.NewHealth(map[string]func(context.Context) error{grpcserve.Liveness: a.live, grpcserve.Readiness: a.ready})
	defer func() {
		if err != nil {
			err = errors.Join(err, a.Close())
		}
	}()
	a.serving(false)
	if err := a.claimNamespace(); err != nil {
		return nil, err
	}
	if err := a.bind(); err != nil {
		return nil, err
	}
	var forwarding *farev1.Forwarding
	var state *farev1.SnapshotResponse
	if a.policy, err = newPolicy(&c); err != nil {
		return nil, err
	}
	config := contract.Config{Version: c.Version, Recovered: a.recovered, Policy: a.policy}
	if c.Journal != "" {
		if a.journal, forwarding, state, err = journal.Open(c.Journal, c.Log); err != nil {
			return nil, err
		}
		config.Journal = a.journal
	}
	if a.driver, err = open(); err != nil {
		return nil, err
	}
	if c.Driver != Memory {
		if a.namer, err = naming.Open(c.Log); err != nil {
			return nil, err
		}
		if a.keeper, err = returning.Open(c.addresses(), c.Log); err != nil {
			return nil, err
		}
	}
	a.watched = newWatched(a.driver.forwarder, a.namer, a.keeper, c.Log)
	config.Name, config.Forwarder = a.driver.name, a.watched
	a.server = contract.New(config)
	if forwarding != nil && a.restore(forwarding, state) {
		a.settle()
	}
	if c.InProcess {
		a.conn = inprocess.New()
		farev1.RegisterDataplaneServiceServer(a.conn, a.server)
	}
	if a.pods, err = a.openPods(); err != nil {
		return nil, err
	}
	for i := range a.endpoints {
		farev1.RegisterDataplaneServiceServer(a.endpoints[i].grpc, a.server)
		farev1.RegisterAttachServiceServer(a.endpoints[i].grpc, a.pods)
	}
	a.looked.Store(time.Now().UnixNano())
	if c.MetricsListen != "" {
		if a.metrics, err = newMetricsServer(c.MetricsListen, a); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// restore restores the state of the journal and reports success. Refused objects are logged, and stay missing until the
// control plane programs them.
func (a *Agent) restore(forwarding *farev1.Forwarding, state *farev1.SnapshotResponse) bool {
	begin := time.Now()
	refused, err := a.server.Restore(forwarding, state)
	if err != nil {
		a.log.Error("cannot restore the journal's state with this driver; waiting for the control plane", "journal", a.c.Journal, "driver", a.driver.name, "error", err)
		return false
	}
	a.complain("an object of the journal was refused", refused)
	a.log.Info("restored", "groups", len(state.Vectors), "destinations", len(state.Destinations), "sub_ports_down", len(state.SubPorts), "refused", len(refused), "took", time.Since(begin).Round(time.Microsecond))
	return true
}

// settle makes the driver remove the state of earlier runs that was not programmed again.
func (a *Agent) settle() {
	if a.unsettled = a.driver.settle(); a.unsettled != nil {
		a.unsettled = fmt.Errorf("cannot remove the objects of an earlier run: %w", a.unsettled)
	}
	a.settled.Store(a.unsettled == nil)
}

// maySettle settles if that was not possible at the start: again after an error or, without a usable journal, after the
// control plane has resent its state, which is assumed when it sends no operations for a while.
func (a *Agent) maySettle() {
	if a.settled.Load() {
		return
	}
	if n := a.server.Tally().Operations(); n != a.operations || !a.greeted() {
		a.operations, a.silent = n, time.Now()
	}
	if a.unsettled != nil || time.Since(a.silent) > silence {
		a.silent = time.Now()
		a.settle()
	}
}

// greeted reports whether a control plane has sent Hello and opened a Program stream.
func (a *Agent) greeted() (yes bool) {
	a.server.View(func(s *contract.State) { yes = s.Forwarding != nil })
	return yes && a.server.Tally().Streams > 0
}

func (a *Agent) recovered(found *farev1.SnapshotResponse, refused []error) {
	a.complain("an object found in the kernel was refused", refused)
	a.log.Info("took objects over from the kernel", "groups", len(found.Vectors), "destinations", len(found.Destinations), "refused", len(refused))
}

// complain logs errors, but at most the first ten.
func (a *Agent) complain(what string, list []error) {
	const most = 10
	for i, err := range list {
		if i == most {
			a.log.Warn(what, "more", len(list)-most)
			return
		}
		a.log.Warn(what, "error", err)
	}
}

// bind binds the addresses. Clients that connect wait until Run serves them.
func (a *Agent) bind() error {
	if a.c.Socket != "" {
		l, err := unixsocket.Listen(unixsocket.Config{Path: a.c.Socket, Mode: a.c.SocketMode, Owner: a.c.SocketOwner, Setting: "path"}, a.log)
		if err != nil {
			return &FieldError{"Socket", err}
		}
		e := &endpoint{Listener: grpcserve.Limit(l), address: a.c.Socket, programs: true}
		a.add(e, grpc.Creds(grpcserve.PeerCredentials()))
		e.direct = &directstream.Server{
			Method: farev1.DataplaneService_Program_FullMethodName, Credentials: grpcserve.PeerCredentials(), Limit: maxRequestBytes, Handle: a.program(e),
		}
	}
	if a.c.Listen != "" {
		l, options, err := grpcserve.Listen(a.c.Listen, a.c.TLS)
		if errors.Is(err, grpcserve.ErrReachable) {
			return &FieldError{"TLS", fmt.Errorf("missing, and %s %w: listen on 127.0.0.1 to do without", a.c.Listen, err)}
		}
		if err != nil {
			return &FieldError{"Listen", err}
		}
		a.add(&endpoint{Listener: l, address: l.Addr().String(), tls: a.c.TLS != nil, clients: a.c.TLSClients}, options...)
	}
	return nil
}

// add creates an endpoint's gRPC server.
func (a *Agent) add(e *endpoint, options ...grpc.ServerOption) {
	e.grpc = grpcserve.New(maxRequestBytes, grpcserve.Window, a.health, append(options,
		grpc.UnaryInterceptor(a.unary(e)), grpc.ChainStreamInterceptor(a.stream(e), a.describe), grpc.WaitForHandlers(true))...)
	a.endpoints = append(a.endpoints, e)
}

// program is the handler of Program outside of gRPC, with the interceptor that all streams have.
func (a *Agent) program(e *endpoint) grpc.StreamHandler {
	const method = farev1.DataplaneService_Program_FullMethodName
	all := farev1.DataplaneService_ServiceDesc.Streams
	i := slices.IndexFunc(all, func(d grpc.StreamDesc) bool { return strings.HasSuffix(method, "/"+d.StreamName) })
	return func(_ any, stream grpc.ServerStream) error {
		return a.stream(e)(a.server, stream, &grpc.StreamServerInfo{FullMethod: method, IsClientStream: true, IsServerStream: true}, all[i].Handler)
	}
}

// describe adds DescriptionHeader to Snapshot.
func (a *Agent) describe(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if info.FullMethod == farev1.DataplaneService_Snapshot_FullMethodName {
		if b, err := proto.Marshal(a.server.Describe()); err == nil {
			if err := stream.SetHeader(metadata.Pairs(DescriptionHeader, string(b))); err != nil {
				return err
			}
		}
	}
	return handler(srv, stream)
}

// Describe returns the HelloResponse from the header of a Snapshot response.
func Describe(header metadata.MD) (*farev1.HelloResponse, error) {
	values := header.Get(DescriptionHeader)
	if len(values) == 0 {
		return nil, errors.New("the data plane does not describe itself, so it is not fared dataplane")
	}
	var d farev1.HelloResponse
	if err := proto.Unmarshal([]byte(values[0]), &d); err != nil {
		return nil, fmt.Errorf("the data plane's description: %w", err)
	}
	return &d, nil
}

// Conn returns the connection for a control plane in this process; the agent needs Config.InProcess. An operation is
// committed in the goroutine that sends it. Calls end with UNAVAILABLE when the agent stops.
func (a *Agent) Conn() grpc.ClientConnInterface { return a.conn }

// Alive reports whether health checks have run within the last limit. They do not while the driver hangs.
func (a *Agent) Alive(limit time.Duration) bool {
	return time.Since(time.Unix(0, a.looked.Load())) < limit
}

// Addr returns the bound TCP address, or nil.
func (a *Agent) Addr() net.Addr {
	if a.c.Listen == "" {
		return nil
	}
	return a.endpoints[len(a.endpoints)-1].Addr()
}

// Run serves calls until ctx ends. Calls may then finish until StopTimeout, the journal is completed and the socket is
// removed. The forwarding state of the kernel stays. Run returns nil then, or the error that stopped it. It may be
// called once.
func (a *Agent) Run(ctx context.Context) error {
	results := make(chan error, len(a.endpoints)+1)
	for _, e := range a.endpoints {
		listener := e.Listener
		if e.direct != nil {
			listener = e.direct.Listener(listener)
		}
		go func() { results <- e.grpc.Serve(listener) }()
		a.log.Info("serving the data plane", "address", e.address, "driver", a.driver.name, "read_only", !e.programs && len(e.clients) == 0)
	}
	left := len(a.endpoints)
	if a.metrics != nil {
		go func() { results <- a.metrics.serve() }()
		a.log.Info("serving metrics", "address", a.metrics.listener.Addr().String())
		left++
	}
	notify := &notifier{Notifier: sdnotify.New(a.c.Notify, a.log)}
	a.look(notify)
	notify.Send(sdnotify.Ready)
	tick := time.NewTimer(beat.Until(time.Now(), pulse))
	defer tick.Stop()
	watchdog := notify.Watchdog()
	var errs []error
	for running := true; running; {
		select {
		case <-ctx.Done():
			running = false
		case err := <-results:
			errs = append(errs, fmt.Errorf("serve: %w", err))
			left--
			running = false
		case <-tick.C:
			a.look(notify)
			tick.Reset(beat.Until(time.Now(), pulse))
		case <-watchdog:
			a.server.Tally() // blocks while a commit hangs, so that systemd restarts the process
			notify.Send(sdnotify.Alive)
		}
	}
	notify.Send(sdnotify.Stopping)
	notify.Close()
	a.stop()
	for range left {
		if err := <-results; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			errs = append(errs, fmt.Errorf("serve: %w", err))
		}
	}
	return errors.Join(append(errs, a.Close())...)
}

// look updates the health status, notifies systemd, and lets the journal retry.
func (a *Agent) look(notify *notifier) {
	if a.journal != nil {
		a.journal.CatchUp()
	}
	a.maySettle()
	if err := a.policy.refresh(policyInterval); err != nil {
		a.log.Warn("the policy follows an earlier state of the machine", "error", err)
	}
	if a.squatted {
		if err := a.claimNamespace(); err != nil {
			a.log.Debug("the network namespace is still claimed", "error", err)
		}
	}
	a.server.Tally() // blocks while a commit hangs
	now := a.driver.limitations()
	if a.namer != nil {
		now = append(append(slices.Clone(now), a.namer.Findings()...), a.keeper.Findings()...)
	}
	a.limit(now)
	a.looked.Store(time.Now().UnixNano())
	err := errors.Join(a.driver.healthy(), a.unsettled, a.damage())
	a.serving(err == nil)
	switch {
	case err != nil && a.broken == nil:
		a.log.Error("the driver is broken; the kernel keeps forwarding", "driver", a.driver.name, "error", err)
	case err == nil && a.broken != nil:
		a.log.Info("the driver works again", "driver", a.driver.name)
	}
	a.broken = err
	if !notify.On() {
		return
	}
	text := fmt.Sprintf("STATUS=%s: ", a.driver.name)
	if err != nil {
		text += "BROKEN: " + err.Error()
	} else {
		a.server.View(func(s *contract.State) {
			text += fmt.Sprintf("%d groups, %d destinations", len(s.Groups), s.Destinations.Len())
		})
		for _, f := range a.limitations {
			text += "; " + f.String()
		}
	}
	notify.status(text)
}

// limit logs the limitations of the host that begin and end, and reports those that concern packets to the control
// plane. One whose text changes ends and begins.
func (a *Agent) limit(now []hostcheck.Finding) {
	before := a.limitations
	if slices.Equal(now, before) {
		return
	}
	a.limitations = now
	for _, f := range before {
		if !slices.Contains(now, f) {
			a.log.Info("a limitation of this host has ended", "reason", f.Reason, "what", f.Text)
		}
	}
	var report []*farev1.Limitation
	for _, f := range now {
		if !slices.Contains(before, f) {
			a.log.Warn("limitation of this host", "reason", f.Reason, "what", f.Text, "remedy", f.Remedy)
		}
		if f.Reason != hostcheck.ReasonPrivate {
			report = append(report, &farev1.Limitation{Reason: f.Reason, Text: f.Text, Remedy: f.Remedy})
		}
	}
	a.server.ReportLimitations(report)
}

// damage returns an error while the kernel lacks part of the acknowledged state.
func (a *Agent) damage() error {
	if now := a.server.Integrity(); !now.Intact {
		return fmt.Errorf("the kernel lacks part of the acknowledged state: %s", now.Message)
	}
	return nil
}

// live is the probe grpcserve.Liveness: it fails while the driver hangs.
func (a *Agent) live(context.Context) error {
	if !a.Alive(hung) {
		return fmt.Errorf("the driver has not answered for %s", hung)
	}
	return nil
}

// ready is the probe grpcserve.Readiness: it fails while the driver hangs, is broken, or the kernel lacks part of the
// acknowledged state.
func (a *Agent) ready(ctx context.Context) error {
	if !a.healthy() {
		return errors.New("the driver is broken; see the log")
	}
	return errors.Join(a.live(ctx), a.damage())
}

func (a *Agent) serving(yes bool) {
	state := healthpb.HealthCheckResponse_NOT_SERVING
	if yes {
		state = healthpb.HealthCheckResponse_SERVING
	}
	for _, name := range []string{"", farev1.DataplaneService_ServiceDesc.ServiceName} {
		a.health.SetServingStatus(name, state)
	}
}

// stop ends all calls: the current Program stream immediately, others gracefully first.
func (a *Agent) stop() {
	a.health.Shutdown()
	a.server.Stop("the data-plane agent stops; the programmed state remains, reconnect")
	if a.conn != nil {
		_ = a.conn.Close() // always nil
	}
	servers := make([]*grpc.Server, len(a.endpoints))
	graceful, deadline := true, time.Now().Add(a.c.StopTimeout)
	for i, e := range a.endpoints {
		if servers[i] = e.grpc; e.direct != nil {
			graceful = e.direct.Stop(a.c.StopTimeout)
		}
	}
	if !grpcserve.Stop(time.Until(deadline), servers...) || !graceful {
		a.log.Warn("canceled calls that did not finish in time", "timeout", a.c.StopTimeout)
	}
	if a.metrics != nil {
		a.metrics.stop(a.c.StopTimeout)
	}
}

// Close releases all resources; the forwarding state of the kernel stays. It may be called after Run.
func (a *Agent) Close() error {
	var errs []error
	if a.conn != nil {
		errs = append(errs, a.conn.Close())
	}
	for _, e := range a.endpoints {
		e.grpc.Stop()
		if err := e.Listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
		if e.direct != nil {
			e.direct.Close()
		}
	}
	if a.metrics != nil {
		a.metrics.stop(0)
		a.metrics = nil
	}
	if a.pods != nil {
		errs = append(errs, a.pods.Close())
		a.pods = nil
	}
	if a.namer != nil {
		errs = append(errs, a.namer.Close())
		a.namer = nil
	}
	if a.keeper != nil {
		a.keeper.Close()
		a.keeper = nil
	}
	if a.driver != nil {
		errs = append(errs, a.driver.close())
		a.driver = nil
	}
	if a.journal != nil {
		errs = append(errs, a.journal.Close())
		a.journal = nil
	}
	if a.policy != nil {
		errs = append(errs, a.policy.close())
	}
	if a.claim != nil {
		errs = append(errs, a.claim.release())
		a.claim = nil
	}
	return errors.Join(errs...)
}
