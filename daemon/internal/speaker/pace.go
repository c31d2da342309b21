package speaker

import (
	"bytes"
	"net/netip"
	"time"

	"github.com/fared/fared/fare"
)

// pace limits how often the bandwidth of a route rises (RFC 10005, Section
// 7.2): a flapping link would make every node of the fabric recompute and every
// data plane reprogram needlessly. A decrease is never held, because traffic
// must leave, nor is the first increase after a pause: a repaired cable counts
// immediately.
type pace struct {
	interval time.Duration
	risen    map[netip.Prefix]time.Time // when the bandwidth last rose; absent if it has not risen since the route was added
}

// hold returns how long to hold a change from one advertisement of a prefix to
// the next; 0 permits it immediately.
func (p *pace) hold(before, after *Advertisement, now time.Time) time.Duration {
	at, ok := p.risen[after.Prefix]
	if p.interval == 0 || !ok || !rises(before.Communities, after.Communities) {
		return 0
	}
	return max(0, p.interval-now.Sub(at))
}

// note records that one advertisement of a prefix replaced another.
func (p *pace) note(before, after *Advertisement, now time.Time) {
	if p.interval > 0 && rises(before.Communities, after.Communities) {
		p.risen[after.Prefix] = now
	}
}

// forget records the withdrawal of a route: a subsequent announcement is not held.
func (p *pace) forget(prefix netip.Prefix) { delete(p.risen, prefix) }

// rises reports whether no bandwidth falls and at least one rises. Communities
// of one kind and administrator end in the bandwidth, big-endian, and
// non-negative floats have the same order as their bits. If the kinds differ,
// rises reports false.
func rises(before, after []fare.Community) bool {
	if len(before) != len(after) {
		return false
	}
	risen := false
	for i := range before {
		b, a := before[i], after[i]
		if !bytes.Equal(b[:4], a[:4]) || bytes.Compare(b[4:], a[4:]) > 0 {
			return false
		}
		risen = risen || b != a
	}
	return risen
}
