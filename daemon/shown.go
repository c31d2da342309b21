package daemon

import (
	"net/netip"
	"slices"
	"time"

	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/internal/prefixmap"
	"github.com/fared/fared/wecmp"
)

// shown holds the published state: for every declared object, whether the last event of the data plane's client reports
// it as in effect. It changes only in the loop's turns, keeps its state while the data plane is disconnected, and drops
// an object with its declaration. The state of the data plane itself, which changes with every acknowledgement and has
// removed objects until their removal is confirmed, is the client's (dpclient.Client); no operation depends on shown.
type shown struct {
	start time.Time // of effect.since
	// objects holds sub-ports and vectors; destinations holds destinations by source and prefix, with the engine's last
	// decision.
	objects      map[dpclient.Object]*effect
	destinations prefixmap.Map[netip.Prefix, shownDestination]
	// counts holds the number of objects by the state of their last change; users counts destinations by vector.
	counts [effectStates]int
	users  map[uint32]int
}

// effect is the state of an object's last change.
type effect struct {
	change uint64
	since  time.Duration // time of the change's declaration
	// reason is the data plane's reason in states approximate and refused, prefixed with the name of the state.
	reason string
	state  effectState
}

// shownDestination is a destination's state and the engine's decision: its vector, the number of slots that moved when
// it was assigned, and the slots that must be drained because of it.
type shownDestination struct {
	effect
	vector, moved uint32
	drain         []uint16
}

type effectState uint8

const (
	effectPending effectState = iota
	effectDone
	effectApproximate // in effect, but a share deviates by more than 1 % of itself
	effectRefused
	effectStates
)

func newShown(start time.Time) shown {
	return shown{start: start, objects: map[dpclient.Object]*effect{}, users: map[uint32]int{}}
}

// of returns the effect of an object, or nil if the object is not declared.
func (e *shown) of(o dpclient.Object) *effect {
	if o.Kind != dpclient.KindDestination {
		return e.objects[o]
	}
	if d := e.destination(o.Destination); d != nil {
		return &d.effect
	}
	return nil
}

// destination returns the record of a destination, or nil.
func (e *shown) destination(key dpclient.Destination) *shownDestination {
	return e.destinations.Get(key.Source, key.Prefix)
}

// apply enters a decision, and completes it with the destination's vector before and with the slots that move.
func (e *shown) apply(a *applied, now time.Time) {
	switch a.Kind {
	case wecmp.VectorSet:
		a.moved = int(a.SlotsMoved) * e.users[a.Vector]
		e.want(a.vectorObject(), a.change, now)
	case wecmp.VectorDelete:
		e.forget(a.vectorObject())
	case wecmp.DestinationSet:
		a.from, a.moved = e.vector(a.key), int(a.SlotsMoved)
		e.assign(a.key, a.change, now, a.Vector, uint32(a.SlotsMoved), a.Drain)
	case wecmp.DestinationDelete:
		a.from = e.vector(a.key)
		e.unassign(a.key)
	}
}

// vector returns the vector of a destination, 0 if it has none.
func (e *shown) vector(key dpclient.Destination) uint32 {
	if d := e.destination(key); d != nil {
		return d.vector
	}
	return 0
}

// want records a declared change of a sub-port or vector. The client gives an equal declaration the number of the
// earlier one.
func (e *shown) want(o dpclient.Object, change uint64, now time.Time) {
	x := e.objects[o]
	if x == nil {
		x = &effect{}
		e.objects[o] = x
		e.counts[effectPending]++
	}
	e.declare(x, change, now)
}

// declare records the number of an object's last declaration.
func (e *shown) declare(x *effect, change uint64, now time.Time) {
	if x.change != change {
		e.enter(x, effectPending, "")
		x.change, x.since = change, now.Sub(e.start)
	}
}

// answered records the data plane's answer to an object's changes up to a number. It returns the previous record, and
// false if the answer concerns an earlier change than the last one.
func (e *shown) answered(o dpclient.Object, change uint64, state effectState, reason string) (before effect, ok bool) {
	x := e.of(o)
	if x == nil || change < x.change {
		return effect{}, false
	}
	before = *x
	e.enter(x, state, reason)
	return before, true
}

// lost records that an object is no longer in effect.
func (e *shown) lost(o dpclient.Object) {
	if x := e.of(o); x != nil {
		e.enter(x, effectPending, "")
	}
}

// enter moves an object to another state and updates the counts.
func (e *shown) enter(x *effect, state effectState, reason string) {
	e.counts[x.state]--
	e.counts[state]++
	x.state, x.reason = state, reason
}

// forget drops a sub-port or vector without waiting for its removal to be acknowledged.
func (e *shown) forget(o dpclient.Object) {
	if x := e.objects[o]; x != nil {
		e.counts[x.state]--
		delete(e.objects, o)
	}
}

// inEffect reports whether an object is declared and its last change is in effect, exactly.
func (e *shown) inEffect(o dpclient.Object) bool {
	x := e.of(o)
	return x != nil && x.state == effectDone
}

// reason returns why the data plane's answer does not put an object's last change into effect exactly: "approximate:
// ..." or "refused: ...". It is empty when the change is in effect, or not answered yet.
func (e *shown) reason(o dpclient.Object) string {
	if x := e.of(o); x != nil {
		return x.reason
	}
	return ""
}

// assign records the declared change of a destination, and its vector, which is not 0.
func (e *shown) assign(key dpclient.Destination, change uint64, now time.Time, vector, moved uint32, drain []uint16) {
	d, added := e.destinations.Add(key.Source, key.Prefix)
	if added {
		e.counts[effectPending]++
	} else {
		e.leave(d)
	}
	e.declare(&d.effect, change, now)
	d.vector, d.moved, d.drain = vector, moved, slices.Clone(drain)
	e.users[vector]++
}

// leave takes a destination from the users of its vector.
func (e *shown) leave(d *shownDestination) {
	if e.users[d.vector]--; e.users[d.vector] <= 0 {
		delete(e.users, d.vector)
	}
}

// unassign drops a destination without waiting for its removal to be acknowledged.
func (e *shown) unassign(key dpclient.Destination) {
	if d := e.destination(key); d != nil {
		e.counts[d.state]--
		e.leave(d)
		e.destinations.Delete(key.Source, key.Prefix)
	}
}
