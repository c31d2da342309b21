package guard

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

// refusedText formats refused routes: "reason routes example", separated by ", ".
func refusedText(list []Refused) string {
	var all []string
	for _, r := range list {
		all = append(all, fmt.Sprintf("%v %d %v", r.Reason, r.Routes, r.Example))
	}
	return strings.Join(all, ", ")
}

// TestRefusedRoutes checks which dropped routes are remembered, step by step on one session: those that hide servers,
// until they are accepted or withdrawn, and not the routine ones.
func TestRefusedRoutes(t *testing.T) {
	const (
		pathLoop    = "40 02 0a 02 02 0000fde9 0000fe4c " // the leaf and our AS
		hopThird    = "40 03 04 0a000009 "
		loop4       = origin + pathLoop + hopLeaf
		third4      = origin + pathLeaf + hopThird
		outside4    = "20 0a020001 "
		aggregate4  = "18 0a0101 "   // 10.1.1.0/24, within accept
		larger4     = "08 0a "       // 10.0.0.0/8, around accept
		elsewhere4  = "18 0a0201 "   // 10.2.1.0/24
		default4    = "00 "          //
		link4       = "1f 0a010100 " // 10.1.1.0/31
		own4        = "20 0a0100ff " // 10.1.0.255, ours
		hostInside4 = "20 0a010107 " // 10.1.1.7
		outside6    = "80 20010db8000b00000000000000000001 "
	)
	c := testConfig()
	c.Own = func() []netip.Prefix {
		return []netip.Prefix{netip.MustParsePrefix("10.1.0.255/32"), netip.MustParsePrefix("2001:db8:a::ff/128")}
	}
	g := establish(t, c, leafOpen(capsBoth, capAS4))
	for _, step := range []struct{ what, withdrawn, attrs, nlri, want string }{
		{"a default route", "", good4, default4, ""},
		{"subnets of links, and aggregates of other addresses", "", good4, link4 + elsewhere4, ""},
		{"our loopback, sent back", "", loop4, own4, ""},
		{"our loopback with our next hop", "", third4, own4, ""},
		{"multicast", "", good4, "20 e0000005 ", ""},
		{"a host outside, and none inside", "", good4, outside4, "route_outside_accept 1 10.2.0.1/32"},
		{"our loopback is no other server", "", good4, own4, "route_outside_accept 1 10.2.0.1/32"},
		{"an IPv6 host outside", "", origin + pathLeaf + "80 0e 26 0002 01 10 fe800000000000000000000000000001 00 " + outside6, "", "route_outside_accept 2 10.2.0.1/32"},
		{"a host inside", "", good4, host4, "route_outside_accept 1 2001:db8:b::1/128"},
		{"an IPv6 host inside", "", origin + pathLeaf + reach6, "", ""},
		{"the host inside is withdrawn", host4, "", "", "route_outside_accept 1 10.2.0.1/32"},
		{"the host outside, too", outside4, "", "", ""},
		{"our AS in the path", "", loop4, host4, "route_as_loop 1 10.1.0.1/32"},
		{"of another host", "", loop4, other4, "route_as_loop 2 10.1.0.1/32"},
		{"repeated", "", loop4, other4, "route_as_loop 2 10.1.0.1/32"},
		{"now by its next hop", "", third4, host4, "route_as_loop 1 10.1.0.2/32, route_next_hop 1 10.1.0.1/32"},
		{"accepted", "", good4, host4, "route_as_loop 1 10.1.0.2/32"},
		{"accepted, and refused in the next UPDATE", "", third4, host4, "route_as_loop 1 10.1.0.2/32, route_next_hop 1 10.1.0.1/32"},
		{"withdrawn", host4 + other4, "", "", ""},
		{"our loopback in an aggregate around it is no other server", "", good4, "18 0a0100 ", "route_not_host 1 10.1.0.0/24"},
		{"another host in it", "", good4, host4, ""},
		{"is withdrawn", host4, "", "", "route_not_host 1 10.1.0.0/24"},
		{"so is the aggregate", "18 0a0100 ", "", "", ""},
		{"an aggregate in place of hosts", "", good4, aggregate4, "route_not_host 1 10.1.1.0/24"},
		{"and a larger one", "", good4, larger4, "route_not_host 2 10.1.1.0/24"},
		{"a larger one of other addresses", "", good4, "08 0b ", "route_not_host 2 10.1.1.0/24"},
		{"a host in the larger one", "", good4, host4, "route_not_host 1 10.1.1.0/24"},
		{"a host in both", "", good4, hostInside4, ""},
		{"a host in both is refused", "", loop4, hostInside4, "route_not_host 1 10.1.1.0/24, route_as_loop 1 10.1.1.7/32"},
		{"the aggregates are withdrawn", aggregate4 + larger4, "", "", "route_as_loop 1 10.1.1.7/32"},
		{"an aggregate and its hosts", "", good4, aggregate4 + hostInside4, ""},
		{"its hosts are withdrawn", hostInside4, "", "", "route_not_host 1 10.1.1.0/24"},
		{"the first AS is another", "", origin + "40 02 06 02 01 0000fde8 " + hopLeaf, host4, "route_not_host 1 10.1.1.0/24, route_first_as 1 10.1.0.1/32"},
		{"a malformed attribute", "", good4 + "80 04 03 000064 ", host4, "route_not_host 1 10.1.1.0/24, route_malformed_attribute 1 10.1.0.1/32"},
		{"a missing attribute", "", pathLeaf + hopLeaf, host4, "route_not_host 1 10.1.1.0/24, route_missing_attribute 1 10.1.0.1/32"},
	} {
		if _, err := g.FromPeer(updateOf(octetsOf(step.withdrawn), octetsOf(step.attrs), octetsOf(step.nlri)), nil); err != nil {
			t.Fatalf("%s: %v", step.what, err)
		}
		g.TakeChanges()
		before := refusedText(g.in.refused.last)
		now, changed := g.TakeRefused()
		if changed != (before != step.want) || changed && refusedText(now) != step.want {
			t.Errorf("%s: changed %v to %q, want %q", step.what, changed, refusedText(now), step.want)
		}
	}
	checkSums(t, c.Counters)
}

