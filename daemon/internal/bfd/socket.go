package bfd

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// port is the destination port of control packets; their source ports begin at firstSource (RFC 5881, Section 4).
const (
	port        = 3784
	firstSource = 49152
	sourcePorts = 65536 - firstSource
)

// dial opens the sending socket of a session, on a source port that no other session of its address uses.
func dial(c Config) (*net.UDPConn, error) {
	begin := rand.IntN(sourcePorts)
	for i := range sourcePorts {
		conn, err := open(netip.AddrPortFrom(c.Local, sourcePort(begin, i)), c.Device)
		if !errors.Is(err, unix.EADDRINUSE) {
			return conn, err
		}
	}
	return nil, fmt.Errorf("all source ports of %v are in use", c.Local)
}

// sourcePort returns the i-th source port to try after a random start; both arguments are below sourcePorts.
func sourcePort(begin, i int) uint16 { return uint16(firstSource + (begin+i)%sourcePorts) }

// listen opens the socket on which the sessions of a place receive.
func listen(at place) (*receiver, error) {
	conn, err := open(netip.AddrPortFrom(at.local, port), at.device)
	if err != nil {
		return nil, err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		conn.Close()
		return nil, err
	}
	return &receiver{place: at, conn: conn, raw: raw, done: make(chan struct{}), sessions: make(map[netip.Addr]*Session), numbered: make(map[uint32]*Session)}, nil
}

// open opens a UDP socket at a local address, for packets that have crossed no router. Since Linux 5.7 it needs no
// privilege to bind a socket to its first device. Bound sockets need no zone for link-local addresses.
func open(at netip.AddrPort, device string) (*net.UDPConn, error) {
	network, level, ttl, tos, recvTTL := "udp4", unix.IPPROTO_IP, unix.IP_TTL, unix.IP_TOS, unix.IP_RECVTTL
	if at.Addr().Is6() {
		network, level, ttl, tos, recvTTL = "udp6", unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_TCLASS, unix.IPV6_RECVHOPLIMIT
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var inner error
		err := c.Control(func(fd uintptr) {
			bind := error(nil)
			if device != "" {
				bind = os.NewSyscallError("SO_BINDTODEVICE "+device, unix.BindToDevice(int(fd), device))
			}
			if errors.Is(bind, unix.ENODEV) && !at.Addr().IsLinkLocalUnicast() {
				bind = nil // sessions over loopback addresses, and devices that another driver owns, have none
			}
			inner = errors.Join(bind,
				os.NewSyscallError("TTL 255", unix.SetsockoptInt(int(fd), level, ttl, 255)),
				os.NewSyscallError("receive TTL", unix.SetsockoptInt(int(fd), level, recvTTL, 1)),
				// Network control, like BGP (DSCP CS6).
				os.NewSyscallError("DSCP", unix.SetsockoptInt(int(fd), level, tos, 0xc0)))
		})
		return errors.Join(err, inner)
	}}
	conn, err := lc.ListenPacket(context.Background(), network, at.String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.UDPConn), nil
}

// hopLimit returns the TTL or hop limit with which a packet arrived, or 0 if the kernel did not report it.
func hopLimit(control []byte) int {
	messages, _ := unix.ParseSocketControlMessage(control) // ignore the error: there are no messages then
	for _, m := range messages {
		v4 := m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_TTL
		v6 := m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_HOPLIMIT
		if (v4 || v6) && len(m.Data) >= 4 {
			return int(binary.NativeEndian.Uint32(m.Data))
		}
	}
	return 0
}

// source returns a packet's source without its zone: the socket is bound to its device.
func source(from unix.Sockaddr) netip.AddrPort {
	switch a := from.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
	}
	return netip.AddrPort{}
}
