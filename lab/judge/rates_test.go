package judge

import (
	"math"
	"testing"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/topo"
)

// TestAllows verifies the rate that cables allow all pairs together against figures computed by hand: max-min fair,
// split by weights.
func TestAllows(t *testing.T) {
	const speed = 100 * fare.Gigabit
	for name, test := range map[string]struct {
		spec topo.Spec
		cut  [][2]string
		want float64 // in units of a cable's speed
	}{
		"whole":                  {topo.Spec{Planes: 4, Servers: 4, SubPorts: 2}, nil, 4 * 4 * 2},
		"a leaf is dead":         {topo.Spec{Planes: 4, Servers: 4, SubPorts: 2}, [][2]string{{"server1", "p2"}, {"server2", "p2"}, {"server3", "p2"}, {"server4", "p2"}}, 4 * 3 * 2},
		"a port of two servers":  {topo.Spec{Planes: 2, Servers: 2, SubPorts: 1}, [][2]string{{"server2", "p0"}}, 2},
		"half a Y-cable":         {topo.Spec{Planes: 2, Servers: 2, SubPorts: 2}, [][2]string{{"server2", "p1.0"}}, 2 * 3},
		"the others go on":       {topo.Spec{Planes: 2, Servers: 3, SubPorts: 1}, [][2]string{{"server3", "p0"}}, 4*0.5 + 2*1},
		"one cannot be reached":  {topo.Spec{Planes: 2, Servers: 3, SubPorts: 1}, [][2]string{{"server3", "p0"}, {"server3", "p1"}}, 2 * 2},
		"no server is reachable": {topo.Spec{Planes: 1, Servers: 2, SubPorts: 1}, [][2]string{{"server2", "p0"}}, 0},
	} {
		test.spec.Speed = speed
		m := testModel(t, test.spec)
		for _, c := range test.cut {
			set, err := m.CablesNamed(c[0], c[1])
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range set {
				m.Cut[c.Index] = true
			}
		}
		if got := m.Allows() / float64(speed); math.Abs(got-test.want) > 1e-6 {
			t.Errorf("%s: %.3f cables' speed, want %.3f", name, got, test.want)
		}
	}
}
