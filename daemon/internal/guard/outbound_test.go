package guard

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// In the form of the speaker: any next hop, communities wrapped or plain.
const (
	pathOurs  = "40 02 06 02 01 0000fe4c "
	hopAny    = "40 03 04 7f000001 "
	hopOurs   = "40 03 04 0a000002 "
	reachAny6 = "80 0e 26 0002 01 10 00000000000000000000ffff7f000001 00 " + host6
	reachOur6 = "80 0e 26 0002 01 10 20010db8000100000000000000000002 00 " + host6
)

func TestFromSpeaker(t *testing.T) {
	linkLocal := func(c *Config) {
		c.LocalNextHop4, c.LocalNextHop6 = netip.Addr{}, netip.Addr{}
		c.LocalLinkLocal, c.ExtendedNextHop = netip.MustParseAddr("fe80::2%eth0"), true
	}
	extended := leafOpen(capsBoth, capAS4, "05 06 0001 0001 0002")
	tests := []struct {
		name string
		edit func(*Config)
		open []byte
		in   []byte
		want []byte
		drop map[Reason]uint64
	}{
		{"IPv4: our next hop, community unwrapped", nil, newLeaf,
			updateOf(nil, octetsOf(origin, pathOurs, hopAny, "c0 10 08 8f00fe4c 5139a6e5"), octetsOf(host4, other4)),
			updateOf(nil, octetsOf(origin, pathOurs, hopOurs, "c0 10 08 0004fe4c 5139a6e5"), octetsOf(host4, other4)), nil},
		{"plain transitive Link Bandwidth and FARE pass", nil, newLeaf,
			updateOf(nil, octetsOf(origin, pathOurs, hopAny, "c0 10 18 0004fe4c 5139a6e5 8f80 02020202 0190 800f 02020202 0190"), octetsOf(host4)),
			updateOf(nil, octetsOf(origin, pathOurs, hopOurs, "c0 10 18 0004fe4c 5139a6e5 800f 02020202 0190 800f 02020202 0190"), octetsOf(host4)), nil},
		{"non-transitive Link Bandwidth stays, wrapped or not", nil, newLeaf,
			updateOf(nil, octetsOf(origin, pathOurs, hopAny, "c0 10 18 4004fe4c 5139a6e5 8f40fe4c 5139a6e5 0002fe4c 00000001"), octetsOf(host4)),
			updateOf(nil, octetsOf(origin, pathOurs, hopOurs), octetsOf(host4)), map[Reason]uint64{CommunityNonTransitive: 2, CommunityUnlisted: 1}},
		{"non-transitive Link Bandwidth goes out where that is configured", func(c *Config) { c.NonTransitive = true }, newLeaf,
			updateOf(nil, octetsOf(origin, pathOurs, hopAny, "c0 10 08 8f40fe4c 5139a6e5"), octetsOf(host4)),
			updateOf(nil, octetsOf(origin, pathOurs, hopOurs, "c0 10 08 4004fe4c 5139a6e5"), octetsOf(host4)), nil},
		{"extended Link Bandwidth", nil, newLeaf,
			updateOf(nil, octetsOf(origin, pathOurs, hopAny, "c0 19 14 02060000 0000001748 76e800 0000fe4c 00000000"), octetsOf(host4)),
			updateOf(nil, octetsOf(origin, pathOurs, hopOurs, "c0 19 14 02060000 0000001748 76e800 0000fe4c 00000000"), octetsOf(host4)), nil},
		{"non-transitive extended Link Bandwidth stays", nil, newLeaf,
			updateOf(nil, octetsOf(origin, pathOurs, hopAny, "c0 19 14 42060000 0000001748 76e800 0000fe4c 00000000"), octetsOf(host4)),
			updateOf(nil, octetsOf(origin, pathOurs, hopOurs), octetsOf(host4)), map[Reason]uint64{CommunityNonTransitive: 1}},
		{"withdrawals leave no community behind", nil, newLeaf,
			updateOf(octetsOf(host4), octetsOf("c0 19 14 42060000 0000001748 76e800 0000fe4c 00000000"), nil), updateOf(octetsOf(host4), nil, nil), nil},
		{"IPv4 by MP_REACH goes out with our IPv4 next hop", func(c *Config) { c.LocalNextHop6 = netip.Addr{} }, newLeaf,
			updateOf(nil, octetsOf("80 0e 0e 0001 01 04 7f000001 00 ", host4, origin, pathOurs), nil),
			updateOf(nil, octetsOf(origin, pathOurs, hopOurs), octetsOf(host4)), nil},
		{"IPv6 without any next hop is withdrawn", func(c *Config) { c.LocalNextHop6 = netip.Addr{} }, newLeaf,
			updateOf(nil, octetsOf(origin, pathOurs, reachAny6), nil), updateOf(nil, octetsOf(unreach6), nil), map[Reason]uint64{RouteNextHop: 1}},
		{"IPv4 with an IPv4 next hop, also where IPv6 ones are possible", func(c *Config) { c.ExtendedNextHop = true }, extended,
			updateOf(nil, octetsOf(origin, pathOurs, hopAny), octetsOf(host4)),
			updateOf(nil, octetsOf(origin, pathOurs, hopOurs), octetsOf(host4)), nil},
		{"no IPv4 to a leaf of IPv6 alone", nil, leafOpen("01 04 0002 00 01", capAS4),
			updateOf(octetsOf(host4, other4), octetsOf(origin, pathOurs, hopAny), octetsOf(host4)),
			nil, map[Reason]uint64{WithdrawFamily: 2, RouteFamily: 1, MessageEmpty: 1}},
		{"2-octet leaf: 65535 is no 4-octet AS", nil, leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 0a 02 02 0000ffff 0000fe4c", hopAny), octetsOf(host4)),
			updateOf(nil, octetsOf(origin, "40 02 06 02 02 ffff fe4c", hopOurs), octetsOf(host4)), nil},
		{"IPv6: our next hop", nil, newLeaf,
			updateOf(nil, octetsOf(origin, pathOurs, reachAny6), nil), updateOf(nil, octetsOf(reachOur6, origin, pathOurs), nil), nil},
		{"IPv6: global and link-local next hop", func(c *Config) { c.LocalLinkLocal = netip.MustParseAddr("fe80::2%eth0") }, newLeaf,
			updateOf(nil, octetsOf(origin, pathOurs, reachAny6), nil),
			updateOf(nil, octetsOf("80 0e 36 0002 01 20 20010db8000100000000000000000002 fe800000000000000000000000000002 00 ", host6, origin, pathOurs), nil), nil},
		{"IPv4 by MP_REACH with our link-local next hop (RFC 8950)", linkLocal, extended,
			updateOf(octetsOf(other4), octetsOf(origin, pathOurs, hopAny), octetsOf(host4)),
			append(updateOf(octetsOf(other4), nil, nil),
				updateOf(nil, octetsOf("80 0e 1a 0001 01 10 fe800000000000000000000000000002 00 ", host4, origin, pathOurs), nil)...), nil},
		{"IPv4 without any next hop is withdrawn", linkLocal, newLeaf,
			updateOf(nil, octetsOf(origin, pathOurs, hopAny), octetsOf(host4)), updateOf(octetsOf(host4), nil, nil), map[Reason]uint64{RouteNextHop: 1}},
		{"what cannot be announced is withdrawn", nil, newLeaf,
			updateOf(nil, octetsOf(origin, "40 02 06 01 01 0000fe4c", hopAny), octetsOf(host4)),
			updateOf(octetsOf(host4), nil, nil), map[Reason]uint64{AttributeMalformed: 1, RoutePath: 1}},
		{"2-octet leaf: AS_TRANS and AS4_PATH", nil, leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, "40 02 0a 02 02 fa56ea01 0000fe4c", hopAny), octetsOf(host4)),
			updateOf(nil, octetsOf(origin, "40 02 06 02 02 5ba0 fe4c", hopOurs, "c0 11 0a 02 02 fa56ea01 0000fe4c"), octetsOf(host4)), nil},
		{"2-octet leaf: nothing lost, no AS4_PATH", nil, leafOpen(capsBoth),
			updateOf(nil, octetsOf(origin, pathOurs, hopAny), octetsOf(host4)),
			updateOf(nil, octetsOf(origin, "40 02 04 02 01 fe4c", hopOurs), octetsOf(host4)), nil},
		{"2-octet leaf, End-of-RIB", nil, leafOpen(capsBoth), append(bytes.Clone(endOf4), endOf6...), append(bytes.Clone(endOf4), endOf6...), nil},
		{"family not in use", nil, leafOpen(capAS4),
			append(updateOf(nil, octetsOf(origin, pathOurs, reachAny6), nil), endOf6...), nil, map[Reason]uint64{AttributeFamily: 2, MessageEmpty: 2}},
		{"IPv6 withdrawal", nil, newLeaf, updateOf(nil, octetsOf(unreach6), nil), updateOf(nil, octetsOf(unreach6), nil), nil},
		{"KEEPALIVE, ROUTE-REFRESH, NOTIFICATION", nil, newLeaf,
			bytes.Join([][]byte{keepalive, message(TypeRouteRefresh, octetsOf("0001 00 01")), message(TypeNotification, octetsOf("06 02 00"))}, nil),
			bytes.Join([][]byte{keepalive, message(TypeRouteRefresh, octetsOf("0001 00 01")), message(TypeNotification, octetsOf("06 02 00"))}, nil), nil},
		{"ROUTE-REFRESH of a family not in use", nil, leafOpen("01 04 0001 00 01 02 00", capAS4),
			message(TypeRouteRefresh, octetsOf("0002 00 01")), nil, map[Reason]uint64{MessageRefresh: 1}},
		{"ROUTE-REFRESH to a leaf that takes none", nil, leafOpen(capAS4),
			message(TypeRouteRefresh, octetsOf("0001 00 01")), nil, map[Reason]uint64{MessageRefresh: 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g, c := session(t, tt.edit, tt.open)
			fqdn := c.Dropped(Outbound, CapabilityUnlisted)
			got, err := g.FromSpeaker(tt.in, nil)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, tt.want) {
				t.Errorf("got\n%x, want\n%x", got, tt.want)
			}
			if _, err := parsed(got); err != nil {
				t.Error(err)
			}
			for _, r := range Reasons() {
				want := tt.drop[r]
				if r == CapabilityUnlisted {
					want = fqdn
				}
				if got := c.Dropped(Outbound, r); got != want {
					t.Errorf("%v: %d, want %d", r, got, want)
				}
			}
			checkSums(t, c)
		})
	}
}

