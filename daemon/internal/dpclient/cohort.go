package dpclient

import (
	"cmp"
	"slices"
)

// cohort counts the destinations that are on one place on the wire and want one vector.
type cohort struct {
	cohortKey
	n       int
	changed bool // is in cohorts.changed
	drains  bool // a destination that joined it has slots to drain, which takes a separate operation
}

// cohortKey identifies a cohort. Wire is the place of the last operation sent, 0 before the first. Vector is the
// owner's number, 0 for destinations that are to be deleted.
type cohortKey struct{ wire, vector uint32 }

// cohorts holds every cohort with a destination.
type cohorts struct {
	byKey   map[cohortKey]*cohort
	last    *cohort   // the cohort that the last destination joined
	changed []*cohort // cohorts that a destination has joined or left since the last transaction
}

func newCohorts() cohorts { return cohorts{byKey: map[cohortKey]*cohort{}} }

// place moves a destination to the cohort of its state. Destinations that neither exist nor are wanted have none.
func (c *cohorts) place(o *object) {
	key := cohortKey{o.sent.to, o.wantTo}
	prev := o.cohort
	if prev != nil && prev.cohortKey == key {
		return
	}
	if prev != nil {
		o.cohort = nil
		prev.n--
		c.note(prev)
	}
	if key == (cohortKey{}) {
		return
	}
	next := c.last
	if next == nil || next.cohortKey != key {
		if next = c.byKey[key]; next == nil {
			next = &cohort{cohortKey: key}
			c.byKey[key] = next
		}
		c.last = next
	}
	o.cohort = next
	next.n++
	c.note(next)
}

// note records that a cohort has changed.
func (c *cohorts) note(x *cohort) {
	if !x.changed {
		x.changed = true
		c.changed = append(c.changed, x)
	}
}

// size returns the number of destinations on a place on the wire that want a vector.
func (c *cohorts) size(wire, vector uint32) int {
	if x := c.byKey[cohortKey{wire, vector}]; x != nil {
		return x.n
	}
	return 0
}

// drain appends the cohorts with a change to the empty buf, the largest first, and forgets the empty ones.
func (c *cohorts) drain(buf []*cohort) []*cohort {
	for i, x := range c.changed {
		c.changed[i], x.changed = nil, false
		if x.n > 0 {
			buf = append(buf, x)
			continue
		}
		delete(c.byKey, x.cohortKey)
		if c.last == x {
			c.last = nil
		}
	}
	c.changed = c.changed[:0]
	slices.SortFunc(buf, func(x, y *cohort) int {
		return cmp.Or(cmp.Compare(y.n, x.n), cmp.Compare(x.wire, y.wire), cmp.Compare(x.vector, y.vector))
	})
	return buf
}
