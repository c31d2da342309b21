package tcpqp

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

const (
	testKey    = 7
	testBase   = 1 << 20
	testMemory = 4 << 20
)

// pair is two hosts on sockets with one channel between them; each has one region of memory.
type pair struct {
	t          testing.TB
	mu         sync.Mutex // shared by both hosts
	transports [2]*Transport
	hosts      [2]*rdmatest.Host
	memory     [2][]byte
	channels   [2]rdma.Channel
	sent       [2]atomic.Uint64
	again      [2]atomic.Uint64

	// Guarded by the lock.
	done     map[*rdma.Op]error
	room     [2]bool
	ready    bool // receives are posted
	bodies   [2][][]byte
	failures [2]error
}

func newPair(t testing.TB, addresses [2]netip.Addr, configs [2]Config, wraps ...func(*Transport) rdma.Transport) *pair {
	t.Helper()
	p := &pair{t: t, done: map[*rdma.Op]error{}, ready: true}
	begin := time.Now()
	for i := range p.hosts {
		p.transports[i] = New(configs[i]).(*Transport)
		var transport rdma.Transport = p.transports[i]
		for _, wrap := range wraps {
			transport = wrap(p.transports[i])
		}
		host, err := rdmatest.NewHost(addresses[i], transport, func() time.Duration { return time.Since(begin) + 1 }, &p.mu, rdmatest.Hooks{
			Admit: func(_ rdma.Channel, _ []byte, n int) ([]byte, rdma.Verdict) {
				if !p.ready {
					return nil, rdma.NotReady
				}
				return make([]byte, n), rdma.Accepted
			},
			Deliver:  func(_ rdma.Channel, _, body []byte) { p.bodies[i] = append(p.bodies[i], body) },
			Complete: func(op *rdma.Op, err error) { p.done[op] = err },
			Room:     func(rdma.Channel) { p.room[i] = true },
			Failed:   func(_ rdma.Channel, err error) { p.failures[i] = err },
		})
		if err != nil {
			t.Fatal(err)
		}
		p.hosts[i] = host
		p.memory[i] = make([]byte, testMemory)
		host.Register(testKey, testBase, p.memory[i], rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead|rdma.RemoteAtomic)
	}
	t.Cleanup(p.close)
	for i := range p.hosts {
		p.hosts[i].Do(func() {
			var err error
			if p.channels[i], err = p.hosts[i].Channel(rdma.ChannelConfig{Remote: addresses[1-i], Ordered: true}); err != nil {
				t.Error(err)
			}
		})
	}
	for i := range p.hosts {
		p.hosts[i].Do(func() {
			if err := p.channels[i].Connect(p.channels[1-i].Local(), []rdma.Path{p.path(i, 61500)}); err != nil {
				t.Error(err)
			}
		})
	}
	return p
}

func (p *pair) path(i int, port uint16) rdma.Path {
	return rdma.Path{Port: port, Share: 1, Sent: &p.sent[i], Again: &p.again[i]}
}

func (p *pair) close() {
	for i := range p.hosts {
		p.hosts[i].Do(func() { p.hosts[i].Close(p.channels[i]) })
	}
	for i := range p.hosts {
		p.transports[i].Stop()
		if err := p.hosts[i].Err(); err != nil {
			p.t.Error(err)
		}
	}
}

// post posts an operation on host i's channel once there is room.
func (p *pair) post(i int, op *rdma.Op) *rdma.Op {
	p.t.Helper()
	p.until("room", func() (ok bool) { return p.hosts[i].Post(p.channels[i], op) })
	return op
}

func (p *pair) counters(i int) (c map[string]uint64) {
	p.hosts[i].Do(func() { c = p.transports[i].Counters() })
	return c
}

// until calls ok in turns of both hosts until it returns true.
func (p *pair) until(what string, ok func() bool) {
	p.t.Helper()
	limit := time.Now().Add(time.Minute)
	for {
		var is bool
		p.hosts[0].Do(func() { is = ok() })
		p.hosts[1].Do(func() {})
		if is {
			return
		}
		if time.Now().After(limit) {
			p.t.Fatalf("no %s; counters: %v, %v", what, p.counters(0), p.counters(1))
		}
		time.Sleep(50 * time.Microsecond)
	}
}

