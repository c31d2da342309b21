package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestPins checks that all packets of a slot leave over its sub-port, and that those without a slot are distributed
// over all sub-ports.
func TestPins(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			if f.name != families[0].name {
				gate.Slow(t, gate.Kernel, "another address family")
			}
			b := startBed(t, f, farev1.Mode_MODE_PER_FLOW)
			for name, ports := range map[string][]uint32{
				"progression": sequence(128, 4711, 10127),
				"table":       append(sequence(64, 4711, 10126), sequence(64, 4712, 10128)...),
			} {
				b.commit(setGroup(testGroup(1, 128, false, 1, 1, 1, 1)), setDestination(f.destination, 1, f.source, ports))
				before := b.total()
				const each = 5
				had := map[uint32]int{}
				for slot, port := range ports {
					p, s := place(slot)
					had[port] = b.at(testbed.Device(p, s), port)
					flow := b.flow(port)
					if err := flow.send(each); err != nil {
						t.Fatal(err)
					}
					flow.Close()
				}
				b.arrived(before + each*len(ports))
				for slot, port := range ports {
					p, s := place(slot)
					if got := b.at(testbed.Device(p, s), port) - had[port]; got != each {
						t.Errorf("%s: slot %d: %d of %d packets at %s", name, slot, got, each, testbed.Device(p, s))
					}
				}
			}
		})
	}
}

// TestSpray checks that in per-packet mode a slot's packets are sprayed over its plane's members and those of a flow
// without a slot over all members, by weight, within half a percent of all packets, and that members of a plane that is
// down are excluded immediately.
func TestSpray(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	gate.Needed(t, "packets without a slot, and those of a slot in per-packet mode, go by weight")
	const within = 0.005
	all := gate.Count(t, gate.Kernel, 100_000, 1_000_000)
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			if f.name != families[0].name {
				gate.Slow(t, gate.Kernel, "another address family")
			}
			b := startBed(t, f, farev1.Mode_MODE_PER_PACKET)
			g := testGroup(1, 8, true, 2, 2, 1, 2)
			g.Members[0].Weight, g.Members[1].Weight = 3, 1 // the sub-ports of plane 0
			ports := sequence(8, 99, 10127)
			b.commit(setGroup(g), setDestination(f.destination, 1, f.source, ports))
			var sum uint32
			for _, m := range g.Members {
				sum += m.Weight
			}
			near := func(what string, n, of int, share float64) {
				t.Helper()
				if got := float64(n) / float64(of); math.Abs(got-share) > within {
					t.Errorf("%s: %.4f of the packets, want %.4f", what, got, share)
				}
			}
			slot, stray := b.flow(ports[4]), b.flow(1024)
			for sent := 0; sent < all; sent += all / 20 { // in pieces that fit the taps' buffers
				before := b.total()
				if err := errors.Join(slot.send(all/40), stray.send(all/40)); err != nil {
					t.Fatal(err)
				}
				b.arrived(before + all/20)
			}
			near("slot 4 at p0.0", b.at("p0.0", ports[4]), all/2, 0.75)
			near("slot 4 at p0.1", b.at("p0.1", ports[4]), all/2, 0.25)
			for _, m := range g.Members {
				near("no slot at "+m.Device, b.at(m.Device, 1024), all/2, float64(m.Weight)/float64(sum))
			}
			if got := b.at("p0.0", ports[4]) + b.at("p0.1", ports[4]); got != all/2 {
				t.Errorf("%d of %d packets in plane 0", got, all/2)
			}
			// After one of its plane's two sub-ports fails, the other carries all packets; after both, the rest of the
			// group does.
			b.commit(contract.Change{Kind: contract.SubPortChange, Device: "p0.0"})
			before, had := b.total(), b.at("p0.1", ports[4])
			if err := slot.send(1000); err != nil {
				t.Fatal(err)
			}
			b.arrived(before + 1000)
			if got := b.at("p0.1", ports[4]) - had; got != 1000 {
				t.Errorf("p0.0 down: %d of 1000 at p0.1", got)
			}
			b.commit(contract.Change{Kind: contract.SubPortChange, Device: "p0.1"})
			before, had = b.total(), b.at("p2.0", ports[4])
			if err := slot.send(10000); err != nil {
				t.Fatal(err)
			}
			b.arrived(before + 10000)
			near("plane 0 down, p2.0", b.at("p2.0", ports[4])-had, 10000, 0.1)
			if got := b.slot(4).DivertedPackets; got != 10000 {
				t.Errorf("%d packets counted as diverted, want 10000", got)
			}
		})
	}
}

