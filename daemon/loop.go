package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/drainfile"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/wecmp"
)

// fewEvents is the largest number of events of sessions and changed routes that are decided in some hundred
// microseconds.
const fewEvents = 64

// errStopped is returned to callers after the loop has ended.
var errStopped = errors.New("the daemon is stopping")

// loop makes all decisions, one turn at a time. A turn is run by the goroutine of run, or, while that one waits, by the
// goroutine that has brought the input, because waking another one costs tens of microseconds. Only the owner of mu
// accesses the fields, except the channels of do.
type loop struct {
	mu      sync.Mutex
	running bool // run may be in its select statement
	timer   *time.Timer
	// held means that the declarations of this turn are sent by the goroutine that runs it, once it has released mu;
	// unsent that there are some. ended means that a session has ended in this turn.
	held, unsent, ended bool

	d        *Daemon
	core     *core.Core
	config   *config.Config // the loaded one, with the contents of the files that it names; that of core has none after a reload
	log      *slog.Logger
	builder  *status.Builder
	metrics  *status.Metrics
	recorder *recorder
	// lastEffect is the last progress of the data plane in the recording.
	lastEffect recordedEffect
	tracer     *tracer // nil without traces
	notifier   *notifier
	started    time.Time
	calls      chan func()
	stopped    chan struct{}

	links  []linkState
	faults []string // by session: a fault in addition to its state
	// probers counts the probers that have been built; the last one's avoidances count.
	probers int
	shown   shown
	ports   *sourcePorts
	// dpReady is set once a data plane has been ready, so that loopbacks may be advertised.
	dpReady       bool
	dpConnected   dpclient.Event
	dpError       string
	dpRefused     bool                 // dpError is of a refusal
	limitations   []*farev1.Limitation // of the data plane's host
	damage        string               // damage of the layer below the data plane; "" if it is intact
	deadline      time.Time            // of the start; zero after convergence
	drained       drainRecords
	earlier       []drainfile.Record // drains of an earlier process, until run restores them
	drainTimers   []drainTimer
	evacuations   map[core.DrainTarget]*dpclient.Evacuation // of drains that wait for the data plane
	wokenAt       time.Time                                 // when the inputs of the current step were drained
	speakerEvents []speaker.Event
	bulkEvents    []speaker.Event // events of sessions beyond their allowance
	allowances    []allowance     // by session
	linkEvents    []LinkEvent
	planeEvents   []dpclient.Event
	subPortOps    []core.SubPortOp
	applied       []applied // the ledger of the current delivery
	reweighed     reweighed
	faultReport   faultReport
	intakes       []intake  // by session
	settleAt      time.Time // when settleTime of some established session ends; zero if it has ended for all

	// placesMu guards the fields that the data-plane client's goroutine reads: the places of each vector's slots, and
	// the loopbacks of each source group by name.
	placesMu  sync.Mutex
	places    map[uint32][]wecmp.Place
	loopbacks map[netip.Prefix][]netip.Prefix
}

// drainTimer is a drain whose next step waits for the drain delay.
type drainTimer struct {
	target core.DrainTarget
	stage  core.DrainStage
	at     time.Time
}

func newLoop(d *Daemon, c *core.Core) *loop {
	l := &loop{
		d: d, core: c, config: c.Config(), log: d.log, started: time.Now(),
		calls: make(chan func()), stopped: make(chan struct{}),
		links: make([]linkState, len(c.Layout().SubPorts)), faults: make([]string, len(c.Layout().Sessions)),
		allowances: make([]allowance, len(c.Layout().Sessions)), intakes: make([]intake, len(c.Layout().Sessions)),
		dpReady: !c.Config().Forwards(),
		places:  map[uint32][]wecmp.Place{}, loopbacks: c.Layout().Loopbacks(),
	}
	for i := range l.links {
		l.links[i].SubPort, l.links[i].Reason = i, "no link state yet"
	}
	l.drained = newDrainRecords()
	l.shown = newShown(l.started)
	l.tracer = newTracer(c.Config().Traces.Endpoint, d.deps.Instance, c.Config().RouterID, l.log)
	if c.Config().Forwards() {
		l.ports = newSourcePorts(c.Config(), c.Layout(), l.log)
		l.ports.use(c.Planners(l.ports.asked))
	}
	l.notifier = newNotifier(!d.deps.Embedded, d.deps.Alive, l.log)
	l.builder = status.NewBuilder(source{l}, l.statusLayout(), d.deps.Instance)
	return l
}

