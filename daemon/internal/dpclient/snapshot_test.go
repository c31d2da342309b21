package dpclient

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// endless is a Snapshot without end.
type endless struct {
	grpc.ServerStreamingClient[farev1.SnapshotResponse]
	chunk func(n uint32) *farev1.SnapshotResponse
	n     uint32
}

func (e *endless) Recv() (*farev1.SnapshotResponse, error) {
	if e.n++; e.n > 1<<22 {
		return nil, fmt.Errorf("%d chunks were read", e.n)
	}
	return e.chunk(e.n), nil
}

// TestEndlessSnapshot checks that each part of a Snapshot is bounded, also if it names one object again and again. The
// long text of a part is shared, so that the test itself needs little memory.
func TestEndlessSnapshot(t *testing.T) {
	text := strings.Repeat("x", 1<<20)
	for name, chunk := range map[string]func(n uint32) *farev1.SnapshotResponse{
		"sub-ports": func(n uint32) *farev1.SnapshotResponse {
			return &farev1.SnapshotResponse{SubPorts: []*farev1.SubPortState{{Device: text}}}
		},
		"vectors": func(n uint32) *farev1.SnapshotResponse {
			return &farev1.SnapshotResponse{Vectors: []*farev1.Vector{{Id: n, Members: []*farev1.VectorMember{{Device: text}}}}}
		},
		"approximate": func(n uint32) *farev1.SnapshotResponse {
			return &farev1.SnapshotResponse{Approximate: map[uint32]string{n: text}}
		},
		"destinations": func(uint32) *farev1.SnapshotResponse {
			return &farev1.SnapshotResponse{Destinations: []*farev1.Destination{{Prefix: "10.0.0.1/32", Vector: 1}}}
		},
	} {
		_, err := readBack(&endless{chunk: chunk}, order{})
		if err == nil || !strings.Contains(err.Error(), "more than 320 MiB of state") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSnapshotWithoutAVector checks that a Snapshot with a destination that has no vector is refused.
func TestSnapshotWithoutAVector(t *testing.T) {
	_, err := readBack(&endless{chunk: func(uint32) *farev1.SnapshotResponse {
		return &farev1.SnapshotResponse{Destinations: []*farev1.Destination{{Prefix: "10.0.0.1/32"}}}
	}}, order{})
	if err == nil || !strings.Contains(err.Error(), "10.0.0.1/32 has no vector") {
		t.Error(err)
	}
}
