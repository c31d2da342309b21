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

func setGroup(group *farev1.Group) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetGroup{SetGroup: group}}
}

func deleteGroup(id uint32) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_DeleteGroup{DeleteGroup: id}}
}

func setDestination(prefix string, group uint32, pairs ...*farev1.PairPorts) *farev1.Operation {
	return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: prefix, Group: group, Pairs: pairs}}}
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

// group builds a group with these weights of the four sub-ports, and a slot on each member.
func (d *Driver) group(id uint32, weights ...uint32) *farev1.Group {
	g := &farev1.Group{Id: id}
	for at, weight := range weights {
		if weight > 0 {
			g.Members = append(g.Members, &farev1.GroupMember{Plane: d.plane(at), Device: d.device(at), Weight: weight})
		}
	}
	rest := uint32(1_000_000_000)
	for i, member := range g.Members {
		share := rest
		if i < len(g.Members)-1 {
			share = 1_000_000_000 / uint32(len(g.Members))
		}
		rest -= share
		g.Slots = append(g.Slots, &farev1.GroupSlot{Slot: uint32(i), Plane: member.Plane, Device: member.Device, SharePpb: share})
	}
	return g
}

// state builds the expected answer of Snapshot: all sub-ports up except those in down.
func (d *Driver) state(groups []*farev1.Group, destinations []*farev1.Destination, down ...string) *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{Groups: groups, Destinations: destinations}
	for _, plane := range d.options.Forwarding.Planes {
		for _, subPort := range plane.SubPorts {
			all.SubPorts = append(all.SubPorts, &farev1.SubPortState{Device: subPort.Device, Up: !slices.Contains(down, subPort.Device)})
		}
	}
	slices.SortFunc(all.SubPorts, func(a, b *farev1.SubPortState) int { return cmp.Compare(a.Device, b.Device) })
	return all
}

func to(prefix string, group uint32, pairs ...*farev1.PairPorts) *farev1.Destination {
	return &farev1.Destination{Prefix: prefix, Group: group, Pairs: pairs}
}
