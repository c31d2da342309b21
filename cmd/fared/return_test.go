package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fared/fared/cmd/internal/clitest"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// returnBed is a server with two planes, eth0 and eth1, toward leaf, behind which is another server.
type returnBed struct {
	t                        *testing.T
	server, leaf, other, pod *netnstest.Namespace
	dir                      string
}

func newReturnBed(t *testing.T, driver string, flags ...string) *returnBed {
	t.Helper()
	netnstest.Require(t)
	t.Setenv(clitest.AsFared, "1")
	b := &returnBed{t: t, server: netnstest.New(t), leaf: netnstest.New(t), other: netnstest.New(t), pod: netnstest.New(t), dir: testbed.ShortDir(t)}
	leafFile := "role: leaf\nrouter_id: 10.254.0.1\nas: 65100\naccept: [10.255.0.0/16]\nplanes:\n"
	serverFile := "role: server\nrouter_id: 10.255.0.1\nas: 65001\nloopbacks: [10.255.0.1/32]\naccept: [10.255.0.0/16]\nplanes:\n"
	otherFile := "role: server\nrouter_id: 10.255.0.2\nas: 65002\nloopbacks: [10.255.0.2/32]\naccept: [10.255.0.0/16]\nplanes:\n"
	for k := range 2 {
		b.cable(k)
		b.server.Addr(fmt.Sprint("eth", k), fmt.Sprintf("10.0.%d.1/31", k))
		netnstest.Cable(t, b.other, fmt.Sprint("b", k), fmt.Sprintf("10.1.%d.1/31", k), b.leaf, fmt.Sprint("b", k), fmt.Sprintf("10.1.%d.0/31", k))
		leafFile += fmt.Sprintf("  - name: p%d\n    sub_ports:\n      - {device: a%[1]d, speed: 10G, sessions: [{peer: 10.0.%[1]d.1, local: 10.0.%[1]d.0, passive: true}]}\n", k)
		leafFile += fmt.Sprintf("      - {device: b%d, speed: 10G, sessions: [{peer: 10.1.%[1]d.1, local: 10.1.%[1]d.0, passive: true}]}\n", k)
		serverFile += fmt.Sprintf("  - {name: p%d, sub_ports: [{device: eth%[1]d, speed: 10G, sessions: [{peer: 10.0.%[1]d.0, local: 10.0.%[1]d.1}]}]}\n", k)
		otherFile += fmt.Sprintf("  - {name: p%d, sub_ports: [{device: b%[1]d, speed: 10G, sessions: [{peer: 10.1.%[1]d.0}]}]}\n", k)
	}
	b.server.Addr("lo", "10.255.0.1/32")
	const memory = `dataplane: {address: "memory:"}`
	inside := fmt.Sprintf(`dataplane: {address: "inside:", restore_addresses: true, flags: [--driver=%s, --socket=%s%s]}`, driver, b.socket("agent"), strings.Join(append([]string{""}, flags...), ", "))
	t.Cleanup(func() { testbed.Flush(t, b.server, "--driver", driver) })
	b.start(b.leaf, "leaf", "leaf", leafFile+memory)
	b.start(b.other, "run", "other", otherFile+memory)
	b.start(b.server, "run", "server", serverFile+inside)
	return b
}

func (b *returnBed) socket(name string) string { return filepath.Join(b.dir, name+".sock") }

func (b *returnBed) start(n *netnstest.Namespace, kind, name, text string) {
	b.t.Helper()
	path := filepath.Join(b.dir, name+".yaml")
	if err := os.WriteFile(path, []byte(text+"\napi: {socket: "+b.socket(name)+"}\nbfd: {interval: 0s}\nbgp: {hold_time: 60s}\nlinks: {damping: {failures: 0}}\n"), 0o644); err != nil {
		b.t.Fatal(err)
	}
	n.Start(b.t, executable(b.t), kind, "--config", path)
}

