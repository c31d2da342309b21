package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/lab/judge"
	"github.com/fared/fared/lab/probe"
	"github.com/fared/fared/topo"
)

// Fabric is a running lab.
type Fabric struct {
	*judge.Model
	backend   backend.Backend
	plan      *backend.Plan
	options   Options
	hosts     backend.Hosts     // nil in one process
	captures  probe.Captures    // while packets are recorded
	flow      *probe.Traffic    // nil in one process
	transfer  *transfer         // nil without queue pairs
	followers []*probe.Follower // one per server; nil if weights are not followed
	following sync.WaitGroup
	alive     context.Context // until Close, or until a node exits by itself
	cancel    context.CancelFunc
	closed    sync.Once
	ended     error // result of Close
	// note is called when weights may have changed, during a step.
	note func()
	// lastRows holds the rows of each server's daemon from its last correct state with both processes alive.
	lastRows []map[topo.Way]*judge.Row
	mu       sync.Mutex
	failed   error // error of a node that exited by itself
	wrong    bool  // an expectation was not met
}

// Result is the result of a step; `fared lab -o json` prints one object per step.
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
	// Pairs is the number of (server, destination) weights that were checked.
	Pairs int `json:"pairs"`
	// ElapsedNS is the time from the step's actions until every weight was in effect, nanoseconds.
	ElapsedNS int64 `json:"elapsed_ns"`
	// Wrong lists the first few deviations.
	Wrong []string `json:"wrong,omitempty"`
	// WeightsFollowedNS is the time from the first action until the last server received the last change of its weights
	// from its daemon, nanoseconds; 0 means that no weight changed or that timelines are off.
	WeightsFollowedNS int64 `json:"weights_followed_ns"`
	// Timeline lists the events in order; nil means that there were none or that timelines are off.
	Timeline []Event `json:"timeline,omitempty"`
	// Traffic describes the packets; nil if none are sent.
	Traffic *Traffic `json:"traffic,omitempty"`
	// Transfer describes the queue pair traffic meanwhile; nil if there is none, or if a server could not reach
	// another.
	Transfer *Transfer `json:"transfer,omitempty"`
}

// settleTimeout limits the time that weights have to follow a step. Only a failure waits that long; a busy machine may
// give the fabric a small part of its processors.
const settleTimeout = 90 * time.Second

// Start builds the fabric and waits until every pair has its weights.
func Start(ctx context.Context, o Options, log *slog.Logger) (_ *Fabric, err error) {
	p, o, err := newPlan(o)
	if err != nil {
		return nil, err
	}
	f := &Fabric{Model: judge.NewModel(p.Fabric), plan: p, options: o, lastRows: make([]map[topo.Way]*judge.Row, p.Servers)}
	switch {
	case o.Netns != nil:
		b := backend.NewNetns(p, *o.Netns, log)
		f.backend, f.hosts = b, b
	case o.Containerlab != nil:
		b := backend.NewContainers(p, *o.Containerlab, log)
		f.backend, f.hosts = b, b
	default:
		if p.Site.Port, err = freePort(); err != nil {
			return nil, err
		}
		f.backend = backend.NewInProcess(p, log)
	}
	inner, cancel := context.WithCancel(ctx)
	f.alive, f.cancel = inner, cancel
	up := false
	defer func() {
		if !up { // also after a panic: resources outside this process would outlive it
			if f.bad() {
				err = nil // it only reports that a node has ended, and Close returns the details
			}
			err = errors.Join(err, f.giveUp(ctx.Err() == nil))
		}
	}()
	if err := f.raise(inner, log); err != nil {
		return nil, err
	}
	limit := p.StartTimeout()
	if wrong := f.settleTelling(inner, limit, o.Progress); len(wrong) > 0 {
		return nil, fmt.Errorf("the fabric is not ready after %v: %d of %d nodes are not in the expected state: %s", limit, len(wrong), len(f.Nodes()), wrong[0])
	}
	if f.flow != nil {
		f.flow.Roll() // packets sent until now belong to no step
	}
	up = true
	return f, nil
}

