package traffic

import (
	"maps"
	"slices"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// sampler returns the progress since its previous sample.
type sampler struct {
	run    *run
	at     time.Duration
	bytes  []uint64 // by end
	planes map[string]*farev1.TrafficPlaneBytes
}

func (s *sampler) sample() *farev1.TrafficSample {
	out := &farev1.TrafficSample{FromNs: uint64(s.at)}
	if s.bytes == nil {
		s.bytes, s.planes = make([]uint64, len(s.run.ends)), map[string]*farev1.TrafficPlaneBytes{}
	}
	planes := map[string]*farev1.TrafficPlaneBytes{}
	for i, e := range s.run.ends {
		if e.destination {
			if n := e.bytes.Load(); n > s.bytes[i] {
				out.Pairs = append(out.Pairs, &farev1.TrafficPairBytes{Pair: e.pair.GetPair(), Bytes: n - s.bytes[i]})
				s.bytes[i] = n
			}
			continue
		}
		for _, slot := range e.set.Slots() {
			p := planes[slot.Plane]
			if p == nil {
				p = &farev1.TrafficPlaneBytes{Plane: slot.Plane}
				planes[slot.Plane] = p
			}
			p.Sent += slot.Sent
			p.Again += slot.Again
		}
	}
	s.at = s.run.now()
	out.ToNs = uint64(s.at)
	for _, name := range slices.Sorted(maps.Keys(planes)) {
		now, was := planes[name], s.planes[name]
		// A slot that moves to another plane takes its bytes with it: a decrease counts as no progress.
		sent, again := grown(now.GetSent(), was.GetSent()), grown(now.GetAgain(), was.GetAgain())
		if sent+again > 0 {
			out.Planes = append(out.Planes, &farev1.TrafficPlaneBytes{Plane: name, Sent: sent, Again: again})
		}
	}
	s.planes = planes
	return out
}

func grown(now, was uint64) uint64 { return max(now, was) - was }
