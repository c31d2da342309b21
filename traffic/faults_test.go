package traffic

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/transport/rdma"
)

// fault is a fault that occurs once, at a given work request of the source or sink.
type fault func(next posting, wrs []rdma.SendWR) (int, error)

// faulty is a queue pair set that treats one work request of pair 1 in another way.
type faulty struct {
	posting
	fault fault
	at    uint64 // number of the work request
	done  *atomic.Int32
}

func (f *faulty) PostSend(wrs ...rdma.SendWR) (int, error) {
	for i := range wrs {
		if wrs[i].ID == f.at && f.done.CompareAndSwap(0, 1) {
			if n, err := f.posting.PostSend(wrs[:i]...); err != nil {
				return n, err
			}
			if n, err := f.fault(f.posting, wrs[i:i+1]); err != nil {
				return n, err
			}
			return f.posting.PostSend(wrs[i+1:]...)
		}
	}
	return f.posting.PostSend(wrs...)
}

// corrupting is a transport that changes a byte of one WRITE or SEND in transit.
type corrupting struct {
	rdma.Transport
	left *atomic.Int32 // number of operations until then
}

type corruptingChannel struct {
	rdma.Channel
	left *atomic.Int32
}

func (c corrupting) Channel(cfg rdma.ChannelConfig) (rdma.Channel, error) {
	ch, err := c.Transport.Channel(cfg)
	return corruptingChannel{ch, c.left}, err
}

func (c corruptingChannel) Post(op *rdma.Op) bool {
	if op.Kind != rdma.OpRead && len(op.Local) > 1000 && c.left.Add(-1) == 0 {
		local := append([]byte(nil), op.Local...)
		local[777] ^= 1
		op.Local = local
	}
	return c.Channel.Post(op)
}

// hostOf maps the channels that corrupting has wrapped back for a device.
type hostOf struct {
	rdma.Host
	left *atomic.Int32
}

func (c corrupting) Start(h rdma.Host) error { return c.Transport.Start(hostOf{h, c.left}) }

func (h hostOf) of(ch rdma.Channel) rdma.Channel { return corruptingChannel{ch, h.left} }
func (h hostOf) Memory(ch rdma.Channel, key uint32, a uint64, n int, need rdma.Access) ([]byte, error) {
	return h.Host.Memory(h.of(ch), key, a, n, need)
}
func (h hostOf) Atomic(ch rdma.Channel, k rdma.OpKind, key uint32, a, compare, swap uint64) (uint64, error) {
	return h.Host.Atomic(h.of(ch), k, key, a, compare, swap)
}
func (h hostOf) Admit(ch rdma.Channel, head []byte, n int) ([]byte, rdma.Verdict) {
	return h.Host.Admit(h.of(ch), head, n)
}
func (h hostOf) Deliver(ch rdma.Channel, head []byte) { h.Host.Deliver(h.of(ch), head) }
func (h hostOf) Room(ch rdma.Channel)                 { h.Host.Room(h.of(ch)) }
func (h hostOf) Stalled(ch rdma.Channel, slot int, stalled bool) {
	h.Host.Stalled(h.of(ch), slot, stalled)
}
func (h hostOf) Failed(ch rdma.Channel, err error) { h.Host.Failed(h.of(ch), err) }
func (h hostOf) Complete(op *rdma.Op, err error)   { h.Host.Complete(op, err) }

// playFaulty plays a run of three nodes with a fault.
func playFaulty(t *testing.T, run Config, open func(string, TransportOptions) (rdma.Transport, error), wrap func(*end) posting) *farev1.TrafficReport {
	t.Helper()
	run.Message, run.Outstanding, run.Size = 2000, 8, 60*2000
	if run.Drain == 0 {
		run.Drain = time.Minute // ends when the last message arrives
	}
	l, err := startLocal(LocalConfig{Nodes: 3, Transport: "tcp", Run: run}, open, wrap)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r, err := Coordinate(t.Context(), run, l.Servers, nil)
	if err != nil {
		t.Fatal(err)
	}
	if r.Ok != (len(r.Errors) == 0) {
		t.Errorf("ok is %v with errors %q", r.Ok, r.Errors)
	}
	return r
}

