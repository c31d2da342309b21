package daemon

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/daemon/internal/speaker"
)

// crafted returns an UPDATE of routes with an AS path and a next hop.
func crafted(path []uint32, hop netip.Addr, prefixes ...netip.Prefix) []byte {
	attrs := []byte{0x40, 1, 1, 0, 0x40, 2, byte(2 + 4*len(path)), 2, byte(len(path))}
	for _, as := range path {
		attrs = binary.BigEndian.AppendUint32(attrs, as)
	}
	attrs = append(append(attrs, 0x40, 3, 4), hop.AsSlice()...)
	body := binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(len(attrs)))
	body = append(body, attrs...)
	for _, p := range prefixes {
		body = append(append(body, byte(p.Bits())), p.Addr().AsSlice()[:(p.Bits()+7)/8]...)
	}
	return bgpMessage(2, body)
}

// send writes messages to the leaf's established session.
func (l *rawLeaf) send(messages ...[]byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range messages {
		l.write(b)
	}
}

// TestDroppedRoutesAreFaults checks that routes that a leaf sends and the guard drops are a fault with a remedy in
// status, log and metrics, one line for each change, until the routes are accepted or withdrawn; and that the usual
// other routes of a leaf are none.
func TestDroppedRoutesAreFaults(t *testing.T) {
	log := &lines{}
	s := shape{Planes: 2, SubPorts: 1}.Defaults()
	own := netip.MustParsePrefix(s.Loopbacks[0])
	r := newRig(t, s, rigOptions{leaves: announceAll(400e9, 1), deps: func(d *Deps) { d.Logger = slog.New(slog.NewTextHandler(log, nil)) }})
	r.settled(1)
	leaf := r.leaves[1]
	path := []uint32{uint32(leaf.as), 65001}
	third, ours := netip.MustParseAddr("192.0.2.7"), uint32(4200001000)
	dropped := func(want string) {
		t.Helper()
		eventually(t, "the faults "+want, func() bool { return r.faultsShown() == want })
	}

	// A default route, the subnets of links, loopbacks of switches and our own loopback are what a leaf sends.
	leaf.send(crafted(path, leaf.at, netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("10.255.1.2/31"), netip.MustParsePrefix("192.0.2.1/32")),
		crafted([]uint32{uint32(leaf.as), ours}, leaf.at, own))
	leaf.announce(400e9, destination(1)) // behind them
	eventually(t, "the last route", func() bool { return r.weights(destination(1)) != "unknown" })
	dropped("")

	// Of three servers one is in another AS.
	leaf.send(crafted([]uint32{uint32(leaf.as), ours}, leaf.at, destination(2), destination(3)))
	dropped("routes-dropped p1 p1/p1.0 route_as_loop 2 10.255.1.2/32 true")
	logged(t, log, 1, "level=WARN", "session=p1/p1.0", "2 routes dropped, route_as_loop, such as 10.255.1.2/32", "as-override")
	if got := r.metric("fared_session_routes_dropped", "route_as_loop"); got != 2 {
		t.Errorf("the metric is %v, want 2", got)
	}
	leaf.send(withdrawal(destination(2)))
	dropped("routes-dropped p1 p1/p1.0 route_as_loop 1 10.255.1.3/32 true")
	leaf.announce(400e9, destination(3))
	dropped("")
	logged(t, log, 1, "session=p1/p1.0", "no route is dropped now, route_as_loop")
	if n := log.count("routes dropped, route_as_loop"); n != 1 {
		t.Errorf("%d lines about the begin, want 1", n)
	}

	// A third-party next hop, an aggregate, and a host outside of accept when no route inside is left.
	leaf.send(crafted(path, third, destination(3)))
	dropped("routes-dropped p1 p1/p1.0 route_next_hop 1 10.255.1.3/32 true")
	leaf.send(crafted(path, leaf.at, netip.MustParsePrefix("10.254.7.0/24")))
	dropped("routes-dropped p1 p1/p1.0 route_not_host 1 10.254.7.0/24 true\nroutes-dropped p1 p1/p1.0 route_next_hop 1 10.255.1.3/32 true")
	leaf.withdraw(destination(0), destination(1), destination(3))
	dropped("routes-dropped p1 p1/p1.0 route_not_host 1 10.254.7.0/24 true\nroutes-dropped p1 p1/p1.0 route_outside_accept 1 192.0.2.1/32 true")

	// The session's faults end with it.
	r.links.change(1, func(e *LinkEvent) { e.Up = false })
	dropped("")
	if got := r.metric("fared_session_routes_dropped", "route_not_host"); got != 0 {
		t.Errorf("the metric is %v, want none", got)
	}
}

