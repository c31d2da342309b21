package hostile

import (
	"encoding/binary"
	"math"
	"slices"
)

// Kinds of BGP messages (RFC 4271, Section 4.1; RFC 2918).
const (
	kindOpen         = 1
	kindUpdate       = 2
	kindNotification = 3
	kindKeepalive    = 4
	kindRefresh      = 5
)

const (
	headerLen = 19
	maxLen    = 4096 // RFC 4271, Section 4.1
)

func message(kind byte, body ...byte) []byte {
	b := slices.Repeat([]byte{0xff}, 16)
	b = binary.BigEndian.AppendUint16(b, uint16(headerLen+len(body)))
	return append(append(b, kind), body...)
}

var (
	keepalive = message(kindKeepalive)
	endOfRIB  = message(kindUpdate, 0, 0, 0, 0)
	refresh   = message(kindRefresh, 0, 1, 0, 1)
)

// open returns an OPEN with the leaf's AS and identifier. Without parameters it has the usual capabilities: IPv4
// unicast, route refresh, AS numbers of four octets.
func open(plane int, parameters ...byte) []byte {
	as := leafAS(plane)
	if parameters == nil {
		parameters = parameter(1, 4, 0, 1, 0, 1, 2, 0, 65, 4, 0, 0, byte(as>>8), byte(as))
	}
	id := leafAddress(plane).As4()
	body := append([]byte{4, byte(as >> 8), byte(as), 0, holdTime}, id[:]...)
	return message(kindOpen, append(append(body, byte(len(parameters))), parameters...)...)
}

// parameter returns the optional parameter Capabilities (RFC 5492).
func parameter(capabilities ...byte) []byte {
	return append([]byte{2, byte(len(capabilities))}, capabilities...)
}

// attribute returns a path attribute; the length has two octets if it must.
func attribute(flags, kind byte, value ...byte) []byte {
	if len(value) > 255 {
		return append([]byte{flags | 0x10, kind, byte(len(value) >> 8), byte(len(value))}, value...)
	}
	return append([]byte{flags, kind, byte(len(value))}, value...)
}

// path returns an AS_PATH of one segment for each 255 numbers.
func path(numbers ...uint32) []byte {
	var value []byte
	for part := range slices.Chunk(numbers, 255) {
		value = append(value, 2, byte(len(part)))
		for _, n := range part {
			value = binary.BigEndian.AppendUint32(value, n)
		}
	}
	return attribute(0x40, 2, value...)
}

var origin = attribute(0x40, 1, 0)

func nextHop(address [4]byte) []byte { return attribute(0x40, 3, address[:]...) }

// bandwidth returns the attribute with a Link Bandwidth community (RFC 10005) of octets per second.
func bandwidth(value float32) []byte { return bandwidthBits(math.Float32bits(value)) }

func bandwidthBits(bits uint32) []byte {
	return attribute(0xc0, 16, binary.BigEndian.AppendUint32([]byte{0, 4, 0xfc, 0}, bits)...)
}

// well returns the attributes of a valid route of a leaf, with its bandwidth in octets per second.
func well(plane int, value float32) []byte {
	return slices.Concat(origin, path(uint32(leafAS(plane)), originAS), nextHop(leafAddress(plane).As4()), bandwidth(value))
}

// update returns an UPDATE that announces prefixes.
func update(attributes []byte, prefixes ...[]byte) []byte {
	body := append(binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(len(attributes))), attributes...)
	return message(kindUpdate, append(body, slices.Concat(prefixes...)...)...)
}

// withdraw returns an UPDATE that withdraws prefixes.
func withdraw(prefixes ...[]byte) []byte {
	all := slices.Concat(prefixes...)
	body := append(binary.BigEndian.AppendUint16(nil, uint16(len(all))), all...)
	return message(kindUpdate, append(body, 0, 0)...)
}

// destination returns the host route of a destination.
func destination(i int) []byte {
	return binary.BigEndian.AppendUint32([]byte{32}, firstDestination+uint32(i))
}

// withLength replaces the length in a message's header.
func withLength(b []byte, length int) []byte {
	b = slices.Clone(b)
	binary.BigEndian.PutUint16(b[16:], uint16(length))
	return b
}
