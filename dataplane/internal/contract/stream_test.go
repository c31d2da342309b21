package contract_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/internal/testkit/gate"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// forwarder commits as its fields specify.
type forwarder struct {
	capabilities *farev1.Capabilities
	set          func(*farev1.Forwarding) error
	commit       func([]contract.Change) error
}

func (f *forwarder) Capabilities() *farev1.Capabilities { return f.capabilities }

func (f *forwarder) SetForwarding(forwarding *farev1.Forwarding) error {
	if f.set == nil {
		return nil
	}
	return f.set(forwarding)
}

func (f *forwarder) Commit(changes []contract.Change) error {
	if f.commit == nil {
		return nil
	}
	return f.commit(changes)
}

func dial(t *testing.T, s *contract.Server) farev1.DataplaneServiceClient {
	t.Helper()
	conn, err := memory.Dial(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return farev1.NewDataplaneServiceClient(conn)
}

type stream = interface {
	Send(*farev1.ProgramRequest) error
	Recv() (*farev1.ProgramResponse, error)
	CloseSend() error
}

// open opens a stream and waits until it is the current one.
func open(t *testing.T, ctx context.Context, client farev1.DataplaneServiceClient) stream {
	t.Helper()
	s, err := client.Program(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Header(); err != nil {
		t.Fatal(err)
	}
	return s
}

func hello(t *testing.T, client farev1.DataplaneServiceClient) {
	t.Helper()
	if _, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
		t.Fatal(err)
	}
}

func subPort(id uint64, up bool) *farev1.ProgramRequest {
	return &farev1.ProgramRequest{Operation: &farev1.Operation{Id: id, Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: "dp0a", Up: up}}}}
}

func group(id uint64, number uint32, weight uint32) *farev1.ProgramRequest {
	return &farev1.ProgramRequest{Operation: &farev1.Operation{Id: id, Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{
		Id: number, Members: []*farev1.VectorMember{{Plane: "p0", Device: "dp0a", Weight: weight}},
	}}}}
}

// TestConformanceOverAFailingForwarder runs the suite while every batch of more than one change fails.
func TestConformanceOverAFailingForwarder(t *testing.T) {
	f := &forwarder{capabilities: &farev1.Capabilities{Ipv6: true, PerPacket: true, FlowPins: true}, commit: func(changes []contract.Change) error {
		if len(changes) > 1 {
			return status.Error(codes.Unavailable, "one at a time")
		}
		return nil
	}}
	s := contract.New(contract.Config{Name: "one by one", Forwarder: f})
	conn, err := memory.Dial(s)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	dptest.Run(t, conn, dptest.Options{Batch: 500})
	if c := s.Tally(); c.Retried == 0 {
		t.Errorf("no batch was taken apart: %+v", c)
	}
}

// TestNewerStreamTakesOver checks that the older stream ends with ABORTED, and that none of its pending operations is
// committed after the newer stream has its headers.
func TestNewerStreamTakesOver(t *testing.T) {
	entered, leave := make(chan struct{}, 8), make(chan struct{})
	f := &forwarder{capabilities: &farev1.Capabilities{}, commit: func([]contract.Change) error {
		entered <- struct{}{}
		<-leave
		return nil
	}}
	s := contract.New(contract.Config{Forwarder: f})
	client := dial(t, s)
	hello(t, client)
	older := open(t, t.Context(), client)
	send := func(s stream, requests ...*farev1.ProgramRequest) {
		t.Helper()
		for _, r := range requests {
			if err := s.Send(r); err != nil {
				t.Fatal(err)
			}
		}
	}
	send(older, group(1, 1, 1))
	<-entered
	send(older, group(2, 2, 1), group(3, 3, 1)) // queued behind the first
	newer, err := client.Program(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	close(leave)
	if _, err := newer.Header(); err != nil {
		t.Fatal(err)
	}
	read := func() (ids []uint32) {
		s.View(func(state *contract.State) {
			for _, g := range state.Snapshot().Vectors {
				ids = append(ids, g.Id)
			}
		})
		return ids
	}
	taken := read()
	for {
		_, err := older.Recv()
		if err == nil {
			continue
		}
		if status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "newer Program stream") {
			t.Errorf("the older stream ended with %v, want ABORTED", err)
		}
		break
	}
	send(newer, group(1, 9, 1))
	if _, err := newer.Recv(); err != nil {
		t.Fatal(err)
	}
	if got := read(); len(got) != len(taken)+1 || got[len(got)-1] != 9 {
		t.Errorf("groups %v after the take-over showed %v, want group 9 more and nothing else", got, taken)
	}
	if c := s.Tally(); c.Streams != 2 || c.StreamsReplaced != 1 {
		t.Errorf("counters %+v", c)
	}
}

