package contract_test

import (
	"errors"
	"io"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/memory"
)

// TestConformanceWithLimits runs the suite on a Forwarder with small limits, so that every limit is reached.
func TestConformanceWithLimits(t *testing.T) {
	f := &forwarder{capabilities: &farev1.Capabilities{MaxVectors: 16, MaxDestinations: 64, MaxWeight: 8, MaxWeightSum: 16}}
	conn, err := memory.Dial(contract.New(contract.Config{Name: "little", Forwarder: f}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	dptest.Run(t, conn, dptest.Options{})
}

// TestCannot checks that a Forwarder without Landing and Counters answers UNIMPLEMENTED.
func TestCannot(t *testing.T) {
	client := dial(t, contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{}}}))
	hello(t, client)
	if _, err := client.Landing(t.Context(), &farev1.LandingRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("Landing: %v", err)
	}
	counters, err := client.Counters(t.Context(), &farev1.CountersRequest{})
	if err == nil {
		_, err = counters.Recv()
	}
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("Counters: %v", err)
	}
}

// counting is a Forwarder that answers in several parts, and then ends with err.
type counting struct {
	forwarder
	parts int
	err   error
}

func (c *counting) Counters(_ *farev1.CountersRequest, send func(*farev1.CountersResponse) error) error {
	for i := range c.parts {
		if err := send(&farev1.CountersResponse{Slots: []*farev1.SlotCounters{{Slot: uint32(i)}}}); err != nil {
			return err
		}
	}
	return c.err
}

// TestCounters checks that all parts of a Forwarder's answer arrive in order, followed by its end or error.
func TestCounters(t *testing.T) {
	for _, want := range []counting{{parts: 0}, {parts: 3}, {parts: 2, err: status.Error(codes.Unavailable, "the program is gone")}} {
		want.capabilities = &farev1.Capabilities{}
		client := dial(t, contract.New(contract.Config{Forwarder: &want}))
		answer, err := client.Counters(t.Context(), &farev1.CountersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		parts := 0
		for {
			part, err := answer.Recv()
			if err != nil {
				if errors.Is(err, io.EOF) != (want.err == nil) || status.Code(err) != status.Code(want.err) && want.err != nil {
					t.Errorf("the answer ended with %v, the Forwarder's with %v", err, want.err)
				}
				break
			}
			if part.Slots[0].Slot != uint32(parts) {
				t.Errorf("part %d is %v", parts, part)
			}
			parts++
		}
		if parts != want.parts {
			t.Errorf("%d parts, want %d", parts, want.parts)
		}
	}
}

// TestProgramAfterHello checks that a stream before the first Hello is refused.
func TestProgramAfterHello(t *testing.T) {
	client := dial(t, contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{}}}))
	p, err := client.Program(t.Context())
	if err == nil {
		_ = p.CloseSend()
		_, err = p.Recv()
	}
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("before Hello: %v, want FAILED_PRECONDITION", err)
	}
}

// TestAsManyOperationsAsAnnounced checks that a request may contain as many operations as the capabilities announce,
// and that the server, not the Forwarder, sets that number.
func TestAsManyOperationsAsAnnounced(t *testing.T) {
	client := dial(t, contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{}}}))
	answer, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()})
	if err != nil {
		t.Fatal(err)
	}
	n := int(answer.Capabilities.MaxOperationsPerRequest)
	if n < 2 {
		t.Fatalf("%d operations a request are announced: batches are not used", n)
	}
	request := &farev1.ProgramRequest{}
	for i := range n {
		request.Operations = append(request.Operations, subPort(uint64(i+1), i%2 == 1).Operation)
	}
	p := open(t, t.Context(), client)
	if err := p.Send(request); err != nil {
		t.Fatal(err)
	}
	for acks := 0; acks < n; {
		response, err := p.Recv()
		if err != nil {
			t.Fatalf("after %d acknowledgements of %d: %v", acks, n, err)
		}
		for _, ack := range response.Acks {
			if acks++; ack.Id != uint64(acks) || ack.Level != farev1.AckLevel_ACK_LEVEL_IN_EFFECT {
				t.Fatalf("acknowledgement %v, want %d in effect", ack, acks)
			}
		}
	}
}

// TestPinnedPorts checks that flow pins accept exactly the UDP source ports 1 to 65535.
func TestPinnedPorts(t *testing.T) {
	client := dial(t, contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{FlowPins: true}}}))
	hello(t, client)
	p := open(t, t.Context(), client)
	send := func(r *farev1.ProgramRequest) *farev1.Ack {
		if err := p.Send(r); err != nil {
			t.Fatal(err)
		}
		response, err := p.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return response.Acks[0]
	}
	send(group(1, 1, 1))
	for i, port := range []uint32{0, 1, 65535, 65536} {
		ack := send(&farev1.ProgramRequest{Operation: &farev1.Operation{Id: uint64(i + 2), Op: &farev1.Operation_SetDestination{
			SetDestination: &farev1.Destination{Prefix: "10.255.9.9/32", Vector: 1, Pairs: []*farev1.PairPorts{
				{Source: "10.255.0.1/32", SourcePorts: []uint32{port}},
			}},
		}}})
		if refused := ack.Level == farev1.AckLevel_ACK_LEVEL_REFUSED; refused != (port == 0 || port > 65535) {
			t.Errorf("port %d: %v", port, ack)
		}
	}
}

// TestPlaneWithoutSubPorts checks that without source groups in Forwarding a slot may name a plane that has no sub-port
// yet.
func TestPlaneWithoutSubPorts(t *testing.T) {
	f := dptest.DefaultForwarding()
	f.Planes = append(f.Planes, &farev1.ForwardingPlane{Plane: "p2"})
	s := contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{}}})
	state := func(plane string) *farev1.SnapshotResponse {
		return &farev1.SnapshotResponse{Vectors: []*farev1.Vector{{Id: 1, Slots: []*farev1.VectorSlot{{Plane: plane}}}}}
	}
	client := dial(t, s)
	if _, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: f}); err != nil {
		t.Fatal(err)
	}
	p := open(t, t.Context(), client)
	for id, plane := range []string{"p2", "p3"} {
		group := state(plane).Vectors[0]
		if err := p.Send(&farev1.ProgramRequest{Operation: &farev1.Operation{Id: uint64(id + 1), Op: &farev1.Operation_SetVector{SetVector: group}}}); err != nil {
			t.Fatal(err)
		}
		response, err := p.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if refused := response.Acks[0].Level == farev1.AckLevel_ACK_LEVEL_REFUSED; refused != (plane == "p3") {
			t.Errorf("a slot in plane %s: %v", plane, response.Acks[0])
		}
	}
}
