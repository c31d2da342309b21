package core

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fared/fared/fare"
)

// drainRequest starts or reverses a drain. A request for the current state is not an error.
func (c *Core) drainRequest(ev DrainRequest) error {
	if err := c.CheckTarget(ev.Target); err != nil {
		return err
	}
	i, found := c.findDrain(ev.Target)
	switch {
	case ev.On && !found:
		c.drains = slices.Insert(c.drains, i, drain{target: ev.Target, stage: DrainShares})
	case ev.On && c.drains[i].stage == Undraining:
		c.drains[i].stage = DrainShares
	case !ev.On && found:
		c.drains[i].stage, c.drains[i].restored = Undraining, false // routes first; shares when the delay has passed
	default:
		return nil
	}
	if ev.On {
		c.drainTable(ev.Target, true)
	}
	c.restage()
	return nil
}

// drainRestored drains a target without the stages that shift traffic away: no session has advertised anything over it.
func (c *Core) drainRestored(ev DrainRestored) error {
	if err := c.CheckRestored(ev.Target); err != nil {
		return err
	}
	i, found := c.findDrain(ev.Target)
	if found {
		return nil
	}
	c.drains = slices.Insert(c.drains, i, drain{target: ev.Target, stage: DrainShares, restored: true})
	c.drainTable(ev.Target, true)
	c.restage()
	return nil
}

// CheckRestored returns an error for the target of a restored drain that the configuration does not contain. Any leaf
// is accepted, because leaves identify themselves later.
func (c *Core) CheckRestored(t DrainTarget) error {
	if t.Plane == "" && t.Leaf.IsValid() {
		return nil
	}
	return c.CheckTarget(t)
}

// drainStep advances one drain, if it waits for this step.
func (c *Core) drainStep(ev DrainStep) {
	i, found := c.findDrain(ev.Target)
	if !found {
		return
	}
	switch d := &c.drains[i]; {
	case d.stage == DrainShares && ev.Confirmed && d.restored:
		d.stage = DrainWithdrawing
	case d.stage == DrainShares && ev.Confirmed:
		d.stage = DrainRoutes
	case d.stage == DrainRoutes && !ev.Confirmed:
		d.stage = DrainWithdrawing
	case d.stage == Undraining && !ev.Confirmed:
		c.drains = slices.Delete(c.drains, i, i+1)
		c.drainTable(ev.Target, false)
	}
	c.restage()
}

// strandedNamed is the greatest number of stranded destinations that an error names.
const strandedNamed = 3

// CheckStranded returns an error for a drain that would leave a currently reachable destination of some source group
// without a plane. It takes all current drains, failures and missing routes into account; a drain that is being
// reversed still counts.
func (c *Core) CheckStranded(t DrainTarget) error {
	named, stranded := c.affected(t, true, (*fare.Table).Strands)
	if stranded == 0 {
		return nil
	}
	return fmt.Errorf("it would leave %d destinations without any plane: %s", stranded, named)
}

// CheckOtherEnd returns an error for a drain, whose routes have not been withdrawn yet, if the other end of some
// destination takes the planes out of service that the drain has left to it.
func (c *Core) CheckOtherEnd(t DrainTarget) error {
	named, stranded := c.affected(t, false, (*fare.Table).Frees)
	if stranded == 0 {
		return nil
	}
	return fmt.Errorf("the other end takes the remaining planes of %d destinations out of service at the same time: %s", stranded, named)
}

// affected returns the number of destinations in the groups that find returns for a drain of t or its end, and some of
// them with their planes.
func (c *Core) affected(t DrainTarget, on bool, find func(*fare.Table, fare.Drain) []fare.GroupID) (text string, count int) {
	var named []string
	for i := range c.sources {
		l, table := &c.layout.Sources[i], c.sources[i].table
		local, ok := l.localize(c.tableDrain(t, on)).(fare.Drain)
		if !ok {
			continue // no part of the target serves the source group
		}
		for _, id := range find(table, local) {
			members := slices.SortedFunc(table.Members(id), netip.Prefix.Compare)
			count += len(members)
			for _, prefix := range members[:min(len(members), strandedNamed-len(named))] {
				text := prefix.String()
				if l.Name.IsValid() {
					text += " from " + l.Name.String()
				}
				named = append(named, text+" ("+planesOf(l, table.Group(id))+")")
			}
		}
	}
	text = strings.Join(named, ", ")
	if count > len(named) {
		text += fmt.Sprintf(" and %d more", count-len(named))
	}
	return text, count
}

