package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/fared/fared/fare"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/bfd"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/daemon/internal/ndisc"
	"github.com/fared/fared/daemon/internal/publish"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/internal/httpserve"
	"github.com/fared/fared/internal/tlsfiles"
	"github.com/fared/fared/internal/version"
)

// Deps are the dependencies of a daemon. The zero value is that of a real server: netlink, the configured data plane,
// the configured sockets.
type Deps struct {
	// Logger receives the log; nil discards it.
	Logger *slog.Logger
	// LogDropped returns the number of lines that the log has left out; nil means none. FlushLog is called before the
	// process ends because of a broken library, and must not wait for long; nil does nothing.
	LogDropped func() uint64
	FlushLog   func()
	// LogLevel, if not nil, follows log.level across reloads.
	LogLevel *slog.LevelVar
	// Registry registers and gathers metrics; nil creates a separate registry.
	Registry *prometheus.Registry
	// Links reports link states; nil means netlink.
	Links LinkSource
	// Dataplane is a connection to the data plane; nil dials the configured address.
	Dataplane grpc.ClientConnInterface
	// Alive, if not nil, reports whether the data plane inside this process works. While it does not, systemd's
	// watchdog is not notified. It must not block.
	Alive func() bool
	// Memory connects to a new data plane inside this process, for the address "memory:"; nil rejects that address.
	Memory func() (Conn, error)
	// Instance names this run; empty means the start time.
	Instance string
	// ConfigPath is the file that a reload reads; empty rejects reloads. Override, if not nil, applies the command
	// line's changes to the configuration each time it is read.
	ConfigPath string
	Override   func(*config.Config)
	// Embedded daemons open no sockets for the API and metrics, and send no notifications to systemd.
	Embedded bool
}

// Conn is a connection to a data plane.
type Conn interface {
	grpc.ClientConnInterface
	Close() error
}

// Daemon is one fared: a server or a leaf.
type Daemon struct {
	cfg           *config.Config
	deps          Deps
	log           *slog.Logger
	loop          *loop
	speaker       *speaker.Speaker
	links         LinkSource
	client        *dpclient.Client // nil for a leaf without a data plane
	service       *status.Service
	metrics       *status.Metrics
	registry      *prometheus.Registry
	table         *publish.Publisher // nil if the slot table is disabled
	drains        *drainSaver        // nil if drains end with the daemon
	proofs        *proofs            // nil if no probes are configured
	resolver      *ndisc.Resolver    // of unnumbered sessions
	closers       []func() error
	moved         atomic.Uint64
	proofSettings atomic.Pointer[proofSettings]
	ran           bool
}

