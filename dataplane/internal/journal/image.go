package journal

import (
	"cmp"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/prefixmap"
)

// image is the state that results from the records: the last operation for each object. Objects in their initial state are
// not in it.
type image struct {
	forwarding *farev1.Forwarding // nil if there is none
	// objects holds all but plain destinations; plain holds those by the text of the source group and prefix.
	objects map[key]object
	plain   prefixmap.Map[string, plain]
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

// plain is a destination whose operation has only a prefix in canonical text, a source group and a vector: nearly every destination, unless the
// data plane places flows.
type plain struct {
	vector uint32
	bytes  uint32 // length of its record
}

// plainOf returns the fields of an operation that sets a plain destination; otherwise false.
func plainOf(operation *farev1.Operation) (source string, prefix netip.Prefix, vector uint32, ok bool) {
	op, ok := operation.GetOp().(*farev1.Operation_SetDestination)
	if !ok {
		return "", netip.Prefix{}, 0, false
	}
	d := op.SetDestination
	prefix, ok = canonicalPrefix(d.GetPrefix())
	ok = ok && len(d.Pairs)+len(d.DrainBeforeMove)+len(d.ProtoReflect().GetUnknown())+len(operation.ProtoReflect().GetUnknown()) == 0
	return d.GetSource(), prefix, d.GetVector(), ok
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
	if k.kind == 0 {
		return false
	}
	standing := i.plainAt(k)
	before, there := i.objects[k]
	switch {
	case gone:
		return there || standing != nil
	case standing != nil:
		_, _, vector, ok := plainOf(operation)
		return !ok || vector != standing.vector
	}
	return !there || !proto.Equal(before.operation, operation)
}

// plainAt returns the plain destination with a key, or nil.
func (i *image) plainAt(k key) *plain {
	if k.kind != destinationKey {
		return nil
	}
	prefix, ok := canonicalPrefix(k.name)
	if !ok {
		return nil
	}
	return i.plain.Get(k.source, prefix)
}

// apply applies an operation whose record has the given length in bytes.
func (i *image) apply(operation *farev1.Operation, bytes int64) {
	k, gone := keyOf(operation)
	if k.kind == 0 {
		return
	}
	source, prefix, vector, isPlain := plainOf(operation)
	if standing := i.plainAt(k); standing != nil {
		i.objectBytes -= int64(standing.bytes)
		if gone || !isPlain {
			prefix, _ := canonicalPrefix(k.name)
			i.plain.Delete(k.source, prefix)
		}
	}
	i.objectBytes -= i.objects[k].bytes
	delete(i.objects, k)
	switch {
	case gone:
		return
	case isPlain:
		d, _ := i.plain.Add(source, prefix)
		*d = plain{vector, uint32(bytes)}
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

// item is an object of a copy of the image. operation is nil for a plain destination.
type item struct {
	key       key
	operation *farev1.Operation
	vector    uint32
}

// items returns a copy of all objects, in an order in which each one can be set.
func (i *image) items() []item {
	all := make([]item, 0, len(i.objects)+i.plain.Len())
	for k, o := range i.objects {
		all = append(all, item{key: k, operation: o.operation})
	}
	for k, d := range i.plain.All() {
		all = append(all, item{key: key{kind: destinationKey, source: k.Group, name: k.Prefix.String()}, vector: d.vector})
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
	return &farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: x.key.name, Source: x.key.source, Vector: x.vector}}}
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