// TestSubnetsAreRoutine checks that in a wide accepted range the subnets of links and our own subnet are no aggregates,
// and others are.
func TestSubnetsAreRoutine(t *testing.T) {
	c := testConfig()
	c.Accept = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8::/32")}
	c.LocalLinkLocal = netip.MustParseAddr("fe80::2%eth0")
	g := New(c)
	for prefix, want := range map[string]bool{
		"0.0.0.0/0": false, "::/0": false, "10.0.0.2/31": false, "10.0.0.0/30": false, "10.0.0.0/29": false, "10.0.0.0/24": false, "2001:db8:1::/64": false, "2001:db8:2::/127": false,
		"fe80::/64": false, "192.0.2.0/24": false, "10.0.1.0/24": true, "10.0.1.8/29": true, "10.0.0.0/8": true, "8.0.0.0/6": true, "2001:db8:2::/64": true,
	} {
		if got := g.summarizes(netip.MustParsePrefix(prefix)); got != want {
			t.Errorf("%s may stand for loopbacks: %v, want %v", prefix, got, want)
		}
	}
}

// TestRefusedRoutesAreBounded checks that the memory for refused routes and the scans for aggregates are bounded,
// whatever the peer sends, and that a route beyond the bounds is dropped as before.
func TestRefusedRoutesAreBounded(t *testing.T) {
	c := testConfig()
	g := establish(t, c, leafOpen(capsBoth, capAS4))
	send := func(attrs string, bits byte, octets int, from, to uint32) {
		t.Helper()
		for n := from; n < to; n++ {
			nlri := append([]byte{bits}, binary.BigEndian.AppendUint32(nil, n)[:octets]...)
			if _, err := g.FromPeer(updateOf(nil, octetsOf(attrs), nlri), nil); err != nil {
				t.Fatal(err)
			}
			withdrawn := updateOf(nlri, nil, nil)
			if octets == 3 {
				if _, err := g.FromPeer(withdrawn, nil); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	const loop = origin + "40 02 0a 02 02 0000fde9 0000fe4c " + hopLeaf
	send(loop, 32, 4, 0x0a010000, 0x0a010000+3*MaxRefused)
	if now, _ := g.TakeRefused(); refusedText(now) != fmt.Sprintf("route_as_loop %d 10.1.0.0/32", MaxRefused) {
		t.Errorf("remembered: %q", refusedText(now))
	}
	send(good4, 24, 3, 0x0a010000, 0x0a010000+200<<8) // steps of one: each /24 256 times
	if r := &g.in.refused; r.scans != maxScans && r.scans > 200 || r.scans > maxScans {
		t.Errorf("%d scans of the table, at most %d are permitted", r.scans, maxScans)
	}
	for n := range uint32(200) {
		if _, err := g.FromPeer(updateOf(nil, octetsOf(good4), []byte{24, 10, 1, byte(n)}), nil); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(g.in.refused.aggregates); n > maxAggregates {
		t.Errorf("%d aggregates are remembered, at most %d are permitted", n, maxAggregates)
	}
	if got := c.Counters.Dropped(Inbound, RouteLoop); got != 3*MaxRefused {
		t.Errorf("%d routes are counted, want %d", got, 3*MaxRefused)
	}
}
