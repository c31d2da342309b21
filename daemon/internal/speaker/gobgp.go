package speaker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"
)

// loopback is the address on which every BgpServer listens; the local hop goes
// from a neighbor address to it.
var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// bgpServer is the embedded GoBGP of one session. It has at most one neighbor,
// that of the current incarnation, which connects from neighbor.addr in
// 127.0.0.0/8. Successive incarnations never use the same address, so that late
// events of the former are not attributed to the latter.
//
// GoBGP's own server goroutine cannot be ended: it stays, idle, after stop.
type bgpServer struct {
	bgp      *server.BgpServer
	gate     gate
	port     uint16
	password string // TCP MD5 on the local hop

	patience time.Duration // limit of an answer of GoBGP

	failOnce sync.Once
	failed   chan struct{} // closed by fail
	cause    error         // of the failure; read after failed is closed

	mu    sync.Mutex // serializes calls of bgp
	stuck bool       // a call has not returned
}

func newBGPServer(log *slog.Logger, session string, fatal func(error), password string) *bgpServer {
	s := &bgpServer{password: password, patience: localPatience, failed: make(chan struct{})}
	l := &logger{log: log, session: session, fatal: fatal, broken: s.fail}
	s.bgp = server.NewBgpServer(server.LoggerOption(l), server.TimingHookOption(&s.gate))
	go s.bgp.Serve()
	return s
}

// start listens and sets the export policy. The caller has paused all servers of the world.
func (s *bgpServer) start(as uint32, routerID netip.Addr) error {
	ctx := context.Background()
	global := &api.Global{
		Asn: as, RouterId: routerID.String(), ListenAddresses: []string{loopback.String()},
		Families: []uint32{uint32(api.Family_AFI_IP) - 1, uint32(api.Family_AFI_IP6) - 1},
	}
	var err error
	for range 16 {
		// GoBGP does not listen on port 0, so find a free port first. If
		// another process takes it in between, try the next one.
		if s.port, err = freePort(); err != nil {
			return err
		}
		global.ListenPort = int32(s.port)
		if err = s.bgp.StartBgp(ctx, &api.StartBgpRequest{Global: global}); !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("start gobgp on %s: %w", loopback, err)
	}
	// FARE-in-SUN: a server is a stub and never passes a route on. A BgpServer
	// with one neighbor has no second neighbor anyway; this policy makes it a
	// rule.
	if err := s.bgp.AddPolicy(ctx, &api.AddPolicyRequest{Policy: &api.Policy{
		Name: "originated", Statements: []*api.Statement{{
			Name:       "local",
			Conditions: &api.Conditions{RouteType: api.Conditions_ROUTE_TYPE_LOCAL},
			Actions:    &api.Actions{RouteAction: api.RouteAction_ACCEPT},
		}},
	}}); err != nil {
		return fmt.Errorf("add export policy: %w", err)
	}
	if err := s.bgp.AddPolicyAssignment(ctx, &api.AddPolicyAssignmentRequest{Assignment: &api.PolicyAssignment{
		Name: "global", Direction: api.PolicyDirection_EXPORT, DefaultAction: api.RouteAction_REJECT,
		Policies: []*api.Policy{{Name: "originated"}},
	}}); err != nil {
		return fmt.Errorf("assign export policy: %w", err)
	}
	return nil
}

func (s *bgpServer) stop() error {
	defer s.leave()
	return s.call(func(b *server.BgpServer) error { return b.StopBgp(context.Background(), &api.StopBgpRequest{}) })
}

// neighbor is GoBGP's configuration of an incarnation's peer.
type neighbor struct {
	addr            netip.Addr
	as              uint32
	hold, keepalive time.Duration
	families        []Family
}

