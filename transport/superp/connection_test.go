package superp_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

// bench is two hosts on a simulated network, with a connection between them.
type bench struct {
	t     testing.TB
	net   *rdmatest.Net
	ends  [2]*rdmatest.End
	hosts [2]*rdmatest.Host
	cores [2]*superp.Core
	chans [2]*superp.Connection
	paths [2][]rdma.Path
	mem   [2][]byte
	// Calls to the hosts.
	completed [2][]error
	failed    [2][]error
	delivered [2][]string
	verdict   [2]rdma.Verdict
	opcodes   [256]int // of packets sent by either end
	onPacket  func(from netip.Addr, p *superp.Packet)

	onDatagram func(rdmatest.Datagram)
}

var addresses = [2]netip.Addr{netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")}

const key, memorySize = 7, 1 << 20

func newBench(t testing.TB, cfg superp.Config, planes []rdmatest.Plane, ordered bool) *bench {
	t.Helper()
	b := &bench{t: t}
	b.net = rdmatest.NewNet(rdmatest.NetConfig{Seed: 1, Planes: planes, Trace: func(d rdmatest.Datagram) {
		if b.onDatagram != nil {
			b.onDatagram(d)
		}
		if p, err := superp.Decode(d.Payload); err == nil {
			b.opcodes[p.TAL.Opcode]++
			if b.onPacket != nil {
				b.onPacket(d.From.Addr(), &p)
			}
		}
	}})
	if cfg.Port == 0 {
		cfg.Port = superp.DefaultPort
	}
	cfg.FirstCID = 1
	for i := range 2 {
		b.ends[i] = b.net.Transport(netip.AddrPortFrom(addresses[i], cfg.Port), func(out wire.Out) rdmatest.Core {
			b.cores[i] = superp.NewCore(cfg, out)
			return b.cores[i]
		})
		var err error
		b.hosts[i], err = rdmatest.NewHost(addresses[i], b.ends[i], b.net.Now, nil, rdmatest.Hooks{
			Admit: func(_ rdma.Channel, head []byte, n int) ([]byte, rdma.Verdict) {
				return make([]byte, binary.LittleEndian.Uint32(head)), b.verdict[i]
			},
			Deliver:  func(_ rdma.Channel, head, body []byte) { b.delivered[i] = append(b.delivered[i], string(body)) },
			Complete: func(_ *rdma.Op, err error) { b.completed[i] = append(b.completed[i], err) },
			Failed:   func(_ rdma.Channel, err error) { b.failed[i] = append(b.failed[i], err) },
		})
		if err != nil {
			t.Fatal(err)
		}
		b.mem[i] = make([]byte, memorySize)
		b.hosts[i].Register(key, 0x1000, b.mem[i], rdma.RemoteRead|rdma.RemoteWrite|rdma.RemoteAtomic)
		b.hosts[i].Register(key+1, 0x1000, b.mem[i], rdma.RemoteRead)
		b.hosts[i].Register(0, 0x1000, b.mem[i], rdma.RemoteRead|rdma.RemoteWrite)
		for p := range planes {
			b.paths[i] = append(b.paths[i], rdma.Path{Slot: p, Port: uint16(49152/len(planes)*len(planes) + len(planes) + p), Share: 1,
				Sent: new(atomic.Uint64), Again: new(atomic.Uint64)})
		}
	}
	for i := range 2 {
		ch, err := b.cores[i].Channel(rdma.ChannelConfig{Remote: addresses[1-i], Ordered: ordered})
		if err != nil {
			t.Fatal(err)
		}
		b.chans[i] = ch.(*superp.Connection)
	}
	for i := range 2 {
		b.hosts[i].Do(func() {
			if err := b.chans[i].Connect(b.chans[1-i].Local(), b.paths[i]); err != nil {
				t.Fatal(err)
			}
		})
	}
	return b
}

// post posts on host i's connection.
func (b *bench) post(i int, op rdma.Op) {
	b.t.Helper()
	b.hosts[i].Do(func() {
		if !b.hosts[i].Post(b.chans[i], &op) {
			b.t.Fatal("the send window is full")
		}
	})
}

func (b *bench) send(i int, body string) {
	b.t.Helper()
	head := make([]byte, 20)
	binary.LittleEndian.PutUint32(head, uint32(len(body)))
	binary.LittleEndian.PutUint64(head[8:], rand.Uint64()) // heads must differ
	b.post(i, rdma.Op{Kind: rdma.OpSend, Head: head, Local: []byte(body)})
}

// until runs the network until done.
func (b *bench) until(what string, done func() bool) {
	b.t.Helper()
	if !b.net.Run(done, b.net.Now()+2*time.Minute) && !done() {
		b.t.Fatalf("%s: has not come about; %v; %v", what, b.cores[0].Counters(), b.cores[1].Counters())
	}
}

// quiet runs the network for d.
func (b *bench) quiet(d time.Duration) { b.net.Run(func() bool { return false }, b.net.Now()+d) }

// check fails if a transport has broken the contract, or if completions or failures differ from the expected ones.
func (b *bench) check(completed, failed [2][]error) {
	b.t.Helper()
	for i := range 2 {
		if err := b.hosts[i].Err(); err != nil {
			b.t.Error(err)
		}
		for _, x := range []struct {
			what      string
			got, want []error
		}{{"completions", b.completed[i], completed[i]}, {"failures", b.failed[i], failed[i]}} {
			ok := len(x.got) == len(x.want)
			for k := range x.got {
				ok = ok && errors.Is(x.got[k], x.want[k])
			}
			if !ok {
				b.t.Errorf("host %d: %s %v, want %v", i, x.what, x.got, x.want)
			}
		}
	}
}

var onePlane = []rdmatest.Plane{{Delay: 10 * time.Microsecond}}

// TestErrors checks that a refused operation completes with its error, and the others of its packet with nil, and that
// the connection continues.
func TestErrors(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		b := newBench(t, superp.Config{}, onePlane, ordered)
		b.hosts[0].Do(func() {
			for _, op := range []rdma.Op{
				{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: []byte("aaaa")},
				{Kind: rdma.OpWrite, Key: key, Remote: 0xfff, Local: []byte("bbbb")},
				{Kind: rdma.OpWrite, Key: 99, Remote: 0x1000, Local: []byte("cccc")},
				{Kind: rdma.OpWrite, Key: key, Remote: 0x1004, Local: []byte("dddd")},
				{Kind: rdma.OpWrite, Key: key + 1, Remote: 0x1000, Local: make([]byte, 5000)},
				{Kind: rdma.OpRead, Key: key, Remote: 0x1000, Local: make([]byte, 8)},
				{Kind: rdma.OpRead, Key: key, Remote: 0x1000 + memorySize - 4, Local: make([]byte, 8)},
				{Kind: rdma.OpCompareSwap, Key: key, Remote: 0x1001, Local: make([]byte, 8)},
				{Kind: rdma.OpFetchAdd, Key: key, Remote: 0x1010, Local: make([]byte, 8), Swap: 5},
				{Kind: rdma.OpFetchAdd, Key: key + 1, Remote: 0x1010, Local: make([]byte, 8), Swap: 5},
				{Kind: rdma.OpWrite, Remote: 0x1008, Local: []byte("eeee")}, // no key: the memory of another implementation
			} {
				if !b.hosts[0].Post(b.chans[0], &op) {
					t.Fatal("full")
				}
			}
		})
		b.until("completions", func() bool { return len(b.completed[0]) == 11 })
		if ordered {
			a := rdma.ErrRemoteAccess
			b.check([2][]error{{nil, a, a, nil, a, nil, a, a, nil, a, nil}}, [2][]error{})
		} else {
			n := 0
			for _, err := range b.completed[0] {
				if errors.Is(err, rdma.ErrRemoteAccess) {
					n++
				} else if err != nil {
					t.Error(err)
				}
			}
			if n != 6 {
				t.Errorf("%d errors of 6: %v", n, b.completed[0])
			}
		}
		if n := b.cores[1].Counters()["refused_operations"]; n != 10 { // the WRITE of 5000 bytes has five
			t.Errorf("%d refused operations are counted, want 10", n)
		}
		for o, n := range b.opcodes {
			if o >= 0x40 && o > int(superp.OpcodeAtomicResponse) && n > 0 {
				t.Errorf("%d packets have the private opcode %#x", n, o)
			}
		}
		if got := string(b.mem[1][:12]); got != "aaaaddddeeee" || binary.NativeEndian.Uint64(b.mem[1][16:]) != 5 {
			t.Errorf("memory: %q", b.mem[1][:24])
		}
		b.verdict[1] = rdma.Refused
		b.send(0, "refused")
		b.until("refusal", func() bool { return len(b.completed[0]) == 12 })
		b.verdict[1] = rdma.Accepted
		b.send(0, "taken")
		b.until("delivery", func() bool { return len(b.completed[0]) == 13 })
		if !errors.Is(b.completed[0][11], rdma.ErrRemoteInvalid) || b.completed[0][12] != nil || fmt.Sprint(b.delivered[1]) != "[taken]" {
			t.Errorf("%v, delivered %q", b.completed[0][11:], b.delivered[1])
		}
	}
}

