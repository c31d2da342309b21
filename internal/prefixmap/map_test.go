package prefixmap

import (
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
)

type record struct{ a, b uint64 }

// prefixes returns prefixes that differ in one property each: address, length, family, form, validity.
func prefixes() []netip.Prefix {
	var all []netip.Prefix
	for _, text := range []string{"0.0.0.0/0", "0.0.0.0/32", "10.0.0.1/32", "10.0.0.0/24", "10.0.0.0/25", "255.255.255.255/32", "::/0", "::/128", "::ffff:10.0.0.1/128", "fd00::1/128", "fd00::/64",
		"ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128"} {
		all = append(all, netip.MustParsePrefix(text))
	}
	return append(all, netip.Prefix{})
}

// TestMap compares a Map with a map of Go over random operations.
func TestMap(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var m Map[string, record]
		want := map[Key[string]]record{}
		pointers := map[Key[string]]*record{}
		for range 300 {
			k := Key[string]{[]string{"", "a", "b"}[rng.IntN(3)], prefixes()[rng.IntN(len(prefixes()))]}
			if rng.IntN(5) == 0 { // more than one chunk
				k.Prefix = netip.PrefixFrom(netip.AddrFrom4([4]byte{11, 0, 0, byte(rng.IntN(200))}), 32)
			}
			if rng.IntN(200) == 0 {
				m.Clear()
				clear(want)
				clear(pointers)
			}
			if rng.IntN(3) > 0 {
				v, added := m.Add(k.Group, k.Prefix)
				before, there := want[k]
				if added == there || *v != before {
					t.Fatalf("seed %d: Add(%v) is %v, %v; want %v, %v", seed, k, *v, added, before, !there)
				}
				*v = record{rng.Uint64(), 1}
				want[k], pointers[k] = *v, v
			} else {
				m.Delete(k.Group, k.Prefix)
				delete(want, k)
				delete(pointers, k)
			}
			if m.Len() != len(want) {
				t.Fatalf("seed %d: Len %d, want %d", seed, m.Len(), len(want))
			}
		}
		got := 0
		for k, v := range m.All() {
			if w, ok := want[k]; !ok || *v != w || pointers[k] != v || m.Get(k.Group, k.Prefix) != v {
				t.Fatalf("seed %d: %v is %v, want %v, %v", seed, k, *v, w, ok)
			}
			got++
		}
		if got != len(want) {
			t.Fatalf("seed %d: All yields %d entries, want %d", seed, got, len(want))
		}
		for k := range m.All() {
			m.Delete(k.Group, k.Prefix)
		}
		if m.Len() != 0 || m.Get("a", prefixes()[0]) != nil || m.Get("unknown", prefixes()[0]) != nil || len(m.chunks) != 0 {
			t.Fatalf("seed %d: %d entries and %d chunks after all were deleted", seed, m.Len(), len(m.chunks))
		}
	}
}

// BenchmarkMemory reports the bytes of an entry without its record, next to a map of Go.
func BenchmarkMemory(b *testing.B) {
	const n = 131072
	prefix := func(i int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32)
	}
	measure := func(name string, fill func() any) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				filled := fill()
				runtime.GC()
				runtime.ReadMemStats(&after)
				b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "B/entry")
				runtime.KeepAlive(filled)
			}
		})
	}
	measure("Map", func() any {
		m := new(Map[netip.Prefix, uint64])
		for i := range n {
			m.Add(netip.Prefix{}, prefix(i))
		}
		return m
	})
	measure("map", func() any {
		m := map[Key[netip.Prefix]]uint64{}
		for i := range n {
			m[Key[netip.Prefix]{Prefix: prefix(i)}] = 0
		}
		return m
	})
}
