package speaker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"

	"github.com/fared/fared/fare"
)

// loopback is where every BgpServer listens; the local hop goes from a
// neighbour address to it.
var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// bgpServer is the embedded speaker of one session. It has at most one
// neighbour, the current incarnation's, which connects from neighbour, an
// address of 127.0.0.0/8. Two successive incarnations never use the same, so
// what GoBGP still says about the former is not taken for the latter's.
//
// GoBGP's own server goroutine cannot be ended: it stays, idle, after stop.
type bgpServer struct {
	bgp      *server.BgpServer
	gate     gate
	port     uint16
	password string // TCP MD5 on the local hop; empty if GoBGP's listener has none

	mu sync.Mutex // serialises calls of bgp
}

func newBGPServer(l *logger, password string) *bgpServer {
	s := &bgpServer{password: password}
	s.bgp = server.NewBgpServer(server.LoggerOption(l), server.TimingHookOption(&s.gate))
	go s.bgp.Serve()
	return s
}

// start listens and sets the export policy. The caller holds the world still.
func (s *bgpServer) start(as uint32, routerID netip.Addr) error {
	ctx := context.Background()
	global := &api.Global{
		Asn: as, RouterId: routerID.String(), ListenAddresses: []string{loopback.String()},
		Families: []uint32{uint32(api.Family_AFI_IP) - 1, uint32(api.Family_AFI_IP6) - 1},
	}
	var err error
	for range 16 {
		// GoBGP does not listen on port 0, so a free one is looked for first.
		// Somebody else may take it in between: then another one is.
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
	// FARE-in-SUN: a server is a stub and never passes a route on. One server
	// with one neighbour has nobody to pass it to; this makes it a rule.
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
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.bgp.StopBgp(context.Background(), &api.StopBgpRequest{})
	s.leave()
	return err
}

// neighbour is what GoBGP is told about the peer of an incarnation.
type neighbour struct {
	addr            netip.Addr
	as              uint32
	hold, keepalive time.Duration
	families        []Family
}

func (s *bgpServer) addPeer(n neighbour) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	peer := &api.Peer{
		Conf:      &api.PeerConf{NeighborAddress: n.addr.String(), PeerAsn: n.as, AuthPassword: s.password},
		Transport: &api.Transport{PassiveMode: true, LocalAddress: loopback.String()},
		Timers: &api.Timers{Config: &api.TimersConfig{
			HoldTime: uint64(n.hold / time.Second), KeepaliveInterval: uint64(n.keepalive / time.Second),
		}},
		// On the local hop only: it makes GoBGP end its first UPDATEs with
		// an End-of-RIB. The peer is told what the configuration says.
		GracefulRestart: &api.GracefulRestart{Enabled: true, RestartTime: 1},
	}
	for _, f := range n.families {
		peer.AfiSafis = append(peer.AfiSafis, &api.AfiSafi{
			Config:            &api.AfiSafiConfig{Family: apiFamily(f), Enabled: true},
			MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: true}},
		})
	}
	if err := s.bgp.AddPeer(context.Background(), &api.AddPeerRequest{Peer: peer}); err != nil {
		return fmt.Errorf("add neighbour %v to gobgp: %w", n.addr, err)
	}
	return nil
}

func (s *bgpServer) deletePeer(addr netip.Addr) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.bgp.DeletePeer(context.Background(), &api.DeletePeerRequest{Address: addr.String()}); err != nil {
		return fmt.Errorf("delete neighbour %v from gobgp: %w", addr, err)
	}
	return nil
}

// watch calls f, from one goroutine, with what happens until ctx ends.
func (s *bgpServer) watch(ctx context.Context, f func(*api.WatchEventResponse)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bgp.WatchEvent(ctx, &api.WatchEventRequest{
		Peer: &api.WatchEventRequest_Peer{},
		Table: &api.WatchEventRequest_Table{Filters: []*api.WatchEventRequest_Table_Filter{
			// Adj-in would miss the withdrawals of a lost session.
			{Type: api.WatchEventRequest_Table_Filter_POST_POLICY},
			{Type: api.WatchEventRequest_Table_Filter_EOR},
		}},
	}, f)
}

// originate adds or replaces a route of our own.
func (s *bgpServer) originate(p *api.Path) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.bgp.AddPath(context.Background(), &api.AddPathRequest{TableType: api.TableType_GLOBAL, Path: p})
	return err
}

// retract deletes a route of our own.
func (s *bgpServer) retract(p *api.Path) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bgp.DeletePath(context.Background(), &api.DeletePathRequest{TableType: api.TableType_GLOBAL, Path: p})
}

// received reads what GoBGP holds from the neighbour.
func (s *bgpServer) received(ctx context.Context, addr netip.Addr, c *converter) (map[netip.Prefix]*fare.Attributes, error) {
	world.mu.RLock()
	defer world.mu.RUnlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	routes := make(map[netip.Prefix]*fare.Attributes)
	for _, f := range [...]Family{IPv4, IPv6} {
		var bad error
		err := s.bgp.ListPath(ctx, &api.ListPathRequest{TableType: api.TableType_ADJ_IN, Name: addr.String(), Family: apiFamily(f)},
			func(d *api.Destination) {
				for _, path := range d.Paths {
					prefix, attrs, err := c.route(path)
					if err != nil {
						bad = err
						continue
					}
					routes[prefix] = attrs
				}
			})
		if err := errors.Join(err, bad); err != nil {
			return nil, fmt.Errorf("read back %v routes: %w", f, err)
		}
	}
	return routes, ctx.Err()
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

// localPassword is the random key of this process for the local hop, or empty
// if sockets opened as GoBGP opens its listener take none: Go makes listeners
// multipath TCP unless told otherwise (GODEBUG multipathtcp=0), and that has no
// MD5 signatures. Without a key the ports alone tell our own connection from
// another local process's.
var localPassword = sync.OnceValue(func() string {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp4", netip.AddrPortFrom(loopback, 0).String())
	if err != nil {
		return ""
	}
	defer l.Close()
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		return ""
	}
	if controlRaw(raw, func(fd int) error { return setMD5(fd, loopback, "probe") }) != nil {
		return ""
	}
	return rand.Text()
})
