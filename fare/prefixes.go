package fare

import (
	"iter"
	"net/netip"
)

// prefixes maps prefixes to values. An IPv4 host prefix, which a destination usually is, takes a key of 4 octets in
// place of 32. The zero value is empty and ready for use.
type prefixes[V any] struct {
	hosts  map[[4]byte]V // IPv4 host prefixes
	others map[netip.Prefix]V
}

// newPrefixes reserves memory for n host prefixes.
func newPrefixes[V any](n int) prefixes[V] { return prefixes[V]{hosts: make(map[[4]byte]V, n)} }

func isHost4(p netip.Prefix) bool { return p.Bits() == 32 && p.Addr().Is4() }

func (m *prefixes[V]) get(p netip.Prefix) (v V, ok bool) {
	if isHost4(p) {
		v, ok = m.hosts[p.Addr().As4()]
	} else {
		v, ok = m.others[p]
	}
	return v, ok
}

func (m *prefixes[V]) set(p netip.Prefix, v V) {
	switch {
	case !isHost4(p):
		if m.others == nil {
			m.others = map[netip.Prefix]V{}
		}
		m.others[p] = v
	default:
		if m.hosts == nil {
			m.hosts = map[[4]byte]V{}
		}
		m.hosts[p.Addr().As4()] = v
	}
}

func (m *prefixes[V]) delete(p netip.Prefix) {
	if isHost4(p) {
		delete(m.hosts, p.Addr().As4())
	} else {
		delete(m.others, p)
	}
}

func (m *prefixes[V]) len() int { return len(m.hosts) + len(m.others) }

// keys yields the prefixes in no order.
func (m *prefixes[V]) keys() iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for a := range m.hosts {
			if !yield(netip.PrefixFrom(netip.AddrFrom4(a), 32)) {
				return
			}
		}
		for p := range m.others {
			if !yield(p) {
				return
			}
		}
	}
}
