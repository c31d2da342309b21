package dpclient

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
)

func TestProgramsInOrder(t *testing.T) {
	r := newRig(t, nil)
	r.client.ReleaseRemovals(true)
	// Declared before the data plane is available, in an unfavorable order.
	r.client.SetDestination(dst(2), 2)
	r.client.SetDestination(dst(1), 1)
	r.client.SetVector(vector(2, 1, 0, 1))
	r.client.SetVector(vector(1, 1))
	last := r.client.SetSubPort(device(0, 1), false)
	r.until("in effect", r.has(InEffect, last))
	r.quiet()
	want := []string{"sub-port p0s1 false", "set-vector 1", "set-vector 2", "set 10.200.0.1/32 1", "set 10.200.0.2/32 2"}
	// The declarations race with the connection: a sequence of bursts arrives, each in order.
	got := r.log.take()
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}

	gone := r.client.DeleteVector(1)
	r.client.SetDestination(dst(1), 2)
	r.until("vector gone", r.has(InEffect, gone))
	if got, want := r.log.take(), []string{"set 10.200.0.1/32 2", "delete-vector 1"}; !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}
}

func TestEqualInputDoesNothing(t *testing.T) {
	r := newRig(t, nil)
	r.client.SetSubPort(device(0, 0), false)
	r.client.SetVector(vector(1, 1, 2))
	r.client.SetDestination(dst(1), 1)
	r.connected()
	r.quiet()
	before := r.log.take()
	if len(before) != 3 {
		t.Fatalf("sent %v, want 3 operations", before)
	}
	a := r.client.SetSubPort(device(0, 0), false)
	b := r.client.SetVector(vector(1, 1, 2))
	c := r.client.SetDestination(dst(1), 1)
	if a != 1 || b != 2 || c != 3 {
		t.Errorf("changes %d %d %d of equal input, want 1 2 3", a, b, c)
	}
	r.client.SetVector(vector(9, 1)) // a change that must arrive alone
	r.until("vector 9", func() bool { return r.vectors() == 2 })
	r.quiet()
	if got := r.log.take(); !slices.Equal(got, []string{"set-vector 9"}) {
		t.Errorf("sent %v, want the new vector alone", got)
	}
}

// TestFastPathOvertakes checks that the state of a sub-port is the next message on the wire after those already sent,
// however many are queued.
func TestFastPathOvertakes(t *testing.T) {
	const backlog, window = 16384, 128
	r := newRig(t, func(c *Config) { c.Window = window })
	r.client.SetVector(vector(1, 1, 1, 1, 1))
	r.connected()
	r.quiet()
	r.dp.DelayAcks(time.Hour) // the window fills and stays full
	r.log.take()
	for n := range backlog {
		r.client.SetDestination(dst(n), 1)
	}
	r.until("full window", func() bool { return r.dp.Tally().DestinationSets == window })
	r.client.SetSubPort(device(1, 0), false)
	r.until("sub-port state", func() bool { return r.dp.Tally().SubPorts == 1 })
	got := r.log.take()
	if len(got) != window+1 || got[window] != "sub-port p1s0 false" {
		t.Fatalf("%d operations, the last %q; want the sub-port state right behind the %d that were sent", len(got), got[len(got)-1], window)
	}
	if s := r.client.Status(); s.Queued != backlog-window {
		t.Errorf("%d still queued, want %d", s.Queued, backlog-window)
	}
	// The rest arrives once the data plane continues.
	r.dp.DelayAcks(0)
	r.dp.BreakStream()
	r.until("all", func() bool { return r.destinations() == backlog })
	r.quiet()
	if c := r.dp.Tally(); c.Unchanged != 0 {
		t.Errorf("%d operations changed nothing; only the difference is to be sent after a reconnect", c.Unchanged)
	}
}

