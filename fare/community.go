package fare

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
)

// Community is one BGP extended community in wire format (RFC 4360, Section 2): type,
// sub-type and six bytes of value.
type Community [8]byte

// Code points on the wire.
const (
	typeTwoOctetAS              = 0x00 // transitive two-octet-AS-specific (RFC 4360, Section 3.1)
	typeTwoOctetASNonTransitive = 0x40
	subTypeLinkBandwidth        = 0x04  // RFC 10005, Section 2
	asTrans                     = 23456 // RFC 6793, Section 9: replaces an AS number that needs four bytes

	// DefaultFAREType and DefaultFARESubType are the FARE community's code point when none
	// is configured. IANA has assigned none. Types 0x83 to 0x8f are for experiments in the
	// sense of RFC 3692 (RFC 9184, Section 2.1); the sub-types of 0x80-0x82 are assigned by
	// IANA. Bit 0x40 is clear: transitive. The type is even, because FRR 10.3.0 and 10.3.1 take odd
	// types for non-transitive ones and drop them toward other AS.
	DefaultFAREType    = 0x8e
	DefaultFARESubType = 0x04
)

// String returns the eight bytes as 16 hex digits, the form that [Community.UnmarshalText]
// parses.
func (c Community) String() string { return hex.EncodeToString(c[:]) }

// MarshalText returns [Community.String].
func (c Community) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, c[:]), nil }

// UnmarshalText parses exactly 16 hex digits.
func (c *Community) UnmarshalText(text []byte) error {
	var v Community
	if len(text) != 2*len(v) {
		return fmt.Errorf("extended community %q: write 16 hex digits", text)
	}
	if _, err := hex.Decode(v[:], text); err != nil {
		return fmt.Errorf("extended community %q: write 16 hex digits: %w", text, err)
	}
	*c = v
	return nil
}

// IPv6Community is one IPv6 Address Specific BGP Extended Community in wire format (RFC 5701): type, sub-type and 18
// bytes of value. The zero value is none.
type IPv6Community [20]byte

const (
	typeFourOctetAS              = 0x02
	typeFourOctetASNonTransitive = 0x42
	subTypeExtendedLinkBandwidth = 0x06
)

// IsExtendedLinkBandwidth reports whether c is an extended Link Bandwidth, as FRR has sent it since release 10.1
// (draft-li-idr-link-bandwidth-ext): after two zero bytes a 64-bit integer in bytes/s, and the AS number.
func (c IPv6Community) IsExtendedLinkBandwidth() bool {
	return c[0] == typeFourOctetAS && c[1] == subTypeExtendedLinkBandwidth || c[0] == typeFourOctetASNonTransitive && c[1] == subTypeExtendedLinkBandwidth
}

// Value returns the number of an extended Link Bandwidth.
func (c IPv6Community) Value() uint64 { return binary.BigEndian.Uint64(c[4:12]) }

// String returns the bytes as 40 hex digits, the form that [IPv6Community.UnmarshalText] parses.
func (c IPv6Community) String() string { return hex.EncodeToString(c[:]) }

// MarshalText returns [IPv6Community.String].
func (c IPv6Community) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, c[:]), nil }

// UnmarshalText parses exactly 40 hex digits.
func (c *IPv6Community) UnmarshalText(text []byte) error {
	if n, err := hex.Decode(c[:], text[:min(len(text), 2*len(c))]); err != nil || n != len(c) || len(text) != 2*len(c) {
		return fmt.Errorf("IPv6 extended community %q: write 40 hex digits", text)
	}
	return nil
}

// Codec encodes and decodes the bandwidth of one session. The zero value encodes the
// transitive Link Bandwidth community of RFC 10005 and accepts every valid value. Link
// Bandwidth (both transitivities), its extended form and the FARE community are all decoded
// whatever Encoding is; if a route carries several, the FARE community wins over the extended
// form, and this over Link Bandwidth.
type Codec struct {
	Encoding Encoding // community that is encoded

	// FAREType and FARESubType are the code point of the FARE community; both zero means
	// DefaultFAREType and DefaultFARESubType.
	FAREType, FARESubType byte

	Format Format // number format of Link Bandwidth, encoded and decoded
	// Scale divides the values of Link Bandwidth, and multiplies them again when they are decoded: 0 and 1 encode the
	// bandwidth itself, 1000 thousandths of it. It keeps sums below the 2^32 bytes a second that some leaves compute
	// with (see [ReasonWrapped]). All nodes of a fabric have the same. Min and Max are bounds of decoded values.
	Scale uint32
	AS    uint32 // own AS number, encoded as AS_TRANS if it needs four bytes
	// NonTransitive encodes Link Bandwidth as type 0x40, for a neighbor that decodes no
	// other. That form ends at the border of an AS (RFC 4360, Section 6) unless configured
	// otherwise (RFC 10005, Section 3.1).
	NonTransitive bool
	// Administrator is encoded in place of AS (RFC 10005, Section 2: the Global
	// Administrator); 0 means AS.
	Administrator uint16

	// Min and Max are sanity bounds of received values in bit/s; 0 disables a bound. A
	// value outside the bounds is ignored (some FRR releases corrupt values above 34
	// Gbit/s). Zero always passes, because it announces maintenance.
	Min, Max Bandwidth
}

