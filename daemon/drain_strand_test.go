package daemon

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/drainfile"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestDrainOfTheLastPlaneIsRefused checks that a drain that would leave a destination without any plane is refused with
// the destination, the planes and the remedy, unless it is forced; existing drains and failed links count.
func TestDrainOfTheLastPlaneIsRefused(t *testing.T) {
	r := newRig(t, shape{Planes: 3, SubPorts: 1, Extra: "drain_delay: 0s\n"}, rigOptions{leaves: announceAll(400e9, 2)})
	r.wait(destination(0), "1:1:1")
	drain := func(plane string, force bool) error {
		_, err := r.d.FabricService().Drain(t.Context(), &farev1.DrainRequest{Force: force, Target: &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: plane}}})
		return err
	}
	if err := drain("p0", false); err != nil {
		t.Fatal(err)
	}
	r.links.change(1, func(e *LinkEvent) { e.Up = false })
	r.wait(destination(0), "0:0:1")
	r.wait(destination(0), "0:0:1")
	r.wait(destination(1), "0:0:1")
	err := drain("p2", false)
	for _, part := range []string{"2 destinations", "10.255.1.0/32", "10.255.1.1/32", "by p2 now", "p0: drained", "p1: link-down", "--force"} {
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %v", part, err)
		}
	}
	if got := r.weights(destination(0)); got != "0:0:1" || r.stage(core.DrainTarget{Plane: "p2"}) != "none" {
		t.Errorf("after the refusal: weights %s, stage %s", got, r.stage(core.DrainTarget{Plane: "p2"}))
	}
	for _, target := range []*farev1.DrainTarget{
		{Target: &farev1.DrainTarget_SubPort{SubPort: "p2.0"}}, {Target: &farev1.DrainTarget_Leaf{Leaf: leafNode(2).String()}},
	} {
		if _, err := r.d.FabricService().Drain(t.Context(), &farev1.DrainRequest{Target: target}); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%v: %v", target, err)
		}
	}
	// A plane that carries nothing now may be drained, and a drained one may be drained again.
	for _, plane := range []string{"p1", "p0"} {
		if err := drain(plane, false); err != nil {
			t.Errorf("%s: %v", plane, err)
		}
	}
	if err := drain("p2", true); err != nil {
		t.Error(err)
	}
	r.wait(destination(0), "unreachable")
}

// TestTwoDrainsOfOnePair checks the drains of two operators: while the other end withdraws one plane, which it
// advertises with zero bandwidth, the plane that is left may not be drained here.
func TestTwoDrainsOfOnePair(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 2)})
	r.wait(destination(0), "1:1")
	r.leaves[0].announce(0, destination(0))
	r.wait(destination(0), "0:1")
	drain := func(plane string) error {
		_, err := r.d.FabricService().Drain(t.Context(), &farev1.DrainRequest{Target: &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: plane}}})
		return err
	}
	err := drain("p1")
	for _, part := range []string{"1 destinations", "10.255.1.0/32", "by p1 now", "p0: zero-bandwidth"} {
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %v", part, err)
		}
	}
	if err := drain("p0"); err != nil {
		t.Errorf("the plane that the other end withdraws: %v", err)
	}
}

// TestTwoDrainsAtOnce checks the drains of two operators that both ends have accepted, because the zero bandwidth of
// each was still on its way: once it arrives, the drain is given up, traffic returns at once, and the status has the
// reason until the next request. A forced drain goes on.
func TestTwoDrainsAtOnce(t *testing.T) {
	dir := testbed.ShortDir(t)
	file := filepath.Join(dir, "drains")
	r := keepingWith(t, dir, file, "drain_delay: 1h\n", rigOptions{leaves: announceAll(400e9, 2)})
	r.wait(destination(0), "1:1")
	target := &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: "p1"}}
	drain := func(force bool) {
		t.Helper()
		if _, err := r.d.FabricService().Drain(t.Context(), &farev1.DrainRequest{Target: target, Force: force, Reason: "new optics"}); err != nil {
			t.Fatal(err)
		}
		r.wait(destination(1), "1:0")
		r.waitAnnounced(1, own, "0")
	}
	drain(false)
	r.leaves[0].announce(0, destination(0))
	r.wait(destination(0), "0:1")
	r.wait(destination(1), "1:1")
	r.waitAnnounced(1, own, "400G")
	st := r.status()
	if len(st.Drains) != 1 {
		t.Fatalf("drains: %v", st.Drains)
	}
	d := st.Drains[0]
	if !proto.Equal(d.Target, target) || d.Stage != "given-up" || d.Reason != "new optics" || d.SinceNs == 0 ||
		strings.Join(d.WaitsFor, "") != "the other end takes the remaining planes of 1 destinations out of service at the same time: 10.255.1.0/32 (by p0 with zero bandwidth now; p1: drained)" {
		t.Errorf("shown as %v", d)
	}
	eventually(t, "no drain on the disk", func() bool {
		records, err := drainfile.Load(file)
		return err == nil && len(records) == 0
	})
	r.leaves[0].announce(400e9, destination(0))
	r.wait(destination(0), "1:1")
	drain(true)
	r.leaves[0].announce(0, destination(0))
	r.leaves[0].withdraw(destination(1))
	r.wait(destination(1), "unreachable") // so the zero bandwidth before it has arrived
	if st := r.status(); len(st.Drains) != 1 || st.Drains[0].Stage != "routes" {
		t.Errorf("forced: %v", st.Drains)
	}
	if _, err := r.d.FabricService().Undrain(t.Context(), &farev1.UndrainRequest{Target: target}); err != nil {
		t.Error(err)
	}
}

// TestRestoredDrainsAreNotGivenUp checks that a drain of an earlier process stays in force where the other end drains
// the remaining plane.
func TestRestoredDrainsAreNotGivenUp(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := forwarding(t, s, 1)
	target := core.DrainTarget{Plane: "p1"}
	l.restoreDrains([]drainfile.Record{{DrainTarget: target, Since: time.Now()}})
	l.bgp(oneRoute(0, 1, destination(0), attributes(0, s.PeerAS(0), 65001)))
	if err := l.core.CheckOtherEnd(target); err == nil {
		t.Fatal("the other end takes no plane out of service: this test shows nothing")
	}
	l.giveUpDrains()
	if _, kept := l.drained.all[target]; !kept || len(l.drained.givenUp) != 0 {
		t.Errorf("drains %v, given up %v", l.drained.all, l.drained.givenUp)
	}
}
