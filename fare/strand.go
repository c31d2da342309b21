package fare

import "slices"

// Strands returns the groups that are reachable and would become unreachable if the drain e were switched on, in order
// of their numbers. A path of zero bandwidth is in maintenance (RFC 10005, Section 3.1) and about to disappear, so a group
// that has other paths must keep one of them. Strands changes nothing. An invalid event strands no group.
func (t *Table) Strands(e Drain) []GroupID {
	if !e.On {
		return nil
	}
	planes, subPorts, drained := slices.Clone(t.planes), slices.Clone(t.subPorts), slices.Clone(t.drained)
	touched, ok := t.markDrain(e)
	if !ok {
		return nil
	}
	t.refresh(touched)
	var out []GroupID
	for _, g := range t.groups.byID {
		if g == nil || !g.view.Reachable || !g.touches(touched) {
			continue
		}
		t.work.gather(t, g)
		t.work.judge()
		if t.work.decide(t); !t.work.view.Reachable || g.view.lasting() && !t.work.view.lasting() {
			out = append(out, g.id)
		}
	}
	t.planes, t.subPorts, t.drained = planes, subPorts, drained
	t.refresh(touched)
	return out
}

// lasting reports whether a path has bandwidth.
func (v *GroupView) lasting() bool {
	return slices.ContainsFunc(v.Planes, func(p PlaneBandwidth) bool { return p.Bandwidth > 0 })
}
