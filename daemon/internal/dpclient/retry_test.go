package dpclient

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
)

// TestRefusalsPass refuses every operation on an object for a while. The operation is repeated after 1, 2, 4, ... 30,
// 30 s until it is accepted, the owner receives the refusal once, and what was not wanted in the meantime is not
// repeated.
func TestRefusalsPass(t *testing.T) {
	destination := Object{Kind: KindDestination, Destination: dst(1)}
	group := Object{Kind: KindVector, Vector: 1}
	base := func(b *book) {
		b.setSubPort("p0s0", true)
		b.setVector(vector(1, 1))
		b.setVector(vector(2, 2))
		b.setDestination(dst(1), 2)
	}
	for _, x := range []struct {
		name   string
		object Object
		do     func(b *book)
	}{
		{"sub-port", Object{Kind: KindSubPort, SubPort: "p0s0"}, func(b *book) { b.setSubPort("p0s0", false) }},
		{"vector", group, func(b *book) { b.setVector(vector(1, 3)) }},
		{"vector deleted", group, func(b *book) { b.deleteVector(1) }},
		{"destination", destination, func(b *book) { b.setDestination(dst(1), 1) }},
		{"destination deleted", destination, func(b *book) { b.deleteDestination(dst(1)) }},
		{"source ports", destination, func(b *book) { b.pinning = true; b.setDestination(dst(1), 2) }},
	} {
		for _, code := range []codes.Code{codes.Unavailable, codes.Internal, codes.ResourceExhausted, codes.OutOfRange} {
			t.Run(fmt.Sprint(x.name, " ", code), func(t *testing.T) {
				b := connectedBook()
				b.now = time.Unix(1e9, 0)
				pins := uint64(0)
				// answer sends the due operations, answers them, and returns their number.
				answer := func(level farev1.AckLevel) (n int) {
					t.Helper()
					b.retryDue()
					for op, ok := popCommitted(b); ok; op, ok = popCommitted(b) {
						n++
						b.send(&op, pins)
						if err := b.acknowledge(&farev1.Ack{Id: op.id, Level: level, Code: uint32(code), Message: "busy"}); err != nil {
							t.Fatal(err)
						}
					}
					return n
				}
				base(b)
				answer(farev1.AckLevel_ACK_LEVEL_IN_EFFECT)
				b.take(nil)
				x.do(b)
				pins = 7
				if n := answer(farev1.AckLevel_ACK_LEVEL_REFUSED); n != 1 {
					t.Fatalf("%d operations, want 1", n)
				}
				if events := b.take(nil); len(events) != 1 || events[0].Kind != Refused || events[0].Object != x.object || events[0].Message != "busy" {
					t.Fatalf("events %+v, want the refusal of %v", events, x.object)
				}
				pauses := []time.Duration{1, 2, 4, 8, 16, 30, 30}
				if code == codes.OutOfRange {
					pauses = nil
				}
				for _, seconds := range pauses {
					b.now = b.now.Add(seconds*time.Second - 1)
					if n := answer(farev1.AckLevel_ACK_LEVEL_REFUSED); n != 0 {
						t.Fatalf("%d operations before %d s", n, seconds)
					}
					b.now = b.now.Add(1)
					b.retryDue()
					if len(b.take(nil)) != 0 {
						t.Fatal("the owner was notified of the retry")
					}
					if n := answer(farev1.AckLevel_ACK_LEVEL_REFUSED); n != 1 {
						t.Fatalf("%d operations after %d s, want 1", n, seconds)
					}
					if events := b.take(nil); len(events) != 0 {
						t.Fatalf("events %+v after the same refusal", events)
					}
				}
				b.now = b.now.Add(time.Hour)
				n := answer(farev1.AckLevel_ACK_LEVEL_IN_EFFECT)
				events := b.take(nil)
				if code == codes.OutOfRange {
					if n != 0 || len(events) != 0 {
						t.Errorf("%d operations, events %+v: nothing has changed", n, events)
					}
					return
				}
				if n != 1 || len(events) != 1 || events[0].Kind != InEffect || events[0].Object != x.object {
					t.Errorf("%d operations, events %+v; want that %v is in effect", n, events, x.object)
				}
				if b.now = b.now.Add(time.Hour); answer(farev1.AckLevel_ACK_LEVEL_IN_EFFECT) != 0 || b.queues.len() != 0 {
					t.Error("operations after the object is in effect")
				}
				// A later refusal begins with the least pause again, and is reported.
				b.setSubPort("p0s1", true)
				answer(farev1.AckLevel_ACK_LEVEL_REFUSED)
				if events := b.take(nil); len(events) != 1 || events[0].Kind != Refused {
					t.Errorf("events %+v, want a refusal", events)
				}
				if got := b.retries.at.Sub(b.now); got != time.Second {
					t.Errorf("the next retry is after %v, want 1 s", got)
				}
			})
		}
	}
}

