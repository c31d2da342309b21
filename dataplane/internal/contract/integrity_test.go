package contract_test

import (
	"errors"
	"io"
	"maps"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// guarded is a Forwarder that realizes some groups only approximately, and that can report integrity.
type guarded struct {
	forwarder
	report func(*farev1.Integrity)
}

func (g *guarded) Guard(report func(*farev1.Integrity)) { g.report = report }

func (g *guarded) Approximate(group uint32) string {
	if group == 2 {
		return "dp0a has 3 % more than its share"
	}
	return ""
}

// TestApproximate checks that a group whose weights the layer below cannot realize is acknowledged APPROXIMATE with the
// deviation, also when it is set again unchanged; that all other operations are IN_EFFECT; and that the order is kept.
func TestApproximate(t *testing.T) {
	client := dial(t, contract.New(contract.Config{Forwarder: &guarded{forwarder: forwarder{capabilities: &farev1.Capabilities{}}}}))
	hello(t, client)
	p := open(t, t.Context(), client)
	levels := map[uint64]farev1.AckLevel{}
	requests := []*farev1.ProgramRequest{group(1, 1, 1), group(2, 2, 1), subPort(3, false), group(4, 2, 1), group(5, 1, 2), {
		Operation: &farev1.Operation{Id: 6, Op: &farev1.Operation_DeleteVector{DeleteVector: 2}},
	}}
	for _, r := range requests {
		if err := p.Send(r); err != nil {
			t.Fatal(err)
		}
		for id := r.Operation.Id; levels[id] == 0; {
			response, err := p.Recv()
			if err != nil {
				t.Fatal(err)
			}
			for _, ack := range response.Acks {
				if approximate := ack.Level == farev1.AckLevel_ACK_LEVEL_APPROXIMATE; approximate != (ack.Message != "") || ack.Code != 0 {
					t.Errorf("acknowledgement %v", ack)
				}
				levels[ack.Id] = ack.Level
			}
		}
	}
	for id, level := range levels {
		want := farev1.AckLevel_ACK_LEVEL_IN_EFFECT
		if id == 2 || id == 4 {
			want = farev1.AckLevel_ACK_LEVEL_APPROXIMATE
		}
		if level != want {
			t.Errorf("operation %d: %v, want %v", id, level, want)
		}
	}
}

// TestSnapshotOfApproximateGroups checks that a snapshot lists exactly the approximate groups, with their deviations.
func TestSnapshotOfApproximateGroups(t *testing.T) {
	client := dial(t, contract.New(contract.Config{Forwarder: &guarded{forwarder: forwarder{capabilities: &farev1.Capabilities{}}}}))
	hello(t, client)
	p := open(t, t.Context(), client)
	for id, number := range []uint32{1, 2, 3} {
		if err := p.Send(group(uint64(id+1), number, 1)); err != nil {
			t.Fatal(err)
		}
	}
	for last := uint64(0); last < 3; {
		response, err := p.Recv()
		if err != nil {
			t.Fatal(err)
		}
		for _, ack := range response.Acks {
			last = ack.Id
		}
	}
	snapshot, err := client.Snapshot(t.Context(), &farev1.SnapshotRequest{})
	if err != nil {
		t.Fatal(err)
	}
	groups, got := 0, map[uint32]string{}
	for {
		part, err := snapshot.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		groups += len(part.Vectors)
		maps.Copy(got, part.Approximate)
	}
	if groups != 3 || len(got) != 1 || got[2] != (&guarded{}).Approximate(2) {
		t.Errorf("%d groups, approximate %v; want 3, and group 2 alone", groups, got)
	}
}

// TestIntegrity checks that a report reaches the current stream, a repeated one does not, and a later stream starts
// with the last report.
func TestIntegrity(t *testing.T) {
	g := &guarded{forwarder: forwarder{capabilities: &farev1.Capabilities{}}}
	s := contract.New(contract.Config{Forwarder: g})
	client := dial(t, s)
	hello(t, client)
	next := func(p stream) *farev1.Integrity {
		t.Helper()
		for {
			response, err := p.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if response.Integrity != nil {
				return response.Integrity
			}
		}
	}
	want := func(got, want *farev1.Integrity) {
		t.Helper()
		if !proto.Equal(got, want) {
			t.Errorf("integrity %v, want %v", got, want)
		}
	}
	broken, repaired := &farev1.Integrity{Message: "a rule is gone", Repairs: 1}, &farev1.Integrity{Intact: true, Message: "a rule was gone", Repairs: 2}
	want(s.Integrity(), &farev1.Integrity{Intact: true})
	older := open(t, t.Context(), client)
	g.report(&farev1.Integrity{Intact: true}) // a repeated report
	g.report(broken)
	want(next(older), broken)
	newer := open(t, t.Context(), client)
	want(next(newer), broken)
	g.report(repaired)
	want(next(newer), repaired)
	g.report(repaired)
	g.report(broken)
	want(next(newer), broken)
	want(s.Integrity(), broken)
}

// retrier is a Forwarder that refuses changes until it suggests a retry.
type retrier struct {
	forwarder
	again func()
}

func (r *retrier) Retry(again func()) { r.again = again }

// TestSuggestedRetry checks that the suggestion of a retry reaches the current stream once, with or behind the refusals
// before it, and no later stream.
func TestSuggestedRetry(t *testing.T) {
	r := &retrier{forwarder: forwarder{capabilities: &farev1.Capabilities{}}}
	r.commit = func([]contract.Change) error {
		r.again() // a Forwarder may call it at any time
		return status.Error(codes.Unavailable, "another program's route")
	}
	client := dial(t, contract.New(contract.Config{Forwarder: r}))
	hello(t, client)
	p := open(t, t.Context(), client)
	for id := uint64(1); id <= 2; id++ {
		if err := p.Send(group(id, 1, 1)); err != nil {
			t.Fatal(err)
		}
		for refused, suggested := false, false; !refused || !suggested; {
			response, err := p.Recv()
			if err != nil {
				t.Fatal(err)
			}
			for _, ack := range response.Acks {
				refused = refused || ack.Id == id && ack.Level == farev1.AckLevel_ACK_LEVEL_REFUSED
			}
			if suggested = suggested || response.Retry; suggested && !refused {
				t.Fatalf("%v precedes the refusal", response)
			}
		}
	}
	r.again()
	if response, err := p.Recv(); err != nil || !response.Retry || len(response.Acks) != 0 {
		t.Errorf("%v, %v; want a suggestion alone", response, err)
	}
	r.again()
	r.commit = nil
	newer := open(t, t.Context(), client)
	if err := newer.Send(group(1, 1, 1)); err != nil {
		t.Fatal(err)
	}
	if response, err := newer.Recv(); err != nil || response.Retry || len(response.Acks) != 1 {
		t.Errorf("%v, %v; want the acknowledgement without a suggestion of the previous stream", response, err)
	}
}
