package drain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/topo"
)

func number(t testing.TB, s topo.Spec) *topo.Fabric {
	t.Helper()
	f, err := topo.New(s)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestJudge grants what leaves the budget to every pair, and names the pairs that would suffer otherwise.
func TestJudge(t *testing.T) {
	f := number(t, topo.Spec{Planes: 4, Servers: 3})
	for _, c := range []struct {
		name     string
		budget   Budget
		present  []string
		granted  []Drain
		part     string
		refusal  string // a part of it; empty: granted
		pairs    int
		mistaken bool
	}{
		{name: "the first leaf", budget: Budget{Planes: 3}, part: "leaf0"},
		{name: "the second leaf", budget: Budget{Planes: 3}, granted: []Drain{{Part: "leaf0"}}, part: "leaf1", refusal: "from 3 to 2 planes", pairs: 6},
		{name: "a drain of a server", budget: Budget{Planes: 3}, present: []string{"drain:server1/p1"}, part: "leaf0", refusal: "server1", pairs: 4},
		{name: "next to a failure", budget: Budget{Planes: 3}, present: []string{"server2/p1"}, part: "leaf0", refusal: "server2", pairs: 4},
		{name: "the failed part itself", budget: Budget{Planes: 4}, present: []string{"leaf1"}, part: "leaf1"},
		{name: "next to a dead server", budget: Budget{Planes: 3}, present: []string{"server2"}, part: "leaf0"},
		{name: "half of a port", budget: Budget{Share: 0.9}, part: "server3/p2.0", refusal: "88 %", pairs: 4},
		{name: "half of a port, a smaller budget", budget: Budget{Share: 0.8}, part: "server3/p2.0"},
		{name: "no such part", part: "leaf9", mistaken: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := Judge(f, c.budget, c.present, c.granted, c.part)
			var r *Refusal
			switch {
			case c.mistaken:
				if err == nil || errors.As(err, &r) {
					t.Errorf("an unknown part: %v", err)
				}
			case c.refusal == "":
				if err != nil {
					t.Error(err)
				}
			case !errors.As(err, &r) || !strings.Contains(r.Error(), c.refusal):
				t.Errorf("got %v, want a refusal with %q", err, c.refusal)
			default:
				n := 0
				for _, p := range r.Pairs {
					n += p.Pairs
				}
				if n != c.pairs {
					t.Errorf("%d pairs of %d: %v", n, c.pairs, r)
				}
			}
		})
	}
}

// memory is an engine in this process.
type memory struct {
	mu       sync.Mutex
	value    []byte
	revision int
}

// name returns the revision as text, empty at first.
func (m *memory) name() string {
	if m.revision == 0 {
		return ""
	}
	return strconv.Itoa(m.revision)
}

func (m *memory) Load(context.Context) ([]byte, string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.value, m.name(), nil
}

func (m *memory) Store(_ context.Context, value []byte, revision string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.name() != revision {
		return false, nil
	}
	m.value, m.revision = value, m.revision+1
	return true, nil
}

func list(ctx context.Context, b *Book) ([]Drain, error) {
	r, err := b.Load(ctx)
	return r.Drains, err
}

