package transports

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/roce"
	"github.com/fared/fared/transport/superp"
	"github.com/fared/fared/transport/tcpqp"
	"github.com/fared/fared/wecmp"
)

const (
	incastSenders = 8
	incastRate    = 200_000_000 // bits per second
	incastQueue   = 128 << 10   // bytes
	incastMark    = incastQueue / 2
	incastMessage = 16 << 10
	incastAhead   = 64 // messages that a sender has posted
)

// fan is namespaces of senders and one of a receiver, with a bridge between them. The link to the receiver is shaped,
// and its queue is finite.
type fan struct {
	hub, receiver *netnstest.Namespace
	senders       []*netnstest.Namespace
	marks         *ebpf.Map // nil: nothing is marked
}

func fanAddress(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 2, 0, byte(1 + i)}) }

// newFan makes a fan. Packets are those of the link's MTU, not longer ones that a device would cut, so that the kernel
// counts packets. If mark is set, packets that find more than incastMark bytes in the queue are marked.
func newFan(t testing.TB, mark bool) *fan {
	t.Helper()
	f := &fan{hub: netnstest.New(t), receiver: netnstest.New(t)}
	f.hub.IP("link", "add", "br0", "type", "bridge")
	f.hub.IP("link", "set", "br0", "up")
	join := func(n *netnstest.Namespace, port string, at netip.Addr) {
		netnstest.Veth(t, n, "eth0", f.hub, port)
		for _, device := range []struct {
			n    *netnstest.Namespace
			name string
		}{{n, "eth0"}, {f.hub, port}} {
			device.n.IP("link", "set", device.name, "gso_max_segs", "1")
		}
		f.hub.IP("link", "set", port, "master", "br0", "up")
		n.Addr("eth0", at.String()+"/24")
		n.Sysctl("net.ipv4.tcp_ecn=1")
	}
	join(f.receiver, "shaped", fanAddress(incastSenders))
	for i := range incastSenders {
		n := netnstest.New(t)
		join(n, fmt.Sprint("up", i), fanAddress(i))
		f.senders = append(f.senders, n)
	}
	if _, err := f.hub.Output("tc", "qdisc", "add", "dev", "shaped", "root", "tbf", "rate", fmt.Sprint(incastRate, "bit"), "burst", "16k", "limit",
		fmt.Sprint(incastQueue)); err != nil {
		t.Fatal(err)
	}
	if mark {
		f.mark(t)
	}
	return f
}

// mark attaches a program to the shaped device that marks packets as a queue of the same rate would. A kernel of a
// small machine has no queue that marks.
func (f *fan) mark(t testing.TB) {
	t.Helper()
	const (
		next   = -1                   // TCX_NEXT
		byteNs = 8 * 1e9 / incastRate // time of a byte on the link
		most   = incastQueue * byteNs // time of the whole queue: packets that find it full are dropped
		above  = incastMark * byteNs  // time in the queue above which packets are marked
	)
	// Its value is the time at which the queue is empty, and the number of marked packets.
	var err error
	if f.marks, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 16, MaxEntries: 1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.marks.Close() })
	packettap.Attach(t, f.hub, "shaped", ebpf.AttachTCXEgress, "mark", asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.FnKtimeGetNs.Call(),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, f.marks.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Reg(asm.R8, asm.R0),
		asm.LoadMem(asm.R1, asm.R8, 0, asm.DWord),
		asm.JGE.Reg(asm.R1, asm.R7, "busy"),
		asm.Mov.Reg(asm.R1, asm.R7),
		asm.Mov.Reg(asm.R3, asm.R1).WithSymbol("busy"),
		asm.Sub.Reg(asm.R3, asm.R7), // time in the queue
		asm.JGE.Imm(asm.R3, most, "mark"),
		asm.LoadMem(asm.R2, asm.R6, 0, asm.Word), // length
		asm.Mul.Imm(asm.R2, byteNs),
		asm.Add.Reg(asm.R1, asm.R2),
		asm.StoreMem(asm.R8, 0, asm.R1, asm.DWord),
		asm.JLT.Imm(asm.R3, above, "out"),
		asm.Mov.Reg(asm.R1, asm.R6).WithSymbol("mark"),
		asm.FnSkbEcnSetCe.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.Mov.Imm(asm.R1, 1),
		asm.Add.Imm(asm.R8, 8),
		asm.StoreXAdd(asm.R8, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, next).WithSymbol("out"),
		asm.Return(),
	})
}

