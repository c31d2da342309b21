package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/internal/journal"
	"github.com/fared/fared/internal/unixsocket"
)

// DescriptionHeader is the header of Snapshot's answer that holds a marshalled fare.v1.HelloResponse.
const DescriptionHeader = "fared-description-bin"

const (
	// maxRequestBytes holds a request of as many operations as the contract allows, with 8 sources of 128 slots each.
	maxRequestBytes = 16 << 20
	// maxResponseBytes is what gRPC clients accept by default.
	maxResponseBytes = 4 << 20
	// maxStreams bounds calls at once on one connection.
	maxStreams = 128
	// pulse is how often health is looked at and the journal may try again.
	pulse = 500 * time.Millisecond
	// silence is how long a control plane that says everything anew may pause.
	silence = 5 * time.Second
)

// Agent serves a data plane. Use New, then Run or Close.
type Agent struct {
	c         Config
	log       *slog.Logger
	driver    *driver
	watched   *watched
	journal   *journal.Journal // nil: none
	server    *contract.Server
	health    *health.Server
	endpoints []endpoint
	metrics   *metricsServer // nil: none
	broken    error          // what health said last

	settled   bool  // nothing is left that nobody has promised
	unsettled error // why not
	heard     uint64
	silent    time.Time // since when operations are as many as heard
}

// endpoint is a listener with a gRPC server of its own, because transport security is a server's property.
type endpoint struct {
	net.Listener
	address string
	grpc    *grpc.Server
}

// New binds the addresses, opens the driver, and brings back what the journal promised. It returns when packets obey. The
// error is a *unixsocket.InUseError or a *journal.InUseError when another agent is there, and then nothing was touched. Run
// or Close must follow.
func New(c Config) (*Agent, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	return start(c, func() (*driver, error) { return openDriver(&c) })
}