// cable makes a device of the server, without an address, and its other end at the leaf.
func (b *returnBed) cable(k int) {
	netnstest.Veth(b.t, b.server, fmt.Sprint("eth", k), b.leaf, fmt.Sprint("a", k))
	b.server.IP("link", "set", fmt.Sprint("eth", k), "mtu", "9000")
	b.leaf.IP("link", "set", fmt.Sprint("a", k), "mtu", "9000", "up")
	b.leaf.IP("address", "add", fmt.Sprintf("10.0.%d.0/31", k), "dev", fmt.Sprint("a", k))
}

// returnJourneys are the ways of eth1 out of the server and back, by the calls that these programs make.
var returnJourneys = map[string]func(*returnBed){
	"DRANET": func(b *returnBed) {
		b.server.IP("link", "set", "eth1", "down")
		b.server.IP("link", "set", "eth1", "netns", b.pod.Name, "name", "rail1")
		b.pod.IP("link", "set", "rail1", "up")
		b.away()
		b.pod.IP("link", "set", "rail1", "down")
		b.pod.IP("link", "set", "rail1", "netns", b.server.Name, "name", "eth1")
		b.server.IP("link", "set", "eth1", "up")
	},
	"host-device": func(b *returnBed) {
		temporary := netnstest.New(b.t)
		b.server.IP("link", "set", "eth1", "down")
		b.server.IP("link", "set", "eth1", "netns", temporary.Name)
		temporary.IP("link", "set", "eth1", "alias", "eth1")
		temporary.IP("link", "set", "eth1", "name", "net1")
		temporary.IP("link", "set", "net1", "netns", b.pod.Name)
		b.pod.IP("link", "set", "net1", "up")
		b.away()
		b.pod.IP("link", "set", "net1", "down")
		b.pod.IP("link", "set", "net1", "netns", temporary.Name)
		temporary.IP("link", "set", "net1", "name", "eth1")
		temporary.IP("link", "set", "eth1", "netns", b.server.Name)
		b.server.IP("link", "set", "eth1", "up")
	},
	"a reload of the driver": func(b *returnBed) {
		b.server.IP("link", "delete", "eth1")
		b.away()
		b.cable(1)
		b.server.IP("link", "set", "eth1", "mtu", "1500", "up")
	},
}

// json returns the output of a command of the server.
func (b *returnBed) json(into any, args ...string) error {
	out, err := inNamespace(b.t, b.server, append(args, "-o", "json", "--socket", b.socket("server"))...)
	if err == nil {
		err = json.Unmarshal([]byte(out), into)
	}
	return err
}

// weights waits until the other server has these weights in effect.
func (b *returnBed) weights(want string) (took time.Duration) {
	b.t.Helper()
	return netnstest.Eventually(b.t, time.Minute, func() error {
		out, err := inNamespace(b.t, b.server, "weights", "--socket", b.socket("server"))
		if err != nil || !strings.Contains(out, want) || !strings.Contains(out, "in effect") {
			return fmt.Errorf("%v\n%s", err, out)
		}
		return nil
	})
}

// away checks the state while eth1 is away: the sub-port waits for its device, and nothing of it is left.
func (b *returnBed) away() {
	b.t.Helper()
	b.weights("1:0")
	netnstest.Eventually(b.t, time.Minute, func() error {
		var planes struct {
			Planes []struct {
				SubPorts []renamed `json:"sub_ports"`
			}
		}
		var sessions struct{ Sessions []struct{ State string } }
		if err := errors.Join(b.json(&planes, "planes"), b.json(&sessions, "sessions")); err != nil {
			return err
		}
		if reason, state := planes.Planes[1].SubPorts[0].Reason, sessions.Sessions[1].State; !strings.Contains(reason, "eth1") || state != "waiting" {
			return fmt.Errorf("the sub-port is %q, its session %s", reason, state)
		}
		if objects := b.server.Objects(); strings.Contains(objects, "eth1") {
			return fmt.Errorf("while eth1 is away:\n%s", objects)
		}
		return nil
	})
}

