package guard

// MaxCommunities is the greatest number of extended communities of a route that
// pass. Real routes carry one or two; the draft's tests use fifteen. If there
// are more, the community that Config.Deciding selects is among those that
// pass.
const MaxCommunities = 64

// carrierType is the type octet under which an own community passes through the
// speaker. GoBGP decodes 0x00-0x03, 0x06, 0x0c, 0x40-0x43 and 0x80-0x82 into
// its own structures, which for Link Bandwidth do not preserve transitivity.
// 0x8f belongs to the experimental range of RFC 9184, Section 2.1, and is
// unknown to GoBGP, so GoBGP carries it as eight plain octets; its 0x40 bit is
// clear, so it counts as transitive.
const carrierType = 0x8f

// Sub-type octets of a carrier, which identify the carried community.
const (
	carriesTransitive    = 0x00 // Link Bandwidth 0x00/0x04
	carriesNonTransitive = 0x40 // Link Bandwidth 0x40/0x04
	carriesFARE          = 0x80 // the FARE code point
)

// Link Bandwidth (RFC 10005, Section 2): type octets and sub-type.
const (
	lbTransitive    = 0x00
	lbNonTransitive = 0x40
	lbSubType       = 0x04
)

// CodePoint is the type and sub-type octet of an extended community.
type CodePoint struct{ Type, SubType byte }

// Carrier maps the extended communities that fared reads and sends, and only
// those, to a form that passes through the speaker unchanged, and back. Any [8]byte type,
// such as fare.Community, can be passed and assigned. The zero value supports
// Link Bandwidth only.
type Carrier struct {
	// FARE is the configured code point; zero disables it.
	FARE CodePoint
}

// Wrap converts a community from wire format to its carried form; it returns
// false for other communities. The six octets after type and sub-type stay
// unchanged; the sub-type of the carrier represents these two:
//
//	00 04 v v v v v v  <->  8f 00 v v v v v v
//	40 04 v v v v v v  <->  8f 40 v v v v v v
//	 T  S v v v v v v  <->  8f 80 v v v v v v   (T, S: FARE code point)
func (c Carrier) Wrap(community [8]byte) ([8]byte, bool) {
	var kind byte
	switch point := (CodePoint{community[0], community[1]}); {
	case point == CodePoint{lbTransitive, lbSubType}:
		kind = carriesTransitive
	case point == CodePoint{lbNonTransitive, lbSubType}:
		kind = carriesNonTransitive
	case point == c.FARE && point != CodePoint{}:
		kind = carriesFARE
	default:
		return community, false
	}
	community[0], community[1] = carrierType, kind
	return community, true
}

// Unwrap is the inverse of Wrap; it returns false if carried is not a result of Wrap.
func (c Carrier) Unwrap(carried [8]byte) ([8]byte, bool) {
	if carried[0] != carrierType {
		return carried, false
	}
	switch kind := carried[1]; {
	case kind == carriesTransitive:
		carried[0], carried[1] = lbTransitive, lbSubType
	case kind == carriesNonTransitive:
		carried[0], carried[1] = lbNonTransitive, lbSubType
	case kind == carriesFARE && c.FARE != CodePoint{}:
		carried[0], carried[1] = c.FARE.Type, c.FARE.SubType
	default:
		return carried, false
	}
	return carried, true
}
