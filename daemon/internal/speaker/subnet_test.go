package speaker

import (
	"net/netip"
	"testing"
)

// TestIsNeighbor checks which addresses are other hosts of a device's subnets.
func TestIsNeighbor(t *testing.T) {
	subnets := []netip.Prefix{
		netip.MustParsePrefix("10.9.0.11/24"), netip.MustParsePrefix("10.9.4.1/31"), netip.MustParsePrefix("10.9.5.5/32"),
		netip.MustParsePrefix("fd01::11/64"), netip.MustParsePrefix("fe80::11/64"), netip.MustParsePrefix("10.9.0.12/25"),
	}
	for address, want := range map[string]bool{
		"10.9.0.7": true, "10.9.0.1": true, "10.9.0.254": true, "10.9.4.0": true, "fd01::7": true, "fe80::7": true,
		"10.9.0.11": false, "10.9.0.12": false, "10.9.0.0": false, "10.9.0.255": false, "10.9.0.127": false, // ours, and those of no host
		"10.9.1.7": false, "10.9.4.1": false, "10.9.4.2": false, "10.9.5.5": false, "10.9.5.6": false, "fd01::": false, "fd02::7": false, "fd01::11": false, "0.0.0.0": false, "::": false,
	} {
		if got := isNeighbor(subnets, netip.MustParseAddr(address)); got != want {
			t.Errorf("%s is a neighbor: %v, want %v", address, got, want)
		}
	}
}

// TestSubnetNextHops checks that a route with the next hop of another host of the device's subnet is accepted only with
// SubnetNextHops, and that its refusal is reported once, with its end.
func TestSubnetNextHops(t *testing.T) {
	remote := netip.MustParsePrefix("10.0.0.9/32")
	for _, accepts := range []bool{true, false} {
		server, leaf := pairConfig(t, 1)
		server.Sessions[0].Device, server.Sessions[0].SubnetNextHops = "lo", accepts // 127.0.0.1/8
		leaf.Sessions[0].NextHop4 = netip.MustParseAddr("127.9.9.9")
		a, b := startPair(t, server, leaf)
		refused := func() (out []Refused) {
			for _, e := range a.events {
				if r, ok := e.(Refused); ok {
					out = append(out, r)
				}
			}
			return out
		}
		b.Advertise(0, []Advertisement{{Prefix: remote}})
		if accepts {
			a.until("the route", func() bool { return a.state(0).routes[remote] != nil })
			if r := refused(); len(r) != 0 {
				t.Errorf("reported as refused: %v", r)
			}
			continue
		}
		a.until("the refusal", func() bool { return len(refused()) > 0 })
		b.Advertise(0, []Advertisement{})
		a.until("its end", func() bool { return len(refused()) > 1 })
		r := refused()
		if len(r) != 2 || len(r[0].Routes) != 1 || r[0].Routes[0].Example != remote || r[0].Routes[0].Reason.String() != "route_next_hop" || len(r[1].Routes) != 0 {
			t.Errorf("refusals %v", r)
		}
		if s := a.state(0); len(s.routes) != 0 {
			t.Errorf("routes %v", s.routes)
		}
	}
}
