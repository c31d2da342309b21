package core

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
	// Communities are extended communities in wire format.
	Communities []fare.Community
	// ASPath is the AS path before our own AS is prepended; empty for originated routes.
	ASPath []uint32
	// Signals are those of a route that a leaf passes on.
	Signals fare.Signals
	// Extended is the extended Link Bandwidth of a route that a leaf passes on as it is.
	Extended fare.IPv6Community
}

// Fault is a decision that could not be carried out.
type Fault struct {
	Subject string
	Err     error
}

// SubPortOp is the fast path: one operation toward the data plane for a sub-port that has failed or returned.
type SubPortOp struct {
	SubPort int
	Up      bool
}

// Core makes the decisions. It is deterministic and does no I/O; its methods are for one goroutine.
type Core struct {
	cfg      *config.Config
	layout   Layout
	sources  []sourceGroup      // in the order of layout.sources
	stride   uint32             // see vectorID
	gone     []Update           // removals of objects that a reload has left without an engine
	limits   [2]uint32          // of the data plane: the greatest weight and sum of weights; 0 means none
	held     DataplaneReady     // of the first data plane, until the end of the start
	ready    bool               // a data plane has connected
	flowHash FlowHash           // of the data plane, if source ports follow it
	landings map[flow]placement // the data plane's answers
	subPorts []subPort
	sessions []session
	drains   []drain // sorted by target text
	marks    uint64  // number of marks assigned to sessions so far

	converged bool
	faults    []Fault
	// ownLoopbacks counts received routes to our own loopbacks, which are rejected.
	ownLoopbacks uint64
	// own contains the currently announced routes to our own loopbacks: a reload may give such a loopback to another
	// server.
	own    map[ownRoute]fare.RouteUpdate
	claims claims
	// unbelieved records the path bandwidth that weights ignore.
	unbelieved  ignored
	advertDirty bool     // the wanted set of any session may differ from the last applied one
	advertOf    []uint64 // generation in which a session's set was last applied
	updates     []Update // scratch space of Updates
}

// subPort is the core's state of one physical lane.
type subPort struct {
	known       bool // a link state has been received
	link        bool
	speed       fare.Bandwidth
	established int
	everUsable  bool
	idle        bool // down in the data plane when that connected for the first time
	handed      linkVerdict
}

type linkVerdict uint8

const (
	linkUnsaid linkVerdict = iota
	linkUp
	linkDown
)

// session is the core's state of one BGP session.
type session struct {
	subPort    int
	up         bool
	generation uint64
	nextHop    netip.Addr // the peer's address, once it is known
	node       netip.Addr
	peerAS     uint32
	eor        [2]bool // IPv4, IPv6
	closed     bool    // the peer closed the last connection, see [fare.SessionDown]
	keeps      [2]bool // IPv4, IPv6: during the start, the data plane's state counts in place of the session's routes
	advert     advertStage
	mark       uint64 // mark of the routes of stage advert; 0 in advertNormal
	written    uint64 // the last mark up to which this generation's connection has carried the routes
}

// settled reports whether the session's connection has carried the routes of its stage. It is true without a connection
// and in advertNormal.
func (s *session) settled() bool { return !s.up || s.mark == 0 || s.written == s.mark }

// eorDone reports whether End-of-RIB has arrived for every family that the session carries.
func (s *session) eorDone(l *LayoutSession) bool {
	return (s.eor[0] || !l.FamilySet[0]) && (s.eor[1] || !l.FamilySet[1])
}

// advertStage is the effect of the drains on a session's advertisements.
type advertStage uint8

const (
	advertNormal advertStage = iota
	advertZero               // every route with zero bandwidth (RFC 10005: maintenance)
	advertNone               // no routes
)

// drain is a target that is drained, or is being drained or undrained.
type drain struct {
	target DrainTarget
	stage  DrainStage
	// restored: an earlier process began the drain, so no routes are advertised in any stage.
	restored bool
}

// DrainStage is the progress of a drain or its reversal.
type DrainStage uint8