// raise starts the nodes, and then the probes: captures before any packet, senders and counters once sessions are
// established.
func (f *Fabric) raise(ctx context.Context, log *slog.Logger) (err error) {
	if err := f.backend.Build(ctx, f.fail); err != nil {
		return err
	}
	if f.hosts == nil {
		if err := f.backend.Start(ctx); err != nil {
			return err
		}
		if f.options.Timeline {
			f.followAll(ctx)
		}
		return nil
	}
	carried := f.options.Transport != ""
	if f.captures, err = probe.StartCaptures(f.hosts, slices.Concat(f.Leaf, f.Spine), carried, f.backend.Logs(), log); err != nil {
		return err
	}
	if err := f.backend.Start(ctx); err != nil {
		return err
	}
	c := probe.Config{Fabric: f.Fabric, Hosts: f.hosts, API: f.backend.API, Rate: f.options.rate(), Carried: carried}
	if f.flow, err = probe.Start(ctx, c, f.fail); err != nil {
		return err
	}
	f.followers = f.flow.Followers()
	if carried {
		f.transfer, err = startTransfer(ctx, f.Fabric, f.hosts)
	}
	return err
}

// followAll subscribes to the weights of every daemon in this process.
func (f *Fabric) followAll(ctx context.Context) {
	for _, n := range f.Server {
		w := probe.NewFollower(f.Fabric, n.Index)
		f.followers = append(f.followers, w)
		f.following.Go(func() {
			if err := w.Watch(ctx, f.backend.API(n)); err != nil && ctx.Err() == nil {
				f.fail(fmt.Errorf("weights of %s: %w", n.Name, err))
			}
		})
	}
}

// quiet stops the probes.
func (f *Fabric) quiet() {
	f.captures.Close()
	if f.flow != nil {
		f.flow.Close()
	}
	if f.transfer != nil {
		f.transfer.close()
	}
	f.following.Wait()
}

// moves returns the number of slots that have left their place since the start, over all servers.
func (f *Fabric) moves() uint64 {
	if f.flow != nil {
		return f.flow.SlotsMoved()
	}
	return f.backend.SlotsMoved()
}

// giveUp closes a fabric that did not start.
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
	f.cancel() // a node that exits by itself ends the lab
}

// Close stops everything and waits for it; a second call returns the same error.
func (f *Fabric) Close() error {
	f.closed.Do(func() {
		f.cancel()
		f.quiet()
		err := f.backend.Close(f.bad())
		f.mu.Lock()
		defer f.mu.Unlock()
		f.ended = errors.Join(f.failed, err)
	})
	return f.ended
}

// Leave is Close for a fabric of namespaces that continues without this process, except for its packets. It returns
// lines that explain how to inspect and how to end it.
func (f *Fabric) Leave() (lines []string, err error) {
	f.closed.Do(func() {
		f.cancel()
		f.quiet()
		lines, f.ended = f.backend.Leave()
	})
	return lines, f.ended
}

// Logs returns the folder with the logs and configurations of a failed fabric with separate processes; the folder
// remains after Close. "" means that there is none.
func (f *Fabric) Logs() string {
	if f.bad() {
		return f.backend.Logs()
	}
	return ""
}

// bad reports whether a node or an expectation has failed.
func (f *Fabric) bad() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.wrong || f.failed != nil
}

// Sessions returns the number of BGP sessions of the fabric.
func (f *Fabric) Sessions() int { return len(f.Cables) }