// MaxScale is the largest [Codec.Scale], a ratio.
const MaxScale = 1_000_000

// Kind classifies a community.
type Kind uint8

// The kinds.
const (
	KindOther                      Kind = iota // not a bandwidth
	KindLinkBandwidth                          // RFC 10005, transitive
	KindLinkBandwidthNonTransitive             // RFC 10005, non-transitive
	KindFARE                                   // the FARE community
	KindExtendedLinkBandwidth                  // the extended form of Link Bandwidth
)

var kindNames = []string{"other", "link-bandwidth", "link-bandwidth-non-transitive", "fare", "extended-link-bandwidth"}

// String returns the word used in status output.
func (k Kind) String() string { return enumName(kindNames, k) }

// Verdict is the result of decoding one community of a route. Bandwidth is meaningful only if Reason is [ReasonUsed] or
// one of the reasons that compare values ([ReasonBelowMinimum], [ReasonAboveMaximum], [ReasonWrapped],
// [ReasonOtherScale], [ReasonNotLowest], [ReasonOverridden]).
type Verdict struct {
	Kind      Kind
	Bandwidth Bandwidth
	Reason    Reason
}

// Advertised is the bandwidth that a route's communities carry as a whole. The zero value
// is a route without a bandwidth. Known with a Bandwidth of 0 means that the path is in
// maintenance.
type Advertised struct {
	Known     bool
	Bandwidth Bandwidth
}

func (c Codec) farePoint() (byte, byte) {
	if c.FAREType == 0 && c.FARESubType == 0 {
		return DefaultFAREType, DefaultFARESubType
	}
	return c.FAREType, c.FARESubType
}

// Encode encodes b as the codec's community, transitive unless NonTransitive is set. Link
// Bandwidth rounds to the nearest float32, or in format [Uint32] to the nearest byte/s up
// to 2^32-1. The FARE community carries node (an IPv4 router ID; any other address becomes
// 0.0.0.0) and rounds to the nearest Gbit/s up to 65,535. A rate above zero is never
// rounded to zero, because zero would mean maintenance.
func (c Codec) Encode(b Bandwidth, node netip.Addr) Community {
	b = min(b, MaxBandwidth)
	if c.Encoding == FARECommunity {
		var out Community
		out[0], out[1] = c.farePoint()
		if node.Is4() || node.Is4In6() {
			id := node.Unmap().As4()
			copy(out[2:6], id[:])
		}
		binary.BigEndian.PutUint16(out[6:8], uint16(rounded(b, Gigabit, math.MaxUint16)))
		return out
	}
	out := Community{typeTwoOctetAS, subTypeLinkBandwidth}
	if c.NonTransitive {
		out[0] = typeTwoOctetASNonTransitive
	}
	as := c.AS
	if c.Administrator != 0 {
		as = uint32(c.Administrator)
	} else if as > math.MaxUint16 {
		as = asTrans // RFC 10005, Section 2: AS_TRANS for a four-byte number
	}
	binary.BigEndian.PutUint16(out[2:4], uint16(as))
	if c.Format == Uint32 {
		binary.BigEndian.PutUint32(out[4:8], uint32(rounded(b, 8*c.scale(), math.MaxUint32)))
	} else {
		binary.BigEndian.PutUint32(out[4:8], math.Float32bits(c.scaled(b)))
	}
	return out
}

func (c Codec) scale() Bandwidth { return Bandwidth(max(c.Scale, 1)) }

// scaled returns b as Link Bandwidth encodes it as a number: in bytes/s, divided by the scale. It rounds once, to
// nearest, because b <= 2^53 is exact as float64, and so is a divisor.
func (c Codec) scaled(b Bandwidth) float32 { return float32(float64(b) / float64(8*c.scale())) }

