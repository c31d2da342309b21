package core

import (
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"

	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// Describe writes all of the core's decisions as text: the same events give the same bytes.
func (c *Core) Describe(w io.Writer) {
	fmt.Fprintf(w, "converged %v\n", c.converged)
	for i := range c.subPorts {
		p := &c.subPorts[i]
		fmt.Fprintf(w, "sub-port %s link %v speed %s established %d\n", c.layout.SubPorts[i].Device, p.link, p.speed, p.established)
	}
	for i := range c.sessions {
		s := &c.sessions[i]
		fmt.Fprintf(w, "session %s up %v generation %d node %s eor %v advert %d settled %v\n",
			c.layout.Sessions[i].Name, s.up, s.generation, s.node, s.eor, s.advert, s.settled())
	}
	for _, d := range c.drains {
		fmt.Fprintf(w, "drain %s %s\n", d.target, d.stage)
		if d.restored {
			fmt.Fprintf(w, "drain %s restored\n", d.target)
		}
	}
	if c.flowHash != (FlowHash{}) {
		fmt.Fprintf(w, "flow hash %s\n", c.flowHash)
	}
	for i := range c.subPorts {
		if c.subPorts[i].idle {
			fmt.Fprintf(w, "sub-port %s idle\n", c.layout.SubPorts[i].Device)
		}
	}
	// Recordings of versions before these events have neither, so their digests stay as they were.
	for i := range c.sessions {
		if hop := c.sessions[i].nextHop; hop != c.layout.Sessions[i].Peer {
			fmt.Fprintf(w, "session %s next hop %s\n", c.layout.Sessions[i].Name, hop)
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(c.landings), flow.compare) {
		fmt.Fprintf(w, "landing %s to %s %x\n", key.src, key.dst, c.landings[key].digest)
	}
	for i := range c.sources {
		if len(c.sources) > 1 {
			fmt.Fprintf(w, "source %s\n", c.layout.Sources[i].Name)
		}
		c.sources[i].describe(w, c.cfg.Role)
	}
}

func (s *sourceGroup) describe(w io.Writer, role fare.Role) {
	for prefix, plane := range s.table.Avoidances {
		fmt.Fprintf(w, "avoided %s plane %d\n", prefix, plane)
	}
	for prefix := range s.table.Destinations {
		fmt.Fprintf(w, "destination %s\n", prefix)
		if role == fare.RoleLeaf {
			b, path, ok := s.table.Readvertise(prefix)
			fmt.Fprintf(w, "  readvertise %v %s %v\n", ok, b, path)
		}
		if s.engine == nil {
			continue
		}
		s.describeVector(w, prefix)
	}
	if s.start == nil {
		return
	}
	for _, prefix := range s.start.destinations() {
		if _, known := s.table.Destination(prefix); !known {
			fmt.Fprintf(w, "kept destination %s\n", prefix)
			s.describeVector(w, prefix)
		}
	}
}

func (s *sourceGroup) describeVector(w io.Writer, prefix netip.Prefix) {
	id, _ := s.engine.Destination(prefix)
	if v, ok := s.engine.Vector(id); ok {
		// The ID is omitted: IDs are reused once a deletion has been reported, which depends on the caller.
		fmt.Fprintf(w, "  vector %v %v %v %v\n", v.Reachable, v.Weights, v.SubPortWeights, v.Slots)
	}
}

// describe returns an event as text, with the names of the configuration.
func (l *Layout) describe(ev Event) string {
	session := func(i int) string {
		if i < 0 || i >= len(l.Sessions) {
			return fmt.Sprintf("session %d", i)
		}
		return "session " + l.Sessions[i].Name
	}
	subPort := func(i int) string {
		if i < 0 || i >= len(l.SubPorts) {
			return fmt.Sprintf("sub-port %d", i)
		}
		return "sub-port " + l.SubPorts[i].Device
	}
	switch ev := ev.(type) {
	case Fabric:
		switch f := ev.Event.(type) {
		case fare.SessionUp:
			return fmt.Sprintf("%s up, generation %d, node %s", session(f.Session), f.Generation, f.Node)
		case fare.SessionDown:
			return fmt.Sprintf("%s down, generation %d", session(f.Session), f.Generation)
		case fare.RouteUpdate:
			return fmt.Sprintf("%s has %s", session(f.Session), f.Prefix)
		case fare.RouteWithdraw:
			return fmt.Sprintf("%s has no %s", session(f.Session), f.Prefix)
		case fare.LinkState:
			state := "down"
			if f.Up {
				state = "up"
			}
			return fmt.Sprintf("%s %s, %s", subPort(f.SubPort), state, f.Speed)
		}
		return fmt.Sprintf("%T", ev.Event)
	case EndOfRIB:
		return session(ev.Session) + " sent End-of-RIB"
	case RoutesWritten:
		return session(ev.Session) + " has sent the routes of the drain"
	case NextHop:
		return fmt.Sprintf("%s has next hop %s", session(ev.Session), ev.Address)
	case Landing:
		if len(ev.Table) == 0 {
			return fmt.Sprintf("landing of flows from %s to %s is no longer known", ev.Source, ev.Destination)
		}
		return fmt.Sprintf("landing of flows from %s to %s", ev.Source, ev.Destination)
	case Avoid:
		to := Update{Update: wecmp.Update{Destination: ev.Destination}}
		if ev.Source >= 0 && ev.Source < len(l.Sources) {
			to.Name = l.Sources[ev.Source].Name
		}
		plane := fmt.Sprint("plane ", ev.Plane)
		if ev.Plane >= 0 && ev.Plane < len(l.Planes) {
			plane = "plane " + l.Planes[ev.Plane]
		}
		if ev.On {
			return fmt.Sprintf("probes by %s to %s are lost", plane, to.destination())
		}
		return fmt.Sprintf("probes by %s to %s are answered", plane, to.destination())
	case DrainRequest:
		if ev.On {
			return fmt.Sprintf("drain of %s", ev.Target)
		}
		return fmt.Sprintf("undrain of %s", ev.Target)
	case DrainRestored:
		return fmt.Sprintf("drain of %s is restored", ev.Target)
	case DrainStep:
		return fmt.Sprintf("drain of %s continues", ev.Target)
	}
	return ev.event()
}

// destination names the destination of an update: "10.255.1.0/32 from 10.255.0.1/32", or the prefix alone if there is
// one source group.
func (u *Update) destination() string {
	if u.Name.IsValid() {
		return u.Destination.String() + " from " + u.Name.String()
	}
	return u.Destination.String()
}

// changedWeights returns the vectors and destinations that an event changed, for a replay's timeline.
func (c *Core) changedWeights(updates []Update) []string {
	var out []string
	for _, u := range updates {
		switch u.Kind {
		case wecmp.VectorSet:
			if v, ok := c.Vector(u.Vector); ok {
				out = append(out, fmt.Sprintf("vector %d: weights %v, %d slots moved", u.Vector, v.Weights, u.SlotsMoved))
			}
		case wecmp.DestinationSet:
			out = append(out, fmt.Sprintf("%s: vector %d", u.destination(), u.Vector))
		case wecmp.DestinationDelete:
			out = append(out, fmt.Sprintf("%s: gone", u.destination()))
		}
	}
	return slices.Clip(out)
}
