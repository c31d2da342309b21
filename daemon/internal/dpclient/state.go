package dpclient

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"net/netip"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// State is the actual or wanted state of a data plane. The zero value is empty.
type State struct {
	// SubPorts by device: up or down. Sub-ports missing in a wanted state stay unchanged.
	SubPorts map[string]bool
	// Vectors by their number on the wire.
	Vectors map[uint32]*farev1.Vector
	// Destinations with the vector of each, 1 or higher.
	Destinations map[Destination]uint32
	// Approximate holds the vectors that the data plane forwards approximately, each with its message.
	Approximate map[uint32]string
	// Pins are fingerprints of the destinations' source ports; 0 or absent means none.
	Pins map[Destination]uint64
}

const (
	// maxState bounds the memory of a Snapshot in bytes, as counted by readBack: room for 262,144 destinations and
	// 65,536 vectors of 8 members and 16 slots.
	maxState = 320 << 20
	// objectSize is the approximate memory of an object, a member or a slot, without strings.
	objectSize = 128
)

// readBack collects a Snapshot of at most maxState. The source ports of destinations do not count, because only their
// fingerprints are kept.
func readBack(stream grpc.ServerStreamingClient[farev1.SnapshotResponse], order order) (State, error) {
	state := State{
		SubPorts: map[string]bool{}, Vectors: map[uint32]*farev1.Vector{}, Approximate: map[uint32]string{},
		Destinations: map[Destination]uint32{}, Pins: map[Destination]uint64{},
	}
	size := 0
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return state, nil
		}
		if err == nil {
			if size += chunkSize(chunk); size > maxState {
				err = fmt.Errorf("the data plane returns more than %d MiB of state; restart it", maxState>>20)
			} else {
				err = state.add(chunk, order)
			}
		}
		if err != nil {
			return State{}, fmt.Errorf("snapshot: %w", err)
		}
	}
}

// chunkSize returns the approximate memory of a part of a Snapshot in bytes.
func chunkSize(chunk *farev1.SnapshotResponse) int {
	size := objectSize * (len(chunk.Approximate) + len(chunk.SubPorts) + len(chunk.Vectors) + len(chunk.Destinations))
	for _, message := range chunk.Approximate {
		size += len(message)
	}
	for _, subPort := range chunk.SubPorts {
		size += len(subPort.Device)
	}
	for _, vector := range chunk.Vectors {
		size += objectSize*(len(vector.Members)+len(vector.Slots)) + proto.Size(vector)
	}
	return size
}

// add adds a part of a Snapshot.
func (s *State) add(chunk *farev1.SnapshotResponse, order order) error {
	maps.Copy(s.Approximate, chunk.Approximate)
	for _, subPort := range chunk.SubPorts {
		s.SubPorts[subPort.Device] = subPort.Up
	}
	for _, vector := range chunk.Vectors {
		order.sort(vector)
		s.Vectors[vector.Id] = vector
	}
	for _, destination := range chunk.Destinations {
		key, err := parseDestination(destination)
		if err != nil {
			return fmt.Errorf("destination: %w; the data plane must return host prefixes", err)
		}
		if destination.Vector == 0 {
			return fmt.Errorf("destination %s has no vector; the data plane must return one", key)
		}
		s.Destinations[key] = destination.Vector
		if pins := fingerprint(destination.Pairs); pins != 0 {
			s.Pins[key] = pins
		}
	}
	return nil
}

// parseDestination parses a destination with its source group.
func parseDestination(d *farev1.Destination) (key Destination, err error) {
	if key.Prefix, err = netip.ParsePrefix(d.Prefix); err == nil && d.Source != "" {
		key.Source, err = netip.ParsePrefix(d.Source)
	}
	return key, err
}

// order maps each device to its position in Forwarding.
type order map[string]int

func newOrder(forwarding *farev1.Forwarding) order {
	o := order{}
	for _, plane := range forwarding.GetPlanes() {
		for _, subPort := range plane.SubPorts {
			o[subPort.Device] = len(o)
		}
	}
	return o
}

// sort sorts a vector into the order of Snapshot, so that equal vectors compare equal. Devices missing in Forwarding
// come last, by name.
func (o order) sort(vector *farev1.Vector) {
	place := func(device string) int {
		if at, ok := o[device]; ok {
			return at
		}
		return len(o)
	}
	slices.SortFunc(vector.Members, func(a, b *farev1.VectorMember) int {
		return cmp.Or(cmp.Compare(place(a.Device), place(b.Device)), cmp.Compare(a.Device, b.Device))
	})
	slices.SortFunc(vector.Slots, func(a, b *farev1.VectorSlot) int { return cmp.Compare(a.Slot, b.Slot) })
}

// sameVector compares two vectors without their numbers. nil equals only nil: a vector without members differs from no
// vector.
func sameVector(a, b *farev1.Vector) bool {
	if a == b {
		return true
	}
	return a != nil && b != nil && a.Source == b.Source && sameMembers(a, b) && len(a.Slots) == len(b.Slots) &&
		slices.EqualFunc(a.Slots, b.Slots, func(x, y *farev1.VectorSlot) bool {
			return samePlace(x, y) && x.SharePpb == y.SharePpb && x.DrainBeforeMove == y.DrainBeforeMove
		})
}

func sameMembers(a, b *farev1.Vector) bool {
	return slices.EqualFunc(a.Members, b.Members, func(x, y *farev1.VectorMember) bool {
		return x.Plane == y.Plane && x.Device == y.Device && x.Weight == y.Weight
	})
}

func samePlace(x, y *farev1.VectorSlot) bool {
	return x.Slot == y.Slot && x.Plane == y.Plane && x.Device == y.Device
}

// samePlaces reports whether the slots of two vectors are on the same sub-ports, so that the source ports are the same
// too.
func samePlaces(a, b *farev1.Vector) bool {
	return slices.EqualFunc(a.GetSlots(), b.GetSlots(), samePlace)
}

// contentKey is equal for vectors that sameVector considers equal.
func contentKey(vector *farev1.Vector) string {
	nameless := &farev1.Vector{Members: vector.Members, Slots: vector.Slots, Source: vector.Source}
	key, err := proto.MarshalOptions{Deterministic: true}.Marshal(nameless)
	if err != nil {
		return "" // a name that is not UTF-8: such a vector is never recognized, and refused when it is sent
	}
	return string(key)
}

// fingerprint represents the source ports of a destination: 64 bits instead of kilobytes each. It returns 0 without
// pairs.
func fingerprint(pairs []*farev1.PairPorts) uint64 {
	if len(pairs) == 0 {
		return 0
	}
	h := fnv.New64a()
	var b [3]byte
	for _, pair := range pairs {
		io.WriteString(h, pair.Source) // a hash never returns an error
		for _, port := range pair.SourcePorts {
			b[1], b[2] = byte(port>>8), byte(port)
			h.Write(b[:])
		}
		h.Write([]byte{0xff})
	}
	return max(h.Sum64(), 1)
}
