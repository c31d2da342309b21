package transports

import (
	"bytes"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/interop/transports/tcpbth"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/tcpqp"
	"github.com/fared/fared/wecmp"
)

// optionPair returns two connected sets with one slot, whose TCP segments have the framing option, and a capture from
// before their connection.
func optionPair(t *testing.T, c cable, kernelTimestamps string) (*pair, *segmentCapture) {
	t.Helper()
	for _, n := range []*netnstest.Namespace{c.a, c.b} {
		n.IP("link", "set", "eth0", "mtu", "1500")
		n.Sysctl("net.ipv4.tcp_timestamps=" + kernelTimestamps)
	}
	capture := captureSegments(t, c.a, "eth0")
	p := c.connect(t, contender{name: "tcp", make: func() []rdma.Transport { return []rdma.Transport{tcpqp.New(tcpqp.Config{Option: true})} }},
		[]rdma.Slot{{Slot: 0, Plane: "p0", Port: 51234, Share: 1e9}}, wecmp.Weak)
	for _, d := range p.devices {
		if _, ok := d.Counters()["tcp"]["options_written"]; !ok {
			netnstest.Lacks(t, "the kernel or the process cannot write the option")
		}
	}
	return p, capture
}

// completed waits for a completion without an error.
func completed(t *testing.T, cq *rdma.CQ) rdma.Completion {
	t.Helper()
	var c [1]rdma.Completion
	for limit := time.Now().Add(time.Minute); cq.Poll(c[:]) == 0; time.Sleep(20 * time.Microsecond) {
		if time.Now().After(limit) {
			t.Fatal("no completion")
		}
	}
	if c[0].Err != nil {
		t.Fatal(c[0].Err)
	}
	return c[0]
}

