package drain

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fared/fared/topo"
)

// Engine keeps one value with its revision; both are empty at first.
type Engine interface {
	Load(ctx context.Context) (value []byte, revision string, err error)
	// Store replaces the value if its revision is still the given one, and reports whether it was. After an error the
	// value may have been replaced.
	Store(ctx context.Context, value []byte, revision string) (stored bool, err error)
}

// Book grants and ends drains. Several books, in several processes, may share an engine.
type Book struct {
	Engine Engine
	Fabric *topo.Fabric
	Budget Budget
	// Present returns the failures and drains of now.
	Present func() []string
	// Now is the clock.
	Now func() time.Time
}

// Record is the value of the engine.
type Record struct {
	// Budget is that of the worker which has started last; nil before the first one. Others grant nothing.
	Budget *Budget `json:"budget,omitempty"`
	// Drains are granted and queued, the latter in the order of their requests.
	Drains []Drain `json:"drains"`
}

var (
	// ErrUnknown means that a part is not drained.
	ErrUnknown = errors.New("is not drained by the fleet")
	// ErrBudget means that another worker has started with another budget since.
	ErrBudget = errors.New("workers have different budgets")
)

// load returns the record, without drains that are over.
func (b *Book) load(ctx context.Context) (r Record, revision string, err error) {
	value, revision, err := b.Engine.Load(ctx)
	if err != nil || len(value) == 0 {
		return r, revision, err
	}
	if err := json.Unmarshal(value, &r); err != nil {
		return r, "", fmt.Errorf("the engine's list of drains: %w", err)
	}
	now := b.Now()
	r.Drains = slices.DeleteFunc(r.Drains, func(d Drain) bool { return d.over(now) })
	return r, revision, nil
}

// Load returns the record.
func (b *Book) Load(ctx context.Context) (Record, error) {
	r, _, err := b.load(ctx)
	return r, err
}

// Begin makes the book's budget that of all books.
func (b *Book) Begin(ctx context.Context) error {
	return b.change(ctx, func(r *Record) error {
		if r.Budget != nil && *r.Budget == b.Budget {
			return errUnchanged
		}
		r.Budget = &b.Budget
		return nil
	})
}

// Differs returns ErrBudget if a record has another budget.
func (b *Book) Differs(r Record) error {
	if r.Budget == nil || *r.Budget == b.Budget {
		return nil
	}
	return fmt.Errorf("%w: this one keeps %s, the last one to start %s: start all with the same --keep-planes and --keep-share", ErrBudget, b.Budget, *r.Budget)
}

// Grant grants a drain. A part that is drained keeps its place, with the new owner, and with its reason and end unless
// d has others. The error is a Refusal if the budget is too small; with d.Queued the drain then waits for Promote.
func (b *Book) Grant(ctx context.Context, d Drain) error {
	d.Granted = b.Now()
	mayWait, asked := d.Queued, d
	var refusal *Refusal
	err := b.change(ctx, func(r *Record) error {
		if err := b.Differs(*r); err != nil {
			return err
		}
		at := slices.IndexFunc(r.Drains, func(o Drain) bool { return o.Part == d.Part })
		refusal, d = nil, asked
		d.Queued = false
		if at < 0 || r.Drains[at].Queued {
			if err := Judge(b.Fabric, b.Budget, b.Present(), r.Drains, d.Part); err != nil && (!errors.As(err, &refusal) || !mayWait) {
				return err
			}
			d.Queued = refusal != nil
		}
		if at < 0 {
			r.Drains = append(r.Drains, d)
			return nil
		}
		old := r.Drains[at]
		d.Reason = cmp.Or(d.Reason, old.Reason)
		if d.Until.IsZero() && !d.Never {
			d.Until = old.Until
		}
		r.Drains[at] = d
		return nil
	})
	if err == nil && refusal != nil {
		refusal.Queued = true
		return refusal
	}
	return err
}

// errUnchanged ends a change that is none.
var errUnchanged = errors.New("no change")

// Promote grants the queued drains that fit into the budget now, the oldest first: a later one may overtake one that
// does not fit. It returns their parts.
func (b *Book) Promote(ctx context.Context) (parts []string, err error) {
	return parts, b.change(ctx, func(r *Record) error {
		parts = nil
		for i, d := range r.Drains {
			// A part of another description of the fabric waits as well.
			if d.Queued && b.Differs(*r) == nil && Judge(b.Fabric, b.Budget, b.Present(), r.Drains, d.Part) == nil {
				r.Drains[i].Queued, r.Drains[i].Granted = false, b.Now()
				parts = append(parts, d.Part)
			}
		}
		if parts == nil {
			return errUnchanged
		}
		return nil
	})
}

// Release ends a drain, or its wait.
func (b *Book) Release(ctx context.Context, part string) error {
	return b.change(ctx, func(r *Record) error {
		before := len(r.Drains)
		if r.Drains = slices.DeleteFunc(r.Drains, func(o Drain) bool { return o.Part == part }); len(r.Drains) == before {
			return fmt.Errorf("%s %w", part, ErrUnknown)
		}
		return nil
	})
}

// change replaces the record by one that follows from it, as often as another book is faster.
func (b *Book) change(ctx context.Context, next func(*Record) error) error {
	for {
		r, revision, err := b.load(ctx)
		if err != nil {
			return err
		}
		if err = next(&r); errors.Is(err, errUnchanged) {
			return nil
		}
		if err != nil {
			return err
		}
		value, err := json.Marshal(r)
		if err != nil {
			return err
		}
		if stored, err := b.Engine.Store(ctx, value, revision); stored || err != nil {
			return err
		}
	}
}