// The stages in order. A drain first sets the shares to zero, then withdraws the routes; an undrain first advertises
// the routes, then restores the shares.
const (
	// DrainShares: weights are zero; the data plane has not confirmed them yet.
	DrainShares DrainStage = iota
	// DrainRoutes: routes are advertised with zero bandwidth, so that peers shift traffic before the routes are
	// withdrawn. The drain delay begins when the connections have carried the zero bandwidth.
	DrainRoutes
	// DrainWithdrawing: routes are withdrawn, but the connection of some session has not carried the withdrawals yet.
	DrainWithdrawing
	// Drained: no established session of the target has a route of ours, and the data plane sends nothing over it.
	Drained
	// Undraining: routes are advertised again; shares are still zero.
	Undraining
)

func (s DrainStage) String() string {
	return [...]string{"shares", "routes", "withdrawing", "drained", "undraining"}[s]
}

// New returns the core for a resolved configuration.
func New(cfg *config.Config) (*Core, error) {
	c := &Core{cfg: cfg, layout: NewLayout(cfg)}
	for i := range c.layout.Sources {
		s, err := newSourceGroup(cfg, &c.layout.Sources[i])
		if err != nil {
			return nil, err
		}
		s.lane = uint32(i)
		c.sources = append(c.sources, s)
	}
	c.stride = uint32(len(c.sources))
	c.subPorts = make([]subPort, len(c.layout.SubPorts))
	for i := range c.subPorts {
		c.subPorts[i].speed = c.layout.SubPorts[i].Speed
	}
	c.sessions = make([]session, len(c.layout.Sessions))
	for i := range c.sessions {
		c.sessions[i].subPort, c.sessions[i].nextHop = c.layout.Sessions[i].SubPort, c.layout.Sessions[i].Peer
	}
	c.advertOf = make([]uint64, len(c.sessions))
	return c, nil
}

// fault records an operation that the engine rejected, for Faults: the state stays as it was, and operators must be
// informed.
func (c *Core) fault(subject string, err error) {
	if err != nil {
		c.faults = append(c.faults, Fault{subject, err})
	}
}

// Faults returns the rejected operations, and the conflicts of origins that began or ended, since the last call.
func (c *Core) Faults() []Fault {
	faults := append(c.faults, c.claims.takeNews()...)
	c.faults = nil
	return faults
}

// Step processes one event. Its effects are available from SubPortOps, Updates and Advertise.
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
			if s.eorDone(&c.layout.Sessions[ev.Session]) {
				c.step(fare.EndOfRIB{Session: ev.Session, Generation: ev.Generation})
			}
			c.release(ev.Session, family)
			c.checkConverged()
		}
	case StartDeadline:
		c.endStart()
	case DataplaneReady:
		if !c.ready {
			if err := c.continueSlots(ev.Slots); err != nil {
				return err
			}
		}
		if c.cfg.Forwards() {
			c.limits = [2]uint32{ev.MaxWeight, ev.MaxWeightSum}
			for i := range c.sources {
				c.limit(&c.sources[i])
			}
			c.setFlowHash(ev.FlowHash)
			if !c.ready && !c.converged {
				c.held = ev
				c.adopt(ev)
			}
		}
		c.advertDirty = c.advertDirty || !c.ready // a server advertises nothing before its first data plane
		c.ready = true
	case DrainRequest:
		return c.drainRequest(ev)
	case DrainRestored:
		return c.drainRestored(ev)
	case DrainStep:
		c.drainStep(ev)
	case RoutesWritten:
		if s := &c.sessions[ev.Session]; s.up && s.generation == ev.Generation && ev.Mark == s.mark {
			s.written = ev.Mark
			c.settleDrains()
		}
	case NextHop:
		c.sessions[ev.Session].nextHop = ev.Address
	case Landing:
		c.land(ev)
	case Avoid:
		c.avoid(ev)
	case Reload:
		return c.reload(ev)
	default:
		return fmt.Errorf("no rule for event %T", ev)
	}
	return nil
}

// limit passes the limits of weights to the engine of a source group.
func (c *Core) limit(s *sourceGroup) {
	most, sum := tighter(c.cfg.Weights.MaxWeight, c.limits[0]), tighter(c.cfg.Weights.MaxWeightSum, c.limits[1])
	c.fault("the data plane's limits", s.engine.SetLimits(most, sum))
}

