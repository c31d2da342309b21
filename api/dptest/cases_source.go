package dptest

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// sourceLoopbacks are the loopbacks of the two source groups of the cases: the first loopback uses the first sub-port
// of each plane, the two others use all except the first sub-port.
var sourceLoopbacks = []string{"10.255.0.1/32", "10.255.0.101/32", "10.255.0.102/32"}

func firstSource() string  { return sourceLoopbacks[0] }
func secondSource() string { return sourceLoopbacks[1] }

// sourced returns the driver's Forwarding with two source groups.
func (d *Driver) sourced() *farev1.Forwarding {
	f := proto.CloneOf(d.options.Forwarding)
	f.Loopbacks = sourceLoopbacks
	f.SourceGroups = []*farev1.SourceGroup{
		{Loopbacks: sourceLoopbacks[:1], Devices: []string{d.device(0), d.device(2)}},
		{Loopbacks: sourceLoopbacks[1:], Devices: []string{d.device(1), d.device(2), d.device(3)}},
	}
	return f
}

// from sets the source group of an operation's vector or destination.
func from(source string, op *farev1.Operation) *farev1.Operation {
	switch o := op.Op.(type) {
	case *farev1.Operation_SetVector:
		o.SetVector.Source = source
	case *farev1.Operation_SetDestination:
		o.SetDestination.Source = source
	case *farev1.Operation_DeleteDestination:
		o.DeleteDestination.Source = source
	}
	return op
}

// sourceState programs a vector of each source group, and a destination in both source groups.
func (d *Driver) sourceState() error {
	if _, err := d.hello(d.sourced()); err != nil {
		return err
	}
	return d.succeed(
		from(firstSource(), setVector(d.vector(1, 1, 0, 2))), from(secondSource(), setVector(d.vector(2, 0, 1, 1))),
		from(secondSource(), setDestination(target(1), 2)), from(firstSource(), setDestination(target(2), 1)), from(firstSource(), setDestination(target(1), 1)))
}

// sourceWant returns the objects of sourceState, as Snapshot returns them.
func (d *Driver) sourceWant() ([]*farev1.Vector, []*farev1.Destination) {
	vectors := []*farev1.Vector{d.vector(1, 1, 0, 2), d.vector(2, 0, 1, 1)}
	vectors[0].Source, vectors[1].Source = firstSource(), secondSource()
	destinations := []*farev1.Destination{to(target(1), 1), to(target(2), 1), to(target(1), 2)}
	destinations[0].Source, destinations[1].Source, destinations[2].Source = firstSource(), firstSource(), secondSource()
	return vectors, destinations
}

func helloRefusesSourceGroups(d *Driver) error {
	for _, c := range []struct {
		why    string
		change func(f *farev1.Forwarding)
	}{
		{"one source group alone", func(f *farev1.Forwarding) { f.SourceGroups = f.SourceGroups[:1] }},
		{"a loopback in none", func(f *farev1.Forwarding) { f.SourceGroups[1].Loopbacks = sourceLoopbacks[1:2] }},
		{"a loopback in two", func(f *farev1.Forwarding) { f.SourceGroups[0].Loopbacks = sourceLoopbacks[:2] }},
		{"a loopback that is not one of the forwarding", func(f *farev1.Forwarding) { f.SourceGroups[0].Loopbacks = []string{"10.255.9.9/32"} }},
		{"a source group without loopbacks", func(f *farev1.Forwarding) { f.SourceGroups[0].Loopbacks = nil }},
		{"loopbacks out of order", func(f *farev1.Forwarding) {
			f.SourceGroups[1].Loopbacks = []string{sourceLoopbacks[2], sourceLoopbacks[1]}
		}},
		{"source groups out of order", func(f *farev1.Forwarding) {
			f.SourceGroups[0], f.SourceGroups[1] = f.SourceGroups[1], f.SourceGroups[0]
		}},
		{"a source group without devices", func(f *farev1.Forwarding) { f.SourceGroups[1].Devices = nil }},
		{"an unknown device", func(f *farev1.Forwarding) { f.SourceGroups[1].Devices[0] = "no-such-device-0" }},
		{"a device twice", func(f *farev1.Forwarding) { f.SourceGroups[1].Devices[1] = f.SourceGroups[1].Devices[0] }},
		{"devices out of order", func(f *farev1.Forwarding) {
			devices := f.SourceGroups[1].Devices
			devices[0], devices[1] = devices[1], devices[0]
		}},
	} {
		if err := d.helloEnds(codes.InvalidArgument, c.why, func(f *farev1.Forwarding) {
			sourced := d.sourced()
			c.change(sourced)
			f.Loopbacks, f.SourceGroups = sourced.Loopbacks, sourced.SourceGroups
		}); err != nil {
			return err
		}
	}
	_, err := d.hello(d.sourced())
	return err
}

