package config

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"net/netip"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// equalConfigs compares configurations by value.
var equalConfigs = cmp.Options{cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmpopts.EquateEmpty()}

// files returns the matching files; it fails if there are none, because the test would check nothing.
func files(t testing.TB, pattern string) []string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) == 0 {
		t.Fatalf("no file matches %s (%v)", pattern, err)
	}
	return names
}

func read(t testing.TB, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(string(read(t, name)), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
}

// TestBad compares the errors of every bad file with their exact text.
func TestBad(t *testing.T) {
	for _, name := range files(t, "testdata/bad/*.yaml") {
		t.Run(filepath.Base(name), func(t *testing.T) {
			data := read(t, name)
			c, err := Parse(filepath.Base(name), data)
			var errs Errors
			if !errors.As(err, &errs) || len(errs) == 0 || c != nil {
				t.Fatalf("Parse = %v, %v; want nil and errors", c, err)
			}
			inside(t, data, errs)
			golden(t, strings.TrimSuffix(name, ".yaml")+".want", err.Error()+"\n")
		})
	}
}

// inside checks that positions are in the file, and sorted.
func inside(t *testing.T, data []byte, errs Errors) {
	t.Helper()
	lines := strings.Split(string(data), "\n")
	for i, e := range errs {
		if e.Line < 1 || e.Line > len(lines) || e.Column < 1 || e.Column > len([]rune(lines[e.Line-1]))+1 {
			t.Errorf("position outside of the file: %v", e)
		}
		if e.Path == "" || e.Wrong == "" || e.Right == "" {
			t.Errorf("incomplete error: %#v", e)
		}
		if i > 0 && (e.Line < errs[i-1].Line || e.Line == errs[i-1].Line && e.Column < errs[i-1].Column) {
			t.Errorf("not sorted: %v before %v", errs[i-1], e)
		}
	}
}

// TestGood compares every good file, including the examples, with its resolved value, and with itself after writing and
// reading it.
func TestGood(t *testing.T) {
	for _, name := range append(files(t, "testdata/good/*.yaml"), files(t, "../../examples/*.yaml")...) {
		base := filepath.Base(name)
		t.Run(base, func(t *testing.T) {
			c, err := Parse(base, read(t, name))
			if err != nil {
				t.Fatal(err)
			}
			golden(t, filepath.Join("testdata/good", strings.TrimSuffix(base, ".yaml")+".resolved"), dump(c))
			again(t, c)
			changes, err := Diff(c, c)
			if err != nil || len(changes) != 0 {
				t.Errorf("Diff with itself = %v, %v", changes, err)
			}
		})
	}
}

// again checks that a configuration survives writing and reading, and has one written form.
func again(t testing.TB, c *Config) {
	t.Helper()
	text := c.Text()
	back, err := Parse("again", []byte(text))
	if err != nil {
		t.Fatalf("Text is not accepted:\n%v\n%s", err, text)
	}
	if diff := cmp.Diff(c, back, equalConfigs); diff != "" {
		t.Fatalf("Text loses something (-before +after):\n%s\n%s", diff, text)
	}
	if second := back.Text(); second != text {
		t.Fatalf("Text differs the second time:\n%s", cmp.Diff(text, second))
	}
}

// TestUnnumberedPassive checks which end of an unnumbered cable listens: a leaf toward servers and a spine toward
// leaves, unless the key is set or a listener could not have the session's key.
func TestUnnumberedPassive(t *testing.T) {
	for _, c := range []struct {
		role, subPort, session string
		passive                bool
	}{
		{"server", "", "", false},
		{"server", "", ", passive: true", true},
		{"leaf", "", "", true},
		{"leaf", "", ", passive: false", false},
		{"leaf", ", uplink: true", "", false},
		{"leaf", ", share: pod1", "", true},
		{"leaf", "", ", password_file: x", false},
		{"leaf", "", ", tcp_ao: {key_file: x}", false},
	} {
		text := fmt.Sprintf("role: %s\nas: 65001\nrouter_id: 10.255.1.1\naccept: [10.255.0.0/16]\nplanes: [{name: p0, sub_ports: [{device: e0%s, sessions: [{unnumbered: true%s}, {peer: 10.0.0.0}]}, {device: e1, sessions: [{peer: 10.0.0.2}]}]}]\n",
			c.role, c.subPort, c.session)
		if c.role == "server" {
			text += "loopbacks: [10.255.0.1/32]\n"
		}
		got, err := Parse("x", []byte(text))
		if err != nil {
			t.Errorf("%+v: %v", c, err)
			continue
		}
		if s := got.Planes[0].SubPorts[0].Sessions; s[0].Passive != c.passive || s[1].Passive {
			t.Errorf("%+v: passive %v, of a numbered session %v", c, s[0].Passive, s[1].Passive)
		}
		again(t, got)
	}
}

func TestTooLarge(t *testing.T) {
	_, err := Parse("large.yaml", make([]byte, MaxFileSize+1))
	const want = "large.yaml:1:1: document: is larger than 1048576 bytes, use one file for each server or leaf"
	if err == nil || err.Error() != want {
		t.Errorf("Parse = %v, want %s", err, want)
	}
	huge := []byte(strings.Repeat("a:\n", MaxFileSize/3))
	var errs Errors
	if _, err := Parse("many.yaml", huge); !errors.As(err, &errs) || len(errs) < MaxFileSize/3 {
		t.Errorf("%d errors, want one a line", len(errs))
	}
	deep := []byte("as: " + strings.Repeat("[", MaxFileSize/2))
	if _, err := Parse("deep.yaml", deep); err == nil {
		t.Error("Parse accepts a file of brackets")
	}
}

func FuzzLoad(f *testing.F) {
	for _, pattern := range []string{"testdata/bad/*.yaml", "testdata/good/*.yaml", "../../examples/*.yaml"} {
		for _, name := range files(f, pattern) {
			f.Add(read(f, name))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("fuzz", data)
		if err == nil {
			again(t, c)
			return
		}
		var errs Errors
		if !errors.As(err, &errs) {
			t.Fatalf("%T: %v", err, err)
		}
		inside(t, data, errs)
	})
}
