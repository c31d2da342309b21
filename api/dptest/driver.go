package dptest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// Driver gives a case access to a data plane that has received Hello and is empty.
type Driver struct {
	ctx          context.Context
	client       farev1.DataplaneServiceClient
	options      Options
	capabilities *farev1.Capabilities
	random       *rand.Rand
	stream       *Stream
	cancel       context.CancelFunc
	greeted      *farev1.Forwarding // of the last accepted Hello
}

func newDriver(ctx context.Context, conn grpc.ClientConnInterface, options Options) (*Driver, error) {
	ctx, cancel := context.WithCancel(ctx)
	d := &Driver{
		ctx: ctx, client: farev1.NewDataplaneServiceClient(conn), options: options, cancel: cancel,
		random: rand.New(rand.NewPCG(options.Seed, 0)),
	}
	err := d.begin()
	if err != nil {
		cancel()
		return nil, fmt.Errorf("before the case: %w", err)
	}
	return d, nil
}

func (d *Driver) begin() error {
	hello, err := d.hello(d.options.Forwarding)
	if err != nil {
		return err
	}
	d.capabilities = hello.GetCapabilities()
	if d.capabilities == nil {
		d.capabilities = &farev1.Capabilities{}
	}
	return d.clear()
}

// close empties the data plane over a new stream, because the case may have broken its stream.
func (d *Driver) close() error {
	defer d.cancel()
	if _, err := d.hello(d.options.Forwarding); err != nil {
		return fmt.Errorf("after the case: %w", err)
	}
	if err := d.clear(); err != nil {
		return fmt.Errorf("after the case: %w", err)
	}
	return nil
}

func (d *Driver) hello(forwarding *farev1.Forwarding) (*farev1.HelloResponse, error) {
	ctx, cancel := context.WithTimeout(d.ctx, d.options.Timeout)
	defer cancel()
	response, err := d.client.Hello(ctx, &farev1.HelloRequest{Version: "dptest", Instance: "dptest", Forwarding: forwarding})
	if err != nil {
		return nil, fmt.Errorf("Hello: %w", err)
	}
	d.greeted = forwarding
	return response, nil
}

// clear opens a stream, deletes every object and sets all sub-ports up.
func (d *Driver) clear() error {
	if err := d.open(); err != nil {
		return err
	}
	state, err := d.snapshot()
	if err != nil {
		return err
	}
	var ops []*farev1.Operation
	for _, subPort := range state.SubPorts {
		if !subPort.Up {
			ops = append(ops, subPortOp(subPort.Device, true))
		}
	}
	for _, destination := range state.Destinations {
		ops = append(ops, &farev1.Operation{Op: &farev1.Operation_DeleteDestination{
			DeleteDestination: &farev1.DestinationKey{Prefix: destination.Prefix, Source: destination.Source},
		}})
	}
	for _, vector := range state.Vectors {
		ops = append(ops, deleteVector(vector.Id))
	}
	if err := d.succeed(ops...); err != nil {
		return fmt.Errorf("emptying the data plane: %w", err)
	}
	return nil
}

// open replaces the driver's stream.
func (d *Driver) open() error {
	stream, err := d.newStream()
	if err != nil {
		return err
	}
	if d.stream != nil {
		d.stream.cancel()
	}
	d.stream = stream
	return nil
}

// Stream is a Program stream that checks its acknowledgements against the contract.
type Stream struct {
	grpc.BidiStreamingClient[farev1.ProgramRequest, farev1.ProgramResponse]

	cancel  context.CancelFunc
	driver  *Driver
	next    uint64
	final   map[uint64]*farev1.Ack     // last acknowledgement of each operation
	level   map[uint64]bool            // operations with an ACCEPTED acknowledgement
	vectors map[uint64]bool            // operations that are a set_vector
	highest map[farev1.AckLevel]uint64 // highest id by level, IN_EFFECT and APPROXIMATE together
}

func (d *Driver) newStream() (*Stream, error) {
	ctx, cancel := context.WithCancel(d.ctx)
	stream, err := d.client.Program(ctx)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("Program: %w", err)
	}
	s := &Stream{BidiStreamingClient: stream, cancel: cancel, driver: d, next: 1, final: map[uint64]*farev1.Ack{}, level: map[uint64]bool{}, vectors: map[uint64]bool{}, highest: map[farev1.AckLevel]uint64{}}
	if err := s.guard("the stream's headers", func() error {
		header, err := stream.Header()
		if err == nil && header == nil {
			_, err = stream.Recv()
		}
		return err
	}); err != nil {
		cancel()
		return nil, err
	}
	return s, nil
}

// guard runs fn and ends the stream when fn exceeds the timeout.
func (s *Stream) guard(what string, fn func() error) error {
	late, cancel := context.WithTimeout(context.Background(), s.driver.options.Timeout)
	defer cancel()
	stop := context.AfterFunc(late, s.cancel)
	defer stop()
	err := fn()
	if late.Err() != nil {
		return fmt.Errorf("%s did not come within %v", what, s.driver.options.Timeout)
	}
	return err
}

