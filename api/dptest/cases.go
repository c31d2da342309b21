package dptest

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Tests lists the cases in the order in which they run.
func Tests() []Test {
	room := []Capability{SomeVectors, SomeWeights}
	with := func(more ...Capability) []Capability { return append(room[:2:2], more...) }
	return []Test{
		{"hello-is-idempotent", "DataplaneService.Hello", room, helloIsIdempotent},
		{"hello-refuses-nonsense", "DataplaneService.Hello", nil, helloRefusesNonsense},
		{"hello-takes-any-ports", "Forwarding.udp_ports, Forwarding.tcp_ports, Forwarding.direct_probe_port", nil, helloTakesAnyPorts},
		{"hello-per-packet", "Mode, Capabilities.per_packet", []Capability{PerPacket}, helloPerPacket},
		{"hello-no-per-packet", "Mode, Capabilities.per_packet", []Capability{NoPerPacket}, helloNoPerPacket},
		{"acknowledgements", "DataplaneService.Program, Ack", room, acknowledgements},
		{"ids-must-grow", "Operation.id", room, idsMustGrow},
		{"ids-may-skip", "Operation.id", room, idsMaySkip},
		{"operations-in-one-request", "ProgramRequest", with(Gathering), operationsInOneRequest},
		{"announced-request-may-not-follow", "ProgramRequest.more", room, announcedRequestMayNotFollow},
		{"snapshot-is-what-was-programmed", "DataplaneService.Snapshot", room, snapshotIsWhatWasProgrammed},
		{"snapshot-is-canonical", "DataplaneService.Snapshot", room, snapshotIsCanonical},
		{"idempotent", "Operation", room, idempotent},
		{"any-order-ends-equal", "Operation", room, anyOrderEndsEqual},
		{"add-before-remove", "Destination.vector", room, addBeforeRemove},
		{"delete-absent", "Operation", room, deleteAbsent},
		{"vector-in-use", "Operation.delete_vector", room, vectorInUse},
		{"vector-in-place", "Operation.set_vector", room, vectorInPlace},
		{"unreachable-vector", "Vector.members", room, unreachableVector},
		{"sub-port-fast-path", "Operation.sub_port", room, subPortFastPath},
		{"stream-replaced", "DataplaneService.Program", room, streamReplaced},
		{"state-survives-stream", "DataplaneService.Program", room, stateSurvivesStream},
		{"malformed", "Operation", room, malformed},
		{"unknown-names", "Operation", room, unknownNames},
		{"unknown-vector", "Destination.vector", room, unknownVector},
		{"limit-weight", "Capabilities.max_weight", []Capability{SomeVectors, LimitedWeight}, limitWeight},
		{"limit-weight-sum", "Capabilities.max_weight_sum", []Capability{SomeVectors, LimitedSum}, limitWeightSum},
		{"limit-vectors", "Capabilities.max_vectors", []Capability{LimitedVectors}, limitVectors},
		{"limit-destinations", "Capabilities.max_destinations", []Capability{LimitedTargets}, limitDestinations},
		{"ipv6", "Capabilities.ipv6", with(IPv6), ipv6},
		{"no-ipv6", "Capabilities.ipv6", with(NoIPv6), noIPv6},
		{"per-packet-slots", "VectorSlot.device", with(PerPacket), perPacketSlots},
		{"flow-pins", "Capabilities.flow_pins", with(FlowPins), flowPins},
		{"no-flow-pins", "Capabilities.flow_pins", with(NoFlowPins), noFlowPins},
		{"hello-refuses-source-groups", "Forwarding.source_groups", nil, helloRefusesSourceGroups},
		{"source-groups-are-keys", "Destination.source, DestinationKey", room, sourceGroupsAreKeys},
		{"source-groups-refuse", "Vector.source, Destination.source", room, sourceGroupsRefuse},
		{"source-groups-may-go", "DataplaneService.Hello, SourceGroup", room, sourceGroupsMayGo},
		{"landing", "DataplaneService.Landing, LandingRequest.protocol", with(FlowHash), landing},
		{"large-batch", "Operation", room, largeBatch},
	}
}

func helloIsIdempotent(d *Driver) error {
	if err := d.succeed(setVector(d.vector(1, 1, 2)), setDestination(target(1), 1), subPortOp(d.device(1), false)); err != nil {
		return err
	}
	want := d.state([]*farev1.Vector{d.vector(1, 1, 2)}, []*farev1.Destination{to(target(1), 1)}, d.device(1))
	first, err := d.hello(d.options.Forwarding)
	if err != nil {
		return err
	}
	second, err := d.hello(d.options.Forwarding)
	if err != nil {
		return err
	}
	if !proto.Equal(first, second) {
		return fmt.Errorf("the same Hello was answered {%v}, then {%v}", first, second)
	}
	if err := d.holds(want); err != nil {
		return fmt.Errorf("after Hello: %w", err)
	}
	// The stream continues.
	return d.succeed(deleteDestination(target(1)))
}

