package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/dataplane"
	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/daemon/internal/ndisc"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/internal/tlsfiles"
	"github.com/fared/fared/internal/version"
)

// Deps are what a daemon needs from outside. The zero value is that of a real server: netlink, the configured data
// plane, the configured sockets.
type Deps struct {
	// Logger; nil discards.
	Logger *slog.Logger
	// LogLevel, when given, follows log.level through reloads.
	LogLevel *slog.LevelVar
	// Registerer and Gatherer of metrics; nil: a registry of the daemon's own.
	Registry *prometheus.Registry
	// Links tells link states; nil: netlink.
	Links LinkSource
	// Dataplane is a connection to the data plane; nil: dial the configured address.
	Dataplane grpc.ClientConnInterface
	// Instance names this run; empty: the start time.
	Instance string
	// ConfigPath is the file that a reload reads; empty: reloads are refused. Override, when given, is what the command
	// line changes of it, each time it is read.
	ConfigPath string
	Override   func(*config.Config)
	// Embedded daemons open no sockets of their own for the API and metrics, and tell systemd nothing.
	Embedded bool
}

// Daemon is one fared: a server or a leaf.
type Daemon struct {
	cfg      *config.Config
	deps     Deps
	log      *slog.Logger
	loop     *loop
	speaker  *speaker.Speaker
	links    LinkSource
	client   *dataplane.Client // nil for a leaf without a data plane
	service  *status.Service
	metrics  *status.Metrics
	registry *prometheus.Registry
	closers  []func() error
	moved    atomic.Uint64
	ran      bool
}

// New builds a daemon and starts its BGP servers; nothing is connected before Run. Several daemons can live in one
// process.
func New(cfg *config.Config, deps Deps) (d *Daemon, err error) {
	d = &Daemon{cfg: cfg, deps: deps, log: deps.Logger, registry: deps.Registry}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if d.registry == nil {
		d.registry = prometheus.NewRegistry()
	}
	if d.deps.Instance == "" {
		d.deps.Instance = time.Now().UTC().Format("20060102T150405.000000000Z")
	}
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	core, err := NewCore(cfg)
	if err != nil {
		return nil, err
	}
	d.loop = newLoop(d, core)
	if d.links = deps.Links; d.links == nil {
		if d.links, err = newNetlinkLinks(&core.layout, d.log); err != nil {
			return nil, err
		}
	}
	if err := d.buildSpeaker(&core.layout); err != nil {
		return nil, err
	}
	for i := range core.sessions {
		d.loop.admit(i)
	}
	if cfg.Forwards() {
		if err := d.buildDataplane(&core.layout); err != nil {
			return nil, err
		}
	}
	if cfg.Record.File != "" {
		if d.loop.recorder, err = newRecorder(cfg.Record.File, cfg.Record.MaxBytes, version.String(), cfg); err != nil {
			return nil, err
		}
	}
	return d, d.buildStatus()
}

func (d *Daemon) buildSpeaker(l *layout) error {
	cfg := d.cfg
	out := speaker.Config{
		AS: cfg.AS, RouterID: cfg.RouterID, HoldTime: cfg.BGP.HoldTime, KeepaliveInterval: cfg.BGP.KeepaliveInterval,
		ConnectRetry: cfg.BGP.ConnectRetry, RestartTime: cfg.BGP.RestartTime, MaxPrefixes: cfg.BGP.MaxPrefixes, Accept: cfg.Accept,
		Carrier: guard.Carrier{FARE: guard.CodePoint{Type: cfg.PathBandwidth.FAREType, SubType: cfg.PathBandwidth.FARESubType}},
	}
	if b := cfg.BFD; b != nil {
		out.BFD = speaker.BFD{Interval: b.Interval, Multiplier: b.Multiplier}
	}
	unnumbered := false
	for i := range l.sessions {
		s := &l.sessions[i]
		sp := &l.subPorts[s.subPort]
		families := []speaker.Family{}
		if s.families[0] {
			families = append(families, speaker.IPv4)
		}
		if s.families[1] {
			families = append(families, speaker.IPv6)
		}
		unnumbered = unnumbered || s.Unnumbered
		out.Sessions = append(out.Sessions, speaker.Session{
			Name: s.Name, Peer: s.Peer, Port: s.Port, Local: s.Local, PeerAS: s.PeerAS, Device: sp.Device, Netns: sp.Netns,
			Unnumbered: s.Unnumbered, Passive: s.Passive, Password: s.Password, GTSMHops: s.GTSMHops, Families: families,
			ExtendedNextHop: s.ExtendedNextHop,
		})
	}
	deps := speaker.Deps{Log: d.log, Fatal: func(err error) {
		// GoBGP found its own state broken. Nothing it says can be trusted any more, and the data plane forwards without us.
		d.log.Error("the BGP library cannot go on; ending the process", "error", err)
		os.Exit(1)
	}}
	if unnumbered {
		resolver := ndisc.New(ndisc.Config{Logger: d.log})
		d.closers = append(d.closers, func() error { resolver.Close(); return nil })
		deps.Resolver = resolver
	}
	var err error
	d.speaker, err = speaker.New(out, deps)
	return err
}

func (d *Daemon) buildDataplane(l *layout) error {
	conn := d.deps.Dataplane
	if conn == nil {
		dialed, err := d.dialDataplane()
		if err != nil {
			return err
		}
		conn = dialed
	}
	d.loop.ports.client = farev1.NewDataplaneServiceClient(conn)
	d.loop.core.asked = d.loop.ports.asked
	var err error
	d.client, err = dataplane.New(dataplane.Config{
		Conn: conn, Forwarding: l.forwarding(d.cfg), Instance: d.deps.Instance, Version: version.String(), Logger: d.log,
		Ports: d.loop.pairPorts,
	})
	return err
}

