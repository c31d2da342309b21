package judge

import "github.com/fared/fared/topo"

// Changes records the source groups between which an action changes weights or takes down a cable on which their
// packets arrive. In the second case the packets are lost that the leaf sent to the cable before its kernel saw the
// carrier go down, whatever the weights.
type Changes struct {
	*Model
	before  [][]Vector
	light   map[*topo.Cable]bool
	Changed [][]bool
}

// NewChanges returns the record of a step whose actions have not begun.
func NewChanges(m *Model) *Changes {
	c := &Changes{Model: m, light: map[*topo.Cable]bool{}}
	for src, g := range m.Groups() {
		c.before = append(c.before, make([]Vector, len(m.Groups())))
		c.Changed = append(c.Changed, make([]bool, len(m.Groups())))
		for dst := range m.Groups() {
			c.before[src][dst] = m.vector(src, dst)
		}
		for _, cable := range g.Cables {
			c.light[cable] = m.Up(cable)
		}
	}
	return c
}

// Note records the effects of an action; call it after each one.
func (c *Changes) Note() {
	for src, all := range c.before {
		for dst, before := range all {
			if !c.vector(src, dst).equal(before) || c.darkens(src, dst) {
				c.Changed[src][dst] = true
			}
		}
	}
}

// darkens reports whether a cable of the destination went down in a plane that the source uses.
func (c *Changes) darkens(src, dst int) bool {
	for plane, w := range c.InForce(src, dst) {
		for _, cable := range c.Groups()[dst].Planes[plane] {
			if w > 0 && c.light[cable] && !c.Up(cable) {
				return true
			}
		}
	}
	return false
}