// TestDevicesReturn takes the device of a plane away in each way, repeatedly, and checks that the plane carries packets
// again, that the device has its neighbor settings, and that the kernel has the objects of before.
func TestDevicesReturn(t *testing.T) {
	gate.Needed(t, "no shorter test sees a sub-port's device leave and return through daemon and agent")
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) {
			b := newReturnBed(t, driver)
			b.weights("1:1")
			before, nexthops := b.objects()
			for name, journey := range returnJourneys {
				var took []time.Duration
				for range gate.Count(t, gate.Kernel, 1, 20) {
					journey(b)
					took = append(took, b.weights("1:1"))
					b.whole(name, before, nexthops)
				}
				slices.Sort(took)
				t.Logf("%s: the plane carries packets %v after its return (median of %d, longest %v)", name, took[len(took)/2], len(took), took[len(took)-1])
			}
		})
	}
}

// objects returns the rules and routes of the kernel, without numbers of nexthops, and the number of nexthops. Routes
// to 0.0.0.0/8 hold groups that are ready for other weights.
func (b *returnBed) objects() (all string, nexthops int) {
	var kept []string
	for line := range strings.Lines(b.server.Objects()) {
		switch words := strings.Fields(line); {
		case words[0] == "id":
			nexthops++
		case !strings.HasPrefix(words[0], "0."):
			kept = append(kept, regexp.MustCompile(`nhid \d+`).ReplaceAllString(line, "nhid N"))
		}
	}
	return strings.Join(kept, ""), nexthops
}

// whole checks the device that has returned.
func (b *returnBed) whole(name, before string, nexthops int) {
	b.t.Helper()
	netnstest.Eventually(b.t, time.Minute, func() error {
		settings := b.server.Run("sysctl", "-n", "net.ipv4.neigh.eth1.mcast_solicit", "net.ipv4.neigh.eth1.retrans_time_ms")
		var solicitations, retransmission int // the kernel rounds up to its tick
		if _, err := fmt.Sscan(settings, &solicitations, &retransmission); err != nil || solicitations != 300 || retransmission > 20 {
			return fmt.Errorf("%s: neighbor settings %q", name, settings)
		}
		const ready = 20 // groups that stay for other weights, and their nexthops
		if now, n := b.objects(); now != before || n > nexthops+ready {
			return fmt.Errorf("%s: %d nexthops, before %d, and\n%s\nbefore\n%s", name, n, nexthops, now, before)
		}
		return nil
	})
	if !strings.Contains(b.server.IP("link", "show", "eth1"), "mtu 1500 ") {
		return
	}
	netnstest.Eventually(b.t, time.Minute, func() error { // the smaller MTU is a fault
		if out, _ := inNamespace(b.t, b.server, "health", "--socket", b.socket("server")); !strings.Contains(out, "sub-ports have different MTUs (1500 on eth1; 9000 on eth0)") {
			return errors.New(out)
		}
		return nil
	})
	b.server.IP("link", "set", "eth1", "mtu", "9000")
}

// flood is UDP packets from many ports of the server's loopback to the other server.
type flood struct {
	sent, received atomic.Uint64
	stop           func()
}

