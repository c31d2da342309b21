package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fared/fared/api/dptest"
	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestSUNH checks that SUNH frames that are sent on the anchor leave over the sub-port of their slot, which the flow
// label selects, with the addresses of the next hop and the sub-port and otherwise unchanged. Before the next hop is
// resolved they are dropped and counted.
func TestSUNH(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			if f.name != families[0].name {
				gate.Slow(t, gate.Kernel, "another address family")
			}
			b := newBed(t, f)
			b.cfg.SUNH = netip.MustParsePrefix("10.255.0.0/16")
			if f.source.Addr().Is6() {
				b.cfg.SUNH = netip.MustParsePrefix("fd00:255::/112")
			}
			b.open()
			b.greet(farev1.Mode_MODE_PER_FLOW)
			for _, ports := range [][]uint32{sequence(64, 77, 10127), append(sequence(32, 78, 10126), sequence(32, 77, 10126)...)} {
				b.commit(setGroup(testGroup(1, 64, false, 1, 1, 1, 1)), setDestination(f.destination, 1, f.source, ports))
				raw := b.raw()
				host := func(p netip.Prefix) uint16 {
					a := p.Addr().As16()
					return binary.BigEndian.Uint16(a[14:])
				}
				for slot, port := range ports {
					p, s := place(slot)
					frame := append(bytes.Repeat([]byte{2}, 12), DefaultSUNHType>>8, DefaultSUNHType&0xff, 0x23, 253)
					frame = binary.BigEndian.AppendUint16(frame, 14<<12|uint16(port&0xfff))
					frame = binary.BigEndian.AppendUint16(frame, host(f.source))
					frame = binary.BigEndian.AppendUint16(frame, host(f.destination))
					frame = append(frame, "payload, up to the least of Ethernet......."...)
					tap := b.taps[testbed.Device(p, s)]
					netnstest.Eventually(t, time.Minute, func() error {
						_, _ = unix.Write(raw, frame) // ENOBUFS if it is dropped
						tap.mu.Lock()
						defer tap.mu.Unlock()
						if n := tap.sunh[uint16(port&0xfff)]; n == 0 {
							return fmt.Errorf("slot %d: nothing at %s", slot, testbed.Device(p, s))
						}
						if !bytes.Equal(tap.last[14:], frame[14:]) {
							return fmt.Errorf("slot %d: % x arrived, % x sent", slot, tap.last, frame)
						}
						if mac := b.mac(b.Leaves[p], testbed.LeafPort(s)); !bytes.Equal(tap.last[:6], mac) {
							return fmt.Errorf("slot %d: to % x, the leaf's is % x", slot, tap.last[:6], mac)
						}
						if mac := b.mac(b.Server, testbed.Device(p, s)); !bytes.Equal(tap.last[6:12], mac) {
							return fmt.Errorf("slot %d: from % x, the sub-port's is % x", slot, tap.last[6:12], mac)
						}
						return nil
					})
					for other, at := range b.taps {
						at.mu.Lock()
						if at != tap && at.sunh[uint16(port&0xfff)] > 0 {
							t.Errorf("slot %d came to %s, its own is %s", slot, other, testbed.Device(p, s))
						}
						at.mu.Unlock()
					}
				}
				for _, tap := range b.taps {
					tap.mu.Lock()
					clear(tap.sunh)
					tap.mu.Unlock()
				}
				if err := unix.Close(raw); err != nil {
					t.Fatal(err)
				}
			}
			if n := b.drops(); n[DropUnresolved] == 0 || len(n) != 1 {
				t.Errorf("drops: %v, want some unresolved at the start and nothing else", n)
			}
		})
	}
}

// raw opens a socket that sends frames on the anchor.
func (b *bed) raw() (fd int) {
	b.Helper()
	b.Server.Must(func() (err error) {
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: b.s.have.routes.anchor})
	})
	return fd
}

func (b *bed) mac(n *netnstest.Namespace, device string) net.HardwareAddr {
	b.Helper()
	return n.Device(device).HardwareAddr
}

