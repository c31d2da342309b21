package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// smallest returns the smallest fabric of namespaces in which halves of Y-cables can fail.
func smallest(t *testing.T, n backend.Netns) Options {
	t.Helper()
	netnstest.Require(t, "tc", "go", "/usr/lib/frr/zebra", "/usr/lib/frr/bgpd", "/usr/sbin/bird")
	n.Binary = binary.Fared(t)
	ownFiles(t)
	return Options{Spec: topo.Spec{Planes: 2, Servers: 2}, Netns: &n, Quick: true}
}

// ownFiles gives the test a separate folder for temporary files, which is removed with it. If the test has failed, it
// shows the end of every log.
func ownFiles(t testing.TB) {
	t.Helper()
	dir := netnstest.Folder(t)
	t.Cleanup(func() {
		logs, _ := filepath.Glob(filepath.Join(dir, "fared-lab-*", "*", "*.log")) // no match is as good as an error
		for _, log := range logs {
			if t.Failed() {
				t.Logf("%s ends with\n%s", log, tail(log))
			}
		}
	})
}

// tail returns the end of a file.
func tail(file string) string {
	text, _ := os.ReadFile(file) // a file that cannot be read is shown as empty
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-10):], "\n")
}

// ip runs ip in a node's namespace.
func ip(t *testing.T, f *Fabric, node, line string) {
	t.Helper()
	args := append([]string{"-n", string(f.plan.Namespace(node))}, strings.Fields(line)...)
	if out, err := exec.CommandContext(t.Context(), "ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %q: %v\n%s", args, err, out)
	}
}

// killAll kills the processes of a node whose first argument is command, or all for "", and waits until they are gone.
func killAll(t *testing.T, f *Fabric, n *topo.Node, command string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "ip", "netns", "pids", string(f.plan.Namespace(n.Name))).Output()
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	for _, pid := range strings.Fields(string(out)) {
		line, _ := os.ReadFile(filepath.Join("/proc", pid, "cmdline")) // a process that has ended reads as empty
		if args := strings.Split(string(line), "\x00"); len(args) < 2 || command != "" && !slices.Contains(args, command) {
			continue
		}
		number, err := strconv.Atoi(pid)
		if err != nil || number == os.Getpid() {
			t.Fatalf("process %q of %s: %v", pid, n.Name, err)
		}
		if err := syscall.Kill(number, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		killed++
		netnstest.Eventually(t, time.Minute, func() error {
			if _, err := os.Stat(filepath.Join("/proc", pid)); err == nil {
				return fmt.Errorf("process %s of %s has not ended", pid, n.Name)
			}
			return nil
		})
	}
	if killed == 0 {
		t.Fatalf("%s has no process %q", n.Name, command)
	}
}