// planesOf describes which planes carry a group, and why the others do not: "by p1; p0: drained".
func planesOf(l *SourceLayout, view fare.GroupView) string {
	var carry, rest []string
	for p, name := range l.Planes {
		switch plane := &view.Planes[p]; {
		case plane.Capacity > 0 && view.Rule == fare.RuleAllZeroEqual:
			carry = append(carry, name+" with zero bandwidth")
		case plane.Capacity > 0:
			carry = append(carry, name)
		default:
			rest = append(rest, name+": "+plane.Reason.String())
		}
	}
	if carry != nil {
		rest = append([]string{"by " + strings.Join(carry, ", ") + " now"}, rest...)
	}
	return strings.Join(rest, "; ")
}

// drainTable sets the target's shares to zero in the tables, or restores them.
func (c *Core) drainTable(t DrainTarget, on bool) {
	c.step(c.tableDrain(t, on))
	for i := range c.sources {
		c.reweigh(i) // the table does not know that the data plane's state counts
	}
}

// tableDrain returns the tables' event for a target's drain.
func (c *Core) tableDrain(t DrainTarget, on bool) fare.Drain {
	ev := fare.Drain{On: on}
	switch {
	case t.Plane != "":
		ev.Scope, ev.Index = fare.DrainPlane, slices.Index(c.layout.Planes, t.Plane)
	case t.Leaf.IsValid():
		ev.Scope, ev.Node = fare.DrainNode, t.Leaf
	default:
		ev.Scope, ev.Index = fare.DrainSubPort, c.layout.subPortByDevice(t.SubPort)
	}
	return ev
}

// restage derives every session's advertisement stage from the drains: the most severe stage of the drains that cover
// it.
func (c *Core) restage() {
	for i := range c.sessions {
		stage := advertNormal
		for _, d := range c.drains {
			switch {
			case d.restored && d.target.Leaf.IsValid() && !c.sessions[i].node.IsValid():
				stage = advertNone // the session may lead to the drained leaf
			case !c.Covers(d.target, i):
			case d.stage == DrainRoutes:
				stage = max(stage, advertZero)
			case d.stage == DrainWithdrawing, d.stage == Drained, d.restored:
				stage = advertNone
			}
		}
		if s := &c.sessions[i]; s.advert != stage {
			s.advert, s.mark = stage, 0
			if stage != advertNormal {
				c.marks++
				s.mark = c.marks
			}
			c.advertDirty = true // with advertise: node, the bandwidth of other sessions to the same node changes too
		}
	}
	c.settleDrains()
}

// settleDrains moves drains between their last two stages: a target is drained once every established session of it has
// carried the withdrawals. A session that comes up with another leaf than before may have routes to withdraw.
func (c *Core) settleDrains() {
	for i := range c.drains {
		d := &c.drains[i]
		switch settled := len(c.Unsettled(d.target)) == 0; {
		case d.stage == DrainWithdrawing && settled:
			d.stage = Drained
		case d.stage == Drained && !settled:
			d.stage = DrainWithdrawing
		}
	}
}

// Unsettled returns the sessions of a target whose connections have not carried the routes of their stage.
func (c *Core) Unsettled(t DrainTarget) (sessions []int) {
	for i := range c.sessions {
		if c.Covers(t, i) && !c.sessions[i].settled() {
			sessions = append(sessions, i)
		}
	}
	return sessions
}