// rounded returns b in units of unit, rounded to nearest, at least 1 unless b is 0, at most
// limit.
func rounded(b, unit Bandwidth, limit uint64) uint64 {
	if b == 0 {
		return 0
	}
	return min(max(uint64((b+unit/2)/unit), 1), limit)
}

// Judge decodes a route's communities. It appends one [Verdict] for each to buf[:0], in
// their order, and returns the resulting bandwidth of the route. Invalid values are ignored
// without effect on the valid ones. At most one verdict is [ReasonUsed].
func (c Codec) Judge(communities []Community, buf []Verdict) (Advertised, []Verdict) {
	out := buf[:0]
	link, fare := -1, -1 // index of the lowest valid value of each kind
	for i := range communities {
		v := c.judge(communities[i])
		if v.Reason == ReasonUsed {
			lowest := &link
			if v.Kind == KindFARE {
				lowest = &fare
			}
			// RFC 10005, Section 4: the lowest of several values counts, whatever their
			// transitivity or AS number; the comparison is by value, not by bytes.
			switch {
			case *lowest < 0:
				*lowest = i
			case v.Bandwidth < out[*lowest].Bandwidth:
				out[*lowest].Reason = ReasonNotLowest
				*lowest = i
			default:
				v.Reason = ReasonNotLowest
			}
		}
		out = append(out, v)
	}
	switch {
	case fare >= 0:
		if link >= 0 {
			out[link].Reason = ReasonOverridden
		}
		return Advertised{Known: true, Bandwidth: out[fare].Bandwidth}, out
	case link >= 0:
		return Advertised{Known: true, Bandwidth: out[link].Bandwidth}, out
	}
	return Advertised{}, out
}

// JudgeRoute is [Codec.Judge] with the extended Link Bandwidth of a route, whose verdict is the last one. It overrides
// Link Bandwidth, because FRR adds it to the sum of several routes, in place of their Link Bandwidth, and leaves that
// of one route as it was.
func (c Codec) JudgeRoute(a *Attributes, buf []Verdict) (Advertised, []Verdict) {
	advertised, out := c.Judge(a.Communities, buf)
	if a.Extended == (IPv6Community{}) {
		return advertised, out
	}
	v := Verdict{Kind: KindExtendedLinkBandwidth}
	unit := 8 * c.scale()
	v.Bandwidth = Bandwidth(min(a.Extended.Value(), uint64(MaxBandwidth/unit))) * unit
	v.Reason = c.outside(v.Bandwidth)
	for i := range out {
		switch {
		case v.Reason != ReasonUsed || out[i].Reason != ReasonUsed:
		case out[i].Kind == KindFARE:
			v.Reason = ReasonOverridden
		default:
			out[i].Reason = ReasonOverridden
		}
	}
	if v.Reason == ReasonUsed {
		advertised = Advertised{Known: true, Bandwidth: v.Bandwidth}
	}
	return advertised, append(out, v)
}

// outside returns why a received bandwidth is outside of the bounds, or [ReasonUsed].
func (c Codec) outside(b Bandwidth) Reason {
	switch {
	case b == 0:
	case b < c.Min:
		return ReasonBelowMinimum
	case c.Max != 0 && b > c.Max:
		return ReasonAboveMaximum
	}
	return ReasonUsed
}

// precedence orders the kinds of bandwidth: of those on a route, the highest one with a valid value counts.
func (k Kind) precedence() int {
	switch k {
	case KindFARE:
		return 3
	case KindExtendedLinkBandwidth:
		return 2
	case KindLinkBandwidth, KindLinkBandwidthNonTransitive:
		return 1
	}
	return 0
}

// counting returns the kind of the community that counts, or [KindOther].
func counting(verdicts []Verdict) Kind {
	for i := range verdicts {
		if verdicts[i].Reason == ReasonUsed {
			return verdicts[i].Kind
		}
	}
	return KindOther
}

// invalid returns the reason of the first invalid bandwidth community, or [ReasonUsed] if all are valid. Communities
// that would not count if they were valid are not examined.
func invalid(verdicts []Verdict) Reason {
	least := counting(verdicts).precedence()
	for i := range verdicts {
		if verdicts[i].Kind.precedence() < least {
			continue
		}
		switch r := verdicts[i].Reason; r {
		case ReasonNotANumber, ReasonNegative, ReasonInfinite, ReasonBelowMinimum, ReasonAboveMaximum:
			return r
		}
	}
	return ReasonUsed
}

// Deciding returns the index of the community that [Codec.Judge] uses, or -1.
func (c Codec) Deciding(communities []Community) int {
	_, verdicts := c.Judge(communities, nil)
	return slices.IndexFunc(verdicts, func(v Verdict) bool { return v.Reason == ReasonUsed })
}

