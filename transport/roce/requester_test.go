package roce

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
)

func TestMessagesAreCut(t *testing.T) {
	h := newHand(t, Config{})
	got := h.post(sendOp(0), sendOp(full-20), sendOp(2*full-20+1), writeOp(0), writeOp(full), writeOp(2*full+3))
	h.want(got, "send 0? 20 bytes", "send 1? 256 bytes", "send-first 2 256 bytes", "send-middle 3 256 bytes", "send-last 4? 1 bytes",
		"write 5? at 0x2000+0", "write 6? at 0x2000+256 256 bytes",
		"write-first 7 at 0x2000+515 256 bytes", "write-middle 8 256 bytes", "write-last 9? 3 bytes")
	if want := testHead + bytesOf("s", full-20); got[2].payload != want || got[9].key != 0 || got[7].key != 9 {
		t.Errorf("%+v", got)
	}
	h.packet(ack(9, 0x1f), "")
	h.complete(nil, nil, nil, nil, nil, nil)
	if n := h.paths[0].Sent.Load(); n != 20+256+(20+2*full-20+1)+256+515 {
		t.Errorf("%d bytes sent", n)
	}
	if h.sleep(); h.wake != 0 { // the timer that was not stopped
		t.Errorf("wants to wake up at %v", h.wake)
	}
}

func TestAcksAreAskedFor(t *testing.T) {
	h := newHand(t, Config{})
	var requesting []int
	for i, p := range h.post(writeOp(100 * full)) {
		if p.ackReq {
			requesting = append(requesting, i)
		}
	}
	if want := []int{31, 63, 95, 99}; !slices.Equal(requesting, want) {
		t.Errorf("requested with %v, want %v", requesting, want)
	}
}

func TestGoBack(t *testing.T) {
	h := newHand(t, Config{})
	h.post(writeOp(3*full), writeOp(4))
	// Until the oldest packet is acknowledged, it is retransmitted alone.
	oldest := "write-middle 1? 256 bytes"
	h.want(h.packet(ack(1, nakSequence), ""), oldest)
	h.want(h.packet(ack(1, nakSequence), "")) // its duplicate
	h.complete()
	before := h.now
	h.want(h.sleep(), oldest)
	if d := h.now - before; d != 50*time.Millisecond {
		t.Errorf("after %v", d)
	}
	before = h.now
	h.want(h.sleep(), oldest)
	if d := h.now - before; d != 100*time.Millisecond {
		t.Errorf("then after %v", d)
	}
	h.want(h.packet(ack(1, nakSequence), ""), oldest) // of the latest transmission
	h.want(h.packet(ack(2, 0x1f), ""), "write 3? at 0x2000+4 4 bytes")
	h.complete(nil)
	before = h.now
	h.want(h.sleep(), "write 3? at 0x2000+4 4 bytes")
	if d := h.now - before; d != 50*time.Millisecond {
		t.Errorf("after something new, after %v", d)
	}
	h.packet(ack(3, 0x1f), "")
	h.complete(nil)
	if n := h.paths[0].Again.Load(); n != 4*full+2*4 {
		t.Errorf("%d bytes sent again", n)
	}
	h.count("timeouts", 3)
	h.count("retransmitted", 6)
}

// TestAckOfWhatWasGoneBackTo checks that a late acknowledgement prevents another retransmission.
func TestAckOfWhatWasGoneBackTo(t *testing.T) {
	h := newHand(t, Config{})
	h.post(writeOp(3*full), writeOp(4))
	h.want(h.give(h.datagram(ack(1, nakSequence), ""), h.datagram(ack(2, 0x1f), "")), "write 3? at 0x2000+4 4 bytes")
	h.complete(nil)
}

