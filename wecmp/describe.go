package wecmp

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// String renders a vector: a line per plane with its weight, its part of the traffic, and its sub-ports with their
// weights and slots. A slot is number:parts, with p for parked and ! for drain.
//
//	vector 1 of group 1: exact
//	  p0  2  285714286  p0.0=1 p0.1=1  0@p0.0:142857143 4@p0.1:142857143
func (v VectorView) String() string {
	if v.cfg == nil {
		return "no vector\n"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "vector %d of group %d:", v.ID, v.Group)
	switch {
	case !v.Reachable:
		fmt.Fprintf(&b, " unreachable, %s\n", v.Reason)
	case v.Exact:
		b.WriteString(" exact\n")
	default:
		b.WriteString(" fitted\n")
	}
	width := 0
	for _, p := range v.cfg.Planes {
		width = max(width, len(p.Name))
	}
	for p := range v.cfg.Planes {
		plane := &v.cfg.Planes[p]
		var share uint64
		var slots strings.Builder
		for i, s := range v.Slots {
			if s.Plane != p {
				continue
			}
			share += uint64(s.SharePPB)
			at := plane.Name
			if s.SubPort >= 0 {
				at = plane.SubPorts[s.SubPort].Name
			}
			fmt.Fprintf(&slots, " %d@%s:%d", i, at, s.SharePPB)
			if s.Parked {
				slots.WriteByte('p')
			}
			if s.Drain {
				slots.WriteByte('!')
			}
		}
		fmt.Fprintf(&b, "  %-*s  %d  %d ", width, plane.Name, v.Weights[p], share)
		for s, sp := range plane.SubPorts {
			fmt.Fprintf(&b, " %s=%d", sp.Name, v.SubPortWeights[p][s])
		}
		if slots.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(slots.String() + "\n")
	}
	return b.String()
}

// String renders an update: "destination-set 10.255.0.2/32 vector 3 moved 2 drain [1 5]".
func (u Update) String() string {
	var b strings.Builder
	b.WriteString(u.Kind.String())
	if u.Kind == DestinationSet || u.Kind == DestinationDelete {
		fmt.Fprintf(&b, " %s", u.Destination)
	}
	if u.Kind != DestinationDelete {
		fmt.Fprintf(&b, " vector %d", u.Vector)
	}
	if u.Kind == VectorSet || u.Kind == DestinationSet {
		fmt.Fprintf(&b, " moved %d", u.SlotsMoved)
	}
	if u.Drain != nil {
		fmt.Fprintf(&b, " drain %v", u.Drain)
	}
	return b.String()
}

// String renders the whole state: every vector by id, every destination by address.
func (e *Engine) String() string {
	var b strings.Builder
	for id := range e.vectors {
		if v, ok := e.Vector(uint32(id)); ok {
			b.WriteString(v.String())
		}
	}
	for _, dst := range slices.SortedFunc(maps.Keys(e.index), func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits())
	}) {
		if id, ok := e.Destination(dst); ok {
			fmt.Fprintf(&b, "%s: vector %d\n", dst, id)
		}
	}
	return b.String()
}
