package contract

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

// outcome is what became of an operation.
type outcome struct {
	err     error // a status with the code and remedy of the refusal; nil: in effect
	changed bool
}

// commit judges operations and has them carried out, in order. The caller holds mu.
func (s *Server) commit(operations []*farev1.Operation) []outcome {
	outcomes := make([]outcome, len(operations))
	try := make([]*farev1.Operation, 0, len(operations))
	for i, operation := range operations {
		if s.refuse.left > 0 {
			s.refuse.left--
			outcomes[i].err = status.Error(s.refuse.code, s.refuse.message)
			s.counters.Injected++
			continue
		}
		try = append(try, operation)
	}
	results, err := s.attempt(try)
	if err != nil {
		// Which of them failed is not known: each is judged again and committed alone, so that those that depend on a failed
		// one are refused for that, and all others are carried out.
		if len(try) > 1 {
			s.counters.Retried++
		}
		for i := range try {
			if len(try) > 1 {
				var alone []outcome
				alone, err = s.attempt(try[i : i+1])
				results[i] = alone[0]
			}
			if err != nil {
				results[i] = outcome{err: err}
			}
		}
	}
	next := 0
	for i := range outcomes {
		if outcomes[i].err == nil {
			outcomes[i] = results[next]
			s.count(operations[i], results[next])
			next++
		}
	}
	return outcomes
}

// attempt judges operations one after the other and commits what they change. On an error the state is as it was. The
// caller holds mu.
func (s *Server) attempt(operations []*farev1.Operation) ([]outcome, error) {
	results := make([]outcome, len(operations))
	s.changes = s.changes[:0]
	for i, operation := range operations {
		change, changed, err := s.judge(operation)
		results[i] = outcome{err, changed && err == nil}
		if results[i].changed {
			s.state.do(change)
			s.changes = append(s.changes, change)
		}
	}
	if len(s.changes) == 0 {
		return results, nil
	}
	s.journal(s.changes)
	s.counters.Batches++
	err := s.config.Forwarder.Commit(s.changes)
	if err == nil {
		return results, nil
	}
	slices.Reverse(s.changes)
	for i := range s.changes {
		s.changes[i] = s.changes[i].Inverse()
		s.state.do(s.changes[i])
	}
	s.journal(s.changes)
	return results, err
}

func (s *Server) count(operation *farev1.Operation, o outcome) {
	counter := &s.counters.Malformed
	switch operation.GetOp().(type) {
	case *farev1.Operation_SubPort:
		counter = &s.counters.SubPorts
	case *farev1.Operation_SetGroup:
		counter = &s.counters.GroupSets
	case *farev1.Operation_DeleteGroup:
		counter = &s.counters.GroupDeletes
	case *farev1.Operation_SetDestination:
		counter = &s.counters.DestinationSets
	case *farev1.Operation_DeleteDestination:
		counter = &s.counters.DestinationDeletes
	}
	*counter++
	switch {
	case o.err != nil:
		s.counters.Refused++
	case o.changed:
		s.counters.Changed++
	default:
		s.counters.Unchanged++
	}
}

// judge says what an operation would change in the present state. Its error is a status with the code and remedy of the
// refusal.
func (s *Server) judge(operation *farev1.Operation) (Change, bool, error) {
	switch op := operation.GetOp().(type) {
	case *farev1.Operation_SubPort:
		return s.setSubPort(op.SubPort)
	case *farev1.Operation_SetGroup:
		return s.setGroup(op.SetGroup)
	case *farev1.Operation_DeleteGroup:
		return s.deleteGroup(op.DeleteGroup)
	case *farev1.Operation_SetDestination:
		return s.setDestination(op.SetDestination)
	case *farev1.Operation_DeleteDestination:
		return s.deleteDestination(op.DeleteDestination)
	}
	return Change{}, false, invalid("operation %d does nothing that this data plane knows; set one of its fields", operation.GetId())
}

func (s *Server) journal(changes []Change) {
	if s.config.Journal == nil {
		return
	}
	ops := make([]*farev1.Operation, len(changes))
	for i, c := range changes {
		ops[i] = c.operation()
	}
	s.config.Journal.Operations(ops)
}

