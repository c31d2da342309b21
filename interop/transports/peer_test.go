package transports

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/interop/transports/rocepeer"
	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/roce"
)

// foreign is a set of one slot, whose queue pair is connected with one of rocepeer over a cable.
type foreign struct {
	t      *testing.T
	device *rdma.Device
	set    *rdma.Set
	cq     *rdma.CQ
	mr     *rdma.MR
	peer   *rocepeer.Peer
	posted uint64
}

// The peer's memory, and an R_Key that is registered at neither end.
const (
	peerKey     = 0x4711
	peerLocked  = 0x4712 // grants nothing
	peerAddress = 0x7f0000001000
	wrongKey    = 0xdead0001
)

func newForeign(t *testing.T, timing rdma.Timing) *foreign {
	netnstest.Require(t, "ethtool")
	c := newCable(t)
	// A veth pair may carry whole batches; a wire carries packets.
	for _, n := range []*netnstest.Namespace{c.a, c.b} {
		n.Run("ethtool", "-K", "eth0", "tx-udp-segmentation", "off", "gso", "off")
	}
	f := &foreign{t: t}
	c.a.Must(func() (err error) {
		f.device, err = rdma.Open(rdma.Config{Address: ends[0], Transports: []rdma.Transport{roce.New(roce.Config{Timing: timing})}})
		return err
	})
	t.Cleanup(f.device.Close)
	pd := f.device.AllocPD()
	f.cq = f.device.CreateCQ()
	var err error
	if f.mr, err = pd.Alloc(1<<20, rdma.LocalWrite|rdma.RemoteWrite|rdma.RemoteRead|rdma.RemoteAtomic); err != nil {
		t.Fatal(err)
	}
	slot := []rdma.Slot{{Slot: 0, Plane: "p0", Port: 51234, Share: 1e9}}
	set, offer, err := f.device.Offer(ends[1], rdma.SetConfig{PD: pd, SendCQ: f.cq, RecvCQ: f.cq}, slot)
	if err != nil {
		t.Fatal(err)
	}
	f.set = set
	own, err := roce.ParseParameters(offer.GetChannels()[0].GetParameters())
	if err != nil {
		t.Fatal(err)
	}
	const qpn, psn, mtu = 0x1234, 0xfffff0, 1024 // sequence numbers wrap soon
	c.b.Must(func() (err error) {
		f.peer, err = rocepeer.Open(rocepeer.Config{Local: ends[1], Remote: ends[0], QPN: qpn, PSN: psn, MTU: mtu})
		return err
	})
	f.peer.Register(peerKey, &rocepeer.Region{Address: peerAddress, Bytes: make([]byte, 1<<20), Read: true, Write: true, Atomically: true})
	f.peer.Register(peerLocked, &rocepeer.Region{Address: peerAddress, Bytes: make([]byte, 4096)})
	f.peer.Connect(own.QPN, own.PSN, own.MTU)
	theirs := roce.Parameters{QPN: qpn, PSN: psn, MTU: mtu, ReadAtomic: 4}
	if err := set.Finish(&farev1.ConnectAnswer{Channels: []*farev1.ChannelEnd{{Transport: "roce", Slots: []uint32{0}, Parameters: theirs.Bytes()}}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.peer.Close()
		if err := f.peer.Violations(); err != nil {
			t.Errorf("packets that violate the specification: %v", err)
		}
	})
	return f
}

// next waits for the next completion.
func (f *foreign) next() rdma.Completion {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	var c [1]rdma.Completion
	if _, err := f.cq.Wait(ctx, c[:]); err != nil {
		f.t.Fatalf("no completion: %v; counters %v", err, f.device.Counters())
	}
	return c[0]
}

// do posts a work request on the first n bytes of the region, and waits for its completion.
func (f *foreign) do(wr rdma.SendWR, n int) error {
	f.t.Helper()
	f.posted++
	wr.ID, wr.Local = f.posted, rdma.SGE{MR: f.mr, Length: n}
	if _, err := f.set.PostSend(wr); err != nil {
		f.t.Fatal(err)
	}
	c := f.next()
	if c.ID != wr.ID || c.Opcode != wr.Opcode {
		f.t.Errorf("completion %+v of %v", c, wr.Opcode)
	}
	return c.Err
}

