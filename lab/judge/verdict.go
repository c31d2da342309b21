package judge

import (
	"fmt"
	"iter"
	"maps"
	"math"
	"slices"

	"github.com/fared/fared/topo"
)

// Others yields the source groups of other servers, with the model's vector toward each.
func (m *Model) Others(src int) iter.Seq2[int, Vector] {
	return func(yield func(int, Vector) bool) {
		for dst := range m.Groups() {
			if m.Host(dst) != m.Host(src) && !yield(dst, m.vector(src, dst)) {
				return
			}
		}
	}
}

// Destination is a loopback with its source group, and the source group that sends to it.
type Destination struct {
	topo.Way
	Group int
}

// Toward yields all ways from a server, with the model's vector of each.
func (m *Model) Toward(server int) iter.Seq2[Destination, Vector] {
	return func(yield func(Destination, Vector) bool) {
		for _, src := range m.GroupsAt(server) {
			for dst, want := range m.Others(src) {
				for _, l := range m.LoopbacksOf(m.Groups()[dst]) {
					if !yield(Destination{topo.Way{Source: src, Destination: l.Addr()}, dst}, want) {
						return
					}
				}
			}
		}
	}
}

// Row holds a daemon's weights for a destination.
type Row struct {
	Planes []uint32 // by plane
	// SubPorts holds the weights of all sub-ports, by device, on one scale for all planes.
	SubPorts map[string]uint64
	// Pending is the first plane whose weight is not in effect, "" if there is none.
	Pending string
}

// Devices returns the weights of sub-ports, or nil without a row.
func (r *Row) Devices() map[string]uint64 {
	if r == nil {
		return nil
	}
	return r.SubPorts
}

// CheckWeights compares a daemon's weights for a destination (nil if it has none) with the model. With inEffect they
// must also be in effect.
func (m *Model) CheckWeights(to Destination, d *Row, want Vector, inEffect bool) string {
	if d == nil {
		if slices.Max(want.Planes) > 0 {
			return " is unreachable, want " + Ratio(want.Planes)
		}
		return ""
	}
	if !slices.Equal(d.Planes, want.Planes) {
		return fmt.Sprintf(" has %s, want %s", Ratio(d.Planes), Ratio(want.Planes))
	}
	if text := m.checkLanes(to.Source, d.SubPorts, want); text != "" {
		return text
	}
	if inEffect && d.Pending != "" {
		return fmt.Sprintf(": the weight of %s is not in effect", d.Pending)
	}
	return ""
}

// checkLanes compares the weights of a source group's sub-ports with the model; devices without a weight are absent
// from weights.
func (m *Model) checkLanes(src int, weights map[string]uint64, want Vector) string {
	var sum float64
	for _, w := range weights {
		sum += float64(w)
	}
	left := len(weights)
	for i, c := range m.Groups()[src].Cables {
		w, there := weights[c.Down.Device]
		if there {
			left--
		}
		if got := float64(w) / max(sum, 1); math.Abs(got-want.Lanes[i]) > 1e-6*want.Lanes[i] {
			return fmt.Sprintf(" gives %s %.4f %%, want %.4f %%", c.Down.Device, 100*got, 100*want.Lanes[i])
		}
	}
	if left > 0 {
		return fmt.Sprintf(" has %d sub-ports that do not serve %s", left, m.Groups()[src].Name)
	}
	return ""
}

// Ratio formats weights in the usual notation, such as 2:2:1:2.
func Ratio(w []uint32) string {
	var b []byte
	for i, v := range w {
		if i > 0 {
			b = append(b, ':')
		}
		b = fmt.Append(b, v)
	}
	return string(b)
}

// CheckBuckets compares the kernel's route to a destination with the weights of sub-ports: routed is false without a
// route that forwards, nexthop is the number of the route's group, and have the number of its buckets by device. No
// weights mean that the destination is unreachable.
func CheckBuckets(routed bool, nexthop int, have, weights map[string]uint64) string {
	if len(weights) == 0 {
		if routed {
			return fmt.Sprintf("the kernel has a route, over nexthop %d, to an unreachable destination", nexthop)
		}
		return ""
	}
	if !routed {
		return "the kernel has no route"
	}
	var all, sum uint64
	for _, n := range have {
		all += n
	}
	for _, w := range weights {
		sum += w
	}
	if all == 0 {
		return fmt.Sprintf("the kernel's nexthop %d is not a resilient group", nexthop)
	}
	devices := maps.Clone(weights)
	for d := range have {
		devices[d] += 0
	}
	for _, d := range slices.Sorted(maps.Keys(devices)) {
		want := float64(all) * float64(weights[d]) / float64(sum)
		if math.Abs(float64(have[d])-want) > 1 || weights[d] == 0 && have[d] > 0 {
			return fmt.Sprintf("the kernel gives %s %d of %d buckets, want %.1f", d, have[d], all, want)
		}
	}
	return ""
}

// CheckAvoided returns a description of the first of some devices that still has buckets of a destination, or "".
func CheckAvoided(have map[string]uint64, devices []string) string {
	for _, d := range devices {
		if n := have[d]; n > 0 {
			return fmt.Sprintf("the kernel gives %s %d buckets, but its link is down", d, n)
		}
	}
	return ""
}

// CheckMembers compares the weights by which a data plane in memory forwards, by plane and by device, with the model.
func (m *Model) CheckMembers(src int, planes, devices map[string]uint64, want Vector) string {
	got := make([]uint64, m.Planes)
	for p := range got {
		got[p] = planes[m.PlaneName(p)]
	}
	if terms := lowestTerms(got); !slices.Equal(terms, want.Planes) {
		all := make([]uint32, len(got))
		for p, w := range got {
			all[p] = uint32(w)
		}
		return fmt.Sprintf("the data plane forwards by %s, want %s", Ratio(all), Ratio(want.Planes))
	}
	if text := m.checkLanes(src, devices, want); text != "" {
		return "the data plane" + text
	}
	return ""
}

// CheckFollowed returns a description of the first expected weights that a daemon has not yet reported over
// WatchWeights, or "": got are its last reported weights, effective is true if it has reported them as in effect. With
// inEffect they must be.
func CheckFollowed(got []uint32, effective bool, want []uint32, inEffect bool) string {
	positive := func(w uint32) bool { return w > 0 }
	reachable := slices.ContainsFunc(want, positive)
	switch {
	case reachable && !slices.Equal(got, want), !reachable && slices.ContainsFunc(got, positive):
		return fmt.Sprintf("WatchWeights reports the weights %q, want %s", Ratio(got), Ratio(want))
	case reachable && inEffect && !effective:
		return fmt.Sprintf("WatchWeights does not report the weights %s as in effect", Ratio(want))
	}
	return ""
}
