package guard

import (
	"sync"
	"testing"
)

// TestWaysAreIndependent runs both directions concurrently, and reads Info and
// Counters. The race detector finds the errors.
func TestWaysAreIndependent(t *testing.T) {
	c := testConfig()
	g := establish(t, c, newLeaf)
	in := updateOf(nil, octetsOf(good4, lb400), octetsOf(host4, other4))
	back := updateOf(nil, octetsOf(origin, pathOurs, hopAny), octetsOf(host4))
	const rounds = 2000
	var wg sync.WaitGroup
	wg.Go(func() {
		for range rounds {
			if _, err := g.FromPeer(in, nil); err != nil {
				t.Error(err)
				return
			}
		}
	})
	wg.Go(func() {
		for range rounds {
			if _, err := g.FromSpeaker(back, nil); err != nil {
				t.Error(err)
				return
			}
		}
	})
	wg.Go(func() {
		for range rounds {
			if info, ok := g.Info(); !ok || info.PeerAS != 65001 {
				t.Errorf("info %+v, %v", info, ok)
				return
			}
			c.Counters.Received(Inbound, Messages)
		}
	})
	wg.Wait()
	checkSums(t, c.Counters)
	if p, q := c.Counters.Passed(Inbound, Routes), c.Counters.Passed(Outbound, Routes); p != 2*rounds || q != rounds {
		t.Errorf("passed %d and %d routes, want %d and %d", p, q, 2*rounds, rounds)
	}
}

// TestLabels fixes the labels, which are keys of metrics and status.
func TestLabels(t *testing.T) {
	got := []string{Inbound.String(), Outbound.String(), IPv4Unicast.String(), IPv6Unicast.String(), Family(0).String(),
		Messages.String(), Routes.String(), Withdrawals.String(), Attributes.String(), Communities.String(), Capabilities.String()}
	want := []string{"in", "out", "ipv4", "ipv6", "unknown",
		"messages", "routes", "withdrawals", "attributes", "extended_communities", "capabilities"}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("label %q, want %q", got[i], want[i])
		}
	}
}

// TestDefaults checks that a guard without the caller's counters or limit has its own.
func TestDefaults(t *testing.T) {
	g := New(Config{LocalAS: 65100})
	if g.counters == nil || g.config.MaxPrefixes != DefaultMaxPrefixes || g.families != FamilySet(IPv4Unicast) {
		t.Errorf("counters %v, limit %d, families %v", g.counters, g.config.MaxPrefixes, g.families)
	}
	if _, err := g.FromPeer(append(leafOpen(), keepalive...), nil); err != nil {
		t.Fatal(err)
	}
}
