package topo

import (
	"strings"
	"testing"
)

func TestFind(t *testing.T) {
	f := example(t, "two-tier")
	for _, c := range []struct {
		name string
		ends string // lower ends of the cables found
	}{
		{"server2", "server2/p0.0 server2/p0.1 server2/p1.0 server2/p1.1"},
		{"server2/p1", "server2/p1.0 server2/p1.1"},
		{"server2/p1.1", "server2/p1.1"},
		{"leaf1-1", "server3/p1.0 server3/p1.1 server4/p1.0 server4/p1.1 leaf1-1/up0 leaf1-1/up1"},
		{"leaf1-1/s3.1", "server3/p1.1"},
		{"leaf0-1/up0", "leaf0-1/up0"},
		{"spine0-1", "leaf0-0/up1 leaf0-1/up1"},
		{"spine0-1/down0", "leaf0-0/up1"},
	} {
		cables, err := f.Find(c.name)
		var ends []string
		for _, cable := range cables {
			ends = append(ends, cable.Down.Node.Name+"/"+cable.Down.Device)
		}
		if got := strings.Join(ends, " "); got != c.ends || err != nil {
			t.Errorf("%s: %s, %v", c.name, got, err)
		}
	}
	if plane, err := f.Find("p1"); err != nil || len(plane) != 12 {
		t.Errorf("p1: %d cables, %v", len(plane), err)
	}
	for _, name := range []string{"", "server5", "p2", "leaf0-0/p0", "server1/p2", "server1/s1.0", "server1/", "p0/x"} {
		if cables, err := f.Find(name); err == nil || !strings.Contains(err.Error(), "server1 to server4, leaf0-0 to leaf1-1, spine0-0 to spine1-1") {
			t.Errorf("%q finds %d cables, %v", name, len(cables), err)
		}
	}
}

// TestWays verifies that a server's cables go to one leaf of a plane, or to all of
// them in turn.
func TestWays(t *testing.T) {
	leaves := func(f *Fabric) string {
		var names []string
		for _, n := range f.Server {
			for _, c := range f.At(n) {
				if c.Plane == 0 {
					names = append(names, c.Up.Node.Name)
				}
			}
		}
		return strings.Join(names, " ")
	}
	for _, c := range []struct {
		spec Spec
		want string
	}{
		{Spec{Servers: 3, Leaves: 2, Spines: 1}, "leaf0-0 leaf0-0 leaf0-0 leaf0-0 leaf0-1 leaf0-1"},
		{Spec{Servers: 2, Leaves: 2}, "leaf0-0 leaf0-1 leaf0-0 leaf0-1"},
		{Spec{Servers: 2}, "leaf0 leaf0 leaf0 leaf0"},
	} {
		f, err := New(c.spec)
		if err != nil {
			t.Fatal(err)
		}
		if got := leaves(f); got != c.want {
			t.Errorf("%s: %s", f.Title(), got)
		}
	}
}
