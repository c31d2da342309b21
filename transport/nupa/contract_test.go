package nupa_test

import (
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// TestContract runs the common model: operations of all kinds in both directions, planes that are parked and return, receivers not ready.
func TestContract(t *testing.T) {
	defer goleak.VerifyNone(t)
	for _, tc := range []struct {
		name string
		o    rdmatest.Options
	}{
		{"quiet", rdmatest.Options{}},
		{"not ready", rdmatest.Options{NotReady: 0.2}},
		{"parked", rdmatest.Options{Flap: 2 * time.Millisecond, Notice: time.Millisecond}},
		{"parked and not ready", rdmatest.Options{Flap: 2 * time.Millisecond, Notice: time.Millisecond, NotReady: 0.1}},
		{"many channels", rdmatest.Options{Channels: 8, Window: 200}},
		{"apart", rdmatest.Options{Apart: true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "plane")
			o := tc.o
			o.Ops, o.Settle = 4000, 10*time.Millisecond
			bed := rdmatest.Real(rdmatest.RealConfig{
				Addresses: [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")},
				Transports: [2]rdma.Transport{
					nupa.New(nupa.Config{File: path, Size: 64 << 20, Channels: 20}),
					nupa.New(nupa.Config{File: path}),
				},
			})
			result := rdmatest.ChannelsOn(t, bed, o)
			t.Logf("%+v", result)
		})
	}
}
