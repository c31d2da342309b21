package transports

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/packettap"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/tcpqp"
)

// TestTCPUnderLoss checks that the kernel's TCP recovers from the faults of a bad cable, in both directions, while
// channels move between ports: every operation is executed once, and memory equals the model's.
func TestTCPUnderLoss(t *testing.T) {
	gate.WithoutRaceDetector(t, "has millions of packets")
	netnstest.Require(t, "tc", "nstat")
	for _, test := range []struct {
		bad
		ops     int
		flap    time.Duration
		maxSize int
	}{
		{bad{loss: 0.01, duplicate: 0.01, late: 0.02}, gate.Count(t, gate.Models, 20_000, 1_000_000) / 2, 10 * time.Millisecond, 16 << 10},
		{bad{loss: 0.10, duplicate: 0.05, late: 0.05}, 1000, 100 * time.Millisecond, 16 << 10},
		{bad{loss: 0.30, duplicate: 0.05, late: 0.05}, 200, 500 * time.Millisecond, 4 << 10},
	} {
		t.Run(fmt.Sprintf("loss=%v", test.loss), func(t *testing.T) {
			if test.loss > 0.01 {
				gate.Slow(t, gate.Models, "TCP's timers under many losses")
			}
			t.Parallel() // the runs wait for TCP's timers
			c := newBadCable(t, test.bad)
			transports := [2]rdma.Transport{inside{tcpqp.New(tcpqp.Config{}), c.a}, inside{tcpqp.New(tcpqp.Config{}), c.b}}
			bed := rdmatest.Real(rdmatest.RealConfig{Addresses: ends, Transports: transports, Planes: 4})
			r := rdmatest.ChannelsOn(t, bed, rdmatest.Options{Seed: 1, Ops: test.ops, Channels: 8, Window: 32, MaxSize: test.maxSize, Apart: true,
				Flap: test.flap, Settle: 100 * time.Millisecond})
			again := uint64(0)
			for _, n := range []*netnstest.Namespace{c.a, c.b} {
				out := n.Run("nstat", "-asz", "TcpRetransSegs")
				for _, line := range strings.Split(string(out), "\n") {
					var count uint64
					if n, _ := fmt.Sscanf(line, "TcpRetransSegs %d", &count); n == 1 {
						again += count
					}
				}
			}
			t.Logf("%d operations in %v, %d flaps, %d segments sent again", r.Ops, r.Time.Round(time.Millisecond), r.Flaps, again)
			if again == 0 {
				t.Error("TCP has sent nothing again: the cable loses nothing, or this test has lost its subject")
			}
			if r.Flaps == 0 {
				t.Error("nothing flapped")
			}
		})
	}
}

// bad is the faults of a cable, as probabilities per packet: late packets make a detour through a queue, and later ones
// overtake them.
type bad struct{ loss, duplicate, late float64 }

// newBadCable returns a cable with such faults in both directions. Kernels of small machines lack netem, but have TCX.
func newBadCable(t testing.TB, what bad) cable {
	t.Helper()
	c := newCable(t)
	netnstest.Veth(t, c.a, "detour", c.b, "detour")
	for i, n := range []*netnstest.Namespace{c.a, c.b} {
		n.IP("link", "set", "detour", "mtu", "9000", "address", fmt.Sprintf("02:00:00:00:00:%02x", i))
		n.IP("link", "set", "eth0", "gso_max_segs", "1", "address", fmt.Sprintf("02:00:00:00:00:%02x", i))
		n.Run("tc", "qdisc", "add", "dev", "detour", "root", "tbf", "rate", "100mbit", "burst", "16k", "limit", "256k")
		packettap.Attach(t, n, "eth0", ebpf.AttachTCXEgress, "spoil", what.program(n.Device("eth0").Index, n.Device("detour").Index))
	}
	return c
}

// program returns the program that runs for every outgoing packet.
func (b bad) program(straight, detour int) asm.Instructions {
	const drop, next = 2, -1 // TCX_DROP, TCX_NEXT
	unless := func(p float64, label string) asm.Instructions {
		return asm.Instructions{asm.FnGetPrandomU32.Call(), asm.RSh.Imm(asm.R0, 1), asm.JGE.Imm(asm.R0, int32(p*math.MaxInt32), label)}
	}
	code := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	code = append(code, unless(b.loss, "kept")...)
	code = append(code, asm.Mov.Imm(asm.R0, drop), asm.Return())
	at := len(code)
	code = append(code, unless(b.duplicate, "once")...)
	code[at] = code[at].WithSymbol("kept")
	code = append(code, asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, int32(straight)), asm.Mov.Imm(asm.R3, 0), asm.FnCloneRedirect.Call())
	at = len(code)
	code = append(code, unless(b.late, "straight")...)
	code[at] = code[at].WithSymbol("once")
	code = append(code, asm.Mov.Imm(asm.R1, int32(detour)), asm.Mov.Imm(asm.R2, 0), asm.FnRedirect.Call(), asm.Return())
	return append(code, asm.Mov.Imm(asm.R0, next).WithSymbol("straight"), asm.Return())
}