// fill fills the first n bytes of the local region with bytes that depend on salt, and returns a copy of them.
func (f *foreign) fill(n, salt int) []byte {
	f.device.Do(func() {
		b := f.mr.Bytes()[:n]
		for i := range b {
			b[i] = byte(i*7 + i>>8 + salt)
		}
	})
	return f.memory()[:n]
}

// memory returns a copy of the local region, taken with the device's lock, which the responder holds while it writes.
func (f *foreign) memory() (b []byte) {
	f.device.Do(func() { b = bytes.Clone(f.mr.Bytes()) })
	return b
}

// sizes are message lengths around packets of 1,024 bytes, and a message of many packets.
var sizes = []int{0, 1, 7, 1024, 1025, 5000, 200_000}

func pattern(n, salt int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*13 + i>>8 + salt)
	}
	return b
}

// TestForeignPeerIsTarget checks every operation of a set toward an implementation that shares no code with it.
func TestForeignPeerIsTarget(t *testing.T) {
	f := newForeign(t, rdma.Timing{})
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	for i, n := range sizes {
		imm := uint32(0xa0b0c000 + i)
		for _, op := range []rdma.Opcode{rdma.Send, rdma.SendImmediate, rdma.WriteImmediate} {
			f.peer.PostReceive(n)
			want := f.fill(n, i+int(op))
			must(fmt.Sprint(op, n), f.do(rdma.SendWR{Opcode: op, Immediate: imm, RemoteAddress: peerAddress + 8, RemoteKey: peerKey}, n))
			all := f.peer.Messages()
			if len(all) != 3*i+int(op)+1 && op != rdma.WriteImmediate || len(all) == 0 {
				t.Fatalf("%v of %d bytes: %d messages", op, n, len(all))
			}
			m := all[len(all)-1]
			data := m.Data
			if op == rdma.WriteImmediate {
				data = f.peer.Memory(peerKey)[8:][:n]
			}
			if m.Write != (op == rdma.WriteImmediate) || m.HasImm != (op != rdma.Send) || m.HasImm && m.Imm != imm || m.Bytes != n || !bytes.Equal(data, want) {
				t.Errorf("%v of %d bytes arrives as %d bytes, write %v, immediate %v %#x", op, n, m.Bytes, m.Write, m.HasImm, m.Imm)
			}
		}
		want, key := f.fill(n, i), uint32(peerKey)
		if n == 0 {
			key = wrongKey // C9-88: a message of no bytes needs no valid key
		}
		must("WRITE", f.do(rdma.SendWR{Opcode: rdma.Write, RemoteAddress: peerAddress + 4096, RemoteKey: key}, n))
		if got := f.peer.Memory(peerKey)[4096:][:n]; !bytes.Equal(got, want) {
			t.Errorf("WRITE of %d bytes differs", n)
		}
		f.device.Do(func() { clear(f.mr.Bytes()) })
		must("READ", f.do(rdma.SendWR{Opcode: rdma.Read, RemoteAddress: peerAddress + 4096, RemoteKey: key}, n))
		if !bytes.Equal(f.memory()[:n], want) {
			t.Errorf("READ of %d bytes differs", n)
		}
	}
	word := func() uint64 { return binary.NativeEndian.Uint64(f.peer.Memory(peerKey)) }
	must("FetchAdd", f.do(rdma.SendWR{Opcode: rdma.FetchAdd, Add: 5, RemoteAddress: peerAddress, RemoteKey: peerKey}, 8))
	must("FetchAdd", f.do(rdma.SendWR{Opcode: rdma.FetchAdd, Add: 1 << 40, RemoteAddress: peerAddress, RemoteKey: peerKey}, 8))
	if was := binary.NativeEndian.Uint64(f.memory()); was != 5 || word() != 5+1<<40 {
		t.Errorf("FetchAdd returned %d, the word is %d", was, word())
	}
	for _, swap := range []struct{ compare, swap, want uint64 }{{4, 9, 5 + 1<<40}, {5 + 1<<40, 9, 9}} {
		must("CmpSwap", f.do(rdma.SendWR{Opcode: rdma.CompareSwap, Compare: swap.compare, Swap: swap.swap, RemoteAddress: peerAddress, RemoteKey: peerKey}, 8))
		if was := binary.NativeEndian.Uint64(f.memory()); was != 5+1<<40 || word() != swap.want {
			t.Errorf("CmpSwap returned %d, the word is %d", was, word())
		}
	}
	counts, _, _ := f.peer.Counts()
	for op := byte(rocepeer.SendFirst); op <= rocepeer.FetchAdd; op++ {
		if response := op >= rocepeer.ReadFirst && op <= rocepeer.AtomicAcknowledge; counts[op] == 0 && !response {
			t.Errorf("opcode %d has not occurred", op)
		}
	}
}