func start(c Config, open func() (*driver, error)) (_ *Agent, err error) {
	if c.Socket == "" && c.Listen == "" {
		return nil, errors.New("neither a socket nor a listen address is given: use --socket or --listen")
	}
	a := &Agent{c: c, log: c.Log, health: health.NewServer()}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.Close())
		}
	}()
	a.serving(false)
	if err := a.bind(); err != nil {
		return nil, err
	}
	var forwarding *farev1.Forwarding
	var state *farev1.SnapshotResponse
	config := contract.Config{Version: c.Version, Recovered: a.recovered}
	if c.Journal != "" {
		if a.journal, forwarding, state, err = journal.Open(c.Journal, c.Log); err != nil {
			return nil, err
		}
		config.Journal = a.journal
	}
	if a.driver, err = open(); err != nil {
		return nil, err
	}
	a.watched = newWatched(a.driver.forwarder, c.Log)
	config.Name, config.Forwarder = a.driver.name, a.watched
	a.server = contract.New(config)
	if forwarding != nil && a.restore(forwarding, state) {
		a.settle()
	}
	for i := range a.endpoints {
		farev1.RegisterDataplaneServiceServer(a.endpoints[i].grpc, a.server)
	}
	if c.MetricsListen != "" {
		if a.metrics, err = newMetricsServer(c.MetricsListen, a); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// restore brings back what the journal promised, and says whether that went. What does not come back is logged, and waits
// for the control plane.
func (a *Agent) restore(forwarding *farev1.Forwarding, state *farev1.SnapshotResponse) bool {
	begin := time.Now()
	refused, err := a.server.Restore(forwarding, state)
	if err != nil {
		a.log.Error("what the journal holds cannot be restored with this driver; waiting for the control plane", "journal", a.c.Journal, "driver", a.driver.name, "error", err)
		return false
	}
	a.complain("an object of the journal was refused", refused)
	a.log.Info("restored", "groups", len(state.Groups), "destinations", len(state.Destinations), "sub_ports_down", len(state.SubPorts), "refused", len(refused), "took", time.Since(begin).Round(time.Microsecond))
	return true
}

// settle has the driver remove what nobody has promised.
func (a *Agent) settle() {
	if a.unsettled = a.driver.settle(); a.unsettled != nil {
		a.unsettled = fmt.Errorf("what an earlier run left cannot be put in order: %w", a.unsettled)
	}
	a.settled = a.unsettled == nil
}

// maySettle settles when that was not possible at the start: again after an error, or, when there was no journal that said
// what is promised, after the control plane has said it all, which is when it has been silent for a while.
func (a *Agent) maySettle() {
	if a.settled {
		return
	}
	if n := a.server.Tally().Operations(); n != a.heard || !a.greeted() {
		a.heard, a.silent = n, time.Now()
	}
	if a.unsettled != nil || time.Since(a.silent) > silence {
		a.silent = time.Now()
		a.settle()
	}
}

// greeted says whether the control plane is there: it has said Hello, and its stream.
func (a *Agent) greeted() (yes bool) {
	a.server.View(func(s *contract.State) { yes = s.Forwarding != nil })
	return yes && a.server.Tally().Streams > 0
}

func (a *Agent) recovered(found *farev1.SnapshotResponse, refused []error) {
	a.complain("an object that the kernel still had was refused", refused)
	a.log.Info("taken over from the kernel", "groups", len(found.Groups), "destinations", len(found.Destinations), "refused", len(refused))
}

// complain logs errors, but not thousands.
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

// bind takes the addresses. Who connects waits until they are served.
func (a *Agent) bind() error {
	if a.c.Socket != "" {
		l, err := unixsocket.Listen(unixsocket.Config{Path: a.c.Socket, Mode: a.c.SocketMode, Owner: a.c.SocketOwner, Setting: "--socket"}, a.log)
		if err != nil {
			return fmt.Errorf("socket: %w", err)
		}
		a.endpoints = append(a.endpoints, endpoint{l, a.c.Socket, a.newGRPC()})
	}
	if a.c.Listen != "" {
		var options []grpc.ServerOption
		if a.c.TLS != nil {
			options = append(options, grpc.Creds(credentials.NewTLS(a.c.TLS)))
		}
		l, err := net.Listen("tcp", a.c.Listen)
		if err != nil {
			return fmt.Errorf("--listen: %w", err)
		}
		a.endpoints = append(a.endpoints, endpoint{l, l.Addr().String(), a.newGRPC(options...)})
		if a.c.TLS == nil && !loopback(l.Addr()) {
			return fmt.Errorf("--listen %s is reachable from outside: give --tls-cert, --tls-key and --tls-client-ca, or listen on 127.0.0.1", a.c.Listen)
		}
	}
	return nil
}

// loopback looks at the address that was bound, so that names count as what they resolved to.
func loopback(a net.Addr) bool {
	ap, err := netip.ParseAddrPort(a.String())
	return err == nil && ap.Addr().Unmap().IsLoopback()
}

func (a *Agent) newGRPC(options ...grpc.ServerOption) *grpc.Server {
	g := grpc.NewServer(append(options,
		grpc.MaxRecvMsgSize(maxRequestBytes), grpc.MaxSendMsgSize(maxResponseBytes), grpc.MaxConcurrentStreams(maxStreams), grpc.ConnectionTimeout(10*time.Second),
		// A control plane that vanished without a word is noticed after 40 s; one that pings too often is sent away.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.StreamInterceptor(a.describe), grpc.WaitForHandlers(true),
	)...)
	healthpb.RegisterHealthServer(g, a.health)
	reflection.Register(g)
	return g
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

// Describe reads what Hello would answer from the header of Snapshot's answer.
func Describe(header metadata.MD) (*farev1.HelloResponse, error) {
	values := header.Get(DescriptionHeader)
	if len(values) == 0 {
		return nil, errors.New("the data plane does not describe itself; it is another one than fared dataplane")
	}
	var d farev1.HelloResponse
	if err := proto.Unmarshal([]byte(values[0]), &d); err != nil {
		return nil, fmt.Errorf("the data plane's description: %w", err)
	}
	return &d, nil
}

// Addr returns the bound TCP address, nil without one.
func (a *Agent) Addr() net.Addr {
	if a.c.Listen == "" {
		return nil
	}
	return a.endpoints[len(a.endpoints)-1].Addr()
}

// Run answers calls until ctx ends; then calls may finish until StopTimeout, the journal is written out and the socket
// removed. What the kernel forwards by stays. It returns nil then, or why it could not go on. It may be called once.
func (a *Agent) Run(ctx context.Context) error {
	results := make(chan error, len(a.endpoints)+1)
	for _, e := range a.endpoints {
		go func() { results <- e.grpc.Serve(e.Listener) }()
		a.log.Info("serving the data plane", "address", e.address, "driver", a.driver.name)
	}
	left := len(a.endpoints)
	if a.metrics != nil {
		go func() { results <- a.metrics.serve() }()
		a.log.Info("serving metrics", "address", a.metrics.listener.Addr().String())
		left++
	}
	notify := newNotifier(a.c.Notify, a.log)
	a.look(notify)
	notify.say("READY=1")
	tick := time.NewTicker(pulse)
	defer tick.Stop()
	watchdog := notify.watchdog()
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
		case <-watchdog:
			a.server.Tally() // a commit that hangs holds this up, and systemd starts a new process
			notify.say("WATCHDOG=1")
		}
	}
	notify.say("STOPPING=1")
	notify.stop()
	a.stop()
	for range left {
		if err := <-results; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			errs = append(errs, fmt.Errorf("serve: %w", err))
		}
	}
	return errors.Join(append(errs, a.Close())...)
}

