package dpclient

import (
	"testing"
	"unsafe"
)

// TestSizeOfADestination bounds the memory of a destination: there may be 131,072. All share the fields of other kinds,
// which must not change.
func TestSizeOfADestination(t *testing.T) {
	if size := unsafe.Sizeof(object{}); size > 176 {
		t.Errorf("an object has %d bytes, at most 176 fit the runtime's size class", size)
	}
	d1 := dst(1)
	o := newDestination(d1)
	if o.few != &none || o.key() != d1 || o.name() != (Object{Kind: KindDestination, Destination: d1}) {
		t.Errorf("%+v is not %s without fields of other kinds", o, d1)
	}
	if none.SubPort != "" || none.Vector != 0 || none.wantVector != nil || none.wire != nil || len(none.wanters) > 0 || none.formers != 0 || none.approximate != "" {
		t.Errorf("a destination has changed the fields of other kinds: %+v", none)
	}
}
