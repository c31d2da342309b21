package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/dataplane/internal/contract"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/internal/testkit/testbed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	testPlanes   = 4
	patience     = time.Minute
	testSubPorts = 2
	roce         = 4791
)

// family holds the addresses of flows and next hops of one combination of families.
type family struct {
	name                string
	source, destination netip.Prefix
	hop4, hop6          bool
}

var families = []family{
	{"v4", netip.MustParsePrefix("10.255.0.1/32"), netip.MustParsePrefix("10.255.0.2/32"), true, false},
	{"v6", netip.MustParsePrefix("fd00:255::1/128"), netip.MustParsePrefix("fd00:255::2/128"), false, true},
	{"v4 over v6", netip.MustParsePrefix("10.255.0.1/32"), netip.MustParsePrefix("10.255.0.2/32"), false, true},
}

// bed is a server whose sub-ports end in leaves that count packets.
type bed struct {
	testing.TB
	*testbed.Planes
	taps   map[string]*tap
	family family
	tcp    []uint32 // steered TCP ports
	cfg    Config
	s      *Steering
}

func newBed(t testing.TB, f family) *bed {
	t.Helper()
	return newBedBy(t, f, netnstest.Veth)
}

// startBed is newBed with a running Steering, and all next hops resolved.
func startBed(t testing.TB, f family, mode farev1.Mode) *bed {
	t.Helper()
	b := newBed(t, f)
	b.Resolve()
	b.open()
	b.greet(mode)
	return b
}

// newBedBy is newBed with cables created by join.
func newBedBy(t testing.TB, f family, join func(testing.TB, *netnstest.Namespace, string, *netnstest.Namespace, string)) *bed {
	t.Helper()
	b := &bed{TB: t, Planes: testbed.NewPlanes(t, testPlanes, testSubPorts), taps: map[string]*tap{}, family: f}
	b.Join = join
	b.cfg = Config{PinDir: mountBPF(t) + "/fared", Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	b.Server.Addr("lo", "10.255.0.1/32", "fd00:255::1/128")
	b.Wire(b.cable)
	return b
}

func (b *bed) cable(p, s int) {
	b.Helper()
	b.Cable(p, s)
	b.taps[testbed.Device(p, s)] = newTap(b, b.Leaves[p], testbed.LeafPort(s))
}

// mountBPF mounts a BPF file system until the end of the test.
func mountBPF(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func (b *bed) open() {
	b.Helper()
	b.Server.Must(func() (err error) {
		b.s, err = Open(b.cfg)
		return err
	})
	s := b.s
	b.Cleanup(func() { s.Close() })
}

func (b *bed) forwarding(mode farev1.Mode) *farev1.Forwarding {
	f := b.Forwarding(mode, b.family.source.String(), b.family.hop4, b.family.hop6, roce, 4444)
	f.TcpPorts = b.tcp
	return f
}

func (b *bed) greet(mode farev1.Mode) {
	b.Helper()
	if err := b.s.SetForwarding(b.forwarding(mode)); err != nil {
		b.Fatal(err)
	}
}

func (b *bed) commit(changes ...contract.Change) {
	b.Helper()
	if err := b.s.Commit(changes); err != nil {
		b.Fatal(err)
	}
}

// testGroup returns a group with n slots, assigned to the sub-ports in turn, or to planes in per-packet mode; weights
// are by plane.
func testGroup(id uint32, n int, perPacket bool, weights ...uint32) *farev1.Vector {
	g := &farev1.Vector{Id: id}
	for p, w := range weights {
		for s := range testSubPorts {
			if w > 0 {
				g.Members = append(g.Members, &farev1.VectorMember{Plane: fmt.Sprintf("p%d", p), Device: testbed.Device(p, s), Weight: w})
			}
		}
	}
	for i := range n {
		p, s := place(i)
		slot := &farev1.VectorSlot{Slot: uint32(i), Plane: fmt.Sprintf("p%d", p), Device: testbed.Device(p, s)}
		if perPacket {
			slot.Device = ""
		}
		g.Slots = append(g.Slots, slot)
	}
	return g
}

// place returns the position of a slot of testGroup.
func place(slot int) (plane, sub int) { return slot % testPlanes, slot / testPlanes % testSubPorts }

func setGroup(g *farev1.Vector) contract.Change {
	return contract.Change{Kind: contract.GroupChange, Group: g.Id, After: g}
}

func setDestination(to netip.Prefix, group uint32, source netip.Prefix, ports []uint32) contract.Change {
	return contract.Change{Kind: contract.DestinationChange, Prefix: to, To: contract.Destination{
		Group: group, Pairs: []*farev1.PairPorts{{Source: source.String(), SourcePorts: ports}},
	}}
}

// sequence returns a progression of ports like those of the control plane.
func sequence(n, start, stride int) (ports []uint32) {
	for i := range n {
		ports = append(ports, uint32(dynamicPorts+(start+i*stride)%portCount))
	}
	return ports
}

// flow sends from one UDP source port.
type flow struct {
	*net.UDPConn
	batch *ipv4.PacketConn
	sent  int
}

func (b *bed) flow(port uint32) *flow { return b.flowTo(b.family.destination.Addr(), port) }

func (b *bed) flowTo(to netip.Addr, port uint32) *flow {
	return b.flowFrom(b.family.source.Addr(), to, port)
}

func (b *bed) flowFrom(from, to netip.Addr, port uint32) *flow {
	b.Helper()
	f := &flow{}
	b.Server.Must(func() (err error) {
		f.UDPConn, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, uint16(port))),
			net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, roce)))
		return err
	})
	f.batch = ipv4.NewPacketConn(f.UDPConn) // WriteBatch does not depend on the family
	b.Cleanup(func() { f.Close() })
	return f
}

