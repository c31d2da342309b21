// Package prefixmap maps destinations to small records in few bytes. A map of Go with a key of two netip.Prefix takes
// 100 to 150 bytes an entry for the keys alone. Here an IPv4 entry takes a key of 8 bytes next to its record, and 1.3
// to 2.7 numbers of 4 bytes in a table: 13 to 19 bytes and the record.
package prefixmap

import (
	"hash/maphash"
	"iter"
	"net/netip"
	"slices"
)

// chunk is the number of records that are allocated together.
const chunk = 128

// Map holds a record V for each pair of a group and a prefix. A group is, for example, the name of a source group:
// there are few, and they are never removed. The zero value is empty and ready for use. Not safe for concurrent use.
type Map[G comparable, V any] struct {
	groups []G
	// table has the IPv4 entries by hash: the index of the record and 1, or 0. Entries with the hash of another one
	// follow it; the length is a power of two.
	table []uint32
	seed  maphash.Seed // so that no peer can choose many addresses with one hash
	n4    int          // number of IPv4 entries
	v6    map[key6]uint32
	// chunks hold the records. They never move, so that pointers stay valid; memory of deleted records is used for new
	// ones.
	chunks []*records[V]
	free   []uint32
	next   uint32 // first index that was never used
}

// records are records with their IPv4 keys.
type records[V any] struct {
	keys   [chunk]uint64
	values [chunk]V
}

// noKey is the key of a record that has no IPv4 entry.
const noKey = ^uint64(0)

// key6 is a key of an IPv6 prefix, or of a prefix that is not valid; meta is the group and the length.
type key6 struct {
	address [16]byte
	meta    uint32
}

// An IPv4 key is the group, the length and the address.
const (
	lengthBits  = 8
	addressBits = 32
)

// group returns the number of a group; unless add is set, false for an unknown group.
func (m *Map[G, V]) group(g G, add bool) (uint64, bool) {
	i := slices.Index(m.groups, g)
	if i < 0 && add {
		i = len(m.groups)
		m.groups = append(m.groups, g)
	}
	return uint64(i), i >= 0
}

func key4(group uint64, p netip.Prefix) uint64 {
	a := p.Addr().As4()
	return group<<(lengthBits+addressBits) | uint64(uint8(p.Bits()))<<addressBits | uint64(a[0])<<24 | uint64(a[1])<<16 | uint64(a[2])<<8 | uint64(a[3])
}

func prefix4(key uint64) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(key >> 24), byte(key >> 16), byte(key >> 8), byte(key)}), int(uint8(key>>addressBits)))
}

// newKey6 represents the zero Prefix by the length -1.
func newKey6(group uint64, p netip.Prefix) key6 {
	k := key6{meta: uint32(group)<<lengthBits | uint32(uint8(p.Bits()))}
	if p.IsValid() {
		k.address = p.Addr().As16()
	}
	return k
}

func (k key6) prefix() netip.Prefix {
	if bits := uint8(k.meta); bits <= 128 {
		return netip.PrefixFrom(netip.AddrFrom16(k.address), int(bits))
	}
	return netip.Prefix{}
}

// find returns the index of a record.
func (m *Map[G, V]) find(g G, p netip.Prefix) (i uint32, ok bool) {
	group, ok := m.group(g, false)
	if !ok {
		return 0, false
	}
	if !isKey4(p) {
		i, ok = m.v6[newKey6(group, p)]
		return i, ok
	}
	if at, ok := m.slot(key4(group, p)); ok {
		return m.table[at] - 1, true
	}
	return 0, false
}

func isKey4(p netip.Prefix) bool { return p.Addr().Is4() && p.IsValid() }

// slot returns the place of a key in the table, or false and the place at which it may be added, if the table has one.
func (m *Map[G, V]) slot(key uint64) (at uint32, found bool) {
	if len(m.table) == 0 {
		return 0, false
	}
	mask := uint32(len(m.table) - 1)
	for at = m.home(key); m.table[at] != 0; at = (at + 1) & mask {
		if *m.key(m.table[at] - 1) == key {
			return at, true
		}
	}
	return at, false
}

// home returns the first place of a key.
func (m *Map[G, V]) home(key uint64) uint32 {
	return uint32(maphash.Comparable(m.seed, key)) & uint32(len(m.table)-1)
}