// number gives an operation the next id.
func (s *Stream) number(op *farev1.Operation) {
	op.Id = s.next
	s.next++
	s.vectors[op.Id] = op.GetSetVector() != nil
}

// send numbers an operation and sends it, without waiting. more announces another request.
func (s *Stream) send(op *farev1.Operation, more bool) (uint64, error) {
	s.number(op)
	if err := s.Send(&farev1.ProgramRequest{Operation: op, More: more}); err != nil {
		_, received := s.Recv()
		return op.Id, errors.Join(err, received)
	}
	return op.Id, nil
}

// window is the number of operations sent ahead of their acknowledgements, small enough for any flow control.
const window = 256

// run sends operations and waits for the last acknowledgement of each, in order of the operations.
func (s *Stream) run(ops ...*farev1.Operation) ([]*farev1.Ack, error) {
	first := s.next
	for i, op := range ops {
		if _, err := s.send(op, i+1 < len(ops)); err != nil {
			return nil, err
		}
		if i >= window {
			if err := s.await(first + uint64(i-window)); err != nil {
				return nil, err
			}
		}
	}
	acks := make([]*farev1.Ack, 0, len(ops))
	for i := range ops {
		id := first + uint64(i)
		if err := s.await(id); err != nil {
			return nil, err
		}
		acks = append(acks, s.final[id])
	}
	return acks, nil
}

// await reads until operation id has its last acknowledgement.
func (s *Stream) await(id uint64) error {
	for s.final[id] == nil {
		var response *farev1.ProgramResponse
		err := s.guard(fmt.Sprintf("the acknowledgement of operation %d", id), func() (err error) {
			response, err = s.Recv()
			return err
		})
		if err != nil {
			return fmt.Errorf("waiting for operation %d: %w", id, err)
		}
		for _, ack := range response.Acks {
			if err := s.judge(ack); err != nil {
				return err
			}
		}
	}
	return nil
}

// judge checks an acknowledgement against the contract.
func (s *Stream) judge(ack *farev1.Ack) error {
	switch {
	case ack.Id == 0 || ack.Id >= s.next:
		return fmt.Errorf("operation %d was acknowledged, but never sent", ack.Id)
	case s.final[ack.Id] != nil:
		return fmt.Errorf("operation %d was acknowledged %v after %v, which is final", ack.Id, ack.Level, s.final[ack.Id].Level)
	}
	level := ack.Level
	switch level {
	case farev1.AckLevel_ACK_LEVEL_ACCEPTED:
		if s.level[ack.Id] {
			return fmt.Errorf("operation %d was accepted twice", ack.Id)
		}
		s.level[ack.Id] = true
	case farev1.AckLevel_ACK_LEVEL_IN_EFFECT:
		s.final[ack.Id] = ack
	case farev1.AckLevel_ACK_LEVEL_APPROXIMATE:
		level = farev1.AckLevel_ACK_LEVEL_IN_EFFECT // both levels have one order
		if !s.vectors[ack.Id] || ack.Message == "" {
			return fmt.Errorf("operation %d was acknowledged APPROXIMATE with message %q; this level is only for set_vector, with a message that names the member and its deviation", ack.Id, ack.Message)
		}
		s.final[ack.Id] = ack
	case farev1.AckLevel_ACK_LEVEL_REFUSED:
		if s.level[ack.Id] {
			return fmt.Errorf("operation %d was refused after it was accepted; accept only what can be applied", ack.Id)
		}
		if codes.Code(ack.Code) == codes.OK || ack.Message == "" {
			return fmt.Errorf("operation %d was refused with code %v and message %q; both must give the reason", ack.Id, codes.Code(ack.Code), ack.Message)
		}
		s.final[ack.Id] = ack
	default:
		return fmt.Errorf("operation %d was acknowledged with level %d, which does not exist", ack.Id, ack.Level)
	}
	if ack.Id < s.highest[level] {
		return fmt.Errorf("operation %d was acknowledged %v after operation %d; each level keeps the order", ack.Id, ack.Level, s.highest[level])
	}
	s.highest[level] = ack.Id
	return nil
}

// ends reads until the stream ends, and requires the status code.
func (s *Stream) ends(code codes.Code) error {
	err := s.guard("the end of the stream", func() error {
		for {
			if _, err := s.Recv(); errors.Is(err, io.EOF) {
				return nil
			} else if err != nil {
				return err
			}
		}
	})
	if status.Code(err) != code {
		return fmt.Errorf("the stream ended with %v, want %v", err, code)
	}
	return nil
}

// succeed runs operations and requires that they come into effect.
func (d *Driver) succeed(ops ...*farev1.Operation) error {
	acks, err := d.stream.run(ops...)
	if err != nil {
		return err
	}
	for i, ack := range acks {
		if ack.Level == farev1.AckLevel_ACK_LEVEL_REFUSED {
			return fmt.Errorf("%v was refused: %v: %s", ops[i], codes.Code(ack.Code), ack.Message)
		}
	}
	return nil
}

