package daemon

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// TestOwnPortsEndToEnd covers sessions, data plane and API of a daemon whose two GPUs have a port each in two planes.
func TestOwnPortsEndToEnd(t *testing.T) {
	s := coretest.OwnPorts(2, 2)
	r := newRig(t, s, rigOptions{leaves: announceAll(400e9, 1)})
	d := destination(0)
	rows := func(sources ...string) string {
		resp, err := r.d.WeightService().GetWeights(context.Background(), &farev1.GetWeightsRequest{Destination: d.Addr().String(), Sources: sources, Explain: true})
		if err != nil {
			return err.Error()
		}
		var out []string
		for _, w := range resp.Weights {
			line := strings.Join(w.Sources, ",")
			for _, p := range w.Planes {
				line += fmt.Sprintf(" %s=%d", p.Plane, p.Weight)
				if !p.InEffect {
					line += "?"
				}
			}
			for _, pair := range w.Pairs {
				line += " from " + pair.Source
			}
			for _, x := range w.Explanation.GetRoutes() {
				line += " " + x.Device
			}
			out = append(out, line)
		}
		return strings.Join(out, "\n")
	}
	first := "10.255.0.1/32 p0=1 p1=1 from 10.255.0.1/32 p0.0 p1.0"
	second := "10.255.0.2/32 p0=1 p1=1 from 10.255.0.2/32 p0.1 p1.1"
	eventually(t, "both rows in effect", func() bool { return rows() == first+"\n"+second })
	if got := rows("10.255.0.2"); got != second {
		t.Errorf("asked for the second source: %s", got)
	}
	for i, l := range r.leaves {
		for g := range 2 {
			want := "nothing"
			if i%2 == g {
				want = "400G"
			}
			eventually(t, fmt.Sprintf("sub-port %d carries GPU %d: %q", i, g, want), func() bool { return l.has(coretest.GPU(g)) == want })
		}
	}
	r.links.change(3, func(e *LinkEvent) { e.Up = false })
	hurt := strings.Replace(second, "p1=1", "p1=0", 1)
	eventually(t, "the second GPU without its port", func() bool { return rows() == first+"\n"+hurt })
	eventually(t, "the data plane has both", func() bool {
		state := r.dp.State()
		groups := map[uint32]*farev1.Vector{}
		for _, g := range state.Vectors {
			groups[g.Id] = g
		}
		var got []string
		for _, dst := range state.Destinations {
			line := dst.Prefix + " from " + dst.Source + ":"
			for _, m := range groups[dst.Vector].GetMembers() {
				line += fmt.Sprintf(" %s=%d", m.Device, m.Weight)
			}
			got = append(got, line)
		}
		return strings.Join(got, "\n") == d.String()+" from 10.255.0.1/32: p0.0=1 p1.0=1\n"+d.String()+" from 10.255.0.2/32: p0.1=1"
	})
	for _, l := range r.leaves {
		l.withdraw(d)
	}
	eventually(t, "nothing is programmed", func() bool { return len(r.dp.State().Destinations) == 0 && strings.Contains(rows(), "no route") })
}

// TestPortsOfSources checks that a source port lands in the home of its slot's sub-port, and that homes are counted
// over the sub-ports of the source group: the first GPU has 4 of 6, the second 2.
func TestPortsOfSources(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 3, Loopbacks: []string{coretest.GPU(0).String(), coretest.GPU(1).String()}}
	s.Serves = func(i int) string { return coretest.GPU(i % 3 / 2).String() }
	c := coreOf(t, s.Text())
	bring(t, s, c, 1, func(int, int) fare.Bandwidth { return 1200e9 })
	hash := core.FlowHash{Algorithm: core.FlowHashLinux, Seed: 7, Buckets: 1024, Lasting: 16}
	do(t, c, core.DataplaneReady{FlowHash: hash})
	devices := [][]string{{"p0.0", "p0.1", "p1.0", "p1.1"}, {"p0.2", "p1.2"}}
	for g, own := range devices {
		v, ok := coretest.VectorFrom(c, g, destination(0))
		ports, placement := c.Planners(nil)[g].Ports(coretest.GPU(g).Addr(), destination(0).Addr(), v.Places(), nil)
		if !ok || len(ports) != len(own) || placement.String() != "hash" {
			t.Fatalf("GPU %d: %d ports by %s for %d sub-ports", g, len(ports), placement, len(own))
		}
		for i, port := range ports {
			device := c.Layout().Sources[g].Device(v.Slots[i].Plane, v.Slots[i].SubPort)
			place, n := slices.Index(own, device), len(own)
			value, _ := wecmp.LinuxL4{Seed: hash.Seed}.Hash(coretest.GPU(g).Addr(), destination(0).Addr(), wecmp.ProtocolUDP, port, 4791)
			bucket, end := int(value%1024), (2*1024*(place+1)+n)/(2*n)
			if place < 0 || bucket >= end || bucket < end-16 {
				t.Errorf("GPU %d, slot %d: port %d is in bucket %d, the home of %s ends at %d", g, i, port, bucket, device, end)
			}
		}
	}
	if got := forwardingOf(c).SourceGroups; len(got) != 2 || !slices.Equal(got[0].Devices, devices[0]) || !slices.Equal(got[1].Devices, devices[1]) ||
		!slices.Equal(got[1].Loopbacks, []string{coretest.GPU(1).String()}) {
		t.Errorf("the data plane is given %v", got)
	}
}
