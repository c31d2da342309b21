package page

import (
	"context"
	"sync"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Source is the daemon of a node: the read calls of fare.v1. Its methods may be called from any goroutine.
type Source interface {
	GetWeights(context.Context, *farev1.GetWeightsRequest) (*farev1.GetWeightsResponse, error)
	GetStatus(context.Context, *farev1.GetStatusRequest) (*farev1.GetStatusResponse, error)
	ListPlanes(context.Context, *farev1.ListPlanesRequest) (*farev1.ListPlanesResponse, error)
	ListSessions(context.Context, *farev1.ListSessionsRequest) (*farev1.ListSessionsResponse, error)
	// Follow calls take with every message of WatchWeights, FollowEvents with every message of WatchEvents, until ctx
	// or the daemon ends.
	Follow(ctx context.Context, r *farev1.WatchWeightsRequest, take func(*farev1.WatchWeightsResponse) error) error
	FollowEvents(ctx context.Context, r *farev1.WatchEventsRequest, take func(*farev1.FabricEvent) error) error
}

const (
	// pollEvery is the interval of the queries for state that has no watch: counters of sessions, BFD, the data plane.
	pollEvery = time.Second
	// recentEvents is the number of earlier events in the timeline of a new page.
	recentEvents = 200
	// callTimeout bounds a query.
	callTimeout = 5 * time.Second
)

// Node is a daemon with the name under which the page shows it.
type Node struct {
	Name   string
	Source Source
}

// node follows the source of a Node while it has viewers.
type node struct {
	Node
	mu      sync.Mutex // guards the fields below, and the model
	viewers int
	model   *model
	stop    func()      // ends the goroutines that follow the source, and waits for them; nil if none run
	idle    *time.Timer // calls end; nil before the first viewer has left
	wake    Wake
}

// Wake wakes all waiting goroutines. Take the channel first, then read the state, then wait.
type Wake struct{ ch chan struct{} }

// Wait returns a channel that the next All closes.
func (w *Wake) Wait() <-chan struct{} {
	if w.ch == nil {
		w.ch = make(chan struct{})
	}
	return w.ch
}

// All closes the channel.
func (w *Wake) All() {
	if w.ch != nil {
		close(w.ch)
		w.ch = nil
	}
}

// linger is the time for which a node follows its source after the last viewer has left: a page that shows another
// section connects again, and the timeline goes on.
const linger = 10 * time.Second

// enter adds a viewer and starts the goroutines if none run. leave must be called once.
func (n *node) enter() (leave func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.viewers++
	if n.stop == nil {
		n.start()
	}
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.viewers--; n.viewers > 0 {
			return
		}
		if n.idle == nil {
			n.idle = time.AfterFunc(linger, n.end)
		} else {
			n.idle.Reset(linger)
		}
	}
}

// end ends the goroutines of a node without viewers.
func (n *node) end() {
	n.mu.Lock()
	stop := n.stop
	if n.viewers > 0 || stop == nil {
		n.mu.Unlock()
		return
	}
	n.stop = nil
	n.mu.Unlock()
	stop()
}

// start starts the goroutines of one period with viewers. Each period has a separate model, so goroutines of an earlier
// one change nothing.
func (n *node) start() {
	ctx, cancel := context.WithCancel(context.Background())
	m := newModel()
	n.model = m
	apply := func(f func(at time.Time)) {
		at := time.Now()
		n.mu.Lock()
		defer n.mu.Unlock()
		f(at)
		n.wake.All()
	}
	poll := make(chan struct{}, 1)
	again := func() {
		select {
		case poll <- struct{}{}:
		default:
		}
	}
	var tasks sync.WaitGroup
	tasks.Go(func() {
		retry(ctx, func() error {
			return n.Source.Follow(ctx, &farev1.WatchWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}}, func(r *farev1.WatchWeightsResponse) error {
				apply(func(at time.Time) { m.weights(r, at) })
				again()
				return nil
			})
		})
	})
	tasks.Go(func() {
		recent := uint32(recentEvents)
		retry(ctx, func() error {
			r := &farev1.WatchEventsRequest{Recent: recent}
			recent = 0 // events of the time without a watch may be missing, but none comes twice
			return n.Source.FollowEvents(ctx, r, func(e *farev1.FabricEvent) error {
				apply(func(time.Time) { m.timeline.event(e) })
				again()
				return nil
			})
		})
	})
	tasks.Go(func() { n.poll(ctx, poll, m, apply) })
	n.stop = func() {
		cancel()
		tasks.Wait()
	}
}

// poll queries the source every pollEvery, and within pace after a change that the watches report: a burst of changes
// costs the daemon one query in pace.
func (n *node) poll(ctx context.Context, again <-chan struct{}, m *model, apply func(func(time.Time))) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		status, planes, sessions, err := n.query(ctx)
		if ctx.Err() != nil {
			return
		}
		apply(func(at time.Time) {
			if m.problem = ""; err != nil {
				m.problem = err.Error()
				return
			}
			m.report(status, planes, sessions, at)
		})
		select {
		case <-tick.C:
		case <-again:
			if !sleep(ctx, pace) {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

func (n *node) query(ctx context.Context) (status *farev1.GetStatusResponse, planes *farev1.ListPlanesResponse, sessions *farev1.ListSessionsResponse, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if status, err = n.Source.GetStatus(ctx, &farev1.GetStatusRequest{}); err != nil {
		return
	}
	if planes, err = n.Source.ListPlanes(ctx, &farev1.ListPlanesRequest{}); err != nil {
		return
	}
	sessions, err = n.Source.ListSessions(ctx, &farev1.ListSessionsRequest{})
	return
}

// retry calls follow until ctx ends, at most once in pollEvery.
func retry(ctx context.Context, follow func() error) {
	for {
		_ = follow() // the poll shows why the daemon does not answer
		select {
		case <-ctx.Done():
			return
		case <-time.After(pollEvery):
		}
	}
}

// view returns the tables of a selection, and a channel that is closed by the next change.
func (n *node) view(s selection) (map[string]Table, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	changed := n.wake.Wait()
	return n.model.tables(s), changed
}
