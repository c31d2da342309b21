package worker

import (
	"bytes"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/topo"
)

// TestSilentPeer follows a worker that ends every connection: the log has one line, not one an attempt.
func TestSilentPeer(t *testing.T) {
	f := number(t, topo.Spec{Planes: 2, Servers: 2})
	peer := listen(t)
	defer peer.Close()
	var attempts atomic.Int64
	go func() {
		for c, err := peer.Accept(); err == nil; c, err = peer.Accept() {
			attempts.Add(1)
			c.Close()
		}
	}()
	var out bytes.Buffer
	_, stop := serveConfig(t, listen(t), Config{Fabric: f, Peers: []string{peer.Addr().String()}, Log: slog.New(slog.NewTextHandler(&out, nil))})
	until(t, "the third attempt", func() bool { return attempts.Load() >= 3 })
	stop()
	if n := strings.Count(out.String(), "another worker does not answer"); n != 1 {
		t.Errorf("%d lines:\n%s", n, out.String())
	}
}

// TestRefusedReports sends reports of a node of another fabric: the log names it, once a minute.
func TestRefusedReports(t *testing.T) {
	var out bytes.Buffer
	l := listen(t)
	w, stop := serveConfig(t, l, Config{Fabric: number(t, topo.Spec{Planes: 2, Servers: 2}), Log: slog.New(slog.NewTextHandler(&out, nil))})
	c := ask(t, l.Addr().String())
	for range 3 {
		stream, err := c.Report(t.Context())
		if err == nil {
			err = stream.Send(&fleetv1.ReportRequest{RouterId: "192.0.2.9", ConnectionNs: 1, Revision: 1})
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); status.Code(err) != codes.InvalidArgument {
			t.Fatalf("a node of another fabric: %v", err)
		}
	}
	stop()
	if n := strings.Count(out.String(), "192.0.2.9"); n != 1 || w.tally.refused.Load() != 3 {
		t.Errorf("%d lines, %d refusals:\n%s", n, w.tally.refused.Load(), out.String())
	}
}

// TestLogOfFaults names half a cable at fault, and its end.
func TestLogOfFaults(t *testing.T) {
	var out bytes.Buffer
	f := number(t, topo.Spec{Planes: 2, Servers: 2})
	l := listen(t)
	_, stop := serveConfig(t, l, Config{Fabric: f, Log: slog.New(slog.NewTextHandler(&out, nil))})
	c := ask(t, l.Addr().String())
	stream, err := c.Report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i, state := range []string{"dark", "up"} {
		m := message(f, f.Server[1], 1, uint64(i+1))
		m.Ports.Ports[0].State = state
		if err := stream.Send(m); err != nil {
			t.Fatal(err)
		}
		until(t, state, func() bool { return (len(faults(t, c)) > 0) == (state == "dark") })
	}
	stop()
	for _, want := range []string{`"a part is at fault" part=server2/p0.0 fault=dark evidence="[1 cable without a carrier]"`, `"a part is no longer at fault" part=server2/p0.0 fault=dark`} {
		if strings.Count(out.String(), want) != 1 {
			t.Errorf("not once %s:\n%s", want, out.String())
		}
	}
}
