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
		{"no mapping", "- planes\n", "f:1:1: document: is no mapping, write keys and values, such as planes: 4"},
		{"syntax", "name: x\nplanes: [\n", "f:2:1: document: is not YAML: did not find expected node content, look at this line and the one before it"},
		{"two documents", "name: x\n---\nname: y\n", "f:2:1: document: a second document starts here, keep one fabric in a file"},
		{"no UTF-8", "name: \xff\n", "f:1:1: document: is not UTF-8, save the file as UTF-8"},
		{"unknown", "server: 4\n", `f:1:1: "server": is not a known key, did you mean "servers"?`},
		{"unknown, with a dash", "sub-ports: 4\n", `f:1:1: "sub-ports": is not a known key, did you mean "sub_ports"?`},
		{"twice", "planes: 2\nservers: 4\nplanes: 3\n", "f:3:1: planes: is set in line 1 already, keep one of the two"},
		{"wrong type", "planes: many\n", `f:1:9: planes: "many" is no whole number, or too large, for example 4`},
		{"too large", "servers: 99999999999999999999\n", `f:1:10: servers: "99999999999999999999" is no whole number, or too large, for example 8`},
		{"no unit", "speed: 400\n", `f:1:8: speed: "400" has no unit, write 400G for Gbit/s, or use M, T`},
		{"list", "leaf: [frr]\n", "f:1:7: leaf: is not one value, write leaf: fared"},
		{"no value", "leaf:\n", "f:1:6: leaf: has no value, write leaf: fared, or leave it out"},
		{"alias", "planes: &p 4\nservers: *p\n", "f:1:9: planes: is written with an anchor, alias or tag, write planes: 4\nf:2:10: servers: is written with an anchor, alias or tag, write servers: 8"},
		{"zero is no default", "planes: 0\n", `f:1:9: planes: "0" is out of range, for example 4, or leave it out`},
		{"range, and how it is called", "name: No!\nservers: 5000\n",
			"f:1:7: name: \"No!\" cannot name a fabric, use lower-case letters, digits and dashes, at most 32\nf:2:10: servers: 5000 is out of range, use 2 to 4096"},
		{"all at once", "planes: x\nleaf: junos\nspeed: fast\nserver_as: -1\nunderlay: here\n", strings.Join([]string{
			`f:1:9: planes: "x" is no whole number, or too large, for example 4`,
			`f:2:7: leaf: "junos" is not known, use fared, frr, bird`,
			`f:3:8: speed: "fast" is no speed, write a number of bit/s with an optional unit, for example 400G`,
			`f:4:12: server_as: "-1" is no AS number, for example 4200001000`,
			`f:5:11: underlay: "here" is no network, for example 10.0.0.0/9`}, "\n")},
		{"does not fit", "leaves: 3\n", "f:1:9: leaves: 3 leaves of a plane for 2 sub-ports of a server, use at most a leaf for each sub-port"},
		{"leaves apart", "leaves: 2\ncabling: block\n", "f:1:1: spines: nothing joins the 2 leaves of a plane, give the plane a spine, or use cabling: split"},
		{"reserved AS", "server_as: 23450\nservers: 16\n", "f:1:12: server_as: 23450 to 23465 have 23456, which is reserved, use a private range (RFC 6996): 4200000000 to 4294967294"},
		{"loopbacks of every machine", "loopbacks: 127.1.0.0/16\n", "f:1:12: loopbacks: 127.1.0.0/16 has addresses of 127.0.0.0/8, which nothing may have here, for example 10.0.0.0/9"},
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

// TestMarshal: what is written says what differs from the defaults, and is read back.
func TestMarshal(t *testing.T) {
	if got, want := string(Marshal(Spec{})), "name: fabric\n"; got != want {
		t.Errorf("of defaults alone: %q", got)
	}
	// YAML would take this name for no value.
	if got, want := string(Marshal(Spec{Name: "null", Planes: 4, GPUs: 8})), "name: \"null\"\ngpus: 8\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		s := randomSpec(rng)
		back, err := Parse("marshalled", Marshal(s))
		if err != nil {
			t.Fatalf("%+v\n%s\n%v", s, Marshal(s), err)
		}
		if back.WithDefaults() != s.WithDefaults() {
			t.Fatalf("%+v\ncame back as\n%+v", s.WithDefaults(), back.WithDefaults())
		}
	}
}

// TestKeys: every field of a Spec has a key, in the same order.
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
		if k.Kind() == "word" && k.Words == nil && k.Name != "name" {
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
	if _, err := Example("figure2"); err == nil || !strings.Contains(err.Error(), "figure1, superpod") {
		t.Errorf("an example that is not there: %v", err)
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

// FuzzParse: nothing panics, and what is read is valid and the same when it is written and read again.
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

// randomSpec is a valid Spec of a small fabric, for properties.
func randomSpec(rng *rand.Rand) Spec {
	one := func(words []string) string { return append([]string{""}, words...)[rng.IntN(len(words)+1)] }
	for {
		s := Spec{
			Name: []string{"", "a", "null", "yes-no", "x1"}[rng.IntN(5)], Planes: rng.IntN(6), Leaves: rng.IntN(5), Spines: rng.IntN(4), Servers: rng.IntN(12),
			GPUs: rng.IntN(9), SubPorts: rng.IntN(5), Speed: fare.Bandwidth(rng.IntN(3)) * 200 * fare.Gigabit, Cabling: one(cablings), Leaf: one(software), Spine: one(software),
			Mode: one(modes), Policy: one(policies), Ordering: one(orderings), ServerAS: uint32(rng.IntN(3)) * 70_000, LeafAS: uint32(rng.IntN(3)) * 64_512,
			BFD: []time.Duration{0, 50 * time.Millisecond, 300 * time.Millisecond, 2 * time.Second}[rng.IntN(4)],
		}
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
