package core

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
)

// TestStrandedIsWhatADrainDoes checks, for random routes, failures and drains of a server with own ports, that a drain is refused exactly when
// it makes a reachable destination of some source group unreachable, or leaves one that has bandwidth only paths of zero bandwidth: the test forces
// the drain and compares the destinations before and after it.
func TestStrandedIsWhatADrainDoes(t *testing.T) {
	refused := 0
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		s := shape{Planes: 3, SubPorts: 2, Loopbacks: []string{"10.255.0.1/32", "10.255.0.2/32"}, Serves: func(i int) string {
			return []string{"10.255.0.1/32", "10.255.0.2/32", "10.255.0.1/32, 10.255.0.2/32"}[(i+int(seed))%3]
		}}
		c := coreOf(t, s.Text())
		for i := range 6 {
			do(t, c, up(i, 400e9), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i / 2), PeerAS: s.PeerAS(i)}})
			for d := range 3 {
				if random.IntN(3) > 0 {
					value := fare.Bandwidth(400e9)
					if random.IntN(4) == 0 {
						value = 0
					}
					do(t, c, Fabric{fare.RouteUpdate{Session: i, Generation: 1, Prefix: destination(d), Attrs: attributes(value, s.PeerAS(i), 65001)}})
				}
			}
			if random.IntN(4) == 0 {
				do(t, c, down(i))
			}
		}
		reachable := func() map[string]int { // 1: by paths of zero bandwidth alone
			out := map[string]int{}
			for i := range c.sources {
				for prefix, id := range c.sources[i].table.Destinations {
					view, state := c.sources[i].table.Group(id), 0
					if view.Reachable {
						state = 1
					}
					for _, p := range view.Planes {
						if p.Bandwidth > 0 {
							state = 2
						}
					}
					out[fmt.Sprint(i, prefix)] = state
				}
			}
			return out
		}
		for range 5 {
			target := []DrainTarget{{Plane: fmt.Sprint("p", random.IntN(3))}, {SubPort: s.Device(random.IntN(6))}, {Leaf: leafNode(random.IntN(3))}}[random.IntN(3)]
			before := reachable()
			err := c.CheckStranded(target)
			if now := reachable(); fmt.Sprint(now) != fmt.Sprint(before) {
				t.Fatalf("seed %d: the check of %v changed %v to %v", seed, target, before, now)
			}
			do(t, c, DrainRequest{Target: target, On: true})
			after, lost := reachable(), 0
			for key, was := range before {
				if after[key] < was {
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
