package speaker

import (
	"slices"
	"testing"

	api "github.com/osrg/gobgp/v3/api"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

// TestConverterWrites checks that a path of 256 numbers takes two segments (RFC 4271, Section 4.3), one of 255 takes
// one, and an empty one none; a community of another kind is an error.
func TestConverterWrites(t *testing.T) {
	c := converter{carrier: guard.Carrier{}}
	for n, want := range map[int][]int{0: nil, 255: {255}, 256: {255, 1}} {
		path := make([]uint32, n)
		for i := range path {
			path[i] = uint32(65001 + i)
		}
		p, err := c.path(&Advertisement{Prefix: prefix(1), ASPath: path})
		if err != nil {
			t.Fatal(err)
		}
		var lengths []int
		var got []uint32
		for _, attr := range p.Pattrs {
			var a api.AsPathAttribute
			if attr.UnmarshalTo(&a) != nil {
				continue // another attribute
			}
			for _, s := range a.Segments {
				if s.Type != api.AsSegment_AS_SEQUENCE {
					t.Errorf("segment of type %v", s.Type)
				}
				lengths, got = append(lengths, len(s.Numbers)), append(got, s.Numbers...)
			}
		}
		if !slices.Equal(lengths, want) || !slices.Equal(got, path) {
			t.Errorf("%d numbers in segments of %v, want %v", n, lengths, want)
		}
	}
	if p, err := c.path(&Advertisement{Prefix: prefix(1), Communities: []fare.Community{{0, 2, 0, 0, 0, 0, 0, 1}}}); err == nil {
		t.Errorf("a route target is sent: %v", p)
	}
}
