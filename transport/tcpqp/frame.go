package tcpqp

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/fared/fared/transport/rdma"
)

// opcode is the kind of a frame. RDMA operations have InfiniBand's opcodes for reliable connections (IBTA 1.4, Table
// 38), in the ONLY variant, since a frame is a whole message; other frames have opcodes from the vendor range.
type opcode uint8

const (
	opSend          opcode = 0x04 // head, data
	opSendImmediate opcode = 0x05 // immediate data, head, data
	opWrite         opcode = 0x0a // address and key; data
	opRead          opcode = 0x0c // address and key; length is the requested length, no data follows
	opReadAnswer    opcode = 0x10 // data
	opAck           opcode = 0x11 // all requests before msn have been executed, and need no other answer
	opAtomicAnswer  opcode = 0x12 // the previous value
	opCompareSwap   opcode = 0x13 // address and key, swap, compare
	opFetchAdd      opcode = 0x14 // address and key, addend
	opOpen          opcode = 0xc0 // attaches a channel to the connection
	opAccept        opcode = 0xc1 // msn: the first request that has not been executed
	opRefuse        opcode = 0xc2 // status: the reason
	opError         opcode = 0xc3 // status: the reason why the request was not executed
	opHold          opcode = 0xc4 // no receive for SEND msn: stop
	opResume        opcode = 0xc5 // continue from msn
)

// headerSize is the length of the fixed part of all headers: opcode, status, length of the head, 0, channel (4), msn
// (4), done (4), length (4).
const headerSize = 20

// Sizes of the variable part, by opcode.
const (
	whereSize  = 12 // address (8), key (4)
	atomicSize = whereSize + 16
	openSize   = 4 + 4 + 4 + 4 + nonceSize // magic, sender's channel, epoch, features, nonce
	nonceSize  = 16
	acceptSize = 8 // epoch, features
	wasSize    = 8
	immSize    = 4
	// WriteHeader is the number of bytes in front of the data in a WRITE's frame.
	WriteHeader = headerSize + whereSize
	maxHeader   = headerSize + openSize + rdma.MaxHead
)

const magic = 0x46515032 // "FQP2": also identifies the version of the protocol

// featureOption requests that segments carry the option.
const featureOption = 1

// status is the reason of a refusal or an error.
type status uint8

const (
	statusNone      status = iota
	statusAccess           // rdma.ErrRemoteAccess
	statusInvalid          // rdma.ErrRemoteInvalid
	statusOperation        // rdma.ErrRemoteOperation
	statusGone             // REFUSE: the channel does not exist, or has ended
	statusHeld             // ACCEPT: HOLD is in force
)

// statusOf returns the status for an error of the Host.
func statusOf(err error) status {
	switch {
	case errors.Is(err, rdma.ErrRemoteAccess):
		return statusAccess
	case errors.Is(err, rdma.ErrRemoteInvalid):
		return statusInvalid
	}
	return statusOperation
}

// err returns the error with which an operation with this status completes.
func (s status) err() error {
	switch s {
	case statusAccess:
		return rdma.ErrRemoteAccess
	case statusInvalid:
		return rdma.ErrRemoteInvalid
	}
	return rdma.ErrRemoteOperation
}

// header is a frame without its data. Fields that its opcode does not use are 0.
type header struct {
	op      opcode
	status  status
	channel uint32 // number of the receiving channel
	msn     uint32
	done    uint32 // OPEN and requests: the first unanswered request
	length  uint32 // length of the data; READ: requested length

	address       uint64
	key           uint32
	swap, compare uint64 // atomics; swap is the addend of FetchAdd, and the previous value in an answer
	immediate     uint32

	from, epoch, features uint32 // OPEN; ACCEPT has the last two
	nonce                 [nonceSize]byte

	head  [rdma.MaxHead]byte
	headN uint8
}

// extension returns the length of the variable part without SEND's head, and false for an unknown opcode.
func (o opcode) extension() (int, bool) {
	switch o {
	case opWrite, opRead:
		return whereSize, true
	case opCompareSwap, opFetchAdd:
		return atomicSize, true
	case opAtomicAnswer:
		return wasSize, true
	case opSendImmediate:
		return immSize, true
	case opOpen:
		return openSize, true
	case opAccept:
		return acceptSize, true
	case opSend, opReadAnswer, opAck, opRefuse, opError, opHold, opResume:
		return 0, true
	}
	return 0, false
}

