package worker

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/fleet/drain"
	"github.com/fared/fared/topo"
)

// leaving is an engine that may be away.
type leaving struct {
	engine
	away atomic.Bool
}

func (l *leaving) Load(ctx context.Context) ([]byte, string, error) {
	if l.away.Load() {
		return nil, "", errors.New("nobody answers")
	}
	return l.engine.Load(ctx)
}

// TestEngineAway lists the drains of the last read, marked, while the engine does not answer, and present ones after.
func TestEngineAway(t *testing.T) {
	f, e, l := number(t, topo.Spec{Planes: 3, Servers: 2}), &leaving{}, listen(t)
	serveConfig(t, l, Config{Fabric: f, Engine: e, Budget: drain.Budget{Planes: 2}})
	c := ask(t, l.Addr().String())
	if _, err := c.Drain(t.Context(), &fleetv1.DrainRequest{Part: "leaf1"}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	for _, away := range []bool{true, false} {
		e.away.Store(away)
		until(t, "the list is marked, or no longer", func() bool {
			m, err := c.ListDrains(t.Context(), &fleetv1.ListDrainsRequest{})
			if err != nil || len(m.Drains) != 1 || m.Drains[0].Part != "leaf1" {
				t.Fatalf("drains %v, %v", m, err)
			}
			state, err := c.GetFleet(t.Context(), &fleetv1.GetFleetRequest{})
			return err == nil && (m.Stale == "nobody answers") == away && (m.ReadNs > 0) == away &&
				strings.Contains(strings.Join(state.Problems, " "), "nobody answers") == away
		})
	}
	e.away.Store(true)
	w := New(Config{Fabric: f, Engine: e})
	if _, err := w.ListDrains(t.Context(), &fleetv1.ListDrainsRequest{}); status.Code(err) != codes.Internal {
		t.Errorf("a worker that has read nothing: %v", err)
	}
}

// TestBudgetOfAnother starts a worker with another budget: the first one grants nothing from then on, and says why.
func TestBudgetOfAnother(t *testing.T) {
	var out bytes.Buffer
	f, e, l := number(t, topo.Spec{Planes: 3, Servers: 2}), &engine{}, listen(t)
	_, stop := serveConfig(t, l, Config{Fabric: f, Engine: e, Budget: drain.Budget{Planes: 1}, Log: slog.New(slog.NewTextHandler(&out, nil))})
	c := ask(t, l.Addr().String())
	if _, err := c.Drain(t.Context(), &fleetv1.DrainRequest{Part: "leaf1"}, grpc.WaitForReady(true)); err != nil {
		t.Fatal(err)
	}
	other := listen(t)
	serveConfig(t, other, Config{Fabric: f, Engine: e, Budget: drain.Budget{Planes: 2}})
	const problem = "workers have different budgets: this one keeps 1 planes, the last one to start 2 planes"
	until(t, "the first worker knows the other's budget", func() bool {
		m, err := c.GetFleet(t.Context(), &fleetv1.GetFleetRequest{})
		return err == nil && strings.Contains(strings.Join(m.Problems, " "), problem)
	})
	if _, err := c.Drain(t.Context(), &fleetv1.DrainRequest{Part: "leaf2"}); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), problem) {
		t.Errorf("a drain by the first worker: %v", err)
	}
	if _, err := c.Undrain(t.Context(), &fleetv1.UndrainRequest{Part: "leaf1"}); err != nil {
		t.Error(err)
	}
	if _, err := ask(t, other.Addr().String()).Drain(t.Context(), &fleetv1.DrainRequest{Part: "leaf2"}, grpc.WaitForReady(true)); err != nil {
		t.Errorf("a drain by the other worker: %v", err)
	}
	end := uint64(time.Now().Add(time.Hour).UnixNano())
	for _, req := range []*fleetv1.DrainRequest{{Part: "leaf2", UntilNs: end}, {Part: "leaf2"}} {
		if m, err := ask(t, other.Addr().String()).Drain(t.Context(), req); err != nil || m.UntilNs != end {
			t.Errorf("a drain that ends by itself, again: %v %v", m, err)
		}
	}
	until(t, "the log has the problem", func() bool { stop(); return strings.Count(out.String(), problem) == 1 })
}

// TestCaller names who has asked: by the certificate, by the caller's own word, or by the address alone.
func TestCaller(t *testing.T) {
	a := &authority{t: t}
	a.issue("authority")
	certificate, err := x509.ParseCertificate(a.issue("ops1").Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		certified  bool
		says, want string
	}{
		{true, "alice@laptop", "ops1, alice@laptop"}, {true, "", "ops1"}, {false, "alice@laptop", "alice@laptop"}, {false, "a\nb\xff", "a?b"}, {false, "", "anonymous from 192.0.2.1"},
		{false, strings.Repeat("x", 200), strings.Repeat("x", 100)},
	} {
		p := &peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 4711}}
		if c.certified {
			p.AuthInfo = credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{certificate}}}
		}
		if got := callerOf(peer.NewContext(t.Context(), p), c.says); got != c.want {
			t.Errorf("%q is %q, want %q", c.says, got, c.want)
		}
	}
}