func TestRefusals(t *testing.T) {
	dp, log, conn := newDataplane(t, &farev1.Capabilities{MaxWeight: 4, Ipv6: true})
	r := &rig{t: t, dp: dp, log: log, conn: conn}
	r.restart(nil)
	t.Cleanup(func() { r.stop() })
	r.client.ReleaseRemovals(true)
	heavy := r.client.SetVector(vector(1, 5))
	to := r.client.SetDestination(dst(1), 1)
	r.until("refusals", func() bool { return r.has(Refused, heavy)() && r.has(Refused, to)() })
	for _, e := range r.events {
		if e.Change == heavy && (e.Code != codes.OutOfRange || !strings.Contains(e.Message, "limit of 4")) {
			t.Errorf("vector: %+v, want OUT_OF_RANGE and the limit", e)
		}
		if e.Kind == Refused && e.Change == to && e.Code != codes.FailedPrecondition {
			t.Errorf("destination: %+v, want FAILED_PRECONDITION", e)
		}
	}
	r.quiet()
	sent := len(log.take())
	other := r.client.SetVector(vector(2, 1))
	r.until("other vector", r.has(InEffect, other))
	if got := log.take(); !slices.Equal(got, []string{"set-vector 2"}) {
		t.Errorf("after %d operations sent %v: what was refused is not to be tried again", sent, got)
	}
	light := r.client.SetVector(vector(1, 4))
	r.until("both in effect", func() bool { return r.has(InEffect, light)() && r.has(InEffect, to)() })

	// After a refused change the previous state stays in effect; a reconnect retries the change.
	dp.RefuseNext(1, codes.OutOfRange, "no memory")
	changed := r.client.SetVector(vector(1, 3))
	r.until("refusal", r.has(Refused, changed))
	if w := dp.State().Vectors[0].Members[0].Weight; w != 4 {
		t.Errorf("weight %d after a refusal, want 4 as before", w)
	}
	// The refused state does not exist there: returning to the current state needs no operation.
	log.take()
	back := r.client.SetVector(vector(1, 4))
	r.until("in effect again", r.has(InEffect, back))
	if got := log.take(); len(got) != 0 {
		t.Errorf("sent %v, want nothing", got)
	}
	dp.RefuseNext(1, codes.OutOfRange, "no memory")
	changed = r.client.SetVector(vector(1, 2))
	r.until("refusal", r.has(Refused, changed))
	dp.BreakStream()
	r.until("in effect after reconnect", r.has(InEffect, changed))
}

func TestMissingVectorIsReported(t *testing.T) {
	r := newRig(t, nil)
	change := r.client.SetDestination(dst(1), 7)
	r.until("refusal", r.has(Refused, change))
	r.client.SetVector(vector(7, 1))
	r.until("in effect", r.has(InEffect, change))
}

func TestStallIsBroken(t *testing.T) { synctest.Test(t, testStallIsBroken) }

func testStallIsBroken(t *testing.T) {
	r := newRig(t, func(c *Config) { c.AckTimeout = time.Minute / 2 })
	r.connected()
	r.dp.DelayAcks(time.Hour)
	change := r.client.SetVector(vector(1, 1))
	r.until("stall", func() bool { return r.client.Status().Counters.Stalls == 1 })
	r.until("event", r.has(Disconnected, 0))
	// The vector had arrived: reading back shows it, and nothing has to be sent.
	r.until("in effect", r.has(InEffect, change))
	if c := r.dp.Tally(); c.GroupSets != 1 {
		t.Errorf("vector was set %d times, want once", c.GroupSets)
	}
}

func TestDataplaneRestart(t *testing.T) {
	r := newRig(t, nil)
	r.client.ReleaseRemovals(true)
	r.client.SetSubPort(device(0, 0), false)
	r.client.SetVector(vector(1, 1, 1))
	change := r.client.SetDestination(dst(1), 1)
	r.until("in effect", r.has(InEffect, change))
	r.quiet()
	r.events = nil
	r.log.take()
	r.dp.Reset()
	r.until("programmed again", func() bool { return r.destinations() == 1 })
	r.until("in effect again", r.has(InEffect, change))
	want := []string{"sub-port p0s0 false", "set-vector 1", "set 10.200.0.1/32 1"}
	if got := r.log.take(); !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}
}

// TestLostEffectIsReported checks that state that the data plane disconnected is no longer in effect, until it is
// acknowledged again.
func TestLostEffectIsReported(t *testing.T) {
	r := newRig(t, nil)
	change := r.client.SetVector(vector(1, 1, 1))
	r.until("in effect", r.has(InEffect, change))
	r.quiet()
	r.events = nil
	r.dp.DelayAcks(time.Hour)
	r.dp.Reset()
	r.until("pending", r.has(Pending, change))
	r.until("sent again", func() bool { return r.vectors() == 1 })
	r.take()
	if r.has(InEffect, change)() {
		t.Error("reported in effect before it was acknowledged again")
	}
}

