package slotfile

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/internal/slotlayout"
)

// benchTable publishes a table of n pairs with a number of slots; 64 vectors serve all pairs.
func benchTable(b *testing.B, n, slotCount int) (*Writer, *model, string) {
	b.Helper()
	w, path := open(b)
	m := newModel()
	for id := range uint32(64) {
		v := &Vector{slotlayout.VectorReachable | slotlayout.VectorInEffect, make([]slotlayout.Slot, slotCount)}
		for i := range v.Slots {
			v.Slots[i] = slotlayout.Slot{Share: 1e9 / uint32(slotCount), SubPort: uint16(i % 4), Plane: uint8(i % 4 / 2), Flags: slotlayout.SlotInEffect}
		}
		m.vectors[1+id] = v
	}
	for i := range n {
		p := &Pair{PairKey: pairOf(i), Vector: 1 + uint32(i%64), InEffect: true}
		p.Source[14] += byte(i >> 16)
		m.pairs[p.PairKey], m.ports[p.PairKey] = p, 50000
	}
	s := shape(slotCount)
	s.Pairs, s.Vectors = n, 64
	if err := w.Begin(s); err != nil {
		b.Fatal(err)
	}
	step(b, w, newModel(), m, 1)
	return w, m, path
}

// BenchmarkLookup measures look-ups of random pairs by the Go reader.
func BenchmarkLookup(b *testing.B) {
	for _, c := range []struct{ pairs, slots int }{{64, 8}, {16384, 16}, {131072, 16}, {131072, 128}} {
		b.Run(fmt.Sprintf("pairs=%d/slots=%d", c.pairs, c.slots), func(b *testing.B) {
			_, m, path := benchTable(b, c.pairs, c.slots)
			table := reader(b, path)
			var keys []PairKey
			for key := range m.pairs {
				keys = append(keys, key)
			}
			rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
			buf := make([]slots.Slot, 0, c.slots)
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				key := &keys[i%len(keys)]
				if _, err := table.Lookup(slotlayout.Addr(key.Source), slotlayout.Addr(key.Destination), buf); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			if info, err := os.Stat(path); err == nil {
				b.ReportMetric(float64(info.Size())/float64(c.pairs), "file-bytes/pair")
			}
		})
	}
}

// BenchmarkChange measures one publication: a vector that 16,384 pairs share changes its shares, or one pair changes
// its vector.
func BenchmarkChange(b *testing.B) {
	w, m, _ := benchTable(b, 16384, 16)
	key := pairOf(0)
	changes := map[string]func(to *model, i int){
		"vector": func(to *model, i int) { to.vectors[1].Slots[0].Share = uint32(i) },
		"pair":   func(to *model, i int) { to.pairs[key].Vector = 1 + uint32(i%2) },
	}
	for _, name := range []string{"vector", "pair"} {
		b.Run(name, func(b *testing.B) {
			next := m.clone()
			c := change(newModel(), m, 2)
			c.Vector = func(p *Pair) *Vector { return next.vectors[p.Vector] }
			c.Ports = next.portsOf
			c.Vectors = func(func(uint32, *Vector) bool) {}
			c.Pairs = func(func(*Pair) bool) {}
			if name == "vector" {
				c.Vectors = func(yield func(uint32, *Vector) bool) { yield(1, next.vectors[1]) }
			} else {
				c.Pairs = slices.Values([]*Pair{next.pairs[key]})
			}
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				changes[name](next, i)
				if err := w.Apply(c); err != nil {
					b.Fatal(err)
				}
				if err := w.Publish(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkBuild measures a whole table, without the choice of source ports.
func BenchmarkBuild(b *testing.B) {
	for _, n := range []int{16384, 131072} {
		b.Run(fmt.Sprintf("pairs=%d", n), func(b *testing.B) {
			w, m, _ := benchTable(b, n, 16)
			s := shape(16)
			s.Pairs, s.Vectors = n, 64
			c := change(newModel(), m, 1)
			for b.Loop() {
				if err := w.Begin(s); err != nil {
					b.Fatal(err)
				}
				if err := w.Apply(c); err != nil {
					b.Fatal(err)
				}
				if err := w.Publish(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
