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

// pipeBytes is the size of the in-process connection's buffers, each way: large enough for a window of operations,
// small enough for thousands of data planes in one process.
const pipeBytes = 16 << 10

// Conn is an in-process connection to a data plane.
type Conn struct {
	*grpc.ClientConn

	server *grpc.Server
	served sync.WaitGroup
}

// Dial serves a data plane inside the process and connects to it: gRPC as over a socket, without a network. Close it
// to end both sides.
func Dial(dataplane farev1.DataplaneServiceServer) (*Conn, error) {
	listener := bufconn.Listen(pipeBytes)
	// Every buffer of the transport is kept small: nothing here waits for a network.
	server := grpc.NewServer(grpc.ReadBufferSize(4<<10), grpc.WriteBufferSize(4<<10), grpc.WaitForHandlers(true))
	farev1.RegisterDataplaneServiceServer(server, dataplane)
	client, err := grpc.NewClient("passthrough:///memory",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(4<<10),
		// A few bytes a second at most: no idle timer needs to tear the connection down.
		grpc.WithIdleTimeout(0))
	if err != nil {
		server.Stop()
		return nil, fmt.Errorf("in-process data plane: %w", err)
	}
	c := &Conn{ClientConn: client, server: server}
	// Serve returns nil after Stop, and Stop is the only way that this listener ends.
	c.served.Go(func() { _ = server.Serve(listener) })
	return c, nil
}

// Close ends the connection, the streams over it and the server; it returns when all are gone.
func (c *Conn) Close() error {
	err := c.ClientConn.Close()
	c.server.Stop()
	c.served.Wait()
	return err
}
