package guard

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// TestOpenCapabilities covers capabilities whose bits and repetitions matter: the speaker's copy of them, and the
// counters.
func TestOpenCapabilities(t *testing.T) {
	const both = "01 04 0001 00 01  01 04 0002 00 01  "
	tests := []struct {
		name, caps, want string // capabilities of the leaf, and for the speaker
		drop             map[Reason]uint64
		restart          time.Duration
		extended         bool
	}{
		{"graceful restart without R and F, reserved bits set (RFC 4724, Section 3)", both + "40 0a 7fff 0001 01 7f 0002 01 00 ",
			both + "40 0a 0fff 0001 01 00 0002 01 00 ", nil, 4095 * time.Second, false},
		{"graceful restart of no family", both + "40 02 8001 ", both + "40 02 8001 ", nil, time.Second, false},
		{"graceful restart of a family that is not in use", "01 04 0001 00 01 40 0a 0001 0001 01 00 0002 01 80 ",
			"01 04 0001 00 01 40 06 0001 0001 01 00 ", nil, time.Second, false},
		{"of two graceful restarts the last (RFC 4724, Section 3)", both + "40 06 8002 0001 01 80 40 06 0001 0002 01 80 ",
			both + "40 06 0001 0002 01 80 ", map[Reason]uint64{CapabilityDuplicate: 1}, time.Second, false},
		{"repetitions", both + both + "02 00 02 00 41 04 0000fde9 ", both + "02 00 ", map[Reason]uint64{CapabilityDuplicate: 4}, 0, false},
		{"codes 64 apart are no repetitions", both + "02 00 42 00 82 00 c2 00 ", both + "02 00 ", map[Reason]uint64{CapabilityUnlisted: 3}, 0, false},
		{"extended next hop of other families", both + "05 0c 0002 0001 0002 0001 0080 0002 ", both, nil, 0, false},
		{"extended next hop, the second of two", both + "05 0c 0001 0002 0002 0001 0001 0002 ", both, nil, 0, true},
		{"extended next hop without IPv4", "01 04 0002 00 01 05 06 0001 0001 0002 ", "01 04 0002 00 01 ", nil, 0, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := testConfig()
			c.ExtendedNextHop = true
			g := New(c)
			out, err := g.FromPeer(leafOpen(tt.caps, capAS4), nil)
			if err != nil {
				t.Fatal(err)
			}
			want := octetsOf(tt.want, capAS4)
			want = append(append(octetsOf("04 fde9 005a 01010101"), byte(len(want)+2), 2, byte(len(want))), want...)
			if want = message(TypeOpen, want); !bytes.Equal(out, want) {
				t.Errorf("speaker gets\n%x, want\n%x", out, want)
			}
			info, _ := g.Info()
			if info.RestartTime != tt.restart || info.GracefulRestart != (tt.restart > 0) || info.ExtendedNextHop != tt.extended {
				t.Errorf("info %+v", info)
			}
			for _, r := range Reasons() {
				if got := c.Counters.Dropped(Inbound, r); got != tt.drop[r] {
					t.Errorf("%v: %d, want %d", r, got, tt.drop[r])
				}
			}
			checkSums(t, c.Counters)
		})
	}
}

// TestExtendedNextHopTakesBoth checks that an extended next hop is in use only if both ends announce it (RFC 8950,
// Section 4).
func TestExtendedNextHopTakesBoth(t *testing.T) {
	for _, ours := range []bool{false, true} {
		for _, theirs := range []string{"", "05 06 0001 0001 0002"} {
			c := testConfig()
			c.ExtendedNextHop = ours
			if info, _ := establish(t, c, leafOpen(capsBoth, capAS4, theirs)).Info(); info.ExtendedNextHop != (ours && theirs != "") {
				t.Errorf("ours %v, theirs %q: %v", ours, theirs, info.ExtendedNextHop)
			}
		}
	}
}

// TestHoldTime checks that the hold time is the smaller one of both ends; 0 is smaller than all (RFC 4271, Section
// 4.2). The speaker's is 9 s.
func TestHoldTime(t *testing.T) {
	for peer, want := range map[uint16]time.Duration{0: 0, 3: 3 * time.Second, 9: 9 * time.Second, 65535: 9 * time.Second} {
		g := New(testConfig())
		if _, err := g.FromSpeaker(speakerOpen(), nil); err != nil {
			t.Fatal(err)
		}
		if info, both := g.Info(); both || info.HoldTime != 9*time.Second {
			t.Errorf("before the peer's OPEN: %v, %v", info.HoldTime, both)
		}
		open := bytes.Clone(newLeaf)
		binary.BigEndian.PutUint16(open[HeaderLen+3:], peer)
		if _, err := g.FromPeer(open, nil); err != nil {
			t.Fatal(err)
		}
		if info, both := g.Info(); !both || info.HoldTime != want {
			t.Errorf("the peer's is %d s: %v, want %v", peer, info.HoldTime, want)
		}
	}
}

