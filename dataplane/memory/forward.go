package memory

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// ErrNoRoute reports that the destination is not programmed.
var ErrNoRoute = errors.New("no such destination")

// ErrUnreachable reports that the destination's group has no member that is up; packets are dropped.
var ErrUnreachable = errors.New("unreachable")

// ErrNoSlot reports that the destination's group has no slot with that number.
var ErrNoSlot = errors.New("no such slot")

// Path is the egress of a packet.
type Path struct {
	Plane, Device string
	// Slot is the slot of the packet, or -1 if the packet was placed by its flow alone.
	Slot int
	// Diverted is true if the slot's sub-port is down or no longer a member, and another sub-port carries the packet.
	Diverted bool
}

// Member is a sub-port that carries traffic, and its weight.
type Member struct {
	Plane, Device string
	Weight        uint32
}

// Weights calls WeightsFrom for the first source group.
func (d *Dataplane) Weights(dst netip.Addr) ([]Member, error) {
	return d.WeightsFrom(netip.Addr{}, dst)
}

// WeightsFrom returns the members that are up in the group for packets from src to dst, in the order of Forwarding. If
// it is empty, packets are dropped.
func (d *Dataplane) WeightsFrom(src, dst netip.Addr) (live []Member, err error) {
	d.View(func(s *contract.State) {
		var t target
		if t, err = lookup(s, src, dst); err != nil {
			return
		}
		for _, member := range t.group.Members {
			if t.carries(member) {
				live = append(live, Member{Plane: member.Plane, Device: member.Device, Weight: member.Weight})
			}
		}
	})
	return live, err
}

// Forward returns the egress of a packet. flow is the hash of the packet: of any w consecutive flows, where w is the
// sum of the live weights, each sub-port gets exactly as many as its weight. On a data plane with flow pins, a flow
// that equals one of the pair's source ports, of UDP or TCP, follows its slot.
func (d *Dataplane) Forward(src, dst netip.Addr, flow uint32) (path Path, err error) {
	d.View(func(s *contract.State) {
		var t target
		if t, err = lookup(s, src, dst); err != nil {
			return
		}
		if slot, ok := t.pinned(src, flow); ok {
			path, err = t.slotPath(slot, flow)
		} else {
			path, err = t.hashed("", flow)
		}
	})
	return path, err
}

// SlotPath calls SlotPathFrom for the first source group.
func (d *Dataplane) SlotPath(dst netip.Addr, slot int) (Path, error) {
	return d.SlotPathFrom(netip.Addr{}, dst, slot)
}

// SlotPathFrom returns the egress of a packet of a slot from src: the slot's sub-port if it is up and a member,
// otherwise the other sub-ports by weight, like a group that fails over without the control plane.
func (d *Dataplane) SlotPathFrom(src, dst netip.Addr, slot int) (path Path, err error) {
	d.View(func(s *contract.State) {
		var t target
		if t, err = lookup(s, src, dst); err == nil {
			path, err = t.slotPath(slot, uint32(slot))
		}
	})
	return path, err
}

// target is a destination and its forwarding state.
type target struct {
	dst    netip.Addr
	state  *contract.State
	source *contract.SourceGroup
	group  *farev1.Vector
	pairs  []*farev1.PairPorts
}

func lookup(s *contract.State, src, dst netip.Addr) (target, error) {
	name := s.SourceOf(src)
	programmed, ok := s.Destination(contract.DestinationKey{Source: name, Prefix: netip.PrefixFrom(dst, dst.BitLen())})
	if !ok {
		return target{}, fmt.Errorf("%s: %w", dst, ErrNoRoute)
	}
	return target{dst, s, s.SourceGroup(name), s.Groups[programmed.Group], programmed.Pairs}, nil
}

// pinned returns the slot whose source port equals a flow.
func (t *target) pinned(src netip.Addr, flow uint32) (slot int, ok bool) {
	for _, pair := range t.pairs {
		if source, err := netip.ParsePrefix(pair.Source); err == nil && source.Addr() == src {
			slot = slices.Index(pair.SourcePorts, flow)
			return slot, slot >= 0
		}
	}
	return 0, false
}

// carries reports whether a member's sub-port serves the source group and is up.
func (t *target) carries(member *farev1.VectorMember) bool {
	return t.source.Serves(member.Device) && t.state.Up(member.Device) && t.state.Devices[member.Device].Plane == member.Plane
}

func (t *target) slotPath(number int, flow uint32) (Path, error) {
	for _, slot := range t.group.Slots {
		if int(slot.Slot) != number {
			continue
		}
		path, err := Path{}, ErrUnreachable
		if slot.Device == "" {
			path, err = t.hashed(slot.Plane, flow)
		} else {
			for _, member := range t.group.Members {
				if member.Device == slot.Device && t.carries(member) {
					path, err = Path{Plane: member.Plane, Device: member.Device}, nil
				}
			}
		}
		if errors.Is(err, ErrUnreachable) {
			path, err = t.hashed("", flow)
			path.Diverted = true
		}
		path.Slot = number
		return path, err
	}
	return Path{}, fmt.Errorf("%s: group %d: slot %d: %w", t.dst, t.group.Id, number, ErrNoSlot)
}

// hashed places a flow on the live members, only those of plane unless it is empty.
func (t *target) hashed(plane string, flow uint32) (Path, error) {
	eligible := func(member *farev1.VectorMember) bool {
		return (plane == "" || member.Plane == plane) && t.carries(member)
	}
	var sum uint64
	for _, member := range t.group.Members {
		if eligible(member) {
			sum += uint64(member.Weight)
		}
	}
	if sum == 0 {
		return Path{}, fmt.Errorf("%s: group %d: %w", t.dst, t.group.Id, ErrUnreachable)
	}
	bucket := uint64(flow) % sum
	for _, member := range t.group.Members {
		if !eligible(member) {
			continue
		}
		if bucket < uint64(member.Weight) {
			return Path{Plane: member.Plane, Device: member.Device, Slot: -1}, nil
		}
		bucket -= uint64(member.Weight)
	}
	return Path{}, fmt.Errorf("%s: group %d: %w", t.dst, t.group.Id, ErrUnreachable)
}
