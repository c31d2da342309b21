package superp_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/superp"
)

// write posts a WRITE of one byte on a connection, and returns its error.
func (m *member) write(t *testing.T, cid uint32, at uint64, value byte) error {
	t.Helper()
	m.host.Do(func() {
		c := m.agent.Connection(uint16(cid))
		if c == nil || !m.host.Post(c, &rdma.Op{Kind: rdma.OpWrite, Key: 1, Remote: at, Local: []byte{value}}) {
			t.Fatalf("cid %d: not posted", cid)
		}
	})
	select {
	case err := <-m.completed:
		return err
	case <-time.After(time.Minute):
		t.Fatalf("cid %d: no completion", cid)
		return nil
	}
}

// TestSupervise fails one of two connections at one end. The manager ends it at the other end, where a pending
// operation fails and is not repeated, and restarts it with the same cids and new psns, not before two seconds. The
// other connection goes on. Then an agent disappears, and the mesh ends.
func TestSupervise(t *testing.T) {
	members := newMembers(t, 7, 2)
	manager := newManager(t, mesh(first, members, false, true))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := manager.Up(ctx); err != nil {
		t.Fatal(err)
	}
	type restart struct {
		cid uint32
		err error
	}
	failed, restarts, violated, over := make(chan string, 10), make(chan restart, 10), make(chan *farev1.SuperpProtocolError, 10), make(chan error, 1)
	go func() {
		over <- manager.Supervise(ctx, superp.Supervision{Lost: time.Second,
			ProtocolError: func(node string, e *farev1.SuperpProtocolError, _ uint64) { violated <- e },
			Failed:        func(node string, c *farev1.SuperpConnectionStatus) { failed <- fmt.Sprint(node, " ", c.Error) },
			Restarted:     func(_, _ string, c *farev1.SuperpConnection, err error) { restarts <- restart{c.LocalCid, err} },
		})
	}()
	a, b := members[0], members[1]
	plan := manager.Plan()
	broken, other := plan[0].Connections[0], plan[0].Connections[1]
	for _, c := range []*farev1.SuperpConnection{broken, other} {
		if err := a.write(t, c.LocalCid, 0, 1); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := a.agent.RestartSuperpConnection(ctx, &farev1.RestartSuperpConnectionRequest{LocalCid: broken.LocalCid}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("restart of a connection that works: %v", err)
	}
	if _, err := a.agent.ShutdownSuperpConnection(ctx, &farev1.ShutdownSuperpConnectionRequest{LocalCid: 1, Hard: true}); status.Code(err) != codes.NotFound {
		t.Errorf("shutdown of no connection: %v", err)
	}
	reason := errors.New("a hard error")
	begin := time.Now()
	a.host.Do(func() { a.agent.Connection(uint16(broken.LocalCid)).Break(reason) })
	b.host.Do(func() { // its packets are dropped from now on
		if !b.host.Post(b.agent.Connection(uint16(broken.RemoteCid)), &rdma.Op{Kind: rdma.OpWrite, Key: 1, Remote: 100, Local: []byte{9}}) {
			t.Error("not posted")
		}
	})
	if err := <-b.completed; !errors.Is(err, rdma.ErrFlushed) {
		t.Errorf("the pending operation at the other end: %v", err)
	}
	if got := <-failed; got != "gpu0 a hard error" {
		t.Errorf("reported: %s", got)
	}
	if err := a.write(t, other.LocalCid, 1, 2); err != nil {
		t.Errorf("the other connection: %v", err)
	}
	if r := <-restarts; r.cid != broken.LocalCid || r.err != nil {
		t.Fatalf("restart: %+v", r)
	}
	if d := time.Since(begin); d < 2*time.Second {
		t.Errorf("the restart takes %v", d)
	}
	for i, m := range members {
		s := m.status(t)
		for _, c := range s.Connections {
			want := uint32(0)
			if cid := c.Connection.LocalCid; i == 0 && cid == broken.LocalCid || i == 1 && cid == broken.RemoteCid {
				if want = 1; c.NextPsn != 0 || c.ExpectedPsn != 0 || c.NextXid != 0 {
					t.Errorf("node %d: a restarted connection has the state %v", i, c)
				}
			}
			if c.Restarts != want || c.State != farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_STARTED || c.Error != "" {
				t.Errorf("node %d: %v", i, c)
			}
		}
	}
	if err := a.write(t, broken.LocalCid, 2, 3); err != nil {
		t.Errorf("the restarted connection: %v", err)
	}
	if err := b.write(t, broken.RemoteCid, 2, 4); err != nil {
		t.Errorf("the restarted connection, other end: %v", err)
	}
	b.host.Do(func() {
		if got := fmt.Sprint(b.memory[:3]); got != "[1 2 3]" {
			t.Errorf("memory %s", got)
		}
	})
	a.host.Do(func() {
		if a.memory[100] != 0 || a.memory[2] != 4 {
			t.Error("an operation that has failed was executed after the restart")
		}
	})
	// A protocol error reaches the manager.
	a.host.Do(func() { a.agent.Connection(uint16(other.LocalCid)).Violate(77) })
	if e := <-violated; e.Kind != farev1.SuperpProtocolErrorKind_SUPERP_PROTOCOL_ERROR_KIND_PSN || e.Psn != 77 || e.LocalCid != other.LocalCid || e.Number != 1 || e.RemoteAddress != b.node.Address.String() {
		t.Errorf("%v", e)
	}
	if n := a.status(t).Connections; n[0].ProtocolErrors+n[1].ProtocolErrors != 1 {
		t.Errorf("%v", n)
	}
	// A connection that is shut down in order stays so, and can be restarted by hand.
	for i, m := range members {
		go m.agent.ShutdownSuperpConnection(ctx, &farev1.ShutdownSuperpConnectionRequest{Generation: first, LocalCid: plan[i].Connections[1].LocalCid})
	}
	for _, m := range members {
		netnstest.Eventually(t, time.Minute, func() error {
			for _, c := range m.status(t).Connections {
				if c.State == farev1.SuperpConnectionState_SUPERP_CONNECTION_STATE_ENDED && c.Error == "" {
					return nil
				}
			}
			return fmt.Errorf("no connection has ended: %v", m.status(t).Connections)
		})
	}
	select {
	case r := <-restarts:
		t.Errorf("a restart: %+v", r)
	case err := <-over:
		t.Errorf("the supervision ends: %v", err)
	default:
	}
	members[1].stop()
	if err := <-over; !errors.Is(err, superp.ErrSystem) {
		t.Errorf("without an agent the supervision ends with %v", err)
	}
	if s := a.status(t); s.Generation != 0 {
		t.Errorf("the mesh continues: %v", s)
	}
}
