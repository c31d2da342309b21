package main

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/cmd/internal/cli"
)

// fabricFile writes a description.
func fabricFile(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "fabric.yaml")
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return name
}

// tree lists the files below a folder.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var files []string
	err := fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestTopoShow(t *testing.T) {
	file := fabricFile(t, "name: small\nplanes: 2\nleaves: 2\nspines: 1\nservers: 4\nspine: frr\n")
	out := must(t, "topo", "show", file)
	const want = `small: 4 servers with 1 GPU each, 2 planes, 2 leaves (fared) and 1 spine (frr) a plane, Y-cables of 2 × 400G a server and plane, uplinks of 1.6T

NODES               COUNT  RUNS   AS                        BGP IDENTIFIER                SESSIONS EACH
server1 to server4  4      fared  4200001000 to 4200001003  10.255.0.1 to 10.255.0.4      4
leaf0-0 to leaf1-1  4      fared  4200010000 to 4200010003  10.254.0.1 to 10.254.0.4      5
spine0 to spine1    2      frr    4200060000 to 4200060001  10.254.128.1 to 10.254.128.2  2

PLANE  LEAVES  SPINES  CABLES  ADDRESSES
p0     2       1       10      10.0.1.0 to 10.0.1.19
p1     2       1       10      10.0.2.0 to 10.0.2.19

GPUS  LOOPBACKS                 PORT IN A PLANE  OF           UPLINK
4     10.255.0.1 to 10.255.0.4  2 x 400G         each server  1.6T
`
	if out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
}

// TestTopoFlags checks that flags override the file, and that defaults follow the flags.
func TestTopoFlags(t *testing.T) {
	file := fabricFile(t, "name: small\nplanes: 2\nleaves: 2\nspines: 1\nservers: 4\n")
	out := must(t, "topo", "show", file, "--spines", "2", "--leaf=bird", "--sub-ports", "4", "-o", "json")
	var shown struct {
		Name   string
		Spec   map[string]any
		Nodes  []struct{ Name, Kind, Software string }
		Cables []struct {
			From, To struct{ Node, Device, Address string }
			Speed    uint64 `json:"speed_bps"`
		}
	}
	if err := json.Unmarshal([]byte(out), &shown); err != nil {
		t.Fatal(err)
	}
	if shown.Name != "small" || shown.Spec["spines"] != 2.0 || shown.Spec["uplink_speed"] != "1.6T" || shown.Spec["restart_time"] != "1m0s" || len(shown.Spec) != 28 {
		t.Errorf("%s: %v", shown.Name, shown.Spec)
	}
	if len(shown.Nodes) != 4+4+4 || shown.Nodes[4].Software != "bird" || shown.Nodes[11].Kind != "spine" {
		t.Errorf("%v", shown.Nodes)
	}
	if first := shown.Cables[0]; len(shown.Cables) != 2*4*4+4*2 || first.From.Device != "p0.0" || first.To.Address != "10.0.1.1/31" || first.Speed != 400e9 {
		t.Errorf("%d cables, first %+v", len(shown.Cables), first)
	}
}

func TestTopoErrors(t *testing.T) {
	bad := fabricFile(t, "planes: 0\nspeeed: 400G\n")
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"show", "--planes", "99"}, "planes: 99 is out of range; use 1 to 64"},
		{[]string{"show", "--planes", "many"}, `invalid argument "many" for "--planes" flag: "many" is not a whole number`},
		{[]string{"show", "--leaf", "junos"}, `leaf: "junos" is not known; use fared, frr, bird`},
		{[]string{"show", "--example", "figure2"}, "--example: there is no example \"figure2\"; the examples are figure1"},
		{[]string{"show", "--example", "figure1", bad}, "both the file"},
		{[]string{"show", "a", "b"}, `takes one file, but got "b" too`},
		{[]string{"show", "/nowhere.yaml"}, "/nowhere.yaml: no such file"},
		{[]string{"show", bad}, bad + ":2:1: \"speeed\": is not a known key, did you mean \"speed\"?\n"},
		{[]string{"check", bad}, bad + `:1:9: planes: "0" is out of range`},
		{[]string{"check"}, "check needs a file"},
		{[]string{"draw", "--format", "pdf"}, `--format "pdf" is not known`},
		{[]string{"generate"}, "--out is missing"},
		{[]string{"generate", "--out", "x", "--for", "kubernetes"}, `--for: "kubernetes" is not a target`},
		{[]string{"paint"}, `unknown command "topo paint"`},
	} {
		if text := refused(t, cli.ExitUsage, append([]string{"topo"}, c.args...)...); !strings.Contains(text, c.want) {
			t.Errorf("%v: %q", c.args, text)
		}
	}
}

func TestTopoCheck(t *testing.T) {
	good, bad := fabricFile(t, "name: good\n"), fabricFile(t, "name: BAD\n")
	o := fared(t, "topo", "check", bad, good)
	if o.Code != cli.ExitUsage || !strings.HasPrefix(o.Out, good+": good: 8 servers with 1 GPU each") || !strings.Contains(o.Err, bad+":1:7: name:") {
		t.Errorf("%+v", o)
	}
	must(t, "topo", "check", good)
}

