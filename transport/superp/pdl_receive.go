package superp

import "math/bits"

// arrival is the receiver's classification of a psn.
type arrival uint8

const (
	fresh     arrival = iota
	duplicate         // received before; its acknowledgements are still processed
	outside           // above the window: a protocol error of the peer
)

// receiver is the receiving half of the packet delivery layer: it records the received psns. The zero value of next is
// the first psn.
type receiver struct {
	window  uint32 // in packets, from next on. Packets are accepted in all of it, whatever was offered
	offered int    // window in the latest packet to the peer (Connection.receiveWindow)
	next    uint32 // next expected psn
	high    uint32 // psn after the highest received
	seen    []uint64
	mask    uint32
	// pending counts the packets that request an acknowledgement since the latest one was sent; moved: any packet has
	// arrived since.
	pending int
	moved   bool
	plain   bool // the next acknowledgement must not be a NACK
}

func newReceiver(window int) receiver {
	n := max(64, ceilPow2(window))
	return receiver{window: uint32(window), offered: window, seen: make([]uint64, n/64), mask: uint32(n - 1)}
}

func (r *receiver) has(psn uint32) bool { return r.seen[psn&r.mask>>6]>>(psn&63)&1 != 0 }

// judge classifies a psn without changing state.
func (r *receiver) judge(psn uint32) arrival {
	switch d := int32(psn - r.next); {
	case d < 0:
		return duplicate
	case uint32(d) >= r.window:
		return outside
	case r.has(psn):
		return duplicate
	}
	return fresh
}

// take records a fresh psn, and reports whether it was the next expected one.
func (r *receiver) take(psn uint32) (inOrder bool) {
	r.seen[psn&r.mask>>6] |= 1 << (psn & 63)
	if int32(psn+1-r.high) > 0 {
		r.high = psn + 1
	}
	r.moved = true
	inOrder = psn == r.next
	for r.next != r.high && r.has(r.next) {
		r.seen[r.next&r.mask>>6] &^= 1 << (r.next & 63)
		r.next++
	}
	return inOrder
}

// holes reports whether packets are missing before the highest received one.
func (r *receiver) holes() bool { return r.next != r.high }

// acks returns the acknowledgement fields of the next packet. They usually contain the cumulative acknowledgement and a
// bitmap of the 32 psns from the next expected one on. If the first packet received out of order is beyond the bitmap,
// they form a NACK, which states that all psns between the cumulative acknowledgement and AckPSN are missing.
//
// A NACK does not contain the start of that range. A peer that missed the previous acknowledgements would keep
// retransmitting packets that have arrived, so every other packet, and the one after a duplicate, carries the
// cumulative acknowledgement instead.
func (r *receiver) acks() (ackPSN, sack uint32) {
	plain := r.plain
	r.plain = !plain
	if plain || !r.holes() {
		return r.next - 1, r.bitmap(r.next)
	}
	if sack := r.bitmap(r.next); sack != 0 {
		return r.next - 1, sack
	}
	for psn := r.next + 32; psn != r.high; psn++ {
		if word := r.seen[psn&r.mask>>6] >> (psn & 63); word == 0 {
			psn |= 63 // skip to the end of the word
			continue
		} else if n := uint32(bits.TrailingZeros64(word)); n > 0 {
			psn += n - 1
			continue
		}
		return psn, r.bitmap(psn)
	}
	return r.next - 1, 0
}

// bitmap returns the received psns of the 32 from first on; bits above the highest received psn are 0.
func (r *receiver) bitmap(first uint32) (b uint32) {
	for i := uint32(0); i < 32 && int32(first+i-r.high) < 0; i++ {
		if r.has(first + i) {
			b |= 1 << i
		}
	}
	return b
}
