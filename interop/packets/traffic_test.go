package packets

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

// flow sends the packets of one queue pair slot from a UDP socket with the slot's source port. Every other socket is
// connected, because the kernel caches a route with those.
type flow struct {
	conn   *ipv4.PacketConn // works for both families
	socket *net.UDPConn
	to     *net.UDPAddr // nil if connected
	sent   atomic.Uint64
	batch  []ipv4.Message
}

// payload is the content of a packet, which is not checked.
var payload = make([]byte, 256)

const batchSize = 32

// shared lets sockets of two services have one source port.
func shared(_, _ string, c syscall.RawConn) error {
	var err error
	if failed := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }); failed != nil {
		return failed
	}
	return err
}

// flows opens a socket in the server for each source port toward a destination.
func (b *bed) flows(t testing.TB, dst netip.Prefix, ports []uint16) []*flow {
	t.Helper()
	return b.flowsToward(t, dst, roce, ports)
}

// flowsToward is flows for packets to another UDP port.
func (b *bed) flowsToward(t testing.TB, dst netip.Prefix, to uint16, ports []uint16) []*flow {
	t.Helper()
	var out []*flow
	for i, port := range ports {
		f := &flow{}
		b.Server.Must(func() (err error) {
			local := net.UDPAddrFromAddrPort(netip.AddrPortFrom(b.family.source.Addr(), port))
			remote := net.UDPAddrFromAddrPort(netip.AddrPortFrom(dst.Addr(), to))
			if i%2 == 0 {
				dialer := net.Dialer{LocalAddr: local, Control: shared}
				var conn net.Conn
				if conn, err = dialer.Dial("udp", remote.String()); err == nil {
					f.socket = conn.(*net.UDPConn)
				}
				return err
			}
			f.to = remote
			listen := net.ListenConfig{Control: shared}
			conn, err := listen.ListenPacket(t.Context(), "udp", local.String())
			if err == nil {
				f.socket = conn.(*net.UDPConn)
			}
			return err
		})
		t.Cleanup(func() { f.socket.Close() })
		if err := f.socket.SetWriteBuffer(4 << 20); err != nil {
			t.Fatal(err)
		}
		f.conn = ipv4.NewPacketConn(f.socket)
		for range batchSize {
			m := ipv4.Message{Buffers: [][]byte{payload}}
			if f.to != nil {
				m.Addr = f.to
			}
			f.batch = append(f.batch, m)
		}
		out = append(out, f)
	}
	return out
}

// send sends n packets. It retries packets that the kernel refused, so that only packets on the wire count as sent.
func (f *flow) send(n int) error {
	for n > 0 {
		took, err := f.conn.WriteBatch(f.batch[:min(n, batchSize)], 0)
		if took > 0 {
			f.sent.Add(uint64(took))
			n -= took
		}
		switch {
		case err == nil:
		case errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, syscall.EAGAIN):
		default:
			return fmt.Errorf("%s: %w", f.socket.LocalAddr(), err)
		}
	}
	return nil
}

// stripe sends n packets over the flows, exactly by share: the parts follow the largest remainder method.
func stripe(t testing.TB, flows []*flow, parts []uint64) {
	t.Helper()
	const round = 64 // so that slots are interleaved as an application's are
	left := make([]uint64, len(parts))
	copy(left, parts)
	for more := true; more; {
		more = false
		for i, f := range flows {
			n := min(left[i], round)
			if err := f.send(int(n)); err != nil {
				t.Fatal(err)
			}
			left[i] -= n
			more = more || left[i] > 0
		}
	}
}
