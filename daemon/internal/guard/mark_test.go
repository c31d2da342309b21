package guard

import (
	"bytes"
	"net/netip"
	"testing"
)

// TestMarkPrefixes checks that marks are distinct host routes of their ranges, and that their numbers can be read back.
func TestMarkPrefixes(t *testing.T) {
	within := map[Family]netip.Prefix{IPv4Unicast: netip.MustParsePrefix("0.0.0.0/8"), IPv6Unicast: netip.MustParsePrefix("100::/64")}
	for family, all := range within {
		for _, n := range []uint32{1, 2, 255, 256, 65535, 65536, MaxMark - 1, MaxMark} {
			p := Mark(family, n)
			encoded := append([]byte{byte(p.Bits())}, p.Addr().AsSlice()...)
			if !p.IsSingleIP() || !all.Contains(p.Addr()) || markOf(encoded, family) != n {
				t.Errorf("%v mark %d is %v, read back as %d", family, n, p, markOf(encoded, family))
			}
		}
	}
	for family, encoded := range map[Family][]byte{IPv4Unicast: octetsOf("20 0a000001"), IPv6Unicast: octetsOf(host6)} {
		if n := markOf(encoded, family); n != 0 {
			t.Errorf("%x is read as mark %d", encoded, n)
		}
	}
}

// TestMarksStayInside checks that FromSpeaker passes no mark, alone or among routes, counts none as a message, and
// returns the number after the withdrawal, not before.
func TestMarksStayInside(t *testing.T) {
	c := testConfig()
	c.Counters = new(Counters)
	g := establish(t, c, leafOpen(capsBoth, capAS4))
	attrs := octetsOf("40 01 01 00", pathOurs, hopAny)
	send := func(update []byte) []byte {
		t.Helper()
		out, err := g.FromSpeaker(update, nil)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	before := c.Counters.Received(Outbound, Messages)
	if out := send(updateOf(nil, attrs, octetsOf("20 00000007"))); len(out) > 0 || g.Marked() != 0 {
		t.Errorf("a mark announced: sent %x, mark %d", out, g.Marked())
	}
	if out := send(updateOf(octetsOf("20 00000007"), nil, nil)); len(out) > 0 || g.Marked() != 7 {
		t.Errorf("a mark withdrawn: sent %x, mark %d", out, g.Marked())
	}
	if n := c.Counters.Received(Outbound, Messages) - before; n != 0 {
		t.Errorf("%d messages of marks alone were counted", n)
	}
	want := send(updateOf(octetsOf("20 0a000009"), attrs, octetsOf("20 0a000001")))
	got := send(updateOf(octetsOf("20 00000008 20 0a000009"), attrs, octetsOf("20 00000009 20 0a000001")))
	if len(want) == 0 || !bytes.Equal(got, want) || g.Marked() != 8 {
		t.Errorf("marks among routes: sent %x, want %x; mark %d", got, want, g.Marked())
	}
	checkSums(t, c.Counters)
}
