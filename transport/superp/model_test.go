package superp_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

// with returns a constructor of cores with a configuration.
func with(cfg superp.Config) rdmatest.Constructor {
	return func(out wire.Out) rdmatest.Core {
		cfg := cfg
		cfg.FirstCID = 1
		return superp.NewCore(cfg, out)
	}
}

// TestModel runs operations of every kind over networks that lose, duplicate and reorder packets, and over planes that
// go down and up. Each operation completes once, none early, and memory ends up equal to the model's.
func TestModel(t *testing.T) {
	small := superp.Config{Payload: 256, Parameters: superp.Parameters{Window: 16, ReceiveWindow: 16, Transactions: 4, PacketsPerTransaction: 300}}
	narrow := superp.Config{Parameters: superp.Parameters{Window: 1024, ReceiveWindow: 1, Transactions: 1}}
	// With SUNH the last packet of a transaction and short WRITEs are cut differently; the simulated network carries
	// them as datagrams.
	short := superp.Config{Payload: 64, SUNH: superp.SUNHConfig{Subnet: netip.MustParsePrefix("10.255.0.0/16"), Device: "any"}}
	for _, x := range []struct {
		name string
		cfg  superp.Config
		o    rdmatest.Options
	}{
		{"quiet", superp.Config{}, rdmatest.Options{}},
		{"loss 1 %", superp.Config{}, rdmatest.Options{Loss: 0.01}},
		{"loss 10 %", superp.Config{}, rdmatest.Options{Loss: 0.1, Duplicate: 0.05}},
		{"loss 30 %", superp.Config{}, rdmatest.Options{Loss: 0.3, Duplicate: 0.05, Reorder: 0.1}},
		{"reordered", superp.Config{}, rdmatest.Options{Reorder: 0.3, Duplicate: 0.1}},
		{"not ready", superp.Config{}, rdmatest.Options{NotReady: 0.5, Loss: 0.02}},
		{"flapping", superp.Config{}, rdmatest.Options{Flap: 10 * time.Millisecond, Loss: 0.01, NotReady: 0.05}},
		{"small windows", small, rdmatest.Options{Loss: 0.05, Duplicate: 0.05, Reorder: 0.05, NotReady: 0.1}},
		{"cut for SUNH", short, rdmatest.Options{Loss: 0.05, Duplicate: 0.05, Reorder: 0.05, MaxSize: 300}},
		{"receive window of one", narrow, rdmatest.Options{Loss: 0.02, MaxSize: 4096}},
		{"psns wrap", superp.Config{FirstPSN: ^uint32(0) - 200}, rdmatest.Options{Loss: 0.05, Duplicate: 0.05, Reorder: 0.1}},
	} {
		for _, ordered := range []bool{false, true} {
			name := x.name + ", unordered"
			if ordered {
				name = x.name + ", ordered"
			}
			t.Run(name, func(t *testing.T) {
				for seed := range uint64(seeds) {
					o := x.o
					o.Seed, o.Ordered, o.Ops = seed, ordered, 2000/scale
					r := rdmatest.Channels(t, with(x.cfg), o)
					if seed == 0 {
						t.Logf("%d operations in %v: %v", r.Ops, r.Time, r.Counters[0])
					}
				}
			})
		}
	}
}

// TestKinds runs each kind of operation alone, so that operations share packets.
func TestKinds(t *testing.T) {
	for kind := rdma.OpSend; kind <= rdma.OpFetchAdd; kind++ {
		for _, size := range []int{8, 64, 5000} {
			rdmatest.Channels(t, with(superp.Config{}), rdmatest.Options{Seed: 7, Ops: 1000 / scale, Window: 64, MaxSize: size,
				Kinds: []rdma.OpKind{kind}, Loss: 0.05})
		}
	}
}