// TestForeignPeerIsInitiator checks every operation of the foreign peer toward a set.
func TestForeignPeerIsInitiator(t *testing.T) {
	f := newForeign(t, rdma.Timing{})
	must := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	key, address := f.mr.Key(), f.mr.Address()
	receive := func() {
		if _, err := f.set.PostRecv(rdma.RecvWR{ID: 99, Local: rdma.SGE{MR: f.mr, Offset: 512 << 10, Length: 256 << 10}}); err != nil {
			t.Fatal(err)
		}
	}
	arrives := func(what string, want rdma.Completion) {
		t.Helper()
		want.Set, want.ID = f.set, 99
		if c := f.next(); c != want {
			t.Errorf("%s arrives as %+v, want %+v", what, c, want)
		}
	}
	for i, n := range sizes {
		imm, data := uint32(0xc0000000+i), pattern(n, i)
		receive()
		must("SEND", f.peer.Send(data, nil))
		arrives("SEND", rdma.Completion{Opcode: rdma.Recv, Bytes: n})
		if !bytes.Equal(f.memory()[512<<10:][:n], data) {
			t.Errorf("SEND of %d bytes differs", n)
		}
		receive()
		must("SEND with immediate", f.peer.Send(data, &imm))
		arrives("SEND with immediate", rdma.Completion{Opcode: rdma.Recv, Bytes: n, HasImmediate: true, Immediate: imm})
		receive()
		must("WRITE with immediate", f.peer.Write(data, address, key, &imm))
		arrives("WRITE with immediate", rdma.Completion{Opcode: rdma.RecvWrite, Bytes: n, HasImmediate: true, Immediate: imm})
		if !bytes.Equal(f.memory()[:n], data) {
			t.Errorf("WRITE with immediate of %d bytes differs", n)
		}
		other, otherKey := pattern(n, i+100), key
		if n == 0 {
			otherKey = wrongKey
		}
		must("WRITE", f.peer.Write(other, address+3, otherKey, nil))
		if !bytes.Equal(f.memory()[3:][:n], other) {
			t.Errorf("WRITE of %d bytes differs", n)
		}
		got, err := f.peer.Read(n, address+3, otherKey)
		must("READ", err)
		if !bytes.Equal(got, other) {
			t.Errorf("READ of %d bytes differs", n)
		}
	}
	f.device.Do(func() { binary.NativeEndian.PutUint64(f.mr.Bytes()[1000:], 7) })
	was, err := f.peer.Add(address+1000, key, 3)
	must("FetchAdd", err)
	again, err := f.peer.Swap(address+1000, key, 10, 77)
	must("CmpSwap", err)
	other, err := f.peer.Swap(address+1000, key, 10, 78)
	must("CmpSwap", err)
	if word := binary.NativeEndian.Uint64(f.memory()[1000:]); was != 7 || again != 10 || other != 77 || word != 77 {
		t.Errorf("atomics returned %d, %d and %d, the word is %d", was, again, other, word)
	}
	if c := f.device.Counters()["roce"]; c["bad_icrc"] > 0 || c["malformed"] > 0 || c["nonzero_ip_id"] == 0 {
		t.Errorf("counters %v", c)
	}
}

