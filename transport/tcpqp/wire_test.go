package tcpqp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/transport/rdma"
)

// captured is a TCP segment with data, as seen on the wire.
type captured struct {
	from, to netip.AddrPort
	seq      uint32
	options  []byte
	data     []byte
}

// capture records segments with data on a namespace's device until it is stopped.
type capture struct {
	end      func()
	segments []captured // valid after stop
}

func newCapture(t *testing.T, n *netnstest.Namespace, device string) *capture {
	t.Helper()
	c := &capture{}
	c.end = packettap.Frames(t, n, device, func(frame []byte) {
		if s, ok := segmentOf(frame); ok {
			c.segments = append(c.segments, s)
		}
	})
	return c
}

func (c *capture) stop() []captured {
	c.end()
	return c.segments
}

// segmentOf parses an Ethernet frame with IPv4 and TCP.
func segmentOf(p []byte) (s captured, ok bool) {
	if len(p) < 14+40 || binary.BigEndian.Uint16(p[12:]) != unix.ETH_P_IP || p[14+9] != unix.IPPROTO_TCP {
		return s, false
	}
	ip := p[14:]
	ip = ip[:binary.BigEndian.Uint16(ip[2:])]
	tcp := ip[int(ip[0]&15)*4:]
	header := int(tcp[12]>>4) * 4
	if header >= len(tcp) {
		return s, false
	}
	port := func(at, i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[at:at+4])), binary.BigEndian.Uint16(tcp[i:]))
	}
	return captured{
		from: port(12, 0), to: port(16, 2), seq: binary.BigEndian.Uint32(tcp[4:]),
		options: bytes.Clone(tcp[20:header]), data: bytes.Clone(tcp[header:]),
	}, true
}

// TestPlacedByOption checks that segments from the wire, placed in any order by their options and the frame header in
// the first segment of their message, result in the memory that the transport has written. Each segment has the CRC of
// its data.
func TestPlacedByOption(t *testing.T) {
	needsOption(t)
	for _, kernel := range []string{"1", "0"} {
		t.Run("tcp_timestamps="+kernel, func(t *testing.T) {
			var mu sync.Mutex
			byOffset := map[uint32]Option{} // by offset in host 0's stream
			spaces, addresses := veths(t)
			var configs [2]Config
			for i, n := range spaces {
				// Without SACK: an end that is delayed acknowledges data that TCP then sends twice with blocks (RFC
				// 2883), of which several take the option's room.
				n.Sysctl("net.ipv4.tcp_timestamps="+kernel, "net.ipv4.tcp_sack=0")
				configs[i].inside, configs[i].Option = n.Do, true
			}
			configs[1].Segments = func(s Segment) {
				mu.Lock()
				defer mu.Unlock()
				if s.Port == Port && s.Remote.Port() == 61500 {
					byOffset[s.Offset] = s.Option
				}
			}
			p := newPair(t, addresses, configs)
			if err := p.wait(p.post(0, write(0, []byte{1})), p.post(1, write(0, []byte{1}))); err != nil { // both ends have agreed on the option
				t.Fatal(err)
			}
			c := newCapture(t, spaces[0], "plane")
			rng := rand.New(rand.NewPCG(1, 1))
			var ops []*rdma.Op
			reads := map[uint16][]byte{}
			at := 0
			for n := range uint16(200) {
				b := make([]byte, 1+rng.IntN(30_000)/(1+rng.IntN(30)))
				op := write(at, b)
				if n%4 == 3 {
					op = read(rng.IntN(at), b)
					reads[n+1] = b
				} else {
					for i := range b {
						b[i] = byte(rng.Uint32())
					}
					at += len(b)
				}
				ops = append(ops, p.post(0, op))
			}
			if err := p.wait(ops...); err != nil {
				t.Fatal(err)
			}
			segments := c.stop()
			rng.Shuffle(len(segments), func(i, j int) { segments[i], segments[j] = segments[j], segments[i] })
			memory := make([]byte, testMemory)
			memory[0] = p.memory[1][0]
			answers := map[uint16][]byte{}
			stamped, seen := 0, [2]int{}
			type message struct {
				from netip.AddrPort
				msn  uint16
			}
			headers := map[message]header{}
			for _, s := range segments {
				o, ok := findOption(s.options)
				if !ok {
					t.Fatalf("%v to %v: %d bytes of data without the option: options %x", s.from, s.to, len(s.data), s.options)
				}
				if o.Timestamped {
					stamped++
				}
				if o.ICRC != crc32.ChecksumIEEE(s.data) {
					t.Errorf("a wrong ICRC: %+v", o)
				}
				if o.Offset == 0 {
					var h header
					if n, err := h.parse(s.data); n == 0 || err != nil {
						t.Fatalf("%+v: a header of %d bytes, %v", o, n, err)
					}
					headers[message{s.from, o.MSN}] = h
				}
			}
			for _, s := range segments {
				o, _ := findOption(s.options)
				h, ok := headers[message{s.from, o.MSN}]
				if !ok {
					t.Fatalf("%+v: no segment begins its message", o)
				}
				length := map[opcode]int{opWrite: WriteHeader, opReadAnswer: headerSize}[h.op]
				skip := max(0, length-int(o.Offset))
				place, data := int(o.Offset)+skip-length, s.data[min(skip, len(s.data)):]
				switch h.op {
				case opWrite:
					seen[0]++
					copy(memory[int(h.address-testBase)+place:], data)
				case opReadAnswer:
					seen[1]++
					request := uint16(h.msn)
					if answers[request] == nil {
						answers[request] = make([]byte, h.length)
					}
					copy(answers[request][place:], data)
					if last := place+len(data) == int(h.length); last == o.More {
						t.Errorf("more_segments is wrong: %+v", o)
					}
				}
			}
			if !bytes.Equal(memory, p.memory[1]) {
				t.Error("memory placed by options is another than the transport's")
			}
			for msn, b := range reads {
				if !bytes.Equal(answers[msn], b) {
					t.Errorf("READ %d placed by options is another than the transport's", msn)
				}
			}
			if len(answers) != len(reads) || seen[0] < 200 || seen[1] < 50 || stamped != 0 != (kernel == "0") {
				t.Errorf("%d answers of %d, %v segments, %d with timestamps", len(answers), len(reads), seen, stamped)
			}
			first := segments[0] // of host 0's stream
			for _, x := range segments {
				if x.to.Port() == Port && (first.to.Port() != Port || int32(x.seq-first.seq) < 0) {
					first = x
				}
			}
			// OPEN and the WRITE of one byte precede it.
			origin := first.seq - headerSize - openSize - WriteHeader - 1
			p.until("records that say what was on the wire", func() bool {
				mu.Lock()
				defer mu.Unlock()
				for _, x := range segments {
					o, _ := findOption(x.options)
					is := byOffset[x.seq-origin]
					is.Timestamp, is.Echo, is.RTR, is.RTRAck = o.Timestamp, o.Echo, o.RTR, o.RTRAck // a retransmission has others
					if x.to.Port() == Port && is != o {
						return false
					}
				}
				return true
			})
			t.Logf("%d WRITE and %d answer segments, %d with timestamps; counters %v", seen[0], seen[1], stamped, p.counters(0))
		})
	}
}