// sourceGroupsAreKeys checks that a destination exists once for each source group, with a vector of that source group;
// Snapshot lists destinations by source group.
func sourceGroupsAreKeys(d *Driver) error {
	if err := d.sourceState(); err != nil {
		return err
	}
	vectors, destinations := d.sourceWant()
	if err := d.holds(d.state(vectors, destinations)); err != nil {
		return err
	}
	if err := d.succeed(from(firstSource(), deleteDestination(target(1))), from(secondSource(), deleteDestination(target(2)))); err != nil {
		return err
	}
	if err := d.holds(d.state(vectors, destinations[1:])); err != nil {
		return fmt.Errorf("after the destination of one source group was deleted: %w", err)
	}
	return nil
}

func sourceGroupsRefuse(d *Driver) error {
	if err := d.sourceState(); err != nil {
		return err
	}
	slotOf := func(plane, device string) *farev1.Operation {
		g := d.vector(1, 1, 0, 2)
		g.Slots[0].Plane, g.Slots[0].Device = plane, device
		return from(firstSource(), setVector(g))
	}
	const unknown = "10.255.9.9/32"
	for _, b := range []badOperation{
		{"a member of another source group", codes.NotFound, from(firstSource(), setVector(d.vector(1, 1, 1)))},
		{"a slot of another source group", codes.NotFound, slotOf(d.plane(1), d.device(1))},
		{"a vector of no source group", codes.NotFound, setVector(d.vector(3, 1))},
		{"a vector of an unknown source group", codes.NotFound, from(unknown, setVector(d.vector(3, 1)))},
		{"a vector of a loopback that is not the first", codes.NotFound, from(sourceLoopbacks[2], setVector(d.vector(3, 0, 1)))},
		{"a vector whose source is text", codes.InvalidArgument, from("gpu17", setVector(d.vector(3, 1)))},
		{"a vector that changes its source group", codes.FailedPrecondition, from(secondSource(), setVector(d.vector(1, 0, 0, 1)))},
		{"a destination of no source group", codes.NotFound, setDestination(target(3), 1)},
		{"a destination of an unknown source group", codes.NotFound, from(unknown, setDestination(target(3), 1))},
		{"a destination with another source group's vector", codes.FailedPrecondition, from(secondSource(), setDestination(target(1), 1))},
		{"deleting a destination whose source is text", codes.InvalidArgument, from("gpu17", deleteDestination(target(1)))},
	} {
		if err := d.refused(b.code, b.op); err != nil {
			return fmt.Errorf("%s: %w", b.why, err)
		}
	}
	if !FlowPins.Present(d.capabilities) {
		return nil
	}
	pair := &farev1.PairPorts{Source: secondSource(), SourcePorts: []uint32{50000}}
	return d.refused(codes.NotFound, from(firstSource(), setDestination(target(1), 1, pair)))
}

// sourceGroupsMayGo checks a Hello that removes source groups: their entries stay, can only be deleted, and are
// unchanged when another Hello restores the source groups.
func sourceGroupsMayGo(d *Driver) error {
	if err := d.sourceState(); err != nil {
		return err
	}
	vectors, destinations := d.sourceWant()
	if _, err := d.hello(d.options.Forwarding); err != nil {
		return err
	}
	if err := d.holds(d.state(vectors, destinations)); err != nil {
		return fmt.Errorf("after a Hello without source groups: %w", err)
	}
	if err := d.refused(codes.NotFound, from(secondSource(), setDestination(target(3), 2))); err != nil {
		return err
	}
	if err := d.succeed(setVector(d.vector(5, 1)), setDestination(target(1), 5)); err != nil {
		return fmt.Errorf("without source groups: %w", err)
	}
	if err := d.succeed(from(firstSource(), deleteDestination(target(2))), deleteDestination(target(1)), deleteVector(5)); err != nil {
		return err
	}
	if _, err := d.hello(d.sourced()); err != nil {
		return err
	}
	if err := d.holds(d.state(vectors, []*farev1.Destination{destinations[0], destinations[2]})); err != nil {
		return fmt.Errorf("after the source groups are back: %w", err)
	}
	if err := d.succeed(from(firstSource(), setVector(d.vector(1, 1))), from(secondSource(), deleteDestination(target(1))), deleteVector(2)); err != nil {
		return err
	}
	vectors[0] = d.vector(1, 1)
	vectors[0].Source = firstSource()
	return d.holds(d.state(vectors[:1], destinations[:1]))
}
