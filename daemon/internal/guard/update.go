package guard

import (
	"encoding/binary"

	"github.com/fared/fared/fare"
)

// Attribute types (RFC 4271, Section 5; RFC 1997; RFC 4760; RFC 4360; RFC
// 6793; RFC 5701; RFC 8092).
const (
	attrOrigin          = 1
	attrASPath          = 2
	attrNextHop         = 3
	attrMED             = 4
	attrLocalPref       = 5
	attrAtomicAggregate = 6
	attrAggregator      = 7
	attrCommunities     = 8
	attrReach           = 14
	attrUnreach         = 15
	attrExtended        = 16
	attrAS4Path         = 17
	attrAS4Aggregator   = 18
	attrIPv6Extended    = 25
	attrLarge           = 32
)

// Attribute flags (RFC 4271, Section 4.3).
const (
	flagOptional       = 0x80
	flagTransitive     = 0x40
	flagExtendedLength = 0x10
)

// flagsOf contains the required Optional and Transitive flags of the attributes
// that pass; 0 for all others.
var flagsOf = [256]byte{
	attrOrigin:       flagTransitive,
	attrASPath:       flagTransitive,
	attrNextHop:      flagTransitive,
	attrMED:          flagOptional,
	attrCommunities:  flagOptional | flagTransitive,
	attrReach:        flagOptional,
	attrUnreach:      flagOptional,
	attrExtended:     flagOptional | flagTransitive,
	attrAS4Path:      flagOptional | flagTransitive,
	attrIPv6Extended: flagOptional | flagTransitive,
	attrLarge:        flagOptional | flagTransitive,
}

// mpField is an MP_REACH_NLRI or MP_UNREACH_NLRI of a family in use; family 0
// means absent.
type mpField struct {
	family Family
	hop    []byte // MP_REACH only: 4, 16 or 32 octets
	nlri   []byte // syntax checked
}

// update is a parsed UPDATE. Its slices point into the message or into buffers
// that the next UPDATE reuses.
type update struct {
	// Set once, or as a result of the OPENs.
	families FamilySet // in use
	width    int       // octets of an AS number in AS_PATH: 2 or 4
	extended bool      // IPv4 prefixes may have an IPv6 next hop
	carrier  func([8]byte) ([8]byte, Reason)
	deciding func(carried []byte) int // index of the community that counts, -1 if none does; may be nil

	withdrawn, nlri []byte // IPv4 unicast, syntax checked
	reach, unreach  mpField
	origin          byte
	path, path4     []uint32
	hop, med        []byte             // nil if absent
	extendeds       []byte             // communities that pass, in their output form
	signals         fare.Signals       // of its communities
	wide            fare.IPv6Community // the lowest extended Link Bandwidth; zero: none
	seen            [4]uint64          // attribute types that occurred
	others          bool               // an attribute other than MP_UNREACH occurred
	unused          bool               // an MP_REACH of a family not in use had prefixes
	aggregatorAS    uint32

	// fault is the reason to treat the announced prefixes as withdrawn, or
	// None. The first one counts.
	fault Reason
}

func (u *update) has(kind byte) bool { return u.seen[kind>>6]&(1<<(kind&63)) != 0 }

// blame records why the prefixes cannot be used (RFC 7606, Section 2,
// "treat-as-withdraw").
func (u *update) blame(r Reason) {
	if u.fault == None {
		u.fault = r
	}
}

// isEmpty reports whether u is the End-of-RIB marker of IPv4 (RFC 4724, Section
// 2), which has no content.
func (u *update) isEmpty() bool {
	return len(u.withdrawn) == 0 && len(u.nlri) == 0 && u.seen == [4]uint64{}
}

// endOfRIB returns the family whose End-of-RIB marker u is, or 0. The marker of
// other families, permitted for IPv4 as well, is an MP_UNREACH without prefixes
// and without any other content (RFC 4724, Section 2).
func (u *update) endOfRIB() Family {
	switch {
	case u.isEmpty():
		return IPv4Unicast
	case !u.others && len(u.withdrawn) == 0 && len(u.nlri) == 0 && len(u.unreach.nlri) == 0:
		return u.unreach.family
	}
	return 0
}

