package probe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/lab/backend"
	"github.com/fared/fared/topo"
)

// serverPorts returns a leaf's devices toward servers. Packets that arrive at the others, from spines, were counted at
// another leaf.
func serverPorts(f *topo.Fabric, leaf *topo.Node) []string {
	var devices []string
	for _, c := range f.At(leaf) {
		if !c.Uplink() {
			devices = append(devices, c.Up.Device)
		}
	}
	return devices
}

// serverCables returns a leaf's cables to servers, by device.
func serverCables(f *topo.Fabric, leaf *topo.Node) map[string]*topo.Cable {
	all := map[string]*topo.Cable{}
	for _, c := range f.At(leaf) {
		if !c.Uplink() {
			all[c.Up.Device] = c
		}
	}
	return all
}

// counterSocket is a packet socket on a leaf that counts packets by cable.
type counterSocket struct {
	*os.File
	cables map[int]*topo.Cable // by index of the leaf's device
}

// newCounterSocket opens a packet socket on a leaf that reads the first bytes, from the IPv4 header on, of every packet
// of this traffic that arrives at one of some devices.
func newCounterSocket(ns backend.Namespace, cables map[string]*topo.Cable) (*counterSocket, error) {
	w := &counterSocket{cables: map[int]*topo.Cable{}}
	filter := append(ofTraffic(), bpf.LoadExtension{Num: bpf.ExtInterfaceIndex})
	fd := -1
	err := ns.Do(func() error {
		for name, cable := range cables {
			device, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			w.cables[device.Index] = cable
			filter = append(filter, bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(device.Index), SkipFalse: 1}, bpf.RetConstant{Val: countedBytes})
		}
		filter = append(filter, bpf.RetConstant{Val: 0})
		// Protocol 0 receives nothing until the filter is attached and bind sets the protocol.
		var err error
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	const ipv4 = 0x0800
	if err := errors.Join(
		attach(fd, filter),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBytes),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: ipv4>>8 | ipv4&0xff<<8}),
	); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	w.File = os.NewFile(uintptr(fd), "counter of "+string(ns))
	return w, nil
}

// newReceiver opens a raw socket that reads the first bytes, from the IPv4 header on, of every packet of this traffic
// to an address. It gets copies, so that a program of the namespace may have the UDP port.
func newReceiver(ns backend.Namespace, at netip.Addr) (*os.File, error) {
	fd := -1
	err := ns.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(
		attach(fd, append(ofTraffic(), bpf.RetConstant{Val: countedBytes})),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBytes),
		unix.Bind(fd, &unix.SockaddrInet4{Addr: at.As4()}),
	); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "receiver of "+string(ns)), nil
}

// ofTraffic returns the begin of a filter that drops all packets, from their IPv4 header on, but those of this traffic:
// a program that sends to the same port must not fill the sockets.
func ofTraffic() []bpf.Instruction {
	drop := bpf.RetConstant{Val: 0}
	return []bpf.Instruction{
		bpf.LoadAbsolute{Off: 9, Size: 1}, // protocol
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_UDP, SkipTrue: 1},
		drop,
		bpf.LoadMemShift{Off: 0},
		bpf.LoadIndirect{Off: 2, Size: 2}, // destination port
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: rocePort, SkipTrue: 1},
		drop,
		bpf.LoadIndirect{Off: 8, Size: 4}, // begin of the payload
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: payloadMark, SkipTrue: 1},
		drop,
	}
}

