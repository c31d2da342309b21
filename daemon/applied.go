package daemon

import (
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/wecmp"
)

// applied is a decision of the engines that is declared to the data plane: an entry of the ledger that everything which
// reports decisions reads.
type applied struct {
	core.Update
	key     dpclient.Destination // of a destination
	change  uint64               // number of the declaration, 0 for a removal
	from    uint32               // vector of the destination before, 0 for none
	moved   int                  // slots that moved, of all destinations
	weights []uint32             // of a vector that is set, by plane; valid until the next step
}

// vectorObject is the vector of a decision as an object of the data plane.
func (a *applied) vectorObject() dpclient.Object {
	return dpclient.Object{Kind: dpclient.KindVector, Vector: a.Vector}
}

// apply declares one of the engines' decisions to the data plane, and enters it in the ledger.
func (l *loop) apply(t *dpclient.Transaction, u core.Update) {
	a := applied{Update: u}
	switch u.Kind {
	case wecmp.VectorSet:
		v, _ := l.core.Vector(u.Vector)
		a.weights = v.Weights
		a.change = t.SetVector(l.group(u.Vector))
	case wecmp.VectorDelete:
		t.DeleteVector(u.Vector)
		l.forgetPlaces(u.Vector)
	case wecmp.DestinationSet:
		a.key = dpclient.Destination{Prefix: u.Destination, Source: u.Name}
		a.change = t.SetDestination(a.key, u.Vector, u.Drain...)
	case wecmp.DestinationDelete:
		a.key = dpclient.Destination{Prefix: u.Destination, Source: u.Name}
		t.DeleteDestination(a.key)
		if u.Source >= 0 {
			l.ports.forget(u.Destination.Addr(), l.core.Layout().Sources[u.Source].Loopbacks)
		}
	}
	l.shown.apply(&a, l.wokenAt) // answers may come from now on
	if l.applied = append(l.applied, a); len(l.applied) == ledger {
		l.account()
	}
}

// ledger limits the decisions in the ledger.
const ledger = 1 << 8

// account empties the ledger: burst of weights, trace, status and the count of moved slots read each decision once, in
// order.
func (l *loop) account() {
	for i := range l.applied {
		a := &l.applied[i]
		l.reweighed.apply(a, l.wokenAt)
		l.tracer.apply(a)
		switch a.Kind {
		case wecmp.VectorSet, wecmp.VectorDelete:
			l.builder.MarkVector(a.Vector)
		case wecmp.DestinationSet, wecmp.DestinationDelete:
			if a.Source < 0 {
				break // the status has another structure since
			}
			l.builder.MarkDestination(status.Key{Prefix: a.Destination, Source: a.Source})
		}
		l.d.moved.Add(uint64(a.moved))
	}
	clear(l.applied)
	l.applied = l.applied[:0]
}