// TestVectorInUseStays checks that a vector that the owner deletes too early stays until its last destination is
// removed.
func TestVectorInUseStays(t *testing.T) {
	r := newRig(t, nil)
	r.client.ReleaseRemovals(true)
	r.client.SetVector(vector(1, 1))
	r.client.SetDestination(dst(1), 1)
	r.connected()
	r.quiet()
	r.log.take()
	gone := r.client.DeleteVector(1)
	other := r.client.SetVector(vector(2, 1))
	r.until("other vector", r.has(InEffect, other))
	if got := r.log.take(); !slices.Equal(got, []string{"set-vector 2"}) {
		t.Errorf("sent %v, want the other vector alone", got)
	}
	r.client.DeleteDestination(dst(1))
	r.until("vector gone", r.has(InEffect, gone))
	if got, want := r.log.take(), []string{"delete 10.200.0.1/32", "delete-vector 1"}; !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}
}

// TestRestartKeepsTraffic checks that after a restart of the control plane, which renumbers vectors, only necessary
// changes are made to the state in effect, and none at all before removals are released.
func TestRestartKeepsTraffic(t *testing.T) {
	r := newRig(t, nil)
	r.client.ReleaseRemovals(true)
	r.client.SetVector(vector(1, 1, 1, 1, 1))
	r.client.SetVector(vector(2, 1))
	for n := range 8 {
		r.client.SetDestination(dst(n), 1)
	}
	r.client.SetDestination(dst(8), 2)
	r.connected()
	r.quiet()
	r.restart(nil)
	r.connected()
	r.log.take()

	// While it learns, it first knows only plane p0; numbers are swapped.
	partial := r.client.SetDestination(dst(0), 1)
	r.client.SetVector(vector(1, 1))
	fresh := r.client.SetDestination(dst(20), 1)
	r.until("new destination", r.has(InEffect, fresh))
	if got := r.log.take(); !slices.Equal(got, []string{"set 10.200.0.20/32 2"}) {
		t.Errorf("sent %v; the vector is there as 2, and what is in effect stays", got)
	}
	if r.has(InEffect, partial)() {
		t.Error("a destination that was held was reported in effect")
	}
	// Vector 1 changes while removals are held: it gets another place on the wire, so that destination 8 keeps its
	// state.
	r.client.SetVector(vector(1, 1, 1))
	r.until("moved", func() bool { return r.vectors() == 3 })
	r.quiet()
	if got, want := r.log.take(), []string{"set-vector 3", "set 10.200.0.20/32 3"}; !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}
	// All routes are learned: destinations 0 to 6 as before; 7 and 8 are removed.
	r.client.SetVector(vector(2, 1, 1, 1, 1))
	for n := range 7 {
		r.client.SetDestination(dst(n), 2)
	}
	r.quiet()
	if got := r.log.take(); len(got) != 0 {
		t.Errorf("sent %v, want nothing: vector 2 is there as 1, the destinations use it", got)
	}
	r.client.ReleaseRemovals(true)
	r.until("removals", func() bool { return r.destinations() == 8 && r.vectors() == 2 })
	want := []string{"delete 10.200.0.7/32", "delete 10.200.0.8/32", "delete-vector 2"}
	if got := r.log.take(); !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}
}

// TestReusedNumber checks that a number that the owner immediately reuses for another vector does not move the
// destinations of the old vector, however late the operations are sent.
func TestReusedNumber(t *testing.T) {
	r := newRig(t, nil)
	r.client.ReleaseRemovals(true)
	r.client.SetVector(vector(1, 1))
	r.client.SetDestination(dst(1), 1)
	r.connected()
	r.quiet()
	r.log.take()
	var last uint64
	r.client.Transaction(func(tx *Transaction) {
		tx.SetVector(vector(2, 0, 1))
		tx.SetDestination(dst(1), 2)
		tx.DeleteVector(1)
		tx.SetVector(vector(1, 0, 0, 1))
		tx.SetDestination(dst(2), 1)
		last = tx.SetVector(vector(4, 1))
	})
	r.until("in effect", r.has(InEffect, last))
	r.quiet()
	// Vector 2 takes the place of the old vector 1 with its destination; the number 1 gets an unused one.
	want := []string{"set-vector 1", "set-vector 3", "set-vector 4", "set 10.200.0.2/32 3"}
	if got := r.log.take(); !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}
}

