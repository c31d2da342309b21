package probe

import (
	"context"
	"net"
	"syscall"
	"testing"
	"time"
)

// TestUnread verifies that packets in a socket count as unread until they are read, and that a
// closed socket has none.
func TestUnread(t *testing.T) {
	to, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	from, err := net.DialUDP("udp4", nil, to.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	tr := &Traffic{readers: []syscall.Conn{from, to}}
	if tr.unread() {
		t.Error("unread before a packet was sent")
	}
	if _, err := from.Write([]byte("packet")); err != nil {
		t.Fatal(err)
	}
	if !tr.unread() {
		t.Error("nothing unread after a packet was sent over loopback")
	}
	if _, err := to.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	if tr.unread() {
		t.Error("unread after the packet was read")
	}
	to.Close()
	if tr.unread() {
		t.Error("a closed socket has something unread")
	}
}

// TestGatherEnds verifies that Gather does not wait for a lost packet as long as a socket has unread ones: they may be
// those of later tallies.
func TestGatherEnds(t *testing.T) {
	to, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if _, err := to.WriteTo([]byte("later"), to.LocalAddr()); err != nil {
		t.Fatal(err)
	}
	tr := &Traffic{readers: []syscall.Conn{to}, loopbacks: 1, lanes: 1, backlog: 2 * quiet}
	n := tr.newTally(1)
	n.sent[0].Add(1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if tr.Gather(ctx, n); ctx.Err() != nil {
		t.Error("Gather waits as long as a packet is unread")
	}
	if !tr.unread() {
		t.Error("the packet was read: this test has lost its subject")
	}
}

// TestPortsPending verifies that source ports are pending while only some are chosen: where none is, the data plane
// needs no choice.
func TestPortsPending(t *testing.T) {
	for _, test := range []struct {
		placed [][]bool // by sender and outlet
		want   bool
	}{
		{nil, false}, {[][]bool{{}, {}}, false}, {[][]bool{{true, true}, {true}}, false}, {[][]bool{{false}, {false, false}}, false},
		{[][]bool{{true, false}}, true}, {[][]bool{{true}, {}, {false}}, true},
	} {
		tr := &Traffic{}
		for _, all := range test.placed {
			o := &sender{}
			for _, placed := range all {
				o.order = append(o.order, &outlet{placed: placed})
			}
			tr.senders = append(tr.senders, o)
		}
		if got := tr.PortsPending(); got != test.want {
			t.Errorf("%v: %v", test.placed, got)
		}
	}
}

// TestCovered checks that a sender that has not sent to one of its destinations holds the others up, unless it is
// muted.
func TestCovered(t *testing.T) {
	tr := &Traffic{loopbacks: 2, lanes: 1}
	tr.now = tr.newTally(1)
	o := &sender{Traffic: tr, order: []*outlet{{pair: 1}, {pair: 2}}}
	tr.senders = []*sender{o, {Traffic: tr}}
	tr.now.sent[1].Store(2)
	tr.now.sent[2].Store(1)
	for n, want := range []bool{true, true, false} {
		if got := tr.Covered(uint64(n)); got != want {
			t.Errorf("%d packets to each: %v, want %v", n, got, want)
		}
	}
	o.muted = true
	if !tr.Covered(2) {
		t.Error("a muted sender is waited for")
	}
}
