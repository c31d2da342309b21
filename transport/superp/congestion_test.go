package superp_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

// TestEcho checks that an end reports marked packets by the reserved bits of the TAL header if both ends agree on it,
// and otherwise sends these bits as 0.
func TestEcho(t *testing.T) {
	b := newBench(t, superp.Config{}, []rdmatest.Plane{{Delay: 10 * time.Microsecond, Inbound: rdmatest.Link{Rate: 100e6, Mark: 1}}}, false)
	for _, agreed := range []bool{true, false} {
		if !agreed { // a second connection, whose ends have received data without the flag
			for i := range 2 {
				ch, err := b.cores[i].Channel(rdma.ChannelConfig{Remote: addresses[1-i]})
				if err != nil {
					t.Fatal(err)
				}
				b.chans[i] = ch.(*superp.Connection)
			}
			for i := range 2 {
				b.hosts[i].Do(func() {
					local := b.chans[1-i].Local()
					local[1] &^= 4
					if err := b.chans[i].Connect(local, b.paths[i]); err != nil {
						t.Fatal(err)
					}
				})
			}
		}
		echoes := 0
		b.onPacket = func(from netip.Addr, p *superp.Packet) {
			if p.TAL.Reserved > 1 || p.TAL.Reserved == 1 && !agreed {
				t.Errorf("reserved bits %#x from %v", p.TAL.Reserved, from)
			}
			if p.TAL.Reserved == 1 && from == addresses[1] {
				echoes++
			}
		}
		before, marked := b.cores[0].Counters()["marks_echoed"], b.cores[1].Counters()["packets_marked"]
		b.completed[0] = nil
		b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 32<<10)})
		b.until("a WRITE", func() bool { return len(b.completed[0]) == 1 })
		if b.cores[1].Counters()["packets_marked"] == marked {
			t.Fatal("no packet was marked")
		}
		if got := b.cores[0].Counters()["marks_echoed"] - before; (echoes > 0) != agreed || got != uint64(echoes) {
			t.Errorf("agreed %v: %d packets with an echo, %d counted", agreed, echoes, got)
		}
	}
}

// TestDeadPathIsNoCongestion checks that the packets lost on a plane that fails do not reduce the window, and that
// those lost on a plane that delivers others do.
func TestDeadPathIsNoCongestion(t *testing.T) {
	plane := rdmatest.Plane{Delay: 10 * time.Microsecond, Rate: 20e6} // slow: acknowledgements show that packets are missing before the path is stalled
	b := newBench(t, superp.Config{Timing: rdma.Timing{Stall: 20 * time.Millisecond}}, []rdmatest.Plane{plane, plane}, false)
	posted := 0
	run := func(d time.Duration) {
		b.net.Run(func() bool {
			for posted-len(b.completed[0]) < 4 {
				b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 16<<10)})
				posted++
			}
			return false
		}, b.net.Now()+d)
	}
	run(10 * time.Millisecond)
	b.net.SetPlane(0, false)
	run(100 * time.Millisecond)
	b.net.SetPlane(0, true)
	run(300 * time.Millisecond)
	if c := b.cores[0].Counters(); c["stalls"] == 0 || c["retransmitted"] == 0 || c["window_cuts"] > 0 {
		t.Errorf("a dead plane: %v", c)
	}
	plane.Loss = 0.05
	b.net.SetQuality(0, plane)
	run(10 * time.Millisecond)
	if c := b.cores[0].Counters(); c["window_cuts"] == 0 {
		t.Errorf("a plane that drops: %v", c)
	}
}
