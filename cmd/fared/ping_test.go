package main

import (
	"strings"
	"testing"
	"text/tabwriter"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestPingTable draws a row for each sub-port.
func TestPingTable(t *testing.T) {
	right := func(slot uint32, plane, device string, ns uint64) *farev1.PingReply {
		return &farev1.PingReply{Slot: slot, Plane: plane, Device: device, RoundTripNs: ns, LeftBy: device, ArrivedPlane: plane, ArrivedBy: "far" + device, ReturnedBy: "far" + device, ReturnedTo: device}
	}
	lost := &farev1.PingReply{Slot: 2, Plane: "p1", Device: "eth1", LeftBy: "eth1", Problem: "lost", Text: "no answer"}
	other := right(3, "p1", "eth1", 5000)
	other.ArrivedPlane, other.ArrivedBy, other.Problem, other.Text = "p0", "fareth0", "wrong-plane", "expected arrival by plane p1"
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	pingTable(w, &farev1.PingResponse{Replies: []*farev1.PingReply{lost, right(0, "p0", "eth0", 10_000), right(1, "p0", "eth0", 20_000), right(0, "p0", "eth0", 30_000), other}})
	w.Flush()
	want := `PLANE  SUB-PORT  SLOTS  LOST    ROUND TRIP  WAYS                                         STATE
p0     eth0      2      0 of 3  20µs        eth0 > fareth0 (p0), fareth0 > eth0          proved
p1     eth1      2      1 of 2  5µs         eth1 > fareth0 (p0), fareth1 > eth1          WRONG: no answer
`
	clean := func(s string) (out string) {
		for line := range strings.Lines(s) {
			out += strings.Join(strings.Fields(line), " ") + "\n"
		}
		return out
	}
	if clean(b.String()) != clean(want) {
		t.Errorf("\n%s\nwant\n%s", b.String(), want)
	}
}

func TestProvedColumn(t *testing.T) {
	for _, c := range []struct {
		p    *farev1.DestinationProof
		want string
	}{
		{nil, "-"},
		{&farev1.DestinationProof{PlanesProved: 4, Planes: 4}, "4/4"},
		{&farev1.DestinationProof{PlanesProved: 3, Planes: 4, LossPpb: 25_000_000}, "3/4, 2.5 % lost"},
		{&farev1.DestinationProof{Planes: 4, Reason: "it does not answer probes"}, "0/4 (it does not answer probes)"},
	} {
		if got := proved(c.p); got != c.want {
			t.Errorf("%v: %q, want %q", c.p, got, c.want)
		}
	}
}