// TestNothingWrong verifies that the same runs succeed without a fault, so that the failures below result from the
// faults.
func TestNothingWrong(t *testing.T) {
	for _, op := range Ops() {
		if r := playFaulty(t, Config{Op: op}, newTransport, nil); !r.Ok {
			t.Errorf("%s: %q", op, r.Errors)
		}
	}
}

// TestCorruption verifies that one byte changed in transit is detected, in the correct pair.
func TestCorruption(t *testing.T) {
	for _, op := range []string{"write", "write-imm", "send"} {
		left := new(atomic.Int32)
		left.Store(100)
		r := playFaulty(t, Config{Op: op}, func(name string, o TransportOptions) (rdma.Transport, error) {
			inner, err := newTransport(name, o)
			return corrupting{inner, left}, err
		}, nil)
		if left.Load() > 0 {
			t.Fatalf("%s: nothing was corrupted", op)
		}
		if r.Ok || r.Total.WrongBytes != 1 || r.Total.Lost+r.Total.Duplicated+r.Total.Errors != 0 || len(r.Errors) != 1 || !strings.Contains(r.Errors[0], "1 bytes wrong") {
			t.Errorf("%s: %v %q", op, r.Total, r.Errors)
		}
		if got, want := r.Total.Bytes, uint64((6*60-1)*2000); got != want {
			t.Errorf("%s: %d bytes are called verified, want %d", op, got, want)
		}
	}
}

// TestStaleRead verifies that READs that the peer answers with another message's bytes are detected.
func TestStaleRead(t *testing.T) {
	done := new(atomic.Int32)
	r := playFaulty(t, Config{Op: "read"}, newTransport, func(e *end) posting {
		return &faulty{posting: e.set, at: 30, done: done, fault: func(next posting, wrs []rdma.SendWR) (int, error) {
			wrs[0].RemoteAddress++
			return next.PostSend(wrs...)
		}}
	})
	if r.Ok || r.Total.WrongBytes < 1000 || r.Total.Lost+r.Total.Duplicated+r.Total.Errors != 0 {
		t.Errorf("%v %q", r.Total, r.Errors)
	}
}

// TestLoss verifies that a message that completes but never arrives is detected.
func TestLoss(t *testing.T) {
	for _, op := range []string{"write-imm", "send"} {
		done := new(atomic.Int32)
		r := playFaulty(t, Config{Op: op, Drain: time.Second}, newTransport, func(e *end) posting {
			return &faulty{posting: e.set, at: 30, done: done, fault: func(next posting, wrs []rdma.SendWR) (int, error) {
				// An empty WRITE completes without a notification at the peer.
				return next.PostSend(rdma.SendWR{ID: wrs[0].ID, Opcode: rdma.Write, RemoteAddress: e.remote.address, RemoteKey: e.remote.key})
			}}
		})
		if r.Ok || r.Total.Lost != 1 || r.Total.Duplicated+r.Total.Errors != 0 || r.Total.Messages != 6*60-1 {
			t.Errorf("%s: %v %q", op, r.Total, r.Errors)
		}
		if op == "write-imm" && r.Total.WrongBytes != 0 {
			t.Errorf("%s: what was not lost is wrong: %v", op, r.Total)
		}
	}
}

// TestDuplicate verifies that a message that arrives twice is detected.
func TestDuplicate(t *testing.T) {
	for _, op := range []string{"write-imm", "send"} {
		done := new(atomic.Int32)
		r := playFaulty(t, Config{Op: op}, newTransport, func(e *end) posting {
			return &faulty{posting: e.set, at: 30, done: done, fault: func(next posting, wrs []rdma.SendWR) (int, error) {
				again := wrs[0]
				again.Silent = true
				return next.PostSend(wrs[0], again)
			}}
		})
		if r.Ok || r.Total.Duplicated != 1 || r.Total.Lost+r.Total.Errors+r.Total.WrongBytes != 0 || r.Total.Messages != 6*60 {
			t.Errorf("%s: %v %q", op, r.Total, r.Errors)
		}
	}
}

