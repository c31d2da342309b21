package topo

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/gate"
)

func TestParse(t *testing.T) {
	got, err := Parse("x.yaml", []byte("# a comment\nname: x\nplanes: 2\nleaves: 2\nspines: 2 # two\nspeed: 200Gbps\nspine: frr\nserver_as: 4200002000\nloopbacks: 10.200.0.0/16\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := Spec{Name: "x", Planes: 2, Leaves: 2, Spines: 2, Speed: 200 * fare.Gigabit, Spine: FRR, ServerAS: 4200002000}
	if want.Loopbacks = got.Loopbacks; got != want || got.Loopbacks.String() != "10.200.0.0/16" {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestParseErrors(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"empty", "# nothing\n", "f:1:1: document: is empty, write a key, such as name: fabric"},
		{"no mapping", "- planes\n", "f:1:1: document: is not a mapping, write keys and values, such as planes: 4"},
		{"syntax", "name: x\nplanes: [\n", "f:2:1: document: is not YAML: did not find expected node content, correct this line or the previous line"},
		{"two documents", "name: x\n---\nname: y\n", "f:2:1: document: a second document starts here, keep one fabric in a file"},
		{"no UTF-8", "name: \xff\n", "f:1:1: document: is not UTF-8, save the file as UTF-8"},
		{"unknown", "server: 4\n", `f:1:1: "server": is not a known key, did you mean "servers"?`},
		{"unknown, with a dash", "sub-ports: 4\n", `f:1:1: "sub-ports": is not a known key, did you mean "sub_ports"?`},
		{"twice", "planes: 2\nservers: 4\nplanes: 3\n", "f:3:1: planes: is set in line 1 already, keep one of the two"},
		{"wrong type", "planes: many\n", `f:1:9: planes: "many" is not a whole number, or too large, for example 4`},
		{"too large", "servers: 99999999999999999999\n", `f:1:10: servers: "99999999999999999999" is not a whole number, or too large, for example 8`},
		{"no unit", "speed: 400\n", `f:1:8: speed: "400" has no unit, write 400G for Gbit/s, or use M, T`},
		{"list", "leaf: [frr]\n", "f:1:7: leaf: is not one value, write leaf: fared"},
		{"no value", "leaf:\n", "f:1:6: leaf: has no value, write leaf: fared, or leave it out"},
		{"alias", "planes: &p 4\nservers: *p\n", "f:1:9: planes: is written with an anchor, alias or tag, write planes: 4\nf:2:10: servers: is written with an anchor, alias or tag, write servers: 8"},
		{"zero is no default", "planes: 0\n", `f:1:9: planes: "0" is out of range, for example 4, or leave it out`},
		{"range, and how it is called", "name: No!\nservers: 5000\n",
			"f:1:7: name: \"No!\" cannot name a fabric, use lower-case letters, digits and dashes, at most 32\nf:2:10: servers: 5000 is out of range, use 2 to 4096"},
		{"all at once", "planes: x\nleaf: junos\nspeed: fast\nserver_as: -1\nunderlay: here\n", strings.Join([]string{
			`f:1:9: planes: "x" is not a whole number, or too large, for example 4`,
			`f:2:7: leaf: "junos" is not known, use fared, frr, bird`,
			`f:3:8: speed: "fast" is not a speed, write a number of bit/s with an optional unit, for example 400G`,
			`f:4:12: server_as: "-1" is not an AS number, for example 4200001000`,
			`f:5:11: underlay: "here" is not a network, for example 10.0.0.0/9`}, "\n")},
		{"does not fit", "leaves: 3\n", "f:1:9: leaves: 3 leaves of a plane for 2 sub-ports of a server, use at most a leaf for each sub-port"},
		{"leaves apart", "leaves: 2\ncabling: block\n", "f:1:1: spines: the 2 leaves of a plane are not connected, give the plane a spine, or use cabling: split"},
		{"reserved AS", "server_as: 23450\nservers: 16\n", "f:1:12: server_as: 23450 to 23465 have 23456, which is reserved, use a private range (RFC 6996): 4200000000 to 4294967294"},
		{"loopbacks of every machine", "loopbacks: 127.1.0.0/16\n", "f:1:12: loopbacks: 127.1.0.0/16 has addresses of 127.0.0.0/8, which cannot be used here, for example 10.0.0.0/9"},
		{"no placeholder", "devices: eth{x}\n", `f:1:10: devices: "{x}" is not a placeholder, use {p}, {plane}, {sub}, {gpu}, {n}`},
		{"GPU without ports", "devices: g{gpu}.{n}\n", `f:1:10: devices: {gpu} in "g{gpu}.{n}", and GPUs share the server's ports, leave it out, or use gpu_ports: own`},
		{"device of 16 characters", "devices: enp{n}s0f{sub}np01234\nplanes: 6\n",
			`f:1:10: devices: "enp10s0f0np01234", sub-port 0 of server1 in plane p5, has 16 characters, more than the 15 of a Linux device, use a shorter pattern, such as eth{n}`},
		{"device twice", "devices: eth{p}\n", `f:1:10: devices: "eth0", sub-port 1 of server1 in plane p0, is sub-port 0 of server1 in plane p0 too, distinguish sub-ports by {n}, or by {plane}, {sub} and, where GPUs own their ports, {gpu}`},
		{"device of Linux", "devices: lo\nservers: 2\n", `f:1:10: devices: "lo", sub-port 0 of server1 in plane p0, is reserved by Linux, use another name, such as eth{n}`},
		{"device with a space", "devices: eth {n}\n", `f:1:10: devices: "eth 0", sub-port 0 of server1 in plane p0, is not a device name, begin with a letter, and use letters, digits, '.', '_' and '-', such as eth{n}`},
		{"device like an open brace", "devices: eth{n\n", `f:1:10: devices: "eth{n", sub-port 0 of server1 in plane p0, is not a device name, begin with a letter, and use letters, digits, '.', '_' and '-', such as eth{n}`},
		{"device like a plane", "devices: p{n}\n", `f:1:10: devices: "p0", sub-port 0 of server1 in plane p0, is the name of a plane, of a GPU, or of a GPU's port, which has other sub-ports, use another name, such as eth{n}`},
		{"device like a GPU", "gpus: 2\ngpu_ports: own\nplanes: 1\nsub_ports: 1\ndevices: g{n}p0\noverrides: server2/g0 sub_ports=2\n",
			`f:5:10: devices: "g0p0", sub-port 0 of server2/g0 in plane p0, is the name of a plane, of a GPU, or of a GPU's port, which has other sub-ports, use another name, such as eth{n}`},
		{"families", "addresses: both\nloopbacks6: 10.0.0.0/8\nunderlay6: fe80::/64\n", strings.Join([]string{
			`f:1:12: addresses: "both" is not known, use ipv4, ipv6, dual`,
			`f:2:13: loopbacks6: 10.0.0.0/8 is not an IPv6 network, for example fd00:255::/64`,
			`f:3:12: underlay6: fe80::/64 has addresses of fe80::/10, which cannot be used here, for example fd00:10::/64`}, "\n")},
		{"small IPv6 networks", "addresses: ipv6\nloopbacks6: fd01::/125\nunderlay6: fd02::/118\n", strings.Join([]string{
			"f:2:13: loopbacks6: fd01::/125 has no room for 8 GPUs, use a larger network",
			"f:3:12: underlay6: fd02::/118 has no room for 1280 addresses, use a larger network"}, "\n")},
		{"IPv6 networks overlap", "addresses: dual\nloopbacks6: fd00:10::/96\n", "f:2:13: loopbacks6: fd00:10::/96 overlaps the underlay fd00:10::/64, use another network"},
		{"too many sessions of two families", "addresses: dual\nservers: 300\n", "f:1:1: leaves: a leaf would have 1200 sessions, more than 1024, use more leaves in a plane"},
		{"too many GPUs", "servers: 4096\ngpus: 8\n", "f:1:1: leaves: a leaf would have 8192 sessions, more than 1024, use more leaves in a plane\nf:2:7: gpus: 4096 servers with 8 GPUs are 32768, more than 16384, use fewer servers or fewer GPUs of a server"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse("f", []byte(c.text))
			if err == nil {
				t.Fatal("accepted")
			}
			if err.Error() != c.want {
				t.Errorf("got\n%s\nwant\n%s", err, c.want)
			}
		})
	}
	if _, err := Parse("f", bytes.Repeat([]byte("#"), MaxFileSize+1)); err == nil || !strings.Contains(err.Error(), "larger than 65536 bytes") {
		t.Errorf("a large file: %v", err)
	}
}

// TestMarshal verifies that Marshal writes the differences from the defaults, and that Parse accepts them.
func TestMarshal(t *testing.T) {
	if got, want := string(Marshal(Spec{})), "name: fabric\n"; got != want {
		t.Errorf("of defaults alone: %q", got)
	}
	// YAML would parse this name as null.
	if got, want := string(Marshal(Spec{Name: "null", Planes: 4, GPUs: 8})), "name: \"null\"\ngpus: 8\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range gate.Count(t, gate.Models, 400, 2000) {
		s := randomSpec(rng)
		back, err := Parse("marshaled", Marshal(s))
		if err != nil {
			t.Fatalf("%+v\n%s\n%v", s, Marshal(s), err)
		}
		if back.WithDefaults() != s.WithDefaults() {
			t.Fatalf("%+v\ncame back as\n%+v", s.WithDefaults(), back.WithDefaults())
		}
	}
}