// parse parses the body of an UPDATE (RFC 4271, Section 4.3) and checks it by
// RFC 7606. A Notification is a "session reset"; "treat-as-withdraw" is
// u.fault; "attribute discard" happens here.
func (u *update) parse(body []byte, t *tally) *Notification {
	*u = update{
		families: u.families, width: u.width, extended: u.extended, carrier: u.carrier, deciding: u.deciding,
		path: u.path[:0], path4: u.path4[:0], extendeds: u.extendeds[:0],
	}
	// RFC 4271, Section 6.3: the two lengths and 23 exceed the message.
	n := int(binary.BigEndian.Uint16(body))
	if n > len(body)-4 {
		return malformedUpdate("withdrawn routes are longer than the message")
	}
	u.withdrawn, body = body[2:2+n], body[2+n:]
	n = int(binary.BigEndian.Uint16(body))
	if n > len(body)-2 {
		return malformedUpdate("path attributes are longer than the message")
	}
	attrs := body[2 : 2+n]
	u.nlri = body[2+n:]
	// RFC 7606, Section 5.3 and Section 3 (j): malformed prefixes leave nothing
	// to withdraw, so the session is reset; RFC 4271, Section 6.3: Invalid
	// Network Field.
	if !wellFormed(u.withdrawn, 32) || !wellFormed(u.nlri, 32) {
		return notify(CodeUpdateMessageError, 10, nil, MessageUpdate, "prefix is malformed")
	}
	if bad := u.walk(attrs, t); bad != nil {
		return bad
	}
	announces := len(u.nlri) > 0 || len(u.reach.nlri) > 0 || u.unused
	if announces {
		u.complete()
	} else if u.others && u.fault != None {
		// RFC 7606, Section 5.2: malformed attributes, and no prefix to which
		// they could belong: the prefixes may have been missed.
		return malformedUpdate("path attributes are malformed and there is no prefix")
	}
	return nil
}

func malformedUpdate(detail string) *Notification {
	// RFC 4271, Section 6.3: Malformed Attribute List.
	return notify(CodeUpdateMessageError, 1, nil, MessageUpdate, detail)
}

// walk processes each attribute once.
func (u *update) walk(attrs []byte, t *tally) *Notification {
	for len(attrs) > 0 {
		// RFC 7606, Section 4: fewer octets than a header or the length
		// requires: the rest cannot be separated.
		head := 3
		if attrs[0]&flagExtendedLength != 0 {
			head = 4
		}
		if len(attrs) < head {
			t.judge(Attributes, AttributeMalformed)
			u.others = true
			u.blame(RouteMalformed)
			return nil
		}
		flags, kind, n := attrs[0], attrs[1], int(attrs[2])
		if head == 4 {
			n = int(binary.BigEndian.Uint16(attrs[2:]))
		}
		if n > len(attrs)-head {
			t.judge(Attributes, AttributeMalformed)
			u.others = true
			u.blame(RouteMalformed)
			return nil
		}
		whole, value := attrs[:head+n], attrs[head:head+n]
		attrs = attrs[head+n:]

		bit := uint64(1) << (kind & 63)
		if u.seen[kind>>6]&bit != 0 {
			t.judge(Attributes, AttributeDuplicate)
			if kind == attrReach || kind == attrUnreach {
				// RFC 7606, Section 3 (g): session reset for these two only.
				return malformedUpdate("MP_REACH or MP_UNREACH occurs twice")
			}
			continue // all except the first are discarded, same section
		}
		u.seen[kind>>6] |= bit
		u.others = u.others || kind != attrUnreach
		reason, bad := u.attribute(flags, kind, value, whole, t)
		t.judge(Attributes, reason)
		if bad != nil {
			return bad
		}
	}
	return nil
}

