package core

import (
	"net/netip"
	"slices"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
)

// ownRoute identifies a route to one of this node's loopbacks.
type ownRoute struct {
	session int
	prefix  netip.Prefix
}

// keepOwn stores a route to one of this node's loopbacks, which the tables reject: the speaker reports a route once,
// and a reload may give the loopback to another server.
func (c *Core) keepOwn(ev fare.RouteUpdate) {
	if s := &c.sessions[ev.Session]; s.up && s.generation == ev.Generation {
		if c.own == nil {
			c.own = map[ownRoute]fare.RouteUpdate{}
		}
		c.own[ownRoute{ev.Session, ev.Prefix}] = ev
	}
}

// forgetOwn drops a session's routes to this node's loopbacks.
func (c *Core) forgetOwn(session int) {
	for key := range c.own {
		if key.session == session {
			delete(c.own, key)
		}
	}
}

// reload applies a configuration that differs only in keys that may change while running (verified by config.Diff).
// Afterwards the core equals a core that started with the new configuration and received the same events, except that
// slots keep their places.
func (c *Core) reload(ev Reload) error {
	next, err := config.Parse("reload", []byte(ev.Config))
	if err != nil {
		return err
	}
	if _, err := config.Diff(c.cfg, next); err != nil {
		return err
	}
	layout := NewLayout(next)
	if m := Succeed(&c.layout, &layout); !m.Same(&c.layout) || !c.layout.SameSources(&layout) {
		return c.restructure(next, layout, m, nil)
	}
	before := c.cfg.Loopbacks
	c.cfg = next
	for _, lo := range next.Loopbacks {
		if !slices.Contains(before, lo) {
			c.takeOver(lo)
		}
	}
	for i := range layout.SubPorts {
		if is := layout.SubPorts[i].Speed; is != c.layout.SubPorts[i].Speed {
			c.subPorts[i].speed = is
			c.step(fare.LinkState{SubPort: i, Up: c.subPorts[i].link, Speed: is, Unknown: is == 0})
		}
	}
	for i := range layout.Sources {
		layout.Sources[i].homes = c.layout.Sources[i].homes
	}
	c.layout = layout
	c.step(next.Policies())
	for _, lo := range before {
		if !slices.Contains(next.Loopbacks, lo) {
			c.handOver(lo)
		}
	}
	c.noteOwn(append(slices.Clone(before), next.Loopbacks...)...)
	c.advertDirty = true
	return nil
}

// SameSources reports whether a layout with the same sub-ports and sessions has the same source groups, and the same
// uplinks.
func (l *Layout) SameSources(o *Layout) bool {
	for i := range l.SubPorts {
		if a, b := &l.SubPorts[i], &o.SubPorts[i]; a.Uplink != b.Uplink || a.ShareGroup() != b.ShareGroup() {
			return false
		}
	}
	return slices.EqualFunc(l.Sources, o.Sources, func(a, b SourceLayout) bool { return a.Name == b.Name && slices.Equal(a.at.subPorts, b.at.subPorts) })
}

// takeOver removes the routes to a loopback that now belongs to this node from the tables.
func (c *Core) takeOver(lo netip.Prefix) {
	c.disown(lo)
	for i := range c.sessions {
		generation := c.sessions[i].generation
		if attrs := c.route(i, lo); attrs != nil {
			attrs = &fare.Attributes{Communities: slices.Clone(attrs.Communities), ASPath: slices.Clone(attrs.ASPath), Signals: attrs.Signals, Extended: attrs.Extended}
			c.keepOwn(fare.RouteUpdate{Session: i, Generation: generation, Prefix: lo, Attrs: attrs})
			c.step(fare.RouteWithdraw{Session: i, Generation: generation, Prefix: lo})
		}
	}
}

// route returns the attributes of a session's route, nil if it has none. Every source group that the session serves has
// the same route.
func (c *Core) route(session int, prefix netip.Prefix) *fare.Attributes {
	for i := range c.sources {
		if at := c.layout.Sources[i].at.sessions[session]; at >= 0 {
			return c.sources[i].table.Route(at, prefix)
		}
	}
	return nil
}

// handOver adds the routes to a loopback that no longer belongs to this node to the tables.
func (c *Core) handOver(lo netip.Prefix) {
	for i := range c.sessions {
		key := ownRoute{i, lo}
		if ev, ok := c.own[key]; ok {
			delete(c.own, key)
			c.step(ev)
		}
	}
}
