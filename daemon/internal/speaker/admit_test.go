package speaker

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// second connects to the leaf from the server's address, as any user of the server can.
func second(t *testing.T, server Config) *net.TCPConn {
	t.Helper()
	s := server.Sessions[0]
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(s.Local, 0)), Timeout: deadline}
	conn, err := d.DialContext(t.Context(), "tcp", netip.AddrPortFrom(s.Peer, s.Port).String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn.(*net.TCPConn)
}

// answers returns the octets that the leaf sends until it closes a connection; the error is nil then.
func answers(conn *net.TCPConn) ([]byte, error) {
	if err := conn.SetReadDeadline(time.Now().Add(deadline)); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(conn)
	if errors.Is(err, syscall.ECONNRESET) {
		err = nil
	}
	return b, err
}

// TestSecondConnections opens connections from the peer's address before and while a passive session is established:
// empty ones, incomplete ones, and a complete OPEN, which RFC 4271, Section 6.8, lets the newly created connection
// answer for. The session comes up and stays up.
func TestSecondConnections(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	b := start(t, create(t, leaf))
	var conns []*net.TCPConn
	var err error
	for end := time.Now().Add(deadline); ; time.Sleep(time.Millisecond) { // until the leaf listens
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(server.Sessions[0].Local, 0))}
		var conn net.Conn
		if conn, err = d.Dial("tcp", netip.AddrPortFrom(server.Sessions[0].Peer, server.Sessions[0].Port).String()); err == nil {
			conn.Close()
			break
		} else if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	open := rawOpen(65001, 90, server.RouterID)
	several := func() {
		for i := range 3 * maxCandidates {
			conn := second(t, server)
			if _, err := conn.Write(open[:i%minOpen]); err != nil && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
				t.Fatal(err)
			}
			conns = append(conns, conn)
		}
	}
	several()
	a := start(t, create(t, server))
	a.until("up", func() bool { return a.state(0).up })
	b.until("up", func() bool { return b.state(0).up })
	several()
	for i := range 2 {
		conn := second(t, server)
		if _, err := conn.Write(open); err != nil {
			t.Fatal(err)
		}
		got, err := answers(conn)
		// RFC 4271, Section 4.5; RFC 4486: Cease, Connection Collision Resolution.
		if want := string(message(3, 6, 7)); err != nil || string(got) != want {
			t.Errorf("connection %d with an OPEN: %x, %v, want %x", i, got, err, want)
		}
	}
	// All but the newest incomplete connections are closed.
	for i, conn := range conns[:len(conns)-maxCandidates] {
		if got, err := answers(conn); err != nil || len(got) > 0 {
			t.Errorf("incomplete connection %d: %x, %v", i, got, err)
		}
	}
	for name, r := range map[string]*running{"server": a, "leaf": b} {
		if s := r.state(0); !s.up || s.downs != 0 || s.ups != 1 {
			t.Errorf("%s: %d times up, %d times down", name, s.ups, s.downs)
		}
	}
}

// TestPeerWithoutMemory checks that a peer whose kernel has lost the connection, as after a crash, comes up again long
// before the hold time ends.
func TestPeerWithoutMemory(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	server.HoldTime, leaf.HoldTime = time.Hour, time.Hour
	a, b := create(t, server), create(t, leaf)
	a.rereadAfter, b.rereadAfter = time.Hour, time.Hour
	ra, rb := start(t, a), start(t, b)
	// Both have sent everything, so that only the challenge meets the peer's kernel.
	ra.until("up, with End-of-RIB", func() bool { s := ra.state(0); return s.up && s.eor == 2 })
	rb.until("up, with End-of-RIB", func() bool { s := rb.state(0); return s.up && s.eor == 2 })
	a.sessions[0].mu.Lock()
	conn := a.sessions[0].current.conn
	a.sessions[0].mu.Unlock()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	// No acknowledgement of the leaf is outstanding, which would meet the server's kernel, too.
	ra.until("everything acknowledged", func() bool {
		n := -1
		err = controlRaw(raw, func(fd int) (err error) {
			n, err = unix.IoctlGetInt(fd, unix.TIOCOUTQ)
			return err
		})
		return err == nil && n == 0
	})
	// A socket in repair mode closes without a segment.
	if err := controlRaw(raw, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, 1) }); errors.Is(err, os.ErrPermission) {
		t.Skip("TCP_REPAIR needs CAP_NET_ADMIN")
	} else if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	rb.until("the second generation", func() bool { s := rb.state(0); return s.up && s.gen == 2 })
	ra.until("up again", func() bool { s := ra.state(0); return s.up && s.gen >= 2 })
}
