package transports

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/interop/transports/superppeer"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

// stranger is a connection of transport/superp with one of superppeer, over UDP on the loopback.
type stranger struct {
	t         *testing.T
	host      *rdmatest.Host
	transport *superp.Transport
	conn      *superp.Connection
	peer      *superppeer.Peer
	region    *superppeer.Region // the peer's memory
	memory    []byte             // this end's
	// The host's calls, under mu.
	mu        sync.Mutex
	completed chan error
	delivered chan []byte
	failed    chan error

	leastWrite, headSize int
}

const (
	strangerPort    = 24447
	strangerHead    = 12
	strangerCID     = 0x4711
	strangerKey     = 0xfeedf00d
	strangerAddress = 0x7f0000001000
	ownAddress      = 1 << 40
	ownKey          = 0x80000001
	window          = 32 // of psns and of XIDs: the description's default
	strangerType    = 0x88b5
)

// medium carries the packets between a stranger's ends.
type medium struct {
	own, other netip.Addr
	cfg        superp.Config
	sunh       *superppeer.SUNH // nil: UDP on the loopback
	inOwn      func(func() error) error
	inOther    func(func() error) error
	path       rdma.Path
}

func overUDP(*testing.T) medium {
	here := func(f func() error) error { return f() }
	return medium{own: netip.MustParseAddr("127.88.77.1"), other: netip.MustParseAddr("127.88.77.2"), inOwn: here, inOther: here, path: rdma.Path{Port: 51234, Share: 1},
		cfg: superp.Config{TrafficClass: 0x48}}
}

// overSUNH returns a cable between two namespaces, whose devices have no addresses.
func overSUNH(t *testing.T) medium {
	netnstest.Require(t)
	w := newWires(t, 1)
	m := medium{own: w.address[0], other: w.address[1], inOwn: w.space[0].Do, inOther: w.space[1].Do, path: rdma.Path{Port: 51234, Share: 1, Device: wire(0)},
		cfg: superp.Config{TrafficClass: 0x48, SUNH: superp.SUNHConfig{Subnet: netip.MustParsePrefix("10.23.0.0/16"), EtherType: strangerType}}}
	m.sunh = &superppeer.SUNH{Device: wire(0), MAC: w.mac(), EtherType: strangerType, Label: 51234 & 0xfff, TrafficClass: 0x48}
	return m
}

