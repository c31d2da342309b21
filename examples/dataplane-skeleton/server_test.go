package main

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
)

// start serves a table as main does and connects to it.
func start(t *testing.T, tbl *table) *grpc.ClientConn {
	t.Helper()
	dir, err := os.MkdirTemp("", "skeleton") // t.TempDir can be too long for the path of a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "socket")
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- serve(ctx, socket, tbl) }()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return conn
}

func TestConformance(t *testing.T) {
	dptest.Run(t, start(t, newTable(nothing{})), dptest.Options{Batch: 4096})
}

func TestProgramNeedsHello(t *testing.T) {
	stream, err := farev1.NewDataplaneServiceClient(start(t, newTable(nothing{}))).Program(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("Program without Hello: %v, want FAILED_PRECONDITION", err)
	}
}

// broken is a layer that refuses every operation.
type broken struct{ err error }

func (broken) setForwarding(*farev1.Forwarding) error { return nil }
func (b broken) apply(*farev1.Operation) error        { return b.err }

// TestLayerRefuses checks that an error of the layer becomes a refusal that leaves the table unchanged.
func TestLayerRefuses(t *testing.T) {
	for _, c := range []struct {
		err  error
		code codes.Code
	}{
		{errors.New("no answer"), codes.Internal}, {status.Error(codes.Unavailable, "no answer"), codes.Unavailable},
	} {
		tbl := newTable(broken{c.err})
		if _, err := tbl.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
			t.Fatal(err)
		}
		before := tbl.snapshot()
		stream, err := tbl.takeOver()
		if err != nil {
			t.Fatal(err)
		}
		tbl.groups[7], tbl.destinations[key{prefix: netip.MustParsePrefix("10.255.0.2/32")}] = &farev1.Vector{Id: 7}, 7
		with := tbl.snapshot()
		if proto.Equal(before, with) {
			t.Fatal("the snapshot lacks the group and the destination")
		}
		for i, op := range []*farev1.Operation{
			{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: "dp0a"}}},
			{Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: 1}}},
			{Op: &farev1.Operation_DeleteVector{DeleteVector: 7}},
			{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: "10.255.0.3/32", Vector: 7}}},
			{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: "10.255.0.2/32"}}},
		} {
			op.Id = uint64(i + 1)
			ack := tbl.commit(stream, op)
			if ack.GetLevel() != farev1.AckLevel_ACK_LEVEL_REFUSED || ack.Code != uint32(c.code) || ack.Message != "no answer" {
				t.Errorf("%v: acknowledged {%v}, want a refusal with code %v", op, ack, c.code)
			}
		}
		if after := tbl.snapshot(); !proto.Equal(with, after) {
			t.Errorf("refused operations changed the table from {%v} to {%v}", with, after)
		}
	}
}

// TestReplacedStreamIsOver checks that an operation of a replaced stream, received but not yet carried out, has no
// effect.
func TestReplacedStreamIsOver(t *testing.T) {
	tbl := newTable(nothing{})
	if _, err := tbl.Hello(t.Context(), &farev1.HelloRequest{Forwarding: dptest.DefaultForwarding()}); err != nil {
		t.Fatal(err)
	}
	older, err := tbl.takeOver()
	if err != nil {
		t.Fatal(err)
	}
	newer, err := tbl.takeOver()
	if err != nil {
		t.Fatal(err)
	}
	op := &farev1.Operation{Id: 1, Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: 1}}}
	if ack := tbl.commit(older, op); ack != nil || len(tbl.groups) != 0 {
		t.Errorf("the replaced stream was answered {%v} and left the groups %v", ack, tbl.groups)
	}
	if ack := tbl.commit(newer, op); ack.GetLevel() != farev1.AckLevel_ACK_LEVEL_IN_EFFECT || len(tbl.groups) != 1 {
		t.Errorf("the newer stream was answered {%v} and left the groups %v", ack, tbl.groups)
	}
}
