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
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

func TestMain(m *testing.M) {
	// The one goroutine that GoBGP never ends (daemon/internal/speaker, doc.go), of the lab in this process.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/osrg/gobgp/v3/pkg/server.(*BgpServer).Serve"))
}

// fabrics are the folders with a topology file each, and the scenarios to play there; nil means all. The others are
// played with that software, or in that kind of fabric, in namespaces (lab.TestNetnsScenarios), or by the sequence of
// failures of agree_test.go.
var fabrics = map[string][]string{
	"frr":       nil,
	"fared":     {"sub-cable", "leaf", "drain", "frozen", "port", "recovery", "flap", "blackhole"},
	"bird":      {"port", "drain", "reboot", "sub-cable", "leaf"},
	"two-tier":  {"leaf", "two-planes", "sub-cable", "maintenance", "reboot"},
	"own-ports": {"gpu", "maintenance", "port", "leaf"},
}

// inGate is the scenario that the gate plays, in the folder frr.
const inGate = "sub-cable"

// tool returns the path of containerlab on this machine; if none is installed it is built once.
var tool = sync.OnceValues(func() (string, error) {
	cmd := exec.Command("../scripts/containerlab.sh")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
})

// options returns the options of the fabric in a folder. It skips the test on machines without containers.
func options(t *testing.T, folder string) lab.Options {
	t.Helper()
	netnstest.Require(t, "tc", "docker", "tcpdump", "go")
	if out, err := exec.Command("docker", "image", "inspect", "fared:local", "fared-frr:local", "fared-bird:local").CombinedOutput(); err != nil {
		netnstest.Lacks(t, fmt.Sprintf("the images of the labs are not there, 'make images' makes them: %v: %s", err, out))
	}
	path, err := tool()
	if err != nil {
		t.Fatalf("no containerlab: %v", err)
	}
	netnstest.Lock(t, "containerlab") // containers have fixed names
	spec := described(t, folder)
	dir := netnstest.Folder(t)
	t.Cleanup(func() {
		logs, _ := filepath.Glob(filepath.Join(dir, "*", "*", "container.log")) // of a failed fabric
		for _, log := range logs {
			if text, err := os.ReadFile(log); err == nil && t.Failed() {
				t.Logf("%s ends with\n%s", log, text[max(0, len(text)-2000):])
			}
		}
	})
	// Half of the default rate: each step still sends as many packets after its change, in twice the time, and fewer
	// while it waits.
	clab := &backend.Containerlab{Rate: 1000, File: filepath.Join(folder, spec.Name+".clab.yml"), Binary: path, Progress: func(text string) { t.Log(text) }}
	if err := clab.Matches(spec); err != nil {
		t.Fatal(err)
	}
	return lab.Options{Spec: spec, Containerlab: clab}
}

// described returns the description of the fabric in a folder.
func described(t *testing.T, folder string) topo.Spec {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, topo.SpecFile))
	if err != nil {
		t.Fatal(err)
	}
	spec, err := topo.Parse(topo.SpecFile, text)
	if err != nil {
		t.Fatal(err)
	}
	return spec
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

// buckets lists the kernel's nexthop groups of all servers, each as runs of consecutive buckets: device of the nexthop,
// id, number.
func buckets(t *testing.T, f *lab.Fabric, fabric string) string {
	t.Helper()
	var all strings.Builder
	for _, server := range f.Server {
		ip := func(args ...string) string {
			out, err := exec.Command("ip", append([]string{"-n", "clab-" + fabric + "-" + server.Name}, args...)...).CombinedOutput()
			if err != nil {
				t.Logf("ip %q: %v: %s", args, err, out)
			}
			return string(out)
		}
		// word returns the word after a name in a line of ip.
		word := func(line, name string) string {
			if words := strings.Fields(line); slices.Contains(words, name) {
				return words[slices.Index(words, name)+1]
			}
			return ""
		}
		fmt.Fprintf(&all, "%s\n%s", server.Name, ip("route", "show", "table", "all", "root", f.Loopbacks.String()))
		nexthops, device := ip("nexthop", "show"), map[string]string{}
		for line := range strings.Lines(nexthops) {
			device[word(line, "id")] = word(line, "dev")
		}
		for line := range strings.Lines(nexthops) {
			if word(line, "group") == "" {
				continue
			}
			all.WriteString(strings.TrimSpace(line) + ":")
			last, n := "", 0
			flush := func(next string) {
				if n > 0 {
					fmt.Fprintf(&all, " %s/%s*%d", device[last], last, n)
				}
				last, n = next, 0
			}
			for bucket := range strings.Lines(ip("nexthop", "bucket", "show", "id", word(line, "id"))) {
				if id := word(bucket, "nhid"); id != last {
					flush(id)
				}
				n++
			}
			flush("")
			all.WriteString("\n")
		}
	}
	return all.String()
}

