package daemon

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/fare"
)

// TestWeightsOfAReplay checks that fared replay lists every destination's weights once for each source group, sorted by
// address, across any number of pages. Without a data plane nothing is in effect.
func TestWeightsOfAReplay(t *testing.T) {
	s := coretest.OwnPorts(2, 2)
	c := coreOf(t, s.Text())
	bring(t, s, c, 2, func(d, subPort int) fare.Bandwidth {
		if d == 1 && subPort == 3 { // of the second GPU, in plane p1
			return 100e9
		}
		return 400e9
	})
	discard(c)
	weights, err := Weights(c)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, w := range weights {
		line := fmt.Sprint(w.Destination, w.Sources)
		for _, p := range w.Planes {
			line += fmt.Sprintf(" %s=%d,%v", p.Plane, p.Weight, p.InEffect)
		}
		got = append(got, line)
	}
	want := []string{
		"10.255.1.0/32[10.255.0.1/32] p0=1,false p1=1,false",
		"10.255.1.0/32[10.255.0.2/32] p0=1,false p1=1,false",
		"10.255.1.1/32[10.255.0.1/32] p0=1,false p1=1,false",
		"10.255.1.1/32[10.255.0.2/32] p0=4,false p1=1,false",
	}
	if !slices.Equal(got, want) {
		t.Errorf("weights\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}

	many := shape{Planes: 1, SubPorts: 1}
	c = coreOf(t, many.Text())
	const n = 10001 // a page has 10,000
	bring(t, many, c, n, func(int, int) fare.Bandwidth { return 400e9 })
	discard(c)
	if weights, err = Weights(c); err != nil || len(weights) != n {
		t.Fatalf("%d destinations, %v; want %d", len(weights), err, n)
	}
	for i, w := range weights {
		if w.Destination != destination(i).String() {
			t.Fatalf("row %d is %s, want %s", i, w.Destination, destination(i))
		}
	}

	// A leaf without a data plane weighs nothing.
	leaf := shape{Planes: 1, SubPorts: 2, Leaf: true}
	c = coreOf(t, leaf.Text())
	do(t, c, up(0, 0), core.Fabric{Event: fare.SessionUp{Generation: 1, Node: leafNode(0), PeerAS: leaf.PeerAS(0)}})
	do(t, c, core.Fabric{Event: fare.RouteUpdate{Generation: 1, Prefix: netip.MustParsePrefix("10.255.1.0/32"), Attrs: attributes(400e9, 65100)}})
	if weights, err = Weights(c); err != nil || len(weights) != 0 {
		t.Errorf("a leaf has the weights %v, %v", weights, err)
	}
}
