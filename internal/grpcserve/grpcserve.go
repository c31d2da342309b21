// Package grpcserve has the common part of the gRPC servers of the daemon and of the data-plane agent: the rule that
// other hosts need a certificate, limits, the detection of vanished clients, and the end.
package grpcserve

import (
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
)

const (
	// maxResponseBytes is the default limit of gRPC clients.
	maxResponseBytes = 4 << 20
	// maxCalls limits the concurrent calls of a server, on one connection or on several. A call may hold a request of
	// the largest size.
	maxCalls = 128
	// MaxConnections limits the open connections of a listener. Further ones wait in the kernel's queue.
	MaxConnections = 128
	// maxIdle is the time after which a connection without calls is closed; clients connect again with their next call.
	maxIdle = time.Minute
	// maxHeaderBytes limits the header of a call; gRPC's default is 16 MiB.
	maxHeaderBytes = 32 << 10
	// Window is the size in bytes of the flow-control windows of a connection and of its streams: more than the
	// operations that a control plane has in flight. gRPC sends a PING for nearly every message of a connection whose
	// windows may grow, and each PING wakes both processes.
	Window = 4 << 20
)

// ErrReachable means that an address without TLS is not a loopback address.
var ErrReachable = errors.New("is reachable from other hosts")

// CheckTLS returns an error unless c requires and verifies client certificates, from TLS 1.3 on.
func CheckTLS(c *tls.Config) error {
	if c.ClientAuth != tls.RequireAndVerifyClientCert || c.ClientCAs == nil || c.MinVersion < tls.VersionTLS13 {
		return errors.New("clients would not need a certificate, or could use a version before TLS 1.3")
	}
	return nil
}

// Listen is Open with MaxConnections.
func Listen(address string, secure *tls.Config) (net.Listener, []grpc.ServerOption, error) {
	l, options, err := Open(address, secure)
	if err != nil {
		return nil, nil, err
	}
	return Limit(l), options, nil
}

// Open binds a TCP address, host:port, and returns the options of its server. A nil secure disables TLS; the bound
// address must be a loopback address then, else the error is ErrReachable. Otherwise secure must pass CheckTLS.
func Open(address string, secure *tls.Config) (net.Listener, []grpc.ServerOption, error) {
	var options []grpc.ServerOption
	if secure != nil {
		if err := CheckTLS(secure); err != nil {
			return nil, nil, err
		}
		options = append(options, grpc.Creds(credentials.NewTLS(secure)))
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, nil, err
	}
	if secure == nil && !loopback(l.Addr()) { // the bound address, so that host names count as their addresses
		return nil, nil, errors.Join(ErrReachable, l.Close())
	}
	return l, options, nil
}

func loopback(a net.Addr) bool {
	ap, err := netip.ParseAddrPort(a.String())
	return err == nil && ap.Addr().Unmap().IsLoopback()
}

// New returns a server with the limits, health checks and reflection. maxRequestBytes limits the size of a request.
// window is the flow-control window in bytes: it bounds what a client can make the server hold for a call that does not
// read.
func New(maxRequestBytes int, window int32, checks healthpb.HealthServer, options ...grpc.ServerOption) *grpc.Server {
	s := grpc.NewServer(append(options,
		grpc.MaxRecvMsgSize(maxRequestBytes), grpc.MaxSendMsgSize(maxResponseBytes),
		grpc.MaxConcurrentStreams(maxCalls), grpc.StaticStreamWindowSize(window), grpc.StaticConnWindowSize(window), grpc.ConnectionTimeout(10*time.Second),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.InTapHandle(new(calls).admit),
		// A vanished client is detected after 40 s; a client that pings too often is disconnected.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second, MaxConnectionIdle: maxIdle}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	)...)
	healthpb.RegisterHealthServer(s, checks)
	reflection.Register(s)
	return s
}

// Stop waits until the calls of all servers have ended, or cancels them after the timeout. It reports whether all ended
// by themselves.
func Stop(timeout time.Duration, servers ...*grpc.Server) (graceful bool) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, s := range servers {
			s.GracefulStop()
		}
	}()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
	}
	for _, s := range servers {
		s.Stop()
	}
	<-done
	return false
}
