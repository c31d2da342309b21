package testbed

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// ShortDir returns a folder for sockets, whose paths must be short, that daemons of other users can enter. The end of
// the test removes it.
func ShortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "fared-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// Dial returns a connection to the Unix socket of a daemon or an agent, which need not exist yet. The end of the test
// closes it.
func Dial(t testing.TB, socket string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// Serve serves on a Unix socket what register registers, until the end of the test.
func Serve(t testing.TB, socket string, register func(grpc.ServiceRegistrar)) {
	t.Helper()
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		<-served
	})
}

// Answers waits until the agent behind a connection answers. running returns an error once its process has ended, which
// fails the test.
func Answers(t testing.TB, conn grpc.ClientConnInterface, running func() error) {
	t.Helper()
	netnstest.Eventually(t, 2*limit, func() error {
		if err := running(); err != nil {
			t.Fatal(err)
		}
		_, err := read(t, conn)
		return err
	})
}

// Snapshot returns the state of an agent, in one message.
func Snapshot(t testing.TB, conn grpc.ClientConnInterface, options ...grpc.CallOption) *farev1.SnapshotResponse {
	t.Helper()
	all, err := read(t, conn, options...)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func read(t testing.TB, conn grpc.ClientConnInterface, options ...grpc.CallOption) (*farev1.SnapshotResponse, error) {
	stream, err := farev1.NewDataplaneServiceClient(conn).Snapshot(t.Context(), &farev1.SnapshotRequest{}, options...)
	if err != nil {
		return nil, err
	}
	all := &farev1.SnapshotResponse{}
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		proto.Merge(all, part)
	}
}

// Stream is a stream that programs an agent, with the numbers of its operations.
type Stream struct {
	farev1.DataplaneService_ProgramClient
	// Cancel ends the stream before the end of the test.
	Cancel context.CancelFunc
	// Retry is whether the agent has suggested a retry with or after a refusal of the last Try.
	Retry bool
	// Sent is the number of operations sent, which is that of the last one.
	Sent uint64
	open map[uint64]bool // operations without a last answer
	t    testing.TB
}

// OpenStream opens a stream, which the end of the test closes.
func OpenStream(t testing.TB, conn grpc.ClientConnInterface) *Stream {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := farev1.NewDataplaneServiceClient(conn).Program(ctx)
	if err == nil {
		_, err = stream.Header()
	}
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	return &Stream{DataplaneService_ProgramClient: stream, Cancel: cancel, open: map[uint64]bool{}, t: t}
}

// Do programs operations, and returns when all are in effect.
func (p *Stream) Do(operations ...*farev1.Operation) {
	p.t.Helper()
	p.send(operations)
	for _, ack := range p.answers() {
		if ack.Level != farev1.AckLevel_ACK_LEVEL_IN_EFFECT {
			p.t.Fatalf("not in effect: %v", ack)
		}
	}
}

// Try programs operations, one per message, and returns the refusals when each operation is in effect or refused.
func (p *Stream) Try(operations ...*farev1.Operation) (refused []*farev1.Ack) {
	p.t.Helper()
	p.send(operations)
	return p.Await()
}

// send sends operations, one per message.
func (p *Stream) send(operations []*farev1.Operation) {
	p.t.Helper()
	p.Retry = false
	for _, op := range operations {
		op = proto.CloneOf(op)
		p.request(&farev1.ProgramRequest{Operation: op}, op)
	}
}

// Request sends operations in one message, and sets their numbers.
func (p *Stream) Request(operations ...*farev1.Operation) {
	p.t.Helper()
	p.request(&farev1.ProgramRequest{Operations: operations}, operations...)
}

func (p *Stream) request(r *farev1.ProgramRequest, operations ...*farev1.Operation) {
	p.t.Helper()
	for _, op := range operations {
		p.Sent++
		op.Id = p.Sent
		p.open[op.Id] = true
	}
	if err := p.Send(r); err != nil {
		_, cause := p.Recv()
		p.t.Fatal(errors.Join(err, cause))
	}
}

// Answer programs an operation and returns its last acknowledgement: in effect, or refused.
func (p *Stream) Answer(op *farev1.Operation) *farev1.Ack {
	p.t.Helper()
	op = proto.CloneOf(op)
	p.request(&farev1.ProgramRequest{Operation: op}, op)
	return p.answers()[0]
}

// Await returns the refusals when each operation is in effect or refused.
func (p *Stream) Await() (refused []*farev1.Ack) {
	p.t.Helper()
	return slices.DeleteFunc(p.answers(), func(ack *farev1.Ack) bool { return !refuses(ack) })
}

func refuses(ack *farev1.Ack) bool { return ack.Level == farev1.AckLevel_ACK_LEVEL_REFUSED }

func (p *Stream) answers() (all []*farev1.Ack) {
	p.t.Helper()
	for len(p.open) > 0 {
		response, err := p.Recv()
		if err != nil {
			p.t.Fatal(err)
		}
		for _, ack := range response.Acks {
			switch {
			case ack.Level == farev1.AckLevel_ACK_LEVEL_ACCEPTED:
			case ack.Level == farev1.AckLevel_ACK_LEVEL_UNSPECIFIED || !p.open[ack.Id]:
				p.t.Fatalf("%v is no last answer to one of the operations %v", ack, p.open)
			default:
				delete(p.open, ack.Id)
				all = append(all, ack)
			}
		}
		p.Retry = p.Retry || response.Retry && slices.ContainsFunc(all, refuses)
	}
	return all
}

// Finish is Await at the end of the requests: it requires that the agent ends the stream after its last answer. Reports
// on the host may come until then.
func (p *Stream) Finish() (refused []*farev1.Ack) {
	p.t.Helper()
	if err := p.CloseSend(); err != nil {
		p.t.Fatal(err)
	}
	refused = p.Await()
	response, err := p.Recv()
	for err == nil && response.Integrity != nil && len(response.Acks) == 0 {
		response, err = p.Recv()
	}
	if !errors.Is(err, io.EOF) {
		p.t.Fatalf("%v, %v after the last answer", response, err)
	}
	return refused
}
