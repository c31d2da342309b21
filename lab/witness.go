package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/fared/fared/topo"
)

// serverPorts are a leaf's devices to servers. What comes in at the others, from spines, has been counted at another leaf.
func (p *plan) serverPorts(leaf *topo.Node) []string {
	var devices []string
	for _, c := range p.At(leaf) {
		if !c.Uplink() {
			devices = append(devices, c.Up.Device)
		}
	}
	return devices
}

// newWitness opens a packet socket on a leaf that reads the first bytes of every UDP packet to the traffic's port that comes in
// at one of some devices, from the IPv4 header on.
func newWitness(ns namespace, devices []string) (*os.File, error) {
	filter := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 9, Size: 1}, // the protocol
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.IPPROTO_UDP, SkipTrue: 1},
		bpf.RetConstant{Val: 0},
		bpf.LoadMemShift{Off: 0},
		bpf.LoadIndirect{Off: 2, Size: 2}, // the destination port
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: rocePort, SkipTrue: 1},
		bpf.RetConstant{Val: 0},
		bpf.LoadExtension{Num: bpf.ExtInterfaceIndex},
	}
	fd := -1
	err := ns.do(func() error {
		for _, name := range devices {
			device, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			filter = append(filter, bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(device.Index), SkipFalse: 1}, bpf.RetConstant{Val: witnessBytes})
		}
		filter = append(filter, bpf.RetConstant{Val: 0})
		// Protocol 0 receives nothing until the filter is there and bind names the protocol.
		var err error
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	assembled, err := bpf.Assemble(filter)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	program := make([]unix.SockFilter, len(assembled))
	for i, f := range assembled {
		program[i] = unix.SockFilter{Code: f.Op, Jt: f.Jt, Jf: f.Jf, K: f.K}
	}
	const ipv4 = 0x0800
	if err := errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, socketBytes),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: ipv4>>8 | ipv4&0xff<<8}),
	); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	return os.NewFile(uintptr(fd), "witness of "+string(ns)), nil
}

// witnessBytes are read of each packet: the headers and what counted needs.
const witnessBytes = 60 + 8 + payloadUsed

// witness counts what comes in at a plane's leaf until the socket is closed.
func (t *traffic) witness(socket *os.File, plane int) error {
	buf := make([]byte, witnessBytes)
	for {
		n, err := socket.Read(buf)
		if err != nil {
			switch {
			case errors.Is(err, os.ErrClosed):
				return nil
			case errors.Is(err, unix.ENETDOWN): // one of the leaf's ports went down
				continue
			}
			return err
		}
		header := 4*int(buf[0]&15) + 8
		if n < header {
			continue
		}
		if c, pair := t.counted(buf[header:n]); c != nil {
			c.seen[plane][pair].Add(1)
			t.gauge.count(plane, pair)
		}
	}
}

// gauge knows the rates of the last second.
type gauge struct {
	*plan
	ports []*os.File // each leaf's /proc/net/dev
	pairs int

	mu      sync.Mutex // guards what follows
	packets [][]uint64 // by plane and pair, since the start
	samples []sample   // oldest first
}

// sample is the state of all counters at a moment.
type sample struct {
	at      time.Time
	packets [][]uint64
	ports   []uint64 // by plane
}

const (
	gaugeBeat    = 200 * time.Millisecond
	gaugeSamples = 6 // so that the first and the last are a second apart
)

func newGauge(b *real) (*gauge, error) {
	g := &gauge{plan: b.plan, pairs: b.Servers * b.GPUs * b.Servers * b.GPUs}
	for range g.Planes {
		g.packets = append(g.packets, make([]uint64, g.pairs))
	}
	for _, leaf := range g.Leaf {
		// A file that was opened inside shows the namespace's devices from anywhere.
		err := b.namespace(leaf.Name).do(func() error {
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

func (g *gauge) run(ctx context.Context, t *traffic) error {
	for sleep(ctx, gaugeBeat) == nil {
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
		n, _ := f.ReadAt(text, 0) // ends with EOF
		s.ports[g.Leaf[i].Plane] += receivedPackets(text[:n], g.serverPorts(g.Leaf[i]))
	}
	g.samples = append(g.samples, s)
	if len(g.samples) > gaugeSamples {
		g.samples = slices.Delete(g.samples, 0, 1)
	}
}

// receivedPackets adds up what some of the devices in /proc/net/dev have received.
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

// picture adds the rates of the last second.
func (t *traffic) picture(p *Picture, src, dst int) {
	g := t.gauge
	g.mu.Lock()
	defer g.mu.Unlock()
	p.Packets = t.rate > 0
	if len(g.samples) < 2 {
		return
	}
	first, last := g.samples[0], g.samples[len(g.samples)-1]
	span := last.at.Sub(first.at).Seconds()
	var all float64
	for plane := range p.Planes {
		if plane < len(first.ports) && last.ports[plane] > first.ports[plane] {
			p.Planes[plane].Rate = float64(last.ports[plane]-first.ports[plane]) / span
		}
		for a := range t.GPUs {
			for b := range t.GPUs {
				pair := t.pair(src, a, dst, b)
				p.Planes[plane].Share += float64(last.packets[plane][pair] - first.packets[plane][pair])
			}
		}
		all += p.Planes[plane].Share
	}
	for plane := range p.Planes {
		if all > 0 {
			p.Planes[plane].Share /= all
		}
	}
}
