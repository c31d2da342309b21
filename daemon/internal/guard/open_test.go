package guard

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

func TestOpenRefused(t *testing.T) {
	fixed := "04 fde9 005a 01010101 "
	tests := []struct {
		name    string
		body    string
		subcode byte
		data    string
	}{
		{"version 3", "03 fde9 005a 01010101 00", 1, "0004"},
		{"AS 0", "04 0000 005a 01010101 00", 2, ""},
		{"AS_TRANS without capability", "04 5ba0 005a 01010101 00", 2, ""},
		{"AS_TRANS in the capability", "04 5ba0 005a 01010101 08 02 06 41 04 00005ba0", 2, ""},
		{"AS 0 in the capability", "04 5ba0 005a 01010101 08 02 06 41 04 00000000", 2, ""},
		{"AS and capability differ", fixed + "08 02 06 41 04 0000fdea", 2, ""},
		{"two capabilities differ", fixed + "0e 02 0c 41 04 0000fde9 41 04 0000fdea", 0, ""},
		{"another AS than configured", "04 fdea 005a 01010101 00", 2, ""},
		{"our AS", "04 fe4c 005a 01010101 00", 2, ""},
		{"hold time 1", "04 fde9 0001 01010101 00", 6, ""},
		{"hold time 2", "04 fde9 0002 01010101 00", 6, ""},
		{"identifier 0", "04 fde9 005a 00000000 00", 3, ""},
		{"our identifier", "04 fde9 005a 02020202 00", 3, ""},
		{"parameters longer than the message", fixed + "03 02 00", 0, ""},
		{"octets after the parameters", fixed + "00 02 00", 0, ""},
		{"parameter header cut off", fixed + "01 02", 0, ""},
		{"parameter longer than the message", fixed + "02 02 01", 0, ""},
		{"parameter 1, authentication", fixed + "03 01 01 00", 4, ""},
		{"capability header cut off", fixed + "03 02 01 41", 0, ""},
		{"no family in common", fixed + "08 02 06 01 04 0019 00 46", 7, "01 04 0001 00 01 01 04 0002 00 01"},
		{"RFC 9072 with a length of zero", fixed + "00 ff 0000", 0, ""},
		{"RFC 9072 length of the message exceeded", fixed + "ff ff 0004 02 0000", 0, ""},
		{"RFC 9072 parameter cut off", fixed + "ff ff 0002 02 00", 0, ""},
		{"RFC 9072 parameter too long", fixed + "ff ff 0003 02 0001", 0, ""},
		{"RFC 9072 header cut off", fixed + "02 ff 00", 0, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := testConfig()
			g := New(c)
			out, err := g.FromPeer(message(TypeOpen, octetsOf(tt.body)), nil)
			var n *Notification
			if !errors.As(err, &n) || n.Code != CodeOpenMessageError || n.Subcode != tt.subcode || !bytes.Equal(n.Data, octetsOf(tt.data)) {
				t.Fatalf("got %v, want NOTIFICATION 2/%d", err, tt.subcode)
			}
			if n.Reason != MessageOpen || c.Counters.Dropped(Inbound, MessageOpen) != 1 {
				t.Error("not counted as an OPEN")
			}
			if _, err := parsed(n.AppendTo(nil)); err != nil {
				t.Error(err)
			}
			if _, err := parsed(out); err != nil {
				t.Error(err)
			}
			if info, ok := g.Info(); ok || info.PeerAS != 0 {
				t.Errorf("info after refusal: %+v", info)
			}
			checkSums(t, c.Counters)
		})
	}
}