// checkIndexes fails the test unless both ends of every cable have the same interface index in the containers, so that
// ifindex equals iflink as for a physical NIC.
func checkIndexes(t *testing.T, f *lab.Fabric, fabric string) {
	t.Helper()
	files := map[string]string{} // contents by node and file below /sys/class/net
	for _, n := range f.Nodes() {
		// ip mounts the namespace's own /sys.
		out, err := exec.Command("ip", "netns", "exec", "clab-"+fabric+"-"+n.Name, "sh", "-c", "cd /sys/class/net && grep . */ifindex */iflink").CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", n.Name, err, out)
		}
		for line := range strings.Lines(string(out)) {
			file, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			files[n.Name+"/"+file] = value
		}
	}
	for _, c := range f.Cables {
		down, up := c.Down.Node.Name+"/"+c.Down.Device, c.Up.Node.Name+"/"+c.Up.Device
		index := files[down+"/ifindex"]
		if index == "" || index != files[down+"/iflink"] || index != files[up+"/ifindex"] || index != files[up+"/iflink"] {
			t.Errorf("%s has ifindex %q and iflink %q, %s at the other end %q and %q: want one number", down, index, files[down+"/iflink"],
				up, files[up+"/ifindex"], files[up+"/iflink"])
		}
	}
}

// checkSecondCable fails the test unless a server's daemon reports the second failed cable of a port without an event
// of the kernel.
func checkSecondCable(t *testing.T, f *lab.Fabric, fabric string) {
	t.Helper()
	port := f.Groups()[len(f.Groups())-1].Planes[0]
	if len(port) < 2 {
		t.Fatalf("%s has %d cables in a plane", port[0].Down.Node.Name, len(port))
	}
	server := "clab-" + fabric + "-" + port[0].Down.Node.Name
	pid, err := exec.Command("docker", "inspect", "--format", "{{.State.Pid}}", server).Output()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix:/proc/"+strings.TrimSpace(string(pid))+"/root/run/fared/fared.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	daemon := farev1.NewFabricServiceClient(conn)
	far := map[string]string{} // the server's devices by the leaf's
	for _, c := range port {
		far[c.Up.Device] = c.Down.Device
	}
	leaf := netnstest.Named(t, "clab-"+fabric+"-"+port[0].Up.Node.Name)
	netnstest.SecondCable(t, netnstest.Named(t, server), leaf, port[0].Up.Device, port[1].Up.Device, func(device string) bool {
		list, err := daemon.ListPlanes(t.Context(), &farev1.ListPlanesRequest{})
		if err != nil {
			t.Fatalf("%s: %v", server, err)
		}
		for _, p := range list.Planes {
			for _, sp := range p.SubPorts {
				if sp.Device == far[device] {
					return !sp.Carrier
				}
			}
		}
		t.Fatalf("%s has no sub-port %s", server, far[device])
		return false
	})
}

// leftovers lists containers, network namespaces, lines of /etc/hosts and files that a fabric has left.
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

