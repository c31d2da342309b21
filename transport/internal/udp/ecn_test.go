package udp

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/transport/internal/wire"
)

// markedCore is a device whose core is a wire.Marked.
type markedCore struct {
	*device
	marked int
}

var _ wire.Marked = (*markedCore)(nil)

func (m *markedCore) ReceiveMarked(netip.AddrPort, []byte) { m.marked++ }

// TestECN checks that datagrams of a Marked core are ECN-capable, and that those with "congestion experienced" reach
// ReceiveMarked.
func TestECN(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			core := &markedCore{device: &device{}}
			start := time.Now()
			e, err := Open(Config{Address: f.b, Core: core, Do: core.do, Now: func() time.Duration { return time.Since(start) }})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(e.Close)
			core.do(func() { core.endpoint = e })
			at := net.UDPAddrFromAddrPort(netip.AddrPortFrom(f.b, e.Port()))
			conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(f.a, 0)), at)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			raw, err := conn.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			for ecn := range 4 { // 3 is "congestion experienced"
				option := familyOf(f.a).capable()
				if err := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), option.level, option.name, ecn) }); err != nil {
					t.Fatal(err)
				}
				for range ecn + 1 {
					if _, err := conn.Write([]byte("datagram")); err != nil {
						t.Fatal(err)
					}
				}
			}
			core.until(t, func() error {
				if len(core.got) != 1+2+3 || core.marked != 4 {
					return fmt.Errorf("%d datagrams and %d marked ones", len(core.got), core.marked)
				}
				return nil
			})
			for _, fd := range []int{e.sender.receiveFD, senderOf(t, e, core)} {
				option := familyOf(f.a).capable()
				if v, err := unix.GetsockoptInt(fd, option.level, option.name); err != nil || v != 2 {
					t.Errorf("sends with ECN field %d, want 2 (%v)", v, err)
				}
			}
		})
	}
}

// senderOf returns the socket of a source port.
func senderOf(t *testing.T, e *Endpoint, core *markedCore) (fd int) {
	t.Helper()
	core.do(func() { e.Send(netip.AddrPortFrom(e.config.Address, e.Port()), 61000, []byte("x"), nil, nil) })
	core.do(func() { fd = e.sender.ports[61000].fd })
	return fd
}
