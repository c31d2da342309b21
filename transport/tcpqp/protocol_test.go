package tcpqp

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// lone is a host whose peers are the test, which sends and reads frame by frame.
type lone struct {
	t    *testing.T
	host *rdmatest.Host
	e    *endpoint
	ch   *channel
}

func newLone(t *testing.T, hooks rdmatest.Hooks) *lone {
	t.Helper()
	s := newSim(1, 0, 1<<16, false)
	host, err := s.Open(0, hooks)
	if err != nil {
		t.Fatal(err)
	}
	l := &lone{t: t, host: host, e: s.ends[0].e}
	host.Do(func() {
		ch, _ := host.Channel(rdma.ChannelConfig{Remote: simAddresses[1]})
		l.ch = ch.(*channel)
	})
	return l
}

func (l *lone) connect() {
	l.t.Helper()
	l.host.Do(func() {
		if err := l.ch.Connect((&parameters{port: Port, id: 9}).put(), []rdma.Path{new(pair).path(0, 61500)}); err != nil {
			l.t.Fatal(err)
		}
	})
}

func (l *lone) accept() (k *conn) {
	l.host.Do(func() { k = l.e.accept(&deadEdge{}) })
	return k
}

// feed delivers frames. The caller holds the lock.
func (l *lone) feed(k *conn, hs ...header) {
	for _, h := range hs {
		if h.op == opOpen {
			h.nonce = l.ch.local.nonce
		}
		var b [maxHeader]byte
		p := append(b[:h.put(b[:]):len(b)], make([]byte, h.data())...)
		for len(p) > 0 && k.dead == nil {
			x, y := k.want()
			n := copy(x, p)
			n += copy(y, p[n:])
			p = p[n:]
			k.got(n)
		}
	}
}

// headers returns the outgoing frames, which have no data.
func (l *lone) headers(k *conn) (hs []header) {
	l.t.Helper()
	l.host.Do(func() {
		var b []byte
		for x := k.fill(); x != nil; x = k.fill() {
			for _, p := range x.bufs {
				b = append(b, p...)
			}
			k.wrote(x.size)
		}
		for len(b) > 0 {
			var h header
			n, err := h.parse(b)
			if n == 0 || err != nil {
				l.t.Fatal(n, err)
			}
			hs = append(hs, h)
			b = b[n:]
		}
	})
	return hs
}

func opcodes(hs []header) (ops []opcode) {
	for _, h := range hs {
		ops = append(ops, h.op)
	}
	return ops
}

// TestEveryChannelIsRefused checks that all channels of a peer that open nonexistent ones are refused, however many do
// so at once.
func TestEveryChannelIsRefused(t *testing.T) {
	l := newLone(t, rdmatest.Hooks{})
	k := l.accept()
	const many = 500
	l.host.Do(func() {
		for i := range uint32(many) {
			l.feed(k, header{op: opOpen, channel: 77, from: 1 + i, epoch: 1})
		}
	})
	if hs := l.headers(k); len(hs) != many || hs[many-1].op != opRefuse || hs[many-1].channel != many {
		t.Errorf("%d of %d were refused", len(hs), many)
	}
}

// TestReadyBeforeAccept checks that ACCEPT suffices if the receive is posted before it; a RESUME after it would make
// the peer repeat requests.
func TestReadyBeforeAccept(t *testing.T) {
	ready := false
	l := newLone(t, rdmatest.Hooks{Admit: func(_ rdma.Channel, _ []byte, n int) ([]byte, rdma.Verdict) {
		if !ready {
			return nil, rdma.NotReady
		}
		return make([]byte, n), rdma.Accepted
	}})
	l.connect()
	k := l.accept()
	send := header{op: opSend, channel: 1, length: 20}
	l.host.Do(func() { l.feed(k, header{op: opOpen, channel: 1, from: 9, epoch: 1}, send) })
	if got := opcodes(l.headers(k)); !slices.Equal(got, []opcode{opAccept, opHold}) {
		t.Fatalf("headers %#x", got)
	}
	k = l.accept()
	l.host.Do(func() {
		l.feed(k, header{op: opOpen, channel: 1, from: 9, epoch: 2})
		ready = true
		l.ch.Ready()
	})
	if got := l.headers(k); !slices.Equal(opcodes(got), []opcode{opAccept}) || got[0].status != statusNone {
		t.Errorf("headers %+v", got)
	}
	l.host.Do(func() { l.feed(k, send) })
	if got := l.headers(k); !slices.Equal(opcodes(got), []opcode{opAck}) || k.dead != nil {
		t.Errorf("headers %+v, %v", got, k.dead)
	}
	l.host.Do(func() { l.host.Close(l.ch) })
}

// TestOvertakenBeforeConnect checks that of two OPENs before Connect the later one is answered, in either order of
// arrival.
func TestOvertakenBeforeConnect(t *testing.T) {
	for _, order := range [][2]uint32{{1, 2}, {2, 1}} {
		l := newLone(t, rdmatest.Hooks{})
		var k [3]*conn
		for _, epoch := range order {
			k[epoch] = l.accept()
			l.host.Do(func() { l.feed(k[epoch], header{op: opOpen, channel: 1, from: 9, epoch: epoch}) })
		}
		l.host.Do(func() { k[1].fail(errReset) })
		l.connect()
		if got := l.headers(k[2]); len(got) != 1 || got[0].op != opAccept || got[0].epoch != 2 {
			t.Errorf("%v: headers %+v", order, got)
		}
		l.host.Do(func() { l.host.Close(l.ch) })
	}
}

