package superp_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

// forge delivers a packet to host i in the name of its peer. The packet's dcid is added.
func (b *bench) forge(i int, h superp.PDL, tal superp.TAL, body ...byte) {
	le := binary.LittleEndian
	p := le.AppendUint16(nil, b.chans[i].CID())
	p = le.AppendUint16(p, h.RWin)
	p = le.AppendUint32(p, h.PSN)
	p = le.AppendUint32(p, h.AckPSN)
	p = le.AppendUint32(p, h.SACK)
	first := tal.NumOps
	if tal.EOM {
		first |= 0x80
	}
	p = append(p, first, byte(tal.Opcode))
	p = le.AppendUint16(p, tal.Seqno)
	p = le.AppendUint16(p, tal.XID)
	p = le.AppendUint16(p, tal.AckXID)
	b.net.Inject(netip.AddrPortFrom(addresses[1-i], 50000), netip.AddrPortFrom(addresses[i], superp.DefaultPort), 0, append(p, body...))
	b.quiet(time.Millisecond)
}

// TestViolations forges each protocol error of the description, one by one: each is reported once with the fields of
// its packet, nothing else is, and the packet has no effect. Packets without an error between them are executed.
func TestViolations(t *testing.T) {
	b := newBench(t, superp.Config{}, onePlane, false)
	b.net.SetSender(addresses[1], 0, false) // the peer is forged
	var got []superp.ProtocolError
	b.cores[0].OnViolation(func(e superp.ProtocolError) { got = append(got, e) })
	const none = ^uint32(0)
	psn, ack := uint32(0), none
	total := uint64(0)
	write := binary.LittleEndian.AppendUint64(nil, rdma.FlatAddress(key, 0x1000))
	// expect delivers a packet under the next psn.
	expect := func(want superp.Violation, tal superp.TAL, body ...byte) {
		t.Helper()
		got = nil
		memory := bytes.Clone(b.mem[0][:64])
		b.forge(0, superp.PDL{RWin: 255, PSN: psn, AckPSN: ack}, tal, body...)
		psn++
		if want == 0 {
			if len(got) > 0 {
				t.Errorf("a packet without an error: %v", got)
			}
			return
		}
		total++
		if len(got) != 1 || got[0].Kind != want || got[0].PSN != psn-1 || got[0].Opcode != tal.Opcode || got[0].XID != tal.XID || got[0].Seqno != tal.Seqno ||
			got[0].CID != b.chans[0].CID() || got[0].Remote != addresses[1] || got[0].At == 0 {
			t.Errorf("%v: reported %+v", want, got)
		}
		if !bytes.Equal(memory, b.mem[0][:64]) {
			t.Errorf("%v: the packet has written memory", want)
		}
		if n := b.cores[0].Counters()["protocol_errors"]; n != total {
			t.Errorf("%v: %d protocol errors are counted, want %d", want, n, total)
		}
	}
	request := func(xid, seqno uint16, eom bool) superp.TAL {
		return superp.TAL{NumOps: 1, Opcode: superp.OpcodeWrite, XID: xid, Seqno: seqno, EOM: eom, AckXID: 0xffff}
	}
	data := func(text string) []byte { return append(bytes.Clone(write), text...) }

	psn = 1024
	expect(superp.ViolationPSN, request(0, 0, true), data("psn")...)
	psn, ack = 0, 3
	expect(superp.ViolationAckPSN, request(0, 0, true), data("ack")...)
	psn, ack = 0, none
	expect(0, request(0, 0, false), data("good")...)
	if got := string(b.mem[0][:4]); got != "good" {
		t.Errorf("a good packet writes %q", got)
	}
	expect(superp.ViolationSeqno, request(0, 0, false), data("seqn")...)
	expect(superp.ViolationSeqno, request(0, 65, false), data("many")...)
	expect(superp.ViolationOpcode, superp.TAL{NumOps: 1, Opcode: superp.OpcodeSend, Seqno: 1, AckXID: 0xffff}, make([]byte, 40)...)
	expect(superp.ViolationXID, request(128, 0, true), data("far ")...)
	expect(0, request(1, 1, true), data("last")...)
	expect(superp.ViolationEOM, request(1, 0, true), data("end2")...)
	expect(superp.ViolationSeqno, request(1, 2, false), data("over")...)
	expect(0, request(1, 0, false), data("done")...) // complete, before transaction 0
	expect(superp.ViolationXID, request(1, 0, true), data("again")...)
	expect(0, request(2, 3, false), data("high")...)
	expect(superp.ViolationSeqno, request(2, 2, true), data("low ")...)
	expect(superp.ViolationXID, superp.TAL{Opcode: superp.OpcodeLast, XID: 300, EOM: true, AckXID: 0xffff})
	tal := request(3, 0, true)
	tal.AckXID = 0x7000
	expect(superp.ViolationAckXID, tal, data(string(b.mem[0][:4]))...) // is executed: only the acknowledgement is wrong

	answer := func(o superp.Opcode, xid, seqno uint16, eom bool) superp.TAL {
		return superp.TAL{NumOps: 1, Opcode: o, XID: xid, Seqno: seqno, EOM: eom, AckXID: 0xffff}
	}
	refusal := []byte{0, 0, 0, 0, 1, 0, 0, 0}
	response := func(op byte, offset uint32, n int) []byte {
		return append(binary.LittleEndian.AppendUint32([]byte{0, 0, op, 0}, offset), bytes.Repeat([]byte{0x77}, n)...)
	}
	b.quiet(time.Second)
	local := make([]byte, 3000)
	var xid uint16
	b.onPacket = func(_ netip.Addr, p *superp.Packet) {
		if p.TAL.Opcode == superp.OpcodeRead {
			xid = p.TAL.XID
		}
	}
	b.post(0, rdma.Op{Kind: rdma.OpRead, Key: key, Remote: 0x1000, Local: local})
	b.quiet(time.Second)
	expect(superp.ViolationReplyXID, answer(superp.OpcodeError, xid+1, 0, true), refusal...)
	expect(superp.ViolationReply, answer(superp.OpcodeReadResponse, xid, 5, false), response(1, 0, 1000)...)
	expect(0, answer(superp.OpcodeReadResponse, xid, 0, false), response(0, 0, 1000)...)
	expect(superp.ViolationReplySeqno, answer(superp.OpcodeReadResponse, xid, 0, false), response(0, 1000, 2000)...)
	expect(superp.ViolationReplySeqno, answer(superp.OpcodeReadResponse, xid, 4, true), response(0, 1000, 2000)...)
	if len(b.completed[0]) > 0 {
		t.Error("the read is complete with one of its packets twice")
	}
	expect(0, answer(superp.OpcodeReadResponse, xid, 6, true), response(0, 1000, 1000)...)
	expect(superp.ViolationReplyEOM, answer(superp.OpcodeReadResponse, xid, 1, true), response(0, 2000, 1000)...)
	expect(superp.ViolationReplySeqno, answer(superp.OpcodeReadResponse, xid, 7, false), response(0, 2000, 1000)...)
	expect(0, answer(superp.OpcodeReadResponse, xid, 1, false), response(0, 2000, 1000)...)
	if len(b.completed[0]) != 1 || b.completed[0][0] != nil || !bytes.Equal(local, bytes.Repeat([]byte{0x77}, 3000)) {
		t.Errorf("the read: %v", b.completed[0])
	}
	expect(superp.ViolationReplySeqno, answer(superp.OpcodeReadResponse, xid, 1, false), response(0, 2000, 1000)...) // the read is over
	if len(b.failed[0]) > 0 {
		t.Errorf("the connection has failed: %v", b.failed[0])
	}
	if err := b.hosts[0].Err(); err != nil {
		t.Error(err)
	}
}

