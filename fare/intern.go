package fare

import (
	"hash/maphash"
	"slices"
)

// link makes a struct a member of one internSet.
type link[T any] struct {
	hash uint64
	next *T
}

type interned[T any] interface {
	*T
	chain() *link[T]
}

// internSet finds equal values by hash. The caller compares the values: it
// walks from first along chain().next. Unlike a map, the set allocates only
// when it grows.
type internSet[T any, P interned[T]] struct {
	buckets []*T // the length is a power of two or 0
	n       int
}

func (s *internSet[T, P]) first(hash uint64) *T {
	if len(s.buckets) == 0 {
		return nil
	}
	return s.buckets[hash&uint64(len(s.buckets)-1)]
}

func (s *internSet[T, P]) insert(x *T, hash uint64) {
	if s.n == len(s.buckets) {
		old := s.buckets
		s.buckets = make([]*T, max(16, 2*len(old)))
		for _, head := range old {
			for head != nil {
				next := P(head).chain().next
				s.put(head)
				head = next
			}
		}
	}
	P(x).chain().hash = hash
	s.put(x)
	s.n++
}

func (s *internSet[T, P]) put(x *T) {
	l := P(x).chain()
	head := &s.buckets[l.hash&uint64(len(s.buckets)-1)]
	l.next, *head = *head, x
}

func (s *internSet[T, P]) remove(x *T) {
	l := P(x).chain()
	at := &s.buckets[l.hash&uint64(len(s.buckets)-1)]
	for *at != x {
		at = &P(*at).chain().next
	}
	*at, l.next = l.next, nil
	s.n--
}

// attributeSet is one distinct Attributes, shared by the routes that have it.
type attributeSet struct {
	link[attributeSet]
	attrs *Attributes
	refs  int
	heir  *attributeSet // during [Table.Inherit]: the set with the same attributes in the other table; otherwise nil
}

func (a *attributeSet) chain() *link[attributeSet] { return &a.link }

// attributePool interns Attributes.
type attributePool struct {
	set  internSet[attributeSet, *attributeSet]
	free []*attributeSet
}

// intern returns the set equal to attrs with one more reference. The seed is secret, so that a neighbor that chooses
// attributes cannot make chains long. No order visible outside the package depends on hashes.
func (p *attributePool) intern(seed maphash.Seed, attrs *Attributes) *attributeSet {
	var h maphash.Hash
	h.SetSeed(seed)
	for i := range attrs.Communities {
		h.Write(attrs.Communities[i][:])
	}
	for _, as := range attrs.ASPath {
		maphash.WriteComparable(&h, as)
	}
	maphash.WriteComparable(&h, attrs.Signals)
	maphash.WriteComparable(&h, attrs.Extended)
	hash := h.Sum64()
	for a := p.set.first(hash); a != nil; a = a.next {
		if a.hash == hash && (a.attrs == attrs || slices.Equal(a.attrs.Communities, attrs.Communities) &&
			slices.Equal(a.attrs.ASPath, attrs.ASPath) && a.attrs.Signals == attrs.Signals && a.attrs.Extended == attrs.Extended) {
			a.refs++
			return a
		}
	}
	var a *attributeSet
	if n := len(p.free); n > 0 {
		a, p.free = p.free[n-1], p.free[:n-1]
	} else {
		a = new(attributeSet)
	}
	a.attrs, a.refs = attrs, 1
	p.set.insert(a, hash)
	return a
}

func (p *attributePool) release(a *attributeSet) {
	if a.refs--; a.refs == 0 {
		p.set.remove(a)
		a.attrs = nil
		p.free = recycle(p.free, a)
	}
}

// recycled is the greatest number of unused records of a kind that are kept for new ones. Most of those of a burst, for
// example of groups that exist only while a fabric loads, are left to the garbage collector.
const recycled = 1 << 10

func recycle[T any](free []*T, x *T) []*T {
	if len(free) == recycled {
		return free
	}
	return append(free, x)
}
