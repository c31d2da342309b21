package superp

import (
	"encoding/binary"
	"fmt"
)

// Opcode is the kind of a packet's operations. All packets of a transaction have the same opcode.
type Opcode uint8

// The opcodes of the SUPERp description.
const (
	OpcodeNoOp         Opcode = 0  // carries acknowledgements only
	OpcodeLast         Opcode = 1  // Last NULL: no further transactions (soft shutdown)
	OpcodeError        Opcode = 2  // reply: an operation failed
	OpcodeRead         Opcode = 8  // RMA read
	OpcodeWrite        Opcode = 9  // RMA write
	OpcodeReadResponse Opcode = 10 // reply
	OpcodeSend         Opcode = 11 // part of a message
	OpcodeSendQP       Opcode = 12 // a whole message for a queue pair
)

// The private opcodes: SUPERp has no atomics. The description numbers opcodes from 0 upwards and has reached 12, so bit
// 6 marks the private ones. Two ends that use no atomics speak plain SUPERp. A peer that does not know them answers
// with a transaction error.
//
//	compare-swap     address u64, key u32, reserved u32, compare u64, swap u64; answered by an atomic response
//	fetch-add        address u64, key u32, reserved u32, addend u64; answered by an atomic response
//	atomic response  seqno u16, op_num u8, reserved u8, previous value u64
const (
	OpcodeCompareSwap    Opcode = 0x40
	OpcodeFetchAdd       Opcode = 0x41
	OpcodeAtomicResponse Opcode = 0x42
)

// form is the layout of an opcode's operations.
type form struct {
	name   string
	header int  // length of an operation header in bytes
	data   bool // each operation has a block of data
	none   bool // the packet has no operations
}

// form returns the opcode's form and whether the opcode is known.
func (o Opcode) form() (form, bool) {
	switch o {
	case OpcodeNoOp:
		return form{name: "No-op", none: true}, true
	case OpcodeLast:
		return form{name: "Last NULL", none: true}, true
	case OpcodeError:
		return form{name: "Transaction error", header: 8}, true
	case OpcodeRead:
		return form{name: "RMA read", header: 12}, true
	case OpcodeWrite:
		return form{name: "RMA write", header: 8, data: true}, true
	case OpcodeReadResponse:
		return form{name: "Read response", header: 8, data: true}, true
	case OpcodeSend:
		return form{name: "Send", header: 8, data: true}, true
	case OpcodeSendQP:
		return form{name: "Send to QP", header: 4, data: true}, true
	case OpcodeCompareSwap:
		return form{name: "Compare-swap", header: 32}, true
	case OpcodeFetchAdd:
		return form{name: "Fetch-add", header: 24}, true
	case OpcodeAtomicResponse:
		return form{name: "Atomic response", header: 12}, true
	}
	return form{}, false
}

// Known reports whether this package can decode the opcode's operations.
func (o Opcode) Known() bool {
	_, known := o.form()
	return known
}

// reply reports whether packets of the opcode go from target to initiator.
func (o Opcode) reply() bool {
	return o == OpcodeError || o == OpcodeReadResponse || o == OpcodeAtomicResponse
}

func (o Opcode) String() string {
	if f, known := o.form(); known {
		return f.name
	}
	return fmt.Sprintf("opcode %#x", uint8(o))
}

// ErrorOp is the header of a Transaction error: operation xid:Seqno:Op failed.
type ErrorOp struct {
	Seqno        uint16
	Op, Reserved uint8
	Major, Minor uint16
}

// ReadOp is the header of an RMA read. Address is an rdma.FlatAddress.
type ReadOp struct {
	Address uint64
	Length  uint32
}

// WriteOp is the header of an RMA write. Address is an rdma.FlatAddress.
type WriteOp struct{ Address uint64 }

// ReadResponseOp is the header of a Read response: the block belongs at Offset of the bytes read by operation
// xid:Seqno:Op.
type ReadResponseOp struct {
	Seqno        uint16
	Op, Reserved uint8
	Offset       uint32
}

// SendOp is the header of a Send: the block belongs at Offset of the transaction's message. Key is the target's
// receiving context. A connection has one, its receives, under the random key of its connection data (0 if an agent has
// made the connection).
type SendOp struct{ Key, Offset uint32 }

// SendQPOp is the header of a Send to queue pair: the block is a message. A connection has one queue pair, whose number
// is the cid that the target has assigned to the connection.
type SendQPOp struct {
	QP       uint32 // 24 bits
	Reserved uint8
}