// TestOptionByAnotherDecoder checks the framing option of all segments between two sets with a decoder that shares no
// code with transport/tcpqp: version, opcodes, message numbers, offsets, immediate data, the agreement by rtr and
// rtr_ack, and the ICRC of every segment. Both ends send requests, of every kind and of one to many segments.
func TestOptionByAnotherDecoder(t *testing.T) {
	netnstest.Require(t)
	for _, test := range []struct{ kernel, family string }{{"0", "IPv4"}, {"1", "IPv4"}, {"0", "IPv6"}, {"1", "IPv6"}} {
		t.Run("tcp_timestamps="+test.kernel+"/"+test.family, func(t *testing.T) {
			kernel, ends := test.kernel, families[test.family]
			p, capture := optionPair(t, newCableOf(t, ends), kernel)
			memory := [2]*rdma.MR{p.local, p.remote}
			type message struct {
				name string
				data []byte
				imm  uint32
				has  bool
			}
			var want [2][]message // by requester
			for i, n := range []int{0, 1, 20, 1400, 1420, 3000, 60_000} {
				for side, set := range p.sets {
					data := pattern(n, 2*i+side)
					copy(memory[side].Bytes(), data)
					imm := uint32(0xabcd0000 + 2*i + side)
					for _, op := range []rdma.Opcode{rdma.Send, rdma.SendImmediate, rdma.Write, rdma.WriteImmediate, rdma.Read} {
						receives := op == rdma.Send || op == rdma.SendImmediate || op == rdma.WriteImmediate
						if receives {
							wr := rdma.RecvWR{Local: rdma.SGE{MR: memory[1-side], Offset: 1 << 20, Length: 1 << 20}}
							if _, err := p.sets[1-side].PostRecv(wr); err != nil {
								t.Fatal(err)
							}
						}
						if _, err := set.PostSend(rdma.SendWR{Opcode: op, Local: rdma.SGE{MR: memory[side], Length: n}, Immediate: imm,
							RemoteAddress: memory[1-side].Address() + 2<<20, RemoteKey: memory[1-side].Key()}); err != nil {
							t.Fatal(err)
						}
						completed(t, p.cqs[side])
						if receives {
							if c := completed(t, p.cqs[1-side]); c.HasImmediate != (op != rdma.Send) || c.HasImmediate && c.Immediate != imm {
								t.Errorf("%v with the immediate data %#x arrived as %+v", op, imm, c)
							}
						}
						m := message{data: data}
						switch op {
						case rdma.Send:
							m.name = "SEND"
						case rdma.SendImmediate:
							m.name, m.imm, m.has = "SEND", imm, true
						case rdma.Write:
							m.name = "WRITE"
						case rdma.WriteImmediate: // a WRITE, and a SEND that announces it
							want[side] = append(want[side], message{name: "WRITE", data: data})
							m = message{name: "SEND", imm: imm, has: true}
						case rdma.Read:
							m.name = "READ request"
						}
						want[side] = append(want[side], m)
					}
				}
			}
			segments := capture.stop()
			directions, violations := tcpbth.Judge(segments)
			if len(violations) > 0 || len(directions) != 4 {
				t.Fatalf("%d directions; %d violations: %s", len(directions), len(violations), strings.Join(violations[:min(len(violations), 20)], "\n"))
			}
			for _, d := range directions {
				t.Logf("%v > %v: %d segments, %d before the agreement, %d with the option, %d with the right ICRC, %d stamped, %d rtr, %d rtr_ack, %d messages",
					d.From, d.To, d.Segments, d.Before, d.Optioned, d.Checked, d.Stamped, d.RTR, d.Ack, len(d.Messages))
				if d.Bare != 0 || d.Before > 1 || d.Checked != d.Optioned || (kernel == "0") != (d.Stamped == d.Optioned) || (kernel == "1") != (d.Stamped == 0) {
					t.Errorf("%+v", d)
				}
				if d.RTR == 0 || d.Ack == 0 || d.RTR > 8 || d.Ack > 8 {
					t.Errorf("%d segments have rtr, %d rtr_ack, of %d", d.RTR, d.Ack, d.Segments)
				}
				side := slices.Index(ends[:], d.From.Addr())
				if d.To.Port() != tcpqp.Port { // responses: among them those of the READs
					n := 0
					for _, m := range d.Messages {
						if m.Name == "READ response" {
							n++
						}
					}
					if n != 7 {
						t.Errorf("%d READ responses, want 7", n)
					}
					continue
				}
				at := 0
				for _, m := range d.Messages {
					if at < len(want[side]) {
						w := want[side][at]
						if m.Name == w.name && m.HasImmediate == w.has && m.Immediate == w.imm && (w.name == "READ request" || bytes.HasSuffix(m.Data, w.data)) {
							at++
							continue
						}
					}
					// A set also sends credits, which are short SENDs.
					if credit := m.Name == "SEND" && !m.HasImmediate && len(m.Data) <= 64; !credit && m.Name != "private" {
						t.Fatalf("side %d: %s %d of %d bytes, with the immediate data %v %#x, in place of message %d of %d", side, m.Name, m.MSN,
							len(m.Data), m.HasImmediate, m.Immediate, at, len(want[side]))
					}
				}
				if at != len(want[side]) {
					t.Errorf("side %d: %d messages on the wire, want %d", side, at, len(want[side]))
				}
			}
			// The judge sees a corrupted byte, and a CRC that is left out.
			middle := slices.IndexFunc(segments, func(s tcpbth.Segment) bool {
				o, err := tcpbth.Decode(s.Options)
				return err == nil && o.BTH != nil && o.BTH.Opcode == 0x07
			})
			if middle < 0 {
				t.Fatal("no WRITE has a middle segment")
			}
			for what, spoil := range map[string]func(*tcpbth.Segment){
				"a corrupted byte": func(s *tcpbth.Segment) { s.Data[700] ^= 0x10 },
				"no CRC":           func(s *tcpbth.Segment) { clear(s.Options[bytes.Index(s.Options, []byte{0xfb, 0x54})+10:][:4]) },
			} {
				spoiled := slices.Clone(segments)
				s := &spoiled[middle]
				s.Data, s.Options = bytes.Clone(s.Data), bytes.Clone(s.Options)
				spoil(s)
				if _, violations := tcpbth.Judge(spoiled); len(violations) != 1 || !strings.Contains(violations[0], "ICRC") {
					t.Errorf("%s: violations %q", what, violations)
				}
			}
		})
	}
}

