package status

import (
	"context"
	"fmt"
	"net"
	"os/user"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionalphapb "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/unixsocket"
)

// access is the right that a call needs.
type access uint8

const (
	accessOperate access = iota // the call changes the daemon's behavior; unknown methods need this right, too
	accessRead                  // the call only reads
	accessRights                // the number of rights
)

// methods classifies every method of every service that Server registers, by its full name.
var methods = map[string]access{
	farev1.WeightService_GetWeights_FullMethodName:   accessRead,
	farev1.WeightService_ListWeights_FullMethodName:  accessRead,
	farev1.WeightService_WatchWeights_FullMethodName: accessRead,

	farev1.FabricService_GetStatus_FullMethodName:    accessRead,
	farev1.FabricService_ListSessions_FullMethodName: accessRead,
	farev1.FabricService_ListPlanes_FullMethodName:   accessRead,
	farev1.FabricService_WatchEvents_FullMethodName:  accessRead,
	farev1.FabricService_Drain_FullMethodName:        accessOperate,
	farev1.FabricService_Undrain_FullMethodName:      accessOperate,
	farev1.FabricService_Reload_FullMethodName:       accessOperate,

	healthpb.Health_Check_FullMethodName: accessRead,
	healthpb.Health_List_FullMethodName:  accessRead,
	healthpb.Health_Watch_FullMethodName: accessRead,

	reflectionpb.ServerReflection_ServerReflectionInfo_FullMethodName:      accessRead,
	reflectionalphapb.ServerReflection_ServerReflectionInfo_FullMethodName: accessRead,
}

// allow returns PERMISSION_DENIED for a method that needs more than the endpoint grants.
func (e *endpoint) allow(method string) error {
	if e.access == accessOperate || methods[method] == accessRead {
		return nil
	}
	return rpcError(codes.PermissionDenied, reasonPermission, fmt.Sprintf("%s is not possible on %s, which serves only calls that read: use %s", method, e.name, e.operate))
}

// allowUnary is the interceptor of unary calls.
func (e *endpoint) allowUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := e.allow(info.FullMethod); err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

// allowStream is the interceptor of streams.
func (e *endpoint) allowStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := e.allow(info.FullMethod); err != nil {
		return err
	}
	return handler(srv, accessStream{ss, context.WithValue(ss.Context(), accessKey{}, e.access)})
}

// accessKey is the key of an endpoint's right in the context of its streams.
type accessKey struct{}

// accessStream is a stream whose context has the right of its endpoint.
type accessStream struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s accessStream) Context() context.Context { return s.ctx }

// accessOf returns the right of the endpoint that received a streaming call; accessOperate for a call inside the process.
func accessOf(ctx context.Context) access {
	right, _ := ctx.Value(accessKey{}).(access)
	return right
}

// Caller describes the process at the other end of a call, for logs and events: "uid 1000 (alice) pid 4242" on a unix socket, the address and
// the certificate's common name over TCP, "" for a call inside the process.
func Caller(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	switch info := p.AuthInfo.(type) {
	case processInfo:
		return info.String()
	case credentials.TLSInfo:
		if certs := info.State.PeerCertificates; len(certs) > 0 {
			return fmt.Sprintf("%q at %s", certs[0].Subject.CommonName, p.Addr)
		}
	}
	return p.Addr.String()
}

// processInfo identifies the process that connected to a unix socket (unix(7), SO_PEERCRED).
type processInfo struct {
	credentials.CommonAuthInfo
	uid uint32
	pid int32 // 0 for a process of another PID namespace
}

// AuthType implements credentials.AuthInfo.
func (processInfo) AuthType() string { return "peercred" }

// String returns the user's number and name, and the process's number.
func (i processInfo) String() string {
	s := fmt.Sprintf("uid %d", i.uid)
	if u, err := user.LookupId(strconv.FormatUint(uint64(i.uid), 10)); err == nil {
		s += " (" + u.Username + ")"
	}
	if i.pid != 0 {
		s += fmt.Sprintf(" pid %d", i.pid)
	}
	return s
}

// limitedListener limits the number of open connections of a unix socket. Further connections wait in the kernel's queue.
type limitedListener struct {
	*unixsocket.Listener
	free   chan struct{} // contains an element for each open connection
	closed chan struct{}
	once   sync.Once
}

// Accept implements net.Listener.
func (l *limitedListener) Accept() (net.Conn, error) {
	select {
	case l.free <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	conn, err := l.AcceptUnix()
	if err != nil {
		<-l.free
		return nil, err
	}
	return &limitedConn{UnixConn: conn, release: sync.OnceFunc(func() { <-l.free })}, nil
}

// Close implements net.Listener.
func (l *limitedListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// limitedConn is a connection of a limitedListener.
type limitedConn struct {
	*net.UnixConn
	release func()
}

// Close implements net.Conn.
func (c *limitedConn) Close() error {
	defer c.release()
	return c.UnixConn.Close()
}

// peerCredentials implements transport credentials for a server on a unix socket: no bytes are exchanged, and the kernel identifies the client.
type peerCredentials struct {
	credentials.TransportCredentials
}

func newPeerCredentials() peerCredentials { return peerCredentials{insecure.NewCredentials()} }

// ServerHandshake implements credentials.TransportCredentials.
func (c peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	local, ok := conn.(syscall.Conn)
	if !ok {
		return nil, nil, fmt.Errorf("peer credentials of a %T", conn)
	}
	raw, err := local.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, nil, err
	}
	if credErr != nil {
		return nil, nil, fmt.Errorf("peer credentials: %w", credErr)
	}
	return conn, processInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}, cred.Uid, cred.Pid}, nil
}

// Clone implements credentials.TransportCredentials.
func (c peerCredentials) Clone() credentials.TransportCredentials {
	return peerCredentials{c.TransportCredentials.Clone()}
}
