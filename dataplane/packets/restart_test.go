package packets

import (
	"testing"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/wecmp"
)

// TestAgentKilled: the agent is killed, again and again, under full traffic, and started again; the control plane's stream
// breaks with it and is made again, or is broken by itself. Every packet arrives, and arrives at its slot's sub-port, and
// the agent knows what it promised.
func TestAgentKilled(t *testing.T) {
	each(t, func(t *testing.T, b *bed) {
		b.start()
		b.resolve()
		c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 50)
		c.weigh(2, 2, 1, 2)
		dst := c.dst[0]
		ports, places := c.ports(dst), c.view().Places()
		flows := b.flows(t, dst, ports)
		promised := b.snapshot()
		before := b.arrivals()
		bg := send(t.Context(), flows)
		for round := range 4 {
			busy(t, flows, 500)
			if round%2 == 1 {
				c.cancel() // the control plane goes first
				busy(t, flows, 200)
			}
			b.agent.Kill()
			busy(t, flows, 500)
			b.start()
			busy(t, flows, 500)
			if got := b.snapshot(); !proto.Equal(got, promised) {
				t.Errorf("round %d: after the restart the agent has %d groups and %d destinations, other than it had: %v", round, len(got.Groups), len(got.Destinations), got.Groups)
			}
			c = b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 50)
			c.weigh(2, 2, 1, 2)
		}
		bg.stop(t)
		got := b.settled(before, sentBy(flows))
		if n, where := strays(got, ports, places, all); n > 0 {
			t.Errorf("%d strays of %d packets, the last: %s", n, sentBy(flows), where)
		}
	})
}
