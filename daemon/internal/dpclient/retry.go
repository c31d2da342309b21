package dpclient

import (
	"time"

	"google.golang.org/grpc/codes"
)

// retryLeast and retryMost bound the time after which refused operations are sent again; it doubles while the data
// plane refuses them.
const (
	retryLeast = time.Second
	retryMost  = 30 * time.Second
)

// passing reports whether the reason of a refusal may pass while the wanted state, Forwarding and the stream stay the
// same. The other reasons are functions of these three alone.
func passing(code codes.Code) bool {
	return code == codes.Unavailable || code == codes.Internal || code == codes.ResourceExhausted
}

// retries holds the objects, and the vectors to delete, that were refused for a reason that may pass.
type retries struct {
	objects []*object
	deletes []*wire
	at      time.Time // of the next retry; zero if nothing is to be retried
	last    time.Time // of the last retry
	pause   time.Duration
}

// reset forgets all of a stream. Objects keep their mark.
func (r *retries) reset() { *r = retries{} }

// schedule sets the time of the next retry. A refusal within one pause after the last retry doubles the pause.
func (r *retries) schedule(now time.Time) {
	switch {
	case !r.at.IsZero():
		return
	case r.pause > 0 && now.Sub(r.last) < r.pause:
		r.pause = min(2*r.pause, retryMost)
	default:
		r.pause = retryLeast
	}
	r.at = now.Add(r.pause)
}

// add notes a refused object for a retry.
func (r *retries) add(o *object, now time.Time) {
	if !o.listed {
		o.listed = true
		r.objects = append(r.objects, o)
	}
	r.schedule(now)
}

// addDelete notes a vector, whose deletion was refused, for a retry.
func (r *retries) addDelete(w *wire, now time.Time) {
	r.deletes = append(r.deletes, w)
	r.schedule(now)
}

// retry lets a refused object be sent again. It stays refused for the owner until the answer.
func (b *book) retry(o *object) {
	o.again, o.refusal = o.refusal, nil
	o.repin = o.repin || b.pinning && o.Kind == KindDestination && o.wanted // perhaps only its source ports were refused
	b.mark(o)
}

// retryDue retries the due operations.
func (b *book) retryDue() {
	if at := b.retries.at; !at.IsZero() && !b.now.Before(at) {
		b.retryAll()
	}
}

// retryAll retries the operations whose reason may have passed. They are bulk: later changes do not wait behind them.
func (b *book) retryAll() {
	defer func(bulk bool) { b.queues.bulk = bulk }(b.queues.bulk)
	b.queues.bulk = true
	r := b.retries
	b.retries = retries{last: b.now, pause: r.pause}
	for _, o := range r.objects {
		if o.listed = false; o.refusal != nil && passing(o.refusal.code) {
			b.retry(o)
		}
	}
	for _, w := range r.deletes {
		w.refused = false
		b.markWire(w)
	}
}