// attach gives a socket a filter.
func attach(fd int, filter []bpf.Instruction) error {
	assembled, err := bpf.Assemble(filter)
	if err != nil {
		return err
	}
	program := make([]unix.SockFilter, len(assembled))
	for i, f := range assembled {
		program[i] = unix.SockFilter{Code: f.Op, Jt: f.Jt, Jf: f.Jf, K: f.K}
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
}

// countedBytes is the number of bytes read of each packet: the headers and the payload that counted needs.
const countedBytes = 60 + 8 + payloadUsed

// payloadOf returns the UDP payload of an IPv4 packet.
func payloadOf(packet []byte) []byte {
	if len(packet) == 0 {
		return nil
	}
	return packet[min(4*int(packet[0]&15)+8, len(packet)):]
}

// read reads a packet and returns the cable that it arrived on, or nil if that does not lead to a server.
func (w *counterSocket) read(buf []byte) (n int, cable *topo.Cable, err error) {
	conn, err := w.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	var inner error
	err = conn.Read(func(fd uintptr) bool {
		var from unix.Sockaddr
		n, from, inner = unix.Recvfrom(int(fd), buf, 0)
		if at, ok := from.(*unix.SockaddrLinklayer); ok && inner == nil {
			cable = w.cables[at.Ifindex]
		}
		return inner != unix.EAGAIN && inner != unix.EINTR
	})
	return n, cable, errors.Join(err, inner)
}

// countAtLeaf counts the packets that arrive at a leaf until the socket is closed.
func (t *Traffic) countAtLeaf(ctx context.Context, w *counterSocket) error {
	buf := make([]byte, countedBytes)
	for {
		n, cable, err := w.read(buf)
		if err != nil {
			switch {
			case ctx.Err() != nil: // the socket is closed after ctx ends
				return nil
			case errors.Is(err, unix.ENETDOWN): // one of the leaf's ports went down
				continue
			}
			return err
		}
		if cable == nil {
			continue
		}
		if c, pair := t.counted(payloadOf(buf[:n])); c != nil {
			if i, own := t.lane(cable, pair); own {
				c.seen[i].Add(1)
			} else {
				c.astray[pair].Add(1)
			}
			t.gauge.count(cable.Plane, pair)
		}
	}
}

// lane returns the index in tally.seen of a pair's packets on a cable, or false if the cable does not serve the pair's
// source.
func (t *Traffic) lane(c *topo.Cable, pair int) (int, bool) {
	src, _ := t.Ends(pair)
	if c.Group.Index != src {
		return 0, false
	}
	return pair*t.lanes + slices.Index(c.Group.Cables, c), true
}

// gauge measures the rates of the last second.
type gauge struct {
	*topo.Fabric
	ports []*os.File // /proc/net/dev of each leaf
	pairs int

	mu      sync.Mutex // guards the fields below
	packets [][]uint64 // by plane and pair, since the start
	samples []sample   // oldest first
}

// sample holds all counters at one moment.
type sample struct {
	at      time.Time
	packets [][]uint64
	ports   []uint64 // by plane
}

const (
	gaugeBeat    = 200 * time.Millisecond
	gaugeSamples = 6 // so that the first and the last are one second apart
)

func newGauge(f *topo.Fabric, h backend.Hosts) (*gauge, error) {
	g := &gauge{Fabric: f, pairs: f.Servers * f.GPUs * f.Servers * f.GPUs}
	for range g.Planes {
		g.packets = append(g.packets, make([]uint64, g.pairs))
	}
	for _, leaf := range g.Leaf {
		// A file opened inside the namespace shows its devices also to threads outside.
		err := h.Namespace(leaf.Name).Do(func() error {
			f, err := os.Open("/proc/thread-self/net/dev")
			if err == nil {
				g.ports = append(g.ports, f)
			}
			return err
		})
		if err != nil {
			return nil, errors.Join(err, g.close())
		}
	}
	return g, nil
}

func (g *gauge) close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, f := range g.ports {
		f.Close()
	}
	g.ports = nil
	return nil
}

func (g *gauge) count(plane, pair int) {
	g.mu.Lock()
	g.packets[plane][pair]++
	g.mu.Unlock()
}

func (g *gauge) run(ctx context.Context) error {
	for backend.Sleep(ctx, gaugeBeat) == nil {
		g.sample()
	}
	return nil
}

func (g *gauge) sample() {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := sample{at: time.Now()}
	for _, p := range g.packets {
		s.packets = append(s.packets, slices.Clone(p))
	}
	s.ports = make([]uint64, g.Planes)
	for i, f := range g.ports {
		text := make([]byte, 64<<10)
		n, _ := f.ReadAt(text, 0) // the error is EOF
		s.ports[g.Leaf[i].Plane] += receivedPackets(text[:n], serverPorts(g.Fabric, g.Leaf[i]))
	}
	g.samples = append(g.samples, s)
	if len(g.samples) > gaugeSamples {
		g.samples = slices.Delete(g.samples, 0, 1)
	}
}

// receivedPackets sums the received packets of some devices in /proc/net/dev.
func receivedPackets(text []byte, devices []string) (n uint64) {
	for line := range bytes.Lines(text) {
		name, counters, ok := bytes.Cut(line, []byte(":"))
		fields := bytes.Fields(counters)
		if !ok || len(fields) < 2 || !slices.Contains(devices, string(bytes.TrimSpace(name))) {
			continue
		}
		v, _ := strconv.ParseUint(string(fields[1]), 10, 64)
		n += v
	}
	return n
}

// PlaneRate is the traffic of a plane in the last second: the packets per second received at the leaves' ports, and the
// plane's fraction of a pair's packets.
type PlaneRate struct{ Packets, Share float64 }

// Rates returns the traffic of each plane, and its part of the packets from one source group to another. It returns nil
// before the second sample.
func (t *Traffic) Rates(src, dst int) []PlaneRate {
	g := t.gauge
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.samples) < 2 {
		return nil
	}
	first, last := g.samples[0], g.samples[len(g.samples)-1]
	span := last.at.Sub(first.at).Seconds()
	all := make([]PlaneRate, g.Planes)
	var sum float64
	for plane := range all {
		if last.ports[plane] > first.ports[plane] {
			all[plane].Packets = float64(last.ports[plane]-first.ports[plane]) / span
		}
		for _, pair := range t.PairsOf(src, dst) {
			all[plane].Share += float64(last.packets[plane][pair] - first.packets[plane][pair])
		}
		sum += all[plane].Share
	}
	for plane := range all {
		if sum > 0 {
			all[plane].Share /= sum
		}
	}
	return all
}
