package prober

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/proof"
	"github.com/fared/fared/internal/testkit/netnstest"
)

// addresses of the tests' hosts, by family: the loopbacks, and the cables of two planes.
var addresses = []struct {
	name        string
	near, far   string
	cables, via [2]string
	bits        string
}{
	{"v4", "10.255.0.1", "10.255.0.2", [2]string{"10.0.0.1/24", "10.0.1.1/24"}, [2]string{"10.0.0.2", "10.0.1.2"}, "/32"},
	{"v6", "fd00:255::1", "fd00:255::2", [2]string{"fd00:0::1/64", "fd00:1::1/64"}, [2]string{"fd00:0::2", "fd00:1::2"}, "/128"},
}

// portOf is the source port of the packets of a plane.
func portOf(plane int) int { return 50000 + plane }

// hosts joins two namespaces by a cable of each plane: rules lead packets of portOf(p) to plane p.
func hosts(t *testing.T, f int) (near, far *netnstest.Namespace) {
	netnstest.Require(t, "nft")
	x := addresses[f]
	near, far = netnstest.New(t), netnstest.New(t)
	ip := []string{"-4", "-6"}[f]
	near.Addr("lo", x.near+x.bits)
	far.Addr("lo", x.far+x.bits)
	for p := range 2 {
		name := fmt.Sprintf("plane%d", p)
		_, bits, _ := strings.Cut(x.cables[p], "/")
		netnstest.Cable(t, near, name, x.cables[p], far, name, x.via[p]+"/"+bits)
		near.IP(ip, "route", "add", x.far+x.bits, "via", x.via[p], "table", fmt.Sprint(100+p))
		near.IP(ip, "rule", "add", "priority", "50", "ipproto", "udp", "sport", fmt.Sprint(portOf(p)), "lookup", fmt.Sprint(100+p))
		far.IP(ip, "route", "add", x.near+x.bits, "via", strings.TrimSuffix(x.cables[p], "/"+bits), "metric", fmt.Sprint(10+p))
	}
	for _, n := range []*netnstest.Namespace{near, far} {
		n.Sysctl("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.plane0.rp_filter=0", "net.ipv4.conf.plane1.rp_filter=0")
	}
	return near, far
}

// opened opens the sockets of a loopback in a namespace. Packets that are handled at once come from the channel.
func opened(t *testing.T, n *netnstest.Namespace, at netip.AddrPort) (*socket, chan message) {
	var s *socket
	n.Must(func() error { s = listen(at); return s.err })
	atOnce := make(chan message, 64)
	go s.serve(slog.Default(), func(m *message) {
		m.data = slices.Clone(m.data)
		atOnce <- *m
	})
	t.Cleanup(func() { s.close(); <-s.done })
	return s, atOnce
}

// TestTransmit sends by each plane, and judges the kernel's report of the device against the receiver's: packets to be
// handled at once, and those that wait until they are read.
func TestTransmit(t *testing.T) {
	for f, x := range addresses {
		t.Run(x.name, func(t *testing.T) {
			near, far := hosts(t, f)
			at := netip.AddrPortFrom(netip.MustParseAddr(x.far), 4796)
			s, atOnce := opened(t, far, at)
			begin, b := time.Now().Add(-time.Second), inbox{}
			receive := func(flags uint16) (message, bool) {
				if flags == 0 {
					return s.next(&b)
				}
				select {
				case m := <-atOnce:
					return m, true
				default:
					return message{}, false
				}
			}
			for i := range 4 {
				p, flags := i/2, uint16(i%2)*proof.FlagAtOnce
				from := netip.AddrPortFrom(netip.MustParseAddr(x.near), uint16(portOf(p)))
				want := [2]int{near.Device(fmt.Sprintf("plane%d", p)).Index, far.Device(fmt.Sprintf("plane%d", p)).Index}
				sent := proof.Packet{Kind: proof.Probe, Flags: flags, Nonce: uint64(i + 1), Size: 200}
				// The first packets may wait for the neighbor, or be lost while addresses are tentative.
				netnstest.Eventually(t, time.Minute, func() error {
					before := time.Now()
					way := netnstest.In(near, func() (departure, error) { return transmit(from, at, sent.Append(nil, nil), stamped) })
					if len(way.devices) == 0 {
						return errors.New("no device is reported")
					}
					if last := way.devices[len(way.devices)-1]; last != want[0] || way.at.Before(before.Add(-time.Second)) {
						t.Fatalf("plane %d: left by %v at %v, want %d", p, way.devices, way.at, want[0])
					}
					got := errors.New("nothing arrives")
					for {
						m, ok := receive(flags)
						if !ok {
							return got
						}
						packet, _, err := proof.Parse(m.data, nil)
						if err != nil || packet.Flags != flags {
							t.Fatalf("flags %d: %+v, %v", flags, packet, err)
						}
						if packet.Nonce != sent.Nonce {
							continue // one of the other plane that has waited
						}
						if len(m.data) != 200 || m.from != from.Addr() || m.index != want[1] || m.arrived.Before(begin) {
							t.Fatalf("plane %d: %d bytes from %v by device %d at %v, want %d", p, len(m.data), m.from, m.index, m.arrived, want[1])
						}
						got = nil
					}
				})
			}
		})
	}
}