func TestWindowBoundsPackets(t *testing.T) {
	h := newHand(t, Config{MaxOp: 1 << 20, Window: 1 << 20, Depth: 1})
	window := h.q.requester.flight.Size()
	if n := len(h.post(writeOp(1 << 20))); n != window {
		t.Errorf("%d packets in flight, want %d", n, window)
	}
	// An acknowledgement, which measures the round trip, doubles the window until the first loss.
	h.now += time.Millisecond
	h.packet(ack(window-1, 0x1f), "")
	first := window
	window *= 2
	// A loss halves the window. Packets of one flight count as one loss.
	window /= 2
	for i := range 3 {
		if n := len(h.packet(ack(first+i, nakSequence), "")); n != 1 {
			t.Errorf("%d packets after a NAK, want 1", n)
		}
	}
	h.count("window_cuts", 1)
	got := h.packet(ack(first+2, 0x1f), "")
	if len(got) != window {
		t.Errorf("%d packets in flight, want %d", len(got), window)
	}
	if !got[len(got)-1].ackReq {
		t.Error("the last of the window does not ask for an ACK")
	}
	h.now += 2 * time.Millisecond
	h.packet(ack(first+3, nakSequence), "")
	h.count("window_cuts", 2)
	if n := len(h.packet(ack(first+3, 0x1f), "")); n != window/2 {
		t.Errorf("%d packets in flight after a loss in the next flight, want %d", n, window/2)
	}
}

// TestTimeoutIsVerified checks that a timeout reduces the window only once the peer's answer shows that packets were
// dropped. Until then the path gets one packet.
func TestTimeoutIsVerified(t *testing.T) {
	for _, x := range []struct {
		name  string
		after time.Duration // from the retransmission to the answer
		to    int           // last packet that the answer acknowledges
		stall bool          // before the answer the path is stalled
		cut   bool
	}{
		{"the rest was dropped", time.Millisecond, 4, false, true},
		{"nothing was dropped", time.Millisecond, 9, false, false},
		{"too early for the retransmitted packet", 10 * time.Microsecond, 4, false, false},
		{"a path that delivered nothing", time.Millisecond, 4, true, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			h := newHand(t, Config{Timing: rdma.Timing{Stall: 200 * time.Millisecond}})
			h.post(writeOp(4 * full))
			h.now += time.Millisecond
			h.packet(ack(3, 0x1f), "")
			window := h.q.requester.flight.Size()
			h.post(writeOp(6 * full))
			h.want(h.sleep(), "write-first 4? at 0x2000+1536 256 bytes")
			for x.stall && len(h.stalls) == 0 {
				h.sleep()
			}
			if n := len(h.post(writeOp(4))); n != 0 {
				t.Errorf("%d packets more before the answer", n)
			}
			h.now += x.after
			if got, want := len(h.packet(ack(x.to, 0x1f), "")), 10-x.to; got != want {
				t.Errorf("%d packets after the answer, want %d", got, want)
			}
			if got := h.q.requester.flight.Size() < window; got != x.cut {
				t.Errorf("reduced: %v, want %v", got, x.cut)
			}
			h.host.Do(func() { h.host.Close(h.q) })
		})
	}
}

func TestReadIsAskedForAgainFromWhereItStopped(t *testing.T) {
	h := newHand(t, Config{})
	op := readOp(3*full + 5)
	h.want(h.post(op, readOp(4)), "read 0 at 0x2000+773", "read 4 at 0x2000+4")
	response := func(o opcode, n int) header { p := ack(n, 0x1f); p.opcode = o; return p }
	h.want(h.packet(response(readFirst, 0), bytesOf("a", full)))
	h.want(h.packet(response(readFirst, 0), bytesOf("x", full))) // a duplicate
	// The response to the second READ implies that the responses in between are lost.
	rest := []string{"read 1 at 0x2100+517", "read 4 at 0x2000+4"}
	h.want(h.packet(response(readOnly, 4), "text"), rest[0])
	h.want(h.packet(response(readOnly, 4), "text")) // sent once
	h.want(h.sleep(), rest[0])
	h.want(h.packet(response(readFirst, 1), bytesOf("b", full)), rest[1])
	h.want(h.packet(response(readMiddle, 2), bytesOf("c", full-1))) // too short
	h.want(h.packet(response(readLast, 2), bytesOf("c", full)))     // not the last response
	h.count("bad_responses", 2)
	h.want(h.packet(response(readMiddle, 2), bytesOf("c", full)))
	h.complete()
	h.want(h.packet(response(readLast, 3), "ddddd"))
	h.complete(nil)
	if want := bytesOf("a", full) + bytesOf("b", full) + bytesOf("c", full) + "ddddd"; string(op.Local) != "" && string(op.Local) != want {
		t.Errorf("read %q", op.Local)
	}
	h.want(h.packet(response(readOnly, 4), "text"))
	if got := string(h.completed[0].op.Local); got != "text" {
		t.Errorf("read %q", got)
	}
	h.complete(nil)
}

