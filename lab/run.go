package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Fabric is a running lab.
type Fabric struct {
	*model
	backend
	cancel context.CancelFunc
	closed sync.Once
	ended  error // of Close
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
	// Traffic is what became of the packets; nil where none are sent.
	Traffic *Traffic `json:"traffic,omitempty"`
}

// settleTimeout is how long weights may take to follow a step. Nothing waits for it but a failure.
const settleTimeout = 15 * time.Second

// Start builds the fabric and waits until every pair has its weights.
func Start(ctx context.Context, o Options, log *slog.Logger) (_ *Fabric, err error) {
	p, err := newPlan(o)
	if err != nil {
		return nil, err
	}
	f := &Fabric{model: newModel(p), said: make([]map[netip.Addr]*farev1.DestinationWeights, p.Servers)}
	if o.Netns == nil {
		if p.port, err = freePort(); err != nil {
			return nil, err
		}
		f.backend = &inProcess{plan: p, log: log}
	} else {
		f.backend = newNetns(f.model, log)
	}
	inner, cancel := context.WithCancel(ctx)
	f.cancel = cancel
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
func (f *Fabric) Sessions() int { return f.Planes * f.Servers * f.SubPorts }

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
		if step.Lost >= 0 && (f.Netns == nil || f.Netns.Rate == 0) {
			errs = append(errs, fmt.Errorf("%s: step %q: lost is for packets, and none are sent here: use network namespaces (--netns), with a --rate above 0", s.Name, step.Text))
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

// subst replaces the names that built-in scenarios use for whatever size the fabric has: the draft's plane 3, its leaf,
// and a receiving server.
func (f *Fabric) subst(word string) string {
	plane := min(2, f.Planes-1)
	switch word {
	case "$server":
		return f.serverName(1)
	case "$leaf":
		return f.leafName(plane)
	case "$plane":
		return f.planeName(plane)
	case "$plane.0":
		return f.device(plane, 0)
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
		server, err := f.server(args[0])
		if err != nil {
			return nil, err
		}
		plane, subs, err := f.lanesOf(args[1])
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error {
			for _, sub := range subs {
				f.cut[plane][server][sub] = a.Verb == "cut"
			}
			return f.wire(ctx, plane, server, subs)
		}, nil
	case "kill", "restart":
		plane, err := f.leaf(args[0])
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context) error {
			f.dark[plane] = a.Verb == "kill"
			var set []cable
			for server := range f.Servers {
				for sub := range f.SubPorts {
					set = append(set, f.cable(plane, server, sub))
				}
			}
			f.darkened(plane, set)
			return errors.Join(f.cables(ctx, plane, set), f.power(ctx, plane, !f.dark[plane]))
		}, nil
	case "crash", "revive":
		return f.resolveCrash(a.Verb == "crash", args)
	default: // drain, undrain: Parse knows no other verb
		return f.resolveDrain(a.Verb == "drain", args)
	}
}

// wire gives both ends of a server's cables in a plane their state.
func (f *Fabric) wire(ctx context.Context, plane, server int, subs []int) error {
	set := make([]cable, len(subs))
	for i, sub := range subs {
		set[i] = f.cable(plane, server, sub)
	}
	f.darkened(plane, set)
	return f.cables(ctx, plane, set)
}

func (f *Fabric) resolveDrain(on bool, args []string) (func(ctx context.Context) error, error) {
	server, err := f.server(args[0])
	if err != nil {
		return nil, err
	}
	target := &farev1.DrainTarget{}
	var plane int
	var subs []int
	switch args[1] {
	case "plane", "sub-port":
		if plane, subs, err = f.lanesOf(args[2]); err != nil {
			return nil, err
		}
		if args[1] == "plane" {
			target.Target = &farev1.DrainTarget_Plane{Plane: args[2]}
		} else {
			target.Target = &farev1.DrainTarget_SubPort{SubPort: args[2]}
		}
	case "leaf":
		if plane, err = f.leaf(args[2]); err != nil {
			return nil, err
		}
		_, subs, _ = f.lanesOf(f.planeName(plane))
		target.Target = &farev1.DrainTarget_Leaf{Leaf: f.leafID(plane).String()}
	default:
		return nil, fmt.Errorf("%q cannot be drained: name a plane, a sub-port or a leaf", args[1])
	}
	return func(ctx context.Context) error {
		for _, sub := range subs {
			f.drained[plane][server][sub] = on
		}
		var err error
		if on {
			_, err = f.api(server).Drain(ctx, &farev1.DrainRequest{Target: target})
		} else {
			_, err = f.api(server).Undrain(ctx, &farev1.UndrainRequest{Target: target})
		}
		return errors.Join(err, f.wire(ctx, plane, server, subs))
	}, nil
}

// Run plays a scenario and calls each with every step's result. It returns false when an expectation was not met.
func (f *Fabric) Run(ctx context.Context, s *Scenario, each func(Result)) (bool, error) {
	if err := f.Check(s); err != nil {
		return false, err
	}
	all := true
	for i := range s.Steps {
		r, err := f.step(ctx, s, &s.Steps[i])
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
	t := f.packets()
	var idle *tally
	if t != nil {
		idle = t.roll()
	}
	start := time.Now()
	for _, a := range step.Actions {
		do, err := f.resolve(a)
		if err == nil {
			err = do(ctx)
		}
		if err != nil {
			return Result{}, fmt.Errorf("%s:%d: %w", s.Name, a.Line, err)
		}
		changes.note()
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
		r.Source, r.Destination = f.serverName(0), f.serverName(1)
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
	r.OK = len(r.Wrong) == 0
	r.Wrong = r.Wrong[:min(len(r.Wrong), 8)]
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wrong = f.wrong || !r.OK
	return r, f.failed
}
