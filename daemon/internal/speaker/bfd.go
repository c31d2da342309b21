package speaker

import (
	"fmt"
	"time"

	"github.com/fared/fared/daemon/internal/bfd"
)

// A session's BFD lives as long as its incarnation. It begins between the two addresses of the TCP connection when both ends
// have confirmed (RFC 5882, Section 4.1: the control protocol bootstraps it), so it needs no configuration of its own, and never
// keeps a session from coming up. Up once, it takes the session with it when it goes down; the next incarnation begins anew.
// That a TCP connection comes about shows that packets go both ways, so a link that swallows them in one direction alone ends
// one session and does not bring up another. Nor does what a peer's last BFD session says end a session that is newer.

// bfdError ends an incarnation whose path has failed.
type bfdError struct{ change bfd.Change }

func (e *bfdError) Error() string {
	if e.change.Silence > 0 {
		return fmt.Sprintf("BFD down: the peer was silent for %v", e.change.Silence)
	}
	return fmt.Sprintf("BFD down: the peer says %s, %s", e.change.RemoteState, e.change.RemoteDiagnostic)
}

// protect starts the BFD session of an incarnation. Without one BGP goes on, by its hold time.
func (s *session) protect(in *incarnation) {
	c := &s.speaker.conf.BFD
	if c.Interval == 0 {
		return
	}
	session, err := s.speaker.responder.Start(bfd.Config{
		Interval: c.Interval, Multiplier: c.Multiplier,
		Local: addrPort(in.conn.LocalAddr()).Addr(), Remote: addrPort(in.conn.RemoteAddr()).Addr(),
		Device: s.conf.Device, Netns: s.conf.Netns,
		Changed: func(change bfd.Change) { s.bfdChanged(in, change) },
	})
	if err != nil {
		s.log.Warn("session without BFD", "session", s.conf.Name, "error", err)
		s.speaker.queue.fault(Fault{Session: s.index, Reason: err.Error()})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bfd, s.bfdErr = session, err
}

// lag is how much later than the end of its connection a peer that is to keep our routes is told of the end of BFD. FRR drops them
// (8.4, which takes AdminDown for a failure) if it hears of BFD first; it forgets BFD, as RFC 5882, Section 4.3, asks, once it
// waits for us to restart. To say nothing would be worse: the next process's first packet, or its silence, would end the session
// that is established again.
const lag = 200 * time.Millisecond

// unprotect ends the BFD session of an incarnation that is over. A peer that has not noticed yet is told that this is no failure.
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

// bfdChanged is called by the BFD session of an incarnation. A failure is a loss like that of a link: the owner is told before the
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

// bfdStatusLocked returns a picture of the session's BFD. The caller holds mu.
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
