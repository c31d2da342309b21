package daemon

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
)

// TestDrainOfTheLastPlaneIsRefused checks that a drain that would leave a destination without any plane is refused with the destination, the
// planes and the remedy, unless it is forced; existing drains and failed links count.
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

// TestTwoDrainsOfOnePair checks the drains of two operators: while the other end withdraws one plane, which it advertises with zero bandwidth, the plane
// that is left may not be drained here.
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
