package status

import (
	"cmp"
	"iter"
	"slices"

	"github.com/fared/fared/internal/prefixmap"
)

// pageMax is the greatest number of destinations in a page: a build copies at most this many pointers for one change,
// and a table of 16,384 destinations has some 200 pages.
const pageMax = 128

// destination is a destination in a view. Immutable.
type destination struct {
	Destination
	key Key
	// revision of the last change of the destination itself; its vector has a separate one.
	revision uint64
}

// page holds adjacent destinations in address order. Immutable once its build is published.
type page struct {
	items []*destination
	// revision is at least that of every item; it may be higher after a removal or split.
	revision uint64
	// build is the build that created the page, and the only one that may change it.
	build uint64
}

// pages holds all destinations in address order. No page is empty.
type pages []*page

// compareKeys orders by prefix, then by source group.
func compareKeys(a, b Key) int {
	return cmp.Or(prefixmap.Compare(a.Prefix, b.Prefix), cmp.Compare(a.Source, b.Source))
}

// seek returns the first page whose last item is not before key, or len(p).
func (p pages) seek(key Key) int {
	i, _ := slices.BinarySearchFunc(p, key, func(g *page, key Key) int {
		return compareKeys(g.items[len(g.items)-1].key, key)
	})
	return i
}

func (g *page) seek(key Key) (int, bool) {
	return slices.BinarySearchFunc(g.items, key, func(d *destination, key Key) int {
		return compareKeys(d.key, key)
	})
}

// get returns the destination, or nil.
func (p pages) get(key Key) *destination {
	i := p.seek(key)
	if i == len(p) {
		return nil
	}
	if j, ok := p[i].seek(key); ok {
		return p[i].items[j]
	}
	return nil
}

// from yields the destinations from key on, including key. It skips pages without a revision after since.
func (p pages) from(key Key, since uint64) iter.Seq[*destination] {
	return func(yield func(*destination) bool) {
		first := p.seek(key)
		for i := first; i < len(p); i++ {
			if p[i].revision <= since {
				continue
			}
			j := 0
			if i == first {
				j, _ = p[i].seek(key)
			}
			for _, d := range p[i].items[j:] {
				if !yield(d) {
					return
				}
			}
		}
	}
}

// edit modifies a copy of pages during one build.
type edit struct {
	pages pages
	count int
	build uint64
	// shared reports that pages is still the slice of the last view.
	shared bool
}

// own returns page i in a form that this build may modify.
func (e *edit) own(i int) *page {
	if e.shared {
		e.pages, e.shared = slices.Clone(e.pages), false
	}
	p := e.pages[i]
	if p.build != e.build {
		items := make([]*destination, len(p.items), pageMax+1)
		copy(items, p.items)
		p = &page{items: items, revision: p.revision, build: e.build}
		e.pages[i] = p
	}
	return p
}

// insertPage inserts a page at i.
func (e *edit) insertPage(i int, p *page) {
	if e.shared {
		e.pages, e.shared = slices.Clone(e.pages), false
	}
	e.pages = slices.Insert(e.pages, i, p)
}

// set adds or replaces a destination.
func (e *edit) set(d *destination) {
	i := e.pages.seek(d.key)
	if i == len(e.pages) {
		if i == 0 {
			e.insertPage(0, &page{items: make([]*destination, 0, pageMax+1), build: e.build})
		} else {
			i-- // after all items: into the last page
		}
	}
	p := e.own(i)
	p.revision = max(p.revision, d.revision)
	j, ok := p.seek(d.key)
	if ok {
		p.items[j] = d
		return
	}
	p.items = slices.Insert(p.items, j, d)
	e.count++
	if len(p.items) > pageMax {
		at := len(p.items) / 2
		if j == pageMax {
			at = pageMax // growth at the end, as for sorted input: leave a full page behind
		}
		items := make([]*destination, len(p.items)-at, pageMax+1)
		copy(items, p.items[at:])
		clear(p.items[at:])
		p.items = p.items[:at]
		e.insertPage(i+1, &page{items: items, revision: p.revision, build: e.build})
	}
}

// remove deletes a destination and reports whether it existed.
func (e *edit) remove(key Key) bool {
	i := e.pages.seek(key)
	if i == len(e.pages) {
		return false
	}
	j, ok := e.pages[i].seek(key)
	if !ok {
		return false
	}
	p := e.own(i)
	p.items = slices.Delete(p.items, j, j+1)
	e.count--
	switch {
	case len(p.items) == 0:
		e.pages = slices.Delete(e.pages, i, i+1)
	case i+1 < len(e.pages) && len(p.items)+len(e.pages[i+1].items) <= pageMax/2:
		e.merge(i)
	case i > 0 && len(p.items)+len(e.pages[i-1].items) <= pageMax/2:
		e.merge(i - 1)
	}
	return true
}

// merge joins page i and the next, so that many removals do not leave many small pages.
func (e *edit) merge(i int) {
	p, next := e.own(i), e.pages[i+1]
	p.items = append(p.items, next.items...)
	p.revision = max(p.revision, next.revision)
	e.pages = slices.Delete(e.pages, i+1, i+2)
}
