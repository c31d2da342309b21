package core

import (
	"net/netip"
	"slices"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// SourceLayout is the part of a layout that serves a source group, with its own indexes. It omits planes without a
// sub-port of the source group.
type SourceLayout struct {
	Layout
	Loopbacks []netip.Prefix
	// Name identifies the source group toward the data plane: its first loopback, or the zero value if there is only
	// one source group.
	Name netip.Prefix
	// at maps indexes of planes, sub-ports and sessions of the whole layout to those of the source group; -1 means
	// absent.
	at struct{ planes, subPorts, sessions []int }
}

// serving returns the part of a layout that serves a source group.
func (l *Layout) serving(g config.SourceGroup) SourceLayout {
	s := SourceLayout{Loopbacks: g.Loopbacks}
	s.at.planes, s.at.subPorts, s.at.sessions = absent(len(l.Planes)), absent(len(l.SubPorts)), absent(len(l.Sessions))
	for _, i := range g.SubPorts {
		sp := l.SubPorts[i]
		if s.at.planes[sp.Plane] < 0 {
			s.at.planes[sp.Plane] = len(s.Planes)
			s.Planes, s.OfPlane = append(s.Planes, l.Planes[sp.Plane]), append(s.OfPlane, nil)
		}
		sp.Plane = s.at.planes[sp.Plane]
		sp.inPlane = len(s.OfPlane[sp.Plane])
		s.at.subPorts[i] = len(s.SubPorts)
		s.OfPlane[sp.Plane] = append(s.OfPlane[sp.Plane], len(s.SubPorts))
		s.SubPorts = append(s.SubPorts, sp)
	}
	for i, ses := range l.Sessions {
		if at := s.at.subPorts[ses.SubPort]; at >= 0 {
			ses.SubPort, ses.Plane = at, s.at.planes[ses.Plane]
			s.at.sessions[i] = len(s.Sessions)
			s.Sessions = append(s.Sessions, ses)
		}
	}
	return s
}

// absent returns n times -1.
func absent(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = -1
	}
	return out
}

// localize translates an event of the whole server into one of the source group, or returns nil if it does not concern
// the source group.
func (s *SourceLayout) localize(ev fare.Event) fare.Event {
	if !s.Name.IsValid() {
		return ev // the only source group has the same indexes
	}
	move := func(index *int, at []int) bool {
		*index = at[*index]
		return *index >= 0
	}
	switch ev := ev.(type) {
	case fare.SessionUp:
		if move(&ev.Session, s.at.sessions) {
			return ev
		}
	case fare.SessionDown:
		if move(&ev.Session, s.at.sessions) {
			return ev
		}
	case fare.EndOfRIB:
		if move(&ev.Session, s.at.sessions) {
			return ev
		}
	case fare.RouteUpdate:
		if move(&ev.Session, s.at.sessions) {
			return ev
		}
	case fare.RouteWithdraw:
		if move(&ev.Session, s.at.sessions) {
			return ev
		}
	case fare.LinkState:
		if move(&ev.SubPort, s.at.subPorts) {
			return ev
		}
	case fare.Drain:
		switch {
		case ev.Scope == fare.DrainPlane && !move(&ev.Index, s.at.planes), ev.Scope == fare.DrainSubPort && !move(&ev.Index, s.at.subPorts):
			return nil
		}
		return ev
	default:
		return ev
	}
	return nil
}

// Loopbacks returns the loopbacks of each source group by its name.
func (l *Layout) Loopbacks() map[netip.Prefix][]netip.Prefix {
	out := map[netip.Prefix][]netip.Prefix{}
	for i := range l.Sources {
		out[l.Sources[i].Name] = l.Sources[i].Loopbacks
	}
	return out
}

// SourceOfLoopback returns the source group of each loopback.
func (l *Layout) SourceOfLoopback() map[netip.Addr]int {
	out := map[netip.Addr]int{}
	for i := range l.Sources {
		for _, lo := range l.Sources[i].Loopbacks {
			out[lo.Addr()] = i
		}
	}
	return out
}

// SourceNamed returns the index of the source group with a name.
func (l *Layout) SourceNamed(name netip.Prefix) int {
	for i := range l.Sources {
		if l.Sources[i].Name == name {
			return i
		}
	}
	return 0
}

// sourceOf returns the index of the first source group that a sub-port serves.
func (l *Layout) sourceOf(subPort int) int {
	for i := range l.Sources {
		if l.Sources[i].at.subPorts[subPort] >= 0 {
			return i
		}
	}
	return 0
}

// sourceGroup computes the weights for the loopbacks that the same sub-ports serve.
type sourceGroup struct {
	table  *fare.Table
	engine *wecmp.Engine    // nil for a leaf without a data plane
	planes []wecmp.Capacity // scratch space of capacities
	start  *start           // nil without a start of which the data plane has state
	lane   uint32           // see vectorID
}

func newSourceGroup(cfg *config.Config, l *SourceLayout) (s sourceGroup, err error) {
	if s.table, err = fare.NewTable(l.fareConfig(cfg)); err != nil || !cfg.Forwards() {
		return s, err
	}
	engine := l.EngineConfig(cfg)
	if s.engine, err = wecmp.NewEngine(engine); err != nil {
		return sourceGroup{}, err
	}
	for _, p := range engine.Planes {
		s.planes = append(s.planes, wecmp.Capacity{SubPorts: make([]uint64, len(p.SubPorts))})
	}
	return s, nil
}

// setGroup passes the weights of a group of the table to the engine.
func (s *sourceGroup) setGroup(l *SourceLayout, id fare.GroupID) error {
	s.capacities(l, id)
	return s.engine.SetGroup(tableGroup(id), s.planes)
}

// capacities translates a group's path bandwidths into the engine's unit-free capacities, in s.planes. Group 0 has
// none.
func (s *sourceGroup) capacities(l *SourceLayout, id fare.GroupID) {
	view := s.table.Group(id)
	for p := range s.planes {
		out := &s.planes[p]
		out.Capacity, out.Bandwidth = 0, 0
		clear(out.SubPorts)
		if p < len(view.Planes) {
			in := &view.Planes[p]
			out.Capacity, out.Bandwidth = in.Capacity, uint64(in.Bandwidth)
			for _, sp := range in.SubPorts {
				out.SubPorts[l.SubPorts[sp.SubPort].inPlane] = sp.Weight
			}
		}
	}
}

// vectorID returns a number for an engine's vector that is unique over all source groups; 0 stays 0: (vector-1) x
// stride + lane + 1. A source group has its lane as long as it exists. With one source group the number equals the
// engine's.
func (c *Core) vectorID(source int, vector uint32) uint32 {
	if vector == 0 {
		return 0
	}
	return (vector-1)*c.stride + c.sources[source].lane + 1
}

// OwnerOf is the inverse of vectorID. The source is -1 for a number of a lane without a source group.
func (c *Core) OwnerOf(id uint32) (source int, vector uint32) {
	if id == 0 {
		return 0, 0
	}
	lane := (id - 1) % c.stride
	return slices.IndexFunc(c.sources, func(s sourceGroup) bool { return s.lane == lane }), (id-1)/c.stride + 1
}

// Vector returns a vector by its unique number.
func (c *Core) Vector(id uint32) (wecmp.VectorView, bool) {
	source, vector := c.OwnerOf(id)
	if source < 0 {
		return wecmp.VectorView{}, false
	}
	return c.sources[source].engine.Vector(vector)
}
