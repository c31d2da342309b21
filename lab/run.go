package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"sync"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/topo"
)

// Fabric is a running lab.
type Fabric struct {
	*model
	backend
	alive  context.Context // until Close, or until a node ends by itself
	cancel context.CancelFunc
	closed sync.Once
	ended  error // of Close
	// note is to be called when weights may have changed, during a step.
	note func()
	// said is what each server's daemon said of destinations when it was last right, with both its processes alive.
	said   []map[netip.Addr]*farev1.DestinationWeights
	mu     sync.Mutex
	failed error // of a node that ended by itself
	wrong  bool  // an expectation was not met
}

// Result is what a step came to; it is what `fared lab -o json` prints, one object a step.
type Result struct {
	Scenario    string            `json:"scenario"`
	Step        string            `json:"step"`
	Source      string            `json:"source"`
	Destination string            `json:"destination"`
	Weights     map[string]uint32 `json:"weights"`
	Expected    map[string]uint32 `json:"expected"`
	OK          bool              `json:"ok"`
	// SlotsMoved counts queue pair slots, over all pairs, that left their plane or sub-port during the step.
	SlotsMoved uint64 `json:"slots_moved"`
	// Pairs is how many (server, destination) weights were checked.
	Pairs int `json:"pairs"`
	// ElapsedNS is from the step's actions until every weight was in effect, nanoseconds.
	ElapsedNS int64 `json:"elapsed_ns"`
	// Wrong says what was not as expected, a few at most.
	Wrong []string `json:"wrong,omitempty"`
	// WeightsFollowedNS is from the first action until the last server was told by its daemon of the last change of its weights,
	// nanoseconds; 0: none changed, or no timeline was asked for.
	WeightsFollowedNS int64 `json:"weights_followed_ns"`
	// Timeline is what happened, in order; nil: nothing, or it was not asked for.
	Timeline []Event `json:"timeline,omitempty"`
	// Traffic is what became of the packets; nil where none are sent.
	Traffic *Traffic `json:"traffic,omitempty"`
	// Transfer is what queue pairs carried meanwhile; nil where there are none, or where a server had no way to another.
	Transfer *Transfer `json:"transfer,omitempty"`
}

// settleTimeout is how long weights may take to follow a step. Nothing waits for it but a failure.
const settleTimeout = 30 * time.Second

// Start builds the fabric and waits until every pair has its weights.
func Start(ctx context.Context, o Options, log *slog.Logger) (_ *Fabric, err error) {
	p, err := newPlan(o)
	if err != nil {
		return nil, err
	}
	f := &Fabric{model: newModel(p), said: make([]map[netip.Addr]*farev1.DestinationWeights, p.Servers)}
	switch {
	case o.Netns != nil:
		f.backend = newNetns(f.model, log)
	case o.Containerlab != nil:
		f.backend = newContainers(f.model, log)
	default:
		if p.site.Port, err = freePort(); err != nil {
			return nil, err
		}
		f.backend = &inProcess{plan: p, log: log}
	}
	inner, cancel := context.WithCancel(ctx)
	f.alive, f.cancel = inner, cancel
	up := false
	defer func() {
		if !up { // after a panic too: what is outside this process would outlive it
			if f.bad() {
				err = nil // it only says that a node has ended, which Close says better
			}
			err = errors.Join(err, f.giveUp(ctx.Err() == nil))
		}
	}()
	if err := f.start(inner, f.fail); err != nil {
		return nil, err
	}
	if wrong := f.settle(inner, time.Minute); len(wrong) > 0 {
		return nil, fmt.Errorf("the fabric did not come up: %s", wrong[0])
	}
	if t := f.packets(); t != nil {
		t.roll() // what was sent until now is no step's
	}
	up = true
	return f, nil
}

// giveUp closes a fabric that did not come up.
func (f *Fabric) giveUp(failed bool) error {
	f.mu.Lock()
	f.wrong = failed
	f.mu.Unlock()
	err := f.Close()
	if logs := f.Logs(); logs != "" {
		err = errors.Join(err, fmt.Errorf("logs and configurations of all processes are kept in %s", logs))
	}
	return err
}

func (f *Fabric) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = errors.Join(f.failed, err)
	f.cancel() // a node that ends by itself ends the lab
}

// Close ends everything and waits for it; a second call does nothing more.
func (f *Fabric) Close() error {
	f.closed.Do(func() {
		f.cancel()
		err := f.close(f.bad())
		f.mu.Lock()
		defer f.mu.Unlock()
		f.ended = errors.Join(f.failed, err)
	})
	return f.ended
}

