package dptest

import (
	"fmt"
	"net/netip"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
)

func codeOf(err error) codes.Code { return status.Code(err) }

func streamReplaced(d *Driver) error {
	if err := d.succeed(setVector(d.vector(1, 1))); err != nil {
		return err
	}
	older := d.stream
	newer, err := d.newStream()
	if err != nil {
		return err
	}
	d.stream = newer
	defer older.cancel()
	if err := older.ends(codes.Aborted); err != nil {
		return fmt.Errorf("older stream: %w", err)
	}
	if err := d.succeed(setVector(d.vector(2, 1))); err != nil {
		return fmt.Errorf("newer stream: %w", err)
	}
	return d.holds(d.state([]*farev1.Vector{d.vector(1, 1), d.vector(2, 1)}, nil))
}

func stateSurvivesStream(d *Driver) error {
	if err := d.succeed(setVector(d.vector(1, 1, 2)), setDestination(target(1), 1), subPortOp(d.device(2), false)); err != nil {
		return err
	}
	want := d.state([]*farev1.Vector{d.vector(1, 1, 2)}, []*farev1.Destination{to(target(1), 1)}, d.device(2))
	// End the stream in order; the data plane confirms the end.
	if err := d.stream.CloseSend(); err != nil {
		return err
	}
	if err := d.stream.ends(codes.OK); err != nil {
		return err
	}
	if err := d.holds(want); err != nil {
		return fmt.Errorf("after the stream was closed: %w", err)
	}
	if err := d.open(); err != nil {
		return err
	}
	// Break the next stream. The headers of the one after it show that the broken stream is over.
	d.stream.cancel()
	if err := d.open(); err != nil {
		return err
	}
	if err := d.holds(want); err != nil {
		return fmt.Errorf("after the stream was broken: %w", err)
	}
	return d.succeed(setVector(d.vector(1, 1, 2)), setDestination(target(1), 1))
}

// step is the desired state of one object in anyOrderEndsEqual.
type step struct {
	prefix string
	vector uint32 // 0 deletes the destination
}

// anyOrderEndsEqual programs random states one after the other, each by operations in random order, and checks that
// each state is reached from the previous one.
func anyOrderEndsEqual(d *Driver) error {
	const rounds, destinations, vectors = 12, 24, 6
	weights := func(id uint32, round int) *farev1.Vector {
		return d.vector(id, 1+uint32(round)%3, id%2, uint32(round/2)%3)
	}
	for round := range rounds {
		var ops []*farev1.Operation
		var list []*farev1.Vector
		for id := uint32(1); id <= vectors; id++ {
			list = append(list, weights(id, round))
			ops = append(ops, setVector(weights(id, round)))
		}
		shuffle := func(list []*farev1.Operation) {
			d.random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		}
		shuffle(ops)
		var steps []step
		for n := range destinations {
			steps = append(steps, step{target(n), uint32(d.random.IntN(vectors + 1))})
		}
		first := len(ops)
		var programmed []*farev1.Destination
		var down []string
		for _, s := range steps {
			if s.vector == 0 {
				ops = append(ops, deleteDestination(s.prefix))
				continue
			}
			ops = append(ops, setDestination(s.prefix, s.vector))
			programmed = append(programmed, to(s.prefix, s.vector))
		}
		for at := range 4 {
			up := d.random.IntN(2) == 0
			ops = append(ops, subPortOp(d.device(at), up))
			if !up {
				down = append(down, d.device(at))
			}
		}
		shuffle(ops[first:])
		if err := d.succeed(ops...); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		slices.SortFunc(programmed, func(a, b *farev1.Destination) int {
			return netip.MustParsePrefix(a.Prefix).Compare(netip.MustParsePrefix(b.Prefix))
		})
		if err := d.holds(d.state(list, programmed, down...)); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	return nil
}

// largeBatch programs many destinations on one vector, moves them by one operation, and deletes them.
func largeBatch(d *Driver) error {
	size := d.options.Batch
	if size == 0 {
		size = 16384
	}
	if limit := int(d.capabilities.MaxDestinations); limit > 0 {
		size = min(size, limit)
	}
	ops := []*farev1.Operation{setVector(d.vector(1, 1, 1, 1, 1)), setVector(d.vector(2, 1))}
	list := make([]*farev1.Destination, 0, size)
	for n := range size {
		vector := uint32(1 + n%2)
		ops = append(ops, setDestination(target(n), vector))
		list = append(list, to(target(n), vector))
	}
	if err := d.succeed(ops...); err != nil {
		return err
	}
	if err := d.succeed(setVector(d.vector(1, 1, 0, 2))); err != nil {
		return err
	}
	if err := d.holds(d.state([]*farev1.Vector{d.vector(1, 1, 0, 2), d.vector(2, 1)}, list)); err != nil {
		return err
	}
	ops = ops[:0]
	for n := range size {
		ops = append(ops, deleteDestination(target(n)))
	}
	if err := d.succeed(append(ops, deleteVector(1), deleteVector(2))...); err != nil {
		return err
	}
	return d.holds(d.state(nil, nil))
}
