package grpcserve

import (
	"context"
	"fmt"
	"net"
	"os/user"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	"github.com/fared/fared/internal/tlsfiles"
)

// Caller is the client of a call, as the kernel or its certificate identifies it. The zero value is a caller inside the
// process.
type Caller struct {
	// Names are the names of the certificate (tlsfiles.Names), nil without a certificate.
	Names []string
	who   fmt.Stringer // nil inside the process
	// client is equal for all connections of a user, of a certificate's name or, without both, of an address.
	client string
}

// CallerOf returns the caller of a handler's context.
func CallerOf(ctx context.Context) Caller {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Caller{}
	}
	switch info := p.AuthInfo.(type) {
	case processInfo:
		return Caller{who: info, client: fmt.Sprintf("uid %d", info.uid)}
	case credentials.TLSInfo:
		if certs := info.State.PeerCertificates; len(certs) > 0 {
			names := tlsfiles.Names(certs[0])
			return Caller{Names: names, who: certified{names[0], p.Addr}, client: fmt.Sprintf("certificate %q", names[0])}
		}
	}
	return Caller{who: p.Addr, client: hostOf(p.Addr)}
}

// hostOf returns the client of an address without its port.
func hostOf(a net.Addr) string {
	host, _, err := net.SplitHostPort(a.String())
	if err != nil {
		host = a.String()
	}
	return "address " + host
}

// String describes the caller for logs and events: "uid 1000 (alice) pid 4242" on a unix socket, the certificate's
// first name and the address over TLS, the address over TCP, "" inside the process.
func (c Caller) String() string {
	if c.who == nil {
		return ""
	}
	return c.who.String()
}

// Client identifies the client behind all connections of a user ("uid 1000"), a certificate or an address; "" inside
// the process.
func (c Caller) Client() string { return c.client }

// certified describes a client with a certificate.
type certified struct {
	name string
	addr net.Addr
}

func (c certified) String() string { return fmt.Sprintf("%q at %s", c.name, c.addr) }

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

// peerCredentials implements transport credentials for a server on a unix socket: no bytes are exchanged, and the
// kernel identifies the client.
type peerCredentials struct {
	credentials.TransportCredentials
}

// PeerCredentials returns transport credentials for a server on a unix socket, with which CallerOf knows the client's
// process.
func PeerCredentials() credentials.TransportCredentials {
	return peerCredentials{insecure.NewCredentials()}
}

// ServerHandshake implements credentials.TransportCredentials.
func (c peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cred, err := peerOf(conn)
	if err != nil {
		return nil, nil, err
	}
	return conn, processInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}, cred.Uid, cred.Pid}, nil
}

// peerOf returns the credentials of the process that connected to a unix socket.
func peerOf(conn net.Conn) (*unix.Ucred, error) {
	local, ok := conn.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("peer credentials of a %T", conn)
	}
	raw, err := local.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, err
	}
	if credErr != nil {
		return nil, fmt.Errorf("peer credentials: %w", credErr)
	}
	return cred, nil
}

// Clone implements credentials.TransportCredentials.
func (c peerCredentials) Clone() credentials.TransportCredentials {
	return peerCredentials{c.TransportCredentials.Clone()}
}
