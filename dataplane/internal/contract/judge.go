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

// shareSum is the required sum of the shares of a group's slots, in parts per billion.
const shareSum = 1_000_000_000

// outcome is the result of an operation.
type outcome struct {
	err     error // status with the code and remedy of the refusal; nil if the operation is in effect
	changed bool
	// deviation is the text of Approximator for the group that was set, "" if the weights are realized exactly.
	deviation string
}

// commit validates operations and commits them, in order. The caller holds mu.
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
		// The failed operation is unknown. Each operation is validated again and committed alone, so that operations
		// that depend on a failed one are refused because of it, and all others are committed.
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
			outcomes[i].deviation = s.deviation(operations[i], results[next])
			s.count(operations[i], results[next])
			next++
		}
	}
	return outcomes
}

// deviation queries the Forwarder for the deviation of the group that an operation set. The caller holds mu.
func (s *Server) deviation(operation *farev1.Operation, o outcome) string {
	a, ok := s.config.Forwarder.(Approximator)
	if id := operation.GetSetVector().GetId(); ok && o.err == nil && s.state.Groups[id] != nil {
		return a.Approximate(id)
	}
	return ""
}

// deviations returns the deviations of all groups with approximate weights. The caller holds mu.
func (s *Server) deviations() map[uint32]string {
	a, ok := s.config.Forwarder.(Approximator)
	if !ok {
		return nil
	}
	out := map[uint32]string{}
	for id := range s.state.Groups {
		if text := a.Approximate(id); text != "" {
			out[id] = text
		}
	}
	return out
}

// attempt validates operations one after the other and commits their changes. On an error the state is unchanged. The
// caller holds mu.
func (s *Server) attempt(operations []*farev1.Operation) ([]outcome, error) {
	results := make([]outcome, len(operations))
	s.changes = s.changes[:0]
	for i, operation := range operations {
		change, changed, err := s.judge(operation)
		results[i] = outcome{err: err, changed: changed && err == nil}
		if results[i].changed {
			s.state.do(change)
			s.changes = append(s.changes, change)
		}
	}
	if len(s.changes) == 0 {
		return results, nil
	}
	s.counters.Batches++
	err := s.config.Forwarder.Commit(s.changes)
	if err == nil {
		s.journal(s.changes)
		s.feed.note(s.changes)
		return results, nil
	}
	slices.Reverse(s.changes)
	for i := range s.changes {
		s.changes[i] = s.changes[i].Inverse()
		s.state.do(s.changes[i])
	}
	s.journal(s.changes) // in Restore the journal has the refused changes
	return results, err
}

