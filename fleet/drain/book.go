package drain

import (
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

// ErrUnknown means that a part is not drained.
var ErrUnknown = errors.New("is not drained by the fleet")

// load returns the drains that are not over.
func (b *Book) load(ctx context.Context) ([]Drain, string, error) {
	value, revision, err := b.Engine.Load(ctx)
	if err != nil || len(value) == 0 {
		return nil, revision, err
	}
	var all []Drain
	if err := json.Unmarshal(value, &all); err != nil {
		return nil, "", fmt.Errorf("the engine's list of drains: %w", err)
	}
	now := b.Now()
	return slices.DeleteFunc(all, func(d Drain) bool { return d.over(now) }), revision, nil
}

// List returns the granted and the queued drains, the latter in the order of their requests.
func (b *Book) List(ctx context.Context) ([]Drain, error) {
	all, _, err := b.load(ctx)
	return all, err
}

// Grant grants a drain. A part that is drained keeps its place, with the new owner, reason and end. The error is a
// Refusal if the budget is too small; with d.Queued the drain then waits for Promote.
func (b *Book) Grant(ctx context.Context, d Drain) error {
	d.Granted = b.Now()
	mayWait := d.Queued
	var refusal *Refusal
	err := b.change(ctx, func(all []Drain) ([]Drain, error) {
		at := slices.IndexFunc(all, func(o Drain) bool { return o.Part == d.Part })
		refusal, d.Queued = nil, false
		if at < 0 || all[at].Queued {
			if err := Judge(b.Fabric, b.Budget, b.Present(), all, d.Part); err != nil && (!errors.As(err, &refusal) || !mayWait) {
				return nil, err
			}
			d.Queued = refusal != nil
		}
		if at < 0 {
			return append(all, d), nil
		}
		all[at] = d
		return all, nil
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
	err = b.change(ctx, func(all []Drain) ([]Drain, error) {
		parts = nil
		for i, d := range all {
			// A part of another description of the fabric waits as well.
			if d.Queued && Judge(b.Fabric, b.Budget, b.Present(), all, d.Part) == nil {
				all[i].Queued, all[i].Granted = false, b.Now()
				parts = append(parts, d.Part)
			}
		}
		if parts == nil {
			return nil, errUnchanged
		}
		return all, nil
	})
	if errors.Is(err, errUnchanged) {
		err = nil
	}
	return parts, err
}

// Release ends a drain, or its wait.
func (b *Book) Release(ctx context.Context, part string) error {
	return b.change(ctx, func(all []Drain) ([]Drain, error) {
		others := slices.DeleteFunc(slices.Clone(all), func(o Drain) bool { return o.Part == part })
		if len(others) == len(all) {
			return nil, fmt.Errorf("%s %w", part, ErrUnknown)
		}
		return others, nil
	})
}

// change replaces the list by one that follows from it, as often as another book is faster.
func (b *Book) change(ctx context.Context, next func([]Drain) ([]Drain, error)) error {
	for {
		all, revision, err := b.load(ctx)
		if err != nil {
			return err
		}
		if all, err = next(all); err != nil {
			return err
		}
		value, err := json.Marshal(all)
		if err != nil {
			return err
		}
		if stored, err := b.Engine.Store(ctx, value, revision); stored || err != nil {
			return err
		}
	}
}