// Check returns an error if a scenario names objects that this fabric does not have, before anything is done.
func (f *Fabric) Check(s *Scenario) error {
	var errs []error
	for _, step := range s.Steps {
		for _, a := range step.Actions {
			_, err := f.resolve(a)
			if errors.Is(err, backend.ErrNoProcesses) {
				return fmt.Errorf("%s:%d: %s: %w", s.Name, a.Line, a.Verb, err) // all such lines would have the same error
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s:%d: %w", s.Name, a.Line, err))
			}
		}
		if step.Lost >= 0 && f.options.rate() == 0 && f.options.Transport == "" { // a transfer must not lose anything in any case
			errs = append(errs, backend.NewOptionError("%s: step %q: lost needs packets, and this fabric sends none: use network namespaces ({Netns}) or containers ({Containerlab}), with a {Rate} above 0", s.Name, step.Text))
		}
		for _, e := range step.Expect {
			for _, name := range []string{e.Source, e.Destination} {
				if name == "*" {
					continue
				}
				if _, err := f.GroupsNamed(f.subst(name)); err != nil {
					errs = append(errs, fmt.Errorf("%s:%d: %w", s.Name, e.Line, err))
				}
			}
			if len(e.Weights) != f.Planes {
				errs = append(errs, fmt.Errorf("%s:%d: %d weights, but there are %d planes", s.Name, e.Line, len(e.Weights), f.Planes))
			}
		}
		for _, name := range []string{step.Source, step.Destination} {
			if name != "" {
				if _, err := f.GroupsNamed(f.subst(name)); err != nil {
					errs = append(errs, fmt.Errorf("%s: step %q: %w", s.Name, step.Text, err))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// subst replaces the names with which built-in scenarios adapt to the size of the fabric: the draft's plane 3, its
// first leaf, another plane, a receiving server, and the second GPU of a server.
func (f *Fabric) subst(word string) string { return f.substAt(f.Server[1], word) }

// substAt is subst for a word that may stand for a device of a server: $plane.0 and $other.0 are the first sub-port in
// a plane, $gpu$plane.0 is that of the second GPU.
func (f *Fabric) substAt(server *topo.Node, word string) string {
	if !strings.Contains(word, "$") {
		return word
	}
	plane := min(2, f.Planes-1)
	return strings.NewReplacer("$gpu$plane.0", f.first(server, 1, plane), "$gpu$plane", "g1"+f.PlaneName(plane), "$gpu", "g1",
		"$otherleaf", f.Leaf[0].Name, "$leaf", f.Leaf[plane*f.Leaves].Name, "$server", f.Server[1].Name,
		"$plane.0", f.first(server, -1, plane), "$other.0", f.first(server, -1, 0), "$plane", f.PlaneName(plane), "$other", f.PlaneName(0)).Replace(word)
}

// substArgs substitutes the arguments of an action; devices belong to the node named by the first argument.
func (f *Fabric) substArgs(args []string) []string {
	at := f.Server[1]
	all := make([]string, len(args))
	for i, word := range args {
		all[i] = f.substAt(at, word)
		if n := f.Node(all[0]); i == 0 && n != nil {
			at = n
		}
	}
	return all
}

// first returns the device of a server's first sub-port in a plane, or of the first one that a GPU owns there. If there
// is none, it returns a name with spaces, which matches no device.
func (f *Fabric) first(server *topo.Node, gpu, plane int) string {
	name := f.PlaneName(plane) + " sub-port 0"
	if gpu >= 0 {
		name = fmt.Sprintf("g%d %s", gpu, name)
	}
	for _, c := range f.At(server) {
		if c.Plane == plane && !c.Uplink() && (gpu < 0 || f.GroupsEach() > 1 && c.Group.GPU == gpu) {
			return c.Down.Device
		}
	}
	return name
}

// resolve returns the function for a script's line.
func (f *Fabric) resolve(a Action) (func(ctx context.Context) error, error) {
	args := f.substArgs(a.Args)
	switch a.Verb {
	case "cut", "mend":
		set, err := f.CablesNamed(args[0], args[1])
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error { return f.setCut(ctx, set, a.Verb == "cut") }, nil
	case "flap":
		return f.resolveFlap(args)
	case "blackhole", "heal":
		return f.resolveLoss(a.Verb == "blackhole", args)
	case "kill", "restart":
		n, err := f.LeafNamed(args[0])
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error {
			f.Dark[n] = a.Verb == "kill"
			err := f.wire(ctx, f.At(n))
			return errors.Join(err, f.backend.Power(ctx, n, !f.Dark[n]))
		}, nil
	case "freeze", "thaw":
		return f.resolveFreeze(a.Verb == "freeze", args)
	case "poweroff", "poweron":
		return f.resolvePower(a.Verb == "poweroff", args)
	case "crash", "revive":
		return f.resolveCrash(a.Verb == "crash", args)
	default: // drain and undrain; Parse accepts no other verb
		return f.resolveDrain(a.Verb == "drain", a.Args)
	}
}

func (f *Fabric) setCut(ctx context.Context, set []*topo.Cable, cut bool) error {
	for _, c := range set {
		f.Cut[c.Index] = cut
	}
	return f.wire(ctx, set)
}

// wire applies the model's state to both ends of cables.
func (f *Fabric) wire(ctx context.Context, set []*topo.Cable) error {
	states := make([]backend.Cable, len(set))
	for i, c := range set {
		states[i] = backend.Cable{Cable: c, Connected: f.Up(c)}
	}
	f.Darkened(set)
	if f.note != nil { // a change that an action makes and reverts counts too
		f.note()
	}
	return f.backend.SetCables(ctx, states)
}

// resolveFlap cuts a cable and mends it n times, each state for the given time.
func (f *Fabric) resolveFlap(args []string) (func(ctx context.Context) error, error) {
	set, err := f.CablesNamed(args[0], args[1])
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
			if err := errors.Join(f.setCut(ctx, set, true), backend.Sleep(ctx, period), f.setCut(ctx, set, false), backend.Sleep(ctx, period)); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// resolveLoss makes cables drop packets silently, or ends that.
func (f *Fabric) resolveLoss(on bool, args []string) (func(ctx context.Context) error, error) {
	if !f.options.real() {
		return nil, backend.ErrNoProcesses
	}
	set, err := f.CablesNamed(args[0], args[1])
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		for _, c := range set {
			f.Lossy[c.Index] = on
			if err := f.backend.Lose(ctx, c, on); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// resolveFreeze stops all processes of a leaf or a spine, or continues them.
func (f *Fabric) resolveFreeze(on bool, args []string) (func(ctx context.Context) error, error) {
	if !f.options.real() {
		return nil, backend.ErrNoProcesses
	}
	n, err := f.LeafNamed(args[0])
	if err != nil {
		return nil, err
	}
	return func(context.Context) error {
		f.Asleep[n] = on
		return f.backend.Freeze(n, on)
	}, nil
}

// resolvePower powers a server off, or on again: a reboot, which no state survives.
func (f *Fabric) resolvePower(off bool, args []string) (func(ctx context.Context) error, error) {
	if !f.options.real() {
		return nil, backend.ErrNoProcesses
	}
	if f.options.Transport != "" {
		return nil, backend.NewOptionError("a server without power loses its queue pairs too: leave out {Transport}")
	}
	server, err := f.ServerNamed(args[0])
	if err != nil {
		return nil, err
	}
	n := f.Server[server]
	return func(ctx context.Context) error {
		if off == f.Dark[n] {
			return fmt.Errorf("%s: the power is %s already", n.Name, map[bool]string{true: "off", false: "on"}[off])
		}
		f.Dark[n] = off
		if off {
			f.Crashed(server, judge.BothParts)
			err := f.wire(ctx, f.At(n))
			f.flow.Mute(server, true)
			return errors.Join(err, f.backend.Power(ctx, n, false))
		}
		f.Revived(server, judge.BothParts)
		err := f.wire(ctx, f.At(n))
		f.flow.Mute(server, false)
		return errors.Join(err, f.backend.Power(ctx, n, true))
	}, nil
}

// drainTarget returns the cables of a server that the two words of a drain name, such as "sub-port p2.0", and the
// target for its daemon. The cables may be empty for a leaf.
func (f *Fabric) drainTarget(server *topo.Node, kind, word string) ([]*topo.Cable, *farev1.DrainTarget, error) {
	name := f.substAt(server, word)
	switch kind {
	case "plane":
		set, err := f.CablesNamed(server.Name, name)
		if err == nil && name != f.PlaneName(set[0].Plane) {
			err = fmt.Errorf("%q is not a plane: planes are %s to %s", name, f.PlaneName(0), f.PlaneName(f.Planes-1))
		}
		return set, &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: name}}, err
	case "sub-port":
		set, err := f.CablesNamed(server.Name, name)
		if err == nil && name != set[0].Down.Device {
			err = fmt.Errorf("%q is not a sub-port: name a device such as %s", name, set[0].Down.Device)
		}
		return set, &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: name}}, err
	case "leaf":
		leaf, err := f.LeafNamed(name)
		if err != nil {
			return nil, nil, err
		}
		var set []*topo.Cable
		for _, c := range f.At(server) {
			if c.Up.Node == leaf {
				set = append(set, c)
			}
		}
		return set, &farev1.DrainTarget{Target: &farev1.DrainTarget_Leaf{Leaf: leaf.ID.String()}}, nil
	}
	return nil, nil, fmt.Errorf("%q cannot be drained: name a plane, a sub-port or a leaf", kind)
}

// resolveDrain drains or undrains the same target at one server or at all. Its words are as in the script: $plane.0 is
// a device of each server.
func (f *Fabric) resolveDrain(on bool, words []string) (func(ctx context.Context) error, error) {
	servers, err := f.ServersNamed(f.subst(words[0]))
	if err != nil {
		return nil, err
	}
	sets, targets := make([][]*topo.Cable, len(servers)), make([]*farev1.DrainTarget, len(servers))
	for i, server := range servers {
		n := f.Server[server]
		if sets[i], targets[i], err = f.drainTarget(n, words[1], words[2]); err != nil {
			if i > 0 {
				err = fmt.Errorf("%s: %w", n.Name, err)
			}
			return nil, err
		}
	}
	return func(ctx context.Context) error {
		var set []*topo.Cable
		var errs []error
		for i, server := range servers {
			n, target := f.Server[server], targets[i]
			for _, c := range sets[i] {
				f.Drained[c.Index] = on
				set = append(set, c)
			}
			var err error
			if on {
				_, err = f.backend.API(n).Drain(ctx, &farev1.DrainRequest{Target: target, Force: true}) // scenarios also drain the last plane
			} else {
				_, err = f.backend.API(n).Undrain(ctx, &farev1.UndrainRequest{Target: target})
			}
			errs = append(errs, err)
		}
		return errors.Join(errors.Join(errs...), f.wire(ctx, set))
	}, nil
}

// Run plays a scenario and calls each with every step's result. It returns false if an expectation was not met.
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

// beginTransfer starts a step's transfer. It returns nil without queue pairs, or if a pair is unreachable.
func (f *Fabric) beginTransfer(ctx context.Context) *flight {
	if f.transfer == nil || f.Severed() {
		return nil
	}
	return f.transfer.begin(ctx)
}

// allowed returns the rate that the cables allow all pairs together, bit/s, or 0 if cables are not shaped.
func (f *Fabric) allowed() uint64 {
	if f.transfer == nil || f.plan.Site.RateScale == 0 {
		return 0
	}
	return uint64(math.Round(f.Allows() / backend.RateScale))
}

// pairs returns the number of pairs of GPUs on different servers.
func (f *Fabric) pairs() int { n := f.Servers * f.GPUs; return n * (f.Servers - 1) * f.GPUs }

// shown returns the source group that represents a name in a step: the first one of a server.
func (f *Fabric) shown(name string) int {
	found, err := f.GroupsNamed(name)
	if err != nil { // Check has verified the name
		return 0
	}
	return found[0]
}

func (f *Fabric) step(ctx context.Context, s *Scenario, step *Step) (Result, error) {
	before := f.moves()
	changes := judge.NewChanges(f.Model)
	f.note = changes.Note
	t := f.flow
	var idle *probe.Tally
	var events []Event
	x := f.beginTransfer(ctx)
	defer func() { x.abandon() }()
	start := time.Now() // no packet of the next tally is sent before
	if t != nil {
		idle = t.Roll()
	}
	for _, a := range step.Actions {
		do, err := f.resolve(a)
		if err == nil {
			err = do(ctx)
		}
		if err != nil {
			return Result{}, fmt.Errorf("%s:%d: %w", s.Name, a.Line, err)
		}
		changes.Note()
		events = append(events, Event{AtNS: time.Since(start).Nanoseconds(), Event: EventAction, Detail: f.words(a)})
	}
	wrong := f.settle(ctx, settleTimeout)
	if ctx.Err() != nil {
		return Result{}, ctx.Err()
	}
	took := time.Since(start)
	r := Result{
		Scenario: s.Name, Step: step.Text, Source: f.subst(step.Source), Destination: f.subst(step.Destination),
		ElapsedNS: took.Nanoseconds(), Pairs: f.pairs(), SlotsMoved: f.moves() - before, Wrong: wrong,
	}
	if step.Source == "" {
		r.Source, r.Destination = f.Server[0].Name, f.Server[1].Name
	}
	src, dst := f.shown(r.Source), f.shown(r.Destination)
	r.Source, r.Destination = f.Groups()[src].Name, f.Groups()[dst].Name
	r.Weights = f.named(f.observed(src, dst))
	r.Expected = f.named(f.InForce(src, dst))
	for _, e := range step.Expect {
		r.Wrong = append(r.Wrong, f.demand(e)...)
	}
	if step.Moved >= 0 && r.SlotsMoved > uint64(step.Moved) && (step.MovedPolicy == "" || step.MovedPolicy == f.Policy) {
		r.Wrong = append(r.Wrong, fmt.Sprintf("%d slots moved, want at most %d", r.SlotsMoved, step.Moved))
	}
	if t != nil {
		var wrong []string
		w := watched{idle: idle, src: src, dst: dst, judge: len(r.Wrong) == 0, most: step.Lost, changed: changes.Changed}
		if r.Traffic, wrong = f.watchPackets(ctx, t, w); ctx.Err() != nil {
			return Result{}, ctx.Err()
		}
		r.Wrong = append(r.Wrong, wrong...)
	}
	if x == nil { // a server could not reach another, which may have changed
		x = f.beginTransfer(ctx)
	}
	moved, failures := x.end(start, f.Severed(), f.allowed())
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
