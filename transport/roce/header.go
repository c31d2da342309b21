package roce

import (
	"encoding/binary"
	"errors"
)

// Sizes in bytes.
const (
	bthSize          = 12
	rethSize         = 16
	atomicETHSize    = 28
	aethSize         = 4
	atomicAckETHSize = 8
	immSize          = 4
	icrcSize         = 4
	maxHeader        = bthSize + atomicETHSize
)

// defaultPKey is the partition key of RoCE: full member of the default partition (annex A16).
const defaultPKey = 0xffff

// header is a BTH with the extended headers of its opcode (Sections 9.2 and 9.3). The fields of other headers are zero
// after unmarshal, and ignored by marshal.
type header struct {
	opcode    opcode
	solicited bool // SE
	migrated  bool // M: the path migration state is "migrated", as in queue pairs without an alternate path
	pad       uint8
	pkey      uint16
	becn      uint8 // FECN, BECN and six reserved bits: not covered by the ICRC
	qpn       uint32
	ackReq    bool
	psn       uint32

	// RETH: RDMA requests. address, key and compare, swap: AtomicETH.
	address uint64
	key     uint32
	length  uint32
	swap    uint64 // FetchAdd: the addend
	compare uint64
	// AETH.
	syndrome uint8
	msn      uint32
	// AtomicAckETH.
	original uint64
	// ImmDt.
	immediate uint32
}

// Errors of malformed packets, which are dropped.
var (
	errShort   = errors.New("shorter than its headers")
	errOpcode  = errors.New("not an opcode of RC")
	errVersion = errors.New("transport header version other than 0")
	errPad     = errors.New("more padding than payload")
	errPayload = errors.New("payload where the opcode has none")
)

// marshal writes the header to b, which has room for maxHeader bytes, and returns its length.
func (h *header) marshal(b []byte) int {
	_ = b[:bthSize]
	b[0] = uint8(h.opcode)
	b[1] = h.pad << 4
	if h.solicited {
		b[1] |= 0x80
	}
	if h.migrated {
		b[1] |= 0x40
	}
	binary.BigEndian.PutUint16(b[2:], h.pkey)
	binary.BigEndian.PutUint32(b[4:], uint32(h.becn)<<24|h.qpn&mask24)
	psn := h.psn & mask24
	if h.ackReq {
		psn |= 1 << 31
	}
	binary.BigEndian.PutUint32(b[8:], psn)
	n, t := bthSize, traits[h.opcode]
	if t&hasRETH != 0 {
		binary.BigEndian.PutUint64(b[n:], h.address)
		binary.BigEndian.PutUint32(b[n+8:], h.key)
		binary.BigEndian.PutUint32(b[n+12:], h.length)
		n += rethSize
	}
	if t&hasAtomicETH != 0 {
		binary.BigEndian.PutUint64(b[n:], h.address)
		binary.BigEndian.PutUint32(b[n+8:], h.key)
		binary.BigEndian.PutUint64(b[n+12:], h.swap)
		binary.BigEndian.PutUint64(b[n+20:], h.compare)
		n += atomicETHSize
	}
	if t&hasAETH != 0 {
		binary.BigEndian.PutUint32(b[n:], uint32(h.syndrome)<<24|h.msn&mask24)
		n += aethSize
	}
	if t&hasAtomicAckETH != 0 {
		binary.BigEndian.PutUint64(b[n:], h.original)
		n += atomicAckETHSize
	}
	if t&hasImm != 0 {
		binary.BigEndian.PutUint32(b[n:], h.immediate)
		n += immSize
	}
	return n
}

// unmarshal parses a packet without its ICRC. It returns the payload without padding, which shares p's memory.
func (h *header) unmarshal(p []byte) ([]byte, error) {
	if len(p) < bthSize {
		return nil, errShort
	}
	op := opcode(p[0])
	if op >= opcodes {
		return nil, errOpcode
	}
	if p[1]&0x0f != 0 {
		return nil, errVersion
	}
	t := traits[op]
	n := t.size()
	if len(p) < n {
		return nil, errShort
	}
	pad := p[1] >> 4 & 3
	switch {
	case t&hasPayload == 0 && len(p) != n:
		return nil, errPayload
	case len(p)-n < int(pad) || len(p)%4 != 0: // payload and padding form words of four bytes (Section 9.2)
		return nil, errPad
	}
	payload := p[n : len(p)-int(pad)]
	*h = header{
		opcode: op, solicited: p[1]&0x80 != 0, migrated: p[1]&0x40 != 0, pad: pad,
		pkey: binary.BigEndian.Uint16(p[2:]), becn: p[4], qpn: binary.BigEndian.Uint32(p[4:]) & mask24,
		ackReq: p[8]&0x80 != 0, psn: binary.BigEndian.Uint32(p[8:]) & mask24,
	}
	p = p[bthSize:n]
	if t&hasRETH != 0 {
		h.address, h.key, h.length = binary.BigEndian.Uint64(p), binary.BigEndian.Uint32(p[8:]), binary.BigEndian.Uint32(p[12:])
		p = p[rethSize:]
	}
	if t&hasAtomicETH != 0 {
		h.address, h.key = binary.BigEndian.Uint64(p), binary.BigEndian.Uint32(p[8:])
		h.swap, h.compare = binary.BigEndian.Uint64(p[12:]), binary.BigEndian.Uint64(p[20:])
		p = p[atomicETHSize:]
	}
	if t&hasAETH != 0 {
		v := binary.BigEndian.Uint32(p)
		h.syndrome, h.msn = uint8(v>>24), v&mask24
		p = p[aethSize:]
	}
	if t&hasAtomicAckETH != 0 {
		h.original = binary.BigEndian.Uint64(p)
		p = p[atomicAckETHSize:]
	}
	if t&hasImm != 0 {
		h.immediate = binary.BigEndian.Uint32(p)
	}
	return payload, nil
}
