package lab

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/lab/probe"
)

// Traffic describes the packets that were sent between the end of the previous step and the end of this one.
type Traffic struct {
	// Sent and Lost count packets of all servers. A cable that fails loses the packets in transit over it.
	Sent uint64 `json:"packets_sent"`
	Lost uint64 `json:"packets_lost"`
	// SteadySent and SteadyLost count those sent after every weight was in effect, when no loss is allowed.
	SteadySent uint64 `json:"steady_packets_sent"`
	SteadyLost uint64 `json:"steady_packets_lost"`
	// Measured is the number of the pair's steady packets that the leaf of each plane has seen, Share their fraction of
	// all, 0 to 1, and Wanted the fraction that the weight gives.
	Measured map[string]uint64  `json:"measured_packets"`
	Share    map[string]float64 `json:"measured_share"`
	Wanted   map[string]float64 `json:"weight_share"`
	// Duplicated counts packets that arrived more than once, Late those that arrived after they were counted as lost.
	Duplicated uint64 `json:"packets_duplicated"`
	Late       uint64 `json:"packets_late"`
	// LossIntervalNS is the longest time, from the first action on, for which a pair of loopbacks lost packets: from
	// the sending of its first lost packet to that of the last, plus one gap between the pair's packets, nanoseconds.
	// Packets of the pair over other planes may have arrived in between. 0 means that nothing was lost. RFC 6412 calls
	// it a loss of connectivity period, here for all of a pair's traffic. LossWorst names the servers of that pair:
	// "server1 -> server2".
	LossIntervalNS int64  `json:"loss_interval_ns"`
	LossWorst      string `json:"loss_worst,omitempty"`
	// LossSpanNS is the time from the first lost packet of any pair to the last of any pair.
	LossSpanNS int64 `json:"loss_span_ns"`
	// LossPairs is the number of pairs that lost packets, LossPlanes the number of lost packets by the plane of the
	// slot that sent them. Packets that were sent before the first action and lost in transit count in Lost only.
	LossPairs  int               `json:"loss_pairs"`
	LossPlanes map[string]uint64 `json:"loss_planes"`

	outage probe.Outage
}

// A step's steady time is that in which each pair sends steadyPackets, within bounds. On a machine that has no time for
// the senders it goes on until they have sent half of what was due, for steadyPatience at most.
const (
	steadyPackets  = 150
	steadyAtLeast  = 200 * time.Millisecond
	steadyAtMost   = 2 * time.Second
	steadyPatience = 30 * time.Second
)

// watched describes a step whose packets are checked.
type watched struct {
	idle     *probe.Tally // packets between the previous step and this one's first action
	src, dst int          // the pair whose shares are reported
	judge    bool         // false if the weights are already wrong
	most     int          // maximum number of packets lost during the step; -1: no limit
	changed  [][]bool
}

