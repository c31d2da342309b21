package containerlab

import (
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/internal/netnstest"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/topo"
)

func TestMain(m *testing.M) {
	// The one goroutine that GoBGP never ends (daemon/internal/speaker, doc.go), of the lab in this process.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/osrg/gobgp/v3/pkg/server.(*BgpServer).Serve"))
}

// fabrics are the folders with a topology file each.
var fabrics = []string{"frr", "fared", "bird", "two-tier"}

// binary is the containerlab of this machine; it is built once where none is installed.
var binary = sync.OnceValues(func() (string, error) {
	cmd := exec.Command("../scripts/containerlab.sh")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
})

// options are those of the fabric in a folder. The test is skipped where containers cannot be had.
func options(t *testing.T, folder string) lab.Options {
	t.Helper()
	netnstest.Require(t, "tc", "docker", "tcpdump", "go")
	if out, err := exec.Command("docker", "image", "inspect", "fared:local", "fared-frr:local", "fared-bird:local").CombinedOutput(); err != nil {
		netnstest.Lacks(t, fmt.Sprintf("the images of the labs are not there, 'make images' makes them: %v: %s", err, out))
	}
	path, err := binary()
	if err != nil {
		t.Fatalf("no containerlab: %v", err)
	}
	text, err := os.ReadFile(filepath.Join(folder, topo.SpecFile))
	if err != nil {
		t.Fatal(err)
	}
	spec, err := topo.Parse(topo.SpecFile, text)
	if err != nil {
		t.Fatal(err)
	}
	dir := netnstest.Folder(t)
	t.Cleanup(func() {
		logs, _ := filepath.Glob(filepath.Join(dir, "*", "*", "container.log")) // of a fabric that has failed
		for _, log := range logs {
			if text, err := os.ReadFile(log); err == nil && t.Failed() {
				t.Logf("%s ends with\n%s", log, text[max(0, len(text)-2000):])
			}
		}
	})
	clab := &lab.Containerlab{File: filepath.Join(folder, spec.Name+".clab.yml"), Binary: path, Progress: func(text string) { t.Log(text) }}
	if err := clab.Matches(spec); err != nil {
		t.Fatal(err)
	}
	return lab.Options{Spec: spec, Containerlab: clab}
}

