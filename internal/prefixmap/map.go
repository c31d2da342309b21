// Package prefixmap maps destinations to small records in few bytes. A map of Go with a key of two netip.Prefix takes
// 100 to 150 bytes an entry for the keys alone. Here an IPv4 entry takes a key of 8 bytes and an index of 4 in a map,
// and its record in a slice: 16 to 32 bytes and the record.
package prefixmap

import (
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
	v4     map[uint64]uint32
	v6     map[key6]uint32
	// chunks hold the records. They never move, so that pointers stay valid; memory of deleted records is used for new
	// ones.
	chunks []*[chunk]V
	free   []uint32
	next   uint32 // first index that was never used
}

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
	if p.Addr().Is4() && p.IsValid() {
		i, ok = m.v4[key4(group, p)]
	} else {
		i, ok = m.v6[newKey6(group, p)]
	}
	return i, ok
}

func (m *Map[G, V]) at(i uint32) *V { return &m.chunks[i/chunk][i%chunk] }

// Len returns the number of entries.
func (m *Map[G, V]) Len() int { return len(m.v4) + len(m.v6) }

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
			m.chunks = append(m.chunks, new([chunk]V))
		}
		m.next++
	}
	if p.Addr().Is4() && p.IsValid() {
		if m.v4 == nil {
			m.v4 = map[uint64]uint32{}
		}
		m.v4[key4(group, p)] = i
	} else {
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
	if p.Addr().Is4() && p.IsValid() {
		delete(m.v4, key4(group, p))
	} else {
		delete(m.v6, newKey6(group, p))
	}
	if m.Len() == 0 { // a map keeps its size
		*m = Map[G, V]{groups: m.groups}
		return
	}
	var zero V
	*m.at(i) = zero
	m.free = append(m.free, i)
}

// Clear deletes all entries, and keeps the memory for others.
func (m *Map[G, V]) Clear() {
	clear(m.v4)
	clear(m.v6)
	for _, c := range m.chunks {
		clear(c[:])
	}
	m.free, m.next = m.free[:0], 0
}

// Key is the key of an entry.
type Key[G comparable] struct {
	Group  G
	Prefix netip.Prefix
}

// All yields all entries in no order. During the iteration entries may be deleted.
func (m *Map[G, V]) All() iter.Seq2[Key[G], *V] {
	return func(yield func(Key[G], *V) bool) {
		for k, i := range m.v4 {
			if !yield(Key[G]{m.groups[k>>(lengthBits+addressBits)], prefix4(k)}, m.at(i)) {
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
