package containerlab

import (
	"fmt"
	"log/slog"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fared/fared/lab"
	"github.com/fared/fared/topo"
)

// event is one step of a story, as the lab's scripts say it and as the simulation does.
type event struct {
	script     string
	fail, heal string // names of topo.Fabric.Find, separated by spaces
}

// stories are failures that follow each other, by the folder of the fabric they happen to.
var stories = map[string][]event{
	"fared": {
		{"cut server2 p2.0", "server2/p2.0", ""},
		{"cut server1 p2.1", "server1/p2.1", ""},
		{"cut server3 p0", "server3/p0", ""},
		{"kill leaf3", "leaf3", ""},
		{"drain server4 plane p1", "drain:server4/p1", ""},
		{"mend server2 p2.0", "", "server2/p2.0"},
		{"restart leaf3", "", "leaf3"},
		{"undrain server4 plane p1\nmend server1 p2.1\nmend server3 p0", "", "drain:server4/p1 server1/p2.1 server3/p0"},
	},
	"two-tier": {
		{"cut server3 p1.0", "server3/p1.0", ""},
		{"cut leaf0-0 up1", "leaf0-0/up1", ""},
		{"kill spine1-0", "spine1-0", ""},
		{"cut server1 p0", "server1/p0", ""},
		{"kill leaf0-1", "leaf0-1", ""},
		{"restart spine1-0\nrestart leaf0-1", "", "spine1-0 leaf0-1"},
		{"mend leaf0-0 up1\nmend server1 p0\nmend server3 p1.0", "", "leaf0-0/up1 server1/p0 server3/p1.0"},
	},
}

// matrix is every server's weights toward every other.
func matrix(servers int, weights func(src, dst int) []uint32) string {
	var b strings.Builder
	for src := range servers {
		for dst := range servers {
			if src != dst {
				fmt.Fprintf(&b, "%d>%d %s ", src+1, dst+1, lab.Ratio(weights(src, dst)))
			}
		}
	}
	return b.String()
}

// TestAllAgree feeds the same failures of the same fabric to the simulation, to the lab in one process, to the lab on network
// namespaces and to containers: after each of them every server's weights are the same everywhere.
func TestAllAgree(t *testing.T) {
	for _, folder := range []string{"fared", "two-tier"} {
		t.Run(folder, func(t *testing.T) {
			o := options(t, folder)
			fared := filepath.Join(t.TempDir(), "fared")
			if out, err := exec.Command("go", "build", "-o", fared, "../cmd/fared").CombinedOutput(); err != nil {
				t.Fatalf("go build: %v\n%s", err, out)
			}
			story := stories[folder]
			var script strings.Builder
			for i, e := range story {
				fmt.Fprintf(&script, "step %d\n%s\n", i, e.script)
			}
			inside := o.Spec
			inside.Spine = topo.Fared
			seen := map[string][]string{"simulation": simulate(t, o.Spec, story)}
			for kind, lo := range map[string]lab.Options{
				"one process":  {Spec: inside},
				"namespaces":   {Spec: o.Spec, Netns: &lab.Netns{Driver: "linux", Binary: fared, Rate: -1}},
				"containerlab": o,
			} {
				s, err := lab.Parse(folder, strings.NewReader(script.String()))
				if err != nil {
					t.Fatal(err)
				}
				f, err := lab.Start(t.Context(), lo, slog.New(slog.DiscardHandler))
				if err != nil {
					t.Fatalf("%s: %v", kind, err)
				}
				ok, err := f.Run(t.Context(), s, func(r lab.Result) {
					if len(r.Wrong) > 0 {
						t.Errorf("%s, step %s: %q", kind, r.Step, r.Wrong)
					}
					seen[kind] = append(seen[kind], matrix(f.Servers, f.Weights))
				})
				if !ok || err != nil {
					t.Errorf("%s: %v, %v", kind, ok, err)
				}
				if err := f.Close(); err != nil {
					t.Errorf("%s: %v", kind, err)
				}
			}
			distinct := map[string]bool{}
			for i, e := range story {
				want := seen["simulation"][i]
				distinct[want] = true
				for kind, all := range seen {
					if i >= len(all) || all[i] != want {
						t.Errorf("after %q, %s:\n%s\nthe simulation:\n%s", e.script, kind, all, want)
					}
				}
			}
			if len(distinct) < len(story)/2 {
				t.Errorf("only %d different states after %d failures: this test has lost its subject", len(distinct), len(story))
			}
		})
	}
}

// simulate returns the weights after each event.
func simulate(t *testing.T, spec topo.Spec, story []event) (seen []string) {
	t.Helper()
	fabric, err := topo.New(spec)
	if err != nil {
		t.Fatal(err)
	}
	s := topo.Simulate(fabric)
	for _, e := range story {
		if e.fail != "" {
			if _, err := s.Fail(strings.Fields(e.fail)...); err != nil {
				t.Fatal(err)
			}
		}
		if e.heal != "" {
			if _, err := s.Heal(strings.Fields(e.heal)...); err != nil {
				t.Fatal(err)
			}
		}
		for _, v := range s.Check() {
			t.Errorf("after %q: %v", e.script, v)
		}
		seen = append(seen, matrix(fabric.Servers, s.Weights))
	}
	return seen
}
