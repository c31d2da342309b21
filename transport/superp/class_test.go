package superp

import (
	"math/rand/v2"
	"net/netip"
	"testing"
)

// TestPools compares the pools with counts of each class: every class that has connections has an equal part, whatever
// others keep.
func TestPools(t *testing.T) {
	const all = 1000
	rng := rand.New(rand.NewPCG(1, 1))
	var p pools
	connections, kept := map[uint8]int{}, map[uint8]int{}
	for range 10_000 {
		class := uint8(rng.IntN(8)) << 5
		switch {
		case rng.IntN(2) == 0:
			p.join(class)
			connections[class]++
		case connections[class] > 0:
			p.leave(class)
			if connections[class]--; connections[class] == 0 {
				delete(connections, class)
			}
		}
		if n := rng.IntN(5) - 2; kept[class]+n >= 0 {
			p.keep(class, n)
			kept[class] += n
		}
		for class := range connections {
			if got, want := p.left(class, all), all/len(connections)-kept[class]; got != want {
				t.Fatalf("class %#x of %d has %d buffers left, want %d", class, len(connections), got, want)
			}
		}
	}
}

// TestWindowsOfClasses checks that connections of one class to a peer share a congestion window, and that those of
// another class and to another peer do not.
func TestWindowsOfClasses(t *testing.T) {
	c := NewCore(Config{}, nil)
	peer, other := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	first := c.join(peer, 0xb8)
	rooms := []struct {
		flight interface{ Room() int }
		shared bool
	}{{c.join(peer, 0xb8), true}, {c.join(peer, 0), false}, {c.join(peer, 0xbc), false}, {c.join(other, 0xb8), false}}
	before := first.Room()
	first.Add(2)
	for i, x := range rooms {
		if got := before - x.flight.Room(); got != 0 != x.shared {
			t.Errorf("flight %d: %d packets less", i, got)
		}
	}
}
