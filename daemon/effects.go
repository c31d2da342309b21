package daemon

import (
	"slices"
	"time"

	"github.com/fared/fared/daemon/internal/dpclient"
)

// effects records, for every object declared to the data plane, whether it is in effect.
type effects struct {
	objects map[dpclient.Object]*effect
	// counts holds the number of objects by the state of their last change.
	counts [effectStates]int
	// destinations holds the engine's last decision for each destination; users counts them by vector.
	destinations map[dpclient.Destination]assigned
	users        map[uint32]int
}

type effect struct {
	change uint64
	since  time.Time
	state  effectState
	// reason is the data plane's reason in states approximate and refused, prefixed with the name of the state.
	reason string
}

type effectState uint8

const (
	effectPending effectState = iota
	effectDone
	effectApproximate // in effect, but a share deviates by more than 1 % of itself
	effectRefused
	effectStates
)

// assigned is a destination's vector, the number of slots that moved when it was assigned, and the slots that must be drained because of it.
type assigned struct {
	vector, moved uint32
	drain         []uint16
}

func newEffects() effects {
	return effects{objects: map[dpclient.Object]*effect{}, destinations: map[dpclient.Destination]assigned{}, users: map[uint32]int{}}
}

// want records a declared change of an object. The client gives an equal declaration the number of the earlier one.
func (e *effects) want(o dpclient.Object, change uint64, now time.Time) {
	x := e.objects[o]
	switch {
	case x == nil:
		e.objects[o] = &effect{change: change, since: now}
		e.counts[effectPending]++
	case x.change != change:
		e.enter(x, effectPending, "")
		x.change, x.since = change, now
	}
}

// answered records the data plane's answer to an object's changes up to a number. It returns the previous record, and false if the answer
// concerns an earlier change than the last one.
func (e *effects) answered(o dpclient.Object, change uint64, state effectState, reason string) (before effect, ok bool) {
	x := e.objects[o]
	if x == nil || change < x.change {
		return effect{}, false
	}
	before = *x
	e.enter(x, state, reason)
	return before, true
}

// lost records that an object is no longer in effect.
func (e *effects) lost(o dpclient.Object) {
	if x := e.objects[o]; x != nil {
		e.enter(x, effectPending, "")
	}
}

// enter moves an object to another state and updates the counts.
func (e *effects) enter(x *effect, state effectState, reason string) {
	e.counts[x.state]--
	e.counts[state]++
	x.state, x.reason = state, reason
}

// forget drops an object without waiting for its removal to be acknowledged.
func (e *effects) forget(o dpclient.Object) {
	if x := e.objects[o]; x != nil {
		e.counts[x.state]--
		delete(e.objects, o)
	}
}

// inEffect reports whether an object is declared and its last change is in effect, exactly.
func (e *effects) inEffect(o dpclient.Object) bool {
	x := e.objects[o]
	return x != nil && x.state == effectDone
}

// reason returns why the data plane's answer does not put an object's last change into effect exactly: "approximate: ..." or "refused: ...". It
// is empty when the change is in effect, or not answered yet.
func (e *effects) reason(o dpclient.Object) string {
	if x := e.objects[o]; x != nil {
		return x.reason
	}
	return ""
}

// assign records a destination's vector; vector 0 drops the destination.
func (e *effects) assign(key dpclient.Destination, vector, moved uint32, drain []uint16) {
	if old, ok := e.destinations[key]; ok {
		if e.users[old.vector]--; e.users[old.vector] <= 0 {
			delete(e.users, old.vector)
		}
		delete(e.destinations, key)
	}
	if vector != 0 {
		e.destinations[key] = assigned{vector, moved, slices.Clone(drain)}
		e.users[vector]++
	}
}
