package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
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
	if step.Moved >= 0 && r.SlotsMoved > uint64(step.Moved) && f.Policy == "reweight" {
		r.Wrong = append(r.Wrong, fmt.Sprintf("%d slots moved, at most %d may", r.SlotsMoved, step.Moved))
	}
	r.OK = len(r.Wrong) == 0
	r.Wrong = r.Wrong[:min(len(r.Wrong), 8)]
	f.mu.Lock()
	defer f.mu.Unlock()
	return r, f.failed
}

// demand checks what a script itself expects.
func (f *Fabric) demand(e Expectation) []string {
	var wrong []string
	for src := range f.Servers {
		for dst := range f.Servers {
			if src == dst || e.Source != "*" && f.subst(e.Source) != f.serverName(src) || e.Destination != "*" && f.subst(e.Destination) != f.serverName(dst) {
				continue
			}
			if got := f.observed(src, dst); !slices.Equal(got, e.Weights) {
				wrong = append(wrong, fmt.Sprintf("line %d: %s -> %s has %s, the script expects %s", e.Line, f.serverName(src), f.serverName(dst), Ratio(got), Ratio(e.Weights)))
			}
		}
	}
	return wrong
}

// slotsMoved is how many slots have left their place since the start, over all servers.
func (f *Fabric) slotsMoved() uint64 {
	var n uint64
	for _, s := range f.servers {
		n += s.daemon.SlotsMoved()
	}
	return n
}

func (f *Fabric) named(w []uint32) map[string]uint32 {
	m := make(map[string]uint32, len(w))
	for p, v := range w {
		m[f.planeName(p)] = v
	}
	return m
}

// observed asks a server's daemon for its weights toward another's first GPU; nil when it knows none.
func (f *Fabric) observed(src, dst int) []uint32 {
	resp, err := f.servers[src].daemon.WeightService().GetWeights(context.Background(), &farev1.GetWeightsRequest{Destination: f.loopback(dst, 0).Addr().String()})
	if err != nil {
		return make([]uint32, f.Planes)
	}
	return planeWeights(resp.Weights)
}

func planeWeights(d *farev1.DestinationWeights) []uint32 {
	w := make([]uint32, len(d.Planes))
	for i, p := range d.Planes {
		w[i] = p.Weight
	}
	return w
}

// settle waits until every pair has the model's weights, in effect in the data plane; it returns what is still wrong
// when the time is over.
func (f *Fabric) settle(ctx context.Context, limit time.Duration) []string {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	pause := time.NewTimer(0)
	defer pause.Stop()
	waiting := make([]int, f.Servers)
	for s := range waiting {
		waiting[s] = s
	}
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		var wrong []string
		left := waiting[:0]
		for _, s := range waiting {
			if text := f.checkServer(ctx, s); text != "" {
				left = append(left, s)
				wrong = append(wrong, text)
			}
		}
		waiting = left
		if len(waiting) == 0 {
			// Nothing may have changed back behind our back: the verdict is over all servers at once.
			for s := range f.Servers {
				if text := f.checkServer(ctx, s); text != "" {
					waiting = append(waiting, s)
					wrong = append(wrong, text)
				}
			}
			if len(waiting) == 0 {
				return nil
			}
		}
		pause.Reset(delay)
		select {
		case <-ctx.Done():
			return wrong
		case <-pause.C:
		}
	}
}

// checkServer compares all of a server's weights with the model, in its daemon and in what its data plane forwards by;
// it returns the first difference, or "".
func (f *Fabric) checkServer(ctx context.Context, src int) string {
	n := f.servers[src]
	seen := map[netip.Addr]*farev1.DestinationWeights{}
	for token := ""; ; {
		page, err := n.daemon.WeightService().ListWeights(ctx, &farev1.ListWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}, PageSize: 10000, PageToken: token})
		if err != nil {
			return fmt.Sprintf("%s: %v", n.name, err)
		}
		for _, d := range page.Weights {
			prefix, err := netip.ParsePrefix(d.Destination)
			if err != nil {
				return fmt.Sprintf("%s: %v", n.name, err)
			}
			seen[prefix.Addr()] = d
		}
		if token = page.NextPageToken; token == "" {
			break
		}
	}
	for dst := range f.Servers {
		if dst == src {
			continue
		}
		want := f.weights(src, dst)
		for g := range f.GPUs {
			addr := f.loopback(dst, g).Addr()
			if text := f.checkDestination(n, addr, seen[addr], want); text != "" {
				return text
			}
		}
	}
	return ""
}

func (f *Fabric) checkDestination(n *node, addr netip.Addr, d *farev1.DestinationWeights, want []uint32) string {
	reachable := slices.Max(want) > 0
	if d == nil || !d.Reachable {
		if reachable {
			return fmt.Sprintf("%s -> %s is unreachable, should have %s", n.name, addr, Ratio(want))
		}
	} else {
		if got := planeWeights(d); !slices.Equal(got, want) {
			return fmt.Sprintf("%s -> %s has %s, should have %s", n.name, addr, Ratio(got), Ratio(want))
		}
		for _, p := range d.Planes {
			if !p.InEffect {
				return fmt.Sprintf("%s -> %s: the weight of %s is not in effect", n.name, addr, p.Plane)
			}
		}
	}
	live, err := n.dataplane.Weights(addr)
	if err != nil && reachable {
		return fmt.Sprintf("%s -> %s: data plane: %v", n.name, addr, err)
	}
	got := make([]uint32, f.Planes)
	for _, m := range live {
		for p := range got {
			if f.planeName(p) == m.Plane {
				got[p] += m.Weight
			}
		}
	}
	if !slices.Equal(lowestTerms(got), want) {
		return fmt.Sprintf("%s -> %s: the data plane forwards by %s, should by %s", n.name, addr, Ratio(got), Ratio(want))
	}
	return ""
}

// Ratio writes weights as the field does: 2:2:1:2.
func Ratio(w []uint32) string {
	var b []byte
	for i, v := range w {
		if i > 0 {
			b = append(b, ':')
		}
		b = fmt.Append(b, v)
	}
	return string(b)
}