func TestAckBeyondReadMeansItsResponseIsLost(t *testing.T) {
	h := newHand(t, Config{})
	h.post(readOp(4), addOp())
	h.want(h.packet(ack(0, 0x1f), ""), "read 0 at 0x2000+4")
	h.complete()
}

// TestNothingOvertakesARead checks that no request overtakes a READ, which would see it if executed again.
func TestNothingOvertakesARead(t *testing.T) {
	h := newHand(t, Config{})
	h.want(h.post(readOp(4), readOp(4), writeOp(4), readOp(4), addOp()), "read 0 at 0x2000+4", "read 1 at 0x2000+4")
	response := ack(0, 0x1f)
	response.opcode = readOnly
	h.want(h.packet(response, "text"))
	response.psn = uint32(ourFirst+1) & mask24
	h.want(h.packet(response, "text"), "write 2? at 0x2000+4 4 bytes", "read 3 at 0x2000+4")
	response.psn = uint32(ourFirst+3) & mask24
	h.want(h.packet(response, "text"), "fetch-add 4")
	answer := ack(4, 0x1f)
	answer.opcode, answer.original = atomicAck, 0x1122334455667788
	h.packet(answer, "")
	if got := binary.NativeEndian.Uint64(h.completed[4].op.Local); got != answer.original {
		t.Errorf("was %#x", got)
	}
	h.complete(nil, nil, nil, nil, nil)
}

func TestReadsAndAtomicsAreLimited(t *testing.T) {
	h := newHand(t, Config{MaxReadAtomic: 2})
	h.want(h.post(addOp(), addOp(), addOp(), addOp()), "fetch-add 0", "fetch-add 1")
	answer := ack(0, 0x1f)
	answer.opcode = atomicAck
	h.want(h.packet(answer, ""), "fetch-add 2")
	h.want(h.sleep(), "fetch-add 1")
}

func TestReceiverNotReady(t *testing.T) {
	h := newHand(t, Config{Timing: rdma.Timing{GiveUp: time.Second}})
	h.post(sendOp(4), sendOp(4))
	for range 400 {
		before := h.now
		h.want(h.packet(ack(0, syndromeRNR|20), "")) // 10.24 ms
		h.want(h.sleep(), "send 0? 24 bytes", "send 1? 24 bytes")
		if d := h.now - before; d != 10240*time.Microsecond {
			t.Fatalf("after %v", d)
		}
	}
	// Longer than GiveUp, but the peer is alive.
	h.packet(ack(1, 0x1f), "")
	h.complete(nil, nil)
	h.count("timeouts", 0)
}

func TestGivesUp(t *testing.T) {
	h := newHand(t, Config{})
	h.now += time.Hour // time without outstanding requests does not count
	h.post(writeOp(4), sendOp(4))
	begin := h.now
	for h.failed == nil && h.wake != 0 {
		h.sleep()
	}
	h.complete(rdma.ErrRetryExceeded, rdma.ErrFlushed)
	if d := h.now - begin; !errors.Is(h.failed, rdma.ErrRetryExceeded) || d < 30*time.Second || d > 31*time.Second {
		t.Errorf("failed after %v with %v", d, h.failed)
	}
	h.want(h.packet(with(sendOnly, 0), testHead), "ack 0 63 msn=0")
	h.host.Do(func() {
		if h.q.Post(writeOp(4)) {
			t.Error("takes an operation")
		}
	})
}

// TestStalledPath checks the reports of a path without responses for Timing.Stall, with a response again, or with
// another port.
func TestStalledPath(t *testing.T) {
	h := newHand(t, Config{Timing: rdma.Timing{Stall: 20 * time.Millisecond}})
	want := func(stalls ...bool) {
		t.Helper()
		if !slices.Equal(h.stalls, stalls) {
			t.Errorf("stalled %v, want %v", h.stalls, stalls)
		}
		h.stalls = nil
	}
	h.now += time.Hour // idle
	h.post(writeOp(4), writeOp(4))
	begin := h.now
	h.want(h.sleep())
	if d := h.now - begin; d != 20*time.Millisecond {
		t.Errorf("after %v", d)
	}
	want(true)
	h.want(h.sleep(), "write 0? at 0x2000+4 4 bytes") // the retransmission timer
	want()
	h.packet(ack(0, 0x1f), "")
	want(false)
	h.sleep() // the timer fires too early
	h.sleep()
	want(true)
	h.host.Do(func() {
		h.q.SetPaths([]rdma.Path{{Port: 50001, Share: 1, Sent: h.paths[0].Sent, Again: h.paths[0].Again}})
	})
	want(false)
	h.now += time.Minute // the process is stopped, and the response has arrived meanwhile
	h.sleep()
	want()
	h.packet(ack(1, 0x1f), "")
	want()
	h.complete(nil, nil)
	h.count("stalls", 2)
}

