package interop

import (
	"fmt"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

// TestASPaths cuts half a Y-cable behind leaves that modify AS paths: weights must be exact in both directions in every
// case. Origins are hidden by as-override, remove-private-AS (which removes a four-byte number from the second server's
// path) and confederations; servers of one AS see each other by as-override, or if they allow their own AS.
func TestASPaths(t *testing.T) {
	gate.Needed(t, "fabrics whose AS numbers collide")
	for _, tc := range []struct {
		name   string
		daemon daemon
		opt    options
		leaf   leaf
	}{
		{name: "as-override", daemon: frr{}, leaf: leaf{policy: "as-override"}},
		{name: "remove-private-AS", daemon: frr{}, leaf: leaf{policy: "remove-private-AS"}},
		{name: "remove-private-AS all", daemon: frr{}, leaf: leaf{policy: "remove-private-AS all"}},
		{name: "remove-private-AS all replace-AS", daemon: frr{}, leaf: leaf{policy: "remove-private-AS all replace-AS"}},
		{name: "confederation", daemon: frr{}, leaf: leaf{confederation: 64999}},
		{name: "confederation of two leaves", daemon: frr{}, opt: options{leaves: 2}, leaf: leaf{confederation: 64999}},
		{name: "one AS, allow_own_as", daemon: frr{}, opt: options{oneAS: true, allowOwnAS: 1}},
		{name: "one AS, as-override", daemon: frr{}, opt: options{oneAS: true}, leaf: leaf{policy: "as-override"}},
		{name: "one AS, allow_own_as, BIRD", daemon: bird{}, opt: options{oneAS: true, allowOwnAS: 1, advertise: "node"}},
		{name: "one AS, as_override, fared leaf", daemon: faredLeaf{}, opt: options{oneAS: true}, leaf: leaf{policy: "as-override"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.name != "as-override" && tc.name != "one AS, allow_own_as" {
				gate.Slow(t, gate.Interop, "another policy of AS paths")
			}
			tc.opt.daemons = both(tc.daemon)
			tc.opt.each = func(l *leaf) {
				l.cumulative, l.policy = true, tc.leaf.policy
				if tc.leaf.confederation != 0 {
					l.confederation = tc.leaf.confederation + uint32(l.plane)
				}
			}
			f := newFabric(t, tc.opt)
			f.up()
			f.checkAdvertised()
			for p := range planes {
				f.learned(p, sum)
			}
			f.weigh("all up", "1:1")
			for p, want := range []string{"1:2", "2:1"} {
				f.lane(p, 1, 1, false)
				f.weigh(fmt.Sprintf("half a Y-cable of plane %d at server 1", p), want)
				f.lane(p, 1, 1, true)
				f.up()
				f.weigh("cable back", "1:1")
			}
		})
	}
}
