package fare

import (
	"math"
	"slices"
)

// wrapLimit is 2^32 bytes a second, in bit/s, from which on no value has lost bits.
const wrapLimit = Bandwidth(8) << 32

// fastest, in bit/s, is above the speed of any link, and low enough for a float32 to tell sums apart.
const fastest = 32 * Terabit

// noteSpeeds records the different speeds of a plane's sub-ports, without those above fastest.
func (t *Table) noteSpeeds(p int) {
	speeds := t.planes[p].speeds[:0]
	for i := range t.subPorts {
		if sp := &t.subPorts[i]; sp.plane == p && sp.speed > 0 && sp.speed <= fastest && !slices.Contains(speeds, sp.speed) {
			speeds = append(speeds, sp.speed)
		}
	}
	t.planes[p].speeds = speeds
}

// suspect returns [ReasonWrapped] or [ReasonOtherScale] for a Link Bandwidth, extended or not, that the neighbor passes
// on and that, compared with the speeds of the plane's sub-ports, is no bandwidth, otherwise [ReasonUsed]. Sums of
// links of different speeds are not recognized.
func (t *Table) suspect(e *entry) Reason {
	if !e.known || e.kind == KindFARE || e.originated || e.value == 0 {
		return ReasonUsed
	}
	s := &t.sessions[t.order[e.rank]]
	for _, speed := range t.planes[t.subPorts[s.subPort].plane].speeds {
		switch {
		case s.codec.wraps(e.value, speed, e.kind):
			return ReasonWrapped
		case otherScale(e.value, speed):
			return ReasonOtherScale
		}
	}
	return ReasonUsed
}

// wraps reports whether value is the sum of 2 to [MaxSubPorts] links of that speed, encoded, modulo 2^32 bytes a
// second. FRR through 10.7.0 keeps a sum so: it sends two links of 400 Gbit/s as 9.726 Gbit/s. The result says nothing
// about the path: a plane of which one link is left, whose value needs no sum, would get more than a whole plane. The
// links and the sum are, or are not, rounded to float32. In its extended form FRR sends a sum of 64 bits, of links that
// have lost their upper bits.
func (c Codec) wraps(value, speed Bandwidth, kind Kind) bool {
	wide := kind == KindExtendedLinkBandwidth
	if value >= wrapLimit*c.scale() && !wide {
		return false
	}
	got := float64(c.scaled(value))
	for _, one := range [...]uint64{uint64(c.scaled(speed)), uint64(speed / (8 * c.scale()))} {
		for k := uint64(1); k <= MaxSubPorts; k++ {
			sum, lost := uint64(uint32(k*one)), k > 1 && k*one > math.MaxUint32
			if wide {
				sum, lost = k*uint64(uint32(one)), one > math.MaxUint32
			}
			if lost && math.Abs(got-float64(sum)) <= got/(1<<22) {
				return true
			}
		}
	}
	return false
}

// otherScale reports whether value is that of 1 to 8 links of that speed, but a thousand or a million times as high or
// as low. More links in thousandths would be as fast as a slow link.
func otherScale(value, speed Bandwidth) bool {
	for _, factor := range [...]float64{1e-6, 1e-3, 1e3, 1e6} {
		links := float64(value) / float64(speed) * factor
		if n := math.Round(links); n >= 1 && n <= 8 && math.Abs(links-n) <= 1e-6*n {
			return true
		}
	}
	return false
}