// TestForeignPeerRefuses checks the completions of operations that the foreign peer refuses, each of which ends the
// set.
func TestForeignPeerRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		wr   rdma.SendWR
		n    int
		want error
	}{
		"WRITE, wrong key":  {rdma.SendWR{Opcode: rdma.Write, RemoteAddress: peerAddress, RemoteKey: wrongKey}, 3000, rdma.ErrRemoteAccess},
		"WRITE, no right":   {rdma.SendWR{Opcode: rdma.Write, RemoteAddress: peerAddress, RemoteKey: peerLocked}, 8, rdma.ErrRemoteAccess},
		"READ, bounds":      {rdma.SendWR{Opcode: rdma.Read, RemoteAddress: peerAddress + 1<<20 - 7, RemoteKey: peerKey}, 8, rdma.ErrRemoteAccess},
		"atomic, wrong key": {rdma.SendWR{Opcode: rdma.FetchAdd, RemoteAddress: peerAddress, RemoteKey: wrongKey}, 8, rdma.ErrRemoteAccess},
		"SEND, too long":    {rdma.SendWR{Opcode: rdma.Send}, 101, rdma.ErrRemoteInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			f := newForeign(t, rdma.Timing{})
			f.peer.PostReceive(100)
			if err := f.do(test.wr, test.n); !errors.Is(err, test.want) {
				t.Errorf("completes with %v, want %v", err, test.want)
			}
			<-f.set.Done()
		})
	}
}

// TestForeignPeerIsRefused checks the NAKs that a set sends, and that its queue pair answers afterwards.
func TestForeignPeerIsRefused(t *testing.T) {
	for name, test := range map[string]struct {
		request func(f *foreign) error
		want    byte // syndrome
	}{
		"WRITE, wrong key":  {func(f *foreign) error { return f.peer.Write(pattern(3000, 1), f.mr.Address(), wrongKey, nil) }, 0x62},
		"WRITE, bounds":     {func(f *foreign) error { return f.peer.Write(pattern(8, 1), f.mr.Address()+1<<20-7, f.mr.Key(), nil) }, 0x62},
		"READ, wrong key":   {func(f *foreign) error { _, err := f.peer.Read(8, f.mr.Address(), wrongKey); return err }, 0x62},
		"atomic, alignment": {func(f *foreign) error { _, err := f.peer.Add(f.mr.Address()+4, f.mr.Key(), 1); return err }, 0x62},
		"SEND, too long":    {func(f *foreign) error { return f.peer.Send(pattern(2001, 1), nil) }, 0x61},
		"middle first":      {func(f *foreign) error { return f.peer.SendRest(pattern(3000, 1)) }, 0x61},
	} {
		t.Run(name, func(t *testing.T) {
			f := newForeign(t, rdma.Timing{})
			if _, err := f.set.PostRecv(rdma.RecvWR{Local: rdma.SGE{MR: f.mr, Length: 2000}}); err != nil {
				t.Fatal(err)
			}
			before := f.memory()[2000:]
			var nak rocepeer.NAK
			if err := test.request(f); !errors.As(err, &nak) || nak.Syndrome != test.want {
				t.Errorf("answered with %v, want syndrome %#x", err, test.want)
			}
			if c := f.next(); c.Opcode != rdma.Recv || c.Err == nil {
				t.Errorf("the receive completes with %+v", c)
			}
			<-f.set.Done()
			if !bytes.Equal(before, f.memory()[2000:]) {
				t.Error("memory has changed")
			}
		})
	}
}