// Leave is Close for a fabric of namespaces that goes on without this process, but for the packets. It returns lines that say
// how to look at it, and to end it.
func (f *Fabric) Leave() (lines []string, err error) {
	f.closed.Do(func() {
		f.cancel()
		lines, f.ended = f.leave()
	})
	return lines, f.ended
}

// Logs is the folder with the logs and configurations of a fabric that has failed, in processes of its own; it stays after
// Close. "": there is none.
func (f *Fabric) Logs() string {
	if f.bad() {
		return f.logs()
	}
	return ""
}

// bad says that a node or an expectation has failed.
func (f *Fabric) bad() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.wrong || f.failed != nil
}

// Sessions returns how many BGP sessions the fabric has.
func (f *Fabric) Sessions() int { return len(f.Cables) }

// Check refuses a scenario that names what this fabric does not have, before anything is done.
func (f *Fabric) Check(s *Scenario) error {
	var errs []error
	for _, step := range s.Steps {
		for _, a := range step.Actions {
			_, err := f.resolve(a)
			if errors.Is(err, errNoProcesses) {
				return fmt.Errorf("%s:%d: %s: %w", s.Name, a.Line, a.Verb, err) // every such line would say the same
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s:%d: %w", s.Name, a.Line, err))
			}
		}
		if step.Lost >= 0 && f.options.rate() == 0 && f.options.Transport == "" { // a transfer must not lose anything at all
			errs = append(errs, fmt.Errorf("%s: step %q: lost is for packets, and none are sent here: use network namespaces (--netns) or containers (--containerlab), with a --rate above 0", s.Name, step.Text))
		}
		for _, e := range step.Expect {
			for _, name := range []string{e.Source, e.Destination} {
				if name == "*" {
					continue
				}
				if _, err := f.server(f.subst(name)); err != nil {
					errs = append(errs, fmt.Errorf("%s:%d: %w", s.Name, e.Line, err))
				}
			}
			if len(e.Weights) != f.Planes {
				errs = append(errs, fmt.Errorf("%s:%d: %d weights, but there are %d planes", s.Name, e.Line, len(e.Weights), f.Planes))
			}
		}
		for _, name := range []string{step.Source, step.Destination} {
			if name != "" {
				if _, err := f.server(f.subst(name)); err != nil {
					errs = append(errs, fmt.Errorf("%s: step %q: %w", s.Name, step.Text, err))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// subst replaces the names that built-in scenarios use for whatever size the fabric has: the draft's plane 3, its first leaf, another
// plane, and a receiving server.
func (f *Fabric) subst(word string) string {
	plane := min(2, f.Planes-1)
	switch word {
	case "$server":
		return f.Server[1].Name
	case "$leaf":
		return f.Leaf[plane*f.Leaves].Name
	case "$plane":
		return f.PlaneName(plane)
	case "$plane.0":
		return f.Device(plane, 0)
	case "$other":
		return f.PlaneName(0)
	case "$other.0":
		return f.Device(0, 0)
	case "$otherleaf":
		return f.Leaf[0].Name
	}
	return word
}

// resolve turns a script's line into what to do.
func (f *Fabric) resolve(a Action) (func(ctx context.Context) error, error) {
	args := make([]string, len(a.Args))
	for i, w := range a.Args {
		args[i] = f.subst(w)
	}
	switch a.Verb {
	case "cut", "mend":
		set, err := f.cablesOf(args[0], args[1])
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error { return f.setCut(ctx, set, a.Verb == "cut") }, nil
	case "flap":
		return f.resolveFlap(args)
	case "blackhole", "heal":
		return f.resolveLoss(a.Verb == "blackhole", args)
	case "kill", "restart":
		n, err := f.leaf(args[0])
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error {
			f.dark[n] = a.Verb == "kill"
			err := f.wire(ctx, f.At(n))
			return errors.Join(err, f.power(ctx, n, !f.dark[n]))
		}, nil
	case "freeze", "thaw":
		return f.resolveFreeze(a.Verb == "freeze", args)
	case "poweroff", "poweron":
		return f.resolvePower(a.Verb == "poweroff", args)
	case "crash", "revive":
		return f.resolveCrash(a.Verb == "crash", args)
	default: // drain, undrain: Parse knows no other verb
		return f.resolveDrain(a.Verb == "drain", args)
	}
}

func (f *Fabric) setCut(ctx context.Context, set []*topo.Cable, cut bool) error {
	for _, c := range set {
		f.cut[c.Index] = cut
	}
	return f.wire(ctx, set)
}

// wire gives both ends of cables their state.
func (f *Fabric) wire(ctx context.Context, set []*topo.Cable) error {
	states := make([]cable, len(set))
	for i, c := range set {
		states[i] = f.cable(c)
	}
	f.darkened(states)
	if f.note != nil { // what an action does and undoes is a change too
		f.note()
	}
	return f.cables(ctx, states)
}

// resolveFlap cuts a cable and mends it, so many times, each state for the given time.
func (f *Fabric) resolveFlap(args []string) (func(ctx context.Context) error, error) {
	set, err := f.cablesOf(args[0], args[1])
	if err != nil {
		return nil, err
	}
	times, err := strconv.Atoi(args[2])
	if err != nil || times < 1 || times > 1000 {
		return nil, fmt.Errorf("flap %q times: use 1 to 1000", args[2])
	}
	period, err := time.ParseDuration(args[3])
	if err != nil || period < time.Millisecond || period > time.Minute {
		return nil, fmt.Errorf("flap every %q: use a time such as 100ms, 1ms to 1m", args[3])
	}
	return func(ctx context.Context) error {
		for range times {
			if err := errors.Join(f.setCut(ctx, set, true), sleep(ctx, period), f.setCut(ctx, set, false), sleep(ctx, period)); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// resolveLoss makes cables drop packets in silence, or ends that.
func (f *Fabric) resolveLoss(on bool, args []string) (func(ctx context.Context) error, error) {
	if !f.options.real() {
		return nil, errNoProcesses
	}
	set, err := f.cablesOf(args[0], args[1])
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		for _, c := range set {
			f.lossy[c.Index] = on
			if err := f.lose(ctx, c, on); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// resolveFreeze stops all processes of a leaf or a spine, or lets them go on.
func (f *Fabric) resolveFreeze(on bool, args []string) (func(ctx context.Context) error, error) {
	if !f.options.real() {
		return nil, errNoProcesses
	}
	n, err := f.leaf(args[0])
	if err != nil {
		return nil, err
	}
	return func(context.Context) error {
		f.asleep[n] = on
		return f.freeze(n, on)
	}, nil
}

// resolvePower takes a server's power, or returns it: a reboot. Nothing that it knew survives.
func (f *Fabric) resolvePower(off bool, args []string) (func(ctx context.Context) error, error) {
	if !f.options.real() {
		return nil, errNoProcesses
	}
	if f.options.Transport != "" {
		return nil, errors.New("a server without power loses its queue pairs too: leave out --transport")
	}
	server, err := f.server(args[0])
	if err != nil {
		return nil, err
	}
	n := f.Server[server]
	return func(ctx context.Context) error {
		if off == f.dark[n] {
			return fmt.Errorf("%s: its power is %s already", n.Name, map[bool]string{true: "off", false: "on"}[off])
		}
		f.dark[n] = off
		if off {
			f.crashed(server, bothParts)
			return errors.Join(f.wire(ctx, f.At(n)), f.power(ctx, n, false))
		}
		f.revived(server, bothParts)
		return errors.Join(f.wire(ctx, f.At(n)), f.power(ctx, n, true))
	}, nil
}

func (f *Fabric) resolveDrain(on bool, args []string) (func(ctx context.Context) error, error) {
	servers, err := f.servers(args[0])
	if err != nil {
		return nil, err
	}
	target := &farev1.DrainTarget{}
	var of func(c *topo.Cable) bool
	switch args[1] {
	case "plane", "sub-port":
		named, err := f.cablesOf(f.Server[servers[0]].Name, args[2])
		if err != nil {
			return nil, err
		}
		if args[1] == "plane" {
			target.Target = &farev1.DrainTarget_Plane{Plane: args[2]}
			of = func(c *topo.Cable) bool { return c.Plane == named[0].Plane }
		} else {
			target.Target = &farev1.DrainTarget_SubPort{SubPort: args[2]}
			of = func(c *topo.Cable) bool { return c.Down.Device == args[2] }
		}
	case "leaf":
		leaf, err := f.leaf(args[2])
		if err != nil {
			return nil, err
		}
		target.Target = &farev1.DrainTarget_Leaf{Leaf: leaf.ID.String()}
		of = func(c *topo.Cable) bool { return c.Up.Node == leaf }
	default:
		return nil, fmt.Errorf("%q cannot be drained: name a plane, a sub-port or a leaf", args[1])
	}
	return func(ctx context.Context) error {
		var set []*topo.Cable
		var errs []error
		for _, server := range servers {
			n := f.Server[server]
			for _, c := range f.At(n) {
				if of(c) {
					f.drained[c.Index] = on
					set = append(set, c)
				}
			}
			var err error
			if on {
				_, err = f.api(n).Drain(ctx, &farev1.DrainRequest{Target: target})
			} else {
				_, err = f.api(n).Undrain(ctx, &farev1.UndrainRequest{Target: target})
			}
			errs = append(errs, err)
		}
		return errors.Join(errors.Join(errs...), f.wire(ctx, set))
	}, nil
}

// Run plays a scenario and calls each with every step's result. It returns false when an expectation was not met.
func (f *Fabric) Run(ctx context.Context, s *Scenario, each func(Result)) (bool, error) {
	if err := f.Check(s); err != nil {
		return false, err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(f.alive, stop)()
	all := true
	for i := range s.Steps {
		r, err := f.step(ctx, s, &s.Steps[i])
		if err == nil && f.alive.Err() != nil {
			err = f.alive.Err()
		}
		if err != nil && f.alive.Err() != nil {
			err = fmt.Errorf("%s: step %q was not played to its end: %w", s.Name, s.Steps[i].Text, err)
		}
		if err != nil {
			return false, err
		}
		all = all && r.OK
		each(r)
	}
	return all, nil
}

func (f *Fabric) step(ctx context.Context, s *Scenario, step *Step) (Result, error) {
	before := f.slotsMoved()
	changes := newChanges(f.model)
	f.note = changes.note
	t := f.packets()
	var idle *tally
	var events []Event
	x := f.transfer().begin(ctx)
	defer func() { x.abandon() }()
	start := time.Now() // no packet of the next tally is sent before
	if t != nil {
		idle = t.roll()
	}
	for _, a := range step.Actions {
		do, err := f.resolve(a)
		if err == nil {
			err = do(ctx)
		}
		if err != nil {
			return Result{}, fmt.Errorf("%s:%d: %w", s.Name, a.Line, err)
		}
		changes.note()
		events = append(events, Event{AtNS: time.Since(start).Nanoseconds(), Event: EventAction, Detail: f.words(a)})
	}
	wrong := f.settle(ctx, settleTimeout)
	if ctx.Err() != nil {
		return Result{}, ctx.Err()
	}
	took := time.Since(start)
	r := Result{
		Scenario: s.Name, Step: step.Text, Source: f.subst(step.Source), Destination: f.subst(step.Destination),
		ElapsedNS: took.Nanoseconds(), Pairs: f.pairs(), SlotsMoved: f.slotsMoved() - before, Wrong: wrong,
	}
	if step.Source == "" {
		r.Source, r.Destination = f.Server[0].Name, f.Server[1].Name
	}
	src, _ := f.server(r.Source)
	dst, _ := f.server(r.Destination)
	r.Weights = f.named(f.observed(src, dst))
	r.Expected = f.named(f.inForce(src, dst))
	for _, e := range step.Expect {
		r.Wrong = append(r.Wrong, f.demand(e)...)
	}
	if step.Moved >= 0 && r.SlotsMoved > uint64(step.Moved) && (step.MovedPolicy == "" || step.MovedPolicy == f.Policy) {
		r.Wrong = append(r.Wrong, fmt.Sprintf("%d slots moved, at most %d may", r.SlotsMoved, step.Moved))
	}
	if t != nil {
		var wrong []string
		w := watched{idle: idle, src: src, dst: dst, judge: len(r.Wrong) == 0, most: step.Lost, changed: changes.changed}
		if r.Traffic, wrong = f.watchPackets(ctx, t, w); ctx.Err() != nil {
			return Result{}, ctx.Err()
		}
		r.Wrong = append(r.Wrong, wrong...)
	}
	if x == nil { // some server had no way to another; it may have now
		x = f.transfer().begin(ctx)
	}
	moved, failures := x.end(start)
	r.Transfer, r.Wrong = moved, append(r.Wrong, failures...)
	if f.options.Timeline {
		f.timeline(&r, start, events)
	}
	r.OK = len(r.Wrong) == 0
	r.Wrong = r.Wrong[:min(len(r.Wrong), 8)]
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wrong = f.wrong || !r.OK
	return r, nil
}
