package coretest

import (
	"io"
	"net/netip"
	"strings"
	"testing"

	"github.com/fared/fared/wecmp"
)

// Do steps a core and fails the test on an error.
func Do[Event any](t testing.TB, c interface{ Step(Event) error }, events ...Event) {
	t.Helper()
	for _, ev := range events {
		if err := c.Step(ev); err != nil {
			t.Fatalf("%+v: %v", ev, err)
		}
	}
}

// Describe returns the description of a core's state.
func Describe(c interface{ Describe(io.Writer) }) string {
	var b strings.Builder
	c.Describe(&b)
	return b.String()
}

// VectorFrom returns the vector of a destination for a source group, or false if the destination is unreachable.
func VectorFrom(c interface {
	Destinations(visit func(source int, prefix netip.Prefix, vector uint32))
	Vector(uint32) (wecmp.VectorView, bool)
}, source int, d netip.Prefix) (wecmp.VectorView, bool) {
	var id uint32
	c.Destinations(func(i int, prefix netip.Prefix, vector uint32) {
		if i == source && prefix == d {
			id = vector
		}
	})
	v, ok := c.Vector(id)
	return v, ok && v.Reachable
}
