package superp_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

// newLite is a bench of SUPERp-lite. It checks all packets: they begin with the transaction header, no block has less
// than 16 bytes, and no No-op repeats an XID.
func newLite(t *testing.T, ordered bool) *bench {
	return newLiteOver(t, onePlane, 0, ordered)
}

// newLiteOver is newLite over other planes, with another window of transactions.
func newLiteOver(t *testing.T, planes []rdmatest.Plane, transactions int, ordered bool) *bench {
	cfg := superp.Config{HeadSize: rdma.MaxHead, SUNH: superp.SUNHConfig{Subnet: netip.MustParsePrefix("10.255.0.0/16"), Device: "any", Lite: true},
		Parameters: superp.Parameters{TransactionTimeout: 3 * time.Second, Transactions: transactions}}
	b := newBench(t, cfg, planes, ordered)
	headers := map[byte]int{0: 0, 1: 0, 2: 8, 8: 12, 9: 8, 10: 8, 11: 8, 12: 4}
	noOps := map[netip.Addr]uint16{}
	b.onDatagram = func(d rdmatest.Datagram) {
		p := d.Payload
		n, opcode := int(p[0]&15), p[1]
		header, known := headers[opcode]
		rest := len(p) - 8 - n*header
		switch {
		case !known || rest < 0 || n == 0 && rest > 0:
			t.Errorf("a packet % x", p[:min(len(p), 40)])
		case opcode >= 9 && rest < 16*n:
			t.Errorf("opcode %d: %d blocks in %d bytes", opcode, n, rest)
		}
		if xid := binary.LittleEndian.Uint16(p[4:]); opcode == 0 {
			if before, ok := noOps[d.From.Addr()]; ok && int16(xid-before) <= 0 {
				t.Errorf("a No-op with XID %d after one with %d", xid, before)
			}
			noOps[d.From.Addr()] = xid
		}
	}
	return b
}

// TestLite runs WRITEs, READs and messages of many lengths in both directions at the same time.
func TestLite(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		b, rng := newLite(t, ordered), rand.New(rand.NewPCG(1, 1))
		var want [2][]byte
		for i := range 2 {
			for k := range b.mem[i] {
				b.mem[i][k] = byte(rng.Uint32())
			}
			want[i] = bytes.Clone(b.mem[i])
		}
		type read struct{ got, want []byte }
		var reads []read
		var posted [2]int
		messages := [2][]string{}
		at := 0
		for k := range 1200 {
			i, n := rng.IntN(2), []int{0, 1, 15, 16, 17, 21, 22, 23, 100, 1000, 1024, 1025, 1030, 3000}[rng.IntN(14)]
			if k%100 == 0 {
				n = 60_000
			}
			op := rdma.Op{Key: key, Local: make([]byte, n)}
			switch kind := rng.IntN(3); {
			case kind == 0 && n >= 16 && at+n < memorySize/2: // WRITEs to the lower half, each somewhere else
				op.Kind, op.Remote = rdma.OpWrite, 0x1000+uint64(at)
				for j := range op.Local {
					op.Local[j] = byte(rng.Uint32())
				}
				copy(want[1-i][at:], op.Local)
				at += n
			case kind == 1:
				op.Kind = rdma.OpSend
				op.Head = make([]byte, rdma.MaxHead)
				binary.LittleEndian.PutUint32(op.Head, uint32(n))
				binary.LittleEndian.PutUint64(op.Head[8:], uint64(k))
				copy(op.Local, fmt.Sprint(k))
				messages[1-i] = append(messages[1-i], string(op.Local))
			default: // READs of the upper half
				from := memorySize/2 + rng.IntN(memorySize/2-n)
				op.Kind, op.Remote = rdma.OpRead, 0x1000+uint64(from)
				reads = append(reads, read{op.Local, want[1-i][from:][:n]})
			}
			for ok := false; !ok; {
				b.hosts[i].Do(func() { ok = b.hosts[i].Post(b.chans[i], &op) })
				b.quiet(time.Microsecond)
			}
			posted[i]++
		}
		b.until("completions", func() bool { return len(b.completed[0]) == posted[0] && len(b.completed[1]) == posted[1] })
		b.check([2][]error{make([]error, posted[0]), make([]error, posted[1])}, [2][]error{})
		for i := range 2 {
			if !bytes.Equal(b.mem[i], want[i]) {
				t.Errorf("ordered %v: the memory of host %d differs", ordered, i)
			}
			if fmt.Sprint(b.delivered[i]) != fmt.Sprint(messages[i]) && ordered || len(b.delivered[i]) != len(messages[i]) {
				t.Errorf("ordered %v: %d messages arrive at host %d, want %d", ordered, len(b.delivered[i]), i, len(messages[i]))
			}
			if c := b.cores[i].Counters(); c["retransmitted"]+c["timeouts"]+c["protocol_errors"]+c["malformed"] > 0 {
				t.Errorf("ordered %v: %v", ordered, c)
			}
		}
		for _, r := range reads {
			if !bytes.Equal(r.got, r.want) {
				t.Errorf("ordered %v: a READ of %d bytes differs", ordered, len(r.want))
			}
		}
		// Two idle ends fall silent.
		sent := b.cores[0].Counters()["packets_sent"]
		b.quiet(time.Minute)
		if n := b.cores[0].Counters()["packets_sent"] - sent; n > 2 {
			t.Errorf("ordered %v: %d packets in a minute without operations", ordered, n)
		}
		b.completed = [2][]error{}
		b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 15)})
		b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: 99, Remote: 0x1000, Local: make([]byte, 16)})
		b.until("refusals", func() bool { return len(b.completed[0]) == 2 })
		b.hosts[1].Do(func() { b.chans[1].Shutdown(true) })
		b.until("both ends", func() bool { return len(b.failed[0]) == 1 && len(b.failed[1]) == 1 })
		b.check([2][]error{{superp.ErrShort, rdma.ErrRemoteAccess}}, [2][]error{{superp.ErrShutdown}, {superp.ErrShutdown}})
		if _, err := b.cores[0].Channel(rdma.ChannelConfig{Remote: addresses[1]}); err == nil {
			t.Error("a second connection to one peer")
		}
	}
}