func (c Codec) judge(raw Community) Verdict {
	var v Verdict
	fareType, fareSubType := c.farePoint()
	switch {
	case raw[0] == fareType && raw[1] == fareSubType:
		v.Kind = KindFARE
		v.Bandwidth = Bandwidth(binary.BigEndian.Uint16(raw[6:8])) * Gigabit
	case raw[0] == typeTwoOctetAS && raw[1] == subTypeLinkBandwidth,
		raw[0] == typeTwoOctetASNonTransitive && raw[1] == subTypeLinkBandwidth:
		// RFC 10005, Sections 2 and 3.2: both transitivities are valid, and the AS number
		// has no meaning.
		v.Kind = KindLinkBandwidth
		if raw[0] == typeTwoOctetASNonTransitive {
			v.Kind = KindLinkBandwidthNonTransitive
		}
		value := binary.BigEndian.Uint32(raw[4:8])
		if c.Format == Uint32 {
			v.Bandwidth = Bandwidth(value) * 8
		} else {
			v.Bandwidth, v.Reason = fromFloat(math.Float32frombits(value))
		}
		v.Bandwidth = min(v.Bandwidth, MaxBandwidth/c.scale()) * c.scale()
	default:
		v.Reason = ReasonNotBandwidth
	}
	if v.Reason == ReasonUsed {
		v.Reason = c.outside(v.Bandwidth)
	}
	return v
}

// fromFloat converts bytes/s as received to bit/s. It reads the float as the shortest
// decimal that rounds to it. So 400G and 800G, which float32 cannot hold in bytes/s, are
// decoded as exactly 400e9 and 800e9, with a ratio of exactly 1:2. Fractions of a bit are
// dropped. If the result would not encode to the same float (possible only below about 100
// Mbit/s), the float's own value replaces it, so that a decoded value survives any number
// of encodings and decodings.
func fromFloat(f float32) (Bandwidth, Reason) {
	const tooLarge = float32(MaxBandwidth / 8)
	switch {
	case f != f: // RFC 10005, Section 4, ignores negative values; it does not mention NaN and infinity
		return 0, ReasonNotANumber
	case math.IsInf(float64(f), 0):
		return 0, ReasonInfinite
	case f < 0: // minus zero is zero
		return 0, ReasonNegative
	}
	// A finite value is valid, however high: the local links toward the neighbor bound it.
	// Ignoring it would turn the path into one without a value, which affects more than the
	// path.
	f = min(f, tooLarge)
	var buf [24]byte
	mantissa, exponent := uint64(0), 0
	text := strconv.AppendFloat(buf[:0], float64(f), 'e', -1, 32) // d[.ddd]e±dd, at most 9 digits
	i, fraction := 0, false
	for ; text[i] != 'e'; i++ {
		if text[i] == '.' {
			fraction = true
			continue
		}
		mantissa = mantissa*10 + uint64(text[i]-'0')
		if fraction {
			exponent--
		}
	}
	e := 0
	for _, digit := range text[i+2:] {
		e = e*10 + int(digit-'0')
	}
	if text[i+1] == '-' {
		e = -e
	}
	bits := mantissa * 8
	for exponent += e; exponent > 0; exponent-- {
		bits *= 10 // f <= 2^50, so bits <= 2^53 plus a rounding error
	}
	for ; exponent < 0 && bits > 0; exponent++ {
		bits /= 10 // rounding down in steps is rounding down
	}
	if float32(float64(bits)/8) != f {
		bits = uint64(float64(f) * 8)
	}
	return min(Bandwidth(bits), MaxBandwidth), ReasonUsed
}

// Validate returns all errors in a codec's settings, joined.
func (c Codec) Validate() error {
	var errs []error
	if int(c.Encoding) >= len(encodingNames) {
		errs = append(errs, fmt.Errorf("encoding %s", c.Encoding))
	}
	if int(c.Format) >= len(formatNames) {
		errs = append(errs, fmt.Errorf("format %s", c.Format))
	}
	if c.Scale > MaxScale {
		errs = append(errs, fmt.Errorf("scale %d, at most %d", c.Scale, MaxScale))
	}
	if err := CheckCodePoint(c.farePoint()); err != nil {
		errs = append(errs, fmt.Errorf("FARE community: %w", err))
	}
	if c.Max != 0 && c.Min > c.Max {
		errs = append(errs, fmt.Errorf("minimum %s is above maximum %s", c.Min, c.Max))
	}
	return errors.Join(errs...)
}
