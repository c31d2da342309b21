package guard

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"
)

// session returns an established session that holds host4 and host6.
func session(t *testing.T, edit func(*Config), open []byte) (*Guard, *Counters) {
	t.Helper()
	c := testConfig()
	if edit != nil {
		edit(&c)
	}
	return establish(t, c, open), c.Counters
}

var newLeaf = leafOpen(capsBoth, capAS4)

// TestMulticast checks that no multicast address becomes a destination, whatever the accepted ranges, and no
// IPv4-mapped one; the adjacent addresses do.
func TestMulticast(t *testing.T) {
	g, c := session(t, func(c *Config) {
		c.Accept = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	}, newLeaf)
	const v6 = "80 0e 4a 0002 01 10 fe800000000000000000000000000001 00 "
	_, err := g.FromPeer(append(
		updateOf(nil, octetsOf(good4), octetsOf("20 e0000000 ", "20 ef000001 ", "20 efffffff ", "04 e0 ", "20 dfffffff ", "20 f0000000")),
		updateOf(nil, octetsOf(v6, "80 ff0e0000000000000000000000000001 ", "80 feffffffffffffffffffffffffffffff ", "80 00000000000000000000ffff0a000001 ", "08 ff", origin, pathLeaf), nil)...), nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := show(g.TakeChanges()), "+223.255.255.255/32 65001, +240.0.0.0/32 65001, +feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128 65001"; got != want {
		t.Errorf("%s passed, want %s", got, want)
	}
	if m, h, o := c.Dropped(Inbound, RouteMulticast), c.Dropped(Inbound, RouteNotHost), c.Dropped(Inbound, RouteOutside); m != 4 || h != 2 || o != 1 {
		t.Errorf("%d multicast addresses, %d ranges and %d mapped addresses were counted, want 4, 2 and 1", m, h, o)
	}
	checkSums(t, c)
}

func TestUpdatePasses(t *testing.T) {
	all := origin + pathLeaf + hopLeaf + med + "40 05 04 000000c8 40 06 00 c0 07 08 0000fde9 01010101 " +
		"c0 08 04 fde90001 c0 10 18 0004fde9 5139a6e5 4004fde9 5139a6e5 0002fde9 00000001 c0 20 0c 0000fde9 00000001 00000002 c0 63 01 00 "
	tests := []struct {
		name string
		open []byte
		in   []byte
		want string // changes
		drop map[Reason]uint64
	}{
		{"IPv4, mandatory attributes only", newLeaf,
			updateOf(nil, octetsOf(good4), octetsOf(host4)),
			"+10.1.0.1/32 65001", nil},
		{"every attribute", newLeaf,
			updateOf(nil, octetsOf(all), octetsOf(host4)),
			"+10.1.0.1/32 65001 0004fde95139a6e5 4004fde95139a6e5",
			map[Reason]uint64{AttributeMisplaced: 1, AttributeUnlisted: 5, CommunityUnlisted: 1}},
		{"extended Link Bandwidth, the lowest of several", newLeaf,
			updateOf(nil, octetsOf(good4, lb400, "c0 19 50", "02060000 0000001748 76e800 0000fdf2 00000000", "42060000 00000000 773594000000fdf2 00000000",
				"02060000 0000001748 76e801 0000fdf2 00000000", "00020000 0000000000 000000 0000fdf2 00000000"), octetsOf(host4)),
			"+10.1.0.1/32 65001 0004fde95139a6e5 4206000000000000773594000000fdf200000000", map[Reason]uint64{CommunityUnlisted: 1, CommunityExcess: 2}},
		{"IPv6", newLeaf,
			updateOf(nil, octetsOf(origin, pathLeaf, reach6), nil),
			"+2001:db8:a::1/128 65001", nil},
		{"IPv6 with global and link-local next hop, extended length, partial bit", newLeaf,
			updateOf(nil, octetsOf("90 0e 0036 0002 01 20 20010db8000000000000000000000bad fe800000000000000000000000000001 00 ", host6,
				origin, pathLeaf, "f0 10 0008 0004fde9 5139a6e5"), nil),
			"+2001:db8:a::1/128 65001 0004fde95139a6e5", nil},
		{"IPv4 by MP_REACH with an IPv4 next hop", newLeaf,
			updateOf(nil, octetsOf("80 0e 0e 0001 01 04 0a000001 00 ", host4, origin, pathLeaf), nil),
			"+10.1.0.1/32 65001", nil},
		{"IPv4 with an IPv6 next hop (RFC 8950)", newLeaf,
			updateOf(nil, octetsOf("80 0e 1a 0001 01 10 fe800000000000000000000000000001 00 ", host4, origin, pathLeaf), nil),
			"+10.1.0.1/32 65001", nil},
		{"both families and attributes in any order", newLeaf,
			updateOf(nil, octetsOf(hopLeaf, pathLeaf, reach6, origin), octetsOf(other4)),
			"+10.1.0.2/32 65001, +2001:db8:a::1/128 65001", nil},
		{"a stray NEXT_HOP beside MP_REACH is ignored", newLeaf,
			updateOf(nil, octetsOf(origin, pathLeaf, "40 03 04 0a000003", reach6), nil),
			"+2001:db8:a::1/128 65001", nil},
		{"prefixes that are no host routes or outside", newLeaf,
			updateOf(nil, octetsOf(good4), octetsOf("18 0a0100 00 ", host4, "20 0a020001 ", "1f 0a010002")),
			"+10.1.0.1/32 65001",
			map[Reason]uint64{RouteNotHost: 3, RouteOutside: 1}},
		{"only the first of an attribute", newLeaf,
			updateOf(nil, octetsOf(good4, "40 01 01 02"), octetsOf(host4)),
			"+10.1.0.1/32 65001", map[Reason]uint64{AttributeDuplicate: 1}},
		{"AS4_PATH of a 4-octet leaf is discarded", newLeaf,
			updateOf(nil, octetsOf(good4, "c0 11 06 02 01 0000fdea"), octetsOf(host4)),
			"+10.1.0.1/32 65001", map[Reason]uint64{AttributeMisplaced: 1}},
		{"AS4_PATH of a 2-octet leaf", leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 06 02 02 fde9 5ba0", hopLeaf, "c0 11 06 02 01 fa56ea01"), octetsOf(host4)),
			"+10.1.0.1/32 65001 4200000001", nil},
		{"longer AS4_PATH is ignored", leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 04 02 01 fde9", hopLeaf, "c0 11 0a 02 02 0000fde9 fa56ea01"), octetsOf(host4)),
			"+10.1.0.1/32 65001", nil},
		{"AS4_PATH beside an AGGREGATOR with a true AS is ignored", leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 06 02 02 fde9 5ba0", hopLeaf, "c0 07 06 fde9 01010101", "c0 11 06 02 01 fa56ea01", "c0 12 08 fa56ea01 01010101"), octetsOf(host4)),
			"+10.1.0.1/32 65001 23456", map[Reason]uint64{AttributeUnlisted: 2}},
		{"AS4_PATH as long as AS_PATH replaces it all", leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 06 02 02 fde9 5ba0", hopLeaf, "c0 11 0a 02 02 0000fde9 fa56ea01"), octetsOf(host4)),
			"+10.1.0.1/32 65001 4200000001", nil},
		{"AS4_PATH beside an AGGREGATOR with AS_TRANS counts", leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 06 02 02 fde9 5ba0", hopLeaf, "c0 07 06 5ba0 01010101", "c0 11 06 02 01 fa56ea01", "c0 12 08 fa56ea01 01010101"), octetsOf(host4)),
			"+10.1.0.1/32 65001 4200000001", map[Reason]uint64{AttributeUnlisted: 2}},
		{"AS4_PATH beside an AGGREGATOR and no AS4_AGGREGATOR counts", leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 06 02 02 fde9 5ba0", hopLeaf, "c0 07 06 fde9 01010101", "c0 11 06 02 01 fa56ea01"), octetsOf(host4)),
			"+10.1.0.1/32 65001 4200000001", map[Reason]uint64{AttributeUnlisted: 1}},
		{"AS4_PATH with flags in conflict is discarded", leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 06 02 02 fde9 5ba0", hopLeaf, "40 11 06 02 01 fa56ea01"), octetsOf(host4)),
			"+10.1.0.1/32 65001 23456", map[Reason]uint64{AttributeMalformed: 1}},
		{"malformed AS4_PATH is discarded", leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 04 02 01 fde9", hopLeaf, "c0 11 05 02 01 0000fd"), octetsOf(host4)),
			"+10.1.0.1/32 65001", map[Reason]uint64{AttributeMalformed: 1}},
		{"AGGREGATOR of a wrong length is discarded, and AS4_PATH counts (RFC 7606, Section 7.7)", leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 06 02 02 fde9 5ba0", hopLeaf, "c0 07 08 fde9fde9 01010101", "c0 11 06 02 01 fa56ea01", "c0 12 08 fa56ea01 01010101"), octetsOf(host4)),
			"+10.1.0.1/32 65001 4200000001", map[Reason]uint64{AttributeUnlisted: 2}},
		{"attributes without a value at the end", newLeaf,
			updateOf(nil, octetsOf(good4, "c0 63 00"), octetsOf(host4)),
			"+10.1.0.1/32 65001", map[Reason]uint64{AttributeUnlisted: 1}},
		{"attributes without a value of extended length at the end", newLeaf,
			updateOf(nil, octetsOf(good4, "d0 63 0000"), octetsOf(host4)),
			"+10.1.0.1/32 65001", map[Reason]uint64{AttributeUnlisted: 1}},
		{"IPv4 with a global and a link-local next hop (RFC 8950)", newLeaf,
			updateOf(nil, octetsOf("80 0e 2a 0001 01 20 20010db8000000000000000000000bad fe800000000000000000000000000001 00 ", host4, origin, pathLeaf), nil),
			"+10.1.0.1/32 65001", nil},
		{"MP_REACH of another family, as short as it gets", newLeaf,
			updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 05 0001 85 00 00"), nil), "",
			map[Reason]uint64{AttributeFamily: 1, MessageEmpty: 1}},
		{"IPv4 of a leaf of IPv6 alone", leafOpen("01 04 0002 00 01", capAS4),
			updateOf(octetsOf(host4, other4), octetsOf(good4), octetsOf(host4)), "",
			map[Reason]uint64{WithdrawFamily: 2, RouteFamily: 1, MessageEmpty: 1}},
		{"End-of-RIB IPv4", newLeaf, endOf4, "end ipv4", nil},
		{"End-of-RIB IPv6", newLeaf, endOf6, "end ipv6", nil},
		{"End-of-RIB IPv4 by MP_UNREACH", newLeaf, appendUnreach(nil, IPv4Unicast, nil), "end ipv4", nil},
		{"End-of-RIB of a family not in use", leafOpen("01 04 0001 00 01", capAS4), endOf6, "",
			map[Reason]uint64{AttributeFamily: 1, MessageEmpty: 1}},
		{"ROUTE-REFRESH", newLeaf, message(TypeRouteRefresh, octetsOf("0002 00 01")), "", nil},
		{"ROUTE-REFRESH of another family", newLeaf, message(TypeRouteRefresh, octetsOf("0019 00 46")), "", map[Reason]uint64{MessageRefresh: 1}},
		{"ROUTE-REFRESH, begin of RFC 7313", newLeaf, message(TypeRouteRefresh, octetsOf("0001 01 01")), "", map[Reason]uint64{MessageRefresh: 1}},
		{"KEEPALIVE", newLeaf, keepalive, "", nil},
		{"families not in use leave nothing", newLeaf,
			updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 0b 0001 80 04 0a000001 00 0000"), nil), "",
			map[Reason]uint64{AttributeFamily: 1, MessageEmpty: 1}},
		{"unknown withdrawals leave nothing", newLeaf,
			updateOf(octetsOf(host4), octetsOf(unreach6), nil), "", map[Reason]uint64{WithdrawUnknown: 2, MessageEmpty: 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g, c := session(t, func(c *Config) { c.ExtendedNextHop = true }, tt.open)
			out, err := g.FromPeer(tt.in, nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := show(g.TakeChanges()); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			if refresh := tt.name == "ROUTE-REFRESH"; refresh != bytes.Equal(out, tt.in) || !refresh && len(out) > 0 {
				t.Errorf("the speaker gets %x", out)
			}
			for _, r := range Reasons() {
				if got := c.Dropped(Inbound, r); got != tt.drop[r] {
					t.Errorf("%v: %d, want %d", r, got, tt.drop[r])
				}
			}
			checkSums(t, c)
		})
	}
}

// pathOf returns an AS_PATH attribute of n four-octet numbers, in segments of up to 200.
func pathOf(n int) []byte {
	value := []byte{}
	for left := n; left > 0; left -= 200 {
		value = append(value, segmentSequence, byte(min(left, 200)))
		for range min(left, 200) {
			value = append(value, 0, 0, 0xfd, 0xe9)
		}
	}
	return append(binary.BigEndian.AppendUint16(octetsOf("50 02"), uint16(len(value))), value...)
}

// TestLongestPath checks the longest path that passes.
func TestLongestPath(t *testing.T) {
	g, c := session(t, nil, newLeaf)
	_, err := g.FromPeer(updateOf(nil, append(octetsOf(origin, hopLeaf), pathOf(64)...), octetsOf(host4)), nil)
	if changes := g.TakeChanges(); err != nil || c.Passed(Inbound, Routes) != 1 || len(changes) != 1 || len(changes[0].Attrs.ASPath) != 64 {
		t.Errorf("a path of 64 numbers: %s, %v, %d routes passed", show(changes), err, c.Passed(Inbound, Routes))
	}
}

// TestUpdateTreatedAsWithdraw checks that each case withdraws the prefixes of a
// session that holds them, is counted once per prefix, and that the session
// continues.
func TestUpdateTreatedAsWithdraw(t *testing.T) {
	tests := []struct {
		name  string
		attrs []byte
		want  Reason
	}{
		{"ORIGIN of 2 octets", octetsOf("40 01 02 0000", pathLeaf, hopLeaf), RouteMalformed},
		{"ORIGIN 3", octetsOf("40 01 01 03", pathLeaf, hopLeaf), RouteMalformed},
		{"ORIGIN optional", octetsOf("c0 01 01 00", pathLeaf, hopLeaf), RouteMalformed},
		{"ORIGIN missing", octetsOf(pathLeaf, hopLeaf), RouteIncomplete},
		{"AS_PATH missing", octetsOf(origin, hopLeaf), RouteIncomplete},
		{"NEXT_HOP missing", octetsOf(origin, pathLeaf), RouteIncomplete},
		{"NEXT_HOP is a third party", octetsOf(origin, pathLeaf, "40 03 04 0a000003"), RouteNextHop},
		{"NEXT_HOP is ours", octetsOf(origin, pathLeaf, "40 03 04 0a000002"), RouteNextHop},
		{"MED of 3 octets", octetsOf(good4, "80 04 03 000000"), RouteMalformed},
		{"MED transitive", octetsOf(good4, "c0 04 04 00000000"), RouteMalformed},
		{"COMMUNITIES empty", octetsOf(good4, "c0 08 00"), RouteMalformed},
		{"COMMUNITIES of 5 octets", octetsOf(good4, "c0 08 05 0000000000"), RouteMalformed},
		{"EXTENDED COMMUNITIES empty", octetsOf(good4, "c0 10 00"), RouteMalformed},
		{"EXTENDED COMMUNITIES of 7 octets", octetsOf(good4, "c0 10 07 00040000000000"), RouteMalformed},
		{"IPv6 EXTENDED COMMUNITIES empty", octetsOf(good4, "c0 19 00"), RouteMalformed},
		{"IPv6 EXTENDED COMMUNITIES of 16 octets", octetsOf(good4, "c0 19 10 02060000 0000000000000000 0000fde9"), RouteMalformed},
		{"EXTENDED COMMUNITIES not transitive", octetsOf(good4, "80 10 08 0004000000000000"), RouteMalformed},
		{"COMMUNITIES not transitive", octetsOf(good4, "80 08 04 fde90001"), RouteMalformed},
		{"LARGE COMMUNITIES empty", octetsOf(good4, "c0 20 00"), RouteMalformed},
		{"LARGE COMMUNITIES not optional", octetsOf(good4, "40 20 0c 0000fde9 00000001 00000002"), RouteMalformed},
		{"LARGE COMMUNITIES of 8 octets", octetsOf(good4, "c0 20 08 0000000000000000"), RouteMalformed},
		{"AS_PATH of another neighbor", octetsOf(origin, "40 02 06 02 01 0000fdea", hopLeaf), RouteFirstAS},
		{"AS_PATH with our AS", octetsOf(origin, "40 02 0a 02 02 0000fde9 0000fe4c", hopLeaf), RouteLoop},
		{"AS_PATH with AS 0", octetsOf(origin, "40 02 0a 02 02 0000fde9 00000000", hopLeaf), RoutePath},
		{"AS_PATH segment type 0", octetsOf(origin, "40 02 06 00 01 0000fde9", hopLeaf), RoutePath},
		{"AS_PATH segment type 5", octetsOf(origin, "40 02 06 05 01 0000fde9", hopLeaf), RoutePath},
		{"AS_PATH set", octetsOf(origin, "40 02 0c 02 01 0000fde9 01 01 0000fdea", hopLeaf), RoutePath},
		{"AS_PATH confederation sequence", octetsOf(origin, "40 02 0c 03 01 0000fde9 02 01 0000fde9", hopLeaf), RoutePath},
		{"AS_PATH confederation set", octetsOf(origin, "40 02 06 04 01 0000fde9", hopLeaf), RoutePath},
		{"AS_PATH segment of no AS", octetsOf(origin, "40 02 02 02 00", hopLeaf), RoutePath},
		{"AS_PATH segment overruns", octetsOf(origin, "40 02 06 02 02 0000fde9", hopLeaf), RoutePath},
		{"AS_PATH ends in one octet", octetsOf(origin, "40 02 07 02 01 0000fde9 02", hopLeaf), RoutePath},
		{"AS_PATH in 2 octets from a 4-octet leaf", octetsOf(origin, "40 02 04 02 01 fde9", hopLeaf), RoutePath},
		{"AS_PATH without Transitive", octetsOf(origin, "00 02 06 02 01 0000fde9", hopLeaf), RouteMalformed},
		{"MP_REACH transitive", octetsOf(good4, "c0"+reach6[2:]), RouteMalformed},
		{"an octet in place of an attribute", octetsOf(good4, "40"), RouteMalformed},
		{"a header of three octets, of extended length", octetsOf(good4, "d0 63 00"), RouteMalformed},
		{"an attribute longer than the rest", octetsOf(good4, "c0 63 02 00"), RouteMalformed},
		{"AS_PATH of 65 numbers", append(octetsOf(origin, hopLeaf), pathOf(65)...), RouteOversize},
		{"AS_PATH that fills the message", append(octetsOf(origin, hopLeaf), pathOf(900)...), RouteOversize},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g, c := session(t, nil, newLeaf)
			if _, err := g.FromPeer(updateOf(nil, octetsOf(good4), octetsOf(host4)), nil); err != nil {
				t.Fatal(err)
			}
			g.TakeChanges()
			// the same prefix twice and one that is not held: one withdrawal
			if _, err := g.FromPeer(updateOf(nil, tt.attrs, octetsOf(host4, other4, host4)), nil); err != nil {
				t.Fatal(err)
			}
			if got, want := show(g.TakeChanges()), "-10.1.0.1/32"; got != want {
				t.Errorf("got %s, want %s", got, want)
			}
			checkWithdrawn(t, c, tt.name, tt.want)
			// no longer held, so a withdrawal of it is unknown
			if _, err := g.FromPeer(updateOf(octetsOf(host4), nil, nil), nil); err != nil || len(g.TakeChanges()) > 0 {
				t.Errorf("a withdrawal afterwards passes, %v", err)
			}
			checkSums(t, c)
		})
	}
}

