package proof

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"slices"
)

// Sizes of packets, in bytes of UDP payload. An answer has the size of its probe.
const (
	MinSize = 160
	MaxSize = 65507
)

// FlagsAt is the place of the flags, two bytes in network order, in a packet.
const FlagsAt = 6

const (
	version = 1
	macAt   = 144
	macSize = 16
)

var magic = [4]byte{'f', 'r', 'd', 'P'}

// Kind is the kind of a packet.
type Kind uint8

// Kinds of packets.
const (
	Probe  Kind = 1
	Answer Kind = 2
)

// Flags of packets: the first two of answers.
const (
	// FlagOtherReturn: the answer leaves by another plane than the one asked for, on which the peer has no slot with a
	// share.
	FlagOtherReturn = 1 << iota
	// FlagForeignPlane: the peer has no plane with the name of the probe's, so that names cannot be compared.
	FlagForeignPlane
	// FlagAtOnce: the receiver handles the packet at once, others together with its next regular work. The answer to
	// such a probe has it too.
	FlagAtOnce
	// FlagSoon: the prober reads its answers every quarter of a second, and wants the receiver to do so.
	FlagSoon
	knownFlags = FlagOtherReturn | FlagForeignPlane | FlagAtOnce | FlagSoon
)

// NeverHeard is the value of Packet.Heard of a sender that has received no probe of the receiver.
const NeverHeard = 1<<32 - 1

// Name is the name of a device or plane, padded with zero bytes. A longer one is its first seven bytes and a hash.
type Name [16]byte

// NameOf returns the name in a packet.
func NameOf(s string) (n Name) {
	if len(s) > len(n) {
		sum := sha256.Sum256([]byte(s))
		s = s[:7] + "~" + hex.EncodeToString(sum[:4])
	}
	copy(n[:], s)
	return n
}

// String returns the name, in which bytes that do not belong into a name are replaced.
func (n Name) String() string {
	s, _, _ := bytes.Cut(n[:], []byte{0})
	s = bytes.Clone(s)
	for i, c := range s {
		if c <= ' ' || c > '~' {
			s[i] = '?'
		}
	}
	return string(s)
}

// Packet is a probe, or the answer to one, which repeats the probe's fields.
type Packet struct {
	Kind  Kind
	Flags uint16
	// Nonce is random, so that an answer proves that its sender has read the probe.
	Nonce uint64
	// Sent is the time of the probe, Received and Answered those of the peer, as in RFC 8762: nanoseconds of the
	// sender's Unix time.
	Sent, Received, Answered int64
	// Heard is the age in milliseconds of the last probe that the prober has received from this peer.
	Heard uint32
	// Slot chooses the slot of the answer among those of its plane: equal numbers choose equal slots.
	Slot uint16
	// Size is the length of the datagram.
	Size int
	// Device and Plane are the sub-port of the probe's slot. Return is the plane by which the probe is to be answered,
	// in an answer the one by which it leaves, and ReturnDevice that slot's sub-port.
	Device, Plane, Return, ReturnDevice Name
	// ArrivedDevice and ArrivedPlane are where the probe arrived; the plane is empty if the device is no sub-port.
	ArrivedDevice, ArrivedPlane Name
}

// AtOnce reports whether the receiver handles the packet when it arrives.
func (p *Packet) AtOnce() bool { return p.Flags&FlagAtOnce != 0 }

// names lists the names in the order of the packet.
func (p *Packet) names() [6]*Name {
	return [6]*Name{&p.Device, &p.Plane, &p.Return, &p.ReturnDevice, &p.ArrivedDevice, &p.ArrivedPlane}
}

// Append appends the packet, padded to Size, with a keyed hash unless the key is empty.
func (p *Packet) Append(b, key []byte) []byte {
	start := len(b)
	b = append(b, magic[:]...)
	b = append(b, version, byte(p.Kind))
	b = binary.BigEndian.AppendUint16(b, p.Flags)
	b = binary.BigEndian.AppendUint64(b, p.Nonce)
	for _, t := range []int64{p.Sent, p.Received, p.Answered} {
		b = binary.BigEndian.AppendUint64(b, uint64(t))
	}
	b = binary.BigEndian.AppendUint32(b, p.Heard)
	b = binary.BigEndian.AppendUint16(b, p.Slot)
	b = binary.BigEndian.AppendUint16(b, uint16(p.Size))
	for _, n := range p.names() {
		b = append(b, n[:]...)
	}
	var mac [macSize]byte
	if len(key) > 0 {
		mac = hash(b[start:], key)
	}
	b = append(b, mac[:]...)
	n, padding := len(b), max(0, p.Size-MinSize)
	b = slices.Grow(b, padding)[:n+padding]
	clear(b[n:])
	return b
}

// Errors of Parse, which are the reasons of dropped packets.
var (
	ErrFormat = errors.New("not a packet of proofs")
	ErrKey    = errors.New("no key has made the packet's hash")
)

// Parse reads a datagram. If there are keys, one of them must have made the packet's hash, and is returned: an answer
// has the key of its probe, so that keys can be replaced one server at a time.
func Parse(b []byte, keys [][]byte) (p Packet, key []byte, err error) {
	if len(b) < MinSize || len(b) > MaxSize || [4]byte(b) != magic || b[4] != version {
		return p, nil, ErrFormat
	}
	p = Packet{
		Kind: Kind(b[5]), Flags: binary.BigEndian.Uint16(b[FlagsAt:]), Nonce: binary.BigEndian.Uint64(b[8:]),
		Sent: int64(binary.BigEndian.Uint64(b[16:])), Received: int64(binary.BigEndian.Uint64(b[24:])), Answered: int64(binary.BigEndian.Uint64(b[32:])),
		Heard: binary.BigEndian.Uint32(b[40:]), Slot: binary.BigEndian.Uint16(b[44:]), Size: int(binary.BigEndian.Uint16(b[46:])),
	}
	for i, n := range p.names() {
		*n = Name(b[48+16*i:])
	}
	if p.Kind != Probe && p.Kind != Answer || p.Flags&^knownFlags != 0 || p.Size != len(b) {
		return p, nil, ErrFormat
	}
	for _, k := range keys {
		if mac := hash(b[:macAt], k); hmac.Equal(mac[:], b[macAt:macAt+macSize]) {
			return p, k, nil
		}
	}
	if len(keys) > 0 {
		return p, nil, ErrKey
	}
	return p, nil, nil
}

// hash returns the first half of HMAC-SHA256.
func hash(b, key []byte) [macSize]byte {
	h := hmac.New(sha256.New, key)
	h.Write(b)
	return [macSize]byte(h.Sum(nil))
}
