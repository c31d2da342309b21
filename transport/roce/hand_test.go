package roce

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// hand is a core with one connected queue pair, whose peer is the test, packet by packet. It checks and records the
// packets of the core.
type hand struct {
	t    *testing.T
	core *Core
	host *rdmatest.Host
	q    *queuePair
	now  time.Duration
	wake time.Duration

	sent      []packet
	completed []completion
	delivered []string // head and body
	rooms     int
	stalls    []bool // arguments of Host.Stalled
	failed    error
	verdict   rdma.Verdict
	body      []byte // result of Admit; nil: as many bytes as requested
	memory    []byte // at address 0x1000 with key 7
	checker   checker
	paths     []rdma.Path
	calls     []func() // run by Complete, one per call
}

// packet is a packet that the core has sent.
type packet struct {
	port uint16
	header
	payload string
}

type completion struct {
	op  rdma.Op
	err error
}

const (
	handPeer  = 0x0badca // the peer's number
	handFirst = 0xfffffd // its first PSN: sequence numbers wrap soon
	ourFirst  = 0xfffffe
	testHead  = "head of twenty bytes"
	// openWindow is the number of packets that have been acknowledged before.
	openWindow = 508
)

var (
	ourAddress  = netip.MustParseAddr("10.255.0.1")
	handAddress = netip.MustParseAddr("10.255.0.2")
)

func newHand(t *testing.T, cfg Config) *hand {
	t.Helper()
	h := &hand{t: t, now: time.Second, memory: make([]byte, 8192)}
	cfg.MTU = 256
	if cfg.Timing.Stall == 0 {
		cfg.Timing.Stall = time.Hour // test other timers separately
	}
	random := []uint32{1, 0x42, ourFirst} // 1 is reserved
	cfg.Random = func() uint32 {
		v := random[0]
		random = append(random[1:], v)
		return v
	}
	h.core = NewCore(cfg, h)
	var err error
	h.host, err = rdmatest.NewHost(ourAddress, h.core, func() time.Duration { return h.now }, nil, rdmatest.Hooks{
		Admit: func(_ rdma.Channel, _ []byte, n int) ([]byte, rdma.Verdict) {
			if h.body == nil && n >= 0 {
				return make([]byte, n), h.verdict
			}
			return h.body, h.verdict
		},
		Deliver: func(_ rdma.Channel, head, body []byte) { h.delivered = append(h.delivered, string(head)+string(body)) },
		Complete: func(op *rdma.Op, err error) {
			h.completed = append(h.completed, completion{*op, err})
			for _, f := range h.calls {
				f()
			}
		},
		Room:    func(rdma.Channel) { h.rooms++ },
		Stalled: func(_ rdma.Channel, _ int, stalled bool) { h.stalls = append(h.stalls, stalled) },
		Failed:  func(_ rdma.Channel, err error) { h.failed = err },
	})
	if err != nil {
		t.Fatal(err)
	}
	h.host.Register(7, 0x1000, h.memory, rdma.RemoteWrite|rdma.RemoteRead|rdma.RemoteAtomic)
	h.host.Register(8, 0x1000, h.memory, 0)
	ch, err := h.core.Channel(rdma.ChannelConfig{Remote: handAddress})
	if err != nil {
		t.Fatal(err)
	}
	h.q = ch.(*queuePair)
	remote := slices.Clone(h.q.Local())
	binary.BigEndian.PutUint32(remote[8:], handPeer)
	binary.BigEndian.PutUint32(remote[12:], handFirst)
	h.paths = []rdma.Path{{Port: 50000, Share: 1, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}}
	if err := ch.Connect(remote, h.paths); err != nil {
		t.Fatal(err)
	}
	// The window has grown already.
	h.q.requester.flight.Set(openWindow)
	h.q.requester.flight.Acked(openWindow)
	t.Cleanup(func() {
		if err := h.host.Err(); err != nil {
			t.Error(err)
		}
	})
	return h
}

// Send implements wire.Out.
func (h *hand) Send(to netip.AddrPort, port uint16, head, payload, tail []byte) {
	h.t.Helper()
	p := slices.Concat(head, payload, tail)
	if want := netip.AddrPortFrom(handAddress, DefaultPort); to != want {
		h.t.Errorf("sent to %v, want %v", to, want)
	}
	end := len(p) - icrcSize
	whole := ipPacket(netip.AddrPortFrom(ourAddress, port), to, h.Next(to, port, len(p)), p)
	if icrc := dumbICRC(whole[:len(whole)-icrcSize]); !bytes.Equal(icrc[:], p[end:]) {
		h.t.Errorf("ICRC %x, want %x", p[end:], icrc)
	}
	s := packet{port: port}
	b, err := s.header.unmarshal(p[:end])
	if err != nil {
		h.t.Errorf("sent %x: %v", p, err)
	}
	if s.pkey != defaultPKey || !s.migrated || s.solicited || s.becn != 0 || s.qpn != handPeer {
		h.t.Errorf("sent %+v", s.header)
	}
	s.payload = string(b)
	s.pkey, s.migrated, s.qpn, s.pad = 0, false, 0, 0
	h.sent = append(h.sent, s)
}

// Next implements wire.Out.
func (h *hand) Next(_ netip.AddrPort, _ uint16, length int) uint16 {
	return uint16(length / 4 % maxBatch)
}

// WakeAt implements wire.Out.
func (h *hand) WakeAt(at time.Duration) { h.wake = at }

