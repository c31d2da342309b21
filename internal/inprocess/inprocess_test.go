package inprocess

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience limits how long a test waits for an event.
const patience = time.Minute

type (
	programServer  = grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]
	snapshotServer = grpc.ServerStreamingServer[farev1.SnapshotResponse]
	programClient  = grpc.BidiStreamingClient[farev1.ProgramRequest, farev1.ProgramResponse]
)

// fake is a data plane whose methods a test supplies.
type fake struct {
	farev1.UnimplementedDataplaneServiceServer
	hello    func(context.Context, *farev1.HelloRequest) (*farev1.HelloResponse, error)
	program  func(programServer) error
	snapshot func(*farev1.SnapshotRequest, snapshotServer) error
}

func (f *fake) Hello(ctx context.Context, r *farev1.HelloRequest) (*farev1.HelloResponse, error) {
	return f.hello(ctx, r)
}
func (f *fake) Program(s programServer) error { return f.program(s) }
func (f *fake) Snapshot(r *farev1.SnapshotRequest, s snapshotServer) error {
	return f.snapshot(r, s)
}

// log is what a scenario observed.
type log struct{ strings.Builder }

func (l *log) add(format string, args ...any) { fmt.Fprintf(l, format+"\n", args...) }

// result describes an error by code and message.
func result(err error) string {
	if errors.Is(err, io.EOF) {
		return "EOF"
	}
	return fmt.Sprintf("%v %q", status.Code(err), status.Convert(err).Message())
}

// of lists the values of a test's keys.
func of(md metadata.MD) string {
	if md == nil {
		return "none"
	}
	return fmt.Sprint(md.Get("a"), md.Get("b"))
}

// request is a request with one operation.
func request(id uint64) *farev1.ProgramRequest {
	return &farev1.ProgramRequest{Operation: &farev1.Operation{Id: id, Op: &farev1.Operation_DeleteVector{DeleteVector: uint32(id)}}}
}

type ctxKey struct{}

