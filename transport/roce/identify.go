package roce

import "hash/crc32"

// maxBatch is the maximum number of packets that Linux cuts from one UDP_SEGMENT batch (UDP_MAX_SEGMENTS, 128 since
// 6.9): their IPv4 identifications are 0 to maxBatch-1.
const maxBatch = 128

// anyID is the highest identification that a packet can have.
const anyID = 0xffff

// pivot is one step of the elimination that solves for an identification: if a difference contains bit, vector is
// subtracted from it, and id added to the identification.
type pivot struct {
	bit, vector uint32
	id          uint16
}

// solver finds the IPv4 identification that explains the difference of a CRC from the one for identification 0. A CRC
// is linear: a change of input bits changes it by an exclusive or that depends only on these bits and the number of
// bytes after them. The effects of the identification's 16 bits are linearly independent (a CRC of 32 bits detects
// every burst of 32), so at most one identification explains a difference.
type solver [16]pivot

// newSolver makes the solver for an identification that is followed by n bytes.
func newSolver(n int) *solver {
	s := new(solver)
	covered := make([]byte, 2+n)
	for b := range s {
		clear(covered[:2])
		id := uint16(1) << b
		covered[0], covered[1] = byte(id>>8), byte(id)
		// The register starts and ends at 0, where crc32 has ones: this removes the affine part.
		vector := ^crc32.Update(^uint32(0), crc32.IEEETable, covered)
		for _, p := range s[:b] {
			if vector&p.bit != 0 {
				vector, id = vector^p.vector, id^p.id
			}
		}
		s[b] = pivot{bit: vector & -vector, vector: vector, id: id}
	}
	return s
}

// solve returns the identification for a difference of CRCs, or false if none explains it.
func (s *solver) solve(difference uint32) (id uint16, ok bool) {
	for i := range s {
		if p := &s[i]; difference&p.bit != 0 {
			difference, id = difference^p.vector, id^p.id
		}
	}
	return id, difference == 0
}

// solvers caches solvers by the number of 32-bit words in the UDP payload. A packet has at most maxDatagram bytes.
type solvers [maxDatagram/4 + 1]*solver

// maxDatagram is the maximum UDP payload in both directions: headers, 4,096 bytes of payload and the ICRC.
const maxDatagram = maxHeader + 4096 + icrcSize

// afterID is the number of bytes that the ICRC covers between the identification and the UDP payload: flags, TTL,
// protocol, checksum, addresses and the UDP header.
const afterID = 2 + 1 + 1 + 2 + 8 + 8

// solve is solver.solve for UDP payloads of n bytes, a multiple of 4.
func (s *solvers) solve(n int, difference uint32) (uint16, bool) {
	if s[n/4] == nil {
		s[n/4] = newSolver(afterID + n - icrcSize)
	}
	return s[n/4].solve(difference)
}
