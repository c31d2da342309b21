package speaker

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/fared/fared/daemon/internal/ndisc"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// cable returns two namespaces with a cable between their devices eth0, which have link-local addresses.
func cable(t *testing.T) (server, leaf *netnstest.Namespace) {
	t.Helper()
	netnstest.Require(t)
	server, leaf = netnstest.New(t), netnstest.New(t)
	for _, n := range []*netnstest.Namespace{server, leaf} {
		n.Sysctl("net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0")
	}
	netnstest.Cable(t, server, "eth0", "", leaf, "eth0", "")
	return server, leaf
}

// TestUnnumberedPair checks that two ends that know nothing of each other find each other, the passive one included,
// next to a numbered session of the same cable, and that BFD protects both sessions.
func TestUnnumberedPair(t *testing.T) {
	a, b := cable(t)
	numbers := []string{"10.0.0.0", "10.0.0.1"}
	end := func(as uint32, id string, n *netnstest.Namespace, passive bool) *running {
		n.Addr("eth0", numbers[0]+"/31")
		local, peer := netip.MustParseAddr(numbers[0]), netip.MustParseAddr(numbers[1])
		numbers[0], numbers[1] = numbers[1], numbers[0]
		resolver := ndisc.New(ndisc.Config{})
		t.Cleanup(resolver.Close)
		d := testDeps(t)
		d.Resolver = resolver
		s, err := New(Config{
			AS: as, RouterID: netip.MustParseAddr(id), Accept: acceptAll, ConnectRetry: 50 * time.Millisecond, HoldTime: 90 * time.Second,
			BFD: BFD{Interval: 200 * time.Millisecond, Multiplier: 255},
			Sessions: []Session{{
				Name: "eth0", Unnumbered: true, Device: "eth0", Netns: n.Name, Passive: passive,
				Families: []Family{IPv4, IPv6}, ExtendedNextHop: true,
			}, {
				Name: "eth0#2", Peer: peer, Local: local, Device: "eth0", Netns: n.Name, Passive: passive,
			}},
		}, d)
		if err != nil {
			t.Fatal(err)
		}
		return start(t, s)
	}
	server, leaf := end(65001, "10.255.0.1", a, false), end(65100, "10.255.1.1", b, true)
	for _, r := range []*running{server, leaf} {
		for i := range 2 {
			r.until("established, with BFD", func() bool { return r.state(i).up && r.Status(i).BFD.State == "up" })
		}
	}
}

// lateResolver knows the peer once it is sent.
type lateResolver chan netip.Addr

func (l lateResolver) Peer(ctx context.Context, _, _ string) (netip.Addr, error) {
	select {
	case a := <-l:
		return a, nil
	case <-ctx.Done():
		return netip.Addr{}, errors.New("nothing was received")
	}
}

// TestUnnumberedWithoutRouter checks that the status of a session shows why it waits, in place of why it last ended,
// and that an established session no longer shows it.
func TestUnnumberedWithoutRouter(t *testing.T) {
	p := newRawPeer(t, hosts(1)[0], func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 90, leafID)) == nil {
			keep(conn)
		}
	})
	c := rawConfig(t, p)
	c.Sessions[0].Peer, c.Sessions[0].Unnumbered, c.Sessions[0].Device = netip.Addr{}, true, "lo"
	d, found := testDeps(t), make(lateResolver)
	d.Resolver = found
	s, err := New(c, d)
	if err != nil {
		t.Fatal(err)
	}
	s.patienceToFind = time.Millisecond
	r := start(t, s)
	waits := func() bool {
		s := r.Status(0)
		return s.State == Connecting && s.Reason == "find the neighbor on lo: nothing was received"
	}
	r.until("waiting, with the reason", waits)
	found <- addrPort(p.ln.Addr()).Addr()
	r.until("established, without a reason", func() bool { s := r.Status(0); return s.State == Established && s.Reason == "" })
	r.sessions[0].mu.Lock()
	r.sessions[0].current.conn.Close()
	r.sessions[0].mu.Unlock()
	r.until("waiting again", waits)
}

// TestRefusedOnNumberedCable checks the reason for which FRR's peers-over-interface refuse a link-local session: the
// cable has a /31.
func TestRefusedOnNumberedCable(t *testing.T) {
	a, b := cable(t)
	var peer netip.Addr
	var ln *net.TCPListener
	netnstest.Eventually(t, deadline, func() error {
		return b.Do(func() error {
			device, err := net.InterfaceByName("eth0")
			if err != nil {
				return err
			}
			addrs, err := device.Addrs()
			if err != nil || len(addrs) == 0 {
				return errors.Join(err, errors.New("no address"))
			}
			peer = netip.MustParsePrefix(addrs[0].String()).Addr()
			ln, err = net.ListenTCP("tcp6", &net.TCPAddr{})
			return err
		})
	})
	defer ln.Close()
	go func() {
		for {
			conn, err := ln.AcceptTCP()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	found := make(lateResolver)
	d := testDeps(t)
	d.Resolver = found
	s, err := New(Config{
		AS: 65001, RouterID: netip.MustParseAddr("10.255.0.1"), ConnectRetry: 50 * time.Millisecond,
		Sessions: []Session{{Name: "eth0", Unnumbered: true, Device: "eth0", Netns: a.Name, Port: addrPort(ln.Addr()).Port()}},
	}, d)
	if err != nil {
		t.Fatal(err)
	}
	r := start(t, s)
	refused := func(reason string) func() bool {
		return func() bool {
			select {
			case found <- peer:
			default:
			}
			return r.Status(0).Reason == reason
		}
	}
	const closed = "connection to the peer: closed by the other end before its OPEN"
	r.until("refused", refused(closed))
	a.Addr("eth0", "10.0.0.1/31")
	r.until("refused, with the remedy", refused(closed+`; eth0 has 10.0.0.1/31, which FRR's "neighbor interface" uses unless it has v6only: add that there, or write peer: 10.0.0.0 here`))
}

func TestOtherEnd(t *testing.T) {
	for cable, want := range map[string]string{
		"10.0.0.0/31": "10.0.0.1", "10.0.0.1/31": "10.0.0.0", "10.0.0.255/31": "10.0.0.254", "10.0.0.5/30": "10.0.0.6", "10.0.0.6/30": "10.0.0.5",
	} {
		if got := otherEnd(netip.MustParsePrefix(cable)).String(); got != want {
			t.Errorf("%s: %s, want %s", cable, got, want)
		}
	}
}
