package roce

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// FuzzQP runs the model with a network, a configuration and operations chosen by the input: memory must equal the
// model's, every operation is executed once, and none completes early.
func FuzzQP(f *testing.F) {
	f.Add(uint64(1), []byte{10, 10, 10, 10, 40, 20, 3, 2, 1, 16})
	f.Add(uint64(2), []byte{60, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add(uint64(3), []byte{0, 90, 50, 0, 90, 5, 1, 4, 3, 1})
	f.Add(uint64(4), []byte{5, 5, 5, 60, 0, 1, 7, 1, 2, 128})
	f.Fuzz(func(t *testing.T, seed uint64, b []byte) {
		at := func(i int) int {
			if i < len(b) {
				return int(b[i])
			}
			return 0
		}
		// Each fault affects up to a quarter of all packets.
		chance := func(i int) float64 { return float64(at(i)) / 1024 }
		o := rdmatest.Options{Seed: seed, Ops: 60, MaxSize: 1 + 200*at(5), Channels: 1 + at(6)%3,
			Loss: chance(0), Duplicate: chance(1), Reorder: chance(2), Corrupt: chance(3), NotReady: chance(4)}
		if at(7)%2 == 1 {
			o.Flap = time.Duration(1+at(7)) * 100 * time.Microsecond
		}
		cfg := Config{MTU: 256 << (at(8) % 5), MaxReadAtomic: 1 + at(9)%16, Depth: 1 + at(9), Timing: rdma.Timing{GiveUp: time.Hour},
			// Sequence numbers wrap.
			Random: func() uint32 { seed += 0x1000193; return uint32(seed)<<12 ^ 0xfffff0 }}
		o.MaxSize = min(o.MaxSize, 40*cfg.MTU) // otherwise go-back-N makes no progress in the worst of these networks
		rdmatest.Channels(t, constructor(cfg), o)
	})
}

// FuzzRequests delivers packets with correct ICRCs to a queue pair with outstanding operations. No packet breaks the
// contract, and the core still serves another queue pair afterwards.
func FuzzRequests(f *testing.F) {
	f.Add([]byte{byte(sendOnly), 0, 0, 40, byte(acknowledge), 0, 0x1f, 0})
	f.Add([]byte{byte(writeFirst), 0, 0, 255, byte(writeLast), 1, 0, 7, byte(readRequest), 2, 4, 0, byte(fetchAdd), 3, 0, 0, byte(fetchAdd), 3, 0, 0})
	f.Add([]byte{byte(readOnly), 1, 0, 4, byte(atomicAck), 2, 0, 0, byte(acknowledge), 255, 0x62, 0, byte(sendMiddle), 1, 1, 255})
	f.Add([]byte{byte(acknowledge), 0, 0x2e, 0, 0xff, 0, 0, 0, byte(acknowledge), 0, 0x60, 0, 0xff, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		h := newHand(t, Config{})
		h.body = make([]byte, 300)
		h.post(sendOp(300), readOp(600), addOp(), writeOp(9))
		posted, wraps := 4, 0
		for ; len(b) >= 4; b = b[4:] {
			op := opcode(b[0])
			if op >= opcodes {
				switch {
				case h.wake != 0 && wraps < 100: // let time pass
					wraps++
					h.sleep()
				case h.q.state == ready:
					h.host.Do(func() {
						h.q.SetPaths([]rdma.Path{{Port: h.paths[0].Port + uint16(b[1]), Sent: h.paths[0].Sent, Again: h.paths[0].Again}})
					})
				}
				continue
			}
			p := with(op, int(int8(b[1])))
			if op.isResponse() {
				p = ack(int(int8(b[1])), b[2])
				p.opcode = op
			}
			p.ackReq = b[2]&0x80 != 0
			p.length = uint32(b[3]) * uint32(b[2]+1)
			p.address += uint64(b[2]&3) * 8
			payload := make([]byte, 0, 512)
			if traits[op]&hasPayload != 0 {
				payload = payload[:int(b[3])+int(b[2]&1)]
			}
			h.packet(p, string(payload))
		}
		h.host.Do(func() { h.host.Close(h.q) })
		if len(h.completed) != posted {
			t.Errorf("%d of %d operations have completed", len(h.completed), posted)
		}
	})
}

// FuzzReceive delivers arbitrary bytes to a core.
func FuzzReceive(f *testing.F) {
	for _, test := range packets {
		f.Add(unhex(test.bytes), true)
	}
	f.Add([]byte{1, 2, 3}, false)
	f.Fuzz(func(t *testing.T, p []byte, right bool) {
		h := newHand(t, Config{})
		h.body = make([]byte, 16)
		if right && len(p) >= bthSize && len(p)+icrcSize <= maxDatagram { // for the queue pair, with a correct ICRC
			binary.BigEndian.PutUint32(p[4:], h.q.qpn)
			e := endpoints{handAddress, ourAddress, 60000, DefaultPort}
			p = binary.LittleEndian.AppendUint32(p, h.checker.cover(h.checker.begin(&seed{}, &e, len(p)+icrcSize, 0), p))
		}
		h.give(p)
		h.core.Receive(netip.MustParseAddrPort("[fd00::1]:4791"), p)
	})
}
