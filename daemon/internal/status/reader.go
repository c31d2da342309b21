package status

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
)

// Do runs a function on the loop's goroutine, between two steps, and returns after it has run. If it returns an error
// (the context ended, the loop has stopped) the function may run later or never.
type Do func(ctx context.Context, fn func()) error

// Reader is the readers' side of the status. Its methods may be called from any goroutine except the loop's.
type Reader struct {
	b  *Builder
	do Do
	// turn holds one token: one build at a time, however many readers there are.
	turn chan struct{}
}

// Reader returns a reader. It may be called from any goroutine.
func (b *Builder) Reader(do Do) *Reader {
	return &Reader{b: b, do: do, turn: make(chan struct{}, 1)}
}

// Instance names this run of the process.
func (r *Reader) Instance() string { return r.b.instance }

// Revision returns the revision of the loop's last commit.
func (r *Reader) Revision() uint64 { return r.b.latest.Load() }

// View returns a view no older than the last commit before the call. Its error is that of Do, or of the context.
func (r *Reader) View(ctx context.Context) (*View, error) {
	if v := r.b.view.Load(); v.revision >= r.b.latest.Load() {
		return v, nil
	}
	want := r.b.latest.Load()
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the daemon's state: %w", context.Cause(ctx))
	}
	if v := r.b.view.Load(); v.revision >= want {
		return v, nil // built for another reader
	}
	return ask(ctx, r.do, r.b.build)
}

// Report is a view with the state that each request reads again.
type Report struct {
	View     *View
	Planes   []Plane
	Sessions []Session
	Process  Process
}

// Report reads planes, sessions and the process from the source, with the view of the same moment.
func (r *Reader) Report(ctx context.Context) (*Report, error) {
	return ask(ctx, r.do, func() *Report {
		return &Report{
			View: r.b.build(), Planes: r.b.source.Planes(), Sessions: r.b.source.Sessions(), Process: r.b.source.Process(),
		}
	})
}

// Ping returns when the loop has answered.
func (r *Reader) Ping(ctx context.Context) error {
	return r.do(ctx, func() {})
}

// Ready returns nil once the daemon does its work: the start is over, and the data plane, if it needs one, is
// connected. Otherwise the error has the reason.
func (r *Reader) Ready(ctx context.Context) error {
	p, err := ask(ctx, r.do, func() *Process { p := r.b.source.Process(); return &p })
	switch {
	case err != nil:
		return fmt.Errorf("the daemon's loop does not answer: %w", err)
	case !p.Converged:
		return errors.New("the start is not over: some session has not sent End-of-RIB yet")
	case p.Dataplane.Address != "" && !p.Dataplane.Connected:
		return fmt.Errorf("no data plane is connected at %s", p.Dataplane.Address)
	}
	return nil
}

// explained is a view with the explanations of a destination, by source group, at the same moment.
type explained struct {
	view         *View
	explanations map[int]Explanation
}

func (r *Reader) explain(ctx context.Context, prefix netip.Prefix, fn func(Key) (Explanation, bool)) (explained, error) {
	return ask(ctx, r.do, func() explained {
		out := explained{view: r.b.build(), explanations: map[int]Explanation{}}
		for i := range out.view.layout.Groups {
			if e, ok := fn(Key{prefix, i}); ok {
				out.explanations[i] = e
			}
		}
		return out
	})
}

// ask runs fn on the loop and returns its result. The result passes through a channel because fn may still run after do
// has given up.
func ask[T any](ctx context.Context, do Do, fn func() T) (T, error) {
	out := make(chan T, 1)
	if err := do(ctx, func() { out <- fn() }); err != nil {
		var none T
		return none, err
	}
	return <-out, nil
}
