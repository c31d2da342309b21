package judge

import (
	"math"
	"slices"
)

// Allows returns the rate at which all pairs of source groups together can send, bit/s before scaling. It is the sum of
// max-min fair rates (Bertsekas and Gallager, Data Networks, Section 6.5.2), where each pair splits by the weights in
// force and every plane of a source group carries the sum of its usable cables, in each direction. Capacity between
// leaves and spines is not considered.
func (m *Model) Allows() float64 {
	type way struct {
		group, plane int
		in           bool
	}
	left := map[way]float64{}
	for _, c := range m.Cables {
		if c.Group != nil && m.sends(c) {
			left[way{c.Group.Index, c.Plane, false}] += float64(c.Speed)
			left[way{c.Group.Index, c.Plane, true}] += float64(c.Speed)
		}
	}
	type flow struct {
		parts map[way]float64 // parts of each bit that the pair sends
		rate  float64
		over  bool
	}
	var flows []*flow
	for src := range m.Groups() {
		for dst := range m.Others(src) {
			f := &flow{parts: map[way]float64{}}
			for p, part := range Fractions(m.InForce(src, dst)) {
				if part > 0 {
					f.parts[way{src, p, false}], f.parts[way{dst, p, true}] = part, part
				}
			}
			f.over = len(f.parts) == 0
			flows = append(flows, f)
		}
	}
	for {
		// All flows that can still grow do so at the same pace, until a plane of some server is full.
		load := map[way]float64{}
		for _, f := range flows {
			for w, part := range f.parts {
				if !f.over {
					load[w] += part
				}
			}
		}
		if len(load) == 0 {
			break
		}
		step := math.Inf(1)
		for w, l := range load {
			step = min(step, left[w]/l)
		}
		for w, l := range load {
			left[w] -= step * l
		}
		for _, f := range flows {
			if f.over {
				continue
			}
			f.rate += step
			for w := range f.parts {
				f.over = f.over || left[w] <= 1e-6*load[w]*f.rate
			}
		}
	}
	var all float64
	for _, f := range flows {
		all += f.rate
	}
	return all
}

// Severed reports whether a server cannot reach another, so that a transfer from all to all cannot succeed.
func (m *Model) Severed() bool {
	for src := range m.Groups() {
		for dst := range m.Others(src) {
			if slices.Max(m.InForce(src, dst)) == 0 || m.Moved(src, dst) && !m.Carries(src, dst) {
				return true
			}
		}
	}
	return false
}

// Fractions divides weights by their sum.
func Fractions(weights []uint32) []float64 {
	out := make([]float64, len(weights))
	var all float64
	for _, w := range weights {
		all += float64(w)
	}
	for p, w := range weights {
		if all > 0 {
			out[p] = float64(w) / all
		}
	}
	return out
}
