package chaos

import (
	"fmt"
	"net/netip"
	"strings"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// cables is the judge's state: the cables that are up, and the leaves that run BGP. It comes from the test's actions,
// not from fared.
type cables struct {
	d    *design
	up   [planes][groups][subPorts]bool
	leaf [planes]bool
}

func allUp(d *design) cables {
	c := cables{d: d}
	for p := range planes {
		c.leaf[p] = true
		for g := range groups {
			for i, speed := range d.speed[p][g] {
				c.up[p][g][i] = speed > 0
			}
		}
	}
	return c
}

// lit returns the speed of an owner's cables that are up in a plane.
func (c *cables) lit(plane, group int) (n int) {
	for i, up := range c.up[plane][group] {
		if up {
			n += c.d.speed[plane][group][i]
		}
	}
	return n
}

// bandwidth returns a plane's bandwidth from one owner to another: the lesser of both ends
// (draft-xu-rtgwg-fare-in-sun-02, Section 3: the path bandwidth is that of the narrowest link).
func (c *cables) bandwidth(plane, src, dst int) int {
	if !c.leaf[plane] {
		return 0
	}
	return min(c.lit(plane, src), c.lit(plane, dst))
}

// shares holds the part of the traffic for each cable of the source.
type shares [planes][subPorts]float64

// want returns the shares of traffic from one end to another: planes get shares in proportion to their bandwidth, and
// the cables of a plane that are up in proportion to their speeds.
func (c *cables) want(from, to int) (s shares) {
	src, dst := groupOf(from), groupOf(to)
	total := 0
	for p := range planes {
		total += c.bandwidth(p, src, dst)
	}
	for p := range planes {
		for i, up := range c.up[p][src] {
			if up && total > 0 {
				s[p][i] = float64(c.bandwidth(p, src, dst)) / float64(total) * float64(c.d.speed[p][src][i]) / float64(c.lit(p, src))
			}
		}
	}
	return s
}

// shown returns the shares that a daemon shows; devices that the source does not own get none.
func shown(row *farev1.DestinationWeights) (s shares, inEffect bool) {
	var total float64
	for _, p := range row.Planes {
		total += float64(p.Weight)
	}
	inEffect = true
	for _, p := range row.Planes {
		plane := planeOf(p.Plane)
		inEffect = inEffect && p.InEffect
		var sum float64
		for _, sub := range p.SubPorts {
			sum += float64(sub.Weight)
		}
		for _, sub := range p.SubPorts {
			if of, i := cableOf(sub.Device); plane >= 0 && of == plane && sum > 0 && total > 0 {
				s[plane][i] = float64(p.Weight) / total * float64(sub.Weight) / sum
			}
		}
	}
	return s, inEffect
}

func planeOf(name string) int {
	var p int
	if _, err := fmt.Sscanf(name, "p%d", &p); err != nil || p >= planes {
		return -1
	}
	return p
}

// differ describes how a daemon's shares differ from the wanted ones, or returns "".
func differ(want, is shares) string {
	for p := range planes {
		for i := range subPorts {
			if d := want[p][i] - is[p][i]; d > 1e-9 || d < -1e-9 {
				return fmt.Sprintf("p%d.%d: a share of %.4f, want %.4f (%v, want %v)", p, i, is[p][i], want[p][i], is, want)
			}
		}
	}
	return ""
}

// String formats shares in percent, plane by plane.
func (s shares) String() string {
	var out []string
	for _, p := range s {
		var subs []string
		for _, x := range p {
			subs = append(subs, fmt.Sprintf("%.1f", 100*x))
		}
		out = append(out, strings.Join(subs, "+"))
	}
	return strings.Join(out, ":")
}

// slotShares sums the shares of slots by their cable; sprayed slots count at the plane's first cable.
func slotShares(row *farev1.DestinationWeights, source string) (s shares) {
	for _, pair := range row.Pairs {
		if pair.Source != source {
			continue
		}
		for _, slot := range pair.Slots {
			if p, i := slotCable(slot); p >= 0 {
				i = max(i, 0)
				s[p][i] += float64(slot.SharePpb) / 1e9
			}
		}
	}
	return s
}

// slotCable returns the plane and the sub-port of a slot; sub-port -1 means any of the plane.
func slotCable(slot *farev1.Slot) (p, i int) {
	if slot.Device == "" {
		return planeOf(slot.Plane), -1
	}
	return cableOf(slot.Device)
}

// inPlanes sums the shares of each plane at its first cable.
func (s shares) inPlanes() (sum shares) {
	for p := range planes {
		for _, x := range s[p] {
			sum[p][0] += x
		}
	}
	return sum
}

// cableOf returns the plane and the sub-port of a device such as "p2.0" or "g1p2.0".
func cableOf(device string) (p, i int) {
	if at := strings.Index(device, "p"); at > 0 {
		device = device[at:]
	}
	if _, err := fmt.Sscanf(device, "p%d.%d", &p, &i); err != nil || p >= planes || i >= subPorts {
		return -1, -1
	}
	return p, i
}

// tally counts packets of one pair of servers by the cable on which they left.
type tally [planes][subPorts]int

func (t *tally) sum() (n int) {
	for _, p := range t {
		for _, c := range p {
			n += c
		}
	}
	return n
}

// chiSquare returns the maximum statistic of the test of a multinomial distribution: a correct distribution exceeds it
// at most once in 10^9 bursts, for any degrees of freedom from 1 to those of all cables of an owner.
func chiSquare(freedom int) float64 { return 46 + 2*float64(freedom) }

// distributed describes how counted packets of random flows differ from shares, or returns "": none may use a cable
// with share zero, and elsewhere the difference must not exceed chance.
func (t *tally) distributed(want shares) string {
	n, square, freedom := t.sum(), 0.0, -1
	for p := range planes {
		for i := range subPorts {
			expected := float64(n) * want[p][i]
			if expected == 0 {
				if t[p][i] != 0 {
					return fmt.Sprintf("%d packets over p%d.%d, which is to carry none: %v, want %v", t[p][i], p, i, *t, want)
				}
				continue
			}
			freedom++
			d := float64(t[p][i]) - expected
			square += d * d / expected
		}
	}
	if square > chiSquare(freedom) {
		return fmt.Sprintf("chi-square %.0f: %v of %d packets, want %v", square, *t, n, want)
	}
	return ""
}

func (f *fabric) loopback(end int) netip.Prefix {
	for _, l := range f.numbers.LoopbacksAt(f.d.serverOf(end), groupOf(end)%f.d.gpus) {
		if l.Addr().Is6() == (familyOf(end) == 6) {
			return l
		}
	}
	f.t.Fatalf("%s has no loopback", f.d.nameOf(end))
	return netip.Prefix{}
}
