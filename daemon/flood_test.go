package daemon

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/testbed"
)

// flooded is a rig with three leaves. The first repeatedly advertises a distinct bandwidth for each of many
// destinations; the second changes its bandwidth toward one destination that the first does not announce. The data
// plane takes cost for each group.
type flooded struct {
	*rig
	n       int
	cost    atomic.Int64   // nanoseconds
	after   atomic.Int64   // cost from the victim's next group on
	victim  chan time.Time // when the data plane has applied the victim's group
	groups  chan struct{}  // one element while the flood's groups arrive
	flooder *rawLeaf
	floods  int
}

func newFlooded(t testing.TB, n int, cost time.Duration) *flooded {
	t.Helper()
	checkLeaks(t)
	f := &flooded{n: n, victim: make(chan time.Time, 1024), groups: make(chan struct{}, 1)}
	f.cost.Store(int64(cost))
	f.after.Store(int64(cost))
	dp := memory.New(memory.Config{Observe: func(op *farev1.Operation) {
		set := op.GetSetVector()
		if set == nil {
			return
		}
		if len(set.Members) == 2 { // only the victim's groups have no member in the flooder's plane
			f.cost.Store(f.after.Load())
			f.victim <- time.Now()
			return
		}
		select {
		case f.groups <- struct{}{}:
		default:
		}
		if cost := time.Duration(f.cost.Load()); cost > 0 {
			<-time.After(cost)
		}
	}})
	f.rig = newRig(t, shape{Planes: 3, SubPorts: 1}, rigOptions{checked: true, dp: dp, conn: testbed.Dial(t, serveDataplane(t, dp)), leaves: func(l *rawLeaf) {
		announceAll(400e9, n)(l)
		if l.name != "p0.0" {
			l.table[destination(n)] = 400e9
		}
	}})
	f.settled(n + 1)
	f.flooder = f.leaves[0]
	return f
}

// flood sends a round: each destination gets a bandwidth that differs from all others.
func (f *flooded) flood() {
	f.floods++
	select {
	case <-f.groups: // of earlier rounds
	default:
	}
	l := f.flooder
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []byte
	for i := range f.n {
		out = append(out, l.update(fare.Bandwidth(1e9+(i*2+f.floods%2)*10e6), destination(i))...)
	}
	l.write(out)
}

// change makes the second leaf change the victim, and returns how long the data plane took to apply it.
func (f *flooded) change(t testing.TB, b fare.Bandwidth) time.Duration {
	t.Helper()
	for len(f.victim) > 0 {
		<-f.victim
	}
	began := time.Now()
	f.leaves[1].announce(b, destination(f.n))
	select {
	case at := <-f.victim:
		return at.Sub(began)
	case <-time.After(waitLimit):
		t.Fatal("the change is not in effect")
		return 0
	}
}

// BenchmarkOthersUnderFlood measures how long other sessions' changes take while one leaf floods, and how long the loop
// is unresponsive.
func BenchmarkOthersUnderFlood(b *testing.B) {
	for _, c := range []struct {
		n    int
		cost time.Duration
	}{{8192, 0}, {8192, 100 * time.Microsecond}, {16000, 100 * time.Microsecond}} {
		b.Run(fmt.Sprintf("destinations=%d/group=%v", c.n, c.cost), func(b *testing.B) {
			f := newFlooded(b, c.n, c.cost)
			var changes, alive []time.Duration
			flooded := 0 // changes that began while groups of the flood were pending
			for range b.N {
				f.flood()
				<-f.groups
				for i := range 20 {
					if f.d.client.Status().Queued > 0 {
						flooded++
					}
					changes = append(changes, f.change(b, fare.Bandwidth(100e9+(i%2)*100e9)))
					began := time.Now()
					f.inside(func(*loop) {})
					alive = append(alive, time.Since(began))
				}
			}
			report(b, "change-", changes)
			report(b, "loop-", alive)
			b.ReportMetric(float64(slices.Max(alive).Microseconds()), "loop-max-µs")
			b.ReportMetric(float64(flooded)/float64(len(changes)), "flooded")
		})
	}
}

// TestFloodDelaysNoOthers checks that, while the data plane applies one leaf's flood of distinct bandwidths, changes of
// another session are applied among the flood's first groups, not behind them. The data plane is slow except from the
// declaration of a change until it is applied, so that the result does not depend on the speed of the machine.
func TestFloodDelaysNoOthers(t *testing.T) {
	const n = 4096
	slow := int64(20 * time.Millisecond)
	f := newFlooded(t, n, 0)
	f.cost.Store(slow)
	f.after.Store(slow)
	f.flood()
	eventually(t, "the flood waits for the data plane", func() bool { return f.d.client.Status().Queued > n })
	for i, weights := range []string{"0?:1?:4?", "0?:1?:2?"} {
		for len(f.victim) > 0 {
			<-f.victim
		}
		f.leaves[1].announce(fare.Bandwidth(100e9*(i+1)), destination(n))
		declared := func() bool { return len(f.victim) > 0 || f.weights(destination(n)) == weights }
		eventually(t, "the change is declared", declared)
		before := f.d.client.Status()
		f.cost.Store(0)
		select {
		case <-f.victim:
		case <-time.After(waitLimit):
			t.Fatal("the change is not in effect")
		}
		f.cost.Store(slow) // also if the change was applied before it was seen as declared
		// A change waits for the window in flight; behind the flood it would wait for all its groups.
		now := f.d.client.Status()
		if sent := now.Counters.Sent[dpclient.VectorSet] - before.Counters.Sent[dpclient.VectorSet]; sent > n/2 {
			t.Errorf("%d groups were sent until a change of another session was carried out; want at most %d, with %d objects waiting at first", sent, n/2, before.Queued)
		} else {
			t.Logf("%d groups sent until change %d; %d objects waited, %d wait still", sent, i, before.Queued, now.Queued)
		}
	}
	f.after.Store(0)
	f.cost.Store(0)
}
