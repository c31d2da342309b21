package speaker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/link"
	"github.com/fared/fared/internal/netns"
)

// dial opens the TCP connection of an active session within limit.
func (s *session) dial(ctx context.Context, peer netip.Addr, limit time.Duration) (*net.TCPConn, error) {
	d := net.Dialer{
		Timeout: limit,
		// BGP's keepalives (RFC 4271) replace TCP's.
		KeepAlive: -1,
		Control: func(_, _ string, c syscall.RawConn) error {
			return s.controlled(c, func(fd int) error { return s.setOptions(fd, peer, true) })
		},
	}
	d.SetMultipathTCP(false) // multipath TCP has no MD5 signatures
	var conn net.Conn
	err := netns.In(s.conf.Netns, func() error {
		to, err := scoped(peer, s.conf.Device)
		if err != nil {
			return err
		}
		if s.conf.Local.IsValid() {
			from, err := scoped(s.conf.Local, s.conf.Device)
			if err != nil {
				return err
			}
			d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
		}
		conn, err = d.DialContext(ctx, "tcp", netip.AddrPortFrom(to, s.conf.Port).String())
		return absentLocal(s.conf.Local, err)
	})
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// absentLocal explains the error of a socket whose local address is on no device of the network namespace, or is not
// usable yet.
func absentLocal(local netip.Addr, err error) error {
	var call *os.SyscallError
	if local.IsValid() && errors.As(err, &call) && call.Syscall == "bind" && errors.Is(call, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("local %v is on no device of this server; add the address to the sub-port, or correct local: %w", local, call)
	}
	return err
}

// scoped returns a link-local address with its zone as a number. Package net
// looks names up in a cache of the whole process, which covers one namespace.
func scoped(a netip.Addr, device string) (netip.Addr, error) {
	if !a.Is6() || !a.IsLinkLocalUnicast() {
		return a, nil
	}
	zone := a.Zone()
	if zone == "" {
		zone = device
	}
	if _, err := strconv.Atoi(zone); err == nil {
		return a.WithZone(zone), nil
	}
	ifi, err := link.Interface(zone)
	if err != nil {
		return a, fmt.Errorf("device %s: %w", zone, err)
	}
	return a.WithZone(strconv.Itoa(ifi.Index)), nil
}

// listen opens the listener of passive sessions.
func listen(ctx context.Context, key listenAddr) (*net.TCPListener, error) {
	lc := net.ListenConfig{KeepAlive: -1}
	if key.device != "" {
		lc.Control = func(_, _ string, c syscall.RawConn) error {
			return controlRaw(c, func(fd int) error {
				return os.NewSyscallError("SO_BINDTODEVICE", unix.BindToDevice(fd, key.device))
			})
		}
	}
	lc.SetMultipathTCP(false)
	network := "tcp"
	switch {
	case key.addr.Is4():
		network = "tcp4"
	case key.addr.IsValid(), key.device != "": // all peers are link-local, and other listeners may have the device's IPv4 addresses
		network = "tcp6"
	}
	var l net.Listener
	err := netns.In(key.netns, func() error {
		host := ""
		if key.addr.IsValid() {
			a, err := scoped(key.addr, key.device)
			if err != nil {
				return err
			}
			host = a.String()
		}
		var err error
		l, err = lc.Listen(ctx, network, net.JoinHostPort(host, fmt.Sprint(key.port)))
		return absentLocal(key.addr, err)
	})
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// socketBuffer is far more than the octets in flight to a leaf one hop away.
const socketBuffer = 256 << 10

// setOptions prepares a socket of the session, dialed or accepted.
func (s *session) setOptions(fd int, peer netip.Addr, dialing bool) error {
	set := func(name string, level, option, value int) error {
		if err := unix.SetsockoptInt(fd, level, option, value); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}
	var errs []error
	v6 := peer.Is6() && !peer.Is4In6()
	if dialing {
		errs = append(errs, s.bind(fd, peer))
	}
	// RFC 5082, Section 3: send with 255, whether or not this end checks, because the peer may; accept packets that
	// have crossed at most GTSMHops.
	level, hops, least := unix.IPPROTO_IP, unix.IP_TTL, unix.IP_MINTTL
	if v6 {
		level, hops, least = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_MINHOPCOUNT
	}
	errs = append(errs, set("TTL 255", level, hops, 255))
	if s.conf.GTSMHops > 0 {
		errs = append(errs, set("minimum TTL", level, least, 256-s.conf.GTSMHops))
	}
	if dialing && s.conf.Password != "" {
		errs = append(errs, setMD5(fd, peer, s.conf.Password))
	}
	if s.conf.AO.Key != "" {
		if dialing {
			errs = append(errs, addAO(fd, peer, s.conf.AO, true))
		}
		errs = append(errs, requireAO(fd))
	}
	errs = append(errs,
		// A peer that sends without end, or does not read, occupies at most
		// this much in the kernel, twice in each direction (socket(7)).
		set("SO_RCVBUF", unix.SOL_SOCKET, unix.SO_RCVBUF, socketBuffer),
		set("SO_SNDBUF", unix.SOL_SOCKET, unix.SO_SNDBUF, socketBuffer),
		set("TCP_NODELAY", unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		// Data that stays unacknowledged for this long would have ended the
		// session at the peer, too (RFC 5482, Section 3).
		set("TCP_USER_TIMEOUT", unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(s.speaker.conf.HoldTime.Milliseconds())),
		// BGP sessions are network control traffic (DSCP CS6).
		set("DSCP", map[bool]int{false: unix.IPPROTO_IP, true: unix.IPPROTO_IPV6}[v6],
			map[bool]int{false: unix.IP_TOS, true: unix.IPV6_TCLASS}[v6], 0xc0))
	return errors.Join(errs...)
}

// bind binds a socket to the session's device if the peer's address has a meaning there alone.
func (s *session) bind(fd int, peer netip.Addr) error {
	if s.conf.Device == "" || !s.conf.Unnumbered && !peer.IsLinkLocalUnicast() {
		return nil
	}
	if err := unix.BindToDevice(fd, s.conf.Device); err != nil {
		return fmt.Errorf("SO_BINDTODEVICE %s: %w", s.conf.Device, err)
	}
	return nil
}

func (s *session) controlled(c syscall.RawConn, f func(fd int) error) error {
	if err := controlRaw(c, f); err != nil {
		return fmt.Errorf("session %s: socket option %w", s.conf.Name, err)
	}
	return nil
}

// controlRaw runs f with the socket's descriptor.
func controlRaw(c syscall.RawConn, f func(fd int) error) error {
	var inner error
	if err := c.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// setMD5 sets the key for segments to and from an address (RFC 2385), on a
// listener or before connecting. An empty key removes it.
func setMD5(fd int, peer netip.Addr, key string) error {
	family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return fmt.Errorf("SO_DOMAIN: %w", err)
	}
	sig := unix.TCPMD5Sig{Keylen: uint16(len(key))}
	copy(sig.Key[:], key)
	sig.Addr, _ = sockaddr(family, peer)
	if err := unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, &sig); err != nil {
		return fmt.Errorf("TCP_MD5SIG: %w (the kernel needs CONFIG_TCP_MD5SIG)", err)
	}
	return nil
}

// sockaddr returns a peer's address in the form that key options of a socket of a family require, and the length of its
// host prefix in bits. An IPv6 socket represents an IPv4 address as a mapped one, whose prefix counts the bits of the
// IPv4 address.
func sockaddr(family int, peer netip.Addr) (sa unix.SockaddrStorage, bits uint8) {
	peer = peer.Unmap()
	// Data is a sockaddr behind its family: IPv4 after the port, IPv6 after
	// port and flow label.
	if family == unix.AF_INET && peer.Is4() {
		a := peer.As4()
		sa.Family = unix.AF_INET
		copy(sa.Data[2:], a[:])
	} else {
		a := peer.As16()
		sa.Family = unix.AF_INET6
		copy(sa.Data[6:], a[:])
	}
	return sa, uint8(peer.BitLen())
}

// readable reports whether a connection has octets, or an end, to read within d.
func readable(conn *net.TCPConn, d time.Duration) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return true // the next read returns the error
	}
	n := 0
	wait := unix.NsecToTimespec(d.Nanoseconds())
	err = controlRaw(raw, func(fd int) (err error) {
		n, err = unix.Ppoll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, &wait, nil)
		return err
	})
	return err == nil && n > 0
}

// sendQueue returns the number of octets written to a connection that its other end has not acknowledged (tcp(7),
// SIOCOUTQ).
func sendQueue(conn *net.TCPConn) (octets int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	err = controlRaw(raw, func(fd int) (err error) {
		octets, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		return err
	})
	return octets, err
}
