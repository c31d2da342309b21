package prober

import (
	"net/netip"
	"time"
)

const (
	// mostProbes is the number of probes of one peer in a second that are answered: an honest peer sends at most 50 and
	// a trial. mostOfAll is that of all peers.
	mostProbes, mostOfAll = 200, 20_000
	// ignored is the time for which a peer that sends more is not answered at all: if some of its probes were answered,
	// it would judge that the others are lost.
	ignored = 2 * time.Second
)

// limiter limits the answers.
type limiter struct {
	begin time.Time // of the present second
	all   int
	peers map[netip.Addr]int
	quiet map[netip.Addr]time.Time // until when a peer is not answered
	shut  time.Time                // until when no peer is answered
}

// allow reports whether a probe of a known peer is answered.
func (l *limiter) allow(now time.Time, from netip.Addr) bool {
	if now.Sub(l.begin) >= time.Second || now.Before(l.begin) {
		if l.begin, l.all = now, 0; l.peers == nil {
			l.peers = map[netip.Addr]int{}
		}
		clear(l.peers)
		for a, until := range l.quiet {
			if !now.Before(until) {
				delete(l.quiet, a)
			}
		}
	}
	l.all++
	l.peers[from]++
	switch {
	case l.all > mostOfAll:
		l.shut = now.Add(ignored)
	case l.peers[from] > mostProbes:
		if l.quiet == nil {
			l.quiet = map[netip.Addr]time.Time{}
		}
		l.quiet[from] = now.Add(ignored)
	}
	return !now.Before(l.shut) && !now.Before(l.quiet[from])
}