// TestCapabilityLengths sends OPENs with one capability of a random length. The guard refuses a length that the
// capability does not have: RFC 4760, Section 8; RFC 2918, Section 2; RFC 8950, Section 4; RFC 4724, Section 3; RFC
// 6793, Section 3.
func TestCapabilityLengths(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	fits := map[byte]func(n int) bool{
		1: func(n int) bool { return n == 4 }, 2: func(n int) bool { return n == 0 }, 5: func(n int) bool { return n%6 == 0 },
		64: func(n int) bool { return n%4 == 2 }, 65: func(n int) bool { return n == 4 },
	}
	for kind, fit := range fits {
		for range 2000 {
			n := r.IntN(40)
			capability := append([]byte{kind, byte(n)}, make([]byte, n)...)
			if kind == 65 && n == 4 {
				copy(capability[2:], octetsOf("0000fde9"))
			}
			end := r.IntN(len(capability)) // of the parameter
			if r.IntN(4) > 0 {
				end = len(capability)
			}
			body := append(octetsOf("04 fde9 005a 01010101"), byte(end+2), 2, byte(end))
			c := testConfig()
			g := New(c)
			out, err := g.FromPeer(message(TypeOpen, append(body, capability[:end]...)), nil)
			want := end == 0 || end == len(capability) && fit(n)
			var bad *Notification
			switch none := kind == 1; {
			case want && none && end > 0: // no family in common
				if !errors.As(err, &bad) || bad.Subcode != 7 {
					t.Fatalf("capability %d of %d octets, the parameter has %d: %v", kind, n, end, err)
				}
			case want != (err == nil), err != nil && (!errors.As(err, &bad) || bad.Code != CodeOpenMessageError || bad.Subcode != 0 || len(out) > 0):
				t.Fatalf("capability %d of %d octets, the parameter has %d: %v", kind, n, end, err)
			}
			checkSums(t, c.Counters)
		}
	}
}

func TestOpenCanonical(t *testing.T) {
	restart := "40 0a 8078 0001 01 80  0019 46 80 "
	tests := []struct {
		name string
		open []byte
		want string // body for the speaker
		info Info
	}{
		{
			"no capabilities: IPv4 and 2 octets", leafOpen(),
			"04 fde9 005a 01010101 0e 02 0c  01 04 0001 00 01  41 04 0000fde9",
			Info{PeerAS: 65001, Families: FamilySet(IPv4Unicast)},
		},
		{
			"all that is used, and much that is not",
			leafOpen(capsBoth, capAS4, restart, "05 06 0001 0001 0002 ", "46 00 06 00 49 06 04 6c656166 00 45 04 0001 01 03 01 04 0019 00 46 01 04 0001 00 01"),
			"04 fde9 005a 01010101 1e 02 1c  01 04 0001 00 01  01 04 0002 00 01  02 00  40 06 8078 0001 01 80  41 04 0000fde9",
			Info{PeerAS: 65001, Families: FamilySet(IPv4Unicast | IPv6Unicast), FourOctetAS: true, RouteRefresh: true,
				GracefulRestart: true, RestartTime: 120 * time.Second, ExtendedNextHop: true},
		},
		{
			"extended parameters of RFC 9072, one each capability",
			message(TypeOpen, octetsOf("04 fde9 005a 01010101 ff ff 0012  02 0006 01 04 0002 00 01  02 0006 41 04 0000fde9")),
			"04 fde9 005a 01010101 0e 02 0c  01 04 0002 00 01  41 04 0000fde9",
			Info{PeerAS: 65001, Families: FamilySet(IPv6Unicast), FourOctetAS: true},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := testConfig()
			c.ExtendedNextHop = true
			g := New(c)
			out, err := g.FromPeer(tt.open, nil)
			if err != nil {
				t.Fatal(err)
			}
			if want := message(TypeOpen, octetsOf(tt.want)); !bytes.Equal(out, want) {
				t.Errorf("speaker gets\n%x, want\n%x", out, want)
			}
			messages, err := parsed(out)
			if err != nil {
				t.Fatal(err)
			}
			if as, err := bgp.ValidateOpenMsg(messages[0].Body.(*bgp.BGPOpen), 65001, 65100, []byte{2, 2, 2, 2}); err != nil || as != 65001 {
				t.Errorf("speaker: AS %d, %v", as, err)
			}
			tt.info.RouterID, tt.info.HoldTime = netip.MustParseAddr("1.1.1.1"), 90*time.Second
			if info, ok := g.Info(); ok || info != tt.info {
				t.Errorf("info %+v\nwant %+v", info, tt.info)
			}
			if _, err := g.FromSpeaker(speakerOpen(), nil); err != nil {
				t.Fatal(err)
			}
			if info, ok := g.Info(); !ok || info.HoldTime != 9*time.Second {
				t.Errorf("hold time %v, want the smaller one", info.HoldTime)
			}
			checkSums(t, c.Counters)
		})
	}
}