func TestNewerClientWins(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MinBackoff = time.Hour; c.MaxBackoff = time.Hour })
	r.connected()
	first := r.client
	stop := r.stop
	defer stop()
	r.stop = nil
	r.restart(nil)
	r.connected()
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	var events []Event
	for !slices.ContainsFunc(events, func(e Event) bool { return e.Kind == Disconnected }) {
		select {
		case <-first.Ready():
			events = first.Take(events)
		case <-deadline.C:
			t.Fatal("the first client still believes that it programs")
		}
	}
	if e := events[len(events)-1]; !strings.Contains(e.Err.Error(), "newer Program stream") {
		t.Errorf("first client ended with %v", e.Err)
	}
}

func TestFlowPins(t *testing.T) {
	dp, log, conn := newDataplane(t, &farev1.Capabilities{FlowPins: true, Ipv6: true})
	r := &rig{t: t, dp: dp, log: log, conn: conn}
	base := make(chan uint32, 1)
	base <- 50000
	ports := func(c *Config) {
		c.Ports = func(destination Destination, vector uint32) []*farev1.PairPorts {
			b := <-base
			base <- b
			return []*farev1.PairPorts{{Source: "10.255.0.1/32", SourcePorts: []uint32{b + vector, b + 100 + vector}}}
		}
	}
	r.restart(ports)
	t.Cleanup(func() { r.stop() })
	slots := func(id uint32, devices ...string) *farev1.Vector {
		g := vector(id, 1, 0, 1)
		for i, d := range devices {
			g.Slots = append(g.Slots, &farev1.VectorSlot{Slot: uint32(i), Plane: planes[d[1]-'0'], Device: d, SharePpb: 500_000_000})
		}
		return g
	}
	r.client.SetVector(slots(1, "p0s0", "p1s0"))
	change := r.client.SetDestination(dst(1), 1)
	r.until("in effect", r.has(InEffect, change))
	port := func() uint32 {
		return dp.State().Destinations[0].Pairs[0].SourcePorts[0]
	}
	if port() != 50001 {
		t.Errorf("port %d, want 50001", port())
	}
	path, err := dp.Forward(netip.MustParseAddr("10.255.0.1"), dst(1).Prefix.Addr(), 50101)
	if err != nil || path.Device != "p1s0" || path.Slot != 1 {
		t.Errorf("flow 50101: %+v, %v; want slot 1 on p1s0", path, err)
	}
	// Nothing changed: neither a restart nor a repeated declaration sends an operation.
	r.quiet()
	log.take()
	r.restart(ports)
	r.client.SetVector(slots(1, "p0s0", "p1s0"))
	change = r.client.SetDestination(dst(1), 1)
	r.until("in effect", r.has(InEffect, change))
	r.client.SetDestination(dst(1), 1)
	r.quiet()
	if got := log.take(); len(got) != 0 {
		t.Errorf("sent %v, want nothing", got)
	}
	// Slots move: the destinations of the vector get other ports.
	<-base
	base <- 51000
	r.client.ReleaseRemovals(true)
	r.client.SetVector(slots(1, "p1s0", "p0s0"))
	r.until("new ports", func() bool { return port() == 51001 })
	r.quiet()
	if got, want := log.take(), []string{"set-vector 1", "set 10.200.0.1/32 1"}; !slices.Equal(got, want) {
		t.Errorf("sent %v, want %v", got, want)
	}
}

func TestForwardingIsToldAgain(t *testing.T) {
	r := newRig(t, nil)
	r.connected()
	f := testForwarding()
	f.Planes[0].SubPorts = append(f.Planes[0].SubPorts, &farev1.ForwardingSubPort{Device: "p0s2", NextHopV6: "fe80::1"})
	r.client.SetForwarding(f)
	g := &farev1.Vector{Id: 1, Members: []*farev1.VectorMember{{Plane: "p0", Device: "p0s2", Weight: 1}}}
	r.until("in effect", r.has(InEffect, r.client.SetVector(g)))
	if c := r.dp.Tally(); c.Hellos != 2 || c.Streams != 1 {
		t.Errorf("%d hellos, %d streams; want 2 on one stream", c.Hellos, c.Streams)
	}
}

