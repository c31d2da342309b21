package guard

import "encoding/binary"

// segmentSequence is AS_SEQUENCE, the one segment type that passes (RFC 4271,
// Section 4.3).
const segmentSequence = 2

// appendPath appends the AS numbers of an AS_PATH or AS4_PATH value whose
// numbers have width octets. False: the value is malformed or not plain
// sequences, and the route is to be treated as withdrawn:
//   - RFC 7606, Section 7.2: unknown type, zero or overrunning segment;
//   - RFC 9774, Section 3: AS_SET and AS_CONFED_SET;
//   - RFC 5065, Section 5: AS_CONFED_SEQUENCE outside a confederation;
//   - RFC 7607, Section 2: AS 0.
func appendPath(path []uint32, value []byte, width int) ([]uint32, bool) {
	for len(value) > 0 {
		if len(value) < 2 || value[0] != segmentSequence || value[1] == 0 {
			return path, false
		}
		n := int(value[1])
		value = value[2:]
		if len(value) < n*width {
			return path, false
		}
		for range n {
			var as uint32
			if width == 2 {
				as = uint32(binary.BigEndian.Uint16(value))
			} else {
				as = binary.BigEndian.Uint32(value)
			}
			if as == 0 {
				return path, false
			}
			path = append(path, as)
			value = value[width:]
		}
	}
	return path, true
}

// mergePath is RFC 6793, Section 4.2.3: the leading numbers of the 2-octet
// path that the 4-octet one does not know of, then the 4-octet one; it is
// ignored if it is the longer. The result is stored in path.
func mergePath(path, path4 []uint32) []uint32 {
	if len(path4) > len(path) {
		return path
	}
	copy(path[len(path)-len(path4):], path4)
	return path
}

// appendSegments appends path as sequences of at most 255 numbers, each in
// width octets; in two octets a larger one becomes AS_TRANS (RFC 6793,
// Section 4.2.2).
func appendSegments(b []byte, path []uint32, width int) []byte {
	for len(path) > 0 {
		n := min(len(path), 255)
		b = append(b, segmentSequence, byte(n))
		for _, as := range path[:n] {
			if width == 4 {
				b = binary.BigEndian.AppendUint32(b, as)
				continue
			}
			if as > 0xffff {
				as = asTrans
			}
			b = binary.BigEndian.AppendUint16(b, uint16(as))
		}
		path = path[n:]
	}
	return b
}

// segmentsLen is how many octets appendSegments appends.
func segmentsLen(path []uint32, width int) int {
	return 2*((len(path)+254)/255) + width*len(path)
}

// needsFourOctets tells whether path loses something in two octets.
func needsFourOctets(path []uint32) bool {
	for _, as := range path {
		if as > 0xffff {
			return true
		}
	}
	return false
}
