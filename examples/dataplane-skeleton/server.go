package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/netip"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// table is the programmed state, and the server of fare.v1.DataplaneService. Use newTable.
type table struct {
	farev1.UnimplementedDataplaneServiceServer

	below layer

	mu           sync.Mutex    // guards everything below, and serializes calls of the layer
	topology     *topology     // of the last Hello; nil before the first
	current      chan struct{} // closed when a newer Program stream takes over; nil before the first stream
	down         map[string]bool
	groups       map[uint32]*farev1.Vector // messages are replaced, never modified
	users        map[uint32]int            // number of destinations of each group
	destinations map[key]uint32            // the group of each destination
}

// key identifies a destination; source is the zero value if Forwarding has no source groups.
type key struct{ source, prefix netip.Prefix }

func newTable(below layer) *table {
	return &table{below: below, down: map[string]bool{}, groups: map[uint32]*farev1.Vector{}, users: map[uint32]int{}, destinations: map[key]uint32{}}
}

// Hello implements farev1.DataplaneServiceServer.
func (t *table) Hello(_ context.Context, request *farev1.HelloRequest) (*farev1.HelloResponse, error) {
	checked, err := checkForwarding(request.GetForwarding())
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.below.setForwarding(request.Forwarding); err != nil {
		return nil, err
	}
	t.topology = checked
	for device := range t.down {
		if _, ok := checked.devices[device]; !ok {
			delete(t.down, device)
		}
	}
	return &farev1.HelloResponse{Name: "skeleton", Capabilities: &farev1.Capabilities{PerPacket: true, Ipv6: true, ConfirmsInEffect: true}}, nil
}

// Program implements farev1.DataplaneServiceServer.
func (t *table) Program(stream grpc.BidiStreamingServer[farev1.ProgramRequest, farev1.ProgramResponse]) error {
	replaced, err := t.takeOver()
	if err != nil {
		return err
	}
	// The client waits for the headers: from here on no other stream changes the state.
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	// Recv runs in a separate goroutine, so that a newer stream can end this one. When Program returns, gRPC cancels
	// the stream and with it Recv.
	operations, ended := make(chan *farev1.Operation), make(chan error, 1)
	go func() {
		for {
			request, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			select {
			case operations <- request.GetOperation():
			case <-stream.Context().Done():
				return
			}
		}
	}()
	newer := status.Error(codes.Aborted, "a newer Program stream has taken over")
	for last := uint64(0); ; {
		select {
		case <-replaced:
			return newer
		case err := <-ended:
			if errors.Is(err, io.EOF) {
				return nil // the client has closed its side, and every operation is acknowledged
			}
			return err
		case op := <-operations:
			if op.GetId() <= last {
				return invalid("operation id %d follows %d; ids start at 1 and increase", op.GetId(), last)
			}
			last = op.Id
			ack := t.commit(replaced, op)
			if ack == nil {
				return newer
			}
			if err := stream.Send(&farev1.ProgramResponse{Acks: []*farev1.Ack{ack}}); err != nil {
				return err
			}
		}
	}
}

// takeOver ends the current stream and returns the channel that ends the new one.
func (t *table) takeOver() (chan struct{}, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.topology == nil {
		return nil, status.Error(codes.FailedPrecondition, "no Hello precedes Program; call Hello first")
	}
	if t.current != nil {
		close(t.current)
	}
	t.current = make(chan struct{})
	return t.current, nil
}

// commit carries out an operation and returns its acknowledgement, or nil if a newer stream has replaced the
// operation's stream.
func (t *table) commit(replaced chan struct{}, op *farev1.Operation) *farev1.Ack {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.current != replaced {
		return nil
	}
	err := t.change(op)
	if err == nil {
		return &farev1.Ack{Id: op.Id, Level: farev1.AckLevel_ACK_LEVEL_IN_EFFECT}
	}
	code := status.Code(err)
	if code == codes.Unknown { // an error of the layer that is not a gRPC status
		code = codes.Internal
	}
	return &farev1.Ack{Id: op.Id, Level: farev1.AckLevel_ACK_LEVEL_REFUSED, Code: uint32(code), Message: status.Convert(err).Message()}
}