func TestEventsNameTheOperation(t *testing.T) {
	r := newRig(t, nil)
	r.connected()
	var changes []uint64
	for n := range 5 {
		changes = append(changes, r.client.SetVector(vector(1, uint32(n+1), 7)))
		r.until(fmt.Sprint("change ", n), r.has(InEffect, changes[n]))
	}
	r.quiet()
	e := r.events[len(r.events)-1]
	if want := (Object{Kind: KindVector, Vector: 1}); e.Object != want || e.Op != 5 || e.Object.String() != "vector 1" {
		t.Errorf("last event %+v, want vector 1 at operation 5", e)
	}
	if s := r.client.Status(); s.Counters.Sent[VectorSet] != 5 || s.Counters.InEffect[VectorSet] != 5 || s.Counters.Refused != ([classes]uint64{}) {
		t.Errorf("counters %+v, want 5 sent and in effect", s.Counters)
	}
}

func TestNewRefusesNonsense(t *testing.T) {
	_, _, conn := newDataplane(t, nil)
	for name, config := range map[string]Config{
		"no connection": {Forwarding: testForwarding()},
		"no planes":     {Conn: conn},
		"window":        {Conn: conn, Forwarding: testForwarding(), Window: -1},
	} {
		if _, err := New(config); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// gathering is a data plane that reports how many operations per message it supports, and records the messages.
type gathering struct {
	*memory.Dataplane
	limit    uint32
	flowHash *farev1.FlowHash // changes with the second Hello

	mu       sync.Mutex
	hellos   int
	requests [][]string // kinds of the operations in each
}

func (g *gathering) Hello(ctx context.Context, request *farev1.HelloRequest) (*farev1.HelloResponse, error) {
	response, err := g.Dataplane.Hello(ctx, request)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	response.Capabilities.MaxOperationsPerRequest = g.limit
	if g.hellos++; g.hellos > 1 {
		response.Capabilities.FlowHash, response.Capabilities.DirectProbePort = g.flowHash, true
	}
	return response, nil
}

func (g *gathering) Program(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]) error {
	return g.Dataplane.Program(&gatheringStream{stream, g})
}

type gatheringStream struct {
	grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]
	g *gathering
}

func (s *gatheringStream) Recv() (*farev1.ProgramRequest, error) {
	request, err := s.BidiStreamingServer.Recv()
	if err == nil {
		var kinds []string
		if request.Operation != nil {
			kinds = append(kinds, fmt.Sprintf("%T", request.Operation.Op))
		}
		for _, op := range request.Operations {
			kinds = append(kinds, fmt.Sprintf("%T", op.Op))
		}
		s.g.mu.Lock()
		s.g.requests = append(s.g.requests, kinds)
		s.g.mu.Unlock()
	}
	return request, err
}

