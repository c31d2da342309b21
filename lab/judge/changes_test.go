package judge

import (
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/topo"
)

// TestChanges verifies between which of three servers (with BIRD leaves, which keep a dead server's value) packets may
// be lost in a step.
func TestChanges(t *testing.T) {
	for name, test := range map[string]struct {
		before, step func(m *Model)
		want         []string
	}{
		"a cable is cut": {nil, func(m *Model) { dim(t, m, "server1", "p0.0") },
			[]string{"server1 -> server2", "server1 -> server3", "server2 -> server1", "server3 -> server1"}},
		// The forwarding of server1 stays, and so do its routes at the others; leaf0 still loses the packets in transit
		// to the cable.
		"a cable of a dead control plane is cut": {func(m *Model) { m.Crashed(0, Parts{Fared: true}) }, func(m *Model) { dim(t, m, "server1", "p0.0") },
			[]string{"server1 -> server2", "server1 -> server3", "server2 -> server1", "server3 -> server1"}},
		"a control plane crashes": {nil, func(m *Model) { m.Crashed(0, Parts{Fared: true}) }, nil},
		"the cable is unused":     {func(m *Model) { drainAll(m, 0) }, func(m *Model) { dim(t, m, "server1", "p0") }, nil},
		"light returns to an unused cable": {func(m *Model) { drainAll(m, 0); dim(t, m, "server1", "p0") },
			func(m *Model) { clear(m.Cut) }, nil},
	} {
		m := testModel(t, topo.Spec{Planes: 2, Servers: 3, Leaf: topo.BIRD, RestartTime: time.Minute})
		if test.before != nil {
			test.before(m)
		}
		c := NewChanges(m)
		c.Note()
		test.step(m)
		c.Note()
		var got []string
		for src, all := range c.Changed {
			for dst, changed := range all {
				if changed && src != dst {
					got = append(got, m.Server[src].Name+" -> "+m.Server[dst].Name)
				}
			}
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: packets may be lost of %q, want %q", name, got, test.want)
		}
	}
}

// dim cuts cables of a server.
func dim(t *testing.T, m *Model, server, port string) {
	t.Helper()
	set, err := m.CablesNamed(server, port)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range set {
		m.Cut[c.Index] = true
	}
}

// drainAll drains a plane at every server.
func drainAll(m *Model, plane int) {
	for server := range m.Servers {
		for sub := range m.SubPorts {
			m.Drained[m.Groups()[server].Planes[plane][sub].Index] = true
		}
	}
}
