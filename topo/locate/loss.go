package locate

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/fared/fared/topo"
)

const (
	// odds is the logarithm of the odds against any fault of a kind before a look at the losses: one evaluation in a
	// million names a part by chance.
	odds = 13.8
	// leastBase is the loss rate of a fabric without a fault, at least.
	leastBase = 1e-5
	// maxLosses is the number of pairs with losses from which on a part of the servers is looked at first.
	maxLosses = 40_000
	// maxLossy bounds the parts that are named for losses at once.
	maxLossy = 64
	// precision is that of a loss rate, relative.
	precision = 1e-7
	// even is the difference of likelihoods, as logarithms, up to which parts have the same evidence.
	even = 1e-6
)

// suspect is a part that may lose packets.
type suspect struct {
	key
	exposure float64 // expected number of packets that pass it
	lossy    []pass  // pairs with losses that pass it
	rate     float64
	ratio    float64 // logarithm of the likelihood ratio
	score    float64
}

// pass is a pair with losses, and how often each of its probes passes a suspect.
type pass struct {
	loss  int
	share float64
}

// trial is one search for losses.
type trial struct {
	*Locator
	lost     []Loss
	expected []float64 // rate of losses that is explained, by loss
	suspects map[key]*suspect
	kinds    map[string]int // number of candidates of each kind
	shares   []keyShare     // of trace, which is called for each loss
}

// keyShare is how often the probes of a loss pass a suspect.
type keyShare struct {
	key
	share float64
}

// losses finds the parts that lose packets.
func (l *Locator) losses(views map[*topo.Node]*View, hard hardFaults) []Guilty {
	var sent []Sent
	var lost []Loss
	for _, n := range l.fabric.Server {
		if v := views[n]; v != nil {
			sent = append(sent, v.Sent...)
			lost = append(lost, v.Lost...)
		}
	}
	base := l.base(sent, lost)
	lost = slices.DeleteFunc(lost, func(x Loss) bool { return !l.counts(x, hard.cables) })
	each := 1 + len(lost)/maxLosses
	all, keys := l.search(l.thin(sent, lost, each), base)
	if each == 1 {
		return all
	}
	lost = slices.DeleteFunc(lost, func(x Loss) bool { return l.passesAny(x, keys) })
	more, _ := l.search(results{sent, lost}, base)
	return append(all, more...)
}

// results are those of probes.
type results struct {
	sent []Sent
	lost []Loss
}

// thin returns the results of one server of so many: these know enough of a leaf that drops all packets. Fainter faults
// are among the losses that it does not explain.
func (l *Locator) thin(sent []Sent, lost []Loss, each int) results {
	if each == 1 {
		return results{sent, lost}
	}
	var r results
	keep := func(group int) bool { return l.fabric.Host(group)%each == 0 }
	for _, s := range sent {
		if keep(s.From) {
			r.sent = append(r.sent, s)
		}
	}
	for _, x := range lost {
		if keep(x.From) {
			r.lost = append(r.lost, x)
		}
	}
	return r
}

// passesAny reports whether the probes of a loss pass one of the named suspects.
func (l *Locator) passesAny(x Loss, named []key) (passes bool) {
	for _, w := range l.ways(x) {
		l.pass(w, func(k key, _ float64) { passes = passes || slices.Contains(named, k) })
	}
	return passes
}

// search finds the parts that explain losses best, one after the other.
func (l *Locator) search(r results, base float64) (all []Guilty, keys []key) {
	t := &trial{Locator: l, suspects: map[key]*suspect{}, lost: r.lost}
	if len(t.lost) == 0 {
		return nil, nil
	}
	for i, x := range t.lost {
		t.expected = append(t.expected, base)
		t.trace(i, x)
	}
	t.expose(r.sent)
	t.countKinds()
	for len(all) < maxLossy {
		g, k, ok := t.next()
		if !ok {
			break
		}
		all, keys = append(all, g), append(keys, k)
	}
	return all, keys
}

// counts reports whether a loss is of this fabric, and not of a cable that is known to have failed.
func (l *Locator) counts(x Loss, cables []cable) bool {
	groups := l.fabric.Groups()
	if x.Lost <= 0 || x.From < 0 || x.To < 0 || x.Plane < 0 || x.From >= len(groups) || x.To >= len(groups) || x.Plane >= l.fabric.Planes {
		return false
	}
	return l.healthy(groups[x.From], x.Plane, cables) && l.healthy(groups[x.To], x.Plane, cables)
}

