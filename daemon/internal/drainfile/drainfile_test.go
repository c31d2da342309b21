package drainfile

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/daemon/internal/core"
)

var some = []Record{
	{DrainTarget: core.DrainTarget{Leaf: netip.MustParseAddr("10.1.0.3")}, Since: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), By: "uid 0 (root)", Reason: "new optics, \"really\""},
	{DrainTarget: core.DrainTarget{Plane: "p2"}, Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)},
	{DrainTarget: core.DrainTarget{SubPort: "eth4"}, Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)},
}

// signed returns a file of version 1 with any records.
func signed(body string) []byte {
	return fmt.Appendf(nil, "fared drains 1 %x\n%s", sha256.Sum256([]byte(body)), body)
}

// TestSaveLoad checks that records survive a file unchanged, that the last file counts, and that its owner alone may
// read it.
func TestSaveLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "made", "drains")
	if got, err := Load(path); got != nil || err != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
	for _, want := range [][]Record{some, {}, some[:1]} {
		if err := Save(path, want); err != nil {
			t.Fatal(err)
		}
		if got, err := Load(path); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("read %v, %v; want %v", got, err, want)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("files are left: %v", entries)
	}
}

// TestLoadDamaged checks that a file with any changed, missing or additional byte, of another version, or of another
// kind, is refused with the reason, and is kept under another name.
func TestLoadDamaged(t *testing.T) {
	good, err := encode(some)
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		content []byte
		want    string
	}{
		"empty":           {nil, "not that of a file of drains"},
		"another file":    {[]byte("root:x:0:0\n"), "not that of a file of drains"},
		"newer":           {bytes.Replace(good, []byte("drains 1"), []byte("drains 2"), 1), "version 2, and this fared reads version 1"},
		"version zero":    {bytes.Replace(good, []byte("drains 1"), []byte("drains 0"), 1), "version 0"},
		"truncated":       {good[:len(good)-9], "checksum"},
		"longer":          {append(bytes.Clone(good), '\n'), "checksum"},
		"no checksum":     {[]byte("fared drains 1\n[]\n"), "checksum"},
		"too large":       {append(bytes.Clone(good), bytes.Repeat([]byte(" "), maxSize)...), "more than 1048576 bytes"},
		"no target":       {signed(`[{"since":"2026-01-02T03:04:05Z"}]`), "record 0 does not have exactly one target"},
		"two targets":     {signed(`[{"plane":"p0","sub_port":"eth0","since":"2026-01-02T03:04:05Z"}]`), "record 0 does not have exactly one target"},
		"leaf and more":   {signed(`[{"leaf":"10.1.0.1","sub_port":"eth0","since":"2026-01-02T03:04:05Z"}]`), "record 0 does not have exactly one target"},
		"unknown field":   {signed(`[{"plane":"p0","color":"red"}]`), `unknown field "color"`},
		"not a list":      {signed(`{}`), "records: "},
		"not an address":  {signed(`[{"leaf":"ten"}]`), "records: "},
		"not even JSON":   {signed(`[`), "records: "},
		"a directory":     {[]byte("directory"), "is a directory"},
		"a missing break": {bytes.ReplaceAll(good, []byte("\n"), nil), "checksum"},
	}
	for what, c := range cases {
		t.Run(what, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "drains")
			var err error
			if what == "a directory" {
				err = os.Mkdir(path, 0o700)
			} else {
				err = os.WriteFile(path, c.content, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			got, err := Load(path)
			if got != nil || err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v, %v; want %q", got, err, c.want)
			}
			_, aside, _ := strings.Cut(err.Error(), "it is now ")
			if what == "a directory" {
				return
			}
			if kept, err := os.ReadFile(aside); err != nil || !bytes.Equal(kept, c.content) {
				t.Errorf("the file was not kept: %v", err)
			}
			if got, err := Load(path); got != nil || err != nil {
				t.Errorf("afterwards: %v, %v", got, err)
			}
		})
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		bad := bytes.Clone(good)
		bad[r.IntN(len(bad))] ^= 1 << r.IntN(8)
		if got, err := decode(bad); err == nil {
			t.Fatalf("accepted as %v:\n%s", got, bad)
		}
	}
}

// TestSaveFails checks that a failed replacement leaves the old file and no other.
func TestSaveFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "drains")
	if err := os.MkdirAll(filepath.Join(path, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Save(path, some); err == nil {
		t.Error("a directory was replaced")
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("files are left: %v", entries)
	}
	if err := Save(filepath.Join(path, "in the way", strings.Repeat("x", 300)), some); err == nil {
		t.Error("a name that is too long was accepted")
	}
}

// FuzzDecode checks that no content is accepted that does not encode to itself, and that none panics.
func FuzzDecode(f *testing.F) {
	good, err := encode(some)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(signed("[]"))
	f.Add(signed("null"))
	f.Fuzz(func(t *testing.T, content []byte) {
		records, err := decode(content)
		if err != nil {
			return
		}
		again, err := encode(records)
		if err != nil {
			t.Fatal(err)
		}
		if twice, err := decode(again); err != nil || len(twice) != len(records) {
			t.Fatalf("%q came back as %v, %v", content, twice, err)
		}
	})
}