// datagram returns a packet to the core's queue pair, from the peer's port 60000.
func (h *hand) datagram(p header, payload string) []byte {
	if p.pkey == 0 {
		p.pkey = defaultPKey
	}
	if p.qpn == 0 {
		p.qpn = h.q.qpn
	}
	p.pad = uint8(-len(payload) & 3)
	var b [maxHeader]byte
	d := append(b[:p.marshal(b[:])], payload...)
	d = append(d, make([]byte, p.pad)...)
	e := endpoints{handAddress, ourAddress, 60000, DefaultPort}
	return binary.LittleEndian.AppendUint32(d, h.checker.cover(h.checker.begin(&seed{}, &e, len(d)+icrcSize, 0), d))
}

// give delivers packets to the core in one turn, and returns the packets that the core sends in response.
func (h *hand) give(datagrams ...[]byte) []packet {
	h.sent = nil
	h.host.Do(func() {
		for _, d := range datagrams {
			h.core.Receive(netip.AddrPortFrom(handAddress, 60000), slices.Clone(d))
		}
	})
	return h.sent
}

// packet is give for one packet.
func (h *hand) packet(p header, payload string) []packet { return h.give(h.datagram(p, payload)) }

// post posts operations and returns the packets sent.
func (h *hand) post(ops ...*rdma.Op) []packet {
	h.t.Helper()
	h.sent = nil
	h.host.Do(func() {
		for _, op := range ops {
			if !h.host.Post(h.q, op) {
				h.t.Error("no room")
			}
		}
	})
	return h.sent
}

// sleep advances to the time of the core's timer, and returns the packets sent then.
func (h *hand) sleep() []packet {
	h.t.Helper()
	h.sent = nil
	if h.wake == 0 {
		h.t.Fatal("nothing to wake up for")
	}
	h.now = max(h.now, h.wake)
	h.host.Do(h.core.Tick)
	return h.sent
}

// want compares packets by their String.
func (h *hand) want(got []packet, want ...string) {
	h.t.Helper()
	var s []string
	for _, p := range got {
		s = append(s, p.String())
	}
	if !slices.Equal(s, want) {
		h.t.Errorf("sent\n  %q, want\n  %q", s, want)
	}
}

// count checks a counter.
func (h *hand) count(name string, want uint64) {
	h.t.Helper()
	got, ok := h.core.Counters()[name]
	if !ok || got != want {
		h.t.Errorf("%s is %d, want %d", name, got, want)
	}
}

// complete checks the operations that have completed since its last call, in order.
func (h *hand) complete(want ...error) {
	h.t.Helper()
	var got []error
	for _, c := range h.completed {
		got = append(got, c.err)
	}
	if !slices.EqualFunc(got, want, func(a, b error) bool { return a == b || b != nil && errors.Is(a, b) }) {
		h.t.Errorf("completed with %v, want %v", got, want)
	}
	h.completed = nil
}

var names = [opcodes]string{"send-first", "send-middle", "send-last", "send-last-imm", "send", "send-imm", "write-first", "write-middle",
	"write-last", "write-last-imm", "write", "write-imm", "read", "read-first", "read-middle", "read-last", "read-only", "ack", "atomic-ack",
	"compare-swap", "fetch-add"}

// String returns the packet with PSNs relative to handFirst or ourFirst.
func (p packet) String() string {
	relative := func(first seq) seq { return first.near(p.psn) - first }
	if p.opcode.isResponse() {
		s := fmt.Sprintf("%s %d", names[p.opcode], relative(handFirst))
		if traits[p.opcode]&hasAETH != 0 {
			s += fmt.Sprintf(" %02x msn=%d", p.syndrome, p.msn)
		}
		return s + p.rest()
	}
	s := fmt.Sprintf("%s %d", names[p.opcode], relative(ourFirst))
	if p.ackReq {
		s += "?"
	}
	if p.opcode == readRequest || p.opcode == writeFirst || p.opcode == writeOnly {
		s += fmt.Sprintf(" at %#x+%d", p.address, p.length)
	}
	return s + p.rest()
}

func (p packet) rest() string {
	if n := len(p.payload); n > 0 {
		return fmt.Sprintf(" %d bytes", n)
	}
	return ""
}

// sendOp, writeOp and readOp return the operations that the tests post.

func sendOp(n int) *rdma.Op {
	return &rdma.Op{Kind: rdma.OpSend, Head: []byte(testHead), Local: bytes.Repeat([]byte{'s'}, n)}
}

func writeOp(n int) *rdma.Op {
	return &rdma.Op{Kind: rdma.OpWrite, Key: 9, Remote: 0x2000, Local: bytes.Repeat([]byte{'w'}, n)}
}

func readOp(n int) *rdma.Op {
	return &rdma.Op{Kind: rdma.OpRead, Key: 9, Remote: 0x2000, Local: make([]byte, n)}
}

func addOp() *rdma.Op {
	return &rdma.Op{Kind: rdma.OpFetchAdd, Key: 9, Remote: 0x2000, Swap: 5, Local: make([]byte, 8)}
}

// ack returns a response to the requester, for the nth of its sequence numbers.
func ack(n int, syndrome uint8) header {
	return header{opcode: acknowledge, psn: uint32(ourFirst+n) & mask24, syndrome: syndrome}
}

// with returns a request to the responder with the nth of the hand's sequence numbers.
func with(o opcode, n int) header {
	return header{opcode: o, psn: uint32(handFirst+n) & mask24, address: 0x1000, key: 7}
}