// TestTimeOfAStoppedProcess checks that such time does not count: the response may wait in the socket while the timer
// fires.
func TestTimeOfAStoppedProcess(t *testing.T) {
	h := newHand(t, Config{})
	h.post(writeOp(4), writeOp(4))
	for range 2 {
		h.now += time.Minute
		h.want(h.sleep(), "write 0? at 0x2000+4 4 bytes")
	}
	h.packet(ack(1, 0x1f), "")
	h.complete(nil, nil)
	if h.failed != nil {
		t.Error(h.failed)
	}
}

func TestRefused(t *testing.T) {
	for syndrome, want := range map[uint8]error{nakInvalid: rdma.ErrRemoteInvalid, nakAccess: rdma.ErrRemoteAccess, nakOperational: rdma.ErrRemoteOperation} {
		h := newHand(t, Config{})
		h.post(writeOp(4), writeOp(3*full), writeOp(4))
		h.want(h.packet(ack(2, syndrome), ""))
		h.complete(nil, want, rdma.ErrFlushed)
		if !errors.Is(h.failed, want) {
			t.Errorf("failed with %v, want %v", h.failed, want)
		}
	}
}

func TestAnswersToNothing(t *testing.T) {
	h := newHand(t, Config{})
	h.want(h.packet(ack(-1, 0x1f), "")) // acknowledges no request
	h.want(h.packet(ack(0, 0x1f), ""))  // no request is outstanding
	h.post(writeOp(4), readOp(4))
	h.want(h.packet(ack(2, 0x1f), ""))
	h.want(h.packet(ack(1<<22, nakAccess), ""))
	answer := ack(0, 0x1f)
	answer.opcode = readOnly
	h.want(h.packet(answer, "text")) // a READ response to a WRITE
	answer.opcode = atomicAck
	h.want(h.packet(answer, ""))
	h.want(h.packet(ack(0, 0x40), ""))          // reserved
	h.want(h.packet(ack(0, nakSequence+4), "")) // reserved
	h.count("bad_responses", 7)
	h.want(h.packet(ack(-5, nakAccess), ""))
	h.count("duplicates", 2)
	h.complete()
	if h.failed != nil {
		t.Error(h.failed)
	}
	h.packet(ack(0, 0x1f), "")
	h.complete(nil)
}

func TestPathChanges(t *testing.T) {
	h := newHand(t, Config{})
	h.packet(with(sendOnly, 0), testHead)
	h.sleep()
	h.post(writeOp(2*full), writeOp(4))
	h.packet(ack(0, 0x1f), "")
	next := []rdma.Path{{Port: 50001, Sent: new(atomic.Uint64), Again: new(atomic.Uint64)}}
	h.sent = nil
	h.host.Do(func() { h.q.SetPaths(next) })
	// Sequence numbers stay, and the peer gets an acknowledgement of the executed requests.
	h.want(h.sent, "ack 0 1f msn=1", "write-last 1? 256 bytes", "write 2? at 0x2000+4 4 bytes")
	for _, p := range h.sent {
		if p.port != 50001 {
			t.Errorf("%v by port %d", p, p.port)
		}
	}
	if n := next[0].Again.Load(); n != full+4 {
		t.Errorf("%d bytes sent again by the new path", n)
	}
	if h.paths[0].Again.Load() != 0 || next[0].Sent.Load() != 0 {
		t.Error("counted for the wrong path")
	}
	h.sent = nil
	h.host.Do(func() { h.q.SetPaths(next) })
	h.want(h.sent) // nothing has changed
	h.packet(ack(2, 0x1f), "")
	h.complete(nil, nil)
	h.count("window_cuts", 0)
}

