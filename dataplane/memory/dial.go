package memory

import (
	"context"
	"fmt"
	"net"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// pipeBytes is the buffer size of the in-process connection per direction: large enough for a window of operations,
// small enough for thousands of data planes in one process.
const pipeBytes = 16 << 10

// Conn is an in-process connection to a data plane.
type Conn struct {
	*grpc.ClientConn

	server *grpc.Server
	served sync.WaitGroup
}

// Dial serves a data plane inside the process and connects to it by gRPC without a network. The caller must close the
// connection, which ends both sides.
func Dial(dataplane farev1.DataplaneServiceServer) (*Conn, error) {
	listener := bufconn.Listen(pipeBytes)
	// All transport buffers are small, because there is no network latency.
	server := grpc.NewServer(grpc.ReadBufferSize(4<<10), grpc.WriteBufferSize(4<<10), grpc.WaitForHandlers(true))
	farev1.RegisterDataplaneServiceServer(server, dataplane)
	client, err := grpc.NewClient("passthrough:///memory",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(4<<10),
		// The connection needs a few bytes per second at most, so it has no idle timer.
		grpc.WithIdleTimeout(0))
	if err != nil {
		server.Stop()
		return nil, fmt.Errorf("in-process data plane: %w", err)
	}
	c := &Conn{ClientConn: client, server: server}
	// Serve returns nil after Stop, which is the only way to end this listener.
	c.served.Go(func() { _ = server.Serve(listener) })
	return c, nil
}

// Close ends the connection, its streams and the server, and waits for them.
func (c *Conn) Close() error {
	err := c.ClientConn.Close()
	c.server.Stop()
	c.served.Wait()
	return err
}
