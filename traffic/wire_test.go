package traffic

import (
	"maps"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestSentBytes reads /proc/net/dev as Linux 6.12 writes it.
func TestSentBytes(t *testing.T) {
	const text = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:  186446    1342    0    0    0     0          0         0   186447    1342    0    0    0     0       0          0
  p0.1:18446744073709551615 56 0 0 0 0 0 0 78901 23 0 0 0 0 0 0
broken: 1 2 3
`
	want := map[string]uint64{"lo": 186447, "p0.1": 78901}
	if got := sentBytes([]byte(text)); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestWrongPlanes checks which differences between slots and the wire are errors of a node.
func TestWrongPlanes(t *testing.T) {
	const mega = 1 << 20
	plane := func(name string, sent, again uint64, wire *uint64) *farev1.TrafficPlaneReport {
		return &farev1.TrafficPlaneReport{Plane: name, Sent: sent * mega, Again: again * mega, Wire: wire}
	}
	fell := func(p *farev1.TrafficPlaneReport) *farev1.TrafficPlaneReport {
		p.Fell = true
		return p
	}
	wired := func(n uint64) *uint64 { return proto.Uint64(n * mega) }
	for name, test := range map[string]struct {
		planes []*farev1.TrafficPlaneReport
		want   string // part of the error; "" for none
	}{
		"as the slots":      {[]*farev1.TrafficPlaneReport{plane("p0", 100, 0, wired(108)), plane("p1", 100, 0, wired(107))}, ""},
		"a tenth wrong":     {[]*farev1.TrafficPlaneReport{plane("p0", 100, 0, wired(129)), plane("p1", 100, 0, wired(86))}, "node 10.0.0.1: 60.0 % of the bytes on the wire left by plane p0, whose slots sent 50.0 %"},
		"another wrong":     {[]*farev1.TrafficPlaneReport{plane("p0", 100, 0, wired(50)), plane("p1", 100, 0, wired(70)), plane("p2", 100, 0, wired(200))}, "left by plane p2"},
		"sent again":        {[]*farev1.TrafficPlaneReport{plane("p0", 100, 100, wired(210)), plane("p1", 100, 0, wired(105))}, ""},
		"a carrier lost":    {[]*farev1.TrafficPlaneReport{plane("p0", 100, 20, wired(125)), plane("p1", 100, 0, wired(84))}, ""},
		"more than lost":    {[]*farev1.TrafficPlaneReport{plane("p0", 100, 20, wired(190)), plane("p1", 100, 0, wired(40))}, "left by plane p0"},
		"diverted":          {[]*farev1.TrafficPlaneReport{fell(plane("p0", 40, 0, wired(20))), plane("p1", 100, 0, wired(115)), plane("p2", 100, 0, wired(120))}, ""},
		"none has failed":   {[]*farev1.TrafficPlaneReport{plane("p0", 40, 0, wired(20)), plane("p1", 100, 0, wired(115)), plane("p2", 100, 0, wired(120))}, "left by plane p0"},
		"more than failed":  {[]*farev1.TrafficPlaneReport{fell(plane("p0", 40, 0, wired(20))), plane("p1", 100, 0, wired(75)), plane("p2", 100, 0, wired(160))}, "left by plane p1"},
		"to a failed one":   {[]*farev1.TrafficPlaneReport{fell(plane("p0", 40, 0, wired(80))), plane("p1", 100, 0, wired(90)), plane("p2", 100, 0, wired(90))}, "left by plane p0"},
		"not counted":       {[]*farev1.TrafficPlaneReport{plane("p0", 100, 0, nil), plane("p1", 100, 0, nil)}, ""},
		"a plane of memory": {[]*farev1.TrafficPlaneReport{plane("p0", 100, 0, wired(103)), plane("p1", 100, 0, wired(104)), plane("p2", 100, 0, nil)}, ""},
		"little":            {[]*farev1.TrafficPlaneReport{plane("p0", 2, 0, wired(5)), plane("p1", 2, 0, wired(1))}, ""},
		"others' traffic":   {[]*farev1.TrafficPlaneReport{plane("p0", 100, 0, wired(400)), plane("p1", 100, 0, wired(110))}, ""},
	} {
		got := wrongPlanes(&farev1.TrafficNodeReport{Loopback: "10.0.0.1", Planes: test.planes})
		if len(got) > 1 || (len(got) == 1) != (test.want != "") || len(got) == 1 && !strings.Contains(got[0], test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
