package daemon

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/fare"
)

// TestDrainOfTheLastPlaneIsRefused checks that a drain that would leave a destination without any plane is refused with the destination, the
// planes and the remedy, unless it is forced; existing drains and failed links count.
func TestDrainOfTheLastPlaneIsRefused(t *testing.T) {
	r := newRig(t, shape{planes: 3, subPorts: 1, extra: "drain_delay: 0s\n"}, rigOptions{leaves: announceAll(400e9, 2)})
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
	if got := r.weights(destination(0)); got != "0:0:1" || r.stage(DrainTarget{Plane: "p2"}) != "none" {
		t.Errorf("after the refusal: weights %s, stage %s", got, r.stage(DrainTarget{Plane: "p2"}))
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

// TestStrandedIsWhatADrainDoes checks, for random routes, failures and drains of a server with own ports, that a drain is refused exactly when
// it makes a reachable destination of some source group unreachable: the test forces the drain and compares the destinations before and after
// it.
func TestStrandedIsWhatADrainDoes(t *testing.T) {
	refused := 0
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		s := shape{planes: 3, subPorts: 2, loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}, serves: func(i int) string {
			return []string{"10.255.0.1/32", "10.255.0.2/32", "10.255.0.1/32, 10.255.0.2/32"}[(i+int(seed))%3]
		}}
		c := s.core(t)
		for i := range 6 {
			do(t, c, up(i, 400e9), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i / 2), PeerAS: s.peerAS(i)}})
			for d := range 3 {
				if random.IntN(3) > 0 {
					value := fare.Bandwidth(400e9)
					if random.IntN(4) == 0 {
						value = 0
					}
					do(t, c, Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(d), Attrs: says(value, s.peerAS(i), 65001)}})
				}
			}
			if random.IntN(4) == 0 {
				do(t, c, down(i))
			}
		}
		reachable := func() map[string]bool {
			out := map[string]bool{}
			for i := range c.sources {
				for prefix, id := range c.sources[i].table.Destinations {
					out[fmt.Sprint(i, prefix)] = c.sources[i].table.Group(id).Reachable
				}
			}
			return out
		}
		for range 5 {
			target := []DrainTarget{{Plane: fmt.Sprint("p", random.IntN(3))}, {SubPort: s.device(random.IntN(6))}, {Leaf: leafNode(random.IntN(3))}}[random.IntN(3)]
			before := reachable()
			err := c.checkStranded(target)
			if now := reachable(); fmt.Sprint(now) != fmt.Sprint(before) {
				t.Fatalf("seed %d: the check of %v changed %v to %v", seed, target, before, now)
			}
			do(t, c, DrainRequest{Target: target, On: true})
			after, lost := reachable(), 0
			for key, was := range before {
				if was && !after[key] {
					lost++
				}
			}
			if (err != nil) != (lost > 0) || err != nil && !strings.Contains(err.Error(), fmt.Sprintf("leave %d destinations", lost)) {
				t.Fatalf("seed %d: drain of %v takes %d destinations, the check returns %v", seed, target, lost, err)
			}
			if lost > 0 {
				refused++
			}
		}
	}
	if refused < 100 {
		t.Errorf("only %d drains took a destination: this test shows little", refused)
	}
}
