package status

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/grpcserve"
	"github.com/fared/fared/internal/unixsocket"
)

const (
	// maxRequestBytes is enough for a filter of more than 20,000 prefixes.
	maxRequestBytes = 1 << 20
	// window is gRPC's default; requests are small, and any local user may call.
	window = 64 << 10
	// unaryTimeout ends a call whose client set no deadline.
	unaryTimeout = 30 * time.Second
	// DefaultStopTimeout limits how long calls may continue after a stop was requested.
	DefaultStopTimeout = 2 * time.Second
)

// ServerConfig configures the addresses of the API. At least one of Socket and Listen is needed.
type ServerConfig struct {
	// Socket is the path of a unix socket; empty disables it.
	Socket string
	// SocketMode is its mode; 0 means unixsocket.DefaultMode. SocketOwner is "user", "user:group" or ":group"; empty
	// means the process's.
	SocketMode  os.FileMode
	SocketOwner string
	// ReadOnlySocket is the path of a unix socket for calls that only read; empty disables it. ReadOnlyMode is its
	// mode; 0 means 0666.
	ReadOnlySocket string
	ReadOnlyMode   os.FileMode
	// Listen is a TCP address, host:port; empty disables it. Without TLS it must be a loopback address, and only read
	// calls are accepted.
	Listen string
	// TLS must require and verify client certificates. Without Operators every certificate may only read.
	TLS *tls.Config
	// Operators are the names of the certificates that may operate on Listen, as for tlsfiles.CheckName.
	Operators []string
	// StopTimeout limits how long calls may continue after Serve's context ended; 0 means DefaultStopTimeout.
	StopTimeout time.Duration
}

// Server serves the API: WeightService, FabricService, health and reflection.
type Server struct {
	c         ServerConfig
	service   *Service
	log       *slog.Logger
	health    *grpcserve.Health
	endpoints []*endpoint
}

// endpoint is a listener with a separate gRPC server, because transport security and access are properties of a server.
type endpoint struct {
	net.Listener
	grpc *grpc.Server
	// name is the address that clients use.
	name string
	// access is the right of every client here, but with tls certificates of operators may operate. operate is the
	// remedy, in errors.
	access    access
	tls       bool
	operators []string
	operate   string
}

// NewServer binds the addresses. The error is a *unixsocket.InUseError when another process serves the socket. The
// caller must call Serve or Close.
func NewServer(c ServerConfig, service *Service, log *slog.Logger) (_ *Server, err error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if c.SocketMode == 0 {
		c.SocketMode = unixsocket.DefaultMode
	}
	if c.ReadOnlyMode == 0 {
		c.ReadOnlyMode = 0o666
	}
	if c.StopTimeout == 0 {
		c.StopTimeout = DefaultStopTimeout
	}
	if c.Socket == "" && c.ReadOnlySocket == "" && c.Listen == "" {
		return nil, errors.New("api: both the socket and the listen address are missing: set api.socket or api.listen")
	}
	s := &Server{c: c, service: service, log: log, health: grpcserve.NewHealth(map[string]func(context.Context) error{
		grpcserve.Liveness: service.c.Reader.Ping, grpcserve.Readiness: service.c.Reader.Ready,
	})}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	operate := "api.listen with a certificate of api.tls.operators"
	if c.Socket != "" {
		operate = c.Socket + ", as root or as a member of its group"
		l, err := unixsocket.Listen(unixsocket.Config{Path: c.Socket, Mode: c.SocketMode, Owner: c.SocketOwner, Setting: "api.socket"}, log)
		if err != nil {
			return nil, fmt.Errorf("api.socket: %w", err)
		}
		s.add(&endpoint{Listener: grpcserve.Limit(l), name: c.Socket, access: accessOperate}, grpc.Creds(grpcserve.PeerCredentials()))
	}
	if c.ReadOnlySocket != "" {
		l, err := unixsocket.Listen(unixsocket.Config{Path: c.ReadOnlySocket, Mode: c.ReadOnlyMode, Owner: c.SocketOwner, Setting: "api.read_only_socket"}, log)
		if err != nil {
			return nil, fmt.Errorf("api.read_only_socket: %w", err)
		}
		s.add(&endpoint{Listener: grpcserve.Limit(l), name: c.ReadOnlySocket, access: accessRead, operate: operate}, grpc.Creds(grpcserve.PeerCredentials()))
	}
	if c.Listen != "" {
		if c.TLS != nil {
			if err := grpcserve.CheckTLS(c.TLS); err != nil {
				return nil, fmt.Errorf("api.tls: %w: set client_ca_file", err)
			}
		}
		l, options, err := grpcserve.Listen(c.Listen, c.TLS)
		if errors.Is(err, grpcserve.ErrReachable) {
			return nil, fmt.Errorf("api.listen: %s %w: set api.tls, or listen on 127.0.0.1", c.Listen, err)
		}
		if err != nil {
			return nil, fmt.Errorf("api.listen: %w", err)
		}
		e := &endpoint{Listener: l, name: l.Addr().String(), access: accessRead, tls: c.TLS != nil, operators: c.Operators, operate: operate}
		if e.tls && c.Socket != "" {
			e.operate = ", or use " + operate
		} else if e.tls {
			e.operate = ""
		}
		s.add(e, options...)
	}
	return s, nil
}

