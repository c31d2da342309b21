package directstream

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/grpcserve"
)

const (
	method = farev1.DataplaneService_Program_FullMethodName
	limit  = 1 << 20
)

// service is a Program handler for tests. It answers each request with the ids of its operations, and obeys an
// operation with one of the special ids.
type service struct {
	farev1.UnimplementedDataplaneServiceServer
	ended chan string // the caller, and why the requests ended
}

const (
	refuseID  = 1 << 40 // the stream ends with an error
	silentID  = 2 << 40 // no answer to this request
	waitID    = 3 << 40 // the handler waits for the end of its context
	answersID = 4 << 40 // two answers
)

func (s *service) Program(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]) error {
	why := "returned"
	defer func() { s.ended <- grpcserve.CallerOf(stream.Context()).Client() + ": " + why }()
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	for {
		request, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			why = "half-close"
			return nil
		}
		if err != nil {
			why = "failed"
			return err
		}
		response := &farev1.ProgramResponse{}
		answers := 1
		for _, o := range request.Operations {
			switch o.Id {
			case refuseID:
				return status.Error(codes.FailedPrecondition, "refused ü")
			case silentID:
				answers = 0
			case answersID:
				answers = 2
			case waitID:
				if err := stream.Send(response); err != nil {
					return err
				}
				<-stream.Context().Done()
				why = "context"
				return stream.Context().Err()
			default:
				response.Acks = append(response.Acks, &farev1.Ack{Id: o.Id, Message: strings.Repeat("x", int(o.Id%5000))})
			}
		}
		for range answers {
			if err := stream.Send(response); err != nil {
				return err
			}
		}
	}
}

// bed is a server of both protocols.
type bed struct {
	socket  string
	service *service
	direct  *Server
	grpc    *grpc.Server
}