// TestFragmentsAndSegments checks that all fragments of a datagram arrive, the first one at its slot's sub-port, and
// that a datagram for later segmentation (UDP_SEGMENT) is steered whole and counted as its segments.
func TestFragmentsAndSegments(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			if f.name != families[0].name {
				gate.Slow(t, gate.Kernel, "another address family")
			}
			b := startBed(t, f, farev1.Mode_MODE_PER_FLOW)
			ports := sequence(8, 0, 10127)
			b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(f.destination, 1, f.source, ports))
			flow := b.flow(ports[3])
			if _, err := flow.Write(make([]byte, 4000)); err != nil {
				t.Fatal(err)
			}
			netnstest.Eventually(t, time.Minute, func() error {
				pieces := 0
				for _, tap := range b.taps {
					tap.mu.Lock()
					pieces += tap.frag
					tap.mu.Unlock()
				}
				first := b.at("p3.0", ports[3])
				want := [2]int{1, 2}
				if f.source.Addr().Is6() {
					want = [2]int{0, 3} // the ports of the first fragment follow another header
				}
				if got := [2]int{first, pieces}; got != want {
					return fmt.Errorf("%d first and other pieces, want %d; %v", got, want, b.drops())
				}
				return nil
			})
			before, counted := b.at("p3.0", ports[3]), b.slot(3)
			raw, err := flow.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			if err := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000) }); err != nil {
				t.Fatal(err)
			}
			if _, err := flow.Write(make([]byte, 10_000)); err != nil {
				t.Fatal(err)
			}
			netnstest.Eventually(t, time.Minute, func() error {
				if b.at("p3.0", ports[3]) == before {
					return errors.New("nothing arrived")
				}
				return nil
			})
			headers := uint64(14 + 20 + 8)
			if f.source.Addr().Is6() {
				headers += 20
			}
			now := b.slot(3)
			if p, n := now.Packets-counted.Packets, now.Bytes-counted.Bytes; p != 10 || n != 10*(1000+headers) {
				t.Errorf("%d packets of %d bytes counted, want 10 of %d", p, n, 10*(1000+headers))
			}
		})
	}
}

// TestOptions checks that IPv4 options do not hide the ports, and that a port that is not steered has no rule.
func TestOptions(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
	ports := sequence(8, 0, 10127)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
	flow := b.flow(ports[6])
	raw, err := flow.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), unix.IPPROTO_IP, unix.IP_OPTIONS, "\x01\x01\x01\x01\x01\x01\x01\x00")
	}); errors.Join(cerr, err) != nil {
		t.Fatal(cerr, err)
	}
	if err := flow.send(4); err != nil {
		t.Fatal(err)
	}
	b.arrived(4)
	if got := b.at("p2.1", ports[6]); got != 4 {
		t.Errorf("%d of 4 packets with options at p2.1", got)
	}
	if out, err := b.Server.Output("ip", "route", "get", "10.255.0.2", "from", "10.255.0.1", "ipproto", "udp", "dport", "4790"); err == nil && strings.Contains(string(out), "fared0") {
		t.Errorf("port 4790 is steered: %s", out)
	}
	for _, port := range []string{"4791", "4444"} {
		if out, err := b.Server.Output("ip", "route", "get", "10.255.0.2", "from", "10.255.0.1", "ipproto", "udp", "dport", port); err != nil || !strings.Contains(string(out), "fared0") {
			t.Errorf("port %s is not steered: %s %v", port, out, err)
		}
	}
	// Another port list removes the rule, and the program drops packets that are sent on the anchor nevertheless. It
	// also drops all other unknown packets.
	f := b.forwarding(farev1.Mode_MODE_PER_FLOW)
	f.UdpPorts = []uint32{4444}
	if err := b.s.SetForwarding(f); err != nil {
		t.Fatal(err)
	}
	if rules := b.Server.IP("rule") + b.Server.IP("-6", "rule"); strings.Contains(rules, "4791") || strings.Count(rules, "4444") != 2 {
		t.Errorf("rules: %s", rules)
	}
	datagram := []byte{0x45, 0, 0, 28, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0, 10, 255, 0, 1, 10, 255, 0, 2, 0xc0, 0, 0x12, 0xb7, 0, 8, 0, 0}
	anchor := b.raw()
	defer unix.Close(anchor)
	for _, c := range []struct {
		want  Drop
		frame []byte
	}{
		{DropPort, append(append(make([]byte, 12), 8, 0), datagram...)},
		{DropMalformed, append(append(make([]byte, 12), 8, 0), datagram[:22]...)},
		{DropProtocol, append(make([]byte, 12), 8, 6, 0, 0)},
		{DropProtocol, append(append(make([]byte, 12), DefaultSUNHType>>8, DefaultSUNHType&0xff), make([]byte, 8)...)}, // not configured
		{DropDestination, append(append(make([]byte, 12), 0x86, 0xdd, 0x60), make([]byte, 39)...)},
	} {
		had := b.drops()[c.want]
		_, _ = unix.Write(anchor, c.frame) // ENOBUFS if it is dropped
		if got := b.drops()[c.want] - had; got != 1 {
			t.Errorf("% x: %d dropped as %v, want 1: %v", c.frame, got, c.want, b.drops())
		}
	}
}

