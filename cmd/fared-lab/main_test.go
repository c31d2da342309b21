package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/testbed"
)

// The helpers of clitest that most tests use.
var (
	execute, fared, must, refused, explains = clitest.Execute, clitest.Run, clitest.Must, clitest.Refused, clitest.Explains
	inBackground, start, within, executable = clitest.InBackground, clitest.Start, clitest.Within, clitest.Executable
)

const generous = clitest.Generous

func TestMain(m *testing.M) {
	clitest.Begin(newRoot, main)
	clitest.Main(m)
}

// withFared makes command lines of the test find the program fared.
func withFared(t *testing.T) {
	t.Helper()
	t.Setenv("PATH", filepath.Dir(binary.Fared(t))+":"+os.Getenv("PATH"))
}

// loopbacks is a daemon that lists its loopbacks.
type loopbacks struct {
	farev1.UnimplementedFabricServiceServer
}

func (loopbacks) GetStatus(context.Context, *farev1.GetStatusRequest) (*farev1.GetStatusResponse, error) {
	return &farev1.GetStatusResponse{Loopbacks: []string{"10.255.0.1/32"}}, nil
}

// TestGolden plays command lines, also next to a daemon, which completions ask.
func TestGolden(t *testing.T) {
	serve := func(t *testing.T) string {
		socket := filepath.Join(t.TempDir(), "s")
		testbed.Serve(t, socket, func(s grpc.ServiceRegistrar) { farev1.RegisterFabricServiceServer(s, loopbacks{}) })
		return socket
	}
	clitest.Golden(t, serve, nil, func(string) bool { return false })
}
