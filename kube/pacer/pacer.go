// Package pacer decides when a changed object is written. Writes cost tokens, of which one arrives every twelve
// seconds: a change of planes is written at once while tokens last, and an object that flaps for hours costs a write
// every twelve seconds. It is pure: callers pass the time and report results.
package pacer

import (
	"slices"
	"strings"
	"time"
)

// Limits of writes.
const (
	Refill  = 12 * time.Second // in which one token arrives: 0.1 writes a second in 18 minutes, a burst included
	Burst   = 18               // greatest number of tokens: three objects of six changes of planes
	Gap     = 10 * time.Second // least time between minor writes of an object
	reserve = 3                // tokens that minor writes leave to urgent ones: a change of planes

	retryFirst = time.Second // after the first failed attempt
	RetryLast  = 5 * time.Second

	// ease is the wait after a write, in durations of the shorter one of the last two: a server that is busy with the
	// writes of many nodes, as when their leaf flaps, has at most a fifth of the nodes at a time, and answers before
	// they give up. One slow write, as while a server starts, delays nothing.
	ease    = 4
	maxEase = 16 * time.Second
)

// Object is a text to write. A change of Urgent is written at once, another change of Body when it is convenient.
type Object struct{ Body, Urgent string }

// entry is an object and its last write.
type entry struct {
	key             string
	wanted, written Object
	stale           bool      // written is unknown, or was changed by another program
	pending         bool      // to be written
	since           time.Time // since when, or since the last attempt
	behind          time.Time // since when it differs from the last write; zero if it does not
	at              time.Time // of the last write; zero before the first
	retry           time.Time // no attempt before
	delay           time.Duration
}

// Pacer orders the writes of objects. At most one is under way.
type Pacer struct {
	entries []*entry      // by key
	credit  time.Duration // a token is a Refill
	counted time.Time     // when credit was last counted
	flying  *entry
	sent    Object
	begun   time.Time // the last write
	took    time.Duration
	quiet   time.Time // no write before
}

// New returns a pacer without objects, with all tokens.
func New(now time.Time) *Pacer { return &Pacer{credit: Burst * Refill, counted: now} }

// Want sets the object of a key.
func (p *Pacer) Want(now time.Time, key string, o Object) {
	i, ok := slices.BinarySearchFunc(p.entries, key, func(e *entry, key string) int { return strings.Compare(e.key, key) })
	if !ok {
		p.entries = slices.Insert(p.entries, i, &entry{key: key, stale: true})
	}
	p.entries[i].wanted = o
	p.entries[i].mark(now)
}

// mark records whether an object has to be written.
func (e *entry) mark(now time.Time) {
	pending := e.stale || e.wanted != e.written
	if pending && !e.pending {
		e.since = now
	}
	if pending && e.behind.IsZero() {
		e.behind = now
	}
	e.pending = pending
}

// Behind returns the number of objects, and of those that are not written as wanted, and since when the first one is
// not.
func (p *Pacer) Behind() (objects, behind int, since time.Time) {
	for _, e := range p.entries {
		if e.behind.IsZero() {
			continue
		}
		if behind++; since.IsZero() || e.behind.Before(since) {
			since = e.behind
		}
	}
	return len(p.entries), behind, since
}

// Refresh makes the objects of the keys, or all if there is none, pending, as minor changes: another program may have
// changed or removed them.
func (p *Pacer) Refresh(now time.Time, keys ...string) {
	for _, e := range p.entries {
		if len(keys) == 0 || slices.Contains(keys, e.key) {
			e.stale = true
			e.mark(now)
		}
	}
}

// Next returns the key and object to write now; the caller reports the result by Done. Without one, ok is false, and
// wake is when there will be, or zero if nothing is pending or a write is under way.
func (p *Pacer) Next(now time.Time) (key string, o Object, wake time.Time, ok bool) {
	if p.flying != nil {
		return "", Object{}, time.Time{}, false
	}
	p.count(now)
	var best *entry
	for _, e := range p.entries {
		if !e.pending {
			continue
		}
		at := p.due(e)
		if at.After(now) {
			if wake.IsZero() || at.Before(wake) {
				wake = at
			}
			continue
		}
		if best == nil || e.since.Before(best.since) {
			best = e
		}
	}
	if best == nil {
		return "", Object{}, wake, false
	}
	p.credit -= Refill
	p.flying, p.sent, p.begun, best.stale, best.pending = best, best.wanted, now, false, false
	return best.key, best.wanted, time.Time{}, true
}

// due returns when a pending object may be written.
func (p *Pacer) due(e *entry) time.Time {
	at := p.when(1)
	if !e.at.IsZero() && e.wanted.Urgent == e.written.Urgent {
		at = later(p.when(reserve+1), e.at.Add(Gap))
	}
	return later(later(at, p.quiet), e.retry)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// count adds the tokens that have arrived.
func (p *Pacer) count(now time.Time) {
	if now.After(p.counted) {
		p.credit = min(Burst*Refill, p.credit+now.Sub(p.counted))
		p.counted = now
	}
}

// when returns the time from which on there are n tokens.
func (p *Pacer) when(n time.Duration) time.Time { return p.counted.Add(max(0, n*Refill-p.credit)) }

// Result is the end of a write.
type Result int

// The results. A refused write has had no effect, and costs no token; one that failed may have had its effect.
const (
	Written Result = iota
	Refused
	Failed
)

// Done reports the result of the write under way. One that is refused or failed is repeated after a delay that doubles,
// or after wait if that is longer.
func (p *Pacer) Done(now time.Time, r Result, wait time.Duration) {
	e := p.flying
	p.flying = nil
	p.count(now)
	if r == Refused {
		p.credit = min(Burst*Refill, p.credit+Refill)
	}
	if r != Written {
		e.delay = min(max(2*e.delay, retryFirst), RetryLast)
		e.retry = now.Add(max(e.delay, wait))
		e.stale = true // the server may have written it all the same
	} else {
		took := now.Sub(p.begun)
		p.quiet, p.took = now.Add(min(maxEase, ease*min(took, p.took))), took
		e.written, e.at, e.retry, e.delay, e.behind = p.sent, now, time.Time{}, 0, time.Time{}
	}
	e.pending = false // others have waited longer
	e.mark(now)
}
