package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/linux"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

const probePort = 4796

// reachBed is a server with an agent, whose sub-ports p0.0 and p1.0 end in leaves that receive frames.
type reachBed struct {
	testing.TB
	*testbed.Planes
	config     Config
	forwarding *farev1.Forwarding
	stop       func()
	leaves     []int // packet sockets
	sent       int
}

func newReachBed(t *testing.T, driver, loopback string, hop4, hop6 bool) *reachBed {
	b := &reachBed{TB: t, Planes: testbed.NewPlanes(t, 2, 1)}
	b.Server.Addr("lo", loopback)
	b.Wire(b.Cable)
	b.Resolve()
	pins := t.TempDir()
	if err := unix.Mount("bpf", pins, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(pins, 0) })
	b.config = Config{Driver: driver, InProcess: true, Journal: filepath.Join(t.TempDir(), "journal"), Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	b.config.BPF.PinDir, b.config.Linux.AuditInterval = pins+"/fared", time.Hour
	b.forwarding = b.Forwarding(farev1.Mode_MODE_PER_FLOW, loopback, hop4, hop6, 4791, probePort)
	b.forwarding.DirectProbePort = probePort
	for _, leaf := range b.Leaves {
		b.leaves = append(b.leaves, netnstest.In(leaf, func() (int, error) {
			return unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.ETH_P_ALL<<8)
		}))
	}
	t.Cleanup(func() {
		for _, fd := range b.leaves {
			unix.Close(fd)
		}
	})
	return b
}

// start runs an agent until stop, or the end of the test.
func (b *reachBed) start() *Agent {
	b.Helper()
	a := netnstest.In(b.Server, func() (*Agent, error) { return New(b.config) })
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	running := true
	b.stop = func() {
		if cancel(); running {
			running = false
			if err := <-ended; err != nil {
				b.Error(err)
			}
		}
	}
	b.Cleanup(b.stop)
	return a
}

func (b *reachBed) hello(a *Agent) {
	b.Helper()
	r, err := farev1.NewDataplaneServiceClient(a.Conn()).Hello(b.Context(), &farev1.HelloRequest{Forwarding: b.forwarding})
	if err != nil || !r.Capabilities.DirectProbePort {
		b.Fatal(r, err)
	}
}

// send sends a datagram from a source port to the probe port, out of a device or, with "", without one. It returns the
// plane at whose leaf's link-layer address the datagram has arrived within a time.
func (b *reachBed) send(from, to netip.Addr, port uint16, device string, within time.Duration) (plane int, err error) {
	b.sent++
	payload := fmt.Sprintf("probe number %d.", b.sent)
	err = b.Server.Do(func() error {
		socket, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, port)))
		if err != nil {
			return err
		}
		defer socket.Close()
		var control []byte
		if device != "" {
			out, err := net.InterfaceByName(device)
			if err != nil {
				return err
			}
			if control = (&ipv6.ControlMessage{IfIndex: out.Index}).Marshal(); to.Is4() {
				control = (&ipv4.ControlMessage{IfIndex: out.Index}).Marshal()
			}
		}
		_, _, err = socket.WriteMsgUDPAddrPort([]byte(payload), control, netip.AddrPortFrom(to, probePort))
		return err
	})
	if err != nil {
		return 0, err
	}
	return b.arrival(payload, time.Now().Add(within))
}

