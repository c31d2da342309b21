package dptest

import (
	"fmt"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// base programs state that a refused operation could damage.
func (d *Driver) base() error {
	return d.succeed(setVector(d.vector(1, 1, 2)), setDestination(target(1), 1))
}

// changed returns an operation that sets vector 1 with other weights and a flaw.
func (d *Driver) changed(flaw func(*farev1.Vector)) *farev1.Operation {
	g := d.vector(1, 2, 1, 1)
	flaw(g)
	return setVector(g)
}

type badOperation struct {
	why  string
	code codes.Code
	op   *farev1.Operation
}

func (d *Driver) allRefused(bad []badOperation) error {
	if err := d.base(); err != nil {
		return err
	}
	for _, b := range bad {
		if err := d.refused(b.code, b.op); err != nil {
			return fmt.Errorf("%s: %w", b.why, err)
		}
	}
	return d.succeed(setDestination(target(2), 1))
}

func malformed(d *Driver) error {
	pair := &farev1.PairPorts{Source: "10.255.0.1/32", SourcePorts: []uint32{50000}}
	bad := []badOperation{
		{"no operation", codes.InvalidArgument, &farev1.Operation{}},
		{"vector 0", codes.InvalidArgument, d.changed(func(g *farev1.Vector) { g.Id = 0 })},
		{"delete vector 0", codes.InvalidArgument, deleteVector(0)},
		{"weight 0", codes.InvalidArgument, d.changed(func(g *farev1.Vector) { g.Members[1].Weight = 0 })},
		{"a member twice", codes.InvalidArgument, d.changed(func(g *farev1.Vector) {
			*g.Members[1] = farev1.VectorMember{Plane: d.plane(0), Device: d.device(0), Weight: 1}
		})},
		{"a member without a device", codes.InvalidArgument, d.changed(func(g *farev1.Vector) { g.Members[0].Device = "" })},
		{"a slot twice", codes.InvalidArgument, d.changed(func(g *farev1.Vector) { g.Slots[1].Slot = g.Slots[0].Slot })},
		{"shares one too many", codes.InvalidArgument, d.changed(func(g *farev1.Vector) { g.Slots[0].SharePpb++ })},
		{"shares one too few", codes.InvalidArgument, d.changed(func(g *farev1.Vector) { g.Slots[0].SharePpb-- })},
		{"shares of 0", codes.InvalidArgument, d.changed(func(g *farev1.Vector) {
			for _, slot := range g.Slots {
				slot.SharePpb = 0
			}
		})},
		{"shares without members", codes.InvalidArgument, d.changed(func(g *farev1.Vector) { g.Members = nil })},
		{"shares that wrap around 2^32", codes.InvalidArgument, d.changed(func(g *farev1.Vector) {
			g.Slots = nil
			for i, share := range []uint32{1<<32 - 1, 1_000_000_001} {
				g.Slots = append(g.Slots, &farev1.VectorSlot{Slot: uint32(i), Plane: d.plane(0), Device: d.device(0), SharePpb: share})
			}
		})},
		{"no prefix", codes.InvalidArgument, setDestination("", 1)},
		{"an address", codes.InvalidArgument, setDestination("10.128.0.1", 1)},
		{"a network", codes.InvalidArgument, setDestination("10.128.0.0/24", 1)},
		{"an IPv6 network", codes.InvalidArgument, setDestination("fd00::/64", 1)},
		{"an IPv4-mapped address", codes.InvalidArgument, setDestination("::ffff:10.128.0.1/128", 1)},
		{"a multicast address", codes.InvalidArgument, setDestination("239.0.0.1/32", 1)},
		{"an IPv6 multicast address", codes.InvalidArgument, setDestination("ff0e::1/128", 1)},
		{"a prefix that is text", codes.InvalidArgument, setDestination("gpu17", 1)},
		{"delete a network", codes.InvalidArgument, deleteDestination("10.128.0.0/24")},
		{"delete a prefix that is text", codes.InvalidArgument, deleteDestination("gpu17")},
	}
	if FlowPins.Present(d.capabilities) {
		with := func(ports ...uint32) *farev1.PairPorts {
			return &farev1.PairPorts{Source: "10.255.0.1/32", SourcePorts: ports}
		}
		bad = append(bad,
			badOperation{"port 0", codes.InvalidArgument, setDestination(target(1), 1, with(0))},
			badOperation{"port 65536", codes.InvalidArgument, setDestination(target(1), 1, with(50000, 65536))},
			badOperation{"a source twice", codes.InvalidArgument, setDestination(target(1), 1, pair, with(50001))},
			badOperation{"a source that is not a host", codes.InvalidArgument, setDestination(target(1), 1, &farev1.PairPorts{Source: "10.255.0.0/24"})})
	}
	return d.allRefused(bad)
}

func unknownNames(d *Driver) error {
	const nowhere = "no-such-device-0"
	return d.allRefused([]badOperation{
		{"state of an unknown device", codes.NotFound, subPortOp(nowhere, false)},
		{"a member of an unknown device", codes.NotFound, d.changed(func(g *farev1.Vector) { g.Members[0].Device = nowhere })},
		{"a member of an unknown plane", codes.NotFound, d.changed(func(g *farev1.Vector) { g.Members[0].Plane = nowhere })},
		{"a member in another plane", codes.NotFound, d.changed(func(g *farev1.Vector) { g.Members[0].Plane = d.plane(2) })},
		{"a slot of an unknown device", codes.NotFound, d.changed(func(g *farev1.Vector) { g.Slots[0].Device = nowhere })},
		{"a slot of an unknown plane", codes.NotFound, d.changed(func(g *farev1.Vector) { g.Slots[0].Plane = nowhere })},
		{"a slot in another plane", codes.NotFound, d.changed(func(g *farev1.Vector) { g.Slots[0].Plane = d.plane(2) })},
	})
}

func unknownVector(d *Driver) error {
	return d.allRefused([]badOperation{
		{"a new destination", codes.FailedPrecondition, setDestination(target(2), 99)},
		{"a known destination", codes.FailedPrecondition, setDestination(target(1), 99)},
		{"vector 0", codes.FailedPrecondition, setDestination(target(1), 0)},
	})
}

func limitWeight(d *Driver) error {
	limit := d.capabilities.MaxWeight
	if sum := d.capabilities.MaxWeightSum; sum == 0 || sum >= limit {
		if err := d.succeed(setVector(d.vector(2, limit))); err != nil {
			return fmt.Errorf("the limit itself: %w", err)
		}
	}
	if err := d.succeed(setVector(d.vector(1, 1))); err != nil {
		return err
	}
	return d.refused(codes.OutOfRange, setVector(d.vector(1, limit+1)))
}

func limitWeightSum(d *Driver) error {
	limit := d.capabilities.MaxWeightSum
	most := d.capabilities.MaxWeight
	if most == 0 {
		most = limit
	}
	// Use as many of the four members as the sum needs to exceed the limit by one.
	weights := make([]uint32, 4)
	rest := uint64(limit) + 1
	for at := range weights {
		weights[at] = uint32(min(rest, uint64(most)))
		rest -= uint64(weights[at])
	}
	if err := d.succeed(setVector(d.vector(1, 1))); err != nil {
		return err
	}
	if err := d.refused(codes.OutOfRange, setVector(d.vector(1, weights...))); err != nil {
		return err
	}
	for at := range weights {
		if weights[at] > 0 {
			weights[at]--
			break
		}
	}
	if err := d.succeed(setVector(d.vector(1, weights...))); err != nil {
		return fmt.Errorf("the limit itself: %w", err)
	}
	return nil
}

func limitVectors(d *Driver) error {
	limit := d.capabilities.MaxVectors
	var ops []*farev1.Operation
	for id := uint32(1); id <= limit; id++ {
		ops = append(ops, setVector(d.vector(id, 1)))
	}
	if err := d.succeed(ops...); err != nil {
		return fmt.Errorf("at the promised limit: %w", err)
	}
	if err := d.refused(codes.ResourceExhausted, setVector(d.vector(limit+1, 1))); err != nil {
		return err
	}
	// Existing objects can still be changed, and a released place is free.
	return d.succeed(setVector(d.vector(1, 0, 1)), deleteVector(limit), setVector(d.vector(limit+1, 1)))
}

func limitDestinations(d *Driver) error {
	limit := int(d.capabilities.MaxDestinations)
	ops := []*farev1.Operation{setVector(d.vector(1, 1))}
	for n := range limit {
		ops = append(ops, setDestination(target(n), 1))
	}
	if err := d.succeed(ops...); err != nil {
		return fmt.Errorf("at the promised limit: %w", err)
	}
	if err := d.refused(codes.ResourceExhausted, setDestination(target(limit), 1)); err != nil {
		return err
	}
	return d.succeed(setDestination(target(0), 1), deleteDestination(target(0)), setDestination(target(limit), 1))
}

func ipv6(d *Driver) error {
	if err := d.succeed(setVector(d.vector(1, 1, 1)), setDestination(target6(2), 1), setDestination(target(1), 1), setDestination(target6(1), 1)); err != nil {
		return err
	}
	want := []*farev1.Destination{to(target(1), 1), to(target6(1), 1), to(target6(2), 1)}
	if err := d.holds(d.state([]*farev1.Vector{d.vector(1, 1, 1)}, want)); err != nil {
		return err
	}
	if err := d.succeed(deleteDestination(target6(1))); err != nil {
		return err
	}
	return d.holds(d.state([]*farev1.Vector{d.vector(1, 1, 1)}, []*farev1.Destination{want[0], want[2]}))
}

func noIPv6(d *Driver) error {
	return d.allRefused([]badOperation{
		{"an IPv6 destination", codes.Unimplemented, setDestination(target6(1), 1)},
	})
}

// perPacketSlots checks that a slot without a device is sprayed over its plane.
func perPacketSlots(d *Driver) error {
	sprayed := func() *farev1.Vector {
		g := d.vector(1, 1, 1, 2)
		g.Slots = []*farev1.VectorSlot{
			{Slot: 0, Plane: d.plane(0), SharePpb: 500_000_000}, {Slot: 1, Plane: d.plane(2), SharePpb: 500_000_000},
		}
		return g
	}
	if err := d.helloEnds(codes.OK, "mode per-packet", func(f *farev1.Forwarding) { f.Mode = farev1.Mode_MODE_PER_PACKET }); err != nil {
		return err
	}
	if err := d.succeed(setVector(sprayed()), setDestination(target(1), 1)); err != nil {
		return err
	}
	return d.holds(d.state([]*farev1.Vector{sprayed()}, []*farev1.Destination{to(target(1), 1)}))
}

func flowPins(d *Driver) error {
	pair := func(first uint32) *farev1.PairPorts {
		return &farev1.PairPorts{Source: "10.255.0.1/32", SourcePorts: []uint32{first, first + 1}}
	}
	holds := func(p *farev1.PairPorts) error {
		return d.holds(d.state([]*farev1.Vector{d.vector(1, 1, 1)}, []*farev1.Destination{to(target(1), 1, p)}))
	}
	if err := d.succeed(setVector(d.vector(1, 1, 1)), setDestination(target(1), 1, pair(50000))); err != nil {
		return err
	}
	if err := holds(pair(50000)); err != nil {
		return err
	}
	// The same vector with other ports is a change.
	if err := d.succeed(setDestination(target(1), 1, pair(51000))); err != nil {
		return err
	}
	return holds(pair(51000))
}

func noFlowPins(d *Driver) error {
	return d.allRefused([]badOperation{
		{"pairs", codes.Unimplemented, setDestination(target(1), 1, &farev1.PairPorts{Source: "10.255.0.1/32", SourcePorts: []uint32{50000}})},
	})
}
