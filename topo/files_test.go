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
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
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

// TestGenerateGolden compares the files of the examples: those of two-tier in full for readers, those of the others by
// digests.
func TestGenerateGolden(t *testing.T) {
	for _, name := range Examples() {
		var all strings.Builder
		targets := Targets()
		if name != "two-tier" {
			targets = targets[:slices.Index(targets, Networkd)] // files of addresses have no variants
		}
		for _, target := range targets {
			for _, file := range example(t, name).Generate(target) {
				switch {
				case name != "two-tier":
					fmt.Fprintf(&all, "%x  %s/%s\n", sha256.Sum256([]byte(file.Text)), target, file.Name)
				case path.Base(file.Name) == ConfigFile && target != Machines: // as for machines, or with other paths
				case target == Machines || strings.HasPrefix(file.Name, "nodes/server1/") || path.Dir(file.Name) == "." && !strings.HasPrefix(file.Name, "cabling.") && !strings.HasPrefix(file.Name, "fabric."):
					fmt.Fprintf(&all, "-- %s/%s --\n%s", target, file.Name, file.Text)
				}
			}
		}
		golden(t, name, all.String())
	}
}

// TestUnnumberedGolden compares the files of fabrics without addresses of cables: those of the first server for each
// program, and those of a leaf and a spine, with all software.
func TestUnnumberedGolden(t *testing.T) {
	var all strings.Builder
	for _, s := range []Spec{
		{Leaf: FRR, Spine: FRR, Leaves: 2, Spines: 1, Addresses: Dual},
		{Leaf: Fared, Spine: BIRD, Leaves: 2, Spines: 1},
		{Leaf: BIRD, Addresses: Dual},
		{Leaf: BIRD, Addresses: IPv6},
	} {
		s.Name, s.Planes, s.SubPorts, s.Servers, s.Cables = "bare", 1, 1, 2, Unnumbered
		f, err := New(s)
		if err != nil {
			t.Fatal(err)
		}
		for _, target := range []Target{Networkd, Netplan, Ifupdown} {
			for _, file := range f.Generate(target) {
				node := strings.HasPrefix(file.Name, "nodes/server1/") || strings.HasPrefix(file.Name, "nodes/leaf0") || strings.HasPrefix(file.Name, "nodes/spine0")
				common := path.Base(file.Name) == "daemons" || path.Base(file.Name) == "vtysh.conf"
				if target == Networkd && (node || file.Name == "cabling.csv") && !common || strings.HasPrefix(file.Name, "nodes/server1/") && path.Base(file.Name) != ConfigFile {
					fmt.Fprintf(&all, "-- %s/%s --\n%s", target, file.Name, file.Text)
				}
			}
		}
	}
	golden(t, "unnumbered", all.String())
	for _, address := range []string{"10.0.", "10.1.", "fd00:10:"} { // of the underlay
		if strings.Contains(all.String(), address) {
			t.Errorf("a file has an address of a cable, %s", address)
		}
	}
	waits := Spec{Leaf: BIRD, Leaves: 2, Spines: 1, Cables: Unnumbered}
	if _, err := New(waits); err == nil || !strings.Contains(err.Error(), "BIRD leaf waits") {
		t.Errorf("BIRD leaves below spines, all of which wait: %v", err)
	}
}

// TestShippedContainerlab verifies that the files in containerlab/ equal those generated from their descriptions. make
// generate writes them.
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

// check passes a file to a router's own parser.
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