// TestPreferredSource checks that an unbound socket sends from the first loopback that is a local address.
func TestPreferredSource(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := newBed(t, families[0])
	b.Server.Addr("lo", "10.255.0.77/32")
	b.cfg.PreferSource = true
	b.open()
	f := b.forwarding(farev1.Mode_MODE_PER_FLOW)
	f.Loopbacks = []string{"10.255.0.99/32", "fd00:255::1/128", "10.255.0.77/32", "10.255.0.1/32"}
	if err := b.s.SetForwarding(f); err != nil {
		t.Fatal(err)
	}
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, sequence(8, 0, 1)))
	from := func() string {
		return b.Server.IP("route", "get", "10.255.0.2", "ipproto", "udp", "dport", "4791")
	}
	if got := from(); !strings.Contains(got, "src 10.255.0.77") {
		t.Errorf("from %s, want 10.255.0.77", got)
	}
	f.Loopbacks = f.Loopbacks[3:]
	if err := b.s.SetForwarding(f); err != nil {
		t.Fatal(err)
	}
	if got := from(); !strings.Contains(got, "src 10.255.0.1 ") {
		t.Errorf("from %s, want 10.255.0.1", got)
	}
}

// TestForwardingChanges adds, removes and reorders sub-ports and changes their plane and next hop. Groups that name a
// removed sub-port work without it, and other groups are not affected.
func TestForwardingChanges(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
	ports := sequence(8, 0, 10127)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
	check := func(when, gone string) {
		t.Helper()
		for slot, port := range ports {
			p, s := place(slot)
			before, had, flow := b.total(), b.at(testbed.Device(p, s), port), b.flow(port)
			if err := flow.send(2); err != nil {
				t.Fatal(err)
			}
			flow.Close()
			b.arrived(before + 2)
			if got := b.at(testbed.Device(p, s), port) - had; (got == 2) != (testbed.Device(p, s) != gone) {
				t.Errorf("%s: slot %d: %d of 2 packets at %s", when, slot, got, testbed.Device(p, s))
			}
		}
	}
	check("start", "")
	without := b.forwarding(farev1.Mode_MODE_PER_FLOW)
	without.Planes[2].SubPorts = without.Planes[2].SubPorts[1:]
	if err := b.s.SetForwarding(without); err != nil {
		t.Fatal(err)
	}
	check("without p2.0", "p2.0")
	turned := b.forwarding(farev1.Mode_MODE_PER_FLOW)
	turned.Planes[0], turned.Planes[3] = turned.Planes[3], turned.Planes[0]
	if err := b.s.SetForwarding(turned); err != nil {
		t.Fatal(err)
	}
	check("in another order", "")
	unknown := b.forwarding(farev1.Mode_MODE_PER_FLOW)
	unknown.Planes[1].SubPorts[1].NextHopV4 = ""
	if err := b.s.SetForwarding(unknown); err != nil {
		t.Fatal(err)
	}
	check("next hop unknown", "p1.1")
	b.greet(farev1.Mode_MODE_PER_FLOW)
	check("as at first", "")
	for name, change := range map[string]func(*farev1.Forwarding){
		"netns":  func(f *farev1.Forwarding) { f.Planes[0].SubPorts[0].Netns = "other" },
		"name":   func(f *farev1.Forwarding) { f.Planes[0].SubPorts[0].Device = "a-name-that-is-too-long" },
		"anchor": func(f *farev1.Forwarding) { f.Planes[0].SubPorts[0].Device = "fared0" },
		"many": func(f *farev1.Forwarding) {
			for i := range maxPlaces {
				f.Planes[0].SubPorts = append(f.Planes[0].SubPorts, &farev1.ForwardingSubPort{Device: fmt.Sprint("x", i)})
			}
		},
	} {
		f := b.forwarding(farev1.Mode_MODE_PER_FLOW)
		change(f)
		if code := status.Code(b.s.SetForwarding(f)); code != codes.InvalidArgument && code != codes.ResourceExhausted {
			t.Errorf("%s: %v", name, code)
		}
	}
	check("after refusals", "")
}