// wait waits for operations, and returns their joined errors.
func (p *pair) wait(ops ...*rdma.Op) error {
	p.t.Helper()
	errs := make([]error, len(ops))
	for i, op := range ops {
		p.until("completion", func() (ok bool) { errs[i], ok = p.done[op]; return ok })
	}
	return errors.Join(errs...)
}

func write(at int, b []byte) *rdma.Op {
	return &rdma.Op{Kind: rdma.OpWrite, Key: testKey, Remote: testBase + uint64(at), Local: b}
}

func read(at int, b []byte) *rdma.Op {
	return &rdma.Op{Kind: rdma.OpRead, Key: testKey, Remote: testBase + uint64(at), Local: b}
}

func localhost() [2]netip.Addr {
	return [2]netip.Addr{netip.MustParseAddr("127.0.48.1"), netip.MustParseAddr("127.0.48.2")}
}

// veths returns two namespaces connected by a veth pair, with the addresses of a pair.
func veths(t testing.TB) (spaces [2]*netnstest.Namespace, addresses [2]netip.Addr) {
	spaces[0], spaces[1] = netnstest.Pair(t, "plane", "10.77.0.1/24", "10.77.0.2/24")
	return spaces, [2]netip.Addr{netip.MustParseAddr("10.77.0.1"), netip.MustParseAddr("10.77.0.2")}
}

// onVeths returns a pair on them.
func onVeths(t testing.TB, change func(*Config)) (*pair, [2]*netnstest.Namespace) {
	spaces, addresses := veths(t)
	var configs [2]Config
	for i, n := range spaces {
		configs[i].inside = n.Do
		change(&configs[i])
	}
	return newPair(t, addresses, configs), spaces
}

func TestErrorsArePerOperation(t *testing.T) {
	p := newPair(t, localhost(), [2]Config{})
	b := make([]byte, 100_000)
	bad := p.post(0, &rdma.Op{Kind: rdma.OpWrite, Key: 99, Remote: testBase, Local: b})
	beyond := p.post(0, read(testMemory-1, make([]byte, 2)))
	odd := p.post(0, &rdma.Op{Kind: rdma.OpFetchAdd, Key: testKey, Remote: testBase + 4, Swap: 1, Local: make([]byte, 8)})
	good := p.post(0, write(0, []byte{1, 2, 3}))
	for _, op := range []*rdma.Op{bad, beyond, odd} {
		if err := p.wait(op); !errors.Is(err, rdma.ErrRemoteAccess) {
			t.Errorf("completed with %v", err)
		}
	}
	if err := p.wait(good); err != nil || p.memory[1][1] != 2 {
		t.Errorf("completed with %v, memory %v", err, p.memory[1][:3])
	}
}

// TestMove checks that outstanding operations continue on another port, and on the first port again although its
// connection has just ended.
func TestMove(t *testing.T) {
	p := newPair(t, localhost(), [2]Config{})
	var ops []*rdma.Op
	for n := range 60 {
		b := make([]byte, 50_000)
		b[0], b[len(b)-1] = byte(n), byte(n)
		ops = append(ops, p.post(0, write(n*len(b), b)))
		if n%5 == 0 {
			p.hosts[0].Do(func() { p.channels[0].SetPaths([]rdma.Path{p.path(0, 61500+uint16(n/5%2))}) })
		}
	}
	if err := p.wait(ops...); err != nil {
		t.Fatal(err)
	}
	for n := range ops {
		if b := p.memory[1][n*50_000:]; b[0] != byte(n) || b[49_999] != byte(n) {
			t.Errorf("write %d: %d, %d", n, b[0], b[49_999])
		}
	}
	if c := p.counters(0); c["moved"] < 10 {
		t.Errorf("%v", c)
	}
}

