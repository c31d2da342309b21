package core

import (
	"fmt"

	"github.com/fared/fared/fare"
)

// avoid passes an avoidance to the table of its source group. The table keeps it while proof.unproved is report, too,
// so that a reload decides about the effect at once. A restart forgets it, and so does a reload with other planes,
// sub-ports, sessions or source groups, because the probes begin again.
func (c *Core) avoid(ev Avoid) {
	s, plane := &c.sources[ev.Source], c.layout.Sources[ev.Source].at.planes[ev.Plane]
	if plane < 0 || c.Avoided(ev) == ev.On {
		return
	}
	c.apply(ev.Source, s.table.Step(fare.Avoid{Prefix: ev.Destination, Plane: plane, On: ev.On}))
	if c.Avoided(ev) != ev.On {
		c.fault(ev.Destination.String(), fmt.Errorf("not avoided by plane %s: planes are avoided toward %d destinations already, or it is no address of a GPU",
			c.layout.Planes[ev.Plane], fare.MaxAvoided))
	}
}

// endAvoidances ends all avoidances.
func (c *Core) endAvoidances() {
	for i := range c.sources {
		for prefix, plane := range c.sources[i].table.Avoidances {
			c.apply(i, c.sources[i].table.Step(fare.Avoid{Prefix: prefix, Plane: plane}))
		}
	}
}

// Avoided reports whether the last Avoid of the same source group, destination and plane was On.
func (c *Core) Avoided(ev Avoid) bool {
	plane := c.layout.Sources[ev.Source].at.planes[ev.Plane]
	return plane >= 0 && c.sources[ev.Source].table.Avoided(ev.Destination, plane)
}

// AvoidedBy returns, by plane, the number of destinations of all source groups toward which it carries nothing because
// it is avoided.
func (c *Core) AvoidedBy() []int {
	out := make([]int, len(c.layout.Planes))
	for i := range c.sources {
		counts := c.sources[i].table.AvoidedBy()
		for plane, at := range c.layout.Sources[i].at.planes {
			if at >= 0 {
				out[plane] += counts[at]
			}
		}
	}
	return out
}

// checkAvoid returns an error for an avoidance that refers to an index outside the configuration.
func (c *Core) checkAvoid(ev Avoid) error {
	if ev.Source < 0 || ev.Source >= len(c.sources) {
		return fmt.Errorf("source group %d: the configuration has %d", ev.Source, len(c.sources))
	}
	if ev.Plane < 0 || ev.Plane >= len(c.layout.Planes) {
		return fmt.Errorf("plane %d: the configuration has %d", ev.Plane, len(c.layout.Planes))
	}
	return nil
}
