package rdmatest_test

import (
	"net/netip"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/roce"
	"github.com/fared/fared/transport/superp"
)

// TestSockets runs the model in real time, over sockets on loopback addresses. Channels change their source ports,
// although no plane loses datagrams.
func TestSockets(t *testing.T) {
	for name, construct := range map[string]func() rdma.Transport{
		"RoCE":   func() rdma.Transport { return roce.New(roce.Config{Port: 24791}) },
		"SUPERp": func() rdma.Transport { return superp.New(superp.Config{Port: 24444}) },
	} {
		t.Run(name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			defer netnstest.Eventually(t, time.Minute, func() error { return goleak.Find(before) })
			for _, ordered := range []bool{false, true} {
				bed := rdmatest.Real(rdmatest.RealConfig{
					Addresses:  [2]netip.Addr{netip.MustParseAddr("127.0.47.1"), netip.MustParseAddr("127.0.47.2")},
					Transports: [2]rdma.Transport{construct(), construct()},
					Planes:     4,
				})
				r := rdmatest.ChannelsOn(t, bed, rdmatest.Options{Ops: max(500, 5000/effort), Ordered: ordered, NotReady: 0.05,
					Flap: 5 * time.Millisecond, Settle: 200 * time.Millisecond})
				t.Logf("%d operations in %v, %d flaps", r.Ops, r.Time.Round(time.Millisecond), r.Flaps)
			}
		})
	}
}
