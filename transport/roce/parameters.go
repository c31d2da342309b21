package roce

import (
	"encoding/binary"
	"fmt"
)

// Parameters are the parameters of a queue pair that its peer needs. Applications that connect a queue pair with one of
// another implementation exchange QPN and PSN by their own means, as ibv_modify_qp takes them; Bytes is the form of
// farev1.ChannelEnd.Parameters. Such a queue pair is the only one of its set, and both ends then exchange nothing but
// the packets of the InfiniBand specification.
type Parameters struct {
	QPN uint32 // number of the queue pair: 2 to 2^24-1
	PSN uint32 // sequence number of the first request that it sends: 24 bits
	MTU int    // path MTU: 256, 512, 1024, 2048 or 4096 bytes; a queue pair uses the lower value of both ends
	// ReadAtomic is the number of outstanding READs and atomics that it executes for its peer, at least 1
	// (max_dest_rd_atomic).
	ReadAtomic int

	head   uint8 // length of rdma.Op.Head; 0 for other implementations
	socket bool  // its packets have the IPv4 identifications of a socket, below maxBatch: the peer checks more bits of their ICRCs
}

// parametersSize and parametersVersion are the size and version of Parameters.Bytes, in network byte order:
//
//	0  version u8 · length of heads u8 · MTU u16
//	4  limit of outstanding READs and atomics u16 · flags u16
//	8  queue pair number u32
//	12 first PSN u32
const (
	parametersSize    = 16
	parametersVersion = 1
	flagSocket        = 1
)

// Bytes returns the parameters in the encoding of the exchange between sets.
func (p Parameters) Bytes() []byte {
	b := make([]byte, parametersSize)
	b[0], b[1] = parametersVersion, p.head
	binary.BigEndian.PutUint16(b[2:], uint16(p.MTU))
	binary.BigEndian.PutUint16(b[4:], uint16(p.ReadAtomic))
	if p.socket {
		binary.BigEndian.PutUint16(b[6:], flagSocket)
	}
	binary.BigEndian.PutUint32(b[8:], p.QPN)
	binary.BigEndian.PutUint32(b[12:], p.PSN)
	return b
}

// ParseParameters parses the result of Bytes. Unknown flags are ignored.
func ParseParameters(b []byte) (Parameters, error) {
	if len(b) != parametersSize || b[0] != parametersVersion {
		return Parameters{}, fmt.Errorf("roce: parameters %x of a queue pair: want %d bytes of version %d", b, parametersSize, parametersVersion)
	}
	p := Parameters{QPN: binary.BigEndian.Uint32(b[8:]), PSN: binary.BigEndian.Uint32(b[12:]), MTU: int(binary.BigEndian.Uint16(b[2:])),
		ReadAtomic: int(binary.BigEndian.Uint16(b[4:])), head: b[1], socket: binary.BigEndian.Uint16(b[6:])&flagSocket != 0}
	if !validMTU(p.MTU) || p.ReadAtomic < 1 || p.QPN < 2 || p.QPN > mask24 || p.PSN > mask24 {
		return Parameters{}, fmt.Errorf("roce: parameters of a queue pair: MTU %d, READs and atomics %d, number %d, first PSN %d", p.MTU, p.ReadAtomic, p.QPN, p.PSN)
	}
	return p, nil
}
