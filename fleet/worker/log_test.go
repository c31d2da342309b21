package worker

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/internal/testkit/testlog"
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
	m, err := c.GetFleet(t.Context(), &fleetv1.GetFleetRequest{})
	if err != nil || len(m.Refused) != 1 || m.Refused[0].RouterId != "192.0.2.9" || m.Refused[0].Address != "127.0.0.1" || !strings.Contains(m.Refused[0].Reason, "no node of the fabric") {
		t.Errorf("refused nodes %v, %v", m.GetRefused(), err)
	}
	another := listen(t)
	serve(t, w.fabric, another, l.Addr().String())
	other := ask(t, another.Addr().String())
	until(t, "another worker names the node", func() bool {
		m, err := other.GetFleet(t.Context(), &fleetv1.GetFleetRequest{})
		return err == nil && len(m.Refused) == 1 && m.Refused[0].RouterId == "192.0.2.9"
	})
	if late := w.refusedNodes(time.Now().Add(2 * memorable)); len(late) != 0 {
		t.Errorf("for ever: %v", late)
	}
	stop()
	if n := strings.Count(out.String(), "192.0.2.9"); n != 1 || w.tally.refused.Load() != 3 {
		t.Errorf("%d lines, %d refusals:\n%s", n, w.tally.refused.Load(), out.String())
	}
}

// TestLogOfFaults names half a cable at fault, and its end.
func TestLogOfFaults(t *testing.T) {
	var out testlog.Log
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
		until(t, state, func() bool {
			return (len(faults(t, c)) > 0) == (state == "dark") && strings.Count(out.String(), "fault=dark") == i+1
		})
	}
	stop()
	for _, want := range []string{`"a part is at fault" part=server2/p0.0 fault=dark evidence="[1 cable without a carrier]"`, `"a part is no longer at fault" part=server2/p0.0 fault=dark`} {
		if strings.Count(out.String(), want) != 1 {
			t.Errorf("not once %s:\n%s", want, out.String())
		}
	}
}

// TestLogOfAStorm names four cables one after another, then their leaf alone: the log has the leaf. Parts that change
// for ever are logged in the end.
func TestLogOfAStorm(t *testing.T) {
	var out bytes.Buffer
	w := New(Config{Fabric: number(t, topo.Spec{Planes: 2, Servers: 2}), Log: slog.New(slog.NewTextHandler(&out, nil))})
	now := time.Unix(1_800_000_000, 0)
	step := func(parts ...string) time.Duration {
		var all []*fleetv1.Fault
		for _, p := range parts {
			all = append(all, &fleetv1.Fault{Part: p, Fault: "dark"})
		}
		now = now.Add(calm / 2)
		return w.tell(all, now)
	}
	for i := range 4 {
		if wait := step([]string{"server1/p0.0", "server1/p0.1", "server2/p0.0", "server2/p0.1"}[:i+1]...); wait != calm {
			t.Errorf("wait for %s", wait)
		}
	}
	for _, want := range []time.Duration{calm, calm / 2, 0, 0} {
		if wait := step("leaf0"); wait != want {
			t.Errorf("wait for %s, want %s", wait, want)
		}
	}
	if text := out.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "part=leaf0 fault=dark") {
		t.Errorf("the log has\n%s", text)
	}
	for range 4 {
		step("leaf0", "leaf1")
		now = now.Add(calm)
		step("leaf0")
	}
	if strings.Contains(out.String(), "leaf1") {
		t.Errorf("a part at fault for a moment is logged:\n%s", out.String())
	}
	for i := range 1 + 2*int(overdue/calm) {
		step("leaf0", []string{"server1/p1", "server2/p1"}[i%2])
	}
	if step("leaf0"); strings.Count(out.String(), "p1 fault") != 1 {
		t.Errorf("after %s the log has\n%s", overdue, out.String())
	}
}

// ended is a stream whose other worker has ended.
type ended struct {
	grpc.ServerStreamingServer[fleetv1.FollowResponse]
}

func (ended) SendHeader(metadata.MD) error { return io.EOF }

// TestArrived tries another worker at once when one has arrived, which may be that one.
func TestArrived(t *testing.T) {
	w := New(Config{Fabric: number(t, topo.Spec{Planes: 2, Servers: 2}), Peers: []string{"fleet2:4798"}})
	for range 2 {
		if err := w.Follow(nil, ended{}); !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
	}
	if n := len(w.arrived["fleet2:4798"]); n != 1 {
		t.Errorf("%d rings", n)
	}
}
