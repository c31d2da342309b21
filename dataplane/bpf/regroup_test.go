package bpf

import (
	"slices"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
)

// TestFlowsOfALostSubPortMoveOnce checks that the flows of a sub-port without a carrier go at once where the control
// plane's vector without that sub-port sends them, that no other flow moves, and that all return with the carrier.
func TestFlowsOfALostSubPortMoveOnce(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
	whole := testGroup(1, 0, false, 1, 1, 1, 1)
	b.commit(setGroup(whole), setDestination(b.family.destination, 1, b.family.source, nil))
	const flows = 96
	var all []*flow
	for port := range flows {
		all = append(all, b.flow(uint32(40000+port)))
	}
	places := func() (where [flows]string) {
		t.Helper()
		before := map[string][flows]int{}
		count := func(dev string) (n [flows]int) {
			for i := range n {
				n[i] = b.at(dev, uint32(40000+i))
			}
			return n
		}
		for dev := range b.taps {
			before[dev] = count(dev)
		}
		total := b.total()
		for _, f := range all {
			if err := f.send(1); err != nil {
				t.Fatal(err)
			}
		}
		b.arrived(total + flows)
		for dev := range b.taps {
			for i, n := range count(dev) {
				if n > before[dev][i] {
					where[i] = dev
				}
			}
		}
		return where
	}
	first := places()
	b.Leaves[1].IP("link", "set", "server0", "down")
	b.awaitLive("p1.0", false)
	lost := places()
	moved := 0
	for i := range first {
		if first[i] == "p1.0" {
			moved++
		}
		if (first[i] == "p1.0") != (lost[i] != first[i]) {
			t.Errorf("flow %d was at %s, is at %s", i, first[i], lost[i])
		}
	}
	if moved == 0 {
		t.Error("no flow was at the lost sub-port")
	}
	without := testGroup(1, 0, false, 1, 1, 1, 1)
	without.Members = slices.DeleteFunc(without.Members, func(m *farev1.VectorMember) bool { return m.Device == "p1.0" })
	change := setGroup(without)
	change.Before = whole
	b.commit(change)
	if after := places(); after != lost {
		t.Errorf("the control plane's vector moves flows:\n%v\nto\n%v", lost, after)
	}
	change = setGroup(whole)
	change.Before = without
	b.commit(change)
	if after := places(); after != lost {
		t.Errorf("weights for a sub-port without a carrier move flows:\n%v\nto\n%v", lost, after)
	}
	b.Leaves[1].IP("link", "set", "server0", "up")
	b.Leaves[1].Addr("server0", "fd00:16:1:0::2/64") // the address was removed with the link
	b.awaitLive("p1.0", true)
	b.Resolve()
	if back := places(); back != first {
		t.Errorf("after the carrier is back:\n%v\nbefore:\n%v", back, first)
	}
}
