package bpf

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestNeighbors checks which updates of the neighbor table change the addresses of frames.
func TestNeighbors(t *testing.T) {
	var none *neighbors
	if _, ok := none.macs(1, netip.MustParseAddr("10.0.0.1")); ok {
		t.Error("an address without SUNH")
	}
	none.forget(1)
	n := &neighbors{hops: map[hop][6]byte{}, own: map[int][6]byte{}}
	first, second := net.HardwareAddr{2, 0, 0, 0, 0, 1}, net.HardwareAddr{2, 0, 0, 0, 0, 2}
	for i, step := range []struct {
		kind    uint16
		addr    string
		state   int
		mac     net.HardwareAddr
		changes bool
		want    byte // last byte of the next hop's MAC address; 0 if it is not known
	}{
		{unix.RTM_NEWNEIGH, "10.0.0.1", unix.NUD_INCOMPLETE, nil, false, 0},
		{unix.RTM_NEWNEIGH, "10.0.0.1", unix.NUD_REACHABLE, first, true, 1},
		{unix.RTM_NEWNEIGH, "10.0.0.1", unix.NUD_STALE, first, false, 1},
		{unix.RTM_NEWNEIGH, "::ffff:10.0.0.1", unix.NUD_REACHABLE, second, true, 2},
		{unix.RTM_NEWNEIGH, "10.0.0.2", unix.NUD_REACHABLE, first, true, 2},
		{unix.RTM_NEWNEIGH, "10.0.0.1", unix.NUD_REACHABLE, first[:4], false, 2},
		{unix.RTM_DELNEIGH, "10.0.0.1", unix.NUD_STALE, second, false, 2},
		{unix.RTM_NEWNEIGH, "10.0.0.1", unix.NUD_FAILED, nil, true, 0},
		{unix.RTM_NEWNEIGH, "10.0.0.1", unix.NUD_FAILED, nil, false, 0},
	} {
		u := netlink.NeighUpdate{Type: step.kind, Neigh: netlink.Neigh{
			LinkIndex: 7, IP: netip.MustParseAddr(step.addr).AsSlice(), State: step.state, HardwareAddr: step.mac,
		}}
		if got := n.take(u); got != step.changes {
			t.Errorf("step %d: changes %v, want %v", i, got, step.changes)
		}
		hop := netip.MustParseAddr("10.0.0.1")
		if _, ok := n.macs(7, hop); ok {
			t.Errorf("step %d: an address of a device whose own address is not known", i)
		}
		n.own[7] = [6]byte{2, 0, 0, 0, 0, 9}
		macs, ok := n.macs(7, netip.Addr{}, hop)
		if ok != (step.want != 0) || macs[5] != step.want || ok && macs[11] != 9 {
			t.Errorf("step %d: %v, %v; want %d", i, macs, ok, step.want)
		}
		n.forget(7)
	}
}

// TestNeighborsDue checks that all next hops are requested once in askAll.
func TestNeighborsDue(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		after time.Duration
		want  bool
	}{{0, false}, {askAll, false}, {askAll + 1, true}} {
		n := &neighbors{asked: now}
		if got := n.due(now.Add(c.after)); got != c.want || n.due(now.Add(c.after)) {
			t.Errorf("%v after a request: %v, or twice", c.after, got)
		}
	}
}

// TestFollowEnds checks that follow ends with close also after a failed subscription.
func TestFollowEnds(t *testing.T) {
	n := &neighbors{quit: make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		n.follow(nil, nil)
		close(ended)
	}()
	n.close()
	<-ended
}