// base returns the loss rate of the best plane: planes share nothing, so a fault of one does not raise it. The least of
// several random rates is too small, so two standard deviations are added.
func (l *Locator) base(sent []Sent, lost []Loss) float64 {
	all, bad := make([]float64, l.fabric.Planes), make([]float64, l.fabric.Planes)
	for _, s := range sent {
		if s.Plane >= 0 && s.Plane < len(all) {
			all[s.Plane] += s.Probes
		}
	}
	for _, x := range lost {
		if x.Plane >= 0 && x.Plane < len(bad) {
			bad[x.Plane] += x.Lost
		}
	}
	best := 1.0
	for p := range all {
		if all[p] > 0 {
			best = min(best, (bad[p]+2*math.Sqrt(bad[p])+2)/all[p])
		}
	}
	return max(best, leastBase)
}

// countKinds counts the candidates of each kind in the fabric.
func (t *trial) countKinds() {
	f := t.fabric
	groups, ports := len(f.Groups()), 0
	for _, c := range f.Cables {
		if !c.Uplink() {
			ports++
		}
	}
	t.kinds = map[string]int{
		halfCable: 2 * ports, oneCable: 2 * groups * f.Planes, nic: 2 * groups, server: 2 * f.Servers, leaf: len(f.Leaf),
		spine: len(f.Spine), uplink: len(f.Cables) - ports, pair: groups * (groups - 1) * f.Planes,
	}
}

// next names the part with the best score.
func (t *trial) next() (g Guilty, k key, found bool) {
	var all []*suspect
	for _, s := range t.suspects {
		if t.judge(s); !math.IsInf(s.score, -1) {
			all = append(all, s)
		}
	}
	if len(all) == 0 {
		return g, k, false
	}
	slices.SortFunc(all, func(a, b *suspect) int { return cmp.Or(cmp.Compare(b.score, a.score), compareKeys(a.key, b.key)) })
	best := all[0]
	if best.score <= 0 {
		return g, k, false
	}
	g = Guilty{Kind: best.kind, Side: best.side, Fault: FaultLoss, Rate: best.rate}
	for _, s := range all {
		if best.ratio-s.ratio > even {
			continue
		}
		for _, name := range t.names(s.key) {
			if name == g.Part && s.side != g.Side {
				g.Side = "" // the direction is open
			}
			if g.Part == "" {
				g.Part = name
			} else if name != g.Part && !slices.Contains(g.Alternatives, name) {
				g.Alternatives = append(g.Alternatives, name)
			}
		}
	}
	g.Confidence = t.confidence(all, g.Part, best.score)
	var lost float64
	for _, p := range best.lossy {
		lost += t.lost[p.loss].Lost
		t.expected[p.loss] += best.rate * p.share
	}
	g.Evidence = []string{fmt.Sprintf("%.0f probes of %d pairs lost, of about %.0f that pass it", lost, len(best.lossy), best.exposure)}
	return g, best.key, true
}

// confidence returns the probability of a part, in any direction, among all suspects and no fault at all.
func (t *trial) confidence(all []*suspect, name string, best float64) float64 {
	own, sum := 0.0, math.Exp(-best)
	for _, s := range all {
		p := math.Exp(s.score - best)
		sum += p
		if names := t.names(s.key); names[0] == name {
			own += p / float64(len(names))
		}
	}
	return own / sum
}

// judge computes the likeliest loss rate of a suspect, and its score.
func (t *trial) judge(s *suspect) {
	s.rate, s.ratio, s.score = 0, math.Inf(-1), math.Inf(-1)
	prior := math.Log(float64(max(t.kinds[s.kind], 1))) + odds
	if t.bound(s) < prior {
		return
	}
	slope := func(q float64) (sum float64) { // of the log likelihood
		for _, p := range s.lossy {
			sum += t.lost[p.loss].Lost * p.share / (t.expected[p.loss] + q*p.share)
		}
		return sum - s.exposure
	}
	low, high := 0.0, 1.0
	if slope(0) <= 0 {
		return
	}
	for range 50 {
		if high-low < precision*low {
			break
		}
		if mid := (low + high) / 2; slope(mid) > 0 {
			low = mid
		} else {
			high = mid
		}
	}
	s.rate = low
	s.ratio = -s.exposure * s.rate
	for _, p := range s.lossy {
		s.ratio += t.lost[p.loss].Lost * math.Log1p(s.rate*p.share/t.expected[p.loss])
	}
	s.score = s.ratio - prior
}

// bound returns an upper bound of a suspect's likelihood ratio: as if all of its losses were as unexpected as the least
// expected one.
func (t *trial) bound(s *suspect) float64 {
	var lost, worst float64
	for _, p := range s.lossy {
		lost += t.lost[p.loss].Lost
		worst = max(worst, p.share/t.expected[p.loss])
	}
	if s.exposure <= 0 || lost*worst <= s.exposure {
		return math.Inf(-1)
	}
	return lost*math.Log(lost*worst/s.exposure) - lost + s.exposure/worst
}
