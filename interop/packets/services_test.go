package packets

import (
	"fmt"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/wecmp"
)

// superp is the UDP destination port of the second service.
const superp = 4444

// TestTwoServicesLand sends packets of two services, RoCEv2's and SUPERp's UDP ports, over the same slots at once, each
// from its source ports. Every packet of both arrives at its slot's sub-port, before and after a change of weights.
// With driver linux the second service then uses the first one's ports, and its packets arrive elsewhere.
func TestTwoServicesLand(t *testing.T) {
	gate.Slow(t, gate.Packets, "packets of two services, with each driver")
	for _, driver := range drivers {
		t.Run(driver, func(t *testing.T) {
			b := newBed(t, driver, families[0])
			b.others = []uint32{superp}
			var taps [planes][subPorts]*packettap.Tap
			for p := range planes {
				for s := range subPorts {
					taps[p][s] = packettap.New(t, b.Leaves[p], testbed.LeafPort(s), superp, packettap.End)
				}
			}
			second := func() (a arrivals) {
				for p := range planes {
					for s := range subPorts {
						a[p][s] = taps[p][s].Read(t)
					}
				}
				return a
			}
			b.start()
			b.Resolve()
			c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 1)
			c.weigh(draftWeights[0]...)
			dst, places, ports := c.dst[0], c.view().Places(), c.ports(c.dst[0])
			others, placement := c.planner.Toward(wecmp.Service{Protocol: wecmp.ProtocolUDP, Port: superp}, nil).Ports(b.family.source.Addr(), dst.Addr(), places, nil)
			if placement.Missed != 0 {
				t.Fatalf("%d slots have no source port that lands", placement.Missed)
			}
			// exchange sends n packets a slot of both services, and returns those that arrived elsewhere than at their
			// slots' sub-ports.
			exchange := func(ports2 []uint16, n int) (strays1, strays2 uint64) {
				first, beforeSecond := b.arrivals(), second()
				flows, flows2 := b.flows(t, dst, ports), b.flowsToward(t, dst, superp, ports2)
				for sent := 0; sent < n; sent += batchSize {
					for i := range flows {
						for _, f := range []*flow{flows[i], flows2[i]} {
							if err := f.send(batchSize); err != nil {
								t.Fatal(err)
							}
						}
					}
				}
				var got, got2 arrivals
				netnstest.Eventually(t, time.Minute, func() error {
					got, got2 = b.arrivals().since(first), second().since(beforeSecond)
					if a, s := got.total()+got2.total(), sentBy(flows)+sentBy(flows2); a+backlogDrops(t)-b.drops < s {
						return fmt.Errorf("%d packets sent, %d arrived", s, a)
					}
					return nil
				})
				for i := range flows {
					flows[i].socket.Close()
					flows2[i].socket.Close()
				}
				strays1, _ = strays(got, ports, places, all)
				strays2, _ = strays(got2, ports2, places, all)
				t.Logf("%d and %d packets arrived, %d and %d elsewhere", got.total(), got2.total(), strays1, strays2)
				return strays1, strays2
			}
			for _, weights := range draftWeights[:2] {
				c.weigh(weights...)
				b.atRest()
				if one, two := exchange(others, 512); one+two != 0 {
					t.Errorf("%s: %d and %d strays", ratio(weights), one, two)
				}
			}
			c.weigh(draftWeights[0]...)
			b.atRest()
			if _, two := exchange(ports, 64); (two > 0) != (driver == "linux") {
				t.Errorf("with the ports of the other service %d packets arrive elsewhere", two)
			}
		})
	}
}
