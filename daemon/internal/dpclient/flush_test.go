package dpclient

import (
	"context"
	"slices"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/internal/inprocess"
)

// hold declares a vector without sending it.
func (r *rig) hold(vector *farev1.Vector) (work bool) {
	return r.client.Hold(func(tx *Transaction) { tx.SetVector(vector) })
}

// newInside returns a client of a data plane in this process, which commits in the goroutine that sends. wrap may
// replace the connection.
func newInside(t *testing.T, wrap func(grpc.ClientConnInterface) grpc.ClientConnInterface) *rig {
	t.Helper()
	log, conn := &wireLog{}, inprocess.New()
	dp := memory.New(memory.Config{Observe: log.add})
	farev1.RegisterDataplaneServiceServer(conn, dp)
	t.Cleanup(func() { conn.Close() })
	r := &rig{t: t, dp: dp, log: log}
	r.restart(func(c *Config) { c.Conn = wrap(conn) })
	t.Cleanup(func() { r.stop() })
	r.connected()
	r.quiet()
	return r
}

// TestFlush checks that held changes wait for Flush, which applies them to a data plane in this process before it
// returns, and leaves them to the sender while an acknowledgement is missing.
func TestFlush(t *testing.T) {
	r := newInside(t, func(conn grpc.ClientConnInterface) grpc.ClientConnInterface { return conn })
	here := 0 // changes that were applied in this goroutine; the sender may be looking for work and do it instead
	for i := range uint32(100) {
		if !r.hold(vector(1, i+1, 1)) {
			t.Fatal("nothing to send")
		}
		if got := r.log.take(); len(got) != 0 {
			t.Fatalf("%v were sent before Flush", got)
		}
		r.client.Flush()
		if slices.Equal(r.log.take(), []string{"set-vector 1"}) {
			here++
		}
		r.quiet()
		r.log.take()
	}
	if here == 0 {
		t.Error("no change was applied before Flush returned")
	}
	if r.client.Flush(); r.hold(vector(1, 100, 1)) || len(r.log.take()) != 0 {
		t.Error("a change was sent, or is to be sent, without any")
	}
	r.dp.DelayAcks(patience)
	r.hold(vector(2, 1, 1))
	r.client.Flush()
	r.hold(vector(3, 1, 2))
	r.client.Flush()
	r.until("both are sent", func() bool { return r.vectors() == 3 })
	r.dp.DelayAcks(0)
}

// TestFlushOfFailure checks that Flush applies the states of sub-ports together with the vector that follows from them.
func TestFlushOfFailure(t *testing.T) {
	r := newInside(t, func(conn grpc.ClientConnInterface) grpc.ClientConnInterface { return conn })
	here := 0 // as in TestFlush
	for i := range uint32(100) {
		r.client.Hold(func(tx *Transaction) {
			tx.SetSubPort(device(0, 0), i%2 == 1)
			tx.SetSubPort(device(0, 1), i%2 == 1)
			tx.SetVector(vector(i+1, 1))
		})
		r.client.Flush()
		if r.vectors() == int(i+1) {
			here++
		}
		r.quiet()
	}
	if here == 0 {
		t.Error("no vector was applied before Flush returned")
	}
}

// TestFlushOfRefused checks that a refusal in Flush is reported, and that the changes that follow are sent.
func TestFlushOfRefused(t *testing.T) {
	r := newInside(t, func(conn grpc.ClientConnInterface) grpc.ClientConnInterface { return conn })
	r.dp.RefuseNext(1, codes.ResourceExhausted, "full")
	r.hold(vector(1, 1, 1))
	r.client.Flush()
	r.until("refused", r.has(Refused, 0))
	r.hold(vector(1, 1, 2))
	r.client.Flush()
	r.until("in effect", r.has(InEffect, 0))
}

// slowHello lets a Hello wait.
type slowHello struct {
	grpc.ClientConnInterface
	mu         sync.Mutex
	begun, end chan struct{} // nil while Hello does not wait
}

func (s *slowHello) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	s.mu.Lock()
	begun, end := s.begun, s.end
	s.begun = nil
	s.mu.Unlock()
	if begun != nil && method == farev1.DataplaneService_Hello_FullMethodName {
		close(begun)
		<-end
	}
	return s.ClientConnInterface.Invoke(ctx, method, args, reply, opts...)
}

// TestFlushFollowsForwarding checks that changes of another forwarding are not sent before it is acknowledged.
func TestFlushFollowsForwarding(t *testing.T) {
	slow := &slowHello{}
	r := newInside(t, func(conn grpc.ClientConnInterface) grpc.ClientConnInterface {
		slow.ClientConnInterface = conn
		return slow
	})
	begun, end := make(chan struct{}), make(chan struct{})
	slow.mu.Lock()
	slow.begun, slow.end = begun, end
	slow.mu.Unlock()
	f := testForwarding()
	f.Planes[0].SubPorts = append(f.Planes[0].SubPorts, &farev1.ForwardingSubPort{Device: "p0s2", NextHopV6: "fe80::1"})
	r.client.SetForwarding(f)
	<-begun
	r.hold(&farev1.Vector{Id: 1, Members: []*farev1.VectorMember{{Plane: "p0", Device: "p0s2", Weight: 1}}})
	r.client.Flush()
	if got := r.log.take(); len(got) != 0 {
		t.Errorf("%v were sent before the forwarding", got)
	}
	close(end)
	r.until("in effect", r.has(InEffect, 0))
}
