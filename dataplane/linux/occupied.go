package linux

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/dataplane/internal/contract"
)

// occupied knows the places of destinations' routes that routes of other programs have. The kernel refuses a route
// there until the other route is gone, so Commit refuses the destination without a message: the control plane repeats
// all refused operations whenever one place is free.
type occupied struct {
	places map[routeKey]bool
	again  func() // reports that a refused change may succeed; nil disables reports
}

// Retry implements contract.Retrier.
func (d *Driver) Retry(again func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.occupied.again = again
}

// occupies reports whether the kernel refused a new route because another program's route has its place.
func (f failure) occupies() bool { return f.op.kind == setRoute && errors.Is(f.err, unix.EEXIST) }

// refusalOf returns the refusal of a destination with an occupied place. Its text is the same from the kernel and from
// memory, so that a repeated operation is not refused for another reason.
func refusalOf(at routeKey) error {
	return kernelStatus(fmt.Errorf("%w; another program's route to %v exists, and is kept: remove it, or set another metric", unix.EEXIST, at.prefix))
}

// refuse returns the refusal of the first change that adds a destination in an occupied place, or nil.
func (o *occupied) refuse(st *state, changes []contract.Change) error {
	if len(o.places) == 0 {
		return nil
	}
	for _, c := range changes {
		if c.Kind != contract.DestinationChange || c.From.Group != 0 || c.To.Group == 0 {
			continue
		}
		if at, ok := st.want.place(c.Key()); ok && o.places[at] {
			return refusalOf(at)
		}
	}
	return nil
}

// note records the occupied places among the failures of a commit that was undone. The Driver itself retries routes
// that are still wanted.
func (o *occupied) note(st *state, failures []failure) {
	for _, f := range failures {
		if _, wanted := st.want.wantedAt(f.op.at); f.occupies() && !wanted {
			o.places[f.op.at] = true
		}
	}
}

// free records that a route in a place was removed.
func (o *occupied) free(at routeKey) {
	if o.places[at] {
		delete(o.places, at)
		o.report()
	}
}

// freeAll forgets all places, after changes that the Driver may not know.
func (o *occupied) freeAll() {
	if len(o.places) > 0 {
		clear(o.places)
		o.report()
	}
}

// report calls again.
func (o *occupied) report() {
	if o.again != nil {
		o.again()
	}
}
