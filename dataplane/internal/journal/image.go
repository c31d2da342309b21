package journal

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
)

// image is the state that the records add up to: the last word on each object. An object that is as if nothing had been
// said is not in it.
type image struct {
	forwarding *farev1.Forwarding // nil: nothing was said
	objects    map[key]object
	// Lengths of the records that would say all this.
	forwardingBytes, objectBytes int64
}

// key names an object; the order of kinds is one in which objects can be set.
type key struct {
	kind int
	id   uint32
	name string
}

const (
	groupKey = iota + 1
	destinationKey
	subPortKey
)

// object is an operation that sets it, and the length of its record.
type object struct {
	operation *farev1.Operation
	bytes     int64
}

func newImage() image { return image{objects: map[key]object{}} }

// keyOf names the object of an operation, and says whether the operation leaves it as if nothing had been said. A kind of
// 0 is an operation without an object.
func keyOf(operation *farev1.Operation) (k key, gone bool) {
	switch op := operation.GetOp().(type) {
	case *farev1.Operation_SubPort:
		return key{kind: subPortKey, name: op.SubPort.GetDevice()}, op.SubPort.GetUp()
	case *farev1.Operation_SetGroup:
		return key{kind: groupKey, id: op.SetGroup.GetId()}, false
	case *farev1.Operation_DeleteGroup:
		return key{kind: groupKey, id: op.DeleteGroup}, true
	case *farev1.Operation_SetDestination:
		return key{kind: destinationKey, name: op.SetDestination.GetPrefix()}, false
	case *farev1.Operation_DeleteDestination:
		return key{kind: destinationKey, name: op.DeleteDestination}, true
	}
	return key{}, false
}

// size is the length of a file that says only this.
func (i *image) size() int64 { return int64(len(versionBytes)) + i.forwardingBytes + i.objectBytes }

// news says whether an operation tells the image anything.
func (i *image) news(operation *farev1.Operation) bool {
	k, gone := keyOf(operation)
	before, there := i.objects[k]
	if gone || !there {
		return k.kind != 0 && gone == there
	}
	return !proto.Equal(before.operation, operation)
}

// apply takes an operation whose record has so many bytes.
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

// forward takes a Forwarding. Sub-ports that are not part of it are up when they return.
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

// operations lists what sets all objects, in an order in which each is valid.
func (i *image) operations() []*farev1.Operation {
	keys := slices.SortedFunc(maps.Keys(i.objects), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.id, b.id), cmp.Compare(a.name, b.name))
	})
	all := make([]*farev1.Operation, len(keys))
	for n, k := range keys {
		all[n] = i.objects[k].operation
	}
	return all
}

// snapshot lists what is not as if nothing had been said, around the image's messages.
func (i *image) snapshot() *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{}
	for _, operation := range i.operations() {
		switch op := operation.Op.(type) {
		case *farev1.Operation_SubPort:
			all.SubPorts = append(all.SubPorts, op.SubPort)
		case *farev1.Operation_SetGroup:
			all.Groups = append(all.Groups, op.SetGroup)
		case *farev1.Operation_SetDestination:
			all.Destinations = append(all.Destinations, op.SetDestination)
		}
	}
	slices.SortStableFunc(all.Destinations, func(a, b *farev1.Destination) int {
		x, _ := netip.ParsePrefix(a.Prefix) // what does not parse comes first, and is refused by whoever restores it
		y, _ := netip.ParsePrefix(b.Prefix)
		return x.Compare(y)
	})
	return all
}
