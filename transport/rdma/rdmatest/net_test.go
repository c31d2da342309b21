package rdmatest

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/fared/fared/transport/internal/wire"
	"github.com/fared/fared/transport/rdma"
)

// probe is a core that records datagrams, and sends on command.
type probe struct {
	Core
	out      wire.Out
	net      *Net
	received []arrival
	ticks    []time.Duration
}

type arrival struct {
	At    time.Duration
	Port  uint16
	Bytes string
}

func (p *probe) Start(rdma.Host) error { return nil }
func (p *probe) Flush()                {}
func (p *probe) Stop()                 {}
func (p *probe) Tick()                 { p.ticks = append(p.ticks, p.net.Now()) }
func (p *probe) Receive(from netip.AddrPort, b []byte) {
	p.received = append(p.received, arrival{p.net.Now() - time.Second, from.Port(), string(b)})
}

// probes returns two of them on a network.
func probes(t *testing.T, c NetConfig) (n *Net, a, b *probe, flush func(), to netip.AddrPort) {
	n = NewNet(c)
	var ends [2]*End
	cores := [2]*probe{}
	for i := range cores {
		cores[i] = &probe{net: n}
		ends[i] = n.Transport(netip.AddrPortFrom(n.address(i), 0), func(out wire.Out) Core { cores[i].out = out; return cores[i] })
		if _, err := NewHost(n.address(i), ends[i], n.Now, nil, Hooks{}); err != nil {
			t.Fatal(err)
		}
	}
	return n, cores[0], cores[1], ends[0].Flush, netip.AddrPortFrom(n.address(1), 4791)
}

func forever(n *Net) { n.Run(func() bool { return false }, n.Now()+time.Hour) }

func TestNetDelivers(t *testing.T) {
	n, a, b, flush, to := probes(t, NetConfig{Planes: []Plane{{Delay: 30}, {Delay: 10}}})
	a.out.Send(to, 50000, []byte("he"), []byte("l"), []byte("lo"))
	a.out.Send(to, 50001, nil, []byte("plane 1 is faster"), nil)
	if n.Step() {
		t.Error("something happens before the flush")
	}
	flush()
	forever(n)
	want := []arrival{{10, 50001, "plane 1 is faster"}, {30, 50000, "hello"}}
	if diff := cmp.Diff(want, b.received); diff != "" {
		t.Errorf("received (-want +got):\n%s", diff)
	}
	if s := n.Stats(); s.Sent != 2 || s.Delivered != 2 || s.Bytes != 22 || s.Changed != 0 {
		t.Errorf("%+v", s)
	}
}

// TestNetReadsPayloadAtFlush checks that the payload is read at the flush, and head and tail at Send, as sockets do.
func TestNetReadsPayloadAtFlush(t *testing.T) {
	n, a, b, flush, to := probes(t, NetConfig{Planes: []Plane{{}}})
	head, payload := []byte("head "), []byte("payload")
	a.out.Send(to, 50000, head, payload, nil)
	copy(head, "HEAD")
	copy(payload, "PAY")
	flush()
	forever(n)
	if got := b.received[0].Bytes; got != "head PAYload" || n.Stats().Changed != 1 {
		t.Errorf("%q, %+v", got, n.Stats())
	}
}

// TestNetOrder checks that jitter does not reorder inside a plane, and that Reorder does.
func TestNetOrder(t *testing.T) {
	for _, reorder := range []float64{0, 0.2} {
		n, a, b, flush, to := probes(t, NetConfig{Planes: []Plane{{Delay: 1000, Jitter: 5000, Reorder: reorder}}})
		const count = 1000
		for i := range uint32(count) {
			a.out.Send(to, 50000, binary.BigEndian.AppendUint32(nil, i), nil, nil)
			flush()
			n.Run(func() bool { return false }, n.Now()+100)
		}
		forever(n)
		behind := 0
		for i := range b.received {
			if i > 0 && b.received[i].Bytes < b.received[i-1].Bytes {
				behind++
			}
		}
		if len(b.received) != count || (behind > 0) != (reorder > 0) {
			t.Errorf("reorder %v: %d received, %d after a later one", reorder, len(b.received), behind)
		}
	}
}

// TestNetChances checks that random faults are counted, and that without them nothing is lost.
func TestNetChances(t *testing.T) {
	n, a, b, flush, to := probes(t, NetConfig{Planes: []Plane{{Loss: 0.2, Duplicate: 0.1, Corrupt: 0.1}}})
	const count = 10000
	for range count {
		a.out.Send(to, 50000, []byte("0123456789"), nil, nil)
		flush()
	}
	forever(n)
	wrong := uint64(0)
	for _, r := range b.received {
		if r.Bytes != "0123456789" {
			wrong++
		}
	}
	s := n.Stats()
	within := func(name string, got, want uint64) {
		if got < want*8/10 || got > want*12/10 {
			t.Errorf("%s: %d, want about %d", name, got, want)
		}
	}
	within("lost", s.Lost, count/5)
	within("duplicated", s.Duplicated, count/10)
	within("corrupted", s.Corrupted, count/10)
	if s.Sent+s.Duplicated != s.Delivered+s.Lost || s.Delivered != uint64(len(b.received)) || wrong == 0 || wrong > s.Corrupted {
		t.Errorf("%+v, %d received, %d of them wrong", s, len(b.received), wrong)
	}
}