// scenarios are calls whose observations must be the same in one process as over a connection.
var scenarios = map[string]func(t *testing.T, f *fake, client farev1.DataplaneServiceClient, l *log){
	"a unary call": func(t *testing.T, f *fake, client farev1.DataplaneServiceClient, l *log) {
		f.hello = func(ctx context.Context, r *farev1.HelloRequest) (*farev1.HelloResponse, error) {
			md, _ := metadata.FromIncomingContext(ctx)
			method, _ := grpc.Method(ctx)
			_, deadline := ctx.Deadline()
			l.add("%s %s %s, deadline %v, value %v", r.Version, of(md), method, deadline, ctx.Value(ctxKey{}))
			l.add("header %v %v %v", grpc.SetHeader(ctx, metadata.Pairs("a", "1")), grpc.SendHeader(ctx, metadata.Pairs("a", "2")), grpc.SetTrailer(ctx, metadata.Pairs("b", "3")))
			l.add("too late: %v", grpc.SetHeader(ctx, metadata.Pairs("a", "4")) != nil)
			return &farev1.HelloResponse{Name: "x", Capabilities: &farev1.Capabilities{MaxVectors: 3}}, nil
		}
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), ctxKey{}, "hidden"), time.Hour)
		defer cancel()
		ctx = metadata.AppendToOutgoingContext(ctx, "a", "5", "b", "6")
		var header, trailer metadata.MD
		response, err := client.Hello(ctx, &farev1.HelloRequest{Version: "7"}, grpc.Header(&header), grpc.Trailer(&trailer))
		l.add("%s %d %v, header %s, trailer %s", response.GetName(), response.GetCapabilities().GetMaxVectors(), err, of(header), of(trailer))
	},
	"unary errors": func(t *testing.T, f *fake, client farev1.DataplaneServiceClient, l *log) {
		for _, fail := range []error{
			errors.New("plain"), status.Error(codes.NotFound, "missing"), context.DeadlineExceeded, context.Canceled,
			fmt.Errorf("wrapped: %w", status.Error(codes.OutOfRange, "far")), io.EOF,
		} {
			f.hello = func(ctx context.Context, _ *farev1.HelloRequest) (*farev1.HelloResponse, error) {
				return nil, errors.Join(grpc.SetTrailer(ctx, metadata.Pairs("b", "1")), fail)
			}
			var trailer metadata.MD
			_, err := client.Hello(t.Context(), &farev1.HelloRequest{}, grpc.Trailer(&trailer))
			l.add("%s, trailer %s", result(err), of(trailer))
		}
		// A status has details.
		detailed, err := status.New(codes.Aborted, "with details").WithDetails(&farev1.HelloRequest{Version: "9"})
		if err != nil {
			t.Fatal(err)
		}
		f.hello = func(context.Context, *farev1.HelloRequest) (*farev1.HelloResponse, error) { return nil, detailed.Err() }
		_, err = client.Hello(t.Context(), &farev1.HelloRequest{})
		l.add("%s %d details", result(err), len(status.Convert(err).Details()))
	},
	"a unary call that is canceled": func(t *testing.T, f *fake, client farev1.DataplaneServiceClient, l *log) {
		for _, timeout := range []time.Duration{0, 20 * time.Millisecond} {
			ctx, cancel := context.WithCancel(t.Context())
			over := make(chan error, 1)
			f.hello = func(inner context.Context, _ *farev1.HelloRequest) (*farev1.HelloResponse, error) {
				if timeout == 0 {
					cancel()
				}
				<-inner.Done()
				over <- inner.Err()
				return nil, status.FromContextError(inner.Err()).Err()
			}
			if timeout > 0 {
				ctx, cancel = context.WithTimeout(t.Context(), timeout)
			}
			_, err := client.Hello(ctx, &farev1.HelloRequest{})
			l.add("%v", status.Code(err))
			if timeout == 0 { // else the handler may not even have begun
				l.add("handler: %v", <-over)
			}
			_, err = client.Hello(ctx, &farev1.HelloRequest{}) // not even begun
			l.add("%v", status.Code(err))
			cancel()
		}
	},
	"a server's stream": func(t *testing.T, f *fake, client farev1.DataplaneServiceClient, l *log) {
		for _, end := range []error{nil, status.Error(codes.Unavailable, "gone"), errors.New("plain")} {
			f.snapshot = func(_ *farev1.SnapshotRequest, s snapshotServer) error {
				if err := s.SetHeader(metadata.Pairs("a", "1")); err != nil {
					return err
				}
				s.SetTrailer(metadata.Pairs("b", "2"))
				for id := range uint32(3) {
					if err := s.Send(&farev1.SnapshotResponse{Vectors: []*farev1.Vector{{Id: id}}, Approximate: map[uint32]string{id: "x"}}); err != nil {
						return err
					}
				}
				return end
			}
			stream, err := client.Snapshot(t.Context(), &farev1.SnapshotRequest{})
			l.add("%v", err)
			header, err := stream.Header()
			l.add("header %s %v", of(header), err)
			for {
				part, err := stream.Recv()
				if err != nil {
					l.add("%s, trailer %s", result(err), of(stream.Trailer()))
					break
				}
				l.add("%d %q", part.Vectors[0].Id, part.Approximate[part.Vectors[0].Id])
			}
		}
	},
	"a stream in both directions": func(t *testing.T, f *fake, client farev1.DataplaneServiceClient, l *log) {
		f.program = func(s programServer) error {
			if err := s.SendHeader(metadata.MD{}); err != nil {
				return err
			}
			for {
				r, err := s.Recv()
				if err != nil {
					l.add("handler: %s", result(err))
					return status.Error(codes.DataLoss, "the end")
				}
				if err := s.Send(&farev1.ProgramResponse{Acks: []*farev1.Ack{{Id: r.Operation.Id}}}); err != nil {
					return err
				}
			}
		}
		stream, err := client.Program(t.Context())
		l.add("%v", err)
		header, err := stream.Header()
		l.add("header %s %v", of(header), err)
		for id := range uint64(3) {
			l.add("%v", stream.Send(request(id+1)))
			response, err := stream.Recv()
			l.add("%v %v", response.GetAcks()[0].Id, err)
		}
		closed := stream.CloseSend() // the handler observes the end before Recv returns
		_, err = stream.Recv()
		l.add("%v %s", closed, result(err))
		_, err = stream.Recv()
		l.add("%s", result(err))
		l.add("%s", result(stream.Send(request(9))))
	},
	"a stream that is refused": func(t *testing.T, f *fake, client farev1.DataplaneServiceClient, l *log) {
		f.program = func(programServer) error { return status.Error(codes.FailedPrecondition, "not now") }
		stream, err := client.Program(t.Context())
		l.add("%v", err)
		header, err := stream.Header()
		l.add("header %v %v", header == nil, err)
		_, err = stream.Recv()
		l.add("%s", result(err))
	},
	"a stream that is canceled": func(t *testing.T, f *fake, client farev1.DataplaneServiceClient, l *log) {
		over := make(chan error, 1)
		f.program = func(s programServer) error {
			if err := s.SendHeader(nil); err != nil {
				return err
			}
			_, err := s.Recv()
			over <- err
			return err
		}
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := client.Program(ctx)
		l.add("%v", err)
		_, err = stream.Header()
		l.add("%v", err)
		cancel()
		_, err = stream.Recv()
		l.add("%v", status.Code(err))
		l.add("handler: %v", status.Code(<-over))
		_, err = client.Program(ctx)
		l.add("%v", status.Code(err))
	},
	"messages and their owners": func(t *testing.T, f *fake, client farev1.DataplaneServiceClient, l *log) {
		sent := &farev1.ProgramResponse{}
		received := make(chan *farev1.ProgramRequest, 2)
		f.program = func(s programServer) error {
			for id := range uint64(2) {
				r, err := s.Recv()
				if err != nil {
					return err
				}
				r.Operation.Id += 100
				received <- r
				sent.Acks = []*farev1.Ack{{Id: id, Message: "sent"}}
				if err := s.Send(sent); err != nil {
					return err
				}
				sent.Acks[0].Message = "modified later"
			}
			return nil
		}
		stream, err := client.Program(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		mine := request(1)
		for range 2 {
			if err := stream.Send(mine); err != nil {
				t.Fatal(err)
			}
			mine.Operation.Id = 2
		}
		var response farev1.ProgramResponse
		response.Integrity = &farev1.Integrity{Message: "left over"} // replaced by the message
		for range 2 {
			err := stream.RecvMsg(&response)
			l.add("%d %s %v %v", response.Acks[0].Id, response.Acks[0].Message, response.Integrity, err)
			response.Acks[0].Id = 50
		}
		l.add("%d %d, mine is %d", (<-received).Operation.Id, (<-received).Operation.Id, mine.Operation.Id)
		_, err = stream.Recv()
		l.add("%s", result(err))
	},
}

