package speaker

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// listenAddr identifies a listener that passive sessions share.
type listenAddr struct {
	addr   netip.Addr // invalid means unspecified
	port   uint16
	device string // only for link-local sessions
	netns  string
}

func (l listenAddr) String() string {
	return fmt.Sprintf("%v:%d device %q netns %q", l.addr, l.port, l.device, l.netns)
}

func listenKey(s *Session) listenAddr {
	l := listenAddr{addr: s.Local, port: s.Port, netns: s.Netns}
	if s.Unnumbered || s.Peer.IsLinkLocalUnicast() && s.Peer.Is6() {
		l.device = s.Device
	}
	return l
}

// listener accepts the connections of passive sessions on one address.
type listener struct {
	speaker  *Speaker
	key      listenAddr
	sessions []*session
	before   *listener     // the listener on this address that has to end first; nil if there is none
	end      func()        // ends run; nil before Run
	done     chan struct{} // closed when run has ended; nil before Run
}

// run listens until ctx ends. It retries while the address does not exist yet.
func (l *listener) run(ctx context.Context) {
	for ctx.Err() == nil {
		err := l.serve(ctx)
		if ctx.Err() != nil {
			return
		}
		for _, s := range l.sessions {
			l.speaker.queue.fault(Fault{Session: s.id, Reason: fmt.Sprintf("listen on %v: %v", l.key, err)})
		}
		timer := time.NewTimer(min(time.Second, l.speaker.conf.ConnectRetry))
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (l *listener) serve(ctx context.Context) error {
	ln, err := listen(ctx, l.key)
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := l.prepare(ln); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	ctx, cancel := context.WithCancel(ctx)
	var admissions sync.WaitGroup
	defer admissions.Wait()
	defer cancel()
	for {
		conn, err := ln.AcceptTCP()
		if err != nil {
			return err
		}
		if s := l.match(addrPort(conn.RemoteAddr()).Addr()); s == nil || s.adopt(conn) != nil {
			conn.Close()
		} else {
			admissions.Go(func() { s.admit(ctx, conn) })
		}
	}
}

// prepare sets the options that must be set before a peer connects.
func (l *listener) prepare(ln *net.TCPListener) error {
	raw, err := ln.SyscallConn()
	if err != nil {
		return err
	}
	return controlRaw(raw, func(fd int) error {
		// The TTL check of a socket begins when it is set. On the listener it
		// covers all sessions, so it can only be as strict as the laxest
		// session. Where sessions differ, an OPEN may pass before adopt sets
		// the session's own limit, and nothing after it.
		hops := l.sessions[0].conf.GTSMHops
		for _, s := range l.sessions {
			if hops = max(hops, s.conf.GTSMHops); s.conf.GTSMHops == 0 {
				hops = 256
			}
		}
		if hops < 256 {
			e4 := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MINTTL, 256-hops)
			e6 := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MINHOPCOUNT, 256-hops)
			if e4 != nil && e6 != nil {
				return fmt.Errorf("minimum TTL: %w", e4)
			}
		}
		for _, s := range l.sessions {
			if s.conf.Password != "" {
				if err := setMD5(fd, s.conf.Peer, s.conf.Password); err != nil {
					return err
				}
			}
			if s.conf.AO.Key != "" {
				if err := addAO(fd, s.conf.Peer, s.conf.AO, false); err != nil {
					return err
				}
			}
		}
		// A peer that checks would drop our SYN-ACK otherwise (RFC 5082, Section 3). One of the two options does not
		// apply to the socket's family.
		e4 := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, 255)
		e6 := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 255)
		if e4 != nil && e6 != nil {
			return fmt.Errorf("TTL 255: %w", e4)
		}
		return nil
	})
}

// adopt sets the session's options on an accepted socket.
func (s *session) adopt(conn *net.TCPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	return s.controlled(raw, func(fd int) error {
		return s.setOptions(fd, addrPort(conn.RemoteAddr()).Addr(), false)
	})
}

// match returns the session of a remote address: the session configured with
// it, else the unnumbered session, whose listener is bound to its device.
func (l *listener) match(remote netip.Addr) *session {
	var unnumbered *session
	for _, s := range l.sessions {
		if s.conf.Unnumbered {
			unnumbered = s
		} else if s.conf.Peer.WithZone("") == remote.WithZone("") {
			return s
		}
	}
	if remote.IsLinkLocalUnicast() {
		return unnumbered
	}
	return nil
}