// TestEarlyReply checks that a reply to a request that was not completely sent is dropped and reported, and that the
// request does not complete without an error: the dropped reply may have had it.
func TestEarlyReply(t *testing.T) {
	b := newBench(t, superp.Config{}, []rdmatest.Plane{{Delay: 5 * time.Millisecond}}, false)
	var got []superp.Violation
	b.cores[0].OnViolation(func(e superp.ProtocolError) { got = append(got, e.Kind) })
	b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 60_000)}) // 59 packets; the first window has four
	b.forge(0, superp.PDL{RWin: 255, PSN: 0, AckPSN: ^uint32(0)}, superp.TAL{NumOps: 1, Opcode: superp.OpcodeError, EOM: true, AckXID: 0xffff}, 0, 0, 0, 0, 1, 0, 0, 0)
	b.quiet(5 * time.Millisecond)
	if len(got) != 1 || got[0] != superp.ViolationEarly {
		t.Fatalf("reported %v", got)
	}
	b.until("completion", func() bool { return len(b.completed[0]) == 1 || len(b.failed[0]) == 1 })
	if err := b.completed[0][0]; !errors.Is(err, rdma.ErrRemoteOperation) && !errors.Is(err, rdma.ErrRetryExceeded) {
		t.Errorf("the request completes with %v", err)
	}
}

