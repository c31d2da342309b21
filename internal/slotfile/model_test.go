package slotfile

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/fared/fared/client/slots"
	"github.com/fared/fared/client/slots/slotstest"
	"github.com/fared/fared/internal/slotlayout"
	"github.com/fared/fared/internal/testkit/gate"
)

// services are those of the tests' tables.
var services = []slots.Service{{Protocol: 17, Port: 4791}, {Protocol: 17, Port: 4444}, {Protocol: 6, Port: 4793}}

// shape is the shape of the tests' tables: two planes of two sub-ports, two sources, and three services.
func shape(maxSlots int) Shape {
	return Shape{
		Instance: "test", Planes: []string{"p0", "p1"},
		SubPorts: []SubPort{{"eth0", 0}, {"eth1", 0}, {"eth2", 1}, {"eth3", 1}},
		Sources:  []Source{{netip.MustParseAddr("10.255.0.1"), 0}, {netip.MustParseAddr("2001:db8::1"), 1}}, MaxSlots: maxSlots,
		Services: []Service{Service(services[0]), Service(services[1]), Service(services[2])},
	}
}

// open opens a writer of a path in a temporary directory.
func open(t testing.TB) (*Writer, string) {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "fared-") // in memory, as /run: where / is an overlay, as in containers, no reader sees that a directory is deleted
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "slots")
	return reopen(t, path), path
}