// TestScenarios checks, after each step of each fabric's scenarios, in the gate of one scenario of one fabric, that the
// daemons and the kernels of the servers' containers have the model's weights, and that packets took the planes in that
// ratio, without loss once the state was stable. After each event of the fabric's sequence the weights equal the
// simulation's. Both ends of a cable have the same interface index, and the second failed cable of a port is noticed
// before the kernel announces it. The fabric leaves no leftovers.
func TestScenarios(t *testing.T) {
	gate.Needed(t, "the images, the containers' network and containerlab's files make a fabric")
	for folder, names := range fabrics {
		t.Run(folder, func(t *testing.T) {
			if folder != "frr" {
				gate.Slow(t, gate.Containers, "another fabric")
			}
			o := options(t, folder)
			f := start(t, o)
			checkIndexes(t, f, o.Name)
			scenarios, err := lab.Load("all", o)
			if err != nil {
				t.Fatal(err)
			}
			if names != nil {
				scenarios = slices.DeleteFunc(scenarios, func(s *lab.Scenario) bool { return !slices.Contains(names, s.Name) })
			}
			if want := max(len(names), 12*(1-min(len(names), 1))); len(scenarios) < want {
				t.Fatalf("%d scenarios, not %d", len(scenarios), want)
			}
			if first := slices.IndexFunc(scenarios, func(s *lab.Scenario) bool { return s.Name == inGate }); first > 0 {
				scenarios[0], scenarios[first] = scenarios[first], scenarios[0]
			}
			for _, s := range scenarios[:gate.Count(t, gate.Containers, 1, len(scenarios))] {
				if _, err := f.Run(t.Context(), s, func(r lab.Result) {
					if !r.OK || f.Policy == "reweight" && s.Name != "reboot" && r.SlotsMoved != 0 {
						t.Errorf("%s: %s: %d slots moved, %q\n%s", s.Name, r.Step, r.SlotsMoved, r.Wrong, buckets(t, f, o.Name))
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
			if events := sequences[folder]; events != nil {
				compare(t, "containers", simulate(t, o.Spec, events), observe(t, f, events), events)
			}
			checkSecondCable(t, f, o.Name)
			if err := f.Close(); err != nil {
				t.Error(err)
			}
			if left := leftovers(t, o.Name); len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		})
	}
}

// TestTransfer carries verified WRITEs by queue pairs of RoCEv2 between the servers' containers while leaves and halves
// of Y-cables fail and return; cmd/fared-lab's TestLabTransfer does so while ports fail. Every byte arrives once and
// unchanged, no queue pair has an error, and each plane carries its share by weight. Cables are not shaped here, so the
// processor limits goodput. The fabric leaves no leftovers. FARED_TRANSFER is the number of bytes, 2 GB by default.
func TestTransfer(t *testing.T) {
	gate.Slow(t, gate.Containers, "2 GB between containers")
	bytes := uint64(2e9)
	if text := os.Getenv("FARED_TRANSFER"); text != "" {
		var err error
		if bytes, err = strconv.ParseUint(text, 10, 63); err != nil {
			t.Fatalf("FARED_TRANSFER: %v", err)
		}
	}
	o := options(t, "fared")
	o.Transport = "roce"
	f := start(t, o)
	steps, err := lab.Parse("planes die", strings.NewReader(`
step half a Y-cable
  cut server2 p2.0
  expect * -> server2 2:2:1:2
step it is mended
  mend server2 p2.0
  expect * -> server2 1:1:1:1
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
		if _, err := f.Run(t.Context(), steps, func(r lab.Result) {
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

// TestFailureLeavesTheFacts checks that a scenario with an unmet expectation leaves logs, configurations and captures,
// and no other leftovers, also when a leaf is frozen and a cable is a black hole at its end.
func TestFailureLeavesTheFacts(t *testing.T) {
	gate.Slow(t, gate.Containers, "an expectation that is not met until its limit")
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

// TestDeploysAgain checks that a failed deployment is reported, removed and repeated once; and that the end of a
// container ends the lab with its name, and that the others are destroyed.
func TestDeploysAgain(t *testing.T) {
	gate.Slow(t, gate.Containers, "two deployments")
	o := options(t, "own-ports")
	var progress []string
	o.Containerlab.Progress = func(text string) { progress = append(progress, text) }
	failing := filepath.Join(t.TempDir(), "containerlab")
	script := "#!/bin/sh\nif [ $1 = deploy ] && [ ! -e $0.failed ]; then touch $0.failed; echo a first failure; exit 1; fi\nexec " + o.Containerlab.Binary + " \"$@\"\n"
	if err := os.WriteFile(failing, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	o.Containerlab.Binary = failing
	f, err := lab.Start(t.Context(), o, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if text := strings.Join(progress, "\n"); !strings.Contains(text, "again after") || !strings.Contains(text, "a first failure") {
		t.Errorf("progress: %s", text)
	}
	dies := "clab-" + o.Name + "-" + f.Server[len(f.Server)-1].Name
	if out, err := exec.Command("docker", "kill", dies).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s, err := lab.Parse("test", strings.NewReader("step nothing\n"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Run(t.Context(), s, func(lab.Result) {})
	if text := fmt.Sprint(err, f.Close()); !strings.Contains(text, "the container "+dies+": Exited (137)") {
		t.Error(text)
	}
	if left := leftovers(t, o.Name); !slices.Equal(left, []string{f.Logs()}) {
		t.Errorf("left behind: %q", left)
	}
}

// TestRunningFabricGoesOn checks that a running fabric is used, and restored after any scenario. Its leaves are not
// FRR, which at times loses a route after it was frozen (docs/operations/leaves.md).
func TestRunningFabricGoesOn(t *testing.T) {
	gate.Slow(t, gate.Containers, "three starts over one deployment")
	o := options(t, "fared")
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
		if left := leftovers(t, o.Name); len(left) != 1 { // the folder of the first run
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