// leftovers returns namespaces, folders and processes of this process's runs.
func leftovers(t testing.TB) []string {
	t.Helper()
	run := fmt.Sprint(os.Getpid())
	var all []string
	for _, pattern := range []string{"/run/netns/fared-" + run + "*-leaf*", "/run/netns/fared-" + run + "*-server*", filepath.Join(os.TempDir(), "fared-lab-"+run+"*"), "/sys/fs/bpf/fared-" + run + "*-server*"} {
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
		line, _ := os.ReadFile(file) // a process that has ended since reads as empty
		if strings.Contains(string(line), filepath.Join(os.TempDir(), "fared-lab-"+run)) {
			all = append(all, file+": "+strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return all
}

// TestNetnsScenarios plays scenarios on small fabrics, with each leaf software and either driver, in one tier or two;
// the gate plays one fabric. After each step the weights are the model's, in the daemons and in the kernels' buckets,
// and packets use the planes by them, without a loss once the changes are complete. (containerlab.TestScenarios plays
// all scenarios in containers.)
func TestNetnsScenarios(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives other processes")
	gate.Needed(t, "processes, kernels and packets agree with the model")
	for name, test := range map[string]struct {
		driver    string
		spec      topo.Spec
		scenarios []string // nil means all
	}{
		"fared leaf, linux": {"linux", topo.Spec{Planes: 2, Servers: 2}, nil},
		"FRR leaf, auto":    {"auto", topo.Spec{Planes: 2, Servers: 2, Leaf: topo.FRR, RestartTime: 10 * time.Minute}, []string{"sub-cable", "port", "leaf", "two-planes", "recovery", "drain", "crash", "reboot"}},
		"BIRD leaf, linux":  {"linux", topo.Spec{Planes: 2, Servers: 2, Leaf: topo.BIRD, RestartTime: 10 * time.Minute}, []string{"sub-cable", "leaf", "crash"}},
		"per-packet":        {"bpf", topo.Spec{Planes: 2, Servers: 2, Mode: "per-packet", GPUs: 2}, []string{"sub-cable", "port", "leaf", "drain", "crash"}},
		"two-tier":          {"linux", topo.Spec{Planes: 2, Servers: 4, Leaves: 2, Spines: 2, Spine: topo.FRR}, []string{"sub-cable", "leaf", "maintenance", "reboot"}},
		"FRR leaf, BFD":     {"linux", topo.Spec{Planes: 2, Servers: 2, Leaf: topo.FRR, Speed: 1.6e12, SubPorts: 4, BFD: 300 * time.Millisecond}, []string{"sub-cable", "frozen", "blackhole", "leaf"}},
		"dual-leaf":         {"linux", topo.Spec{Planes: 2, Servers: 3, Leaves: 2, Speed: 800e9, SubPorts: 3}, []string{"sub-cable", "leaf", "flap"}},
		"own ports":         {"linux", topo.Spec{Planes: 2, Servers: 2, GPUs: 2, GPUPorts: topo.Own}, []string{"gpu", "sub-cable", "crash"}},
		"own ports, bpf":    {"bpf", topo.Spec{Planes: 2, Servers: 2, GPUs: 2, GPUPorts: topo.Own, Leaf: topo.FRR, SharedAS: topo.SharedServers}, []string{"gpu", "leaf"}},
	} {
		t.Run(name, func(t *testing.T) {
			if name != "BIRD leaf, linux" {
				gate.Slow(t, gate.Labs, "scenarios with another leaf, driver or kind of fabric")
			}
			o := smallest(t, backend.Netns{Driver: test.driver})
			o.Spec, o.Quick = test.spec, false
			var progress []string
			o.Netns.Progress = func(text string) { progress = append(progress, text) }
			f := fabric(t, o)
			if len(progress) < 3 || !strings.HasSuffix(progress[0], fmt.Sprintf(" network namespaces, %d cables", f.Sessions())) || !strings.HasSuffix(progress[len(progress)-1], " BGP sessions") {
				t.Errorf("the start reports %q", progress)
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
			if gate.Count(t, gate.Labs, 0, 1) == 0 { // TestTransferInScenarios plays crashes
				scenarios = slices.DeleteFunc(scenarios, func(s *Scenario) bool { return s.Name == "crash" })
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
					// Packets of a server with a dead control plane toward one that its leaves have forgotten are lost,
					// as expected.
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

// TestNetnsDefaults verifies that with fared's defaults, a restart time behind leaves that keep routes, and without the
// settings that labs shorten, leaves of every kind end their initial updates with End-of-RIB, so that servers converge
// without waiting for start.deadline, and that failures take effect.
func TestNetnsDefaults(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives other processes")
	for _, leaf := range []string{topo.Fared, topo.FRR, topo.BIRD} {
		t.Run(leaf, func(t *testing.T) {
			if leaf != topo.FRR {
				gate.Slow(t, gate.Labs, "a fabric of another leaf")
			}
			o := smallest(t, backend.Netns{Driver: "linux"})
			o.Leaf, o.Quick = leaf, false
			f := fabric(t, o) // it is up once every session has received End-of-RIB
			for _, n := range f.Server {
				file := f.Files(n, f.plan.Site)[0].Text
				for _, key := range []string{"deadline", "drain_delay", "connect_retry", "hold_time"} {
					if strings.Contains(file, key) {
						t.Errorf("%s sets %s:\n%s", n.Name, key, file)
					}
				}
				if strings.Contains(file, "restart_time: 1m0s") != (leaf != topo.Fared) {
					t.Errorf("%s behind %s:\n%s", n.Name, leaf, file)
				}
				status, err := f.backend.API(n).GetStatus(t.Context(), &farev1.GetStatusRequest{})
				if err != nil || !status.Converged {
					t.Errorf("%s has not converged: %v, %v", n.Name, status, err)
				}
			}
			steps := "step half a Y-cable\n cut server2 p1.0\n expect server1 -> server2 2:1\n moved 0\nstep it returns\n mend server2 p1.0\n expect * -> * 1:1\n" +
				"step a leaf fails\n kill leaf0\n expect * -> * 0:1\nstep it returns\n restart leaf0\n expect * -> * 1:1\n moved 0\n"
			results, _ := play(t, f, script(t, steps))
			for _, r := range results {
				if t.Logf("%s: %v", r.Step, time.Duration(r.ElapsedNS)); !r.OK {
					t.Errorf("%s: %q", r.Step, r.Wrong)
				}
			}
		})
	}
}

// TestNetnsRestartWithADeadLeaf verifies the start of a server's control plane while a leaf is dead whose cables have a
// carrier, and a cable fails in another plane. If the leaf was dead before, the start ends without it. If it dies
// meanwhile, the failure is in effect long before the deadline.
func TestNetnsRestartWithADeadLeaf(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives other processes")
	gate.Slow(t, gate.Labs, "waits for a hold time and for start.deadline; daemon.TestStartWithADeadLeaf is in the gate")
	const late = "not every session has sent End-of-RIB"
	for name, test := range map[string]struct {
		steps    string
		deadline bool
	}{
		"dead before": {"step a leaf dies\n freeze leaf2\nstep a crash\n crash server1 fared\nstep a start and a failure\n revive server1 fared\n cut server2 p1\n expect server1 -> server2 1:0:0\n", false},
		"dead since":  {"step a crash, and a leaf dies\n crash server1 fared\n freeze leaf2\nstep a start and a failure\n revive server1 fared\n cut server2 p1\n expect server1 -> server2 1:0:0\n", true},
	} {
		t.Run(name, func(t *testing.T) {
			o := smallest(t, backend.Netns{Driver: "linux"})
			o.Planes = 3
			f := fabric(t, o)
			results, _ := play(t, f, script(t, test.steps))
			for _, r := range results {
				if !r.OK || r.Traffic == nil {
					t.Fatalf("%s: %q, traffic %+v", r.Step, r.Wrong, r.Traffic)
				}
				t.Logf("%s: %v, %d packets, %d lost", r.Step, time.Duration(r.ElapsedNS), r.Traffic.Sent, r.Traffic.Lost)
			}
			log, err := os.ReadFile(filepath.Join(f.plan.Dir, "server1", "run.log"))
			if err != nil || strings.Contains(string(log), late) != test.deadline {
				t.Errorf("the start ends at the deadline: %v, want %v (%v)", strings.Contains(string(log), late), test.deadline, err)
			}
			// A black hole of a plane of three until the deadline takes a sixth of all packets.
			if tr := results[len(results)-1].Traffic; test.deadline && tr.Lost > tr.Sent/20 {
				t.Errorf("%d of %d packets are lost", tr.Lost, tr.Sent)
			}
		})
	}
}

// TestNetnsProcessDies verifies that the exit of a node's process fails the lab with its last lines, and that its logs
// remain.
func TestNetnsProcessDies(t *testing.T) {
	f, err := Start(t.Context(), smallest(t, backend.Netns{}), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	killAll(t, f, f.Server[1], "dataplane")
	// A display goes on although the daemon that it queries has ended.
	killAll(t, f, f.Server[0], "")
	drawn := make(chan Picture)
	go func() {
		f.Picture(&Step{}) // may still use the connection, which fails at once
		drawn <- f.Picture(&Step{})
	}()
	select {
	case p := <-drawn:
		if p.Source != "server1" || p.Weights != nil {
			t.Errorf("with a dead daemon: %+v", p)
		}
	case <-time.After(time.Minute):
		t.Error("a picture waits for a daemon that has ended")
	}
	_, err = f.Run(t.Context(), script(t, "step nothing\n"), func(Result) {})
	err = errors.Join(err, f.Close())
	if err == nil || !strings.Contains(err.Error(), " ended unexpectedly (signal: killed); its last lines in ") {
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

// TestNetnsDoesNotStart verifies that a binary that is not fared fails the start with an error.
func TestNetnsDoesNotStart(t *testing.T) {
	netnstest.Require(t, "tc", "false")
	ownFiles(t)
	f, err := Start(t.Context(), Options{Spec: topo.Spec{Planes: 1, Servers: 2, SubPorts: 1}, Netns: &backend.Netns{Binary: "false"}}, slog.New(slog.DiscardHandler))
	if f != nil || err == nil || !strings.Contains(err.Error(), "ended unexpectedly (exit status 1)") {
		t.Fatalf("%v, %v", f, err)
	}
	_, dir, _ := strings.Cut(err.Error(), "logs and configurations of all processes are kept in ")
	if left := leftovers(t); !slices.Equal(left, []string{dir}) {
		t.Errorf("left behind: %q, logs in %q", left, dir)
	}
}

// TestNetnsInterrupted verifies that an interrupt during the start leaves nothing behind.
func TestNetnsInterrupted(t *testing.T) {
	o := smallest(t, backend.Netns{})
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

// TestNetnsLeave verifies that a fabric continues after Leave, and that Cleanup ends it, but not one that is in use.
func TestNetnsLeave(t *testing.T) {
	gate.Needed(t, "a fabric that was left goes on, and ends by Cleanup alone")
	o := smallest(t, backend.Netns{})
	netnstest.Lock(t, "kept-labs") // every cleanup removes all labs that outlive their process
	left, err := Start(t.Context(), o, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	lines, err := left.Leave()
	if err != nil || len(lines) == 0 || !strings.Contains(strings.Join(lines, "\n"), "fared lab --netns --cleanup") {
		t.Errorf("%q, %v", lines, err)
	}
	used := fabric(t, Options{Spec: topo.Spec{Planes: 1, Servers: 2, SubPorts: 1}, Netns: o.Netns})
	out, err := exec.Command(o.Netns.Binary, "--socket", left.plan.Socket("server1"), "weights").Output()
	if err != nil || !strings.Contains(string(out), "10.255.0.2") {
		t.Errorf("the fabric that was left answers %q, %v", out, err)
	}
	removed, err := backend.Cleanup(t.Context())
	want := []string{left.plan.Dir}
	for _, n := range left.Nodes() {
		want = append(want, string(left.plan.Namespace(n.Name)))
	}
	for _, name := range want {
		if !slices.Contains(removed, name) { // other runs may have leftovers too
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

// TestPacketsAreTheJudge verifies that packets override tables: a leaf that loses packets is found although every
// weight is right, and so is a server that sends by other shares.
func TestPacketsAreTheJudge(t *testing.T) {
	f := fabric(t, smallest(t, backend.Netns{}))
	ip(t, f, "leaf1", "route prepend blackhole 10.255.0.2/32")
	results, ok := play(t, f, script(t, "step a leaf that drops\n"))
	if r := results[0]; ok || len(r.Wrong) != 1 || !strings.HasPrefix(r.Wrong[0], "server1 -> server2: ") || !strings.Contains(r.Wrong[0], "packets were lost while nothing changed") ||
		r.Traffic.SteadyLost == 0 || r.Traffic.SteadyLost >= r.Traffic.SteadySent {
		t.Errorf("%q, %+v", r.Wrong, r.Traffic)
	}
	ip(t, f, "leaf1", "route del blackhole 10.255.0.2/32")
	if results, ok := play(t, f, script(t, "step it is mended\n")); !ok {
		t.Errorf("%q", results[0].Wrong)
	}
	// p0.0 sends three times as much as p0.1, and the other sub-ports so that both planes carry their part: 3:1 of 4,
	// and 2:2.
	f.flow.ScaleShares(0, map[string]int64{"p0.0": 3, "p0.1": 1, "p1.0": 2, "p1.1": 2})
	results, ok = play(t, f, script(t, "step a server that sends by other shares of sub-ports\n"))
	if r := results[0]; ok || len(r.Wrong) != 2 || !strings.Contains(r.Wrong[0], "packets took p0.0, want ") || !strings.Contains(r.Wrong[1], "packets took p0.1") {
		t.Errorf("%q, %+v", r.Wrong, r.Traffic)
	}
	f.flow.ScaleShares(0, map[string]int64{"p0.0": 2, "p0.1": 6, "p1.0": 1, "p1.1": 1})
	results, ok = play(t, f, script(t, "step a server that sends by other shares of planes\n"))
	if r := results[0]; ok || len(r.Wrong) != 6 || !strings.Contains(r.Wrong[4], "packets took p0, the weights 1:1 give ") {
		t.Errorf("%q, %+v", r.Wrong, r.Traffic)
	}
	// A display shows the kernel's links, and not the links that the model expects.
	if up, all := f.backend.Light(f.Leaf[1]); up != all || all != 4 {
		t.Errorf("%d of %d cables are up", up, all)
	}
	ip(t, f, "leaf1", "link set dev s1.0 down")
	if up, all := f.backend.Light(f.Leaf[1]); up != all-1 || !f.Up(f.At(f.Leaf[1])[0]) {
		t.Errorf("with a device down, %d of %d cables are up", up, all)
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

// TestNetnsOptions verifies that options that a fabric of namespaces does not support are rejected with the option.
func TestNetnsOptions(t *testing.T) {
	for want, o := range map[string]Options{
		`leaf: "cisco" is not known; use fared, frr, bird`:                                                    {Spec: topo.Spec{Leaf: "cisco"}, Netns: &backend.Netns{}},
		`Driver "dpdk" is not known: use auto, linux, bpf`:                                                    {Netns: &backend.Netns{Driver: "dpdk"}},
		"Mode per-packet with Driver linux: the kernel's nexthop groups do not spray packets, use Driver bpf": {Spec: topo.Spec{Mode: "per-packet"}, Netns: &backend.Netns{Driver: "linux"}},
		"Rate 1000000 is not within 0 to 200000":                                                              {Netns: &backend.Netns{Rate: 1e6}},
		"Planes 4, Servers 200 and SubPorts 2: 1600 cables, more than the 1024 of a fabric of namespaces":     {Spec: topo.Spec{Servers: 200}, Netns: &backend.Netns{}},
		"Speed 100M: below 1G, a cable would be too slow for its BGP session":                                 {Spec: topo.Spec{Speed: 100e6}, Netns: &backend.Netns{}},
	} {
		if _, err := Configs(o); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	files, err := Configs(Options{Netns: &backend.Netns{}})
	if err != nil || len(files) != 8 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		if err := checkConfig(file); err != nil {
			t.Errorf("%s: %v\n%s", file.Name, err, file.Text)
		}
	}
}
