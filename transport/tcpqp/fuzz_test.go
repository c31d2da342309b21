package tcpqp

import (
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// FuzzModel checks that the model holds for all behaviors of streams and paths.
func FuzzModel(f *testing.F) {
	f.Add(uint64(1), uint8(10), uint8(3), uint8(2), true, uint8(20))
	f.Add(uint64(77), uint8(12), uint8(30), uint8(45), false, uint8(7))
	f.Add(uint64(2), uint8(0), uint8(0), uint8(0), false, uint8(0))
	f.Add(uint64(3), uint8(80), uint8(7), uint8(4), true, uint8(100))
	f.Fuzz(func(t *testing.T, seed uint64, death, limit, channels uint8, flap bool, notReady uint8) {
		o := rdmatest.Options{Seed: seed, Ops: 150, Channels: 1 + int(channels%6), MaxSize: 3000, NotReady: float64(notReady%120) / 256}
		if flap {
			o.Flap = 3 * time.Millisecond
		}
		rdmatest.ChannelsOn(t, newSim(seed, float64(death%50)/1000, 1<<(11+limit%8), seed%2 == 0), o)
	})
}

// FuzzStream checks that a peer that sends arbitrary bytes, on a connection in either direction, cannot make the
// endpoint panic, write outside the region, or complete operations without an answer.
func FuzzStream(f *testing.F) {
	put := func(nonce bool, hs ...header) (b []byte) {
		for _, h := range hs {
			var p [maxHeader]byte
			if nonce && h.op == opOpen {
				h.nonce = [nonceSize]byte{1}
			}
			b = append(b, p[:h.put(p[:])]...)
			b = append(b, make([]byte, h.data())...)
		}
		return b
	}
	open := header{op: opOpen, channel: 1, from: 9, epoch: 1}
	f.Add(true, uint16(7), put(true, open, header{op: opWrite, channel: 1, length: 40, key: 1, address: 0},
		header{op: opRead, channel: 1, msn: 1, length: 40, key: 1}, header{op: opFetchAdd, channel: 1, msn: 2, key: 1},
		header{op: opSend, channel: 1, msn: 3, length: 20}, header{op: opWrite, channel: 1, msn: 4, length: 60, key: 1, address: 30}))
	f.Add(true, uint16(3), put(false, open, header{op: opWrite, channel: 1, msn: 3}))
	f.Add(false, uint16(9), put(false, header{op: opAccept, channel: 1, epoch: 1}, header{op: opAck, channel: 1, msn: 1},
		header{op: opReadAnswer, channel: 1, msn: 1, length: 16}, header{op: opAtomicAnswer, channel: 1, msn: 2, swap: 3},
		header{op: opHold, channel: 1, msn: 3}, header{op: opResume, channel: 1, msn: 3}, header{op: opError, channel: 1, status: statusAccess, msn: 3}))
	f.Add(false, uint16(1), put(false, header{op: opAccept, channel: 1, epoch: 1, msn: 99}))
	f.Add(false, uint16(5), put(false, header{op: opRefuse, channel: 1, status: statusGone}))
	f.Fuzz(func(t *testing.T, dialed bool, chunk uint16, script []byte) {
		s := newSim(1, 0, 1<<16, false)
		var host *rdmatest.Host
		region := make([]byte, 100)
		hooks := rdmatest.Hooks{Admit: func(_ rdma.Channel, head []byte, n int) ([]byte, rdma.Verdict) {
			return make([]byte, n), rdma.Verdict(len(head) % 3)
		}}
		completed := 0
		hooks.Complete = func(*rdma.Op, error) { completed++ }
		host, err := s.Open(0, hooks)
		if err != nil {
			t.Fatal(err)
		}
		host.Register(1, 0, region[10:80], rdma.RemoteWrite|rdma.RemoteRead|rdma.RemoteAtomic)
		e := s.ends[0].e
		var k *conn
		edge := &deadEdge{}
		ops := []*rdma.Op{
			{Kind: rdma.OpWrite, Local: make([]byte, 50)}, {Kind: rdma.OpRead, Local: make([]byte, 16)},
			{Kind: rdma.OpFetchAdd, Local: make([]byte, 8)}, {Kind: rdma.OpSend, Local: make([]byte, 50), Head: []byte{1}},
		}
		var ch rdma.Channel
		host.Do(func() {
			ch, _ = host.Channel(rdma.ChannelConfig{Remote: simAddresses[1]})
			c := ch.(*channel)
			c.local.nonce = [nonceSize]byte{1}
			p := &pair{}
			if err := ch.Connect((&parameters{port: Port, id: 9}).put(), []rdma.Path{p.path(0, 61500)}); err != nil {
				t.Fatal(err)
			}
			for _, op := range ops {
				host.Post(ch, op)
			}
			if dialed {
				k = e.accept(edge)
			} else {
				k = c.out0.flow.dialed(edge)
			}
		})
		for n := 1 + int(chunk); len(script) > 0 && k.dead == nil; script = script[min(n, len(script)):] {
			host.Do(func() {
				if b := k.fill(); b != nil {
					k.wrote(1 + n%b.size)
				}
				part := script[:min(n, len(script))]
				for len(part) > 0 && k.dead == nil {
					x, y := k.want()
					d := copy(x, part)
					d += copy(y, part[d:])
					part = part[d:]
					k.got(d)
				}
			})
		}
		if dialed && completed > 0 {
			t.Fatalf("%d operations completed", completed)
		}
		for i, x := range region {
			if x != 0 && (i < 10 || i >= 80) {
				t.Fatalf("byte %d outside of the region was written", i)
			}
		}
		host.Do(func() { host.Close(ch) })
		if err := host.Err(); err != nil {
			t.Fatal(err)
		}
		if completed != len(ops) {
			t.Fatalf("%d operations completed", completed)
		}
	})
}

// deadEdge is an edge that transfers nothing.
type deadEdge struct{}

func (*deadEdge) kick()   {}
func (*deadEdge) settle() {}
func (*deadEdge) close()  {}