// TestOutbox sends datagrams by devices with one call; the kernel refuses the first one.
func TestOutbox(t *testing.T) {
	for f, x := range addresses {
		t.Run(x.name, func(t *testing.T) {
			near, far := hosts(t, f)
			for p := range 2 {
				near.IP([]string{"-4", "-6"}[f], "rule", "add", "priority", "60", "oif", fmt.Sprintf("plane%d", p), "lookup", fmt.Sprint(100+p))
			}
			own, to := netip.MustParseAddr(x.near), netip.AddrPortFrom(netip.MustParseAddr(x.far), 4796)
			from, _ := opened(t, near, netip.AddrPortFrom(own, 4796))
			at, _ := opened(t, far, to)
			stranger := netip.AddrPortFrom([]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}[f], 4796)
			var o outbox
			for range 2 { // the second time with what is left of the first
				netnstest.Eventually(t, time.Minute, func() error { // the first packets may wait for the neighbor
					o.reset()
					for i, to := range []netip.AddrPort{stranger, to, to} {
						packet := proof.Packet{Kind: proof.Probe, Nonce: uint64(i), Size: 160 + 400*i}
						o.add(packet.Append(nil, nil), from.family.source(own, near.Device(fmt.Sprintf("plane%d", max(0, i-1))).Index), to)
					}
					o.send(from.waiting)
					b := inbox{}
					for want := 1; want < 3; {
						m, ok := at.next(&b)
						if !ok {
							return fmt.Errorf("packet %d does not arrive", want)
						}
						packet, _, err := proof.Parse(m.data, nil)
						if int(packet.Nonce) < want {
							continue
						}
						if err != nil || int(packet.Nonce) != want || m.index != far.Device(fmt.Sprintf("plane%d", want-1)).Index {
							return fmt.Errorf("packet %d by device %d, %v", packet.Nonce, m.index, err)
						}
						want++
					}
					return nil
				})
			}
		})
	}
}

// TestAlarm rings at the last time that was set, also without a descriptor for the kernel's timer.
func TestAlarm(t *testing.T) {
	for _, kernel := range []bool{true, false} {
		var limit unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
		if !kernel {
			if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: limit.Max}); err != nil {
				t.Fatal(err)
			}
		}
		a := newAlarm()
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
		if kernel != (a.timer == nil) {
			t.Fatalf("a timer of the kernel is %v", kernel)
		}
		for _, wait := range []time.Duration{-time.Second, 20 * time.Millisecond} {
			at := time.Now().Add(wait)
			a.set(time.Now().Add(time.Hour))
			a.set(at)
			if a.wait(); time.Now().Before(at) {
				t.Errorf("it rings before %v", wait)
			}
		}
		a.set(time.Now().Add(time.Hour))
		go a.set(time.Now()) // while the other waits
		a.wait()
		a.set(time.Time{})
		a.close()
	}
}

// TestFaultOf provokes each error of the kernel.
func TestFaultOf(t *testing.T) {
	near, _ := hosts(t, 0)
	from, to := netip.MustParseAddrPort("10.255.0.1:50000"), netip.MustParseAddrPort("10.255.0.2:4796")
	try := func(from, to netip.AddrPort, size int) proof.Fault {
		var fault proof.Fault
		near.Must(func() error {
			_, err := transmit(from, to, make([]byte, size), stamped)
			fault = faultOf(err)
			return nil
		})
		return fault
	}
	check := func(what string, got, want proof.Fault) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %d, want %d", what, got, want)
		}
	}
	check("all is well", try(from, to, 200), proof.None)
	check("too big", try(from, to, 2000), proof.TooBig)
	check("without a route", try(netip.AddrPortFrom(from.Addr(), 40000), to, 200), proof.NoRoute)
	check("without the address", try(netip.MustParseAddrPort("10.255.0.9:50000"), to, 200), proof.NoRoute)
	other := netnstest.In(near, func() (*net.UDPConn, error) { return net.ListenUDP("udp4", net.UDPAddrFromAddrPort(from)) })
	check("a program has the source port", try(from, to, 200), proof.None)
	other.Close()
	near.Run("nft", "add table ip t; add chain ip t o { type filter hook output priority 0; }; add rule ip t o oifname plane0 drop")
	check("a firewall", try(from, to, 200), proof.Refused)
	check("a firewall at another sub-port", try(netip.AddrPortFrom(from.Addr(), 50001), to, 200), proof.None)
}