// dialDataplane opens the configured data plane. "memory:" is one inside this process, which forwards nothing: for trying out.
func (d *Daemon) dialDataplane() (grpc.ClientConnInterface, error) {
	address := d.cfg.Dataplane.Address
	if address == "memory:" {
		conn, err := memory.Dial(memory.New(memory.Config{}))
		if err != nil {
			return nil, err
		}
		d.closers = append(d.closers, conn.Close)
		return conn, nil
	}
	var secure *tls.Config
	if t := d.cfg.Dataplane.TLS; t != nil {
		var err error
		if secure, err = tlsfiles.Client(t.CertFile, t.KeyFile, t.ClientCAFile); err != nil {
			return nil, fmt.Errorf("dataplane.tls: %w", err)
		}
	}
	conn, err := dataplane.Open(address, secure)
	if err != nil {
		return nil, fmt.Errorf("dataplane.address: %w", err)
	}
	d.closers = append(d.closers, conn.Close)
	return conn, nil
}

func (d *Daemon) buildStatus() error {
	reader := d.loop.builder.Reader(d.loop.do)
	var err error
	d.service, err = status.NewService(status.ServiceConfig{
		Reader: reader, Version: version.String(), Started: d.loop.started, Explain: d.loop.explain,
		Drain: d.drain, Reload: d.Reload, Log: d.log,
	})
	if err != nil {
		return err
	}
	d.metrics, err = status.NewMetrics(d.registry, status.MetricsConfig{Reader: reader, Service: d.service, Version: version.String()})
	d.loop.metrics = d.metrics
	return err
}

// WeightService is the daemon's implementation of fare.v1.WeightService, for use inside the process.
func (d *Daemon) WeightService() farev1.WeightServiceServer { return d.service.Weights() }

// FabricService is the daemon's implementation of fare.v1.FabricService, for use inside the process.
func (d *Daemon) FabricService() farev1.FabricServiceServer { return d.service.Fabric() }

// SlotsMoved is how many queue pair slots of a destination have left their plane or sub-port since the start, added up
// over all destinations. A slot that is parked has not moved.
func (d *Daemon) SlotsMoved() uint64 { return d.moved.Load() }

// Run carries the daemon until ctx ends or something it cannot go on without fails. It returns after every goroutine has
// ended. The data plane keeps forwarding.
func (d *Daemon) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var tasks []func(context.Context) error
	if !d.deps.Embedded {
		serve, err := d.servers()
		if err != nil {
			return err
		}
		tasks = append(tasks, serve...)
	}
	d.ran = true
	// The loop ends before what feeds it: what the end does to sessions is nothing that the data plane may hear of.
	feeding, release := context.WithCancel(context.WithoutCancel(ctx))
	defer release()
	tasks = append(tasks, func(ctx context.Context) error {
		defer release()
		return d.loop.run(ctx)
	})
	adapters := []func(context.Context) error{d.links.Run, d.speaker.Run}
	if d.client != nil {
		adapters = append(adapters, d.client.Run, d.loop.ports.run)
	}
	for _, run := range adapters {
		tasks = append(tasks, func(context.Context) error { return run(feeding) })
	}
	results := make(chan error, len(tasks))
	for _, task := range tasks {
		go func() {
			err := task(ctx)
			cancel() // one ends, all end
			results <- err
		}()
	}
	var errs []error
	for range tasks {
		if err := <-results; err != nil && !errors.Is(err, context.Canceled) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// servers opens the API's socket and the metrics listener, so that an address that is taken is an error before anything
// starts.
func (d *Daemon) servers() ([]func(context.Context) error, error) {
	api := d.cfg.API
	server := status.ServerConfig{Socket: api.Socket, SocketMode: api.SocketMode, Listen: api.Listen}
	if t := api.TLS; t != nil {
		cfg, err := tlsfiles.Server(t.CertFile, t.KeyFile, t.ClientCAFile)
		if err != nil {
			return nil, fmt.Errorf("api.tls: %w", err)
		}
		server.TLS = cfg
	}
	s, err := status.NewServer(server, d.service, d.log)
	if err != nil {
		return nil, err
	}
	tasks := []func(context.Context) error{s.Serve}
	if d.cfg.Metrics.Listen == "" {
		return tasks, nil
	}
	l, err := net.Listen("tcp", d.cfg.Metrics.Listen)
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("metrics.listen: %w", err)
	}
	h := &http.Server{Handler: status.Handler(d.registry, d.loop.builder.Reader(d.loop.do)), ReadHeaderTimeout: 5 * time.Second}
	return append(tasks, func(ctx context.Context) error {
		stop := context.AfterFunc(ctx, func() { h.Close() })
		defer stop()
		if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("metrics: %w", err)
		}
		return nil
	}), nil
}

// Close releases what New made. Call it after Run has returned, or instead of Run.
func (d *Daemon) Close() error {
	var errs []error
	if d.speaker != nil && !d.ran {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		errs = append(errs, d.speaker.Run(ended)) // releases the BGP servers that New started
	}
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i]())
	}
	d.closers = nil
	if d.loop != nil && d.loop.recorder != nil {
		errs = append(errs, d.loop.recorder.close(d.loop.core))
		d.loop.recorder = nil
	}
	return errors.Join(errs...)
}
