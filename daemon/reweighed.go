package daemon

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/internal/prefixmap"
	"github.com/fared/fared/wecmp"
)

const (
	// reweighedFor is the length of a burst of changed weights, from its first change: a flood is one event, and does
	// not displace others from the journal.
	reweighedFor = time.Second
	// reweighedKinds limits the distinct changes that an event names.
	reweighedKinds = 8
)

// reweighed is the burst of changed weights that no event has reported yet. A vector and its weights are of the planes
// of its source group.
type reweighed struct {
	since time.Time // of the first change, zero if there is none
	// effect is the time at which all changes so far were in effect, zero while some are not.
	effect time.Time
	now    map[uint32][]uint32 // plane weights of each declared vector
	// before has the weights at since of the vectors that were set or deleted since then, nil for those that did not
	// exist.
	before map[uint32][]uint32
	// moved has the vector at since, and the present one, of destinations for which they differ; 0 for none.
	moved prefixmap.Map[netip.Prefix, [2]uint32]
}

// apply enters a decision.
func (r *reweighed) apply(a *applied, at time.Time) {
	switch a.Kind {
	case wecmp.VectorSet, wecmp.VectorDelete:
		r.set(at, a.Vector, a.weights)
	case wecmp.DestinationSet:
		r.move(at, a.key, a.from, a.Vector)
	case wecmp.DestinationDelete:
		r.move(at, a.key, a.from, 0)
	}
}

// set records that a vector is set, or deleted if weights is nil.
func (r *reweighed) set(at time.Time, vector uint32, weights []uint32) {
	r.begin(at)
	if _, known := r.before[vector]; !known {
		r.before[vector] = r.now[vector]
	}
	if weights == nil {
		delete(r.now, vector)
	} else {
		r.now[vector] = slices.Clone(weights)
	}
}

// move records that a destination has another vector, 0 for none.
func (r *reweighed) move(at time.Time, key dpclient.Destination, from, to uint32) {
	r.begin(at)
	m, added := r.moved.Add(key.Source, key.Prefix)
	if added {
		m[0] = from
	}
	if m[1] = to; m[0] == to {
		r.moved.Delete(key.Source, key.Prefix)
	}
}

func (r *reweighed) begin(at time.Time) {
	r.effect = time.Time{}
	if !r.since.IsZero() {
		return
	}
	r.since, r.before = at, map[uint32][]uint32{}
	if r.now == nil {
		r.now = map[uint32][]uint32{}
	}
}

// end ends the burst and describes it: how many destinations went from which weights to which, the most frequent change
// first. users is the number of destinations of each vector. It returns "" if no weights differ.
func (r *reweighed) end(users map[uint32]int) string {
	old := func(vector uint32) []uint32 {
		if weights, changed := r.before[vector]; changed {
			return weights
		}
		return r.now[vector]
	}
	kinds, arrived := map[string]int{}, map[uint32]int{}
	count := func(from, to []uint32, n int) {
		if n > 0 && !slices.Equal(from, to) {
			kinds[ratioOf(from)+" to "+ratioOf(to)] += n
		}
	}
	moves := map[[2]uint32]int{}
	for _, m := range r.moved.All() {
		moves[*m]++
		arrived[m[1]]++
	}
	for m, n := range moves {
		count(old(m[0]), r.now[m[1]], n)
	}
	for vector, weights := range r.before {
		count(weights, r.now[vector], users[vector]-arrived[vector])
	}
	*r = reweighed{now: r.now}
	lines := slices.SortedFunc(maps.Keys(kinds), func(a, b string) int { return cmp.Or(kinds[b]-kinds[a], strings.Compare(a, b)) })
	more := 0
	for i, kind := range lines {
		if i >= reweighedKinds {
			more += kinds[kind]
		}
		lines[i] = fmt.Sprintf("%s for %s", kind, destinationsOf(kinds[kind]))
	}
	if more > 0 {
		lines = append(lines[:reweighedKinds], fmt.Sprintf("%d other changes for %s", len(kinds)-reweighedKinds, destinationsOf(more)))
	}
	return strings.Join(lines, "; ")
}

func destinationsOf(n int) string {
	if n == 1 {
		return "1 destination"
	}
	return fmt.Sprintf("%d destinations", n)
}

// ratioOf formats plane weights as fared weights does.
func ratioOf(weights []uint32) string {
	if len(weights) == 0 {
		return "none"
	}
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(weights), " ", ":"), "[]")
}

// reportWeights reports a burst of changed weights when it is reweighedFor old. The time of the event is that at which
// the weights were in effect.
func (l *loop) reportWeights() {
	r := &l.reweighed
	now := time.Now()
	if r.since.IsZero() {
		return
	}
	if r.effect.IsZero() && l.shown.counts[effectPending] == 0 {
		r.effect = now
	}
	since, at := r.since, r.effect
	if now.Sub(since) < reweighedFor {
		return
	}
	if detail := r.end(l.shown.users); detail != "" {
		switch {
		case l.d.client == nil:
			at = since
		case at.IsZero():
			at, detail = now, detail+"; not in effect yet"
		default:
			detail += "; in effect after " + at.Sub(since).Round(10*time.Microsecond).String()
		}
		l.builder.Event(status.Event{Time: at, Kind: status.EventWeights, Subject: "weights", Detail: detail})
		l.log.Info(status.EventWeights.String(), "detail", detail)
	}
}
