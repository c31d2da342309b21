package dptest

import (
	"cmp"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
)

func subPortOp(device string, up bool) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SubPort{SubPort: &farev1.SubPortState{Device: device, Up: up}}}
}

func setVector(vector *farev1.Vector) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: vector}}
}

func deleteVector(id uint32) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_DeleteVector{DeleteVector: id}}
}

func setDestination(prefix string, vector uint32, pairs ...*farev1.PairPorts) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: prefix, Vector: vector, Pairs: pairs}}}
}

func deleteDestination(prefix string) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_DeleteDestination{DeleteDestination: &farev1.DestinationKey{Prefix: prefix}}}
}

// target returns the n-th IPv4 destination.
func target(n int) string {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(128 + n>>16), byte(n >> 8), byte(n)}), 32).String()
}

// target6 returns the n-th IPv6 destination.
func target6(n int) string {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 15: byte(n), 14: byte(n >> 8)}), 128).String()
}

// plane and device name the sub-ports of the first two planes: 0 and 1 in plane 0, 2 and 3 in plane 1.
func (d *Driver) plane(at int) string { return d.options.Forwarding.Planes[at/2].Plane }

func (d *Driver) device(at int) string {
	return d.options.Forwarding.Planes[at/2].SubPorts[at%2].Device
}

// vector builds a vector with these weights of the four sub-ports, and a slot on each member.
func (d *Driver) vector(id uint32, weights ...uint32) *farev1.Vector {
	g := &farev1.Vector{Id: id}
	for at, weight := range weights {
		if weight > 0 {
			g.Members = append(g.Members, &farev1.VectorMember{Plane: d.plane(at), Device: d.device(at), Weight: weight})
		}
	}
	rest := uint32(1_000_000_000)
	for i, member := range g.Members {
		share := rest
		if i < len(g.Members)-1 {
			share = 1_000_000_000 / uint32(len(g.Members))
		}
		rest -= share
		g.Slots = append(g.Slots, &farev1.VectorSlot{Slot: uint32(i), Plane: member.Plane, Device: member.Device, SharePpb: share})
	}
	return g
}

// state builds the expected answer of Snapshot: all sub-ports up except those in down.
func (d *Driver) state(vectors []*farev1.Vector, destinations []*farev1.Destination, down ...string) *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{Vectors: vectors, Destinations: destinations}
	for _, plane := range d.options.Forwarding.Planes {
		for _, subPort := range plane.SubPorts {
			all.SubPorts = append(all.SubPorts, &farev1.SubPortState{Device: subPort.Device, Up: !slices.Contains(down, subPort.Device)})
		}
	}
	slices.SortFunc(all.SubPorts, func(a, b *farev1.SubPortState) int { return cmp.Compare(a.Device, b.Device) })
	return all
}

func to(prefix string, vector uint32, pairs ...*farev1.PairPorts) *farev1.Destination {
	return &farev1.Destination{Prefix: prefix, Vector: vector, Pairs: pairs}
}
