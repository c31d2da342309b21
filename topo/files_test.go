package topo

import (
	"bytes"
	"crypto/sha256"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/netnstest"
)

var update = flag.Bool("update", false, "rewrite testdata/*.golden")

// golden compares with testdata/NAME.golden.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	a, b := strings.SplitAfter(got, "\n"), strings.SplitAfter(string(want), "\n")
	for i := range max(len(a), len(b)) {
		if i >= len(a) || i >= len(b) || a[i] != b[i] {
			t.Fatalf("%s:%d differs: -update rewrites it\ngot  %q\nwant %q", file, i+1, a[min(i, len(a)):min(i+1, len(a))], b[min(i, len(b)):min(i+1, len(b))])
		}
	}
}

// TestGenerateGolden: the files of the examples. Those of two-tier are there to be read, of the others only digests.
func TestGenerateGolden(t *testing.T) {
	for _, name := range Examples() {
		var all strings.Builder
		for _, target := range Targets() {
			for _, file := range example(t, name).Generate(target) {
				switch {
				case name != "two-tier":
					fmt.Fprintf(&all, "%x  %s/%s\n", sha256.Sum256([]byte(file.Text)), target, file.Name)
				case target == Machines || path.Dir(file.Name) == "." && !strings.HasPrefix(file.Name, "cabling.") && !strings.HasPrefix(file.Name, "fabric."):
					fmt.Fprintf(&all, "-- %s/%s --\n%s", target, file.Name, file.Text)
				}
			}
		}
		golden(t, name, all.String())
	}
}