// start deploys a fabric, and destroys it at the end of the test.
func start(t *testing.T, o lab.Options) *lab.Fabric {
	t.Helper()
	f, err := lab.Start(t.Context(), o, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

// leftovers are containers, network namespaces, lines of /etc/hosts and files that a fabric has left.
func leftovers(t *testing.T, name string) (left []string) {
	t.Helper()
	out, err := exec.Command("docker", "ps", "--all", "--filter", "label=containerlab="+name, "--format", "container {{.Names}}").Output()
	if err != nil {
		t.Fatal(err)
	}
	left = strings.FieldsFunc(string(out), func(r rune) bool { return r == '\n' })
	hosts, err := os.ReadFile("/etc/hosts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(hosts)) {
		if strings.Contains(line, "clab-"+name) {
			left = append(left, "/etc/hosts: "+strings.TrimSpace(line))
		}
	}
	for _, pattern := range []string{"/run/netns/clab-" + name + "-*", filepath.Join(os.TempDir(), "fared-lab-*"), "*/clab-*", "clab-*"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, found...)
	}
	return left
}

// TestScenarios: every scenario on every fabric: after each step the weights are the model's, in the daemons and in the kernels of the
// servers' containers, and packets took the planes by them, without a loss once nothing changed any more. Nothing is left behind.
func TestScenarios(t *testing.T) {
	for _, folder := range fabrics {
		t.Run(folder, func(t *testing.T) {
			o := options(t, folder)
			f := start(t, o)
			scenarios, err := lab.Load("all", o)
			if err != nil {
				t.Fatal(err)
			}
			if len(scenarios) < 12 {
				t.Fatalf("only %d scenarios", len(scenarios))
			}
			for _, s := range scenarios {
				if _, err := f.Run(t.Context(), s, func(r lab.Result) {
					if !r.OK || f.Policy == "reweight" && s.Name != "reboot" && r.SlotsMoved != 0 {
						t.Errorf("%s: %s: %d slots moved, %q", s.Name, r.Step, r.SlotsMoved, r.Wrong)
					}
					if r.Traffic == nil || r.Traffic.Sent == 0 {
						t.Errorf("%s: %s: no traffic", s.Name, r.Step)
						return
					}
					t.Logf("%s: %s: weights followed after %v, %d of %d packets lost within %v", s.Name, r.Step,
						time.Duration(r.ElapsedNS), r.Traffic.Lost, r.Traffic.Sent, time.Duration(r.Traffic.LossIntervalNS))
				}); err != nil {
					t.Fatal(err)
				}
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
			if left := leftovers(t, o.Name); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// TestTransfer: queue pairs of RoCEv2 carry verified WRITEs between the containers of servers while leaves, ports and halves of Y-cables
// die and return: every byte arrives once and right, no queue pair sees an error, and planes carry what weights give them. Cables are
// not shaped here, so goodput is what the processor gives. Nothing is left behind. FARED_TRANSFER is how many bytes, 10 GB unless it is set.
func TestTransfer(t *testing.T) {
	bytes := uint64(10e9)
	if text := os.Getenv("FARED_TRANSFER"); text != "" {
		var err error
		if bytes, err = strconv.ParseUint(text, 10, 63); err != nil {
			t.Fatalf("FARED_TRANSFER: %v", err)
		}
	}
	o := options(t, "fared")
	o.Transport = "roce"
	f := start(t, o)
	story, err := lab.Parse("planes die", strings.NewReader(`
step half a Y-cable
  cut server2 p2.0
  expect * -> server2 2:2:1:2
step it is mended
  mend server2 p2.0
step a port
  cut server3 p1
  expect * -> server3 1:0:1:1
step it is back
  mend server3 p1
step a leaf
  kill leaf0
  expect * -> * 0:1:1:1
step it returns
  restart leaf0
  expect * -> * 1:1:1:1
`))
	if err != nil {
		t.Fatal(err)
	}
	var verified uint64
	sent, due := map[string]float64{}, map[string]float64{}
	for verified < bytes {
		before := verified
		if _, err := f.Run(t.Context(), story, func(r lab.Result) {
			x := r.Transfer
			if !r.OK || x == nil || x.Bytes == 0 || x.Lost+x.Duplicated+x.WrongBytes > 0 {
				t.Fatalf("%s: %+v, %q", r.Step, x, r.Wrong)
			}
			t.Logf("%s: weights followed after %v, %d bytes at %d Mbit/s, %d again", r.Step, time.Duration(r.ElapsedNS), x.Bytes, x.GoodputBps/1e6, x.Retransmitted)
			verified += x.Bytes
			for p, part := range x.Planes {
				sent[p] += float64(part.Sent)
				due[p] += float64(part.Due)
			}
		}); err != nil {
			t.Fatal(err)
		}
		if verified == before {
			t.Fatalf("nothing more than %d bytes arrives, want %d", verified, bytes)
		}
	}
	t.Logf("%d bytes verified", verified)
	var allSent, allDue float64
	for p := range sent {
		allSent, allDue = allSent+sent[p], allDue+due[p]
	}
	for p := range sent {
		part, wanted := sent[p]/allSent, due[p]/allDue
		t.Logf("%s carried %.3f %%, by weights %.3f %%", p, 100*part, 100*wanted)
		if math.Abs(part-wanted) > 0.01 {
			t.Errorf("%s carried %.3f %% of all, by weights it is %.3f %%", p, 100*part, 100*wanted)
		}
	}
	if len(sent) != f.Planes {
		t.Errorf("%d planes", len(sent))
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if left := leftovers(t, o.Name); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

// TestFailureLeavesTheFacts: a scenario whose expectation is not met leaves logs, configurations and captures, and nothing else; with a
// leaf frozen and a cable black at its end.
func TestFailureLeavesTheFacts(t *testing.T) {
	o := options(t, "frr")
	f := start(t, o)
	s, err := lab.Parse("test", strings.NewReader(`
step a wrong expectation
  freeze leaf1
  cut server2 p2.0
  blackhole server3 p0.0
  expect server1 -> server2 9:9:9:9
`))
	if err != nil {
		t.Fatal(err)
	}
	ok, err := f.Run(t.Context(), s, func(lab.Result) {})
	if err != nil || ok {
		t.Errorf("%v, %v", ok, err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	kept := f.Logs()
	for _, want := range []string{"server1/container.log", "server1/fared.yaml", "leaf2/frr.conf", "leaf2/capture.pcap*", "frr.clab.yml"} {
		found, err := filepath.Glob(filepath.Join(kept, want))
		if err != nil || len(found) == 0 {
			t.Errorf("no %s in %s", want, kept)
			continue
		}
		if info, err := os.Stat(found[0]); err != nil || info.Size() == 0 {
			t.Errorf("%s is empty: %v", found[0], err)
		}
	}
	if left := leftovers(t, o.Name); !slices.Equal(left, []string{kept}) {
		t.Errorf("left behind: %q", left)
	}
}

// TestContainerDies: the end of a container ends the lab with its name, and the others are destroyed.
func TestContainerDies(t *testing.T) {
	o := options(t, "fared")
	f, err := lab.Start(t.Context(), o, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if out, err := exec.Command("docker", "kill", "clab-fared-server3").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s, err := lab.Parse("test", strings.NewReader("step nothing\n"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Run(t.Context(), s, func(lab.Result) {})
	if text := fmt.Sprint(err, f.Close()); !strings.Contains(text, "the container clab-fared-server3: Exited (137)") {
		t.Error(text)
	}
	if left := leftovers(t, o.Name); !slices.Equal(left, []string{f.Logs()}) {
		t.Errorf("left behind: %q", left)
	}
}

// TestRunningFabricGoesOn: a fabric that runs already is used, and goes on as it was, whatever the scenario has left undone.
func TestRunningFabricGoesOn(t *testing.T) {
	o := options(t, "frr")
	first := start(t, o)
	lines, err := first.Leave()
	if err != nil || len(lines) == 0 {
		t.Fatalf("%q, %v", lines, err)
	}
	end := exec.Command("sh", "-c", lines[len(lines)-1])
	t.Cleanup(func() {
		if out, err := end.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s", end, err, out)
		}
		if left := leftovers(t, o.Name); len(left) != 1 { // the folder of the first
			t.Errorf("left behind: %q", left)
		}
	})
	second, err := lab.Start(t.Context(), o, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s, err := lab.Parse("test", strings.NewReader("step much is left undone\n cut server2 p2.0\n blackhole server3 p1.1\n freeze leaf0\nstep and a little more\n crash server4 fared\n"))
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := second.Run(t.Context(), s, func(r lab.Result) { t.Log(r.Wrong) }); !ok || err != nil {
		t.Errorf("%v, %v", ok, err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	s, err = lab.Parse("test", strings.NewReader("step all is as it was\n expect * -> * 1:1:1:1\n"))
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := start(t, o).Run(t.Context(), s, func(r lab.Result) { t.Log(r.Wrong) }); !ok || err != nil {
		t.Errorf("%v, %v", ok, err)
	}
}
