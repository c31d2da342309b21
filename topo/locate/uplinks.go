package locate

import (
	"fmt"
	"math"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/topo"
)

// uplinks finds failed uplinks and spines by the bandwidth between servers, in planes whose leaves do not report.
func (l *Locator) uplinks(views map[*topo.Node]*View, cables []cable) []Guilty {
	f := l.fabric
	if f.Spines == 0 || f.Leaves < 2 {
		return nil
	}
	var all []Guilty
	for p := range f.Planes {
		seen := false
		for _, leaf := range f.Leaf[p*f.Leaves : (p+1)*f.Leaves] {
			seen = seen || views[leaf] != nil
		}
		if !seen {
			all = append(all, l.uplinksOf(p, l.missing(views, cables, p))...)
		}
	}
	return all
}

// healthy reports whether all cables of a source group in a plane are up, or at least not known to have failed.
func (l *Locator) healthy(g *topo.Group, plane int, cables []cable) bool {
	for _, c := range g.Planes[plane] {
		if s := cables[c.Index].state; s != Up && s != Unknown {
			return false
		}
	}
	return len(g.Planes[plane]) > 0
}

// missing returns the number of uplinks that the paths from each leaf of a plane to each other one miss: the least over
// all pairs of servers whose cables work, or -1 without such a pair.
func (l *Locator) missing(views map[*topo.Node]*View, cables []cable, plane int) [][]int {
	f := l.fabric
	out := make([][]int, f.Leaves)
	for i := range out {
		out[i] = make([]int, f.Leaves)
		for k := range out[i] {
			out[i][k] = -1
		}
	}
	groups, leaves := f.Groups(), l.leafOf[plane]
	fine := make([]bool, len(groups))
	for i, g := range groups {
		fine[i] = leaves[i] >= 0 && l.healthy(g, plane, cables)
	}
	for _, v := range views {
		for i := range v.Paths {
			path := &v.Paths[i]
			if path.From >= len(groups) || !fine[path.From] || len(path.Bandwidth) != f.Planes {
				continue
			}
			for to := path.First; to <= path.Last && to < len(groups); to++ {
				if !fine[to] || leaves[to] == leaves[path.From] {
					continue
				}
				at := &out[leaves[path.From]-plane*f.Leaves][leaves[to]-plane*f.Leaves]
				if *at != 0 {
					*at = least(*at, l.short(path.From, to, plane, path.Bandwidth[plane]))
				}
			}
		}
	}
	return out
}

// least returns the smaller of two numbers, of which -1 is none.
func least(a, b int) int {
	if a < 0 || b < 0 {
		return max(a, b)
	}
	return min(a, b)
}

// short returns the number of uplinks that a bandwidth misses.
func (l *Locator) short(from, to, plane int, has fare.Bandwidth) int {
	want := l.intact().PathBandwidth(from, to)
	if want == nil || want[plane] == 0 {
		return -1
	}
	return int(math.Round(float64(l.fabric.Spines) * (1 - float64(has)/float64(want[plane]))))
}

// uplinksOf explains the missing uplinks of a plane: spines miss at all pairs of leaves, uplinks at all of one leaf.
func (l *Locator) uplinksOf(plane int, missing [][]int) []Guilty {
	f := l.fabric
	leaves := f.Leaf[plane*f.Leaves : (plane+1)*f.Leaves]
	all := -1
	of := make([]int, len(leaves))
	for a := range missing {
		of[a] = -1
		for b := range missing {
			if a != b {
				of[a] = least(least(of[a], missing[a][b]), missing[b][a])
			}
		}
		all = least(all, of[a])
	}
	if len(leaves) == 2 && all > 0 { // spines, or uplinks of either leaf
		return []Guilty{l.open(spine, all, append(l.spines(plane), append(l.uplinkNames(leaves[0]), l.uplinkNames(leaves[1])...)...))}
	}
	var found []Guilty
	if all > 0 {
		found = append(found, l.open(spine, all, l.spines(plane)))
	}
	for a, n := range of {
		if n -= max(all, 0); n > 0 {
			found = append(found, l.open(uplink, n, l.uplinkNames(leaves[a])))
		}
	}
	return found
}

// open describes n failed parts among names.
func (l *Locator) open(kind string, n int, names []string) Guilty {
	return Guilty{
		Part: names[0], Kind: kind, Fault: FaultCapacity, Alternatives: names[1:], Confidence: min(1, float64(n)/float64(len(names))),
		Evidence: []string{fmt.Sprintf("servers learn %d of %d uplinks less; the leaves do not report, so any of the alternatives is as likely", n, l.fabric.Spines)},
	}
}

func (l *Locator) spines(plane int) (names []string) {
	for _, n := range l.fabric.Spine[plane*l.fabric.Spines : (plane+1)*l.fabric.Spines] {
		names = append(names, n.Name)
	}
	return names
}

func (l *Locator) uplinkNames(leaf *topo.Node) (names []string) {
	for _, c := range l.fabric.At(leaf) {
		if c.Uplink() {
			names = append(names, leaf.Name+"/"+c.Down.Device)
		}
	}
	return names
}