// TestBudgets lets the book that has begun last grant, and none with another budget: its drains stay in force, and it
// ends them.
func TestBudgets(t *testing.T) {
	e, f := &memory{}, number(t, topo.Spec{Planes: 3, Servers: 2})
	book := func(b Budget) *Book {
		return &Book{Engine: e, Fabric: f, Budget: b, Present: func() []string { return nil }, Now: time.Now}
	}
	ctx, strict, lax := t.Context(), book(Budget{Planes: 2}), book(Budget{Planes: 1, Share: 0.25})
	for _, b := range []*Book{lax, strict, strict} {
		if err := b.Begin(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if e.revision != 2 {
		t.Errorf("revision %d: an equal budget is stored again", e.revision)
	}
	for _, d := range []Drain{{Part: "leaf0"}, {Part: "leaf1", Queued: true}} {
		var refusal *Refusal
		if err := strict.Grant(ctx, d); err != nil && !errors.As(err, &refusal) {
			t.Fatal(err)
		}
	}
	if err := lax.Grant(ctx, Drain{Part: "leaf1"}); !errors.Is(err, ErrBudget) || !strings.Contains(err.Error(), "this one keeps 1 planes and 25 % of the bandwidth, the last one to start 2 planes") {
		t.Errorf("another budget: %v", err)
	}
	if parts, err := lax.Promote(ctx); err != nil || parts != nil {
		t.Errorf("another budget grants %q, %v", parts, err)
	}
	if err := lax.Begin(ctx); err != nil {
		t.Fatal(err)
	}
	if parts, err := lax.Promote(ctx); err != nil || len(parts) != 1 {
		t.Errorf("the last one to start grants %q, %v", parts, err)
	}
	if err := strict.Grant(ctx, Drain{Part: "leaf0"}); !errors.Is(err, ErrBudget) {
		t.Errorf("the one before: %v", err)
	}
	if err := strict.Release(ctx, "leaf0"); err != nil {
		t.Error(err)
	}
}

// TestBook keeps drains, replaces their reason, and ends them: on request, and at their time.
func TestBook(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	b := &Book{Engine: &memory{}, Fabric: number(t, topo.Spec{Planes: 3, Servers: 2}), Budget: Budget{Planes: 2}, Present: func() []string { return nil }, Now: func() time.Time { return now }}
	ctx := t.Context()
	grant := func(d Drain) error { return b.Grant(ctx, d) }
	if err := grant(Drain{Part: "leaf0", By: "alice", Until: now.Add(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	if err := grant(Drain{Part: "leaf0", By: "bob", Reason: "optics", Until: now.Add(time.Hour)}); err != nil {
		t.Errorf("a repeated drain: %v", err)
	}
	for _, c := range []struct {
		again Drain
		want  string
	}{
		{Drain{Reason: "fans"}, "fans true"}, {Drain{}, "fans true"}, {Drain{Never: true}, "fans false"}, {Drain{}, "fans false"}, {Drain{Reason: "optics", Until: now.Add(time.Hour)}, "optics true"},
	} {
		c.again.Part, c.again.By = "leaf0", "bob"
		if err := grant(c.again); err != nil {
			t.Fatal(err)
		}
		if all, err := list(ctx, b); err != nil || fmt.Sprintf("%s %t", all[0].Reason, !all[0].Until.IsZero()) != c.want {
			t.Errorf("%+v makes it %+v, %v; want %s", c.again, all, err, c.want)
		}
	}
	var r *Refusal
	if err := grant(Drain{Part: "leaf1"}); !errors.As(err, &r) {
		t.Errorf("the second plane: %v", err)
	}
	if all, err := list(ctx, b); err != nil || len(all) != 1 || all[0].By != "bob" || all[0].Reason != "optics" || !all[0].Granted.Equal(now) {
		t.Errorf("drains %+v, %v", all, err)
	}
	if err := b.Release(ctx, "leaf1"); !errors.Is(err, ErrUnknown) {
		t.Errorf("the end of a drain that is none: %v", err)
	}
	now = now.Add(time.Hour)
	if all, err := list(ctx, b); err != nil || len(all) != 0 {
		t.Errorf("after its time %+v, %v", all, err)
	}
	if err := grant(Drain{Part: "leaf1"}); err != nil {
		t.Errorf("after the first one's time: %v", err)
	}
	if err := b.Release(ctx, "leaf1"); err != nil {
		t.Error(err)
	}
	b.Engine.(*memory).value = []byte("{")
	if _, err := list(ctx, b); err == nil {
		t.Error("a broken list is a list")
	}
}

// request is an operation of a race: a drain of a leaf, or its end.
type request struct {
	leaf    int
	release bool
}

// specification is the sequential meaning of requests: a drain is granted if planes remain.
func specification(planes, budget int) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return 0 },
		Step: func(state, input, output any) (bool, any) {
			drained, r, ok := state.(int), input.(request), output.(bool)
			bit := 1 << r.leaf
			count := 0
			for i := range planes {
				count += drained >> i & 1
			}
			may := drained&bit != 0 || planes-count-1 >= budget
			if r.release {
				may = drained&bit != 0
			}
			switch {
			case ok != may:
				return false, state
			case !ok:
				return true, state
			case r.release:
				return true, drained &^ bit
			}
			return true, drained | bit
		},
	}
}

// race lets operators, each with a separate book, drain and release leaves at once, and checks that their answers are
// those of some order.
func race(t *testing.T, f *topo.Fabric, engine Engine, random *rand.Rand) {
	const operators, each = 3, 2
	var mu sync.Mutex
	var history []porcupine.Operation
	var done sync.WaitGroup
	begun := time.Now()
	for i := range operators {
		var plan []request
		for range each {
			plan = append(plan, request{random.IntN(f.Planes), random.IntN(3) == 0})
		}
		b := &Book{Engine: engine, Fabric: f, Budget: Budget{Planes: f.Planes - 1}, Present: func() []string { return nil }, Now: time.Now}
		done.Go(func() {
			for _, r := range plan {
				called := time.Since(begun)
				var err error
				if r.release {
					err = b.Release(t.Context(), fmt.Sprintf("leaf%d", r.leaf))
				} else {
					err = b.Grant(t.Context(), Drain{Part: fmt.Sprintf("leaf%d", r.leaf)})
				}
				var refusal *Refusal
				if err != nil && !errors.Is(err, ErrUnknown) && !errors.As(err, &refusal) {
					t.Error(err)
				}
				mu.Lock()
				history = append(history, porcupine.Operation{ClientId: i, Input: r, Output: err == nil, Call: int64(called), Return: int64(time.Since(begun))})
				mu.Unlock()
			}
		})
	}
	done.Wait()
	if !porcupine.CheckOperations(specification(f.Planes, f.Planes-1), history) {
		t.Errorf("no order explains the answers: %+v", history)
	}
}

// TestRaces checks races of operators for linearizability: the last plane is never granted twice.
func TestRaces(t *testing.T) {
	f := number(t, topo.Spec{Planes: 3, Servers: 2, SubPorts: 1})
	races := gate.Count(t, gate.Models, 60, 1000)
	for seed := range gate.Count(t, gate.Models, 1, 10) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(23, uint64(seed)))
			for range races {
				race(t, f, &memory{}, random)
			}
		})
	}
}

