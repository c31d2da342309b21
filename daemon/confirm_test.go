package daemon

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/fare"
)

// drainStatus returns the only drain in the status.
func (r *rig) drainStatus() *farev1.DrainStatus {
	r.t.Helper()
	resp, err := r.d.FabricService().GetStatus(r.t.Context(), &farev1.GetStatusRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	if len(resp.Drains) != 1 {
		r.t.Fatalf("the status shows the drains %v, want one", resp.Drains)
	}
	return resp.Drains[0]
}

// TestDrainPassesRefusalsAndChurn checks that neither an object that the data plane refused and that does not lead to
// the drained plane, nor endless changes of another destination, delay a drain.
func TestDrainPassesRefusalsAndChurn(t *testing.T) {
	r := newRig(t, shape{Planes: 3, SubPorts: 1, Extra: "drain_delay: 0s\n"}, rigOptions{leaves: func(l *rawLeaf) {
		if l.name != "p2.0" { // p2 carries only the last destination
			l.table[destination(0)] = 400e9
			l.table[destination(1)] = 400e9
		}
		l.table[destination(2)] = 400e9
	}})
	r.settled(3) // no other operation is refused
	r.wait(destination(0), "1:1:0")
	r.wait(destination(2), "1:1:1")
	r.dp.RefuseNext(1, codes.PermissionDenied, "table full")
	r.leaves[0].announce(100e9, destination(1))
	r.wait(destination(1), "1?:4?:0?")
	churn, quit := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(churn)
		for n := 0; ; n++ {
			select {
			case <-quit:
				return
			default:
				r.leaves[0].announce(fare.Bandwidth(1+n%350)*1e9, destination(0))
			}
		}
	}()
	r.drain("p2", true)
	eventually(t, "drained", func() bool { return r.drainStatus().Stage == "drained" })
	close(quit)
	<-churn
	if got := r.weights(destination(1)); !strings.Contains(got, "?") {
		t.Errorf("the refused weights are shown as %s", got)
	}
}

// TestDrainShowsWhatItWaitsFor checks that a refused group that still leads to the drained plane keeps the drain in its
// first stage; the status shows the destination and the data plane's reason. An accepted change ends the wait.
func TestDrainShowsWhatItWaitsFor(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 0s\n"}, rigOptions{leaves: announceAll(400e9, 1)})
	r.settled(1) // no other operation is refused
	r.dp.RefuseNext(1, codes.PermissionDenied, "table full")
	r.drain("p1", true)
	r.wait(destination(0), "1?:0?")
	eventually(t, "a reason", func() bool {
		d := r.drainStatus()
		return d.Stage == "shares" && d.Waiting == 1 && d.Target.GetPlane() == "p1" && len(d.WaitsFor) == 1 &&
			strings.Contains(d.WaitsFor[0], "10.255.1.0/32") && strings.Contains(d.WaitsFor[0], "table full")
	})
	r.links.change(0, func(e *LinkEvent) { e.Up = false })
	r.wait(destination(0), "unreachable")
	r.links.change(0, func(e *LinkEvent) { e.Up = true })
	eventually(t, "drained", func() bool { return r.drainStatus().Stage == "drained" })
}

// TestDrainWithoutADataPlane checks that a leaf that forwards nothing waits for no data plane, and passes through all
// stages, not before the drain delay, which a slow machine only extends.
func TestDrainWithoutADataPlane(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Leaf: true, Extra: "drain_delay: 100ms\n"}, rigOptions{leaves: func(l *rawLeaf) {
		if l.as == 65100 {
			l.table[destination(0)] = 400e9
		}
	}})
	r.waitAnnounced(1, destination(0), "400G")
	n := r.journal.len()
	began := time.Now()
	r.drain("p1", true)
	eventually(t, "drained", func() bool { return r.drainStatus().Stage == "drained" })
	if took := time.Since(began); took < 100*time.Millisecond {
		t.Errorf("drained after %v, before the drain delay", took)
	}
	r.waitAnnounced(1, destination(0), "nothing")
	r.inOrder(n, "p1.0: 10.255.1.0/32 0", "p1.0: 10.255.1.0/32 withdrawn")
}
