package probe

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/topo"
)

// row returns a daemon's row for a destination; without weights, a removed row.
func row(inEffect bool, weights ...uint32) *farev1.DestinationWeights {
	d := &farev1.DestinationWeights{Reachable: len(weights) > 0 && slices.Max(weights) > 0}
	for i, w := range weights {
		d.Planes = append(d.Planes, &farev1.PlaneWeight{Plane: fmt.Sprintf("p%d", i), Weight: w, InEffect: inEffect})
	}
	return d
}

// TestFollower verifies that only a change of weights counts as a change, that the first report of a state in effect
// counts, and that an unknown destination is behind.
func TestFollower(t *testing.T) {
	dst := topo.Way{Source: 0, Destination: netip.MustParseAddr("10.255.0.2")}
	at := func(n int) time.Time {
		if n == 0 {
			return time.Time{}
		}
		return time.Unix(int64(n), 0)
	}
	fabric, err := topo.New(topo.Spec{Planes: 2, Servers: 2})
	if err != nil {
		t.Fatal(err)
	}
	w := NewFollower(fabric, 0)
	behind := func(want []uint32, inEffect bool) string {
		h := w.Followed(dst)
		return judge.CheckFollowed(h.Weights, h.InEffect, want, inEffect)
	}
	if got := behind([]uint32{1, 1}, false); got != `WatchWeights reports the weights "", want 1:1` {
		t.Error(got)
	}
	for i, step := range []struct {
		row                         *farev1.DestinationWeights
		adopt                       bool
		changed, effective, adopted int // index of the event, from 1; 0: never
		want                        []uint32
		behind                      string
	}{
		{row(false, 1, 1), true, 1, 0, 1, []uint32{1, 1}, "WatchWeights does not report the weights 1:1 as in effect"},
		{row(true, 1, 1), false, 1, 2, 1, []uint32{1, 1}, ""},
		{row(true, 1, 1), true, 1, 2, 3, []uint32{1, 1}, ""}, // other slots, the same weights
		{row(false, 2, 1), true, 4, 0, 4, []uint32{2, 1}, "WatchWeights does not report the weights 2:1 as in effect"},
		{row(true, 2, 1), false, 4, 5, 4, []uint32{1, 2}, `WatchWeights reports the weights "2:1", want 1:2`},
		{row(true, 0, 0), false, 6, 0, 4, []uint32{0, 0}, ""}, // unreachable: no weights to be in effect
		{row(true, 0, 0), false, 6, 0, 4, []uint32{1, 1}, `WatchWeights reports the weights "0:0", want 1:1`},
		{row(true, 1, 1), false, 8, 8, 4, []uint32{0, 0}, `WatchWeights reports the weights "1:1", want 0:0`},
		{row(true), false, 9, 0, 4, []uint32{0, 0}, ""}, // removed
	} {
		adopted := time.Time{}
		if step.adopt {
			adopted = at(i + 1)
		}
		w.note(dst, step.row, at(i+1), adopted)
		if h := w.Followed(dst); !h.Changed.Equal(at(step.changed)) || !h.Effective.Equal(at(step.effective)) || !h.Adopted.Equal(at(step.adopted)) {
			t.Errorf("message %d: changed at %v, in effect at %v, adopted at %v", i+1, h.Changed, h.Effective, h.Adopted)
		}
		if got := behind(step.want, true); got != step.behind {
			t.Errorf("message %d: %q, want %q", i+1, got, step.behind)
		}
	}
	w.forget()
	if h := w.Followed(dst); h.Weights != nil {
		t.Errorf("after it was forgotten: %+v", h)
	}
}

// TestSlotsTakeTurns verifies that slots send in proportion to their shares, evenly at any moment.
func TestSlotsTakeTurns(t *testing.T) {
	shares := []int64{285714286, 285714286, 142857142, 285714286}
	o := outlet{}
	for _, s := range shares {
		o.slots = append(o.slots, flow{share: s})
	}
	counts := make([]int, len(shares))
	for n := 1; n <= 7000; n++ {
		before := make([]int64, len(shares))
		for i := range o.slots {
			before[i] = o.slots[i].credit + o.slots[i].share
		}
		o.next()
		for i := range o.slots {
			if o.slots[i].credit < before[i] {
				counts[i]++
			}
			if want := float64(n) * float64(shares[i]) / 1e9; float64(counts[i]) < want-1.001 || float64(counts[i]) > want+1.001 {
				t.Fatalf("after %d packets slot %d has sent %d, its share is %.1f", n, i, counts[i], want)
			}
		}
	}
}

func TestReceivedPackets(t *testing.T) {
	const text = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    1000      77    0    0    0     0          0         0     1000      77    0    0    0     0       0          0
  s1.0:   14900     100    0    0    0     0          0         0    25130     217    0    0    0     0       0          0
  up0:   24500     160    0    0    0     0          0         0    25130     217    0    0    0     0       0          0
  s2.0:123456789    23    0    0    0     0          0         0    25130     217    0    0    0     0       0          0
`
	if got := receivedPackets([]byte(text), []string{"s1.0", "s2.0"}); got != 123 {
		t.Errorf("%d packets, want 123", got)
	}
}
