package hostile

import (
	"context"
	"testing"
	"time"

	"github.com/fared/fared/internal/netnstest"
)

// strike runs an attack for the configured time, and measures meanwhile.
func (x attack) strike(t testing.TB, b *bed) (*verdict, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	a, err := newAttacker(ctx, b.far)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		x.run(a)
	}()
	observed, stop := context.WithTimeout(ctx, attackTime(t)*time.Duration(max(1, x.longer)))
	defer stop()
	v, err := b.observe(observed)
	cancel()
	<-done
	t.Logf("%d connections, %d sessions, %d KiB sent; %v", a.connections.Load(), a.sessions.Load(), a.octets.Load()>>10, v)
	if a.connections.Load() == 0 || a.octets.Load() == 0 {
		t.Error("the attack has sent nothing")
	}
	return v, err
}

// TestHostileLeaf runs every attack against the binary, and judges the process, the other leaves' sessions, their changes, the heartbeat and the memory.
func TestHostileLeaf(t *testing.T) {
	netnstest.Require(t)
	n := newNetwork(t)
	for _, x := range attacks {
		t.Run(x.name, func(t *testing.T) {
			b := newBed(t, n, max(few, x.destinations))
			v, err := x.strike(t, b)
			if err != nil {
				t.Fatal(err)
			}
			v.judge(t, 2*x.held)
			b.process.Kill() // an orderly end takes a second
		})
	}
}
