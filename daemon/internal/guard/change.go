package guard

import (
	"net/netip"

	"github.com/fared/fared/fare"
)

// Change is one change of the peer's routes, or an End-of-RIB.
type Change struct {
	// Prefix is a host route; invalid if the change is an End-of-RIB.
	Prefix netip.Prefix
	// Attrs has the AS path, of at most MaxASPath numbers, and the communities
	// of bandwidth as on the wire, at most MaxCommunities. It is never changed,
	// and routes with equal attributes may share it. nil withdraws the prefix.
	Attrs *fare.Attributes
	// New reports that the session did not hold the announced prefix before.
	New bool
	// Ended is the family whose End-of-RIB arrived (RFC 4724, Section 2), the
	// first one of the session; else 0.
	Ended Family
}

// TakeChanges returns the changes since its last call, in the order in which
// the peer sent them. An announcement that changes nothing is no change. The
// slice is valid until the next call of FromPeer, which must come from the same
// goroutine.
func (g *Guard) TakeChanges() []Change {
	in := &g.in
	changes := in.changes
	if cap(changes) > keptChanges {
		in.changes = nil
	} else {
		in.changes = changes[:0]
	}
	return changes
}

// keptChanges is the capacity up to which the memory of changes is reused: a
// table of thousands of routes arrives once.
const keptChanges = 512

// hostRoute returns a host route in NLRI encoding as a prefix.
func hostRoute(prefix []byte) netip.Prefix {
	if len(prefix) == hostLen4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte(prefix[1:])), 32)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte(prefix[1:])), 128)
}

// prefixOf returns a prefix in NLRI encoding; bits beyond its length are cleared.
func prefixOf(nlri []byte, family Family) netip.Prefix {
	if family == IPv4Unicast {
		var a [4]byte
		copy(a[:], nlri[1:])
		return netip.PrefixFrom(netip.AddrFrom4(a), int(nlri[0])).Masked()
	}
	var a [16]byte
	copy(a[:], nlri[1:])
	return netip.PrefixFrom(netip.AddrFrom16(a), int(nlri[0])).Masked()
}

// describes reports whether an announcement has the given attributes.
func (u *update) describes(a *fare.Attributes) bool {
	if len(u.path) != len(a.ASPath) || len(u.extendeds) != 8*len(a.Communities) || u.signals != a.Signals || u.wide != a.Extended {
		return false
	}
	for i, as := range a.ASPath {
		if u.path[i] != as {
			return false
		}
	}
	for i := range a.Communities {
		if a.Communities[i] != fare.Community(u.extendeds[8*i:]) {
			return false
		}
	}
	return true
}

// attributes returns the attributes of the current announcement.
func (in *inbound) attributes() *fare.Attributes {
	if in.last == nil || !in.update.describes(in.last) {
		in.last = in.update.attributes()
	}
	return in.last
}

// usual holds attributes of the usual size in one object.
type usual struct {
	fare.Attributes
	path        [4]uint32
	communities [1]fare.Community
}

// attributes returns a copy of the announcement's attributes.
func (u *update) attributes() *fare.Attributes {
	var a *fare.Attributes
	if len(u.path) <= len(usual{}.path) && len(u.extendeds) <= 8*len(usual{}.communities) {
		o := new(usual)
		a = &o.Attributes
		a.ASPath, a.Communities = o.path[:0], o.communities[:0]
	} else {
		a = &fare.Attributes{ASPath: make([]uint32, 0, len(u.path)), Communities: make([]fare.Community, 0, len(u.extendeds)/8)}
	}
	a.ASPath, a.Signals, a.Extended = append(a.ASPath, u.path...), u.signals, u.wide
	for list := u.extendeds; len(list) > 0; list = list[8:] {
		a.Communities = append(a.Communities, fare.Community(list))
	}
	return a
}
