package nccl

import (
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netnstest"
)

// lab is a running fabric of fared: four planes, four servers, steered by BPF.
type lab struct {
	binary, folder, prefix string
}

// newLab starts a fabric that stays until the test ends.
func newLab(t testing.TB) *lab {
	t.Helper()
	netnstest.Require(t, "ip", "tc")
	l := &lab{binary: filepath.Join(t.TempDir(), "fared")}
	if out, err := exec.Command("go", "build", "-o", l.binary, "github.com/fared/fared/cmd/fared").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
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

// still returns the bytes that have arrived at each leaf while the ranks are stopped and nothing is in flight, so that all leaves are read at the same moment.
func (l *lab) still(t testing.TB, ranks []*rank) (sums [planes]float64) {
	t.Helper()
	for _, s := range []unix.Signal{unix.SIGSTOP, unix.SIGCONT} {
		for _, r := range ranks {
			if err := r.cmd.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
		}
		if s == unix.SIGCONT {
			break
		}
		last := l.received(t)
		netnstest.Eventually(t, time.Minute, func() error {
			time.Sleep(300 * time.Millisecond) // above TCP's least retransmission timeout
			previous := last
			last = l.received(t)
			for p := range planes {
				// BGP and BFD send some bytes all the time.
				if last[p] > previous[p]+5000 {
					return fmt.Errorf("%.0f bytes arrive at leaf%d still", last[p]-previous[p], p)
				}
			}
			return nil
		})
		sums = last
	}
	return sums
}

// TestFabric runs ring all-reduces over real sessions, weights and BPF steering, judged at the leaves: all planes carry the same, none of it takes the plane of
// a dead leaf, and all planes carry the same again once the leaf is back.
func TestFabric(t *testing.T) {
	b := release(t)
	l := newLab(t)
	ranks := start(t, servers, func(i int) ([]string, []string) {
		node := fmt.Sprintf("server%d", 1+i)
		return []string{"ip", "netns", "exec", l.prefix + node, b.check(), "--plugin", b.plugin()},
			// The fabric steers TCP port 4793 alone, which suffices for one receiving communicator of each server.
			[]string{"FARED_SLOTS=" + filepath.Join(l.folder, node, "slots"), "FARED_NCCL_PORTS=4793-4793", "FARED_NCCL_STALL_MS=60000"}
	}, "--bytes", "8000000", "--seconds", "3600", "--timeout", "120")
	// Each phase begins with bytes that have arrived after its weights are in effect, and lasts 100 MB.
	phase := func(name string, carries [planes]bool) {
		t.Helper()
		before := l.still(t, ranks)
		var after [planes]float64
		var total float64
		netnstest.Eventually(t, 2*time.Minute, func() error {
			if ended(ranks) {
				t.Fatalf("%s: a rank has ended:\n%s", name, ranks[0].out.String())
			}
			time.Sleep(time.Second)
			after, total = l.still(t, ranks), 0
			for p := range planes {
				total += after[p] - before[p]
			}
			if total < 100e6 {
				return fmt.Errorf("%s: %.0f bytes have arrived", name, total)
			}
			return nil
		})
		n := 0.0
		for _, c := range carries {
			if c {
				n++
			}
		}
		for p, c := range carries {
			share := 100 * (after[p] - before[p]) / total
			t.Logf("%s: plane %d carried %.2f %%", name, p, share)
			if want := 100 / n; c && (share < want-2 || share > want+2) || !c && share > 0.1 {
				t.Errorf("%s: plane %d carried %.2f %%", name, p, share)
			}
		}
	}
	l.awaitWeights(t, "1:1:1:1")
	phase("all leaves", [planes]bool{true, true, true, true})
	l.setLeaf(t, "leaf1", "down")
	l.awaitWeights(t, "1:0:1:1")
	phase("leaf1 is dead", [planes]bool{true, false, true, true})
	l.setLeaf(t, "leaf1", "up")
	l.awaitWeights(t, "1:1:1:1")
	phase("leaf1 is back", [planes]bool{true, true, true, true})
	for _, r := range ranks {
		if strings.Contains(r.out.String(), "element") {
			t.Errorf("a wrong element:\n%s", r.out.String())
		}
	}
}