// TestKilledConnection checks that connections that are shut down under the transport during transfers are dialed
// again.
func TestKilledConnection(t *testing.T) {
	p := newPair(t, localhost(), [2]Config{})
	// Dialing takes time: without this, all operations may be posted before there is a connection to kill.
	if err := p.wait(p.post(0, write(0, []byte{1})), p.post(1, write(0, []byte{1}))); err != nil {
		t.Fatal(err)
	}
	kills := 0
	var ops []*rdma.Op
	for n := range 200 {
		b := make([]byte, 20_000)
		b[0], b[len(b)-1] = byte(n), byte(n)
		ops = append(ops, p.post(n%2, write(n/2*len(b), b)))
		if n%10 == 9 {
			p.hosts[0].Do(func() {
				for _, k := range p.transports[n/10%2].e.conns {
					k.edge.(*socket).c.CloseWrite()
					kills++
				}
			})
		}
	}
	if err := p.wait(ops...); err != nil || kills == 0 {
		t.Fatalf("%d connections killed, %v", kills, err)
	}
	for n := range ops {
		if b := p.memory[1-n%2][n/2*20_000:]; b[0] != byte(n) || b[19_999] != byte(n) {
			t.Errorf("write %d: %d, %d", n, b[0], b[19_999])
		}
	}
}

// TestClosedPeer checks that the peer's channel learns at once that the other end is gone, and that its outstanding
// operations are flushed.
func TestClosedPeer(t *testing.T) {
	p := newPair(t, localhost(), [2]Config{})
	if err := p.wait(p.post(0, write(0, []byte{1}))); err != nil {
		t.Fatal(err)
	}
	p.hosts[1].Do(func() { p.ready = false })
	held := p.post(0, &rdma.Op{Kind: rdma.OpSend, Local: []byte("hello"), Head: []byte("head")})
	p.until("hold", func() bool { return p.transports[1].Counters()["held"] > 0 })
	p.hosts[1].Do(func() { p.hosts[1].Close(p.channels[1]) })
	if err := p.wait(held); !errors.Is(err, rdma.ErrFlushed) {
		t.Errorf("completed with %v", err)
	}
	p.until("failure", func() bool { return errors.Is(p.failures[0], rdma.ErrFlushed) })
	for i := range p.transports {
		if c := p.counters(i); c["malformed"] != 0 {
			t.Errorf("an end is blamed: %v", c)
		}
	}
}

// TestGiveUp checks that an absent peer is given up, and that a peer without a receive is not. GiveUp is short only
// where it must end, or must not matter: elsewhere a delayed peer would be given up too.
func TestGiveUp(t *testing.T) {
	p := newPair(t, localhost(), [2]Config{})
	patience := func(d time.Duration) { p.transports[0].e.timing.GiveUp = d }
	if err := p.wait(p.post(0, write(0, []byte{1}))); err != nil {
		t.Fatal(err)
	}
	p.hosts[1].Do(func() { p.ready = false })
	patient := p.post(0, &rdma.Op{Kind: rdma.OpSend, Local: []byte("hello")})
	p.until("hold", func() bool { return p.transports[0].e.channels[1].out0.held })
	p.hosts[0].Do(func() {
		patience(1)
		p.transports[0].e.tick()
		patience(time.Minute)
		if err := p.failures[0]; err != nil {
			t.Errorf("a peer without a receive was given up: %v", err)
		}
	})
	p.hosts[1].Do(func() { p.ready = true; p.channels[1].Ready() })
	if err := p.wait(patient); err != nil {
		t.Fatal(err)
	}
	p.transports[1].listen.Close()
	p.until("lost connections", func() bool {
		for _, k := range p.transports[1].e.conns {
			k.edge.(*socket).close()
		}
		return p.transports[0].e.channels[1].out0.conn == nil
	})
	p.hosts[0].Do(func() { patience(200 * time.Millisecond) })
	if err := p.wait(p.post(0, write(0, []byte{1}))); !errors.Is(err, rdma.ErrRetryExceeded) {
		t.Errorf("completed with %v", err)
	}
}