// send sends n packets.
func (f *flow) send(n int) error {
	const burst = 64
	messages := make([]ipv4.Message, burst)
	for i := range messages {
		messages[i].Buffers = [][]byte{{0, 1, 2, 3}}
	}
	for n > 0 {
		k, err := f.batch.WriteBatch(messages[:min(n, burst)], 0)
		n, f.sent = n-k, f.sent+k
		if err != nil {
			return err
		}
	}
	return nil
}

// tap counts frames that arrive at a device, by UDP source port or SUNH label.
type tap struct {
	fd   int
	name string
	file *os.File
	mu   sync.Mutex // guards everything below
	udp  map[uint16]int
	tcp  map[uint16]carried // to tcpPort
	sunh map[uint16]int
	frag int
	last []byte // last SUNH frame
	done chan struct{}
}

func newTap(t testing.TB, n *netnstest.Namespace, port string) *tap {
	t.Helper()
	p := &tap{name: port, udp: map[uint16]int{}, tcp: map[uint16]carried{}, sunh: map[uint16]int{}, done: make(chan struct{})}
	index := n.Device(port).Index
	n.Must(func() (err error) {
		if p.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(p.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 256<<20); err != nil {
			return err
		}
		return unix.Bind(p.fd, &unix.SockaddrLinklayer{Ifindex: index, Protocol: binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})})
	})
	p.file = os.NewFile(uintptr(p.fd), port)
	go p.run()
	t.Cleanup(func() {
		p.file.Close()
		<-p.done
	})
	return p
}

func (p *tap) run() {
	defer close(p.done)
	buf := make([]byte, 1<<16)
	for {
		n, err := p.file.Read(buf)
		if errors.Is(err, unix.ENETDOWN) {
			continue // reported once
		}
		if err != nil {
			return
		}
		b := buf[:n]
		if len(b) < 22 {
			continue
		}
		p.mu.Lock()
		switch at := 14; binary.BigEndian.Uint16(b[12:]) {
		case unix.ETH_P_IP:
			at += int(b[14]&15) * 4
			if b[23] == unix.IPPROTO_UDP && len(b) >= at+8 {
				if binary.BigEndian.Uint16(b[20:])&0x1fff != 0 {
					p.frag++
				} else if d := binary.BigEndian.Uint16(b[at+2:]); d == roce || d == 4444 {
					p.udp[binary.BigEndian.Uint16(b[at:])]++
				}
			} else if b[23] == unix.IPPROTO_TCP && len(b) >= at+20 {
				p.segment(b[at:], n)
			}
		case unix.ETH_P_IPV6:
			if b[20] == unix.IPPROTO_FRAGMENT {
				p.frag++
			} else if b[20] == unix.IPPROTO_UDP && binary.BigEndian.Uint16(b[56:]) == roce {
				p.udp[binary.BigEndian.Uint16(b[54:])]++
			} else if b[20] == unix.IPPROTO_TCP && len(b) >= 74 {
				p.segment(b[54:], n)
			}
		case DefaultSUNHType:
			p.sunh[binary.BigEndian.Uint16(b[16:])&0xfff]++
			p.last = append(p.last[:0], b...)
		}
		p.mu.Unlock()
	}
}

// at returns the number of packets from a port that arrived at a device.
func (b *bed) at(dev string, port uint32) int {
	p := b.taps[dev]
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.udp[uint16(port)]
}

// total returns the number of UDP packets that arrived at all devices.
func (b *bed) total() (n int) {
	for _, p := range b.taps {
		p.mu.Lock()
		for _, c := range p.udp {
			n += c
		}
		p.mu.Unlock()
	}
	return n
}

// arrived waits until n packets have arrived.
func (b *bed) arrived(n int) {
	b.Helper()
	netnstest.Eventually(b, time.Minute, func() error {
		if got := b.total(); got != n {
			return fmt.Errorf("%d packets arrived, want %d; not sent: %v", got, n, b.drops())
		}
		return nil
	})
}

func (b *bed) drops() map[Drop]uint64 {
	stats, err := b.s.Stats()
	if err != nil {
		b.Fatal(err)
	}
	for d, n := range stats.Drops {
		if n == 0 {
			delete(stats.Drops, d)
		}
	}
	return stats.Drops
}

// awaitLive waits until a sub-port is usable, or is not.
func (b *bed) awaitLive(device string, want bool) {
	b.Helper()
	netnstest.Eventually(b, time.Minute, func() error {
		stats, err := b.s.Stats()
		if err == nil && slices.Contains(stats.Live, device) != want {
			err = fmt.Errorf("live: %v", stats.Live)
		}
		return err
	})
}
