package linux

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
)

// TestJumboPastASmallSubPort checks that datagrams of 9,000 bytes that must not be fragmented leave whole while a
// sub-port with an MTU of 1500 is down, and while it has no weight, so that only sub-ports that carry packets bound
// their size.
func TestJumboPastASmallSubPort(t *testing.T) {
	const size = 9000 - 20 - 8
	h := newHost(t, 2)
	for _, n := range []*netnstest.Namespace{h.Namespace, h.leaf} {
		n.IP("link", "set", "p0", "mtu", "9000")
	}
	_, c := h.start()
	s := program(t, c.server)
	s.do(h.group(1, 1, 1), destination(target4(0), 1))
	e := h.tap()
	to := netip.AddrPortFrom(mustPrefix(target4(0)).Addr(), 4791)
	for _, step := range []struct {
		what string
		do   func()
	}{
		{"the link is down", func() { h.IP("link", "set", "p1", "down") }},
		{"no weight", func() {
			h.IP("link", "set", "p1", "up")
			h.carriers(2)
			s.do(h.group(1, 1, 0))
		}},
	} {
		step.do()
		h.wants(target4(0), map[string]int{"p0": testBuckets})
		for port := range 16 {
			if err := h.SendWhole(netip.AddrPortFrom(netip.MustParseAddr("10.255.0.1"), uint16(50000+port)), to, size); err != nil {
				t.Fatalf("%s, port %d: %v", step.what, port, err)
			}
			e.whole(step.what, 9000)
		}
	}
}

// whole waits for an IPv4 packet of a length at p0.
func (e *ends) whole(what string, length int) {
	e.t.Helper()
	netnstest.Eventually(e.t, time.Minute, func() error {
		buffer := make([]byte, 1<<16)
		for {
			n, from, err := unix.Recvfrom(e.fd, buffer, unix.MSG_DONTWAIT)
			if err != nil {
				return fmt.Errorf("%s: no packet of %d bytes: %w", what, length, err)
			}
			if l, ok := from.(*unix.SockaddrLinklayer); ok && e.names[l.Ifindex] == "p0" && n == length {
				return nil
			}
		}
	})
}
