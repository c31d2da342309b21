package memory

import (
	"errors"
	"fmt"
	"net/netip"

	farev1 "github.com/fared/fared/api/fare/v1"
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
func (d *Dataplane) Weights(dst netip.Addr) ([]Member, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	group, _, err := d.lookup(dst)
	if err != nil {
		return nil, err
	}
	var live []Member
	for _, member := range group.Members {
		if d.carries(member) {
			live = append(live, Member{Plane: member.Plane, Device: member.Device, Weight: member.Weight})
		}
	}
	return live, nil
}

// Forward returns where a packet of a flow leaves. flow is what the packet's hash came to: over as many consecutive
// flows as the live weights sum to, each sub-port is picked exactly as often as its weight says. On a data plane with
// flow pins, a flow that is one of the pair's UDP source ports follows its slot.
func (d *Dataplane) Forward(src, dst netip.Addr, flow uint32) (Path, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	group, programmed, err := d.lookup(dst)
	if err != nil {
		return Path{}, err
	}
	for _, pair := range programmed.pairs {
		if source, err := netip.ParsePrefix(pair.Source); err != nil || source.Addr() != src {
			continue
		}
		for slot, port := range pair.UdpSourcePorts {
			if port == flow {
				return d.slotPath(group, dst, slot, flow)
			}
		}
	}
	return d.hashed(group, dst, "", flow)
}

// SlotPath returns where a packet of a slot leaves: over the slot's own sub-port while that is up and a member, else
// over the others by weight, as a group that fails over without the control plane does.
func (d *Dataplane) SlotPath(dst netip.Addr, slot int) (Path, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	group, _, err := d.lookup(dst)
	if err != nil {
		return Path{}, err
	}
	return d.slotPath(group, dst, slot, uint32(slot))
}

// lookup finds the group of a destination. The caller holds mu.
func (d *Dataplane) lookup(dst netip.Addr) (*farev1.Group, destination, error) {
	programmed, ok := d.destinations[netip.PrefixFrom(dst, dst.BitLen())]
	if !ok {
		return nil, programmed, fmt.Errorf("%s: %w", dst, ErrNoRoute)
	}
	return d.groups[programmed.group], programmed, nil
}

// carries says whether a member's sub-port is part of Forwarding and up. The caller holds mu.
func (d *Dataplane) carries(member *farev1.GroupMember) bool {
	at, ok := d.devices[member.Device]
	return ok && at.plane == member.Plane && !d.down[member.Device]
}

func (d *Dataplane) slotPath(group *farev1.Group, dst netip.Addr, number int, flow uint32) (Path, error) {
	for _, slot := range group.Slots {
		if int(slot.Slot) != number {
			continue
		}
		path, err := Path{}, ErrUnreachable
		if slot.Device == "" {
			path, err = d.hashed(group, dst, slot.Plane, flow)
		} else {
			for _, member := range group.Members {
				if member.Device == slot.Device && d.carries(member) {
					path, err = Path{Plane: member.Plane, Device: member.Device}, nil
				}
			}
		}
		if errors.Is(err, ErrUnreachable) {
			path, err = d.hashed(group, dst, "", flow)
			path.Diverted = true
		}
		path.Slot = number
		return path, err
	}
	return Path{}, fmt.Errorf("%s: group %d: slot %d: %w", dst, group.Id, number, ErrNoSlot)
}

// hashed places a flow over the live members, of one plane unless plane is empty. The caller holds mu.
func (d *Dataplane) hashed(group *farev1.Group, dst netip.Addr, plane string, flow uint32) (Path, error) {
	eligible := func(member *farev1.GroupMember) bool {
		return (plane == "" || member.Plane == plane) && d.carries(member)
	}
	var sum uint64
	for _, member := range group.Members {
		if eligible(member) {
			sum += uint64(member.Weight)
		}
	}
	if sum == 0 {
		return Path{}, fmt.Errorf("%s: group %d: %w", dst, group.Id, ErrUnreachable)
	}
	bucket := uint64(flow) % sum
	for _, member := range group.Members {
		if !eligible(member) {
			continue
		}
		if bucket < uint64(member.Weight) {
			return Path{Plane: member.Plane, Device: member.Device, Slot: -1}, nil
		}
		bucket -= uint64(member.Weight)
	}
	return Path{}, fmt.Errorf("%s: group %d: %w", dst, group.Id, ErrUnreachable)
}