// TestDroppedRoutesAreJudgedLate checks that the dropped routes of a session are judged at its End-of-RIB, or after
// settleTime, for which the loop wakes.
func TestDroppedRoutesAreJudgedLate(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := idle(t, s.Text())
	refused := []guard.Refused{{Reason: guard.RouteNextHop, Routes: 3, Example: destination(7)}}
	for i := range 2 {
		establish(l, s, i)
		l.bgp(speaker.Refused{Session: i, Generation: 1, Routes: refused})
	}
	if n := len(l.sessionFaults()); n != 0 {
		t.Errorf("%d faults before End-of-RIB", n)
	}
	l.bgp(speaker.EndOfRIB{Session: 0, Generation: 1, Family: speaker.IPv4})
	if f := l.sessionFaults(); len(f) != 1 || f[0].Session != "p0/p0.0" || f[0].Routes != 3 {
		t.Errorf("after End-of-RIB of the first: %v", f)
	}
	if !l.settleAt.Equal(l.intakes[1].since.Add(settleTime)) {
		t.Errorf("the loop wakes at %v, the session came up at %v", l.settleAt, l.intakes[1].since)
	}
	l.intakes[1].since = l.intakes[1].since.Add(-settleTime)
	l.faultReport.dirty = false
	l.settle(l.settleAt)
	if f := l.sessionFaults(); len(f) != 2 || !l.faultReport.dirty || !l.settleAt.IsZero() {
		t.Errorf("after settleTime: %v, dirty %v, next %v", f, l.faultReport.dirty, l.settleAt)
	}
	// A later session waits for its own time.
	l.bgp(speaker.SessionUp{Session: 1, Generation: 2, Node: leafNode(1), PeerAS: s.PeerAS(1), Families: speaker.FamilySet(speaker.IPv4)})
	l.settle(l.wokenAt.Add(settleTime - time.Nanosecond))
	if f := l.sessionFaults(); len(f) != 1 || l.settleAt.IsZero() {
		t.Errorf("in a new generation: %v, next %v", f, l.settleAt)
	}
}

// TestLoopsOfALeafAreRoutine checks that a leaf, whose spines send its routes back, has no fault for them.
func TestLoopsOfALeafAreRoutine(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 2, Uplinks: 1, Leaf: true}
	l := idle(t, s.Text())
	for i := range 2 {
		establish(l, s, i)
		l.bgp(speaker.Refused{Session: i, Generation: 1, Routes: []guard.Refused{
			{Reason: guard.RouteLoop, Routes: 9, Example: destination(1)}, {Reason: guard.RouteNextHop, Routes: 1, Example: destination(2)},
		}})
		l.bgp(speaker.EndOfRIB{Session: i, Generation: 1, Family: speaker.IPv4})
	}
	f := l.sessionFaults()
	if len(f) != 2 || f[0].Reason != "route_next_hop" || f[1].Reason != "route_next_hop" {
		t.Errorf("faults of a leaf: %v", f)
	}
}