// TestSendToQueuePair checks messages that fit into a packet, which go to the connection's queue pair. A target handles
// the messages of a packet separately: it refuses one for another queue pair, and if one waits for its receive, those
// behind it wait too.
func TestSendToQueuePair(t *testing.T) {
	b := newBench(t, superp.Config{}, onePlane, false)
	b.send(0, "short")
	b.send(0, string(make([]byte, 5000)))
	b.until("completions", func() bool { return len(b.completed[0]) == 2 })
	if b.opcodes[superp.OpcodeSendQP] != 1 || b.opcodes[superp.OpcodeSend] != 5 {
		t.Errorf("%d packets of Send to queue pair and %d of Send, want 1 and 5", b.opcodes[superp.OpcodeSendQP], b.opcodes[superp.OpcodeSend])
	}
	for _, ordered := range []bool{false, true} {
		for name, c := range map[string]struct {
			qps    []uint32
			late   bool // receives are posted late
			bodies string
		}{
			"its own": {[]uint32{1}, false, "[0000]"}, "another": {[]uint32{2}, false, "[]"}, "three": {[]uint32{1, 1, 1}, false, "[0000 1111 2222]"},
			"one of another": {[]uint32{1, 2, 1}, false, "[0000 2222]"}, "three that wait": {[]uint32{1, 1, 1}, true, "[0000 1111 2222]"},
			"two that wait": {[]uint32{1, 2, 1}, true, "[0000 2222]"},
		} {
			b := newBench(t, superp.Config{}, onePlane, ordered)
			if c.late {
				b.verdict[1] = rdma.NotReady
			}
			h := superp.PDL{DCID: b.chans[1].CID(), RWin: 31, AckPSN: ^uint32(0)}
			packet := packetOf(h, superp.TAL{EOM: true, Opcode: superp.OpcodeSendQP, AckXID: 0xffff}, c.qps)
			b.net.Inject(netip.AddrPortFrom(addresses[0], 50000), netip.AddrPortFrom(addresses[1], superp.DefaultPort), 0, packet)
			b.quiet(time.Second)
			if c.late {
				if len(b.delivered[1]) > 0 {
					t.Errorf("%s: delivered %q without receives", name, b.delivered[1])
				}
				b.hosts[1].Do(func() {
					b.verdict[1] = rdma.Accepted
					b.chans[1].Ready()
				})
				b.quiet(time.Second)
			}
			refused := strings.Contains(fmt.Sprint(c.qps), "2")
			if got := fmt.Sprint(b.delivered[1]); got != c.bodies || refused != (b.opcodes[superp.OpcodeError] > 0) || len(b.failed[1]) > 0 {
				t.Errorf("%s, ordered %v: delivered %s, want %s; %d errors answered, failed %v", name, ordered, got, c.bodies, b.opcodes[superp.OpcodeError], b.failed[1])
			}
			if err := b.hosts[1].Err(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// packetOf returns a packet of Sends to queue pairs: messages of four digits, which count up.
func packetOf(h superp.PDL, tal superp.TAL, qps []uint32) []byte {
	le := binary.LittleEndian
	b := le.AppendUint16(nil, h.DCID)
	b = le.AppendUint16(b, h.RWin)
	b = le.AppendUint32(b, h.PSN)
	b = le.AppendUint32(b, h.AckPSN)
	b = le.AppendUint32(b, h.SACK)
	b = append(b, uint8(len(qps))|0x80, byte(tal.Opcode))
	b = le.AppendUint16(b, tal.Seqno)
	b = le.AppendUint16(b, tal.XID)
	b = le.AppendUint16(b, tal.AckXID)
	for _, qp := range qps {
		b = le.AppendUint32(b, qp)
	}
	for i := range qps {
		b = le.AppendUint32(b, 4) // the head: the length, and a value that makes heads differ
		b = append(b, make([]byte, 15)...)
		b = append(b, byte(i))
		b = append(b, strings.Repeat(fmt.Sprint(i), 4)...)
	}
	return b
}

// TestMessageOfAnotherLength checks that such a message ends the connection at the receiver: its receive cannot
// complete.
func TestMessageOfAnotherLength(t *testing.T) {
	b := newBench(t, superp.Config{}, onePlane, false)
	head := make([]byte, 20)
	binary.LittleEndian.PutUint32(head, 4)
	b.post(0, rdma.Op{Kind: rdma.OpSend, Head: head, Local: []byte("longer")})
	b.until("the receiver's end", func() bool { return len(b.failed[1]) == 1 })
	b.quiet(time.Minute)
	b.check([2][]error{{rdma.ErrRetryExceeded}}, [2][]error{{rdma.ErrRetryExceeded}, {rdma.ErrRemoteInvalid}})
}

// TestReadyIsBackpressure checks that messages without a receive fill tal_trans_window, so that the peer stops sending,
// and that none is lost or duplicated.
func TestReadyIsBackpressure(t *testing.T) {
	b := newBench(t, superp.Config{Parameters: superp.Parameters{Transactions: 4}}, onePlane, true)
	b.verdict[1] = rdma.NotReady
	for i := range 8 { // four in flight, four in the queue
		b.send(0, fmt.Sprint(i))
	}
	b.quiet(40 * time.Second) // longer than GiveUp: the peer is alive and answers probes
	if len(b.completed[0]) > 0 || len(b.failed[0]) > 0 {
		t.Fatalf("%v, %v", b.completed[0], b.failed[0])
	}
	sent := b.cores[0].Counters()["packets_sent"]
	if sent > 40 {
		t.Errorf("%d packets for 4 messages and signs of life", sent)
	}
	b.hosts[1].Do(func() {
		b.verdict[1] = rdma.Accepted
		b.chans[1].Ready()
	})
	b.until("completions", func() bool { return len(b.completed[0]) == 8 })
	b.check([2][]error{make([]error, 8)}, [2][]error{})
	if got := fmt.Sprint(b.delivered[1]); got != "[0 1 2 3 4 5 6 7]" {
		t.Errorf("delivered %s", got)
	}
}

// TestReceiveWindowFollowsBuffers checks that the offered window shrinks by the packets that wait behind a message
// without a receive, to one packet, that the sender respects it, and that it grows again when they have been executed.
func TestReceiveWindowFollowsBuffers(t *testing.T) {
	for name, p := range map[string]superp.Parameters{"connection": {ReceiveWindow: 64, Window: 64}, "endpoint": {ReceiveWindow: 256, Buffers: 64}} {
		b := newBench(t, superp.Config{Parameters: p}, onePlane, true)
		b.verdict[1] = rdma.NotReady
		least, latest := 1<<16, 0
		var acked, sent uint32
		offered := p.ReceiveWindow
		b.onPacket = func(from netip.Addr, x *superp.Packet) {
			switch {
			case from == addresses[1]:
				offered, acked = int(x.PDL.RWin)+1, x.PDL.AckPSN+1
				least, latest = min(least, offered), offered
			case x.PDL.PSN >= sent:
				sent = x.PDL.PSN + 1
			}
		}
		for i := range 60 {
			b.send(0, strings.Repeat(fmt.Sprint(i%10), 5000))
			b.quiet(100 * time.Microsecond)
			if offered == 1 && sent-acked > 2 { // the second acknowledges
				t.Fatalf("%s: %d packets in flight with a window of one", name, sent-acked)
			}
		}
		b.quiet(time.Second)
		if least != 1 || len(b.delivered[1]) != 0 {
			t.Errorf("%s: the least window is %d, %d messages are delivered", name, least, len(b.delivered[1]))
		}
		b.hosts[1].Do(func() {
			b.verdict[1] = rdma.Accepted
			b.chans[1].Ready()
		})
		b.until("delivery", func() bool { return len(b.completed[0]) == 60 })
		b.quiet(time.Second)
		if latest != p.ReceiveWindow && (name == "connection" || latest != 64) {
			t.Errorf("%s: the window is %d after the messages have been delivered", name, latest)
		}
		b.check([2][]error{make([]error, 60)}, [2][]error{})
	}
}

// TestPeerDies checks that operations whose packets were all acknowledged also fail if the peer is silent for GiveUp.
func TestPeerDies(t *testing.T) {
	b := newBench(t, superp.Config{Timing: rdma.Timing{GiveUp: 4 * time.Second}}, onePlane, false)
	b.verdict[1] = rdma.NotReady
	b.send(0, "held")
	b.quiet(time.Second)
	b.net.SetPlane(0, false)
	b.until("the end", func() bool { return len(b.failed[0]) == 1 })
	b.check([2][]error{{rdma.ErrRetryExceeded}}, [2][]error{{rdma.ErrRetryExceeded}})
}

// TestTimeOfAStoppedProcess checks that such time does not count: the acknowledgement may wait in the socket while the
// timer fires.
func TestTimeOfAStoppedProcess(t *testing.T) {
	b := newBench(t, superp.Config{}, []rdmatest.Plane{{Delay: 2 * time.Second}}, false) // no answer before the timer
	b.send(0, "slow")
	for range 3 {
		b.quiet(time.Millisecond)
		b.net.Stall(time.Minute)
	}
	b.until("completion", func() bool { return len(b.completed[0]) == 1 })
	b.check([2][]error{{nil}}, [2][]error{})
}

// duplicate delivers a duplicate packet to host i, which answers each with an acknowledgement that the peer does not
// acknowledge.
func (b *bench) duplicate(i int) {
	packet := packetOf(superp.PDL{DCID: b.chans[i].CID(), RWin: 1023, PSN: ^uint32(0), AckPSN: ^uint32(0)}, superp.TAL{AckXID: 0xffff}, nil)
	b.net.Inject(netip.AddrPortFrom(addresses[1-i], 50000), netip.AddrPortFrom(addresses[i], superp.DefaultPort), 0, packet)
	b.quiet(time.Millisecond)
}

// TestWindowOfAcknowledgements checks a window full of acknowledgements, which the peer has no reason to acknowledge:
// waiting packets are still sent, and a dead peer is detected.
func TestWindowOfAcknowledgements(t *testing.T) {
	for _, window := range []int{1, 2, 3, 4, 16} {
		for _, ordered := range []bool{false, true} {
			b := newBench(t, superp.Config{Parameters: superp.Parameters{Window: 16, ReceiveWindow: window}}, onePlane, ordered)
			for i := range 10 { // the last acknowledgement of each write is never acknowledged
				b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 3000)})
				b.until(fmt.Sprintf("window %d, write %d", window, i), func() bool { return len(b.completed[0]) == i+1 })
				b.quiet(time.Second)
			}
			b.hosts[0].Do(func() { b.chans[0].Shutdown(true) })
			b.until("both ends", func() bool { return len(b.failed[0]) == 1 && len(b.failed[1]) == 1 })
			b.check([2][]error{make([]error, 10)}, [2][]error{{superp.ErrShutdown}, {superp.ErrShutdown}})
		}
		for n := range 20 {
			b := newBench(t, superp.Config{Parameters: superp.Parameters{Window: 16, ReceiveWindow: window}}, onePlane, false)
			for range n {
				b.duplicate(0)
			}
			b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 8)})
			b.until(fmt.Sprintf("window %d, a write after %d acknowledgements", window, n), func() bool { return len(b.completed[0]) == 1 })
		}
		b := newBench(t, superp.Config{Parameters: superp.Parameters{Window: 16, ReceiveWindow: window}}, onePlane, false)
		b.verdict[1] = rdma.NotReady
		b.send(0, "held")
		b.quiet(time.Second)
		for range 20 {
			b.duplicate(0)
		}
		b.quiet(time.Second)
		b.net.SetPlane(0, false)
		b.until("the end", func() bool { return len(b.failed[0]) == 1 })
		b.check([2][]error{{rdma.ErrRetryExceeded}}, [2][]error{{rdma.ErrRetryExceeded}, b.failed[1]})
	}
}

