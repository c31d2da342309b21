package report

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	fleetv1 "github.com/fared/fared/api/fleet/v1"
	"github.com/fared/fared/client"
)

// TestOrder spreads nodes evenly over workers; without one of them, the nodes of the others stay.
func TestOrder(t *testing.T) {
	workers := []string{"10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"}
	count := map[string]int{}
	second := map[string]int{}
	for i := range 3000 {
		node := fmt.Sprintf("10.255.%d.%d", i/250, i%250)
		order := Order(workers, node)
		count[order[0]]++
		rest := Order(workers[1:], node)
		if order[0] != workers[0] && rest[0] != order[0] {
			t.Fatalf("%s moves from %s to %s", node, order[0], rest[0])
		}
		if order[0] == workers[0] {
			second[rest[0]]++
		}
	}
	for _, w := range workers {
		if count[w] < 900 || count[w] > 1100 {
			t.Errorf("%d of 3000 nodes at %s", count[w], w)
		}
	}
	if len(second) != 2 || second[workers[1]] < 400 {
		t.Errorf("the nodes of a lost worker spread as %v", second)
	}
}

// TestPorts derives states of sub-ports from the daemon's answers, and keeps the time of a state.
func TestPorts(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	session := func(name, state string) *farev1.Session {
		return &farev1.Session{Name: name, Device: name, State: state, StateAgeNs: uint64(3 * time.Second)}
	}
	s := &seen{
		status: &farev1.GetStatusResponse{Converged: true, Faults: []*farev1.Fault{{Kind: "bandwidth-ignored", Session: "a", Reason: "negative", Routes: 2, Example: "10.255.0.9/32"},
			{Kind: "routes-dropped", Session: "b", Reason: "route_next_hop", Routes: 1}}},
		sessions: []*farev1.Session{session("a", "established"), session("b", "connecting"), session("c", "established"), session("d", "established"), session("e", "draining")},
		planes: []*farev1.Plane{{Plane: "p0", SubPorts: []*farev1.SubPort{
			{Device: "a", Carrier: true}, {Device: "b", Carrier: true}, {Device: "c"}, {Device: "d", Carrier: true, Drained: true}, {Device: "e", Carrier: true},
		}}},
	}
	first := s.ports(nil, now)
	var states []string
	for _, p := range first.Ports {
		states = append(states, p.State)
	}
	if want := []string{up, silent, dark, drained, up}; !slices.Equal(states, want) {
		t.Errorf("states %v, want %v", states, want)
	}
	if p := first.Ports[0]; p.Ignored != "negative" || p.Routes != 2 || first.Ports[1].Ignored != "" {
		t.Errorf("faults of routes: %v", first.Ports)
	}
	if got := time.Unix(0, int64(first.Ports[1].SinceNs)); !got.Equal(now.Add(-3 * time.Second)) {
		t.Errorf("silent since %s", got)
	}
	s.planes[0].SubPorts[0].Carrier = false
	next := s.ports(first, now.Add(time.Minute))
	if next.Ports[1].SinceNs != first.Ports[1].SinceNs || next.Ports[0].SinceNs != uint64(now.Add(time.Minute).UnixNano()) {
		t.Errorf("later %v", next.Ports)
	}
	s.status.Converged = false
	if got := s.ports(nil, now).Ports[1].State; got != unknown {
		t.Errorf("a session of a starting daemon is %s", got)
	}
}

// TestPaths joins destinations with equal bandwidths, and consecutive addresses; a removed destination leaves a gap.
func TestPaths(t *testing.T) {
	set := func(to string, bps ...uint64) *farev1.DestinationWeights {
		w := &farev1.DestinationWeights{Destination: to + "/32", Sources: []string{"10.255.0.1/32", "10.255.0.2/32"}}
		for i, b := range bps {
			w.Planes = append(w.Planes, &farev1.PlaneWeight{Plane: fmt.Sprintf("p%d", i), BandwidthBps: b})
		}
		return w
	}
	table := table{rows: map[client.Key]row{}}
	table.apply(&client.Update{Set: []*farev1.DestinationWeights{
		set("10.255.0.3", 4, 4), set("10.255.0.4", 4, 4), set("10.255.0.6", 4, 4), set("10.255.0.5", 4, 2), set("10.255.0.7", 4, 4),
		{Destination: "none"},
	}})
	want := &fleetv1.Paths{Planes: []string{"p0", "p1"}, Paths: []*fleetv1.Path{
		{Source: "10.255.0.1", BandwidthBps: []uint64{4, 4}, Destinations: []*fleetv1.Range{{First: "10.255.0.3", Count: 2}, {First: "10.255.0.6", Count: 2}}},
		{Source: "10.255.0.1", BandwidthBps: []uint64{4, 2}, Destinations: []*fleetv1.Range{{First: "10.255.0.5", Count: 1}}},
	}}
	if got := table.paths(); prototext.Format(got) != prototext.Format(want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	table.apply(&client.Update{Removed: []client.Key{{Destination: "10.255.0.6/32", Sources: "10.255.0.1/32,10.255.0.2/32"}}})
	want.Paths[0].Destinations[1] = &fleetv1.Range{First: "10.255.0.7", Count: 1}
	if got := table.paths(); prototext.Format(got) != prototext.Format(want) {
		t.Errorf("after a removal %v\nwant %v", got, want)
	}
	if m, changed := (sections{paths: want}).since(sections{paths: table.paths(), ports: &fleetv1.Ports{}}); changed {
		t.Errorf("nothing has changed, and is sent: %v", m)
	}
}

// TestProofs passes recent probes on, and nothing without probes.
func TestProofs(t *testing.T) {
	s := &seen{status: &farev1.GetStatusResponse{}}
	if got := s.proofs(nil); got != nil {
		t.Errorf("a leaf proves %v", got)
	}
	s.status.Proof = &farev1.ProofStatus{Answering: 7, Planes: []*farev1.ProofPlane{{Plane: "p0", Recent: 900}},
		Losses: []*farev1.ProofLoss{{Plane: "p0", Source: "10.255.0.1", Destination: "10.255.0.9", Probes: 100, Lost: 2}}}
	got := s.proofs(nil)
	if len(got.Planes) != 1 || got.Planes[0].Probes != 900 || got.Planes[0].Peers != 7 || len(got.Lossy) != 1 || got.Lossy[0].Lost != 2 {
		t.Errorf("proofs %v", got)
	}
	s.status.Proof.Planes[0].Recent = 850
	if again := s.proofs(got); !proto.Equal(again, got) {
		t.Errorf("50 probes of 900 less: %v", again)
	}
	s.status.Proof.Planes[0].Recent = 700
	if later := s.proofs(got); later.Planes[0].Probes != 700 {
		t.Errorf("700 probes: %v", later)
	}
	s.status.Proof.Inactive = "the daemon starts"
	if got := s.proofs(nil); got != nil {
		t.Errorf("inactive probes prove %v", got)
	}
}
