package packets

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/wecmp"
)

// TestAgentKilled repeatedly kills the agent under full traffic and restarts it. The control plane's stream breaks with
// it and reconnects, or breaks alone. Every packet must arrive at its slot's sub-port, and the agent must know its
// acknowledged state.
func TestAgentKilled(t *testing.T) {
	gate.Slow(t, gate.Packets, "four kills under traffic, for each driver and family")
	each(t, func(t *testing.T, driver string, f family) {
		b := newBed(t, driver, f)
		b.start()
		b.Resolve()
		c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 50)
		c.weigh(2, 2, 1, 2)
		dst := c.dst[0]
		ports, places := c.ports(dst), c.view().Places()
		flows := b.flows(t, dst, ports)
		promised := testbed.Snapshot(t, b.conn)
		before := b.arrivals()
		bg := send(t.Context(), flows)
		for round := range 4 {
			busy(t, flows, 500)
			if round%2 == 1 {
				c.Cancel() // the control plane ends first
				busy(t, flows, 200)
			}
			b.agent.Kill()
			busy(t, flows, 500)
			b.start()
			busy(t, flows, 500)
			if got := testbed.Snapshot(t, b.conn); !proto.Equal(got, promised) {
				t.Errorf("round %d: after the restart the agent has %d groups and %d destinations, other than it had: %v", round, len(got.Vectors), len(got.Destinations), got.Vectors)
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

// TestJournalLost kills the agent and removes or corrupts its journal before the restart. With bpf it must recover from
// its maps: it has its acknowledged state after the control plane's Hello, and every packet arrives at its slot's
// sub-port.
func TestJournalLost(t *testing.T) {
	gate.Slow(t, gate.Packets, "two lost journals under traffic, for each family")
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			b := newBed(t, "bpf", f)
			b.start()
			b.Resolve()
			c := b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 50)
			c.weigh(2, 2, 1, 2)
			dst := c.dst[0]
			ports, places := c.ports(dst), c.view().Places()
			flows := b.flows(t, dst, ports)
			promised := testbed.Snapshot(t, b.conn)
			before := b.arrivals()
			bg := send(t.Context(), flows)
			path := filepath.Join(b.dir, "dataplane.journal")
			for _, spoil := range []func() error{
				func() error { return os.Remove(path) },
				func() error { return os.WriteFile(path, bytes.Repeat([]byte("garbled "), 100), 0o600) },
			} {
				busy(t, flows, 500)
				b.agent.Kill()
				if err := spoil(); err != nil {
					t.Fatal(err)
				}
				b.start()
				busy(t, flows, 200)
				c = b.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 50)
				if got := testbed.Snapshot(t, b.conn); !proto.Equal(got, promised) {
					t.Errorf("after Hello the agent has %d groups and %d destinations, other than it had: %v", len(got.Vectors), len(got.Destinations), got.Vectors)
				}
				busy(t, flows, 200)
				c.weigh(2, 2, 1, 2)
			}
			bg.stop(t)
			got := b.settled(before, sentBy(flows))
			if n, where := strays(got, ports, places, all); n > 0 {
				t.Errorf("%d strays of %d packets, the last: %s", n, sentBy(flows), where)
			}
		})
	}
}
