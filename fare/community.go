package fare

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
)

// Community is one BGP extended community as it is on the wire (RFC 4360,
// Section 2): type, sub-type and six bytes of value.
type Community [8]byte

// Code points on the wire.
const (
	typeTwoOctetAS              = 0x00 // transitive two-octet-AS-specific (RFC 4360, Section 3.1)
	typeTwoOctetASNonTransitive = 0x40
	subTypeLinkBandwidth        = 0x04  // RFC 10005
	asTrans                     = 23456 // RFC 6793, Section 9: stands for an AS number that needs four bytes

	// DefaultFAREType and DefaultFARESubType are the FARE community's code
	// point when none is configured. IANA has assigned none; types 0x83 to
	// 0x8f are for experiments in the sense of RFC 3692 (RFC 7153, Section
	// 5.1) and clear of 0x80-0x82, whose sub-types flow specification uses.
	// Bit 0x40 is clear: transitive.
	DefaultFAREType    = 0x8f
	DefaultFARESubType = 0x04
)

// String is the eight bytes as 16 hex digits, which [Community.UnmarshalText]
// reads back.
func (c Community) String() string { return hex.EncodeToString(c[:]) }

// MarshalText is [Community.String].
func (c Community) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, c[:]), nil }

// UnmarshalText reads exactly 16 hex digits.
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

// Codec is how one session writes and reads bandwidth. The zero value writes
// the transitive Link Bandwidth community of RFC 10005 and reads every valid
// value. Link Bandwidth (both transitivities) and the FARE community are both
// read whatever Encoding says; when both arrive the FARE one wins.
type Codec struct {
	Encoding Encoding // what is written

	// Code point of the FARE community; both zero means DefaultFAREType and
	// DefaultFARESubType.
	FAREType, FARESubType byte

	Format Format // number format of Link Bandwidth, written and read
	AS     uint32 // our AS number, written as AS_TRANS when it needs four bytes

	// Sanity bounds of received values in bit/s; 0 is none. A value outside is
	// ignored (some FRR releases corrupt values above 34 Gbit/s). Zero is
	// always inside: it is how maintenance is said.
	Min, Max Bandwidth
}

// Kind is what a community turned out to be.
type Kind uint8

// The kinds.
const (
	KindOther                      Kind = iota // says nothing about bandwidth
	KindLinkBandwidth                          // RFC 10005, transitive
	KindLinkBandwidthNonTransitive             // RFC 10005, non-transitive
	KindFARE                                   // the FARE community
)

var kindNames = []string{"other", "link-bandwidth", "link-bandwidth-non-transitive", "fare"}

// String is a word for status output.
func (k Kind) String() string { return enumName(kindNames, k) }

// Verdict is what one community of a route was judged to be. Bandwidth is
// meaningful only when Reason is [ReasonUsed] or one of those that compare values
// ([ReasonBelowMinimum], [ReasonAboveMaximum], [ReasonNotLowest], [ReasonOverridden]).
type Verdict struct {
	Kind      Kind
	Bandwidth Bandwidth
	Reason    Reason
}

// Advertised is the bandwidth that a route's communities say together. The
// zero value is a route that says nothing; Known with a Bandwidth of 0 says
// that the path is in maintenance.
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

// Encode writes b as the codec's community, always transitive. Link Bandwidth
// rounds to the nearest float32, or in format [Uint32] to the nearest byte/s
// up to 2^32-1. The FARE community names node (an IPv4 router ID; anything
// else is written as 0.0.0.0) and rounds to the nearest Gbit/s up to 65,535.
// A rate above zero is never rounded to zero, which would say maintenance.
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
	as := c.AS
	if as > math.MaxUint16 {
		as = asTrans // RFC 10005: AS_TRANS when the number needs four bytes
	}
	binary.BigEndian.PutUint16(out[2:4], uint16(as))
	if c.Format == Uint32 {
		binary.BigEndian.PutUint32(out[4:8], uint32(rounded(b, 8, math.MaxUint32)))
	} else {
		// Exact as float64 (b <= 2^53), so this rounds once, to nearest.
		binary.BigEndian.PutUint32(out[4:8], math.Float32bits(float32(float64(b)/8)))
	}
	return out
}