// TestReadyFlagsSurviveLoss loses segments that carry rtr and rtr_ack, in both directions. The flags repeat until they
// are acknowledged, no message with data has the option before the peer's rtr, and both flags end.
func TestReadyFlagsSurviveLoss(t *testing.T) {
	netnstest.Require(t)
	for family, ends := range families {
		t.Run(family, func(t *testing.T) { readyFlagsSurviveLoss(t, newCableOf(t, ends)) })
	}
}

func readyFlagsSurviveLoss(t *testing.T, c cable) {
	// Bit n: lose the n-th segment with the option. The first of b is its ACCEPT with rtr; the third is an answer with
	// rtr_ack. The first two of a are the first request and its retransmission.
	losses := [2]*loss{c.loseOptions(t, c.a, 0, numbered(0b11)), c.loseOptions(t, c.b, 0, numbered(0b101))}
	p, capture := optionPair(t, c, "0")
	for i := range 10 {
		if _, err := p.set.PostSend(rdma.SendWR{Opcode: rdma.Write, Local: rdma.SGE{MR: p.local, Length: 5000},
			RemoteAddress: p.remote.Address() + uint64(i)*8192, RemoteKey: p.remote.Key()}); err != nil {
			t.Fatal(err)
		}
		completed(t, p.cqs[0])
	}
	directions, violations := tcpbth.Judge(capture.stop())
	if len(violations) > 0 {
		t.Fatal(strings.Join(violations, "\n"))
	}
	for i, l := range losses {
		if n := l.lost(t); n != 2 {
			t.Errorf("%d segments of end %d were lost, want 2", n, i)
		}
	}
	writes := 0
	for _, d := range directions {
		t.Logf("%v > %v: %d segments, %d with the option, %d rtr, %d rtr_ack", d.From, d.To, d.Segments, d.Optioned, d.RTR, d.Ack)
		for _, m := range d.Messages {
			if m.Name == "WRITE" {
				writes++
			}
		}
		if d.From.Port() != 51234 && d.To.Port() != 51234 || d.From.Addr() == c.ends[1] && d.From.Port() == 51234 || d.To.Addr() == c.ends[1] && d.To.Port() == 51234 {
			continue // b's flow, on which b may have sent nothing but credit
		}
		if d.Bare != 0 || d.RTR == 0 || d.Ack == 0 || d.RTR == d.Optioned || d.Ack == d.Optioned || d.Checked != d.Optioned {
			t.Errorf("%+v", d)
		}
	}
	if writes != 10 {
		t.Errorf("%d WRITEs on the wire, want 10", writes)
	}
}