// TestOpenAnyAS accepts any AS except ours, including four-octet ones.
func TestOpenAnyAS(t *testing.T) {
	c := testConfig()
	c.PeerAS = 0
	g := New(c)
	out, err := g.FromPeer(message(TypeOpen, octetsOf("04 5ba0 0000 01010101 08 02 06 41 04 fffffff0")), nil)
	if err != nil {
		t.Fatal(err)
	}
	want := message(TypeOpen, octetsOf("04 5ba0 0000 01010101 0e 02 0c  01 04 0001 00 01  41 04 fffffff0"))
	if !bytes.Equal(out, want) {
		t.Errorf("got %x, want %x", out, want)
	}
	if info, _ := g.Info(); info.PeerAS != 0xfffffff0 || info.HoldTime != 0 {
		t.Errorf("info %+v", info)
	}
}

func TestOpenToPeer(t *testing.T) {
	tests := []struct {
		name string
		edit func(*Config)
		want string
	}{
		{"both families", func(*Config) {},
			"04 fe4c 0009 02020202 1e 02 1c  01 04 0001 00 01  01 04 0002 00 01  02 00  40 06 8078 0001 01 80  41 04 0000fe4c"},
		{"IPv4 with IPv6 next hops", func(c *Config) { c.ExtendedNextHop, c.Families = true, []Family{IPv4Unicast} },
			"04 fe4c 0009 02020202 20 02 1e  01 04 0001 00 01  02 00  05 06 0001 0001 0002  40 06 8078 0001 01 80  41 04 0000fe4c"},
		{"IPv6, AS of four octets", func(c *Config) { c.LocalAS, c.Families, c.ExtendedNextHop = 4200000001, []Family{IPv6Unicast}, true },
			"04 5ba0 0009 02020202 14 02 12  01 04 0002 00 01  02 00  40 02 8078  41 04 fa56ea01"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := testConfig()
			tt.edit(&c)
			out, err := New(c).FromSpeaker(speakerOpen(), nil)
			if err != nil {
				t.Fatal(err)
			}
			if want := message(TypeOpen, octetsOf(tt.want)); !bytes.Equal(out, want) {
				t.Errorf("peer gets\n%x, want\n%x", out, want)
			}
			if _, err := parsed(out); err != nil {
				t.Error(err)
			}
			if got := c.Counters.Dropped(Outbound, CapabilityUnlisted); got != 1 {
				t.Errorf("%d capabilities dropped, want the FQDN", got)
			}
			checkSums(t, c.Counters)
		})
	}
}

// TestOwnASIsRefused checks that, although any AS may answer, ours may not, in either field: every session is eBGP.
func TestOwnASIsRefused(t *testing.T) {
	for name, body := range map[string]string{
		"fixed field": "04 fe4c 005a 01010101 00",
		"capability":  "04 5ba0 005a 01010101 08 02 06 41 04 0000fe4c",
	} {
		c := testConfig()
		c.PeerAS = 0
		_, err := New(c).FromPeer(message(TypeOpen, octetsOf(body)), nil)
		var n *Notification
		if !errors.As(err, &n) || n.Code != CodeOpenMessageError || n.Subcode != 2 {
			t.Errorf("%s: %v, want NOTIFICATION 2/2 (RFC 4271, Bad Peer AS)", name, err)
		}
		if _, err := New(c).FromPeer(message(TypeOpen, octetsOf(strings.Replace(body, "fe4c", "fe4d", 1))), nil); err != nil {
			t.Errorf("%s: another AS: %v", name, err)
		}
	}
}

// TestNumbersOfBadAS checks that an AS number that is not the expected one is named with the expected one.
func TestNumbersOfBadAS(t *testing.T) {
	for _, test := range []struct {
		peerAS uint32
		want   string
	}{
		{65009, "peer's AS number is 65001, and the configured one (peer_as) is 65009"},
		{0, ""},
	} {
		c := testConfig()
		c.PeerAS = test.peerAS
		_, err := New(c).FromPeer(leafOpen(capsBoth, capAS4), nil)
		if got := fmt.Sprint(err); (err != nil) != (test.want != "") || !strings.Contains(got, test.want) {
			t.Errorf("peer_as %d: %v, want %q", test.peerAS, err, test.want)
		}
	}
	c := testConfig()
	c.LocalAS = 65001
	if _, err := New(c).FromPeer(leafOpen(capsBoth, capAS4), nil); err == nil || !strings.Contains(err.Error(), "local AS number, 65001") {
		t.Errorf("our own AS: %v", err)
	}
	_, err := New(testConfig()).FromPeer(message(TypeNotification, []byte{CodeOpenMessageError, OpenBadPeerAS}), nil)
	if err == nil || !strings.Contains(err.Error(), "it does not expect our AS number, 65100") {
		t.Errorf("the peer refuses our AS: %v", err)
	}
}
