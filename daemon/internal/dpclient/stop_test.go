package dpclient

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// failing is a connection on which all calls fail while down is set.
type failing struct {
	grpc.ClientConnInterface
	down atomic.Bool
}

func (f *failing) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if f.down.Load() {
		return status.Error(codes.Unavailable, "connection refused")
	}
	return f.ClientConnInterface.Invoke(ctx, method, args, reply, opts...)
}

// lockedText is a text that one goroutine writes while another reads it.
type lockedText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lockedText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lockedText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// TestOrderlyStop checks in virtual time that failed attempts are warnings at once after a broken stream, and ten
// seconds after a data plane has stopped in order.
func TestOrderlyStop(t *testing.T) {
	for _, orderly := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			var log lockedText
			var conn *failing
			r := newRig(t, func(c *Config) {
				conn = &failing{ClientConnInterface: c.Conn}
				c.Conn, c.Logger = conn, slog.New(slog.NewTextHandler(&log, nil))
			})
			r.connected()
			conn.down.Store(true)
			if orderly {
				r.dp.Stop("it stops")
			} else {
				r.dp.BreakStream()
			}
			began := time.Now()
			r.until("end", r.has(Disconnected, 0))
			last := r.events[len(r.events)-1]
			if last.Kind != Disconnected || Stopped(last.Err) != orderly {
				t.Errorf("orderly %v: the last event is %v with %v", orderly, last.Kind, last.Err)
			}
			r.until("warning", func() bool { return strings.Contains(log.String(), "level=WARN msg=\"data plane not connected\"") })
			if took := time.Since(began); (took > restarts) != orderly || took > restarts+DefaultMaxBackoff+time.Second {
				t.Errorf("orderly %v: the first warning after %v", orderly, took)
			}
			conn.down.Store(false)
			r.connected()
		})
	}
}