// do runs fn between two turns. It implements status.Do.
func (l *loop) do(ctx context.Context, fn func()) error {
	return l.begin(ctx, func() func() { fn(); return nil })
}

// begin is do for a function that returns a rest, or nil. The rest may run after begin has returned, before any other
// input.
func (l *loop) begin(ctx context.Context, fn func() (rest func())) error {
	done := make(chan struct{})
	call := func() {
		rest := fn()
		close(done)
		if rest != nil {
			runtime.Gosched() // the caller goes on in this thread; the start of another one may wait for a processor
			rest()
		}
	}
	select {
	case l.calls <- call:
	case <-l.stopped:
		return errStopped
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	<-done
	return nil
}

// run is the loop. Every input notifies it through a channel with one slot; no input waits for a timer.
func (l *loop) run(ctx context.Context) error {
	defer close(l.stopped)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer = time.NewTimer(time.Hour)
	defer l.timer.Stop()
	if d := l.core.Config().Start.Deadline; l.core.Config().Forwards() {
		l.deadline = l.started.Add(d)
	} else {
		l.builder.Started()
	}
	l.notifier.ready()
	defer l.notifier.stopping()
	var planeReady, portsReady <-chan struct{}
	if l.d.client != nil {
		planeReady, portsReady = l.d.client.Ready(), l.ports.ready
	}
	l.restoreDrains(l.earlier)
	l.earlier = nil
	l.running = true
	defer func() { l.running = false }()
	for {
		l.rest()
		l.mu.Unlock()
		call, over := func() {}, false
		select {
		case <-ctx.Done():
			over = true
		case <-l.d.links.Ready():
		case <-l.d.speaker.Ready():
		case <-planeReady:
		case <-portsReady:
		case <-l.timer.C:
		case <-l.notifier.tick():
			call = l.notifier.alive
		case call = <-l.calls:
		}
		l.mu.Lock()
		if over {
			return nil
		}
		call()
		l.wokenAt = time.Now()
		l.turn()
	}
}

// attend runs a turn in the goroutine of a session, and returns true, if run waits for input. The declarations are sent
// before the rest of the turn, without mu: a data plane in this process applies them in this goroutine, and meanwhile
// the loop goes on with other input.
func (l *loop) attend() bool {
	if !l.mu.TryLock() {
		return false
	}
	defer l.mu.Unlock()
	if !l.running {
		return false
	}
	woken := time.Now()
	l.wokenAt, l.held, l.unsent = woken, l.d.client != nil, false
	l.decide()
	if l.held = false; l.unsent {
		l.mu.Unlock()
		l.d.client.Flush()
		l.mu.Lock()
		if !l.running {
			return true
		}
	}
	l.conclude(woken)
	l.rest()
	return true
}

// rest prepares the pause until the next input.
func (l *loop) rest() {
	l.arm(l.timer)
	l.recordEffect(false)
	l.flushRecorder()
}

// turn decides and concludes.
func (l *loop) turn() {
	l.decide()
	l.conclude(l.wokenAt)
}

// decide drains all inputs, decides, and applies the results: links first, because their failures are certain, then
// BGP, then acknowledgements.
func (l *loop) decide() {
	l.linkEvents = l.d.links.Take(l.linkEvents[:0])
	for i := range l.linkEvents {
		l.link(&l.linkEvents[i])
	}
	l.held = l.held && len(l.linkEvents) == 0
	l.deliver() // the fast path does not wait for the other inputs
	l.speakerEvents = l.d.speaker.Take(l.speakerEvents[:0])
	l.held = l.held && few(l.speakerEvents)
	l.sessions(l.speakerEvents)
	clear(l.speakerEvents) // release the attributes
	if l.d.client != nil {
		l.answers()
		l.landed()
	}
	l.giveUpDrains()
	l.confirmDrains()
	l.deliver()
}

// conclude reports the results of a turn that began at woken.
func (l *loop) conclude(woken time.Time) {
	if l.ended { // BFD or TCP may detect a failure before the kernel reports the lost carrier
		l.ended = false
		l.d.links.Poll()
	}
	l.reportWeights()
	l.markIgnored()
	l.reportFaults()
	l.builder.Commit()
	if l.deadline.IsZero() && l.core.Converged() { // watches begin with the state after the start
		l.builder.Started()
		l.builder.Commit()
	}
	l.tracer.turn(woken, time.Now(), l.shown.counts[effectPending])
	l.metrics.ObserveStep(time.Since(woken))
}

// few reports whether events are so few that their results need not be sent before the last of them is handled.
func few(events []speaker.Event) bool {
	n := 0
	for _, ev := range events {
		n++
		if routes, ok := ev.(speaker.Routes); ok {
			n += len(routes.Changes)
		}
	}
	return n <= fewEvents
}

// sessions handles the events of sessions and the due timers: prompt ones first, then bulk ones. The prompt changes are
// declared separately only if a timer, or another session than those with bulk events, has caused some. So the data
// plane gets a session's burst as one transaction.
func (l *loop) sessions(events []speaker.Event) {
	for _, ev := range events {
		prompt, bulk := l.divide(ev)
		if prompt != nil {
			l.bgp(prompt)
		}
		if bulk != nil {
			l.bulkEvents = append(l.bulkEvents, bulk)
		}
	}
	if l.timers() || len(l.bulkEvents) == 0 || slices.ContainsFunc(events, func(ev speaker.Event) bool { return !l.late(ev) }) {
		l.deliver()
	}
	l.bulk()
}

// step records an event and passes it to the core.
func (l *loop) step(ev core.Event) {
	l.record(ev)
	if err := l.core.Step(ev); err != nil {
		// Adapters only produce events in range, and requests of people were checked before.
		l.report(slog.LevelError, status.EventFault, "loop", fmt.Sprintf("%T was refused: %v", ev, err))
	}
	for _, f := range l.core.Faults() {
		l.event(status.EventFault, f.Subject, f.Err.Error())
	}
}

// deliver applies the results of the steps so far: sub-ports first, then vectors and destinations in the engine's
// order, then advertisements.
func (l *loop) deliver() {
	if l.d.client != nil {
		if l.held {
			l.unsent = l.d.client.Hold(l.declare) || l.unsent
		} else {
			l.d.client.Transaction(l.declare)
		}
		l.account()
	}
	if l.dpReady {
		l.core.Advertise(func(session int, routes []core.Route) {
			ads := make([]speaker.Advertisement, len(routes))
			for i, r := range routes {
				ads[i] = speaker.Advertisement{Prefix: r.Prefix, Communities: r.Communities, ASPath: r.ASPath, Signals: r.Signals, Extended: r.Extended}
			}
			l.d.speaker.AdvertiseMarked(session, ads, l.core.Mark(session))
		})
	}
}

// declare declares the results of the steps so far to the data plane.
func (l *loop) declare(t *dpclient.Transaction) {
	l.subPortOps = l.core.SubPortOps(l.subPortOps)
	for _, op := range l.subPortOps {
		device := l.core.Layout().SubPorts[op.SubPort].Device
		l.shown.want(dpclient.Object{Kind: dpclient.KindSubPort, SubPort: device}, t.SetSubPort(device, op.Up), l.wokenAt)
	}
	for _, u := range l.core.Updates() {
		l.apply(t, u)
	}
	if l.dpReady {
		t.ReleaseChanges() // the core has the data plane's state since DataplaneReady
	}
	if !l.deadline.IsZero() && l.core.Converged() {
		l.deadline = time.Time{}
		t.ReleaseRemovals(true)
	}
}

// admitSubPort lets the sessions over a sub-port connect when its link is up.
func (l *loop) admitSubPort(subPort int) {
	for i := range l.core.Layout().Sessions {
		if l.core.Layout().Sessions[i].SubPort == subPort {
			l.admit(i)
		}
	}
}

// admit lets a session connect when its link is up. With graceful restart it also waits for the data plane: leaves keep
// our routes until our End-of-RIB, which without a data plane would announce that there are none.
func (l *loop) admit(session int) {
	cur := &l.links[l.core.Layout().Sessions[session].SubPort]
	if !l.dpReady && l.core.Config().BGP.RestartTime > 0 {
		l.d.speaker.SetAdminState(session, false, "waiting for the data plane")
		return
	}
	l.d.speaker.SetAdminState(session, !cur.seen || cur.Up, cur.Reason)
}

// bgp handles an event of a session.
func (l *loop) bgp(ev speaker.Event) {
	switch ev := ev.(type) {
	case speaker.SessionUp:
		l.step(core.Fabric{Event: fare.SessionUp{Session: ev.Session, Generation: ev.Generation, Node: ev.Node, PeerAS: ev.PeerAS}})
		l.faults[ev.Session] = ""
		l.noteIntake(ev.Session, intake{up: true, since: l.wokenAt, families: ev.Families})
		l.checkIdentifier(ev)
		l.learnNextHop(ev.Session, l.d.speaker.Status(ev.Session).Remote.Addr())
		l.skipFamilies(ev)
		detail := fmt.Sprintf("node %v, AS %d, generation %d", ev.Node, ev.PeerAS, ev.Generation)
		if remote := l.d.speaker.Status(ev.Session).Remote; remote.IsValid() {
			detail += ", remote " + remote.String()
		}
		l.event(status.EventSessionUp, l.core.Layout().Sessions[ev.Session].Name, detail)
	case speaker.SessionDown:
		l.ended = true
		l.step(core.Fabric{Event: fare.SessionDown{Session: ev.Session, Generation: ev.Generation, Closed: ev.Closed}})
		l.noteIntake(ev.Session, intake{})
		l.event(status.EventSessionDown, l.core.Layout().Sessions[ev.Session].Name, ev.Reason)
		l.deliver() // one plane-level operation, before all other pending work
	case speaker.Routes:
		for _, c := range ev.Changes {
			if c.Attrs != nil {
				l.step(core.Fabric{Event: fare.RouteUpdate{Session: ev.Session, Generation: ev.Generation, Prefix: c.Prefix, Attrs: c.Attrs}})
			} else {
				l.step(core.Fabric{Event: fare.RouteWithdraw{Session: ev.Session, Generation: ev.Generation, Prefix: c.Prefix}})
			}
		}
		l.builder.MarkFabric()
	case speaker.Refused:
		in := l.intakes[ev.Session]
		in.refused = ev.Routes
		l.noteIntake(ev.Session, in)
		l.builder.MarkFabric()
	case speaker.EndOfRIB:
		l.faultReport.dirty = true
		l.step(core.EndOfRIB{Session: ev.Session, Generation: ev.Generation, IPv6: ev.Family == speaker.IPv6})
		l.event(status.EventEndOfRIB, l.core.Layout().Sessions[ev.Session].Name, ev.Family.String())
	case speaker.Written:
		l.step(core.RoutesWritten{Session: ev.Session, Generation: ev.Generation, Mark: ev.Mark})
		l.builder.MarkFabric()
	case speaker.Fault:
		l.faults[ev.Session] = ev.Reason
		l.event(status.EventFault, l.core.Layout().Sessions[ev.Session].Name, ev.Reason)
	}
}

// skipFamilies marks End-of-RIB as received for configured families that were not negotiated.
func (l *loop) skipFamilies(ev speaker.SessionUp) {
	for i, family := range []speaker.Family{speaker.IPv4, speaker.IPv6} {
		if l.core.Layout().Sessions[ev.Session].FamilySet[i] && !ev.Families.Has(family) {
			l.step(core.EndOfRIB{Session: ev.Session, Generation: ev.Generation, IPv6: family == speaker.IPv6})
		}
	}
}

// learnNextHop passes the address of a session's neighbor to the data plane if the configuration does not contain it.
func (l *loop) learnNextHop(session int, peer netip.Addr) {
	if l.d.client != nil && peer.IsValid() && l.core.SessionState(session).NextHop != peer {
		l.step(core.NextHop{Session: session, Address: peer})
		l.d.client.SetForwarding(forwardingOf(l.core))
	}
}

// timers runs the actions that are due, and reports whether there were any.
func (l *loop) timers() (due bool) {
	now := l.wokenAt
	if !l.deadline.IsZero() && !now.Before(l.deadline) {
		l.log.Warn("not every session has sent End-of-RIB; continuing with the routes received so far", "deadline", l.core.Config().Start.Deadline)
		l.step(core.StartDeadline{})
		due = true
	}
	for i := range l.links {
		if p := &l.links[i]; p.held && !now.Before(p.holdUntil) {
			p.held, due = false, true
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
		l.step(core.DrainStep{Target: t.target})
		due = true
		l.builder.MarkFabric()
	}
	l.armDrains()
	l.settle(now)
	return due
}

// armDrains starts a timer for every drain whose stage waits for one. In stage DrainRoutes the delay begins when the
// sessions' connections have carried the zero bandwidth; a session that comes up later does not restart it.
func (l *loop) armDrains() {
	l.core.Drains(func(t core.DrainTarget, s core.DrainStage) {
		i := slices.IndexFunc(l.drainTimers, func(d drainTimer) bool { return d.target == t })
		if s != core.DrainRoutes && s != core.Undraining {
			if i >= 0 {
				l.drainTimers = slices.Delete(l.drainTimers, i, i+1)
			}
			return
		}
		if s == core.DrainRoutes && (i < 0 || l.drainTimers[i].stage != s) && len(l.core.Unsettled(t)) > 0 {
			if i >= 0 {
				l.drainTimers = slices.Delete(l.drainTimers, i, i+1)
			}
			return
		}
		at := l.wokenAt.Add(l.core.Config().DrainDelay)
		if i < 0 {
			l.drainTimers = append(l.drainTimers, drainTimer{t, s, at})
		} else if l.drainTimers[i].stage != s {
			l.drainTimers[i] = drainTimer{t, s, at}
		}
	})
}

// arm sets the timer to the earliest pending action.
func (l *loop) arm(timer *time.Timer) {
	next := l.deadline
	earlier := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	for i := range l.links {
		if l.links[i].held {
			earlier(l.links[i].holdUntil)
		}
	}
	for _, t := range l.drainTimers {
		earlier(t.at)
	}
	if l.recorder != nil && l.recorder.failure != nil {
		earlier(l.recorder.retry)
	}
	if !l.reweighed.since.IsZero() {
		earlier(l.reweighed.since.Add(reweighedFor))
	}
	if l.faultReport.dirty {
		earlier(l.faultReport.last.Add(faultsEvery))
	}
	if !l.settleAt.IsZero() {
		earlier(l.settleAt)
	}
	if due := l.tracer.due(); !due.IsZero() {
		earlier(due)
	}
	if next.IsZero() {
		timer.Stop()
		return
	}
	timer.Reset(time.Until(next))
}

// event reports an event to the journal and the log, where failures are warnings.
func (l *loop) event(kind status.EventKind, subject, detail string) {
	level := slog.LevelInfo
	switch kind {
	case status.EventSessionDown, status.EventLinkDown, status.EventFault:
		level = slog.LevelWarn
	}
	l.report(level, kind, subject, detail)
}

// report is event with another level of the log.
func (l *loop) report(level slog.Level, kind status.EventKind, subject, detail string) {
	now := time.Now()
	l.builder.Event(status.Event{Time: now, Kind: kind, Subject: subject, Detail: detail})
	l.tracer.event(kind, subject, detail, now)
	l.log.Log(context.Background(), level, kind.String(), "subject", subject, "detail", detail)
}
