package guard

import (
	"net/netip"

	"github.com/fared/fared/fare"
)

// hostLen4 is the number of octets of an IPv4 host route in NLRI, including the length octet.
const hostLen4 = 5

// wellFormed reports whether nlri is a sequence of prefixes of at most bits
// bits (RFC 4271, Section 4.3).
func wellFormed(nlri []byte, bits int) bool {
	for len(nlri) > 0 {
		n := int(nlri[0])
		if n > bits || prefixLen(nlri[0]) > len(nlri) {
			return false
		}
		nlri = nlri[prefixLen(nlri[0]):]
	}
	return true
}

// prefixLen returns the number of octets of a prefix of bits bits, including
// the length octet.
func prefixLen(bits byte) int { return 1 + (int(bits)+7)/8 }

// held is the peer's table: the host routes that have passed and were not withdrawn since. The limit bounds its size,
// whatever the peer sends. Routes refer to their attributes by number, because many routes share few of them.
type held struct {
	v4     map[[4]byte]uint32
	v6     map[[16]byte]uint32
	shared sharing
	limit  int
}

func newHeld(limit int) held {
	return held{v4: make(map[[4]byte]uint32), v6: make(map[[16]byte]uint32), limit: limit}
}

func (h *held) full() bool { return len(h.v4)+len(h.v6) >= h.limit }

// get returns the attributes of a host route, or nil if it is not held.
func (h *held) get(prefix []byte) *fare.Attributes {
	if len(prefix) == hostLen4 {
		return h.shared.at(h.v4[[4]byte(prefix[1:])])
	}
	return h.shared.at(h.v6[[16]byte(prefix[1:])])
}

// has reports whether the host route of an address is held.
func (h *held) has(a netip.Addr) bool {
	if a.Is4() {
		return h.v4[a.As4()] != 0
	}
	return h.v6[a.As16()] != 0
}

// set adds or replaces a host route.
func (h *held) set(prefix []byte, attrs *fare.Attributes) {
	n := h.shared.acquire(attrs)
	if len(prefix) == hostLen4 {
		replace(h, h.v4, [4]byte(prefix[1:]), n)
	} else {
		replace(h, h.v6, [16]byte(prefix[1:]), n)
	}
}

func replace[K comparable](h *held, table map[K]uint32, key K, n uint32) {
	h.shared.release(table[key])
	table[key] = n
}

// remove removes a prefix; it returns false if the set did not contain it,
// which is always the case for a prefix that is not a host route.
func (h *held) remove(prefix []byte, family Family) bool {
	switch {
	case family == IPv4Unicast && prefix[0] == 32:
		return remove(h, h.v4, [4]byte(prefix[1:]))
	case family == IPv6Unicast && prefix[0] == 128:
		return remove(h, h.v6, [16]byte(prefix[1:]))
	}
	return false
}

func remove[K comparable](h *held, table map[K]uint32, key K) bool {
	n := table[key]
	if n != 0 {
		delete(table, key)
		h.shared.release(n)
	}
	return n != 0
}

// sharing numbers the attributes of routes; 0 means none.
type sharing struct {
	entries []shared // by number-1
	free    []uint32 // numbers
	numbers map[*fare.Attributes]uint32
	last    uint32 // acquired
}

// shared are attributes with the number of their routes.
type shared struct {
	attrs  *fare.Attributes
	routes uint32
}

func (s *sharing) at(n uint32) *fare.Attributes {
	if n == 0 {
		return nil
	}
	return s.entries[n-1].attrs
}

// acquire returns the number of a route's attributes.
func (s *sharing) acquire(attrs *fare.Attributes) uint32 {
	n := s.last
	if s.at(n) != attrs {
		if n = s.numbers[attrs]; n == 0 {
			n = s.add(attrs)
		}
		s.last = n
	}
	s.entries[n-1].routes++
	return n
}

func (s *sharing) add(attrs *fare.Attributes) (n uint32) {
	if last := len(s.free) - 1; last >= 0 {
		n, s.free = s.free[last], s.free[:last]
	} else {
		s.entries = append(s.entries, shared{})
		n = uint32(len(s.entries))
	}
	s.entries[n-1].attrs = attrs
	if s.numbers == nil {
		s.numbers = map[*fare.Attributes]uint32{}
	}
	s.numbers[attrs] = n
	return n
}

// release gives a number back that a route has had; 0 is ignored.
func (s *sharing) release(n uint32) {
	if n == 0 {
		return
	}
	e := &s.entries[n-1]
	if e.routes--; e.routes == 0 {
		delete(s.numbers, e.attrs)
		e.attrs = nil
		s.free = append(s.free, n)
	}
}

// ranges are the accepted ranges, split by family.
type ranges struct{ v4, v6 []netip.Prefix }

func newRanges(accept []netip.Prefix) ranges {
	var r ranges
	for _, p := range accept {
		if p.Addr().Is4() {
			r.v4 = append(r.v4, p.Masked())
		} else if p.IsValid() {
			r.v6 = append(r.v6, p.Masked())
		}
	}
	return r
}

// of returns the ranges of a family.
func (r *ranges) of(family Family) []netip.Prefix {
	if family == IPv4Unicast {
		return r.v4
	}
	return r.v6
}

// judge returns None if a prefix may become a destination, else the reason why not.
func (r *ranges) judge(prefix []byte, family Family) Reason {
	var addr netip.Addr
	within := r.v4
	switch {
	case family == IPv4Unicast && prefix[0] == 32:
		addr = netip.AddrFrom4([4]byte(prefix[1:]))
	case family == IPv6Unicast && prefix[0] == 128:
		addr, within = netip.AddrFrom16([16]byte(prefix[1:])), r.v6
	default:
		return RouteNotHost
	}
	if addr.IsMulticast() {
		return RouteMulticast
	}
	if addr.Is4In6() {
		// RFC 4291, Section 2.5.5.2: it stands for an IPv4 address, which
		// belongs to the other family.
		return RouteOutside
	}
	for _, p := range within {
		if p.Contains(addr) {
			return None
		}
	}
	return RouteOutside
}