// TestLiteWaitsForXIDs fills the windows of transactions with acknowledgements of single WRITEs, in both directions
// over a slow plane: an acknowledgement without a free XID waits, since a target takes one from before its window for
// an error.
func TestLiteWaitsForXIDs(t *testing.T) {
	const writes = 500
	b := newLiteOver(t, []rdmatest.Plane{{Delay: time.Millisecond}}, 16, false)
	start := b.net.Now()
	for k := range 2 * writes {
		i := k % 2
		for ok := false; !ok; {
			b.hosts[i].Do(func() {
				ok = b.hosts[i].Post(b.chans[i], &rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000 + uint64(64*k), Local: make([]byte, 16+k%7)})
			})
			b.quiet(50 * time.Microsecond)
		}
	}
	b.until("completions", func() bool { return len(b.completed[0]) == writes && len(b.completed[1]) == writes })
	b.check([2][]error{make([]error, writes), make([]error, writes)}, [2][]error{})
	if d := b.net.Now() - start; d > 500*time.Millisecond { // without a wait 73 ms
		t.Errorf("%d WRITEs took %v", 2*writes, d)
	}
}

// TestLiteLosses drops each packet of an exchange once, of requests and of replies: no operation completes without
// having been executed, and if one does not complete, its initiator's timer ends the connection, with a report.
func TestLiteLosses(t *testing.T) {
	for _, kind := range []rdma.OpKind{rdma.OpWrite, rdma.OpRead, rdma.OpSend} {
		lost, timeouts := true, 0
		for drop := 0; lost; drop++ {
			b := newLite(t, false)
			check, n := b.onDatagram, 0
			lost = false
			b.onDatagram = func(d rdmatest.Datagram) {
				check(d)
				if n++; n == drop+1 { // the plane fails for this packet
					lost = true
					b.net.SetPlane(0, false)
					b.net.After(0, func() { b.net.SetPlane(0, true) })
				}
			}
			op := rdma.Op{Kind: kind, Key: key, Remote: 0x1000, Local: bytes.Repeat([]byte{7}, 3000)}
			if kind == rdma.OpSend {
				op.Head = binary.LittleEndian.AppendUint32(nil, 3000)
				op.Head = append(op.Head, make([]byte, rdma.MaxHead-4)...)
			}
			copy(b.mem[1], bytes.Repeat([]byte{9}, 3000))
			b.post(0, op)
			b.quiet(5 * time.Second)
			if len(b.completed[0]) != 1 {
				t.Fatalf("kind %d, packet %d dropped: %d completions", kind, drop, len(b.completed[0]))
			}
			done := kind == rdma.OpWrite && bytes.Equal(b.mem[1][:3000], op.Local) || kind == rdma.OpRead && bytes.Equal(op.Local, b.mem[1][:3000]) || kind == rdma.OpSend && len(b.delivered[1]) == 1
			switch err := b.completed[0][0]; {
			case err == nil && !done:
				t.Errorf("kind %d, packet %d dropped: the operation completes without having been executed", kind, drop)
			case err != nil:
				timeouts++
				if !errors.Is(err, superp.ErrTransactionTimeout) || len(b.failed[0]) != 1 || b.cores[0].Counters()["transaction_timeouts"] != 1 {
					t.Errorf("kind %d, packet %d dropped: %v, failed %v, %v", kind, drop, err, b.failed[0], b.cores[0].Counters())
				}
			case !lost && len(b.failed[0]) > 0:
				t.Errorf("kind %d: no packet was dropped, failed %v", kind, b.failed[0])
			}
		}
		if timeouts < 3 {
			t.Errorf("kind %d: %d timeouts", kind, timeouts)
		}
	}
}

// TestLiteShortBlock checks that a packet with blocks of less than 16 bytes is answered with a Transaction error and
// reported.
func TestLiteShortBlock(t *testing.T) {
	b := newLite(t, false)
	var got []superp.ProtocolError
	b.cores[1].OnViolation(func(e superp.ProtocolError) { got = append(got, e) })
	errors := 0
	b.onDatagram = func(d rdmatest.Datagram) {
		if d.Payload[1] == byte(superp.OpcodeError) && d.From.Addr() == addresses[1] {
			errors++
		}
	}
	p := []byte{0x81, byte(superp.OpcodeWrite), 0, 0, 0, 0, 0xff, 0xff}
	p = append(binary.LittleEndian.AppendUint64(p, rdma.FlatAddress(key, 0x1000)), bytes.Repeat([]byte{1}, 15)...)
	b.net.Inject(netip.AddrPortFrom(addresses[0], 50000), netip.AddrPortFrom(addresses[1], superp.DefaultPort), 0, p)
	b.quiet(time.Second)
	if len(got) != 1 || got[0].Kind != superp.ViolationBlock || errors != 1 || b.mem[1][0] != 0 {
		t.Errorf("reported %v, %d errors answered, memory %d", got, errors, b.mem[1][0])
	}
}
