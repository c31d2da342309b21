package journal

import (
	"cmp"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/prefixmap"
)

// image is the state that results from the records: the last operation for each object. Objects in their initial state
// are not in it.
type image struct {
	forwarding *farev1.Forwarding // nil if there is none
	// objects holds all but destinations; destinations holds those by the text of the source group and prefix.
	// Destinations whose operations have other fields are in objects.
	objects      map[key]object
	destinations prefixmap.Map[string, target]
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

// target is a destination whose operation has only a prefix in canonical text, a source group, a vector and pairs, as
// those of this version have.
type target struct {
	vector uint32
	bytes  uint32              // length of its record
	pairs  []*farev1.PairPorts // replaced, never modified: they are the data plane's too
}

// targetOf returns the fields of an operation that sets such a destination, without the length of its record; otherwise
// false.
func targetOf(operation *farev1.Operation) (source string, prefix netip.Prefix, set target, ok bool) {
	op, ok := operation.GetOp().(*farev1.Operation_SetDestination)
	if !ok {
		return "", netip.Prefix{}, target{}, false
	}
	d := op.SetDestination
	prefix, ok = canonicalPrefix(d.GetPrefix())
	ok = ok && len(d.DrainBeforeMove)+len(d.ProtoReflect().GetUnknown())+len(operation.ProtoReflect().GetUnknown()) == 0
	return d.GetSource(), prefix, target{vector: d.GetVector(), pairs: d.GetPairs()}, ok
}

// same reports whether two destinations have the same vector and pairs.
func (d *target) same(other target) bool {
	return d.vector == other.vector && slices.EqualFunc(d.pairs, other.pairs, func(a, b *farev1.PairPorts) bool { return a == b || proto.Equal(a, b) })
}

// canonicalPrefix parses the text of a prefix, and reports whether the text equals that of Prefix.String.
func canonicalPrefix(text string) (netip.Prefix, bool) {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, false
	}
	var b [64]byte
	return prefix, string(prefix.AppendTo(b[:0])) == text
}

func newImage() image { return image{objects: map[key]object{}} }

// keyOf returns the key of the object of an operation, and reports whether the operation returns the object to its
// initial state. Kind 0 marks an operation without an object.
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
	if k.kind == 0 {
		return false
	}
	standing := i.targetAt(k)
	before, there := i.objects[k]
	switch {
	case gone:
		return there || standing != nil
	case standing != nil:
		_, _, set, ok := targetOf(operation)
		return !ok || !standing.same(set)
	}
	return !there || !proto.Equal(before.operation, operation)
}

// targetAt returns the destination with a key, or nil.
func (i *image) targetAt(k key) *target {
	if k.kind != destinationKey {
		return nil
	}
	prefix, ok := canonicalPrefix(k.name)
	if !ok {
		return nil
	}
	return i.destinations.Get(k.source, prefix)
}

// apply applies an operation whose record has the given length in bytes.
func (i *image) apply(operation *farev1.Operation, bytes int64) {
	k, gone := keyOf(operation)
	if k.kind == 0 {
		return
	}
	source, prefix, set, ok := targetOf(operation)
	if standing := i.targetAt(k); standing != nil {
		i.objectBytes -= int64(standing.bytes)
		if gone || !ok {
			prefix, _ := canonicalPrefix(k.name)
			i.destinations.Delete(k.source, prefix)
		}
	}
	i.objectBytes -= i.objects[k].bytes
	delete(i.objects, k)
	switch {
	case gone:
		return
	case ok:
		set.bytes = uint32(bytes)
		d, _ := i.destinations.Add(source, prefix)
		*d = set
	default:
		i.objects[k] = object{operation, bytes}
	}
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

// item is an object of a copy of the image. operation is nil for one of image.destinations.
type item struct {
	key       key
	operation *farev1.Operation
	target    target
}

// items returns a copy of all objects, in an order in which each one can be set.
func (i *image) items() []item {
	all := make([]item, 0, len(i.objects)+i.destinations.Len())
	for k, o := range i.objects {
		all = append(all, item{key: k, operation: o.operation})
	}
	for k, d := range i.destinations.All() {
		all = append(all, item{key: key{kind: destinationKey, source: k.Group, name: k.Prefix.String()}, target: *d})
	}
	slices.SortFunc(all, func(x, y item) int {
		a, b := &x.key, &y.key
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.id, b.id), cmp.Compare(a.source, b.source), cmp.Compare(a.name, b.name))
	})
	return all
}

// set returns the operation that sets an item's object.
func (x *item) set() *farev1.Operation {
	if x.operation != nil {
		return x.operation
	}
	return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{
		Prefix: x.key.name, Source: x.key.source, Vector: x.target.vector, Pairs: x.target.pairs,
	}}}
}

// snapshot returns the objects that are not in their initial state. The result shares the messages of the image.
func (i *image) snapshot() *farev1.SnapshotResponse {
	all := &farev1.SnapshotResponse{}
	for _, x := range i.items() {
		switch op := x.set().Op.(type) {
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
