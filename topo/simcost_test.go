package topo

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/fared/fared/fare"
)

// TestUpdateSizes compares the sizes with messages that GoBGP's packet library, which also encodes fared's, writes and
// parses.
func TestUpdateSizes(t *testing.T) {
	for hops := 1; hops <= 4; hops++ {
		for prefixes := 1; prefixes <= 8; prefixes++ {
			path := make([]uint32, hops)
			for i := range path {
				path[i] = 4200000000 + uint32(i)
			}
			attrs := &fare.Attributes{ASPath: path, Communities: []fare.Community{fare.Codec{AS: path[0]}.Encode(400*fare.Gigabit, netip.MustParseAddr("10.0.0.1"))}}
			for _, software := range []string{Fared, FRR, BIRD} {
				asPath := bgp.NewPathAttributeAsPath([]bgp.AsPathParamInterface{bgp.NewAs4PathParam(bgp.BGP_ASPATH_ATTR_TYPE_SEQ, path)})
				if software == FRR {
					asPath.Flags |= bgp.BGP_ATTR_FLAG_EXTENDED_LENGTH
				}
				raw := attrs.Communities[0]
				var nlri []*bgp.IPAddrPrefix
				for i := range prefixes {
					nlri = append(nlri, bgp.NewIPAddrPrefix(32, fmt.Sprintf("10.255.0.%d", i)))
				}
				checkSize(t, updateSize(software, attrs, prefixes), bgp.NewBGPUpdateMessage(nil, []bgp.PathAttributeInterface{
					bgp.NewPathAttributeOrigin(0), asPath, bgp.NewPathAttributeNextHop("10.0.0.1"),
					bgp.NewPathAttributeExtendedCommunities([]bgp.ExtendedCommunityInterface{bgp.NewUnknownExtended(bgp.ExtendedCommunityAttrType(raw[0]), raw[1:])}),
				}, nlri))
			}
		}
	}
	for _, prefixes := range []int{1, 8, withdrawals} {
		var nlri []*bgp.IPAddrPrefix
		for i := range prefixes {
			nlri = append(nlri, bgp.NewIPAddrPrefix(32, fmt.Sprintf("10.255.%d.%d", i>>8, i&255)))
		}
		checkSize(t, emptyUpdate+prefixes*prefixSize, bgp.NewBGPUpdateMessage(nlri, nil, nil))
	}
	checkSize(t, endOfRIB, bgp.NewEndOfRib(bgp.RF_IPv4_UC))
	if size := emptyUpdate + (withdrawals+1)*prefixSize; size <= maxMessage {
		t.Errorf("%d withdrawals would fit: %d octets", withdrawals+1, size)
	}
}

func checkSize(t *testing.T, want int, m *bgp.BGPMessage) {
	t.Helper()
	raw, err := m.Serialize()
	if err != nil {
		t.Fatal(err)
	}
	if len(raw) != want || len(raw) > maxMessage {
		t.Errorf("%d octets, and not %d: % x", len(raw), want, raw)
	}
	if _, err := bgp.ParseBGPMessage(raw); err != nil {
		t.Errorf("% x: %v", raw, err)
	}
}
