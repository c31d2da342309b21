package dpclient

import (
	"cmp"
	"maps"
	"slices"
)

// Class is the class of an operation. Classes are sent in this order: see Diff.
type Class uint8

// The classes, in the order of sending.
const (
	SubPortSet Class = iota
	VectorSet
	DestinationSet
	DestinationDelete
	VectorDelete
	classes
)

var classNames = [classes]string{"sub-port", "vector set", "destination set", "destination delete", "vector delete"}

func (c Class) String() string {
	if c < classes {
		return classNames[c]
	}
	return "none"
}

// Step identifies one operation; only the field of its class is set.
type Step struct {
	Class       Class
	SubPort     string
	Vector      uint32
	Destination Destination
}

// Diff returns the fewest operations that turn have into want, in an order in which no destination is ever without its
// vector: sub-port states, vector sets, destination sets, destination deletes, vector deletes; sorted within each.
func Diff(have, want State) []Step {
	var steps []Step
	for _, device := range slices.Sorted(maps.Keys(want.SubPorts)) {
		if up, known := have.SubPorts[device]; !known || up != want.SubPorts[device] {
			steps = append(steps, Step{Class: SubPortSet, SubPort: device})
		}
	}
	for _, id := range slices.Sorted(maps.Keys(want.Vectors)) {
		if !sameVector(have.Vectors[id], want.Vectors[id]) {
			steps = append(steps, Step{Class: VectorSet, Vector: id})
		}
	}
	first := len(steps)
	for destination, vector := range want.Destinations {
		if before, ok := have.Destinations[destination]; !ok || before != vector || have.Pins[destination] != want.Pins[destination] {
			steps = append(steps, Step{Class: DestinationSet, Destination: destination})
		}
	}
	for destination := range have.Destinations {
		if _, ok := want.Destinations[destination]; !ok {
			steps = append(steps, Step{Class: DestinationDelete, Destination: destination})
		}
	}
	slices.SortFunc(steps[first:], func(a, b Step) int {
		return cmp.Or(cmp.Compare(a.Class, b.Class), a.Destination.Compare(b.Destination))
	})
	for _, id := range slices.Sorted(maps.Keys(have.Vectors)) {
		if _, ok := want.Vectors[id]; !ok {
			steps = append(steps, Step{Class: VectorDelete, Vector: id})
		}
	}
	return steps
}