// rounded is b in units of unit, to nearest, at least 1 unless b is 0, at most
// limit.
func rounded(b, unit Bandwidth, limit uint64) uint64 {
	if b == 0 {
		return 0
	}
	return min(max(uint64((b+unit/2)/unit), 1), limit)
}

// Judge reads a route's communities: one [Verdict] each, appended to buf[:0]
// in their order, and what they say together. Invalid values are ignored, the
// others keep their meaning. At most one verdict is [ReasonUsed].
func (c Codec) Judge(communities []Community, buf []Verdict) (Advertised, []Verdict) {
	out := buf[:0]
	link, fare := -1, -1 // index of the lowest valid value of each
	for i := range communities {
		v := c.judge(communities[i])
		if v.Reason == ReasonUsed {
			lowest := &link
			if v.Kind == KindFARE {
				lowest = &fare
			}
			// RFC 10005: of several the lowest counts, whatever their
			// transitivity or AS number; compared by value, not by bytes.
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

func (c Codec) judge(raw Community) Verdict {
	var v Verdict
	fareType, fareSubType := c.farePoint()
	switch {
	case raw[0] == fareType && raw[1] == fareSubType:
		v.Kind = KindFARE
		v.Bandwidth = Bandwidth(binary.BigEndian.Uint16(raw[6:8])) * Gigabit
	case raw[0] == typeTwoOctetAS && raw[1] == subTypeLinkBandwidth,
		raw[0] == typeTwoOctetASNonTransitive && raw[1] == subTypeLinkBandwidth:
		// RFC 10005: both transitivities, mixed too; the AS number says nothing.
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
	default:
		v.Reason = ReasonNotBandwidth
	}
	if v.Reason == ReasonUsed && v.Bandwidth != 0 {
		if v.Bandwidth < c.Min {
			v.Reason = ReasonBelowMinimum
		} else if c.Max != 0 && v.Bandwidth > c.Max {
			v.Reason = ReasonAboveMaximum
		}
	}
	return v
}

// fromFloat turns bytes/s as sent into bit/s. The float is read as the
// shortest decimal that stands for it, so that 400G and 800G, neither of which
// is a float32 in bytes/s, come back as exactly 400e9 and 800e9 and their
// ratio as exactly 1:2. Fractions of a bit are dropped. A result that would
// not encode to the same float again (possible only below about 100 Mbit/s) is
// replaced by the float's own value, so that decoding, encoding and decoding
// again changes nothing.
func fromFloat(f float32) (Bandwidth, Reason) {
	const tooLarge = float32(MaxBandwidth / 8)
	switch {
	case f != f: // RFC 10005: not a number, negative and infinite are ignored
		return 0, ReasonNotANumber
	case math.IsInf(float64(f), 0):
		return 0, ReasonInfinite
	case f < 0: // minus zero is zero
		return 0, ReasonNegative
	case f > tooLarge:
		return 0, ReasonTooLarge
	}
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
		bits *= 10 // f <= 2^50, so bits <= 2^53 plus a rounding
	}
	for ; exponent < 0 && bits > 0; exponent++ {
		bits /= 10 // rounding down in steps is rounding down
	}
	if float32(float64(bits)/8) != f {
		bits = uint64(float64(f) * 8)
	}
	return min(Bandwidth(bits), MaxBandwidth), ReasonUsed
}

// Validate says what is wrong with a codec's settings, all of it.
func (c Codec) Validate() error {
	var errs []error
	if int(c.Encoding) >= len(encodingNames) {
		errs = append(errs, fmt.Errorf("encoding %s", c.Encoding))
	}
	if int(c.Format) >= len(formatNames) {
		errs = append(errs, fmt.Errorf("format %s", c.Format))
	}
	if t, s := c.farePoint(); t&^0x40 == typeTwoOctetAS && s == subTypeLinkBandwidth {
		errs = append(errs, fmt.Errorf("FARE community type %#02x sub-type %#02x is Link Bandwidth's: choose another, such as %#02x %#02x",
			t, s, DefaultFAREType, DefaultFARESubType))
	} else if t&0x40 != 0 {
		errs = append(errs, fmt.Errorf("FARE community type %#02x is not transitive: clear bit 0x40", t))
	}
	if c.Max != 0 && c.Min > c.Max {
		errs = append(errs, fmt.Errorf("minimum %s is above maximum %s", c.Min, c.Max))
	}
	return errors.Join(errs...)
}
