package memory

import (
	"cmp"
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// shareSum is what the shares of a pair's slots sum to, in parts per billion.
const shareSum = 1_000_000_000

// apply judges and carries out one operation. Its error is a status with the code and remedy of the refusal; the state
// is then as it was. The caller holds mu.
func (d *Dataplane) apply(operation *farev1.Operation) error {
	var changed bool
	var err error
	counter := &d.counters.Malformed
	switch op := operation.GetOp().(type) {
	case *farev1.Operation_SubPort:
		counter = &d.counters.SubPorts
		changed, err = d.setSubPort(op.SubPort)
	case *farev1.Operation_SetGroup:
		counter = &d.counters.GroupSets
		changed, err = d.setGroup(op.SetGroup)
	case *farev1.Operation_DeleteGroup:
		counter = &d.counters.GroupDeletes
		changed, err = d.deleteGroup(op.DeleteGroup)
	case *farev1.Operation_SetDestination:
		counter = &d.counters.DestinationSets
		changed, err = d.setDestination(op.SetDestination)
	case *farev1.Operation_DeleteDestination:
		counter = &d.counters.DestinationDeletes
		changed, err = d.deleteDestination(op.DeleteDestination)
	default:
		err = invalid("operation %d does nothing that this data plane knows; set one of its fields", operation.GetId())
	}
	*counter++
	switch {
	case err != nil:
		d.counters.Refused++
	case changed:
		d.counters.Changed++
	default:
		d.counters.Unchanged++
	}
	return err
}

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

func (d *Dataplane) setSubPort(state *farev1.SubPortState) (bool, error) {
	if _, ok := d.devices[state.GetDevice()]; !ok {
		return false, status.Errorf(codes.NotFound, "sub-port %q is not part of the forwarding that Hello brought; say Hello with it first", state.GetDevice())
	}
	if d.down[state.Device] == !state.Up {
		return false, nil
	}
	if state.Up {
		delete(d.down, state.Device)
	} else {
		d.down[state.Device] = true
	}
	return true, nil
}

func (d *Dataplane) setGroup(group *farev1.Group) (bool, error) {
	if err := d.judgeGroup(group); err != nil {
		return false, err
	}
	before, exists := d.groups[group.Id]
	if limit := d.config.Capabilities.MaxGroups; !exists && limit > 0 && len(d.groups) >= int(limit) {
		return false, status.Errorf(codes.ResourceExhausted, "group %d would be one more than the %d groups that fit; delete one first", group.Id, limit)
	}
	// The canonical order is that of Snapshot, whatever the order of the operation was.
	slices.SortFunc(group.Members, func(a, b *farev1.GroupMember) int {
		return cmp.Compare(d.devices[a.Device].index, d.devices[b.Device].index)
	})
	slices.SortFunc(group.Slots, func(a, b *farev1.GroupSlot) int { return cmp.Compare(a.Slot, b.Slot) })
	if exists && proto.Equal(before, group) {
		return false, nil
	}
	d.groups[group.Id] = group
	return true, nil
}

// judgeGroup checks a group against itself, Forwarding and the capabilities.
func (d *Dataplane) judgeGroup(group *farev1.Group) error {
	if group.GetId() == 0 {
		return invalid("group 0 means none; use 1 or higher")
	}
	limits := d.config.Capabilities
	var sum uint64
	members := make(map[string]bool, len(group.Members))
	for i, member := range group.Members {
		if err := d.judgePlace(member.Plane, member.Device); err != nil {
			return status.Errorf(status.Code(err), "group %d: members[%d]: %s", group.Id, i, status.Convert(err).Message())
		}
		switch {
		case member.Device == "":
			return invalid("group %d: members[%d]: no device; name the sub-port", group.Id, i)
		case members[member.Device]:
			return invalid("group %d: members[%d]: %s is a member twice; add the weights", group.Id, i, member.Device)
		case member.Weight == 0:
			return invalid("group %d: members[%d]: weight 0; leave the member out", group.Id, i)
		case limits.MaxWeight > 0 && member.Weight > limits.MaxWeight:
			return status.Errorf(codes.OutOfRange, "group %d: members[%d]: weight %d is above the limit of %d; reduce the weights", group.Id, i, member.Weight, limits.MaxWeight)
		}
		members[member.Device] = true
		sum += uint64(member.Weight)
	}
	if limits.MaxWeightSum > 0 && sum > uint64(limits.MaxWeightSum) {
		return status.Errorf(codes.OutOfRange, "group %d: the weights sum to %d, above the limit of %d; reduce the weights", group.Id, sum, limits.MaxWeightSum)
	}
	return d.judgeSlots(group)
}

func (d *Dataplane) judgeSlots(group *farev1.Group) error {
	if len(group.Slots) == 0 {
		return nil
	}
	var sum uint64
	numbers := make(map[uint32]bool, len(group.Slots))
	for i, slot := range group.Slots {
		if err := d.judgePlace(slot.Plane, slot.Device); err != nil {
			return status.Errorf(status.Code(err), "group %d: slots[%d]: %s", group.Id, i, status.Convert(err).Message())
		}
		if numbers[slot.Slot] {
			return invalid("group %d: slots[%d]: slot %d is there twice; number each once", group.Id, i, slot.Slot)
		}
		numbers[slot.Slot] = true
		sum += uint64(slot.SharePpb)
	}
	want := uint64(shareSum)
	if len(group.Members) == 0 {
		want = 0
	}
	if sum != want {
		return invalid("group %d: the shares of its %d slots sum to %d ppb; make them sum to %d", group.Id, len(group.Slots), sum, want)
	}
	return nil
}

// judgePlace checks that the plane exists and the device, unless empty, is one of its sub-ports.
func (d *Dataplane) judgePlace(plane, device string) error {
	if !d.planes[plane] {
		return status.Errorf(codes.NotFound, "plane %q is not part of the forwarding that Hello brought; say Hello with it first", plane)
	}
	if device == "" {
		return nil
	}
	switch at, ok := d.devices[device]; {
	case !ok:
		return status.Errorf(codes.NotFound, "sub-port %q is not part of the forwarding that Hello brought; say Hello with it first", device)
	case at.plane != plane:
		return status.Errorf(codes.NotFound, "sub-port %q belongs to plane %q, not %q; correct the plane", device, at.plane, plane)
	}
	return nil
}

func (d *Dataplane) deleteGroup(id uint32) (bool, error) {
	if id == 0 {
		return false, invalid("group 0 means none; use 1 or higher")
	}
	if users := d.users[id]; users > 0 {
		return false, status.Errorf(codes.FailedPrecondition, "group %d is used by %d destinations; move or delete them first", id, users)
	}
	_, exists := d.groups[id]
	delete(d.groups, id)
	return exists, nil
}

func (d *Dataplane) setDestination(target *farev1.Destination) (bool, error) {
	prefix, err := d.judgePrefix(target.GetPrefix())
	if err != nil {
		return false, err
	}
	if len(target.Pairs) > 0 && !d.config.Capabilities.FlowPins {
		return false, status.Errorf(codes.Unimplemented, "destination %s: flow pins are not supported; leave out pairs", prefix)
	}
	sources := make(map[netip.Prefix]bool, len(target.Pairs))
	for i, pair := range target.Pairs {
		source, err := hostPrefix(pair.Source)
		if err != nil {
			return false, invalid("destination %s: pairs[%d]: %v", prefix, i, err)
		}
		if sources[source] {
			return false, invalid("destination %s: pairs[%d]: source %s is there twice; list each once", prefix, i, source)
		}
		sources[source] = true
		for j, port := range pair.UdpSourcePorts {
			if port == 0 || port > 65535 {
				return false, invalid("destination %s: pairs[%d].udp_source_ports[%d]: %d is no UDP port; use 1 to 65535", prefix, i, j, port)
			}
		}
	}
	if _, ok := d.groups[target.Group]; !ok {
		return false, status.Errorf(codes.FailedPrecondition, "destination %s: group %d does not exist; set it first", prefix, target.Group)
	}
	before, exists := d.destinations[prefix]
	if limit := d.config.Capabilities.MaxDestinations; !exists && limit > 0 && len(d.destinations) >= int(limit) {
		return false, status.Errorf(codes.ResourceExhausted, "destination %s would be one more than the %d that fit; delete one first", prefix, limit)
	}
	if exists && before.group == target.Group && slices.EqualFunc(before.pairs, target.Pairs, func(a, b *farev1.PairPorts) bool { return proto.Equal(a, b) }) {
		return false, nil
	}
	if exists {
		d.users[before.group]--
	}
	d.users[target.Group]++
	d.destinations[prefix] = destination{group: target.Group, pairs: target.Pairs}
	return true, nil
}

func (d *Dataplane) deleteDestination(text string) (bool, error) {
	prefix, err := d.judgePrefix(text)
	if err != nil {
		return false, err
	}
	before, exists := d.destinations[prefix]
	if exists {
		d.users[before.group]--
		delete(d.destinations, prefix)
	}
	return exists, nil
}

// judgePrefix checks that a destination is a host prefix of a family that the data plane can do.
func (d *Dataplane) judgePrefix(text string) (netip.Prefix, error) {
	prefix, err := hostPrefix(text)
	if err != nil {
		return prefix, invalid("destination: %v", err)
	}
	if prefix.Addr().Is6() && !d.config.Capabilities.Ipv6 {
		return prefix, status.Errorf(codes.Unimplemented, "destination %s: IPv6 is not supported; leave it out", prefix)
	}
	return prefix, nil
}