// tighter returns the smaller of two limits, where 0 means no limit.
func tighter(a, b uint32) uint32 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// fabric updates the core's own view of links and sessions and passes the event to the tables.
func (c *Core) fabric(ev fare.Event) {
	switch ev := ev.(type) {
	case fare.SessionUp:
		s := &c.sessions[ev.Session]
		if !s.up {
			c.subPorts[s.subPort].established++
		}
		c.forgetOwn(ev.Session)
		s.up, s.generation, s.node, s.peerAS, s.eor, s.written = true, ev.Generation, ev.Node, ev.PeerAS, [2]bool{}, 0
		c.noteOwn(c.cfg.Loopbacks...)
		c.usableChanged()
		c.step(ev)
		c.applyLeafDrains()
		c.settleDrains()
		return
	case fare.SessionDown:
		s := &c.sessions[ev.Session]
		if s.up && s.generation == ev.Generation {
			s.up, s.closed = false, ev.Closed
			c.forgetOwn(ev.Session)
			c.noteOwn(c.cfg.Loopbacks...)
			c.subPorts[s.subPort].established--
			c.usableChanged()
			c.settleDrains()
			if !ev.Closed { // else the next connection is awaited
				c.release(ev.Session)
			}
		}
	case fare.RouteUpdate:
		// Only this server can host its own GPUs: such a route would send a server's traffic to itself through the
		// fabric.
		if slices.Contains(c.cfg.Loopbacks, ev.Prefix) {
			c.ownLoopbacks++
			c.keepOwn(ev)
			c.noteOwn(ev.Prefix)
			return
		}
	case fare.RouteWithdraw:
		if c.sessions[ev.Session].generation == ev.Generation {
			if key := (ownRoute{ev.Session, ev.Prefix}); c.own[key].Attrs != nil {
				delete(c.own, key)
				c.noteOwn(ev.Prefix)
				return
			}
		}
	case fare.LinkState:
		p := &c.subPorts[ev.SubPort]
		if (ev.Speed != 0 || ev.Unknown) && ev.Speed != p.speed {
			p.speed = ev.Speed
			c.advertDirty = true
		}
		p.known, p.link = true, ev.Up
		c.usableChanged()
		for i := range c.sessions {
			if !ev.Up && c.sessions[i].subPort == ev.SubPort {
				c.release(i)
			}
		}
	}
	c.step(ev)
	c.checkConverged()
}

// usableChanged records that the usability of a sub-port may have changed. With path_bandwidth.advertise: node the
// routes of other sessions depend on it.
func (c *Core) usableChanged() {
	c.advertDirty = c.advertDirty || c.cfg.PathBandwidth.Advertise == config.AdvertiseNode
}

// step passes an event to the tables of the source groups that it concerns, and their changes to the engines.
func (c *Core) step(ev fare.Event) {
	for i := range c.sources {
		if local := c.layout.Sources[i].localize(ev); local != nil {
			c.apply(i, c.sources[i].table.Step(local))
		}
	}
}

func (c *Core) apply(source int, changes []fare.Change) {
	s := &c.sources[source]
	for _, ch := range changes {
		c.noteOrigins(source, ch)
		c.noteIgnored(source, ch)
		switch {
		case ch.Kind == fare.Readvertise:
			c.advertDirty = true
		case s.engine == nil:
		case s.start != nil:
			c.fault("weight engine", s.applyStarting(&c.layout.Sources[source], ch))
		case ch.Kind == fare.GroupSet:
			c.fault("weight engine", s.setGroup(&c.layout.Sources[source], ch.Group))
		case ch.Kind == fare.GroupDelete:
			c.fault("weight engine", s.engine.DeleteGroup(tableGroup(ch.Group)))
		case ch.Kind == fare.DestinationSet:
			c.fault("weight engine", s.engine.SetDestination(ch.Destination, tableGroup(ch.Group)))
		case ch.Kind == fare.DestinationDelete:
			s.engine.DeleteDestination(ch.Destination)
		}
	}
}