// attribute processes one attribute and returns its outcome.
func (u *update) attribute(flags, kind byte, value, whole []byte, t *tally) (Reason, *Notification) {
	switch kind {
	case attrLocalPref:
		// RFC 7606, Section 7.5: discarded if it comes from an external neighbor.
		return AttributeMisplaced, nil
	case attrAtomicAggregate:
		return AttributeUnlisted, nil
	case attrAggregator:
		if len(value) == 6 { // of an OLD speaker, which sends AS4_PATH
			u.aggregatorAS = uint32(binary.BigEndian.Uint16(value))
		}
		return AttributeUnlisted, nil
	case attrAS4Path:
		if u.width == 4 {
			// RFC 6793, Section 4.1: discarded if it comes from a NEW speaker.
			return AttributeMisplaced, nil
		}
	}
	want := flagsOf[kind]
	if want == 0 {
		if flags&flagOptional == 0 {
			// RFC 4271, Section 6.3: Unrecognized Well-known Attribute.
			return AttributeMalformed, notify(CodeUpdateMessageError, 2, whole, MessageUpdate, "well-known attribute is not recognized")
		}
		return AttributeUnlisted, nil
	}
	sound := flags&(flagOptional|flagTransitive) == want
	if !sound && kind != attrAS4Path {
		// RFC 7606, Section 3 (c): conflicting flags: treat-as-withdraw. The
		// value is still read, because it contains the prefixes to withdraw.
		u.blame(RouteMalformed)
	}
	switch kind {
	case attrReach, attrUnreach:
		reason, bad := u.multiprotocol(kind, value, whole)
		if reason == None && !sound {
			reason = AttributeMalformed
		}
		return reason, bad
	case attrASPath:
		// RFC 7606, Section 7.2.
		var ok bool
		if u.path, ok = appendPath(u.path[:0], value, u.width); !ok {
			u.blame(RoutePath)
			return AttributeMalformed, nil
		}
	case attrAS4Path:
		// RFC 6793, Section 6: a malformed AS4_PATH is discarded. So is one
		// with a set or a confederation: the accompanying AS_PATH decides about
		// the route.
		var ok bool
		if u.path4, ok = appendPath(u.path4[:0], value, 4); !ok || !sound {
			u.path4 = u.path4[:0]
			return AttributeMalformed, nil
		}
		return None, nil
	case attrNextHop:
		u.hop = value // checked once there is a prefix to which it belongs
	default:
		if !u.plain(kind, value, t) {
			// RFC 7606, Sections 7.1, 7.4, 7.8, 7.14, 7.15; RFC 8092, Section 6.
			u.blame(RouteMalformed)
			return AttributeMalformed, nil
		}
		if sound && (kind == attrCommunities || kind == attrLarge) {
			// Checked, because a malformed one withdraws the route, but not
			// passed: it takes kilobytes per route, and only the signals have
			// a reader.
			return AttributeUnlisted, nil
		}
	}
	if !sound {
		return AttributeMalformed, nil
	}
	return None, nil
}

// plain processes the attributes whose only rule is their length or value.
func (u *update) plain(kind byte, value []byte, t *tally) bool {
	switch kind {
	case attrOrigin:
		if len(value) != 1 || value[0] > 2 {
			return false
		}
		u.origin = value[0]
	case attrMED:
		if len(value) != 4 {
			return false
		}
		u.med = value
	case attrCommunities:
		if len(value) == 0 || len(value)%4 != 0 {
			return false
		}
		for ; len(value) > 0; value = value[4:] {
			u.signals |= fare.SignalOf(binary.BigEndian.Uint32(value))
		}
	case attrLarge:
		return len(value) > 0 && len(value)%12 == 0
	case attrExtended:
		if len(value) == 0 || len(value)%8 != 0 {
			return false
		}
		u.takeExtended(value, t)
	case attrIPv6Extended:
		if len(value) == 0 || len(value)%20 != 0 {
			return false
		}
		u.takeIPv6Extended(value, t)
	}
	return true
}

// takeIPv6Extended collects the lowest extended Link Bandwidth among the
// communities (RFC 10005, Section 4, for the ordinary one).
func (u *update) takeIPv6Extended(value []byte, t *tally) {
	found := false
	for ; len(value) > 0; value = value[20:] {
		c := fare.IPv6Community(value)
		switch {
		case !c.IsExtendedLinkBandwidth():
			t.judge(Communities, CommunityUnlisted)
			continue
		case found:
			t.judge(Communities, CommunityExcess)
		default:
			t.judge(Communities, None)
		}
		if !found || c.Value() < u.wide.Value() {
			u.wide, found = c, true
		}
	}
}

