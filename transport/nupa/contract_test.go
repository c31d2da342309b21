package nupa_test

import (
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// TestContract runs the common model: operations of all kinds in both directions, planes that are parked and return,
// receivers not ready.
func TestContract(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, tc := range []struct {
		name   string
		o      rdmatest.Options
		shared bool
	}{
		{"quiet", rdmatest.Options{}, false},
		{"not ready", rdmatest.Options{NotReady: 0.2}, false},
		{"parked", rdmatest.Options{Flap: 2 * time.Millisecond, Notice: time.Millisecond}, false},
		{"parked and not ready", rdmatest.Options{Flap: 2 * time.Millisecond, Notice: time.Millisecond, NotReady: 0.1}, false},
		{"between kernels, parked and not ready", rdmatest.Options{Flap: 2 * time.Millisecond, Notice: time.Millisecond, NotReady: 0.1}, true},
		{"many channels", rdmatest.Options{Channels: 8, Window: 200}, false},
		{"apart", rdmatest.Options{Apart: true}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "plane")
			o := tc.o
			o.Ops, o.Settle = gate.Count(t, gate.Models, 1500, 4000), 10*time.Millisecond
			bed := rdmatest.Real(rdmatest.RealConfig{
				Addresses: [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")},
				Transports: [2]rdma.Transport{
					nupa.New(nupa.Config{File: path, Size: 64 << 20, Channels: 20, Shared: tc.shared}),
					nupa.New(nupa.Config{File: path, Shared: tc.shared}),
				},
			})
			result := rdmatest.ChannelsOn(t, bed, o)
			t.Logf("%+v", result)
		})
	}
}