func (d *Driver) helloEnds(code codes.Code, why string, change func(*farev1.Forwarding)) error {
	forwarding := proto.CloneOf(d.options.Forwarding)
	change(forwarding)
	if _, err := d.hello(forwarding); codeOf(err) != code {
		return fmt.Errorf("Hello with %s was answered %v, want %v", why, err, code)
	}
	return nil
}

func helloRefusesNonsense(d *Driver) error {
	for _, c := range []struct {
		why    string
		change func(*farev1.Forwarding)
	}{
		{"no planes", func(f *farev1.Forwarding) { f.Planes = nil }},
		{"no mode", func(f *farev1.Forwarding) { f.Mode = farev1.Mode_MODE_UNSPECIFIED }},
		{"a plane without a name", func(f *farev1.Forwarding) { f.Planes[0].Plane = "" }},
		{"a plane twice", func(f *farev1.Forwarding) { f.Planes[1].Plane = f.Planes[0].Plane }},
		{"a device twice", func(f *farev1.Forwarding) { f.Planes[1].SubPorts[0].Device = f.Planes[0].SubPorts[0].Device }},
		{"a device without a name", func(f *farev1.Forwarding) { f.Planes[1].SubPorts[0].Device = "" }},
		{"a next hop that is not an address", func(f *farev1.Forwarding) { f.Planes[0].SubPorts[0].NextHopV4 = "leaf" }},
		{"a loopback that is not a host prefix", func(f *farev1.Forwarding) { f.Loopbacks = []string{"10.255.0.0/24"} }},
		{"UDP port 0", func(f *farev1.Forwarding) { f.UdpPorts = []uint32{0} }},
		{"UDP port 65536", func(f *farev1.Forwarding) { f.UdpPorts = []uint32{65536} }},
		{"TCP port 0", func(f *farev1.Forwarding) { f.TcpPorts = []uint32{4793, 0} }},
		{"TCP port 65536", func(f *farev1.Forwarding) { f.TcpPorts = []uint32{65536} }},
	} {
		if err := d.helloEnds(codes.InvalidArgument, c.why, c.change); err != nil {
			return err
		}
	}
	if !d.capabilities.GetDirectProbePort() {
		return nil
	}
	return d.helloEnds(codes.InvalidArgument, "probe port 65536", func(f *farev1.Forwarding) { f.DirectProbePort = 65536 })
}

// helloTakesAnyPorts checks that Hello accepts UDP ports, TCP ports, both, the same of both, or none, and a probe port,
// which data planes without the capability ignore.
func helloTakesAnyPorts(d *Driver) error {
	for _, c := range []struct {
		why      string
		udp, tcp []uint32
		probes   uint32
	}{
		{"TCP ports alone", nil, []uint32{4793, 65534}, 0}, {"a port of UDP and TCP", []uint32{4791, 4793}, []uint32{4793}, 0},
		{"UDP ports alone", []uint32{4791, 1}, nil, 0}, {"no ports", nil, nil, 0},
		{"a probe port", []uint32{4791, 4796}, nil, 4796}, {"a probe port alone", nil, nil, 65535},
	} {
		if err := d.helloEnds(codes.OK, c.why, func(f *farev1.Forwarding) { f.UdpPorts, f.TcpPorts, f.DirectProbePort = c.udp, c.tcp, c.probes }); err != nil {
			return err
		}
	}
	return nil
}

func helloPerPacket(d *Driver) error {
	return d.helloEnds(codes.OK, "mode per-packet", func(f *farev1.Forwarding) { f.Mode = farev1.Mode_MODE_PER_PACKET })
}

func helloNoPerPacket(d *Driver) error {
	return d.helloEnds(codes.Unimplemented, "mode per-packet", func(f *farev1.Forwarding) { f.Mode = farev1.Mode_MODE_PER_PACKET })
}

// acknowledgements sends valid and refused operations, mixed and without waiting; the stream checks the
// acknowledgements.
func acknowledgements(d *Driver) error {
	var ops []*farev1.Operation
	for n := range 64 {
		ops = append(ops, setVector(d.vector(uint32(1+n%8), 1, uint32(1+n%3))), setDestination(target(n), uint32(1+n%8)))
		if n%4 == 0 {
			ops = append(ops, setVector(&farev1.Vector{Id: 0}))
		}
	}
	acks, err := d.stream.run(ops...)
	if err != nil {
		return err
	}
	for i, ack := range acks {
		refused := ops[i].GetSetVector() != nil && ops[i].GetSetVector().Id == 0
		if refused != (ack.Level == farev1.AckLevel_ACK_LEVEL_REFUSED) {
			return fmt.Errorf("%v was answered %v %s", ops[i], ack.Level, ack.Message)
		}
	}
	return nil
}