// TestMaxRetransmits checks that pdl_max_rtx, if set, ends a connection before GiveUp.
func TestMaxRetransmits(t *testing.T) {
	b := newBench(t, superp.Config{Parameters: superp.Parameters{MaxRetransmits: 4}}, onePlane, false)
	b.net.SetPlane(0, false)
	b.send(0, "lost")
	begin := b.net.Now()
	b.until("the end", func() bool { return len(b.failed[0]) == 1 })
	if d := b.net.Now() - begin; d < 200*time.Millisecond || d > 5*time.Second {
		t.Errorf("it took %v", d)
	}
	b.check([2][]error{{rdma.ErrRetryExceeded}}, [2][]error{{rdma.ErrRetryExceeded}})
}

// TestPathDies checks that packets in flight on a removed path are retransmitted at once on other paths, without a
// timeout.
func TestPathDies(t *testing.T) {
	planes := []rdmatest.Plane{{Delay: 10 * time.Microsecond}, {Delay: 10 * time.Microsecond}}
	b := newBench(t, superp.Config{}, planes, false)
	for i := range 2 {
		b.hosts[i].Do(func() { b.chans[i].SetPaths([]rdma.Path{b.paths[i][0]}) })
	}
	b.net.SetPlane(0, false)
	const bytes = 4000 // as many packets as the first window
	b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, bytes)})
	b.quiet(100 * time.Microsecond)
	begin := b.net.Now()
	for i := range 2 {
		b.hosts[i].Do(func() { b.chans[i].SetPaths([]rdma.Path{b.paths[i][1]}) })
	}
	b.until("the write", func() bool { return len(b.completed[0]) == 1 })
	if d := b.net.Now() - begin; d > time.Millisecond {
		t.Errorf("it took %v", d)
	}
	b.check([2][]error{{nil}}, [2][]error{})
	if sent, again := b.paths[0][0].Sent.Load(), b.paths[0][1].Again.Load(); sent != bytes || again != bytes {
		t.Errorf("%d bytes sent by the one, %d again by the other", sent, again)
	}
}

