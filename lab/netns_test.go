package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/netnstest"
	"github.com/fared/fared/topo"
)

// built is the fared that runs in namespaces, made once and removed by TestMain.
var built struct {
	once sync.Once
	dir  string
	err  error
}

func faredBinary(t *testing.T) string {
	t.Helper()
	built.once.Do(func() {
		if built.dir, built.err = os.MkdirTemp("", "fared-"); built.err != nil {
			return
		}
		cmd := exec.Command("go", "build", "-o", filepath.Join(built.dir, "fared"), "./cmd/fared")
		cmd.Dir = ".."
		if out, err := cmd.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("go build ./cmd/fared: %w\n%s", err, out)
		}
	})
	if built.err != nil {
		t.Fatal(built.err)
	}
	return filepath.Join(built.dir, "fared")
}

// smallest is the smallest fabric of namespaces in which halves of Y-cables can fail.
func smallest(t *testing.T, n Netns) Options {
	t.Helper()
	netnstest.Require(t, "tc", "go", filepath.Join(frrDir, "zebra"), filepath.Join(frrDir, "bgpd"), birdPath)
	n.Binary = faredBinary(t)
	ownFiles(t)
	return Options{Spec: topo.Spec{Planes: 2, Servers: 2}, Netns: &n}
}

// ownFiles gives the test a folder for temporary files that goes with it. When the test has failed, it shows the end of every log.
func ownFiles(t *testing.T) {
	t.Helper()
	dir := netnstest.Folder(t)
	t.Cleanup(func() {
		logs, _ := filepath.Glob(filepath.Join(dir, runDir+"*", "*", "*.log")) // none is as good as an error
		for _, log := range logs {
			if t.Failed() {
				t.Logf("%s ends with\n%s", log, lastLines(log, 10))
			}
		}
	})
}

