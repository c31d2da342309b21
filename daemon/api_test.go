package daemon

import (
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"

	"fmt"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/internal/unixsocket"
)

// standalone returns a rig whose daemon opens its own sockets.
func standalone(t *testing.T, extra string) (r *rig, socket string) {
	t.Helper()
	socket = filepath.Join(testbed.ShortDir(t), "fared.sock")
	r = newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "api: {socket: " + socket + "}\n" + extra}, rigOptions{
		leaves: announceAll(400e9, 1), deps: func(d *Deps) { d.Embedded = false },
	})
	r.wait(destination(0), "1:1")
	return r, socket
}

func dial(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	// The socket may not exist yet.
	return testbed.Dial(t, socket, grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
}

// TestWatchFollowsAFailure checks that a watch over the unix socket shows the weights before, during and after a
// failure.
func TestWatchFollowsAFailure(t *testing.T) {
	r, socket := standalone(t, "")
	watch, err := farev1.NewWeightServiceClient(dial(t, socket)).WatchWeights(t.Context(), &farev1.WatchWeightsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	until := func(what string, ok func(*farev1.DestinationWeights) bool) {
		t.Helper()
		for {
			m, err := watch.Recv()
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			for _, w := range m.Weights {
				if w.Destination == destination(0).String() && ok(w) {
					return
				}
			}
		}
	}
	are := func(a, b uint32) func(*farev1.DestinationWeights) bool {
		return func(w *farev1.DestinationWeights) bool {
			var shares uint64
			for _, s := range w.Pairs[0].Slots {
				shares += uint64(s.SharePpb)
			}
			return w.Planes[0].Weight == a && w.Planes[1].Weight == b && w.Planes[0].InEffect && w.Planes[1].InEffect && shares == 1e9
		}
	}
	until("at first", are(1, 1))
	r.links.change(1, func(e *LinkEvent) { e.Up, e.Reason = false, "no carrier" })
	until("after the cut", are(1, 0))
	r.links.change(1, func(e *LinkEvent) { e.Up, e.Reason = true, "" })
	until("after the return", are(1, 1))
	if err := watch.CloseSend(); err != nil {
		t.Error(err)
	}
}

// TestHealthAndReflection checks that both services answer on the socket, and that reflection lists all services.
func TestHealthAndReflection(t *testing.T) {
	_, socket := standalone(t, "")
	conn := dial(t, socket)
	h, err := healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil || h.Status != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("health: %v, %v", h, err)
	}
	stream, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	resp, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range resp.GetListServicesResponse().GetService() {
		names = append(names, s.Name)
	}
	for _, want := range []string{"fare.v1.WeightService", "fare.v1.FabricService", "grpc.health.v1.Health"} {
		if !strings.Contains(strings.Join(names, " "), want) {
			t.Errorf("no %s in %v", want, names)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Error(err)
	}
}

// second runs another daemon with the same configuration and returns its error.
func second(t *testing.T, s shape) error {
	t.Helper()
	conn, err := memory.Dial(memory.New(memory.Config{}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	d, err := New(s.Config(t), Deps{Links: newTestLinks(s.Planes*s.SubPorts, 400e9), Dataplane: conn})
	if err != nil {
		return err
	}
	err = d.Run(t.Context())
	if cerr := d.Close(); cerr != nil {
		t.Error(cerr)
	}
	return err
}

// TestSecondInstance checks that a daemon whose socket is served by another daemon ends with an error that reports
// this, and that the first daemon's socket still answers.
func TestSecondInstance(t *testing.T) {
	r, socket := standalone(t, "")
	err := second(t, r.s)
	var inUse *unixsocket.InUseError
	if !errors.As(err, &inUse) || inUse.Path != socket || !strings.Contains(err.Error(), socket) {
		t.Errorf("%v, want that %s is in use", err, socket)
	}
	if _, err := farev1.NewFabricServiceClient(dial(t, socket)).GetStatus(t.Context(), &farev1.GetStatusRequest{}); err != nil {
		t.Errorf("the first one: %v", err)
	}
}

// TestMetricsAddressInUse checks that the error contains the address, and that the socket that was opened before is
// removed.
func TestMetricsAddressInUse(t *testing.T) {
	checkLeaks(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	socket := filepath.Join(t.TempDir(), "s")
	s := shape{Planes: 1, SubPorts: 1, Port: netnstest.FreePort(t), Net: 97, Extra: "api: {socket: " + socket + "}\nmetrics: {listen: \"" + l.Addr().String() + "\"}\n"}
	if err := second(t, s); err == nil || !strings.Contains(err.Error(), "metrics.listen") || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

// TestMetricsAreServed reads the metrics over HTTP and compares the sessions.
func TestMetricsAreServed(t *testing.T) {
	address := fmt.Sprintf("127.0.0.1:%d", netnstest.FreePort(t))
	standalone(t, "metrics: {listen: \""+address+"\"}\n")
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: transport}).Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var b strings.Builder
	if err := resp.Write(&b); err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK || !strings.Contains(b.String(), "fared_") || !strings.Contains(b.String(), "p1/p1.0") {
		t.Errorf("%s\n%s", resp.Status, b.String())
	}
}