// look asks the driver how it is, tells whoever wants to know, and gives the journal its chance.
func (a *Agent) look(notify *notifier) {
	if a.journal != nil {
		a.journal.CatchUp()
	}
	a.maySettle()
	err := errors.Join(a.driver.healthy(), a.unsettled)
	a.serving(err == nil)
	switch {
	case err != nil && a.broken == nil:
		a.log.Error("the driver is broken; what it forwards by stays", "driver", a.driver.name, "error", err)
	case err == nil && a.broken != nil:
		a.log.Info("the driver works again", "driver", a.driver.name)
	}
	a.broken = err
	if !notify.on {
		return
	}
	text := fmt.Sprintf("STATUS=%s: ", a.driver.name)
	if err != nil {
		text += "BROKEN: " + err.Error()
	} else {
		a.server.View(func(s *contract.State) {
			text += fmt.Sprintf("%d groups, %d destinations", len(s.Groups), len(s.Destinations))
		})
	}
	notify.status(text)
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

// stop ends all calls: the present Program stream at once, others politely first.
func (a *Agent) stop() {
	a.health.Shutdown()
	a.server.BreakStream("the data-plane agent ends; what it programmed stays, connect again")
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, e := range a.endpoints {
			e.grpc.GracefulStop()
		}
	}()
	timer := time.NewTimer(a.c.StopTimeout)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		a.log.Warn("ending calls that did not finish in time", "timeout", a.c.StopTimeout)
		for _, e := range a.endpoints {
			e.grpc.Stop()
		}
		<-done
	}
	if a.metrics != nil {
		a.metrics.stop(a.c.StopTimeout)
	}
}

// Close lets go of everything; what the kernel forwards by stays. It is safe after Run.
func (a *Agent) Close() error {
	var errs []error
	for _, e := range a.endpoints {
		e.grpc.Stop()
		if err := e.Listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	if a.metrics != nil {
		a.metrics.stop(0)
		a.metrics = nil
	}
	if a.driver != nil {
		errs = append(errs, a.driver.close())
		a.driver = nil
	}
	if a.journal != nil {
		errs = append(errs, a.journal.Close())
		a.journal = nil
	}
	return errors.Join(errs...)
}
