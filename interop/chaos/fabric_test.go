// Package chaos breaks a fabric at random and judges it by its cables: real processes of fared and FRR in network
// namespaces, and a judge that shares no code with fared. See docs/testing.md.
package chaos

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/topo"
)

// Names of processes.
const (
	control   = "control"   // fared run, fared leaf, bgpd, or bird
	dataplane = "dataplane" // fared dataplane, or zebra
)

// diskSize is the size of the file system with the files of a fared node.
const diskSize = "size=4m"

// holdTime limits the time for which a silent neighbor counts as alive.
const holdTime = 3 * time.Second

// fabric is a running fabric.
type fabric struct {
	t       *testing.T
	d       *design
	numbers *topo.Fabric // numbering and wiring
	dir     string
	server  [servers]*node
	leaf    [planes]*node
}

// node is a server or a leaf.
type node struct {
	*topo.Node
	f         *fabric
	ns        *netnstest.Namespace
	dir       string
	software  string // as in topo
	driver    string
	processes map[string]*netnstest.Process
	conn      *grpc.ClientConn
}

// newFabric creates namespaces and cables, and starts every process.
func newFabric(t *testing.T, d *design) *fabric {
	t.Helper()
	netnstest.Require(t, "tc", "sysctl", "/usr/lib/frr/bgpd", "/usr/lib/frr/zebra", "bird")
	t.Log(d)
	f := &fabric{t: t, d: d, dir: netnstest.Folder(t)}
	software := map[string]*topo.Fabric{}
	for _, leaf := range []string{topo.Fared, topo.FRR, topo.BIRD} {
		var err error
		if software[leaf], err = topo.New(d.spec(leaf)); err != nil {
			t.Fatal(err)
		}
	}
	// Servers' configurations depend on the leaves' software; for leaves of several kinds they are those for leaves
	// that sum.
	of := software[topo.Fared]
	if d.homogeneous() {
		of = software[d.leaf[0]]
	}
	f.numbers = of
	for i, n := range f.numbers.Server {
		f.server[i] = f.newNode(n, d.driver[i], topo.Fared)
	}
	for p, n := range f.numbers.Leaf {
		f.leaf[p] = f.newNode(n, "linux", d.leaf[p])
	}
	site := f.site()
	f.wire(site)
	for _, n := range f.nodes() {
		of := of
		if n.Kind == topo.KindLeaf {
			of = software[n.software]
		}
		for _, file := range of.Files(of.Node(n.Name), site) {
			n.write(file.Name, n.adapt(file.Text))
		}
		n.startAll()
	}
	return f
}

func (f *fabric) site() topo.Site {
	site := f.numbers.Site(topo.Containerlab) // slow cables
	site.Quick = true
	site.RateScale = topo.LabRateScale
	site.Socket = func(name string) string { return filepath.Join(f.dir, name, "fared.sock") }
	site.Dataplane = func(name string) string { return "unix:" + filepath.Join(f.dir, name, "dataplane.sock") }
	return site
}

func (f *fabric) newNode(n *topo.Node, driver, software string) *node {
	x := &node{Node: n, f: f, software: software, ns: netnstest.New(f.t), dir: filepath.Join(f.dir, n.Name), driver: driver, processes: map[string]*netnstest.Process{}}
	if err := os.Mkdir(x.dir, 0o755); err != nil {
		f.t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", x.dir, "tmpfs", 0, diskSize+",mode=0755"); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		for _, p := range x.processes {
			p.Stop()
		}
		if driver == "bpf" {
			testbed.Flush(f.t, x.ns, "--driver", driver, "--socket", x.socket("dataplane"), "--pin-dir", x.pins())
		}
		if err := unix.Unmount(x.dir, unix.MNT_DETACH); err != nil {
			f.t.Error(err)
		}
	})
	return x
}

func (f *fabric) nodes() (all []*node) {
	return append(append(all, f.leaf[:]...), f.server[:]...)
}

// wire creates the cables and gives every node its addresses and settings.
func (f *fabric) wire(site topo.Site) {
	f.t.Helper()
	byName := map[string]*node{}
	for _, n := range f.nodes() {
		byName[n.Name] = n
	}
	f.batch("ip", f.numbers.Pairs(func(name string) string { return byName[name].ns.Name }))
	for _, w := range f.numbers.Wiring(site) {
		n := byName[w.Node.Name]
		settings := []string{"-eqw"}
		for _, s := range w.Sysctls {
			settings = append(settings, s.Name+"="+s.Value)
		}
		n.ns.Run("sysctl", settings...)
		f.batch("ip", w.IP(), "-n", n.ns.Name)
		f.slowDown(w)
		f.batch("tc", w.TC(), "-n", n.ns.Name)
	}
}

// slowDown gives both ends of slower cables the rates from which fared and FRR take their speeds.
func (f *fabric) slowDown(w topo.NodeWiring) {
	for _, c := range f.numbers.At(w.Node) {
		here, _ := c.At(w.Node)
		port := f.d.subs(c.Plane, c.Group.Index)
		for i := range w.Devices {
			if w.Devices[i].Name == here.Device {
				w.Devices[i].Rate = w.Devices[i].Rate * fare.Bandwidth(port[c.Sub]) / fare.Bandwidth(port[0])
			}
		}
	}
}

