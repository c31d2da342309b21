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

// held is the peer's table: the host routes that have passed and were not
// withdrawn since. The limit bounds its size, whatever the peer sends.
type held struct {
	v4    map[[4]byte]*fare.Attributes
	v6    map[[16]byte]*fare.Attributes
	limit int
}

func newHeld(limit int) held {
	return held{v4: make(map[[4]byte]*fare.Attributes), v6: make(map[[16]byte]*fare.Attributes), limit: limit}
}

func (h *held) full() bool { return len(h.v4)+len(h.v6) >= h.limit }

// get returns the attributes of a host route, or nil if it is not held.
func (h *held) get(prefix []byte) *fare.Attributes {
	if len(prefix) == hostLen4 {
		return h.v4[[4]byte(prefix[1:])]
	}
	return h.v6[[16]byte(prefix[1:])]
}

// has reports whether the host route of an address is held.
func (h *held) has(a netip.Addr) bool {
	if a.Is4() {
		return h.v4[a.As4()] != nil
	}
	return h.v6[a.As16()] != nil
}

// set adds or replaces a host route.
func (h *held) set(prefix []byte, attrs *fare.Attributes) {
	if len(prefix) == hostLen4 {
		h.v4[[4]byte(prefix[1:])] = attrs
	} else {
		h.v6[[16]byte(prefix[1:])] = attrs
	}
}

// remove removes a prefix; it returns false if the set did not contain it,
// which is always the case for a prefix that is not a host route.
func (h *held) remove(prefix []byte, family Family) bool {
	switch {
	case family == IPv4Unicast && prefix[0] == 32:
		key := [4]byte(prefix[1:])
		if _, there := h.v4[key]; !there {
			return false
		}
		delete(h.v4, key)
		return true
	case family == IPv6Unicast && prefix[0] == 128:
		key := [16]byte(prefix[1:])
		if _, there := h.v6[key]; !there {
			return false
		}
		delete(h.v6, key)
		return true
	}
	return false
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