// TestKeys verifies that every field of a Spec has a key, in the same order.
func TestKeys(t *testing.T) {
	typ := reflect.TypeFor[Spec]()
	if typ.NumField() != len(keys) {
		t.Fatalf("%d fields and %d keys", typ.NumField(), len(keys))
	}
	var s Spec
	for i, k := range keys {
		if field := reflect.ValueOf(&s).Elem().Field(i).Addr().Interface(); k.field(&s) != field {
			t.Errorf("the key %s is not of the field %s", k.Name, typ.Field(i).Name)
		}
		if want := strings.ReplaceAll(strings.ToLower(typ.Field(i).Name), "_", ""); strings.ReplaceAll(k.Name, "_", "") != want {
			t.Errorf("the key of %s is %s", typ.Field(i).Name, k.Name)
		}
		if k.Kind() == "word" && k.Words == nil && k.Name != "name" && k.Name != "devices" {
			t.Errorf("%s: no words", k.Name)
		}
	}
}

func TestExamples(t *testing.T) {
	files, err := filepath.Glob("examples/*.yaml")
	if err != nil || len(files) != len(Examples()) {
		t.Fatalf("%d files, %d examples, %v", len(files), len(Examples()), err)
	}
	for _, name := range Examples() {
		f := example(t, name)
		if f.Name != name {
			t.Errorf("the example %s is called %s", name, f.Name)
		}
	}
	if _, err := Example("figure2"); err == nil || !strings.Contains(err.Error(), "figure1, figure1-servers, superpod") {
		t.Errorf("an example that is not in the fabric: %v", err)
	}
	// draft-xu-rtgwg-fare-in-sun, Figure 1.
	if f := example(t, "figure1"); f.Servers*f.GPUs != 64 || len(f.Leaf) != 4 || f.Speed != 400*fare.Gigabit || f.SubPorts != 2 || len(f.At(f.Server[0])) != 8 {
		t.Errorf("figure1 is not the draft's: %s", f.Title())
	}
}