// TestPSNReuse checks that a connection waits before it uses a psn within two seconds of its latest transmission, and
// reports that, once, and that it does neither without such a transmission.
func TestPSNReuse(t *testing.T) {
	for _, recent := range []bool{false, true} {
		b := newBench(t, superp.Config{FirstPSN: superp.PSNsOfBlock - 5}, onePlane, false)
		var got []superp.ProtocolError
		b.cores[0].OnViolation(func(e superp.ProtocolError) { got = append(got, e) })
		at := b.net.Now() - 500*time.Millisecond
		if !recent {
			at = b.net.Now() - 2*time.Second + 1 // over, when the packet is due
		}
		b.chans[0].Used(1, at)
		next := uint32(superp.PSNsOfBlock - 5)
		var first time.Duration
		b.onPacket = func(from netip.Addr, p *superp.Packet) {
			if from != addresses[0] || p.PDL.PSN < next {
				return
			}
			if p.PDL.PSN != next {
				t.Errorf("psn %d follows %d", p.PDL.PSN, next-1)
			}
			if next++; p.PDL.PSN == superp.PSNsOfBlock {
				first = b.net.Now()
			}
		}
		b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 20_000)})
		b.until("the write", func() bool { return len(b.completed[0]) == 1 })
		b.check([2][]error{{nil}}, [2][]error{})
		switch paused := first-at >= 2*time.Second; {
		case recent && (!paused || first-at > 2*time.Second+10*time.Millisecond || len(got) != 1 || got[0].Kind != superp.ViolationPSNReuse || got[0].PSN != superp.PSNsOfBlock):
			t.Errorf("psn %d is sent %v after its latest transmission; reported %v", superp.PSNsOfBlock, first-at, got)
		case !recent && len(got) > 0:
			t.Errorf("reported %v", got)
		}
	}
}

// TestTransactionTimeout checks that a transaction that is not complete in time ends the connection, with a report, and
// that the time in which the process did not run does not count.
func TestTransactionTimeout(t *testing.T) {
	const limit = 3 * time.Second
	b := newBench(t, superp.Config{Parameters: superp.Parameters{TransactionTimeout: limit}}, onePlane, false)
	var got []superp.ProtocolError
	b.cores[0].OnViolation(func(e superp.ProtocolError) { got = append(got, e) })
	for range 3 { // each in time, all together not
		b.verdict[1] = rdma.NotReady
		b.send(0, "in time")
		b.quiet(limit - 100*time.Millisecond)
		b.hosts[1].Do(func() {
			b.verdict[1] = rdma.Accepted
			b.chans[1].Ready()
		})
		b.quiet(50 * time.Millisecond)
	}
	b.check([2][]error{{nil, nil, nil}}, [2][]error{})
	b.quiet(time.Minute) // nothing is incomplete
	b.send(0, "stalled")
	b.net.Stall(time.Minute)
	b.quiet(time.Second)
	b.check([2][]error{{nil, nil, nil, nil}}, [2][]error{})
	if len(got) > 0 {
		t.Fatalf("reported %v", got)
	}
	b.verdict[1] = rdma.NotReady
	begin := b.net.Now()
	b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 8)}) // complete at once
	b.send(0, "late")
	b.until("the end", func() bool { return len(b.failed[0]) == 1 })
	if d := b.net.Now() - begin; d < limit || d > limit+10*time.Millisecond {
		t.Errorf("the end comes after %v", d)
	}
	b.check([2][]error{{nil, nil, nil, nil, nil, superp.ErrTransactionTimeout}}, [2][]error{{superp.ErrTransactionTimeout}, b.failed[1]})
	if len(got) != 1 || got[0].Kind != superp.ViolationTimeout || got[0].Opcode != superp.OpcodeSendQP {
		t.Errorf("reported %+v", got)
	}
}

// TestClasses checks that each connection's packets have its traffic class.
func TestClasses(t *testing.T) {
	classes := map[uint16]uint8{} // by the dcid of packets
	seen := map[uint8]int{}
	b := newBench(t, superp.Config{TrafficClass: 0x20}, onePlane, false)
	b.onDatagram = func(d rdmatest.Datagram) {
		want, known := classes[binary.LittleEndian.Uint16(d.Payload)]
		if !known {
			want = 0x20
		}
		if d.Class != want {
			t.Errorf("a packet to cid %d has class %#x, want %#x", binary.LittleEndian.Uint16(d.Payload), d.Class, want)
		}
		seen[d.Class]++
	}
	b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 3000)})
	for k, class := range []uint8{0xb8, 0x08, 0} {
		cid := uint16(200 + k)
		classes[cid] = class
		for i := range 2 {
			c, err := b.cores[i].ConnectionOfClass(cid, addresses[1-i], class, false, false)
			if err != nil {
				t.Fatal(err)
			}
			b.chans[i] = c
		}
		for i := range 2 {
			b.hosts[i].Do(func() {
				if err := b.chans[i].Connect(b.chans[1-i].Local(), b.paths[i]); err != nil {
					t.Fatal(err)
				}
			})
		}
		b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 3000)})
	}
	b.until("completion", func() bool { return len(b.completed[0]) == 4 })
	if len(seen) != 4 || b.chans[0].TrafficClass() != 0 {
		t.Errorf("packets by class: %v", seen)
	}
	if _, err := b.cores[0].ConnectionOfClass(300, addresses[1], 0x41, false, false); err == nil {
		t.Error("a class with ECN bits is accepted")
	}
	b.check([2][]error{{nil, nil, nil, nil}}, [2][]error{})
}