func (s *Server) count(operation *farev1.Operation, o outcome) {
	counter := &s.counters.Malformed
	switch operation.GetOp().(type) {
	case *farev1.Operation_SubPort:
		counter = &s.counters.SubPorts
	case *farev1.Operation_SetVector:
		counter = &s.counters.GroupSets
	case *farev1.Operation_DeleteVector:
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

// judge returns the change that an operation makes to the current state, and whether there is one. Its error is a
// status with the code and remedy of the refusal.
func (s *Server) judge(operation *farev1.Operation) (Change, bool, error) {
	switch op := operation.GetOp().(type) {
	case *farev1.Operation_SubPort:
		return s.setSubPort(op.SubPort)
	case *farev1.Operation_SetVector:
		return s.setGroup(op.SetVector)
	case *farev1.Operation_DeleteVector:
		return s.deleteGroup(op.DeleteVector)
	case *farev1.Operation_SetDestination:
		return s.setDestination(op.SetDestination)
	case *farev1.Operation_DeleteDestination:
		return s.deleteDestination(op.DeleteDestination)
	}
	return Change{}, false, invalid("operation %d has no change that this data plane recognizes; set one of its fields", operation.GetId())
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
		return Change{}, false, status.Errorf(codes.NotFound, "sub-port %q is not part of the last Hello's forwarding; send a Hello with it first", device)
	}
	return Change{Kind: SubPortChange, Device: device, Up: state.Up}, s.state.down[device] == state.Up, nil
}

func (s *Server) setGroup(group *farev1.Vector) (Change, bool, error) {
	source, err := s.judgeGroup(group)
	if err != nil {
		return Change{}, false, err
	}
	before, exists := s.state.Groups[group.Id]
	if exists && before.Source != group.Source {
		return Change{}, false, status.Errorf(codes.FailedPrecondition, "group %d serves source %q, not %q; delete it first, or use another id", group.Id, before.Source, group.Source)
	}
	if limit := s.capabilities.MaxVectors; !exists && limit > 0 && len(s.state.Groups) >= int(limit) {
		return Change{}, false, status.Errorf(codes.ResourceExhausted, "group %d would exceed the limit of %d groups; delete one first", group.Id, limit)
	}
	// The canonical order is that of Snapshot, independent of the order in the operation.
	slices.SortStableFunc(group.Members, s.state.order)
	slices.SortFunc(group.Slots, func(a, b *farev1.VectorSlot) int { return cmp.Compare(a.Slot, b.Slot) })
	return Change{Kind: GroupChange, Group: group.Id, Source: source, Before: before, After: group}, !exists || !proto.Equal(before, group), nil
}

// judgeGroup validates a group against Forwarding and the capabilities, and sets the canonical name of its source
// group.
func (s *Server) judgeGroup(group *farev1.Vector) (netip.Prefix, error) {
	if group.GetId() == 0 {
		return netip.Prefix{}, invalid("group 0 is reserved; use 1 or higher")
	}
	source, err := s.judgeSource(group.Source)
	if err == nil {
		err = s.judgeMembers(group, source)
	}
	if err == nil {
		err = s.judgeSlots(group, source)
	}
	if err != nil {
		return source, status.Errorf(status.Code(err), "group %d: %s", group.Id, status.Convert(err).Message())
	}
	group.Source = sourceText(source)
	return source, nil
}

func (s *Server) judgeMembers(group *farev1.Vector, source netip.Prefix) error {
	limits := s.capabilities
	var sum uint64
	members := make(map[string]bool, len(group.Members))
	for i, member := range group.Members {
		if err := s.judgePlace(source, member.Plane, member.Device); err != nil {
			return status.Errorf(status.Code(err), "members[%d]: %s", i, status.Convert(err).Message())
		}
		switch {
		case member.Device == "":
			return invalid("members[%d]: the device is missing; set the sub-port's device", i)
		case members[member.Device]:
			return invalid("members[%d]: %s is a member twice; use one member with the sum of the weights", i, member.Device)
		case member.Weight == 0:
			return invalid("members[%d]: weight 0; omit the member", i)
		case limits.MaxWeight > 0 && member.Weight > limits.MaxWeight:
			return status.Errorf(codes.OutOfRange, "members[%d]: weight %d is above the limit of %d; reduce the weights", i, member.Weight, limits.MaxWeight)
		}
		members[member.Device] = true
		sum += uint64(member.Weight)
	}
	if limits.MaxWeightSum > 0 && sum > uint64(limits.MaxWeightSum) {
		return status.Errorf(codes.OutOfRange, "the weights sum to %d, above the limit of %d; reduce the weights", sum, limits.MaxWeightSum)
	}
	return nil
}

func (s *Server) judgeSlots(group *farev1.Vector, source netip.Prefix) error {
	if len(group.Slots) == 0 {
		return nil
	}
	var sum uint64
	numbers := make(map[uint32]bool, len(group.Slots))
	for i, slot := range group.Slots {
		if err := s.judgePlace(source, slot.Plane, slot.Device); err != nil {
			return status.Errorf(status.Code(err), "slots[%d]: %s", i, status.Convert(err).Message())
		}
		if numbers[slot.Slot] {
			return invalid("slots[%d]: slot %d is listed twice; use each number once", i, slot.Slot)
		}
		numbers[slot.Slot] = true
		sum += uint64(slot.SharePpb)
	}
	want := uint64(shareSum)
	if len(group.Members) == 0 {
		want = 0
	}
	if sum != want {
		return invalid("the shares of its %d slots sum to %d ppb; make them sum to %d", len(group.Slots), sum, want)
	}
	return nil
}

// judgePlace checks that the source group has the plane, and that the device, unless empty, is one of its sub-ports in
// that plane.
func (s *Server) judgePlace(source netip.Prefix, plane, device string) error {
	if s.restoring {
		return nil // a Hello may have removed the sub-port, but its groups stay
	}
	group := s.state.SourceGroup(source)
	at, ok := s.state.Devices[device]
	switch {
	case device != "" && !ok:
		return status.Errorf(codes.NotFound, "sub-port %q is not part of the last Hello's forwarding; send a Hello with it first", device)
	case device != "" && at.Plane != plane:
		return status.Errorf(codes.NotFound, "sub-port %q belongs to plane %q, not %q; correct the plane", device, at.Plane, plane)
	case device != "" && !group.Serves(device):
		return status.Errorf(codes.NotFound, "sub-port %q does not serve source %s; omit it, or send a Hello with it in that source group first", device, source)
	case device == "" && !group.planes[plane]:
		return status.Errorf(codes.NotFound, "plane %q with a sub-port of the source group is not part of the last Hello's forwarding; send a Hello with it first", plane)
	}
	return nil
}

func (s *Server) deleteGroup(id uint32) (Change, bool, error) {
	if id == 0 {
		return Change{}, false, invalid("group 0 is reserved; use 1 or higher")
	}
	if users := s.state.users[id]; users > 0 {
		return Change{}, false, status.Errorf(codes.FailedPrecondition, "group %d is used by %d destinations; move or delete them first", id, users)
	}
	before, exists := s.state.Groups[id]
	source, _ := parseSource(before.GetSource()) // canonical since it was set
	return Change{Kind: GroupChange, Group: id, Source: source, Before: before}, exists, nil
}

func (s *Server) setDestination(target *farev1.Destination) (Change, bool, error) {
	prefix, err := s.judgePrefix(target.GetPrefix())
	if err != nil {
		return Change{}, false, err
	}
	if s.config.Policy != nil {
		if err := s.config.Policy.Destination(prefix); err != nil {
			return Change{}, false, err
		}
	}
	if s.restoring && !s.capabilities.FlowPins {
		target.Pairs = nil // stored by a Forwarder that supports flow pins
	}
	source, err := s.judgeSource(target.Source)
	if err == nil {
		err = s.judgePairs(target.Pairs, source)
	}
	key := DestinationKey{source, prefix}
	if err == nil {
		err = s.judgeTarget(key, target.Vector)
	}
	if err != nil {
		return Change{}, false, status.Errorf(status.Code(err), "destination %s: %s", prefix, status.Convert(err).Message())
	}
	before, exists := s.state.Destination(key)
	if limit := s.capabilities.MaxDestinations; !exists && limit > 0 && s.state.Destinations.Len() >= int(limit) {
		return Change{}, false, status.Errorf(codes.ResourceExhausted, "destination %s would exceed the limit of %d destinations; delete one first", key, limit)
	}
	same := exists && before.Group == target.Vector && slices.EqualFunc(before.Pairs, target.Pairs, func(a, b *farev1.PairPorts) bool { return proto.Equal(a, b) })
	return Change{Kind: DestinationChange, Source: source, Prefix: prefix, From: before, To: Destination{Group: target.Vector, Pairs: target.Pairs}}, !same, nil
}

// judgePairs validates the flow pins of a destination of a source group.
func (s *Server) judgePairs(pairs []*farev1.PairPorts, source netip.Prefix) error {
	if len(pairs) > 0 && !s.capabilities.FlowPins {
		return status.Error(codes.Unimplemented, "flow pins are not supported; omit pairs")
	}
	seen := make(map[netip.Prefix]bool, len(pairs))
	for i, pair := range pairs {
		from, err := hostPrefix(pair.Source)
		if err != nil {
			return invalid("pairs[%d]: %v", i, err)
		}
		if seen[from] {
			return invalid("pairs[%d]: source %s is listed twice; list each once", i, from)
		}
		seen[from] = true
		if source.IsValid() && !s.restoring && !slices.Contains(s.state.SourceGroup(source).Loopbacks, from) {
			return status.Errorf(codes.NotFound, "pairs[%d]: %s is not a loopback of source group %s; list it with the destination of its own source group", i, from, source)
		}
		for j, port := range pair.SourcePorts {
			if port == 0 || port > 65535 {
				return invalid("pairs[%d].source_ports[%d]: %d is not a UDP port; use 1 to 65535", i, j, port)
			}
		}
	}
	return nil
}

// judgeTarget checks that the group of a destination exists and serves the same source group.
func (s *Server) judgeTarget(key DestinationKey, id uint32) error {
	group, ok := s.state.Groups[id]
	if !ok {
		return status.Errorf(codes.FailedPrecondition, "group %d does not exist; set it first", id)
	}
	if group.Source != sourceText(key.Source) {
		return status.Errorf(codes.FailedPrecondition, "group %d serves source %q, not %q; use a group of the same source", id, group.Source, sourceText(key.Source))
	}
	return nil
}

func (s *Server) deleteDestination(target *farev1.DestinationKey) (Change, bool, error) {
	prefix, err := s.judgePrefix(target.GetPrefix())
	if err != nil {
		return Change{}, false, err
	}
	source, err := parseSource(target.Source) // the source group may no longer be in Forwarding
	if err != nil {
		return Change{}, false, invalid("destination %s: source: %v", prefix, err)
	}
	before, exists := s.state.Destination(DestinationKey{source, prefix})
	return Change{Kind: DestinationChange, Source: source, Prefix: prefix, From: before}, exists, nil
}

// judgePrefix checks that a destination is a host prefix of a family that the data plane supports.
func (s *Server) judgePrefix(text string) (netip.Prefix, error) {
	prefix, err := hostPrefix(text)
	if err != nil {
		return prefix, invalid("destination: %v", err)
	}
	if prefix.Addr().Is6() && !s.capabilities.Ipv6 {
		if e, ok := s.config.Forwarder.(Explainer); ok && e.WithoutIPv6() != "" {
			return prefix, status.Errorf(codes.Unimplemented, "destination %s: no IPv6 on this host: %s", prefix, e.WithoutIPv6())
		}
		return prefix, status.Errorf(codes.Unimplemented, "destination %s: IPv6 is not supported; omit the destination", prefix)
	}
	return prefix, nil
}