func TestPostWaitsForRoom(t *testing.T) {
	h := newHand(t, Config{MaxOp: 1000, Window: 1000, Depth: 4})
	try := func(op *rdma.Op) (ok bool) {
		h.host.Do(func() { ok = h.host.Post(h.q, op) })
		return ok
	}
	big := sendOp(1000) // longer than the window with its head; accepted because it is alone
	if !try(big) || try(writeOp(0)) {
		t.Error("the window is not what is outstanding")
	}
	h.packet(ack(3, 0x1f), "")
	for i := range 5 {
		if got := try(writeOp(100)); got != (i < 4) {
			t.Errorf("%d: %v", i, got)
		}
	}
	h.rooms = 0
	h.packet(ack(4, 0x1f), "")
	h.packet(ack(5, 0x1f), "")
	if h.rooms != 1 {
		t.Errorf("Room was called %d times", h.rooms)
	}
}

// TestCallsFromComplete checks that calls of the host from Complete are safe.
func TestCallsFromComplete(t *testing.T) {
	h := newHand(t, Config{})
	h.post(writeOp(4), writeOp(4), writeOp(4))
	h.calls = []func(){func() { h.calls = nil; h.q.Close() }}
	h.want(h.packet(ack(1, 0x1f), ""))
	h.complete(nil, rdma.ErrFlushed, rdma.ErrFlushed)
	if h.failed != nil {
		t.Error(h.failed)
	}
}

func TestConnectRefusesNonsense(t *testing.T) {
	h := newHand(t, Config{})
	good := h.q.Local()
	connect := func(change func(b []byte) []byte, paths []rdma.Path) error {
		h.core.cfg.Random = func() uint32 { return 0x43 }
		h.core.graves = graveyard{} // its number may be reused
		ch, err := h.core.Channel(rdma.ChannelConfig{Remote: handAddress})
		if err != nil {
			t.Fatal(err)
		}
		defer ch.Close()
		return ch.Connect(change(slices.Clone(good)), paths)
	}
	same := func(b []byte) []byte { return b }
	if err := connect(same, h.paths); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(b []byte) []byte{
		"want 16 bytes":      func(b []byte) []byte { return b[:15] },
		"of version 1":       func(b []byte) []byte { b[0] = 2; return b },
		"heads have 32":      func(b []byte) []byte { b[1] = 32; return b },
		"MTU 0":              func(b []byte) []byte { b[2], b[3] = 0, 0; return b },
		"atomics 0":          func(b []byte) []byte { b[4], b[5] = 0, 0; return b },
		"number 1,":          func(b []byte) []byte { binary.BigEndian.PutUint32(b[8:], 1); return b },
		"first PSN 33554430": func(b []byte) []byte { b[12] = 1; return b },
	} {
		if err := connect(change, h.paths); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if err := connect(same, nil); err == nil {
		t.Error("connects without a path")
	}
	if err := h.q.Connect(good, h.paths); err == nil {
		t.Error("connects twice")
	}
	if _, err := h.core.Channel(rdma.ChannelConfig{Remote: netip.MustParseAddr("fd00::1")}); err == nil {
		t.Error("IPv6 from an IPv4 address")
	}
}

func TestNumbersRest(t *testing.T) {
	h := newHand(t, Config{})
	numbers := []uint32{0, 1, 0x42, 0x43, 5, 0x42, 0x43, 0x44, 5}
	h.core.cfg.Random = func() uint32 { n := numbers[0]; numbers = numbers[1:]; return n }
	ch, _ := h.core.Channel(rdma.ChannelConfig{Remote: handAddress}) // 0x42 is in use
	q := ch.(*queuePair)
	if err := ch.Connect(h.q.Local(), h.paths); err != nil || q.qpn != 0x43 {
		t.Fatal(err, q.qpn)
	}
	h.host.Do(func() { ch.Close(); h.host.Close(h.q) })
	ch, _ = h.core.Channel(rdma.ChannelConfig{Remote: handAddress})
	if n := ch.(*queuePair).qpn; n != 0x44 {
		t.Errorf("number %#x", n)
	}
	for i := range 3 * maxGraves {
		h.core.graves.add(&grave{qpn: uint32(100 + i)})
	}
	if n := len(h.core.graves.byNumber); n != maxGraves || len(h.core.graves.order) != maxGraves {
		t.Errorf("%d graves", n)
	}
}

func TestConfigOutOfRange(t *testing.T) {
	for _, cfg := range []Config{{MTU: 1500}, {MaxOp: 1 << 21, Window: 1 << 22}, {Window: 100}, {Depth: -1}, {MaxReadAtomic: 200}, {HeadSize: 33}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%+v is taken", cfg)
				}
			}()
			NewCore(cfg, nil)
		}()
	}
}
