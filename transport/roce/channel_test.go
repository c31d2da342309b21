package roce

import (
	"testing"
	"time"

	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

func constructor(cfg Config) rdmatest.Constructor {
	return func(out wire.Out) rdmatest.Core { return NewCore(cfg, out) }
}

// everyKind posts mostly SENDs and WRITEs, like the default, and as many READs.
var everyKind = []rdma.OpKind{rdma.OpWrite, rdma.OpWrite, rdma.OpSend, rdma.OpSend, rdma.OpRead, rdma.OpRead, rdma.OpCompareSwap, rdma.OpFetchAdd}

func TestChannels(t *testing.T) {
	for _, test := range []struct {
		name    string
		cfg     Config
		options rdmatest.Options
		happens []string // counters that must not be zero
	}{
		{name: "clean", happens: []string{"acks_sent"}},
		{name: "loss", options: rdmatest.Options{Loss: 0.02}, happens: []string{"naks_received", "timeouts", "retransmitted", "read_responses_again"}},
		{name: "much loss", options: rdmatest.Options{Loss: 0.2, Ops: 300, MaxSize: 8 << 10}},
		{name: "duplicates", options: rdmatest.Options{Duplicate: 0.3}, happens: []string{"duplicates"}},
		{name: "reordering", options: rdmatest.Options{Reorder: 0.05}, happens: []string{"out_of_sequence", "retransmitted"}},
		{name: "corruption", options: rdmatest.Options{Corrupt: 0.03}, happens: []string{"bad_icrc"}},
		{name: "everything", options: rdmatest.Options{Loss: 0.01, Duplicate: 0.02, Reorder: 0.01, Corrupt: 0.01, NotReady: 0.1,
			Flap: 30 * time.Millisecond, Channels: 4}},
		{name: "not ready", options: rdmatest.Options{NotReady: 0.5}, happens: []string{"rnr_sent", "rnr_received"}},
		{name: "planes go", options: rdmatest.Options{Flap: 100 * time.Microsecond, Notice: 100 * time.Microsecond, Ops: 5000, Channels: 8},
			happens: []string{"retransmitted", "duplicates"}},
		{name: "reads", options: rdmatest.Options{Kinds: everyKind, Loss: 0.03, Reorder: 0.01}},
		{name: "atomics", options: rdmatest.Options{Kinds: []rdma.OpKind{rdma.OpFetchAdd, rdma.OpCompareSwap}, Loss: 0.1, Duplicate: 0.2, Window: 64}},
		{name: "one READ at a time", cfg: Config{MaxReadAtomic: 1}, options: rdmatest.Options{Kinds: everyKind, Loss: 0.02}},
		{name: "small window", cfg: Config{Window: 64 << 10, Depth: 4}, options: rdmatest.Options{Loss: 0.02}},
		{name: "long heads", cfg: Config{HeadSize: rdma.MaxHead}, options: rdmatest.Options{Head: rdma.MaxHead, Loss: 0.02}},
		{name: "MTU 256", cfg: Config{MTU: 256}, options: rdmatest.Options{Loss: 0.005, Ops: 500}},
		{name: "MTU 4096", cfg: Config{MTU: 4096}, options: rdmatest.Options{Loss: 0.02}},
	} {
		t.Run(test.name, func(t *testing.T) {
			happened := make(map[string]uint64)
			for seed := range uint64(2) {
				o := test.options
				o.Seed = seed
				r := rdmatest.Channels(t, constructor(test.cfg), o)
				if r.Net.Changed != 0 {
					t.Errorf("%d payloads changed before the flush", r.Net.Changed)
				}
				for _, name := range test.happens {
					happened[name] += r.Counters[0][name] + r.Counters[1][name]
				}
			}
			for _, name := range test.happens {
				if happened[name] == 0 {
					t.Errorf("%s: never", name)
				}
			}
			t.Log(happened)
		})
	}
}
