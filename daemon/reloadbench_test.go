package daemon

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/fare"
)

// BenchmarkReload measures a reload until it is decided, when its call is answered, and until it is declared, with
// 2,048 destinations in 3 planes of 2 sub-ports and a data plane in this process: one that gives one of two GPUs a
// sub-port of its own, so that all source groups are others, and one that takes it back.
func BenchmarkReload(b *testing.B) {
	const n = 2048
	s := shape{Planes: 3, SubPorts: 2, Loopbacks: []string{"10.255.0.1/32, 10.255.0.2/32"}}
	whole := s.Config(b)
	s.Serves = func(i int) string {
		return [...]string{"10.255.0.1/32, 10.255.0.2/32", "10.255.0.2/32", "10.255.0.1/32"}[min(i, 2)]
	}
	owned := s.Config(b)
	l := idle(b, whole.Text())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = l.d.client.Run(ctx) }()
	b.Cleanup(func() { cancel(); <-ended })
	turn := func() { l.wokenAt = time.Now(); l.turn() }
	attrs := &fare.Attributes{ASPath: []uint32{65100, 65002}, Communities: []fare.Community{fare.Codec{}.Encode(100e9, netip.Addr{})}}
	for i := range s.Planes * s.SubPorts {
		l.link(&LinkEvent{SubPort: i, Up: true, Speed: 400e9})
		l.bgp(speaker.SessionUp{Session: i, Generation: 1, Node: leafNode(i / s.SubPorts), PeerAS: s.PeerAS(i), Families: speaker.FamilySet(3)})
		for d := range n {
			l.bgp(oneRoute(i, 1, destination(d), attrs))
		}
		l.bgp(speaker.EndOfRIB{Session: i, Generation: 1, Family: speaker.IPv4})
	}
	settled := func(groups int) {
		b.Helper()
		eventually(b, "weights in effect", func() bool {
			turn()
			s := l.d.client.Status()
			return l.dpReady && s.Removals && s.Queued+s.InFlight == 0 && l.shown.counts[effectPending] == 0 && l.shown.destinations.Len() == n*groups
		})
	}
	l.deadline = time.Now().Add(time.Hour) // convergence releases removals
	settled(1)
	var decided, took []time.Duration
	for b.Loop() {
		for i, next := range []*config.Config{owned, whole} {
			began := time.Now()
			l.wokenAt = began
			rest := l.reload(next)
			decided = append(decided, time.Since(began))
			rest()
			took = append(took, time.Since(began))
			settled(2 - i)
		}
	}
	report(b, "decided-", decided)
	report(b, "", took)
}
