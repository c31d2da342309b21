package roce

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

const full = 256 // the MTU

func bytesOf(c string, n int) string { return strings.Repeat(c, n) }

func TestSendIsDelivered(t *testing.T) {
	h := newHand(t, Config{})
	only := with(sendOnly, 0)
	only.ackReq = true
	h.want(h.packet(only, testHead+"body"), "ack 0 1f msn=1")
	h.body = make([]byte, full+3)
	h.want(h.packet(with(sendFirst, 1), testHead+bytesOf("x", full-20)))
	last := with(sendLast, 2)
	last.ackReq = true
	h.want(h.packet(last, bytesOf("y", 23)), "ack 2 1f msn=2")
	if len(h.delivered) != 2 || h.delivered[0] != testHead+"body" || h.delivered[1] != testHead+bytesOf("x", full-20)+bytesOf("y", 23) {
		t.Errorf("delivered %q", h.delivered)
	}
}

func TestAcksAreCoalesced(t *testing.T) {
	h := newHand(t, Config{})
	var d [][]byte
	for i := range 5 {
		p := with(sendOnly, i)
		p.ackReq = true
		d = append(d, h.datagram(p, testHead))
	}
	h.want(h.give(d...), "ack 4 1f msn=5")
	// Without a request for acknowledgement, the acknowledgement waits for AckDelay.
	h.want(h.packet(with(sendOnly, 5), testHead))
	before := h.now
	h.want(h.sleep(), "ack 5 1f msn=6")
	if d := h.now - before; d != 200*time.Microsecond {
		t.Errorf("after %v", d)
	}
	if h.wake != 0 {
		t.Errorf("and wants to wake up at %v", h.wake)
	}
}

func TestGapIsToldOnce(t *testing.T) {
	h := newHand(t, Config{})
	h.want(h.packet(with(sendOnly, 2), testHead), "ack 0 60 msn=0")
	h.want(h.packet(with(sendOnly, 3), testHead))
	h.want(h.packet(with(sendOnly, 1), testHead))
	if len(h.delivered) != 0 {
		t.Errorf("delivered %q", h.delivered)
	}
	h.count("out_of_sequence", 3)
	h.want(h.packet(with(sendOnly, 0), testHead))
	h.want(h.packet(with(sendOnly, 2), testHead), "ack 1 60 msn=1") // another gap
}

func TestDuplicatesAreAcknowledgedAgain(t *testing.T) {
	h := newHand(t, Config{})
	w := with(writeOnly, 0)
	w.length, w.ackReq = 4, true
	h.want(h.packet(w, "once"), "ack 0 1f msn=1")
	copy(h.memory, "else")
	h.want(h.packet(w, "once"), "ack 0 1f msn=1")
	if !bytes.HasPrefix(h.memory, []byte("else")) {
		t.Error("executed twice")
	}
	h.count("duplicates", 1)
}

func TestAtomicsAreReplayed(t *testing.T) {
	h := newHand(t, Config{MaxReadAtomic: 2})
	binary.NativeEndian.PutUint64(h.memory, 100)
	for i := range 3 {
		a := with(fetchAdd, i)
		a.swap = 10
		got := h.packet(a, "")
		if len(got) != 1 || got[0].opcode != atomicAck || got[0].original != uint64(100+10*i) {
			t.Fatalf("%+v", got)
		}
	}
	for i := range 3 {
		a := with(fetchAdd, i)
		a.swap = 10
		got := h.packet(a, "")
		if i == 0 { // older than the requester's limit of outstanding atomics
			h.want(got)
		} else if len(got) != 1 || got[0].original != uint64(100+10*i) {
			t.Errorf("again: %+v", got)
		}
	}
	s := with(compareSwap, 3)
	s.compare, s.swap = 130, 1
	if got := h.packet(s, ""); len(got) != 1 || got[0].original != 130 {
		t.Errorf("%+v", got)
	}
	if v := binary.NativeEndian.Uint64(h.memory); v != 1 {
		t.Errorf("the word is %d", v)
	}
}