// TestBackPressure checks that a client that reads no acknowledgements is blocked, with bounded memory; that all of
// them arrive in order once it reads; and that no goroutine remains if the client ends instead (a bubble with a blocked
// goroutine fails).
func TestBackPressure(t *testing.T) {
	gate.WithoutRaceDetector(t, "60,000 operations")
	const operations = 60_000
	for _, reads := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			s := contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{}}})
			conn, err := memory.Dial(s)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			client := farev1.NewDataplaneServiceClient(conn)
			hello(t, client)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			p := open(t, ctx, client)
			synctest.Wait() // as in TestBurst
			sent := make(chan error, 1)
			go func() {
				for id := range uint64(operations) {
					if err := p.Send(subPort(id+1, id%2 == 1)); err != nil {
						sent <- err
						return
					}
				}
				sent <- p.CloseSend()
			}()
			synctest.Wait()
			// The 64 KiB buffers of gRPC at each end contain the acknowledgements, each of at least 4 bytes.
			if n := s.Tally().Operations(); n < 1024 || n > 2*65536/4 {
				t.Errorf("%d operations were taken from a client that reads nothing", n)
			}
			if !reads {
				cancel()
				synctest.Wait()
				if err := <-sent; err == nil {
					t.Error("everything was sent: nothing was held back")
				}
				return
			}
			next := uint64(1)
			for {
				response, err := p.Recv()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				for _, ack := range response.Acks {
					if ack.Id != next || ack.Level != farev1.AckLevel_ACK_LEVEL_IN_EFFECT {
						t.Fatalf("acknowledgement %v, want %d in effect", ack, next)
					}
					next++
				}
			}
			if err := <-sent; err != nil || next != operations+1 {
				t.Errorf("acknowledged up to %d, sent: %v", next-1, err)
			}
		})
	}
}

// TestAcknowledgedBeforeTheEnd checks that operations in effect are acknowledged before an error of the client ends the
// stream.
func TestAcknowledgedBeforeTheEnd(t *testing.T) {
	for range 50 {
		client := dial(t, contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{}}}))
		hello(t, client)
		p := open(t, t.Context(), client)
		for id := range uint64(20) {
			if err := p.Send(subPort(id+1, id%2 == 1)); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.Send(subPort(20, true)); err != nil {
			t.Fatal(err)
		}
		acks := 0
		for {
			response, err := p.Recv()
			if err != nil {
				if status.Code(err) != codes.InvalidArgument || acks != 20 {
					t.Fatalf("the stream ended with %v after %d acknowledgements, want INVALID_ARGUMENT after 20", err, acks)
				}
				break
			}
			acks += len(response.Acks)
		}
	}
}

// TestLateAcknowledgements checks that delayed acknowledgements keep the order of the stream.
func TestLateAcknowledgements(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{}}})
		conn, err := memory.Dial(s)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		client := farev1.NewDataplaneServiceClient(conn)
		hello(t, client)
		p := open(t, t.Context(), client)
		s.DelayAcks(time.Hour)
		begin := time.Now()
		_ = p.Send(subPort(1, false))
		synctest.Wait()
		s.DelayAcks(0)
		_ = p.Send(subPort(2, true)) // must not overtake
		_ = p.CloseSend()
		var accepted, got []uint64
		for {
			response, err := p.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, ack := range response.Acks {
				if ack.Level == farev1.AckLevel_ACK_LEVEL_ACCEPTED {
					accepted = append(accepted, ack.Id)
					if time.Since(begin) != 0 {
						t.Errorf("operation %d accepted after %v", ack.Id, time.Since(begin))
					}
				}
				if ack.Level == farev1.AckLevel_ACK_LEVEL_IN_EFFECT {
					got = append(got, ack.Id)
					if time.Since(begin) != time.Hour {
						t.Errorf("operation %d in effect after %v", ack.Id, time.Since(begin))
					}
				}
			}
		}
		if want := []uint64{1, 2}; !slices.Equal(accepted, want) || !slices.Equal(got, want) {
			t.Errorf("accepted: %v, in effect: %v, want %v each", accepted, got, want)
		}
	})
}