// checkWithdrawn asserts that a reason counts three announced prefixes, and no other reason any. A malformed attribute
// counts once.
func checkWithdrawn(t *testing.T, c *Counters, name string, reason Reason) {
	t.Helper()
	want := map[Reason]uint64{reason: 3}
	if reason == RouteMalformed || reason == RoutePath {
		want[AttributeMalformed] = 1
	}
	if name == "MP_REACH transitive" {
		want[reason]++ // the prefix in it
	}
	for _, r := range Reasons() {
		if got := c.Dropped(Inbound, r); r.Unit() != Capabilities && got != want[r] {
			t.Errorf("%v: %d, want %d", r, got, want[r])
		}
	}
}

// TestUpdateResets checks that errors that cannot be confined to prefixes end the session.
func TestUpdateResets(t *testing.T) {
	tests := []struct {
		name    string
		in      []byte
		subcode byte
	}{
		{"withdrawn routes longer than the message", message(TypeUpdate, octetsOf("0005 0000")), 1},
		{"attributes longer than the message", message(TypeUpdate, octetsOf("0000 0001")), 1},
		{"attributes longer by one", message(TypeUpdate, octetsOf("0001 00 0001")), 1},
		{"withdrawn /33", updateOf(octetsOf("21 0a010001 00"), nil, nil), 10},
		{"announced /33", updateOf(nil, octetsOf(good4), octetsOf("21 0a010001 00")), 10},
		{"announced prefix cut off", updateOf(nil, octetsOf(good4), octetsOf("20 0a0100")), 10},
		{"MP_REACH twice", updateOf(nil, octetsOf(origin, pathLeaf, reach6, reach6), nil), 1},
		{"MP_UNREACH twice", updateOf(nil, octetsOf(unreach6, unreach6), nil), 1},
		{"MP_REACH empty", updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 00"), nil), 9},
		{"MP_REACH of 4 octets", updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 04 0002 01 00"), nil), 9},
		{"MP_REACH next hop of 4 octets for IPv6", updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 09 0002 01 04 0a000001 00"), nil), 9},
		{"MP_REACH next hop of 24 octets", updateOf(nil, append(octetsOf(origin, pathLeaf, "80 0e 1d 0002 01 18"), make([]byte, 25)...), nil), 9},
		{"MP_REACH next hop longer than the attribute", updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 0b 0002 01 10 000000000000 00"), nil), 9},
		{"MP_REACH without the reserved octet", updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 14 0002 01 10 fe800000000000000000000000000001"), nil), 9},
		{"MP_REACH IPv4 with IPv6 next hop, not announced", updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 1a 0001 01 10 fe800000000000000000000000000001 00", host4), nil), 9},
		{"MP_REACH /129", updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 27 0002 01 10 fe800000000000000000000000000001 00 81 20010db8000a0000000000000000000100"), nil), 9},
		{"MP_REACH prefix cut off", updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 17 0002 01 10 fe800000000000000000000000000001 00 80 20"), nil), 9},
		{"MP_UNREACH of 2 octets", updateOf(nil, octetsOf("80 0f 02 0002"), nil), 9},
		{"MP_UNREACH prefix cut off", updateOf(nil, octetsOf("80 0f 05 0002 01 80 20"), nil), 9},
		{"malformed attribute and no prefix", updateOf(nil, octetsOf("40 01 01 03"), nil), 1},
		{"an octet in place of an attribute and no prefix", updateOf(nil, octetsOf("40"), nil), 1},
		{"an attribute longer than the rest and no prefix", updateOf(nil, octetsOf("40 01 02 00"), nil), 1},
		{"malformed attribute and only withdrawals", updateOf(octetsOf(host4), octetsOf("c0 08 01 00"), nil), 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g, c := session(t, nil, newLeaf)
			out, err := g.FromPeer(tt.in, nil)
			var n *Notification
			if !errors.As(err, &n) || n.Code != CodeUpdateMessageError || n.Subcode != tt.subcode {
				t.Fatalf("got %v, want NOTIFICATION 3/%d", err, tt.subcode)
			}
			if len(out) > 0 {
				t.Errorf("speaker gets %x", out)
			}
			if _, err := parsed(n.AppendTo(nil)); err != nil {
				t.Error(err)
			}
			// RFC 4271, Section 6.3: the data of 3/9 is the attribute, whole; 3/1 and 3/10 have none.
			if whole := tt.subcode == 9; whole != (len(n.Data) > 0) {
				t.Errorf("data %x", n.Data)
			} else if whole && (len(n.Data) != 3+int(n.Data[2]) || !bytes.Contains(tt.in, n.Data)) {
				t.Errorf("data %x is no attribute of the message", n.Data)
			}
			if c.Dropped(Inbound, MessageUpdate) != 1 {
				t.Error("not counted")
			}
			checkSums(t, c)
		})
	}
}

func TestWithdrawals(t *testing.T) {
	g, c := session(t, nil, newLeaf)
	if _, err := g.FromPeer(updateOf(nil, octetsOf(good4, reach6), octetsOf(host4, other4)), nil); err != nil {
		t.Fatal(err)
	}
	g.TakeChanges()
	// withdrawn and announced in one message: announced (RFC 4271, Section 4.3)
	if _, err := g.FromPeer(updateOf(octetsOf(host4, "18 0a0100"), octetsOf(unreach6, good4), octetsOf(host4)), nil); err != nil {
		t.Fatal(err)
	}
	if got, want := show(g.TakeChanges()), "-10.1.0.1/32, -2001:db8:a::1/128, +10.1.0.1/32 65001"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if len(g.in.held.v4) != 2 || len(g.in.held.v6) != 0 {
		t.Errorf("holds %d and %d", len(g.in.held.v4), len(g.in.held.v6))
	}
	if got := c.Dropped(Inbound, WithdrawUnknown); got != 1 {
		t.Errorf("%d unknown, want the /24", got)
	}
	checkSums(t, c)
}

// TestAnyPartPasses checks that an UPDATE passes if one of its lists of prefixes, or several, change the table, whether
// its announcements are usable or treated as withdrawn.
func TestAnyPartPasses(t *testing.T) {
	const other6 = "80 20010db8000a00000000000000000002 "
	both6 := strings.Replace(reach6, "80 0e 26", "80 0e 37", 1) + other6
	for parts := range 1 << 4 {
		for _, attrs := range []string{good4, origin + hopLeaf} { // the second lacks AS_PATH
			g, c := session(t, nil, newLeaf)
			if _, err := g.FromPeer(updateOf(nil, octetsOf(good4, both6), octetsOf(host4, other4)), nil); err != nil {
				t.Fatal(err)
			}
			part := func(i int, text string) string { return strings.Repeat(text, parts>>i&1) }
			in := updateOf(octetsOf(part(0, host4)), octetsOf(part(1, unreach6), part(2, strings.Replace(reach6, host6, other6, 1)), attrs), octetsOf(part(3, other4)))
			if _, err := g.FromPeer(in, nil); err != nil {
				t.Fatal(err)
			}
			if empty := c.Dropped(Inbound, MessageEmpty) == 1; empty != (parts == 0) {
				t.Errorf("parts %04b with attributes %s: counted as empty: %v", parts, attrs, empty)
			}
		}
	}
}

func TestMaxPrefixes(t *testing.T) {
	g, c := session(t, func(c *Config) { c.MaxPrefixes = 2 }, newLeaf)
	in := updateOf(nil, octetsOf(good4), octetsOf(host4, other4))
	for range 3 { // a repetition adds nothing
		if _, err := g.FromPeer(in, nil); err != nil {
			t.Fatal(err)
		}
	}
	_, err := g.FromPeer(updateOf(nil, octetsOf(origin, pathLeaf, reach6), nil), nil)
	var n *Notification
	if !errors.As(err, &n) || n.Code != CodeCease || n.Subcode != 1 || !bytes.Equal(n.Data, octetsOf("0002 01 00000002")) {
		t.Fatalf("got %v", err)
	}
	if c.Dropped(Inbound, MessageLimit) != 1 || c.Dropped(Inbound, RouteLimit) != 1 {
		t.Error("not counted")
	}
	checkSums(t, c)
}

// TestNextHopLength checks that NEXT_HOP has four octets if there are prefixes to which it belongs (RFC 7606, Section
// 7.3).
func TestNextHopLength(t *testing.T) {
	for n := range 40 {
		u := update{nlri: octetsOf(host4), hop: make([]byte, n)}
		u.seen[0] = 1<<attrOrigin | 1<<attrASPath | 1<<attrNextHop
		u.complete()
		if malformed := u.fault == RouteMalformed; malformed != (n != 4) || n == 4 && u.fault != None {
			t.Errorf("%d octets: %v", n, u.fault)
		}
	}
}

// TestNextHop covers the permitted next hops, in all their encodings.
func TestNextHop(t *testing.T) {
	mapped := "00000000000000000000ffff0a000001"
	ll, other := "fe800000000000000000000000000001", "fe800000000000000000000000000009"
	for _, tt := range []struct {
		name, length, hop string
		none              bool
		passes            bool
	}{
		{"link-local", "10", ll, false, true},
		{"another link-local", "10", other, false, false},
		{"IPv4-mapped", "10", mapped, false, true},
		{"link-local twice", "20", ll + ll, false, true},
		{"zeros and link-local", "20", "00000000000000000000000000000000" + ll, false, true},
		{"zeros and another link-local", "20", "00000000000000000000000000000000" + other, false, false},
		{"no address of the peer is known", "10", ll, true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g, c := session(t, func(c *Config) {
				if tt.none {
					c.NextHop = nil
				}
			}, newLeaf)
			reach := octetsOf("0002 01", tt.length, tt.hop, "00", host6)
			attrs := append(append(octetsOf(origin, pathLeaf, "80 0e"), byte(len(reach))), reach...)
			if _, err := g.FromPeer(updateOf(nil, attrs, nil), nil); err != nil {
				t.Fatal(err)
			}
			if got := c.Passed(Inbound, Routes) == 1; got != tt.passes || c.Dropped(Inbound, RouteNextHop) == 1 == tt.passes {
				t.Errorf("passes: %v, want %v", got, tt.passes)
			}
			checkSums(t, c)
		})
	}
}

func TestCommunityExcess(t *testing.T) {
	g, c := session(t, nil, newLeaf)
	attr := octetsOf("d0 10 0280")
	for range 80 {
		attr = append(attr, octetsOf("0004 fde9 5139a6e5")...)
	}
	_, err := g.FromPeer(updateOf(nil, append(octetsOf(good4), attr...), octetsOf(host4)), nil)
	if err != nil || c.Passed(Inbound, Communities) != MaxCommunities || c.Dropped(Inbound, CommunityExcess) != 80-MaxCommunities {
		t.Fatalf("%d passed, %v", c.Passed(Inbound, Communities), err)
	}
	if changes := g.TakeChanges(); len(changes) != 1 || len(changes[0].Attrs.Communities) != MaxCommunities {
		t.Errorf("changes %s", show(changes))
	}
	checkSums(t, c)
}

// TestRepeatedMessages floods End-of-RIB and ROUTE-REFRESH: the first of a family passes, the others cost nothing.
func TestRepeatedMessages(t *testing.T) {
	refresh4, refresh6 := message(TypeRouteRefresh, octetsOf("0001 00 01")), message(TypeRouteRefresh, octetsOf("0002 00 01"))
	g, c := session(t, nil, newLeaf)
	pass := func(what string, in []byte, want ...[]byte) {
		t.Helper()
		if out, err := g.FromPeer(in, nil); err != nil || !bytes.Equal(out, bytes.Join(want, nil)) {
			t.Errorf("%s: % x, %v; want % x", what, out, err, bytes.Join(want, nil))
		}
	}
	ends := func(what, want string) {
		t.Helper()
		if got := show(g.TakeChanges()); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	if out := g.Refresh(nil); len(out) != 0 {
		t.Errorf("nothing was deferred, got % x", out)
	}
	pass("End-of-RIB", bytes.Join([][]byte{endOf4, endOf6}, nil))
	ends("End-of-RIB of both families", "end ipv4, end ipv6")
	pass("End-of-RIB", bytes.Join([][]byte{endOf4, endOf6, endOf4}, nil))
	ends("the same repeated", "")
	pass("the first refresh", refresh4, refresh4)
	pass("a flood", bytes.Repeat(refresh4, 1000))
	pass("another family's", refresh6, refresh6)
	if got := c.Dropped(Inbound, MessageRepeated); got != 1003 {
		t.Errorf("%d counted, want 1003", got)
	}
	if out := g.Refresh(nil); !bytes.Equal(out, refresh4) {
		t.Errorf("deferred: % x, want one of IPv4", out)
	}
	pass("again too soon, as the deferred one has just passed", refresh4)
	pass("not too soon for the other family", refresh6, refresh6)
	if out := g.Refresh(nil); !bytes.Equal(out, refresh4) {
		t.Errorf("deferred: % x, want one of IPv4", out)
	}
	g.Refresh(nil)
	pass("after a pause", refresh4, refresh4)
}
