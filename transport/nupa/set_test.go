package nupa_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/fared/fared/transport/nupa"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/wecmp"
)

// TestSets connects two devices whose only plane is memory, and runs every kind of work request on two slots, one of
// which is parked at times. The test waits only for completions, so a missing notification of the transport would stop
// it.
func TestSets(t *testing.T) {
	for _, ordering := range []wecmp.Ordering{wecmp.Weak, wecmp.Partial, wecmp.Strong} {
		t.Run(ordering.String(), func(t *testing.T) { testSets(t, ordering) })
	}
}

func testSets(t *testing.T, ordering wecmp.Ordering) {
	path := filepath.Join(t.TempDir(), "plane")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var devices [2]*rdma.Device
	var cfgs [2]rdma.SetConfig
	for i := range devices {
		d, err := rdma.Open(rdma.Config{Address: netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + i)}),
			Transports: []rdma.Transport{nupa.New(nupa.Config{File: path, Size: 32 << 20, Channels: 8})}})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		cq := d.CreateCQ()
		devices[i], cfgs[i] = d, rdma.SetConfig{PD: d.AllocPD(), SendCQ: cq, RecvCQ: cq, Ordering: ordering}
	}
	slots := func(a, b uint32) []rdma.Slot {
		return []rdma.Slot{{Slot: 0, Plane: "memory", Port: 50000, Share: a}, {Slot: 1, Plane: "memory", Port: 50001, Share: b}}
	}
	a, offer, err := devices[0].Offer(devices[1].Address(), cfgs[0], slots(1, 1))
	if err != nil {
		t.Fatal(err)
	}
	b, answer, err := devices[1].Answer(offer, cfgs[1], slots(1, 1))
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Finish(answer); err != nil {
		t.Fatal(err)
	}
	const size = 256 << 10
	const everything = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead | rdma.RemoteAtomic
	alloc := func(i int) *rdma.MR {
		m, err := cfgs[i].PD.Alloc(size, everything)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	source, back, target := alloc(0), alloc(0), alloc(1)
	defer func() {
		for _, m := range []*rdma.MR{source, back, target} {
			m.Deregister()
		}
	}()
	rng := rand.New(rand.NewPCG(1, 7))
	for i := range source.Bytes() {
		source.Bytes()[i] = byte(rng.Uint32())
	}
	var out [16]rdma.Completion
	wait := func(i, n int) {
		t.Helper()
		for n > 0 {
			k, err := cfgs[i].SendCQ.Wait(ctx, out[:min(n, len(out))])
			if err != nil {
				t.Fatalf("%d completions are missing: %v", n, err)
			}
			for _, c := range out[:k] {
				if c.Err != nil {
					t.Fatal(c.Err)
				}
			}
			n -= k
		}
	}
	post := func(wr rdma.SendWR) {
		t.Helper()
		if _, err := a.PostSend(wr); err != nil {
			t.Fatal(err)
		}
	}
	adds := uint64(0)
	for round := range 300 {
		n := 1 + rng.IntN(size-16)
		local := rdma.SGE{MR: source, Length: n}
		if rng.IntN(4) == 0 {
			n = 1 + rng.IntN(200)
			local.Length = n
		}
		if rng.IntN(3) == 0 {
			if err := a.SetSlots(slots(uint32(round%3), 1)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := b.PostRecv(rdma.RecvWR{Local: rdma.SGE{MR: target, Offset: 8, Length: size - 8}}); err != nil {
			t.Fatal(err)
		}
		post(rdma.SendWR{Opcode: rdma.Write, Local: local, RemoteAddress: target.Address() + 8, RemoteKey: target.Key()})
		post(rdma.SendWR{Opcode: rdma.Read, Fence: true, Local: rdma.SGE{MR: back, Length: n},
			RemoteAddress: target.Address() + 8, RemoteKey: target.Key()})
		post(rdma.SendWR{Opcode: rdma.FetchAdd, Local: rdma.SGE{MR: back, Offset: size - 8, Length: 8},
			RemoteAddress: target.Address(), RemoteKey: target.Key(), Add: 3})
		adds += 3
		post(rdma.SendWR{Opcode: rdma.Send, Local: local, Fence: true})
		wait(0, 4)
		wait(1, 1)
		if !bytes.Equal(back.Bytes()[:n], source.Bytes()[:n]) || !bytes.Equal(target.Bytes()[8:8+n], source.Bytes()[:n]) {
			t.Fatalf("round %d, %d bytes: memory differs", round, n)
		}
		if got := binary.NativeEndian.Uint64(target.Bytes()); got != adds {
			t.Fatalf("round %d: added up to %d, want %d", round, got, adds)
		}
		clear(target.Bytes()[8:])
		clear(back.Bytes())
	}
	if c := devices[0].Counters()["nupa"]; c["direct"] == 0 || c["posted"] == c["direct"] {
		t.Errorf("counted %v", c)
	}
	a.Close()
	b.Close()
}