// flood lets the leaf forward packets toward the other server, and begins to send.
func (b *returnBed) flood() *flood {
	b.t.Helper()
	b.leaf.Sysctl("net.ipv4.ip_forward=1")
	b.leaf.IP("route", "add", "10.255.0.2/32", "nexthop", "via", "10.1.0.1", "nexthop", "via", "10.1.1.1")
	b.other.Addr("lo", "10.255.0.2/32")
	for _, n := range []*netnstest.Namespace{b.leaf, b.other} {
		n.Sysctl("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0")
	}
	for _, device := range []string{"b0", "b1"} {
		b.other.Sysctl("net.ipv4.conf." + device + ".rp_filter=0")
	}
	f := &flood{}
	sink := netnstest.In(b.other, func() (*net.UDPConn, error) {
		return net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 255, 0, 2), Port: 4791})
	})
	_ = sink.SetReadBuffer(8 << 20)
	var sources []*net.UDPConn
	for range 32 {
		sources = append(sources, netnstest.In(b.server, func() (*net.UDPConn, error) {
			return net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(10, 255, 0, 1)}, &net.UDPAddr{IP: net.IPv4(10, 255, 0, 2), Port: 4791})
		}))
	}
	quit := make(chan struct{})
	var sending, receiving sync.WaitGroup
	receiving.Go(func() {
		for buf := make([]byte, 64); ; f.received.Add(1) {
			if _, err := sink.Read(buf); err != nil {
				return
			}
		}
	})
	sending.Go(func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
			}
			for _, s := range sources {
				if _, err := s.Write([]byte("packet")); err != nil {
					b.t.Errorf("send: %v", err)
					return
				}
				f.sent.Add(1)
			}
		}
	})
	f.stop = sync.OnceFunc(func() {
		close(quit)
		sending.Wait()
		netnstest.Eventually(b.t, 10*time.Second, func() error {
			if sent, received := f.sent.Load(), f.received.Load(); sent != received {
				return fmt.Errorf("%d of %d packets have arrived", received, sent)
			}
			return nil
		})
		sink.Close()
		for _, s := range sources {
			s.Close()
		}
		receiving.Wait()
	})
	b.t.Cleanup(f.stop)
	return f
}

// TestReloadsUnderTraffic removes and adds planes, a sub-port and a loopback by reloads while packets flow. No packet
// is lost, the session that stays is the same one, and in the end the kernel has the objects of before.
func TestReloadsUnderTraffic(t *testing.T) {
	gate.Needed(t, "no other test counts packets while a reload changes the sub-ports of an agent")
	for _, driver := range []string{"linux", "bpf"} {
		t.Run(driver, func(t *testing.T) {
			b := newReturnBed(t, driver, "--buckets=1024")
			b.weights("1:1")
			whole, err := os.ReadFile(filepath.Join(b.dir, "server.yaml"))
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.SplitAfter(string(whole), "\n")
			p1 := slices.IndexFunc(lines, func(line string) bool { return strings.Contains(line, "name: p1") })
			without := strings.Join(slices.Delete(slices.Clone(lines), p1, p1+1), "")
			first := slices.Clone(lines)
			first[p1-1], first[p1] = first[p1], first[p1-1]
			more := strings.Replace(string(whole), "loopbacks: [10.255.0.1/32]", "loopbacks: [10.255.0.1/32, 10.255.0.9/32]", 1)
			reload := func(text, weights string) {
				t.Helper()
				if err := os.WriteFile(filepath.Join(b.dir, "server.yaml"), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
				if out, err := inNamespace(t, b.server, "reload", "--socket", b.socket("server")); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				b.weights(weights)
			}
			var sessions struct{ Sessions []struct{ Generation uint64 } }
			if err := b.json(&sessions, "sessions"); err != nil {
				t.Fatal(err)
			}
			generation := sessions.Sessions[0].Generation
			before, nexthops := b.objects()
			f := b.flood()
			for range gate.Count(t, gate.Kernel, 2, 100) {
				reload(without, " 1 ")
				netnstest.Eventually(t, time.Minute, func() error { // the kernel's answers may come after the weights
					if objects := b.server.Objects(); strings.Contains(objects, "eth1") {
						return fmt.Errorf("without p1:\n%s", objects)
					}
					return nil
				})
				reload(string(whole), " 1:1 ")
				reload(more, " 1:1 ")
				reload(strings.Join(first, ""), " 1:1 ")
				reload(string(whole), " 1:1 ")
			}
			f.stop()
			t.Logf("%d packets", f.sent.Load())
			b.whole("reloads", before, nexthops)
			if err := b.json(&sessions, "sessions"); err != nil || sessions.Sessions[0].Generation != generation {
				t.Errorf("%v, %+v: the session of p0 is another one", err, sessions)
			}
		})
	}
}