// TestConnectRefuses checks the refusal of invalid connection data.
func TestConnectRefuses(t *testing.T) {
	b := newBench(t, superp.Config{}, onePlane, false)
	good := b.chans[1].Local()
	for name, bad := range map[string][]byte{
		"nothing":         nil,
		"another version": append([]byte{9}, good[1:]...),
		"ordered":         append([]byte{good[0], 1}, good[2:]...),
		"other heads":     append(append([]byte(nil), good[:4]...), append([]byte{21}, good[5:]...)...),
		"no packets":      slices.Concat(good[:10], []byte{0, 0, 1, 0}, good[14:]),
	} {
		ch, err := b.cores[0].Channel(rdma.ChannelConfig{Remote: addresses[1]})
		if err != nil {
			t.Fatal(err)
		}
		if err := ch.Connect(bad, b.paths[0]); err == nil {
			t.Errorf("%s: connected", name)
		}
		ch.Close()
	}
	if err := b.chans[0].Connect(good, b.paths[0]); err == nil {
		t.Error("connected twice")
	}
}

// TestOrderOfEachDirection checks a connection of which only one direction is ordered, on a network that reorders.
func TestOrderOfEachDirection(t *testing.T) {
	for ordered := range 2 {
		b := newBench(t, superp.Config{}, []rdmatest.Plane{{Delay: 10 * time.Microsecond, Reorder: 0.3}}, false)
		for i := range 2 {
			var err error
			if b.chans[i], err = b.cores[i].Connection(100, addresses[1-i], i == ordered, i != ordered); err != nil {
				t.Fatal(err)
			}
		}
		for i := range 2 {
			b.hosts[i].Do(func() {
				if err := b.chans[i].Connect(b.chans[i].Local(), b.paths[i]); err == nil {
					t.Error("connected with an end that orders the same direction")
				}
				if err := b.chans[i].Connect(b.chans[1-i].Local(), b.paths[i]); err != nil {
					t.Fatal(err)
				}
			})
		}
		var want []string
		for k := range 50 {
			want = append(want, fmt.Sprint(k))
			b.send(0, want[k])
			b.send(1, want[k])
			b.quiet(2 * time.Microsecond)
		}
		b.until("completions", func() bool { return len(b.completed[0]) == 50 && len(b.completed[1]) == 50 })
		for i := range 2 {
			if got := slices.Equal(b.delivered[1-i], want); got != (i == ordered) {
				t.Errorf("ordered direction %d: messages of end %d arrive in order: %v\n%v", ordered, i, got, b.delivered[1-i])
			}
		}
		b.check([2][]error{make([]error, 50), make([]error, 50)}, [2][]error{})
	}
}

