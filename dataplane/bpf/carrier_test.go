package bpf

import (
	"slices"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/netnstest"
)

// TestSecondCableIsNotLate lets both cables of a port fail while the kernel delays the event of the second cable.
func TestSecondCableIsNotLate(t *testing.T) {
	b := newBedBy(t, families[0], netnstest.NIC)
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	device := map[string]string{"server0": "p0.0", "server1": "p0.1"}
	netnstest.SecondCable(t, b.leaves[0], "server0", "server1", func(port string) bool {
		stats, err := b.s.Stats()
		if err != nil {
			t.Fatal(err)
		}
		return !slices.Contains(stats.Live, device[port])
	})
}
