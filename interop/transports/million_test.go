package transports

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/tcpqp"
)

// TestMillion compares the transports without datagrams with the model, in real time, while slots are parked, lent and
// returned (rdmatest.Sets does so in virtual time for RoCEv2 and SUPERp).
func TestMillion(t *testing.T) {
	gate.WithoutRaceDetector(t, "has millions of packets")
	for name, construct := range map[string]func(file string) rdma.Transport{
		"nupa": func(file string) rdma.Transport {
			return nupa.New(nupa.Config{File: file, Size: 64 << 20, Channels: 20})
		},
		"tcp": func(string) rdma.Transport { return tcpqp.New(tcpqp.Config{Port: 24793}) },
	} {
		for _, flap := range []time.Duration{0, 3 * time.Millisecond} {
			t.Run(fmt.Sprintf("%s/flap=%v", name, flap), func(t *testing.T) {
				file := filepath.Join(t.TempDir(), "plane")
				bed := rdmatest.Real(rdmatest.RealConfig{
					Addresses:  [2]netip.Addr{netip.MustParseAddr("127.0.53.1"), netip.MustParseAddr("127.0.53.2")},
					Transports: [2]rdma.Transport{construct(file), construct(file)},
					Planes:     4,
				})
				r := rdmatest.ChannelsOn(t, bed, rdmatest.Options{Seed: 1, Ops: gate.Count(t, gate.Models, 20_000, 1_000_000) / 2, Channels: 4, MaxSize: 16 << 10, Apart: true,
					NotReady: 0.01, Flap: flap, Notice: time.Millisecond, Settle: 50 * time.Millisecond})
				if flap > 0 && r.Flaps == 0 {
					t.Error("nothing flapped")
				}
				t.Logf("%d operations in %v, %d flaps", r.Ops, r.Time.Round(time.Millisecond), r.Flaps)
			})
		}
	}
}
