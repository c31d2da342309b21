package superp_test

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/superp"
)

// straight carries datagrams from one core to the other without delay, so that only the cost of the cores remains.
type straight struct {
	rdma.Host // unused methods panic
	core      *superp.Core
	from      netip.AddrPort
	now       *time.Duration
	memory    []byte
	wake      time.Duration
	queue     [][]byte
	n         int
	done      int
	failed    error
	body      []byte
}

func (s *straight) Address() netip.Addr    { return s.from.Addr() }
func (s *straight) Now() time.Duration     { return *s.now }
func (s *straight) WakeAt(d time.Duration) { s.wake = d }
func (s *straight) Memory(_ rdma.Channel, _ uint32, address uint64, n int, _ rdma.Access) ([]byte, error) {
	return s.memory[address : address+uint64(n)], nil
}
func (s *straight) FlatMemory(_ rdma.Channel, address uint64, n int, _ rdma.Access) ([]byte, error) {
	return s.memory[uint32(address) : uint64(uint32(address))+uint64(n)], nil
}
func (s *straight) Atomic(rdma.Channel, rdma.OpKind, uint32, uint64, uint64, uint64) (uint64, error) {
	return 0, nil
}
func (s *straight) Admit(rdma.Channel, []byte, int) ([]byte, rdma.Verdict) {
	return s.body, rdma.Accepted
}
func (s *straight) Deliver(rdma.Channel, []byte)            {}
func (s *straight) Room(rdma.Channel)                       {}
func (s *straight) Stalled(rdma.Channel, int, bool)         {}
func (s *straight) Failed(_ rdma.Channel, err error)        { s.failed = err }
func (s *straight) Next(netip.AddrPort, uint16, int) uint16 { return 0 }

func (s *straight) Complete(_ *rdma.Op, err error) {
	s.done++
	if err != nil {
		s.failed = err
	}
}

func (s *straight) Send(_ netip.AddrPort, _ uint16, head, payload, tail []byte) {
	if s.n == len(s.queue) {
		s.queue = append(s.queue, make([]byte, 0, 4096))
	}
	b := append(s.queue[s.n][:0], head...)
	b = append(b, payload...)
	s.queue[s.n] = append(b, tail...)
	s.n++
}

// pair is two of them with a connection.
type pair struct {
	ends  [2]*straight
	chans [2]rdma.Channel
	ops   []rdma.Op
	sent  uint64 // packets
}

func newPair(t testing.TB, ordered bool, op rdma.Op, inFlight int) *pair {
	p, now := &pair{}, time.Second
	for i := range p.ends {
		s := &straight{from: netip.AddrPortFrom(addresses[i], 50000), now: &now, memory: make([]byte, 1<<20), body: make([]byte, len(op.Local))}
		s.core = superp.NewCore(superp.Config{FirstCID: 1}, s)
		if err := s.core.Start(s); err != nil {
			t.Fatal(err)
		}
		var err error
		if p.chans[i], err = s.core.Channel(rdma.ChannelConfig{Remote: addresses[1-i], Ordered: ordered}); err != nil {
			t.Fatal(err)
		}
		p.ends[i] = s
	}
	for i, ch := range p.chans {
		if err := ch.Connect(p.chans[1-i].Local(), eightPaths()); err != nil {
			t.Fatal(err)
		}
	}
	for range inFlight {
		op := op
		op.Local = make([]byte, len(op.Local))
		p.ops = append(p.ops, op)
	}
	return p
}

// eightPaths returns paths with shares 1, 2, 3, 1, 2, ...
func eightPaths() (paths []rdma.Path) {
	for k := range 8 {
		paths = append(paths, rdma.Path{Slot: k, Port: uint16(50000 + k), Share: uint32(1 + k%3), Sent: new(atomic.Uint64), Again: new(atomic.Uint64)})
	}
	return paths
}

// round posts all operations and carries packets until all have completed.
func (p *pair) round(t testing.TB) {
	*p.ends[0].now += time.Microsecond
	want := p.ends[0].done + len(p.ops)
	for i := range p.ops {
		if !p.chans[0].Post(&p.ops[i]) {
			t.Fatal("full")
		}
	}
	for p.ends[0].done < want {
		moved := false
		for i, s := range p.ends {
			s.core.Flush()
			for _, b := range s.queue[:s.n] {
				p.ends[1-i].core.Receive(s.from, b)
			}
			moved = moved || s.n > 0
			p.sent += uint64(s.n)
			s.n = 0
		}
		if !moved {
			*p.ends[0].now += 200 * time.Microsecond // a delayed acknowledgement
			for _, s := range p.ends {
				if s.wake != 0 && s.wake <= *s.now {
					s.core.Tick()
				}
			}
		}
		if p.ends[0].failed != nil {
			t.Fatal(p.ends[0].failed)
		}
	}
}

var costs = []struct {
	name string
	op   rdma.Op
}{
	{"write 64 KiB", rdma.Op{Kind: rdma.OpWrite, Key: 1, Local: make([]byte, 64<<10)}},
	{"write 64 B", rdma.Op{Kind: rdma.OpWrite, Key: 1, Local: make([]byte, 64)}},
	{"read 64 KiB", rdma.Op{Kind: rdma.OpRead, Key: 1, Local: make([]byte, 64<<10)}},
	{"send 4 KiB", rdma.Op{Kind: rdma.OpSend, Head: make([]byte, 20), Local: make([]byte, 4<<10)}},
	{"fetch-add", rdma.Op{Kind: rdma.OpFetchAdd, Key: 1, Local: make([]byte, 8)}},
}

// TestSteadyStateAllocatesNothing checks that an operation does not allocate once the queues have grown.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	for _, x := range costs {
		for _, ordered := range []bool{false, true} {
			p := newPair(t, ordered, x.op, 16)
			for range 100 / scale {
				p.round(t)
			}
			if n := testing.AllocsPerRun(50/scale, func() { p.round(t) }); n != 0 {
				t.Errorf("%s, ordered %v: %v allocations for %d operations", x.name, ordered, n, len(p.ops))
			}
		}
	}
}

// BenchmarkCore measures the cost of both cores together, including the copies of the payload (one into the datagram,
// one to its destination).
func BenchmarkCore(b *testing.B) {
	for _, x := range costs {
		for _, ordered := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/ordered=%v", x.name, ordered), func(b *testing.B) {
				p := newPair(b, ordered, x.op, 32)
				b.ReportAllocs()
				b.SetBytes(int64(len(x.op.Local)) * int64(len(p.ops)))
				p.sent = 0
				for b.Loop() {
					p.round(b)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(p.sent), "ns/packet")
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(p.ops)), "ns/operation")
			})
		}
	}
}
