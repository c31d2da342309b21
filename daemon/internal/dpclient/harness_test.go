package dpclient

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience limits how long a test waits for an event.
const patience = time.Minute

var planes = []string{"p0", "p1"}

func device(plane, sub int) string { return fmt.Sprintf("p%ds%d", plane, sub) }

func testForwarding() *farev1.Forwarding {
	f := &farev1.Forwarding{Mode: farev1.Mode_MODE_PER_FLOW, Loopbacks: []string{"10.255.0.1/32"}, UdpPorts: []uint32{4791}}
	for p, name := range planes {
		plane := &farev1.ForwardingPlane{Plane: name}
		for s := range 2 {
			plane.SubPorts = append(plane.SubPorts, &farev1.ForwardingSubPort{Device: device(p, s)})
		}
		f.Planes = append(f.Planes, plane)
	}
	return f
}

// vector returns a vector; weights are of p0s0, p0s1, p1s0, p1s1, and 0 omits the member.
func vector(id uint32, weights ...uint32) *farev1.Vector {
	g := &farev1.Vector{Id: id}
	for i, weight := range weights {
		if weight > 0 {
			g.Members = append(g.Members, &farev1.VectorMember{Plane: planes[i/2], Device: device(i/2, i%2), Weight: weight})
		}
	}
	return g
}

func dst(n int) Destination {
	return Destination{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200, byte(n >> 8), byte(n)}), 32)}
}

// wireLog records the operations that arrived at the data plane.
type wireLog struct {
	mu  sync.Mutex
	ops []string
}

func (l *wireLog) add(op *farev1.Operation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch op := op.Op.(type) {
	case *farev1.Operation_SubPort:
		l.ops = append(l.ops, fmt.Sprintf("sub-port %s %v", op.SubPort.Device, op.SubPort.Up))
	case *farev1.Operation_SetVector:
		l.ops = append(l.ops, fmt.Sprintf("set-vector %d", op.SetVector.Id))
	case *farev1.Operation_DeleteVector:
		l.ops = append(l.ops, fmt.Sprintf("delete-vector %d", op.DeleteVector))
	case *farev1.Operation_SetDestination:
		l.ops = append(l.ops, fmt.Sprintf("set %s %d", op.SetDestination.Prefix, op.SetDestination.Vector))
	case *farev1.Operation_DeleteDestination:
		l.ops = append(l.ops, "delete "+op.DeleteDestination.GetPrefix())
	}
}

func (l *wireLog) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	ops := l.ops
	l.ops = nil
	return ops
}

// rig is a client of an in-memory data plane.
type rig struct {
	t      *testing.T
	dp     *memory.Dataplane
	log    *wireLog
	conn   *memory.Conn
	client *Client
	stop   func()

	events []Event
}

func newDataplane(t *testing.T, capabilities *farev1.Capabilities) (*memory.Dataplane, *wireLog, *memory.Conn) {
	t.Helper()
	log := &wireLog{}
	dp := memory.New(memory.Config{Capabilities: capabilities, Observe: log.add})
	conn, err := memory.Dial(dp)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return dp, log, conn
}

func newRig(t *testing.T, change func(*Config)) *rig {
	t.Helper()
	dp, log, conn := newDataplane(t, nil)
	r := &rig{t: t, dp: dp, log: log, conn: conn}
	r.restart(change)
	t.Cleanup(func() { r.stop() })
	return r
}

// restart ends the client, if any, and starts another one, like a restarted control plane. Its data plane may be silent
// for an hour unless change sets another limit: tests delay acknowledgements, and a busy machine delays them too.
func (r *rig) restart(change func(*Config)) {
	r.t.Helper()
	if r.stop != nil {
		r.stop()
	}
	config := Config{Conn: r.conn, Forwarding: testForwarding(), MinBackoff: time.Millisecond, MaxBackoff: 4 * time.Millisecond, AckTimeout: time.Hour}
	if change != nil {
		change(&config)
	}
	client, err := New(config)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(r.t.Context())
	done := make(chan error, 1)
	go func() { done <- client.Run(ctx) }()
	r.client, r.events = client, nil
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			r.t.Errorf("Run: %v", err)
		}
	})
}

// take takes all events.
func (r *rig) take() {
	for n := -1; n != len(r.events); {
		n = len(r.events)
		r.events = r.client.Take(r.events)
	}
}

// until drains events until ok returns true.
func (r *rig) until(what string, ok func() bool) {
	r.t.Helper()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	poll := time.NewTicker(2 * time.Millisecond)
	defer poll.Stop()
	for !ok() {
		select {
		case <-r.client.Ready():
			r.take()
		case <-poll.C:
		case <-deadline.C:
			r.t.Fatalf("%s did not happen; status %+v\n%d vectors, %d destinations\nevents %+v",
				what, r.client.Status(), r.vectors(), r.destinations(), tail(r.events))
		}
	}
}

func tail(events []Event) []Event { return events[max(0, len(events)-10):] }

func (r *rig) has(kind EventKind, change uint64) func() bool {
	return func() bool {
		return slices.ContainsFunc(r.events, func(e Event) bool { return e.Kind == kind && (change == 0 || e.Change == change) })
	}
}

func (r *rig) connected() {
	r.t.Helper()
	r.until("connect", func() bool { return r.client.Status().Connected })
}

func (r *rig) vectors() int {
	vectors, _ := r.dp.Size()
	return vectors
}

func (r *rig) destinations() int {
	_, destinations := r.dp.Size()
	return destinations
}

// quiet waits until all declared changes were sent and answered.
func (r *rig) quiet() {
	r.t.Helper()
	r.until("quiet", func() bool {
		s := r.client.Status()
		return s.Connected && s.Queued == 0 && s.InFlight == 0
	})
	r.take()
}
