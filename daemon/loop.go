package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/fared/fared/daemon/internal/dataplane"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// errStopped is what callers get that come after the loop has ended.
var errStopped = errors.New("the daemon is stopping")

// loop is the one owner of decisions. Its goroutine is the only one that touches its fields, but for do's channels.
type loop struct {
	d        *Daemon
	core     *Core
	log      *slog.Logger
	builder  *status.Builder
	metrics  *status.Metrics
	recorder *recorder
	notifier *notifier
	started  time.Time
	calls    chan func()
	stopped  chan struct{}

	lanes   []lane
	faults  []string // by session: what is wrong beside its state
	effects effects
	ports   *sourcePorts
	// dpReady: a data plane has been ready once, so loopbacks may be advertised.
	dpReady       bool
	admitted      bool // sessions that waited for the data plane have been let go
	dpConnected   dataplane.Event
	dpError       string
	deadline      time.Time // of the start; zero when converged
	drainTimers   []drainTimer
	wokenAt       time.Time // when the inputs being handled were taken
	speakerEvents []speaker.Event
	linkEvents    []LinkEvent
	planeEvents   []dataplane.Event
	subPortOps    []SubPortOp

	// placesMu guards what the data-plane client's goroutine reads: the slots' places of each vector, and the loopbacks.
	placesMu  sync.Mutex
	places    map[uint32][]wecmp.Place
	loopbacks []netip.Prefix
}

// drainTimer is a drain whose next step waits for the drain delay.
type drainTimer struct {
	target DrainTarget
	stage  DrainStage
	at     time.Time
}

func newLoop(d *Daemon, core *Core) *loop {
	l := &loop{
		d: d, core: core, log: d.log, started: time.Now(),
		calls: make(chan func()), stopped: make(chan struct{}),
		lanes: make([]lane, len(core.layout.subPorts)), faults: make([]string, len(core.layout.sessions)),
		dpReady: !core.cfg.Forwards(),
		places:  map[uint32][]wecmp.Place{}, loopbacks: core.cfg.Loopbacks,
	}
	for i := range l.lanes {
		l.lanes[i].SubPort, l.lanes[i].Reason = i, "no link state yet"
	}
	l.effects = newEffects()
	if core.engine != nil {
		l.ports = newSourcePorts(core.cfg, &core.layout, l.log)
		l.ports.use(core.planner)
	}
	l.notifier = newNotifier(!d.deps.Embedded, l.log)
	l.builder = status.NewBuilder(source{l}, l.statusLayout(), d.deps.Instance)
	return l
}