// TestPortStaysFree binds sockets of programs, without options, to a loopback and a port from which a probe is sent,
// also while the loopback device is down.
func TestPortStaysFree(t *testing.T) {
	for i, x := range addresses {
		n, other := netnstest.New(t), netnstest.New(t)
		netnstest.Veth(t, n, "plane0", other, "plane0")
		n.Addr("plane0", x.near+x.bits)
		for _, state := range []string{"up", "down"} {
			n.IP("link", "set", "lo", state)
			n.Must(func() error {
				fd, err := unix.Socket(families[i].domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					return err
				}
				defer unix.Close(fd)
				if err := families[i].takePort(fd, 50000); err != nil {
					return err
				}
				c, err := net.ListenUDP(families[i].network, net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(x.near), 50000)))
				if err == nil {
					err = c.Close()
				}
				return err
			})
		}
	}
}

// TestListen opens the sockets of a loopback that is added later. Other sockets at the port are errors, also in this
// order: fared must not share it with another process of its user.
func TestListen(t *testing.T) {
	n, at := netnstest.New(t), netip.MustParseAddrPort("10.255.0.1:4796")
	first, _ := opened(t, n, at)
	n.Must(func() error {
		if second := listen(at); !errors.Is(second.err, unix.EADDRINUSE) {
			second.close()
			t.Errorf("a second one: %v", second.err)
		}
		return nil
	})
	if first.close(); first.waiting != -1 {
		t.Error("the first one is open")
	}
	<-first.done
	third, _ := opened(t, n, at)
	if _, ok := third.next(&inbox{}); ok {
		t.Error("a packet of nobody")
	}
}

func TestDevices(t *testing.T) {
	near, _ := hosts(t, 0)
	near.IP("link", "set", "plane1", "mtu", "1400")
	d := devices{names: []string{"plane0", "plane1", "absent"}}
	i0, i1, lo := near.Device("plane0").Index, near.Device("plane1").Index, near.Device("lo").Index
	near.Must(func() error {
		now := time.Now()
		for _, c := range []struct {
			indexes  []int
			expected int
			name     string
			subPort  int
		}{
			{[]int{i0}, 0, "plane0", 0},
			{[]int{lo, i1, i1}, 1, "plane1", 1}, // behind a redirection
			{[]int{i1, i0}, 1, "plane1", 1},     // a device above another
			{[]int{lo}, 0, "lo", -1},
			{[]int{lo, i1}, 0, "plane1", 1},
			{nil, 0, "", -1},
		} {
			if name, subPort := d.left(now, c.indexes, c.expected); name != c.name || subPort != c.subPort {
				t.Errorf("%v, expected sub-port %d: %q %d, want %q %d", c.indexes, c.expected, name, subPort, c.name, c.subPort)
			}
		}
		if d.mtu != 1500 || !slices.Equal(d.mtus, []int{1500, 1400, 0}) {
			t.Errorf("MTUs %v, the largest %d", d.mtus, d.mtu)
		}
		return nil
	})
	near.IP("link", "set", "plane0", "mtu", "1400")
	near.Must(func() error {
		d.read = d.read.Add(-strangeAge)
		if !d.shrunk(1500) || d.shrunk(1400) {
			t.Errorf("packets of 1500 bytes are sent although the largest MTU is %d", d.mtu)
		}
		return nil
	})
}

// TestLimiter answers an honest peer next to one that sends too much, which is not answered at all.
func TestLimiter(t *testing.T) {
	var l limiter
	now := time.Unix(1000, 0)
	honest, flood := netip.MustParseAddr("10.255.0.1"), netip.MustParseAddr("10.255.0.2")
	for second := range 10 {
		answered := 0
		for i := range 1000 {
			at := now.Add(time.Duration(second)*time.Second + time.Duration(i)*time.Millisecond)
			if i%20 == 0 && !l.allow(at, honest) {
				t.Fatalf("%v: an honest peer is not answered", at)
			}
			if l.allow(at, flood) {
				answered++
			}
		}
		if second == 0 && answered != mostProbes || second > 0 && answered != 0 {
			t.Errorf("second %d: %d answers", second, answered)
		}
	}
	if later := now.Add(13 * time.Second); !l.allow(later, flood) || len(l.quiet) != 0 {
		t.Error("a peer is not answered after its flood")
	}
}