// TestRoutersAccept verifies that FRR's and BIRD's own parsers accept the files, and reject them with a mistake in
// them.
func TestRoutersAccept(t *testing.T) {
	netnstest.Require(t, "vtysh", "bird")
	mistakes := map[string][2]string{"frr.conf": {"bandwidth cumulative", "bandwidth cumulatively"}, "bird.conf": {"protocol bgp", "protocol bgpp"}}
	specs := []Spec{{Addresses: Dual, Leaves: 2, Spines: 2, Servers: 4, SharedAS: SharedServers, BFD: time.Second},
		{GPUs: 2, GPUPorts: Own, Servers: 2}, {Leaves: 2},
		{}, {Leaves: 2, Spines: 2, GPUs: 8, Servers: 4}, {SubPorts: 16, Speed: 1 * fare.Terabit}, {Leaves: 2, Spines: 1, BFD: 100 * time.Millisecond},
		{Addresses: IPv6, Leaves: 2, Spines: 2, GPUs: 2, GPUPorts: Own, Servers: 4}}[:gate.Count(t, gate.Interop, 3, 8)]
	for _, software := range []string{FRR, BIRD} {
		for _, s := range specs {
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

// session is a BGP session in one node's file.
type session struct {
	local, peer netip.Addr
	as, peerAS  uint32
}

var (
	frrAS       = regexp.MustCompile(`(?m)^router bgp (\d+)$`)
	frrNeighbor = regexp.MustCompile(`(?m)^ neighbor (\S+) remote-as (\d+)$`)
	frrAddress  = regexp.MustCompile(`(?m)^ (?:ip|ipv6) address (\S+/(?:31|127))$`)
	birdSession = regexp.MustCompile(`(?m)^protocol bgp \w+ from \w+ \{ local (\S+) as (\d+); neighbor (\S+) as (\d+); \}$`)
)

// sessions parses a node's file.
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
			p := netip.MustParsePrefix(m[1])
			locals[p.Masked()] = p.Addr()
		}
		for _, m := range frrNeighbor.FindAllStringSubmatch(file.Text, -1) {
			peer := netip.MustParseAddr(m[1])
			all = append(all, session{locals[netip.PrefixFrom(peer, peer.BitLen()-1).Masked()], peer, own, as(m[2])})
		}
	case "bird.conf":
		for _, m := range birdSession.FindAllStringSubmatch(file.Text, -1) {
			all = append(all, session{netip.MustParseAddr(m[1]), netip.MustParseAddr(m[3]), as(m[2]), as(m[4])})
		}
	default:
		t.Fatalf("%s: no test parses it", file.Name)
	}
	return all, passive
}

// TestPeersAgree verifies that every session of any fabric is in the files of both its nodes, with the same addresses
// and AS numbers, and that the files have no other session.
func TestPeersAgree(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range gate.Count(t, gate.Models, 18, 45) {
		f, err := New(randomSpec(rng))
		if err != nil {
			t.Fatal(err)
		}
		for _, target := range Targets()[i%3 : i%3+1] {
			seen := map[session]int{}
			total := 0
			for _, n := range f.Nodes() {
				all, passive := sessions(t, f, n, f.Files(n, f.Site(target))[0])
				each := 1
				if f.Addresses == Dual {
					each = 2
				}
				for _, s := range all {
					if s.local.Is4() && f.Addresses == IPv6 || s.local.Is6() && f.Addresses == IPv4 || s.local.Is4() != s.peer.Is4() {
						t.Fatalf("%+v: %s has the session %+v", f.Spec, n.Name, s)
					}
				}
				if len(all) != each*len(f.At(n)) {
					t.Fatalf("%+v: %s has %d sessions in its file, and %d cables", f.Spec, n.Name, len(all), len(f.At(n)))
				}
				down := 0
				for _, c := range f.At(n) {
					if here, _ := c.At(n); here == &c.Up {
						down += each
					}
				}
				if f.Software(n) == Fared && passive != down {
					t.Fatalf("%+v: %s waits on %d sessions, and has %d below it", f.Spec, n.Name, passive, down)
				}
				for _, s := range all {
					seen[s]++
					total++
				}
			}
			for s := range seen {
				if seen[s] != 1 || seen[session{s.peer, s.local, s.peerAS, s.as}] != 1 {
					t.Fatalf("%+v: %+v is not what the other end says", f.Spec, s)
				}
			}
			if total != 2*len(f.Cables)*f.sessionsEach() {
				t.Fatalf("%+v: %d ends of sessions, %d cables", f.Spec, total, len(f.Cables))
			}
		}
	}
}

