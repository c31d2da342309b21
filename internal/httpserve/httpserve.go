// Package httpserve has the HTTP servers of metrics, whose listeners any host or user may reach: every wait of a
// connection has a limit, and so has the number of connections.
package httpserve

import (
	"container/list"
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// MaxConnections bounds the open connections of a server. A further one replaces the connection that has waited longest
// outside of a handler, so that idle connections shut out no client. If a handler runs for every connection, the new
// one is closed.
const MaxConnections = 64

// maxHeaderBytes bounds the header of a request, as far as net/http does: it reads some 4 KiB more.
const maxHeaderBytes = 16 << 10

// New returns a server that runs handler.
func New(handler http.Handler) *http.Server {
	k := &keeper{conns: make(map[net.Conn]*tracked)}
	return &http.Server{
		Handler: k.mark(handler), ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: maxHeaderBytes, ConnState: k.state, ConnContext: k.context,
	}
}

// keeper tracks the connections of a server.
type keeper struct {
	mu      sync.Mutex
	conns   map[net.Conn]*tracked
	waiting list.List // of *tracked without a running handler, the longest wait first
}

// tracked is an open connection.
type tracked struct {
	conn net.Conn
	at   *list.Element // in waiting; nil while a handler runs
}

// key is the context key of a request's *tracked.
type key struct{}

// context implements http.Server.ConnContext.
func (k *keeper) context(ctx context.Context, conn net.Conn) context.Context {
	k.mu.Lock()
	defer k.mu.Unlock()
	t := &tracked{conn: conn}
	k.conns[conn], t.at = t, k.waiting.PushBack(t)
	if len(k.conns) > MaxConnections { // the new connection, at worst
		oldest := k.waiting.Front().Value.(*tracked)
		oldest.conn.Close()
		k.forgetLocked(oldest)
	}
	return context.WithValue(ctx, key{}, t)
}

// state implements http.Server.ConnState.
func (k *keeper) state(conn net.Conn, s http.ConnState) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if t := k.conns[conn]; t != nil && (s == http.StateClosed || s == http.StateHijacked) {
		k.forgetLocked(t)
	}
}

// forgetLocked removes a connection. The caller holds mu.
func (k *keeper) forgetLocked(t *tracked) {
	delete(k.conns, t.conn)
	if t.at != nil {
		k.waiting.Remove(t.at)
		t.at = nil
	}
}

// mark returns a handler that runs next, and keeps its connection out of waiting meanwhile.
func (k *keeper) mark(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t := r.Context().Value(key{}).(*tracked)
		k.mu.Lock()
		if t.at != nil { // nil if another connection has replaced this one
			k.waiting.Remove(t.at)
			t.at = nil
		}
		k.mu.Unlock()
		defer func() {
			k.mu.Lock()
			defer k.mu.Unlock()
			if k.conns[t.conn] == t {
				t.at = k.waiting.PushBack(t)
			}
		}()
		next.ServeHTTP(w, r)
	})
}