// TestShippedContainerlab: what is in containerlab/ is what its descriptions give. make generate writes it.
func TestShippedContainerlab(t *testing.T) {
	const root = "../containerlab"
	descriptions, err := filepath.Glob(filepath.Join(root, "*", SpecFile))
	if err != nil || len(descriptions) < 4 {
		t.Fatalf("%d descriptions in containerlab/: this test has lost its subject (%v)", len(descriptions), err)
	}
	for _, description := range descriptions {
		text, err := os.ReadFile(description)
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Dir(description)
		wanted := map[string]bool{}
		for _, file := range fabric(t, description, text).Generate(Containerlab) {
			wanted[file.Name] = true
			got, err := os.ReadFile(filepath.Join(dir, file.Name))
			if err != nil {
				t.Fatalf("%v: run 'make generate' and commit", err)
			}
			if string(got) != file.Text {
				t.Errorf("%s is stale: run 'make generate' and commit", filepath.Join(dir, file.Name))
			}
		}
		err = fs.WalkDir(os.DirFS(filepath.Join(dir, "nodes")), ".", func(name string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() && !wanted["nodes/"+name] {
				t.Errorf("%s/nodes/%s belongs to no node", dir, name)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// check gives a file to a router's own parser.
func check(t *testing.T, name, text string) error {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	command := []string{"vtysh", "-C", "-f", file}
	if name == "bird.conf" {
		command = []string{"bird", "-p", "-c", file}
	}
	if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// TestRoutersAccept: FRR's and BIRD's own parsers take the files, and refuse them with a mistake in them.
func TestRoutersAccept(t *testing.T) {
	netnstest.Require(t, "vtysh", "bird")
	mistakes := map[string][2]string{"frr.conf": {"bandwidth cumulative", "bandwidth cumulatively"}, "bird.conf": {"protocol bgp", "protocol bgpp"}}
	for _, software := range []string{FRR, BIRD} {
		for _, s := range []Spec{{}, {Leaves: 2, Spines: 2, GPUs: 8, Servers: 4}, {Leaves: 2}, {SubPorts: 16, Speed: 1 * fare.Terabit}, {Leaves: 2, Spines: 1, BFD: 100 * time.Millisecond}} {
			s.Leaf, s.Spine = software, software
			f, err := New(s)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range f.Nodes()[f.Servers:] {
				file := f.Files(n, f.Site(Machines))[0]
				if err := check(t, file.Name, file.Text); err != nil {
					t.Errorf("%s of %s: %v", file.Name, n.Name, err)
				}
				if n.Index > 0 {
					continue
				}
				wrong := strings.Replace(file.Text, mistakes[file.Name][0], mistakes[file.Name][1], 1)
				if wrong == file.Text {
					t.Fatalf("%s does not say %q", file.Name, mistakes[file.Name][0])
				}
				if check(t, file.Name, wrong) == nil {
					t.Errorf("%s is taken with a mistake in it: this test shows nothing", file.Name)
				}
			}
		}
	}
}

// session is what one node's file says of a BGP session.
type session struct {
	local, peer netip.Addr
	as, peerAS  uint32
}

var (
	frrAS       = regexp.MustCompile(`(?m)^router bgp (\d+)$`)
	frrNeighbor = regexp.MustCompile(`(?m)^ neighbor (\S+) remote-as (\d+)$`)
	frrAddress  = regexp.MustCompile(`(?m)^ ip address (\S+)/31$`)
	birdSession = regexp.MustCompile(`(?m)^protocol bgp \w+ from \w+ \{ local (\S+) as (\d+); neighbor (\S+) as (\d+); \}$`)
)

// sessions reads a node's file.
func sessions(t *testing.T, f *Fabric, n *Node, file File) (all []session, passive int) {
	t.Helper()
	as := func(text string) uint32 {
		v, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		return uint32(v)
	}
	switch file.Name {
	case ConfigFile:
		c, err := config.Parse(n.Name, []byte(file.Text))
		if err != nil {
			t.Fatalf("%+v\n%v\n%s", f.Spec, err, file.Text)
		}
		if (c.Role == fare.RoleServer) != (n.Kind == KindServer) || c.RouterID != n.ID {
			t.Errorf("%s: role %s, router ID %s", n.Name, c.Role, c.RouterID)
		}
		for _, p := range c.Planes {
			for _, sp := range p.SubPorts {
				for _, s := range sp.Sessions {
					all = append(all, session{s.Local, s.Peer, c.AS, s.PeerAS})
					if s.Passive {
						passive++
					}
				}
			}
		}
	case "frr.conf":
		own := as(frrAS.FindStringSubmatch(file.Text)[1])
		locals := map[netip.Prefix]netip.Addr{}
		for _, m := range frrAddress.FindAllStringSubmatch(file.Text, -1) {
			a := netip.MustParseAddr(m[1])
			locals[netip.PrefixFrom(a, 31).Masked()] = a
		}
		for _, m := range frrNeighbor.FindAllStringSubmatch(file.Text, -1) {
			peer := netip.MustParseAddr(m[1])
			all = append(all, session{locals[netip.PrefixFrom(peer, 31).Masked()], peer, own, as(m[2])})
		}
	case "bird.conf":
		for _, m := range birdSession.FindAllStringSubmatch(file.Text, -1) {
			all = append(all, session{netip.MustParseAddr(m[1]), netip.MustParseAddr(m[3]), as(m[2]), as(m[4])})
		}
	default:
		t.Fatalf("%s: nobody reads it", file.Name)
	}
	return all, passive
}

// TestPeersAgree: of any fabric, every session is in the files of both its nodes, with the same addresses and AS numbers, and
// nothing else is.
func TestPeersAgree(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range 45 {
		f, err := New(randomSpec(rng))
		if err != nil {
			t.Fatal(err)
		}
		for _, target := range Targets()[i%3 : i%3+1] {
			said := map[session]int{}
			total := 0
			for _, n := range f.Nodes() {
				all, passive := sessions(t, f, n, f.Files(n, f.Site(target))[0])
				if len(all) != len(f.At(n)) {
					t.Fatalf("%+v: %s has %d sessions in its file, and %d cables", f.Spec, n.Name, len(all), len(f.At(n)))
				}
				down := 0
				for _, c := range f.At(n) {
					if here, _ := c.At(n); here == &c.Up {
						down++
					}
				}
				if f.Software(n) == Fared && passive != down {
					t.Fatalf("%+v: %s waits on %d sessions, and has %d below it", f.Spec, n.Name, passive, down)
				}
				for _, s := range all {
					said[s]++
					total++
				}
			}
			for s := range said {
				if said[s] != 1 || said[session{s.peer, s.local, s.peerAS, s.as}] != 1 {
					t.Fatalf("%+v: %+v is not what the other end says", f.Spec, s)
				}
			}
			if total != 2*len(f.Cables) {
				t.Fatalf("%+v: %d ends of sessions, %d cables", f.Spec, total, len(f.Cables))
			}
		}
	}
}

// TestNumbering: names, addresses, AS numbers and identifiers are unique, and both ends of a cable are in one /31.
func TestNumbering(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	specs := []Spec{{Servers: 2048, GPUs: 8, Planes: 8, Leaves: 16, Spines: 16}, {Planes: 64, SubPorts: 1, Servers: 1024}}
	for range 300 {
		specs = append(specs, randomSpec(rng))
	}
	for _, s := range specs {
		f, err := New(s)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[any]string{}
		own := func(what any, who string) {
			if other, taken := seen[what]; taken {
				t.Fatalf("%+v: %v is of %s and of %s", s, what, other, who)
			}
			seen[what] = who
		}
		for _, n := range f.Nodes() {
			own(n.Name, n.Name)
			own(n.ID, n.Name)
			if n.Kind != KindSpine { // those of a plane share one
				own(n.AS, n.Name)
			}
			if f.Node(n.Name) != n {
				t.Fatalf("%s is not found by its name", n.Name)
			}
			if n.Kind == KindServer {
				for g := range f.GPUs {
					if g > 0 { // the first is the identifier
						own(f.Loopback(n.Index, g).Addr(), n.Name)
					}
					if !f.Loopbacks.Contains(f.Loopback(n.Index, g).Addr()) {
						t.Fatalf("%+v: the loopback %s is not in %s", s, f.Loopback(n.Index, g), f.Loopbacks)
					}
				}
			}
		}
		for i, c := range f.Cables {
			if c.Index != i || c.Down.Node.Kind >= c.Up.Node.Kind || c.Up.Node.Plane != c.Plane {
				t.Fatalf("%+v: cable %d is %+v", s, i, c)
			}
			if netip.PrefixFrom(c.Down.Addr, 31).Masked() != netip.PrefixFrom(c.Up.Addr, 31).Masked() || !f.Underlay.Contains(c.Down.Addr) {
				t.Fatalf("%+v: cable %d from %s to %s", s, i, c.Down.Addr, c.Up.Addr)
			}
			for _, e := range []End{c.Down, c.Up} {
				own(e.Addr, e.Node.Name)
				own(e.Node.Name+"/"+e.Device, "a device")
				if len(e.Device) > 15 {
					t.Fatalf("%+v: a device cannot be called %s", s, e.Device)
				}
			}
			if at, err := f.Find(c.Down.Node.Name + "/" + c.Down.Device); err != nil || len(at) != 1 || at[0] != c {
				t.Fatalf("%s/%s finds %v, %v", c.Down.Node.Name, c.Down.Device, at, err)
			}
		}
		for p := range f.Planes {
			for s := range f.Server {
				for sub := range f.SubPorts {
					if c := f.Cable(p, s, sub); c.Plane != p || c.Down.Node != f.Server[s] || c.Sub != sub {
						t.Fatalf("the cable of server %d's sub-port %d in plane %d is %+v", s, sub, p, c)
					}
				}
			}
		}
	}
}

// TestDeterministic: the same description gives the same bytes.
func TestDeterministic(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for range 30 {
		s := randomSpec(rng)
		for _, target := range Targets() {
			a, err := New(s)
			if err != nil {
				t.Fatal(err)
			}
			b, err := New(s)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(a.Generate(target), b.Generate(target)) {
				t.Fatalf("%+v: two runs differ", s)
			}
		}
	}
}

// TestWiring: devices, addresses, rates and settings of a leaf and a server.
func TestWiring(t *testing.T) {
	f := example(t, "two-tier")
	wiring := f.Wiring(Site{Speeds: "tbf", SpeedScale: 1000})
	if len(wiring) != len(f.Nodes()) {
		t.Fatalf("%d nodes", len(wiring))
	}
	server := wiring[0]
	if got, want := strings.Join(append(server.IP()[:4], server.TC()[0]), "; "), "link set lo up; addr add 10.255.0.1/32 dev lo; addr add 10.0.1.0/31 dev p0.0; link set p0.0 up; "+
		"qdisc add dev p0.0 root tbf rate 400000000bit burst 500000 latency 50ms"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	leaf := wiring[f.Servers]
	if up := leaf.Devices[len(leaf.Devices)-1]; up.Name != "up1" || up.Rate != 800*fare.Megabit || len(leaf.Loopbacks) != 0 {
		t.Errorf("%+v", leaf)
	}
	if !slices.Contains(leaf.Sysctls, Sysctl{"net.ipv4.ip_forward", "1"}) || !slices.Contains(server.Sysctls, Sysctl{"net.ipv4.ip_forward", "0"}) {
		t.Errorf("a leaf forwards, and a server does not: %v, %v", leaf.Sysctls, server.Sysctls)
	}
	indexes, seeds := map[int]bool{}, map[string]bool{}
	for _, w := range wiring {
		for _, d := range w.Devices {
			if indexes[d.Index] {
				t.Errorf("two devices have the index %d", d.Index)
			}
			indexes[d.Index] = true
		}
		for _, s := range w.Sysctls {
			if s.Name == hashSeed(w.Node).Name {
				if seeds[s.Value] || s.Value == "0" {
					t.Errorf("%s: the seed %s", w.Node.Name, s.Value)
				}
				seeds[s.Value] = true
			}
		}
	}
	if len(seeds) != len(f.Leaf)+len(f.Spine) {
		t.Errorf("%d seeds", len(seeds))
	}
	if lines := f.Wiring(Site{})[0].TC(); lines != nil {
		t.Errorf("rates without a site that has them: %v", lines)
	}
}

// TestNetnsScript: the script makes what the wiring says, and removes all of it.
func TestNetnsScript(t *testing.T) {
	netnstest.Require(t, "tc", "sysctl", "sh")
	f, err := New(Spec{Name: fmt.Sprintf("t%d", os.Getpid()), Planes: 2, Leaves: 2, Spines: 1, Servers: 2, GPUs: 2})
	if err != nil {
		t.Fatal(err)
	}
	site := f.Site(Netns)
	script := filepath.Join(t.TempDir(), "netns.sh")
	if err := os.WriteFile(script, []byte(f.NetnsScript(site).Text), 0o755); err != nil {
		t.Fatal(err)
	}
	run := func(command ...string) string {
		out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v\n%s", command, err, out)
		}
		return string(out)
	}
	t.Cleanup(func() { exec.Command(script, "down").Run() }) // when the test fails
	run(script, "up")
	for _, w := range f.Wiring(site) {
		netns := f.netnsName(w.Node.Name)
		addresses := run("ip", "-n", netns, "-brief", "address", "show", "up")
		rates := run("tc", "-n", netns, "qdisc", "show")
		for _, d := range w.Devices {
			if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(d.Name) + `@\S+ +\S+ +` + regexp.QuoteMeta(d.Addr.String()) + ` `).MatchString(addresses) {
				t.Errorf("%s has no %s %s:\n%s", w.Node.Name, d.Name, d.Addr, addresses)
			}
			if !strings.Contains(rates, "dev "+d.Name+" root refcnt") {
				t.Errorf("%s: %s has no rate:\n%s", w.Node.Name, d.Name, rates)
			}
		}
		for _, l := range w.Loopbacks {
			if !strings.Contains(addresses, " "+l.String()) {
				t.Errorf("%s has no loopback %s:\n%s", w.Node.Name, l, addresses)
			}
		}
		for _, s := range w.Sysctls {
			want, err := strconv.ParseUint(s.Value, 0, 32)
			if got := strings.TrimSpace(run("ip", "netns", "exec", netns, "sysctl", "-n", s.Name)); err != nil || got != fmt.Sprint(want) {
				t.Errorf("%s: %s is %s, not %s", w.Node.Name, s.Name, got, s.Value)
			}
		}
	}
	run(script, "down")
	if left := run("ip", "netns", "list"); strings.Contains(left, f.netnsName("")) {
		t.Errorf("left behind:\n%s", left)
	}
	if err := exec.Command(script).Run(); err == nil {
		t.Error("the script does something without being told what")
	}
}

// TestClab: the topology file has every node with files that there are, and every cable.
func TestClab(t *testing.T) {
	for _, s := range []Spec{{}, {Leaf: FRR}, {Leaf: BIRD, Servers: 3}, {Leaves: 2, Spines: 2, Spine: FRR}} {
		f, err := New(s)
		if err != nil {
			t.Fatal(err)
		}
		files := map[string]string{}
		for _, file := range f.Generate(Containerlab) {
			files[file.Name] = file.Text
		}
		var lab struct {
			Name     string
			Topology struct {
				Defaults map[string]any
				Groups   map[string]struct {
					Image, Cmd string
					Exec       []string
					Sysctls    map[string]string
				}
				Nodes map[string]struct {
					Group   string
					Sysctls map[string]string
					Binds   []string
				}
				Links []struct{ Endpoints []string }
			}
		}
		dec := yaml.NewDecoder(bytes.NewReader([]byte(files[f.ClabFile()])))
		dec.KnownFields(true)
		if err := dec.Decode(&lab); err != nil {
			t.Fatalf("%v\n%s", err, files[f.ClabFile()])
		}
		if lab.Name != f.Name || len(lab.Topology.Nodes) != len(f.Nodes()) || len(lab.Topology.Links) != len(f.Cables) {
			t.Errorf("%s: %d nodes, %d links", lab.Name, len(lab.Topology.Nodes), len(lab.Topology.Links))
		}
		for name, n := range lab.Topology.Nodes {
			if f.Node(name) == nil || lab.Topology.Groups[n.Group].Image == "" || len(n.Binds) == 0 || len(lab.Topology.Groups[n.Group].Sysctls) == 0 ||
				(len(n.Sysctls) > 0) != (f.Spines > 0 && f.Node(name).Kind != KindServer) {
				t.Errorf("%s: %+v", name, n)
			}
			for _, b := range n.Binds {
				source, _, _ := strings.Cut(b, ":")
				if files[source] == "" || path.Dir(source) != "nodes/"+name {
					t.Errorf("%s binds %s, which is not generated", name, source)
				}
			}
		}
		for i, l := range lab.Topology.Links {
			c := f.Cables[i]
			if want := []string{c.Down.Node.Name + ":" + c.Down.Device, c.Up.Node.Name + ":" + c.Up.Device}; !slices.Equal(l.Endpoints, want) {
				t.Errorf("link %d: %v, not %v", i, l.Endpoints, want)
			}
		}
	}
}
