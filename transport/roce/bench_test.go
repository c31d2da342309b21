package roce

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

// end is one of two cores connected by a lossless wire, with its host. The host does minimal work, so that the
// benchmark measures the core.
type end struct {
	*Core
	address netip.Addr
	memory  []byte
	now     time.Duration
	done    int
	body    []byte
	ch      rdma.Channel

	from     netip.AddrPort
	wire     [][]byte // packets in flight; their memory is reused
	n        int
	position uint16 // in a batch, as UDP_SEGMENT makes them
	length   int
}

func (e *end) Send(to netip.AddrPort, port uint16, head, payload, tail []byte) {
	length := len(head) + len(payload) + len(tail)
	e.position, e.length = e.Next(to, port, length)+1, length
	if e.n == len(e.wire) {
		e.wire = append(e.wire, make([]byte, 0, maxDatagram))
	}
	e.wire[e.n] = append(append(append(e.wire[e.n][:0], head...), payload...), tail...)
	e.n++
	e.from = netip.AddrPortFrom(e.address, port)
}

func (e *end) Next(_ netip.AddrPort, _ uint16, length int) uint16 {
	if e.position < 63 && e.length == length {
		return e.position
	}
	return 0
}

func (e *end) WakeAt(time.Duration) {}

// carry moves the packets sent by e to the other end, in turns as recvmmsg makes them, and returns their number.
func (e *end) carry(to *end) int {
	n := e.n
	for i, p := range e.wire[:n] {
		to.Receive(e.from, p)
		if i%64 == 63 {
			to.Flush()
		}
	}
	e.n, e.position = 0, 0
	to.Flush()
	return n
}

func (e *end) Address() netip.Addr { return e.address }
func (e *end) Now() time.Duration  { e.now++; return e.now }
func (e *end) Do(f func())         { f() }
func (e *end) Memory(_ rdma.Channel, _ uint32, address uint64, n int, _ rdma.Access) ([]byte, error) {
	return e.memory[address : address+uint64(n)], nil
}
func (e *end) Atomic(rdma.Channel, rdma.OpKind, uint32, uint64, uint64, uint64) (uint64, error) {
	return 0, nil
}
func (e *end) Admit(_ rdma.Channel, _ []byte, n int) ([]byte, rdma.Verdict) {
	return e.body, rdma.Accepted
}
func (e *end) Deliver(rdma.Channel, []byte) {}
func (e *end) Complete(_ *rdma.Op, err error) {
	if err != nil {
		panic(err)
	}
	e.done++
}
func (e *end) Return(*rdma.Op)                 {}
func (e *end) Room(rdma.Channel)               {}
func (e *end) Stalled(rdma.Channel, int, bool) {}
func (e *end) Failed(rdma.Channel, error)      {}

func newEnds(t testing.TB, cfg Config, addresses [2]string) [2]*end {
	var ends [2]*end
	for i := range ends {
		e := &end{address: netip.MustParseAddr(addresses[i]), memory: make([]byte, 1<<20), now: time.Second}
		e.Core = NewCore(cfg, e)
		if err := e.Start(e); err != nil {
			t.Fatal(err)
		}
		ends[i] = e
	}
	for i, e := range ends {
		var err error
		if e.ch, err = e.Channel(rdma.ChannelConfig{Remote: ends[1-i].address}); err != nil {
			t.Fatal(err)
		}
	}
	for i, e := range ends {
		if err := e.ch.Connect(ends[1-i].ch.Local(), []rdma.Path{{Port: 50000, Share: 1, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}}); err != nil {
			t.Fatal(err)
		}
	}
	return ends
}

// run executes an operation eight times concurrently, and returns the number of packets in both directions.
func (e *end) run(to *end, op *rdma.Op) (packets int) {
	want := e.done + 8
	for range 8 {
		if !e.ch.Post(op) {
			panic("no room")
		}
	}
	e.Flush()
	for e.done < want {
		packets += e.carry(to) + to.carry(e)
	}
	return packets
}

var families = [][2]string{{"10.255.0.1", "10.255.0.2"}, {"fd00:255::1", "fd00:255::2"}}

func benchmarkOps() map[string]*rdma.Op {
	return map[string]*rdma.Op{
		"WRITE/60KiB": {Kind: rdma.OpWrite, Local: make([]byte, 60<<10)},
		"WRITE/8":     {Kind: rdma.OpWrite, Local: make([]byte, 8)},
		"READ/60KiB":  {Kind: rdma.OpRead, Local: make([]byte, 60<<10)},
		"SEND/60KiB":  {Kind: rdma.OpSend, Head: make([]byte, rdma.HeadSize), Local: make([]byte, 60<<10)},
		"FetchAdd":    {Kind: rdma.OpFetchAdd, Local: make([]byte, 8)},
	}
}

func BenchmarkCore(b *testing.B) {
	for _, mtu := range []int{1024, 4096} {
		for f, family := range families {
			for name, op := range benchmarkOps() {
				b.Run(fmt.Sprintf("MTU=%d/IPv%d/%s", mtu, 4+2*f, name), func(b *testing.B) {
					ends := newEnds(b, Config{MTU: mtu}, family)
					ends[1].body = op.Local
					ends[0].run(ends[1], op)
					packets := 0
					b.SetBytes(int64(8 * len(op.Local)))
					b.ReportAllocs()
					for b.Loop() {
						packets += ends[0].run(ends[1], op)
					}
					b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(packets), "ns/packet")
				})
			}
		}
	}
}

// TestNothingIsAllocated checks that in the steady state no operation allocates.
func TestNothingIsAllocated(t *testing.T) {
	for _, family := range families {
		for name, op := range benchmarkOps() {
			ends := newEnds(t, Config{}, family)
			ends[1].body = op.Local
			for range 10 { // until the window is open
				ends[0].run(ends[1], op)
			}
			if n := testing.AllocsPerRun(20, func() { ends[0].run(ends[1], op) }); n != 0 {
				t.Errorf("%s: %v allocations", name, n)
			}
		}
	}
}
