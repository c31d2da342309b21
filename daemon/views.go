package daemon

import (
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
)

// plane returns the combined view of a plane over its source groups.
func (c *Core) plane(index int) (out fare.PlaneView) {
	for i := range c.sources {
		if at := c.layout.sources[i].at.planes[index]; at >= 0 {
			view := c.sources[i].table.Plane(at)
			out.Up, out.Drained = out.Up || view.Up, view.Drained // a drain concerns all source groups
		}
	}
	return out
}

// subPort returns the view of a sub-port, which is the same in all source groups that it serves.
func (c *Core) subPort(index int) fare.SubPortView {
	i := c.layout.sourceOf(index)
	return c.sources[i].table.SubPort(c.layout.sources[i].at.subPorts[index])
}

// sessionViews returns every session; its routes are evaluated by the first source group that its sub-port serves.
func (c *Core) sessionViews() []fare.SessionView {
	out := make([]fare.SessionView, len(c.sessions))
	for i := len(c.sources) - 1; i >= 0; i-- {
		views := c.sources[i].table.Sessions(nil)
		for k, at := range c.layout.sources[i].at.sessions {
			if at >= 0 {
				out[k] = views[at]
			}
		}
	}
	return out
}

// ignored counts the inputs that tables did not use, by reason, once for each source group that they concern.
func (c *Core) ignored() []status.Count {
	var out []status.Count
	for r := range fare.Reasons {
		var n uint64
		for i := range c.sources {
			stats := c.sources[i].table.Stats()
			n += stats.Events.Reason(r)
		}
		if n > 0 {
			out = append(out, status.Count{Name: r.String(), Value: n})
		}
	}
	return out
}