// TestBatchesGoWithoutOption checks that batches have no option, nor have parts of a piece that TCP cuts. TCP copies
// the header of a batch into every segment that it is cut into, below the program, so the option could be correct only
// for the first segment; the CRC of a part is not known.
func TestBatchesGoWithoutOption(t *testing.T) {
	needsOption(t)
	for counter, gso := range map[string]string{"options_batched": "100", "options_cut": "1"} {
		t.Run(counter, func(t *testing.T) {
			p, spaces := onVeths(t, func(c *Config) { c.Option = true })
			spaces[0].IP("link", "set", "plane", "gso_max_segs", gso)
			if err := p.wait(p.post(0, write(0, []byte{1}))); err != nil {
				t.Fatal(err)
			}
			// The connection has the device's limit from its beginning.
			p.hosts[0].Do(func() { p.transports[0].e.channels[1].out0.conn.fail(errReset) })
			if err := p.wait(p.post(0, write(0, []byte{1}))); err != nil {
				t.Fatal(err)
			}
			c := newCapture(t, spaces[0], "plane")
			p.hosts[0].Do(func() { // as if segments could be as long as batches
				p.transports[0].e.channels[1].out0.conn.marks.(*marks).size.Store(maxPiece)
			})
			b := make([]byte, 500_000)
			for i := range b {
				b[i] = byte(i >> 8)
			}
			if err := p.wait(p.post(0, write(0, b))); err != nil || !bytes.Equal(p.memory[1][:len(b)], b) {
				t.Fatalf("%v, or other bytes have arrived", err)
			}
			without := 0
			for _, s := range c.stop() {
				if o, ok := findOption(s.options); !ok {
					without++
				} else if len(s.data) > 1460 || o.ICRC != crc32.ChecksumIEEE(s.data) {
					t.Fatalf("%d bytes with the option %+v", len(s.data), o)
				}
			}
			if counts := p.counters(0); counts[counter] == 0 || without < 5 {
				t.Errorf("%d segments without the option; counters %v", without, counts)
			}
		})
	}
}

