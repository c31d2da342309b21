package core

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/fare"
)

// TestRestoredDrainAdvertisesNothing checks that no session over a restored drain's target ever has a route, for each
// kind of target and both roles, and that an undrain returns the target to service. With a drained leaf no session has
// a route before its leaf is known.
func TestRestoredDrainAdvertisesNothing(t *testing.T) {
	for _, leaf := range []bool{false, true} {
		for _, target := range []DrainTarget{{Plane: "p1"}, {SubPort: "p1.0"}, {Leaf: leafNode(1)}} {
			t.Run(fmt.Sprintf("%v, leaf %v", target, leaf), func(t *testing.T) {
				s := shape{Planes: 2, SubPorts: 1, Leaf: leaf}
				c := coreOf(t, s.Text())
				routes := []string{"unset", "unset"}
				var drained []int // every number of routes of the drained session
				look := func() string {
					c.Updates()
					c.Advertise(func(session int, set []Route) {
						routes[session] = fmt.Sprint(len(set))
						if session == 1 {
							drained = append(drained, len(set))
						}
					})
					return strings.Join(routes, " ")
				}
				up := func(i int) {
					do(t, c, up(i, 400e9), Fabric{fare.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: s.PeerAS(i)}})
					look()
					do(t, c, RoutesWritten{Session: i, Generation: 1, Mark: c.Mark(i)})
				}
				stage := func() (out string) {
					c.Drains(func(got DrainTarget, s DrainStage) {
						if got == target {
							out = s.String()
						}
					})
					return out
				}
				do(t, c, DrainRestored{target})
				look()
				if target.Leaf.IsValid() && !leaf && routes[0] != "0" {
					t.Errorf("a session whose leaf is unknown has %s routes", routes[0])
				}
				up(0)
				up(1)
				do(t, c, Fabric{fare.RouteUpdate{Session: 0, Generation: 1, Prefix: destination(0), Attrs: attributes(400e9, s.PeerAS(0), 65001)}})
				if got, want := look(), "1 0"; got != want && !leaf || leaf && routes[1] != "0" {
					t.Errorf("with both sessions up: routes %s, want %s", got, want)
				}
				if got := stage(); got != "shares" {
					t.Errorf("before the data plane: stage %q", got)
				}
				do(t, c, DrainStep{target, true})
				look()
				do(t, c, RoutesWritten{Session: 1, Generation: 1, Mark: c.Mark(1)})
				if got := stage(); got != "drained" {
					t.Errorf("with the data plane's confirmation: stage %q", got)
				}
				if slices.Max(append(drained, 0)) > 0 {
					t.Errorf("the drained session had %v routes", drained)
				}
				do(t, c, DrainRequest{target, false}, DrainStep{target, false})
				if look(); routes[1] != "1" {
					t.Errorf("after the undrain: %s routes", routes[1])
				}
				if got := stage(); got != "" {
					t.Errorf("after the undrain: stage %q", got)
				}
			})
		}
	}
}

// TestRestoredDrainOfNothing checks that the restored drain of a target that the configuration lacks is refused and
// changes nothing, and that one of an unknown leaf is accepted.
func TestRestoredDrainOfNothing(t *testing.T) {
	c := coreOf(t, shape{Planes: 2, SubPorts: 1}.Text())
	before := c.Digest()
	for _, target := range []DrainTarget{{Plane: "p9"}, {SubPort: "eth9"}, {}} {
		if err := c.Step(DrainRestored{target}); err == nil {
			t.Errorf("%v: accepted", target)
		}
	}
	if c.Digest() != before {
		t.Error("refused drains have changed the state")
	}
	do(t, c, DrainRestored{DrainTarget{Leaf: leafNode(7)}})
	do(t, c, DrainRequest{DrainTarget{Leaf: leafNode(7)}, false})
}
