package superp_test

import (
	"errors"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
	"github.com/fared/fared/transport/superp"
)

// TestSoftShutdown checks that outstanding operations of both directions finish first, and that both hosts are then
// notified.
func TestSoftShutdown(t *testing.T) {
	for _, loss := range []float64{0, 0.2} {
		b := newBench(t, superp.Config{}, []rdmatest.Plane{{Delay: 10 * time.Microsecond, Loss: loss}}, false)
		for range 20 {
			b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 3000)})
			b.post(1, rdma.Op{Kind: rdma.OpRead, Key: key, Remote: 0x1000, Local: make([]byte, 3000)})
		}
		b.hosts[0].Do(func() { b.chans[0].Shutdown(true) })
		b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 1)})
		b.until("both ends", func() bool { return len(b.failed[0]) == 1 && len(b.failed[1]) == 1 })
		flushed := 0
		for _, err := range b.completed[0] {
			if errors.Is(err, rdma.ErrFlushed) {
				flushed++
			} else if err != nil {
				t.Error(err)
			}
		}
		if flushed != 1 || len(b.completed[0]) != 21 {
			t.Errorf("%d flushed of %d: want the one that came after Shutdown", flushed, len(b.completed[0]))
		}
		b.completed[0] = nil
		b.check([2][]error{nil, make([]error, 20)}, [2][]error{{superp.ErrShutdown}, {superp.ErrShutdown}})
	}
}

// TestPeerDiesInShutdown checks that a soft shutdown does not wait for the Last NULL of a dead peer.
func TestPeerDiesInShutdown(t *testing.T) {
	b := newBench(t, superp.Config{}, onePlane, false)
	b.verdict[0] = rdma.NotReady
	b.send(1, "held")
	b.hosts[0].Do(func() { b.chans[0].Shutdown(true) })
	b.quiet(time.Minute) // the peer is alive: its message waits
	b.check([2][]error{}, [2][]error{})
	b.net.SetPlane(0, false)
	b.until("both ends", func() bool { return len(b.failed[0]) == 1 && len(b.failed[1]) == 1 })
	b.check([2][]error{nil, {rdma.ErrRetryExceeded}}, [2][]error{{rdma.ErrRetryExceeded}, {rdma.ErrRetryExceeded}})
}

// TestLastIsAcknowledgedAtOnce checks that an end that is stopped right after Close, for longer than it lingers, has
// sent all that the peer needs.
func TestLastIsAcknowledgedAtOnce(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		p := newPair(t, ordered, rdma.Op{}, 0)
		p.chans[0].(*superp.Connection).Shutdown(true)
		for range 4 { // turns
			for i, s := range p.ends {
				s.core.Flush()
				for _, b := range s.queue[:s.n] {
					p.ends[1-i].core.Receive(s.from, b)
				}
				s.n = 0
			}
		}
		for i, s := range p.ends {
			if !errors.Is(s.failed, superp.ErrShutdown) {
				t.Fatalf("end %d: %v", i, s.failed)
			}
		}
		p.chans[0].Close()
		p.ends[0].core.Flush()
		*p.ends[0].now += time.Second
		for _, s := range p.ends {
			s.core.Tick()
			s.core.Flush()
		}
		if n := p.ends[1].core.Counters()["retransmitted"]; n != 0 {
			t.Errorf("ordered %v: the peer does not know that its Last NULL has come, and sends it again", ordered)
		}
	}
}

// TestHardShutdown checks that all pending operations fail at once.
func TestHardShutdown(t *testing.T) {
	b := newBench(t, superp.Config{}, onePlane, false)
	for range 3 {
		b.send(0, "message")
	}
	b.hosts[0].Do(func() { b.chans[0].Shutdown(false) })
	f := rdma.ErrFlushed
	b.check([2][]error{{f, f, f}}, [2][]error{{superp.ErrShutdown}})
	b.quiet(time.Minute) // the peer, whose agent is not notified, fails because its acknowledgement of the messages stays unacknowledged
	b.check([2][]error{{f, f, f}}, [2][]error{{superp.ErrShutdown}, {rdma.ErrRetryExceeded}})
}

// TestFailedOnce checks that Host.Failed is not called a second time if the connection is then ended hard, or the peer
// stops answering.
func TestFailedOnce(t *testing.T) {
	b := newBench(t, superp.Config{}, onePlane, false)
	b.hosts[0].Do(func() { b.chans[0].Shutdown(true) })
	b.until("both ends", func() bool { return len(b.failed[0]) == 1 && len(b.failed[1]) == 1 })
	b.hosts[0].Do(func() { b.chans[0].Shutdown(false) })
	b.quiet(2 * time.Minute)
	b.check([2][]error{}, [2][]error{{superp.ErrShutdown}, {superp.ErrShutdown}})
}

// TestReadyAfterTheEnd checks that a waiting message is no longer admitted.
func TestReadyAfterTheEnd(t *testing.T) {
	b := newBench(t, superp.Config{}, onePlane, false)
	b.verdict[1] = rdma.NotReady
	b.send(0, "")
	b.quiet(time.Millisecond)
	b.hosts[1].Do(func() { b.chans[1].Shutdown(false) })
	b.hosts[1].Do(func() {
		b.verdict[1] = rdma.Accepted
		b.chans[1].Ready()
	})
	if len(b.delivered[1]) > 0 {
		t.Errorf("delivered %q", b.delivered[1])
	}
}

// TestClose checks that operations have completed when Close returns, that the peer's fail without a timeout, and that
// the closed end no longer calls its host or accesses memory of its caller.
func TestClose(t *testing.T) {
	for _, ordered := range []bool{false, true} {
		b := newBench(t, superp.Config{}, onePlane, ordered)
		b.verdict[0] = rdma.NotReady
		b.send(1, "waits")
		b.post(1, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 20_000)})
		b.post(0, rdma.Op{Kind: rdma.OpWrite, Key: key, Remote: 0x1000, Local: make([]byte, 20_000)})
		b.quiet(15 * time.Microsecond)
		b.hosts[0].Do(func() { b.hosts[0].Close(b.chans[0]) })
		b.check([2][]error{{rdma.ErrFlushed}, nil}, [2][]error{})
		begin := b.net.Now()
		b.until("the peer's end", func() bool { return len(b.failed[1]) == 1 })
		if d := b.net.Now() - begin; d > 10*time.Millisecond {
			t.Errorf("it took %v", d)
		}
		if len(b.completed[1]) != 2 || !errors.Is(b.completed[1][0], rdma.ErrFlushed) {
			t.Errorf("the peer's operations: %v", b.completed[1])
		}
		b.hosts[1].Do(func() { b.hosts[1].Close(b.chans[1]) })
		b.quiet(time.Minute)
		for i := range b.hosts {
			if err := b.hosts[i].Err(); err != nil {
				t.Error(err)
			}
		}
	}
}
