package guard

import "encoding/binary"

// segmentSequence is AS_SEQUENCE, the only segment type that passes (RFC 4271,
// Section 4.3).
const segmentSequence = 2

// MaxASPath is the greatest number of AS numbers in the path of a route; a
// route with a longer path is treated as withdrawn. A fabric's paths have a
// handful, and the path is the longest part of a route that passes, so it
// determines the memory that a route takes.
const MaxASPath = 64

// appendPath appends the AS numbers of an AS_PATH or AS4_PATH value whose
// numbers have width octets. It returns false if the value is malformed or
// contains other segments than sequences; the route is then treated as
// withdrawn, without a path:
//   - RFC 7606, Section 7.2: unknown type, zero or overrunning segment;
//   - RFC 9774, Section 3: AS_SET and AS_CONFED_SET;
//   - RFC 5065, Section 5: AS_CONFED_SEQUENCE outside a confederation;
//   - RFC 7607, Section 2: AS 0.
func appendPath(path []uint32, value []byte, width int) ([]uint32, bool) {
	for len(value) > 0 {
		if len(value) < 2 || value[0] != segmentSequence || value[1] == 0 {
			return nil, false
		}
		n := int(value[1])
		value = value[2:]
		if len(value) < n*width {
			return nil, false
		}
		for range n {
			var as uint32
			if width == 2 {
				as = uint32(binary.BigEndian.Uint16(value))
			} else {
				as = binary.BigEndian.Uint32(value)
			}
			if as == 0 {
				return nil, false
			}
			path = append(path, as)
			value = value[width:]
		}
	}
	return path, true
}

// mergePath implements RFC 6793, Section 4.2.3: the result is the leading
// numbers of the 2-octet path that are missing in the 4-octet path, then the
// 4-octet path, which is ignored if it is longer. The result is stored in path.
func mergePath(path, path4 []uint32) []uint32 {
	if len(path4) > len(path) {
		return path
	}
	copy(path[len(path)-len(path4):], path4)
	return path
}

// appendPathAttribute appends an AS_PATH or AS4_PATH of one sequence, which has
// room for MaxASPath numbers, each in width octets; in two octets a larger
// number becomes AS_TRANS (RFC 6793, Section 4.2.2). An empty path has no
// segment.
func appendPathAttribute(b []byte, flags, kind byte, path []uint32, width int) []byte {
	if len(path) == 0 {
		return appendHead(b, flags, kind, 0)
	}
	b = append(appendHead(b, flags, kind, 2+width*len(path)), segmentSequence, byte(len(path)))
	for _, as := range path {
		if width == 4 {
			b = binary.BigEndian.AppendUint32(b, as)
			continue
		}
		if as > 0xffff {
			as = ASTrans
		}
		b = binary.BigEndian.AppendUint16(b, uint16(as))
	}
	return b
}

// needsFourOctets reports whether path contains a number that does not fit two octets.
func needsFourOctets(path []uint32) bool {
	for _, as := range path {
		if as > 0xffff {
			return true
		}
	}
	return false
}