func (s *bgpServer) addPeer(n neighbor) error {
	peer := &api.Peer{
		Conf:      &api.PeerConf{NeighborAddress: n.addr.String(), PeerAsn: n.as, AuthPassword: s.password},
		Transport: &api.Transport{PassiveMode: true, LocalAddress: loopback.String()},
		Timers: &api.Timers{Config: &api.TimersConfig{
			HoldTime: uint64(n.hold / time.Second), KeepaliveInterval: uint64(n.keepalive / time.Second),
		}},
		// On the local hop only: it makes GoBGP end its first UPDATEs with an
		// End-of-RIB. The OPEN to the peer follows the configuration.
		GracefulRestart: &api.GracefulRestart{Enabled: true, RestartTime: 1},
	}
	for _, f := range n.families {
		peer.AfiSafis = append(peer.AfiSafis, &api.AfiSafi{
			Config:            &api.AfiSafiConfig{Family: apiFamily(f), Enabled: true},
			MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: true}},
		})
	}
	if err := s.call(func(b *server.BgpServer) error {
		return b.AddPeer(context.Background(), &api.AddPeerRequest{Peer: peer})
	}); err != nil {
		return fmt.Errorf("add neighbor %v to gobgp: %w", n.addr, err)
	}
	return nil
}

func (s *bgpServer) deletePeer(addr netip.Addr) error {
	if err := s.call(func(b *server.BgpServer) error {
		return b.DeletePeer(context.Background(), &api.DeletePeerRequest{Address: addr.String()})
	}); err != nil {
		return fmt.Errorf("delete neighbor %v from gobgp: %w", addr, err)
	}
	return nil
}

// watch calls f for every change of a neighbor's state, from one goroutine, until ctx ends.
func (s *bgpServer) watch(ctx context.Context, f func(*api.WatchEventResponse)) error {
	request := &api.WatchEventRequest{Peer: &api.WatchEventRequest_Peer{}}
	return s.call(func(b *server.BgpServer) error { return b.WatchEvent(ctx, request, f) })
}

// originate adds or replaces an own route.
func (s *bgpServer) originate(p *api.Path) error {
	return s.call(func(b *server.BgpServer) error {
		_, err := b.AddPath(context.Background(), &api.AddPathRequest{TableType: api.TableType_GLOBAL, Path: p})
		return err
	})
}

// retract deletes an own route.
func (s *bgpServer) retract(p *api.Path) error {
	return s.call(func(b *server.BgpServer) error {
		return b.DeletePath(context.Background(), &api.DeletePathRequest{TableType: api.TableType_GLOBAL, Path: p})
	})
}

func apiFamily(f Family) *api.Family {
	if f == IPv6 {
		return &api.Family{Afi: api.Family_AFI_IP6, Safi: api.Family_SAFI_UNICAST}
	}
	return &api.Family{Afi: api.Family_AFI_IP, Safi: api.Family_SAFI_UNICAST}
}

func freePort() (uint16, error) {
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: loopback.AsSlice()})
	if err != nil {
		return 0, fmt.Errorf("find a free port on %s: %w", loopback, err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port(), nil
}

// localPassword returns the random key of this process for the local hop, or the error of newLocalPassword.
var localPassword = sync.OnceValues(newLocalPassword)

// newLocalPassword returns a random key, or an error if a socket opened like GoBGP's listener does not support keys: Go
// makes listeners multipath TCP by default (unless GODEBUG multipathtcp=0, as go.mod sets it), and these have no MD5
// signatures. Without a key any local user could connect to GoBGP from the peer's address, and end or displace the
// session.
func newLocalPassword() (string, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp4", netip.AddrPortFrom(loopback, 0).String())
	if err != nil {
		return "", fmt.Errorf("listen on %s: %w", loopback, err)
	}
	defer l.Close()
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err == nil {
		err = controlRaw(raw, func(fd int) error { return setMD5(fd, loopback, "probe") })
	}
	if err != nil {
		return "", fmt.Errorf("the connections to gobgp on %s cannot be signed, so any local user could end sessions: %w; use a kernel with CONFIG_TCP_MD5SIG, and start without multipathtcp in GODEBUG", loopback, err)
	}
	return rand.Text(), nil
}

// localAddr returns a random address of 127.128.0.0/9 other than the previous one. GoBGP accepts unsigned connections
// from an address until it is its neighbor's, so a process that could predict the address could connect first.
func localAddr(previous netip.Addr) netip.Addr {
	for {
		var b [3]byte
		_, _ = rand.Read(b[:]) // never fails
		if a := netip.AddrFrom4([4]byte{127, 128 | b[0], b[1], b[2]}); a != previous && a != loopbackBroadcast {
			return a
		}
	}
}

// loopbackBroadcast is the last address of 127.0.0.0/8, to which no connection can be bound.
var loopbackBroadcast = netip.AddrFrom4([4]byte{127, 255, 255, 255})