// passed is the packets of the shaped link, as the kernel counts them.
type passed struct{ sent, dropped, marked uint64 }

func (f *fan) passed(t testing.TB) (p passed) {
	t.Helper()
	out := f.hub.Run("tc", "-j", "-s", "qdisc", "show", "dev", "shaped")
	var qdiscs []struct {
		Kind           string
		Packets, Drops uint64
	}
	if err := json.Unmarshal([]byte(out), &qdiscs); err != nil || len(qdiscs) == 0 || qdiscs[0].Kind != "tbf" {
		t.Fatalf("tc prints %s (%v)", out, err)
	}
	p.sent, p.dropped = qdiscs[0].Packets, qdiscs[0].Drops
	if f.marks != nil {
		var value [16]byte
		if err := f.marks.Lookup(uint32(0), &value); err != nil {
			t.Fatal(err)
		}
		p.marked = binary.NativeEndian.Uint64(value[8:])
	}
	return p
}

// outcome is the result of an incast: goodput in Mbit/s, and packets in percent of all that were sent to the receiver.
type outcome struct{ goodput, dropped, marked float64 }

func (o outcome) String() string {
	return fmt.Sprintf("%.1f Mbit/s, %.2f %% dropped, %.2f %% marked", o.goodput, o.dropped, o.marked)
}

// measure returns the outcome of senders that count the bytes that have arrived. Packets count from the beginning, in
// which all start at once; bytes count after a while, because those of incomplete messages are not known to have
// arrived.
func (f *fan) measure(t testing.TB, length time.Duration, arrived *atomic.Int64) outcome {
	before := f.passed(t)
	time.Sleep(length / 4)
	from, start := arrived.Load(), time.Now()
	time.Sleep(length)
	bytes, took, after := arrived.Load()-from, time.Since(start), f.passed(t)
	all := float64(after.sent - before.sent + after.dropped - before.dropped)
	return outcome{float64(bytes) * 8 / took.Seconds() / 1e6, 100 * float64(after.dropped-before.dropped) / all, 100 * float64(after.marked-before.marked) / all}
}

// incast has a set of each sender write to the receiver as fast as it can, or has the receiver read from all of them.
func (f *fan) incast(t testing.TB, transport func() rdma.Transport, opcode rdma.Opcode, length time.Duration) outcome {
	t.Helper()
	open := func(n *netnstest.Namespace, i int) (d *rdma.Device) {
		n.Must(func() (err error) {
			d, err = rdma.Open(rdma.Config{Address: fanAddress(i), Transports: []rdma.Transport{transport()}})
			return err
		})
		return d
	}
	receiver := open(f.receiver, incastSenders)
	defer receiver.Close()
	ctx, cancel := context.WithCancel(context.Background())
	var wait sync.WaitGroup
	defer func() { cancel(); wait.Wait() }()
	var arrived atomic.Int64
	var begin []func()
	for i, n := range f.senders {
		d := open(n, i)
		defer d.Close()
		devices := [2]*rdma.Device{d, receiver} // the first posts
		if opcode == rdma.Read {
			devices = [2]*rdma.Device{receiver, d}
		}
		e := rdmatest.Connect(t, devices, rdma.SetConfig{Ordering: wecmp.Weak}, rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead, [2]int{incastMessage, incastMessage},
			[2][]rdma.Slot{fourSlots(), fourSlots()})
		set, memory := e.Sets[0], e.Memory
		post := func() {
			if _, err := set.PostSend(rdma.SendWR{Opcode: opcode, Local: rdma.SGE{MR: memory[0], Length: incastMessage},
				RemoteAddress: memory[1].Address(), RemoteKey: memory[1].Key()}); err != nil {
				t.Error(err)
			}
		}
		begin = append(begin, func() {
			for range incastAhead {
				post()
			}
			batch := make([]rdma.Completion, 64)
			for {
				n, err := e.CQs[0].Wait(ctx, batch)
				if err != nil {
					return
				}
				for _, c := range batch[:n] {
					if c.Err != nil {
						t.Errorf("%v: %v", c.Err, d.Counters())
						return
					}
					arrived.Add(incastMessage)
					post()
				}
			}
		})
	}
	for _, b := range begin {
		wait.Go(b)
	}
	o := f.measure(t, length, &arrived)
	cancel()
	wait.Wait()
	return o
}