// slot reads a slot's counters.
func (b *bed) slot(n uint32) *farev1.SlotCounters {
	b.Helper()
	var found *farev1.SlotCounters
	err := b.s.Counters(&farev1.CountersRequest{Destination: b.family.destination.String()}, func(r *farev1.CountersResponse) error {
		for _, s := range r.Slots {
			if s.Slot == n {
				found = s
			}
		}
		return nil
	})
	if err != nil || found == nil {
		b.Fatalf("slot %d: no counters: %v", n, err)
	}
	return found
}

// TestFailover checks that a sub-port that the control plane sets down, that loses its carrier or that is deleted
// carries nothing from then on. The flows of its slots use the others, each one of them, by weight, and are counted;
// the other slots do not move. When it returns, its flows return. Without any sub-port, packets are dropped and
// counted.
func TestFailover(t *testing.T) {
	ways := []struct {
		name     string
		out, off func(b *bed)
	}{
		{"control plane", func(b *bed) {
			b.commit(contract.Change{Kind: contract.SubPortChange, Device: "p1.0"})
		}, func(b *bed) {
			b.commit(contract.Change{Kind: contract.SubPortChange, Device: "p1.0", Up: true})
		}},
		{"carrier", func(b *bed) {
			b.Leaves[1].IP("link", "set", "server0", "down")
		}, func(b *bed) {
			b.Leaves[1].Addr("server0", "fd00:16:1:0::2/64") // the address was removed with the link
		}},
		{"device", func(b *bed) {
			b.Server.IP("link", "del", "p1.0")
		}, func(b *bed) {
			b.cable(1, 0)
		}},
		{"name", func(b *bed) {
			b.Server.IP("link", "set", "p1.0", "down")
			b.Server.IP("link", "set", "p1.0", "name", "other")
			b.Server.IP("link", "set", "other", "up")
		}, func(b *bed) {
			b.Server.IP("link", "set", "other", "down")
			b.Server.IP("link", "set", "other", "name", "p1.0")
			b.Server.Addr("p1.0", "fd00:16:1:0::1/64") // the address was removed with the link
		}},
		{"alternative name", func(b *bed) {
			b.Server.IP("link", "set", "p1.0", "name", "other")
		}, func(b *bed) {
			b.Server.IP("link", "property", "add", "dev", "other", "altname", "p1.0")
		}},
	}
	b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
	const n = 64
	ports := sequence(n, 0, 10127)
	b.commit(setGroup(testGroup(1, n, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
	var flows []*flow
	for _, port := range ports {
		flows = append(flows, b.flow(port))
	}
	// round sends from every slot and returns the device of each slot's packets, "" for several devices.
	round := func() (where [n]string) {
		t.Helper()
		before := b.total()
		var had [n]map[string]int
		for i, port := range ports {
			had[i] = map[string]int{}
			for dev := range b.taps {
				had[i][dev] = b.at(dev, port)
			}
		}
		for _, f := range flows {
			if err := f.send(3); err != nil {
				t.Fatal(err)
			}
		}
		b.arrived(before + 3*n)
		for i, port := range ports {
			for dev := range b.taps {
				if b.at(dev, port)-had[i][dev] == 3 {
					where[i] = dev
				}
			}
		}
		return where
	}
	up := func(want bool) { t.Helper(); b.awaitLive("p1.0", want) }
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			diverted := b.slot(1).DivertedPackets
			way.out(b)
			up(false)
			others := map[string]bool{}
			for slot, dev := range round() {
				p, s := place(slot)
				switch own := testbed.Device(p, s); {
				case own != "p1.0" && dev != own:
					t.Errorf("slot %d moved from %s to %q", slot, own, dev)
				case own == "p1.0" && (dev == "" || dev == own):
					t.Errorf("slot %d of the lost sub-port is at %q", slot, dev)
				case own == "p1.0":
					others[dev] = true
				}
			}
			if len(others) < 3 {
				t.Errorf("the lost sub-port's 8 slots are at %v only", others)
			}
			if got := b.slot(1).DivertedPackets - diverted; got != 3 {
				t.Errorf("slot 1 counts %d diverted packets, want 3", got)
			}
			way.off(b)
			up(true)
			b.Resolve()
			for slot, dev := range round() {
				if p, s := place(slot); dev != testbed.Device(p, s) {
					t.Errorf("back: slot %d at %q", slot, dev)
				}
			}
		})
	}
	t.Run("all", func(t *testing.T) {
		for p := range testPlanes {
			for s := range testSubPorts {
				b.commit(contract.Change{Kind: contract.SubPortChange, Device: testbed.Device(p, s)})
			}
		}
		had := b.drops()[DropUnreachable]
		for _, f := range flows {
			_ = f.send(1) // the socket may return the drop as an error
		}
		if got := b.drops()[DropUnreachable] - had; got != n {
			t.Errorf("%d packets dropped as unreachable, want %d", got, n)
		}
	})
}

