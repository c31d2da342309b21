package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/dataplane/memory"
)

// Fabric is a running lab.
type Fabric struct {
	*model
	servers []*node
	leaves  []*node
	cancel  context.CancelFunc
	done    sync.WaitGroup
	mu      sync.Mutex
	failed  error // of a daemon that ended by itself
}

// node is one daemon of the fabric.
type node struct {
	name      string
	daemon    *daemon.Daemon
	links     *cables
	dataplane *memory.Dataplane // servers only
	conn      *memory.Conn
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
}

// settleTimeout is how long weights may take to follow a step. Nothing waits for it but a failure.
const settleTimeout = 15 * time.Second

// Start builds the fabric and waits until every pair has its weights.
func Start(ctx context.Context, o Options, log *slog.Logger) (*Fabric, error) {
	o = o.withDefaults()
	if err := o.validate(); err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	f := &Fabric{model: newModel(&plan{Options: o, port: port})}
	ctx, f.cancel = context.WithCancel(ctx)
	if err := f.build(log); err != nil {
		f.Close()
		return nil, err
	}
	for _, n := range slices.Concat(f.leaves, f.servers) {
		f.done.Go(func() {
			if err := n.daemon.Run(ctx); err != nil && ctx.Err() == nil {
				f.fail(fmt.Errorf("%s: %w", n.name, err))
			}
		})
	}
	if wrong := f.settle(ctx, time.Minute); len(wrong) > 0 {
		return nil, errors.Join(fmt.Errorf("the fabric did not come up: %s", wrong[0]), f.Close())
	}
	return f, nil
}

// build creates every daemon; none runs yet.
func (f *Fabric) build(log *slog.Logger) error {
	for plane := range f.Planes {
		n := &node{name: f.leafName(plane), links: newCables(f.Servers*f.SubPorts, f.Speed)}
		f.leaves = append(f.leaves, n)
		if err := n.create(f.leafConfig(plane), log); err != nil {
			return err
		}
	}
	for s := range f.Servers {
		n := &node{name: f.serverName(s), links: newCables(f.Planes*f.SubPorts, f.Speed), dataplane: memory.New(memory.Config{})}
		f.servers = append(f.servers, n)
		if err := n.create(f.serverConfig(s), log); err != nil {
			return err
		}
	}
	return nil
}

func (n *node) create(text string, log *slog.Logger) error {
	cfg, err := config.Parse(n.name+".yaml", []byte(text))
	if err != nil {
		return err
	}
	deps := daemon.Deps{Logger: log.With("node", n.name), Links: n.links, Instance: n.name, Embedded: true}
	if n.dataplane != nil {
		if n.conn, err = memory.Dial(n.dataplane); err != nil {
			return err
		}
		deps.Dataplane = n.conn
	}
	n.daemon, err = daemon.New(cfg, deps)
	return err
}

func (f *Fabric) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = errors.Join(f.failed, err)
	f.cancel() // a daemon that ends by itself ends the lab
}

// Close ends every daemon and waits for it.
func (f *Fabric) Close() error {
	f.cancel()
	f.done.Wait()
	for _, n := range slices.Concat(f.leaves, f.servers) {
		if n.daemon != nil {
			n.daemon.Close()
		}
		if n.conn != nil {
			n.conn.Close()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.failed
}

// Sessions returns how many BGP sessions the fabric has.
func (f *Fabric) Sessions() int { return f.Planes * f.Servers * f.SubPorts }

// Check refuses a scenario that names what this fabric does not have, before anything is done.
func (f *Fabric) Check(s *Scenario) error {
	var errs []error
	for _, step := range s.Steps {
		for _, a := range step.Actions {
			if _, err := f.resolve(a); err != nil {
				errs = append(errs, fmt.Errorf("%s:%d: %w", s.Name, a.Line, err))
			}
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
		return func(context.Context) error {
			for _, sub := range subs {
				f.cut[plane][server][sub] = a.Verb == "cut"
				f.wire(plane, server, sub)
			}
			return nil
		}, nil
	case "kill", "restart":
		plane, err := f.leaf(args[0])
		if err != nil {
			return nil, err
		}
		return func(context.Context) error {
			f.dark[plane] = a.Verb == "kill"
			for server := range f.Servers {
				for sub := range f.SubPorts {
					f.wire(plane, server, sub)
				}
			}
			return nil
		}, nil
	default: // drain, undrain: Parse knows no other verb
		return f.resolveDrain(a.Verb == "drain", args)
	}
}

// wire gives both ends of a cable its state.
func (f *Fabric) wire(plane, server, sub int) {
	up := !f.cut[plane][server][sub] && !f.dark[plane]
	f.servers[server].links.set(f.serverSubPort(plane, sub), up)
	f.leaves[plane].links.set(f.leafSubPort(server, sub), up)
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
		fabric := f.servers[server].daemon.FabricService()
		if on {
			_, err := fabric.Drain(ctx, &farev1.DrainRequest{Target: target})
			return err
		}
		_, err := fabric.Undrain(ctx, &farev1.UndrainRequest{Target: target})
		return err
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
	start := time.Now()
	for _, a := range step.Actions {
		do, err := f.resolve(a)
		if err == nil {
			err = do(ctx)
		}
		if err != nil {
			return Result{}, fmt.Errorf("%s:%d: %w", s.Name, a.Line, err)
		}
	}
	wrong := f.settle(ctx, settleTimeout)
	if ctx.Err() != nil {
		return Result{}, ctx.Err()
	}
	r := Result{
		Scenario: s.Name, Step: step.Text, Source: f.subst(step.Source), Destination: f.subst(step.Destination),
		ElapsedNS: time.Since(start).Nanoseconds(), Pairs: f.pairs(), SlotsMoved: f.slotsMoved() - before, Wrong: wrong,
	}
	if step.Source == "" {
		r.Source, r.Destination = f.serverName(0), f.serverName(1)
	}
	src, _ := f.server(r.Source)
	dst, _ := f.server(r.Destination)
	r.Weights = f.named(f.observed(src, dst))
	r.Expected = f.named(f.weights(src, dst))
	for _, e := range step.Expect {
		r.Wrong = append(r.Wrong, f.demand(e)...)
	}
	if step.Moved >= 0 && r.SlotsMoved > uint64(step.Moved) && (step.MovedPolicy == "" || step.MovedPolicy == f.Policy) {
		r.Wrong = append(r.Wrong, fmt.Sprintf("%d slots moved, at most %d may", r.SlotsMoved, step.Moved))
	}
	r.OK = len(r.Wrong) == 0
	r.Wrong = r.Wrong[:min(len(r.Wrong), 8)]
	f.mu.Lock()
	defer f.mu.Unlock()
	return r, f.failed
}
