package bpf

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// jumbo is the number of payload bytes of a UDP datagram that fills 9,000 bytes.
const jumbo = 9000 - 20 - 8

// sends reports whether a datagram that must not be fragmented can be sent from a port, by path MTU discovery
// (IP_PMTUDISC_DO).
func (b *bed) sends(port uint32, bytes int) error {
	b.Helper()
	return b.Server.SendWhole(netip.AddrPortFrom(b.family.source.Addr(), uint16(port)), netip.AddrPortFrom(b.family.destination.Addr(), roce), bytes)
}

// TestUnequalMTU checks by packets of 9,000 bytes that only sub-ports which carry packets bound the size: not one that
// is down, that was set down, or that has neither weight nor slot. A sub-port with a smaller MTU that carries packets
// does, so that none is lost at it, also if the configuration has an alternative name of its device.
func TestUnequalMTU(t *testing.T) {
	for _, name := range []string{"p3.0", "fabric3"} {
		t.Run(name, func(t *testing.T) { unequalMTU(t, name) })
	}
}

// unequalMTU is TestUnequalMTU with a name of device p3.0.
func unequalMTU(t *testing.T, name string) {
	b := newBed(t, families[0])
	b.Resolve()
	for p := range testPlanes {
		for s := range testSubPorts {
			b.Server.IP("link", "set", testbed.Device(p, s), "mtu", "9000")
			b.Leaves[p].IP("link", "set", testbed.LeafPort(s), "mtu", "9000")
		}
	}
	if name != "p3.0" {
		b.ip("link property add dev p3.0 altname " + name)
	}
	b.open()
	forwarding := b.forwarding(farev1.Mode_MODE_PER_FLOW)
	forwarding.Planes[3].SubPorts[0].Device = name
	if err := b.s.SetForwarding(forwarding); err != nil {
		t.Fatal(err)
	}
	group := func(weights ...uint32) *farev1.Vector {
		g := testGroup(1, 6, false, weights...)
		for _, m := range g.Members {
			if m.Device == "p3.0" {
				m.Device = name
			}
		}
		for _, slot := range g.Slots {
			if slot.Device == "p3.0" {
				slot.Device = name
			}
		}
		return g
	}
	ports := sequence(8, 5, 10127)
	without := group(1, 1, 1, 0) // slots 3 and 7 are at plane 3
	without.Slots[3].Plane, without.Slots[3].Device = "p0", "p0.0"
	with := group(1, 1, 1, 1)
	b.commit(setGroup(with), setDestination(b.family.destination, 1, b.family.source, ports[:6]))
	state := func(up bool) contract.Change {
		return contract.Change{Kind: contract.SubPortChange, Device: name, Up: up}
	}
	for _, step := range []struct {
		what string
		do   func()
		fits bool
	}{
		{"all MTUs are 9000", func() {}, true},
		{"a sub-port with traffic has 1500", func() { b.ip("link set p3.0 mtu 1500") }, false},
		{"it is set down", func() { b.commit(state(false)) }, true},
		{"it is set up", func() { b.commit(state(true)) }, false},
		{"it has no weight", func() { b.commit(setGroup(without)) }, true},
		{"it has a weight", func() { b.commit(setGroup(with)) }, false},
		{"its link is down", func() { b.ip("link set p3.0 down") }, true},
		{"its link is up", func() { b.ip("link set p3.0 up") }, false},
		{"another program sets fared0", func() { b.ip("link set p3.0 mtu 9000"); b.ip("link set fared0 mtu 2000") }, true},
	} {
		had := b.at("p1.0", ports[1])
		step.do()
		netnstest.Eventually(t, time.Minute, func() error {
			err := b.sends(ports[1], jumbo)
			if err != nil && !strings.Contains(err.Error(), unix.EMSGSIZE.Error()) {
				t.Fatal(err)
			}
			if fits := err == nil; fits != step.fits || fits && b.at("p1.0", ports[1]) == had {
				return fmt.Errorf("%s: %d bytes: %v, %d packets arrived", step.what, jumbo, err, b.at("p1.0", ports[1])-had)
			}
			return nil
		})
		if link, err := b.s.kernel.handle.LinkByName(DefaultDevice); err != nil || link.Attrs().MTU != map[bool]int{true: 9000, false: 1500}[step.fits] {
			t.Errorf("%s: fared0 %+v, %v", step.what, link.Attrs().MTU, err)
		}
	}
}