func TestTopoDraw(t *testing.T) {
	if svg := must(t, "topo", "draw", "--example", "two-tier"); !strings.HasPrefix(svg, "<svg ") {
		t.Errorf("no SVG: %s", svg)
	}
	out := filepath.Join(t.TempDir(), "x.dot")
	printed := must(t, "topo", "draw", "--example", "two-tier", "--format", "dot", "--out", out)
	if text, err := os.ReadFile(out); printed != "" || err != nil || !strings.HasPrefix(string(text), "graph \"two-tier\" {") {
		t.Errorf("%q, %v: %s", printed, err, text)
	}
}

func TestTopoGenerate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new")
	args := []string{"topo", "generate", "--servers", "2", "--planes", "1", "--leaf", "frr", "--out", dir}
	if out := must(t, append(args, "--for", "netns")...); !strings.HasSuffix(out, filepath.Join(dir, "nodes")+": 3 nodes\n") {
		t.Errorf("%s", out)
	}
	want := []string{"cabling.csv", "cabling.txt", "fabric.dot", "fabric.svg", "fabric.yaml", "netns.sh",
		"nodes/leaf0/daemons", "nodes/leaf0/frr.conf", "nodes/leaf0/vtysh.conf", "nodes/server1/fared.yaml", "nodes/server2/fared.yaml"}
	if got := tree(t, dir); !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
	for name, mode := range map[string]os.FileMode{"netns.sh": 0o755, "fabric.yaml": 0o644} {
		if s, err := os.Stat(filepath.Join(dir, name)); err != nil || s.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}

	// A folder with files is left alone,
	mine := filepath.Join(dir, "mine.txt")
	if err := os.WriteFile(mine, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	spec := filepath.Join(dir, "fabric.yaml")
	if err := os.WriteFile(spec, []byte("changed"), 0o644); err != nil {
		t.Fatal(err)
	}
	if text := refused(t, cli.ExitUsage, args...); !strings.Contains(text, "is not empty\n  name another directory, or add --force") {
		t.Errorf("%s", text)
	}
	if text, err := os.ReadFile(spec); err != nil || string(text) != "changed" {
		t.Errorf("%q, %v", text, err)
	}
	// and --force replaces only the generated files.
	must(t, append(args, "--force")...)
	if text, err := os.ReadFile(mine); err != nil || string(text) != "mine" {
		t.Errorf("%q, %v", text, err)
	}
	if text, err := os.ReadFile(spec); err != nil || !strings.Contains(string(text), "name: fabric\n") {
		t.Errorf("%q, %v", text, err)
	}
	// A note appears for leaves that cannot share over several spines, and for names of devices that ifupdown takes for
	// VLANs.
	for _, c := range []struct {
		note string
		args []string
	}{
		{"", []string{"--leaf", "fared"}},
		{"note: leaves that run FRR advertise their full bandwidth", []string{"--leaf", "frr"}},
		{"note: leaves that run BIRD advertise their full bandwidth", []string{"--leaf", "bird"}},
		{"note: p0.0 is the name of a VLAN to ifupdown", []string{"--leaf", "fared", "--for", "ifupdown"}},
		{"", []string{"--leaf", "fared", "--for", "ifupdown", "--devices", "eth{n}"}},
		{"", []string{"--leaf", "fared", "--for", "netplan"}},
	} {
		o := fared(t, append([]string{"topo", "generate", "--example", "two-tier", "--out", filepath.Join(t.TempDir(), "out")}, c.args...)...)
		if o.Code != cli.ExitOK || !strings.HasPrefix(o.Err, c.note) || (o.Err == "") != (c.note == "") {
			t.Errorf("%q: exit %d, %q", c.args, o.Code, o.Err)
		}
	}
	// The generated folder contains its description.
	if out := must(t, "topo", "check", spec); !strings.Contains(out, "2 servers") {
		t.Errorf("%s", out)
	}
}

// TestTopoDrawEnding checks that the extension of --out chooses the format, and that an unsupported one is refused and
// leaves no file.
func TestTopoDrawEnding(t *testing.T) {
	dir := t.TempDir()
	draw := []string{"topo", "draw", "--example", "two-tier", "--out"}
	for name, begin := range map[string]string{"a.svg": "<svg", "a.dot": "graph", "a.gv": "graph", "a": "<svg"} {
		file := filepath.Join(dir, name)
		must(t, append(draw, file)...)
		if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text[:min(len(text), 200)]), begin) {
			t.Errorf("%s: %v, begins with %.60q, want %q", name, err, text, begin)
		}
	}
	for _, args := range [][]string{{filepath.Join(dir, "x.png")}, {filepath.Join(dir, "x.svg"), "--format", "dot"}} {
		if said := refused(t, cli.ExitUsage, append(draw, args...)...); !strings.Contains(said, "dot") || !strings.Contains(said, args[0]) {
			t.Errorf("%v: %s", args, said)
		}
		if _, err := os.Stat(args[0]); err == nil {
			t.Errorf("%s is written", args[0])
		}
	}
}