// change validates an operation, has the layer apply it, and then stores it; on an error nothing changes. The caller
// holds mu.
func (t *table) change(op *farev1.Operation) error {
	switch o := op.GetOp().(type) {
	case *farev1.Operation_SubPort:
		device := o.SubPort.GetDevice()
		if _, ok := t.topology.devices[device]; !ok {
			return status.Errorf(codes.NotFound, "sub-port %q is not part of Forwarding", device)
		}
		if t.down[device] != o.SubPort.Up {
			return nil
		}
		if err := t.below.apply(op); err != nil {
			return err
		}
		t.down[device] = !o.SubPort.Up
	case *farev1.Operation_SetVector:
		if err := t.checkGroup(o.SetVector); err != nil {
			return err
		}
		t.topology.sort(o.SetVector)
		if proto.Equal(t.groups[o.SetVector.Id], o.SetVector) {
			return nil
		}
		if err := t.below.apply(op); err != nil {
			return err
		}
		t.groups[o.SetVector.Id] = o.SetVector
	case *farev1.Operation_DeleteVector:
		if o.DeleteVector == 0 {
			return invalid("group 0 does not exist; use 1 or higher")
		}
		if users := t.users[o.DeleteVector]; users > 0 {
			return status.Errorf(codes.FailedPrecondition, "group %d is used by %d destinations; move or delete them first", o.DeleteVector, users)
		}
		if t.groups[o.DeleteVector] == nil {
			return nil
		}
		if err := t.below.apply(op); err != nil {
			return err
		}
		delete(t.groups, o.DeleteVector)
		delete(t.users, o.DeleteVector)
	case *farev1.Operation_SetDestination:
		k, err := t.checkDestination(o.SetDestination)
		if err != nil {
			return err
		}
		return t.setDestination(op, k, o.SetDestination.Vector)
	case *farev1.Operation_DeleteDestination:
		// The source group may no longer be part of Forwarding.
		k, err := parseKey(o.DeleteDestination.GetSource(), o.DeleteDestination.GetPrefix())
		if err != nil {
			return err
		}
		return t.setDestination(op, k, 0)
	default:
		return invalid("operation %d has no field that this data plane knows", op.GetId())
	}
	return nil
}

// setDestination changes a destination's group; 0 deletes the destination. The caller holds mu.
func (t *table) setDestination(op *farev1.Operation, k key, group uint32) error {
	before := t.destinations[k] // 0 if the destination does not exist
	if before == group {
		return nil
	}
	if err := t.below.apply(op); err != nil {
		return err
	}
	t.users[before]--
	t.users[group]++
	t.destinations[k] = group
	if group == 0 {
		delete(t.destinations, k)
	}
	return nil
}

// Snapshot implements farev1.DataplaneServiceServer.
func (t *table) Snapshot(_ *farev1.SnapshotRequest, stream grpc.ServerStreamingServer[farev1.SnapshotResponse]) error {
	all := t.snapshot()
	if err := stream.Send(&farev1.SnapshotResponse{SubPorts: all.SubPorts}); err != nil {
		return err
	}
	const chunk = 256 // objects per message: far below gRPC's limit of 4 MiB
	for groups := range slices.Chunk(all.Vectors, chunk) {
		if err := stream.Send(&farev1.SnapshotResponse{Vectors: groups}); err != nil {
			return err
		}
	}
	for destinations := range slices.Chunk(all.Destinations, chunk) {
		if err := stream.Send(&farev1.SnapshotResponse{Destinations: destinations}); err != nil {
			return err
		}
	}
	return nil
}

// snapshot copies the table, in the order of the contract.
func (t *table) snapshot() *farev1.SnapshotResponse {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := &farev1.SnapshotResponse{}
	if t.topology == nil {
		return all
	}
	for device := range t.topology.devices {
		all.SubPorts = append(all.SubPorts, &farev1.SubPortState{Device: device, Up: !t.down[device]})
	}
	slices.SortFunc(all.SubPorts, func(a, b *farev1.SubPortState) int { return cmp.Compare(a.Device, b.Device) })
	for _, group := range t.groups {
		group = proto.CloneOf(group)
		t.topology.sort(group) // a Hello may have changed the order of sub-ports
		all.Vectors = append(all.Vectors, group)
	}
	slices.SortFunc(all.Vectors, func(a, b *farev1.Vector) int { return cmp.Compare(a.Id, b.Id) })
	keys := make([]key, 0, len(t.destinations))
	for k := range t.destinations {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b key) int {
		return cmp.Or(cmp.Compare(t.topology.rank(a.source), t.topology.rank(b.source)), a.source.Compare(b.source), a.prefix.Compare(b.prefix))
	})
	for _, k := range keys {
		all.Destinations = append(all.Destinations, &farev1.Destination{Prefix: k.prefix.String(), Source: nameText(k.source), Vector: t.destinations[k]})
	}
	return all
}
