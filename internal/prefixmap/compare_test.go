package prefixmap

import (
	"math/rand/v2"
	"net/netip"
	"testing"
)

// TestCompare compares the order with that of netip, for prefixes without host bits and some that are not valid.
func TestCompare(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	all := []netip.Prefix{{}, netip.PrefixFrom(netip.AddrFrom4([4]byte{}), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	for range 300 {
		a := [16]byte{0: byte(rng.IntN(2)), 3: byte(rng.IntN(4)), 15: byte(rng.IntN(4))}
		v4, _ := netip.AddrFrom4([4]byte(a[:4])).Prefix(rng.IntN(33))
		v6, _ := netip.AddrFrom16(a).Prefix(rng.IntN(129))
		all = append(all, v4, v6)
	}
	for _, a := range all {
		for _, b := range all {
			if got, want := Compare(a, b), a.Compare(b); got != want {
				t.Fatalf("Compare(%v, %v) = %d, want %d", a, b, got, want)
			}
		}
	}
	if n := testing.AllocsPerRun(100, func() { Compare(netip.Prefix{}, all[3]) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
