package daemon

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/fared/fared/fare"
)

// drainRequest starts or reverses a drain. Asking for what is already so is no error.
func (c *Core) drainRequest(ev DrainRequest) error {
	if err := c.checkTarget(ev.Target); err != nil {
		return err
	}
	i, found := c.findDrain(ev.Target)
	switch {
	case ev.On && !found:
		c.drains = slices.Insert(c.drains, i, drain{target: ev.Target, stage: DrainShares})
	case ev.On && c.drains[i].stage == Undraining:
		c.drains[i].stage = DrainShares
	case !ev.On && found:
		c.drains[i].stage = Undraining // routes first, shares when the delay has passed
	default:
		return nil
	}
	if ev.On {
		c.drainTable(ev.Target, true)
	}
	c.restage()
	return nil
}

// drainStep moves one drain on, if it waits for this.
func (c *Core) drainStep(ev DrainStep) {
	i, found := c.findDrain(ev.Target)
	if !found {
		return
	}
	switch d := &c.drains[i]; {
	case d.stage == DrainShares && ev.Confirmed:
		d.stage = DrainRoutes
	case d.stage == DrainRoutes && !ev.Confirmed:
		d.stage = Drained
	case d.stage == Undraining && !ev.Confirmed:
		c.drains = slices.Delete(c.drains, i, i+1)
		c.drainTable(ev.Target, false)
	}
	c.restage()
}

// drainTable sets the target's shares to zero in the table, or takes that back.
func (c *Core) drainTable(t DrainTarget, on bool) {
	ev := fare.Drain{On: on}
	switch {
	case t.Plane != "":
		ev.Scope, ev.Index = fare.DrainPlane, slices.Index(c.layout.planes, t.Plane)
	case t.Leaf.IsValid():
		ev.Scope, ev.Node = fare.DrainNode, t.Leaf
	default:
		ev.Scope, ev.Index = fare.DrainSubPort, c.layout.subPortByDevice(t.SubPort)
	}
	c.step(ev)
}

// restage derives every session's advertisement stage from the drains: the most severe one that covers it.
func (c *Core) restage() {
	for i := range c.sessions {
		stage := advertNormal
		for _, d := range c.drains {
			if !c.covers(d.target, i) {
				continue
			}
			switch d.stage {
			case DrainRoutes:
				stage = max(stage, advertZero)
			case Drained:
				stage = max(stage, advertNone)
			}
		}
		if s := &c.sessions[i]; s.advert != stage {
			s.advert = stage
			c.advertDirty = true // with advertise: node, what others to the same node say changes too
		}
	}
}

// applyLeafDrains brings a session that has just learned who its leaf is under the drains of that leaf, and out of those
// of the leaf it had before.
func (c *Core) applyLeafDrains() {
	if slices.ContainsFunc(c.drains, func(d drain) bool { return d.target.Leaf.IsValid() }) {
		c.restage()
	}
}

// covers says whether a drain target includes a session.
func (c *Core) covers(t DrainTarget, session int) bool {
	l := &c.layout.sessions[session]
	switch {
	case t.Plane != "":
		return c.layout.planes[l.plane] == t.Plane
	case t.Leaf.IsValid():
		return c.sessions[session].node == t.Leaf
	default:
		return c.layout.subPorts[l.subPort].Device == t.SubPort
	}
}

// Drains returns each drain's target and stage, sorted by target.
func (c *Core) Drains(yield func(DrainTarget, DrainStage)) {
	for _, d := range c.drains {
		yield(d.target, d.stage)
	}
}

func (c *Core) findDrain(t DrainTarget) (int, bool) {
	return slices.BinarySearchFunc(c.drains, t, func(d drain, t DrainTarget) int { return cmp.Compare(d.target.String(), t.String()) })
}

// checkTarget refuses a target that names nothing, and says what there is. What is drained can be undrained, even when
// its sessions have found another leaf since.
func (c *Core) checkTarget(t DrainTarget) error {
	if _, found := c.findDrain(t); found {
		return nil
	}
	switch {
	case t.Plane != "":
		if !slices.Contains(c.layout.planes, t.Plane) {
			return fmt.Errorf("no plane %q: the planes are %s", t.Plane, strings.Join(c.layout.planes, ", "))
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
		return fmt.Errorf("no leaf %s: the leaves seen are %s", t.Leaf, strings.Join(nodes, ", "))
	case t.SubPort != "":
		if c.layout.subPortByDevice(t.SubPort) < 0 {
			return fmt.Errorf("no sub-port %q: the sub-ports are %s", t.SubPort, strings.Join(c.layout.devices(), ", "))
		}
	default:
		return fmt.Errorf("nothing named to drain: name a plane, a leaf or a sub-port")
	}
	return nil
}
