package contract

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

func setDown(device string) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: device}}}
}

func setGroup(id uint32) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: id}}}
}

// TestTally checks that each operation is counted once by its kind and once by its outcome.
func TestTally(t *testing.T) {
	s := New(Config{Forwarder: newStrict(t)})
	greet(t, s, forwarding())
	set := &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: "10.0.0.1/32", Vector: 1}}}
	remove := &farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: "10.0.0.1/32"}}}
	removeGroup := &farev1.Operation{Op: &farev1.Operation_DeleteVector{DeleteVector: 1}}
	kinds := Tally{}
	for _, step := range []struct {
		operation *farev1.Operation
		kind      *uint64
		outcome   *uint64
	}{
		{setDown("a"), &kinds.SubPorts, &kinds.Changed},
		{setDown("a"), &kinds.SubPorts, &kinds.Unchanged},
		{setGroup(1), &kinds.GroupSets, &kinds.Changed},
		{setGroup(0), &kinds.GroupSets, &kinds.Refused},
		{set, &kinds.DestinationSets, &kinds.Changed},
		{removeGroup, &kinds.GroupDeletes, &kinds.Refused}, // in use
		{remove, &kinds.DestinationDeletes, &kinds.Changed},
		{remove, &kinds.DestinationDeletes, &kinds.Unchanged},
		{removeGroup, &kinds.GroupDeletes, &kinds.Changed},
		{&farev1.Operation{}, &kinds.Malformed, &kinds.Refused},
	} {
		*step.kind++
		*step.outcome++
		s.commit([]*farev1.Operation{step.operation})
		got := s.Tally()
		kinds.Hellos, kinds.Batches = 1, kinds.Changed // each change is a separate batch here
		if got != kinds {
			t.Fatalf("after %v: %+v, want %+v", step.operation, got, kinds)
		}
	}
	if n := s.Tally().Operations(); n != 10 {
		t.Errorf("%d operations, want 10", n)
	}
}

// TestInjectedRefusals checks that the next n operations are refused and counted separately, and that the rest of their
// batch is committed with the right answers.
func TestInjectedRefusals(t *testing.T) {
	s := New(Config{Forwarder: newStrict(t)})
	greet(t, s, forwarding())
	s.RefuseNext(2, codes.Internal, "injected")
	outcomes := s.commit([]*farev1.Operation{setGroup(1), setGroup(2), setGroup(3), setGroup(0)})
	for i, want := range []codes.Code{codes.Internal, codes.Internal, codes.OK, codes.InvalidArgument} {
		if got := status.Code(outcomes[i].err); got != want || outcomes[i].changed != (i == 2) {
			t.Errorf("operation %d: %+v, want %v", i, outcomes[i], want)
		}
	}
	if c := s.Tally(); c.Injected != 2 || c.Operations() != 2 || c.Changed != 1 || c.Refused != 1 || len(s.state.Groups) != 1 {
		t.Errorf("%+v, groups %v", c, s.state.Groups)
	}
}

// TestRetried checks that a failed batch is split once, and that a single failed operation is not retried.
func TestRetried(t *testing.T) {
	f := newStrict(t)
	f.fail = func([]Change) error { return status.Error(codes.Unavailable, "not now") }
	s := New(Config{Forwarder: f})
	greet(t, s, forwarding())
	s.commit([]*farev1.Operation{setGroup(1)})
	if c := s.Tally(); c.Retried != 0 || c.Batches != 1 || c.Refused != 1 {
		t.Errorf("one operation: %+v, want one batch and no retry", c)
	}
	s.commit([]*farev1.Operation{setGroup(1), setGroup(2), setGroup(3)})
	if c := s.Tally(); c.Retried != 1 || c.Batches != 1+1+3 || c.Refused != 4 {
		t.Errorf("three more: %+v, want the batch and its three operations", c)
	}
}

// TestSourceOf checks that an address belongs to the source group that lists it as a loopback, and every other address
// to the first one.
func TestSourceOf(t *testing.T) {
	s := New(Config{Forwarder: newStrict(t)})
	if name := s.state.SourceOf(netip.MustParseAddr("10.255.0.1")); name != (netip.Prefix{}) {
		t.Errorf("before Hello: %v, want none", name)
	}
	for _, c := range []struct {
		forwarding *farev1.Forwarding
		from, want string
	}{
		{gpus("ac", "bd"), "10.255.0.0", "10.255.0.0/32"},
		{gpus("ac", "bd"), "10.255.0.1", "10.255.0.1/32"},
		{gpus("ac", "bd"), "192.0.2.1", "10.255.0.0/32"},
		{forwarding(), "10.255.0.1", "invalid Prefix"},
	} {
		greet(t, s, c.forwarding)
		if got := s.state.SourceOf(netip.MustParseAddr(c.from)).String(); got != c.want {
			t.Errorf("%s: source %s, want %s", c.from, got, c.want)
		}
	}
}

// brokenStream is a stream with one request, whose client has gone, which only Send detects.
type brokenStream struct {
	grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]
	ctx      context.Context
	requests chan *farev1.ProgramRequest
	err      error
}

func (b *brokenStream) Context() context.Context           { return b.ctx }
func (b *brokenStream) SendHeader(metadata.MD) error       { return nil }
func (b *brokenStream) Send(*farev1.ProgramResponse) error { return b.err }

func (b *brokenStream) Recv() (*farev1.ProgramRequest, error) {
	select {
	case r := <-b.requests:
		return r, nil
	case <-b.ctx.Done():
		return nil, b.ctx.Err()
	}
}

// TestSendFails checks that the error of sending an acknowledgement ends the stream, of a single request and of a
// burst.
func TestSendFails(t *testing.T) {
	for _, more := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) { // a bubble in which all goroutines wait fails
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			s := New(Config{Forwarder: newStrict(t)})
			greet(t, s, forwarding())
			b := &brokenStream{ctx: ctx, requests: make(chan *farev1.ProgramRequest, 1), err: errors.New("gone")}
			b.requests <- &farev1.ProgramRequest{Operation: &farev1.Operation{Id: 1}, More: more}
			if err := s.Program(b); !errors.Is(err, b.err) {
				t.Errorf("Program = %v, want the stream's error", err)
			}
		})
	}
}