// TestLimits checks that changes beyond the limits are refused and leave the state unchanged.
func TestLimits(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := newBed(t, families[0])
	b.Resolve()
	b.cfg.MaxPairs, b.cfg.MaxSlotCounters = 2, 8
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	ports := sequence(8, 0, 10127)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
	second, third := netip.MustParsePrefix("10.255.0.3/32"), netip.MustParsePrefix("10.255.0.4/32")
	b.commit(setDestination(second, 1, b.family.source, ports))
	if stats, err := b.s.Stats(); err != nil || stats.Uncounted != 1 || stats.Pairs != 2 {
		t.Errorf("%+v, %v: want one of two pairs not counted", stats, err)
	}
	err := b.s.Commit([]contract.Change{setDestination(third, 1, b.family.source, ports)})
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a third pair: %v", err)
	}
	if stats, err := b.s.Stats(); err != nil || stats.Destinations != 2 || stats.Pairs != 2 {
		t.Errorf("%+v, %v", stats, err)
	}
	if routes := b.Server.IP("route", "show", "table", "179"); strings.Contains(routes, "10.255.0.4") {
		t.Errorf("a route is left: %s", routes)
	}
	// The counters of a removed pair are free for another pair, and zero.
	flow := b.flow(ports[0])
	if err := flow.send(3); err != nil {
		t.Fatal(err)
	}
	b.arrived(3)
	gone := setDestination(b.family.destination, 1, b.family.source, ports).Inverse()
	b.commit(gone)
	b.commit(setDestination(third, 1, b.family.source, ports))
	b.family.destination = third
	if got := b.slot(0); got.Packets != 0 {
		t.Errorf("a new pair begins at %d packets", got.Packets)
	}
	for name, change := range map[string]contract.Change{
		"slot 128":  setGroup(&farev1.Vector{Id: 9, Slots: []*farev1.VectorSlot{{Slot: 128, Plane: "p0"}}}),
		"129 ports": setDestination(second, 1, b.family.source, sequence(129, 0, 1)),
	} {
		if code := status.Code(b.s.Commit([]contract.Change{change})); code != codes.OutOfRange {
			t.Errorf("%s: %v", name, code)
		}
	}
}

// TestConformance runs the conformance suite on steering behind the server of the contract.
func TestConformance(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	gate.Needed(t, "driver bpf fulfills the contract")
	b := newBed(t, families[0])
	b.cfg.MaxGroups, b.cfg.MaxDestinations = 64, 64
	b.open()
	conn, err := memory.Dial(contract.New(contract.Config{Name: "bpf", Forwarder: b.s}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	dptest.Run(t, conn, dptest.Options{})
}

// TestMount checks that a directory outside of BPF file systems is refused with the remedy.
func TestMount(t *testing.T) {
	netnstest.Require(t)
	if err := mountPins(t.TempDir() + "/fared"); err == nil || !strings.Contains(err.Error(), "mount -t bpf") {
		t.Errorf("mountPins = %v", err)
	}
}

// TestSupported checks that the test host supports steering.
func TestSupported(t *testing.T) {
	netnstest.Require(t)
	if err := Supported(); err != nil {
		t.Error(err)
	}
}

func TestConfigRefuses(t *testing.T) {
	for want, cfg := range map[string]Config{
		"anchor device":    {Device: "a/b"},
		"a limit is below": {MaxPairs: -1},
		"leaves no 16":     {SUNH: netip.MustParsePrefix("10.0.0.0/24")},
		"for the system":   {Table: 254},
		"10 leaves no 1":   {SUNH: netip.MustParsePrefix("fd00::10/128")},
	} {
		if _, err := cfg.resolve(); err == nil || !strings.Contains(err.Error(), strings.TrimPrefix(want, "10 ")[:8]) {
			t.Errorf("%s: %v", want, err)
		}
	}
}