// insert adds a record with a new key to the table.
func (m *Map[G, V]) insert(key uint64, i uint32) {
	if 4*(m.n4+1) > 3*len(m.table) {
		m.grow()
	}
	at, _ := m.slot(key)
	m.table[at] = i + 1
	*m.key(i) = key
	m.n4++
}

func (m *Map[G, V]) grow() {
	before := m.table
	if before == nil {
		m.seed = maphash.MakeSeed()
	}
	m.table = make([]uint32, max(8, 2*len(before)))
	for _, n := range before {
		if n != 0 {
			at, _ := m.slot(*m.key(n - 1))
			m.table[at] = n
		}
	}
}

// remove removes a key from the table, and moves those behind it that its place separates from theirs.
func (m *Map[G, V]) remove(at uint32) {
	mask := uint32(len(m.table) - 1)
	*m.key(m.table[at] - 1) = noKey
	m.n4--
	for next := (at + 1) & mask; m.table[next] != 0; next = (next + 1) & mask {
		if home := m.home(*m.key(m.table[next] - 1)); (next-home)&mask >= (next-at)&mask {
			m.table[at] = m.table[next]
			at = next
		}
	}
	m.table[at] = 0
}

func (m *Map[G, V]) at(i uint32) *V { return &m.chunks[i/chunk].values[i%chunk] }

func (m *Map[G, V]) key(i uint32) *uint64 { return &m.chunks[i/chunk].keys[i%chunk] }

// Len returns the number of entries.
func (m *Map[G, V]) Len() int { return m.n4 + len(m.v6) }

// Get returns the record of an entry, which may be modified until the entry is deleted; nil if there is no entry. All
// prefixes that are not valid are the same.
func (m *Map[G, V]) Get(g G, p netip.Prefix) *V {
	i, ok := m.find(g, p)
	if !ok {
		return nil
	}
	return m.at(i)
}

// Add returns the record of an entry, and creates the entry with a zero record if it does not exist; added reports
// that.
func (m *Map[G, V]) Add(g G, p netip.Prefix) (v *V, added bool) {
	if i, ok := m.find(g, p); ok {
		return m.at(i), false
	}
	group, _ := m.group(g, true)
	i := m.next
	if n := len(m.free); n > 0 {
		i, m.free = m.free[n-1], m.free[:n-1]
	} else {
		if int(i/chunk) == len(m.chunks) {
			m.chunks = append(m.chunks, new(records[V]))
		}
		m.next++
	}
	if isKey4(p) {
		m.insert(key4(group, p), i)
	} else {
		*m.key(i) = noKey
		if m.v6 == nil {
			m.v6 = map[key6]uint32{}
		}
		m.v6[newKey6(group, p)] = i
	}
	return m.at(i), true
}

// Delete deletes an entry, if it exists. Its record becomes zero, and later belongs to another entry.
func (m *Map[G, V]) Delete(g G, p netip.Prefix) {
	i, ok := m.find(g, p)
	if !ok {
		return
	}
	group, _ := m.group(g, false)
	if isKey4(p) {
		at, _ := m.slot(key4(group, p))
		m.remove(at)
	} else {
		delete(m.v6, newKey6(group, p))
	}
	if m.Len() == 0 { // the table and a map keep their sizes
		*m = Map[G, V]{groups: m.groups}
		return
	}
	var zero V
	*m.at(i) = zero
	m.free = append(m.free, i)
}

// Clear deletes all entries, and keeps the memory for others.
func (m *Map[G, V]) Clear() {
	clear(m.table)
	clear(m.v6)
	for _, c := range m.chunks {
		clear(c.values[:])
	}
	m.free, m.next, m.n4 = m.free[:0], 0, 0
}

// Key is the key of an entry.
type Key[G comparable] struct {
	Group  G
	Prefix netip.Prefix
}

// All yields all entries in no order. During the iteration entries may be deleted.
func (m *Map[G, V]) All() iter.Seq2[Key[G], *V] {
	return func(yield func(Key[G], *V) bool) {
		for i := uint32(0); i < m.next; i++ {
			if k := *m.key(i); k != noKey && !yield(Key[G]{m.groups[k>>(lengthBits+addressBits)], prefix4(k)}, m.at(i)) {
				return
			}
		}
		for k, i := range m.v6 {
			if !yield(Key[G]{m.groups[k.meta>>lengthBits], k.prefix()}, m.at(i)) {
				return
			}
		}
	}
}