func invalid(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

func (s *Server) setSubPort(state *farev1.SubPortState) (Change, bool, error) {
	device := state.GetDevice()
	if _, ok := s.state.Devices[device]; !ok {
		return Change{}, false, status.Errorf(codes.NotFound, "sub-port %q is not part of the forwarding that Hello brought; say Hello with it first", device)
	}
	return Change{Kind: SubPortChange, Device: device, Up: state.Up}, s.state.down[device] == state.Up, nil
}

func (s *Server) setGroup(group *farev1.Group) (Change, bool, error) {
	if err := s.judgeGroup(group); err != nil {
		return Change{}, false, err
	}
	before, exists := s.state.Groups[group.Id]
	if limit := s.capabilities.MaxGroups; !exists && limit > 0 && len(s.state.Groups) >= int(limit) {
		return Change{}, false, status.Errorf(codes.ResourceExhausted, "group %d would be one more than the %d groups that fit; delete one first", group.Id, limit)
	}
	// The canonical order is that of Snapshot, whatever the order of the operation was.
	slices.SortStableFunc(group.Members, s.state.order)
	slices.SortFunc(group.Slots, func(a, b *farev1.GroupSlot) int { return cmp.Compare(a.Slot, b.Slot) })
	return Change{Kind: GroupChange, Group: group.Id, Before: before, After: group}, !exists || !proto.Equal(before, group), nil
}

// judgeGroup checks a group against itself, Forwarding and the capabilities.
func (s *Server) judgeGroup(group *farev1.Group) error {
	if group.GetId() == 0 {
		return invalid("group 0 means none; use 1 or higher")
	}
	limits := s.capabilities
	var sum uint64
	members := make(map[string]bool, len(group.Members))
	for i, member := range group.Members {
		if err := s.judgePlace(member.Plane, member.Device); err != nil {
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
	return s.judgeSlots(group)
}

func (s *Server) judgeSlots(group *farev1.Group) error {
	if len(group.Slots) == 0 {
		return nil
	}
	var sum uint64
	numbers := make(map[uint32]bool, len(group.Slots))
	for i, slot := range group.Slots {
		if err := s.judgePlace(slot.Plane, slot.Device); err != nil {
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
func (s *Server) judgePlace(plane, device string) error {
	if s.restoring {
		return nil // a Hello may have taken the sub-port away, and its groups stay
	}
	if !s.state.planes[plane] {
		return status.Errorf(codes.NotFound, "plane %q is not part of the forwarding that Hello brought; say Hello with it first", plane)
	}
	if device == "" {
		return nil
	}
	switch at, ok := s.state.Devices[device]; {
	case !ok:
		return status.Errorf(codes.NotFound, "sub-port %q is not part of the forwarding that Hello brought; say Hello with it first", device)
	case at.Plane != plane:
		return status.Errorf(codes.NotFound, "sub-port %q belongs to plane %q, not %q; correct the plane", device, at.Plane, plane)
	}
	return nil
}

func (s *Server) deleteGroup(id uint32) (Change, bool, error) {
	if id == 0 {
		return Change{}, false, invalid("group 0 means none; use 1 or higher")
	}
	if users := s.state.users[id]; users > 0 {
		return Change{}, false, status.Errorf(codes.FailedPrecondition, "group %d is used by %d destinations; move or delete them first", id, users)
	}
	before, exists := s.state.Groups[id]
	return Change{Kind: GroupChange, Group: id, Before: before}, exists, nil
}

func (s *Server) setDestination(target *farev1.Destination) (Change, bool, error) {
	prefix, err := s.judgePrefix(target.GetPrefix())
	if err != nil {
		return Change{}, false, err
	}
	if s.restoring && !s.capabilities.FlowPins {
		target.Pairs = nil // another Forwarder kept them
	}
	if len(target.Pairs) > 0 && !s.capabilities.FlowPins {
		return Change{}, false, status.Errorf(codes.Unimplemented, "destination %s: flow pins are not supported; leave out pairs", prefix)
	}
	sources := make(map[netip.Prefix]bool, len(target.Pairs))
	for i, pair := range target.Pairs {
		source, err := hostPrefix(pair.Source)
		if err != nil {
			return Change{}, false, invalid("destination %s: pairs[%d]: %v", prefix, i, err)
		}
		if sources[source] {
			return Change{}, false, invalid("destination %s: pairs[%d]: source %s is there twice; list each once", prefix, i, source)
		}
		sources[source] = true
		for j, port := range pair.UdpSourcePorts {
			if port == 0 || port > 65535 {
				return Change{}, false, invalid("destination %s: pairs[%d].udp_source_ports[%d]: %d is no UDP port; use 1 to 65535", prefix, i, j, port)
			}
		}
	}
	if _, ok := s.state.Groups[target.Group]; !ok {
		return Change{}, false, status.Errorf(codes.FailedPrecondition, "destination %s: group %d does not exist; set it first", prefix, target.Group)
	}
	before, exists := s.state.Destinations[prefix]
	if limit := s.capabilities.MaxDestinations; !exists && limit > 0 && len(s.state.Destinations) >= int(limit) {
		return Change{}, false, status.Errorf(codes.ResourceExhausted, "destination %s would be one more than the %d that fit; delete one first", prefix, limit)
	}
	same := exists && before.Group == target.Group && slices.EqualFunc(before.Pairs, target.Pairs, func(a, b *farev1.PairPorts) bool { return proto.Equal(a, b) })
	return Change{Kind: DestinationChange, Prefix: prefix, From: before, To: Destination{Group: target.Group, Pairs: target.Pairs}}, !same, nil
}

func (s *Server) deleteDestination(text string) (Change, bool, error) {
	prefix, err := s.judgePrefix(text)
	if err != nil {
		return Change{}, false, err
	}
	before, exists := s.state.Destinations[prefix]
	return Change{Kind: DestinationChange, Prefix: prefix, From: before}, exists, nil
}

// judgePrefix checks that a destination is a host prefix of a family that the data plane can do.
func (s *Server) judgePrefix(text string) (netip.Prefix, error) {
	prefix, err := hostPrefix(text)
	if err != nil {
		return prefix, invalid("destination: %v", err)
	}
	if prefix.Addr().Is6() && !s.capabilities.Ipv6 {
		return prefix, status.Errorf(codes.Unimplemented, "destination %s: IPv6 is not supported; leave it out", prefix)
	}
	return prefix, nil
}