func TestCauses(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("sys/net/ipv4/fib_multipath_hash_policy", "1\n")
	write("net/arp", "IP address HW type Flags HW address Mask Device\n10.0.0.2 0x1 0x2 02:00:00:00:00:01 * eth0\n10.0.1.2 0x1 0x0 00:00:00:00:00:00 * eth1\n"+
		"10.0.2.2 0x1 0x6 02:00:00:00:00:02 * eth2\n")
	write("net/netstat", "TcpExt: SyncookiesSent IPReversePathFilter TCPMinTTLDrop\nTcpExt: 1 23 4\nIpExt: InNoRoutes\nIpExt: 5\n")
	at := func(problem proof.Problem, direction proof.Direction, device string) *proof.Finding {
		return &proof.Finding{Problem: problem, Direction: direction, Plane: "p1", Device: device, Source: "10.255.0.1", Destination: "10.255.0.2"}
	}
	fault := at(proof.NotSent, proof.Ours, "eth0")
	check := func(h host, f *proof.Finding, want string) {
		t.Helper()
		h.root = root
		cause, remedy := h.cause(f, 4796)
		if remedy == "" || !strings.Contains(cause+" | "+remedy, want) {
			t.Errorf("%s %s: %q, %q, want %q", f.Problem, f.Direction, cause, remedy, want)
		}
	}
	for f, want := range map[proof.Fault]string{
		proof.Refused: "firewall", proof.TooBig: "mtu 9000", proof.NoRoute: "ip route get 10.255.0.2 from 10.255.0.1",
	} {
		fault.Fault = f
		check(host{mtu: 1500, largest: 9000}, fault, want)
	}
	check(host{}, at(proof.WrongSubPort, proof.Ours, "eth0"), "bpftool")
	check(host{}, at(proof.Lost, proof.Ours, "eth1"), "10.0.1.2 on eth1 does not answer")
	check(host{}, at(proof.Lost, proof.Ours, "eth2"), "10.0.2.2 on eth2 was set by hand to 02:00:00:00:00:02")
	check(host{}, at(proof.Lost, proof.Ours, "eth0"), "the leaf does not forward")
	check(host{}, at(proof.Lost, proof.Both, "eth0"), "fared drain plane p1")
	check(host{}, at(proof.WrongPlane, proof.Ours, "eth0"), "cables behind the leaf")
	check(host{}, at(proof.WrongPlane, proof.Theirs, "eth0"), "at the peer")
	big := at(proof.Lost, proof.Ours, "eth0")
	big.Big = true
	check(host{mtu: 1500, largest: 9000}, big, "MTU of eth0 is 1500, of others 9000")
	check(host{mtu: 9000, largest: 9000}, big, "fared ping --size")
	write("sys/net/ipv4/conf/eth0/rp_filter", "1\n")
	check(host{}, at(proof.Lost, proof.Theirs, "eth0"), "rp_filter of eth0 is strict (1), and has dropped 23 packets")
	write("sys/net/ipv4/conf/all/rp_filter", "2\n")
	check(host{}, at(proof.Lost, proof.Theirs, "eth0"), "nft list ruleset")
	write("sys/net/ipv4/fib_multipath_hash_policy", "0\n")
	check(host{}, at(proof.WrongSubPort, proof.Ours, "eth0"), "fib_multipath_hash_policy is 0")
}

func TestText(t *testing.T) {
	f := proof.Finding{Problem: proof.Lost, Direction: proof.Theirs, Plane: "p2", Device: "eth4", Source: "10.255.0.1", Destination: "10.255.0.2", Slot: 5, Expected: "answers by plane p2", Seen: "none", Big: true}
	if got, want := text(&f, 4796), "p2/eth4: packets with the MTU from peers are lost, as from 10.255.0.1 to 10.255.0.2 (slot 5): expected answers by plane p2, seen none"; got != want {
		t.Errorf("%s", got)
	}
	f = proof.Finding{Problem: proof.Lost, Direction: proof.Ours, Source: "10.255.0.1", Destination: "10.255.0.2", Slot: -1, Expected: "answers", Seen: "none"}
	if got, want := text(&f, 4796), "all planes: packets toward peers are lost, as from 10.255.0.1 to 10.255.0.2: expected answers, seen none"; got != want {
		t.Errorf("%s", got)
	}
	f = proof.Finding{Problem: proof.NotSent, Direction: proof.Ours, Plane: "p0", Device: "eth0", Source: "10.255.0.1", Destination: "10.255.0.2", Slot: 3, Service: 1, Expected: "packets leave by eth0", Seen: "operation not permitted"}
	if got, want := text(&f, 4791), "p0/eth0: packets to UDP port 4791 toward peers are not sent, as from 10.255.0.1 to 10.255.0.2 (slot 3): expected packets leave by eth0, seen operation not permitted"; got != want {
		t.Errorf("%s", got)
	}
}
