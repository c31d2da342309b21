package fare

import "slices"

// Strands returns the groups that are reachable and would become unreachable if the drain e were switched on, in order
// of their numbers. A path of zero bandwidth is in maintenance (RFC 10005, Section 3.1) and about to disappear, as is
// one with a signal of [Config.LeastPreferred], and one by an avoided plane loses packets; a group that has other paths
// must keep one of them. Strands changes nothing. An invalid event strands no group.
func (t *Table) Strands(e Drain) []GroupID {
	if !e.On {
		return nil
	}
	return t.suppose(e, func(g *group) bool { return g.view.Reachable }, func(g *group, then *computation) bool {
		return !then.view.Reachable || g.view.lasting(g.lastResort) && !then.view.lasting(then.lastResort)
	})
}

// Frees returns the groups whose usable paths all have zero bandwidth and that would have another path if the drain e,
// whose On is false, were undone, in order of their numbers: the other end of each is taking the rest of its planes out
// of service. Frees changes nothing. An invalid event frees no group.
func (t *Table) Frees(e Drain) []GroupID {
	if e.On {
		return nil
	}
	return t.suppose(e, func(g *group) bool { return g.view.Rule == RuleAllZeroEqual || g.view.Rule == RuleAllZeroUnreachable }, func(_ *group, then *computation) bool {
		return then.view.lasting(then.lastResort)
	})
}

// suppose returns the groups that satisfy now, and whose state after e satisfies then.
func (t *Table) suppose(e Drain, now func(*group) bool, then func(*group, *computation) bool) []GroupID {
	planes, subPorts, drained := slices.Clone(t.planes), slices.Clone(t.subPorts), slices.Clone(t.drained)
	touched, _ := t.markDrain(e)
	t.refresh(touched)
	var out []GroupID
	for _, g := range t.groups.byID {
		if g == nil || !now(g) || !g.touches(touched) {
			continue
		}
		if t.work.settle(t, g); then(g, &t.work) {
			out = append(out, g.id)
		}
	}
	t.planes, t.subPorts, t.drained = planes, subPorts, drained
	t.refresh(touched)
	return out
}

// lasting reports whether a path has bandwidth and is not a last resort.
func (v *GroupView) lasting(lastResort bool) bool {
	return !lastResort && slices.ContainsFunc(v.Planes, func(p PlaneBandwidth) bool { return p.Bandwidth > 0 })
}
