package daemon

import (
	"net/netip"
	"slices"
	"time"

	"github.com/fared/fared/daemon/internal/dataplane"
)

// effects keeps, for every object declared to the data plane, whether it is in effect.
type effects struct {
	objects map[dataplane.Object]*effect
	// pending is how many objects' last change is neither in effect nor refused.
	pending int
	// refusals is how many objects' last change was refused.
	refusals int
	// destinations are what the engine said last of each destination; users counts them by vector.
	destinations map[netip.Prefix]assigned
	users        map[uint32]int
}

type effect struct {
	change uint64
	since  time.Time
	state  effectState
}

type effectState uint8

const (
	effectPending effectState = iota
	effectDone
	effectRefused
)

// assigned is a destination's vector, how many slots moved when it got it, and which have to be drained because of it.
type assigned struct {
	vector, moved uint32
	drain         []uint16
}

func newEffects() effects {
	return effects{objects: map[dataplane.Object]*effect{}, destinations: map[netip.Prefix]assigned{}, users: map[uint32]int{}}
}

// want notes that a change of an object was declared. The client gives an equal declaration the number of the earlier one.
func (e *effects) want(o dataplane.Object, change uint64, now time.Time) {
	x := e.objects[o]
	switch {
	case x == nil:
		e.objects[o] = &effect{change: change, since: now}
		e.pending++
	case x.change != change:
		e.enter(x, effectPending)
		*x = effect{change: change, since: now}
	}
}

// done notes that an object's changes up to a number are in effect. It returns when the last one was declared, and false
// when a later one is still pending.
func (e *effects) done(o dataplane.Object, change uint64) (time.Time, bool) {
	x := e.objects[o]
	if x == nil || change < x.change || x.state == effectDone {
		return time.Time{}, false
	}
	e.enter(x, effectDone)
	return x.since, true
}

// refused notes that the data plane does not take an object's last change.
func (e *effects) refused(o dataplane.Object, change uint64) {
	if x := e.objects[o]; x != nil && change >= x.change {
		e.enter(x, effectRefused)
	}
}

// lost notes that what was in effect is not any more.
func (e *effects) lost(o dataplane.Object) {
	if x := e.objects[o]; x != nil {
		e.enter(x, effectPending)
	}
}

// enter moves an object to another state and keeps the counts.
func (e *effects) enter(x *effect, to effectState) {
	count := func(state effectState, by int) {
		switch state {
		case effectPending:
			e.pending += by
		case effectRefused:
			e.refusals += by
		}
	}
	count(x.state, -1)
	count(to, 1)
	x.state = to
}

// forget notes that an object was taken back; that its removal is confirmed is not waited for.
func (e *effects) forget(o dataplane.Object) {
	if x := e.objects[o]; x != nil {
		e.enter(x, effectDone)
		delete(e.objects, o)
	}
}

// inEffect says whether an object was declared and its last change is in effect.
func (e *effects) inEffect(o dataplane.Object) bool {
	x := e.objects[o]
	return x != nil && x.state == effectDone
}

// assign notes a destination's vector; 0 forgets the destination.
func (e *effects) assign(prefix netip.Prefix, vector, moved uint32, drain []uint16) {
	if old, ok := e.destinations[prefix]; ok {
		if e.users[old.vector]--; e.users[old.vector] <= 0 {
			delete(e.users, old.vector)
		}
		delete(e.destinations, prefix)
	}
	if vector != 0 {
		e.destinations[prefix] = assigned{vector, moved, slices.Clone(drain)}
		e.users[vector]++
	}
}
