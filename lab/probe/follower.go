package probe

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// Follower receives the weights of a server's daemon (WatchWeights) and records their changes.
type Follower struct {
	fabric *topo.Fabric
	server int
	mu     sync.Mutex // guards the fields below
	toward map[topo.Way]*Followed
}

// Followed is a follower's state of a way. The zero value means that it has received nothing of it.
type Followed struct {
	Weights  []uint32 // by plane
	InEffect bool
	// changed is the time of the last change of the weights, effective the time when they were first reported in effect
	// after it, adopted the time of the last change of the sending slots. Zero means never.
	Changed, Effective, Adopted time.Time
}

// NewFollower returns a follower of a server's daemon that has received nothing.
func NewFollower(f *topo.Fabric, server int) *Follower {
	return &Follower{fabric: f, server: server, toward: map[topo.Way]*Followed{}}
}

// forget discards everything, for a daemon that restarts.
func (w *Follower) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.toward)
}

// note records the daemon's row for a way. at is the time of receipt, adopted the time at which the row changed the
// sending slots, zero if it did not.
func (w *Follower) note(to topo.Way, d *farev1.DestinationWeights, at, adopted time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	h := w.toward[to]
	if h == nil {
		h = &Followed{}
		w.toward[to] = h
	}
	weights := PlaneWeights(w.fabric, d)
	h.InEffect = d.Reachable
	for _, p := range d.Planes {
		h.InEffect = h.InEffect && p.InEffect
	}
	if !slices.Equal(weights, h.Weights) {
		h.Weights, h.Changed, h.Effective = weights, at, time.Time{}
	}
	if h.InEffect && h.Effective.IsZero() {
		h.Effective = at
	}
	if !adopted.IsZero() {
		h.Adopted = adopted
	}
}

// Followed returns the state of a way.
func (w *Follower) Followed(to topo.Way) Followed {
	w.mu.Lock()
	defer w.mu.Unlock()
	if h := w.toward[to]; h != nil {
		return *h
	}
	return Followed{}
}

// Watch follows a server's daemon until ctx or the daemon ends.
func (w *Follower) Watch(ctx context.Context, daemon backend.API) error {
	request := &farev1.WatchWeightsRequest{Filter: &farev1.WeightFilter{OmitPairs: true}}
	return daemon.Follow(ctx, request, func(m *farev1.WatchWeightsResponse) error {
		at := time.Now()
		return eachRow(m, func(d *farev1.DestinationWeights) error {
			ways, err := WaysOf(w.fabric, w.server, d)
			for _, to := range ways {
				w.note(to, d, at, time.Time{})
			}
			return err
		})
	})
}

// eachRow calls f for every row of a message, and with a row without planes for every removed one.
func eachRow(m *farev1.WatchWeightsResponse, f func(*farev1.DestinationWeights) error) error {
	for _, d := range m.Weights {
		if err := f(d); err != nil {
			return err
		}
	}
	for _, gone := range m.Removed {
		if err := f(&farev1.DestinationWeights{Destination: gone.Destination, Sources: gone.Sources}); err != nil {
			return err
		}
	}
	return nil
}

// PlaneWeights returns a row's weights by plane of the fabric, with 0 in a plane to which the row's source group is not
// connected.
func PlaneWeights(p *topo.Fabric, d *farev1.DestinationWeights) []uint32 {
	w := make([]uint32, p.Planes)
	for i := range w {
		for _, plane := range d.Planes {
			if plane.Plane == p.PlaneName(i) {
				w[i] = plane.Weight
			}
		}
	}
	return w
}

// WaysOf returns the ways of a server that a row describes: one from each source group with a loopback among the row's
// sources.
func WaysOf(p *topo.Fabric, server int, d *farev1.DestinationWeights) (all []topo.Way, err error) {
	dst, err := netip.ParsePrefix(d.Destination)
	if err != nil {
		return nil, err
	}
	for _, g := range p.GroupsAt(server) {
		if slices.ContainsFunc(p.LoopbacksOf(p.Groups()[g]), func(l netip.Prefix) bool { return slices.Contains(d.Sources, l.String()) }) {
			all = append(all, topo.Way{Source: g, Destination: dst.Addr()})
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("weights of %q, none of which is a loopback of %s", d.Sources, p.Server[server].Name)
	}
	return all, nil
}
