package locate

import (
	"fmt"
	"math"
	"time"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/topo"
)

// contradiction is the cost of a cable that is up at a part that is named, where a part costs 1.
const contradiction = 3

// rarity is the factor of probability that each unit of cost stands for.
const rarity = 100

// cable is what both ends of a cable report.
type cable struct {
	state State
	since time.Time
}

// hardFaults is the result of the first step.
type hardFaults struct {
	guilty []Guilty
	cables []cable // by index, with those that are only inferred
}

// failed reports whether a cable carries no packets.
func (c cable) failed() bool { return c.state == Silent || c.state == Dark }

// hard finds the parts that have failed.
func (l *Locator) hard(views map[*topo.Node]*View) hardFaults {
	found := hardFaults{cables: l.cables(views)}
	unheard := l.unheard(views, found.cables)
	failed, up := make([]bool, len(found.cables)), make([]bool, len(found.cables))
	for i, c := range found.cables {
		failed[i], up[i] = c.failed(), c.state == Up
	}
	for _, named := range l.cover(failed, up, nil) {
		found.guilty = append(found.guilty, l.hardFault(named, found.cables, unheard))
	}
	found.guilty = append(found.guilty, l.uplinks(views, found.cables)...)
	return found
}

// cables joins the reports of both ends: the worse one counts.
func (l *Locator) cables(views map[*topo.Node]*View) []cable {
	all := make([]cable, len(l.fabric.Cables))
	for n, v := range views {
		for i, c := range l.fabric.At(n) {
			if i >= len(v.Ports) {
				break
			}
			p, at := &v.Ports[i], &all[c.Index]
			if p.State == at.state {
				at.since = earlier(at.since, p.Since)
			} else if p.State > at.state {
				*at = cable{p.State, p.Since}
			}
		}
	}
	return all
}

// named is a part of a cover, with its numbers of failed cables, and of those that are up.
type named struct {
	part
	failed, up int
	margin     int // by which the next best explanation of its cables costs more
}

// cover returns the cheapest parts, approached greedily, that cover the failed elements. extra are parts in addition to
// those of the fabric.
func (l *Locator) cover(failed, up []bool, extra []part) []named {
	parts := append(append([]part(nil), l.parts...), extra...)
	of := map[int]bool{}
	left := 0
	for i, bad := range failed {
		if !bad {
			continue
		}
		left++
		for _, k := range l.of[i] {
			of[k] = true
		}
	}
	for i := range extra {
		of[len(l.parts)+i] = true
	}
	candidates := make([]int, 0, len(of))
	for k := range of {
		candidates = append(candidates, k)
	}
	candidates = sorted(candidates)
	open := append([]bool(nil), failed...)
	var all []named
	for left > 0 {
		best, bestGain, bestUnknown, bestCovers := -1, -1, 0, 0
		for _, k := range candidates {
			covers, contra := count(parts[k].cables, open), count(parts[k].cables, up)
			if covers == 0 {
				continue
			}
			gain, unknown := covers-1-contradiction*contra, len(parts[k].cables)-count(parts[k].cables, failed)-contra
			if gain > bestGain || gain == bestGain && unknown < bestUnknown {
				best, bestGain, bestUnknown, bestCovers = k, gain, unknown, covers
			}
		}
		if best < 0 {
			return all
		}
		p := parts[best]
		all = append(all, named{part: p, failed: count(p.cables, failed), up: count(p.cables, up), margin: max(bestGain, 1)})
		for _, c := range p.cables {
			open[c] = false
		}
		left -= bestCovers
	}
	return all
}

// count returns the number of cables that are set.
func count(cables []int, set []bool) (n int) {
	for _, c := range cables {
		if set[c] {
			n++
		}
	}
	return n
}

// hardFault describes a part of the cover.
func (l *Locator) hardFault(n named, cables []cable, unheard map[int]bool) Guilty {
	g := Guilty{Part: n.name, Kind: n.kind, Fault: FaultSilent, Confidence: sure(n.margin)}
	var dark, silent, inferred int
	for _, i := range n.cables {
		switch c := cables[i]; {
		case unheard[i]:
			inferred++
		case c.state == Dark:
			dark++
			g.Since = earlier(g.Since, c.since)
		case c.state == Silent:
			silent++
			g.Since = earlier(g.Since, c.since)
		}
	}
	if dark > 0 || silent == 0 {
		g.Fault = FaultDark
	}
	tell := func(n int, text string) {
		if n > 0 {
			g.Evidence = append(g.Evidence, fmt.Sprintf("%d cable%s %s", n, [...]string{"", "s"}[min(n-1, 1)], text))
		}
	}
	tell(dark, "without a carrier")
	tell(silent, "with a carrier and without a session")
	tell(inferred, "of a server without a report, to which no other server has a route")
	tell(n.up, "up")
	tell(len(n.cables)-n.failed-n.up, "drained or without a report")
	return g
}

// sure is the probability of an explanation that costs margin less than the next one.
func sure(margin int) float64 { return 1 / (1 + math.Pow(rarity, -float64(margin))) }

// unheard marks the cables of servers without a report as dark in the planes in which no server has a route to them,
// and returns them.
func (l *Locator) unheard(views map[*topo.Node]*View, cables []cable) map[int]bool {
	marked := map[int]bool{}
	var silent []*topo.Group
	for _, g := range l.fabric.Groups() {
		if views[g.Server] == nil {
			silent = append(silent, g)
		}
	}
	if len(silent) == 0 {
		return marked
	}
	best := l.reach(views, silent)
	for k, g := range silent {
		for p, there := range g.Planes {
			if best[k] == nil || best[k][p] > 0 {
				continue
			}
			for _, c := range there {
				if cables[c.Index].state == Unknown {
					cables[c.Index].state, marked[c.Index] = Dark, true
				}
			}
		}
	}
	return marked
}

// reach returns by group and plane the most bandwidth that any server has learned toward it; nil for a group toward
// which no server has learned any.
func (l *Locator) reach(views map[*topo.Node]*View, groups []*topo.Group) [][]fare.Bandwidth {
	best := make([][]fare.Bandwidth, len(groups))
	for _, v := range views {
		for i := range v.Paths {
			path := &v.Paths[i]
			for k, g := range groups {
				if g.Index < path.First || g.Index > path.Last || len(path.Bandwidth) != l.fabric.Planes {
					continue
				}
				if best[k] == nil {
					best[k] = make([]fare.Bandwidth, l.fabric.Planes)
				}
				for p, b := range path.Bandwidth {
					best[k][p] = max(best[k][p], b)
				}
			}
		}
	}
	return best
}