// overGRPC connects to a service by gRPC over a pipe in memory.
func overGRPC(t *testing.T, f *fake) grpc.ClientConnInterface {
	t.Helper()
	listener := bufconn.Listen(1 << 16)
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	farev1.RegisterDataplaneServiceServer(server, f)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return conn
}

func inProcess(t *testing.T, f *fake) *Conn {
	t.Helper()
	conn := New()
	farev1.RegisterDataplaneServiceServer(conn, f)
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return conn
}

// TestLikeGRPC checks that clients and handlers observe the same in one process as over a gRPC connection.
func TestLikeGRPC(t *testing.T) {
	for name, play := range scenarios {
		t.Run(name, func(t *testing.T) {
			var want, got log
			f := &fake{}
			play(t, f, farev1.NewDataplaneServiceClient(overGRPC(t, f)), &want)
			f = &fake{}
			play(t, f, farev1.NewDataplaneServiceClient(inProcess(t, f)), &got)
			if want.String() != got.String() {
				t.Errorf("in one process:\n%s\nby gRPC:\n%s", got.String(), want.String())
			}
		})
	}
}

// TestUnknownMethod checks that calls of methods that no service has are UNIMPLEMENTED.
func TestUnknownMethod(t *testing.T) {
	conn := inProcess(t, &fake{})
	for _, method := range []string{"/fare.v1.DataplaneService/Nothing", "/no.Service/Hello", "Hello", ""} {
		if err := conn.Invoke(t.Context(), method, &farev1.HelloRequest{}, &farev1.HelloResponse{}); status.Code(err) != codes.Unimplemented {
			t.Errorf("%q: %v", method, err)
		}
		if _, err := conn.NewStream(t.Context(), &grpc.StreamDesc{}, method); status.Code(err) != codes.Unimplemented {
			t.Errorf("stream %q: %v", method, err)
		}
	}
}

// TestClose checks that Close ends calls with UNAVAILABLE, waits for their handlers, and refuses later calls.
func TestClose(t *testing.T) { synctest.Test(t, testClose) }

