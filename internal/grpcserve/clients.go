package grpcserve

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
)

// Limits of one client: half of what all share. A client is a user on a unix socket; over TCP it is an address for
// connections, and for calls the name of a certificate or, without one, an address (Caller.Client).
const (
	MaxClientConnections = MaxConnections / 2
	maxClientCalls       = maxCalls / 2
)

// Clients counts what each client holds. The zero value is ready to use.
type Clients struct {
	mu   sync.Mutex
	held map[string]int // by client; without zeros
}

// Take counts one more for a client, unless it holds limit already. The caller calls release once.
func (c *Clients) Take(client string, limit int) (release func(), ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held[client] >= limit {
		return nil, false
	}
	if c.held == nil {
		c.held = map[string]int{}
	}
	c.held[client]++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.held[client]--; c.held[client] == 0 {
			delete(c.held, client)
		}
	}, true
}

// calls counts the open calls of a server.
type calls struct {
	all     atomic.Int64
	clients Clients
}

// admit counts a call from its header on, so that calls whose request never arrives are bounded, too.
func (c *calls) admit(ctx context.Context, _ *tap.Info) (context.Context, error) {
	client := CallerOf(ctx).Client()
	release, ok := c.clients.Take(client, maxClientCalls)
	if !ok {
		return nil, status.Errorf(codes.ResourceExhausted, "%s has %d calls open already: end some, or share one watch among the programs of this host", client, maxClientCalls)
	}
	if c.all.Add(1) > maxCalls {
		c.all.Add(-1)
		release()
		return nil, status.Errorf(codes.ResourceExhausted, "%d calls are open already: end some, or retry later", maxCalls)
	}
	context.AfterFunc(ctx, func() {
		c.all.Add(-1)
		release()
	})
	return ctx, nil
}

// clientOf returns the client of a new connection.
func clientOf(conn net.Conn) string {
	if _, local := conn.(*net.UnixConn); local {
		if cred, err := peerOf(conn); err == nil {
			return fmt.Sprintf("uid %d", cred.Uid)
		}
		return ""
	}
	return hostOf(conn.RemoteAddr())
}
