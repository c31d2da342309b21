package main

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/fleet/worker"
	"github.com/fared/fared/internal/grpcserve"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/internal/tlsfiles"
	"github.com/fared/fared/topo"
)

// node is a daemon that answers a reporter.
type node struct {
	farev1.UnimplementedFabricServiceServer
}

func (node) GetStatus(context.Context, *farev1.GetStatusRequest) (*farev1.GetStatusResponse, error) {
	return &farev1.GetStatusResponse{RouterId: "10.255.0.1"}, nil
}

func (node) ListSessions(context.Context, *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error) {
	return &farev1.ListSessionsResponse{}, nil
}

func (node) ListPlanes(context.Context, *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error) {
	return &farev1.ListPlanesResponse{}, nil
}

// TestReport checks that reports go to other hosts with a certificate alone, and that a worker which does not know the
// node ends them.
func TestReport(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	testbed.Serve(t, socket, func(s grpc.ServiceRegistrar) {
		farev1.RegisterFabricServiceServer(s, node{})
		farev1.RegisterWeightServiceServer(s, farev1.UnimplementedWeightServiceServer{})
	})
	for _, args := range [][]string{nil, {"--worker", "fleet1.example:4798"}, {"--worker", "192.0.2.1:4798"}, {"--worker", "fleet1"}} {
		refused(t, cli.ExitUsage, append([]string{"--socket", socket, "report"}, args...)...)
	}
	cert, key := clitest.Certificate(t)
	secure, err := tlsfiles.Server(cert, key, cert, nil)
	if err != nil {
		t.Fatal(err)
	}
	l, options, err := grpcserve.Open("127.0.0.1:0", secure)
	if err != nil {
		t.Fatal(err)
	}
	f, err := topo.New(topo.Spec{Loopbacks: netip.MustParsePrefix("10.250.0.0/16"), Planes: 2, Servers: 2, Name: "other"})
	if err != nil {
		t.Fatal(err)
	}
	w := worker.New(worker.Config{Fabric: f, Credentials: insecure.NewCredentials(), Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Serve(ctx, l, options...) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	t.Setenv("FARED_TLS_CERT", cert)
	t.Setenv("FARED_TLS_KEY", key)
	t.Setenv("FARED_TLS_CA", cert)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	text := refused(t, cli.ExitFailed, "--socket", socket, "report", "--worker", "127.0.0.1:"+port, "--log-level", "error")
	if !strings.Contains(text, "no node of the fabric other") {
		t.Errorf("a node of another fabric: %s", text)
	}
}