func example(t testing.TB, name string) *Fabric {
	t.Helper()
	text, err := Example(name)
	if err != nil {
		t.Fatal(err)
	}
	return fabric(t, name+".yaml", text)
}

func fabric(t testing.TB, name string, text []byte) *Fabric {
	t.Helper()
	s, err := Parse(name, text)
	if err != nil {
		t.Fatal(err)
	}
	f, err := New(s)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// FuzzParse verifies that nothing panics, and that a parsed Spec is valid and survives Marshal and Parse.
func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("examples/*.yaml")
	if err != nil || len(files) == 0 {
		f.Fatal("no examples", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte("name: null\nplanes: 0x4\nspeed: 1.6T\nleaf: {a: b}\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := Parse("fuzz", text)
		if err != nil {
			return
		}
		if err := s.WithDefaults().Validate(); err != nil {
			t.Fatalf("%q is accepted: %v", text, err)
		}
		back, err := Parse("again", Marshal(s))
		if err != nil {
			t.Fatalf("%q\nis written as\n%s\n%v", text, Marshal(s), err)
		}
		if back.WithDefaults() != s.WithDefaults() {
			t.Fatalf("%+v came back as %+v", s, back)
		}
	})
}

// randomSpec returns a valid Spec of a small fabric, for property tests.
func randomSpec(rng *rand.Rand) Spec {
	one := func(words []string) string { return append([]string{""}, words...)[rng.IntN(len(words)+1)] }
	for {
		s := Spec{
			Name: []string{"", "a", "null", "yes-no", "x1"}[rng.IntN(5)], Planes: rng.IntN(6), Leaves: rng.IntN(5), Spines: rng.IntN(4), Servers: rng.IntN(12),
			GPUs: rng.IntN(9), SubPorts: rng.IntN(5), Speed: fare.Bandwidth(rng.IntN(3)) * 200 * fare.Gigabit, Cabling: one(cablings), Leaf: one(software), Spine: one(software),
			Mode: one(modes), Policy: one(policies), Ordering: one(orderings), ServerAS: uint32(rng.IntN(3)) * 70_000, LeafAS: uint32(rng.IntN(3)) * 64_512,
			BFD:         []time.Duration{0, 50 * time.Millisecond, 300 * time.Millisecond, 2 * time.Second}[rng.IntN(4)],
			RestartTime: []time.Duration{0, time.Second, 10 * time.Minute, 4095 * time.Second}[rng.IntN(4)],
		}
		if rng.IntN(3) == 0 {
			s.GPUPorts, s.SharedAS = one(gpuPorts), one(sharings)
			s.Overrides = randomOverrides(rng, s.WithDefaults())
		}
		s.Addresses = one(families)
		s.Devices = []string{"", "", "eth{n}", "mlx5_{n}", "enp{n}s0f{sub}", "{plane}.{sub}", "g{gpu}-{p}-{sub}", "if{n}{plane}"}[rng.IntN(8)]
		if rng.IntN(4) == 0 {
			s.Speed = 1 + fare.Bandwidth(rng.Uint64N(uint64(maxSpeed)))
		}
		if rng.IntN(4) == 0 {
			s.UplinkSpeed = 1 + fare.Bandwidth(rng.Uint64N(uint64(fare.MaxBandwidth)))
		}
		if s.WithDefaults().Validate() == nil {
			return s
		}
	}
}

// randomOverrides returns exceptions for a Spec with defaults; not all of them are valid.
func randomOverrides(rng *rand.Rand, s Spec) Overrides {
	var all []string
	for range rng.IntN(4) {
		o := override{server: rng.IntN(s.Servers+1) - 1, gpu: -1, plane: rng.IntN(s.Planes+1) - 1, subPorts: rng.IntN(s.SubPorts+2) - 1}
		if s.owners() > 1 {
			o.gpu = rng.IntN(s.GPUs+1) - 1
		}
		if o.subPorts < 0 || rng.IntN(2) == 0 {
			o.speed = fare.Bandwidth(1+rng.IntN(8)) * 100 * fare.Gigabit
		}
		all = append(all, o.String())
	}
	return Overrides(strings.Join(all, "; "))
}

// TestOverrides verifies that the last exception that matches a port wins, and that one that matches nothing is
// rejected.
func TestOverrides(t *testing.T) {
	f := number(t, Spec{Servers: 3, Planes: 3, GPUs: 2, GPUPorts: Own,
		Overrides: "*/p1 speed=200G; server2 sub_ports=1;server2/g1/p1   sub_ports=3 speed=800Gbps; server3/g0/p0 sub_ports=0"})
	want := map[string]string{
		"server1/g0": "400G 400G, 200G 200G, 400G 400G", "server1/g1": "400G 400G, 200G 200G, 400G 400G",
		"server2/g0": "400G, 200G, 400G", "server2/g1": "400G, 800G 800G 800G, 400G",
		"server3/g0": ", 200G 200G, 400G 400G", "server3/g1": "400G 400G, 200G 200G, 400G 400G",
	}
	for _, g := range f.Groups() {
		var planes []string
		for _, cables := range g.Planes {
			var speeds []string
			for _, c := range cables {
				speeds = append(speeds, c.Speed.String())
			}
			planes = append(planes, strings.Join(speeds, " "))
		}
		if got := strings.Join(planes, ", "); got != want[g.Name] {
			t.Errorf("%s: %s, want %s", g.Name, got, want[g.Name])
		}
	}
	if got, want := string(Marshal(f.Spec)), `overrides: '*/p1 speed=200G; server2 sub_ports=1; server2/g1/p1 sub_ports=3 speed=800G; server3/g0/p0 sub_ports=0'`; !strings.Contains(got, want) {
		t.Errorf("%s\nwant %s", got, want)
	}
	for text, want := range map[string]string{
		"server1":                             `"server1" changes nothing`,
		"leaf1 speed=1T":                      `"leaf1" does not name ports: write SERVER, SERVER/GPU, SERVER/PLANE or SERVER/GPU/PLANE`,
		"server1/p0/g1 speed=1T":              `"server1/p0/g1" does not name ports`,
		"server01 speed=1T":                   `"server01" does not name ports`,
		"* speed=100":                         `"speed=100" is not a speed from 1k to 8T with a unit`,
		"* sub_ports=-1":                      `"sub_ports=-1" is not a number of sub-ports`,
		"* color=red":                         `"color=red" is neither sub_ports=N nor speed=SPEED`,
		"server9 speed=1T":                    `"server9 speed=1T" is not in the fabric; name a server, GPU and plane of the fabric`,
		"*/p4 speed=1T":                       `"*/p4 speed=1T" is not in the fabric`,
		"server1/g0 speed=1T":                 `"server1/g0 speed=1T" names a GPU, and GPUs share the server's ports`,
		"server2 sub_ports=0":                 "server2 would have no port at all",
		"*/p1 sub_ports=0":                    "leaf1 would have no server",
		strings.Repeat("* sub_ports=2;", 300): "300 of them, more than 256",
	} {
		var s Spec
		err := findKey("overrides").Set(&s, text)
		if err == nil {
			_, err = New(s)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: %v, want %s", text, err, want)
		}
	}
}

// TestFigure1OfServers verifies that the draft's figure as 8 servers of 8 GPUs has the same ports as with a server
// for each GPU.
func TestFigure1OfServers(t *testing.T) {
	one, f := example(t, "figure1"), example(t, "figure1-servers")
	if len(f.Groups()) != len(one.Groups()) || len(f.Cables) != len(one.Cables) || len(f.Leaf) != len(one.Leaf) || f.Servers != 8 || f.GPUs != 8 {
		t.Fatalf("%s, and %s", f.Title(), one.Title())
	}
	if n := f.Spec.ServerSessions(); n != 8*64 {
		t.Errorf("%d sessions", n)
	}
	for i, g := range f.Groups() {
		for p, cables := range g.Planes {
			if len(cables) != 2 || cables[0].Speed != 400*fare.Gigabit || cables[0].Up.Node != f.Leaf[p] || cables[1].Up.Node != f.Leaf[p] {
				t.Errorf("%s in plane %d: %v", g.Name, p, cables)
			}
		}
		if got, want := f.LoopbacksOf(g)[0], one.LoopbacksOf(one.Groups()[i])[0]; got != want {
			t.Errorf("%s: %s, want %s", g.Name, got, want)
		}
	}
}
