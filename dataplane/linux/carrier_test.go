package linux

import (
	"testing"
	"time"

	"github.com/fared/fared/internal/rtnl"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// nexthops returns the number of nexthop objects on a device in the kernel, including those of other programs.
func (h *host) nexthops(index int) (n int) {
	h.t.Helper()
	all := h.objects()
	for _, nexthop := range all {
		if nexthop.Device == index {
			n++
		}
	}
	return n
}

// device returns the Driver's record of a device.
func (d *Driver) device(name string) rtnl.Link {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state.have.links[d.state.have.names[name]]
}

// TestSecondCableIsNotLate lets both cables of a port fail, the second one without an event of the kernel, which may
// delay it, and checks that the nexthop objects of the second cable are deleted.
func TestSecondCableIsNotLate(t *testing.T) {
	h := newHostBy(t, 4, netnstest.NIC)
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	netnstest.SecondCable(t, h.Namespace, h.leaf, "p0", "p1", func(device string) bool {
		l := d.device(device)
		return !l.Usable() && h.nexthops(l.Index) == 0
	})
}

// TestAskedCarrier simulates a kernel before Linux 6.8, where the answer to a link request is current while the kernel
// still forwards to the device. The Driver then removes the nexthop objects itself.
func TestAskedCarrier(t *testing.T) {
	h := newHost(t, 4)
	h.config.witnessTime = time.Hour
	d, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1, 1, 1), destination(target4(0), 1), destination(target6(0), 1))
	rest(t, d)
	l := d.device("p1")
	if h.nexthops(l.Index) == 0 {
		t.Fatal("no nexthop object on p1")
	}
	func() {
		d.mu.Lock() // prevents the Driver from requesting the link state, which would show a carrier
		defer d.mu.Unlock()
		l.Carrier = false
		d.links.takeLinks([]rtnl.LinkEvent{{Link: l, Asked: true}})
		d.sync()
		if n := h.nexthops(l.Index); n != 0 {
			t.Errorf("%d nexthop objects are left on p1", n)
		}
		for _, target := range []string{target4(0), target6(0)} {
			if share := h.share(target); share["p1"] != 0 || share["p0"]+share["p2"]+share["p3"] != testBuckets {
				t.Errorf("%s is divided %v", target, share)
			}
		}
		if s := d.state.stats; s.Errors != 0 || s.MovedByKernel != 2 {
			t.Errorf("%+v", s)
		}
	}()
	for _, target := range []string{target4(0), target6(0)} {
		h.wants(target, equal("p0", "p1", "p2", "p3")) // the Driver finds the carrier by a request
	}
}
