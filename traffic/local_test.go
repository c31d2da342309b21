package traffic

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"go.uber.org/goleak"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/pairwise"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/wecmp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestLocal plays runs in which every two of transport, operation, ordering and pattern meet: each message must arrive
// once, and complete.
func TestLocal(t *testing.T) {
	playLocal(t, pairwise.Rows(len(Transports()), len(Ops()), len(orderings), len(Patterns())))
}

// TestLocalProduct plays every pattern with every operation in every ordering over every transport.
func TestLocalProduct(t *testing.T) {
	gate.Slow(t, gate.Models, "192 runs")
	var rows [][]int
	for transport := range Transports() {
		for op := range Ops() {
			for o := range orderings {
				for pattern := range Patterns() {
					rows = append(rows, []int{transport, op, o, pattern})
				}
			}
		}
	}
	playLocal(t, rows)
}

// playLocal plays one run per row of indexes of transport, operation, ordering and pattern. The nodes of a transport
// play all its runs, one after the other.
func playLocal(t *testing.T, rows [][]int) {
	const messages = 30
	for i, transport := range Transports() {
		run := Config{Message: 3001, Outstanding: 7, Size: messages * 3001}
		l, err := StartLocal(LocalConfig{Nodes: 3, Transport: transport, Run: run, Slots: LocalSlots()[:2]})
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range rows {
			if row[0] != i {
				continue
			}
			run := run
			run.Op, run.Ordering, run.Pattern = Ops()[row[1]], wecmp.Ordering(row[2]), Pattern(Patterns()[row[3]])
			t.Run(fmt.Sprintf("%s/%s/%s/%s", transport, run.Op, orderings[run.Ordering], run.Pattern), func(t *testing.T) {
				r, err := Coordinate(t.Context(), run, l.Servers, nil)
				if err != nil {
					t.Fatal(err)
				}
				pairs, _ := run.Pattern.Pairs(3)
				if !r.Ok || r.Total.Messages != uint64(messages*len(pairs)) || r.Total.Bytes != r.Total.Messages*3001 || r.Total.Reordered != 0 {
					t.Errorf("%v %q", r.Total, r.Errors)
				}
				due := uint64(0)
				for _, p := range r.Planes {
					due += p.Due
				}
				if due+uint64(len(r.Pairs)*4) < r.Total.Bytes { // each slot's due bytes are truncated to an integer
					t.Errorf("planes were due %d bytes of %d", due, r.Total.Bytes)
				}
			})
		}
		l.Close()
	}
}

// TestMixed runs a plane of shared memory together with planes of packets. Each must carry the part that its share
// gives.
func TestMixed(t *testing.T) {
	run := Config{Message: 4096, Size: 400 * 4096, Pattern: Ring}
	l, err := StartLocal(LocalConfig{Nodes: 2, Transport: "superp", Planes: map[string]string{"p3": "nupa", "p2": "tcp"}, Run: run,
		Slots: []Slot{{"p1", "", 49152, 1}, {"p2", "", 49153, 2}, {"p3", "", 49154, 1}}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r, err := Coordinate(t.Context(), run, l.Servers, nil)
	if err != nil || !r.Ok {
		t.Fatalf("%v, %v", r, err)
	}
	for i, p := range r.Planes {
		if want := []uint64{25e7, 50e7, 25e7}[i]; p.DuePpb != want || max(p.DeviationPpb, -p.DeviationPpb) > 2e7 {
			t.Errorf("%s is due %d and deviates by %d parts per billion", p.Plane, p.DuePpb, p.DeviationPpb)
		}
	}
}

// TestPortIsTaken verifies that flows can be dialed from a slot's port although the kernel has assigned the port to a
// connection between nodes.
func TestPortIsTaken(t *testing.T) {
	run := Config{Message: 2000, Size: 60 * 2000, Stall: 20 * time.Second, Pattern: PeerPeer}
	l, err := StartLocal(LocalConfig{Nodes: 2, Transport: "tcp", Run: run})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, b := l.nodes[0].devices[0].Address(), l.nodes[1].devices[0].Address()
	conn, err := dialer(a).DialContext(t.Context(), "tcp", netip.AddrPortFrom(b, rdma.ConnectPort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	slots, err := newStatic(nil, []Slot{{"p0", "", uint16(conn.LocalAddr().(*net.TCPAddr).Port), 1}})
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range l.nodes {
		n.static.slots = slots.slots
	}
	if r, err := Coordinate(t.Context(), run, l.Servers, nil); err != nil || !r.Ok {
		t.Errorf("%v, %v", r, err)
	}
}

// TestDuration verifies that a run ends when its time is up, with a series whose sum equals the bytes that arrived.
func TestDuration(t *testing.T) {
	run := Config{Message: 10000, Duration: 300 * time.Millisecond, Interval: 10 * time.Millisecond, Pattern: Incast}
	l, err := StartLocal(LocalConfig{Nodes: 3, Transport: "tcp", Run: run})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	seen := 0
	r, err := Coordinate(t.Context(), run, l.Servers, func(i *farev1.TrafficInterval) {
		if i.GetFromNs() != uint64(seen)*10e6 {
			t.Errorf("interval %d begins at %d ns", seen, i.GetFromNs())
		}
		seen++
	})
	if err != nil || !r.Ok {
		t.Fatalf("%v, %v", r, err)
	}
	sum := 0.0
	for _, i := range r.Series {
		sum += float64(i.GoodputBps) / 8 * float64(i.ToNs-i.FromNs) / 1e9
	}
	if d := sum - float64(r.Total.Bytes); seen < 20 || d > 0.001*sum || -d > 0.001*sum {
		t.Errorf("%d intervals, whose bytes add up to %.0f of %d", seen, sum, r.Total.Bytes)
	}
}
