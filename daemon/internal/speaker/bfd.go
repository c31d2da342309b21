package speaker

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/bfd"
	"github.com/fared/fared/internal/netns"
)

// A session's BFD begins as soon as the peer's address is known and the session may connect, before BGP. A peer may
// wait for it: FRR 10.3 closes every connection while BFD is down (RFC 5882, Section 4.1, permits that between
// neighbors that both have BFD). We never wait: a peer without BFD and a peer whose BFD begins with BGP look alike, and
// the section wants a session with the former. When BFD comes up, the session connects at once.
//
// BFD lasts over attempts that fail, and ends with the incarnation that it has protected, when the session is held, and
// when the peer's address changes. So the state of a peer's previous BFD session, such as that of a process that was
// restarted, never ends a newer incarnation. BFD that goes down after it was up ends the incarnation, and so does a
// peer that falls silent while BFD comes up: it has BFD, and its packets came until then. An established TCP connection
// proves that packets pass in both directions, so a link that drops one direction ends one incarnation and does not
// bring up another.

// bfdError ends an incarnation whose path has failed.
type bfdError struct{ change bfd.Change }

func (e *bfdError) Error() string {
	if e.change.Silence > 0 {
		return fmt.Sprintf("BFD down: the peer was silent for %v", e.change.Silence)
	}
	return fmt.Sprintf("BFD down: the peer reports %s, %s", e.change.RemoteState, e.change.RemoteDiagnostic)
}

// meet begins BFD with a peer that is about to connect, or to be connected to.
func (s *session) meet(peer netip.Addr) {
	if s.speaker.conf.BFD.Interval == 0 {
		return
	}
	// An error is that of the connection too, which reports it.
	if local, err := s.localTo(peer); err == nil {
		s.protect(local, peer, false)
	}
}

// localTo returns our address of a connection to a peer.
func (s *session) localTo(peer netip.Addr) (local netip.Addr, err error) {
	if s.conf.Local.IsValid() {
		return s.conf.Local, nil
	}
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		return controlRaw(c, func(fd int) error { return s.bind(fd, peer) })
	}}
	err = netns.In(s.conf.Netns, func() error {
		to, err := scoped(peer, s.conf.Device)
		if err != nil {
			return err
		}
		conn, err := d.Dial("udp", netip.AddrPortFrom(to, s.conf.Port).String()) // sends nothing
		if err != nil {
			return err
		}
		defer conn.Close()
		local = conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
		return nil
	})
	return local, err
}

// protect makes BFD run between two addresses. If BFD cannot start, BGP continues with its hold time. Only one call
// runs at a time.
func (s *session) protect(local, peer netip.Addr, established bool) {
	c := &s.speaker.conf.BFD
	if c.Interval == 0 {
		return
	}
	ends := [2]netip.Addr{local.WithZone(""), peer.WithZone("")}
	s.mu.Lock()
	runs, same, before := s.bfd != nil, s.bfdEnds == ends, s.bfdErr
	auth := bfd.Auth{Type: s.conf.BFDAuth.Type, Keys: s.bfdKeys}
	s.mu.Unlock()
	if runs && same {
		return
	}
	s.unprotect(false)
	session, err := s.speaker.responder.Start(bfd.Config{
		Interval: c.Interval, Multiplier: c.Multiplier, Local: local, Remote: peer,
		Device: s.conf.Device, Netns: s.conf.Netns, Auth: auth, Counters: &s.bfdCounters, Changed: s.bfdChanged,
	})
	// Before BGP our address may not exist yet, which is no fault.
	if err != nil && (established || errors.Is(err, unix.EADDRINUSE) && (before == nil || before.Error() != err.Error())) {
		s.log.Warn("session without BFD", "session", s.conf.Name, "error", err)
		s.speaker.queue.fault(Fault{Session: s.id, Reason: err.Error()})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bfd, s.bfdEnds, s.bfdErr = session, ends, err
	if session != nil {
		_ = session.SetKeys(s.bfdKeys) // valid; they may have changed since Start
	}
}

// setBFDKeys replaces the keys of the authentication of BFD packets. A session that is up stays up, as long as the
// neighbor has them too.
func (s *session) setBFDKeys(keys []bfd.Key) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := (bfd.Auth{Type: s.conf.BFDAuth.Type, Keys: keys}).Validate(); err != nil {
		return err
	}
	s.bfdKeys = keys
	if s.bfd != nil {
		return s.bfd.SetKeys(keys)
	}
	return nil
}

// lag is the delay between the end of the connection and AdminDown when the peer is to keep our routes. FRR 8.4 takes
// AdminDown for a failure and drops the routes if it receives AdminDown first; once it waits for our restart, it
// ignores BFD, as RFC 5882, Section 4.3, requires. To send no AdminDown would be worse: the first packet of the next
// process, or its silence, would end the re-established session.
const lag = 200 * time.Millisecond

// unprotect ends BFD. AdminDown informs the peer that the path has not failed.
func (s *session) unprotect(restarting bool) {
	s.mu.Lock()
	session := s.bfd
	s.bfd, s.bfdErr = nil, nil
	s.mu.Unlock()
	if session != nil {
		if restarting {
			time.Sleep(lag)
		}
		session.Close()
	}
}

// hastenPause is the least time between two attempts that BFD has caused: a peer whose BFD flaps must not make the
// session connect all the time.
const hastenPause = time.Second

// takeover is the time after BGP's start in which the peer may signal that BFD is down, without a failure, if BFD came
// up before: FRR 10.3 begins BFD again when BGP is established. Were it a failure, the peer would close the session
// itself.
const takeover = time.Second

// bfdChanged is called by the session's BFD. It treats a failure like a link failure: it notifies the owner before the
// connections are closed.
func (s *session) bfdChanged(change bfd.Change) {
	s.log.Info("BFD session changed", "session", s.conf.Name, "before", change.Before, "now", change.State,
		"diagnostic", change.Diagnostic, "peer", change.RemoteState, "peer_diagnostic", change.RemoteDiagnostic, "detection_time", change.DetectionTime)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.state != Established:
		if now := time.Now(); change.State == bfd.Up && now.Sub(s.hastened) >= hastenPause {
			s.hastened = now
			close(s.changed)
			s.changed = make(chan struct{})
		}
	case !change.Failed():
	case change.Silence == 0 && change.UpSince.Before(s.since) && time.Since(s.since) < s.speaker.takeover:
	default:
		err := &bfdError{change}
		if s.speaker.queue.sessionDown(SessionDown{Session: s.id, Generation: s.gen, Reason: err.Error()}) {
			s.speaker.queue.wake()
		}
		s.current.stop(err)
	}
}

// bfdStatusLocked returns a snapshot of the session's BFD. The caller holds mu.
func (s *session) bfdStatusLocked() BFDStatus {
	switch {
	case s.bfdErr != nil:
		return BFDStatus{State: "failed"}
	case s.bfd == nil:
		return BFDStatus{}
	}
	st := s.bfd.Status()
	return BFDStatus{State: st.State.String(), DetectionTime: st.DetectionTime}
}
