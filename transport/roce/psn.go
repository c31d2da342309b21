package roce

// mask24 is the range of packet sequence numbers, message sequence numbers and queue pair numbers on the wire: 24 bits.
const mask24 = 1<<24 - 1

// seq is a sequence number that does not wrap: its low 24 bits are the PSN on the wire.
type seq int64

func (s seq) psn() uint32 { return uint32(s) & mask24 }

// near returns the sequence number for a PSN that is nearest to s: between s-2^23 and s+2^23-1 (Section 9.7.1: half of
// the numbers are valid, the other half are duplicates).
func (s seq) near(psn uint32) seq {
	return s + seq(int32((psn-uint32(s))<<8)>>8)
}
