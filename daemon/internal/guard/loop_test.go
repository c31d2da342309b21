package guard

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"github.com/fared/fared/fare"
)

// TestAllowOwnAS checks that our AS (65100) may occur in a path as often as the configuration permits, and no more.
func TestAllowOwnAS(t *testing.T) {
	const leaf, own = "0000fde9 ", "0000fe4c "
	for _, tc := range []struct {
		allow  int
		path   string
		passes bool
	}{
		{0, "40 02 06 02 01 " + leaf, true},
		{0, "40 02 0a 02 02 " + leaf + own, false},
		{1, "40 02 0a 02 02 " + leaf + own, true},
		{1, "40 02 0e 02 03 " + leaf + own + own, false},
		{2, "40 02 0e 02 03 " + leaf + own + own, true},
	} {
		g, c := session(t, func(c *Config) { c.AllowOwnAS = tc.allow }, newLeaf)
		if _, err := g.FromPeer(updateOf(nil, octetsOf(origin, tc.path, hopLeaf), octetsOf(host4)), nil); err != nil {
			t.Fatal(err)
		}
		if passed, looped := c.Passed(Inbound, Routes), c.Dropped(Inbound, RouteLoop); passed+looped != 1 || passed == 1 != tc.passes {
			t.Errorf("allowed %d, path %s: %d passed, %d are loops", tc.allow, tc.path, passed, looped)
		}
	}
}

// TestDecidingCommunityPasses hides the lowest of 500 values, which fill a message, at every position in turn.
func TestDecidingCommunityPasses(t *testing.T) {
	const most = 500
	lowest := func(communities [][8]byte) int {
		at := -1
		for i, c := range communities {
			if c[0] != lbTransitive || c[1] != lbSubType {
				t.Fatalf("%x is not as on the wire", c)
			}
			if at < 0 || bytes.Compare(c[4:], communities[at][4:]) < 0 {
				at = i
			}
		}
		return at
	}
	for place := range most {
		g, c := session(t, func(c *Config) { c.Deciding = lowest }, newLeaf)
		attr := binary.BigEndian.AppendUint16(octetsOf("d0 10"), 8*most)
		for i := range most {
			value := "5139a6e5"
			if i == place {
				value = "01020304"
			}
			attr = append(attr, octetsOf("0004 fde9", value)...)
		}
		if _, err := g.FromPeer(updateOf(nil, append(octetsOf(good4), attr...), octetsOf(host4)), nil); err != nil {
			t.Fatal(err)
		}
		if !slices.Contains(g.TakeChanges()[0].Attrs.Communities, fare.Community{0, 4, 0xfd, 0xe9, 1, 2, 3, 4}) {
			t.Fatalf("the lowest of %d, at place %d, did not pass", most, place)
		}
		if got := c.Passed(Inbound, Communities); got != MaxCommunities {
			t.Fatalf("%d passed, at most %d may", got, MaxCommunities)
		}
		checkSums(t, c)
	}
}