func TestReadIsAnswered(t *testing.T) {
	h := newHand(t, Config{})
	for i := range h.memory {
		h.memory[i] = byte(i / full)
	}
	r := with(readRequest, 0)
	r.length = 2*full + 10
	got := h.packet(r, "")
	h.want(got, "read-first 0 1f msn=1 256 bytes", "read-middle 1 256 bytes", "read-last 2 1f msn=1 10 bytes")
	if got[1].payload != bytesOf("\x01", full) || got[2].payload != bytesOf("\x02", 10) {
		t.Errorf("%q", got)
	}
	// The remaining responses: the requester lacks the last two.
	r.psn++
	r.address += full
	r.length -= full
	h.want(h.packet(r, ""), "read-first 1 1f msn=1 256 bytes", "read-last 2 1f msn=1 10 bytes")
	h.count("read_responses_again", 2)
	// A request for more bytes than the first is not the same READ.
	r.length += full
	h.want(h.packet(r, ""))
	h.count("malformed", 1)
	// A READ of no bytes has a response, too.
	r = with(readRequest, 3)
	h.want(h.packet(r, ""), "read-only 3 1f msn=2")
}

// TestAnswerToDuplicateKeepsAck checks that responses to a duplicate READ acknowledge the requests before it, not those
// between it and its duplicate.
func TestAnswerToDuplicateKeepsAck(t *testing.T) {
	h := newHand(t, Config{})
	r := with(readRequest, 0)
	r.length = 4
	h.want(h.packet(r, ""), "read-only 0 1f msn=1 4 bytes")
	w := with(writeOnly, 1)
	w.length, w.ackReq = 4, true
	h.want(h.give(h.datagram(w, "text"), h.datagram(r, "")), "read-only 0 1f msn=2 4 bytes", "ack 1 1f msn=2")
}

// TestReadOfRegionThatIsGone checks that a late duplicate breaks nothing.
func TestReadOfRegionThatIsGone(t *testing.T) {
	h := newHand(t, Config{})
	r := with(readRequest, 0)
	r.length = 4
	h.packet(r, "")
	h.host.Register(7, 0x1000, nil, 0)
	h.want(h.packet(r, ""), "ack 0 62 msn=1")
	if h.failed != nil {
		t.Error(h.failed)
	}
}

func TestNotReady(t *testing.T) {
	h := newHand(t, Config{Timing: rdma.Timing{NotReady: 5 * time.Millisecond}})
	h.verdict = rdma.NotReady
	h.want(h.packet(with(sendOnly, 0), testHead), "ack 0 32 msn=0") // timer code 18: 5.12 ms
	h.want(h.packet(with(sendOnly, 1), testHead))                   // behind it: dropped silently
	h.want(h.packet(with(sendOnly, 0), testHead), "ack 0 32 msn=0")
	h.verdict = rdma.Accepted
	h.want(h.packet(with(sendOnly, 0), testHead))
	h.want(h.sleep(), "ack 0 1f msn=1")
	if len(h.delivered) != 1 {
		t.Errorf("delivered %q", h.delivered)
	}
	h.count("rnr_sent", 2)
}

