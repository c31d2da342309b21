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
	// Duplicated counts packets that arrived another time, Late those that arrived when they counted as lost already.
	Duplicated uint64 `json:"packets_duplicated"`
	Late       uint64 `json:"packets_late"`
	// LossIntervalNS is how long a pair of loopbacks lost packets, from the first action on, of the pair that did so for the
	// longest: from the sending of its first lost packet to that of the last, and one of its packets' gaps more, nanoseconds.
	// Between the two, packets of the pair that took another plane may have arrived. 0: nothing was lost. It is what RFC 6412 calls
	// a loss of connectivity period, for all that a pair sends. LossWorst names the servers of that pair: "server1 -> server2".
	LossIntervalNS int64  `json:"loss_interval_ns"`
	LossWorst      string `json:"loss_worst,omitempty"`
	// LossSpanNS is the same from the first packet of any pair to the last of any.
	LossSpanNS int64 `json:"loss_span_ns"`
	// LossPairs is how many pairs lost packets, LossPlanes how many packets were lost of those that each plane's slots sent. What
	// was sent before the first action and was lost under way is in Lost only.
	LossPairs  int               `json:"loss_pairs"`
	LossPlanes map[string]uint64 `json:"loss_planes"`

	outage outage
}

// A step's steady time lasts until each pair has sent so many packets, within bounds.
const (
	steadyPackets = 150
	steadyAtLeast = 200 * time.Millisecond
	steadyAtMost  = 2 * time.Second
)

// watched is a step whose packets are to be watched.
type watched struct {
	idle     *tally // of the time from the step before until this one's first action
	src, dst int    // the pair that is shown
	judge    bool   // false when the weights are wrong already
	most     int    // how many packets may be lost during the step; -1: not said
	changed  [][]bool
}

// watchPackets ends a step's time of change, watches packets while nothing changes, and says what should not have happened to
// them.
func (f *Fabric) watchPackets(ctx context.Context, t *traffic, w watched) (*Traffic, []string) {
	if t.rate == 0 {
		return nil, nil
	}
	if t.ready != nil {
		t.ready(ctx)
	}
	change := t.roll()
	if w.judge {
		if sleep(ctx, max(steadyAtLeast, min(steadyPackets*t.gap(), steadyAtMost))) != nil {
			return nil, nil
		}
	}
	steady := t.roll()
	all := []*tally{w.idle, change, steady}
	r := &Traffic{SteadySent: sum(steady.sent),
		Measured: map[string]uint64{}, Share: map[string]float64{}, Wanted: map[string]float64{}}
	for _, n := range all {
		t.gather(ctx, n)
		r.Sent += sum(n.sent)
		r.Lost += lost(n)
		r.Duplicated += n.duplicated.Load()
		r.Late += n.late.Load()
	}
	r.lay(t, newOutage(f.Planes, t.gap().Nanoseconds(), change, steady))
	r.SteadyLost = lost(steady)
	counts := t.counts(steady, w.src, w.dst)
	var seen uint64
	for _, n := range counts {
		seen += n
	}
	for p, part := range fractions(f.inForce(w.src, w.dst)) {
		name := f.PlaneName(p)
		r.Measured[name], r.Wanted[name], r.Share[name] = counts[p], part, 0
		if seen > 0 {
			r.Share[name] = float64(counts[p]) / float64(seen)
		}
	}
	if !w.judge {
		return r, nil
	}
	wrong := f.judge(t, steady)
	if w.most >= 0 {
		wrong = append(wrong, f.undisturbed(t, w, change, steady)...)
	}
	return r, wrong
}

// gap is the time between two packets of a pair of loopbacks while all of them can be reached.
func (t *traffic) gap() time.Duration {
	return time.Duration(float64((t.Servers-1)*t.GPUs*t.GPUs) / float64(t.rate) * float64(time.Second))
}

// lay lays an outage out.
func (r *Traffic) lay(t *traffic, o outage) {
	r.outage = o
	r.LossIntervalNS, r.LossSpanNS, r.LossPairs, r.LossPlanes = o.interval, o.span, o.pairs, map[string]uint64{}
	for p, n := range o.byPlane {
		r.LossPlanes[t.PlaneName(p)] = n
	}
	if o.pairs > 0 {
		src, dst := t.ends(o.worst)
		r.LossWorst = t.Server[src].Name + " -> " + t.Server[dst].Name
	}
}

// ends are the servers of a pair of loopbacks.
func (t *traffic) ends(pair int) (src, dst int) {
	return pair / t.loopbacks / t.GPUs, pair % t.loopbacks / t.GPUs
}

// undisturbed says which servers between which the step changes neither weights nor cables in use have lost packets, when they are
// too many.
func (f *Fabric) undisturbed(t *traffic, w watched, tallies ...*tally) (wrong []string) {
	all := 0
	for src := range f.Servers {
		for dst := range f.others(src) {
			if w.changed[src][dst] || f.moved(src, dst) && !f.carries(src, dst) {
				continue
			}
			var sent, received uint64
			for _, n := range tallies {
				s, r := t.between(n, src, dst)
				sent, received = sent+s, received+r
			}
			if received < sent {
				all += int(sent - received)
				wrong = append(wrong, fmt.Sprintf("%s -> %s: %d of %d packets were lost although nothing changed between them, all in all %d may", f.Server[src].Name, f.Server[dst].Name, sent-received, sent, w.most))
			}
		}
	}
	if all <= w.most {
		return nil
	}
	return wrong
}

// between is what was sent from one server to another, and what has arrived of it.
func (t *traffic) between(n *tally, src, dst int) (sent, received uint64) {
	for a := range t.GPUs {
		for b := range t.GPUs {
			pair := t.pair(src, a, dst, b)
			sent += n.sent[pair].Load()
			received += n.received[pair].Load()
		}
	}
	return sent, received
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

// fractions are the weights' parts of one.
func fractions(weights []uint32) []float64 {
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
			moved := f.moved(src, dst) // by a server with a dead process, which forwards as well as its kernel can
			if moved && !f.carries(src, dst) {
				continue
			}
			sent, received := t.between(n, src, dst)
			name := fmt.Sprintf("%s -> %s", f.Server[src].Name, f.Server[dst].Name)
			if received < sent {
				wrong = append(wrong, fmt.Sprintf("%s: %d of %d packets were lost while nothing changed", name, sent-received, sent))
				continue
			}
			if moved {
				continue
			}
			counts := t.counts(n, src, dst)
			slack := t.senders[src].slack()
			for p, part := range fractions(weights) {
				if want := part * float64(sent); math.Abs(float64(counts[p])-want) > slack {
					wrong = append(wrong, fmt.Sprintf("%s: %d of %d packets took %s, by the weights %s it is %.0f", name, counts[p], sent, f.PlaneName(p), Ratio(weights), want))
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
		slots := map[int]int{}
		for _, s := range out.slots {
			slots[s.lane.plane]++
			most = max(most, slots[s.lane.plane])
		}
	}
	return float64(2*most*o.GPUs*o.GPUs) + 1
}