// TestOperationsAreGathered checks that many destinations are sent in few messages to a data plane that supports it,
// and one by one to any other; a vector is never in a message of several here, and a sub-port state only in front of
// one destination.
func TestOperationsAreGathered(t *testing.T) {
	for _, tc := range []struct {
		limit  uint32
		gather int
		most   int
	}{{0, 0, 1}, {1, 0, 1}, {1000, 0, DefaultGather}, {7, 0, 7}, {1000, 1, 1}} {
		g := &gathering{Dataplane: memory.New(memory.Config{}), limit: tc.limit}
		conn, err := memory.Dial(g)
		if err != nil {
			t.Fatal(err)
		}
		r := &rig{t: t, dp: g.Dataplane, log: &wireLog{}, conn: conn}
		r.restart(func(c *Config) { c.Gather = tc.gather })
		r.connected()
		r.client.ReleaseRemovals(true)
		r.until("the vector", r.has(InEffect, r.client.SetVector(vector(1, 1))))
		const size = 1000
		r.client.Transaction(func(tx *Transaction) {
			for n := range size {
				tx.SetDestination(dst(n), 1)
			}
			tx.SetSubPort(device(0, 0), false)
		})
		r.quiet()
		if got := r.destinations(); got != size {
			t.Errorf("%d destinations, want %d", got, size)
		}
		g.mu.Lock()
		most, operations := 0, 0
		for i, kinds := range g.requests {
			most, operations = max(most, len(kinds)), operations+len(kinds)
			for at, kind := range kinds {
				front := kind == "*farev1.Operation_SubPort" && at == 0 && len(kinds) == 2
				if len(kinds) > 1 && kind != "*farev1.Operation_SetDestination" && !front {
					t.Errorf("%s in a message of %d", kind, len(kinds))
				}
				if kind == "*farev1.Operation_SubPort" && i > 1 {
					t.Errorf("the sub-port state came in message %d", i)
				}
			}
		}
		if most != tc.most || operations != size+2 {
			t.Errorf("limit %d, gather %d: %d operations in messages of up to %d, want %d and %d", tc.limit, tc.gather, operations, most, size+2, tc.most)
		}
		g.mu.Unlock()
		r.stop()
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestChangedCapabilitiesAreReadAgain checks that a Hello during a session with other capabilities starts another
// session, so that the owner is notified of them.
func TestChangedCapabilitiesAreReadAgain(t *testing.T) {
	g := &gathering{Dataplane: memory.New(memory.Config{}), flowHash: &farev1.FlowHash{Algorithm: "ask"}}
	conn, err := memory.Dial(g)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r := &rig{t: t, dp: g.Dataplane, log: &wireLog{}, conn: conn}
	r.restart(nil)
	defer r.stop()
	r.connected()
	if r.client.Status().DirectProbePort {
		t.Error("packets follow a probe port without the capability")
	}
	f := testForwarding()
	f.Planes[0].SubPorts[0].NextHopV6 = "fe80::1"
	r.client.SetForwarding(f)
	r.until("the other capabilities", func() bool {
		s := r.client.Status()
		return s.Connected && s.DirectProbePort && s.Counters.Connects == 2 && s.Capabilities.GetFlowHash().GetAlgorithm() == "ask"
	})
}

// moreConn records ProgramRequest.more of all requests.
type moreConn struct {
	grpc.ClientConnInterface
	mu   sync.Mutex
	sent []bool
}

type moreStream struct {
	grpc.ClientStream
	conn *moreConn
}

func (c *moreConn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := c.ClientConnInterface.NewStream(ctx, desc, method, opts...)
	return &moreStream{s, c}, err
}

func (s *moreStream) SendMsg(m any) error {
	if request, ok := m.(*farev1.ProgramRequest); ok {
		s.conn.mu.Lock()
		s.conn.sent = append(s.conn.sent, request.More)
		s.conn.mu.Unlock()
	}
	return s.ClientStream.SendMsg(m)
}

// TestMoreIsAnnounced checks that each request of a burst, except the last one, announces that another request follows;
// and that a request which fills the window, or is alone, does not.
func TestMoreIsAnnounced(t *testing.T) {
	var conn *moreConn
	const window = 4
	r := newRig(t, func(c *Config) {
		conn = &moreConn{ClientConnInterface: c.Conn}
		c.Conn, c.Window = conn, window
	})
	sent := func() []bool {
		conn.mu.Lock()
		defer conn.mu.Unlock()
		all := conn.sent
		conn.sent = nil
		return all
	}
	r.connected()
	for n := range uint32(window) {
		r.dp.DelayAcks(time.Hour)
		r.client.mu.Lock() // the sender sees all changes at once
		for i := range n + 1 {
			r.client.book.setVector(vector(i+1, n+1))
		}
		r.client.mu.Unlock()
		ring(r.client.work)
		r.until("sent", func() bool {
			conn.mu.Lock()
			defer conn.mu.Unlock()
			return len(conn.sent) == int(n+1)
		})
		want := make([]bool, n+1)
		for i := range n {
			want[i] = true
		}
		if got := sent(); !slices.Equal(got, want) {
			t.Errorf("burst of %d: more %v, want %v", n+1, got, want)
		}
		r.dp.DelayAcks(0)
		r.dp.BreakStream() // drops the delayed acknowledgements
		r.until("reconnect", func() bool { return r.client.Status().Counters.Connects == uint64(n+2) })
		r.quiet()
		sent()
	}
	r.dp.DelayAcks(time.Hour)
	r.client.mu.Lock()
	for i := range uint32(2 * window) {
		r.client.book.setVector(vector(i+1, 100))
	}
	r.client.mu.Unlock()
	ring(r.client.work)
	r.until("a full window", func() bool { return r.client.Status().InFlight == window })
	if got, want := sent(), []bool{true, true, true, false}; !slices.Equal(got, want) {
		t.Errorf("with a window of %d: more %v, want %v", window, got, want)
	}
}

// TestChangesBeforeRemovals checks the start of an owner that knows the state that was read back: once changes are
// released, a vector that it declared changes, also in place, but never under a destination that it has not declared,
// and nothing is removed.
func TestChangesBeforeRemovals(t *testing.T) {
	for name, others := range map[string]bool{"all declared": false, "one not declared": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			r.client.ReleaseRemovals(true)
			r.client.SetVector(vector(1, 1, 0, 1))
			for n := range 3 {
				r.client.SetDestination(dst(n), 1)
			}
			r.connected()
			r.until("programmed", func() bool { return r.destinations() == 3 })
			r.quiet()
			r.restart(nil)
			r.connected()
			declared := []int{0, 1, 2}
			if others {
				declared = declared[:2]
			}
			declare := func(g *farev1.Vector) {
				r.client.Transaction(func(t *Transaction) {
					t.SetVector(g)
					for _, n := range declared {
						t.SetDestination(dst(n), 7)
					}
				})
				r.quiet()
			}
			goes := func() (out string) {
				_, weights, _ := contents(r.dp.State())
				for n := range 3 {
					out += weights[dst(n).Prefix.String()+" "]
				}
				return out
			}
			const before, after = "- p0s0:1 p1s0:1", "- p0s0:1"
			r.log.take()
			declare(vector(7, 1, 0, 1))
			if got := r.log.take(); len(got) > 0 {
				t.Errorf("the state that was read back is declared: %v", got)
			}
			declare(vector(7, 1))
			if got := goes(); got != before+before+before {
				t.Errorf("while changes are held: %s", got)
			}
			r.client.Transaction(func(t *Transaction) { t.ReleaseChanges() })
			r.quiet()
			want := after + after + after
			if others {
				want = after + after + before
			}
			if got := goes(); got != want {
				t.Errorf("after the release of changes: %s, want %s", got, want)
			}
			r.log.take()
			declare(vector(7, 0, 0, 1))
			r.client.DeleteDestination(dst(0))
			r.quiet()
			if ops := r.log.take(); len(ops) != 1 || !strings.HasPrefix(ops[0], "set-vector") {
				t.Errorf("a change of the vector alone takes %v", ops)
			}
			if got := r.destinations(); got != 3 {
				t.Errorf("%d destinations while removals are held", got)
			}
			r.client.ReleaseRemovals(true)
			r.until("removals", func() bool { return r.destinations() == len(declared)-1 })
		})
	}
}