// TestCIDs checks that cids are distinct, not consecutive, and not used again soon.
func TestCIDs(t *testing.T) {
	gate.WithoutRaceDetector(t, "3,000 connections in one goroutine")
	b := newBench(t, superp.Config{}, onePlane, false)
	core := superp.NewCore(superp.Config{}, nil)
	if err := core.Start(b.hosts[0]); err != nil {
		t.Fatal(err)
	}
	used, previous, near := map[uint16]bool{}, uint16(0), 0
	for range 3000 {
		ch, err := core.Channel(rdma.ChannelConfig{Remote: addresses[1]})
		if err != nil {
			t.Fatal(err)
		}
		cid := ch.(*superp.Connection).CID()
		if cid == 0 || used[cid] {
			t.Fatalf("cid %d is 0 or was used before", cid)
		}
		if d := int16(cid - previous); d >= -16 && d <= 16 {
			near++
		}
		used[cid], previous = true, cid
		if len(used)%2 == 0 {
			ch.Close()
		}
	}
	if near > 30 { // 1.5 are expected
		t.Errorf("%d of 3000 cids are near the previous one", near)
	}
}

// TestSendKey checks that Sends carry the key of the peer's connection data, and that a message under another key is
// refused.
func TestSendKey(t *testing.T) {
	for _, wrong := range []bool{false, true} {
		b := newBench(t, superp.Config{}, onePlane, false)
		for i := range 2 {
			ch, err := b.cores[i].Channel(rdma.ChannelConfig{Remote: addresses[1-i]})
			if err != nil {
				t.Fatal(err)
			}
			b.chans[i] = ch.(*superp.Connection)
		}
		want, sent := binary.LittleEndian.Uint32(b.chans[1].Local()[14:]), 0
		for i := range 2 {
			b.hosts[i].Do(func() {
				data := b.chans[1-i].Local()
				if wrong {
					data[14] ^= 1
				}
				if err := b.chans[i].Connect(data, b.paths[i]); err != nil {
					t.Fatal(err)
				}
			})
		}
		b.onPacket = func(_ netip.Addr, p *superp.Packet) {
			if p.TAL.Opcode == superp.OpcodeSend {
				sent++
				if got := p.Send(0).Key; got != want != wrong {
					t.Errorf("key %#x, that of the peer is %#x", got, want)
				}
			}
		}
		b.send(0, string(make([]byte, 5000)))
		b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 8)})
		b.until("completions", func() bool { return len(b.completed[0]) == 2 })
		delivered := len(b.delivered[1])
		if sent < 5 || delivered != 1 && !wrong || delivered != 0 && wrong {
			t.Errorf("wrong key %v: %d Sends, %d messages delivered", wrong, sent, delivered)
		}
		failed := 0
		for _, err := range b.completed[0] {
			if errors.Is(err, rdma.ErrRemoteInvalid) {
				failed++
			} else if err != nil {
				t.Error(err)
			}
		}
		if wrong != (failed == 1) || len(b.failed[0])+len(b.failed[1]) > 0 {
			t.Errorf("wrong key %v: completions %v, failed %v", wrong, b.completed[0], b.failed)
		}
	}
}

