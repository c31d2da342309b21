package memory

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
)

// ErrNoRoute: the destination was never programmed.
var ErrNoRoute = errors.New("no such destination")

// ErrUnreachable: the destination's group has no member that is up; packets are dropped.
var ErrUnreachable = errors.New("unreachable")

// ErrNoSlot: the destination's group has no slot of that number.
var ErrNoSlot = errors.New("no such slot")

// Path is where a packet leaves.
type Path struct {
	Plane, Device string
	// Slot is the slot that the packet belongs to, -1 when it was placed by its flow alone.
	Slot int
	// Diverted: the slot's own sub-port is down (or no member any more), another one carries the packet.
	Diverted bool
}

// Member is a sub-port that carries traffic, and its weight.
type Member struct {
	Plane, Device string
	Weight        uint32
}

// Weights returns the members of dst's group that are up, in the order of Forwarding: what its traffic obeys now.
// Empty means that packets are dropped.
func (d *Dataplane) Weights(dst netip.Addr) (live []Member, err error) {
	d.View(func(s *contract.State) {
		var t target
		if t, err = lookup(s, dst); err != nil {
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

// Forward returns where a packet of a flow leaves. flow is what the packet's hash came to: over as many consecutive
// flows as the live weights sum to, each sub-port is picked exactly as often as its weight says. On a data plane with
// flow pins, a flow that is one of the pair's source ports, of UDP or TCP, follows its slot.
func (d *Dataplane) Forward(src, dst netip.Addr, flow uint32) (path Path, err error) {
	d.View(func(s *contract.State) {
		var t target
		if t, err = lookup(s, dst); err != nil {
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

// SlotPath returns where a packet of a slot leaves: over the slot's own sub-port while that is up and a member, else
// over the others by weight, as a group that fails over without the control plane does.
func (d *Dataplane) SlotPath(dst netip.Addr, slot int) (path Path, err error) {
	d.View(func(s *contract.State) {
		var t target
		if t, err = lookup(s, dst); err == nil {
			path, err = t.slotPath(slot, uint32(slot))
		}
	})
	return path, err
}

// target is a destination and what it is forwarded by.
type target struct {
	dst   netip.Addr
	state *contract.State
	group *farev1.Group
	pairs []*farev1.PairPorts
}

func lookup(s *contract.State, dst netip.Addr) (target, error) {
	programmed, ok := s.Destinations[netip.PrefixFrom(dst, dst.BitLen())]
	if !ok {
		return target{}, fmt.Errorf("%s: %w", dst, ErrNoRoute)
	}
	return target{dst, s, s.Groups[programmed.Group], programmed.Pairs}, nil
}

// pinned finds the slot whose source port a flow is.
func (t *target) pinned(src netip.Addr, flow uint32) (slot int, ok bool) {
	for _, pair := range t.pairs {
		if source, err := netip.ParsePrefix(pair.Source); err == nil && source.Addr() == src {
			slot = slices.Index(pair.UdpSourcePorts, flow)
			return slot, slot >= 0
		}
	}
	return 0, false
}

// carries says whether a member's sub-port is part of Forwarding and up.
func (t *target) carries(member *farev1.GroupMember) bool {
	return t.state.Up(member.Device) && t.state.Devices[member.Device].Plane == member.Plane
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

// hashed places a flow over the live members, of one plane unless plane is empty.
func (t *target) hashed(plane string, flow uint32) (Path, error) {
	eligible := func(member *farev1.GroupMember) bool {
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
