package guard

import "net/netip"

// prefix sizes: octets of a host route in NLRI, length octet included.
const (
	hostLen4 = 5
	hostLen6 = 17
)

// wellFormed tells whether nlri is a sequence of prefixes of at most bits bits
// (RFC 4271, Section 4.3).
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

// prefixLen is how many octets a prefix of that many bits takes, the length
// octet included.
func prefixLen(bits byte) int { return 1 + (int(bits)+7)/8 }

// held is the set of host routes that went to the speaker and were not
// withdrawn since. Its size is bounded by the limit, whatever the peer sends.
type held struct {
	v4    map[[4]byte]struct{}
	v6    map[[16]byte]struct{}
	limit int
}

func newHeld(limit int) held {
	return held{v4: make(map[[4]byte]struct{}), v6: make(map[[16]byte]struct{}), limit: limit}
}

// add puts a host route in; false if that would exceed the limit.
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

// remove takes a prefix out; false if it was not in, as one that is not a
// host route never is.
func (h *held) remove(prefix []byte, family Family) bool {
	switch {
	case family == IPv4Unicast && len(prefix) == hostLen4:
		key := [4]byte(prefix[1:])
		if _, there := h.v4[key]; !there {
			return false
		}
		delete(h.v4, key)
		return true
	case family == IPv6Unicast && len(prefix) == hostLen6 && prefix[0] == 128:
		key := [16]byte(prefix[1:])
		if _, there := h.v6[key]; !there {
			return false
		}
		delete(h.v6, key)
		return true
	}
	return false
}

// ranges are the accepted ones, split by family.
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

// judge tells whether one prefix may become a destination.
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
	for _, p := range within {
		if p.Contains(addr) {
			return None
		}
	}
	return RouteOutside
}
