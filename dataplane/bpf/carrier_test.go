package bpf

import (
	"errors"
	"os"
	"slices"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestSecondCableIsNotLate lets both cables of a port fail, the second one without an event of the kernel, which may
// delay it.
func TestSecondCableIsNotLate(t *testing.T) {
	b := newBedBy(t, families[0], netnstest.NIC)
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	device := map[string]string{"server0": "p0.0", "server1": "p0.1"}
	netnstest.SecondCable(t, b.Server, b.Leaves[0], "server0", "server1", func(port string) bool {
		stats, err := b.s.Stats()
		if err != nil {
			t.Fatal(err)
		}
		return !slices.Contains(stats.Live, device[port])
	})
}

// TestCarrierChangesAreReported checks that the kernel's programs report each change of a sub-port's carrier to the
// agent, also to one that adopts the maps of another, and the change of a device that appears later. The kernel's own
// events would be as early here, because the devices are not numbered like physical ones. Where the kernel refuses the
// programs there are no reports (FARED_CARRIERS=1 makes that a failure, make vm).
func TestCarrierChangesAreReported(t *testing.T) {
	b := newBed(t, families[0])
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	b.awaitLive("p0.0", true)
	refused := b.s.have.pinned.unhooked
	if refused != "" && os.Getenv("FARED_CARRIERS") == "1" {
		t.Fatalf("no programs at carriers: %s", refused)
	}
	changes := func() uint64 {
		t.Helper()
		stats, err := b.s.Stats()
		if err != nil {
			t.Fatal(err)
		}
		return stats.CarrierChanges
	}
	flap := func() {
		t.Helper()
		for _, state := range []string{"down", "up"} {
			before := changes()
			b.Leaves[0].IP("link", "set", "server0", state)
			b.awaitLive("p0.0", state == "up")
			if refused != "" {
				continue
			}
			netnstest.Eventually(t, patience, func() error {
				if changes() == before {
					return errors.New("no report of the link that goes " + state)
				}
				return nil
			})
		}
		if n := changes(); refused != "" && n > 0 {
			t.Errorf("%d reports without programs: %s", n, refused)
		}
	}
	flap()
	if err := b.s.Close(); err != nil {
		t.Fatal(err)
	}
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	b.awaitLive("p0.0", true)
	if !b.s.have.pinned.adopted {
		t.Fatal("the maps are not adopted")
	}
	flap()
	b.Server.IP("link", "delete", "p0.0")
	b.awaitLive("p0.0", false)
	b.cable(0, 0)
	b.awaitLive("p0.0", true)
	flap()
}

// TestRiseReadsCarriers checks that a sub-port that the control plane sets up is live before the change is committed,
// although the goroutine that handles events has not run since the carrier returned.
func TestRiseReadsCarriers(t *testing.T) {
	b := newBed(t, families[0])
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	port := testbed.Device(0, 0)
	b.awaitLive(port, true)
	b.Leaves[0].IP("link", "set", "server0", "down")
	b.awaitLive(port, false)
	live := func() bool { return b.s.have.live.have[0].V4>>b.s.want.layout.sources[0].place[port]&1 != 0 } // under mu
	b.s.mu.Lock()                                                                                          // no event is handled from here on
	defer b.s.mu.Unlock()
	b.Leaves[0].IP("link", "set", "server0", "up")
	netnstest.Eventually(t, patience, func() error {
		links, err := b.s.have.routes.conn.Links()
		if err == nil && !slices.ContainsFunc(links, func(l rtnl.Link) bool { return l.Name == port && l.Usable() }) {
			err = errors.New("no carrier")
		}
		return err
	})
	b.s.beforeRise([]contract.Change{{Kind: contract.SubPortChange, Device: testbed.Device(1, 0), Up: false}})
	if live() {
		t.Fatal("the event was handled before: this test has lost its subject")
	}
	b.s.beforeRise([]contract.Change{{Kind: contract.SubPortChange, Device: port, Up: true}})
	if !live() {
		t.Error("the sub-port is set up, and is not live")
	}
}
