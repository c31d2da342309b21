// Package drain decides which parts of a fabric may be drained at once, and keeps the granted drains in an engine.
//
// A drain is granted if no pair of source groups falls below the budget of planes and bandwidth, with all failures of
// now, all drains of servers and all granted drains counted: by the code of topo's simulation. Pairs that it does not
// make worse do not count, so that a dead server does not block all drains.
//
// All granted drains, and the budget, are one value of the engine, which a decision replaces only if it is the one that
// it has read. So of two operators who ask at once for the last plane, the second one is judged with the first one's
// drain.
package drain

import (
	"fmt"
	"slices"
	"time"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/topo"
)

// Budget is what drains must leave to each pair of source groups.
type Budget struct {
	// Planes is the least number of planes, Share the least part of the bandwidth of the intact fabric, 0 to 1.
	Planes int     `json:"planes"`
	Share  float64 `json:"share,omitempty"`
}

// String describes the budget.
func (b Budget) String() string {
	if b.Share > 0 {
		return fmt.Sprintf("%d planes and %.0f %% of the bandwidth", b.Planes, 100*b.Share)
	}
	return fmt.Sprintf("%d planes", b.Planes)
}

// Drain is a drain that is granted, or waits for the budget.
type Drain struct {
	// Part is a name of topo.Fabric.Find.
	Part   string `json:"part"`
	By     string `json:"by"`
	Reason string `json:"reason"`
	// Queued means that the drain waits; as an argument of Grant, that it may.
	Queued bool `json:"queued,omitempty"`
	// Granted is the time of the grant, or of the request of a queued drain; Until is the time at which the drain ends
	// by itself, zero for never.
	Granted time.Time `json:"granted"`
	Until   time.Time `json:"until,omitzero"`
	// Never, of an argument of Grant, means that a drain which is repeated no longer ends by itself.
	Never bool `json:"-"`
}

// over reports whether the drain has ended by itself.
func (d *Drain) over(now time.Time) bool { return !d.Until.IsZero() && !now.Before(d.Until) }

// Pair is a kind of pair that a drain would leave below the budget.
type Pair struct {
	From, To      string // one of them
	Pairs         int
	Before, After int // planes
	// Share is the part of the intact fabric's bandwidth that would be left.
	Share float64
}

// Refusal is the reason why a drain is not granted.
type Refusal struct {
	Budget Budget
	Pairs  []Pair
	Queued bool // the drain waits
}

// maxExamples is the number of pairs in the text of a refusal.
const maxExamples = 4

// Error describes the refusal with pairs of the first kinds.
func (r *Refusal) Error() string {
	n := 0
	for _, p := range r.Pairs {
		n += p.Pairs
	}
	text := fmt.Sprintf("%d pairs would fall below %d planes", n, r.Budget.Planes)
	if r.Budget.Share > 0 {
		text += fmt.Sprintf(" or %.0f %% of the bandwidth", 100*r.Budget.Share)
	}
	for i, p := range r.Pairs[:min(len(r.Pairs), maxExamples)] {
		text += fmt.Sprintf("%s %s to %s from %d to %d planes, %.0f %%", [...]string{":", ";"}[min(i, 1)], p.From, p.To, p.Before, p.After, 100*p.Share)
	}
	if more := len(r.Pairs) - maxExamples; more > 0 {
		text += fmt.Sprintf("; and pairs of %d other kinds", more)
	}
	return text
}

// Judge returns nil if a part may be drained in addition to the granted drains, a Refusal if not, or the error of an
// unknown part. present are the failures and drains of now, as names of topo.Simulation.Fail.
func Judge(f *topo.Fabric, b Budget, present []string, granted []Drain, part string) error {
	before := slices.Clone(present)
	for _, d := range granted {
		if d.Queued {
			continue
		}
		before = append(before, "drain:"+d.Part)
	}
	intact, old, s := topo.Simulate(f), topo.Simulate(f), topo.Simulate(f)
	for _, sim := range []*topo.Simulation{old, s} {
		if _, err := sim.Fail(before...); err != nil {
			return err
		}
	}
	if _, err := s.Fail("drain:" + part); err != nil {
		return err
	}
	r := &Refusal{Budget: b}
	s.Kinds(func(src, dst, count int) {
		p := Pair{Pairs: count, Before: planes(old, src, dst), After: planes(s, src, dst)}
		was, is := share(intact, old, src, dst), share(intact, s, src, dst)
		if p.Share = is; p.After < p.Before && p.After < b.Planes || is < was && is < b.Share {
			p.From, p.To = f.Groups()[src].Name, f.Groups()[dst].Name
			r.Pairs = append(r.Pairs, p)
		}
	})
	if len(r.Pairs) > 0 {
		return r
	}
	return nil
}

// planes returns the number of planes with a weight.
func planes(s *topo.Simulation, src, dst int) (n int) {
	for _, w := range s.Weights(src, dst) {
		if w > 0 {
			n++
		}
	}
	return n
}

// share returns the part of the intact fabric's bandwidth between two source groups.
func share(intact, now *topo.Simulation, src, dst int) float64 {
	sum := func(s *topo.Simulation) (sum fare.Bandwidth) {
		for _, b := range s.PathBandwidth(src, dst) {
			sum = sum.Add(b)
		}
		return sum
	}
	if all := sum(intact); all > 0 {
		return float64(sum(now)) / float64(all)
	}
	return 1
}