// refused runs an operation and requires a refusal with code that leaves the state unchanged.
func (d *Driver) refused(code codes.Code, op *farev1.Operation) error {
	before, err := d.snapshot()
	if err != nil {
		return err
	}
	acks, err := d.stream.run(op)
	if err != nil {
		return fmt.Errorf("%v: %w", op, err)
	}
	if ack := acks[0]; ack.Level != farev1.AckLevel_ACK_LEVEL_REFUSED || codes.Code(ack.Code) != code {
		return fmt.Errorf("%v was answered %v %v %q, want a refusal with %v", op, ack.Level, codes.Code(ack.Code), ack.Message, code)
	}
	if err := d.holds(before); err != nil {
		return fmt.Errorf("%v was refused, but changed the state: %w", op, err)
	}
	return nil
}

// snapshot reads back the state as one message, and requires it to be sorted.
func (d *Driver) snapshot() (*farev1.SnapshotResponse, error) {
	ctx, cancel := context.WithTimeout(d.ctx, d.options.Timeout)
	defer cancel()
	stream, err := d.client.Snapshot(ctx, &farev1.SnapshotRequest{})
	if err != nil {
		return nil, fmt.Errorf("Snapshot: %w", err)
	}
	all := &farev1.SnapshotResponse{}
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all, sorted(all, d.greeted)
		}
		if err != nil {
			return nil, fmt.Errorf("Snapshot: %w", err)
		}
		all.SubPorts = append(all.SubPorts, chunk.SubPorts...)
		all.Vectors = append(all.Vectors, chunk.Vectors...)
		all.Destinations = append(all.Destinations, chunk.Destinations...)
	}
}

func sorted(all *farev1.SnapshotResponse, forwarding *farev1.Forwarding) error {
	for i := 1; i < len(all.SubPorts); i++ {
		if a, b := all.SubPorts[i-1].Device, all.SubPorts[i].Device; a >= b {
			return fmt.Errorf("Snapshot: sub-port %s precedes %s; sort them, each once", a, b)
		}
	}
	for i := 1; i < len(all.Vectors); i++ {
		if a, b := all.Vectors[i-1].Id, all.Vectors[i].Id; a >= b {
			return fmt.Errorf("Snapshot: vector %d precedes %d; sort them, each once", a, b)
		}
	}
	// Source groups that Forwarding does not have come last, in any order.
	rank := func(source string) int {
		i := slices.IndexFunc(forwarding.SourceGroups, func(g *farev1.SourceGroup) bool { return g.Loopbacks[0] == source })
		if i < 0 && (source != "" || len(forwarding.SourceGroups) > 0) {
			return len(forwarding.SourceGroups)
		}
		return max(i, 0)
	}
	var before netip.Prefix
	var source string
	for i, destination := range all.Destinations {
		prefix, err := netip.ParsePrefix(destination.Prefix)
		if err != nil || prefix.String() != destination.Prefix {
			return fmt.Errorf("Snapshot: destination %q is not written as a host prefix", destination.Prefix)
		}
		if i > 0 && (rank(source) > rank(destination.Source) || source == destination.Source && before.Compare(prefix) >= 0) {
			return fmt.Errorf("Snapshot: destination %s of source %q precedes %s of %q; sort them by source group and address, each once", before, source, prefix, destination.Source)
		}
		before, source = prefix, destination.Source
	}
	return nil
}

// holds requires the state to equal want.
func (d *Driver) holds(want *farev1.SnapshotResponse) error {
	got, err := d.snapshot()
	if err != nil {
		return err
	}
	return same(got, want)
}

// same compares two states and names the first difference.
func same(got, want *farev1.SnapshotResponse) error {
	if len(got.SubPorts) != len(want.SubPorts) || len(got.Vectors) != len(want.Vectors) || len(got.Destinations) != len(want.Destinations) {
		return fmt.Errorf("the snapshot has %d sub-ports, %d vectors, %d destinations, want %d, %d, %d", len(got.SubPorts), len(got.Vectors),
			len(got.Destinations), len(want.SubPorts), len(want.Vectors), len(want.Destinations))
	}
	for i := range want.SubPorts {
		if !proto.Equal(got.SubPorts[i], want.SubPorts[i]) {
			return fmt.Errorf("the snapshot has sub-port {%v}, want {%v}", got.SubPorts[i], want.SubPorts[i])
		}
	}
	for i := range want.Vectors {
		if !proto.Equal(got.Vectors[i], want.Vectors[i]) {
			return fmt.Errorf("the snapshot has vector {%v}, want {%v}", got.Vectors[i], want.Vectors[i])
		}
	}
	for i := range want.Destinations {
		if !proto.Equal(got.Destinations[i], want.Destinations[i]) {
			return fmt.Errorf("the snapshot has destination {%v}, want {%v}", got.Destinations[i], want.Destinations[i])
		}
	}
	return nil
}
