package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/directstream"
)

// direct returns a connection whose Program does not pass through gRPC.
func direct(t *testing.T, socket string) grpc.ClientConnInterface {
	return &directstream.Conn{
		ClientConnInterface: withoutProgram{plain(t, socket)}, Socket: socket, Method: farev1.DataplaneService_Program_FullMethodName, Limit: 4 << 20,
	}
}

// withoutProgram is a connection over which Program fails.
type withoutProgram struct{ grpc.ClientConnInterface }

func (c withoutProgram) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if method == farev1.DataplaneService_Program_FullMethodName {
		return nil, errors.New("the stream is not direct")
	}
	return c.ClientConnInterface.NewStream(ctx, desc, method, opts...)
}

// TestDirectStream checks that a control plane whose Program is direct is logged with its user, is replaced by one over
// gRPC and replaces it, and gets the reason of an orderly stop.
func TestDirectStream(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	var log bytes.Buffer
	a, err := New(Config{Driver: Memory, Socket: socket, Version: "v1", Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	var last grpc.BidiStreamingClient[farev1.ProgramRequest, farev1.ProgramResponse]
	for i, conn := range []grpc.ClientConnInterface{direct(t, socket), plain(t, socket), direct(t, socket), direct(t, socket)} {
		client := farev1.NewDataplaneServiceClient(conn)
		if _, err := client.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}, grpc.WaitForReady(true)); err != nil {
			t.Fatal(err)
		}
		stream, err := client.Program(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if header, err := stream.Header(); err != nil || header == nil {
			t.Fatalf("header %v, %v", header, err)
		}
		if last != nil {
			if _, err := last.Recv(); status.Code(err) != codes.Aborted {
				t.Errorf("stream %d was replaced: %v", i-1, err)
			}
		}
		if err := stream.Send(&farev1.ProgramRequest{Operation: &farev1.Operation{Id: 1, Op: typicalState()[0].Op}}); err != nil {
			t.Fatal(err)
		}
		if r, err := stream.Recv(); err != nil || r.Acks[0].Level != farev1.AckLevel_ACK_LEVEL_IN_EFFECT {
			t.Fatalf("%v, %v", r, err)
		}
		last = stream
	}
	cancel()
	_, err = last.Recv()
	if details := status.Convert(err).Details(); status.Code(err) != codes.Unavailable || len(details) != 1 {
		t.Errorf("an orderly stop: %v, %v", err, details)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if want := fmt.Sprintf("method=Program by=\"uid %d", os.Getuid()); strings.Count(log.String(), want) != 8 {
		t.Errorf("the log has %q %d times, want 8:\n%s", want, strings.Count(log.String(), want), log.String())
	}
}
