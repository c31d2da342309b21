package guard

import "net/netip"

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

// held is the set of host routes that were passed to the speaker and not
// withdrawn since. The limit bounds its size, whatever the peer sends.
type held struct {
	v4    map[[4]byte]struct{}
	v6    map[[16]byte]struct{}
	limit int
}

func newHeld(limit int) held {
	return held{v4: make(map[[4]byte]struct{}), v6: make(map[[16]byte]struct{}), limit: limit}
}

// add adds a host route; it returns false if that would exceed the limit.
func (h *held) add(prefix []byte) bool {
	full := len(h.v4)+len(h.v6) >= h.limit
	if len(prefix) == hostLen4 {
		key := [4]byte(prefix[1:])
		if _, there := h.v4[key]; !there {
			if full {
				return false
			}
			h.v4[key] = struct{}{}
		}
		return true
	}
	key := [16]byte(prefix[1:])
	if _, there := h.v6[key]; !there {
		if full {
			return false
		}
		h.v6[key] = struct{}{}
	}
	return true
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
	for _, p := range within {
		if p.Contains(addr) {
			return None
		}
	}
	return RouteOutside
}
