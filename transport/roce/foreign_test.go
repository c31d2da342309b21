package roce

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fared/fared/transport/rdma"
	"github.com/fared/fared/transport/rdma/rdmatest"
)

// TestIdentifications checks that packets of a peer that is not a socket are accepted with any IPv4 identification, and
// those of a socket with the identifications of batches alone. The ICRCs are calculated bit by bit.
func TestIdentifications(t *testing.T) {
	for _, test := range []struct {
		name  string
		flags uint16
		id    uint16
		fine  bool
	}{
		{"socket", flagSocket, maxBatch - 1, true},
		{"socket, not its identification", flagSocket, maxBatch, false},
		{"NIC", 0, maxBatch, true},
		{"NIC, highest identification", 0, anyID, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHand(t, Config{})
			ch, err := h.core.Channel(rdma.ChannelConfig{Remote: handAddress})
			if err != nil {
				t.Fatal(err)
			}
			q := ch.(*queuePair)
			remote := h.q.Local()
			binary.BigEndian.PutUint16(remote[6:], test.flags)
			binary.BigEndian.PutUint32(remote[8:], handPeer)
			binary.BigEndian.PutUint32(remote[12:], handFirst)
			if err := ch.Connect(remote, h.paths); err != nil {
				t.Fatal(err)
			}
			p := with(writeOnly, 0)
			p.qpn, p.length, p.ackReq = q.qpn, 4, true
			d := h.datagram(p, "text")
			whole := ipPacket(netip.AddrPortFrom(handAddress, 60000), netip.AddrPortFrom(ourAddress, DefaultPort), test.id, d)
			icrc := dumbICRC(whole[:len(whole)-icrcSize])
			copy(d[len(d)-icrcSize:], icrc[:])
			if fine := len(h.give(d)) == 1; fine != test.fine || fine != (string(h.memory[:4]) == "text") {
				t.Errorf("accepted: %v, memory %q", fine, h.memory[:4])
			}
			h.host.Do(func() { h.host.Close(ch) })
		})
	}
}

// TestEmptyOperationsNeedNoKey checks that WRITEs and READs of no bytes are executed with a key that no region has
// (C9-88).
func TestEmptyOperationsNeedNoKey(t *testing.T) {
	h := newHand(t, Config{})
	w := with(writeOnly, 0)
	w.key, w.ackReq = 1, true
	h.want(h.packet(w, ""), "ack 0 1f msn=1")
	r := with(readRequest, 1)
	r.key = 1
	h.want(h.packet(r, ""), "read-only 1 1f msn=2")
	h.want(h.packet(r, ""), "read-only 1 1f msn=2") // a duplicate
	if h.failed != nil {
		t.Error(h.failed)
	}
}

// TestTimeoutFollowsRoundTrips checks that the first timeout is Timing.Retransmit, and that measured round trips
// determine later ones.
func TestTimeoutFollowsRoundTrips(t *testing.T) {
	h := newHand(t, Config{})
	timeout := func(n int) time.Duration {
		t.Helper()
		h.post(writeOp(4))
		before := h.now
		var again []packet
		for len(again) == 0 { // a timer that has moved to a later time expires in vain
			again = h.sleep()
		}
		h.want(again, h.writes(n)...)
		return h.now - before
	}
	if d := timeout(0); d != 50*time.Millisecond {
		t.Errorf("without a measurement: %v", d)
	}
	h.now += time.Millisecond
	h.packet(ack(0, 0x1f), "") // the answer to a retransmission measures nothing
	if d := timeout(1); d != 50*time.Millisecond {
		t.Errorf("after a retransmission: %v", d)
	}
	h.packet(ack(1, 0x1f), "")
	for n := 2; n < 60; n++ {
		h.post(writeOp(4))
		h.now += 20 * time.Millisecond
		h.packet(ack(n, 0x1f), "")
	}
	// The variance of equal samples tends to 0: the limit is the round trip and minTimeout.
	if d := timeout(60); d < 25*time.Millisecond || d > 26*time.Millisecond {
		t.Errorf("round trips of 20 ms: %v", d)
	}
	h.packet(ack(60, 0x1f), "")
	for n := 61; n < 200; n++ {
		h.post(writeOp(4))
		h.now += 10 * time.Microsecond
		h.packet(ack(n, 0x1f), "")
	}
	if d := timeout(200); d < minTimeout+10*time.Microsecond || d > minTimeout+20*time.Microsecond {
		t.Errorf("round trips of 10 µs: %v", d)
	}
	h.host.Do(func() { h.host.Close(h.q) })
}

// writes returns the string of the WRITE of 4 bytes with the nth of the core's sequence numbers.
func (h *hand) writes(n int) []string {
	return []string{packet{header: header{opcode: writeOnly, psn: uint32(ourFirst+n) & mask24, ackReq: true, address: 0x2000, length: 4}, payload: "wwww"}.String()}
}

// TestMTUFollowsTheRoute checks the path MTU of queue pairs on routes of several sizes.
func TestMTUFollowsTheRoute(t *testing.T) {
	addresses := [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	spaces := newBed(t, addresses)
	for _, test := range []struct {
		link           string
		mtu, want      int
		limitedByRoute uint64
	}{
		{"1500", 0, 1024, 0},
		{"1500", 4096, 1024, 1},
		{"1500", 512, 512, 0},
		{"4160", 4096, 4096, 0}, // 20 IP, 8 UDP, 12 BTH, 16 RETH, 4 ImmDt, 4 ICRC
		{"4159", 4096, 2048, 1},
		{"9000", 0, 4096, 0},
		{"300", 0, 0, 0},
	} {
		for _, ns := range spaces {
			ns.IP("link", "set", "eth0", "mtu", test.link)
		}
		transport := New(Config{MTU: test.mtu})
		host, err := rdmatest.NewHost(addresses[0], inNamespace{transport, spaces[0]}, func() time.Duration { return time.Second }, new(sync.Mutex), rdmatest.Hooks{})
		if err != nil {
			t.Fatal(err)
		}
		host.Do(func() {
			ch, err := host.Channel(rdma.ChannelConfig{Remote: addresses[1]})
			got := 0
			if err == nil {
				got = int(binary.BigEndian.Uint16(ch.Local()[2:]))
			}
			if got != test.want || transport.Counters()["mtu_limited_by_route"] != test.limitedByRoute {
				t.Errorf("MTU %d on links of %s: %d, want %d (%v)", test.mtu, test.link, got, test.want, err)
			}
		})
		transport.Stop()
	}
}

// TestNoProgressNamesTheMTU checks the error of a queue pair whose route has shrunk below its packets.
func TestNoProgressNamesTheMTU(t *testing.T) {
	h := newHand(t, Config{Timing: rdma.Timing{GiveUp: 100 * time.Millisecond}})
	h.core.out = shrunken{h}
	h.post(writeOp(4))
	for len(h.completed) == 0 {
		h.sleep()
	}
	h.complete(rdma.ErrRetryExceeded)
	if want := "the route carries IP packets of 296 bytes, and those of the path MTU 256 have up to 320"; h.failed == nil || !errors.Is(h.failed, rdma.ErrRetryExceeded) ||
		!strings.Contains(h.failed.Error(), want) {
		t.Errorf("failed with %v, want %q", h.failed, want)
	}
}

// shrunken is a hand whose routes carry 296 bytes.
type shrunken struct{ *hand }

func (shrunken) PathMTU(netip.Addr) (int, error) { return 296, nil }
