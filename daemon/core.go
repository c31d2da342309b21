package daemon

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// Route is a route to advertise on a session.
type Route struct {
	Prefix netip.Prefix
	// Communities are extended communities as they go on the wire.
	Communities []fare.Community
	// ASPath is what stands before our own AS is prepended; empty for what we originate.
	ASPath []uint32
}

// Fault is a decision that could not be carried out.
type Fault struct {
	Subject string
	Err     error
}

// SubPortOp is the fast path: one operation toward the data plane for a lost or returned sub-port.
type SubPortOp struct {
	SubPort int
	Up      bool
}

// Core decides. It is deterministic and does no I/O; its methods are for one goroutine.
type Core struct {
	cfg      *config.Config
	layout   layout
	table    *fare.Table
	engine   *wecmp.Engine  // nil for a leaf without a data plane
	planner  *wecmp.Planner // chooses source ports; safe for any goroutine; nil where engine is
	flowHash FlowHash       // of the data plane, where that is what ports are chosen by
	asked    wecmp.Asked    // where flows land that a data plane has to be asked for; nil: not to be had
	subPorts []subPort
	sessions []session
	drains   []drain // sorted by target text

	converged bool
	faults    []Fault
	// ownLoopbacks counts routes to our own loopbacks, which are not taken.
	ownLoopbacks uint64
	// One entry for each outgoing thing that may differ from what was handed out.
	subPortDirty bool
	advertDirty  bool             // every session's wanted set
	advertOf     []uint64         // generation a session's set was last handed out in
	planes       []wecmp.Capacity // scratch of setGroup
}

// subPort is what the core knows of one physical lane.
type subPort struct {
	known       bool // a link state has been told
	link        bool
	speed       fare.Bandwidth
	established int
	everUsable  bool
	handed      linkVerdict
}

type linkVerdict uint8

const (
	linkUnsaid linkVerdict = iota
	linkUp
	linkDown
)

// session is what the core knows of one BGP session.
type session struct {
	subPort    int
	up         bool
	generation uint64
	node       netip.Addr
	peerAS     uint32
	eor        [2]bool // IPv4, IPv6
	advert     advertStage
}

// eorDone says whether End-of-RIB has come for every family that the session carries.
func (s *session) eorDone(l *layoutSession) bool {
	return (s.eor[0] || !l.families[0]) && (s.eor[1] || !l.families[1])
}

// advertStage is how far a drain has gone for a session's advertisements.
type advertStage uint8

const (
	advertNormal advertStage = iota
	advertZero               // every route with zero bandwidth (RFC 10005: maintenance)
	advertNone               // nothing
)

// drain is one target that is out of service, or on its way there or back.
type drain struct {
	target DrainTarget
	stage  DrainStage
}

// DrainStage is how far a drain or its reversal has gone.
type DrainStage uint8

// The stages in order. Shares go first, then the routes; on the way back the routes first, then the shares.
const (
	// DrainShares: weights are zero, the data plane has not confirmed yet.
	DrainShares DrainStage = iota
	// DrainRoutes: routes are advertised with zero bandwidth, so that peers move away before they vanish.
	DrainRoutes
	// Drained: routes are withdrawn.
	Drained
	// Undraining: routes are advertised again, shares are still zero.
	Undraining
)

func (s DrainStage) String() string {
	return [...]string{"shares", "routes", "drained", "undraining"}[s]
}