func testClose(t *testing.T) {
	entered, returned := make(chan struct{}), make(chan string, 2)
	f := &fake{
		hello: func(ctx context.Context, _ *farev1.HelloRequest) (*farev1.HelloResponse, error) {
			close(entered)
			<-ctx.Done()
			time.Sleep(time.Hour) // of virtual time, which passes once Close waits
			returned <- "hello"
			return nil, ctx.Err()
		},
		program: func(s programServer) error {
			if err := s.SendHeader(nil); err != nil {
				return err
			}
			_, err := s.Recv()
			returned <- "program " + status.Code(err).String()
			return err
		},
	}
	conn := inProcess(t, f)
	client := farev1.NewDataplaneServiceClient(conn)
	stream, err := client.Program(t.Context())
	if err == nil {
		_, err = stream.Header()
	}
	if err != nil {
		t.Fatal(err)
	}
	unary := make(chan error, 1)
	go func() {
		_, err := client.Hello(t.Context(), &farev1.HelloRequest{})
		unary <- err
	}()
	<-entered
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	if n := len(returned); n != 2 {
		t.Errorf("%d of 2 handlers had returned when Close did", n)
	}
	if err := <-unary; status.Code(err) != codes.Unavailable {
		t.Errorf("unary call: %v", err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("stream: %v", err)
	}
	if err := stream.Send(request(1)); err == nil {
		t.Error("a message was sent after the end")
	}
	for n := len(returned); n > 0; n-- {
		if got := <-returned; got != "hello" && got != "program Unavailable" {
			t.Error(got)
		}
	}
	if _, err := client.Hello(t.Context(), &farev1.HelloRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("after Close: %v", err)
	}
	if _, err := client.Program(t.Context()); status.Code(err) != codes.Unavailable {
		t.Errorf("stream after Close: %v", err)
	}
}

// TestClosedHandlers checks that a client receives UNAVAILABLE, too, if the handler has noticed Close before the client
// and has returned the error of its context.
func TestClosedHandlers(t *testing.T) {
	for range 200 {
		entered := make(chan struct{}, 2)
		f := &fake{
			hello: func(ctx context.Context, _ *farev1.HelloRequest) (*farev1.HelloResponse, error) {
				entered <- struct{}{}
				<-ctx.Done()
				return nil, ctx.Err()
			},
			program: func(s programServer) error {
				entered <- struct{}{}
				<-s.Context().Done()
				return status.FromContextError(s.Context().Err()).Err()
			},
		}
		conn := New()
		farev1.RegisterDataplaneServiceServer(conn, f)
		client := farev1.NewDataplaneServiceClient(conn)
		stream, err := client.Program(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		unary := make(chan error, 1)
		go func() {
			_, err := client.Hello(t.Context(), &farev1.HelloRequest{})
			unary <- err
		}()
		<-entered
		<-entered
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
			t.Fatalf("stream: %v", err)
		}
		if err := <-unary; status.Code(err) != codes.Unavailable {
			t.Fatalf("unary call: %v", err)
		}
	}
}

// TestBackPressure checks that a sender whose messages are not received is blocked after depth messages, and continues
// when they are, in order.
func TestBackPressure(t *testing.T) { synctest.Test(t, testBackPressure) }

func testBackPressure(t *testing.T) {
	const n = 3 * depth
	f := &fake{program: func(s programServer) error {
		for id := range uint64(n) {
			if err := s.Send(&farev1.ProgramResponse{Acks: []*farev1.Ack{{Id: id}}}); err != nil {
				return err
			}
		}
		for id := range uint64(n) {
			r, err := s.Recv()
			if err != nil || r.Operation.Id != id+1 {
				return fmt.Errorf("received %v, %w, want %d", r, err, id+1)
			}
		}
		return nil
	}}
	stream, err := farev1.NewDataplaneServiceClient(inProcess(t, f)).Program(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sent := make(chan int, n)
	go func() {
		for id := range n {
			if stream.Send(request(uint64(id+1))) != nil {
				break
			}
			sent <- id
		}
		close(sent)
	}()
	for range depth {
		<-sent
	}
	synctest.Wait() // until the sender is blocked
	if more := len(sent); more > 0 {
		t.Errorf("%d messages in addition to %d were sent to a handler that does not receive", more, depth)
	}
	for id := range uint64(n) {
		response, err := stream.Recv()
		if err != nil || response.Acks[0].Id != id {
			t.Fatalf("received %v, %v, want %d", response, err, id)
		}
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the end: %v", err)
	}
	for more := true; more; {
		_, more = <-sent
	}
}

// TestPush checks that a handler that calls Push receives all messages in order, those sent before the call included;
// that Send returns after the handler has processed its message; that the end of the client's side is reported once;
// and that the handler owns the messages.
func TestPush(t *testing.T) {
	for _, early := range []int{0, 1, 100} {
		ready, pushed, closed := make(chan struct{}), make(chan struct{}), make(chan struct{})
		var got []uint64
		f := &fake{program: func(s programServer) error {
			<-ready
			if !Push(s, func(r *farev1.ProgramRequest) {
				got = append(got, r.Operation.Id) // unguarded: the race detector objects to a second goroutine
				r.Operation.Id = 0
			}, func() { close(closed) }) {
				return errors.New("not pushed")
			}
			close(pushed)
			<-closed
			return nil
		}}
		stream, err := farev1.NewDataplaneServiceClient(inProcess(t, f)).Program(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for id := range early {
			if err := stream.Send(request(uint64(id + 1))); err != nil {
				t.Fatal(err)
			}
		}
		close(ready)
		<-pushed
		for id := early; id < early+100; id++ {
			if len(got) != id {
				t.Fatalf("%d messages processed, want %d", len(got), id)
			}
			mine := request(uint64(id + 1))
			if err := stream.Send(mine); err != nil || mine.Operation.Id != uint64(id+1) {
				t.Fatalf("%v, %v", err, mine)
			}
		}
		for id, g := range got {
			if g != uint64(id+1) {
				t.Fatalf("message %d is %d", id, g)
			}
		}
		for range 2 {
			if err := stream.CloseSend(); err != nil {
				t.Error(err)
			}
		}
		if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
			t.Errorf("the end: %v", err)
		}
	}
}

// TestPushAfterTheEnd checks that Push reports the end of a client's side that was closed before.
func TestPushAfterTheEnd(t *testing.T) {
	ready, closed := make(chan struct{}), make(chan struct{})
	f := &fake{program: func(s programServer) error {
		<-ready
		n := 0
		if !Push(s, func(*farev1.ProgramRequest) { n++ }, func() { close(closed) }) {
			return errors.New("not pushed")
		}
		select {
		case <-closed:
		case <-time.After(patience):
		}
		return status.Errorf(codes.Code(90), "%d", n)
	}}
	stream, err := farev1.NewDataplaneServiceClient(inProcess(t, f)).Program(t.Context())
	if err == nil {
		err = stream.Send(request(1))
	}
	if err == nil {
		err = stream.CloseSend()
	}
	if err != nil {
		t.Fatal(err)
	}
	close(ready)
	if _, err := stream.Recv(); status.Convert(err).Message() != "1" {
		t.Errorf("processed: %v, want 1", err)
	}
}

// TestPushOverGRPC checks that Push leaves a stream of a connection alone.
func TestPushOverGRPC(t *testing.T) {
	f := &fake{program: func(s programServer) error {
		if Push(s, func(*farev1.ProgramRequest) {}, func() {}) {
			return errors.New("pushed")
		}
		_, err := s.Recv()
		return err
	}}
	stream, err := farev1.NewDataplaneServiceClient(overGRPC(t, f)).Program(t.Context())
	if err == nil {
		err = stream.Send(request(1))
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v", err)
	}
}

// TestMove checks that move copies every kind of field, and unknown ones.
func TestMove(t *testing.T) {
	want := &farev1.SnapshotResponse{
		Vectors:     []*farev1.Vector{{Id: 1, Members: []*farev1.VectorMember{{Plane: "p", Device: "d", Weight: 2}}}},
		SubPorts:    []*farev1.SubPortState{{Device: "d", Up: true}},
		Approximate: map[uint32]string{3: "x"},
	}
	want.ProtoReflect().SetUnknown([]byte{0xf8, 0x07, 1})
	got := &farev1.SnapshotResponse{Destinations: []*farev1.Destination{{Prefix: "left over"}}}
	move(got, proto.CloneOf(want))
	if !proto.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// BenchmarkPush measures a message from Send to its answer.
func BenchmarkPush(b *testing.B) {
	f := &fake{program: func(s programServer) error {
		over := make(chan struct{})
		response := &farev1.ProgramResponse{}
		Push(s, func(r *farev1.ProgramRequest) {
			response.Acks = append(response.Acks[:0], &farev1.Ack{Id: r.Operation.Id})
			if s.Send(response) != nil {
				b.Error("not sent")
			}
		}, func() { close(over) })
		<-over
		return nil
	}}
	conn := New()
	defer conn.Close()
	farev1.RegisterDataplaneServiceServer(conn, f)
	var stream programClient
	stream, err := farev1.NewDataplaneServiceClient(conn).Program(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	id := uint64(0)
	r := request(0)
	for b.Loop() {
		id++
		r.Operation.Id = id
		if err := stream.Send(r); err != nil {
			b.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			b.Fatal(err)
		}
	}
	if err := stream.CloseSend(); err != nil {
		b.Fatal(err)
	}
}
