package dpclient

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"
	"unique"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/prefixmap"
)

// object is a declared object with its state. There may be 131,072 destinations, so the fields of other kinds are
// apart.
type object struct {
	*few
	prefix netip.Prefix                // of a destination
	source unique.Handle[netip.Prefix] // of a destination
	Kind   Kind

	// The owner's wanted state; if none of these fields and few.wantVector is set, the object is to be deleted.
	wantUp bool
	wanted bool
	wantTo uint32 // a destination's vector, the owner's number; 0 means none

	// For sub-ports and destinations: the data plane's state once all sent operations are applied, and its confirmed
	// state.
	sent, effect value
	drain        []uint32 // a destination's slots to drain with its next operation
	cohort       *cohort  // of a destination

	change uint64 // number of the last change of the wanted state; 0 if it was never declared
	done   uint64 // newest change that is in effect; 0 if there is none
	op     uint64 // last operation sent on this stream; 0 if there is none

	refusal  *refusal // of the current change
	again    *refusal // of the operation that is being retried, until its answer; nil if there is none
	place    uint32   // index of a destination in its vector's wanters
	queued   uint8    // queuedBit of each queue that contains it
	reported bool     // is in the event queue
	listed   bool     // is in book.retries
	moved    bool     // is in wanted.moved
	touched  bool     // this client programmed it: it may be changed while removals are held
	repin    bool     // its source ports must be recomputed
	blocked  bool     // a destination refused because its vector is missing
}

// few has the fields of sub-ports and vectors.
type few struct {
	SubPort    string
	Vector     uint32         // the owner's number
	wantVector *farev1.Vector // canonical copy
	wire       *wire          // a vector's place on the wire; nil if it has none yet
	wanters    []*object      // destinations that want this vector, in no order
	formers    int            // places on the wire that belonged to this vector and still have to be cleared
	// approximate is the wire's value when the object was last reported.
	approximate string
}

// none has the fields few of all destinations, and is never written.
var none few

func newDestination(key Destination) *object {
	return &object{few: &none, Kind: KindDestination, prefix: key.Prefix, source: unique.Make(key.Source)}
}

// key returns the owner's name of a destination.
func (o *object) key() Destination { return Destination{Prefix: o.prefix, Source: o.source.Value()} }

// name returns the owner's name of any object.
func (o *object) name() Object {
	if o.Kind == KindDestination {
		return Object{Kind: o.Kind, Destination: o.key()}
	}
	return Object{Kind: o.Kind, SubPort: o.SubPort, Vector: o.Vector}
}

// drains adds slots to those that the object's next operation drains.
func (o *object) drains(slots []uint32) {
	for _, slot := range slots {
		if !slices.Contains(o.drain, slot) {
			o.drain = append(o.drain, slot)
		}
	}
	if o.cohort != nil && len(slots) > 0 {
		o.cohort.drains = true
	}
}

// destinations holds objects by source group and prefix.
type destinations struct {
	prefixmap.Map[netip.Prefix, *object]
}

func (d *destinations) get(key Destination) *object {
	if o := d.Get(key.Source, key.Prefix); o != nil {
		return *o
	}
	return nil
}

func (d *destinations) add(o *object) {
	at, _ := d.Add(o.source.Value(), o.prefix)
	*at = o
}

// all yields the objects in no order; they may be deleted meanwhile.
func (d *destinations) all() iter.Seq[*object] {
	return func(yield func(*object) bool) {
		for _, o := range d.All() {
			if !yield(*o) {
				return
			}
		}
	}
}

// value is the state of a sub-port or destination in the data plane. The zero value means that it does not exist there.
type value struct {
	known bool // sub-port: state was read back or sent
	up    bool
	to    uint32 // destination: number of the vector on the wire
	pins  uint64 // destination: fingerprint of the source ports
}

// refusal is the data plane's refusal of an operation.
type refusal struct {
	code    codes.Code
	message string
}

// refused returns the refusal of an object's current change, also while the change is retried; nil if there is none.
func (o *object) refused() *refusal { return cmp.Or(o.refusal, o.again) }