// leftovers are namespaces, folders and processes of runs of this process.
func leftovers(t *testing.T) []string {
	t.Helper()
	run := fmt.Sprint(os.Getpid())
	var all []string
	for _, pattern := range []string{filepath.Join(netnsDir, "fared-"+run+"*-leaf*"), filepath.Join(netnsDir, "fared-"+run+"*-server*"), filepath.Join(os.TempDir(), runDir+run+"*"), pins(namespace("fared-" + run + "*-server*"))} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, found...)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(processes) == 0 {
		t.Fatalf("no processes: %v", err)
	}
	for _, file := range processes {
		line, _ := os.ReadFile(file) // one that has ended since is none
		if strings.Contains(string(line), filepath.Join(os.TempDir(), runDir+run)) {
			all = append(all, file+": "+strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return all
}

// TestNetnsScenarios: scenarios on small fabrics, with any leaf and either driver, one plane or two tiers high: after each step the weights are the
// model's, in the daemons and in the kernels' buckets, and packets took the planes by them, without a loss once nothing changed any
// more. (Containers play them all, containerlab.TestScenarios.)
func TestNetnsScenarios(t *testing.T) {
	for name, test := range map[string]struct {
		driver    string
		spec      topo.Spec
		scenarios []string // none: all
	}{
		"fared leaf, linux": {"linux", topo.Spec{Planes: 2, Servers: 2}, nil},
		"FRR leaf, auto":    {"auto", topo.Spec{Planes: 2, Servers: 2, Leaf: topo.FRR}, []string{"sub-cable", "port", "leaf", "two-planes", "recovery", "drain", "crash", "reboot"}},
		"BIRD leaf, linux":  {"linux", topo.Spec{Planes: 2, Servers: 2, Leaf: topo.BIRD}, []string{"sub-cable", "leaf", "crash"}},
		"per-packet":        {"bpf", topo.Spec{Planes: 2, Servers: 2, Mode: "per-packet", GPUs: 2}, []string{"sub-cable", "port", "leaf", "drain", "crash"}},
		"two-tier":          {"linux", topo.Spec{Planes: 2, Servers: 4, Leaves: 2, Spines: 2, Spine: topo.FRR}, []string{"sub-cable", "leaf", "maintenance", "reboot"}},
		"FRR leaf, BFD":     {"linux", topo.Spec{Planes: 2, Servers: 2, Leaf: topo.FRR, BFD: 300 * time.Millisecond}, []string{"sub-cable", "frozen", "blackhole", "leaf"}},
		"dual-leaf":         {"linux", topo.Spec{Planes: 2, Servers: 3, Leaves: 2}, []string{"sub-cable", "leaf", "flap"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := smallest(t, Netns{Driver: test.driver})
			o.Spec = test.spec
			var told []string
			o.Netns.Progress = func(text string) { told = append(told, text) }
			f := fabric(t, o)
			if len(told) < 3 || !strings.HasSuffix(told[0], fmt.Sprintf(" network namespaces, %d cables", f.Sessions())) || !strings.HasSuffix(told[len(told)-1], " BGP sessions") {
				t.Errorf("the start says %q", told)
			}
			scenarios, err := Load("all", o)
			if err != nil {
				t.Fatal(err)
			}
			if test.scenarios != nil {
				scenarios = slices.DeleteFunc(scenarios, func(s *Scenario) bool { return !slices.Contains(test.scenarios, s.Name) })
				if len(scenarios) != len(test.scenarios) {
					t.Fatalf("%d scenarios of %q", len(scenarios), test.scenarios)
				}
			}
			for _, s := range scenarios {
				results, _ := play(t, f, s)
				for _, r := range results {
					if !r.OK || r.SlotsMoved != 0 {
						t.Errorf("%s: %s: %d slots moved, %q", s.Name, r.Step, r.SlotsMoved, r.Wrong)
					}
					if tr := r.Traffic; tr != nil {
						t.Logf("%s: %s: %v, %d packets, %d lost, %d and %d of them steady", s.Name, r.Step, time.Duration(r.ElapsedNS), tr.Sent, tr.Lost, tr.SteadySent, tr.SteadyLost)
					}
					reachable := false
					for _, w := range r.Weights {
						reachable = reachable || w > 0
					}
					// What a server with a dead control plane still sends to one that its leaves have forgotten is lost, rightly.
					if tr := r.Traffic; tr == nil || tr.Sent == 0 && reachable || reachable && tr.SteadySent == 0 || tr.SteadyLost > 0 && s.Name != "crash" {
						t.Errorf("%s: %s: traffic %+v", s.Name, r.Step, r.Traffic)
					}
				}
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
			if left := leftovers(t); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// TestNetnsProcessDies: the end of a node's process fails the lab with its last lines; its logs stay.
func TestNetnsProcessDies(t *testing.T) {
	f, err := Start(t.Context(), smallest(t, Netns{}), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	b := f.backend.(*netns)
	b.mu.Lock()
	victim := b.processes[b.Server[1]][0]
	b.mu.Unlock()
	if err := victim.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-victim.done
	_, err = f.Run(t.Context(), script(t, "step nothing\n"), func(Result) {})
	err = errors.Join(err, f.Close())
	if err == nil || !strings.Contains(err.Error(), "server2: dataplane ended by itself (signal: killed); its last lines in "+victim.log) {
		t.Errorf("%v", err)
	}
	dir := f.Logs()
	if _, err := os.Stat(filepath.Join(dir, "server2", "run.log")); dir == "" || err != nil {
		t.Errorf("logs in %q: %v", dir, err)
	}
	if left := leftovers(t); !slices.Equal(left, []string{dir}) {
		t.Errorf("left behind: %q", left)
	}
}

// TestNetnsDoesNotStart: a program that is not fared ends the start, and says so.
func TestNetnsDoesNotStart(t *testing.T) {
	netnstest.Require(t, "tc", "false")
	ownFiles(t)
	f, err := Start(t.Context(), Options{Spec: topo.Spec{Planes: 1, Servers: 2, SubPorts: 1}, Netns: &Netns{Binary: "false"}}, slog.New(slog.DiscardHandler))
	if f != nil || err == nil || !strings.Contains(err.Error(), "ended by itself (exit status 1)") {
		t.Fatalf("%v, %v", f, err)
	}
	_, dir, _ := strings.Cut(err.Error(), "logs and configurations of all processes are kept in ")
	if left := leftovers(t); !slices.Equal(left, []string{dir}) {
		t.Errorf("left behind: %q, logs in %q", left, dir)
	}
}

// TestNetnsInterrupted: an interrupt during the start leaves nothing.
func TestNetnsInterrupted(t *testing.T) {
	o := smallest(t, Netns{})
	ctx, cancel := context.WithCancel(t.Context())
	o.Netns.Progress = func(text string) {
		if strings.HasPrefix(text, "starting") {
			cancel()
		}
	}
	if f, err := Start(ctx, o, slog.New(slog.DiscardHandler)); f != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("%v, %v", f, err)
	}
	if left := leftovers(t); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestNetnsLeave: a fabric that is left goes on, and Cleanup ends it, but not one that is in use.
func TestNetnsLeave(t *testing.T) {
	o := smallest(t, Netns{})
	left, err := Start(t.Context(), o, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	b := left.backend.(*netns)
	lines, err := left.Leave()
	if err != nil || len(lines) == 0 || !strings.Contains(strings.Join(lines, "\n"), "fared lab --netns --cleanup") {
		t.Errorf("%q, %v", lines, err)
	}
	used := fabric(t, Options{Spec: topo.Spec{Planes: 1, Servers: 2, SubPorts: 1}, Netns: o.Netns})
	out, err := exec.Command(b.Netns.Binary, "--socket", b.socket("server1"), "weights").Output()
	if err != nil || !strings.Contains(string(out), "10.255.0.2") {
		t.Errorf("the fabric that was left answers %q, %v", out, err)
	}
	removed, err := Cleanup(t.Context())
	want := []string{b.dir}
	for _, ns := range b.made {
		want = append(want, string(ns))
	}
	for _, name := range want {
		if !slices.Contains(removed, name) { // beside what others have left
			t.Errorf("removed %q, %v, not %s", removed, err, name)
		}
	}
	if results, ok := play(t, used, script(t, "step still there\n expect * -> * 1\n")); !ok {
		t.Errorf("the fabric in use: %q", results[0].Wrong)
	}
	if err := used.Close(); err != nil {
		t.Error(err)
	}
	if left := leftovers(t); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestPacketsAreTheJudge: what tables say is not believed when packets do otherwise: a leaf that loses them is found although
// every weight is right, and so is a server that sends by other shares.
func TestPacketsAreTheJudge(t *testing.T) {
	f := fabric(t, smallest(t, Netns{}))
	b := f.backend.(*netns)
	leaf := b.namespace("leaf1")
	if err := leaf.batch(t.Context(), "ip", []string{"route prepend blackhole 10.255.0.2/32"}); err != nil {
		t.Fatal(err)
	}
	results, ok := play(t, f, script(t, "step a leaf that drops\n"))
	if r := results[0]; ok || len(r.Wrong) != 1 || !strings.HasPrefix(r.Wrong[0], "server1 -> server2: ") || !strings.Contains(r.Wrong[0], "packets were lost while nothing changed") ||
		r.Traffic.SteadyLost == 0 || r.Traffic.SteadyLost >= r.Traffic.SteadySent {
		t.Errorf("%q, %+v", r.Wrong, r.Traffic)
	}
	if err := leaf.batch(t.Context(), "ip", []string{"route del blackhole 10.255.0.2/32"}); err != nil {
		t.Fatal(err)
	}
	if results, ok := play(t, f, script(t, "step it is mended\n")); !ok {
		t.Errorf("%q", results[0].Wrong)
	}
	o := b.flow.senders[0]
	o.mu.Lock()
	for _, out := range o.order {
		for i := range out.slots {
			if out.slots[i].lane.plane == 0 {
				out.slots[i].share *= 3
			}
		}
	}
	o.mu.Unlock()
	results, ok = play(t, f, script(t, "step a server that sends by other shares\n"))
	if r := results[0]; ok || len(r.Wrong) != 2 || !strings.Contains(r.Wrong[0], "packets took p0, by the weights 1:1 it is") {
		t.Errorf("%q, %+v", r.Wrong, r.Traffic)
	}
}

// TestKernelIsRead: buckets that are not by the weights are found: one more or less is none.
func TestKernelIsRead(t *testing.T) {
	nexthops := []kernelNexthop{{ID: 1, Dev: "p0.0"}, {ID: 2, Dev: "p0.0"}, {ID: 3, Dev: "p1.0"}, {ID: 9, Blackhole: &struct{}{}}}
	routes := []kernelRoute{{Dst: "10.255.0.2", NHID: 10}, {Dst: "10.255.0.3", Type: "blackhole"}, {Dst: "10.255.0.4", NHID: 9}, {Dst: "10.255.0.5", NHID: 1}}
	var buckets []kernelBucket
	for _, id := range []int{1, 2, 1, 2, 1, 2, 3, 3, 3, 3} {
		b := kernelBucket{ID: 10}
		b.Bucket.NHID = id
		buckets = append(buckets, b)
	}
	table := newKernelTable(routes, nexthops, buckets)
	for _, test := range []struct {
		dst     string
		weights map[string]uint64
		want    string
	}{
		{"10.255.0.2", map[string]uint64{"p0.0": 6, "p1.0": 4}, ""},
		{"10.255.0.2", map[string]uint64{"p0.0": 1, "p1.0": 1}, ""},
		{"10.255.0.2", map[string]uint64{"p0.0": 3, "p1.0": 1}, "the kernel gives p0.0 6 of 10 buckets, should give 7.5"},
		{"10.255.0.2", map[string]uint64{"p0.0": 1}, "the kernel gives p0.0 6 of 10 buckets, should give 10.0"},
		{"10.255.0.2", map[string]uint64{"p0.0": 6, "p1.0": 4, "p2.0": 5}, "the kernel gives p0.0 6 of 10 buckets, should give 4.0"},
		{"10.255.0.2", nil, "the kernel has a route, over nexthop 10, to what is unreachable"},
		{"10.255.0.3", nil, ""},
		{"10.255.0.4", nil, ""},
		{"10.255.0.9", nil, ""},
		{"10.255.0.9", map[string]uint64{"p0.0": 1}, "the kernel has no route"},
		{"10.255.0.3", map[string]uint64{"p0.0": 1}, "the kernel has no route"},
		{"10.255.0.5", map[string]uint64{"p0.0": 1}, "the kernel's nexthop 1 is no resilient group"},
	} {
		if got := table.check(netip.MustParseAddr(test.dst), test.weights); got != test.want {
			t.Errorf("%s by %v: %q, want %q", test.dst, test.weights, got, test.want)
		}
	}
}

func TestSubPortWeights(t *testing.T) {
	plane := func(weight uint32, subs ...uint32) *farev1.PlaneWeight {
		p := &farev1.PlaneWeight{Weight: weight}
		for i, w := range subs {
			p.SubPorts = append(p.SubPorts, &farev1.SubPortWeight{Device: fmt.Sprintf("w%d.%d", weight, i), Weight: w})
		}
		return p
	}
	d := &farev1.DestinationWeights{Reachable: true, Planes: []*farev1.PlaneWeight{plane(2, 1, 1), plane(1, 1), plane(3, 1, 2), plane(0, 1)}}
	got := fmt.Sprint(subPortWeights(d))
	if want := "map[w1.0:6 w2.0:6 w2.1:6 w3.0:6 w3.1:12]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	d.Reachable = false
	if got := subPortWeights(d); got != nil {
		t.Errorf("unreachable: %v", got)
	}
}

// TestSlotsTakeTurns: slots send as their shares are, evenly at any moment.
func TestSlotsTakeTurns(t *testing.T) {
	shares := []int64{285714286, 285714286, 142857142, 285714286}
	o := outlet{}
	for _, s := range shares {
		o.slots = append(o.slots, flow{share: s})
	}
	counts := make([]int, len(shares))
	for n := 1; n <= 7000; n++ {
		before := make([]int64, len(shares))
		for i := range o.slots {
			before[i] = o.slots[i].credit + o.slots[i].share
		}
		o.next()
		for i := range o.slots {
			if o.slots[i].credit < before[i] {
				counts[i]++
			}
			if want := float64(n) * float64(shares[i]) / 1e9; float64(counts[i]) < want-1.001 || float64(counts[i]) > want+1.001 {
				t.Fatalf("after %d packets slot %d has sent %d, its share is %.1f", n, i, counts[i], want)
			}
		}
	}
}

func TestReceivedPackets(t *testing.T) {
	const text = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    1000      77    0    0    0     0          0         0     1000      77    0    0    0     0       0          0
  s1.0:   14900     100    0    0    0     0          0         0    25130     217    0    0    0     0       0          0
  up0:   24500     160    0    0    0     0          0         0    25130     217    0    0    0     0       0          0
  s2.0:123456789    23    0    0    0     0          0         0    25130     217    0    0    0     0       0          0
`
	if got := receivedPackets([]byte(text), []string{"s1.0", "s2.0"}); got != 123 {
		t.Errorf("%d packets, want 123", got)
	}
}

func TestFailedLine(t *testing.T) {
	if got := failedLine("link set a up\nlink set b up\n", "Cannot find device \"b\"\nCommand failed -:2\n"); !strings.HasSuffix(got, "(link set b up)") {
		t.Errorf("%q", got)
	}
	if got := failedLine("x\n", "no such thing\n"); got != "no such thing" {
		t.Errorf("%q", got)
	}
}

// TestRunsAreTold: which namespaces are a lab's, and when their lab is gone.
func TestRunsAreTold(t *testing.T) {
	for name, run := range map[string]string{"fared-12-server1": "12", "fared-12_3-leaf0": "12_3", "fared-12-3": "", "fared-x-server1": "", "fared-12-server1x": "", "clab-12-server1": ""} {
		got := ""
		if m := nodeNamespace.FindStringSubmatch(name); m != nil {
			got = m[1]
		}
		if got != run {
			t.Errorf("%s is of run %q, want %q", name, got, run)
		}
	}
	ownFiles(t)
	dir, lock, err := newRun()
	if err != nil {
		t.Fatal(err)
	}
	run := strings.TrimPrefix(filepath.Base(dir), runDir)
	if abandoned(run) {
		t.Error("a run whose lock is held counts as abandoned")
	}
	lock.Close()
	if !abandoned(run) {
		t.Error("a run whose lock nobody holds does not count as abandoned")
	}
	if !abandoned("4194305") { // above the largest process id
		t.Error("a run whose process is gone does not count as abandoned")
	}
	if abandoned("1") {
		t.Error("a process without a lock counts as gone")
	}
}

// TestNetnsOptions: what a fabric of namespaces cannot be is refused with the flag.
func TestNetnsOptions(t *testing.T) {
	for want, o := range map[string]Options{
		`--leaf: "cisco" is not known; use fared, frr, bird`:                                                        {Spec: topo.Spec{Leaf: "cisco"}, Netns: &Netns{}},
		`--driver "dpdk" is not known: use auto, linux, bpf`:                                                        {Netns: &Netns{Driver: "dpdk"}},
		"--mode per-packet with --driver linux: the kernel's nexthop groups do not spray packets, use --driver bpf": {Spec: topo.Spec{Mode: "per-packet"}, Netns: &Netns{Driver: "linux"}},
		"--rate 1000000: not within 0 to 200000":                                                                    {Netns: &Netns{Rate: 1e6}},
		"--planes 4, --servers 200 and --sub-ports 2: 1600 cables, more than the 1024 of a fabric of namespaces":    {Spec: topo.Spec{Servers: 200}, Netns: &Netns{}},
		"--speed 100M: below 1G, a cable would be too slow for its BGP session":                                     {Spec: topo.Spec{Speed: 100e6}, Netns: &Netns{}},
	} {
		if _, err := Configs(o); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	files, err := Configs(Options{Netns: &Netns{}})
	if err != nil || len(files) != 8 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		if err := checkConfig(file); err != nil {
			t.Errorf("%s: %v\n%s", file.Name, err, file.Text)
		}
	}
}