// data returns the length of the data that follows the header.
func (h *header) data() int {
	switch h.op {
	case opSend, opSendImmediate, opWrite, opReadAnswer:
		return int(h.length)
	}
	return 0
}

// put writes the header, which has at most maxHeader bytes, and returns its length.
func (h *header) put(p []byte) int {
	p[0], p[1], p[2], p[3] = byte(h.op), byte(h.status), h.headN, 0
	be := binary.BigEndian
	be.PutUint32(p[4:], h.channel)
	be.PutUint32(p[8:], h.msn)
	be.PutUint32(p[12:], h.done)
	be.PutUint32(p[16:], h.length)
	x := p[headerSize:]
	switch h.op {
	case opWrite, opRead, opCompareSwap, opFetchAdd:
		be.PutUint64(x, h.address)
		be.PutUint32(x[8:], h.key)
		if h.op == opCompareSwap || h.op == opFetchAdd {
			be.PutUint64(x[12:], h.swap)
			be.PutUint64(x[20:], h.compare)
		}
	case opAtomicAnswer:
		be.PutUint64(x, h.swap)
	case opSendImmediate:
		be.PutUint32(x, h.immediate)
	case opOpen:
		be.PutUint32(x, magic)
		be.PutUint32(x[4:], h.from)
		be.PutUint32(x[8:], h.epoch)
		be.PutUint32(x[12:], h.features)
		copy(x[16:openSize], h.nonce[:])
	case opAccept:
		be.PutUint32(x, h.epoch)
		be.PutUint32(x[4:], h.features)
	}
	n, _ := h.op.extension()
	n += headerSize
	return n + copy(p[n:], h.head[:h.headN])
}

// parse parses a header and returns its length, or 0 if it is incomplete. An error is permanent: the position of the
// next frame is unknown then.
func (h *header) parse(p []byte) (int, error) {
	if len(p) < headerSize {
		return 0, nil
	}
	op, be := opcode(p[0]), binary.BigEndian
	n, ok := op.extension()
	switch {
	case !ok:
		return 0, fmt.Errorf("tcpqp: opcode %#x", uint8(op))
	case p[3] != 0:
		return 0, fmt.Errorf("tcpqp: reserved byte %#x", p[3])
	case int(p[2]) > rdma.MaxHead || p[2] != 0 && op != opSend && op != opSendImmediate:
		return 0, fmt.Errorf("tcpqp: opcode %#x with a head of %d bytes", uint8(op), p[2])
	}
	got := header{
		op: op, status: status(p[1]), headN: p[2],
		channel: be.Uint32(p[4:]), msn: be.Uint32(p[8:]), done: be.Uint32(p[12:]), length: be.Uint32(p[16:]),
	}
	if got.length > maxOp || got.length != 0 && op != opRead && got.data() == 0 {
		return 0, fmt.Errorf("tcpqp: opcode %#x with a length of %d", uint8(op), got.length)
	}
	n += headerSize
	if len(p) < n+int(got.headN) {
		return 0, nil
	}
	x := p[headerSize:]
	switch op {
	case opWrite, opRead, opCompareSwap, opFetchAdd:
		got.address, got.key = be.Uint64(x), be.Uint32(x[8:])
		if op == opCompareSwap || op == opFetchAdd {
			got.swap, got.compare = be.Uint64(x[12:]), be.Uint64(x[20:])
		}
	case opAtomicAnswer:
		got.swap = be.Uint64(x)
	case opSendImmediate:
		got.immediate = be.Uint32(x)
	case opOpen:
		if m := be.Uint32(x); m != magic {
			return 0, fmt.Errorf("tcpqp: OPEN of another protocol or version: %#x instead of %#x; both ends need the same version of fared", m, magic)
		}
		got.from, got.epoch, got.features = be.Uint32(x[4:]), be.Uint32(x[8:]), be.Uint32(x[12:])
		copy(got.nonce[:], x[16:])
	case opAccept:
		got.epoch, got.features = be.Uint32(x), be.Uint32(x[4:])
	}
	n += copy(got.head[:got.headN], p[n:])
	*h = got
	return n, nil
}
