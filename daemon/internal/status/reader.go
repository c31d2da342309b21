package status

import (
	"context"
	"fmt"
	"net/netip"
)

// Do runs a function on the loop's goroutine, between two steps, and returns when it has run. When it returns an error
// (the context ended, the loop has stopped) the function may run later or never.
type Do func(ctx context.Context, fn func()) error

// Reader is everybody else's side of the status. Its methods may be called from any goroutine but the loop's.
type Reader struct {
	b  *Builder
	do Do
	// turn holds one token: one build at a time, however many ask.
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
		return v, nil // built for another one who asked
	}
	return ask(ctx, r.do, r.b.build)
}

// Report is a view with what is read anew each time.
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

// Ping asks the loop for a sign of life.
func (r *Reader) Ping(ctx context.Context) error {
	return r.do(ctx, func() {})
}

// explained is a view with the explanation of a destination at the same moment.
type explained struct {
	view        *View
	explanation *Explanation
}

func (r *Reader) explain(ctx context.Context, prefix netip.Prefix, fn func(netip.Prefix) (Explanation, bool)) (explained, error) {
	return ask(ctx, r.do, func() explained {
		out := explained{view: r.b.build()}
		if e, ok := fn(prefix); ok {
			out.explanation = &e
		}
		return out
	})
}

// ask runs fn on the loop and returns its result. The result goes through a channel because fn may still run when do has
// given up.
func ask[T any](ctx context.Context, do Do, fn func() T) (T, error) {
	out := make(chan T, 1)
	if err := do(ctx, func() { out <- fn() }); err != nil {
		var none T
		return none, err
	}
	return <-out, nil
}
