package hostile

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// strike runs an attack for the configured time, and measures meanwhile.
func (x attack) strike(t testing.TB, b *bed, usual time.Duration) (*verdict, error) {
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
	observed, stop := context.WithTimeout(ctx, attackTime(t, usual)*time.Duration(max(1, x.longer)))
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

// TestHostileLeaf runs every attack against the binary, and judges the process, the other leaves' sessions, their
// changes, the heartbeat and the memory.
func TestHostileLeaf(t *testing.T) {
	gate.Needed(t, "every attack of a hostile leaf against the binary")
	usual := time.Duration(gate.Count(t, gate.Chaos, 300, 1200)) * time.Millisecond
	netnstest.Require(t)
	n := newNetwork(t)
	for _, x := range attacks {
		t.Run(x.name, func(t *testing.T) {
			b := newBed(t, n, max(few, x.destinations))
			v, err := x.strike(t, b, usual)
			if err != nil {
				t.Fatal(err)
			}
			v.judge(t, 2*x.held)
			b.process.Kill() // an orderly end takes a second
		})
	}
}

// TestJudgeNotices checks that the judge notices a process that ends, and an honest leaf's session that ends. Each
// fault happens once the second change of the honest leaf is in effect, without an attack.
func TestJudgeNotices(t *testing.T) {
	netnstest.Require(t)
	n := newNetwork(t)
	for _, tt := range []struct {
		name  string
		fault func(b *bed) error
	}{
		{"the process ends", func(b *bed) error { return syscall.Kill(b.process.Pid(), syscall.SIGKILL) }},
		{"a session ends", func(b *bed) error { return b.leaves[1].write(message(kindNotification, 6, 2)) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBed(t, n, few)
			defer b.process.Kill()
			ctx, cancel := context.WithTimeout(t.Context(), 2*hangLimit)
			defer cancel()
			failed := make(chan error, 1)
			before := b.dataplane.setVectors()
			go func() {
				for b.dataplane.setVectors() < before+2 && ctx.Err() == nil {
					time.Sleep(time.Millisecond)
				}
				failed <- tt.fault(b)
				for b.process.Running() == nil && b.leaves[1].judge() == nil && ctx.Err() == nil {
					time.Sleep(time.Millisecond)
				}
				cancel()
			}()
			v, err := b.observe(ctx)
			if fault := <-failed; fault != nil {
				t.Fatal(fault)
			}
			if err == nil {
				t.Fatalf("noticed nothing: %v", v)
			}
			t.Log(err)
		})
	}
}