// NewCore returns the core for a resolved configuration.
func NewCore(cfg *config.Config) (*Core, error) {
	c := &Core{cfg: cfg, layout: newLayout(cfg)}
	table, err := fare.NewTable(c.layout.fareConfig(cfg))
	if err != nil {
		return nil, err
	}
	c.table = table
	if cfg.Forwards() {
		engine := c.layout.engineConfig(cfg)
		if c.engine, err = wecmp.NewEngine(engine); err != nil {
			return nil, err
		}
		if c.planner, err = wecmp.NewPlanner(engine); err != nil {
			return nil, err
		}
		for _, p := range engine.Planes {
			c.planes = append(c.planes, wecmp.Capacity{SubPorts: make([]uint64, len(p.SubPorts))})
		}
	}
	c.subPorts = make([]subPort, len(c.layout.subPorts))
	for i := range c.subPorts {
		c.subPorts[i].speed = c.layout.subPorts[i].Speed
	}
	c.sessions = make([]session, len(c.layout.sessions))
	for i := range c.sessions {
		c.sessions[i].subPort = c.layout.sessions[i].subPort
	}
	c.advertOf = make([]uint64, len(c.sessions))
	return c, nil
}

// fault keeps what the engine refused for Faults: the state is what it was before, and somebody must be told.
func (c *Core) fault(subject string, err error) {
	if err != nil {
		c.faults = append(c.faults, Fault{subject, err})
	}
}

// Faults returns what went wrong since the last call.
func (c *Core) Faults() []Fault {
	faults := c.faults
	c.faults = nil
	return faults
}

// settleSubPorts forgets what SubPortOps would return: there is no data plane.
func (c *Core) settleSubPorts() { c.subPortDirty = false }

// Step takes one event. What follows from it is read with SubPortOps, Updates and Advertise.
func (c *Core) Step(ev Event) error {
	switch ev := ev.(type) {
	case Fabric:
		c.fabric(ev.Event)
	case EndOfRIB:
		s := &c.sessions[ev.Session]
		if s.up && s.generation == ev.Generation {
			family := 0
			if ev.IPv6 {
				family = 1
			}
			s.eor[family] = true
			if s.eorDone(&c.layout.sessions[ev.Session]) {
				c.step(fare.EndOfRIB{Session: ev.Session, Generation: ev.Generation})
			}
			c.checkConverged()
		}
	case StartDeadline:
		c.setConverged()
	case DataplaneReady:
		if c.engine != nil {
			c.fault("the data plane's limits", c.engine.SetLimits(tighter(c.cfg.Weights.MaxWeight, ev.MaxWeight), tighter(c.cfg.Weights.MaxWeightSum, ev.MaxWeightSum)))
			c.setFlowHash(ev.FlowHash)
		}
	case DrainRequest:
		return c.drainRequest(ev)
	case DrainStep:
		c.drainStep(ev)
	case Reload:
		return c.reload(ev)
	default:
		return fmt.Errorf("no rule for event %T", ev)
	}
	return nil
}

// tighter returns the smaller of two limits, where 0 is no limit.
func tighter(a, b uint32) uint32 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// fabric keeps the core's own view of links and sessions and hands the event to the table.
func (c *Core) fabric(ev fare.Event) {
	switch ev := ev.(type) {
	case fare.SessionUp:
		s := &c.sessions[ev.Session]
		if !s.up {
			c.subPorts[s.subPort].established++
		}
		s.up, s.generation, s.node, s.peerAS, s.eor = true, ev.Generation, ev.Node, ev.PeerAS, [2]bool{}
		c.usableChanged()
		c.step(ev)
		c.applyLeafDrains()
		return
	case fare.SessionDown:
		s := &c.sessions[ev.Session]
		if s.up && s.generation == ev.Generation {
			s.up = false
			c.subPorts[s.subPort].established--
			c.usableChanged()
		}
	case fare.RouteUpdate:
		// Nobody else can be where our own GPUs are: such a route would lead a server's traffic to itself out of the server.
		if slices.Contains(c.cfg.Loopbacks, ev.Prefix) {
			c.ownLoopbacks++
			c.step(fare.RouteWithdraw{Session: ev.Session, Generation: ev.Generation, Prefix: ev.Prefix})
			return
		}
	case fare.LinkState:
		p := &c.subPorts[ev.SubPort]
		if ev.Speed != 0 && ev.Speed != p.speed {
			p.speed = ev.Speed
			c.advertDirty = true
		}
		p.known, p.link = true, ev.Up
		c.usableChanged()
	}
	c.step(ev)
	c.checkConverged()
}