// TestRefusals checks that each refusal breaks the queue pair, and that later requests are refused too.
func TestRefusals(t *testing.T) {
	type part struct {
		header
		payload string
	}
	write := func(o opcode, n, length int) header {
		h := with(o, n)
		h.length = uint32(length)
		return h
	}
	other := func(h header, change func(*header)) header { change(&h); return h }
	for _, test := range []struct {
		name    string
		parts   []part // the last one is refused
		refused bool   // by the host
		body    int    // length of Admit's result
		want    string
		cause   error
	}{
		{name: "wrong key", parts: []part{{other(write(writeOnly, 0, 4), func(h *header) { h.key = 1 }), "text"}}, want: "ack 0 62 msn=0", cause: rdma.ErrRemoteAccess},
		{name: "no right", parts: []part{{other(write(writeOnly, 0, 4), func(h *header) { h.key = 8 }), "text"}}, want: "ack 0 62 msn=0", cause: rdma.ErrRemoteAccess},
		{name: "bounds of the whole", parts: []part{{write(writeFirst, 0, 9000), bytesOf("w", full)}}, want: "ack 0 62 msn=0", cause: rdma.ErrRemoteAccess},
		{name: "READ out of bounds", parts: []part{{write(readRequest, 0, 9000), ""}}, want: "ack 0 62 msn=0", cause: rdma.ErrRemoteAccess},
		{name: "READ that is too long", parts: []part{{write(readRequest, 0, maxRead+1), ""}}, want: "ack 0 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "atomic across words", parts: []part{{other(with(fetchAdd, 0), func(h *header) { h.address++ }), ""}}, want: "ack 0 62 msn=0", cause: rdma.ErrRemoteAccess},
		{name: "WRITE that is longer than huge", parts: []part{{write(writeFirst, 0, 1<<31+1), bytesOf("w", full)}}, want: "ack 0 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "WRITE longer than said", parts: []part{{write(writeOnly, 0, 3), "text"}}, want: "ack 0 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "WRITE shorter than said", parts: []part{{write(writeFirst, 0, full+5), bytesOf("w", full)}, {with(writeLast, 1), "text"}}, want: "ack 1 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "WRITE first that ends it", parts: []part{{write(writeFirst, 0, full), bytesOf("w", full)}}, want: "ack 0 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "first packet not full", parts: []part{{write(writeFirst, 0, full+5), "text"}}, want: "ack 0 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "middle without first", parts: []part{{with(sendMiddle, 0), bytesOf("s", full)}}, want: "ack 0 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "WRITE inside a SEND", body: 1000, parts: []part{{with(sendFirst, 0), bytesOf("s", full)}, {write(writeOnly, 1, 4), "text"}}, want: "ack 1 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "last without payload", body: full - 20, parts: []part{{with(sendFirst, 0), bytesOf("s", full)}, {with(sendLast, 1), ""}}, want: "ack 1 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "longer than the MTU", parts: []part{{write(writeOnly, 0, full+4), bytesOf("w", full+4)}}, want: "ack 0 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "immediate data", parts: []part{{with(sendOnlyImm, 0), testHead}}, want: "ack 0 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "shorter than a head", parts: []part{{with(sendOnly, 0), "short"}}, want: "ack 0 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "refused", refused: true, parts: []part{{with(sendOnly, 0), testHead}}, want: "ack 0 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "SEND longer than its body", body: 240, parts: []part{{with(sendFirst, 0), bytesOf("s", full)}, {with(sendLast, 1), "ssssss"}}, want: "ack 1 61 msn=0", cause: rdma.ErrRemoteInvalid},
		{name: "SEND shorter than its body", body: 240, parts: []part{{with(sendFirst, 0), bytesOf("s", full)}, {with(sendLast, 1), "s"}}, want: "ack 1 61 msn=0", cause: rdma.ErrRemoteInvalid},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHand(t, Config{})
			if test.refused {
				h.verdict = rdma.Refused
			}
			if test.body > 0 {
				h.body = make([]byte, test.body)
			}
			h.post(writeOp(4))
			before := bytes.Clone(h.memory)
			for i, p := range test.parts {
				got := h.packet(p.header, p.payload)
				if i < len(test.parts)-1 {
					h.want(got)
					before = bytes.Clone(h.memory)
				} else {
					h.want(got, test.want)
				}
			}
			if !errors.Is(h.failed, test.cause) {
				t.Errorf("failed with %v, want %v", h.failed, test.cause)
			}
			h.complete(rdma.ErrFlushed) // the local operation
			if len(h.delivered) > 0 || !bytes.Equal(h.memory, before) {
				t.Errorf("executed all the same; delivered %q", h.delivered)
			}
			last := test.parts[len(test.parts)-1].header
			h.want(h.packet(last, test.parts[len(test.parts)-1].payload), test.want) // as if the NAK was lost
			last.psn = (last.psn + 1) & mask24
			h.want(h.packet(with(sendOnly, 5), testHead), test.want)
			h.count("for_closed_queue_pair", 2)
			h.host.Do(func() { h.host.Close(h.q) })
		})
	}
}

