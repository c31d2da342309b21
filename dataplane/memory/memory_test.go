package memory_test

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/internal/testkit/gate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func dial(t testing.TB, d *memory.Dataplane) farev1.DataplaneServiceClient {
	t.Helper()
	conn, err := memory.Dial(d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return farev1.NewDataplaneServiceClient(conn)
}

func TestConformance(t *testing.T) {
	gate.Needed(t, "the conformance suite once for each driver")
	d := memory.New(memory.Config{})
	conn, err := memory.Dial(d)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	dptest.Run(t, conn, dptest.Options{})
	c := d.Tally()
	if c.Operations() == 0 || c.Operations() != c.Changed+c.Unchanged+c.Refused {
		t.Errorf("counters do not add up: %+v", c)
	}
}

type stream = interface {
	Send(*farev1.ProgramRequest) error
	Recv() (*farev1.ProgramResponse, error)
	CloseSend() error
}

func open(t *testing.T, client farev1.DataplaneServiceClient) stream {
	t.Helper()
	if _, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
		t.Fatal(err)
	}
	s, err := client.Program(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Header(); err != nil {
		t.Fatal(err)
	}
	return s
}

func send(t *testing.T, s stream, ops ...*farev1.Operation) {
	t.Helper()
	for _, op := range ops {
		if err := s.Send(&farev1.ProgramRequest{Operation: op}); err != nil {
			t.Fatal(err)
		}
	}
}

// final receives until n operations have their last acknowledgement, and returns all acknowledgements.
func final(t *testing.T, s stream, n int) []*farev1.Ack {
	t.Helper()
	var all []*farev1.Ack
	for n > 0 {
		response, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, ack := range response.Acks {
			if ack.Level != farev1.AckLevel_ACK_LEVEL_ACCEPTED {
				n--
			}
		}
		all = append(all, response.Acks...)
	}
	return all
}

var dst = netip.MustParseAddr("10.128.0.1")

// program sets a group with weights 2:1:1 on dp0a, dp0b, dp1a, with slots on each and one sprayed over p0.
func program(pairs ...*farev1.PairPorts) []*farev1.Operation {
	group := &farev1.Vector{
		Id: 1,
		Members: []*farev1.VectorMember{
			{Plane: "p0", Device: "dp0a", Weight: 2}, {Plane: "p0", Device: "dp0b", Weight: 1}, {Plane: "p1", Device: "dp1a", Weight: 1},
		},
		Slots: []*farev1.VectorSlot{
			{Slot: 0, Plane: "p0", Device: "dp0a", SharePpb: 500_000_000}, {Slot: 1, Plane: "p1", Device: "dp1a", SharePpb: 250_000_000},
			{Slot: 2, Plane: "p0", SharePpb: 250_000_000},
		},
	}
	return []*farev1.Operation{
		{Id: 1, Op: &farev1.Operation_SetVector{SetVector: group}},
		{Id: 2, Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: dst.String() + "/32", Vector: 1, Pairs: pairs}}},
	}
}

func setState(id uint64, device string, up bool) *farev1.Operation {
	return &farev1.Operation{Id: id, Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: device, Up: up}}}
}

// count forwards a number of flows and counts their egress.
func count(t *testing.T, d *memory.Dataplane, flows uint32) string {
	t.Helper()
	n := map[string]int{}
	for flow := range flows {
		path, err := d.Forward(netip.MustParseAddr("10.255.0.1"), dst, flow)
		if err != nil {
			t.Fatal(err)
		}
		n[path.Device]++
	}
	return fmt.Sprintf("dp0a=%d dp0b=%d dp1a=%d", n["dp0a"], n["dp0b"], n["dp1a"])
}

func TestPacketsObeyWeights(t *testing.T) {
	d := memory.New(memory.Config{})
	s := open(t, dial(t, d))
	send(t, s, program()...)
	final(t, s, 2)
	if got, want := count(t, d, 400), "dp0a=200 dp0b=100 dp1a=100"; got != want {
		t.Errorf("flows leave %s, want %s", got, want)
	}
	slot := func(n int, device string, diverted bool) {
		t.Helper()
		path, err := d.SlotPath(dst, n)
		if err != nil || path.Device != device || path.Diverted != diverted || path.Slot != n {
			t.Errorf("slot %d: %+v, %v; want %s, diverted %v", n, path, err, device, diverted)
		}
	}
	slot(0, "dp0a", false)
	slot(1, "dp1a", false)

	send(t, s, setState(3, "dp0a", false))
	final(t, s, 1)
	if got, want := count(t, d, 400), "dp0a=0 dp0b=200 dp1a=200"; got != want {
		t.Errorf("with dp0a down flows leave %s, want %s", got, want)
	}
	slot(0, "dp0b", true)
	slot(1, "dp1a", false)
	slot(2, "dp0b", false) // its plane still carries it
	send(t, s, setState(4, "dp0b", false))
	final(t, s, 1)
	slot(2, "dp1a", true)
	send(t, s, setState(5, "dp1a", false))
	final(t, s, 1)
	if _, err := d.Forward(netip.Addr{}, dst, 1); !errors.Is(err, memory.ErrUnreachable) {
		t.Errorf("everything down: %v, want ErrUnreachable", err)
	}
	if live, err := d.Weights(dst); err != nil || len(live) != 0 {
		t.Errorf("everything down: weights %v, %v; want none", live, err)
	}
	send(t, s, setState(6, "dp0a", true))
	final(t, s, 1)
	if live, err := d.Weights(dst); err != nil || len(live) != 1 || live[0] != (memory.Member{Plane: "p0", Device: "dp0a", Weight: 2}) {
		t.Errorf("weights %v, %v; want dp0a alone", live, err)
	}
	if _, err := d.Forward(netip.Addr{}, netip.MustParseAddr("10.128.0.2"), 1); !errors.Is(err, memory.ErrNoRoute) {
		t.Errorf("unknown destination: %v, want ErrNoRoute", err)
	}
	if _, err := d.SlotPath(dst, 9); !errors.Is(err, memory.ErrNoSlot) {
		t.Errorf("unknown slot: %v, want ErrNoSlot", err)
	}
}