// TestRetriedDestinationsOfAVector checks that the destinations of a refused vector follow it when it is accepted, and
// that a change of the wanted state ends the retries of the previous one.
func TestRetriedDestinationsOfAVector(t *testing.T) {
	b := connectedBook()
	b.now = time.Unix(1e9, 0)
	full := true
	have := map[uint32]bool{} // vectors of the data plane
	var sent []string
	run := func() []string {
		t.Helper()
		sent = nil
		b.retryDue()
		for op, ok := popCommitted(b); ok; op, ok = popCommitted(b) {
			b.send(&op, 0)
			ack := &farev1.Ack{Id: op.id, Level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT}
			switch {
			case op.class == VectorSet && full:
				ack.Level, ack.Code, ack.Message = farev1.AckLevel_ACK_LEVEL_REFUSED, uint32(codes.ResourceExhausted), "full"
			case op.class == VectorSet:
				have[op.wire.id] = true
			case op.class == DestinationSet && !have[op.wire.id]:
				ack.Level, ack.Code, ack.Message = farev1.AckLevel_ACK_LEVEL_REFUSED, uint32(codes.FailedPrecondition), "no vector"
			}
			sent = append(sent, fmt.Sprint(op.class, " ", ack.Level == farev1.AckLevel_ACK_LEVEL_IN_EFFECT))
			if err := b.acknowledge(ack); err != nil {
				t.Fatal(err)
			}
		}
		return sent
	}
	b.setVector(vector(1, 1))
	b.setDestination(dst(1), 1)
	b.setDestination(dst(2), 1)
	run()
	if events := b.take(nil); len(events) != 3 {
		t.Errorf("events %+v, want three refusals", events)
	}
	b.deleteDestination(dst(2)) // it is not there: no operation
	run()
	b.take(nil)
	full = false
	b.now = b.now.Add(time.Second)
	if got, want := run(), []string{fmt.Sprint(VectorSet, " true"), fmt.Sprint(DestinationSet, " true")}; !slices.Equal(got, want) {
		t.Errorf("operations %v, want %v", got, want)
	}
	if events := b.take(nil); len(events) != 2 || events[0].Kind != InEffect || events[1].Kind != InEffect {
		t.Errorf("events %+v, want the vector and one destination in effect", events)
	}
}

// hinting is a data plane that suggests retries when a test requests it.
type hinting struct {
	*memory.Dataplane
	hint chan struct{}
}

// Program implements farev1.DataplaneServiceServer.
func (h *hinting) Program(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]) error {
	s := &lockedStream{BidiStreamingServer: stream}
	var helper sync.WaitGroup
	defer helper.Wait()
	helper.Go(func() {
		for {
			select {
			case <-stream.Context().Done():
				return
			case <-h.hint:
				_ = s.Send(&farev1.ProgramResponse{Retry: true}) // the stream reports its end to the client
			}
		}
	})
	return h.Dataplane.Program(s)
}

// lockedStream serializes Send.
type lockedStream struct {
	grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]
	mu sync.Mutex
}

func (s *lockedStream) Send(response *farev1.ProgramResponse) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.BidiStreamingServer.Send(response)
}

// TestRetryOverAStream checks both reasons of a retry over a stream, in virtual time: the data plane's suggestion is
// followed at once, and without one the client waits for a second. No new stream is needed.
func TestRetryOverAStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dp := &hinting{memory.New(memory.Config{}), make(chan struct{})}
		conn, err := memory.Dial(dp)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		r := &rig{t: t, dp: dp.Dataplane, log: &wireLog{}, conn: conn}
		r.restart(nil)
		defer r.stop()
		r.connected()
		for _, suggested := range []bool{false, true} {
			r.dp.RefuseNext(1, codes.Unavailable, "another program's route")
			change := r.client.SetVector(vector(1, 1+uint32(r.dp.Tally().GroupSets)))
			r.until("refusal", r.has(Refused, change))
			synctest.Wait()
			began := time.Now()
			if suggested {
				dp.hint <- struct{}{}
				synctest.Wait()
				if r.take(); !r.has(InEffect, change)() {
					t.Errorf("events %+v after the suggestion, want that the change is in effect", tail(r.events))
				}
				continue
			}
			r.until("retry", r.has(InEffect, change))
			if took := time.Since(began); took < 900*time.Millisecond || took > 1100*time.Millisecond { // until polls
				t.Errorf("the change was retried after %v, want 1 s", took)
			}
		}
		if c := r.client.Status().Counters; c.Connects != 1 {
			t.Errorf("%d streams, want 1", c.Connects)
		}
	})
}