// TestWriteToRegionThatGoes checks that the rest of a WRITE is refused, as by a NIC.
func TestWriteToRegionThatGoes(t *testing.T) {
	h := newHand(t, Config{})
	first := with(writeFirst, 0)
	first.length = full + 4
	h.want(h.packet(first, bytesOf("w", full)))
	h.host.Register(7, 0x1000, h.memory, rdma.RemoteRead)
	h.want(h.packet(with(writeLast, 1), "text"), "ack 1 62 msn=0")
	if !errors.Is(h.failed, rdma.ErrRemoteAccess) {
		t.Error(h.failed)
	}
}

func TestClosedQueuePairAnswers(t *testing.T) {
	h := newHand(t, Config{})
	w := with(writeOnly, 0)
	w.length = 4
	h.want(h.packet(w, "text"))
	h.post(writeOp(4))
	h.sent = nil
	h.host.Do(func() { h.host.Close(h.q) })
	h.want(h.sent, "ack 0 1f msn=1") // the delayed acknowledgement
	h.complete(rdma.ErrFlushed)
	h.want(h.packet(w, "text"), "ack 0 1f msn=1")
	h.want(h.packet(with(readRequest, 0), ""), "ack 0 63 msn=1")
	h.want(h.packet(with(sendOnly, 1), testHead), "ack 1 63 msn=1")
	h.want(h.packet(ack(0, 0x1f), ""))
	if h.wake != 0 {
		t.Errorf("wants to wake up at %v", h.wake)
	}
	h.host.Do(func() { h.q.Close() }) // a second call does nothing
}

// TestPacketsThatAreDropped checks that none of them is answered.
func TestPacketsThatAreDropped(t *testing.T) {
	good := func(h *hand) header { return with(sendOnly, 0) }
	for name, test := range map[string]func(h *hand) []byte{
		"malformed":          func(h *hand) []byte { return h.datagram(good(h), testHead)[:10] },
		"bad_icrc":           func(h *hand) []byte { d := h.datagram(good(h), testHead); d[20] ^= 1; return d },
		"unknown_queue_pair": func(h *hand) []byte { p := good(h); p.qpn = 0x777; return h.datagram(p, testHead) },
	} {
		h := newHand(t, Config{})
		h.want(h.give(test(h)))
		h.count(name, 1)
	}
	h := newHand(t, Config{})
	p := good(h)
	p.pkey = 0x8001
	h.want(h.packet(p, testHead))
	h.want(h.give(make([]byte, maxDatagram+4)))
	d := h.datagram(good(h), testHead)
	h.want(h.give(append(d, 0)))
	h.count("malformed", 3)
	if len(h.delivered) != 0 {
		t.Error("delivered")
	}
	// A valid packet from another address.
	other := netip.MustParseAddrPort("10.255.0.3:60000")
	d = h.datagram(good(h), testHead)
	e := endpoints{other.Addr(), ourAddress, other.Port(), DefaultPort}
	binary.LittleEndian.PutUint32(d[len(d)-icrcSize:], h.checker.cover(h.checker.begin(&seed{}, &e, len(d), 0), d[:len(d)-icrcSize]))
	h.host.Do(func() { h.core.Receive(other, d) })
	h.count("wrong_source", 1)
	p.pkey = 0x7fff // a limited member
	h.want(h.packet(p, testHead))
	if len(h.delivered) != 1 {
		t.Error("not delivered")
	}
}