// TestSpecification shows that the checker finds a plane that is granted twice.
func TestSpecification(t *testing.T) {
	op := func(client, leaf int, ok bool) porcupine.Operation {
		return porcupine.Operation{ClientId: client, Input: request{leaf: leaf}, Output: ok, Call: 0, Return: 1}
	}
	m := specification(3, 2)
	if !porcupine.CheckOperations(m, []porcupine.Operation{op(0, 0, true), op(1, 1, false)}) {
		t.Error("one of two drains is granted: refused")
	}
	if porcupine.CheckOperations(m, []porcupine.Operation{op(0, 0, true), op(1, 1, true)}) {
		t.Error("both drains are granted: accepted")
	}
}

// TestQueue lets refused drains wait: the oldest that fits is granted, one that does not fit is overtaken, and a
// request again keeps the place.
func TestQueue(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	var present []string
	b := &Book{Engine: &memory{}, Fabric: number(t, topo.Spec{Planes: 3, Servers: 2}), Budget: Budget{Planes: 2}, Present: func() []string { return present }, Now: func() time.Time { return now }}
	ctx := t.Context()
	grant := func(part string, queue bool) string {
		t.Helper()
		err := b.Grant(ctx, Drain{Part: part, Queued: queue, Until: now.Add(time.Hour)})
		var r *Refusal
		switch {
		case err == nil:
			return "granted"
		case errors.As(err, &r) && r.Queued:
			return "queued"
		}
		return "refused"
	}
	promoted := func() string {
		t.Helper()
		parts, err := b.Promote(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(parts, " ")
	}
	for _, c := range []struct {
		part  string
		queue bool
		want  string
	}{{"leaf0", true, "granted"}, {"leaf1", false, "refused"}, {"leaf1", true, "queued"}, {"server2/p2", true, "queued"}, {"leaf1", true, "queued"}} {
		if got := grant(c.part, c.queue); got != c.want {
			t.Errorf("%s is %s, want %s", c.part, got, c.want)
		}
	}
	if got := promoted(); got != "" {
		t.Errorf("next to leaf0 %s", got)
	}
	present = []string{"server1/p2"} // leaf1 does not fit next to it, the other port of p2 does
	if err := b.Release(ctx, "leaf0"); err != nil {
		t.Fatal(err)
	}
	if got := promoted(); got != "server2/p2" {
		t.Errorf("next to a failure %s", got)
	}
	if all, err := list(ctx, b); err != nil || len(all) != 2 || all[0].Part != "leaf1" || !all[0].Queued || all[1].Queued {
		t.Errorf("drains %+v, %v", all, err)
	}
	if err := b.Release(ctx, "leaf1"); err != nil {
		t.Error(err)
	}
	if all, _ := list(ctx, b); len(all) != 1 {
		t.Errorf("a wait does not end: %+v", all)
	}
}

// judged is an engine that checks every list which it keeps: the granted drains leave the budget.
type judged struct {
	memory
	t    *testing.T
	most int
}

func (j *judged) Store(ctx context.Context, value []byte, revision string) (bool, error) {
	var r Record
	if err := json.Unmarshal(value, &r); err != nil {
		j.t.Error(err)
	}
	granted := 0
	for _, d := range r.Drains {
		if !d.Queued {
			granted++
		}
	}
	if granted > j.most {
		j.t.Errorf("granted at once: %s", value)
	}
	return j.memory.Store(ctx, value, revision)
}

// TestQueuedRaces lets books request, queue, promote and release leaves at once: no two are ever granted together, and
// in the end, after all releases, each that waits is granted in its turn.
func TestQueuedRaces(t *testing.T) {
	f := number(t, topo.Spec{Planes: 3, Servers: 2, SubPorts: 1})
	random := rand.New(rand.NewPCG(31, 0))
	for range gate.Count(t, gate.Models, 30, 500) {
		e := &judged{t: t, most: 1}
		book := func() *Book {
			return &Book{Engine: e, Fabric: f, Budget: Budget{Planes: 2}, Present: func() []string { return nil }, Now: time.Now}
		}
		var done sync.WaitGroup
		for range 3 {
			b, steps := book(), []int{random.IntN(9), random.IntN(9), random.IntN(9)}
			done.Go(func() {
				for _, step := range steps {
					part := fmt.Sprintf("leaf%d", step/3)
					switch step % 3 { // refusals are no faults here
					case 0:
						_ = b.Grant(t.Context(), Drain{Part: part, Queued: true})
					case 1:
						_ = b.Release(t.Context(), part)
					default:
						_, _ = b.Promote(t.Context())
					}
				}
			})
		}
		done.Wait()
		b := book()
		for {
			if _, err := b.Promote(t.Context()); err != nil {
				t.Fatal(err)
			}
			all, err := list(t.Context(), b)
			if err != nil {
				t.Fatal(err)
			}
			if len(all) == 0 {
				break
			}
			at := slices.IndexFunc(all, func(d Drain) bool { return !d.Queued })
			if at < 0 {
				t.Fatalf("all wait: %+v", all)
			}
			if err := b.Release(t.Context(), all[at].Part); err != nil {
				t.Fatal(err)
			}
		}
	}
}
