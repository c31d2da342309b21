package roce

// opcode is a BTH opcode (Section 9.2): the three high bits are the service, 0 for RC.
type opcode uint8

const (
	sendFirst opcode = iota
	sendMiddle
	sendLast
	sendLastImm
	sendOnly
	sendOnlyImm
	writeFirst
	writeMiddle
	writeLast
	writeLastImm
	writeOnly
	writeOnlyImm
	readRequest
	readFirst
	readMiddle
	readLast
	readOnly
	acknowledge
	atomicAck
	compareSwap
	fetchAdd
	opcodes // number of opcodes
)

// has is the set of properties of an opcode: the extended headers that follow the BTH, in wire order, and others.
type has uint8

const (
	hasRETH has = 1 << iota
	hasAtomicETH
	hasAETH
	hasAtomicAckETH
	hasImm
	hasPayload // may have a payload
	isFirst    // first or only packet of a message
	isLast     // last or only packet of a message
)

var traits = [opcodes]has{
	sendFirst:    hasPayload | isFirst,
	sendMiddle:   hasPayload,
	sendLast:     hasPayload | isLast,
	sendLastImm:  hasPayload | isLast | hasImm,
	sendOnly:     hasPayload | isFirst | isLast,
	sendOnlyImm:  hasPayload | isFirst | isLast | hasImm,
	writeFirst:   hasPayload | isFirst | hasRETH,
	writeMiddle:  hasPayload,
	writeLast:    hasPayload | isLast,
	writeLastImm: hasPayload | isLast | hasImm,
	writeOnly:    hasPayload | isFirst | isLast | hasRETH,
	writeOnlyImm: hasPayload | isFirst | isLast | hasRETH | hasImm,
	readRequest:  isFirst | isLast | hasRETH,
	readFirst:    hasPayload | isFirst | hasAETH,
	readMiddle:   hasPayload,
	readLast:     hasPayload | isLast | hasAETH,
	readOnly:     hasPayload | isFirst | isLast | hasAETH,
	acknowledge:  hasAETH,
	atomicAck:    hasAETH | hasAtomicAckETH,
	compareSwap:  isFirst | isLast | hasAtomicETH,
	fetchAdd:     isFirst | isLast | hasAtomicETH,
}

// size returns the length of the BTH and the extended headers, in bytes.
func (h has) size() int {
	n := bthSize
	if h&hasRETH != 0 {
		n += rethSize
	}
	if h&hasAtomicETH != 0 {
		n += atomicETHSize
	}
	if h&hasAETH != 0 {
		n += aethSize
	}
	if h&hasAtomicAckETH != 0 {
		n += atomicAckETHSize
	}
	if h&hasImm != 0 {
		n += immSize
	}
	return n
}

// isSend and isWrite report whether the opcode is one of the packets of a SEND or WRITE.
func (o opcode) isSend() bool  { return o <= sendOnlyImm }
func (o opcode) isWrite() bool { return o >= writeFirst && o <= writeOnlyImm }

// isResponse reports whether packets of the opcode go to the requester.
func (o opcode) isResponse() bool { return o >= readFirst && o <= atomicAck }

// isRead reports whether the opcode is one of the READ responses.
func (o opcode) isRead() bool { return o >= readFirst && o <= readOnly }
