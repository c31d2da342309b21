package bpf

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/fared/fared/internal/netnstest"
)

// TestObjectsAreFresh: what is committed is what clang-14 makes of the source, in any directory.
func TestObjectsAreFresh(t *testing.T) {
	netnstest.Require(t, "clang-14", "llvm-strip-14")
	source, err := os.ReadFile("gen.go")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	_, line, ok := strings.Cut(string(source), "//go:generate go ")
	if !ok {
		t.Fatal("gen.go says nothing about how to generate")
	}
	program, err := os.ReadFile("steer.bpf.c")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "steer.bpf.c"), program, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "tool", "-n", "bpf2go").Output()
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ = strings.Cut(line, "\n")
	cmd := exec.Command(strings.TrimSpace(string(out)), strings.Fields(line)[2:]...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOPACKAGE=bpf")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	made, err := filepath.Glob(filepath.Join(dir, "steer_bpf*"))
	if err != nil || len(made) != 4 {
		t.Fatalf("made %v, %v", made, err)
	}
	for _, path := range made {
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		have, err := os.ReadFile(filepath.Base(path))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(have, want) {
			t.Errorf("%s is stale: run `go generate ./dataplane/bpf` and commit", filepath.Base(path))
		}
	}
}

// TestLayouts: each type that Go writes has the size and the offsets of the program's, and no holes, so that it is written
// as it is.
func TestLayouts(t *testing.T) {
	spec, err := loadSteer()
	if err != nil {
		t.Fatal(err)
	}
	types := map[string]any{
		"settings": steerSettings{}, "live": steerLive{}, "place": steerPlace{}, "plane": steerPlane{}, "group": steerGroup{}, "run": steerRun{},
		"destination": steerDestination{}, "address": steerAddress{}, "pair": steerPair{}, "pins": steerPins{}, "table": steerTable{},
		"slot_counter": steerSlotCounter{}, "counter": steerCounter{},
	}
	for name, v := range types {
		var c *btf.Struct
		if err := spec.Types.TypeByName(name, &c); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		g := reflect.TypeOf(v)
		if uint32(g.Size()) != c.Size {
			t.Errorf("%s: %d bytes in Go, %d in the program", name, g.Size(), c.Size)
		}
		at, field := uint32(0), 0
		for i := range g.NumField() {
			f := g.Field(i)
			if f.Type.Size() == 0 {
				continue
			}
			if uint32(f.Offset) != at {
				t.Errorf("%s: a hole before %s", name, f.Name)
			}
			at += uint32(f.Type.Size())
			if m := c.Members[field]; m.Offset.Bytes() != uint32(f.Offset) || !strings.EqualFold(strings.ReplaceAll(m.Name, "_", ""), f.Name) {
				t.Errorf("%s: %s at %d in Go, %s at %d in the program", name, f.Name, f.Offset, m.Name, m.Offset.Bytes())
			}
			field++
		}
		if at != c.Size || field != len(c.Members) {
			t.Errorf("%s: %d bytes in %d fields of %d in %d", name, at, field, c.Size, len(c.Members))
		}
	}
	if n := spec.Maps[steerMapFaredDrops].MaxEntries; n != uint32(drops) {
		t.Errorf("the program has %d reasons to drop, Go %d", n, drops)
	}
}

// TestVerifierHasRoom: the program stays far below the verifier's million instructions, so that older kernels, which prune
// less, take it too.
func TestVerifierHasRoom(t *testing.T) {
	netnstest.Require(t)
	spec, err := loadSteer()
	if err != nil {
		t.Fatal(err)
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer c.Close()
	info, err := c.Programs[steerProgFaredSteer].Info()
	if err != nil {
		t.Fatal(err)
	}
	n, ok := info.VerifiedInstructions()
	if !ok || n > 200_000 {
		t.Errorf("the verifier walked %d instructions", n)
	}
	t.Logf("the verifier walked %d instructions", n)
}