// TestMarksOutlastTheQueue checks that the send buffer takes no more segments than there are marks: after an outage,
// during which TCP has filled it, each segment still has the option.
func TestMarksOutlastTheQueue(t *testing.T) {
	needsOption(t)
	p, spaces := onVeths(t, func(c *Config) { c.Option = true })
	if err := p.wait(p.post(0, write(0, []byte{1}))); err != nil {
		t.Fatal(err)
	}
	spaces[1].IP("link", "set", "plane", "down")
	var ops []*rdma.Op
	for range 8 { // about 6,000 segments
		ops = append(ops, p.post(0, write(0, make([]byte, maxOp))))
	}
	// No acknowledgement arrives, so a full buffer stays full.
	full := uint64(0)
	p.until("full send buffer", func() bool {
		full = p.transports[0].e.stats.bytesSent
		for _, k := range p.transports[0].e.conns {
			writable := false
			if err := k.edge.(*socket).raw.Control(func(fd uintptr) { writable = polled(fd, unix.POLLOUT) }); err != nil || k.flow != nil && writable {
				return false
			}
		}
		return full >= 300_000
	})
	spaces[1].IP("link", "set", "plane", "up")
	if err := p.wait(ops...); err != nil {
		t.Fatal(err)
	}
	if c := p.counters(0); c["options_unmarked"] > 0 || c["options_written"] < 8*maxOp/1500 {
		t.Errorf("the send buffer took %d bytes; counters %v", full, c)
	}
}

// TestForeignVersion changes the version of the options on the cable in one direction. The receiver interprets none of
// them, and does not take the flag rtr from them; messages arrive by their frames.
func TestForeignVersion(t *testing.T) {
	needsOption(t)
	spaces, addresses := veths(t)
	var configs [2]Config
	for i, n := range spaces {
		n.Sysctl("net.ipv4.tcp_timestamps=0")
		configs[i].inside, configs[i].Option = n.Do, true
	}
	const protocol, kind, flags = 23, 14 + 40, 14 + 44 // of an Ethernet frame with IPv4 and TCP whose first option is the framing option
	packettap.Attach(t, spaces[0], "plane", ebpf.AttachTCXEgress, "version", asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadAbs(protocol, asm.Byte), asm.JNE.Imm(asm.R0, unix.IPPROTO_TCP, "next"),
		asm.LoadAbs(kind, asm.Byte), asm.JNE.Imm(asm.R0, optionKind, "next"),
		asm.LoadAbs(flags, asm.Byte), asm.And.Imm(asm.R0, 0x3f), asm.Or.Imm(asm.R0, 2<<6), asm.StoreMem(asm.RFP, -1, asm.R0, asm.Byte),
		asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, flags), asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -1), asm.Mov.Imm(asm.R4, 1),
		asm.Mov.Imm(asm.R5, 0), asm.FnSkbStoreBytes.Call(),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("next"), asm.Return(), // TCX_NEXT
	})
	p := newPair(t, addresses, configs)
	sent, got := bytes.Repeat([]byte{0xa5}, 5000), make([]byte, 5000)
	if err := p.wait(p.post(0, write(0, sent)), p.post(0, read(0, got))); err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%v; READ returned what was written: %v", err, bytes.Equal(got, sent))
	}
	written, read := p.counters(0), p.counters(1)
	if written["options_written"] < 4 || read["options_received"] != 0 || read["options_foreign"] < 4 || read["options_early"] < 4 {
		t.Errorf("counters of the sender: %v; of the receiver: %v", written, read)
	}
}

// TestTcpdumpShowsTheOption checks that tcpdump shows the option in the format of RFC 6994, on data segments in both
// directions.
func TestTcpdumpShowsTheOption(t *testing.T) {
	needsOption(t)
	netnstest.Require(t, "tcpdump")
	p, spaces := onVeths(t, func(c *Config) { c.Option = true })
	if err := p.wait(p.post(0, write(0, []byte{1}))); err != nil { // the ends have agreed on the option
		t.Fatal(err)
	}
	dump := spaces[0].Start(t, "tcpdump", "-Z", "root", "-l", "-nn", "-i", "plane", "tcp", "port", "4793")
	// Output of tcpdump for kind 253 with the package's ExID, in each direction of a flow; versions of tcpdump differ.
	line := func(from, to string) *regexp.Regexp {
		return regexp.MustCompile(regexp.QuoteMeta(from) + ` > .*` + regexp.QuoteMeta(to) + `: Flags .*(exp-|unknown-253 0x)fb54[0-9a-f ]+.*length [1-9]`)
	}
	a, b := p.hosts[0].Address().String(), p.hosts[1].Address().String()
	there, back := line(a+".61500", b+".4793"), line(b+".4793", a+".61500")
	netnstest.Eventually(t, time.Minute, func() error {
		if err := p.wait(p.post(0, write(0, make([]byte, 3000)))); err != nil {
			return err
		}
		if err := p.wait(p.post(0, read(0, make([]byte, 3000)))); err != nil {
			return err
		}
		if out := dump.Log(); !there.MatchString(out) || !back.MatchString(out) {
			return fmt.Errorf("tcpdump has shown no option both ways:\n%s", out)
		}
		return nil
	})
}
