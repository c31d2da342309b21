package guard

// MaxCommunities is how many extended communities of one route pass. Real
// routes carry one or two; the draft's tests use fifteen.
const MaxCommunities = 64

// carrierType is the type octet under which a community crosses the speaker.
// GoBGP decodes 0x00-0x03, 0x06, 0x0c, 0x40-0x43 and 0x80-0x82 into structures
// of its own, which for Link Bandwidth forget whether it was transitive. 0x8f
// is of the experimental range of RFC 7153, Section 4, unknown to GoBGP, so it
// is carried as eight plain octets; its 0x40 bit is clear, so it counts as
// transitive.
const carrierType = 0x8f

// Sub-type octets of a carrier: which of the three communities it carries.
const (
	carriesTransitive    = 0x00 // Link Bandwidth 0x00/0x04
	carriesNonTransitive = 0x40 // Link Bandwidth 0x40/0x04
	carriesFARE          = 0x80 // the FARE code point
)

// Link Bandwidth (RFC 10005, Section 3): type octets and sub-type.
const (
	lbTransitive    = 0x00
	lbNonTransitive = 0x40
	lbSubType       = 0x04
)

// CodePoint is the type and sub-type octet of an extended community.
type CodePoint struct{ Type, SubType byte }

// Carrier maps the extended communities that fared reads, and only those, to a
// form that passes through the speaker unchanged, and back. Any [8]byte type,
// such as fare.Community, can be passed and assigned. Its zero value knows
// Link Bandwidth only.
type Carrier struct {
	// FARE is the configured code point; zero means none.
	FARE CodePoint
}

// Wrap turns a community of the wire into its carried form; false if it is
// not one that is read. The six octets after type and sub-type stay as they
// are; these two are known from the sub-type of the carrier:
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

// Unwrap is the inverse of Wrap; false if carried is not of its making.
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