// add creates an endpoint's gRPC server.
func (s *Server) add(e *endpoint, options ...grpc.ServerOption) {
	g := grpcserve.New(maxRequestBytes, window, s.health, append(options,
		grpc.ChainUnaryInterceptor(s.unary, e.allowUnary), grpc.ChainStreamInterceptor(s.stream, e.allowStream))...)
	farev1.RegisterWeightServiceServer(g, s.service.Weights())
	farev1.RegisterFabricServiceServer(g, s.service.Fabric())
	e.grpc = g
	s.endpoints = append(s.endpoints, e)
}

// Serve answers calls until ctx ends. Then watches end with an error that asks clients to reconnect, other calls may
// finish until StopTimeout, and the socket is removed. It returns nil then, or the error that stopped it. It may be
// called once.
func (s *Server) Serve(ctx context.Context) error {
	for _, name := range []string{"", farev1.WeightService_ServiceDesc.ServiceName, farev1.FabricService_ServiceDesc.ServiceName} {
		s.health.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
	}
	results := make(chan error, len(s.endpoints))
	for _, e := range s.endpoints {
		go func() { results <- e.grpc.Serve(e.Listener) }()
		s.log.Info("serving the API", "address", e.name, "read_only", e.access == accessRead && len(e.operators) == 0)
	}
	var errs []error
	left := len(s.endpoints)
	select {
	case <-ctx.Done():
	case err := <-results:
		errs = append(errs, fmt.Errorf("serve the API: %w", err))
		left--
	}
	s.stop()
	for range left {
		if err := <-results; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			errs = append(errs, fmt.Errorf("serve the API: %w", err))
		}
	}
	return errors.Join(append(errs, s.Close())...)
}

// stop ends all calls, gracefully at first.
func (s *Server) stop() {
	s.health.Shutdown()
	s.service.stop()
	servers := make([]*grpc.Server, len(s.endpoints))
	for i, e := range s.endpoints {
		servers[i] = e.grpc
	}
	if !grpcserve.Stop(s.c.StopTimeout, servers...) {
		s.log.Warn("canceled calls that did not finish in time", "timeout", s.c.StopTimeout)
	}
}

// Close releases the addresses of a server on which Serve was not called. It is safe after Serve.
func (s *Server) Close() error {
	var errs []error
	for _, e := range s.endpoints {
		e.grpc.Stop()
		if err := e.Listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// unary limits the duration of a call, recovers from panics, counts results and records refused operations.
func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	defer func() {
		err = s.service.finished(info.FullMethod, recover(), err)
		s.service.audit(ctx, info.FullMethod, req, err)
	}()
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, unaryTimeout)
		defer cancel()
	}
	return handler(ctx, req)
}

// stream recovers from panics, counts results and records refused operations.
func (s *Server) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer func() {
		err = s.service.finished(info.FullMethod, recover(), err)
		s.service.audit(ss.Context(), info.FullMethod, nil, err)
	}()
	return handler(srv, ss)
}

// finished counts a call's result; a panic becomes INTERNAL and does not end the process.
func (s *Service) finished(method string, panicked any, err error) error {
	if panicked != nil {
		s.panics.Add(1)
		s.c.Log.Error("a handler panicked", "method", method, "panic", panicked, "stack", string(debug.Stack()))
		err = rpcError(codes.Internal, reasonInternal, "a fault in the daemon, which continues: report it with the log entries about "+method)
	}
	if code := grpcstatus.Code(err); int(code) < len(s.calls) {
		s.calls[code].Add(1)
	}
	return err
}