// SessionDrain returns the progress of the drains that cover a session: draining if a drain is under way, drained if
// the session has carried the withdrawals. A drain that is being reversed does not count.
func (c *Core) SessionDrain(session int) (draining, drained bool) {
	s := &c.sessions[session]
	if s.advert == advertNone && s.settled() {
		return false, true
	}
	return slices.ContainsFunc(c.drains, func(d drain) bool { return d.stage != Undraining && c.Covers(d.target, session) }), false
}

// OutOfService reports whether a sub-port that the tables treat as drained is fully drained: no established session
// over it has a route of ours, and no drain or undrain of it is under way.
func (c *Core) OutOfService(subPort int) bool {
	for i := range c.sessions {
		if c.sessions[i].subPort != subPort {
			continue
		}
		if _, drained := c.SessionDrain(i); drained {
			continue
		}
		if c.sessions[i].up || slices.ContainsFunc(c.drains, func(d drain) bool { return c.Covers(d.target, i) }) {
			return false
		}
	}
	return true
}

// LeafDrained reports whether drains of leaves, an undrain under way included, cover every session over a sub-port,
// with the leaves that the sessions had last: also while they are down, as during the maintenance of a leaf.
func (c *Core) LeafDrained(subPort int) bool {
	covered := false
	for i := range c.sessions {
		if c.sessions[i].subPort != subPort {
			continue
		}
		if covered = slices.ContainsFunc(c.drains, func(d drain) bool { return d.target.Leaf.IsValid() && c.Covers(d.target, i) }); !covered {
			return false
		}
	}
	return covered
}

// applyLeafDrains applies the drains of a session's leaf once the session has identified it, and stops those of its
// previous leaf.
func (c *Core) applyLeafDrains() {
	if slices.ContainsFunc(c.drains, func(d drain) bool { return d.target.Leaf.IsValid() }) {
		c.restage()
	}
}

// Covers reports whether a drain target includes a session.
func (c *Core) Covers(t DrainTarget, session int) bool {
	l := &c.layout.Sessions[session]
	switch {
	case t.Plane != "":
		return c.layout.Planes[l.Plane] == t.Plane
	case t.Leaf.IsValid():
		return c.sessions[session].node == t.Leaf
	default:
		return c.layout.SubPorts[l.SubPort].Device == t.SubPort
	}
}

// Drains yields each drain's target and stage, sorted by target.
func (c *Core) Drains(yield func(DrainTarget, DrainStage)) {
	for _, d := range c.drains {
		yield(d.target, d.stage)
	}
}

func (c *Core) findDrain(t DrainTarget) (int, bool) {
	return slices.BinarySearchFunc(c.drains, t, func(d drain, t DrainTarget) int { return cmp.Compare(d.target.String(), t.String()) })
}

// CheckTarget returns an error for a target that does not exist, with the existing ones. A drained target can be
// undrained even when its sessions have since found another leaf.
func (c *Core) CheckTarget(t DrainTarget) error {
	if _, found := c.findDrain(t); found {
		return nil
	}
	switch {
	case t.Plane != "":
		if !slices.Contains(c.layout.Planes, t.Plane) {
			return fmt.Errorf("no plane %q: the planes are %s", t.Plane, strings.Join(c.layout.Planes, ", "))
		}
	case t.Leaf.IsValid():
		var nodes []string
		for i := range c.sessions {
			if n := c.sessions[i].node; n == t.Leaf {
				return nil
			} else if n.IsValid() && !slices.Contains(nodes, n.String()) {
				nodes = append(nodes, n.String())
			}
		}
		if len(nodes) == 0 {
			return fmt.Errorf("no leaf %s: no session has been established yet, so no leaf is known", t.Leaf)
		}
		return fmt.Errorf("no leaf %s: the known leaves are %s", t.Leaf, strings.Join(nodes, ", "))
	case t.SubPort != "":
		if c.layout.subPortByDevice(t.SubPort) < 0 {
			return fmt.Errorf("no sub-port %q: the sub-ports are %s", t.SubPort, strings.Join(c.layout.Devices(), ", "))
		}
	default:
		return fmt.Errorf("the drain has no target: name a plane, a leaf or a sub-port")
	}
	return nil
}