// joined returns two hosts on simulated streams with a channel between them. Host 1 has receives while ready is true.
func joined(t *testing.T, limit int, ready *bool) (s *sim, hosts [2]*rdmatest.Host, channels [2]rdma.Channel, done map[*rdma.Op]error) {
	t.Helper()
	s = newSim(1, 0, limit, false)
	done = map[*rdma.Op]error{}
	for i := range hosts {
		var err error
		if hosts[i], err = s.Open(i, rdmatest.Hooks{
			Admit: func(_ rdma.Channel, _ []byte, n int) ([]byte, rdma.Verdict) {
				if !*ready {
					return nil, rdma.NotReady
				}
				return make([]byte, n), rdma.Accepted
			},
			Complete: func(op *rdma.Op, err error) { done[op] = err },
		}); err != nil {
			t.Fatal(err)
		}
		hosts[i].Register(testKey, testBase, make([]byte, testMemory), rdma.RemoteWrite)
	}
	s.Run(func() bool { return s.Net.Now() > time.Millisecond }, time.Second)
	for i := range hosts {
		hosts[i].Do(func() { channels[i], _ = hosts[i].Channel(rdma.ChannelConfig{Remote: simAddresses[1-i]}) })
	}
	for i := range hosts {
		hosts[i].Do(func() {
			if err := channels[i].Connect(channels[1-i].Local(), []rdma.Path{new(pair).path(0, 61500)}); err != nil {
				t.Fatal(err)
			}
		})
	}
	return s, hosts, channels, done
}

func (s *sim) kill() {
	for _, x := range slices.Clone(s.edges) {
		x.reset()
	}
}

// TestPatienceSurvivesTheConnection checks that an initiator that HOLD has kept waiting for longer than GiveUp, and
// whose connection fails then, has time for another connection.
func TestPatienceSurvivesTheConnection(t *testing.T) {
	ready := false
	s, hosts, channels, done := joined(t, 1<<16, &ready)
	op := &rdma.Op{Kind: rdma.OpSend, Local: []byte("hello")}
	hosts[0].Do(func() { hosts[0].Post(channels[0], op) })
	out := &channels[0].(*channel).out0
	giveUp := s.ends[0].e.timing.GiveUp
	if !s.Run(func() bool { return out.held }, time.Second) {
		t.Fatal("not held")
	}
	s.Run(func() bool { return false }, 3*giveUp)
	s.kill()
	if !s.Run(func() bool { return out.held || len(done) > 0 }, time.Second) || len(done) > 0 {
		t.Fatalf("not held again: %v", done)
	}
	hosts[1].Do(func() { ready = true; channels[1].Ready() })
	if !s.Run(func() bool { return len(done) > 0 }, time.Second) || done[op] != nil {
		t.Errorf("%v", done)
	}
	if err := s.Err(); err != nil {
		t.Error(err)
	}
}

// TestAcceptIsNoProgress checks that a channel gives up if its connections are accepted but fail before any answer, as
// on a path that passes only short packets.
func TestAcceptIsNoProgress(t *testing.T) {
	ready := true
	s, hosts, channels, done := joined(t, 1<<10, &ready)
	op := &rdma.Op{Kind: rdma.OpWrite, Key: testKey, Remote: testBase, Local: make([]byte, maxOp)}
	hosts[0].Do(func() { hosts[0].Post(channels[0], op) })
	out := &channels[0].(*channel).out0
	times := 0
	for end := s.Net.Now() + 2*s.ends[0].e.timing.GiveUp; len(done) == 0 && s.Net.Now() < end; times++ {
		s.Run(func() bool { return out.opened || len(done) > 0 }, time.Second)
		s.SetPlane(61500%s.Planes(), false)
		s.kill()
		s.Run(func() bool { return false }, 100*time.Millisecond)
		s.SetPlane(61500%s.Planes(), true)
	}
	if err, ok := done[op]; times < 10 || !ok || !errors.Is(err, rdma.ErrRetryExceeded) {
		t.Errorf("%d connections; %v", times, done)
	}
}

// TestTimeOfAStoppedProcess checks that such time does not count, since the answer may wait in the socket, and that
// time without answers does.
func TestTimeOfAStoppedProcess(t *testing.T) {
	ready := true
	s, hosts, channels, done := joined(t, 1<<16, &ready)
	s.SetPlane(61500%s.Planes(), false)
	op := &rdma.Op{Kind: rdma.OpWrite, Key: testKey, Remote: testBase, Local: make([]byte, 8)}
	hosts[0].Do(func() { hosts[0].Post(channels[0], op) })
	giveUp := s.ends[0].e.timing.GiveUp
	begin := s.Net.Now()
	s.Run(func() bool { return false }, time.Millisecond)
	s.Net.Stall(2 * giveUp)
	if !s.Run(func() bool { return len(done) > 0 }, 2*giveUp) || !errors.Is(done[op], rdma.ErrRetryExceeded) {
		t.Fatalf("%v", done)
	}
	// All except the time until the next check.
	if d := s.Net.Now() - begin - 2*giveUp; d < giveUp*3/4 || d > giveUp {
		t.Errorf("given up after %v of its time", d)
	}
}