// watchPackets ends a step's time of change, watches packets while nothing changes, and returns the faults found.
func (f *Fabric) watchPackets(ctx context.Context, t *probe.Traffic, w watched) (*Traffic, []string) {
	if !t.Sends() {
		return nil, nil
	}
	f.leavesForward(ctx)
	portsPlaced(ctx, t)
	change := t.Roll()
	if w.judge {
		if !awaitSteady(ctx, t) {
			return nil, nil
		}
	}
	steady := t.Roll()
	all := []*probe.Tally{w.idle, change, steady}
	r := &Traffic{SteadySent: steady.Sent(),
		Measured: map[string]uint64{}, Share: map[string]float64{}, Wanted: map[string]float64{}}
	for _, n := range all {
		t.Gather(ctx, n)
		r.Sent += n.Sent()
		r.Lost += n.Lost()
		r.Duplicated += n.Duplicated()
		r.Late += n.Late()
	}
	r.lay(t, probe.NewOutage(f.Planes, t.Gap().Nanoseconds(), change, steady))
	r.SteadyLost = steady.Lost()
	counts := make([]uint64, f.Planes)
	var seen uint64
	for i, n := range t.Counts(steady, w.src, w.dst) {
		counts[f.Groups()[w.src].Cables[i].Plane] += n
		seen += n
	}
	for p, part := range judge.Fractions(f.InForce(w.src, w.dst)) {
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

// awaitSteady waits for the steady time of a step. It returns false if ctx ended.
func awaitSteady(ctx context.Context, t *probe.Traffic) bool {
	d := max(steadyAtLeast, min(steadyPackets*t.Gap(), steadyAtMost))
	if backend.Sleep(ctx, d) != nil {
		return false
	}
	patience, cancel := context.WithTimeout(ctx, steadyPatience)
	defer cancel()
	for !t.Covered(uint64(d/t.Gap()/2)) && backend.Sleep(patience, 10*time.Millisecond) == nil {
	}
	return ctx.Err() == nil
}

// portsPlaced waits until the senders have source ports that land on the slots' places. Weights may be in effect before
// a daemon that must ask its data plane for them has the answers. If ports are still missing after the limit, the check
// of packets reports it.
func portsPlaced(ctx context.Context, t *probe.Traffic) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for t.PortsPending() && backend.Sleep(ctx, 10*time.Millisecond) == nil {
	}
}

// lay copies an outage to the result.
func (r *Traffic) lay(t *probe.Traffic, o probe.Outage) {
	r.outage = o
	r.LossIntervalNS, r.LossSpanNS, r.LossPairs, r.LossPlanes = o.Interval, o.Span, o.Pairs, map[string]uint64{}
	for p, n := range o.ByPlane {
		r.LossPlanes[t.PlaneName(p)] = n
	}
	if o.Pairs > 0 {
		src, dst := t.Ends(o.Worst)
		r.LossWorst = t.Groups()[src].Name + " -> " + t.Groups()[dst].Name
	}
}

// undisturbed lists the source groups that lost packets although the step changed neither weights nor cables in use
// between them, if the loss exceeds the limit.
func (f *Fabric) undisturbed(t *probe.Traffic, w watched, tallies ...*probe.Tally) (wrong []string) {
	all, late := 0, uint64(0)
	for _, n := range tallies {
		late += n.Late()
	}
	for src := range f.Groups() {
		for dst := range f.Others(src) {
			if w.changed[src][dst] || f.Moved(src, dst) && !f.Carries(src, dst) {
				continue
			}
			var sent, received uint64
			for _, n := range tallies {
				s, r := t.Between(n, src, dst)
				sent, received = sent+s, received+r
			}
			if received < sent {
				all += int(sent - received)
				wrong = append(wrong, fmt.Sprintf("%s -> %s: %d of %d packets were lost although nothing changed between them, want at most %d in total; %d packets of the step arrived too late to count", f.Groups()[src].Name, f.Groups()[dst].Name, sent-received, sent, w.most, late))
			}
		}
	}
	if all <= w.most {
		return nil
	}
	return wrong
}

// judge returns the faults in packets of a time without change: none may be lost, none may leave by a sub-port that
// does not serve its source, and every plane and every sub-port must carry its part, within the tolerance of slots that
// take turns.
func (f *Fabric) judge(t *probe.Traffic, n *probe.Tally) []string {
	var wrong []string
	for src, from := range f.Groups() {
		for dst, want := range f.Others(src) {
			moved := f.Moved(src, dst) // by a server with a dead process, which forwards by the last state of its kernel
			if moved && !f.Carries(src, dst) {
				continue
			}
			sent, received := t.Between(n, src, dst)
			name := fmt.Sprintf("%s -> %s", from.Name, f.Groups()[dst].Name)
			for _, pair := range t.PairsOf(src, dst) {
				if k := n.Astray(pair); k > 0 {
					wrong = append(wrong, fmt.Sprintf("%s: %d of %d packets left by ports of another GPU or server", name, k, sent))
				}
			}
			if received < sent {
				wrong = append(wrong, fmt.Sprintf("%s: %d of %d packets were lost while nothing changed", name, sent-received, sent))
				continue
			}
			if moved {
				continue
			}
			wrong = append(wrong, f.judgePair(t, name, src, want, t.Counts(n, src, dst), float64(sent))...)
		}
	}
	return wrong
}

// judgePair checks the packets between two source groups by plane and by sub-port.
func (f *Fabric) judgePair(t *probe.Traffic, name string, src int, want judge.Vector, counts []uint64, sent float64) (wrong []string) {
	from := f.Groups()[src]
	inPlane, inLane := t.Slack(src)
	planes := make([]uint64, f.Planes)
	for i, k := range counts {
		c := from.Cables[i]
		planes[c.Plane] += k
		due, slack := want.Lanes[i]*sent, inLane
		if f.Mode == "per-packet" { // sprayed at random over a plane's sub-ports: six standard deviations of a binomial
			slack += 6 * math.Sqrt(due)
		}
		if math.Abs(float64(k)-due) > slack {
			wrong = append(wrong, fmt.Sprintf("%s: %d of %.0f packets took %s, want %.0f by its share", name, k, sent, c.Down.Device, due))
		}
	}
	for p, part := range judge.Fractions(want.Planes) {
		if due := part * sent; math.Abs(float64(planes[p])-due) > inPlane {
			wrong = append(wrong, fmt.Sprintf("%s: %d of %.0f packets took %s, the weights %s give %.0f", name, planes[p], sent, f.PlaneName(p), judge.Ratio(want.Planes), due))
		}
	}
	return wrong
}