// TestOptionNextToSACK checks that the option has room next to SACK blocks, as far as documented: next to one with the
// kernel's timestamps, and next to two without them, where it has timestamps next to one alone. While segments of a
// WRITE are missing, its target answers a READ, so that its data has one block for each part of the WRITE behind a gap.
func TestOptionNextToSACK(t *testing.T) {
	netnstest.Require(t, "tc")
	for _, test := range []struct {
		kernel, family string
		blocks         int
		fits           bool
	}{{"0", "IPv4", 1, true}, {"0", "IPv6", 2, true}, {"0", "IPv4", 3, false}, {"1", "IPv6", 1, true}, {"1", "IPv4", 2, false}} {
		t.Run(fmt.Sprintf("tcp_timestamps=%s/%s/blocks=%d", test.kernel, test.family, test.blocks), func(t *testing.T) {
			c := newCableOf(t, families[test.family])
			position := 0
			if test.kernel == "1" {
				position = 12 // two NOPs and the timestamps precede the framing option
			}
			l := c.loseOptions(t, c.a, position, middles(0b101010&(1<<(2*test.blocks)-1)))
			// A slow cable: the answer is on its way when segments of the WRITE are missing.
			c.b.Run("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "50mbit", "burst", "16k", "limit", "512k")
			p, capture := optionPair(t, c, test.kernel)
			post := func(op rdma.Opcode, n int) {
				t.Helper()
				if _, err := p.set.PostSend(rdma.SendWR{Opcode: op, Local: rdma.SGE{MR: p.local, Length: n},
					RemoteAddress: p.remote.Address() + 8<<20, RemoteKey: p.remote.Key()}); err != nil {
					t.Fatal(err)
				}
			}
			received := func() uint64 { return p.devices[0].Counters()["tcp"]["options_received"] }
			// On a busy machine the answer may be complete before the WRITE begins, or the WRITE may be acknowledged
			// between its segments.
			for limit := time.Now().Add(time.Minute); capture.next(c.ends[1], test.blocks) < 50; {
				if time.Now().After(limit) {
					t.Fatalf("data is not next to %d SACK blocks", test.blocks)
				}
				l.set(t, 1)
				before := received()
				post(rdma.Read, 1<<20)
				// The answer fills the queue, so the acknowledgements of the WRITE are late, and TCP sends its first
				// ten segments at once.
				for received() < before+200 && time.Now().Before(limit) {
					time.Sleep(time.Millisecond)
				}
				post(rdma.Write, 1<<16)
				completed(t, p.cqs[0]) // the READ
				l.set(t, 0)
				completed(t, p.cqs[0])
			}
			directions, violations := tcpbth.Judge(capture.stop())
			if len(violations) > 0 {
				t.Fatalf("%d violations: %s", len(violations), strings.Join(violations[:min(len(violations), 20)], "\n"))
			}
			for _, d := range directions {
				if d.From.Addr() != c.ends[1] || d.To.Port() == tcpqp.Port {
					continue
				}
				t.Logf("%v > %v: %d segments, %d with the option (%v next to 0, 1, ... SACK blocks), %d stamped; %d without (%v)", d.From, d.To, d.Segments,
					d.Optioned, d.SACK, d.Stamped, d.Bare, d.BareSACK)
				if with, without := d.SACK[test.blocks], d.BareSACK[test.blocks]; test.fits != (with > 0) || test.fits != (without == 0) {
					t.Errorf("next to %d SACK blocks: %d segments with the option, %d without", test.blocks, with, without)
				}
				stamped := 0
				if test.kernel == "0" {
					stamped = d.SACK[0] + d.SACK[1]
				}
				if d.Stamped != stamped {
					t.Errorf("%d options have timestamps, want %d", d.Stamped, stamped)
				}
			}
		})
	}
}

// TestOptionUnderLoss checks that every option on a cable that loses segments in both directions is right, also of
// retransmitted segments, and that segments lack it only for the room that SACK blocks take.
func TestOptionUnderLoss(t *testing.T) {
	netnstest.Require(t)
	for family, ends := range families {
		t.Run(family, func(t *testing.T) { optionUnderLoss(t, newCableOf(t, ends)) })
	}
}

func optionUnderLoss(t *testing.T, c cable) {
	lost := [2]*loss{c.loseOptions(t, c.a, 0, randomly(0.03)), c.loseOptions(t, c.b, 0, randomly(0.03))}
	p, capture := optionPair(t, c, "0")
	memory := [2]*rdma.MR{p.local, p.remote}
	const outstanding, rounds = 8, 12
	for round := range rounds {
		for i := range 2 * outstanding {
			side, n := i%2, 1+i*(1+round)*911%60_000
			op := []rdma.Opcode{rdma.Write, rdma.Read}[(i/2+round)%2]
			if _, err := p.sets[side].PostSend(rdma.SendWR{Opcode: op, Local: rdma.SGE{MR: memory[side], Offset: i << 16, Length: n},
				RemoteAddress: memory[1-side].Address() + uint64(8<<20+i<<16), RemoteKey: memory[1-side].Key()}); err != nil {
				t.Fatal(err)
			}
		}
		for range outstanding {
			completed(t, p.cqs[0])
			completed(t, p.cqs[1])
		}
	}
	sum := map[string]uint64{}
	for _, d := range p.devices {
		for name, n := range d.Counters()["tcp"] {
			sum[name] += n
		}
	}
	directions, violations := tcpbth.Judge(capture.stop())
	if len(violations) > 0 {
		t.Fatalf("%d violations: %s", len(violations), strings.Join(violations[:min(len(violations), 20)], "\n"))
	}
	checked, bare, messages := 0, 0, map[string]int{}
	for _, d := range directions {
		t.Logf("%v > %v: %d segments, %d with the option (%v next to SACK blocks), %d without (%v)", d.From, d.To, d.Segments, d.Optioned, d.SACK, d.Bare, d.BareSACK)
		checked, bare = checked+d.Checked, bare+d.Bare
		for _, m := range d.Messages {
			messages[m.Name]++
		}
		if d.Checked != d.Optioned || d.Bare != d.BareSACK[3]+d.BareSACK[4] {
			t.Errorf("%+v", d)
		}
	}
	n := lost[0].lost(t) + lost[1].lost(t)
	t.Logf("%d options written, %d lost, %d checked on the wire; messages %v; %d segments had no room", sum["options_written"], n, checked, messages, sum["options_no_room"])
	const each = rounds * outstanding // WRITEs, and READs
	if whole := messages["WRITE"] == each && messages["READ request"] == each && messages["READ response"] == each; !whole && bare == 0 {
		t.Errorf("messages %v, want %d of each", messages, each)
	}
	if n == 0 || sum["options_cut"]+sum["options_batched"]+sum["options_unmarked"] > 0 {
		t.Errorf("%d lost, counters %v", n, sum)
	}
}

// segmentCapture records the TCP segments with data at a device.
type segmentCapture struct {
	end func()

	mu       sync.Mutex
	segments []tcpbth.Segment
}

func captureSegments(t *testing.T, n *netnstest.Namespace, device string) *segmentCapture {
	t.Helper()
	c := &segmentCapture{}
	c.end = packettap.Frames(t, n, device, c.add)
	return c
}

func (c *segmentCapture) add(frame []byte) {
	if s, ok := tcpbth.Parse(frame); ok {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.segments = append(c.segments, s)
	}
}

// next returns the number of segments from an address whose data is next to a number of SACK blocks.
func (c *segmentCapture) next(from netip.Addr, blocks int) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.segments {
		if o, _ := tcpbth.Decode(s.Options); s.From.Addr() == from && o.SACKBlocks == blocks {
			n++
		}
	}
	return n
}