// TestRestart checks that closing and reopening an agent object under traffic, with adoption, the same commits and
// Settle, disturbs no packet, and that state that was not committed again is removed.
func TestRestart(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	gate.Needed(t, "an agent that restarts adopts its maps, or makes others, and no packet strays")
	for _, layout := range []string{"same", "other"} {
		t.Run(layout, func(t *testing.T) {
			b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
			const n = 32
			ports := sequence(n, 5, 10127)
			gone := netip.MustParsePrefix("10.255.9.9/32")
			state := []contract.Change{setGroup(testGroup(1, n, false, 2, 2, 1, 2)), setDestination(b.family.destination, 1, b.family.source, ports)}
			b.commit(state...)
			b.commit(setGroup(testGroup(2, n, false, 1, 1, 1, 1)), setDestination(gone, 2, b.family.source, ports))
			b.commit(contract.Change{Kind: contract.SubPortChange, Device: "p3.1"})
			var flows []*flow
			for _, port := range ports {
				flows = append(flows, b.flow(port))
			}
			quit, sent := make(chan struct{}), make(chan error, 1)
			go func() {
				for {
					for _, f := range flows {
						if err := f.send(1); err != nil {
							sent <- err
							return
						}
					}
					select {
					case <-quit:
						sent <- nil
						return
					default:
					}
				}
			}()
			busy := func() {
				t.Helper()
				before := b.total()
				netnstest.Eventually(t, time.Minute, func() error {
					if b.total() < before+2*n {
						return errors.New("no traffic")
					}
					return nil
				})
			}
			for range gate.Count(t, gate.Kernel, 2, 5) {
				busy()
				if err := b.s.Close(); err != nil {
					t.Fatal(err)
				}
				busy()
				if layout == "other" {
					b.cfg.MaxGroups = cmp.Or(b.cfg.MaxGroups, DefaultMaxGroups) - 1
				}
				b.open()
				busy()
				b.greet(farev1.Mode_MODE_PER_FLOW)
				busy()
				b.commit(state...)
				b.commit(contract.Change{Kind: contract.SubPortChange, Device: "p3.1"})
				busy()
				if err := b.s.Settle(); err != nil {
					t.Fatal(err)
				}
				busy()
			}
			close(quit)
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
			total := 0
			for _, f := range flows {
				total += f.sent
			}
			b.arrived(total)
			for slot, port := range ports {
				p, s := place(slot)
				if dev := testbed.Device(p, s); dev != "p3.1" && b.at(dev, port) != flows[slot].sent {
					t.Errorf("slot %d: %d of %d packets at %s", slot, b.at(dev, port), flows[slot].sent, dev)
				} else if dev == "p3.1" && b.at(dev, port) != 0 {
					t.Errorf("slot %d: %d packets at %s, which is held down", slot, b.at(dev, port), dev)
				}
			}
			if layout == "same" {
				if got := b.slot(0); got.Packets != uint64(flows[0].sent) {
					t.Errorf("slot 0 counts %d packets of %d", got.Packets, flows[0].sent)
				}
			}
			stats, err := b.s.Stats()
			if err != nil || stats.Groups != 1 || stats.Destinations != 1 || stats.Pairs != 1 || !stats.Settled {
				t.Errorf("settled: %+v, %v", stats, err)
			}
			if routes := b.Server.IP("route", "show", "table", "179"); strings.Contains(routes, "10.255.9.9") || !strings.Contains(routes, "10.255.0.2") {
				t.Errorf("routes: %s", routes)
			}
			if dirs, err := os.ReadDir(b.cfg.PinDir); err != nil || len(dirs) != 2 {
				t.Errorf("pins: %v, %v", dirs, err)
			}
		})
	}
}