func idsMustGrow(d *Driver) error {
	for _, id := range []uint64{1, 0} {
		if err := d.open(); err != nil {
			return err
		}
		if err := d.succeed(setVector(d.vector(1, 1))); err != nil {
			return err
		}
		op := setVector(d.vector(2, 1))
		op.Id = id
		if err := d.stream.Send(&farev1.ProgramRequest{Operation: op}); err != nil {
			return err
		}
		if err := d.stream.ends(codes.InvalidArgument); err != nil {
			return fmt.Errorf("id %d after 1: %w", id, err)
		}
	}
	return d.holds(d.state([]*farev1.Vector{d.vector(1, 1)}, nil))
}

func idsMaySkip(d *Driver) error {
	for _, skip := range []uint64{5, 1 << 40} {
		d.stream.next += skip
		if err := d.succeed(setVector(d.vector(uint32(1+skip%7), 1))); err != nil {
			return err
		}
	}
	return nil
}

// operationsInOneRequest checks that operations of one request are judged one by one, in order, operation before
// operations.
func operationsInOneRequest(d *Driver) error {
	number := func(ops ...*farev1.Operation) []*farev1.Operation {
		for _, op := range ops {
			d.stream.number(op)
		}
		return ops
	}
	vector, refused, target1 := setVector(d.vector(1, 1, 2)), setDestination(target(2), 9), setDestination(target(1), 1)
	last := subPortOp(d.device(1), false)
	ops := number(vector, refused, target1, last)
	for _, request := range []*farev1.ProgramRequest{{Operation: ops[0], Operations: ops[1:3]}, {Operations: ops[3:]}} {
		if err := d.stream.Send(request); err != nil {
			return err
		}
	}
	for _, op := range ops {
		if err := d.stream.await(op.Id); err != nil {
			return err
		}
		if ack := d.stream.final[op.Id]; (ack.Level == farev1.AckLevel_ACK_LEVEL_REFUSED) != (op == refused) {
			return fmt.Errorf("operation %d of one request was acknowledged {%v}, only operation %d must be refused", op.Id, ack, refused.Id)
		}
	}
	return d.holds(d.state([]*farev1.Vector{d.vector(1, 1, 2)}, []*farev1.Destination{to(target(1), 1)}, d.device(1)))
}

// announcedRequestMayNotFollow checks that operations do not wait for the request that theirs announces.
func announcedRequestMayNotFollow(d *Driver) error {
	for _, op := range []*farev1.Operation{setVector(d.vector(1, 1, 2)), setDestination(target(1), 1)} {
		id, err := d.stream.send(op, true)
		if err != nil {
			return err
		}
		if err := d.stream.await(id); err != nil {
			return err
		}
	}
	return d.holds(d.state([]*farev1.Vector{d.vector(1, 1, 2)}, []*farev1.Destination{to(target(1), 1)}))
}

func snapshotIsWhatWasProgrammed(d *Driver) error {
	vectors := []*farev1.Vector{d.vector(1, 1, 2), d.vector(2, 0, 0, 1), d.vector(7, 1, 1, 2, 1)}
	vectors[2].Slots[1].DrainBeforeMove = true
	vectors[0].Slots = nil
	destinations := []*farev1.Destination{to(target(1), 7), to(target(2), 1), to(target(300), 2)}
	if err := d.succeed(
		setVector(vectors[2]), setDestination(target(1), 7), setVector(vectors[1]), setVector(vectors[0]),
		setDestination(target(300), 2), setDestination(target(2), 1), subPortOp(d.device(3), false),
	); err != nil {
		return err
	}
	if err := d.holds(d.state(vectors, destinations, d.device(3))); err != nil {
		return err
	}
	if err := d.succeed(deleteDestination(target(300)), deleteVector(2), subPortOp(d.device(3), true), setDestination(target(2), 7)); err != nil {
		return err
	}
	destinations[1].Vector = 7
	return d.holds(d.state([]*farev1.Vector{vectors[0], vectors[2]}, destinations[:2]))
}

