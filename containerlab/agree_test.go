package containerlab

import (
	"fmt"
	"strings"
	"testing"

	"github.com/fared/fared/internal/testkit/binary"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/lab"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/topo"
)

// event is one step of a sequence, in the languages of the lab's scripts and of the simulation.
type event struct {
	script     string
	fail, heal string // names of topo.Fabric.Find, separated by spaces
}

// sequences are failures and repairs in order, by the folder of their fabric.
var sequences = map[string][]event{
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
	"own-ports": {
		{"cut server2 g1p1.0", "server2/g1p1.0", ""},
		{"cut server1 g0p0", "server1/g0p0", ""},
		{"kill leaf1", "leaf1", ""},
		{"mend server1 g0p0", "", "server1/g0p0"},
		{"restart leaf1\nmend server2 g1p1.0", "", "leaf1 server2/g1p1.0"},
	},
}

// matrix returns every source group's weights toward those of the other servers.
func matrix(groups []*topo.Group, weights func(src, dst int) []uint32) string {
	var b strings.Builder
	for _, src := range groups {
		for _, dst := range groups {
			if src.Server != dst.Server {
				fmt.Fprintf(&b, "%s>%s %s ", src.Name, dst.Name, judge.Ratio(weights(src.Index, dst.Index)))
			}
		}
	}
	return b.String()
}

// TestAllAgree applies the same failures of the same fabric to the simulation, to the lab in one process and to the lab
// on network namespaces. After each failure every server's weights are equal in all of them. TestScenarios does so with
// containers.
func TestAllAgree(t *testing.T) {
	gate.Slow(t, gate.Labs, "three sequences of failures, on two kinds of fabric")
	netnstest.Require(t, "tc", "go")
	fared := binary.Fared(t)
	for folder, events := range sequences {
		t.Run(folder, func(t *testing.T) {
			spec := described(t, folder)
			want := simulate(t, spec, events)
			inside := spec
			inside.Leaf, inside.Spine = topo.Fared, topo.Fared
			for kind, o := range map[string]lab.Options{
				"one process": {Spec: inside, Quick: true},
				"namespaces":  {Spec: spec, Netns: &backend.Netns{Driver: "linux", Binary: fared, Rate: -1}, Quick: true},
			} {
				f := start(t, o)
				compare(t, kind, want, observe(t, f, events), events)
				if err := f.Close(); err != nil { // before the next fabric starts
					t.Error(err)
				}
			}
			distinct := map[string]bool{}
			for _, w := range want {
				distinct[w] = true
			}
			if len(distinct) < len(events)/2 {
				t.Errorf("only %d different states after %d failures: this test has lost its subject", len(distinct), len(events))
			}
		})
	}
}

// observe plays events on a fabric and returns the weights after each event.
func observe(t *testing.T, f *lab.Fabric, events []event) (seen []string) {
	t.Helper()
	var script strings.Builder
	for i, e := range events {
		fmt.Fprintf(&script, "step %d\n%s\n", i, e.script)
	}
	s, err := lab.Parse("events", strings.NewReader(script.String()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Run(t.Context(), s, func(r lab.Result) {
		if len(r.Wrong) > 0 {
			t.Errorf("step %s: %q", r.Step, r.Wrong)
		}
		seen = append(seen, matrix(f.Groups(), f.Weights))
	}); err != nil {
		t.Error(err)
	}
	return seen
}

// compare compares the weights of one kind of fabric after each event with those of the simulation.
func compare(t *testing.T, kind string, want, seen []string, events []event) {
	t.Helper()
	for i, e := range events {
		if i >= len(seen) || seen[i] != want[i] {
			t.Errorf("after %q, %s:\n%q\nthe simulation:\n%s", e.script, kind, seen[min(i, len(seen)):min(i+1, len(seen))], want[i])
		}
	}
}

// simulate returns the weights after each event.
func simulate(t *testing.T, spec topo.Spec, events []event) (seen []string) {
	t.Helper()
	fabric, err := topo.New(spec)
	if err != nil {
		t.Fatal(err)
	}
	s := topo.Simulate(fabric)
	for _, e := range events {
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
		seen = append(seen, matrix(fabric.Groups(), s.Weights))
	}
	return seen
}