func TestNetPlanesGoDown(t *testing.T) {
	n, a, b, flush, to := probes(t, NetConfig{Planes: []Plane{{Delay: 100}, {Delay: 100}}})
	send := func(s string) {
		a.out.Send(to, 50000, []byte(s+" by 0"), nil, nil)
		a.out.Send(to, 50001, []byte(s+" by 1"), nil, nil)
		flush()
	}
	send("on its way")
	n.SetPlane(0, false)
	n.SetPlane(0, true) // datagrams in flight are lost all the same
	send("after")
	n.SetPlane(1, false)
	send("while down")
	forever(n)
	n.SetPlane(1, true)
	n.SetSender(n.address(0), 0, false)
	send("muted")
	forever(n)
	var got []string
	for _, r := range b.received {
		got = append(got, r.Bytes)
	}
	if diff := cmp.Diff([]string{"after by 0", "while down by 0", "muted by 1"}, got); diff != "" {
		t.Errorf("received (-want +got):\n%s", diff)
	}
	if s := n.Stats(); s.Sent != s.Delivered+s.Lost {
		t.Errorf("%+v", s)
	}
}

// TestNetRate checks that datagrams take the time that the plane's rate implies, and that a full queue drops.
func TestNetRate(t *testing.T) {
	n, a, b, flush, to := probes(t, NetConfig{Planes: []Plane{{Rate: 1e9, Queue: 3000}}})
	for range 5 {
		a.out.Send(to, 50000, make([]byte, 1000), nil, nil)
	}
	flush()
	forever(n)
	var at []time.Duration
	for _, r := range b.received {
		at = append(at, r.At)
	}
	if diff := cmp.Diff([]time.Duration{1000, 2000, 3000}, at); diff != "" || n.Stats().Dropped != 2 {
		t.Errorf("arrivals (-want +got):\n%s%+v", diff, n.Stats())
	}
}

// TestNextIsTrue checks that Next predicts the ID of the next datagram, in batches as UDP_SEGMENT makes them.
func TestNextIsTrue(t *testing.T) {
	var ids []uint16
	n, a, _, flush, to := probes(t, NetConfig{Planes: []Plane{{}}, Trace: func(d Datagram) { ids = append(ids, d.ID) }})
	other := netip.AddrPortFrom(n.address(1), 4444)
	var want []uint16
	send := func(to netip.AddrPort, port uint16, length int, id uint16) {
		t.Helper()
		if got := a.out.Next(to, port, length); got != id {
			t.Errorf("Next is %d, want %d (datagram %d)", got, id, len(want))
		}
		want = append(want, id)
		a.out.Send(to, port, nil, make([]byte, length), nil)
	}
	send(to, 50000, 100, 0)
	send(to, 50000, 100, 1)
	send(to, 50000, 50, 2) // shorter: the last of its batch
	send(to, 50000, 50, 0)
	send(to, 50000, 100, 0) // longer
	send(to, 50001, 100, 0) // another port
	send(other, 50001, 100, 0)
	for i := range maxSegments - 1 {
		send(other, 50001, 100, uint16(i+1))
	}
	send(other, 50001, 100, 0) // the batch has the maximum length
	send(to, 50001, 30000, 0)
	send(to, 50001, 30000, 1)
	send(to, 50001, 30000, 0) // the batch would have too many bytes
	flush()
	if diff := cmp.Diff(want, ids); diff != "" {
		t.Errorf("identifications (-want +got):\n%s", diff)
	}
	if got := a.out.Next(to, 50001, 100); got != 0 {
		t.Errorf("a batch goes on after the flush: %d", got)
	}
}

// TestWakeAt checks that the latest call counts, and that the core wakes up once for it, not before.
func TestWakeAt(t *testing.T) {
	n, a, _, _, _ := probes(t, NetConfig{Planes: []Plane{{}}})
	for _, step := range []struct {
		ask, want []time.Duration // relative to now; 0: never
	}{
		{[]time.Duration{5}, []time.Duration{5}},
		{[]time.Duration{10, 7}, []time.Duration{7}},
		{[]time.Duration{10, 20}, []time.Duration{20}},
		{[]time.Duration{30, 0}, nil},
		{[]time.Duration{30, 0, 20}, []time.Duration{20}},
		{[]time.Duration{20, 0, 30, 40}, []time.Duration{40}},
	} {
		begin := n.Now()
		a.ticks = nil
		for _, at := range step.ask {
			if at > 0 {
				at = begin + at*time.Millisecond
			}
			a.out.WakeAt(at)
		}
		forever(n)
		for i := range a.ticks {
			a.ticks[i] = (a.ticks[i] - begin) / time.Millisecond
		}
		if diff := cmp.Diff(step.want, a.ticks); diff != "" {
			t.Errorf("asked for %v (-want +got):\n%s", step.ask, diff)
		}
	}
	a.ticks = nil
	a.out.WakeAt(time.Millisecond) // in the past
	before := n.Now()
	if n.Step(); len(a.ticks) != 1 || a.ticks[0] <= before || a.ticks[0] > before+time.Millisecond {
		t.Errorf("a time that has passed: %v after %v", a.ticks, before)
	}
}

func TestNetBlames(t *testing.T) {
	n, a, b, flush, to := probes(t, NetConfig{Planes: []Plane{{}}, MTU: 100})
	a.out.Send(to, 50000, make([]byte, 100), nil, nil)
	flush()
	forever(n)
	if err := n.Err(); err != nil || len(b.received) != 1 {
		t.Errorf("%d received: %v", len(b.received), err)
	}
	a.out.Send(to, 50000, make([]byte, 101), nil, nil)
	flush()
	forever(n)
	if n.Err() == nil || len(b.received) != 1 {
		t.Errorf("%d received, and no error", len(b.received))
	}
}
