package superppeer

import "encoding/binary"

// The opcodes of the description.
const (
	noOp         = 0
	lastNull     = 1
	transError   = 2
	read         = 8
	write        = 9
	readResponse = 10
	send         = 11
	sendQP       = 12
)

const headers = 16 + 8 // packet delivery and transaction layer

// headerLen is the length of an operation's header, by opcode.
var headerLen = map[byte]int{noOp: 0, lastNull: 0, transError: 8, read: 12, write: 8, readResponse: 8, send: 8, sendQP: 4}

// carriesData reports whether operations have a block of data.
func carriesData(opcode byte) bool {
	return opcode == write || opcode == readResponse || opcode == send || opcode == sendQP
}

// packet is a packet's fields.
type packet struct {
	dcid, rwin        uint16
	psn, ack, bitmap  uint32
	eom               bool
	ops               int
	opcode            byte
	seqno, xid, ackID uint16
	body              []byte // operation headers and data
}

func parse(b []byte) (p packet, ok bool) {
	if len(b) < headers {
		return p, false
	}
	le := binary.LittleEndian
	return packet{dcid: le.Uint16(b), rwin: le.Uint16(b[2:]), psn: le.Uint32(b[4:]), ack: le.Uint32(b[8:]), bitmap: le.Uint32(b[12:]),
		eom: b[16]&0x80 != 0, ops: int(b[16] & 15), opcode: b[17], seqno: le.Uint16(b[18:]), xid: le.Uint16(b[20:]), ackID: le.Uint16(b[22:]),
		body: b[headers:]}, true
}

func (p *packet) bytes() []byte {
	le := binary.LittleEndian
	b := le.AppendUint16(nil, p.dcid)
	b = le.AppendUint16(b, p.rwin)
	b = le.AppendUint32(b, p.psn)
	b = le.AppendUint32(b, p.ack)
	b = le.AppendUint32(b, p.bitmap)
	first := byte(p.ops)
	if p.eom {
		first |= 0x80
	}
	b = append(b, first, p.opcode)
	b = le.AppendUint16(b, p.seqno)
	b = le.AppendUint16(b, p.xid)
	b = le.AppendUint16(b, p.ackID)
	return append(b, p.body...)
}

// operations splits the body into operation headers and blocks of data of equal size.
func (p *packet) operations() (ops, blocks [][]byte, ok bool) {
	n, known := headerLen[p.opcode]
	if !known || (n == 0) != (p.ops == 0) || len(p.body) < n*p.ops {
		return nil, nil, false
	}
	data := p.body[n*p.ops:]
	if p.ops == 0 {
		return nil, nil, len(data) == 0
	}
	if len(data)%p.ops != 0 || len(data) > 0 && !carriesData(p.opcode) {
		return nil, nil, false
	}
	size := len(data) / p.ops
	for i := range p.ops {
		ops, blocks = append(ops, p.body[i*n:(i+1)*n]), append(blocks, data[i*size:(i+1)*size])
	}
	return ops, blocks, true
}