// AtomicOp is the header of a private atomic. Fetch-add has no Compare; its addend is Swap.
type AtomicOp struct {
	Address       uint64
	Key, Reserved uint32
	Compare, Swap uint64
}

// AtomicResponseOp is the header of a private atomic's reply.
type AtomicResponseOp struct {
	Seqno        uint16
	Op, Reserved uint8
	Was          uint64
}

// Error returns operation i of a packet of OpcodeError. This method and the following ones require a packet of their
// opcode.
func (p *Packet) Error(i int) ErrorOp {
	b, le := p.header(i), binary.LittleEndian
	return ErrorOp{Seqno: le.Uint16(b), Op: b[2], Reserved: b[3], Major: le.Uint16(b[4:]), Minor: le.Uint16(b[6:])}
}

// Read returns operation i of a packet of OpcodeRead.
func (p *Packet) Read(i int) ReadOp {
	b, le := p.header(i), binary.LittleEndian
	return ReadOp{Address: le.Uint64(b), Length: le.Uint32(b[8:])}
}

// Write returns operation i of a packet of OpcodeWrite.
func (p *Packet) Write(i int) WriteOp {
	return WriteOp{Address: binary.LittleEndian.Uint64(p.header(i))}
}

// ReadResponse returns operation i of a packet of OpcodeReadResponse.
func (p *Packet) ReadResponse(i int) ReadResponseOp {
	b, le := p.header(i), binary.LittleEndian
	return ReadResponseOp{Seqno: le.Uint16(b), Op: b[2], Reserved: b[3], Offset: le.Uint32(b[4:])}
}

// Send returns operation i of a packet of OpcodeSend.
func (p *Packet) Send(i int) SendOp {
	b, le := p.header(i), binary.LittleEndian
	return SendOp{Key: le.Uint32(b), Offset: le.Uint32(b[4:])}
}

// SendQP returns operation i of a packet of OpcodeSendQP.
func (p *Packet) SendQP(i int) SendQPOp {
	b := p.header(i)
	return SendQPOp{QP: uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16, Reserved: b[3]}
}

// Atomic returns operation i of a packet of OpcodeCompareSwap or OpcodeFetchAdd.
func (p *Packet) Atomic(i int) AtomicOp {
	b, le := p.header(i), binary.LittleEndian
	o := AtomicOp{Address: le.Uint64(b), Key: le.Uint32(b[8:]), Reserved: le.Uint32(b[12:])}
	if p.TAL.Opcode == OpcodeCompareSwap {
		o.Compare, o.Swap = le.Uint64(b[16:]), le.Uint64(b[24:])
	} else {
		o.Swap = le.Uint64(b[16:])
	}
	return o
}

// AtomicResponse returns operation i of a packet of OpcodeAtomicResponse.
func (p *Packet) AtomicResponse(i int) AtomicResponseOp {
	b, le := p.header(i), binary.LittleEndian
	return AtomicResponseOp{Seqno: le.Uint16(b), Op: b[2], Reserved: b[3], Was: le.Uint64(b[4:])}
}

func (o *ErrorOp) append(b []byte) []byte {
	b = append(binary.LittleEndian.AppendUint16(b, o.Seqno), o.Op, o.Reserved)
	b = binary.LittleEndian.AppendUint16(b, o.Major)
	return binary.LittleEndian.AppendUint16(b, o.Minor)
}

func (o *ReadOp) append(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(b, o.Address), o.Length)
}

func (o *WriteOp) append(b []byte) []byte { return binary.LittleEndian.AppendUint64(b, o.Address) }

func (o *ReadResponseOp) append(b []byte) []byte {
	b = append(binary.LittleEndian.AppendUint16(b, o.Seqno), o.Op, o.Reserved)
	return binary.LittleEndian.AppendUint32(b, o.Offset)
}

func (o *SendOp) append(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(b, o.Key), o.Offset)
}

func (o *SendQPOp) append(b []byte) []byte {
	return append(b, byte(o.QP), byte(o.QP>>8), byte(o.QP>>16), o.Reserved)
}

func (o *AtomicOp) append(b []byte, compare bool) []byte {
	le := binary.LittleEndian
	b = le.AppendUint32(le.AppendUint32(le.AppendUint64(b, o.Address), o.Key), o.Reserved)
	if compare {
		b = le.AppendUint64(b, o.Compare)
	}
	return le.AppendUint64(b, o.Swap)
}

func (o *AtomicResponseOp) append(b []byte) []byte {
	b = append(binary.LittleEndian.AppendUint16(b, o.Seqno), o.Op, o.Reserved)
	return binary.LittleEndian.AppendUint64(b, o.Was)
}