// TestNumbering verifies that names, addresses, AS numbers and identifiers are unique, and that both ends of a cable
// are in one /31.
func TestNumbering(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	specs := []Spec{{Servers: 2048, GPUs: 8, Planes: 8, Leaves: 16, Spines: 16}, {Planes: 64, SubPorts: 1, Servers: 1024}}
	for range gate.Count(t, gate.Models, 40, 300) {
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
			if n.Kind == KindLeaf || n.Kind == KindServer && f.SharedAS == SharedNone { // the spines of a plane share one AS
				own(n.AS, n.Name)
			}
			if f.Node(n.Name) != n {
				t.Fatalf("%s is not found by its name", n.Name)
			}
			if n.Kind == KindServer {
				for g := range f.GPUs {
					for _, l := range f.LoopbacksAt(n.Index, g) {
						if l.Addr() != n.ID { // the first loopback equals the identifier
							own(l.Addr(), n.Name)
						}
						if !l.IsSingleIP() || !f.Loopbacks.Contains(l.Addr()) && !f.Loopbacks6.Contains(l.Addr()) {
							t.Fatalf("%+v: the loopback %s is not in %s or %s", s, l, f.Loopbacks, f.Loopbacks6)
						}
					}
				}
			}
		}
		for i, c := range f.Cables {
			if c.Index != i || c.Down.Node.Kind >= c.Up.Node.Kind || c.Up.Node.Plane != c.Plane {
				t.Fatalf("%+v: cable %d is %+v", s, i, c)
			}
			if c.Down.Addr.IsValid() != (f.Addresses != IPv6) || c.Down.Addr6.IsValid() != (f.Addresses != IPv4) {
				t.Fatalf("%+v: cable %d has %s", s, i, c.Down.Addrs())
			}
			for k, down := range c.Down.Addrs() {
				up := c.Up.Addrs()[k]
				if p := netip.PrefixFrom(down, down.BitLen()-1); p != p.Masked() || !p.Contains(up) || up == down || !f.Underlay.Contains(down) && !f.Underlay6.Contains(down) {
					t.Fatalf("%+v: cable %d from %s to %s", s, i, down, up)
				}
			}
			for _, e := range []End{c.Down, c.Up} {
				for _, a := range e.Addrs() {
					own(a, e.Node.Name)
				}
				own(e.Node.Name+"/"+e.Device, "a device")
				if len(e.Device) > 15 {
					t.Fatalf("%+v: a device cannot be called %s", s, e.Device)
				}
			}
			if at, err := f.Find(c.Down.Node.Name + "/" + c.Down.Device); err != nil || len(at) != 1 || at[0] != c {
				t.Fatalf("%s/%s finds %v, %v", c.Down.Node.Name, c.Down.Device, at, err)
			}
		}
		for i, g := range f.Groups() {
			n := 0
			for p, cables := range g.Planes {
				for sub, c := range cables {
					if n++; c.Plane != p || c.Down.Node != g.Server || c.Sub != sub || c.Group != g {
						t.Fatalf("%s: the cable of sub-port %d in plane %d is %+v", g.Name, sub, p, c)
					}
				}
			}
			if g.Index != i || n == 0 || n != len(g.Cables) || f.Group(g.Name) != g || g.Server != f.Server[i/f.GroupsEach()] {
				t.Fatalf("%+v: the source group %d is %+v", s, i, g)
			}
		}
	}
}

// TestDeterministic verifies that the same description yields the same bytes.
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

// TestDevicesEverywhere verifies that every generated file has the names of the pattern, and none has the default ones.
func TestDevicesEverywhere(t *testing.T) {
	byDefault := regexp.MustCompile(`\bp\d\.\d\b`)
	for pattern, want := range map[string]string{"mlx5_{n}": `\bmlx5_11\b`, "enp{n}s0f{sub}": `\benp11s0f1\b`, "gpu{gpu}.{p}.{sub}": `\bgpu1\.2\.1\b`, "r{gpu}{plane}s{sub}": `\br1p2s1\b`} {
		f := number(t, Spec{Servers: 2, Planes: 3, GPUs: 2, GPUPorts: Own, Devices: pattern})
		for _, target := range Targets() {
			for _, file := range f.Generate(target) {
				if m := byDefault.FindString(file.Text); m != "" {
					t.Errorf("%s: %s of %s has the default name %s", pattern, file.Name, target, m)
				}
				switch {
				case strings.Contains(file.Name, "/network/"): // one file a device
				case strings.HasPrefix(file.Name, "nodes/server"), strings.HasPrefix(file.Name, "cabling."), file.Name == "netns.sh", file.Name == f.ClabFile():
					if !regexp.MustCompile(want).MatchString(file.Text) {
						t.Errorf("%s: %s of %s has no device %s", pattern, file.Name, target, want)
					}
				}
			}
		}
	}
	if f := number(t, Spec{Servers: 2}); !byDefault.MatchString(f.CablingText()) {
		t.Error("the default names are others: this test has lost its subject")
	}
}

// TestCablingOfBothFamilies verifies that rows have the addresses of both ends in the columns of their families.
func TestCablingOfBothFamilies(t *testing.T) {
	for addresses, want := range map[string][2]string{
		IPv4: {"plane,from,from_device,from_address,from_as,to,to_device,to_address,to_as,speed,half", "p0,server1,p0.0,10.0.1.0/31,4200001000,leaf0,s1.0,10.0.1.1/31,4200010000,400G,a"},
		IPv6: {"plane,from,from_device,from_address,from_as,to,to_device,to_address,to_as,speed,half", "p0,server1,p0.0,fd00:10::100/127,4200001000,leaf0,s1.0,fd00:10::101/127,4200010000,400G,a"},
		Dual: {"plane,from,from_device,from_address,from_address6,from_as,to,to_device,to_address,to_address6,to_as,speed,half",
			"p0,server1,p0.0,10.0.1.0/31,fd00:10::100/127,4200001000,leaf0,s1.0,10.0.1.1/31,fd00:10::101/127,4200010000,400G,a"},
	} {
		lines := strings.Split(number(t, Spec{Addresses: addresses}).CablingCSV(), "\n")
		if lines[0] != want[0] || lines[1] != want[1] {
			t.Errorf("%s:\n%s\n%s", addresses, lines[0], lines[1])
		}
	}
}

