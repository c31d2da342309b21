package wecmp

import (
	"strings"
	"testing"
)

// TestLeastSlots checks the least number of slots: one a sub-port with per-flow balancing, one a plane with per-packet
// balancing.
func TestLeastSlots(t *testing.T) {
	ports := []SubPort{{Name: "0"}, {Name: "1"}}
	planes := []Plane{{"a", ports}, {"b", ports}, {"c", ports}}
	for _, test := range []struct {
		mode  Mode
		slots int
		fault string
	}{
		{PerFlow, 6, ""}, {PerFlow, 5, "each sub-port needs at least one"},
		{PerPacket, 3, ""}, {PerPacket, 2, "each plane needs at least one"},
	} {
		c := Config{Planes: planes, Mode: test.mode, Slots: test.slots}
		err := c.Validate()
		if (err == nil) != (test.fault == "") || err != nil && !strings.Contains(err.Error(), test.fault) {
			t.Errorf("mode %d, %d slots: %v, want %q", test.mode, test.slots, err, test.fault)
		}
	}
}

// TestDeficitsInOrder compares deficits on both sides of zero: the one that lacks more, or has less too much, is above.
func TestDeficitsInOrder(t *testing.T) {
	order := []lack{deficit(1, 9, 1, 1), deficit(1, 3, 1, 1), deficit(1, 1, 1, 1), deficit(3, 1, 1, 1), deficit(9, 1, 1, 1)} // -8, -2, 0, 2, 8
	for i := range order {
		for k := range order {
			if got := order[i].above(order[k]); got != (i > k) {
				t.Errorf("%d above %d: %v", i, k, got)
			}
		}
	}
}
