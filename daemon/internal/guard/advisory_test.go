package guard

import (
	"fmt"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// alone returns the effect of a message on the embedded speaker's library without a guard. confederation is the kind of peer.
func alone(m []byte, confederation bool) (effect string) {
	defer func() {
		if p := recover(); p != nil {
			effect = "panics"
		}
	}()
	parsed, err := bgp.ParseBGPMessage(m)
	if err != nil {
		return "refuses"
	}
	if u, ok := parsed.Body.(*bgp.BGPUpdate); ok {
		if ok, _ := bgp.ValidateUpdateMsg(u, bothFamilies, true, confederation, false); !ok {
			return "refuses"
		}
	}
	return "accepts"
}

// TestAdvisories covers the public advisories of 2026 for the embedded speaker's library that concern messages of BGP; internal/vex lists all. The library alone
// panics, accepts what RFC 4271 does not permit, or refuses and continues with a message that it has read beyond its fields. Behind the guard the speaker
// receives no octet, and the session has the outcome of RFC 7606.
func TestAdvisories(t *testing.T) {
	const withdrawn = "-10.1.0.1/32"
	tests := []struct {
		id, name string
		in       []byte
		alone    string // effect on the library
		before   string // routes that the session has announced
		// expected NOTIFICATION; with code 0 the session continues, with the changes want
		code, subcode byte
		want          string
	}{
		{"GHSA-4p9m-8gc4-rw2h", "NEXT_HOP of 16 octets", updateOf(nil, octetsOf(origin, pathLeaf, "40 03 10 20010db8000000000000000000000001"), octetsOf(host4)),
			"accepts", "10.1.0.1/32", 0, 0, withdrawn},
		{"GHSA-7235-89m6-f4px", "unknown attribute marked well-known", updateOf(nil, octetsOf(good4, "40 63 01 00"), octetsOf(host4)), "refuses", "", 3, 2, ""},
		{"GHSA-8rxh-r2p6-7f2q", "AS4_PATH before AS_PATH", updateOf(nil, octetsOf("c0 11 06 02 01 0000fde9", good4), octetsOf(host4)), "accepts", "", 0, 0, "+10.1.0.1/32 65001"},
		{"GHSA-p3w2-64xm-833j", "attribute beyond the attributes' length", updateOf(nil, octetsOf(good4, "c0 08 40 0001"), octetsOf(host4)), "refuses", "10.1.0.1/32", 0, 0, withdrawn},
		{"GHSA-frrj-87jh-2772", "AS_PATH of 0 octets", updateOf(nil, octetsOf(origin, "40 02 00", hopLeaf), octetsOf(host4)), "panics", "10.1.0.1/32", 0, 0, withdrawn},
		{"GHSA-vm3g-8xwv-mxfp", "SRv6 L3 service with an unknown part", updateOf(nil, octetsOf(good4, "c0 28 07 05 0004 00 63 0000"), octetsOf(host4)), "panics", "", 0, 0, "+10.1.0.1/32 65001"},
		{"GHSA-wmvj-f67g-qg4g", "IPv6 extended community of 8 octets", updateOf(nil, octetsOf(good4, "c0 19 08 0002000000000000"), octetsOf(host4)), "refuses", "", 0, 0, "+10.1.0.1/32 65001"},
		{"GHSA-pw7p-7fqv-hpj8", "withdrawn routes shorter than their prefix", message(TypeUpdate, octetsOf("0001 20 0a010001 0000")), "refuses", "", 3, 1, ""},
	}
	for _, tt := range tests {
		t.Run(tt.id, func(t *testing.T) {
			if got := alone(tt.in, tt.id == "GHSA-frrj-87jh-2772"); got != tt.alone {
				t.Errorf("%s: the library alone %s the message, expected that it %s it", tt.name, got, tt.alone)
			}
			g, c := session(t, nil, newLeaf)
			if tt.before != "" {
				if _, err := g.FromPeer(updateOf(nil, octetsOf(good4), octetsOf(host4)), nil); err != nil {
					t.Fatal(err)
				}
				if got := show(g.TakeChanges()); got != "+10.1.0.1/32 65001" {
					t.Fatalf("before: %s", got)
				}
			}
			out, err := g.FromPeer(tt.in, nil)
			expect(t, g, out, err, tt.code, tt.subcode, tt.want)
			checkSums(t, c)
		})
	}
	t.Run("GHSA-gjrg-jjr3-56cm", func(t *testing.T) { // 4-octet AS of 0 octets, whose value the library takes from the next capability
		open := leafOpen(capsBoth, "41 00  02 00  02 00")
		m, err := bgp.ParseBGPMessage(open)
		if err != nil {
			t.Fatalf("the library alone: %v", err)
		}
		taken := ""
		for _, p := range m.Body.(*bgp.BGPOpen).OptParams {
			for _, c := range p.(*bgp.OptionParameterCapability).Capability {
				if as, ok := c.(*bgp.CapFourOctetASNumber); ok {
					taken = fmt.Sprintf("%#x", as.CapValue)
				}
			}
		}
		if taken != "0x2000200" {
			t.Errorf("the library alone takes AS %s, expected the octets of the next capabilities", taken)
		}
		g := New(testConfig())
		out, err := g.FromPeer(open, nil)
		expect(t, g, out, err, 2, 0, "")
	})
}
