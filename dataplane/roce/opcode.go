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
	opcodes // how many there are
)

// has says which extended headers follow the BTH, in their order on the wire, and what else an opcode implies.
type has uint8

const (
	hasRETH has = 1 << iota
	hasAtomicETH
	hasAETH
	hasAtomicAckETH
	hasImm
	hasPayload // may have one
	isFirst    // or the only one: begins a message
	isLast     // or the only one: ends it
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

// size is how many bytes the BTH and the extended headers have.
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

// isSend, isWrite: requests in as many packets as they need.
func (o opcode) isSend() bool  { return o <= sendOnlyImm }
func (o opcode) isWrite() bool { return o >= writeFirst && o <= writeOnlyImm }

// isResponse: what goes to the requester.
func (o opcode) isResponse() bool { return o >= readFirst && o <= atomicAck }

// isRead: a READ response.
func (o opcode) isRead() bool { return o >= readFirst && o <= readOnly }
