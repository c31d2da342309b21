package journal

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// image is the state that results from the records: the last operation for each object. Objects in their initial state are
// not in it.
type image struct {
	forwarding *farev1.Forwarding // nil if there is none
	objects    map[key]object
	// Lengths of the records that are needed for this state.
	forwardingBytes, objectBytes int64
}

// key identifies an object; the order of kinds is one in which objects can be set.
type key struct {
	kind   int
	id     uint32
	source string // of a destination
	name   string
}

const (
	groupKey = iota + 1
	destinationKey
	subPortKey
)

// object is an operation that sets the object, and the length of its record.
type object struct {
	operation *farev1.Operation
	bytes     int64
}

func newImage() image { return image{objects: map[key]object{}} }

// keyOf returns the key of the object of an operation, and reports whether the operation returns the object to its initial
// state. Kind 0 marks an operation without an object.
func keyOf(operation *farev1.Operation) (k key, gone bool) {
	switch op := operation.GetOp().(type) {
	case *farev1.Operation_SubPort:
		return key{kind: subPortKey, name: op.SubPort.GetDevice()}, op.SubPort.GetUp()
	case *farev1.Operation_SetVector:
		return key{kind: groupKey, id: op.SetVector.GetId()}, false
	case *farev1.Operation_DeleteVector:
		return key{kind: groupKey, id: op.DeleteVector}, true
	case *farev1.Operation_SetDestination:
		return key{kind: destinationKey, source: op.SetDestination.GetSource(), name: op.SetDestination.GetPrefix()}, false
	case *farev1.Operation_DeleteDestination:
		return key{kind: destinationKey, source: op.DeleteDestination.GetSource(), name: op.DeleteDestination.GetPrefix()}, true
	}
	return key{}, false
}

// size returns the length of a file that contains only this state.
func (i *image) size() int64 { return int64(len(versionBytes)) + i.forwardingBytes + i.objectBytes }

// news reports whether an operation changes the image.
func (i *image) news(operation *farev1.Operation) bool {
	k, gone := keyOf(operation)
	before, there := i.objects[k]
	if gone || !there {
		return k.kind != 0 && gone == there
	}
	return !proto.Equal(before.operation, operation)
}

// apply applies an operation whose record has the given length in bytes.
func (i *image) apply(operation *farev1.Operation, bytes int64) {
	k, gone := keyOf(operation)
	i.objectBytes -= i.objects[k].bytes
	if gone || k.kind == 0 {
		delete(i.objects, k)
		return
	}
	i.objects[k] = object{operation, bytes}
	i.objectBytes += bytes
}

// forward applies a Forwarding. Sub-ports that it does not contain are up when they return.
func (i *image) forward(forwarding *farev1.Forwarding) {
	i.forwarding = forwarding
	devices := map[string]bool{}
	for _, plane := range forwarding.GetPlanes() {
		for _, subPort := range plane.SubPorts {
			devices[subPort.Device] = true
		}
	}
	for k, o := range i.objects {
		if k.kind == subPortKey && !devices[k.name] {
			i.objectBytes -= o.bytes
			delete(i.objects, k)
		}
	}
}

// operations returns operations that set all objects, in an order in which each one is valid.
func (i *image) operations() []*farev1.Operation {
	keys := slices.SortedFunc(maps.Keys(i.objects), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.id, b.id), cmp.Compare(a.source, b.source), cmp.Compare(a.name, b.name))
	})
	all := make([]*farev1.Operation, len(keys))
	for n, k := range keys {
		all[n] = i.objects[k].operation
	}
	return all
}

// snapshot returns the objects that are not in their initial state. The result shares the messages of the image.
func (i *image) snapshot() *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{}
	for _, operation := range i.operations() {
		switch op := operation.Op.(type) {
		case *farev1.Operation_SubPort:
			all.SubPorts = append(all.SubPorts, op.SubPort)
		case *farev1.Operation_SetVector:
			all.Vectors = append(all.Vectors, op.SetVector)
		case *farev1.Operation_SetDestination:
			all.Destinations = append(all.Destinations, op.SetDestination)
		}
	}
	slices.SortStableFunc(all.Destinations, func(a, b *farev1.Destination) int {
		x, _ := netip.ParsePrefix(a.Prefix) // invalid prefixes come first, and are refused when they are restored
		y, _ := netip.ParsePrefix(b.Prefix)
		return cmp.Or(cmp.Compare(a.Source, b.Source), x.Compare(y))
	})
	return all
}