// TestStrangers checks that packets for unknown connections, from other addresses, and garbage are counted and dropped.
func TestStrangers(t *testing.T) {
	b := newBench(t, superp.Config{}, onePlane, false)
	to, from := netip.AddrPortFrom(addresses[0], superp.DefaultPort), netip.AddrPortFrom(addresses[1], 50000)
	packet := append(b.chans[0].Local()[2:4], make([]byte, 22)...) // dcid; the other fields 0: a No-op
	binary.LittleEndian.PutUint32(packet[8:], ^uint32(0))          // ack_psn: none
	binary.LittleEndian.PutUint16(packet[22:], 0xffff)             // ack_xid: none
	inject := func(from netip.AddrPort, b2 []byte) { b.net.Inject(from, to, 0, b2) }
	inject(from, []byte("short"))
	inject(netip.MustParseAddrPort("192.0.2.1:50000"), packet)
	other := bytes.Clone(packet)
	other[0] ^= 0x55
	inject(from, other)
	above := bytes.Clone(packet)
	binary.LittleEndian.PutUint32(above[4:], 1024)
	inject(from, above)
	forged := bytes.Clone(packet)
	binary.LittleEndian.PutUint32(forged[8:], 5)
	inject(from, forged)
	b.quiet(time.Second)
	got := b.cores[0].Counters()
	for _, name := range []string{"malformed", "unknown_address", "unknown_cid", "outside_window", "bad_acks"} {
		if got[name] != 1 {
			t.Errorf("%s: %d, want 1", name, got[name])
		}
	}
	if got["packets_sent"] != 0 || got["packets_received"] != 5 {
		t.Errorf("%v", got)
	}
}

// FuzzConnection fuzzes the model: operations, the fate of datagrams, outages, and forged datagrams.
func FuzzConnection(f *testing.F) {
	rdmatest.Fuzz(f, with(superp.Config{Payload: 256, Parameters: superp.Parameters{PacketsPerTransaction: 300, Window: 64,
		Transactions: 8}}), rdmatest.FuzzOptions{})
}