// TestSwapped verifies that two swapped messages count as reordered, which is not an error in itself, and that their
// bytes are in place.
func TestSwapped(t *testing.T) {
	r := playFaulty(t, Config{Op: "write-imm"}, newTransport, func(e *end) posting {
		return &swapping{posting: e.set}
	})
	if !r.Ok || r.Total.Reordered == 0 || r.Total.Messages != 6*60 {
		t.Errorf("%v %q", r.Total, r.Errors)
	}
	if p := r.Pairs[0]; p.PostedCrc32C == p.ArrivedCrc32C {
		t.Error("the hash of a stream does not tell its order")
	}
}

// swapping posts the first two messages in reverse order, and swaps their completions back.
type swapping struct {
	posting
	done bool
}

func (s *swapping) PostSend(wrs ...rdma.SendWR) (int, error) {
	if !s.done && len(wrs) >= 2 && wrs[0].ID&noteID == 0 {
		s.done = true
		wrs[0], wrs[1] = wrs[1], wrs[0]
		wrs[0].ID, wrs[1].ID = wrs[1].ID, wrs[0].ID
	}
	return s.posting.PostSend(wrs...)
}

// TestForgery verifies that an end of another run, or an invalid request, gets no queue pairs.
func TestForgery(t *testing.T) {
	l, err := StartLocal(LocalConfig{Nodes: 2, Transport: "tcp"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, b := l.nodes[0].Node, l.nodes[1].Node
	a.static.reach(b.devices[0].Address())
	b.static.reach(a.devices[0].Address())
	for _, private := range [][]byte{nil, []byte("hello"), ticket{1, 2}.marshal()} {
		conn, err := a.dial(a.devices[0].Address(), b.devices[0].Address())
		if err != nil {
			t.Fatal(err)
		}
		cq := a.devices[0].CreateCQ()
		set, _, err := a.devices[0].Connect(t.Context(), conn, b.devices[0].Address(), rdma.SetConfig{PD: a.devices[0].AllocPD(), SendCQ: cq, RecvCQ: cq}, private)
		if err == nil {
			set.Close()
			t.Errorf("private data %q: connected", private)
		}
		conn.Close()
	}
}

// TestNodeDeath verifies that the coordinator names the failed node, and that the others can run again.
func TestNodeDeath(t *testing.T) {
	run := Config{Pattern: Incast, Duration: time.Hour, Message: 2000, Interval: 5 * time.Millisecond}
	l, err := StartLocal(LocalConfig{Nodes: 4, Transport: "tcp", Run: run})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	killed := false
	_, err = Coordinate(t.Context(), run, l.Servers, func(i *farev1.TrafficInterval) {
		if i.GetGoodputBps() > 0 && !killed {
			killed = true
			go l.nodes[3].stop()
		}
	})
	lost := new(LostError)
	if !errors.As(err, &lost) || lost.Node != "3" {
		t.Fatalf("node 3 has gone: %v", err)
	}
	idle(l.nodes[:3])
	r, err := Coordinate(t.Context(), Config{Size: 1 << 20}, l.Servers[:3], nil)
	if err != nil || !r.Ok {
		t.Errorf("the others again: %v, %v", r, err)
	}
	if _, err := Coordinate(t.Context(), Config{Size: 1 << 20}, l.Servers, nil); !errors.As(err, &lost) || lost.Node != "3" {
		t.Errorf("with the node that has failed: %v", err)
	}
}

// idle waits until nodes are ready for another run. A busy machine may need longer to end one than a node lets the next
// coordinator wait.
func idle(nodes []*localNode) {
	for _, n := range nodes {
		n.busy <- struct{}{}
		<-n.busy
	}
}

// TestCoordinatorDeath verifies that nodes whose coordinator disconnects during a run end it, and can run again.
func TestCoordinatorDeath(t *testing.T) {
	run := Config{Duration: time.Hour, Message: 2000, Interval: 5 * time.Millisecond}
	l, err := StartLocal(LocalConfig{Nodes: 3, Transport: "superp", Run: run})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := Coordinate(ctx, run, l.Servers, func(i *farev1.TrafficInterval) {
			if i.GetGoodputBps() > 0 {
				cancel()
			}
		})
		if cancel(); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		idle(l.nodes)
	}
	r, err := Coordinate(t.Context(), Config{Size: 1 << 20}, l.Servers, nil)
	if err != nil || !r.Ok {
		t.Errorf("%v, %v", r, err)
	}
}

// TestStall verifies that a pair without grants fails with an error, and that the run ends.
func TestStall(t *testing.T) {
	l, err := startLocal(LocalConfig{Nodes: 2, Transport: "tcp"}, newTransport, func(e *end) posting { return mute{e.set} })
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r, err := Coordinate(t.Context(), Config{Pattern: PeerPeer, Size: 4 << 20, Stall: 100 * time.Millisecond, Drain: 50 * time.Millisecond}, l.Servers, nil)
	if err != nil {
		t.Fatal(err)
	}
	if r.Ok || r.Total.Errors != 1 || !strings.Contains(strings.Join(r.Errors, "\n"), "no progress for 100ms") {
		t.Errorf("%v %q", r.Total, r.Errors)
	}
}

// mute drops notes, so sinks never return buffers.
type mute struct{ posting }

func (m mute) PostSend(wrs ...rdma.SendWR) (int, error) {
	if len(wrs) == 1 && wrs[0].ID == noteID {
		return 1, nil
	}
	return m.posting.PostSend(wrs...)
}

// oneRequest is the stream of a coordinator that sends one request.
type oneRequest struct {
	grpc.BidiStreamingServer[farev1.RunTrafficRequest, farev1.RunTrafficResponse]
	ctx     context.Context
	request *farev1.RunTrafficRequest
}

func (s *oneRequest) Context() context.Context                 { return s.ctx }
func (s *oneRequest) Recv() (*farev1.RunTrafficRequest, error) { return s.request, nil }

// TestBusy verifies that a node plays one run at a time, and lets another coordinator wait for three seconds.
func TestBusy(t *testing.T) {
	for _, tt := range []struct {
		ends time.Duration // end of the first run
		want string
	}{
		{3*time.Second - 1, "is not known"}, // the answer to an empty request: it is this run's turn
		{3*time.Second + 1, "this node is busy with another run"},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := &Node{busy: make(chan struct{}, 1)}
			n.busy <- struct{}{}
			time.AfterFunc(tt.ends, func() { <-n.busy })
			begin := time.Now()
			err := n.RunTraffic(&oneRequest{ctx: t.Context(), request: &farev1.RunTrafficRequest{Message: &farev1.RunTrafficRequest_Prepare{Prepare: new(farev1.PrepareTraffic)}}})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("the first run ends after %v: %v, want %q", tt.ends, err, tt.want)
			}
			if d := time.Since(begin); d != min(tt.ends, 3*time.Second) {
				t.Errorf("the first run ends after %v: the answer takes %v", tt.ends, d)
			}
		})
	}
}

