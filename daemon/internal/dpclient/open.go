package dpclient

import (
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// window is the size in bytes of the flow-control windows: several chunks of a Snapshot, whose destinations have up to 2 KiB of source ports.
const window = 4 << 20

// Open returns a connection to the data plane at address: "unix:/path" or "host:port", the latter with the transport's credentials; nil means
// none. It does not wait for the data plane. The caller closes the connection after Run.
func Open(address string, transport credentials.TransportCredentials) (*grpc.ClientConn, error) {
	if transport == nil {
		transport = insecure.NewCredentials()
	}
	conn, err := grpc.NewClient(address,
		grpc.WithTransportCredentials(transport),
		// As the agent's server (internal/grpcserve.Window): no PINGs that look for larger windows.
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window),
		// Run decides when to retry. The connection state at that time must not be older than Run's shortest pause. (gRPC's ResetConnectBackoff
		// is intended for this, but it reads a map without a lock that the balancer may be writing, as of v1.85.)
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: DefaultMinBackoff, Multiplier: 1, MaxDelay: DefaultMinBackoff},
			MinConnectTimeout: time.Second,
		}))
	if err != nil {
		return nil, fmt.Errorf("data plane %q: %w; use unix:/path or host:port", address, err)
	}
	return conn, nil
}
