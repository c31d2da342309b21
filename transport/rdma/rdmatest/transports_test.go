package rdmatest_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/wecmp"
)

// seeded returns constructors whose cores are deterministic by a seed.
type seeded func(seed uint64) rdmatest.Constructor

type condition struct {
	name string
	o    rdmatest.Options
}

// conditions are the networks for channels; corruption only where the protocol has its own checksum.
var conditions = []condition{
	{"quiet", rdmatest.Options{}},
	{"loss 1%", rdmatest.Options{Loss: 0.01}},
	{"loss 10%", rdmatest.Options{Loss: 0.1, MaxSize: 16 << 10}},
	{"loss 30%", rdmatest.Options{Loss: 0.3, MaxSize: 4 << 10}},
	{"duplicates", rdmatest.Options{Duplicate: 0.2}},
	{"reordering", rdmatest.Options{Reorder: 0.1, MaxSize: 16 << 10}},
	{"not ready", rdmatest.Options{NotReady: 0.3, Loss: 0.01}},
	{"flaps", rdmatest.Options{Flap: 300 * time.Microsecond, Notice: 500 * time.Microsecond}},
	{"slow notice", rdmatest.Options{Flap: 300 * time.Microsecond}},
	{"long outages", rdmatest.Options{Flap: 300 * time.Microsecond, Outage: 25 * time.Second, Idle: 5 * time.Second}},
	{"everything", rdmatest.Options{Loss: 0.05, Duplicate: 0.05, Reorder: 0.05, NotReady: 0.05, Flap: time.Millisecond,
		MaxSize: 16 << 10}},
	{"one at a time", rdmatest.Options{Window: 1, Loss: 0.05}},
	{"congestion", rdmatest.Options{Rate: 1e9, Queue: 64 << 10, Channels: 4, Window: 64}},
	{"IPv6", rdmatest.Options{IPv6: true, Loss: 0.02}},
	{"many channels", rdmatest.Options{Channels: 16, Loss: 0.02, MaxSize: 8 << 10}},
}

// channels runs every condition with a number of seeds.
func channels(t *testing.T, construct seeded, conditions []condition, seeds int) {
	for _, c := range conditions {
		for _, ordered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/ordered=%v", c.name, ordered), func(t *testing.T) {
				flaps := 0
				for seed := range uint64(max(1, seeds/effort)) {
					o := c.o
					o.Seed, o.Ordered, o.Ops = seed, ordered, max(1000, 4000/effort)
					flaps += rdmatest.Channels(t, construct(seed), o).Flaps
				}
				if c.o.Flap > 0 && flaps == 0 {
					t.Errorf("%d flaps in all", flaps)
				}
			})
		}
	}
}

// sets posts a total number of work requests, divided by effort, under every ordering, with loss, duplicates,
// reordering, flaps and changes of weights.
func sets(t *testing.T, construct seeded, total int) {
	total /= effort
	var runs []rdmatest.SetOptions
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
		for _, share := range []struct {
			loss    float64
			percent int // percent of the work requests of an ordering
			size    int
		}{{0, 40, 32 << 10}, {0.01, 40, 16 << 10}, {0.1, 15, 8 << 10}, {0.3, 5, 4 << 10}} {
			o := rdmatest.SetOptions{Ordering: ordering}
			o.Seed = uint64(len(runs))
			o.Ops, o.Loss, o.MaxSize = max(500, total*share.percent/300), share.loss, share.size
			o.Window, o.NotReady, o.Flap = 48, 0.02, time.Millisecond
			o.Notice = 2 * time.Millisecond
			if o.Loss > 0 {
				o.Duplicate, o.Reorder = 0.01, 0.01
			}
			runs = append(runs, o)
		}
	}
	for _, o := range runs {
		t.Run(o.String(), func(t *testing.T) {
			begin := time.Now()
			r := rdmatest.Sets(t, construct(o.Seed), o)
			t.Logf("%d work requests in %v (virtual %v), %d flaps, %d datagrams sent, %d lost", r.Ops,
				time.Since(begin).Round(time.Millisecond), r.Time.Round(time.Millisecond), r.Flaps, r.Net.Sent, r.Net.Lost)
			if r.Ops != uint64(o.Ops) || r.Flaps < o.Ops/5000 || r.Flaps == 0 {
				t.Errorf("%d work requests, %d flaps", r.Ops, r.Flaps)
			}
		})
	}
}

// shares posts in one direction only: each slot has to carry its share.
func shares(t *testing.T, construct seeded, seeds int) {
	for seed := range uint64(max(1, seeds/effort)) {
		o := rdmatest.SetOptions{Options: rdmatest.Options{Seed: seed, Ops: 3000, Window: 48, Kinds: []rdma.OpKind{rdma.OpWrite}}, Slots: 5}
		rdmatest.Sets(t, construct(seed), o)
	}
}
