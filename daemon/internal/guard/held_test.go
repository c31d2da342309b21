package guard

import (
	"math/rand/v2"
	"testing"

	"github.com/fared/fared/fare"
)

// TestHeldSharesAttributes compares the table with a map of pointers, and requires that attributes without a route are
// forgotten and their numbers used for others.
func TestHeldSharesAttributes(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	h, twin := newHeld(1000), map[byte]*fare.Attributes{}
	var pool [6]*fare.Attributes
	for range 50_000 {
		if i := rng.IntN(len(pool)); pool[i] == nil || rng.IntN(50) == 0 {
			pool[i] = &fare.Attributes{Signals: fare.Signals(i)}
		}
		last, family := byte(rng.IntN(12)), IPv4Unicast
		prefix := []byte{32, 10, 0, 0, last}
		if last%2 == 0 {
			prefix, family = append(append([]byte{128, 0xfd}, make([]byte, 14)...), last), IPv6Unicast
		}
		if attrs := pool[rng.IntN(len(pool))]; attrs != nil && rng.IntN(3) > 0 {
			h.set(prefix, attrs)
			twin[last] = attrs
		} else if _, there := twin[last]; h.remove(prefix, family) != there {
			t.Fatalf("prefix %d: removed %v, want %v", last, !there, there)
		} else {
			delete(twin, last)
		}
		used := map[*fare.Attributes]bool{}
		for _, attrs := range twin {
			used[attrs] = true
		}
		if h.get(prefix) != twin[last] || len(h.v4)+len(h.v6) != len(twin) || len(h.shared.numbers) != len(used) {
			t.Fatalf("prefix %d has %p, want %p; %d routes, want %d; %d attributes, want %d", last, h.get(prefix), twin[last], len(h.v4)+len(h.v6), len(twin), len(h.shared.numbers), len(used))
		}
	}
	if n := len(h.shared.entries); n > 13 { // a route's new attributes get their number before its old ones lose theirs
		t.Errorf("%d numbers for 12 routes", n)
	}
}
