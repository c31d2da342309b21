package dpclient

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/directstream"
)

// window is the size in bytes of the flow-control windows: several chunks of a Snapshot, whose destinations have up to
// 2 KiB of source ports.
const window = 4 << 20

// maxResponseBytes is gRPC's default limit of a response.
const maxResponseBytes = 4 << 20

// Conn is a connection to a data plane.
type Conn struct {
	grpc.ClientConnInterface
	grpc *grpc.ClientConn
}

// Close closes the connection. Streams of Program end with their context.
func (c *Conn) Close() error { return c.grpc.Close() }

// Open returns a connection to the data plane at address: "unix:/path" or "host:port", the latter with the transport's
// credentials; nil means none. Over a unix socket Program uses directstream where the data plane knows it. Open does
// not wait for the data plane. The caller closes the connection after Run.
func Open(address string, transport credentials.TransportCredentials) (*Conn, error) {
	if transport == nil {
		transport = insecure.NewCredentials()
	}
	conn, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(transport),
		// As the agent's server (internal/grpcserve.Window): no PINGs that look for larger windows.
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window),
		// Run decides when to retry. The connection state at that time must not be older than Run's shortest pause.
		// (gRPC's ResetConnectBackoff is intended for this, but it reads a map without a lock that the balancer may be
		// writing, as of v1.85.)
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: DefaultMinBackoff, Multiplier: 1, MaxDelay: DefaultMinBackoff},
			MinConnectTimeout: time.Second,
		}))
	if err != nil {
		return nil, fmt.Errorf("data plane %q: %w; use unix:/path or host:port", address, err)
	}
	c := &Conn{conn, conn}
	if path, local := strings.CutPrefix(address, "unix:"); local {
		c.ClientConnInterface = &directstream.Conn{
			ClientConnInterface: conn, Socket: strings.TrimPrefix(path, "//"), Method: farev1.DataplaneService_Program_FullMethodName, Limit: maxResponseBytes,
		}
	}
	return c, nil
}