// tcp is incast with a connection of the kernel's TCP for each sender, with a congestion control.
func (f *fan) tcp(t testing.TB, control string, length time.Duration) outcome {
	t.Helper()
	at := netip.AddrPortFrom(fanAddress(incastSenders), 5000).String()
	var listener net.Listener
	f.receiver.Must(func() (err error) { listener, err = net.Listen("tcp4", at); return err })
	var wait sync.WaitGroup
	var ends []net.Conn
	defer func() {
		for _, c := range ends {
			c.Close()
		}
		wait.Wait()
	}()
	defer listener.Close()
	dialer := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
		if e := c.Control(func(fd uintptr) { err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, control) }); e != nil {
			return e
		}
		return err
	}}
	var arrived atomic.Int64
	for _, n := range f.senders {
		var c net.Conn
		n.Must(func() (err error) { c, err = dialer.Dial("tcp4", at); return err })
		other, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		ends = append(ends, c, other)
	}
	for i := 0; i < len(ends); i += 2 {
		wait.Go(func() {
			b := make([]byte, incastMessage)
			for {
				if _, err := ends[i].Write(b); err != nil {
					return // closed
				}
			}
		})
		wait.Go(func() { io.Copy(counter{&arrived}, ends[i+1]) })
	}
	return f.measure(t, length, &arrived)
}

type counter struct{ n *atomic.Int64 }

func (c counter) Write(b []byte) (int, error) {
	c.n.Add(int64(len(b)))
	return len(b), nil
}

// incastTransports are the transports with congestion control of this module, with their defaults.
func incastTransports() map[string]func() rdma.Transport {
	return map[string]func() rdma.Transport{
		"roce":   func() rdma.Transport { return roce.New(roce.Config{}) },
		"superp": func() rdma.Transport { return superp.New(superp.Config{}) },
	}
}

// BenchmarkIncast measures eight senders to one receiver behind a link of 200 Mbit/s with a queue of 128 KiB: one that
// drops, and one that also marks above a half. The kernel's TCP runs in turn with the transports, and the kernel counts
// dropped packets. Use -benchtime 5x.
func BenchmarkIncast(b *testing.B) { benchmarkIncast(b, rdma.Write) }

// BenchmarkReadIncast is BenchmarkIncast with a receiver that reads from the eight others.
func BenchmarkReadIncast(b *testing.B) { benchmarkIncast(b, rdma.Read) }

func benchmarkIncast(b *testing.B, opcode rdma.Opcode) {
	netnstest.Require(b, "tc", "sysctl")
	const length = 3 * time.Second
	for _, mark := range []bool{false, true} {
		b.Run(map[bool]string{false: "drops", true: "marks"}[mark], func(b *testing.B) {
			f := newFan(b, mark)
			all := map[string][]outcome{}
			add := func(name string, o outcome) {
				b.Logf("%s: %v", name, o)
				all[name] = append(all[name], o)
			}
			for range b.N {
				for _, control := range []string{"cubic", "bbr"} {
					add("tcp-"+control, f.tcp(b, control, length))
				}
				for name, make := range incastTransports() {
					add(name, f.incast(b, make, opcode, length))
				}
				add("tcp-slots", f.incast(b, func() rdma.Transport { return tcpqp.New(tcpqp.Config{}) }, opcode, length))
			}
			for name, list := range all {
				report := func(unit string, of func(outcome) float64) {
					var v []float64
					for _, o := range list {
						v = append(v, of(o))
					}
					b.ReportMetric(median(v), name+unit)
				}
				report("_Mbit/s", func(o outcome) float64 { return o.goodput })
				report("_dropped_%", func(o outcome) float64 { return o.dropped })
				if mark {
					report("_marked_%", func(o outcome) float64 { return o.marked })
				}
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// TestIncast checks on the kernel's counters that senders that together overload a link do not have it drop many
// packets, whether they write to the receiver or the receiver reads from them. The bound is loose, for busy machines:
// without congestion control a third and more are dropped.
func TestIncast(t *testing.T) {
	gate.Slow(t, gate.Models, "sends for a second with each transport")
	netnstest.Require(t, "tc", "sysctl")
	f := newFan(t, false)
	for name, make := range incastTransports() {
		for _, opcode := range []rdma.Opcode{rdma.Write, rdma.Read} {
			o := f.incast(t, make, opcode, time.Second)
			t.Logf("%s, %v: %v", name, opcode, o)
			if o.dropped > 15 || o.goodput == 0 {
				t.Errorf("%s, %v: %v", name, opcode, o)
			}
		}
	}
}
