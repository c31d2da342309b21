package speaker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// dial opens the TCP connection of an active session.
func (s *session) dial(ctx context.Context, peer netip.Addr) (*net.TCPConn, error) {
	d := net.Dialer{
		// A leaf is one hop away: what does not answer for this long is not
		// there, and retries are cheap.
		Timeout: 3 * time.Second,
		// RFC 4271's own keepalives do the work of TCP's.
		KeepAlive: -1,
		Control: func(_, _ string, c syscall.RawConn) error {
			return s.controlled(c, func(fd int) error { return s.setOptions(fd, peer, true) })
		},
	}
	d.SetMultipathTCP(false) // it has no MD5 signatures
	var conn net.Conn
	err := inNetns(s.conf.Netns, func() error {
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
		return err
	})
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// scoped gives a link-local address its zone as a number. Package net looks
// names up in a cache of the whole process, which knows one namespace.
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
	ifi, err := net.InterfaceByName(zone)
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
	if key.addr.IsValid() {
		network = "tcp6"
		if key.addr.Is4() {
			network = "tcp4"
		}
	}
	var l net.Listener
	err := inNetns(key.netns, func() error {
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
		return err
	})
	if err != nil {
		return nil, err
	}
	return l.(*net.TCPListener), nil
}

// setOptions prepares a socket of the session, dialling or accepted.
func (s *session) setOptions(fd int, peer netip.Addr, dialling bool) error {
	set := func(name string, level, option, value int) error {
		if err := unix.SetsockoptInt(fd, level, option, value); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}
	var errs []error
	v6 := peer.Is6() && !peer.Is4In6()
	if dialling && s.conf.Device != "" && (s.conf.Unnumbered || peer.IsLinkLocalUnicast()) {
		if err := unix.BindToDevice(fd, s.conf.Device); err != nil {
			errs = append(errs, fmt.Errorf("SO_BINDTODEVICE %s: %w", s.conf.Device, err))
		}
	}
	if s.conf.GTSMHops > 0 {
		// RFC 5082, Section 3: send 255, take what has crossed fewer hops.
		least := 256 - s.conf.GTSMHops
		if v6 {
			errs = append(errs, set("IPV6_UNICAST_HOPS", unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 255),
				set("IPV6_MINHOPCOUNT", unix.IPPROTO_IPV6, unix.IPV6_MINHOPCOUNT, least))
		} else {
			errs = append(errs, set("IP_TTL", unix.IPPROTO_IP, unix.IP_TTL, 255),
				set("IP_MINTTL", unix.IPPROTO_IP, unix.IP_MINTTL, least))
		}
	}
	if dialling && s.conf.Password != "" {
		errs = append(errs, setMD5(fd, peer, s.conf.Password))
	}
	errs = append(errs,
		set("TCP_NODELAY", unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		// What is not acknowledged for this long would have lost the session
		// at the peer's end too (RFC 5482, Section 3).
		set("TCP_USER_TIMEOUT", unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(s.speaker.conf.HoldTime.Milliseconds())),
		// RFC 4271 sessions are network control (DSCP CS6).
		set("DSCP", map[bool]int{false: unix.IPPROTO_IP, true: unix.IPPROTO_IPV6}[v6],
			map[bool]int{false: unix.IP_TOS, true: unix.IPV6_TCLASS}[v6], 0xc0))
	return errors.Join(errs...)
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
// listener as well as before connecting. An empty key removes it.
func setMD5(fd int, peer netip.Addr, key string) error {
	sig := unix.TCPMD5Sig{Keylen: uint16(len(key))}
	copy(sig.Key[:], key)
	peer = peer.Unmap()
	// Data is a sockaddr behind its family: IPv4 after the port, IPv6 after
	// port and flow label.
	if peer.Is4() {
		a := peer.As4()
		sig.Addr.Family = unix.AF_INET
		copy(sig.Addr.Data[2:], a[:])
	} else {
		a := peer.As16()
		sig.Addr.Family = unix.AF_INET6
		copy(sig.Addr.Data[6:], a[:])
	}
	if err := unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, &sig); err != nil {
		return fmt.Errorf("TCP_MD5SIG: %w (the kernel needs CONFIG_TCP_MD5SIG)", err)
	}
	return nil
}

// inNetns runs f, which opens sockets, inside a network namespace, given by
// name or path; empty is the current one.
func inNetns(name string, f func() error) error {
	if name == "" {
		return f()
	}
	// A thread that cannot return to its namespace must not be used again:
	// the goroutine ends while locked to it, which destroys the thread.
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		done <- func() error {
			here, err := netns.Get()
			if err != nil {
				return fmt.Errorf("current network namespace: %w", err)
			}
			defer here.Close()
			var there netns.NsHandle
			if name[0] == '/' {
				there, err = netns.GetFromPath(name)
			} else {
				there, err = netns.GetFromName(name)
			}
			if err != nil {
				return fmt.Errorf("network namespace %s: %w", name, err)
			}
			defer there.Close()
			if err := netns.Set(there); err != nil {
				return fmt.Errorf("enter network namespace %s: %w", name, err)
			}
			err = f()
			if back := netns.Set(here); back == nil {
				runtime.UnlockOSThread()
			}
			return err
		}()
	}()
	return <-done
}