func TestPinnedFlows(t *testing.T) {
	d := memory.New(memory.Config{Capabilities: &farev1.Capabilities{FlowPins: true}})
	s := open(t, dial(t, d))
	send(t, s, program(&farev1.PairPorts{Source: "10.255.0.1/32", SourcePorts: []uint32{50000, 50001, 50002}})...)
	final(t, s, 2)
	for flow, want := range map[uint32]memory.Path{
		50000: {Plane: "p0", Device: "dp0a", Slot: 0}, 50001: {Plane: "p1", Device: "dp1a", Slot: 1},
		50003: {Plane: "p1", Device: "dp1a", Slot: -1},
	} {
		if path, err := d.Forward(netip.MustParseAddr("10.255.0.1"), dst, flow); err != nil || path != want {
			t.Errorf("flow %d: %+v, %v; want %+v", flow, path, err, want)
		}
	}
	if path, err := d.Forward(netip.MustParseAddr("10.255.0.2"), dst, 50001); err != nil || path.Slot != -1 {
		t.Errorf("another source: %+v, %v; want no slot", path, err)
	}
}

// TestForwardingShrinks checks that a sub-port that a Hello removes carries nothing, and that the groups stay.
func TestForwardingShrinks(t *testing.T) {
	d := memory.New(memory.Config{})
	client := dial(t, d)
	s := open(t, client)
	send(t, s, program()...)
	final(t, s, 2)
	less := dptest.DefaultForwarding()
	less.Planes[0].SubPorts = less.Planes[0].SubPorts[1:]
	if _, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: less}); err != nil {
		t.Fatal(err)
	}
	if got, want := count(t, d, 400), "dp0a=0 dp0b=200 dp1a=200"; got != want {
		t.Errorf("flows leave %s, want %s", got, want)
	}
	if n := len(d.State().Vectors[0].Members); n != 3 {
		t.Errorf("the group has %d members, want 3 as programmed", n)
	}
}

func TestProgramNeedsHello(t *testing.T) {
	s, err := dial(t, memory.New(memory.Config{})).Program(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("Program before Hello ended with %v, want FAILED_PRECONDITION", err)
	}
}

func TestInjectedFaults(t *testing.T) {
	d := memory.New(memory.Config{})
	client := dial(t, d)
	s := open(t, client)
	d.RefuseNext(1, codes.Internal, "no memory")
	send(t, s, program()...) // the group is refused, and with it the destination
	acks := final(t, s, 2)
	if codes.Code(acks[0].Code) != codes.Internal || acks[0].Message != "no memory" || codes.Code(acks[1].Code) != codes.FailedPrecondition {
		t.Errorf("acks %v, want INTERNAL, then FAILED_PRECONDITION", acks)
	}
	if c := d.Tally(); c.Injected != 1 || c.Refused != 1 || c.Operations() != 1 {
		t.Errorf("counters %+v", c)
	}

	const delay = 20 * time.Millisecond
	d.DelayAcks(delay)
	begin := time.Now()
	ops := program()
	ops[0].Id, ops[1].Id = 3, 4
	send(t, s, ops...)
	acks = final(t, s, 2)
	if took := time.Since(begin); took < delay || len(acks) != 4 {
		t.Errorf("%d acks after %v, want 4 after at least %v", len(acks), took, delay)
	}

	d.BreakStream()
	if _, err := s.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("broken stream ended with %v, want UNAVAILABLE", err)
	}
	if groups, destinations := d.Size(); groups != 1 || destinations != 1 {
		t.Errorf("%d groups and %d destinations after the stream broke, want 1 and 1", groups, destinations)
	}
	s = open(t, client)
	d.Reset()
	if _, err := s.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("stream of a data plane that restarted ended with %v, want UNAVAILABLE", err)
	}
	if groups, destinations := d.Size(); groups != 0 || destinations != 0 {
		t.Errorf("%d groups and %d destinations after a restart, want none", groups, destinations)
	}
}

// TestCloseSendFlushes checks that a client that has closed its side still receives delayed acknowledgements, and then
// an orderly end.
func TestCloseSendFlushes(t *testing.T) {
	d := memory.New(memory.Config{})
	s := open(t, dial(t, d))
	d.DelayAcks(10 * time.Millisecond)
	send(t, s, program()...)
	if err := s.CloseSend(); err != nil {
		t.Fatal(err)
	}
	final(t, s, 2)
	if _, err := s.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("stream ended with %v, want EOF", err)
	}
}

// TestManyInOneProcess runs as many data planes as a lab, each with its connection and stream.
func TestManyInOneProcess(t *testing.T) {
	gate.WithoutRaceDetector(t, "500 data planes")
	var streams []stream
	for range 500 {
		s := open(t, dial(t, memory.New(memory.Config{})))
		send(t, s, program()...)
		streams = append(streams, s)
	}
	for _, s := range streams {
		final(t, s, 2)
	}
}