// takeExtended collects the extended communities that pass. If there are more
// than MaxCommunities, the one that decides the bandwidth is among those kept:
// a neighbor must not hide the lowest value (RFC 10005) behind others.
func (u *update) takeExtended(value []byte, t *tally) {
	for ; len(value) > 0; value = value[8:] {
		carried, reason := u.carrier([8]byte(value))
		if reason == None {
			u.extendeds = append(u.extendeds, carried[:]...)
		} else {
			t.judge(Communities, reason)
		}
	}
	n := len(u.extendeds) / 8
	if n > MaxCommunities {
		if u.deciding != nil {
			if i := u.deciding(u.extendeds); i >= MaxCommunities {
				copy(u.extendeds[8*(MaxCommunities-1):8*MaxCommunities], u.extendeds[8*i:])
			}
		}
		u.extendeds = u.extendeds[:8*MaxCommunities]
	}
	for i := range n {
		reason := None
		if i >= MaxCommunities {
			reason = CommunityExcess
		}
		t.judge(Communities, reason)
	}
}

// multiprotocol processes MP_REACH_NLRI or MP_UNREACH_NLRI (RFC 4760, Sections
// 3 and 4). An unparsable one resets the session (RFC 7606, Sections 3 (j), 5.3
// and 7.11) with Optional Attribute Error (RFC 4760, Section 7).
func (u *update) multiprotocol(kind byte, value, whole []byte) (Reason, *Notification) {
	broken := func(detail string) (Reason, *Notification) {
		return AttributeMalformed, notify(CodeUpdateMessageError, 9, whole, MessageUpdate, detail)
	}
	if len(value) < 3 || kind == attrReach && len(value) < 5 {
		return broken("MP_REACH or MP_UNREACH is too short")
	}
	field := mpField{family: familyOf(binary.BigEndian.Uint16(value), value[2])}
	if !u.families.Has(field.family) {
		// RFC 4760, Section 8: only announced families may be used. The
		// prefixes were never held, so there is nothing to withdraw.
		u.unused = u.unused || kind == attrReach
		return AttributeFamily, nil
	}
	bits := 32
	if field.family == IPv6Unicast {
		bits = 128
	}
	if kind == attrUnreach {
		field.nlri = value[3:]
	} else {
		n := int(value[3])
		// RFC 2545, Section 3 and RFC 8950, Section 3: lengths of a next hop.
		fits := n == 16 || n == 32
		if field.family == IPv4Unicast {
			fits = n == 4 || fits && u.extended
		}
		if !fits || n > len(value)-5 {
			return broken("length of the next hop is invalid for its family")
		}
		field.hop, field.nlri = value[4:4+n], value[5+n:]
	}
	if !wellFormed(field.nlri, bits) {
		return broken("prefix is malformed")
	}
	if kind == attrUnreach {
		u.unreach = field
	} else {
		u.reach = field
	}
	return None, nil
}

// complete checks the rules that involve all attributes together.
func (u *update) complete() {
	// RFC 7606, Section 3 (d): a mandatory attribute is missing.
	if !u.has(attrOrigin) || !u.has(attrASPath) || len(u.nlri) > 0 && u.hop == nil {
		u.blame(RouteIncomplete)
	}
	// RFC 7606, Section 7.3; without NLRI the attribute is ignored (RFC 4760,
	// Section 3).
	if len(u.nlri) > 0 && u.hop != nil && len(u.hop) != 4 {
		u.blame(RouteMalformed)
	}
	// RFC 6793, Section 4.2.3: if AGGREGATOR has an actual AS, an OLD speaker
	// has replaced it, and both AS4 attributes are stale.
	if len(u.path4) > 0 && !(u.has(attrAS4Aggregator) && u.aggregatorAS != 0 && u.aggregatorAS != ASTrans) {
		u.path = mergePath(u.path, u.path4)
	}
	if len(u.path) > MaxASPath {
		u.blame(RouteOversize)
	}
}
