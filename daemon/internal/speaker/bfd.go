package speaker

import (
	"fmt"
	"time"

	"github.com/fared/fared/daemon/internal/bfd"
)

// A session's BFD lasts as long as its incarnation. It begins between the two addresses of the TCP connection when both ends have confirmed (RFC
// 5882, Section 4.1: the control protocol bootstraps it), so it needs no separate configuration and never prevents a session from coming up.
// Once BFD has been up, its failure ends the incarnation; the next incarnation starts another BFD session. An established TCP connection proves
// that packets pass in both directions, so a link that drops one direction ends one session and does not bring up another. The state of a peer's
// previous BFD session never ends a newer session.

// bfdError ends an incarnation whose path has failed.
type bfdError struct{ change bfd.Change }

func (e *bfdError) Error() string {
	if e.change.Silence > 0 {
		return fmt.Sprintf("BFD down: the peer was silent for %v", e.change.Silence)
	}
	return fmt.Sprintf("BFD down: the peer reports %s, %s", e.change.RemoteState, e.change.RemoteDiagnostic)
}

// protect starts the BFD session of an incarnation. If BFD cannot start, BGP continues with its hold time.
func (s *session) protect(in *incarnation) {
	c := &s.speaker.conf.BFD
	if c.Interval == 0 {
		return
	}
	s.mu.Lock()
	auth := bfd.Auth{Type: s.conf.BFDAuth.Type, Keys: s.bfdKeys}
	s.mu.Unlock()
	session, err := s.speaker.responder.Start(bfd.Config{
		Interval: c.Interval, Multiplier: c.Multiplier,
		Local: addrPort(in.conn.LocalAddr()).Addr(), Remote: addrPort(in.conn.RemoteAddr()).Addr(),
		Device: s.conf.Device, Netns: s.conf.Netns, Auth: auth, Counters: &s.bfdCounters,
		Changed: func(change bfd.Change) { s.bfdChanged(in, change) },
	})
	if err != nil {
		s.log.Warn("session without BFD", "session", s.conf.Name, "error", err)
		s.speaker.queue.fault(Fault{Session: s.index, Reason: err.Error()})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bfd, s.bfdErr = session, err
	if session != nil {
		_ = session.SetKeys(s.bfdKeys) // valid; they may have changed since Start
	}
}

// setBFDKeys replaces the keys of the authentication of BFD packets. A session that is up stays up, as long as the neighbor has them too.
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

// lag is the delay between the end of the connection and AdminDown when the peer is to keep our routes. FRR 8.4 takes AdminDown for a failure
// and drops the routes if it receives AdminDown first; once it waits for our restart, it ignores BFD, as RFC 5882, Section 4.3, requires. To
// send no AdminDown would be worse: the first packet of the next process, or its silence, would end the re-established session.
const lag = 200 * time.Millisecond

// unprotect ends the BFD session of an incarnation that has ended. AdminDown informs a peer that has not noticed the end yet that the path has
// not failed.
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

// bfdChanged is called by the BFD session of an incarnation. It treats a failure like a link failure: it notifies the owner before the
// connections are closed.
func (s *session) bfdChanged(in *incarnation, change bfd.Change) {
	s.log.Info("BFD session changed", "session", s.conf.Name, "before", change.Before, "now", change.State,
		"diagnostic", change.Diagnostic, "peer", change.RemoteState, "peer_diagnostic", change.RemoteDiagnostic, "detection_time", change.DetectionTime)
	if !change.Failed() {
		return
	}
	err := &bfdError{change}
	s.speaker.queue.sessionDown(SessionDown{Session: s.index, Generation: in.gen, Reason: err.Error()})
	in.stop(err)
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
