package guard

import (
	"bytes"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// TestSignals checks that the communities of maintenance among others are noted on the way in, that one more or less is
// a change, and that they reach the peer of a leaf that passes the route on.
func TestSignals(t *testing.T) {
	g, _ := session(t, nil, newLeaf)
	for _, step := range []struct {
		communities []uint32
		want        string // the changes
	}{
		{nil, "+10.1.0.1/32 65001"},
		{[]uint32{0xfde90000, 0xffffff01}, ""},
		{[]uint32{0xfde90000, 0xffff0000}, "+10.1.0.1/32 65001 graceful-shutdown"},
		{[]uint32{0xffff0000}, ""},
		{[]uint32{0xffff0006, 0xffff0000}, "+10.1.0.1/32 65001 graceful-shutdown,llgr-stale"},
		{[]uint32{0xffff0006}, "+10.1.0.1/32 65001 llgr-stale"},
		{[]uint32{0xffff0001, 0xffff0007}, "+10.1.0.1/32 65001"},
	} {
		attrs := []bgp.PathAttributeInterface{bgp.NewPathAttributeOrigin(0), bgp.NewPathAttributeNextHop("10.0.0.1"),
			bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, []uint32{65001})})}
		if step.communities != nil {
			attrs = append(attrs, bgp.NewPathAttributeCommunities(step.communities))
		}
		b, err := bgp.NewBGPUpdateMessage(nil, attrs, []*bgp.IPAddrPrefix{bgp.NewIPAddrPrefix(32, "10.1.0.1")}).Serialize()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.FromPeer(b, nil); err != nil {
			t.Fatal(err)
		}
		if got := show(g.TakeChanges()); got != step.want {
			t.Errorf("communities %x: %q, want %q", step.communities, got, step.want)
		}
	}

	b, err := bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{
		bgp.NewPathAttributeOrigin(0), bgp.NewPathAttributeNextHop("127.0.0.1"),
		bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{bgp.NewAs4PathParam(2, []uint32{65100})}),
		bgp.NewPathAttributeCommunities([]uint32{0xffff0006, 0xffff0000}),
	}, []*bgp.IPAddrPrefix{bgp.NewIPAddrPrefix(32, "10.1.0.1")}).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	got, err := g.FromSpeaker(b, nil)
	if want := updateOf(nil, octetsOf(origin, pathOurs, hopOurs, "c0 08 08 ffff0000 ffff0006"), octetsOf(host4)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("to the peer %x (%v), want %x", got, err, want)
	}
}
