package dpclient

import "testing"

// TestNewsOfAFlood checks that the events of many objects are taken in parts, each object's once and in order.
func TestNewsOfAFlood(t *testing.T) {
	const size = 2*maxTaken + 1
	var n news
	for i := range uint32(size) {
		n.report(&object{few: &few{Vector: i}, Kind: KindVector, change: 1, done: 1})
	}
	var parts []int
	next := uint32(0)
	for buf := n.take(nil); len(buf) > 0; buf = n.take(buf[:0]) {
		parts = append(parts, len(buf))
		for _, e := range buf {
			if e.Kind != InEffect || e.Object.Vector != next {
				t.Fatalf("event %+v, want that of vector %d", e, next)
			}
			next++
		}
	}
	if next != size || len(parts) != 3 || parts[0] != maxTaken {
		t.Errorf("%d of %d events in parts of %v", next, size, parts)
	}
}