// SubPortOps returns the sub-ports whose verdict toward the data plane has changed since the last call. A sub-port is
// up when its link is up and a session over it is established. Before convergence, a sub-port that has not been up
// since the start is not declared down, so that nothing in effect is removed.
func (c *Core) SubPortOps(buf []SubPortOp) []SubPortOp {
	buf = buf[:0]
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

// Update is a decision of a source group's engine. Its Vector is a number that is unique over all source groups.
type Update struct {
	Source int // -1 if a reload has removed the source group
	// Name is that of the source group, as in SourceLayout.
	Name netip.Prefix
	wecmp.Update
}

// burst is the number of updates from which on their memory is not kept for the next step.
const burst = 1 << 12

// Updates returns the engines' decisions since the last call: vectors and destinations, for each source group in the
// order of programming. The slice is valid until the next Step.
func (c *Core) Updates() []Update {
	if c.updates = c.updates[:0]; cap(c.updates) > burst {
		c.updates = nil
	}
	lists, n := make([][]wecmp.Update, 0, config.MaxSourceGroups), len(c.gone) // on the stack
	for i := range c.sources {
		if c.sources[i].engine == nil {
			break
		}
		lists = append(lists, c.sources[i].engine.Updates())
		n += len(lists[i])
	}
	c.updates = slices.Grow(c.updates, n)
	for i, updates := range lists {
		for _, u := range updates {
			u.Vector = c.vectorID(i, u.Vector)
			c.updates = append(c.updates, Update{i, c.layout.Sources[i].Name, u})
		}
	}
	c.updates = append(c.updates, c.gone...)
	c.gone = nil
	return c.updates
}

// Advertise calls set for every session whose wanted routes may have changed since the last call. A server's set is
// applied before the session is established, so that it precedes End-of-RIB. A leaf omits the routes that the neighbor
// would drop, so it must know the neighbor first; the set of a drained session of a leaf is empty until the session is
// up, so that no route remains from before the drain.
func (c *Core) Advertise(set func(session int, routes []Route)) {
	for i := range c.sessions {
		s := &c.sessions[i]
		if !s.up && c.cfg.Role == fare.RoleLeaf {
			if c.advertDirty && s.advert != advertNormal {
				set(i, []Route{})
			}
			continue
		}
		if !c.advertDirty && c.advertOf[i] == s.generation {
			continue
		}
		c.advertOf[i] = s.generation
		set(i, c.wanted(i))
	}
	c.advertDirty = false
}

// Mark returns the mark of the routes that a drain wants a session to advertise; RoutesWritten reports it back. It is 0
// for routes that no drain waits for.
func (c *Core) Mark(session int) uint64 { return c.sessions[session].mark }

// wanted returns the complete set of routes for a session. Without routes it is empty, not nil.
func (c *Core) wanted(i int) []Route {
	s := &c.sessions[i]
	routes := []Route{}
	if s.advert == advertNone {
		return routes
	}
	codec := c.layout.Sessions[i].Codec
	with := func(b fare.Bandwidth, known bool) []fare.Community {
		if !known {
			return nil
		}
		return []fare.Community{codec.Encode(b, c.cfg.RouterID)}
	}
	if c.cfg.Role == fare.RoleServer {
		for _, lo := range c.cfg.Loopbacks {
			if l := &c.layout.Sessions[i]; l.carries(lo) && c.layout.SubPorts[l.SubPort].Serves(lo) {
				routes = append(routes, Route{Prefix: lo, Communities: with(c.ownBandwidth(i, lo))})
			}
		}
		return routes
	}
	part, whole := c.part(i)
	table := c.sources[0].table // a leaf has one source group
	for prefix := range table.Destinations {
		if !c.layout.Sessions[i].carries(prefix) {
			continue
		}
		bandwidth, path, ok := table.Readvertise(prefix)
		if !ok {
			continue
		}
		if slices.Contains(path, s.peerAS) {
			// The peer would drop a path with its own AS (RFC 4271, Section 9.1.2), so it is not sent.
			if !c.layout.Sessions[i].ASOverride {
				continue
			}
			path = overrideAS(path, s.peerAS, c.cfg.AS)
		}
		if s.advert == advertZero {
			bandwidth = 0
		}
		var extended fare.IPv6Community
		communities := with(bandwidth.Part(part, whole), c.layout.Sessions[i].Bandwidth != config.BandwidthRemove)
		if c.layout.Sessions[i].Bandwidth == config.BandwidthKeep && s.advert != advertZero {
			communities, extended = table.ReadvertisedCommunities(prefix)
		}
		routes = append(routes, Route{Prefix: prefix, Communities: communities, ASPath: path, Signals: table.ReadvertisedSignals(prefix), Extended: extended})
	}
	return routes
}

// overrideAS returns path with one AS replaced by another.
func overrideAS(path []uint32, as, by uint32) []uint32 {
	path = slices.Clone(path)
	for i := range path {
		if path[i] == as {
			path[i] = by
		}
	}
	return path
}

// part returns the fraction of a destination's bandwidth that a leaf advertises on a session: all of it to servers, a
// speed-proportional share on each uplink of a plane, because the far leaves sum the values that they receive from all
// spines. Shares are computed over all configured uplinks, including failed ones, so that the loss of an uplink lowers
// the sum at the far end. An unknown speed counts as the fastest known one.
func (c *Core) part(session int) (part, whole fare.Bandwidth) {
	at, plane := c.sessions[session].subPort, c.layout.Sessions[session].Plane
	group := c.layout.SubPorts[at].ShareGroup()
	if group == "" {
		return 1, 1
	}
	fastest, unknown := fare.Bandwidth(1), fare.Bandwidth(0)
	for i := range c.layout.SubPorts {
		if l := &c.layout.SubPorts[i]; l.ShareGroup() == group && l.Plane == plane {
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

// ownBandwidth returns the bandwidth that a server advertises for its loopback on a session that carries it, or false
// if a sub-port's speed is unknown. With path_bandwidth.advertise: sub-port it is the speed of the session's own
// sub-port. With node it adds every other sub-port that serves the loopback and has an established session to the same
// node that carries it. Before a session is established its node is unknown, so only its own sub-port counts, which is
// never too much. Drained sub-ports add nothing.
func (c *Core) ownBandwidth(session int, loopback netip.Prefix) (sum fare.Bandwidth, known bool) {
	s, plane := &c.sessions[session], c.layout.Sessions[session].Plane
	node := s.up && c.cfg.PathBandwidth.Advertise == config.AdvertiseNode
	counted := -1
	for i := range c.sessions {
		o, l := &c.sessions[i], &c.layout.Sessions[i]
		with := node && o.up && o.node == s.node && o.peerAS == s.peerAS && l.Plane == plane && l.carries(loopback) &&
			c.layout.SubPorts[o.subPort].Serves(loopback) && c.subPorts[o.subPort].link
		if i != session && !with || o.advert != advertNormal || o.subPort == counted { // sessions of a sub-port are adjacent
			continue
		}
		counted = o.subPort
		speed := c.subPorts[counted].speed
		if configured := c.layout.SubPorts[counted].Advertise; configured != 0 {
			speed = configured
		}
		if speed == 0 {
			return 0, false
		}
		sum = sum.Add(speed)
	}
	return sum, true
}

// Converged reports whether every session that can come up has sent End-of-RIB, or the deadline has passed.
func (c *Core) Converged() bool { return c.converged }

// checkConverged ends the start when every session that can come up has sent End-of-RIB. A session whose link is known
// to be down cannot come up; if that applies to all sessions, the deadline decides. A session that is down over a
// sub-port that is down in the data plane is not waited for, because nothing is forwarded there that its routes could
// take away.
func (c *Core) checkConverged() {
	if c.converged {
		return
	}
	any := false
	for i := range c.sessions {
		s := &c.sessions[i]
		if p := &c.subPorts[s.subPort]; p.known && !p.link || p.idle && !s.up {
			continue
		}
		if !s.eorDone(&c.layout.Sessions[i]) {
			return
		}
		any = true
	}
	if any {
		c.endStart()
	}
}
