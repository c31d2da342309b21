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

	"github.com/fared/fared/internal/testkit/netnstest"
)

// tcpPort is the port of queue pairs over TCP connections.
const tcpPort = 4793

// carried is the part of a connection that arrived at a device: segments as sent by the kernel, many per frame.
type carried struct {
	frames, bytes, largest int
	flags                  byte // union over all segments
}

const (
	flagFIN = 1
	flagSYN = 2
	flagRST = 4
)

// segment counts a frame of the given size with a TCP header. The caller holds mu.
func (p *tap) segment(header []byte, size int) {
	if binary.BigEndian.Uint16(header[2:]) != tcpPort {
		return
	}
	port := binary.BigEndian.Uint16(header)
	s := p.tcp[port]
	s.frames, s.bytes, s.largest, s.flags = s.frames+1, s.bytes+size, max(s.largest, size), s.flags|header[13]
	p.tcp[port] = s
}

// segments returns the counts of a port for every device that received packets.
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

// forget resets the counts of the taps after each has read all frames that have arrived.
func (b *bed) forget() {
	b.Helper()
	b.drain()
	for _, p := range b.taps {
		p.mu.Lock()
		clear(p.tcp)
		p.mu.Unlock()
	}
}

// drain waits until the taps have read all frames that have arrived.
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

// sink is the TCP peer: a host behind all leaves that answers by a separate path without any plane.
type sink struct {
	far      *netnstest.Namespace
	listener *net.TCPListener
	done     sync.WaitGroup
	mu       sync.Mutex // guards everything below
	got      map[uint16]int
	failed   error
}

// newTCPBed returns a bed whose destination exists.
func newTCPBed(t testing.TB, f family) (*bed, *sink) {
	t.Helper()
	b := newBed(t, f)
	b.tcp = []uint32{tcpPort}
	k := &sink{far: netnstest.New(t), got: map[uint16]int{}}
	to, from := f.destination.Addr(), f.source.Addr()
	k.far.Addr("lo", f.destination.String())
	for p, leaf := range b.Leaves {
		netnstest.Cable(t, leaf, "far", fmt.Sprintf("172.17.%d.0/31 fd00:17:%d::1/64", p, p), k.far, fmt.Sprint("leaf", p), fmt.Sprintf("172.17.%d.1/31 fd00:17:%d::2/64", p, p))
		leaf.Sysctl("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
		leaf.IP("route", "add", f.destination.String(), "via", via(to, fmt.Sprintf("172.17.%d.1", p), fmt.Sprintf("fd00:17:%d::2", p)))
	}
	netnstest.Cable(t, b.Server, "back", "172.18.0.0/31 fd00:18::1/64", k.far, "back", "172.18.0.1/31 fd00:18::2/64")
	k.far.IP("route", "add", f.source.String(), "via", via(from, "172.18.0.0", "fd00:18::1"))
	k.far.Must(func() (err error) {
		k.listener, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(to, tcpPort)))
		return err
	})
	b.Resolve()
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

// via returns the next hop of an address's family.
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

// serve counts the bytes of a connection, and sends the count when the connection ends.
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
			_, _ = c.Write(binary.BigEndian.AppendUint64(nil, uint64(total))) // finish reads it
			return
		}
	}
}

// arrived returns the number of bytes from a port.
func (k *sink) arrived(port uint32) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.got[uint16(port)]
}

// stream is a TCP connection from a slot's port.
type stream struct {
	*net.TCPConn
	port uint32
	stop chan struct{}
	done chan error
}

func (b *bed) connect(port uint32) *stream {
	b.Helper()
	s := &stream{port: port, stop: make(chan struct{}), done: make(chan error, 1)}
	if err := b.Server.Do(func() (err error) {
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

// mss returns the segment size of the connection in bytes.
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

// finish ends a connection and returns the number of bytes that the other side has read.
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

// pour writes 8 MB/s until it is stopped, and then sends the result on done.
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