func (f *fabric) batch(tool string, lines []string, args ...string) {
	f.t.Helper()
	cmd := exec.Command(tool, append(args, "-batch", "-")...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		f.t.Fatalf("%s: %v\n%s", tool, err, out)
	}
}

func (n *node) socket(name string) string { return filepath.Join(n.dir, name+".sock") }

func (n *node) pins() string { return "/sys/fs/bpf/" + n.ns.Name }

func (n *node) write(name, text string) {
	n.f.t.Helper()
	if err := os.WriteFile(filepath.Join(n.dir, name), []byte(text), 0o644); err != nil {
		n.f.t.Fatal(err)
	}
}

// adapt adds the test's settings to a configuration: a short hold time, metrics, a recording on the small disk.
func (n *node) adapt(text string) string {
	switch n.software {
	case topo.FRR:
		return strings.Replace(text, "timers bgp 3 9", "timers bgp 1 3", 1)
	case topo.BIRD:
		return strings.ReplaceAll(text, "hold time 9; keepalive time 3", "hold time 3; keepalive time 1")
	}
	keys := fmt.Sprintf("hold_time: %s, connect_retry: 200ms", holdTime)
	if n.Kind == topo.KindServer && n.f.d.sharedAS && n.f.d.bird() {
		keys += ", allow_own_as: 1" // BIRD passes on the AS that all servers share
	}
	if n.Kind == topo.KindServer && n.driver == "bpf" && n.f.d.spray {
		text = strings.Replace(text, "mode: per-flow", "mode: per-packet", 1)
	}
	bgp := "bgp: {" + keys + "}"
	var lines []string
	for line := range strings.Lines(text) {
		if before, _, found := strings.Cut(line, " speed: "); found {
			line = before + " speed_source: tbf\n" // slowDown changes the devices
		}
		if !strings.HasPrefix(line, "bgp: ") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "") + bgp + "\nmetrics: {listen: \"127.0.0.1:9179\"}\nrecord: {file: " + filepath.Join(n.dir, "record") + ", max_bytes: 1MiB}\n"
}

// startAll starts the processes that do not run.
func (n *node) startAll() {
	for _, name := range []string{dataplane, control} {
		if n.processes[name] == nil && (name == control || n.software != topo.BIRD) {
			n.start(name)
		}
	}
}

func (n *node) start(name string) {
	n.f.t.Helper()
	switch n.software {
	case topo.FRR:
		f := testbed.FRR{Sockets: filepath.Join(n.dir, "frr"), Start: n.ns.Start}
		n.processes[name] = f.Daemon(n.f.t, map[string]string{control: "bgpd", dataplane: "zebra"}[name], filepath.Join(n.dir, "frr.conf"))
		return
	case topo.BIRD:
		n.processes[name] = n.ns.Start(n.f.t, "bird", "-f", "-c", filepath.Join(n.dir, "bird.conf"), "-s", n.socket("bird"), "-P", filepath.Join(n.dir, "bird.pid"))
		return
	}
	args := []string{"dataplane", "--driver", n.driver, "--socket", n.socket("dataplane"), "--pin-dir", n.pins(), "--metrics-listen", "127.0.0.1:9180"}
	if name == control {
		args = []string{map[bool]string{true: "run", false: "leaf"}[n.Kind == topo.KindServer], "--config", filepath.Join(n.dir, topo.ConfigFile)}
	}
	n.processes[name] = n.ns.Start(n.f.t, binary.Fared(n.f.t), args...)
}

// kill kills a process.
func (n *node) kill(name string) {
	if p := n.processes[name]; p != nil {
		delete(n.processes, name)
		p.Kill()
	}
}

func (n *node) signal(name string, s unix.Signal) {
	n.f.t.Helper()
	if err := n.processes[name].Signal(s); err != nil {
		n.f.t.Fatalf("%s of %s: %v", name, n.Name, err)
	}
}

// client returns a client of the node's daemon.
func (n *node) client() farev1.WeightServiceClient {
	n.f.t.Helper()
	if n.conn == nil {
		pace := backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, MaxDelay: 200 * time.Millisecond}
		n.conn = testbed.Dial(n.f.t, n.socket("fared"), grpc.WithConnectParams(grpc.ConnectParams{Backoff: pace, MinConnectTimeout: 15 * time.Second}))
	}
	return farev1.NewWeightServiceClient(n.conn)
}

// rows returns the rows of a server's daemon, by destination and source.
func (n *node) rows() (map[[2]string]*farev1.DestinationWeights, error) {
	ctx, cancel := context.WithTimeout(n.f.t.Context(), time.Second)
	defer cancel()
	all := map[[2]string]*farev1.DestinationWeights{}
	for _, end := range n.f.d.loopbacks() {
		if n.f.d.serverOf(end) == n.Index {
			continue
		}
		answer, err := n.client().GetWeights(ctx, &farev1.GetWeightsRequest{Destination: n.f.loopback(end).String()})
		if err != nil {
			return nil, err
		}
		for _, row := range answer.Weights {
			for _, source := range row.Sources {
				all[[2]string{row.Destination, source}] = row
			}
		}
	}
	return all, nil
}

// cable returns a cable by its place.
func (f *fabric) cable(x cable) *topo.Cable {
	for _, c := range f.numbers.Cables {
		if c.Plane == x.plane && c.Group.Index == x.group && c.Sub == x.sub {
			return c
		}
	}
	f.t.Fatalf("no cable %v", x)
	return nil
}
