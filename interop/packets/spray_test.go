package packets

import (
	"math"
	"testing"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/wecmp"
)

// spread is the allowed deviation of a share from its weight, as a fraction of all packets.
const spread = 0.005

// TestSpray checks that in per-packet mode a slot's packets are sprayed over its plane's sub-ports, and those of flows
// without a slot over all sub-ports, by weight. A million packets are within half a percent of the weights, and the planes'
// parts of the slots are exact.
func TestSpray(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			b := newBed(t, "bpf", f)
			b.start()
			b.resolve()
			c := b.connect(farev1.Mode_MODE_PER_PACKET, wecmp.Reweight, 2)
			c.weigh(draftWeights[0]...)
			dst := c.dst[0]
			ports := c.ports(dst)
			flows := b.flows(t, dst, ports)
			stray := b.flows(t, dst, []uint16{1024})
			for _, weights := range draftWeights {
				c.weigh(weights...)
				v := c.view()
				var shares []uint64
				var sum uint64
				for _, s := range v.Slots {
					shares = append(shares, uint64(s.SharePPB))
				}
				for _, w := range weights {
					sum += w
				}
				const quarter = 50_000
				parts := wecmp.Apportion(nil, shares, quarter)
				before := b.arrivals()
				stripe(t, flows, parts)
				got := b.settled(before, quarter)
				lost := quarter - got.total()
				var want [planes]uint64
				for slot, s := range v.Slots {
					want[s.Plane] += parts[slot]
				}
				for p := range planes {
					var at [subPorts]uint64
					var plane uint64
					for s := range subPorts {
						for _, port := range ports {
							at[s] += got[p][s][port]
						}
						plane += at[s]
					}
					if plane > want[p] || plane+lost < want[p] {
						t.Errorf("%s: %d packets of the slots at plane %d, want exactly %d", ratio(weights), plane, p, want[p])
					}
					for s := range subPorts {
						near(t, ratio(weights)+" of the slots, "+device(p, s), at[s], plane, 1.0/subPorts)
					}
				}

				before = b.arrivals()
				if err := stray[0].send(quarter); err != nil {
					t.Fatal(err)
				}
				got = b.settled(before, quarter)
				for p := range planes {
					for s := range subPorts {
						near(t, ratio(weights)+" of no slot, "+device(p, s), got[p][s][1024], quarter, float64(weights[p])/float64(sum)/subPorts)
					}
				}
			}
		})
	}
}

// near requires n to be the given share of all.
func near(t *testing.T, what string, n, all uint64, share float64) {
	t.Helper()
	if all == 0 {
		return
	}
	if got := float64(n) / float64(all); math.Abs(got-share) > spread {
		t.Errorf("%s: %.4f of the packets, want %.4f within %.3f", what, got, share, spread)
	}
	if share == 0 && n > 0 {
		t.Errorf("%s: %d packets, want none", what, n)
	}
}
