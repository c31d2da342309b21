package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/internal/netnstest"
)

// tcpPort is the port of queue pairs that are TCP connections.
const tcpPort = 4793

// carried is what of a connection came to a device: segments as the sender's kernel leaves them, many to a frame.
type carried struct {
	frames, bytes, largest int
	flags                  byte // of all of them
}

const (
	flagFIN = 1
	flagSYN = 2
	flagRST = 4
)

// segment counts a frame of so many bytes with a TCP header. The caller holds mu.
func (p *tap) segment(header []byte, size int) {
	if binary.BigEndian.Uint16(header[2:]) != tcpPort {
		return
	}
	port := binary.BigEndian.Uint16(header)
	s := p.tcp[port]
	s.frames, s.bytes, s.largest, s.flags = s.frames+1, s.bytes+size, max(s.largest, size), s.flags|header[13]
	p.tcp[port] = s
}

// segments are those from a port at every device that got any.
func (b *bed) segments(port uint32) map[string]carried {
	all := map[string]carried{}
	for dev, p := range b.taps {
		p.mu.Lock()
		if s, ok := p.tcp[uint16(port)]; ok {
			all[dev] = s
		}
		p.mu.Unlock()
	}
	return all
}

// forget has the taps count from 0, once each has read all that has come to it.
func (b *bed) forget() {
	b.Helper()
	b.drain()
	for _, p := range b.taps {
		p.mu.Lock()
		clear(p.tcp)
		p.mu.Unlock()
	}
}

// drain waits until the taps have read what has come to them.
func (b *bed) drain() {
	b.Helper()
	for _, p := range b.taps {
		netnstest.Eventually(b, time.Minute, func() error {
			waiting, err := unix.IoctlGetInt(p.fd, unix.SIOCINQ)
			if err == nil && waiting > 0 {
				err = fmt.Errorf("%s reads behind", p.name)
			}
			return err
		})
	}
}

// sink is where TCP ends: a host behind all leaves that answers by a way of its own, which no plane is part of.
type sink struct {
	far      *netnstest.Namespace
	listener *net.TCPListener
	done     sync.WaitGroup
	mu       sync.Mutex // guards all below
	got      map[uint16]int
	failed   error
}

// newTCPBed is a bed whose destination exists.
func newTCPBed(t testing.TB, f family) (*bed, *sink) {
	t.Helper()
	b := newBed(t, f)
	b.tcp = []uint32{tcpPort}
	k := &sink{far: netnstest.New(t), got: map[uint16]int{}}
	to, from := f.destination.Addr(), f.source.Addr()
	k.far.Addr("lo", f.destination.String())
	for p, leaf := range b.leaves {
		netnstest.Veth(t, leaf, "far", k.far, fmt.Sprint("leaf", p))
		leaf.Addr("far", fmt.Sprintf("172.17.%d.0/31", p), fmt.Sprintf("fd00:17:%d::1/64", p))
		k.far.Addr(fmt.Sprint("leaf", p), fmt.Sprintf("172.17.%d.1/31", p), fmt.Sprintf("fd00:17:%d::2/64", p))
		for _, set := range []string{"net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"} {
			if out, err := leaf.Output("sysctl", "-qw", set); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		leaf.IP("route", "add", f.destination.String(), "via", via(to, fmt.Sprintf("172.17.%d.1", p), fmt.Sprintf("fd00:17:%d::2", p)))
	}
	netnstest.Veth(t, b.server, "back", k.far, "back")
	b.server.Addr("back", "172.18.0.0/31", "fd00:18::1/64")
	k.far.Addr("back", "172.18.0.1/31", "fd00:18::2/64")
	k.far.IP("route", "add", f.source.String(), "via", via(from, "172.18.0.0", "fd00:18::1"))
	if err := k.far.Do(func() (err error) {
		k.listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(to, tcpPort)))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	b.resolve()
	k.done.Add(1)
	go k.accept()
	t.Cleanup(func() {
		k.listener.Close()
		k.done.Wait()
		if k.failed != nil {
			t.Errorf("where TCP ends: %v", k.failed)
		}
	})
	return b, k
}

// via is the next hop of an address's family.
func via(a netip.Addr, v4, v6 string) string {
	if a.Is4() {
		return v4
	}
	return v6
}

func (k *sink) accept() {
	defer k.done.Done()
	for {
		c, err := k.listener.AcceptTCP()
		if err != nil {
			return // closed
		}
		k.done.Add(1)
		go k.serve(c)
	}
}

// serve counts what a connection brings, and says how much that was when it ends.
func (k *sink) serve(c *net.TCPConn) {
	defer k.done.Done()
	defer c.Close()
	port := c.RemoteAddr().(*net.TCPAddr).AddrPort().Port()
	b, total := make([]byte, 1<<16), 0
	for {
		n, err := c.Read(b)
		total += n
		k.mu.Lock()
		k.got[port] += n
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
			k.failed = err
		}
		k.mu.Unlock()
		if err != nil {
			_, _ = c.Write(binary.BigEndian.AppendUint64(nil, uint64(total))) // who asked reads it
			return
		}
	}
}

// arrived is how many bytes came from a port.
func (k *sink) arrived(port uint32) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.got[uint16(port)]
}

// stream is a connection of TCP from a slot's port.
type stream struct {
	*net.TCPConn
	port uint32
	stop chan struct{}
	done chan error
}

func (b *bed) connect(port uint32) *stream {
	b.Helper()
	s := &stream{port: port, stop: make(chan struct{}), done: make(chan error, 1)}
	if err := b.server.Do(func() (err error) {
		s.TCPConn, err = net.DialTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(b.family.source.Addr(), uint16(port))),
			net.TCPAddrFromAddrPort(netip.AddrPortFrom(b.family.destination.Addr(), tcpPort)))
		return err
	}); err != nil {
		b.Fatalf("connect from port %d: %v; dropped: %v", port, err, b.drops())
	}
	b.Cleanup(func() { s.Close() })
	return s
}

// sockopt reads or sets an option.
func (s *stream) sockopt(f func(fd int) error) error {
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

// mss is how many bytes the connection's segments have.
func (s *stream) mss(t *testing.T) (n int) {
	t.Helper()
	if err := s.sockopt(func(fd int) (err error) {
		n, err = unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// finish ends a connection and returns how many bytes the other side has read by then.
func (s *stream) finish() (int, error) {
	if err := s.CloseWrite(); err != nil {
		return 0, err
	}
	var total [8]byte
	if _, err := io.ReadFull(s, total[:]); err != nil {
		return 0, err
	}
	return int(binary.BigEndian.Uint64(total[:])), s.Close()
}

// pour writes 8 MB/s until it is stopped, and says on done how that ended.
func (s *stream) pour() error {
	if err := s.sockopt(func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, 8<<20) }); err != nil {
		return err
	}
	go func() {
		b := make([]byte, 1<<15)
		for {
			select {
			case <-s.stop:
				s.done <- nil
				return
			default:
			}
			if _, err := s.Write(b); err != nil {
				s.done <- err
				return
			}
		}
	}()
	return nil
}
