package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/cmd/internal/cli"
	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/lab"
)

// namespaces returns the command line of the smallest fabric of namespaces in which half a Y-cable can fail.
func namespaces(t *testing.T, args ...string) []string {
	t.Helper()
	netnstest.Require(t, "tc")
	withFared(t)
	t.Setenv(clitest.AsFared, "1")             // for tests that start the command line in a separate process
	dir, err := os.MkdirTemp("/tmp", "fared-") // short enough for the names of sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { // FRR's daemons have another user
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", dir)
	return append([]string{"lab", "--netns", "--planes", "2", "--servers", "2"}, args...)
}

// nodesOf lists the namespaces of a process's fabrics.
func nodesOf(t *testing.T, pid int) []string {
	t.Helper()
	found, err := filepath.Glob(fmt.Sprintf("/run/netns/fared-%d*-[ls]e*", pid))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestLabUnnumbered plays the failure of a leaf on fabrics whose cables have link-local addresses alone, with each
// software of leaves and spines.
func TestLabUnnumbered(t *testing.T) {
	gate.Slow(t, gate.Labs, "four fabrics of namespaces; topo compares their files in the gate")
	for name, args := range map[string][]string{
		"fared":     {"--leaf", "fared"},
		"FRR":       {"--leaf", "frr", "--leaves", "2", "--spines", "2", "--spine", "frr"},
		"BIRD":      {"--leaf", "bird"},
		"two tiers": {"--leaf", "fared", "--leaves", "2", "--spines", "2", "--spine", "bird"},
	} {
		t.Run(name, func(t *testing.T) {
			o := fared(t, namespaces(t, append(args, "--cables", "unnumbered", "--rate", "0", "--scenario", "leaf")...)...)
			if o.Code != cli.ExitOK || !strings.Contains(o.Out, "2 steps, every expectation met") {
				t.Errorf("exit %d\n%s\n%s", o.Code, o.Out, o.Err)
			}
		})
	}
}

// TestLabNetnsFlags checks that options of a fabric of namespaces are refused without it, and that options it lacks are
// refused with it.
func TestLabNetnsFlags(t *testing.T) {
	for want, args := range map[string][]string{
		"--leaf frr: a fabric in one process runs only fared":            {"--leaf", "frr"},
		"--cables unnumbered: in a single process":                       {"--cables", "unnumbered"},
		"--driver needs a fabric of network namespaces":                  {"--driver", "bpf"},
		"--rate needs a fabric of network namespaces":                    {"--rate", "1"},
		"--keep needs a fabric of network namespaces":                    {"--keep"},
		"--cleanup needs a fabric of network namespaces":                 {"--cleanup"},
		`--leaf: "cisco" is not known`:                                   {"--netns", "--leaf", "cisco"},
		`--driver "memory" is not known`:                                 {"--netns", "--driver", "memory"},
		"--rate 999999 is not within":                                    {"--netns", "--rate", "999999"},
		"--transport needs a fabric of network namespaces or containers": {"--transport", "roce"},
		`--transport "pigeon" is not known`:                              {"--netns", "--transport", "pigeon"},
		"--memory-plane needs a fabric of network namespaces whose":      {"--netns", "--memory-plane", "p3"},
		"--memory-plane p7: planes are p0 to p3":                         {"--netns", "--transport", "roce", "--memory-plane", "p7"},
		"--rate has no effect with --transport":                          {"--netns", "--transport", "roce", "--rate", "5"},
		"a server without power loses its queue pairs":                   {"--netns", "--transport", "tcp", "--scenario", "reboot"},
		"[cleanup keep]": {"--netns", "--keep", "--cleanup"},
	} {
		if got := refused(t, cli.ExitUsage, append([]string{"lab"}, args...)...); !strings.Contains(got, want) {
			t.Errorf("lab %s: no %q in\n%s", strings.Join(args, " "), want, got)
		}
	}
}

// TestLabTransfer checks that every step reports its transfer, for people and in JSON, and that the end reports the
// sum.
func TestLabTransfer(t *testing.T) {
	gate.Slow(t, gate.Labs, "a transfer in two fabrics of namespaces")
	out := must(t, namespaces(t, "--transport", "roce", "--scenario", "port", "-o", "json")...)
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(lines) < 3 {
		t.Fatalf("%d lines, want one for each step and one for all:\n%s", len(lines), out)
	}
	var bytes, fastest uint64
	for _, line := range lines[:len(lines)-1] {
		var step struct {
			OK          bool
			PacketsSent *int `json:"packets_sent"`
			Transfer    lab.Transfer
		}
		if err := json.Unmarshal([]byte(line), &step); err != nil {
			t.Fatal(err)
		}
		x := step.Transfer
		if !step.OK || step.PacketsSent != nil || x.Bytes == 0 || x.Messages == 0 || x.Lost+x.Duplicated+x.WrongBytes != 0 || x.AllowedBps == 0 || len(x.Planes) != 2 || x.Planes["p0"].Due == 0 {
			t.Errorf("%+v in\n%s", step, line)
		}
		bytes += x.Bytes
		fastest = max(fastest, x.GoodputBps)
	}
	if fastest == 0 { // a step's median is 0 where a busy machine delivers nothing in most intervals
		t.Errorf("no step has a goodput:\n%s", out)
	}
	var end struct{ Transfers lab.TransferSummary }
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &end); err != nil || end.Transfers.Steps != len(lines)-1 || end.Transfers.Bytes != bytes || len(end.Transfers.Planes) != 2 {
		t.Errorf("%v, %+v, the steps have %d bytes", err, end, bytes)
	}
	out = must(t, namespaces(t, "--transport", "roce", "--scenario", "none")...)
	for _, want := range []string{" verified, 0 lost, 0 duplicated, 0 bytes wrong; goodput ", " verified in ", "\n  plane         slots       wire  slots %   wire %    due % difference\n  p0 "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if strings.Contains(out, "packets") {
		t.Errorf("packets of the lab's own in\n%s", out)
	}
}

// TestLabNetnsJSON checks that a step has the results of its packets, in addition to the common keys.
func TestLabNetnsJSON(t *testing.T) {
	gate.Needed(t, "scripts find the results of packets")
	out := must(t, namespaces(t, "--scenario", "sub-cable", "-o", "json")...)
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(lines) != 4 {
		t.Fatalf("%d lines, want one for each of 4 steps:\n%s", len(lines), out)
	}
	var step struct {
		Weights         map[string]uint32
		OK              bool
		Sent            uint64 `json:"packets_sent"`
		SteadySent      uint64 `json:"steady_packets_sent"`
		SteadyLost      *int   `json:"steady_packets_lost"`
		MeasuredPackets map[string]uint64
		Share           map[string]float64 `json:"measured_share"`
		Wanted          map[string]float64 `json:"weight_share"`
		LossInterval    *int64             `json:"loss_interval_ns"`
		LossPlanes      map[string]uint64  `json:"loss_planes"`
		Followed        int64              `json:"weights_followed_ns"`
		Timeline        []lab.Event
	}
	if err := json.Unmarshal([]byte(lines[0]), &step); err != nil {
		t.Fatal(err)
	}
	if !step.OK || step.Weights["p0"] != 2 || step.Weights["p1"] != 1 || step.Sent < step.SteadySent || step.SteadySent == 0 || step.SteadyLost == nil || *step.SteadyLost != 0 ||
		math.Abs(step.Wanted["p0"]-2./3) > 1e-9 || math.Abs(step.Share["p0"]-2./3) > 0.05 || math.Abs(step.Share["p0"]+step.Share["p1"]-1) > 1e-9 {
		t.Errorf("%+v in\n%s", step, lines[0])
	}
	if step.LossInterval == nil || len(step.LossPlanes) != 2 || step.Followed <= 0 || !slices.ContainsFunc(step.Timeline, func(e lab.Event) bool { return e.Event == lab.EventAdopted && e.AtNS > 0 }) {
		t.Errorf("the timeline is %+v in\n%s", step.Timeline, lines[0])
	}
}

// TestLabNetnsLines checks that the start and the results of packets are shown, within 120 columns.
func TestLabNetnsLines(t *testing.T) {
	out := must(t, namespaces(t, "--scenario", "none")...)
	for _, want := range []string{"4 network namespaces, 8 cables\n", "8 of 8 BGP sessions\n", "all 2 pairs match the expected weights", " packets, 0 lost, 0 of them while nothing changed; shares at the leaves: "} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	if left := nodesOf(t, os.Getpid()); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
	var o lab.Options
	o.Planes = 4
	share := map[string]float64{"p0": 0.2857, "p1": 0.2857, "p2": 0.1429, "p3": 0.2857}
	if got, want := packets(o, &lab.Traffic{Sent: 12345678, Lost: 1234, SteadySent: 1, Share: share}), "12345678 packets, 1234 lost, 0 of them while nothing changed; shares at the leaves: 28.6 28.6 14.3 28.6 %"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestLabNetnsInterrupted checks that Ctrl-C ends a fabric of namespaces without leftovers.
func TestLabNetnsInterrupted(t *testing.T) {
	gate.Slow(t, gate.Labs, "a fabric of namespaces; lab.TestNetnsInterrupted interrupts one")
	b := inBackground(t, namespaces(t, "--pace", "1h", "--keep")...)
	b.Until(t, "0 slots moved")
	if len(nodesOf(t, os.Getpid())) != 4 {
		t.Errorf("namespaces %q", nodesOf(t, os.Getpid()))
	}
	if code := b.End(t); code != cli.ExitFailed || !strings.Contains(b.Err.String(), "fared: interrupted") {
		t.Errorf("exit %d, %s", code, b.Err)
	}
	if left := nodesOf(t, os.Getpid()); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestLabNetnsCleanup checks that --cleanup removes a lab that was kept or killed.
func TestLabNetnsCleanup(t *testing.T) {
	gate.Slow(t, gate.Labs, "three fabrics of namespaces; lab.TestNetnsLeave leaves one")
	args := namespaces(t, "--scenario", "none", "--keep")
	netnstest.Lock(t, "kept-labs") // every cleanup removes all labs that outlive their process
	start := func(args ...string) (*exec.Cmd, func() string) {
		cmd := exec.Command(os.Args[0], args...)
		var out strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd, out.String
	}
	kept, output := start(args...)
	if err := kept.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, output())
	}
	socket := regexp.MustCompile(`--socket (\S+) weights`).FindStringSubmatch(output())
	if socket == nil || len(nodesOf(t, kept.Process.Pid)) != 4 {
		t.Fatalf("kept %q, printed\n%s", nodesOf(t, kept.Process.Pid), output())
	}
	if out, err := exec.Command(binary.Fared(t), "weights", "--socket", socket[1]).CombinedOutput(); err != nil || !strings.Contains(string(out), "10.255.0.2") {
		t.Errorf("the fabric that was kept prints %v\n%s", err, out)
	}

	killed, _ := start("lab", "--netns", "--planes", "2", "--servers", "2", "--pace", "1h")
	netnstest.Eventually(t, time.Minute, func() error {
		if _, err := os.Stat(filepath.Join(os.TempDir(), "fared-lab-"+strconv.Itoa(killed.Process.Pid), "server2", "run.log")); err != nil {
			return err
		}
		return nil
	})
	if err := killed.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = killed.Wait() // returns that the process was killed

	out := must(t, "lab", "--netns", "--cleanup")
	for _, pid := range []int{kept.Process.Pid, killed.Process.Pid} {
		if n := strings.Count(out, fmt.Sprintf("removed fared-%d-", pid)); n != 4 {
			t.Errorf("%d namespaces of %d removed, want 4:\n%s", n, pid, out)
		}
		if left := nodesOf(t, pid); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
		if _, err := os.Stat(filepath.Join(os.TempDir(), fmt.Sprintf("fared-lab-%d", pid))); err == nil {
			t.Errorf("the files of %d are left behind", pid)
		}
	}
}
