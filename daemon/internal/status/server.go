package status

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/unixsocket"
)

const (
	// maxRequestBytes holds a filter of more than 20,000 prefixes.
	maxRequestBytes = 1 << 20
	// maxResponseBytes is what gRPC clients accept by default. Pages and chunks end at maxMessageBytes.
	maxResponseBytes = 4 << 20
	// maxStreams bounds calls at once on one connection.
	maxStreams = 128
	// unaryTimeout ends a call whose client set no deadline.
	unaryTimeout = 30 * time.Second
	// DefaultStopTimeout is how long calls may go on after the end was asked for.
	DefaultStopTimeout = 2 * time.Second
)

// ServerConfig says where the API is served. At least one of Socket and Listen is needed.
type ServerConfig struct {
	// Socket is the path of a unix socket; empty: none.
	Socket string
	// SocketMode is its mode; 0: unixsocket.DefaultMode. SocketOwner is "user", "user:group" or ":group"; empty: the process's.
	SocketMode  os.FileMode
	SocketOwner string
	// Listen is a TCP address, host:port; empty: none. Without TLS only a loopback is accepted.
	Listen string
	// TLS must demand and verify client certificates.
	TLS *tls.Config
	// StopTimeout is how long calls may go on after Serve's context ended; 0: DefaultStopTimeout.
	StopTimeout time.Duration
}

// Server serves the API: WeightService, FabricService, health and reflection.
type Server struct {
	c         ServerConfig
	service   *Service
	log       *slog.Logger
	health    *health.Server
	endpoints []endpoint
}

// endpoint is a listener with a gRPC server of its own, because transport security is a server's property.
type endpoint struct {
	net.Listener
	grpc *grpc.Server
}

// NewServer binds the addresses. The error is a *unixsocket.InUseError when another process serves the socket. Serve or Close must
// follow.
func NewServer(c ServerConfig, service *Service, log *slog.Logger) (_ *Server, err error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if c.SocketMode == 0 {
		c.SocketMode = unixsocket.DefaultMode
	}
	if c.StopTimeout == 0 {
		c.StopTimeout = DefaultStopTimeout
	}
	if c.Socket == "" && c.Listen == "" {
		return nil, errors.New("api: neither a socket nor a listen address is given: set api.socket or api.listen")
	}
	s := &Server{c: c, service: service, log: log, health: health.NewServer()}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if c.Socket != "" {
		l, err := unixsocket.Listen(unixsocket.Config{Path: c.Socket, Mode: c.SocketMode, Owner: c.SocketOwner, Setting: "api.socket"}, log)
		if err != nil {
			return nil, fmt.Errorf("api.socket: %w", err)
		}
		s.endpoints = append(s.endpoints, endpoint{l, s.newGRPC()})
	}
	if c.Listen != "" {
		var options []grpc.ServerOption
		if c.TLS != nil {
			if c.TLS.ClientAuth != tls.RequireAndVerifyClientCert || c.TLS.ClientCAs == nil {
				return nil, errors.New("api.tls: clients would not need a certificate: give client_ca_file")
			}
			options = append(options, grpc.Creds(credentials.NewTLS(c.TLS)))
		}
		l, err := net.Listen("tcp", c.Listen)
		if err != nil {
			return nil, fmt.Errorf("api.listen: %w", err)
		}
		s.endpoints = append(s.endpoints, endpoint{l, s.newGRPC(options...)})
		if c.TLS == nil && !loopback(l.Addr()) {
			return nil, fmt.Errorf("api.listen: %s is reachable from outside: give api.tls, or listen on 127.0.0.1", c.Listen)
		}
	}
	return s, nil
}

// loopback looks at the address that was bound, so that names count as what they resolved to.
func loopback(a net.Addr) bool {
	ap, err := netip.ParseAddrPort(a.String())
	return err == nil && ap.Addr().Unmap().IsLoopback()
}

func (s *Server) newGRPC(options ...grpc.ServerOption) *grpc.Server {
	g := grpc.NewServer(append(options,
		grpc.MaxRecvMsgSize(maxRequestBytes), grpc.MaxSendMsgSize(maxResponseBytes),
		grpc.MaxConcurrentStreams(maxStreams), grpc.ConnectionTimeout(10*time.Second),
		// A watcher that vanished without a word is noticed after 40 s; one that pings too often is sent away.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.UnaryInterceptor(s.unary), grpc.StreamInterceptor(s.stream),
	)...)
	farev1.RegisterWeightServiceServer(g, s.service.Weights())
	farev1.RegisterFabricServiceServer(g, s.service.Fabric())
	healthpb.RegisterHealthServer(g, s.health)
	reflection.Register(g)
	return g
}

// Addr returns the bound TCP address, nil without one.
func (s *Server) Addr() net.Addr {
	if s.c.Listen == "" {
		return nil
	}
	return s.endpoints[len(s.endpoints)-1].Addr()
}

// Serve answers calls until ctx ends; then watches are told to come back, other calls may finish until StopTimeout, and
// the socket is removed. It returns nil then, or why it could not go on. It may be called once.
func (s *Server) Serve(ctx context.Context) error {
	for _, name := range []string{"", farev1.WeightService_ServiceDesc.ServiceName, farev1.FabricService_ServiceDesc.ServiceName} {
		s.health.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
	}
	results := make(chan error, len(s.endpoints))
	for _, e := range s.endpoints {
		go func() { results <- e.grpc.Serve(e.Listener) }()
		address := e.Addr().String()
		if e.Addr().Network() == "unix" {
			address = s.c.Socket // the listener was bound under a temporary name
		}
		s.log.Info("serving the API", "address", address)
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

// stop ends all calls, politely first.
func (s *Server) stop() {
	s.health.Shutdown()
	s.service.stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, e := range s.endpoints {
			e.grpc.GracefulStop()
		}
	}()
	timer := time.NewTimer(s.c.StopTimeout)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		s.log.Warn("ending calls that did not finish in time", "timeout", s.c.StopTimeout)
		for _, e := range s.endpoints {
			e.grpc.Stop()
		}
		<-done
	}
}

// Close releases the addresses of a server that was not served. It is safe after Serve.
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

// unary bounds a call, catches panics and counts results.
func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	defer func() { err = s.service.finished(info.FullMethod, recover(), err) }()
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, unaryTimeout)
		defer cancel()
	}
	return handler(ctx, req)
}

// stream catches panics and counts results.
func (s *Server) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) (err error) {
	defer func() { err = s.service.finished(info.FullMethod, recover(), err) }()
	return handler(srv, ss)
}

// finished counts a call's result; a panic becomes INTERNAL and leaves the process alive.
func (s *Service) finished(method string, panicked any, err error) error {
	if panicked != nil {
		s.panics.Add(1)
		s.c.Log.Error("a handler panicked", "method", method, "panic", panicked, "stack", string(debug.Stack()))
		err = rpcError(codes.Internal, reasonInternal, "a fault in the daemon, which goes on: report it with what its log says about "+method)
	}
	if code := grpcstatus.Code(err); int(code) < len(s.calls) {
		s.calls[code].Add(1)
	}
	return err
}
