package nccl

import (
	"bytes"
	"fmt"
	"math"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/internal/netnstest"
	"github.com/fared/fared/internal/testkit/binary"
)

// lab is a running fabric of fared: four planes, four servers, steered by BPF.
type lab struct {
	binary, folder, prefix string
}

// newLab starts a fabric that stays until the test ends.
func newLab(t testing.TB) *lab {
	t.Helper()
	netnstest.Require(t, "ip", "tc")
	netnstest.KeepsLabs(t)
	l := &lab{binary: binary.Fared(t)}
	var out bytes.Buffer
	cmd := exec.Command(l.binary, "lab", "--netns", "--servers", fmt.Sprint(servers), "--sub-ports", "1", "--scenario", "none", "--driver", "bpf", "--rate", "0", "--keep")
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	l.prefix = fmt.Sprintf("fared-%d-", cmd.Process.Pid)
	err := cmd.Wait()
	t.Cleanup(func() {
		if out, err := exec.Command(l.binary, "lab", "--netns", "--cleanup").CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
	})
	m := regexp.MustCompile(`logs are in (\S+)`).FindStringSubmatch(out.String())
	if err != nil || m == nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	l.folder = m[1]
	return l
}

func (l *lab) ip(t testing.TB, node string, args ...string) string {
	t.Helper()
	return netnstest.IP(t, append([]string{"-n", l.prefix + node}, args...)...)
}

// setLeaf sets all devices of a leaf up or down.
func (l *lab) setLeaf(t testing.TB, leaf, state string) {
	t.Helper()
	for line := range strings.Lines(l.ip(t, leaf, "-br", "link")) {
		if device, _, _ := strings.Cut(strings.Fields(line)[0], "@"); device != "lo" {
			l.ip(t, leaf, "link", "set", device, state)
		}
	}
}

// awaitWeights waits until every server forwards by the weights.
func (l *lab) awaitWeights(t testing.TB, weights string) {
	t.Helper()
	netnstest.Eventually(t, time.Minute, func() error {
		for i := range servers {
			out, err := exec.Command(l.binary, "--socket", filepath.Join(l.folder, fmt.Sprintf("server%d", 1+i), "fared.sock"), "weights").CombinedOutput()
			if n := strings.Count(string(out), " "+weights+" "); err != nil || n != servers-1 || strings.Count(string(out), "in effect") != servers-1 {
				return fmt.Errorf("server%d: %v\n%s", 1+i, err, out)
			}
		}
		return nil
	})
}

// received returns the bytes that have arrived at each leaf.
func (l *lab) received(t testing.TB) (sums [planes]float64) {
	t.Helper()
	for p := range planes {
		out, err := netnstest.Named(t, fmt.Sprint(l.prefix, "leaf", p)).Output("cat", "/proc/net/dev")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(out)) {
			device, counters, found := strings.Cut(strings.TrimSpace(line), ":")
			if !found || device == "lo" {
				continue
			}
			n, err := strconv.ParseFloat(strings.Fields(counters)[0], 64)
			if err != nil {
				t.Fatal(err)
			}
			sums[p] += n
		}
	}
	return sums
}

// run starts a rank on each server. The fabric steers TCP port 4793 alone, which suffices for one receiving communicator of each server.
func (l *lab) run(t testing.TB, b built, args ...string) []*rank {
	t.Helper()
	return start(t, servers, func(i int) ([]string, []string) {
		node := fmt.Sprintf("server%d", 1+i)
		return []string{"ip", "netns", "exec", l.prefix + node, b.check(), "--plugin", b.plugin()},
			[]string{"FARED_SLOTS=" + filepath.Join(l.folder, node, "slots"), "FARED_NCCL_PORTS=4793-4793", "FARED_NCCL_STALL_MS=60000"}
	}, args...)
}

// TestFabric runs ring all-reduces over real sessions, weights and BPF steering, judged at the leaves: all planes carry the same, none of it takes the plane of
// a dead leaf, and all planes carry the same again once the leaf is back. The leaf dies and returns while a job runs, all of whose elements must be right.
func TestFabric(t *testing.T) {
	b := release(t)
	l := newLab(t)
	// judge runs a whole job, and compares what each leaf has received.
	judge := func(name string, carries ...float64) {
		t.Helper()
		before := l.received(t)
		finish(t, l.run(t, b, "--bytes", "8000000", "--iterations", "3"))
		after := l.received(t)
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
		l.setLeaf(t, "leaf1", state)
		l.awaitWeights(t, weights)
		awaitIteration(t, ranks, begun(ranks)+1) // the first iteration that begins after the change is over
		stop()
		finish(t, ranks)
	}
	l.awaitWeights(t, "1:1:1:1")
	judge("all leaves", 25, 25, 25, 25)
	meanwhile("down", "1:0:1:1")
	judge("leaf1 is dead", 100.0/3, 0, 100.0/3, 100.0/3)
	meanwhile("up", "1:1:1:1")
	judge("leaf1 is back", 25, 25, 25, 25)
}