// startAt starts a run at one node with the test as its coordinator.
func startAt(t *testing.T, l *Local, node int, run *farev1.PrepareTraffic) (ask func(*farev1.RunTrafficRequest), next func() (*farev1.RunTrafficResponse, error), end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := l.Servers[node].Client.RunTraffic(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ask = func(m *farev1.RunTrafficRequest) { stream.Send(m) }
	next = func() (*farev1.RunTrafficResponse, error) {
		for {
			if m, err := stream.Recv(); err != nil || m.GetSample() == nil {
				return m, err
			}
		}
	}
	ask(&farev1.RunTrafficRequest{Message: &farev1.RunTrafficRequest_Prepare{Prepare: run}})
	if m, err := next(); m.GetPrepared() == nil {
		t.Fatalf("%v, %v", m, err)
	}
	return ask, next, cancel
}

var connect = &farev1.RunTrafficRequest{Message: &farev1.RunTrafficRequest_Connect{Connect: &farev1.ConnectTraffic{}}}

// TestMessagesAfterTheEnd verifies that a coordinator that keeps sending after the end does not block the node forever.
func TestMessagesAfterTheEnd(t *testing.T) {
	l, err := StartLocal(LocalConfig{Nodes: 2, Transport: "tcp"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	run, err := Config{Size: 1}.withDefaults().prepare()
	if err != nil {
		t.Fatal(err)
	}
	ask, next, end := startAt(t, l, 0, run)
	defer end()
	finish := &farev1.RunTrafficRequest{Message: &farev1.RunTrafficRequest_Finish{Finish: &farev1.FinishTraffic{}}}
	for _, m := range []*farev1.RunTrafficRequest{connect, {Message: &farev1.RunTrafficRequest_Start{Start: &farev1.StartTraffic{}}}, finish} {
		ask(m)
		if m, err := next(); err != nil {
			t.Fatalf("%v, %v", m, err)
		}
	}
	ask(finish)
	if m, err := next(); status.Code(err) != codes.InvalidArgument {
		t.Errorf("%v, %v", m, err)
	}
	if r, err := Coordinate(t.Context(), Config{Size: 1}, l.Servers, nil); err != nil || !r.Ok {
		t.Errorf("%v, %v", r, err)
	}
}

// TestGoneWithAMessage verifies that next ends with the run even if receive has read a message from the stream and then
// exited.
func TestGoneWithAMessage(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := &conversation{requests: make(chan *farev1.RunTrafficRequest), over: make(chan error, 1)}
	if m, err := c.next(ctx); err == nil {
		t.Errorf("%v", m)
	}
}

// TestWhyNotConnected verifies that, among pairs that cannot be connected, the error names the pair that caused the
// others to be canceled.
func TestWhyNotConnected(t *testing.T) {
	l, err := StartLocal(LocalConfig{Nodes: 2, Transport: "tcp"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	run, err := Config{Size: 1}.withDefaults().prepare()
	if err != nil {
		t.Fatal(err)
	}
	here, there := l.nodes[0].devices[0].Address(), l.nodes[1].devices[0].Address()
	l.nodes[1].static.reach(here) // without slots it would not answer
	// No node listens at the first destination; the second does not know the run.
	run.Pairs = []*farev1.TrafficPair{{Pair: 0, Source: here.String(), Destination: there.Next().String()}, {Pair: 1, Source: here.String(), Destination: there.String()}}
	ask, told, end := startAt(t, l, 0, run)
	defer end()
	ask(connect)
	if _, err := told(); err == nil || !strings.Contains(err.Error(), "pair 1") || !strings.Contains(err.Error(), "the run is unknown to this node") {
		t.Errorf("%v", err)
	}
}

// TestServeWaitsForRuns verifies that no run uses resources that Close releases after Serve has returned.
func TestServeWaitsForRuns(t *testing.T) {
	let := make(chan struct{})
	l, err := startLocal(LocalConfig{Nodes: 2, Transport: "tcp"}, newTransport, func(e *end) posting { return &slow{e.set, let} })
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	// The source blocks in posting.
	over := make(chan error, 1)
	go func() {
		_, err := Coordinate(t.Context(), Config{Pattern: PeerPeer, Duration: time.Hour, Interval: 5 * time.Millisecond}, l.Servers, nil)
		over <- err
	}()
	let <- struct{}{}
	stopped := make(chan bool, 1)
	go func() {
		l.nodes[0].stop()
		stopped <- len(l.nodes[0].busy) == 0
	}()
	<-over
	for !stopWaits() && len(stopped) == 0 {
		time.Sleep(time.Millisecond)
	}
	close(let)
	if !<-stopped {
		t.Error("Serve returned while a run went on")
	}
}

// stopWaits reports whether a goroutine waits in grpc.Server.Stop.
func stopWaits() bool {
	b := make([]byte, 1<<20)
	for g := range strings.SplitSeq(string(b[:runtime.Stack(b, true)]), "\n\n") {
		if strings.Contains(g, " [sync.WaitGroup.Wait") && strings.Contains(g, "grpc.(*Server).stop(") {
			return true
		}
	}
	return false
}

// slow blocks in its first posting until the channel is closed; it receives one element to show that it has started.
type slow struct {
	posting
	let chan struct{}
}

func (s *slow) PostSend(wrs ...rdma.SendWR) (int, error) {
	<-s.let
	<-s.let
	return s.posting.PostSend(wrs...)
}
