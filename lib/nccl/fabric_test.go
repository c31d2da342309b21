package nccl

import (
	"fmt"
	"math"
	"path/filepath"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/testbed"
)

// lab is a running fabric of fared: four planes, four servers, steered by BPF.
type lab struct{ *testbed.Lab }

func newLab(t testing.TB) lab {
	t.Helper()
	return lab{testbed.NewLab(t, "--servers", fmt.Sprint(servers), "--sub-ports", "1", "--driver", "bpf")}
}

// awaitWeights waits until every server forwards by the weights.
func (l lab) awaitWeights(weights string) {
	for i := range servers {
		l.AwaitWeights(fmt.Sprint("server", 1+i), weights, servers-1)
	}
}

// run starts a rank on each server. The fabric steers TCP port 4793 alone, which suffices for one receiving
// communicator of each server.
func (l lab) run(t testing.TB, b built, args ...string) []*rank {
	t.Helper()
	return start(t, servers, func(i int) ([]string, []string) {
		node := fmt.Sprintf("server%d", 1+i)
		return []string{"ip", "netns", "exec", l.Prefix + node, b.check(), "--plugin", b.plugin()},
			[]string{"FARED_SLOTS=" + filepath.Join(l.Folder, node, "slots"), "FARED_NCCL_PORTS=4793-4793", "FARED_NCCL_STALL_MS=60000"}
	}, args...)
}

// TestFabric runs ring all-reduces over real sessions, weights and BPF steering, judged at the leaves: all planes carry
// the same, none of it takes the plane of a dead leaf, and all planes carry the same again once the leaf is back. The
// leaf dies and returns while a job runs, all of whose elements must be right.
func TestFabric(t *testing.T) {
	gate.Slow(t, gate.C, "jobs over a fabric with a leaf that fails")
	b := release(t)
	l := newLab(t)
	// judge runs a whole job, and compares what each leaf has received.
	judge := func(name string, carries ...float64) {
		t.Helper()
		before := l.Received(planes)
		finish(t, l.run(t, b, "--bytes", "8000000", "--iterations", "3"))
		after := l.Received(planes)
		total := 0.0
		for p := range planes {
			total += after[p] - before[p]
		}
		for p, want := range carries {
			share := 100 * (after[p] - before[p]) / total
			t.Logf("%s: plane %d carried %.2f %%", name, p, share)
			if math.Abs(share-want) > 2 || want == 0 && share > 0.1 {
				t.Errorf("%s: plane %d carried %.2f %%, want %.2f", name, p, share, want)
			}
		}
	}
	// meanwhile changes leaf1 during a job.
	meanwhile := func(state, weights string) {
		t.Helper()
		stop, args := until(t, "--bytes", "8000000")
		ranks := l.run(t, b, args...)
		awaitIteration(t, ranks, 2)
		l.SetLeaf("leaf1", state)
		l.awaitWeights(weights)
		awaitIteration(t, ranks, begun(ranks)+1) // the first iteration that begins after the change is over
		stop()
		finish(t, ranks)
	}
	l.awaitWeights("1:1:1:1")
	judge("all leaves", 25, 25, 25, 25)
	meanwhile("down", "1:0:1:1")
	judge("leaf1 is dead", 100.0/3, 0, 100.0/3, 100.0/3)
	meanwhile("up", "1:1:1:1")
	judge("leaf1 is back", 25, 25, 25, 25)
}
