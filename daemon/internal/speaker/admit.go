package speaker

import (
	"context"
	"fmt"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/guard"
)

// Any user of a peer's host can connect from its address. A connection does
// nothing to a passive session before it has an OPEN, and one with an OPEN does
// not end an established connection that the peer's kernel still has (RFC 4271,
// Section 6.8: the newly created connection is closed). Only TCP-AO or TCP MD5
// keep such a user from becoming the peer while no session is established.

const (
	// maxCandidates bounds the connections of a session without an OPEN. A
	// further one replaces the oldest: a peer sends its OPEN at once.
	maxCandidates = 8
	// challengeTime is the time in which a peer's kernel has to reject a segment
	// of a connection that it no longer has. It normally takes a round trip.
	challengeTime = time.Second
	// minOpen is the length of an OPEN without parameters, in octets (RFC 4271, Section 4.2).
	minOpen = 29
)

// admit passes a connection of the peer to a passive session once it has an OPEN, and closes it otherwise.
func (s *session) admit(ctx context.Context, conn *net.TCPConn) {
	release := context.AfterFunc(ctx, func() { conn.Close() })
	if s.refuses() || !s.opens(conn) || !release() || !s.offer(ctx, conn) {
		conn.Close()
	}
}

// refuses reports whether the session accepts no connections now.
func (s *session) refuses() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held != nil || time.Now().Before(s.paused)
}

// opens waits until the peer has sent the octets of an OPEN, and reports whether
// it did in time. It reads none of them.
func (s *session) opens(conn *net.TCPConn) bool {
	s.mu.Lock()
	if len(s.candidates) == maxCandidates {
		s.candidates[0].Close()
		s.candidates = s.candidates[1:]
	}
	s.candidates = append(s.candidates, conn)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if i := slices.Index(s.candidates, conn); i >= 0 {
			s.candidates = slices.Delete(s.candidates, i, i+1)
		}
	}()
	raw, err := conn.SyscallConn()
	if err != nil || conn.SetReadDeadline(time.Now().Add(s.speaker.openTimeout)) != nil {
		return false
	}
	var b [minOpen]byte
	n := 0
	err = raw.Read(func(fd uintptr) bool {
		var failed error
		before := n
		n, _, failed = unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		switch {
		case failed == unix.EAGAIN || failed == unix.EINTR:
			n = before
			return false
		case failed != nil:
			n = 0
		}
		return failed != nil || n == 0 || n == minOpen
	})
	return err == nil && n == minOpen && conn.SetReadDeadline(time.Time{}) == nil
}

// offer passes a connection with an OPEN to the session, in place of one that
// is not established. It reports false if the session has another connection.
func (s *session) offer(ctx context.Context, conn *net.TCPConn) bool {
	s.mu.Lock()
	current := s.current
	s.mu.Unlock()
	if current != nil && current.wasUp.Load() {
		if !s.challenge(ctx, current) {
			n := guard.Notification{Code: guard.CodeCease, Subcode: guard.CeaseConnectionCollisionResolution}
			_ = conn.SetWriteDeadline(time.Now().Add(challengeTime))
			_, _ = conn.Write(n.AppendTo(nil)) // best effort
			return false
		}
		current = nil
	}
	if s.refuses() {
		return false
	}
	for {
		select {
		case s.accepted <- conn:
			if current != nil {
				current.stop(errReplaced)
			}
			return true
		case old := <-s.accepted:
			old.Close()
		}
	}
}

// challenge sends a KEEPALIVE on an established connection, and reports whether
// the connection ends: a kernel that no longer has it answers with a reset. One
// challenge runs at a time; meanwhile others report false.
func (s *session) challenge(ctx context.Context, in *incarnation) (ended bool) {
	s.mu.Lock()
	disputed := s.disputed
	s.disputed = true
	s.mu.Unlock()
	if disputed {
		return false
	}
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.disputed = false
	}()
	s.log.Info("the peer has opened a second connection; verifying the first", "session", s.conf.Name)
	if !in.isUnread() { // otherwise unacknowledged octets are in flight already
		if err := in.send(keepalive, s.speaker.conf.HoldTime); err != nil {
			in.stop(fmt.Errorf("connection to the peer: %w", plain(err)))
		}
	}
	timer := time.NewTimer(challengeTime)
	defer timer.Stop()
	select {
	case <-in.done:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}