func newStranger(t *testing.T, m medium, loss, reorder float64, ordered bool) *stranger {
	t.Helper()
	s := &stranger{t: t, completed: make(chan error, 1000), delivered: make(chan []byte, 1000), failed: make(chan error, 10), memory: make([]byte, 1<<20)}
	own, other := m.own, m.other
	if loss > 0 {
		m.cfg.FirstPSN = ^uint32(0) - 100 // the psns wrap in the middle of the test
	}
	m.cfg.Port, m.cfg.Timing = strangerPort, rdma.Timing{Retransmit: 10 * time.Millisecond}
	s.leastWrite, s.headSize = m.cfg.SUNH.MinWrite(), max(strangerHead, m.cfg.SUNH.MinMessage())
	m.cfg.HeadSize = s.headSize
	s.transport = superp.New(m.cfg)
	start := time.Now()
	hooks := rdmatest.Hooks{
		Admit: func(_ rdma.Channel, head []byte, _ int) ([]byte, rdma.Verdict) {
			return make([]byte, binary.LittleEndian.Uint32(head)), rdma.Accepted
		},
		Deliver:  func(_ rdma.Channel, _, body []byte) { s.delivered <- body },
		Complete: func(_ *rdma.Op, err error) { s.completed <- err },
		Failed:   func(_ rdma.Channel, err error) { s.failed <- err },
	}
	err := m.inOwn(func() (err error) {
		s.host, err = rdmatest.NewHost(own, s.transport, func() time.Duration { return time.Since(start) }, &s.mu, hooks)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.transport.Stop)
	s.host.Register(ownKey, ownAddress, s.memory, rdma.RemoteRead|rdma.RemoteWrite)
	ch, err := s.transport.Channel(rdma.ChannelConfig{Remote: other, Ordered: ordered})
	if err != nil {
		t.Fatal(err)
	}
	s.conn = ch.(*superp.Connection)
	local, le := s.conn.Local(), binary.LittleEndian
	err = m.inOther(func() (err error) {
		s.peer, err = superppeer.Open(superppeer.Config{Local: netip.AddrPortFrom(other, strangerPort), Remote: netip.AddrPortFrom(own, strangerPort),
			CID: strangerCID, RemoteCID: s.conn.CID(), Key: strangerKey, RemoteKey: le.Uint32(local[14:]), Window: window, Transactions: window,
			Payload: 1024, Ordered: ordered, SUNH: m.sunh, TrafficClass: m.cfg.TrafficClass, FirstPSN: m.cfg.FirstPSN, Loss: loss, Reorder: reorder})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.peer.Close()
		if err := s.peer.Violations(); err != nil {
			t.Errorf("packets that violate the description: %v", err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if err := s.host.Err(); err != nil {
			t.Error(err)
		}
		for _, name := range []string{"malformed", "protocol_errors", "unknown_cid"} {
			if n := s.transport.Core.Counters()[name]; n > 0 {
				t.Errorf("%s: %d", name, n)
			}
		}
	})
	s.region = &superppeer.Region{Address: strangerAddress, Bytes: make([]byte, 1<<20), Read: true, Write: true}
	s.peer.Register(s.region)
	// The peer's end of the out-of-band exchange.
	remote := bytes.Clone(local)
	le.PutUint16(remote[2:], strangerCID)
	le.PutUint16(remote[8:], window)
	le.PutUint16(remote[12:], window)
	le.PutUint32(remote[14:], strangerKey)
	m.path.Sent, m.path.Again = new(atomic.Uint64), new(atomic.Uint64)
	s.host.Do(func() { err = s.conn.Connect(remote, []rdma.Path{m.path}) })
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func await[T any](s *stranger, what string, c chan T) T {
	s.t.Helper()
	select {
	case x := <-c:
		return x
	case <-time.After(time.Minute):
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.t.Fatalf("no %s; counters %v; violations %v", what, s.transport.Counters(), s.peer.Violations())
	panic("unreachable")
}

// post posts an operation.
func (s *stranger) post(op *rdma.Op) {
	netnstest.Eventually(s.t, time.Minute, func() error {
		ok := false
		s.host.Do(func() { ok = s.host.Post(s.conn, op) })
		if !ok {
			return errors.New("no room for an operation")
		}
		return nil
	})
}

func (s *stranger) do(op rdma.Op) error {
	s.t.Helper()
	what := fmt.Sprintf("completion of kind %d, %d bytes", op.Kind, len(op.Local))
	s.post(&op)
	return await(s, what, s.completed)
}

// call runs a blocking call of the peer.
func (s *stranger) call(what string, f func() error) error {
	s.t.Helper()
	c := make(chan error, 1)
	go func() { c <- f() }()
	return await(s, what, c)
}

func (s *stranger) head(n, id int) []byte {
	b := make([]byte, s.headSize)
	binary.LittleEndian.PutUint32(b, uint32(n))
	binary.LittleEndian.PutUint64(b[4:], uint64(id))
	return b
}

// TestStrangerOfSUPERp checks reads, writes, messages, No-ops, refusals and the orderly shutdown between
// transport/superp and an implementation that shares no code with it, in both roles, with and without loss and
// reordering. The peer records each violation.
func TestStrangerOfSUPERp(t *testing.T) {
	strangers(t, overUDP, 35, []faults{{0.1, 0.1}, {0, 0}, {0, 0.2}}[:gate.Count(t, gate.Models, 1, 3)]...)
}

// TestStrangerOverLite checks the same over SUPERp-lite, whose packets have no packet delivery layer.
func TestStrangerOverLite(t *testing.T) {
	strangers(t, overLite, 35, faults{0, 0})
}

// overLite is overSUNH without the packet delivery layer.
func overLite(t *testing.T) medium {
	m := overSUNH(t)
	m.cfg.SUNH.Lite, m.sunh.Lite = true, true
	return m
}

// TestStrangerOverSUNH checks the same over SUNH, between two network namespaces. The peer builds its frames itself,
// and fills short ones with noise. It checks the Ethernet and SUNH headers of every frame, including the flow label and
// the minimum length.
func TestStrangerOverSUNH(t *testing.T) {
	gate.Slow(t, gate.Models, "a second encapsulation")
	strangers(t, overSUNH, 37, faults{0, 0}, faults{0.1, 0.1}) // two WRITEs of a byte or two are in their packets twice
}

// faults are probabilities, in each direction.
type faults struct{ loss, reorder float64 }

// strangers runs all operations over a medium. refused is the number of operations that transport/superp refuses.
func strangers(t *testing.T, over func(*testing.T) medium, refused uint64, all ...faults) {
	for _, x := range all {
		for _, ordered := range []bool{false, true} {
			t.Run(fmt.Sprintf("loss=%v/reorder=%v/ordered=%v", x.loss, x.reorder, ordered), func(t *testing.T) {
				s := newStranger(t, over(t), x.loss, x.reorder, ordered)
				s.asInitiator()
				s.asTarget(refused)
				s.together()
				s.shutDown()
			})
		}
	}
}

// asInitiator runs operations of transport/superp.
func (s *stranger) asInitiator() {
	t := s.t
	messages := 0
	for i, n := range sizes {
		if n > 60_000 {
			n = 60_000
		}
		want := pattern(max(n, s.leastWrite), i)
		if err := s.do(rdma.Op{Kind: rdma.OpWrite, Remote: strangerAddress + 4096, Local: want}); err != nil {
			t.Fatalf("WRITE of %d bytes: %v", n, err)
		}
		if got := s.peer.Memory(s.region, 4096, len(want)); !bytes.Equal(got, want) {
			t.Errorf("WRITE of %d bytes differs", n)
		}
		want = want[:n]
		got := make([]byte, n)
		if err := s.do(rdma.Op{Kind: rdma.OpRead, Remote: strangerAddress + 4096, Local: got}); err != nil || !bytes.Equal(got, want) {
			t.Errorf("READ of %d bytes: %v", n, err)
		}
		if err := s.do(rdma.Op{Kind: rdma.OpSend, Head: s.head(n, i), Local: want}); err != nil {
			t.Fatalf("SEND of %d bytes: %v", n, err)
		}
		messages++
		if all := s.peer.Messages(); len(all) != messages || !bytes.Equal(all[messages-1], append(s.head(n, i), want...)) {
			t.Fatalf("SEND of %d bytes: %d messages, or another one", n, len(all))
		}
	}
	for name, op := range map[string]rdma.Op{
		"WRITE before the region":  {Kind: rdma.OpWrite, Remote: strangerAddress - 1, Local: make([]byte, max(8, s.leastWrite))},
		"READ beyond the region":   {Kind: rdma.OpRead, Remote: strangerAddress + 1<<20 - 4, Local: make([]byte, 8)},
		"short WRITE, no region":   {Kind: rdma.OpWrite, Remote: 8, Local: make([]byte, max(1, s.leastWrite))},
		"WRITE with another's key": {Kind: rdma.OpWrite, Key: 1, Remote: strangerAddress, Local: make([]byte, max(8, s.leastWrite))},
		"atomic":                   {Kind: rdma.OpFetchAdd, Remote: strangerAddress, Local: make([]byte, 8)},
	} {
		if err := s.do(op); !errors.Is(err, rdma.ErrRemoteAccess) && (name != "atomic" || !errors.Is(err, rdma.ErrRemoteInvalid)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// asTarget runs operations of the peer.
func (s *stranger) asTarget(refused uint64) {
	t := s.t
	own := rdma.FlatAddress(ownKey, ownAddress)
	for i, n := range sizes {
		if n > 30_000 {
			n = 30_000 // 32 packets of a transaction
		}
		want := pattern(max(n, s.leastWrite), i+100)
		if err := s.call("WRITE", func() error { return s.peer.Write(own+512, want) }); err != nil {
			t.Fatalf("WRITE of %d bytes by the peer: %v", n, err)
		}
		s.mu.Lock()
		if !bytes.Equal(s.memory[512:][:len(want)], want) {
			t.Errorf("WRITE of %d bytes by the peer differs", n)
		}
		s.mu.Unlock()
		want = want[:n]
		if err := s.call("READ", func() error {
			got, err := s.peer.Read(own+512, n)
			if err == nil && !bytes.Equal(got, want) {
				err = errors.New("the bytes differ")
			}
			return err
		}); err != nil {
			t.Errorf("READ of %d bytes by the peer: %v", n, err)
		}
		message := append(s.head(n, 1000+i), want...)
		if err := s.call("SEND", func() error { return s.peer.Send(message) }); err != nil {
			t.Fatalf("SEND of %d bytes by the peer: %v", n, err)
		}
		if got := await(s, "message", s.delivered); !bytes.Equal(got, want) {
			t.Errorf("SEND of %d bytes by the peer arrives with %d", n, len(got))
		}
		if n < 1000 {
			if err := s.call("SEND", func() error { return s.peer.SendQP(uint32(s.conn.CID()), append(s.head(n, 2000+i), want...)) }); err != nil {
				t.Fatalf("Send to queue pair of %d bytes by the peer: %v", n, err)
			}
			if got := await(s, "message", s.delivered); !bytes.Equal(got, want) {
				t.Errorf("Send to queue pair of %d bytes by the peer arrives with %d", n, len(got))
			}
		}
	}
	if err := s.call("WRITEs", func() error {
		rest := make([]byte, max(0, s.leastWrite-4))
		return s.peer.WriteMany([]uint64{own, own + 100, own + 200}, [][]byte{append([]byte("one1"), rest...), append([]byte("two2"), rest...), append([]byte("tri3"), rest...)})
	}); err != nil {
		t.Errorf("three WRITEs in a packet: %v", err)
	}
	s.mu.Lock()
	if got := string(s.memory[:4]) + string(s.memory[100:104]) + string(s.memory[200:204]); got != "one1two2tri3" {
		t.Errorf("three WRITEs in a packet: %q", got)
	}
	s.mu.Unlock()
	for range 2 * window { // more than the window of XIDs
		if err := s.call("No-op", s.peer.NoOp); err != nil {
			t.Fatalf("No-op: %v", err)
		}
	}
	extra := 2 * s.leastWrite
	for name, f := range map[string]func() error{
		"WRITE without the key":   func() error { return s.peer.Write(ownAddress, make([]byte, 1+extra)) },
		"WRITE beyond the region": func() error { return s.peer.Write(own+1<<20-1, make([]byte, 2+extra)) },
		"WRITE of many packets":   func() error { return s.peer.Write(own+1<<20, make([]byte, 30_000)) },
		"READ before the region":  func() error { _, err := s.peer.Read(own-1, 2); return err },
		"READ of too much":        func() error { _, err := s.peer.Read(own, 1<<20+1); return err },
		"message to a foreign pair": func() error {
			return s.peer.SendQP(uint32(s.conn.CID())^1, s.head(0, 1))
		},
	} {
		var refused *superppeer.Error
		if err := s.call(name, f); !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	s.mu.Lock()
	if n := s.transport.Core.Counters()["refused_operations"]; n != refused {
		t.Errorf("%d refused operations are counted, want %d", n, refused)
	}
	s.mu.Unlock()
}

// together runs operations of both ends at the same time, many more than the windows hold.
func (s *stranger) together() {
	const count, size = 200, 3000
	own := rdma.FlatAddress(ownKey, ownAddress)
	results := make(chan error, count)
	for i := range count {
		go func() { results <- s.peer.Write(own+uint64(i*size), pattern(size, i)) }()
	}
	for i := range count {
		s.post(&rdma.Op{Kind: rdma.OpWrite, Remote: strangerAddress + uint64(i*size), Local: pattern(size, i+7)})
	}
	for range count {
		if err := errors.Join(await(s, "completion", s.completed), await(s, "completion of the peer", results)); err != nil {
			s.t.Fatal(err)
		}
	}
	theirs := s.peer.Memory(s.region, 0, count*size)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range count {
		if !bytes.Equal(theirs[i*size:][:size], pattern(size, i+7)) || !bytes.Equal(s.memory[i*size:][:size], pattern(size, i)) {
			s.t.Fatalf("WRITE %d differs", i)
		}
	}
}

// shutDown ends the connection in an orderly way, from both ends.
func (s *stranger) shutDown() {
	s.host.Do(func() { s.conn.Shutdown(true) })
	if err := s.call("shutdown", s.peer.Shutdown); err != nil {
		s.t.Errorf("shutdown: %v", err)
	}
	if err := await(s, "end", s.failed); !errors.Is(err, superp.ErrShutdown) {
		s.t.Errorf("the connection ends with %v", err)
	}
	s.host.Do(func() { s.host.Close(s.conn) })
}