// TestBrokenStream checks that a stream ended by the data plane receives the reason, its operations stay, no further
// ones are committed, and the next stream does not count as a replacement.
func TestBrokenStream(t *testing.T) {
	s := contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{}}})
	s.BreakStream("none is open") // without effect
	client := dial(t, s)
	hello(t, client)
	p := open(t, t.Context(), client)
	if err := p.Send(group(1, 1, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Recv(); err != nil {
		t.Fatal(err)
	}
	s.BreakStream("the agent ends; connect again")
	if _, err := p.Recv(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "the agent ends; connect again") {
		t.Errorf("the stream ended with %v, want UNAVAILABLE and the reason", err)
	}
	s.Stop("none is open any more")
	open(t, t.Context(), client)
	if c := s.Tally(); c.Streams != 2 || c.StreamsReplaced != 0 || c.Changed != 1 {
		t.Errorf("%+v, want two streams, none replaced, one change", c)
	}
	s.View(func(state *contract.State) {
		if len(state.Groups) != 1 {
			t.Errorf("groups %v, want what was programmed", state.Groups)
		}
	})
}

// stoppedStream is a stream whose service stops, and whose connection then closes, as soon as it is the current one.
type stoppedStream struct {
	grpc.ServerStream
	ctx  context.Context
	stop func()
}

func (s stoppedStream) Context() context.Context           { return s.ctx }
func (s stoppedStream) SendHeader(metadata.MD) error       { s.stop(); return nil }
func (s stoppedStream) Send(*farev1.ProgramResponse) error { return s.ctx.Err() }
func (s stoppedStream) Recv() (*farev1.ProgramRequest, error) {
	return nil, status.FromContextError(s.ctx.Err()).Err()
}

// TestReasonOutlivesConnection checks that a client receives the reason of Stop even if its connection closes before
// the handler has noticed.
func TestReasonOutlivesConnection(t *testing.T) {
	for range 50 {
		s := contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{}}})
		if _, err := s.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		err := s.Program(stoppedStream{ctx: ctx, stop: func() {
			s.Stop("the agent ends")
			cancel()
		}})
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "the agent ends") {
			t.Fatalf("the stream ended with %v, want UNAVAILABLE and the reason", err)
		}
	}
}

// TestBurst checks that operations that arrive during a commit are committed together if their requests announce more,
// and that each request that announces nothing is committed separately; all acknowledgements come in order.
func TestBurst(t *testing.T) {
	const n = 10
	for _, more := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			leave := make(chan struct{})
			s := contract.New(contract.Config{Forwarder: &forwarder{capabilities: &farev1.Capabilities{}, commit: func([]contract.Change) error {
				<-leave
				return nil
			}}})
			conn, err := memory.Dial(s)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			client := farev1.NewDataplaneServiceClient(conn)
			hello(t, client)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			p := open(t, ctx, client)
			synctest.Wait() // the handler waits: it would lock the mutex that the commit below holds, which no Wait waits for
			for id := range uint64(n) {
				r := subPort(id+1, id%2 == 1)
				r.More = more
				if err := p.Send(r); err != nil {
					t.Fatal(err)
				}
				synctest.Wait() // the first one is being committed, or this one has been received
			}
			close(leave)
			for next := uint64(1); next <= n; {
				response, err := p.Recv()
				if err != nil {
					t.Fatal(err)
				}
				for _, ack := range response.Acks {
					if ack.Id != next || ack.Level != farev1.AckLevel_ACK_LEVEL_IN_EFFECT {
						t.Fatalf("acknowledgement %v, want %d in effect", ack, next)
					}
					next++
				}
			}
			want := uint64(n)
			if more {
				want = 2
			}
			if got := s.Tally().Batches; got != want {
				t.Errorf("more %v: %d commits, want %d", more, got, want)
			}
		})
	}
}