// TestDeregisterWhileWritten checks that nothing writes to the region after Deregistered has returned, and that the
// peer gets an error.
func TestDeregisterWhileWritten(t *testing.T) {
	p := newPair(t, localhost(), [2]Config{})
	b := make([]byte, maxOp)
	var ops []*rdma.Op
	for n := range 100 {
		ops = append(ops, p.post(0, write(n%3*maxOp, b)))
	}
	p.wait(ops[5])
	p.hosts[1].Register(testKey, 1<<40, make([]byte, 8), 0) // replaces it
	p.hosts[1].Do(func() { p.transports[1].Deregistered(testKey) })
	for i := range p.memory[1] {
		p.memory[1][i] = 0xaa
	}
	ops = append(ops, p.post(0, write(0, b))) // the others may have completed by now
	if err := p.wait(ops...); !errors.Is(err, rdma.ErrRemoteAccess) {
		t.Errorf("completed with %v", err)
	}
	for i, x := range p.memory[1] {
		if x != 0xaa {
			t.Fatalf("byte %d was written after that", i)
		}
	}
}

// flushed is a transport with a callback after its flush, in the same turn.
type flushed struct {
	*Transport
	after func()
}

func (f flushed) Flush() {
	f.Transport.Flush()
	f.after()
}

// TestSettleInTheSameTurn checks that after a flush a device may look at its sets again because of another transport,
// and close or move channels. This happens in the turn of the goroutine that has just chosen its memory, so settle must
// not wait for it.
func TestSettleInTheSameTurn(t *testing.T) {
	turns := 0
	p := newPair(t, localhost(), [2]Config{}, func(x *Transport) rdma.Transport {
		return flushed{x, func() {
			if turns++; turns%2 == 0 {
				x.Deregistered(0)
			}
		}}
	})
	var ops []*rdma.Op
	for n := range 20 {
		b := make([]byte, 1<<18)
		b[0], b[len(b)-1] = byte(n), byte(n)
		ops = append(ops, p.post(n%2, write(n/2*len(b), b)))
	}
	if err := p.wait(ops...); err != nil {
		t.Fatal(err)
	}
	for n := range ops {
		if b := p.memory[1-n%2][n/2<<18:]; b[0] != byte(n) || b[1<<18-1] != byte(n) {
			t.Errorf("write %d: %d, %d", n, b[0], b[1<<18-1])
		}
	}
}

// started is a transport that is not flushed until its device has started.
type started struct {
	*Transport
	on    bool
	turns int // of the device
}

func (s *started) Flush() {
	if s.turns++; s.on {
		s.Transport.Flush()
	}
}

// TestDialedWhileStarting checks that a peer's flow that is dialed before the device flushes the transport is answered
// afterwards.
func TestDialedWhileStarting(t *testing.T) {
	address := localhost()[0]
	var mu sync.Mutex
	x := &started{Transport: New(Config{}).(*Transport)}
	h, err := rdmatest.NewHost(address, x, func() time.Duration { return time.Second }, &mu, rdmatest.Hooks{})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Stop()
	c, err := net.Dial("tcp", netip.AddrPortFrom(address, Port).String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	turns := func() int {
		mu.Lock()
		defer mu.Unlock()
		return x.turns
	}
	// The transport asks in turns whether it has been flushed. One that accepts the connection before that has a turn
	// of each of three goroutines.
	for limit, begin := time.Now().Add(time.Minute), turns(); turns() < begin+3; time.Sleep(50 * time.Microsecond) {
		if time.Now().After(limit) {
			t.Fatal("the transport has no turns")
		}
	}
	h.Do(func() { x.on = true })
	var b [maxHeader]byte
	n := (&header{op: opOpen, channel: 9, from: 7, epoch: 1}).put(b[:])
	c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Write(b[:n]); err != nil {
		t.Fatal(err)
	}
	var got header
	if _, err := io.ReadFull(c, b[:headerSize]); err != nil {
		t.Fatal(err)
	}
	if _, err := got.parse(b[:headerSize]); err != nil || got.op != opRefuse || got.channel != 7 {
		t.Errorf("%+v, %v", got, err)
	}
}
