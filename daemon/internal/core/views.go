package core

import (
	"net/netip"
	"slices"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
)

// Plane returns the combined view of a plane over its source groups.
func (c *Core) Plane(index int) (out fare.PlaneView) {
	for i := range c.sources {
		if at := c.layout.Sources[i].at.planes[index]; at >= 0 {
			view := c.sources[i].table.Plane(at)
			out.Up, out.Drained = out.Up || view.Up, view.Drained // a drain concerns all source groups
		}
	}
	return out
}

// SubPort returns the view of a sub-port, which is the same in all source groups that it serves.
func (c *Core) SubPort(index int) fare.SubPortView {
	i := c.layout.sourceOf(index)
	return c.sources[i].table.SubPort(c.layout.Sources[i].at.subPorts[index])
}

// SessionViews returns every session; its routes are evaluated by the first source group that its sub-port serves.
func (c *Core) SessionViews() []fare.SessionView {
	out := make([]fare.SessionView, len(c.sessions))
	for i := len(c.sources) - 1; i >= 0; i-- {
		views := c.sources[i].table.Sessions(nil)
		for k, at := range c.layout.Sources[i].at.sessions {
			if at >= 0 {
				out[k] = views[at]
			}
		}
	}
	return out
}

// Ignored counts the inputs that tables did not use for a reason, once for each source group that they concern.
func (c *Core) Ignored(r fare.Reason) (n uint64) {
	for i := range c.sources {
		stats := c.sources[i].table.Stats()
		n += stats.Events.Reason(r)
	}
	return n
}

// Config returns the current configuration, which the caller must not modify.
func (c *Core) Config() *config.Config { return c.cfg }

// Layout returns the numbers of the current configuration, which the caller must not modify.
func (c *Core) Layout() *Layout { return &c.layout }

// FlowHash returns the data plane's flow hash that source ports follow.
func (c *Core) FlowHash() FlowHash { return c.flowHash }

// SessionState is the core's state of a session.
type SessionState struct {
	Up       bool
	Node     netip.Addr // the last neighbor's; zero before the first
	PeerAS   uint32     // the last neighbor's
	NextHop  netip.Addr // the neighbor's address, once it is known
	EndOfRIB bool       // End-of-RIB has arrived for every family that the session carries
}

// SessionState returns the state of a session.
func (c *Core) SessionState(i int) SessionState {
	s := &c.sessions[i]
	return SessionState{Up: s.up, Node: s.node, PeerAS: s.peerAS, NextHop: s.nextHop, EndOfRIB: s.eorDone(&c.layout.Sessions[i])}
}

// Group returns the view of a source group's group of destinations, by the number of the engine's group
// (wecmp.VectorView.Group). A plane that keeps the data plane's share during the start has no reason not to count.
func (c *Core) Group(source int, group uint32) fare.GroupView {
	s := &c.sources[source]
	if group%2 == 0 {
		return s.table.Group(fare.GroupID(group / 2))
	}
	if s.start == nil || int(group/2) >= len(s.start.byNumber) {
		return fare.GroupView{Planes: make([]fare.PlaneBandwidth, len(s.planes))}
	}
	class := s.start.byNumber[group/2]
	view := s.table.Group(class.group)
	if view.Planes = slices.Clone(view.Planes); view.Planes == nil {
		view.Reason = fare.ReasonNoRoute
		for range s.planes {
			view.Planes = append(view.Planes, fare.PlaneBandwidth{Reason: fare.ReasonNoRoute})
		}
	}
	if class.vector >= 0 {
		held := s.start.vectors[class.vector]
		for p, kept := range s.start.keptBy(class) {
			for k := range held[p] {
				if kept && s.heldWeight(&c.layout.Sources[source], held, p, k, class.group) > 0 {
					view.Planes[p].Reason = fare.ReasonUsed
				}
			}
		}
	}
	return view
}

// Explain describes how the path bandwidth of a source group's destination was derived.
func (c *Core) Explain(source int, prefix netip.Prefix) fare.Description {
	return c.sources[source].table.Describe(prefix)
}

// Destinations yields the destinations of all source groups with their vectors.
func (c *Core) Destinations(yield func(source int, prefix netip.Prefix, vector uint32)) {
	for i := range c.sources {
		s := &c.sources[i]
		if s.engine == nil {
			return
		}
		for prefix := range s.table.Destinations {
			if vector, ok := s.engine.Destination(prefix); ok {
				yield(i, prefix, c.vectorID(i, vector))
			}
		}
	}
}

// Conflicts returns the number of destinations that several origins announce.
func (c *Core) Conflicts() int { return len(c.claims.conflicts) }

// ClaimedLoopbacks returns the number of own loopbacks that another AS announces.
func (c *Core) ClaimedLoopbacks() int { return len(c.claims.own) }

// OwnLoopbacks returns the number of received routes to own loopbacks, which are rejected.
func (c *Core) OwnLoopbacks() uint64 { return c.ownLoopbacks }
