package daemon

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/dataplane/memory"
)

// TestDrainInOrder checks the order of a drain: acknowledged shares, then zero bandwidth, then no route; and of an
// undrain: the route, then the shares.
func TestDrainInOrder(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 100ms\n"}, rigOptions{leaves: announceAll(400e9, 1)})
	d, target := destination(0), core.DrainTarget{Plane: "p1"}
	r.settled(1)
	r.waitAnnounced(1, own, "400G")
	n := r.journal.len()
	r.dp.DelayAcks(time.Hour)
	r.drain("p1", true)
	eventually(t, "zero shares at the data plane", func() bool { return r.journal.index(n, "dataplane: group p0.0=1") >= 0 })
	// The operation has arrived and is not acknowledged: the leaf must not have received anything yet.
	if value := r.leaves[1].has(own); value != "400G" || r.stage(target) != "shares" {
		t.Errorf("before the acknowledgement the leaf has %s, the stage is %s", value, r.stage(target))
	}
	r.dp.DelayAcks(0)
	r.dp.BreakStream() // the next stream begins with the state in effect
	r.waitAnnounced(1, own, "nothing")
	eventually(t, "drained", func() bool { return r.stage(target) == "drained" })
	r.inOrder(n, "dataplane: group p0.0=1", "p1.0: 10.255.0.1/32 0", "p1.0: 10.255.0.1/32 withdrawn")
	if value := r.leaves[0].has(own); value != "400G" {
		t.Errorf("the other plane's leaf has %s", value)
	}
	if resp, err := r.d.FabricService().ListSessions(t.Context(), &farev1.ListSessionsRequest{}); err != nil || resp.Sessions[1].State != "DRAINED" && resp.Sessions[1].State != "drained" {
		t.Errorf("the session is shown as %v, %v", resp.GetSessions(), err)
	}

	n = r.journal.len()
	r.drain("p1", false)
	r.wait(d, "1:1")
	r.inOrder(n, "p1.0: 10.255.0.1/32 400G", "dataplane: group p0.0=1 p1.0=1")
	if s := r.stage(target); s != "none" {
		t.Errorf("afterwards the stage is %s", s)
	}
	if n := r.leaves[1].count(); n != 1 {
		t.Errorf("the session came up %d times", n)
	}
}

// TestDrainWaitsForTheDataPlane checks that a data plane that does not acknowledge, or refuses, keeps the drain in its
// first stage, however long the drain delay has passed.
func TestDrainWaitsForTheDataPlane(t *testing.T) {
	for name, spoil := range map[string]func(*memory.Dataplane){
		"silent":  func(dp *memory.Dataplane) { dp.DelayAcks(time.Hour) },
		"refuses": func(dp *memory.Dataplane) { dp.RefuseNext(1, codes.PermissionDenied, "table full") },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 0s\n"}, rigOptions{leaves: announceAll(400e9, 1)})
			r.settled(1) // no other operation is refused
			r.waitAnnounced(1, own, "400G")
			n := r.journal.len()
			spoil(r.dp)
			r.drain("p1", true)
			eventually(t, "zero shares at the data plane", func() bool { return r.journal.index(n, "dataplane: group p0.0=1") >= 0 })
			// A later change passes through the whole loop and reaches the leaves: a new speed.
			r.leaves[0].announce(400e9, destination(5))
			eventually(t, "a later UPDATE at the data plane", func() bool { return r.journal.index(n, "dataplane: destination 10.255.1.5/32") >= 0 })
			if s := r.stage(core.DrainTarget{Plane: "p1"}); s != "shares" {
				t.Errorf("stage %s", s)
			}
			if said := r.leaves[1].has(own); said != "400G" {
				t.Errorf("the leaf has %s", said)
			}
		})
	}
}

// TestDrainOfWhatIsNotThere checks that a drain of an unknown target is an error that lists the existing ones.
func TestDrainOfWhatIsNotThere(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.wait(destination(0), "1:1")
	for _, target := range []*farev1.DrainTarget{
		{Target: &farev1.DrainTarget_Plane{Plane: "p7"}},
		{Target: &farev1.DrainTarget_SubPort{SubPort: "eth7"}},
		{Target: &farev1.DrainTarget_Leaf{Leaf: "192.0.2.7"}},
		{},
	} {
		if _, err := r.d.FabricService().Drain(t.Context(), &farev1.DrainRequest{Target: target}); err == nil {
			t.Errorf("%v was accepted", target)
		}
	}
	// A leaf is identified by its router ID and by the address of a session.
	for _, name := range []string{leafNode(1).String(), r.s.There(1).String()} {
		target := &farev1.DrainTarget{Target: &farev1.DrainTarget_Leaf{Leaf: name}}
		resp, err := r.d.FabricService().Drain(t.Context(), &farev1.DrainRequest{Target: target})
		if err != nil || fmt.Sprint(resp.Sessions) != "[p1/p1.0]" || resp.Target.GetLeaf() != leafNode(1).String() {
			t.Fatalf("leaf %s: %v, %v", name, resp, err)
		}
		r.wait(destination(0), "1:0")
	}
}
