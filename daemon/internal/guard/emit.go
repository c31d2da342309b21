package guard

import (
	"encoding/binary"
	"net/netip"

	"github.com/fared/fared/fare"
)

// emitter writes canonical UPDATE messages. Its buffers are reused.
type emitter struct {
	attrs []byte // path attributes except NEXT_HOP and MP_REACH
	hopAt int    // offset in attrs at which NEXT_HOP belongs

	withdrawn4, withdrawn6 []byte // prefixes to withdraw
	nlri4, nlri6           []byte // prefixes to announce
}

func (e *emitter) reset() {
	e.attrs, e.hopAt = e.attrs[:0], 0
	e.withdrawn4, e.withdrawn6 = e.withdrawn4[:0], e.withdrawn6[:0]
	e.nlri4, e.nlri6 = e.nlri4[:0], e.nlri6[:0]
}

func (e *emitter) withdraw(prefix []byte, family Family) {
	if family == IPv4Unicast {
		e.withdrawn4 = append(e.withdrawn4, prefix...)
	} else {
		e.withdrawn6 = append(e.withdrawn6, prefix...)
	}
}

func (e *emitter) announce(prefix []byte, family Family) {
	if family == IPv4Unicast {
		e.nlri4 = append(e.nlri4, prefix...)
	} else {
		e.nlri6 = append(e.nlri6, prefix...)
	}
}

// describe writes the attributes of u, whose path has at most MaxASPath
// numbers, with AS numbers of width octets: about a kilobyte at most, so that a
// message has room for prefixes. Types ascend, as RFC 4271, Section 5
// recommends.
func (e *emitter) describe(u *update, width int) {
	b := append(e.attrs[:0], flagTransitive, attrOrigin, 1, u.origin)
	b = appendPathAttribute(b, flagTransitive, attrASPath, u.path, width)
	e.hopAt = len(b)
	if u.med != nil {
		b = append(appendHead(b, flagOptional, attrMED, 4), u.med...)
	}
	if signals := u.signals.Communities(); len(signals) > 0 {
		b = appendHead(b, flagOptional|flagTransitive, attrCommunities, 4*len(signals))
		for _, community := range signals {
			b = binary.BigEndian.AppendUint32(b, community)
		}
	}
	b = appendList(b, attrExtended, u.extendeds)
	if width == 2 && needsFourOctets(u.path) {
		// RFC 6793, Section 4.2.2: AS4_PATH preserves the numbers that AS_PATH cannot represent.
		b = appendPathAttribute(b, flagOptional|flagTransitive, attrAS4Path, u.path, 4)
	}
	if u.wide != (fare.IPv6Community{}) {
		b = appendList(b, attrIPv6Extended, u.wide[:])
	}
	e.attrs = b
}

// appendHead appends flags, type and length of an attribute.
func appendHead(b []byte, flags, kind byte, n int) []byte {
	if n > 255 {
		return append(b, flags|flagExtendedLength, kind, byte(n>>8), byte(n))
	}
	return append(b, flags, kind, byte(n))
}

// appendList appends an optional transitive attribute unless it is empty.
func appendList(b []byte, kind byte, value []byte) []byte {
	if len(value) == 0 {
		return b
	}
	return append(appendHead(b, flagOptional|flagTransitive, kind, len(value)), value...)
}

// hops are the next hops to write: 4, 16 or 32 octets, empty if there is none.
type hops struct{ v4, v6 []byte }

// appendUpdates appends the collected prefixes: withdrawals before
// announcements, in as many messages as necessary. The withdrawals of a family
// fit one message: they arrived in one message, with at least as much overhead.
// IPv4 prefixes are sent in the classic field if hops.v4 has four octets, else
// by MP_REACH (RFC 8950, Section 3).
func (e *emitter) appendUpdates(b []byte, h hops) []byte {
	if len(e.withdrawn4) > 0 {
		start := len(b)
		b = binary.BigEndian.AppendUint16(beginMessage(b, TypeUpdate), uint16(len(e.withdrawn4)))
		b = endMessage(append(append(b, e.withdrawn4...), 0, 0), start)
	}
	if len(e.withdrawn6) > 0 {
		b = appendUnreach(b, IPv6Unicast, e.withdrawn6)
	}
	if len(h.v4) == 4 {
		for rest := e.nlri4; len(rest) > 0; {
			var part []byte
			part, rest = split(rest, MaxMessage-HeaderLen-4-len(e.attrs)-7)
			start := len(b)
			b = append(beginMessage(b, TypeUpdate), 0, 0)
			b = binary.BigEndian.AppendUint16(b, uint16(len(e.attrs)+7))
			b = append(b, e.attrs[:e.hopAt]...)
			b = append(appendHead(b, flagTransitive, attrNextHop, 4), h.v4...)
			b = append(b, e.attrs[e.hopAt:]...)
			b = endMessage(append(b, part...), start)
		}
	} else {
		b = e.appendReach(b, IPv4Unicast, h.v4, e.nlri4)
	}
	return e.appendReach(b, IPv6Unicast, h.v6, e.nlri6)
}

// appendReach announces rest by MP_REACH, which comes first (RFC 7606, Section
// 5.1).
func (e *emitter) appendReach(b []byte, family Family, hop, rest []byte) []byte {
	for len(rest) > 0 {
		var part []byte
		part, rest = split(rest, MaxMessage-HeaderLen-4-len(e.attrs)-4-5-len(hop))
		value := 5 + len(hop) + len(part)
		start := len(b)
		b = append(beginMessage(b, TypeUpdate), 0, 0, 0, 0)
		attrs := len(b)
		b = appendHead(b, flagOptional, attrReach, value)
		b = append(b, 0, family.afi(), 1, byte(len(hop)))
		b = append(append(b, hop...), 0)
		b = append(append(b, part...), e.attrs...)
		binary.BigEndian.PutUint16(b[attrs-2:], uint16(len(b)-attrs))
		b = endMessage(b, start)
	}
	return b
}

// appendUnreach appends an UPDATE with one MP_UNREACH.
func appendUnreach(b []byte, family Family, nlri []byte) []byte {
	start := len(b)
	b = append(beginMessage(b, TypeUpdate), 0, 0, 0, 0)
	attrs := len(b)
	b = appendHead(b, flagOptional, attrUnreach, 3+len(nlri))
	b = append(append(b, 0, family.afi(), 1), nlri...)
	binary.BigEndian.PutUint16(b[attrs-2:], uint16(len(b)-attrs))
	return endMessage(b, start)
}

// appendEndOfRIB appends the End-of-RIB marker (RFC 4724, Section 2).
func appendEndOfRIB(b []byte, family Family) []byte {
	if family != IPv4Unicast {
		return appendUnreach(b, family, nil)
	}
	start := len(b)
	return endMessage(append(beginMessage(b, TypeUpdate), 0, 0, 0, 0), start)
}

// split cuts nlri after the last prefix that ends within room.
func split(nlri []byte, room int) (part, rest []byte) {
	if len(nlri) <= room {
		return nlri, nil
	}
	n := 0
	for n+prefixLen(nlri[n]) <= room {
		n += prefixLen(nlri[n])
	}
	return nlri[:n], nlri[n:]
}

// octets returns the address as a next hop; empty if it is not valid.
func octets(a netip.Addr) []byte {
	if !a.IsValid() {
		return nil
	}
	return a.Unmap().WithZone("").AsSlice()
}
