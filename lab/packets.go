package lab

import (
	"context"
	"fmt"
	"math"
	"time"
)

// Traffic is what became of the packets that were sent from the end of the step before until the end of this one.
type Traffic struct {
	// Sent and Lost count packets of all servers. While cables fail, what is under way over them is lost.
	Sent uint64 `json:"packets_sent"`
	Lost uint64 `json:"packets_lost"`
	// SteadySent and SteadyLost are the part of them after every weight was in effect: nothing may be lost then.
	SteadySent uint64 `json:"steady_packets_sent"`
	SteadyLost uint64 `json:"steady_packets_lost"`
	// Measured is how many of the steady packets of the pair the leaf of each plane has seen, and Share their part of all, 0 to
	// 1, where the weight's part is Wanted.
	Measured map[string]uint64  `json:"measured_packets"`
	Share    map[string]float64 `json:"measured_share"`
	Wanted   map[string]float64 `json:"weight_share"`
}

// A step's steady time lasts until each pair has sent so many packets, within bounds.
const (
	steadyPackets = 150
	steadyAtLeast = 200 * time.Millisecond
	steadyAtMost  = 2 * time.Second
)

// watchPackets ends a step's time of change, watches packets while nothing changes, and says what should not have happened to
// them. judge is false when the weights are wrong already.
func (f *Fabric) watchPackets(ctx context.Context, t *traffic, src, dst int, judge bool) (*Traffic, []string) {
	if t.rate == 0 {
		return nil, nil
	}
	if t.ready != nil {
		t.ready(ctx)
	}
	change := t.roll()
	if judge {
		pairs := (f.Servers - 1) * f.GPUs * f.GPUs
		span := time.Duration(float64(steadyPackets*pairs) / float64(t.rate) * float64(time.Second))
		if sleep(ctx, max(steadyAtLeast, min(span, steadyAtMost))) != nil {
			return nil, nil
		}
	}
	steady := t.roll()
	t.gather(ctx, change)
	t.gather(ctx, steady)
	r := &Traffic{Sent: sum(change.sent) + sum(steady.sent), SteadySent: sum(steady.sent), SteadyLost: lost(steady),
		Measured: map[string]uint64{}, Share: map[string]float64{}, Wanted: map[string]float64{}}
	r.Lost = lost(change) + r.SteadyLost
	counts := t.counts(steady, src, dst)
	var all uint64
	for _, n := range counts {
		all += n
	}
	for p, part := range parts(f.weights(src, dst)) {
		name := f.planeName(p)
		r.Measured[name], r.Wanted[name], r.Share[name] = counts[p], part, 0
		if all > 0 {
			r.Share[name] = float64(counts[p]) / float64(all)
		}
	}
	if !judge {
		return r, nil
	}
	return r, f.judge(t, steady)
}

// lost is how many packets of a tally have not arrived.
func lost(n *tally) (lost uint64) {
	for pair := range n.sent {
		if sent, received := n.sent[pair].Load(), n.received[pair].Load(); sent > received {
			lost += sent - received
		}
	}
	return lost
}

// counts is how many packets from one server to another each plane's leaf has seen.
func (t *traffic) counts(n *tally, src, dst int) []uint64 {
	counts := make([]uint64, t.Planes)
	for p := range counts {
		for a := range t.GPUs {
			for b := range t.GPUs {
				counts[p] += n.seen[p][t.pair(src, a, dst, b)].Load()
			}
		}
	}
	return counts
}

// parts are the weights' parts of one.
func parts(weights []uint32) []float64 {
	out := make([]float64, len(weights))
	var all float64
	for _, w := range weights {
		all += float64(w)
	}
	for p, w := range weights {
		if all > 0 {
			out[p] = float64(w) / all
		}
	}
	return out
}

// judge says what packets of a time without change have suffered: none may be lost, and every plane must have carried what its
// weight says, to within what slots that take turns can differ by.
func (f *Fabric) judge(t *traffic, n *tally) []string {
	var wrong []string
	for src := range f.Servers {
		for dst, weights := range f.others(src) {
			var sent, received uint64
			for a := range f.GPUs {
				for b := range f.GPUs {
					pair := t.pair(src, a, dst, b)
					sent += n.sent[pair].Load()
					received += n.received[pair].Load()
				}
			}
			name := fmt.Sprintf("%s -> %s", f.serverName(src), f.serverName(dst))
			if received < sent {
				wrong = append(wrong, fmt.Sprintf("%s: %d of %d packets were lost while nothing changed", name, sent-received, sent))
				continue
			}
			counts := t.counts(n, src, dst)
			slack := t.senders[src].slack()
			for p, part := range parts(weights) {
				if want := part * float64(sent); math.Abs(float64(counts[p])-want) > slack {
					wrong = append(wrong, fmt.Sprintf("%s: %d of %d packets took %s, by the weights %s it is %.0f", name, counts[p], sent, f.planeName(p), Ratio(weights), want))
				}
			}
		}
	}
	return wrong
}

// slack is how many packets a plane's count may differ from its part within a span of time: two for each of its slots, as one
// may be due at either end of the span, and one for rounding.
func (o *sender) slack() float64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	most := 0
	for _, out := range o.order {
		slots := map[string]int{}
		for _, s := range out.slots {
			slots[s.plane]++
			most = max(most, slots[s.plane])
		}
	}
	return float64(2*most*o.GPUs*o.GPUs) + 1
}