// stop returns the segments in the order of capture.
func (c *segmentCapture) stop() []tcpbth.Segment {
	c.end()
	return c.segments
}

// loss loses segments with the option.
type loss struct{ state *ebpf.Map }

// Places of loss.state.
const (
	lossSeen  = iota // segments with the option
	lossCount        // lost ones
	lossOn           // middles loses segments
	lossEnd
)

func (l *loss) read(t *testing.T, place uint32) (n uint64) {
	t.Helper()
	if err := l.state.Lookup(place, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

func (l *loss) lost(t *testing.T) uint64 { return l.read(t, lossCount) }

// set begins or ends the losses of middles.
func (l *loss) set(t *testing.T, on uint64) {
	t.Helper()
	if err := l.state.Put(uint32(lossOn), on); err != nil {
		t.Fatal(err)
	}
}

// rule is the part of the program that decides about a segment: it jumps to "lose" or to "next". R6 has the packet, R7
// the number of the segment, R8 whether middles is on. position is that of the option in the packet.
type rule func(position int32) asm.Instructions

// numbered loses segment n if bit n of mask is set.
func numbered(mask int32) rule {
	return func(int32) asm.Instructions {
		return asm.Instructions{
			asm.JGE.Imm(asm.R7, 31, "next"), asm.Mov.Imm(asm.R2, mask), asm.RSh.Reg(asm.R2, asm.R7), asm.And.Imm(asm.R2, 1),
			asm.JNE.Imm(asm.R2, 0, "lose"), asm.Ja.Label("next"),
		}
	}
}

// middles loses segments of WRITEs other than the first and the last whose number in the message has its bit set in
// mask.
func middles(mask int32) rule {
	const opcode, number = 5, 11 // in the option
	return func(position int32) asm.Instructions {
		return asm.Instructions{
			asm.JEq.Imm(asm.R8, 0, "next"),
			asm.LoadAbs(position+opcode, asm.Byte), asm.JNE.Imm(asm.R0, 0x07, "next"),
			asm.LoadAbs(position+number, asm.Byte), asm.JGE.Imm(asm.R0, 31, "next"),
			asm.Mov.Imm(asm.R2, mask), asm.RSh.Reg(asm.R2, asm.R0), asm.And.Imm(asm.R2, 1), asm.JNE.Imm(asm.R2, 0, "lose"), asm.Ja.Label("next"),
		}
	}
}

// randomly loses each segment with a probability.
func randomly(p float64) rule {
	return func(int32) asm.Instructions {
		return asm.Instructions{
			asm.FnGetPrandomU32.Call(), asm.RSh.Imm(asm.R0, 1), asm.JGE.Imm(asm.R0, int32(p*math.MaxInt32), "next"), asm.Ja.Label("lose"),
		}
	}
}

// loseOptions loses outgoing TCP segments of an end's device that have the framing option at a position among their
// options, by a rule. Lost segments go to a device with another address, which drops them: TCP would notice a drop
// here, and not count the segment as sent.
func (c cable) loseOptions(t *testing.T, n *netnstest.Namespace, position int, decide rule) *loss {
	t.Helper()
	protocol, options := int32(14+9), int32(14+20+20) // in an Ethernet frame with IPv4 and TCP
	if c.ends[0].Is6() {
		protocol, options = 14+6, 14+40+20
	}
	state, err := ebpf.NewMap(&ebpf.MapSpec{Name: "options", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: lossEnd})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { state.Close() })
	n.IP("link", "add", "nowhere", "type", "veth", "peer", "name", "end")
	n.IP("link", "set", "nowhere", "up")
	n.IP("link", "set", "end", "up")
	const next = -1                              // TCX_NEXT
	find := func(place int64) asm.Instructions { // R0: the place of the state
		return asm.Instructions{
			asm.StoreImm(asm.RFP, -4, place, asm.Word), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
			asm.LoadMapPtr(asm.R1, state.FD()), asm.FnMapLookupElem.Call(), asm.JEq.Imm(asm.R0, 0, "next"),
		}
	}
	count := asm.Instructions{asm.LoadMem(asm.R7, asm.R0, 0, asm.DWord), asm.Mov.Reg(asm.R2, asm.R7), asm.Add.Imm(asm.R2, 1), asm.StoreMem(asm.R0, 0, asm.R2, asm.DWord)}
	code := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadAbs(protocol, asm.Byte), asm.JNE.Imm(asm.R0, unix.IPPROTO_TCP, "next"),
		asm.LoadAbs(options+int32(position), asm.Byte), asm.JNE.Imm(asm.R0, 253, "next"),
	}
	code = append(append(code, find(lossOn)...), asm.LoadMem(asm.R8, asm.R0, 0, asm.DWord))
	code = append(append(code, find(lossSeen)...), count...)
	code = append(code, decide(options+int32(position))...)
	lose := append(find(lossCount), count...)
	lose[0] = lose[0].WithSymbol("lose")
	code = append(append(code, lose...), asm.Mov.Imm(asm.R1, int32(n.Device("nowhere").Index)), asm.Mov.Imm(asm.R2, 0), asm.FnRedirect.Call(), asm.Return(),
		asm.Mov.Imm(asm.R0, next).WithSymbol("next"), asm.Return())
	packettap.Attach(t, n, "eth0", ebpf.AttachTCXEgress, "lose", code)
	return &loss{state}
}
