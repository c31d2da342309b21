// Package bpftest checks committed BPF objects: they are generated from their source, their types have the layout of
// the Go types, and the verifier accepts them with a wide margin.
package bpftest

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

	"github.com/fared/fared/internal/testkit/netnstest"
)

// Fresh fails unless the committed files in the test's folder equal the output of clang-14 for NAME.bpf.c with the
// options in gen.go, independent of the directory.
func Fresh(t *testing.T, name string) {
	t.Helper()
	netnstest.Require(t, "clang-14", "llvm-strip-14")
	source, err := os.ReadFile("gen.go")
	if err != nil {
		t.Fatal(err)
	}
	_, line, ok := strings.Cut(string(source), "//go:generate go ")
	_, after, named := strings.Cut("\n"+string(source), "\npackage ")
	if !ok || !named {
		t.Fatal("gen.go has no go:generate line")
	}
	line, _, _ = strings.Cut(line, "\n")
	dir := t.TempDir()
	program, err := os.ReadFile(name + ".bpf.c")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".bpf.c"), program, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("go", "tool", "-n", "bpf2go").Output()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(strings.TrimSpace(string(out)), strings.Fields(line)[2:]...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOPACKAGE="+strings.Fields(after)[0])
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	made, err := filepath.Glob(filepath.Join(dir, name+"_bpf*"))
	if err != nil || len(made) != 2 {
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
			t.Errorf("%s is stale: run `make generate` and commit", filepath.Base(path))
		}
	}
}

// Layouts fails unless each Go type, keyed by its name in the program, has the size and offsets of the program's type
// and no padding, so that its memory can be written unchanged.
func Layouts(t *testing.T, spec *ebpf.CollectionSpec, types map[string]any) {
	t.Helper()
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
			if uint32(f.Offset) != at || field >= len(c.Members) {
				t.Errorf("%s: a hole before %s", name, f.Name)
				break
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
}

// VerifierHasRoom fails if the verifier processes more than most instructions of a program. most is far below the limit
// of one million, so that older kernels, which prune fewer paths, accept the program too.
func VerifierHasRoom(t *testing.T, p *ebpf.Program, most uint32) {
	t.Helper()
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	n, ok := info.VerifiedInstructions()
	if t.Logf("the verifier walked %d instructions", n); !ok || n > most {
		t.Errorf("the verifier walked more than %d instructions, or did not report their number", most)
	}
}
