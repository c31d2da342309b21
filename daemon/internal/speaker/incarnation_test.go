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
func bare(t *testing.T) *incarnation {
	t.Helper()
	s := &Speaker{queue: newQueue(1), deps: testDeps(t)}
	x := &session{speaker: s, conf: &Session{Name: "p0"}, log: s.deps.Log, wanted: wanted{ready: make(chan struct{}, 1)}}
	in := &incarnation{
		s: x, gen: 1, addr: netip.MustParseAddr("127.255.0.1"), guard: guard.New(guard.Config{}),
		active: make(chan struct{}), settled: make(chan struct{}), idle: make(chan struct{}), stop: func(error) {},
	}
	x.gen, x.current = 1, in
	return in
}

// TestForeignConnectionIsNotOurs lets another local process reach GoBGP's port first, from the neighbor's address. The
// session does not become carry marks with it, and ends; with the own connection it carries them.
func TestForeignConnectionIsNotOurs(t *testing.T) {
	ln, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: loopback.AsSlice()})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, foreign := range []bool{true, false} {
		in := bare(t)
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
		carries, _ := in.s.carrying()
		if (carries == in.gen) == foreign || in.served.Load() == foreign || (ctx.Err() != nil) != foreign {
			t.Errorf("foreign %v: generation %d carries marks, ended by %v", foreign, carries, context.Cause(ctx))
		}
		if foreign && !strings.Contains(context.Cause(ctx).Error(), "belongs to another process") {
			t.Errorf("ended by %v", context.Cause(ctx))
		}
	}
}

// TestFirstTableWaitsForTheFullSet announces a set before the session exists and before GoBGP has received it. The leaf
// receives nothing, not even End-of-RIB, until GoBGP holds the whole set; then all routes, followed by End-of-RIB. The
// session does not wait to be up.
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
	if len(updates) > 0 {
		t.Error("the leaf has received a table before GoBGP has the routes")
	}
	r.until("the session is up meanwhile", func() bool { return r.state(0).up })
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