// arrival returns the plane at whose leaf a payload arrives first, until a time.
func (b *reachBed) arrival(payload string, until time.Time) (plane int, err error) {
	buffer := make([]byte, 2048)
	var all []unix.PollFd
	for _, fd := range b.leaves {
		all = append(all, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	for {
		if _, err := unix.Poll(all, 50); err != nil && err != unix.EINTR {
			return 0, err
		}
		for plane, fd := range b.leaves {
			n, from, err := unix.Recvfrom(fd, buffer, 0)
			if l, ok := from.(*unix.SockaddrLinklayer); err == nil && ok && l.Pkttype == unix.PACKET_HOST && strings.HasSuffix(string(buffer[:n]), payload) {
				return plane, nil
			}
		}
		if time.Now().After(until) {
			return -1, errors.New("no leaf receives the packet")
		}
	}
}

// TestReach sends probes out of the devices of sub-ports without weight, with both drivers, and compares the leaves at
// which they arrive: before and after a restart of the agent, after changes of devices, rules and routes, and after
// Flush.
func TestReach(t *testing.T) {
	gate.Needed(t, "probes leave by the sub-port without weight that they are to prove, with both drivers")
	for _, driver := range []string{Linux, BPF} {
		for _, c := range []struct {
			name, loopback, known, unknown string
			hop4, hop6                     bool
		}{
			{"IPv4", "10.255.0.1/32", "10.255.0.2", "10.255.0.3", true, true},
			{"IPv6", "fd00:255::1/128", "fd00:255::2", "fd00:255::3", true, true},
			{"IPv4 over IPv6", "10.255.0.1/32", "10.255.0.2", "10.255.0.3", false, true},
		} {
			t.Run(driver+" "+c.name, func(t *testing.T) {
				b := newReachBed(t, driver, c.loopback, c.hop4, c.hop6)
				from, known := netip.MustParsePrefix(c.loopback).Addr(), netip.MustParseAddr(c.known)
				b.reaches(from, known, netip.MustParseAddr(c.unknown))
			})
		}
	}
}

func (b *reachBed) reaches(from, known, unknown netip.Addr) {
	a := b.start()
	b.hello(a)
	testbed.OpenStream(b, a.Conn()).Do(
		&farev1.Operation{Op: &farev1.Operation_SetVector{SetVector: &farev1.Vector{Id: 1, Members: []*farev1.VectorMember{{Plane: "p0", Device: testbed.Device(0, 0), Weight: 1}}}}},
		&farev1.Operation{Op: &farev1.Operation_SetDestination{SetDestination: &farev1.Destination{Prefix: netip.PrefixFrom(known, known.BitLen()).String(), Vector: 1}}},
	)
	all := func(within time.Duration) error {
		for plane := range 2 {
			for _, to := range []netip.Addr{known, unknown} {
				if at, err := b.send(from, to, probePort, testbed.Device(plane, 0), within); err != nil || at != plane {
					return fmt.Errorf("to %v by plane %d: at leaf %d, %v", to, plane, at, err)
				}
			}
		}
		if at, err := b.send(from, known, 50000, "", within); err != nil || at != 0 {
			return fmt.Errorf("another packet: at leaf %d, %v", at, err)
		}
		return nil
	}
	must := func(when string) {
		b.Helper()
		if err := all(time.Minute); err != nil {
			b.Fatalf("%s: %v", when, err)
		}
	}
	must("at first")
	before := b.objects()
	b.stop()
	must("without the agent")
	a = b.start()
	must("after a restart")
	b.hello(a)
	if after := b.objects(); after != before {
		b.Errorf("after a restart\n%s\nbefore\n%s", after, before)
	}
	for what, undo := range map[string]func(){
		"a rule": func() { b.Server.IP(b.family(from), "rule", "del", "priority", "1780") },
		"routes": func() {
			for _, table := range []int{linux.DefaultReachTable, linux.DefaultReachTable + 1, linux.DefaultReachTable + 2} {
				if from.Is4() == (table == linux.DefaultReachTable) {
					b.Server.IP(b.family(from), "route", "flush", "table", fmt.Sprint(table))
				}
			}
		},
		"a device": func() {
			b.Server.IP("link", "set", testbed.Device(1, 0), "down")
			b.Server.IP("link", "set", testbed.Device(1, 0), "up")
		},
	} {
		undo()
		netnstest.Eventually(b, time.Minute, func() error { return all(100 * time.Millisecond) })
		netnstest.Eventually(b, time.Minute, func() error {
			if after := b.objects(); after != before {
				return fmt.Errorf("after the loss of %s\n%s\nbefore\n%s", what, after, before)
			}
			return nil
		})
	}
	b.forwarding.DirectProbePort = 0
	b.hello(a)
	if left := b.objects(); left != "" {
		b.Errorf("without a probe port: %s", left)
	}
	b.forwarding.DirectProbePort = probePort
	b.hello(a)
	must("with the probe port again")
	b.stop()
	b.Server.Must(func() error { _, err := Flush(b.config); return err })
	if left := b.objects(); left != "" {
		b.Errorf("after Flush: %s", left)
	}
}

func (b *reachBed) family(a netip.Addr) string {
	if a.Is4() {
		return "-4"
	}
	return "-6"
}

// objects returns the rules for probes, and the routes of their tables.
func (b *reachBed) objects() (text string) {
	for _, family := range []string{"-4", "-6"} {
		rules := strings.SplitAfter(b.Server.IP(family, "rule", "show", "priority", "1780"), "\n")
		slices.Sort(rules)
		text += strings.Join(rules, "")
		for _, line := range strings.Split(b.Server.IP(family, "route", "show", "table", "all", "proto", "179"), "\n") {
			if strings.HasPrefix(line, "default") || strings.Contains(line, "nexthop via") {
				text += line + "\n"
			}
		}
	}
	return text
}
