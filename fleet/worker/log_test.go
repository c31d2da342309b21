package worker

import (
	"bytes"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

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