// TestMissingFamilyIsAFault checks that a family to which a leaf has not agreed is a fault if a loopback needs it and
// no other session of the sub-port carries it.
func TestMissingFamilyIsAFault(t *testing.T) {
	const text = `
as: 65001
router_id: 10.255.0.1
loopbacks: [10.255.0.1/32, "fd00::1/128", "fd00::2/128"]
accept: [10.255.0.0/16, "fd00::/48"]
dataplane: {address: "memory:"}
planes:
  - name: p0
    sub_ports:
      - {device: e0, speed: 400G, sessions: [{peer: "fe80::1", families: [ipv4, ipv6]}, {peer: "fd01::1"}]}
      - {device: e1, speed: 400G, loopbacks: [10.255.0.1/32], sessions: [{peer: "fe80::2", families: [ipv4, ipv6]}]}
`
	const four, six = speaker.FamilySet(speaker.IPv4), speaker.FamilySet(speaker.IPv6)
	// Without sessions for IPv6.
	without := strings.NewReplacer("families: [ipv4, ipv6]", "families: [ipv4]", `, {peer: "fd01::1"}`, `, {peer: "fd01::1", families: [ipv4]}`).Replace(text)
	const activate, add = "activate the family", "add sessions to the leaves' ipv6 addresses"
	for _, test := range []struct {
		what, text   string
		families     [3]speaker.FamilySet // 0: the session is down
		want, remedy string
	}{
		{"all agreed", text, [3]speaker.FamilySet{four | six, six, four | six}, "", ""},
		{"no leaf has IPv6", text, [3]speaker.FamilySet{four, 0, four}, "p0/e0 family_ipv6 2 fd00::1/128", activate},
		{"another session of the sub-port has it", text, [3]speaker.FamilySet{four, six, four}, "", ""},
		{"no IPv4", text, [3]speaker.FamilySet{six, six, six}, "p0/e0 family_ipv4 1 10.255.0.1/32\np0/e1 family_ipv4 1 10.255.0.1/32", activate},
		{"no session is configured with IPv6", without, [3]speaker.FamilySet{four, four, four}, "p0/e0 family_ipv6 2 fd00::1/128\np0/e0#2 family_ipv6 2 fd00::1/128", add},
		{"all are down", text, [3]speaker.FamilySet{}, "", ""},
	} {
		l := idle(t, test.text)
		for i, families := range test.families {
			if families == 0 {
				continue
			}
			l.bgp(speaker.SessionUp{Session: i, Generation: 1, Node: leafNode(i), PeerAS: 65100, Families: families})
			for _, f := range []speaker.Family{speaker.IPv4, speaker.IPv6} {
				if families.Has(f) {
					l.bgp(speaker.EndOfRIB{Session: i, Generation: 1, Family: f})
				}
			}
		}
		var got []string
		for _, f := range l.sessionFaults() {
			got = append(got, fmt.Sprint(f.Session, " ", f.Reason, " ", f.Routes, " ", f.Example))
			if !strings.Contains(f.Remedy, test.remedy) {
				t.Errorf("%s: remedy %q, want %q", test.what, f.Remedy, test.remedy)
			}
		}
		if text := strings.Join(got, "\n"); text != test.want {
			t.Errorf("%s: %q, want %q", test.what, text, test.want)
		}
	}
}

// TestReloadedLoopbackIsOurs checks that a loopback that a reload adds is known to the speaker as ours.
func TestReloadedLoopbackIsOurs(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 1}.Defaults()
	r := newRig(t, s, rigOptions{leaves: announceAll(400e9, 1)})
	r.settled(1)
	added := netip.MustParsePrefix("10.255.0.9/32")
	s.Port, s.Net, s.Loopbacks = r.s.Port, r.s.Net, append(s.Loopbacks, added.String())
	r.inside(func(l *loop) { l.reload(s.Config(t))() })
	leaf := r.leaves[0]
	leaf.send(crafted([]uint32{uint32(leaf.as), 4200001000}, leaf.at, added))
	leaf.send(crafted([]uint32{uint32(leaf.as), 4200001000}, leaf.at, destination(5)))
	eventually(t, "the fault of another loopback alone", func() bool {
		return r.faultsShown() == "routes-dropped p0 p0/p0.0 route_as_loop 1 10.255.1.5/32 true"
	})
}
