package guard

import (
	"errors"
	"testing"
)

// TestUnusedKinds covers kinds of attributes, families and communities that the allow-list does not have, before and
// after the OPEN. No part of them reaches the speaker.
func TestUnusedKinds(t *testing.T) {
	tests := []struct {
		name string
		in   []byte
		want string // changes while the session is up
	}{
		{"unknown attribute", updateOf(nil, octetsOf(good4, "c0 63 02 0102"), octetsOf(host4)), "+10.1.0.1/32 65001"},
		{"unknown attribute, not transitive", updateOf(nil, octetsOf(good4, "80 63 01 00"), octetsOf(host4)), "+10.1.0.1/32 65001"},
		{"Prefix-SID of a label index", updateOf(nil, octetsOf(good4, "c0 28 0a 01 0007 00 0000 00000064"), octetsOf(host4)), "+10.1.0.1/32 65001"},
		{"multicast announced", updateOf(nil, octetsOf(origin, pathLeaf, "80 0e 0e 0001 02 04 0a000001 00 20 0a010001"), nil), ""},
		{"multicast withdrawn", updateOf(nil, octetsOf("80 0f 08 0001 02 20 0a010001"), nil), ""},
		{"communities of other meanings", updateOf(nil, octetsOf(good4, "c0 10 10 0002fde900000001 0003fde900000001"), octetsOf(host4)), "+10.1.0.1/32 65001"},
		{"withdrawal of an unknown prefix", updateOf(octetsOf("20 c0a80001"), nil, nil), ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			g, c := session(t, nil, newLeaf)
			out, err := g.FromPeer(tt.in, nil)
			expect(t, g, out, err, 0, 0, tt.want)
			checkSums(t, c)

			// Before the OPEN and before the first KEEPALIVE they only end the session.
			for _, s := range []state{openSent, openConfirm} {
				c := testConfig()
				g := New(c)
				if s == openConfirm {
					if _, err := g.FromPeer(newLeaf, nil); err != nil {
						t.Fatal(err)
					}
				}
				out, err := g.FromPeer(tt.in, nil)
				expect(t, g, out, err, CodeFSMError, byte(s)+1, "")
				checkSums(t, c.Counters)
			}
		})
	}
	for _, first := range [][]byte{keepalive, message(TypeRouteRefresh, octetsOf("0001 00 01"))} {
		g := New(testConfig())
		out, err := g.FromPeer(first, nil)
		expect(t, g, out, err, CodeFSMError, 1, "")
	}
}

// expect asserts an end by NOTIFICATION, or the changes of routes if code is 0; the speaker gets nothing.
func expect(t *testing.T, g *Guard, out []byte, err error, code, subcode byte, want string) {
	t.Helper()
	if len(out) > 0 {
		t.Errorf("speaker gets %x", out)
	}
	if got := show(g.TakeChanges()); got != want {
		t.Errorf("changes %s, want %s", got, want)
	}
	if code == 0 {
		if err != nil {
			t.Error(err)
		}
		return
	}
	var n *Notification
	if !errors.As(err, &n) || n.Code != code || n.Subcode != subcode {
		t.Fatalf("got %v, want NOTIFICATION %d/%d", err, code, subcode)
	}
	// RFC 6608, Section 4: the data is the type of the message.
	if code == CodeFSMError && (len(n.Data) != 1 || n.Data[0] < TypeOpen || n.Data[0] > TypeRouteRefresh) {
		t.Errorf("data %x is no message type", n.Data)
	}
}

func TestNotificationOfPeer(t *testing.T) {
	tests := []struct {
		name, body string
		want       PeerClosed
	}{
		{"hold timer", "04 00", PeerClosed{Code: 4}},
		{"arbitrary data", "03 01 deadbeef", PeerClosed{Code: 3, Subcode: 1}},
		{"shutdown with text", "06 02 05 68656c6c6f", PeerClosed{6, 2, "hello"}},
		{"text with control characters", "06 04 03 610a62", PeerClosed{6, 4, "a b"}},
		{"text that is not UTF-8", "06 02 02 fffe", PeerClosed{Code: 6, Subcode: 2}},
		{"text cut off by one octet", "06 02 05 68656c6c", PeerClosed{Code: 6, Subcode: 2}},
		{"text of no octets", "06 02 00", PeerClosed{Code: 6, Subcode: 2}},
		{"text with another reason than shutdown", "06 05 02 6869", PeerClosed{Code: 6, Subcode: 5}},
		{"text with another code than Cease", "05 02 02 6869", PeerClosed{Code: 5, Subcode: 2}},
		{"code 0", "00 01", PeerClosed{Subcode: 1}},
		{"text cut off", "06 02 05 6865", PeerClosed{Code: 6, Subcode: 2}},
		{"unknown code", "63 07 00", PeerClosed{Code: 0x63, Subcode: 7}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, up := range []bool{false, true} {
				c := testConfig()
				g := New(c)
				if up {
					g = establish(t, c, newLeaf)
				}
				out, err := g.FromPeer(message(TypeNotification, octetsOf(tt.body)), nil)
				var closed *PeerClosed
				if !errors.As(err, &closed) || *closed != tt.want {
					t.Fatalf("got %v, want %v", err, &tt.want)
				}
				if len(out) > 0 {
					t.Errorf("speaker gets %x", out)
				}
				if c.Counters.Dropped(Inbound, MessageNotification) != 1 {
					t.Error("not counted")
				}
				checkSums(t, c.Counters)
			}
		})
	}
}