// New builds a daemon and starts its BGP servers; no session connects before Run. One process may contain several
// daemons.
func New(cfg *config.Config, deps Deps) (*Daemon, error) {
	d := &Daemon{cfg: cfg, deps: deps, log: deps.Logger, registry: deps.Registry}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if d.registry == nil {
		d.registry = prometheus.NewRegistry()
	}
	if d.deps.Instance == "" {
		d.deps.Instance = time.Now().UTC().Format("20060102T150405.000000000Z")
	}
	if err := d.build(); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// build creates the daemon's parts. After an error Close releases the parts created so far.
func (d *Daemon) build() error {
	c, err := core.New(d.cfg)
	if err != nil {
		return err
	}
	for _, text := range d.cfg.Warnings() {
		d.log.Warn("configuration", "detail", text)
	}
	d.loop = newLoop(d, c)
	if d.links = d.deps.Links; d.links == nil {
		if d.links, err = newNetlinkLinks(c.Layout(), d.log); err != nil {
			return err
		}
	}
	if err := d.buildSpeaker(c.Layout()); err != nil {
		return err
	}
	for i := range c.Layout().Sessions {
		d.loop.admit(i)
	}
	if d.cfg.Forwards() {
		if err := d.buildDataplane(); err != nil {
			return err
		}
	}
	if r := d.cfg.Record; r.File != "" {
		if d.loop.recorder, err = newRecorder(r, version.String(), c); err != nil {
			return err
		}
	}
	return d.buildStatus()
}

// speakerConfig returns the speaker's part of a configuration; sessions are in the order of the layout.
func speakerConfig(cfg *config.Config, l *core.Layout) speaker.Config {
	out := speaker.Config{
		AS: cfg.AS, RouterID: cfg.RouterID, HoldTime: cfg.BGP.HoldTime, KeepaliveInterval: cfg.BGP.KeepaliveInterval,
		ConnectRetry: cfg.BGP.ConnectRetry, RestartTime: cfg.BGP.RestartTime, MaxPrefixes: cfg.BGP.MaxPrefixes, Accept: cfg.Accept, AllowOwnAS: cfg.BGP.AllowOwnAS,
		Carrier: guard.Carrier{FARE: guard.CodePoint{Type: cfg.PathBandwidth.FAREType, SubType: cfg.PathBandwidth.FARESubType}},
	}
	out.IncreaseInterval = cfg.PathBandwidth.IncreaseInterval
	if b := cfg.BFD; b.Interval > 0 {
		out.BFD = speaker.BFD{Interval: b.Interval, Multiplier: b.Multiplier}
	}
	for i := range l.Sessions {
		s := &l.Sessions[i]
		sp := &l.SubPorts[s.SubPort]
		families := []speaker.Family{}
		if s.FamilySet[0] {
			families = append(families, speaker.IPv4)
		}
		if s.FamilySet[1] {
			families = append(families, speaker.IPv6)
		}
		out.Sessions = append(out.Sessions, speaker.Session{
			Name: s.Name, Peer: s.Peer, Port: s.Port, Local: s.Local, PeerAS: s.PeerAS, Device: sp.Device, Netns: sp.Netns,
			Unnumbered: s.Unnumbered, Passive: s.Passive, Password: s.Password, AO: signing(s.TCPAO), GTSMHops: s.GTSMHops, Families: families,
			BFDAuth: bfdAuth(cfg.BFDAuth(&s.Session)), ExtendedNextHop: s.ExtendedNextHop, Accept: s.Accept, Deciding: deciding(s.Codec), NonTransitive: s.Codec.NonTransitive,
			SubnetNextHops: s.SubnetNextHops,
		})
	}
	return out
}

// exit is os.Exit; tests replace it.
var exit = os.Exit

// fatal ends the process: GoBGP has found its own state broken, so its reports can no longer be trusted. The data plane
// keeps forwarding.
func (d *Daemon) fatal(err error) {
	d.log.Error("the BGP library cannot continue; ending the process", "error", err)
	if d.deps.FlushLog != nil {
		d.deps.FlushLog()
	}
	exit(1)
}

func (d *Daemon) buildSpeaker(l *core.Layout) error {
	cfg := speakerConfig(d.cfg, l)
	deps := speaker.Deps{Log: d.log, Fatal: d.fatal, Attend: d.loop.attend}
	resolver := ndisc.New(ndisc.Config{Logger: d.log}) // a reload may add unnumbered sessions
	d.closers = append(d.closers, func() error { resolver.Close(); return nil })
	deps.Resolver, d.resolver = resolver, resolver
	var err error
	if d.speaker, err = speaker.New(cfg, deps); err == nil {
		d.speaker.SetLoopbacks(d.cfg.Loopbacks)
	}
	return err
}

// signing converts a session's TCP-AO key to the speaker's type.
func signing(ao *config.TCPAO) speaker.AO {
	if ao == nil {
		return speaker.AO{}
	}
	out := speaker.AO{Key: ao.Key, SendID: uint8(ao.SendID), ReceiveID: uint8(ao.ReceiveID)}
	if ao.Algorithm == config.AES128CMAC {
		out.Algorithm = speaker.AES128CMAC
	}
	return out
}

// bfdAuth converts the authentication of a session's BFD packets to the speaker's type.
func bfdAuth(auth *config.BFDAuth) bfd.Auth {
	if auth == nil {
		return bfd.Auth{}
	}
	out := bfd.Auth{Type: map[string]bfd.AuthType{
		config.BFDKeyedMD5: bfd.KeyedMD5, config.BFDMeticulousMD5: bfd.MeticulousMD5, config.BFDKeyedSHA1: bfd.KeyedSHA1, config.BFDMeticulousSHA1: bfd.MeticulousSHA1,
	}[auth.Type]}
	for _, k := range auth.Keys {
		out.Keys = append(out.Keys, bfd.Key{ID: uint8(k.ID), Secret: k.Key})
	}
	return out
}

// CheckKernel returns an error with a remedy for the first TCP-AO key of a configuration that this machine's kernel
// does not support, or nil if it supports all of them. New rejects these configurations.
func CheckKernel(cfg *config.Config) error {
	for i, p := range cfg.Planes {
		for j, sp := range p.SubPorts {
			for k, s := range sp.Sessions {
				if s.TCPAO == nil {
					continue
				}
				if err := speaker.CheckAO(signing(s.TCPAO).Algorithm); err != nil {
					return fmt.Errorf("planes[%d].sub_ports[%d].sessions[%d]: %w", i, j, k, err)
				}
			}
		}
	}
	return nil
}

func (d *Daemon) buildDataplane() error {
	conn := d.deps.Dataplane
	if conn == nil {
		dialed, err := d.dialDataplane()
		if err != nil {
			return err
		}
		conn = dialed
	}
	d.loop.ports.client = farev1.NewDataplaneServiceClient(conn)
	var err error
	d.client, err = dpclient.New(dpclient.Config{
		Conn: conn, Forwarding: forwardingOf(d.loop.core), Instance: d.deps.Instance, Version: version.String(), Logger: d.log,
		Ports: d.loop.pairPorts,
	})
	return err
}

// dialDataplane connects to the configured data plane. "memory:" is a data plane inside this process, which forwards
// nothing and serves for experiments.
func (d *Daemon) dialDataplane() (grpc.ClientConnInterface, error) {
	address := d.cfg.Dataplane.Address
	if address == config.InsideDataplane {
		return nil, errors.New("dataplane.address: inside: is not available in this program")
	}
	if address == "memory:" {
		if d.deps.Memory == nil {
			return nil, errors.New("dataplane.address: memory: is not available in this program")
		}
		conn, err := d.deps.Memory()
		if err != nil {
			return nil, err
		}
		d.closers = append(d.closers, conn.Close)
		return conn, nil
	}
	var secure credentials.TransportCredentials
	if t := d.cfg.Dataplane.TLS; t != nil {
		var err error
		if secure, err = tlsfiles.Credentials(t.CertFile, t.KeyFile, t.ClientCAFile, d.log); err != nil {
			return nil, fmt.Errorf("dataplane.tls: %w", err)
		}
	}
	conn, err := dpclient.Open(address, secure)
	if err != nil {
		return nil, fmt.Errorf("dataplane.address: %w", err)
	}
	d.closers = append(d.closers, conn.Close)
	return conn, nil
}

func (d *Daemon) buildStatus() error {
	reader := d.loop.builder.Reader(d.loop.do)
	var err error
	config := status.ServiceConfig{
		Reader: reader, Version: version.String(), Started: d.loop.started, Explain: d.loop.explain,
		Drain: d.drain, ClearSession: d.clearSession, Reload: d.Reload, Record: d.record, Log: d.log,
	}
	if p := d.buildProber(); p != nil {
		d.proofs = newProofs(p)
		config.Proofs = d.proofs
	}
	d.service, err = status.NewService(config)
	if err == nil {
		d.metrics, err = status.NewMetrics(d.registry, status.MetricsConfig{Reader: reader, Service: d.service, Version: version.String()})
	}
	d.loop.metrics = d.metrics
	return err
}

// WeightService returns the daemon's implementation of fare.v1.WeightService, for use inside the process.
func (d *Daemon) WeightService() farev1.WeightServiceServer { return d.service.Weights() }

// FabricService returns the daemon's implementation of fare.v1.FabricService, for use inside the process.
func (d *Daemon) FabricService() farev1.FabricServiceServer { return d.service.Fabric() }

// SlotsMoved returns the number of queue pair slots that have left their plane or sub-port since the start, summed over
// all destinations. A parked slot has not moved.
func (d *Daemon) SlotsMoved() uint64 { return d.moved.Load() }

// Run runs the daemon until ctx ends or an indispensable part fails. It returns after every goroutine has ended. The
// data plane keeps forwarding.
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
	if d.drains = d.openDrains(); d.drains != nil {
		d.loop.earlier = d.drains.records
		tasks = append(tasks, d.drains.run)
	}
	d.ran = true
	// Stop the loop before its event sources, so that session teardown during shutdown never reaches the data plane.
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
	if d.proofs != nil {
		tasks = append(tasks, d.proofs.run)
	}
	if d.loop.tracer != nil {
		tasks = append(tasks, d.loop.tracer.run)
	}
	results := make(chan error, len(tasks))
	for _, task := range tasks {
		go func() {
			err := task(ctx)
			cancel() // the end of one task ends all others
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

// servers opens the API's socket and the metrics listener, so that an occupied address is an error before any task
// starts.
func (d *Daemon) servers() ([]func(context.Context) error, error) {
	api := d.cfg.API
	server := status.ServerConfig{Socket: api.Socket, SocketMode: api.SocketMode, ReadOnlyMode: api.ReadOnlySocketMode, Listen: api.Listen}
	if api.ReadOnlySocket != config.NoSocket {
		server.ReadOnlySocket = api.ReadOnlySocket
	}
	if t := api.TLS; t != nil {
		cfg, err := tlsfiles.Server(t.CertFile, t.KeyFile, t.ClientCAFile, d.log)
		if err != nil {
			return nil, fmt.Errorf("api.tls: %w", err)
		}
		server.TLS, server.Operators = cfg, t.Operators
	}
	s, err := status.NewServer(server, d.service, d.log)
	if err != nil {
		return nil, err
	}
	tasks := []func(context.Context) error{s.Serve}
	table, err := d.slotTable()
	if err != nil {
		s.Close()
		return nil, err
	}
	if table != nil {
		tasks = append(tasks, table.Run)
	}
	web, err := d.webServers()
	if err != nil {
		s.Close()
		if table != nil {
			err = errors.Join(err, table.Close())
		}
		return nil, err
	}
	return append(tasks, web...), nil
}

// webServers opens the listeners of the metrics and of the page, as far as they are configured.
func (d *Daemon) webServers() (tasks []func(context.Context) error, err error) {
	if d.cfg.Metrics.Listen != "" {
		l, err := net.Listen("tcp", d.cfg.Metrics.Listen)
		if err != nil {
			return nil, fmt.Errorf("metrics.listen: %w", err)
		}
		handler := status.Handler(d.registry, d.loop.builder.Reader(d.loop.do))
		tasks = append(tasks, func(ctx context.Context) error { return serveMetrics(ctx, l, handler) })
		defer func() {
			if tasks == nil {
				l.Close()
			}
		}()
	}
	if d.cfg.UI.Listen != "" {
		serve, err := d.page()
		if err != nil {
			return nil, fmt.Errorf("ui.listen: %w", err)
		}
		tasks = append(tasks, serve)
	}
	return tasks, nil
}

// slotTable opens the slot table, or returns nil if it is disabled.
func (d *Daemon) slotTable() (*publish.Publisher, error) {
	if d.cfg.SlotTable.File == config.NoSlotTable || d.cfg.SlotTable.File == "" {
		return nil, nil
	}
	c := publish.Config{
		Reader: d.loop.builder.Reader(d.loop.do), Path: d.cfg.SlotTable.File, Mode: d.cfg.SlotTable.Mode, Log: d.log,
	}
	if c.Path == config.DefaultSlotTable {
		c.Former = config.FormerSlotTable
	}
	for _, service := range d.cfg.TableServices() {
		c.Services = append(c.Services, status.FlowService(service))
	}
	var err error
	d.table, err = publish.New(c)
	return d.table, err
}

// serveMetrics serves HTTP on l until ctx ends, which is not an error.
func serveMetrics(ctx context.Context, l net.Listener, handler http.Handler) error {
	h := httpserve.New(handler)
	stop := context.AfterFunc(ctx, func() { h.Close() })
	defer stop()
	if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("metrics: %w", err)
	}
	return nil
}

// Close releases the resources that New acquired. Call it after Run has returned, or instead of Run.
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
		d.loop.recordEffect(true)
	}
	if d.loop != nil && d.loop.recorder != nil { // an error of recordEffect ends the recording
		errs = append(errs, d.loop.recorder.close(d.loop.core))
		d.loop.recorder = nil
	}
	return errors.Join(errs...)
}

// deciding returns the guard's callback for a route with too many communities.
func deciding(codec fare.Codec) func([][8]byte) int {
	return func(raw [][8]byte) int {
		communities := make([]fare.Community, len(raw))
		for i := range raw {
			communities[i] = raw[i]
		}
		return codec.Deciding(communities)
	}
}
