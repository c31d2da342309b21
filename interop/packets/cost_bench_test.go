package packets

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/testbed"
	"github.com/fared/fared/wecmp"
)

// BenchmarkPacket compares the sender's cost of a packet toward a steered destination with its cost over a plain route,
// in one run: trials of both alternate, and the ratio is that of each pair. The sockets are not connected, so every
// packet needs a route lookup; the payload is 1 KiB.
func BenchmarkPacket(b *testing.B) {
	for _, driver := range drivers {
		for _, f := range families[:2] {
			b.Run(driver+" "+f.name, func(b *testing.B) { compare(b, driver, f) })
		}
	}
}

func compare(b *testing.B, driver string, f family) {
	bed := newBed(b, driver, f)
	bed.start()
	bed.Resolve()
	c := bed.connect(farev1.Mode_MODE_PER_FLOW, wecmp.Reweight, 1000)
	c.weigh(draftWeights[0]...)
	dst := c.dst[0]
	plain, hop := netip.MustParsePrefix("10.254.0.1/32"), "172.16.0.1"
	if !f.source.Addr().Is4() {
		plain, hop = netip.MustParsePrefix("fd00:254::1/128"), "fd00:16:0:0::2"
	}
	bed.Server.IP("route", "add", plain.String(), "via", hop, "dev", testbed.Device(0, 0))

	// A slot of p0.0, so that both leave through the same device.
	slot := slices.Index(c.view().Places(), wecmp.Place{})
	port := c.ports(dst)[slot]
	open := func(to netip.Prefix, port uint16) *flow {
		return bed.flows(b, to, []uint16{1025, port})[1] // the second is not connected
	}
	steered := open(dst, port)
	route := bed.flows(b, plain, []uint16{1026, 1027})[1]
	for _, x := range []*flow{steered, route} {
		for i := range x.batch {
			x.batch[i].Buffers = [][]byte{make([]byte, 1024)}
		}
	}
	const n = 10_000
	trial := func(x *flow) time.Duration {
		begin := time.Now()
		if err := x.send(n); err != nil {
			b.Fatal(err)
		}
		return time.Since(begin)
	}
	trial(steered)
	trial(route)
	var ratios, costs []float64
	b.ResetTimer()
	for i := 0; b.Loop() || i < 40; i++ {
		var p, s time.Duration
		if i%2 == 0 {
			p, s = trial(route), trial(steered)
		} else {
			s, p = trial(steered), trial(route)
		}
		ratios = append(ratios, float64(s)/float64(p))
		costs = append(costs, float64(s.Nanoseconds())/n)
	}
	slices.Sort(ratios)
	slices.Sort(costs)
	b.ReportMetric(ratios[len(ratios)/2], "ratio-p50")
	b.ReportMetric(ratios[len(ratios)*99/100], "ratio-p99")
	b.ReportMetric(costs[len(costs)/2], "ns/packet")
	b.ReportMetric(float64(len(ratios)), "trials")
	b.ReportMetric(0, "ns/op")
	if got := bed.arrivals(); got[0][0][port] == 0 {
		b.Fatal(fmt.Errorf("nothing of port %d arrived at p0.0", port))
	}
}