// TestChangesInPlace checks that a vector that was read back and is declared changes by one operation, unless a
// destination that is not declared uses it.
func TestChangesInPlace(t *testing.T) {
	for name, tc := range map[string]struct {
		declared, operations int
		want                 string
	}{
		"all declared":     {3, 1, "- p0s0:1- p0s0:1- p0s0:1"},
		"one not declared": {2, 3, "- p0s0:1- p0s0:1- p0s0:1 p1s0:1"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			r.client.SetVector(vector(1, 1, 0, 1))
			for n := range 3 {
				r.client.SetDestination(dst(n), 1)
			}
			r.connected()
			r.until("programmed", func() bool { return r.destinations() == 3 })
			r.quiet()
			r.restart(nil)
			r.connected()
			r.client.Transaction(func(t *Transaction) {
				t.SetVector(vector(7, 1, 0, 1))
				for n := range tc.declared {
					t.SetDestination(dst(n), 7)
				}
				t.ReleaseChanges()
			})
			r.quiet()
			r.log.take()
			r.client.SetVector(vector(7, 1))
			r.quiet()
			if ops := r.log.take(); len(ops) != tc.operations {
				t.Errorf("%d operations, want %d: %v", len(ops), tc.operations, ops)
			}
			_, weights, _ := contents(r.dp.State())
			got := ""
			for n := range 3 {
				got += weights[dst(n).Prefix.String()+" "]
			}
			if got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
		})
	}
}
