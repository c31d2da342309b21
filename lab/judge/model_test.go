package judge

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/topo"
)

// testModel returns the model of a whole fabric.
func testModel(t *testing.T, s topo.Spec) *Model {
	t.Helper()
	f, err := topo.New(s)
	if err != nil {
		t.Fatal(err)
	}
	return NewModel(f)
}

// TestModelAndSimulationAgree builds random fabrics, whose servers, GPUs and planes differ in number and speed of their
// sub-ports, and applies random failures and drains. The model and the simulation, which share no arithmetic, must have
// the same weights of planes and sub-ports between all source groups.
func TestModelAndSimulationAgree(t *testing.T) {
	random := rand.New(rand.NewPCG(11, 12))
	kinds := map[string]int{}
	for range 150 {
		f := different(t, random)
		p, err := topo.New(f.Spec)
		if err != nil {
			t.Fatal(err)
		}
		m, s := NewModel(p), topo.Simulate(p)
		names := p.Single()
		var failed []string
		for range 5 {
			name := names[random.IntN(len(names))]
			if drain := random.IntN(4) == 0; drain && strings.HasPrefix(name, "server") {
				name = "drain:" + name
			}
			if _, err := s.Fail(name); err != nil {
				t.Fatal(err)
			}
			fail(t, m, name)
			compare(t, m, s)
			failed = append(failed, name)
		}
		if t.Failed() {
			t.Fatalf("%s\nfailed: %q", topo.Marshal(p.Spec), failed)
		}
		kinds[fmt.Sprint(p.GPUPorts, p.Cabling, p.Spines > 0, p.Spec.Leaf, p.SharedAS)]++
	}
	if len(kinds) < 10 {
		t.Errorf("only %d kinds of fabrics: this test has lost its subject", len(kinds))
	}
}

// different returns a random fabric of servers, GPUs and planes that differ.
func different(t *testing.T, random *rand.Rand) *topo.Fabric {
	t.Helper()
	software := []string{topo.Fared, topo.FRR, topo.BIRD}
	for {
		s := topo.Spec{Planes: 1 + random.IntN(4), Servers: 2 + random.IntN(3), GPUs: 1 + random.IntN(3), SubPorts: 1 + random.IntN(3), Leaf: software[random.IntN(3)]}
		if random.IntN(3) > 0 {
			s.GPUPorts = topo.Own
		}
		if random.IntN(2) > 0 {
			s.SharedAS = topo.SharedServers
		}
		switch random.IntN(3) {
		case 0:
			s.Leaves, s.Spines, s.Spine = 1+random.IntN(2), 1+random.IntN(3), software[random.IntN(3)]
		case 1:
			s.Leaves = 1 + random.IntN(s.SubPorts)
		}
		var all []string
		for range random.IntN(6) {
			at := fmt.Sprintf("server%d", 1+random.IntN(s.Servers))
			if random.IntN(3) == 0 {
				at = "*"
			}
			if s.GPUPorts == topo.Own && s.GPUs > 1 && random.IntN(2) == 0 {
				at += fmt.Sprintf("/g%d", random.IntN(s.GPUs))
			}
			if random.IntN(2) == 0 {
				at += fmt.Sprintf("/p%d", random.IntN(s.Planes))
			}
			all = append(all, fmt.Sprintf("%s sub_ports=%d speed=%s", at, random.IntN(4), fare.Bandwidth(1+random.IntN(8))*100*fare.Gigabit))
		}
		s.Overrides = topo.Overrides(strings.Join(all, "; "))
		if f, err := topo.New(s); err == nil {
			return f
		}
	}
}

// fail applies to a model the failure that a simulation applies to itself.
func fail(t *testing.T, m *Model, name string) {
	t.Helper()
	at, drain := strings.CutPrefix(name, "drain:")
	set, err := m.Find(at)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range set {
		if drain {
			m.Drained[c.Index] = true
		} else {
			m.Cut[c.Index] = true
		}
	}
}

// compare compares a model with a simulation.
func compare(t *testing.T, m *Model, s *topo.Simulation) {
	t.Helper()
	for src, g := range m.Groups() {
		for dst, want := range m.Others(src) {
			planes, subPorts := s.Weights(src, dst), s.SubPortWeights(src, dst)
			if !slices.Equal(planes, want.Planes) {
				t.Errorf("%s -> %s: the simulation has %v, the model %v", g.Name, m.Groups()[dst].Name, planes, want.Planes)
				continue
			}
			parts := Fractions(planes)
			for i, c := range g.Cables {
				part := Fractions(subPorts[c.Plane])[c.Sub] * parts[c.Plane]
				if math.Abs(part-want.Lanes[i]) > 1e-6 {
					t.Errorf("%s -> %s: the simulation gives %s %.6f, the model %.6f", g.Name, m.Groups()[dst].Name, c.Down.Device, part, want.Lanes[i])
				}
			}
		}
	}
}