func newBed(t testing.TB) *bed {
	t.Helper()
	b := &bed{socket: filepath.Join(t.TempDir(), "s"), service: &service{ended: make(chan string, 100)}}
	l, err := net.Listen("unix", b.socket)
	if err != nil {
		t.Fatal(err)
	}
	b.grpc = grpc.NewServer(grpc.Creds(grpcserve.PeerCredentials()), grpc.MaxRecvMsgSize(limit))
	farev1.RegisterDataplaneServiceServer(b.grpc, b.service)
	b.direct = &Server{Method: method, Credentials: grpcserve.PeerCredentials(), Limit: limit, Handle: func(_ any, s grpc.ServerStream) error {
		return b.service.Program(&grpc.GenericServerStream[farev1.ProgramRequest, farev1.ProgramResponse]{ServerStream: s})
	}}
	served := make(chan error, 1)
	go func() { served <- b.grpc.Serve(b.direct.Listener(l)) }()
	t.Cleanup(func() {
		b.grpc.Stop()
		b.direct.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return b
}

// dial returns a gRPC connection, and one whose Program is direct.
func (b *bed) dial(t testing.TB) (plain grpc.ClientConnInterface, direct *Conn) {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+b.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn, &Conn{conn, b.socket, method, limit}
}

func program(t *testing.T, ctx context.Context, conn grpc.ClientConnInterface) grpc.BidiStreamingClient[farev1.ProgramRequest, farev1.ProgramResponse] {
	t.Helper()
	stream, err := farev1.NewDataplaneServiceClient(conn).Program(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if header, err := stream.Header(); err != nil || header == nil {
		t.Fatalf("header %v, %v", header, err)
	}
	return stream
}

func request(ids ...uint64) *farev1.ProgramRequest {
	r := &farev1.ProgramRequest{}
	for _, id := range ids {
		r.Operations = append(r.Operations, &farev1.Operation{Id: id})
	}
	return r
}

// TestTwin plays random calls over a stream of gRPC and over a direct one: the client sees the same.
func TestTwin(t *testing.T) {
	b := newBed(t)
	plain, direct := b.dial(t)
	for seed := range uint64(60) {
		var logs [2]string
		for i, conn := range []grpc.ClientConnInterface{plain, direct} {
			random := rand.New(rand.NewPCG(seed, 1))
			var log strings.Builder
			ctx, cancel := context.WithCancel(t.Context())
			stream := program(t, ctx, conn)
			open := 0
			for range 40 {
				ids := []uint64{1 + random.Uint64N(20000)}
				switch n := random.IntN(40); n {
				case 0:
					ids = append(ids, refuseID)
				case 1, 2:
					ids = append(ids, silentID)
				case 3:
					ids = append(ids, answersID)
				}
				if err := stream.Send(request(ids...)); err != nil {
					fmt.Fprintf(&log, "send: %v\n", errors.Is(err, io.EOF))
					break
				}
				if len(ids) > 1 && ids[1] == silentID {
					continue
				}
				answers := 1
				if len(ids) > 1 && ids[1] == answersID {
					answers = 2
				}
				for range answers {
					r, err := stream.Recv()
					fmt.Fprintf(&log, "%v, %v\n", r, err)
					if err != nil {
						open = -1
					}
				}
				if open < 0 {
					break
				}
			}
			if random.IntN(2) == 0 {
				fmt.Fprintf(&log, "close: %v\n", stream.CloseSend())
			} else {
				cancel()
			}
			for {
				_, err := stream.Recv()
				if err != nil {
					fmt.Fprintf(&log, "end: %v, %v\n", status.Code(err), errors.Is(err, io.EOF))
					break
				}
			}
			cancel()
			logs[i] = log.String() + strings.TrimSuffix(<-b.service.ended, "failed") // a canceled handler ends one way or the other
		}
		if logs[0] != logs[1] {
			t.Fatalf("seed %d: gRPC:\n%s\ndirect:\n%s", seed, logs[0], logs[1])
		}
	}
}

// TestDirect checks that a direct stream does not use the gRPC connection, which a Conn without one shows.
func TestDirect(t *testing.T) {
	b := newBed(t)
	_, direct := b.dial(t)
	direct.ClientConnInterface = nil
	stream := program(t, t.Context(), direct)
	if err := stream.Send(request(7)); err != nil {
		t.Fatal(err)
	}
	if r, err := stream.Recv(); err != nil || r.Acks[0].Id != 7 {
		t.Fatalf("%v, %v", r, err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if got, want := <-b.service.ended, fmt.Sprintf("uid %d: half-close", os.Getuid()); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestFallback checks that a server without the protocol is used by gRPC, and that a missing server has gRPC's error.
func TestFallback(t *testing.T) {
	b := &bed{socket: filepath.Join(t.TempDir(), "s"), service: &service{ended: make(chan string, 1)}}
	l, err := net.Listen("unix", b.socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.Creds(grpcserve.PeerCredentials()))
	farev1.RegisterDataplaneServiceServer(s, b.service)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	_, direct := b.dial(t)
	stream := program(t, t.Context(), direct)
	if err := stream.Send(request(7)); err != nil {
		t.Fatal(err)
	}
	if r, err := stream.Recv(); err != nil || r.Acks[0].Id != 7 {
		t.Fatalf("%v, %v", r, err)
	}
	s.Stop()
	if err := <-served; err != nil {
		t.Fatal(err)
	}
	if stream, err := farev1.NewDataplaneServiceClient(direct).Program(t.Context()); err == nil {
		_, err = stream.Recv()
		if status.Code(err) != codes.Unavailable {
			t.Errorf("without a server: %v", err)
		}
	} else if status.Code(err) != codes.Unavailable {
		t.Errorf("without a server: %v", err)
	}
}

// TestEnds checks the ends of a stream that its client has not chosen: the handler's context, Stop and Close.
func TestEnds(t *testing.T) {
	t.Run("the client vanishes", func(t *testing.T) {
		b := newBed(t)
		_, direct := b.dial(t)
		ctx, cancel := context.WithCancel(t.Context())
		stream := program(t, ctx, direct)
		cancel()
		if _, err := stream.Recv(); status.Code(err) != codes.Canceled {
			t.Error(err)
		}
		if got := <-b.service.ended; !strings.HasSuffix(got, "failed") {
			t.Error(got)
		}
	})
	t.Run("Close", func(t *testing.T) {
		b := newBed(t)
		_, direct := b.dial(t)
		stream := program(t, t.Context(), direct)
		if err := stream.Send(request(waitID)); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil { // the handler waits
			t.Fatal(err)
		}
		b.direct.Close()
		if got := <-b.service.ended; !strings.HasSuffix(got, "context") {
			t.Error(got)
		}
		if _, err := stream.Recv(); status.Code(err) != codes.Canceled {
			t.Error(err)
		}
		if b.direct.hold(nil) != nil {
			t.Error("a closed server accepts a connection")
		}
	})
	t.Run("Stop", func(t *testing.T) {
		b := newBed(t)
		_, direct := b.dial(t)
		stream := program(t, t.Context(), direct)
		stopped := make(chan bool, 1)
		go func() { stopped <- b.direct.Stop(time.Hour) }()
		if err := stream.Send(request(refuseID)); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); status.Code(err) != codes.FailedPrecondition || status.Convert(err).Message() != "refused ü" {
			t.Error(err)
		}
		if !<-stopped {
			t.Error("not graceful")
		}
		if !b.direct.Stop(time.Hour) {
			t.Error("an idle server does not stop")
		}
	})
	t.Run("Stop of a handler that waits", func(t *testing.T) {
		b := newBed(t)
		_, direct := b.dial(t)
		stream := program(t, t.Context(), direct)
		if err := stream.Send(request(waitID)); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil { // the handler waits
			t.Fatal(err)
		}
		if b.direct.Stop(time.Millisecond) {
			t.Error("graceful")
		}
	})
}

// raw opens a connection and writes bytes; it returns the frame that answers, or "closed".
func (b *bed) raw(t *testing.T, data []byte) string {
	t.Helper()
	conn, err := net.Dial("unix", b.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.UnixConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	s := &clientStream{wire: newWire(conn, limit), ctx: t.Context(), release: func() bool { return true }}
	var got []string
	for {
		k, body, err := s.next()
		if err != nil {
			return strings.Join(append(got, "closed"), ", ")
		}
		if k == end {
			if s.finished(body); errors.Is(s.result, io.EOF) {
				s.result = nil
			}
			return strings.Join(append(got, status.Code(s.result).String()), ", ")
		}
		got = append(got, fmt.Sprint("kind ", k))
	}
}

func frame(k kind, body string) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), append([]byte{byte(k)}, body...)...)
}

// TestStrangers sends bytes that are none of the protocol's.
func TestStrangers(t *testing.T) {
	b := newBed(t)
	opened := append([]byte(Magic), frame(open, method)...)
	for name, x := range map[string]struct {
		data []byte
		want string
	}{
		"nothing":                 {nil, "closed"},
		"part of the magic":       {[]byte(Magic[:4]), "closed"},
		"magic alone":             {[]byte(Magic), "closed"},
		"another method":          {append([]byte(Magic), frame(open, "/x/Y")...), "Unimplemented"},
		"a long method":           {append([]byte(Magic), frame(open, strings.Repeat("x", maxMethod+1))...), "closed"},
		"a message as first":      {append([]byte(Magic), frame(message, "")...), "closed"},
		"vanishes":                {opened, "kind 2, Canceled"},
		"an unknown kind":         {append(opened[:len(opened):len(opened)], frame(9, "")...), "kind 2, InvalidArgument"},
		"a header":                {append(opened[:len(opened):len(opened)], frame(header, "")...), "kind 2, InvalidArgument"},
		"a half-close with bytes": {append(opened[:len(opened):len(opened)], frame(halfClose, "x")...), "kind 2, InvalidArgument"},
		"too large":               {append(opened[:len(opened):len(opened)], 0xff, 0, 0, 0, byte(message)), "kind 2, InvalidArgument"},
		"cut":                     {append(opened[:len(opened):len(opened)], 0, 0, 0, 9, byte(message), 1), "kind 2, Canceled"},
		"no message":              {append(opened[:len(opened):len(opened)], frame(message, "\xff")...), "kind 2, Internal"},
		"half-close":              {append(opened[:len(opened):len(opened)], frame(halfClose, "")...), "kind 2, OK"},
	} {
		if got := b.raw(t, x.data); got != x.want {
			t.Errorf("%s: %s, want %s", name, got, x.want)
		}
	}
}

// TestLargeMessage checks messages beyond the kept buffers and at the limit.
func TestLargeMessage(t *testing.T) {
	b := newBed(t)
	_, direct := b.dial(t)
	direct.ClientConnInterface = nil
	stream := program(t, t.Context(), direct)
	r := request(4999)
	for range 150 {
		r.Operations = append(r.Operations, r.Operations[0])
	}
	if err := stream.Send(r); err != nil {
		t.Fatal(err)
	}
	if got, err := stream.Recv(); err != nil || len(got.Acks) != 151 {
		t.Fatal(len(got.GetAcks()), err)
	}
	direct.Limit = 1000
	stream = program(t, t.Context(), direct)
	if err := stream.Send(r); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "at most 1000") {
		t.Error(err)
	}
}

// FuzzNext checks that frames of any bytes end with an error or are within their limits.
func FuzzNext(f *testing.F) {
	f.Add(append(frame(open, method), frame(message, "\x08\x01")...))
	f.Add(frame(end, ""))
	f.Fuzz(func(t *testing.T, data []byte) {
		client, server := net.Pipe()
		go func() {
			_, _ = client.Write(data)
			client.Close()
		}()
		w := newWire(server, 100)
		var again []byte
		for {
			k, body, err := w.next()
			if err != nil {
				break
			}
			if k == message && len(body) > 100 || k == open && len(body) > maxMethod {
				t.Fatalf("kind %d with %d bytes", k, len(body))
			}
			again = append(again, frame(k, string(body))...)
		}
		server.Close()
		if !bytes.HasPrefix(data, again) {
			t.Fatalf("%x was read as %x", data, again)
		}
	})
}

// BenchmarkRoundTrip compares the round trip of a small message after a pause, over gRPC and direct.
func BenchmarkRoundTrip(b *testing.B) {
	for _, pause := range []time.Duration{0, 5 * time.Millisecond} {
		for _, how := range []string{"grpc", "direct"} {
			b.Run(fmt.Sprintf("pause=%v/%s", pause, how), func(b *testing.B) {
				plain, direct := newBed(b).dial(b)
				conn := map[string]grpc.ClientConnInterface{"grpc": plain, "direct": direct}[how]
				stream, err := farev1.NewDataplaneServiceClient(conn).Program(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				var busy time.Duration
				for b.Loop() {
					time.Sleep(pause)
					began := time.Now()
					if err := stream.Send(request(1)); err != nil {
						b.Fatal(err)
					}
					if _, err := stream.Recv(); err != nil {
						b.Fatal(err)
					}
					busy += time.Since(began)
				}
				b.ReportMetric(float64(busy.Nanoseconds())/float64(b.N), "ns/trip")
			})
		}
	}
}