// snapshotIsCanonical checks that members and slots are returned in one order, whatever the order of sending.
func snapshotIsCanonical(d *Driver) error {
	want := d.vector(1, 1, 2, 1, 3)
	mixed := proto.CloneOf(want)
	d.random.Shuffle(4, func(i, j int) { mixed.Members[i], mixed.Members[j] = mixed.Members[j], mixed.Members[i] })
	mixed.Members[0], mixed.Members[3] = mixed.Members[3], mixed.Members[0]
	mixed.Slots[0], mixed.Slots[2] = mixed.Slots[2], mixed.Slots[0]
	if err := d.succeed(setVector(mixed)); err != nil {
		return err
	}
	return d.holds(d.state([]*farev1.Vector{want}, nil))
}

func idempotent(d *Driver) error {
	program := func() []*farev1.Operation {
		return []*farev1.Operation{
			subPortOp(d.device(0), false), setVector(d.vector(1, 1, 2)), setVector(d.vector(2, 3)), setDestination(target(1), 1),
			setDestination(target(2), 2), deleteDestination(target(3)), deleteVector(3),
		}
	}
	if err := d.succeed(program()...); err != nil {
		return err
	}
	before, err := d.snapshot()
	if err != nil {
		return err
	}
	for _, op := range program() {
		if err := d.succeed(op, proto.CloneOf(op)); err != nil {
			return fmt.Errorf("again: %w", err)
		}
	}
	if err := d.holds(before); err != nil {
		return fmt.Errorf("after the same operations again: %w", err)
	}
	return nil
}

func addBeforeRemove(d *Driver) error {
	if err := d.succeed(setVector(d.vector(1, 1)), setDestination(target(1), 1)); err != nil {
		return err
	}
	if err := d.succeed(setVector(d.vector(2, 0, 1)), setDestination(target(1), 2), deleteVector(1)); err != nil {
		return err
	}
	return d.holds(d.state([]*farev1.Vector{d.vector(2, 0, 1)}, []*farev1.Destination{to(target(1), 2)}))
}

func deleteAbsent(d *Driver) error {
	if err := d.succeed(deleteDestination(target(9)), deleteVector(9)); err != nil {
		return err
	}
	return d.holds(d.state(nil, nil))
}

func vectorInUse(d *Driver) error {
	if err := d.succeed(setVector(d.vector(1, 1)), setDestination(target(1), 1), setDestination(target(2), 1), deleteDestination(target(1))); err != nil {
		return err
	}
	if err := d.refused(codes.FailedPrecondition, deleteVector(1)); err != nil {
		return err
	}
	return d.succeed(deleteDestination(target(2)), deleteVector(1))
}

// vectorInPlace checks that one operation changes the weights of all destinations of a vector.
func vectorInPlace(d *Driver) error {
	if err := d.succeed(setVector(d.vector(1, 1, 1)), setDestination(target(1), 1), setVector(d.vector(1, 0, 1, 2))); err != nil {
		return err
	}
	return d.holds(d.state([]*farev1.Vector{d.vector(1, 0, 1, 2)}, []*farev1.Destination{to(target(1), 1)}))
}

// unreachableVector checks that a vector with parked slots and no members is valid; its packets are dropped.
func unreachableVector(d *Driver) error {
	parked := d.vector(1, 1, 1)
	parked.Members = nil
	for _, slot := range parked.Slots {
		slot.SharePpb = 0
	}
	want := proto.CloneOf(parked)
	if err := d.succeed(setVector(parked), setVector(&farev1.Vector{Id: 2}), setDestination(target(1), 1), setDestination(target(2), 2)); err != nil {
		return err
	}
	return d.holds(d.state([]*farev1.Vector{want, {Id: 2}}, []*farev1.Destination{to(target(1), 1), to(target(2), 2)}))
}

func subPortFastPath(d *Driver) error {
	vectors := []*farev1.Vector{d.vector(1, 2, 1, 1, 1), d.vector(2, 1)}
	destinations := []*farev1.Destination{to(target(1), 1), to(target(2), 2)}
	if err := d.succeed(setVector(vectors[0]), setVector(vectors[1]), setDestination(target(1), 1), setDestination(target(2), 2)); err != nil {
		return err
	}
	for range 2 {
		if err := d.succeed(subPortOp(d.device(0), false)); err != nil {
			return err
		}
		if err := d.holds(d.state(vectors, destinations, d.device(0))); err != nil {
			return fmt.Errorf("sub-port down: %w", err)
		}
		// Groups can be set while a member is down.
		if err := d.succeed(setVector(d.vector(3, 1)), deleteVector(3)); err != nil {
			return err
		}
		if err := d.succeed(subPortOp(d.device(0), true)); err != nil {
			return err
		}
		if err := d.holds(d.state(vectors, destinations)); err != nil {
			return fmt.Errorf("sub-port up again: %w", err)
		}
	}
	return nil
}