// TestDownIsInherited checks that sub-ports that the control plane set down stay down for the next process, until it
// settles without the same operation.
func TestDownIsInherited(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := newBed(t, families[0])
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	b.commit(contract.Change{Kind: contract.SubPortChange, Device: "p0.0"}, contract.Change{Kind: contract.SubPortChange, Device: "p0.1"},
		contract.Change{Kind: contract.SubPortChange, Device: "p1.0"})
	if err := b.s.Close(); err != nil {
		t.Fatal(err)
	}
	b.open()
	live := func(when string, want ...string) {
		t.Helper()
		if stats, err := b.s.Stats(); err != nil || !slices.Equal(stats.Live, want) {
			t.Errorf("%s: live %v, %v; want %v", when, stats.Live, err, want)
		}
	}
	b.greet(farev1.Mode_MODE_PER_FLOW)
	live("adopted", "p1.1", "p2.0", "p2.1", "p3.0", "p3.1")
	b.commit(contract.Change{Kind: contract.SubPortChange, Device: "p0.1"}, contract.Change{Kind: contract.SubPortChange, Device: "p1.0", Up: true})
	live("told again", "p1.0", "p1.1", "p2.0", "p2.1", "p3.0", "p3.1")
	if err := b.s.Settle(); err != nil {
		t.Fatal(err)
	}
	live("settled", "p0.0", "p1.0", "p1.1", "p2.0", "p2.1", "p3.0", "p3.1")
}