// TestForeignPeerGaps checks recovery from dropped packets in both directions.
func TestForeignPeerGaps(t *testing.T) {
	f := newForeign(t, rdma.Timing{})
	once := func(number int) func(int) bool {
		return func(i int) bool {
			if i == number {
				number = -1
				return true
			}
			return false
		}
	}
	data := pattern(20_000, 3)
	f.peer.Skip = once(5)
	if err := f.peer.Write(data, f.mr.Address(), f.mr.Key(), nil); err != nil || !bytes.Equal(f.memory()[:len(data)], data) {
		t.Errorf("WRITE with a gap: %v", err)
	}
	f.peer.Skip = nil
	if f.peer.Sequences != 1 {
		t.Errorf("%d sequence NAKs, want 1", f.peer.Sequences)
	}
	dropped := 0
	f.peer.SetFilter(func(p rocepeer.Packet) bool {
		if p.Op == rocepeer.WriteMiddle && dropped < 1 {
			dropped++
			return false
		}
		return true
	})
	want := f.fill(20_000, 9)
	if err := f.do(rdma.SendWR{Opcode: rdma.Write, RemoteAddress: peerAddress, RemoteKey: peerKey}, len(want)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(f.peer.Memory(peerKey)[:len(want)], want) {
		t.Error("memory differs")
	}
	if c := f.device.Counters()["roce"]; c["naks_received"] != 1 || c["retransmitted"] == 0 {
		t.Errorf("counters %v", c)
	}
}

// TestForeignPeerReadsInParts reads with dropped requests and responses, which shrink the window: each READ is
// requested in parts, and each repeated request has to be a subset of one that the peer has executed, which the peer
// checks.
func TestForeignPeerReadsInParts(t *testing.T) {
	f := newForeign(t, rdma.Timing{})
	const n = 100_000
	want := pattern(n, 5)
	f.peer.Register(peerKey, &rocepeer.Region{Address: peerAddress, Bytes: want, Read: true})
	requests, responses := 0, 0
	f.peer.SetFilter(func(p rocepeer.Packet) bool {
		requests++
		return p.Op != rocepeer.ReadRequest || requests%11 != 5
	})
	f.peer.SetLoss(func(p rocepeer.Packet) bool {
		responses++
		return p.Op != rocepeer.Acknowledge && responses%47 == 20
	})
	for range 4 {
		if err := f.do(rdma.SendWR{Opcode: rdma.Read, RemoteAddress: peerAddress, RemoteKey: peerKey}, n); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(f.memory()[:n], want) {
			t.Fatal("the READ differs")
		}
		f.device.Do(func() { clear(f.mr.Bytes()) })
	}
	c := f.device.Counters()["roce"]
	if c["read_parts"] == 0 || c["window_cuts"] == 0 || c["retransmitted"] == 0 || c["bad_responses"] > 0 {
		t.Errorf("counters %v", c)
	}
}

// TestForeignPeerNotReady checks "receiver not ready" in both directions, for each kind of message that consumes a
// receive.
func TestForeignPeerNotReady(t *testing.T) {
	f := newForeign(t, rdma.Timing{})
	imm := uint32(1)
	for i, send := range []func(data []byte) error{
		func(data []byte) error { return f.peer.Send(data, nil) },
		func(data []byte) error { return f.peer.Write(data, f.mr.Address(), f.mr.Key(), &imm) },
		func([]byte) error { return f.peer.Write(nil, 0, wrongKey, &imm) },
	} {
		sent := make(chan error, 1)
		go func() { sent <- send(pattern(3000, i)) }()
		netnstest.Eventually(t, time.Minute, func() error {
			if n := f.device.Counters()["roce"]["rnr_sent"]; n <= uint64(i) {
				return fmt.Errorf("%d RNR NAKs", n)
			}
			return nil
		})
		if _, err := f.set.PostRecv(rdma.RecvWR{Local: rdma.SGE{MR: f.mr, Length: 4000}}); err != nil {
			t.Fatal(err)
		}
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
		if c := f.next(); c.Err != nil || c.Opcode != rdma.Recv && c.Opcode != rdma.RecvWrite {
			t.Errorf("completion %+v", c)
		}
	}
	for i, op := range []rdma.Opcode{rdma.Send, rdma.WriteImmediate} {
		if _, err := f.set.PostSend(rdma.SendWR{Opcode: op, Local: rdma.SGE{MR: f.mr, Length: 3000}, RemoteAddress: peerAddress, RemoteKey: peerKey}); err != nil {
			t.Fatal(err)
		}
		netnstest.Eventually(t, time.Minute, func() error {
			if _, _, n := f.peer.Counts(); n <= i {
				return fmt.Errorf("%d RNR NAKs", n)
			}
			return nil
		})
		f.peer.PostReceive(3000)
		if c := f.next(); c.Err != nil {
			t.Error(c.Err)
		}
	}
	if n := len(f.peer.Messages()); n != 2 {
		t.Errorf("%d messages, want 2", n)
	}
}

// TestForeignPeerEnds checks both directions of an end: a closed set refuses requests, and a vanished peer fails the
// set.
func TestForeignPeerEnds(t *testing.T) {
	f := newForeign(t, rdma.Timing{})
	if err := f.peer.Write(pattern(10, 1), f.mr.Address(), f.mr.Key(), nil); err != nil {
		t.Fatal(err)
	}
	f.set.Close()
	var nak rocepeer.NAK
	if err := f.peer.Write(pattern(10, 1), f.mr.Address(), f.mr.Key(), nil); !errors.As(err, &nak) || nak.Syndrome != 0x63 {
		t.Errorf("a closed queue pair answers %v, want a remote operational error", err)
	}

	f = newForeign(t, rdma.Timing{GiveUp: 500 * time.Millisecond})
	f.peer.SetFilter(func(rocepeer.Packet) bool { return false })
	if err := f.do(rdma.SendWR{Opcode: rdma.Write, RemoteAddress: peerAddress, RemoteKey: peerKey}, 10); !errors.Is(err, rdma.ErrRetryExceeded) {
		t.Errorf("completes with %v, want %v", err, rdma.ErrRetryExceeded)
	}
	<-f.set.Done()
}

// TestForeignPeerCongestion checks ECN in both directions: packets are ECN-capable, marked ones cause CNPs, and the
// peer's CNPs reduce the window and break nothing.
func TestForeignPeerCongestion(t *testing.T) {
	f := newForeign(t, rdma.Timing{})
	f.peer.Mark(true)
	for range 3 {
		if err := f.peer.Write(pattern(5000, 1), f.mr.Address(), f.mr.Key(), nil); err != nil {
			t.Fatal(err)
		}
	}
	f.peer.Mark(false)
	netnstest.Eventually(t, time.Minute, func() error {
		if counts, _, _ := f.peer.Counts(); counts[rocepeer.CongestionNotification] == 0 {
			return fmt.Errorf("no CNP; counters %v", f.device.Counters()["roce"])
		}
		return nil
	})
	before := f.device.Counters()["roce"]
	if err := f.peer.Write(pattern(5000, 1), f.mr.Address(), f.mr.Key(), nil); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		f.peer.SendRaw(rocepeer.Packet{Op: rocepeer.CongestionNotification, BECN: true, Payload: make([]byte, 16)})
		if err := f.do(rdma.SendWR{Opcode: rdma.Write, RemoteAddress: peerAddress, RemoteKey: peerKey}, 200_000); err != nil {
			t.Fatal(err)
		}
	}
	counts, capable, _ := f.peer.Counts()
	all := 0
	for _, n := range counts {
		all += n
	}
	if capable != all {
		t.Errorf("%d of %d packets are ECN-capable", capable, all)
	}
	c := f.device.Counters()["roce"]
	if c["packets_marked"] != before["packets_marked"] || c["packets_marked"] < 3 || c["cnps_received"] != 3 || c["malformed"] > 0 {
		t.Errorf("counters %v, before %v", c, before)
	}
	f.peer.Mark(true)
	if err := f.do(rdma.SendWR{Opcode: rdma.Read, RemoteAddress: peerAddress, RemoteKey: peerKey}, 200_000); err != nil {
		t.Fatal(err)
	}
	if after := f.device.Counters()["roce"]; after["packets_marked"] == c["packets_marked"] || after["cnps_sent"] == c["cnps_sent"] || after["read_parts"] == c["read_parts"] {
		t.Errorf("marked responses: counters %v, before %v", after, c)
	}
}