// do runs fn on the loop's goroutine between two steps. It implements status.Do.
func (l *loop) do(ctx context.Context, fn func()) error {
	done := make(chan struct{})
	select {
	case l.calls <- func() { defer close(done); fn() }:
	case <-l.stopped:
		return errStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	<-done
	return nil
}

// run is the loop. Every input waits behind a one-slot knock; none of them is behind a timer.
func (l *loop) run(ctx context.Context) error {
	defer close(l.stopped)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	if d := l.core.cfg.Start.Deadline; l.core.cfg.Forwards() {
		l.deadline = l.started.Add(d)
	} else {
		l.builder.Started()
	}
	l.notifier.ready()
	defer l.notifier.stopping()
	var planeKnock, portsKnock <-chan struct{}
	if l.d.client != nil {
		planeKnock, portsKnock = l.d.client.Knock(), l.ports.knock
	}
	for {
		l.arm(timer)
		l.flushRecorder()
		select {
		case <-ctx.Done():
			return nil
		case <-l.d.links.Knock():
		case <-l.d.speaker.Knock():
		case <-planeKnock:
		case <-portsKnock:
		case <-timer.C:
		case <-l.notifier.tick():
			l.notifier.alive()
		case fn := <-l.calls:
			fn()
		}
		l.wokenAt = time.Now()
		l.turn()
	}
}

// turn takes everything that is waiting, decides, and hands out what follows: links first, because what they take away
// is certain, then BGP, then acknowledgements.
func (l *loop) turn() {
	l.linkEvents = l.d.links.Take(l.linkEvents[:0])
	for i := range l.linkEvents {
		l.link(&l.linkEvents[i])
	}
	l.handOut() // the fast path does not wait for what else there is
	l.speakerEvents = l.d.speaker.Take(l.speakerEvents[:0])
	for _, ev := range l.speakerEvents {
		l.bgp(ev)
	}
	clear(l.speakerEvents) // attributes must not stay alive here
	l.timers()
	l.handOut()
	if l.d.client != nil {
		l.planeEvents = l.d.client.Take(l.planeEvents[:0])
		for i := range l.planeEvents {
			l.plane(&l.planeEvents[i])
		}
		clear(l.planeEvents)
		l.landed()
		l.confirmDrains()
		l.handOut()
	}
	l.builder.Commit()
	if !l.wokenAt.IsZero() {
		l.metrics.ObserveStep(time.Since(l.wokenAt))
	}
}

// step records an event and lets the core take it.
func (l *loop) step(ev Event) {
	if l.recorder != nil {
		if err := l.recorder.event(time.Now().UnixNano(), ev, l.core); err != nil {
			l.log.Warn("recording ends", "file", l.core.cfg.Record.File, "error", err)
			l.event(status.EventFault, "recording", err.Error())
			_ = l.recorder.f.Close()
			l.recorder = nil
		}
	}
	if err := l.core.Step(ev); err != nil {
		// What comes from adapters is always in range; what comes from people was checked before.
		l.log.Error("an event was refused", "event", ev, "error", err)
		l.event(status.EventFault, "loop", err.Error())
	}
	for _, f := range l.core.Faults() {
		l.event(status.EventFault, f.Subject, f.Err.Error())
	}
}

func (l *loop) flushRecorder() {
	if l.recorder == nil {
		return
	}
	if err := l.recorder.flush(); err != nil {
		l.log.Warn("recording ends", "file", l.core.cfg.Record.File, "error", err)
		l.recorder = nil
	}
}

// handOut carries out what follows from the steps so far: sub-ports first, then vectors and destinations in the engine's
// order, then advertisements.
func (l *loop) handOut() {
	now := l.wokenAt
	if l.d.client != nil {
		l.subPortOps = l.core.SubPortOps(l.subPortOps)
		for _, op := range l.subPortOps {
			change := l.d.client.SetSubPort(l.core.layout.subPorts[op.SubPort].Device, op.Up)
			l.effects.want(dataplane.Object{Kind: dataplane.KindSubPort, SubPort: l.core.layout.subPorts[op.SubPort].Device}, change, now)
			l.builder.MarkFabric()
		}
		for _, u := range l.core.Updates() {
			l.update(u, now)
		}
		if !l.deadline.IsZero() && l.core.Converged() {
			l.deadline = time.Time{}
			l.d.client.ReleaseRemovals(true)
			l.builder.Started()
		}
	} else {
		l.core.settleSubPorts()
	}
	if l.dpReady {
		l.core.Advertise(func(session int, routes []Route) {
			ads := make([]speaker.Advertisement, len(routes))
			for i, r := range routes {
				ads[i] = speaker.Advertisement{Prefix: r.Prefix, Communities: r.Communities, ASPath: r.ASPath}
			}
			l.d.speaker.Advertise(session, ads)
		})
		if !l.admitted {
			l.admitted = true
			for i := range l.core.sessions {
				l.admit(i)
			}
		}
	}
}

// update declares one of the engine's decisions to the data plane and to the status.
func (l *loop) update(u wecmp.Update, now time.Time) {
	switch u.Kind {
	case wecmp.VectorSet:
		change := l.d.client.SetGroup(l.group(u.Vector))
		l.effects.want(dataplane.Object{Kind: dataplane.KindGroup, Group: u.Vector}, change, now)
		l.builder.MarkVector(u.Vector)
		l.d.moved.Add(uint64(u.SlotsMoved) * uint64(l.effects.users[u.Vector]))
	case wecmp.VectorDelete:
		l.d.client.DeleteGroup(u.Vector)
		l.effects.forget(dataplane.Object{Kind: dataplane.KindGroup, Group: u.Vector})
		l.placesMu.Lock()
		delete(l.places, u.Vector)
		l.placesMu.Unlock()
		l.builder.MarkVector(u.Vector)
	case wecmp.DestinationSet:
		object := dataplane.Object{Kind: dataplane.KindDestination, Destination: u.Destination}
		l.effects.want(object, l.d.client.SetDestination(u.Destination, u.Vector, u.Drain...), now)
		l.effects.assign(u.Destination, u.Vector, uint32(u.SlotsMoved), u.Drain)
		l.builder.MarkDestination(u.Destination)
		l.d.moved.Add(uint64(u.SlotsMoved))
	case wecmp.DestinationDelete:
		l.d.client.DeleteDestination(u.Destination)
		l.effects.forget(dataplane.Object{Kind: dataplane.KindDestination, Destination: u.Destination})
		l.effects.assign(u.Destination, 0, 0, nil)
		l.ports.forget(u.Destination.Addr(), l.core.cfg.Loopbacks)
		l.builder.MarkDestination(u.Destination)
	}
}

// link takes a device's state. What falls counts at once; what rises waits for the hold-up time, where one is set.
func (l *loop) link(ev *LinkEvent) {
	l.lanes[ev.SubPort].told = *ev
	sp := &l.core.layout.subPorts[ev.SubPort]
	if sp.Speed != 0 {
		ev.Speed, ev.SpeedSource = sp.Speed, "config"
	}
	cur := &l.lanes[ev.SubPort]
	if cur.seen && cur.Up && ev.Up && ev.Transitions > cur.Transitions {
		// Down and up again between two looks: the sessions over it are gone.
		down := *ev
		down.Up, down.Reason = false, "carrier lost for a moment"
		l.applyLink(&down)
	}
	holdUp := l.core.cfg.PathBandwidth.IncreaseHoldUp
	if cur.seen && rises(&cur.LinkEvent, ev) && holdUp > 0 {
		if !cur.held || ev.Transitions > cur.rising.Transitions { // it has to last without a break
			cur.held, cur.holdUntil = true, l.wokenAt.Add(holdUp)
		}
		cur.rising = *ev
		if !cur.Up {
			cur.Reason = "held up after its return"
		}
	} else {
		l.applyLink(ev)
		cur.held = false
	}
}

// applyLink makes a device's state count.
func (l *loop) applyLink(ev *LinkEvent) {
	cur := &l.lanes[ev.SubPort]
	sp := &l.core.layout.subPorts[ev.SubPort]
	switch {
	case !cur.seen || cur.Up != ev.Up:
		kind := status.EventLinkDown
		if ev.Up {
			kind = status.EventLinkUp
		}
		l.event(kind, sp.Device, ev.Reason)
	case cur.Speed != ev.Speed:
		l.event(status.EventSpeed, sp.Device, cur.Speed.String()+" to "+ev.Speed.String())
	}
	cur.LinkEvent, cur.seen = *ev, true
	l.step(Fabric{fare.LinkState{SubPort: ev.SubPort, Up: ev.Up, Speed: ev.Speed}})
	for i := range l.core.sessions {
		if l.core.sessions[i].subPort == ev.SubPort {
			l.admit(i)
		}
	}
	l.builder.MarkFabric()
}

// admit lets a session connect when its link is up. With graceful restart it also waits for the data plane: leaves keep our
// routes until we say End-of-RIB, and without a data plane it would say that there are none.
func (l *loop) admit(session int) {
	cur := &l.lanes[l.core.sessions[session].subPort]
	if !l.dpReady && l.core.cfg.BGP.RestartTime > 0 {
		l.d.speaker.SetAdminState(session, false, "waiting for the data plane")
		return
	}
	l.d.speaker.SetAdminState(session, !cur.seen || cur.Up, cur.Reason)
}

// bgp takes what happened on a session.
func (l *loop) bgp(ev speaker.Event) {
	switch ev := ev.(type) {
	case speaker.SessionUp:
		l.step(Fabric{fare.SessionUp{Session: ev.Session, Generation: ev.Generation, Node: ev.Node, PeerAS: ev.PeerAS}})
		l.faults[ev.Session] = ""
		l.learnNextHop(ev.Session)
		l.skipFamilies(ev)
		l.event(status.EventSessionUp, l.core.layout.sessions[ev.Session].Name, "node "+ev.Node.String())
	case speaker.SessionDown:
		l.step(Fabric{fare.SessionDown{Session: ev.Session, Generation: ev.Generation}})
		l.event(status.EventSessionDown, l.core.layout.sessions[ev.Session].Name, ev.Reason)
		l.handOut() // one plane-level operation, before anything else that waits
	case speaker.Route:
		l.step(Fabric{fare.RouteUpdate{Session: ev.Session, Generation: ev.Generation, Prefix: ev.Prefix, Attrs: ev.Attrs}})
		l.builder.MarkFabric()
	case speaker.Withdraw:
		l.step(Fabric{fare.RouteWithdraw{Session: ev.Session, Generation: ev.Generation, Prefix: ev.Prefix}})
		l.builder.MarkFabric()
	case speaker.EndOfRIB:
		l.step(EndOfRIB{Session: ev.Session, Generation: ev.Generation, IPv6: ev.Family == speaker.IPv6})
		l.event(status.EventEndOfRIB, l.core.layout.sessions[ev.Session].Name, ev.Family.String())
	case speaker.Fault:
		l.faults[ev.Session] = ev.Reason
		l.event(status.EventFault, l.core.layout.sessions[ev.Session].Name, ev.Reason)
	}
}

// skipFamilies says of families that are configured and that the neighbour did not agree to that there is nothing to
// wait for.
func (l *loop) skipFamilies(ev speaker.SessionUp) {
	for i, family := range []speaker.Family{speaker.IPv4, speaker.IPv6} {
		if l.core.layout.sessions[ev.Session].families[i] && !ev.Families.Has(family) {
			l.step(EndOfRIB{Session: ev.Session, Generation: ev.Generation, IPv6: family == speaker.IPv6})
		}
	}
}

// learnNextHop tells the data plane where a session's neighbour is, when that was not known from the configuration.
func (l *loop) learnNextHop(session int) {
	peer := l.d.speaker.Status(session).Remote.Addr()
	if s := &l.core.layout.sessions[session]; l.d.client != nil && peer.IsValid() && s.nextHop != peer {
		s.nextHop = peer
		l.d.client.SetForwarding(l.core.layout.forwarding(l.core.cfg))
	}
}

// plane takes what the data plane said.
func (l *loop) plane(ev *dataplane.Event) {
	switch ev.Kind {
	case dataplane.Connected:
		l.dpConnected, l.dpError = *ev, ""
		first := !l.dpReady
		l.dpReady = true
		caps := ev.Capabilities
		before := l.core.flowHash
		l.step(DataplaneReady{MaxWeight: caps.GetMaxWeight(), MaxWeightSum: caps.GetMaxWeightSum(), FlowHash: flowHash(caps.GetFlowHash())})
		l.event(status.EventDataplane, ev.Name, "connected")
		l.ports.connected(l.core.flowHash.Algorithm == flowHashAsk)
		if l.core.flowHash != before {
			l.replan(before, first)
		}
		if first {
			l.core.advertDirty = true
		}
	case dataplane.Disconnected:
		l.dpConnected.Kind = dataplane.Disconnected
		if ev.Err != nil {
			l.dpError = ev.Err.Error()
		}
		l.event(status.EventDataplane, l.dpConnected.Name, "disconnected: "+l.dpError)
	case dataplane.InEffect:
		if at, ok := l.effects.done(ev.Object, ev.Change); ok {
			l.metrics.ObserveAcknowledged(time.Since(at))
		}
		l.markObject(ev.Object)
	case dataplane.Refused:
		l.effects.refused(ev.Object, ev.Change)
		l.dpError = ev.Object.String() + ": " + ev.Message
		l.log.Warn("the data plane refused an operation", "object", ev.Object, "code", ev.Code, "message", ev.Message)
		l.event(status.EventFault, ev.Object.String(), "refused: "+ev.Message)
		l.markObject(ev.Object)
	case dataplane.Pending:
		l.effects.lost(ev.Object)
		l.markObject(ev.Object)
	}
}

// replan has everybody see the ports that the data plane's hash, another one than before, asks for.
func (l *loop) replan(before FlowHash, first bool) {
	l.ports.use(l.core.planner)
	l.builder.SetLayout(l.statusLayout())
	for prefix := range l.effects.destinations {
		l.repin(prefix)
	}
	detail := "flow hash " + l.core.flowHash.String()
	if !first {
		detail += ", before " + before.String() + ": source ports are others now; set up queue pairs again, those with the former ones may leave over other sub-ports than their slots'"
		l.log.Warn("the data plane's flow hash changed", "before", before, "now", l.core.flowHash)
	}
	l.event(status.EventDataplane, l.dpConnected.Name, detail)
}

// repin has a destination's ports computed again for a data plane with flow pins; others take no notice.
func (l *loop) repin(prefix netip.Prefix) {
	if a, ok := l.effects.destinations[prefix]; ok && l.dpConnected.Capabilities.GetFlowPins() {
		l.d.client.SetDestination(prefix, a.vector)
	}
}

// landed shows destinations whose landing was asked for and has come.
func (l *loop) landed() {
	for _, dst := range l.ports.take() {
		prefix := netip.PrefixFrom(dst, dst.BitLen())
		if _, ok := l.effects.destinations[prefix]; ok {
			l.repin(prefix)
			l.builder.MarkDestination(prefix)
		}
	}
}

// markObject says in the status that what is in effect changed.
func (l *loop) markObject(o dataplane.Object) {
	switch o.Kind {
	case dataplane.KindGroup:
		l.builder.MarkVector(o.Group)
	case dataplane.KindDestination:
		l.builder.MarkDestination(o.Destination)
	case dataplane.KindSubPort:
		// A vector's planes are in effect only when their sub-ports are: all of them may look different now.
		for id := range l.effects.users {
			l.builder.MarkVector(id)
		}
	}
}

// timers runs what is due.
func (l *loop) timers() {
	now := l.wokenAt
	if !l.deadline.IsZero() && !now.Before(l.deadline) {
		l.log.Warn("not every session has sent End-of-RIB; going on with what is known", "deadline", l.core.cfg.Start.Deadline)
		l.step(StartDeadline{})
	}
	for i := range l.lanes {
		if p := &l.lanes[i]; p.held && !now.Before(p.holdUntil) {
			p.held = false
			l.applyLink(&p.rising)
		}
	}
	for i := 0; i < len(l.drainTimers); {
		t := l.drainTimers[i]
		if now.Before(t.at) {
			i++
			continue
		}
		l.drainTimers = slices.Delete(l.drainTimers, i, i+1)
		l.step(DrainStep{Target: t.target})
		l.builder.MarkFabric()
	}
	l.armDrains()
}

// confirmDrains moves drains on whose zero shares are all in effect. A refused one is not: peers that would be told to move
// away are not, while we go on sending to them.
func (l *loop) confirmDrains() {
	if len(l.core.drains) == 0 || l.effects.pending > 0 || l.effects.refusals > 0 || l.dpConnected.Kind != dataplane.Connected {
		return
	}
	var confirmed []DrainTarget
	l.core.Drains(func(t DrainTarget, s DrainStage) {
		if s == DrainShares {
			confirmed = append(confirmed, t)
		}
	})
	for _, t := range confirmed {
		l.step(DrainStep{Target: t, Confirmed: true})
		l.builder.MarkFabric()
	}
	l.armDrains()
}

// armDrains starts a timer for every drain whose stage waits for one.
func (l *loop) armDrains() {
	l.core.Drains(func(t DrainTarget, s DrainStage) {
		i := slices.IndexFunc(l.drainTimers, func(d drainTimer) bool { return d.target == t })
		if s != DrainRoutes && s != Undraining {
			if i >= 0 {
				l.drainTimers = slices.Delete(l.drainTimers, i, i+1)
			}
			return
		}
		at := l.wokenAt.Add(l.core.cfg.DrainDelay)
		if i < 0 {
			l.drainTimers = append(l.drainTimers, drainTimer{t, s, at})
		} else if l.drainTimers[i].stage != s {
			l.drainTimers[i] = drainTimer{t, s, at}
		}
	})
}

// arm sets the timer to the next thing that is due.
func (l *loop) arm(timer *time.Timer) {
	next := l.deadline
	earlier := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	for i := range l.lanes {
		if l.lanes[i].held {
			earlier(l.lanes[i].holdUntil)
		}
	}
	for _, t := range l.drainTimers {
		earlier(t.at)
	}
	if next.IsZero() {
		timer.Stop()
		return
	}
	timer.Reset(time.Until(next))
}

// event tells operators.
func (l *loop) event(kind status.EventKind, subject, detail string) {
	l.builder.Event(status.Event{Time: time.Now(), Kind: kind, Subject: subject, Detail: detail})
	l.log.Info(kind.String(), "subject", subject, "detail", detail)
}
