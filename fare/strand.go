package fare

import "slices"

// Strands returns the groups that are reachable and would become unreachable if the drain e were switched on, in order
// of their numbers. It changes nothing. An invalid event strands no group.
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
		if t.work.decide(t); !t.work.view.Reachable {
			out = append(out, g.id)
		}
	}
	t.planes, t.subPorts, t.drained = planes, subPorts, drained
	t.refresh(touched)
	return out
}
