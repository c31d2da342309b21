package rdmatest_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/roce"
	"github.com/fared/fared/transport/superp"
	"github.com/fared/fared/wecmp"
)

// TestTunnels checks that when every plane of one transport fails for good, the operations in flight on its channels
// are executed once, over the other transport.
func TestTunnels(t *testing.T) {
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
		for dying, name := range map[int]string{0: "RoCE by SUPERp", 2: "SUPERp by RoCE"} {
			for _, loss := range []float64{0, 0.05} {
				t.Run(fmt.Sprintf("%v/%s/loss=%v", ordering, name, loss), func(t *testing.T) {
					for seed := range uint64(max(1, 8/effort)) {
						tunnels(t, seed, ordering, dying, loss)
					}
				})
			}
		}
	}
}

// tunnels fails planes dying and dying+1, all planes of one transport, while work requests are in flight in both
// directions.
func tunnels(t *testing.T, seed uint64, ordering wecmp.Ordering, dying int, loss float64) {
	t.Helper()
	config := rdmatest.NetConfig{Seed: seed}
	for range 4 {
		config.Planes = append(config.Planes, rdmatest.Plane{Delay: 10 * time.Microsecond, Jitter: 5 * time.Microsecond, Loss: loss})
	}
	n := rdmatest.NewNet(config)
	rng := rand.New(rand.NewPCG(seed, 8))
	var slots []rdma.Slot
	for i := range 4 {
		slots = append(slots, rdma.Slot{Slot: i, Plane: string(rune('A' + i)), Port: uint16(61440 + i), Share: wecmp.Parts / 4})
	}
	var devices [2]*rdma.Device
	for i := range devices {
		at := netip.AddrFrom4([4]byte{10, 255, 0, byte(1 + i)})
		a := n.Transport(netip.AddrPortFrom(at, roce.DefaultPort), func(out wire.Out) rdmatest.Core { return roce.NewCore(roce.Config{}, out) })
		b := n.Transport(netip.AddrPortFrom(at, superp.DefaultPort), func(out wire.Out) rdmatest.Core { return superp.NewCore(superp.Config{}, out) })
		d, err := rdma.Open(rdma.Config{Address: at, Transports: []rdma.Transport{a, b}, Planes: map[string]string{"C": b.Name(), "D": b.Name()}, Clock: n.Now})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		devices[i] = d
	}
	e := rdmatest.Connect(t, devices, rdma.SetConfig{Ordering: ordering, SegmentSize: 2048}, rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteAtomic, [2]int{1 << 20, 1 << 20}, [2][]rdma.Slot{slots, slots})
	sets, memory := e.Sets, e.Memory
	adds, writes := uint64(0), 0
	var completed [2]int
	batch := make([]rdma.Completion, 64)
	poll := func() {
		for i, cq := range e.CQs {
			for k := cq.Poll(batch); k > 0; k = cq.Poll(batch) {
				for _, c := range batch[:k] {
					if c.Err != nil {
						t.Fatalf("seed %d: %v: %v", seed, c.Opcode, c.Err)
					}
				}
				completed[i] += k
			}
		}
	}
	until := func(done func() bool) {
		t.Helper()
		if !n.Run(func() bool { poll(); return done() }, n.Now()+20*time.Second) {
			t.Fatalf("seed %d: %v completed of %d each: %v %v", seed, completed, writes+int(adds), devices[0].Counters(), devices[1].Counters())
		}
	}
	post := func(rounds int) {
		for range rounds {
			size := 1 + rng.IntN(9000)
			for i, s := range sets {
				peer := memory[1-i]
				at := 8192 + writes*9000
				copy(memory[i].Bytes()[500_000+at:], bytes.Repeat([]byte{byte(writes + i + 1)}, size))
				_, err := s.PostSend(
					rdma.SendWR{Opcode: rdma.Write, Local: rdma.SGE{MR: memory[i], Offset: 500_000 + at, Length: size}, RemoteAddress: peer.Address() + uint64(at), RemoteKey: peer.Key(), OrderKey: rng.Uint64()},
					rdma.SendWR{Opcode: rdma.FetchAdd, Local: rdma.SGE{MR: memory[i], Offset: 16, Length: 8}, RemoteAddress: peer.Address(), RemoteKey: peer.Key(), Add: 1, OrderKey: rng.Uint64()})
				if err != nil {
					t.Fatal(err)
				}
			}
			writes++
			adds++
		}
	}
	all := func() bool { return completed[0] == writes+int(adds) && completed[1] == completed[0] }
	n.Run(func() bool { return false }, n.Now()+time.Millisecond) // the ends have connected
	post(20)
	until(func() bool { return completed[0] >= 5 })
	n.SetPlane(dying, false)
	n.SetPlane(dying+1, false)
	parked := append([]rdma.Slot(nil), slots...)
	parked[dying].Share, parked[dying+1].Share = 0, 0
	for i, s := range sets {
		n.Run(func() bool { return false }, n.Now()+time.Duration(rng.IntN(5000))*time.Microsecond)
		if err := s.SetSlots(parked); err != nil {
			t.Fatalf("end %d: %v", i, err)
		}
	}
	post(10)
	until(all)
	n.SetPlane(dying, true)
	n.SetPlane(dying+1, true)
	for _, s := range sets {
		if err := s.SetSlots(slots); err != nil {
			t.Fatal(err)
		}
	}
	post(10)
	until(all)
	for i, m := range memory {
		if got := rdma.Uint64(m.Bytes()); got != adds {
			t.Errorf("seed %d: word of end %d is %d after %d additions", seed, i, got, adds)
		}
		from, to := memory[1-i].Bytes()[500_000+8192:][:writes*9000], m.Bytes()[8192:][:writes*9000]
		if !bytes.Equal(from, to) {
			t.Errorf("seed %d: what end %d was sent is not in memory", seed, i)
		}
	}
}
