package status

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/fared/fared/internal/testkit/gate"
)

// TestPagesLikeSortedMap checks that a page table behaves like a sorted map, and that a published table never changes.
func TestPagesLikeSortedMap(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 7))
		twin := map[Key]*destination{}
		var table pages
		count := 0
		type published struct {
			table pages
			want  []*destination
		}
		var old []published
		for build := uint64(1); build <= 40; build++ {
			e := edit{pages: table, count: count, build: build, shared: true}
			grow := rng.IntN(3) > 0 // phases of growth and of shrinking
			for range rng.IntN(300) {
				p := Key{prefixAt(rng.IntN(3000)).Prefix, rng.IntN(2)}
				if rng.IntN(4) > 0 == grow {
					d := &destination{key: p, revision: build}
					twin[p] = d
					e.set(d)
				} else {
					_, was := twin[p]
					delete(twin, p)
					if e.remove(p) != was {
						t.Fatalf("seed %d: remove %s: said %v", seed, p, !was)
					}
				}
			}
			table, count = e.pages, e.count
			want := make([]*destination, 0, len(twin))
			for _, d := range twin {
				want = append(want, d)
			}
			slices.SortFunc(want, func(a, b *destination) int { return compareKeys(a.key, b.key) })
			old = append(old, published{table, want})
			if count != len(want) {
				t.Fatalf("seed %d build %d: count %d, want %d", seed, build, count, len(want))
			}
			for _, p := range table {
				if len(p.items) == 0 || len(p.items) > pageMax {
					t.Fatalf("seed %d: page of %d", seed, len(p.items))
				}
				for _, d := range p.items {
					if d.revision > p.revision {
						t.Fatalf("seed %d: page revision %d below item's %d", seed, p.revision, d.revision)
					}
				}
			}
			for range 20 {
				p := Key{prefixAt(rng.IntN(3000)).Prefix, rng.IntN(2)}
				if table.get(p) != twin[p] {
					t.Fatalf("seed %d: get %s", seed, p)
				}
				i, _ := slices.BinarySearchFunc(want, p, func(d *destination, p Key) int { return compareKeys(d.key, p) })
				if got := slices.Collect(table.from(p, 0)); !slices.Equal(got, want[i:]) {
					t.Fatalf("seed %d: from %s: %d items, want %d", seed, p, len(got), len(want)-i)
				}
			}
		}
		for i, o := range old {
			if got := slices.Collect(o.table.from(Key{}, 0)); !slices.Equal(got, o.want) {
				t.Fatalf("seed %d: the table of build %d changed afterwards", seed, i+1)
			}
		}
	}
}

// TestPagesSkipOld checks that a page is skipped only if it has no later revision.
func TestPagesSkipOld(t *testing.T) {
	e := edit{build: 1, shared: true}
	for n := range 4 * pageMax {
		e.set(&destination{key: prefixAt(n * 3), revision: 1})
	}
	next := edit{pages: e.pages, count: e.count, build: 2, shared: true}
	next.set(&destination{key: prefixAt(0), revision: 2})
	got := slices.Collect(next.pages.from(Key{}, 1))
	if len(got) == 0 || len(got) > pageMax || got[0].revision != 2 {
		t.Errorf("from revision 1: %d destinations, want one page that starts with the changed one", len(got))
	}
}