// TestDetach checks that no object of the agent remains, and that objects of other programs are unchanged.
func TestDetach(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	netnstest.Require(t, "bpftool", "tc")
	b := newBed(t, families[0])
	for _, line := range []string{
		"route add 198.51.100.0/24 via 172.16.0.1 dev p0.0 table 179 protocol static",
		"rule add from 203.0.113.0/24 lookup 179 priority 1790 protocol static",
		"rule add ipproto udp dport 4791 lookup 500 priority 1791 protocol static",
		"-6 rule add ipproto udp dport 4791 lookup 500 priority 1791 protocol static",
	} {
		b.Server.IP(strings.Fields(line)...)
	}
	world := func() string { return b.Server.IP("-d", "link") + b.Server.Objects() }
	netnstest.Eventually(t, time.Minute, func() error { // the kernel reports the states of new devices late
		if links := b.Server.IP("link"); strings.Contains(links, "DOWN") {
			return errors.New(links)
		}
		return nil
	})
	before := world()
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	six := netip.MustParsePrefix("fd00:255::2/128")
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, sequence(8, 0, 1)),
		setDestination(six, 1, families[1].source, sequence(8, 0, 1)))
	pass := attachPass(t, b)
	if out, err := b.Server.Output("bpftool", "net", "show"); err != nil || !strings.Contains(string(out), "fared0") {
		t.Logf("bpftool net show: %s %v", out, err)
	}
	if now := b.Server.IP("-6", "route", "show", "table", "179"); !strings.Contains(now, "fd00:255::2 via fe80::1 dev fared0") {
		t.Errorf("no IPv6 route: %s", now)
	}
	if err := pass.Close(); err != nil {
		t.Fatal(err)
	}
	if err := b.s.Detach(); err != nil {
		t.Fatal(err)
	}
	if after := world(); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
	if _, err := os.Stat(b.cfg.PinDir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the pins are left: %v", err)
	}
	// Flush removes the same objects of a previous agent, and nothing when called again.
	b.open()
	b.greet(farev1.Mode_MODE_PER_FLOW)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, sequence(8, 0, 1)))
	if err := b.s.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		b.Server.Must(func() error { return Flush(b.cfg) })
		if after := world(); after != before {
			t.Errorf("before:\n%s\nafter --flush:\n%s", before, after)
		}
	}
	// A device with the anchor's name but without its mark stays.
	b.Server.IP("link", "add", "fared0", "type", "ifb")
	if err := b.Server.Do(func() error {
		s, err := Open(b.cfg)
		if err == nil {
			return s.Close()
		}
		return err
	}); err == nil || !strings.Contains(err.Error(), "use another name") {
		t.Errorf("Open on a device of another program: %v", err)
	}
	b.Server.Must(func() error { return Flush(b.cfg) })
	if !strings.Contains(b.Server.IP("link"), "fared0") {
		t.Error("the device of another program was removed")
	}
}

// attachPass attaches a foreign program next to the agent's, and returns its link.
func attachPass(t *testing.T, b *bed) link.Link {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm32(asm.R0, -1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	var l link.Link
	b.Server.Must(func() error {
		l, err = link.AttachTCX(link.TCXOptions{Interface: b.s.have.routes.anchor, Program: program, Attach: ebpf.AttachTCXEgress})
		return err
	})
	return l
}

// TestAnchorComesBack checks that an anchor removed by another program is recreated with its routes.
func TestAnchorComesBack(t *testing.T) {
	gate.WithoutRaceDetector(t, "drives the kernel in one goroutine")
	b := startBed(t, families[0], farev1.Mode_MODE_PER_FLOW)
	ports := sequence(8, 0, 10127)
	b.commit(setGroup(testGroup(1, 8, false, 1, 1, 1, 1)), setDestination(b.family.destination, 1, b.family.source, ports))
	for _, how := range [][]string{{"link", "set", "fared0", "down"}, {"link", "del", "fared0"}} {
		b.Server.IP(how...)
		netnstest.Eventually(t, time.Minute, func() error {
			if routes, err := b.Server.Output("ip", "route", "show", "table", "179"); err != nil || !strings.Contains(string(routes), "10.255.0.2") {
				return fmt.Errorf("no route: %v", err)
			}
			return nil
		})
		before, had := b.total(), b.at("p2.0", ports[2])
		flow := b.flow(ports[2])
		if err := flow.send(1); err != nil {
			t.Fatal(err)
		}
		flow.Close()
		b.arrived(before + 1)
		if b.at("p2.0", ports[2]) != had+1 {
			t.Errorf("after %v: slot 2 is not at p2.0", how)
		}
		b.Server.IP("link", "set", "p0.0", "mtu", "1400")
		netnstest.Eventually(t, time.Minute, func() error {
			if out := b.Server.IP("link", "show", "fared0"); !strings.Contains(out, "mtu 1400") {
				return errors.New(out)
			}
			return nil
		})
		b.Server.IP("link", "set", "p0.0", "mtu", "1500")
	}
}
