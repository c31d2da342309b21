package rdma

import (
	"encoding/binary"
	"fmt"
)

// HeadSize is the length of the header of every OpSend of a set, in bytes.
const HeadSize = 20

// header is the header of an OpSend: it gives the place of the payload in its message. Integers are in network byte
// order.
//
//	0  kind u8 · length u24: of this piece
//	4  message u32: number of the message that consumes a receive, per direction, from 0, modulo 2^32
//	8  immediate u32
//	12 offset u32: of this piece in the message
//	16 total u32: length of the message; kindWrite: number of bytes written
//
// The payload follows the header. A piece of kindWrite has no payload: it announces that a WRITE with immediate is in
// place. A piece of kindTunnel is a datagram of another channel: message holds that channel's number (8 bits) and a
// counter (24 bits), immediate its source port. A piece of kindCredit announces posted receives for all messages of the
// other direction before message.
type header struct {
	kind      uint8
	length    uint32
	message   uint32
	immediate uint32
	offset    uint32
	total     uint32
}

const (
	kindSend uint8 = iota
	kindSendImmediate
	kindWrite
	kindTunnel
	kindCredit
	kinds
)

// maxMessage and maxPiece are the maximum lengths of a message and of a piece, in bytes.
const (
	maxMessage = 1 << 30
	maxPiece   = 1<<24 - 1
)

func (h *header) marshal(b *[HeadSize]byte) {
	binary.BigEndian.PutUint32(b[0:], uint32(h.kind)<<24|h.length)
	binary.BigEndian.PutUint32(b[4:], h.message)
	binary.BigEndian.PutUint32(b[8:], h.immediate)
	binary.BigEndian.PutUint32(b[12:], h.offset)
	binary.BigEndian.PutUint32(b[16:], h.total)
}

func (h *header) unmarshal(b []byte) error {
	if len(b) != HeadSize {
		return fmt.Errorf("head of %d bytes instead of %d", len(b), HeadSize)
	}
	first := binary.BigEndian.Uint32(b)
	if first>>24 >= uint32(kinds) {
		return fmt.Errorf("head of unknown kind %d", first>>24)
	}
	*h = header{kind: uint8(first >> 24), length: first & maxPiece, message: binary.BigEndian.Uint32(b[4:]), immediate: binary.BigEndian.Uint32(b[8:]),
		offset: binary.BigEndian.Uint32(b[12:]), total: binary.BigEndian.Uint32(b[16:])}
	if h.total > maxMessage || h.offset > h.total || h.length > h.total-h.offset || (h.kind == kindWrite || h.kind == kindCredit) && h.length != 0 {
		return fmt.Errorf("piece of %d bytes at %d of a message of %d bytes", h.length, h.offset, h.total)
	}
	return nil
}
