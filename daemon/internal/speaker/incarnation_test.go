package speaker

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	api "github.com/osrg/gobgp/v3/api"

	"github.com/fared/fared/daemon/internal/guard"
)

// bare returns an incarnation without connections, of a session that is established for the owner.
func bare(t *testing.T) (*incarnation, *Speaker) {
	t.Helper()
	s := &Speaker{queue: newQueue(1), deps: testDeps(t)}
	x := &session{speaker: s, conf: &Session{Name: "p0"}, log: s.deps.Log}
	in := &incarnation{
		s: x, gen: 1, addr: netip.MustParseAddr("127.255.0.1"), guard: guard.New(guard.Config{}),
		active: make(chan struct{}), settled: make(chan struct{}), idle: make(chan struct{}), stop: func(error) {},
	}
	x.gen, x.current = 1, in
	return in, s
}

// TestUnreadableRouteIsWithdrawn checks that a route that GoBGP reports without attributes does not keep its previous value.
func TestUnreadableRouteIsWithdrawn(t *testing.T) {
	in, s := bare(t)
	s.queue.sessionUp(SessionUp{Generation: 1}, 0)
	s.queue.route(Route{Generation: 1, Prefix: prefix(1), Attrs: attrs(7)})
	s.queue.route(Route{Generation: 1, Prefix: prefix(2), Attrs: attrs(7)})
	s.queue.take(nil)
	p, err := destination(prefix(1))
	if err != nil {
		t.Fatal(err)
	}
	in.path(p)
	var withdrawn []netip.Prefix
	faults := 0
	for _, e := range s.queue.take(nil) {
		switch e := e.(type) {
		case Withdraw:
			withdrawn = append(withdrawn, e.Prefix)
		case Fault:
			faults++
		default:
			t.Errorf("%T %+v", e, e)
		}
	}
	if !slices.Equal(withdrawn, []netip.Prefix{prefix(1)}) || faults != 1 || s.queue.present(0) != 1 {
		t.Errorf("withdrawn %v, %d faults, %d routes left; want the unreadable one, one and one", withdrawn, faults, s.queue.present(0))
	}
}

// TestForeignConnectionIsNotOurs lets another local process reach GoBGP's port first, from the neighbor's address. The session does not become
// established with it, and ends; with the own connection it becomes established.
func TestForeignConnectionIsNotOurs(t *testing.T) {
	ln, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: loopback.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, foreign := range []bool{true, false} {
		in, s := bare(t)
		if in.local, err = net.DialTCP("tcp4", nil, ln.Addr().(*net.TCPAddr)); err != nil {
			t.Fatal(err)
		}
		defer in.local.Close()
		ctx, stop := context.WithCancelCause(t.Context())
		in.stop = stop
		from := uint32(in.local.LocalAddr().(*net.TCPAddr).Port)
		if foreign {
			from++
		}
		in.event(&api.WatchEventResponse{Event: &api.WatchEventResponse_Peer{Peer: &api.WatchEventResponse_PeerEvent{Peer: &api.Peer{
			State:     &api.PeerState{NeighborAddress: in.addr.String(), SessionState: api.PeerState_ESTABLISHED},
			Transport: &api.Transport{RemotePort: from},
		}}}})
		up := slices.ContainsFunc(s.queue.take(nil), func(e Event) bool { _, ok := e.(SessionUp); return ok })
		if up == foreign || (ctx.Err() != nil) != foreign {
			t.Errorf("foreign %v: up %v, ended by %v", foreign, up, context.Cause(ctx))
		}
		if foreign && !strings.Contains(context.Cause(ctx).Error(), "belongs to another process") {
			t.Errorf("ended by %v", context.Cause(ctx))
		}
	}
}

// TestFirstTableWaitsForTheFullSet announces a set before the session exists and before GoBGP has received it. The leaf receives nothing, not
// even End-of-RIB, until GoBGP holds the whole set; then all routes, followed by End-of-RIB.
func TestFirstTableWaitsForTheFullSet(t *testing.T) {
	at := hosts(2)
	confirmed, updates := make(chan struct{}, 1), make(chan []byte, 64)
	leaf := func(opened func(), id string) func(int, *net.TCPConn) {
		return func(_ int, conn *net.TCPConn) {
			if shake(conn, rawOpen(65100, 90, netip.MustParseAddr(id))) != nil {
				return
			}
			opened()
			var buf [guard.MaxMessage]byte
			for {
				msg, err := guard.ReadMessage(conn, &buf)
				if err != nil {
					return
				}
				if msg[18] == 2 && opened != nil && id == "10.255.1.1" {
					updates <- slices.Clone(msg)
				}
			}
		}
	}
	first := newRawPeer(t, at[0], leaf(func() { confirmed <- struct{}{} }, "10.255.1.1"))
	second := newRawPeer(t, at[1], leaf(func() {}, "10.255.1.2"))
	s := create(t, rawConfig(t, first, second))
	w := &s.sessions[0].wanted
	s.sessions[1].setAdmin(false, "later")
	var set []Advertisement
	for i := range 8 {
		set = append(set, Advertisement{Prefix: prefix(i), ASPath: []uint32{uint32(65200 + i)}})
	}
	s.Advertise(0, set)
	<-w.ready // the goroutine that updates GoBGP has not seen the set yet
	r := start(t, s)
	<-confirmed
	r.SetAdminState(1, true, "")
	r.until("another session, begun later, is up", func() bool { return r.state(1).up })
	if r.state(0).up {
		t.Error("the session is up before GoBGP has its routes")
	}
	w.ready <- struct{}{}
	for seen := 0; ; seen++ {
		if u := <-updates; len(u) == len(endOfRIB) {
			if seen != 8 {
				t.Errorf("End-of-RIB after %d UPDATEs, want 8", seen)
			}
			return
		}
	}
}