// TestLeavesHaveServers verifies that servers wired in blocks are spread over all leaves, whose numbers of servers
// differ by at most one.
func TestLeavesHaveServers(t *testing.T) {
	for servers := 2; servers < 20; servers++ {
		for leaves := 2; leaves <= servers; leaves++ {
			f := number(t, Spec{Planes: 1, Servers: servers, Leaves: leaves, Spines: 1, SubPorts: 1})
			for _, leaf := range f.Leaf {
				if n := len(f.At(leaf)) - 1; n < servers/leaves || n > (servers+leaves-1)/leaves {
					t.Errorf("%d of %d servers are at %s, one of %d leaves", n, servers, leaf.Name, leaves)
				}
			}
		}
	}
	_, err := New(Spec{Planes: 2, Servers: 4, Leaves: 4, Spines: 1, Overrides: "server2/p1 sub_ports=0"})
	if err == nil || !strings.Contains(err.Error(), "leaf1-1 would have no server") {
		t.Errorf("a leaf with uplinks alone: %v", err)
	}
}

// TestWiring verifies devices, addresses, rates and settings of a leaf and a server.
func TestWiring(t *testing.T) {
	f := example(t, "two-tier")
	wiring := f.Wiring(Site{RateScale: 1000})
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
	indexes, seeds := map[int]int{}, map[string]bool{}
	for _, w := range wiring {
		for _, d := range w.Devices {
			indexes[d.Index]++
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
	for index, n := range indexes {
		if n != 2 {
			t.Errorf("%d devices have the index %d, want both ends of one cable", n, index)
		}
	}
	if len(seeds) != len(f.Leaf)+len(f.Spine) {
		t.Errorf("%d seeds", len(seeds))
	}
	if lines := f.Wiring(Site{})[0].TC(); lines != nil {
		t.Errorf("rates without a site that has them: %v", lines)
	}
}

// TestNetnsScript verifies that the script creates the wiring, and removes all of it.
func TestNetnsScript(t *testing.T) {
	netnstest.Require(t, "tc", "sysctl", "sh")
	f, err := New(Spec{Name: fmt.Sprintf("t%d", os.Getpid()), Planes: 2, Leaves: 2, Spines: 1, Servers: 2, GPUs: 2, Addresses: Dual})
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
	t.Cleanup(func() { exec.Command(script, "down").Run() }) // in case the test fails
	run(script, "up")
	for _, w := range f.Wiring(site) {
		netns := f.netnsName(w.Node.Name)
		addresses := run("ip", "-n", netns, "-brief", "address", "show", "up")
		rates := run("tc", "-n", netns, "qdisc", "show")
		for _, d := range w.Devices {
			if len(d.Addrs) != 2 {
				t.Errorf("%s: %s has the addresses %s", w.Node.Name, d.Name, d.Addrs)
			}
			for _, a := range d.Addrs {
				if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(d.Name) + `@\S+ +\S+ +(\S+ )*` + regexp.QuoteMeta(a.String()) + ` `).MatchString(addresses) {
					t.Errorf("%s has no %s %s:\n%s", w.Node.Name, d.Name, a, addresses)
				}
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

// TestClab verifies that the topology file has every node, with files that exist, and every cable, and that one end of
// each cable takes the interface index of the other end unless neither end runs fared.
func TestClab(t *testing.T) {
	for _, s := range []Spec{{}, {Leaf: FRR}, {Leaf: BIRD, Servers: 3}, {Leaves: 2, Spines: 2, Spine: FRR}, {Addresses: Dual, Leaf: BIRD}, {Addresses: IPv6, Leaves: 2, Spines: 2},
		{Leaves: 2, Spines: 2, Leaf: BIRD}, {Leaves: 2, Spines: 2, Leaf: FRR, Spine: BIRD}, {Devices: "eth{n}"}} {
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
			ends, want := 0, 1
			for _, e := range []End{c.Down, c.Up} {
				for _, command := range lab.Topology.Groups[e.Node.Kind.String()].Exec {
					_, pattern, chosen := strings.Cut(command, "--match-index ")
					if ok, err := path.Match(pattern, e.Device); err != nil {
						t.Errorf("%s: %v", command, err)
					} else if chosen && ok {
						ends++
					}
				}
			}
			if f.Software(c.Down.Node) != Fared && f.Software(c.Up.Node) != Fared {
				want = 0
			}
			if ends != want {
				t.Errorf("%s with leaves of %q and spines of %q: %d ends of %q get the index of the other, want %d", f.Name, f.Spec.Leaf, f.Spec.Spine, ends, l.Endpoints, want)
			}
		}
	}
}
