package superp_test

import (
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

// overSockets returns two hosts with SUPERp on loopback sockets. Planes do not fail there: the test covers the code
// between core and sockets.
func overSockets(net3 byte, cfg superp.Config) rdmatest.Bed {
	c := rdmatest.RealConfig{Planes: 4}
	for i := range c.Addresses {
		c.Transports[i] = superp.New(cfg)
		c.Addresses[i] = netip.AddrFrom4([4]byte{127, 88, net3, byte(1 + i)})
	}
	return rdmatest.Real(c)
}

// TestModelOverSockets runs the model over real sockets, in real time.
func TestModelOverSockets(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		r := rdmatest.ChannelsOn(t, overSockets(10, superp.Config{}), rdmatest.Options{Ordered: ordered, Ops: 5000 / scale, NotReady: 0.02,
			Settle: 50 * time.Millisecond})
		t.Logf("%d operations in %v: %v", r.Ops, r.Time, r.Counters[0])
	}
}

// BenchmarkSockets measures goodput between two endpoints of one process over the loopback device: writes of 64 KiB, 16
// at a time.
func BenchmarkSockets(b *testing.B) {
	for _, payload := range []int{1024, 4096} {
		for _, ordered := range []bool{false, true} {
			name := map[int]string{1024: "payload=1024", 4096: "payload=4096"}[payload] + map[bool]string{true: "/ordered", false: "/unordered"}[ordered]
			b.Run(name, func(b *testing.B) { goodput(b, payload, ordered) })
		}
	}
}

func goodput(b *testing.B, payload int, ordered bool) {
	begin := time.Now()
	done := make(chan error, 64)
	var hosts [2]*rdmatest.Host
	var chans [2]rdma.Channel
	memory := make([]byte, 1<<20)
	for i := range hosts {
		transport := superp.New(superp.Config{Payload: payload})
		var err error
		hosts[i], err = rdmatest.NewHost(netip.AddrFrom4([4]byte{127, 88, 11, byte(1 + i)}), transport,
			func() time.Duration { return time.Since(begin) + time.Second }, new(sync.Mutex), rdmatest.Hooks{
				Complete: func(_ *rdma.Op, err error) { done <- err }})
		if err != nil {
			b.Fatal(err)
		}
		defer transport.Stop()
		hosts[i].Register(1, 0, memory, rdma.RemoteWrite)
	}
	for i := range hosts {
		hosts[i].Do(func() {
			var err error
			if chans[i], err = hosts[i].Channel(rdma.ChannelConfig{Remote: hosts[1-i].Address(), Ordered: ordered}); err != nil {
				b.Fatal(err)
			}
		})
	}
	for i := range hosts {
		hosts[i].Do(func() {
			if err := chans[i].Connect(chans[1-i].Local(), eightPaths()); err != nil {
				b.Fatal(err)
			}
		})
	}
	data := make([]byte, 64<<10)
	post := func() {
		hosts[0].Do(func() {
			if !hosts[0].Post(chans[0], &rdma.Op{Kind: rdma.OpWrite, Key: 1, Local: data}) {
				b.Error("full")
			}
		})
	}
	b.SetBytes(int64(len(data)))
	flying := 0
	for b.Loop() {
		if flying == 16 {
			if err := <-done; err != nil {
				b.Fatal(err)
			}
			flying--
		}
		post()
		flying++
	}
	for ; flying > 0; flying-- {
		<-done
	}
}