// TestOpenFixedAS checks that the fixed field of an OPEN contains 65535; from 65536 on it is AS_TRANS (RFC 6793,
// Section 9).
func TestOpenFixedAS(t *testing.T) {
	for as, want := range map[uint32]uint16{65535: 65535, 65536: 23456} {
		c := testConfig()
		c.LocalAS = as
		out, err := New(c).FromSpeaker(speakerOpen(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := binary.BigEndian.Uint16(out[HeaderLen+1:]); got != want {
			t.Errorf("AS %d: %d in the fixed field, want %d", as, got, want)
		}
	}
}

// TestWithdrawalOfAnotherLength checks that a withdrawal of a shorter prefix, with as many octets as a host route, does
// not withdraw the host route.
func TestWithdrawalOfAnotherLength(t *testing.T) {
	g, c := session(t, nil, newLeaf)
	if _, err := g.FromPeer(updateOf(nil, octetsOf(good4, reach6), octetsOf(host4)), nil); err != nil {
		t.Fatal(err)
	}
	g.TakeChanges()
	near6 := "80 0f 14 0002 01 7f 20010db8000a00000000000000000001 "
	if _, err := g.FromPeer(updateOf(octetsOf("1f 0a010001 19 0a010001"), octetsOf(near6), nil), nil); err != nil || len(g.TakeChanges()) > 0 {
		t.Errorf("a withdrawal passes, %v", err)
	}
	if got := c.Dropped(Inbound, WithdrawUnknown); got != 3 {
		t.Errorf("%d unknown, want 3", got)
	}
	if _, err := g.FromPeer(updateOf(octetsOf(host4), octetsOf(unreach6), nil), nil); err != nil {
		t.Error(err)
	}
	if got, want := show(g.TakeChanges()), "-10.1.0.1/32, -2001:db8:a::1/128"; got != want {
		t.Errorf("the true withdrawals: %s, want %s", got, want)
	}
	checkSums(t, c)
}

// TestMessagesAreFilled checks that announcements that become longer fill their messages to the last octet (RFC 4271,
// Section 4.1: 4096), and lose nothing.
func TestMessagesAreFilled(t *testing.T) {
	linkLocal := func(c *Config) { c.LocalLinkLocal = netip.MustParseAddr("fe80::2%eth0") }
	var nlri4, nlri6 []byte
	for i := range 809 {
		nlri4 = append(nlri4, 32, 10, 1, byte(i>>8), byte(i))
	}
	for i := range 237 {
		nlri6 = append(append(nlri6, octetsOf("80 20010db8000a0000000000000000")...), byte(i>>8), byte(i))
	}
	// For a 2-octet leaf a path of two large numbers takes 12 octets more; one number and a second next hop, 23 more.
	path2, path1 := octetsOf("40 02 0a 02 02 fa56ea01 fa56ea02"), octetsOf("40 02 06 02 01 fa56ea01")
	reach := append(octetsOf("0002 01 10 00000000000000000000ffff7f000001 00"), nlri6...)
	reach = append(binary.BigEndian.AppendUint16(octetsOf("90 0e"), uint16(len(reach))), reach...)
	for _, tt := range []struct {
		name  string
		in    []byte
		first int // prefixes of the first message, which then has 4096 octets
		all   []byte
	}{
		{"IPv4", updateOf(nil, append(octetsOf(origin, hopAny), path2...), nlri4), 808, nlri4},
		{"IPv6", updateOf(nil, append(append(reach, octetsOf(origin)...), path1...), nil), 236, nlri6},
	} {
		g, _ := session(t, linkLocal, leafOpen(capsBoth))
		out, err := g.FromSpeaker(tt.in, nil)
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		cut, err := frames(out)
		if err != nil || len(cut) != 2 || len(cut[0]) != 4096 {
			t.Fatalf("%s: %d messages, the first of %d octets, %v", tt.name, len(cut), len(cut[0]), err)
		}
		messages, err := parsed(out)
		if err != nil {
			t.Fatal(err)
		}
		var got []byte
		for i, m := range messages {
			prefixes := announced(m.Body.(*bgp.BGPUpdate))
			if i == 0 && len(prefixes) != tt.first {
				t.Errorf("%s: %d prefixes in the first message, want %d", tt.name, len(prefixes), tt.first)
			}
			for _, p := range prefixes {
				b, _ := p.Serialize()
				got = append(got, b...)
			}
		}
		if !bytes.Equal(got, tt.all) {
			t.Errorf("%s: the prefixes are not those that came", tt.name)
		}
	}
}

func announced(u *bgp.BGPUpdate) (prefixes []bgp.AddrPrefixInterface) {
	for _, p := range u.NLRI {
		prefixes = append(prefixes, p)
	}
	for _, a := range u.PathAttributes {
		if reach, ok := a.(*bgp.PathAttributeMpReachNLRI); ok {
			prefixes = append(prefixes, reach.Value...)
		}
	}
	return prefixes
}

// TestLongestWithdrawals checks that the longest withdrawals that fit a message remain one message.
func TestLongestWithdrawals(t *testing.T) {
	var nlri4, nlri6 []byte
	for i := range 814 { // of five octets: 4070 of 4073
		nlri4 = append(nlri4, 32, 10, 1, byte(i>>8), byte(i))
	}
	for i := range 451 { // of nine octets: 4059 of 4066
		nlri6 = append(append(nlri6, octetsOf("40 20010db8000a")...), byte(i>>8), byte(i))
	}
	unreach := append(octetsOf("0002 01"), nlri6...)
	unreach = append(binary.BigEndian.AppendUint16(octetsOf("90 0f"), uint16(len(unreach))), unreach...)
	for _, in := range [][]byte{updateOf(nlri4, nil, nil), updateOf(nil, unreach, nil)} {
		g, _ := session(t, nil, newLeaf)
		if out, err := g.FromSpeaker(in, nil); err != nil || !bytes.Equal(out, in) {
			t.Errorf("%d octets became %d, %v", len(in), len(out), err)
		}
	}
}

// TestCommunityLimit checks that MaxCommunities communities pass unchanged without a call of Deciding. With one more,
// the first ones pass unless Deciding selects one.
func TestCommunityLimit(t *testing.T) {
	for _, tt := range []struct{ n, calls int }{{64, 0}, {65, 1}} {
		calls := 0
		g, c := session(t, func(c *Config) { c.Deciding = func([][8]byte) int { calls++; return -1 } }, newLeaf)
		attr := binary.BigEndian.AppendUint16(octetsOf("d0 10"), uint16(8*tt.n))
		want := "+10.1.0.1/32 65001"
		for i := range tt.n {
			attr = append(attr, 0, 4, 0xfd, 0xe9, 0, 0, 0, byte(i))
			if i < 64 {
				want += fmt.Sprintf(" 0004fde9000000%02x", i)
			}
		}
		_, err := g.FromPeer(updateOf(nil, append(octetsOf(good4), attr...), octetsOf(host4)), nil)
		if got := show(g.TakeChanges()); err != nil || got != want || calls != tt.calls {
			t.Errorf("%d communities: %d calls, want %d; %v, %s", tt.n, calls, tt.calls, err, got)
		}
		if c.Passed(Inbound, Communities) != 64 || c.Dropped(Inbound, CommunityExcess) != uint64(tt.n-64) {
			t.Errorf("%d communities: %d passed, %d are too many", tt.n, c.Passed(Inbound, Communities), c.Dropped(Inbound, CommunityExcess))
		}
	}
}

// TestNothingAfterTheEnd checks that a session passes nothing after its end, whatever was deferred.
func TestNothingAfterTheEnd(t *testing.T) {
	g, _ := session(t, nil, newLeaf)
	refresh := message(TypeRouteRefresh, octetsOf("0001 00 01"))
	if _, err := g.FromPeer(append(bytes.Clone(refresh), refresh...), nil); err != nil {
		t.Fatal(err)
	}
	_, end := g.FromPeer(message(TypeNotification, octetsOf("06 02 00")), nil)
	if end == nil {
		t.Fatal("the session continues after a NOTIFICATION")
	}
	if out, err := g.FromPeer(keepalive, nil); len(out) != 0 || err != end {
		t.Errorf("after the end: %x, %v", out, err)
	}
	if out := g.Refresh(nil); len(out) != 0 {
		t.Errorf("a refresh after the end: %x", out)
	}
}