// usableChanged notes that a sub-port may be usable now, or not any more.
func (c *Core) usableChanged() {
	c.subPortDirty = true
	c.advertDirty = c.advertDirty || c.cfg.PathBandwidth.Advertise == config.AdvertiseNode
}

// step runs the table and carries its changes to the engine.
func (c *Core) step(ev fare.Event) {
	c.apply(c.table.Step(ev))
}

func (c *Core) apply(changes []fare.Change) {
	for _, ch := range changes {
		switch {
		case ch.Kind == fare.Readvertise:
			c.advertDirty = true
		case c.engine == nil:
		case ch.Kind == fare.GroupSet:
			c.setGroup(ch.Group)
		case ch.Kind == fare.GroupDelete:
			c.fault("weight engine", c.engine.DeleteGroup(uint32(ch.Group)))
		case ch.Kind == fare.DestinationSet:
			c.fault("weight engine", c.engine.SetDestination(ch.Destination, uint32(ch.Group)))
		case ch.Kind == fare.DestinationDelete:
			c.engine.DeleteDestination(ch.Destination)
		}
	}
}

// setGroup translates a group's path bandwidths into the engine's unit-free capacities.
func (c *Core) setGroup(id fare.GroupID) {
	view := c.table.Group(id)
	for p := range c.planes {
		in := &view.Planes[p]
		out := &c.planes[p]
		out.Capacity, out.Bandwidth = in.Capacity, uint64(in.Bandwidth)
		clear(out.SubPorts)
		for _, sp := range in.SubPorts {
			out.SubPorts[c.layout.subPorts[sp.SubPort].inPlane] = sp.Weight
		}
	}
	c.fault("weight engine", c.engine.SetGroup(uint32(id), c.planes))
}

// SubPortOps returns the sub-ports whose verdict toward the data plane changed since the last call. A sub-port is up
// when its link is up and a session over it is established. One that has never been up since start is not declared down
// before convergence: until then nothing in effect is taken away.
func (c *Core) SubPortOps(buf []SubPortOp) []SubPortOp {
	buf = buf[:0]
	if !c.subPortDirty {
		return buf
	}
	c.subPortDirty = false
	for i := range c.subPorts {
		p := &c.subPorts[i]
		usable := p.link && p.established > 0
		p.everUsable = p.everUsable || usable
		verdict := linkDown
		if usable {
			verdict = linkUp
		}
		if verdict == p.handed || verdict == linkDown && !p.everUsable && !c.converged {
			continue
		}
		p.handed = verdict
		buf = append(buf, SubPortOp{i, usable})
	}
	return buf
}

// Updates returns what the engine decided since the last call: vectors and destinations, in the order to program them.
// The slice is valid until the next Step.
func (c *Core) Updates() []wecmp.Update {
	if c.engine == nil {
		return nil
	}
	return c.engine.Updates()
}

// Advertise calls set for every session whose wanted routes may have changed since the last call. What a server says is
// handed out before the session is established, and so is there when End-of-RIB is said; a leaf leaves out what the
// neighbour would drop, and must know it first.
func (c *Core) Advertise(set func(session int, routes []Route)) {
	for i := range c.sessions {
		s := &c.sessions[i]
		if !s.up && c.cfg.Role == fare.RoleLeaf || !c.advertDirty && c.advertOf[i] == s.generation {
			continue
		}
		c.advertOf[i] = s.generation
		set(i, c.wanted(i))
	}
	c.advertDirty = false
}

