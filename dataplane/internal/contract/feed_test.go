package contract

import (
	"fmt"
	"net/netip"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// TestFeed checks that a follower sees the last state of each changed object, in parts, and none of a refused one.
func TestFeed(t *testing.T) {
	s := New(Config{Name: "test", Forwarder: &accepting{}})
	f := &farev1.Forwarding{Mode: farev1.Mode_MODE_PER_FLOW, Loopbacks: []string{"10.0.0.1/32"}, Planes: []*farev1.ForwardingPlane{{Plane: "p0", SubPorts: []*farev1.ForwardingSubPort{{Device: "a"}}}}}
	if err := s.SetForwarding(f); err != nil {
		t.Fatal(err)
	}
	known := 0
	feed := s.Follow(func(state *State) { known = len(state.Devices) })
	if known != 1 {
		t.Fatal("the present state has ", known, " devices")
	}
	vector := func(weight uint32) *farev1.Operation {
		return &farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: 1, Members: []*farev1.VectorMember{{Plane: "p0", Device: "a", Weight: weight}}}}}
	}
	operations := []*farev1.Operation{vector(1), vector(2), {Op: &farev1.Operation_DeleteVector{DeleteVector: 7}}, {Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: "b"}}}}
	const n = 2*takeLimit + 1
	for i := range n {
		prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 32)
		operations = append(operations, &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: prefix.String(), Vector: 1}}})
	}
	for i, result := range s.Apply(operations) {
		if (result != nil) != (i == 3) {
			t.Fatal(i, result)
		}
	}
	seen := map[DestinationKey]bool{}
	for take := 0; len(seen) < n; take++ {
		select {
		case <-feed.Ready():
		default:
			t.Fatalf("%d of %d destinations are announced", len(seen), n)
		}
		feed.Take(func(state *State, changed Changed) {
			if got := fmt.Sprint(changed.Forwarding, len(changed.SubPorts), len(changed.Groups)); got != fmt.Sprintf("false 0 %d", max(1-take, 0)) || len(changed.Destinations) > takeLimit {
				t.Error(take, got, len(changed.Destinations))
			}
			if w := state.Groups[1].Members[0].Weight; w != 2 {
				t.Error("weight ", w)
			}
			for key := range changed.Destinations {
				seen[key] = true
			}
		})
	}
	if err := s.SetForwarding(f); err != nil {
		t.Fatal(err)
	}
	<-feed.Ready()
	feed.Take(func(_ *State, changed Changed) {
		if !changed.Forwarding || len(changed.Destinations) > 0 {
			t.Error(changed)
		}
	})
}

// accepting is a Forwarder that forwards nothing.
type accepting struct{}

func (accepting) Capabilities() *farev1.Capabilities     { return &farev1.Capabilities{Ipv6: true} }
func (accepting) SetForwarding(*farev1.Forwarding) error { return nil }
func (accepting) Commit([]Change) error                  { return nil }