// TestEmptyPath checks that a path without numbers has no segment (RFC 4271, Section 5.1.2).
func TestEmptyPath(t *testing.T) {
	for _, width := range []int{2, 4} {
		if got, want := appendPathAttribute(nil, flagTransitive, attrASPath, nil, width), appendHead(nil, flagTransitive, attrASPath, 0); !bytes.Equal(got, want) {
			t.Errorf("%d octets a number: %x, want %x", width, got, want)
		}
	}
}

// TestLengthOfAnAttribute checks that a length of up to 255 has one octet (RFC 4271, Section 4.3).
func TestLengthOfAnAttribute(t *testing.T) {
	for n, want := range map[int]string{0: "40 02 00", 255: "40 02 ff", 256: "50 02 0100"} {
		if got := appendHead(nil, flagTransitive, attrASPath, n); !bytes.Equal(got, octetsOf(want)) {
			t.Errorf("of %d octets: %x, want %s", n, got, want)
		}
	}
}

// TestFromSpeakerLibrary checks that the peer receives the content of a route that the speaker's own library encodes.
func TestFromSpeakerLibrary(t *testing.T) {
	g, _ := session(t, nil, newLeaf)
	wrapped, _ := g.config.Carrier.Wrap([8]byte(octetsOf("0004 fe4c 5139a6e5")))
	m := bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{
		bgp.NewPathAttributeOrigin(0),
		bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{bgp.NewAs4PathParam(2, []uint32{65100})}),
		bgp.NewPathAttributeNextHop("127.0.0.1"),
		bgp.NewPathAttributeExtendedCommunities([]bgp.ExtendedCommunityInterface{
			&bgp.UnknownExtended{Type: bgp.ExtendedCommunityAttrType(wrapped[0]), Value: wrapped[1:]}}),
	}, []*bgp.IPAddrPrefix{bgp.NewIPAddrPrefix(32, "10.1.0.1")})
	in, err := m.Serialize()
	if err != nil {
		t.Fatal(err)
	}
	got, err := g.FromSpeaker(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := updateOf(nil, octetsOf(origin, pathOurs, hopOurs, "c0 10 08 0004fe4c 5139a6e5"), octetsOf(host4))
	if !bytes.Equal(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
}

func TestSpeakerFault(t *testing.T) {
	tests := []struct {
		name string
		in   []byte
	}{
		{"UPDATE before the OPENs", endOf4},
		{"KEEPALIVE before OPEN", keepalive},
		{"ROUTE-REFRESH before the OPENs", message(TypeRouteRefresh, octetsOf("0001 00 01"))},
		{"second OPEN", append(speakerOpen(), speakerOpen()...)},
		{"malformed OPEN", message(TypeOpen, octetsOf("04 fe4c 0009 02020202 01 02"))},
		{"no frame", make([]byte, HeaderLen)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := testConfig()
			g := New(c)
			_, err := g.FromSpeaker(tt.in, nil)
			var fault *SpeakerFault
			var cause *Notification
			if !errors.As(err, &fault) || !errors.As(err, &cause) {
				t.Fatalf("got %v", err)
			}
			if out, again := g.FromSpeaker(keepalive, nil); again != err || len(out) != 0 {
				t.Errorf("goes on: %x, %v", out, again)
			}
			checkSums(t, c.Counters)
		})
	}
}