// wanted returns the complete set of routes for a session; empty and not nil when there is none.
func (c *Core) wanted(i int) []Route {
	s := &c.sessions[i]
	routes := []Route{}
	if s.advert == advertNone {
		return routes
	}
	codec := c.layout.sessions[i].codec
	with := func(b fare.Bandwidth, known bool) []fare.Community {
		if !known {
			return nil
		}
		return []fare.Community{codec.Encode(b, c.cfg.RouterID)}
	}
	if c.cfg.Role == fare.RoleServer {
		for _, lo := range c.cfg.Loopbacks {
			if c.layout.sessions[i].carries(lo) {
				routes = append(routes, Route{Prefix: lo, Communities: with(c.ownBandwidth(i, lo))})
			}
		}
		return routes
	}
	part, whole := c.part(i)
	for prefix := range c.table.Destinations {
		if !c.layout.sessions[i].carries(prefix) {
			continue
		}
		bandwidth, path, ok := c.table.Readvertise(prefix)
		// The peer would drop a path with its own AS in it (RFC 4271, Section 9.1.2); it need not be sent.
		if !ok || slices.Contains(path, s.peerAS) {
			continue
		}
		if s.advert == advertZero {
			bandwidth = 0
		}
		routes = append(routes, Route{Prefix: prefix, Communities: with(bandwidth.Part(part, whole), true), ASPath: path})
	}
	return routes
}

// part is which part of the bandwidth toward a destination a leaf says on a session: the whole to a server. Spines pass on what a
// leaf says, and other leaves add it up, so its uplinks of a plane share it by speed. All that are configured count: were a lost
// one's part given to the others, nobody behind them would learn that there is less. What is not known to be slower counts as fast.
func (c *Core) part(session int) (part, whole fare.Bandwidth) {
	at, plane := c.sessions[session].subPort, c.layout.sessions[session].plane
	if !c.layout.subPorts[at].Uplink {
		return 1, 1
	}
	fastest, unknown := fare.Bandwidth(1), fare.Bandwidth(0)
	for i := range c.layout.subPorts {
		if l := &c.layout.subPorts[i]; l.Uplink && l.plane == plane {
			speed := c.subPorts[i].speed
			if speed == 0 {
				unknown++
			}
			whole, fastest = whole.Add(speed), max(fastest, speed)
		}
	}
	if part = c.subPorts[at].speed; part == 0 {
		part = fastest
	}
	return part, whole.Add(unknown * fastest) // at most 2^10 of 2^53
}

// ownBandwidth is what a server says of a loopback on a session that carries it; false: the speed of a sub-port that counts is
// not known. With path_bandwidth.advertise: sub-port that is the session's own; with node also every other over which a session
// that carries the loopback is established to the same node. Until a session is established nobody knows its node, and it says
// its own sub-port alone, which is never too much. What is drained adds nothing.
func (c *Core) ownBandwidth(session int, loopback netip.Prefix) (sum fare.Bandwidth, known bool) {
	s, plane := &c.sessions[session], c.layout.sessions[session].plane
	node := s.up && c.cfg.PathBandwidth.Advertise == config.AdvertiseNode
	counted := -1
	for i := range c.sessions {
		o, l := &c.sessions[i], &c.layout.sessions[i]
		with := node && o.up && o.node == s.node && l.plane == plane && l.carries(loopback) && c.subPorts[o.subPort].link
		if i != session && !with || o.advert != advertNormal || o.subPort == counted { // those of a sub-port are neighbours
			continue
		}
		counted = o.subPort
		speed := c.subPorts[counted].speed
		if speed == 0 {
			return 0, false
		}
		sum = sum.Add(speed)
	}
	return sum, true
}

// Converged says whether every session that can come up has sent End-of-RIB, or the deadline has passed.
func (c *Core) Converged() bool { return c.converged }

// checkConverged ends the start when every session that can come up has sent everything. One whose link is known to be
// down cannot; when that is all of them, the deadline decides.
func (c *Core) checkConverged() {
	if c.converged {
		return
	}
	any := false
	for i := range c.sessions {
		p := &c.subPorts[c.sessions[i].subPort]
		if p.known && !p.link {
			continue
		}
		if !c.sessions[i].eorDone(&c.layout.sessions[i]) {
			return
		}
		any = true
	}
	if any {
		c.setConverged()
	}
}

func (c *Core) setConverged() {
	if !c.converged {
		c.converged = true
		c.subPortDirty = true
	}
}