func reopen(t testing.TB, path string) *Writer {
	t.Helper()
	w, err := Open(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

func reader(t testing.TB, path string) *slots.Table {
	t.Helper()
	r, err := slots.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// model is a table as plain maps.
type model struct {
	vectors map[uint32]*Vector
	pairs   map[PairKey]*Pair
	ports   map[PairKey]uint16 // the first source port for the first service
}

func newModel() *model {
	return &model{map[uint32]*Vector{}, map[PairKey]*Pair{}, map[PairKey]uint16{}}
}

func (m *model) clone() *model {
	out := newModel()
	for id, v := range m.vectors {
		out.vectors[id] = &Vector{v.Flags, slices.Clone(v.Slots)}
	}
	for key, p := range m.pairs {
		q := *p
		q.Drain = slices.Clone(p.Drain)
		out.pairs[key] = &q
	}
	maps.Copy(out.ports, m.ports)
	return out
}

// firstPort returns the first source port of a pair for a service; its remainder is also the placement.
func (m *model) firstPort(key PairKey, service int) uint16 {
	return m.ports[key] + 1001*uint16(service)
}

// portsOf implements Change.Ports: consecutive ports.
func (m *model) portsOf(p *Pair, service int, buf []uint16) ([]uint16, uint32) {
	first := m.firstPort(p.PairKey, service)
	for i := range m.vectors[p.Vector].Slots {
		buf = append(buf, first+uint16(i))
	}
	return buf, uint32(first % 4)
}

// change returns the change from one model to another.
func change(from, to *model, revision uint64) Change {
	c := Change{Revision: revision, Ports: to.portsOf, Vector: func(p *Pair) *Vector { return to.vectors[p.Vector] }}
	for key := range from.pairs {
		if to.pairs[key] == nil {
			c.Remove = append(c.Remove, key)
		}
	}
	c.Vectors = func(yield func(uint32, *Vector) bool) {
		for _, id := range slices.Sorted(maps.Keys(to.vectors)) {
			if old := from.vectors[id]; old == nil || !equalVectors(old, to.vectors[id]) {
				if !yield(id, to.vectors[id]) {
					return
				}
			}
		}
		for id := range from.vectors {
			if to.vectors[id] == nil && !yield(id, nil) {
				return
			}
		}
	}
	var changed []*Pair
	keys := slices.SortedFunc(maps.Keys(to.pairs), func(a, b PairKey) int {
		return cmp.Or(bytes.Compare(a.Source[:], b.Source[:]), bytes.Compare(a.Destination[:], b.Destination[:]))
	})
	for _, key := range keys {
		p, old := to.pairs[key], from.pairs[key]
		places := old != nil && p.Vector != 0 && from.vectors[p.Vector] != nil && !samePlaces(from.vectors[p.Vector].Slots, to.vectors[p.Vector].Slots)
		if old == nil || places || old.Vector != p.Vector || old.InEffect != p.InEffect || !slices.Equal(old.Drain, p.Drain) || from.ports[key] != to.ports[key] {
			changed = append(changed, p)
		}
	}
	c.Pairs = slices.Values(changed)
	return c
}

func equalVectors(a, b *Vector) bool { return a.Flags == b.Flags && slices.Equal(a.Slots, b.Slots) }

// text describes a pair of the model, with the source ports for a service, as describe does one of a reader.
func (m *model) text(key PairKey, service int) string {
	p, first := m.pairs[key], m.firstPort(key, service)
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", slotlayout.Addr(key.Source), slotlayout.Addr(key.Destination))
	v := m.vectors[p.Vector]
	if v == nil {
		return b.String() + " vector=0 uniform"
	}
	fmt.Fprintf(&b, " vector=%d %s", p.Vector, slotlayout.Placements[first%4])
	if v.Flags&slotlayout.VectorReachable != 0 {
		b.WriteString(" reachable")
	}
	if p.InEffect && v.Flags&slotlayout.VectorInEffect != 0 {
		b.WriteString(" in-effect")
	}
	for i, s := range v.Slots {
		sub := int(s.SubPort)
		if s.SubPort == slotlayout.NoSubPort {
			sub = -1
		}
		fmt.Fprintf(&b, "; %d.%d %d:%d", s.Plane, sub, s.Share, first+uint16(i))
		if s.Flags&slotlayout.SlotParked != 0 {
			b.WriteString(" parked")
		}
		if s.Flags&slotlayout.SlotDrain != 0 || slices.Contains(p.Drain, uint16(i)) {
			b.WriteString(" drain")
		}
		if p.InEffect && s.Flags&slotlayout.SlotInEffect != 0 {
			b.WriteString(" in-effect")
		}
	}
	return b.String()
}

// describe describes a pair of a reader.
func describe(p slots.Pair) string { return slotstest.Describe(&p) }

// check compares a reader of the first service with the model, and new ones of all services.
func (m *model) check(t *testing.T, r *slots.Table) {
	t.Helper()
	m.checkService(t, r, 0)
	for i, s := range services {
		of, err := slots.OpenFor(r.Path(), s)
		if err != nil {
			t.Fatal(err)
		}
		m.checkService(t, of, i)
		of.Close()
	}
}

// checkService compares a reader of a service with the model, by look-up and by iteration.
func (m *model) checkService(t *testing.T, r *slots.Table, service int) {
	t.Helper()
	want := map[string]bool{}
	var buf []slots.Slot
	for key := range m.pairs {
		want[m.text(key, service)] = true
		p, err := r.Lookup(slotlayout.Addr(key.Source), slotlayout.Addr(key.Destination), buf)
		if err != nil || describe(p) != m.text(key, service) {
			t.Fatalf("%v\n%s, want\n%s", err, describe(p), m.text(key, service))
		}
		if !r.Current(&p) {
			t.Fatalf("%s is not current", describe(p))
		}
		buf = p.Slots
	}
	n := 0
	for p, err := range r.Pairs() {
		if n++; err != nil || !want[describe(p)] {
			t.Fatalf("%v: %s is not in the table", err, describe(p))
		}
	}
	if n != len(want) || r.Status().Pairs != n {
		t.Fatalf("%d pairs, %d counted, want %d", n, r.Status().Pairs, len(want))
	}
}

// random changes the model: vectors change in place or in their places, come and go, and pairs move between them.
func (m *model) random(r *rand.Rand, maxSlots, pairs int) {
	flip := func(n int) bool { return r.IntN(n) == 0 }
	for id := uint32(1); id <= 12; id++ {
		old := m.vectors[id]
		if old == nil && flip(3) || old != nil && flip(6) {
			v := &Vector{Flags: uint32(r.IntN(4)), Slots: make([]slotlayout.Slot, 1+r.IntN(maxSlots))}
			for i := range v.Slots {
				v.Slots[i] = slotlayout.Slot{SubPort: uint16(r.IntN(4)), Plane: uint8(r.IntN(2))}
				if flip(8) {
					v.Slots[i].SubPort = slotlayout.NoSubPort
				}
			}
			m.vectors[id] = v
		}
		if v := m.vectors[id]; v != nil && flip(2) {
			for i := range v.Slots {
				v.Slots[i].Share, v.Slots[i].Flags = r.Uint32N(1e9), uint8(r.IntN(8))
			}
		}
		if old != nil && flip(8) {
			delete(m.vectors, id)
		}
	}
	ids := append(slices.Collect(maps.Keys(m.vectors)), 0)
	slices.Sort(ids)
	for range r.IntN(2 * pairs) {
		key := pairOf(r.IntN(pairs))
		if flip(4) {
			delete(m.pairs, key)
			continue
		}
		p := &Pair{PairKey: key, Vector: ids[r.IntN(len(ids))], InEffect: flip(2)}
		for slot := range maxSlots {
			if flip(8) {
				p.Drain = append(p.Drain, uint16(slot))
			}
		}
		m.pairs[key], m.ports[key] = p, 50000+uint16(r.IntN(1000))
	}
	for key, p := range m.pairs {
		if p.Vector != 0 && m.vectors[p.Vector] == nil {
			q := *p
			q.Vector, q.Drain = 0, nil
			m.pairs[key] = &q
		}
	}
}

// pairOf returns the n-th pair.
func pairOf(n int) PairKey {
	if n%2 == 0 {
		return Key(netip.MustParseAddr("10.255.0.1"), netip.AddrFrom4([4]byte{10, 255, byte(n >> 8), byte(n)}))
	}
	a := netip.MustParseAddr("2001:db8::2").As16()
	a[8], a[9] = byte(n>>8), byte(n)
	return Key(netip.MustParseAddr("2001:db8::1"), netip.AddrFrom16(a))
}

// step applies the change from the present model to the next.
func step(t testing.TB, w *Writer, from, to *model, revision uint64) {
	t.Helper()
	if err := w.Apply(change(from, to, revision)); err != nil {
		t.Fatal(err)
	}
	if err := w.Publish(); err != nil {
		t.Fatal(err)
	}
}

// TestRandomChanges compares a reader with a model after each of many changes, through growths and restarts of the
// writer.
func TestRandomChanges(t *testing.T) {
	gate.Needed(t, "readers see each of random changes, and no other state")
	for seed := range uint64(7) {
		maxSlots := []int{1, 3, 4, 17, 64, 65, 128}[seed]
		if seed > 0 && maxSlots != 17 && gate.Count(t, gate.Models, 0, 1) == 0 {
			continue // the gate has the smallest table, and one whose slots do not fill words
		}
		r := rand.New(rand.NewPCG(seed, 1))
		w, path := open(t)
		m := newModel()
		if err := w.Begin(shape(maxSlots)); err != nil {
			t.Fatal(err)
		}
		step(t, w, newModel(), m, 1)
		table := reader(t, path)
		pairs := 20
		for revision := uint64(2); revision < 60; revision++ {
			if revision == 40 {
				pairs = 200 // the file grows
			}
			if revision%25 == 0 { // another process
				w.Close()
				if p := slices.Collect(maps.Keys(m.pairs)); len(p) > 0 {
					got, err := table.Lookup(slotlayout.Addr(p[0].Source), slotlayout.Addr(p[0].Destination), nil)
					if err != nil || got.Owned || table.Status().Live {
						t.Fatalf("%v: after the end of the writer a pair is owned: %t, the table live: %t", err, got.Owned, table.Status().Live)
					}
				}
				w = reopen(t, path)
				if err := w.Begin(shape(maxSlots)); err != nil {
					t.Fatal(err)
				}
				if err := w.Apply(change(newModel(), m, revision)); err != nil {
					t.Fatal(err)
				}
			}
			next := m.clone()
			next.random(r, maxSlots, pairs)
			before := table.Status()
			mark := table.Mark()
			step(t, w, m, next, revision)
			if err := w.Beat(); err != nil {
				t.Fatal(err)
			}
			m = next
			if now, err := table.Wait(t.Context(), mark); err != nil || now == mark {
				t.Fatalf("wait: %v", err)
			}
			after := table.Status() // soon after the heartbeat
			m.check(t, table)
			if after.StatusRevision != revision || after.Revision <= before.Revision || after.Run < before.Run || after.Instance != "test" || !after.Live {
				t.Fatalf("status %+v after %+v, at revision %d", after, before, revision)
			}
		}
	}
}
