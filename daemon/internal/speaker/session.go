package speaker

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/bfd"
	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/daemon/internal/link"
	"github.com/fared/fared/internal/netns"
)

// session is one configured session across all its incarnations. Its goroutine,
// run, owns the connections; other goroutines access the fields guarded by mu.
type session struct {
	speaker     *Speaker
	id          int // of its queue; the owner's index may change
	conf        *Session
	log         *slog.Logger
	server      atomic.Pointer[bgpServer] // replaced only by repair
	counters    guard.Counters
	bfdCounters bfd.Counters
	accepted    chan *net.TCPConn // one slot: the newest connection of a passive session's peer
	wanted      wanted
	throttled   atomic.Uint64 // reads that waited for the budget
	before      []*session    // sessions that have to end before this one begins
	succeeds    *session      // the one of them whose generations this one continues; nil if there is none
	removed     atomic.Bool   // by Reconfigure
	end         func()        // ends run; nil before Run
	done        chan struct{} // closed when run has ended; nil before Run
	draining    *incarnation  // the previous incarnation, until drain; used only by run
	localAddr   netip.Addr    // address of the last incarnation on the local hop; used only by run

	mu         sync.Mutex              // guards the fields below
	candidates []*net.TCPConn          // connections of a passive session's peer that have not sent an OPEN yet, the oldest first
	disputed   bool                    // challenge is running
	held       *heldError              // why the session must not run; nil permits it
	changed    chan struct{}           // closed when the session should connect at once, or must not run any more
	cancel     context.CancelCauseFunc // ends the current attempt or incarnation
	stopDial   func()                  // ends the search for the peer and the dial; nil unless there is one
	current    *incarnation            // nil between incarnations
	bfd        *bfd.Session            // nil if there is none
	bfdEnds    [2]netip.Addr           // our and the peer's address of bfd, without zones
	bfdKeys    []bfd.Key               // of the authentication of BFD packets
	bfdErr     error                   // why BFD could not start; nil if it runs or is not needed
	hastened   time.Time               // when BFD last made the session connect at once
	state      State
	since      time.Time
	reason     string
	ended      string // why the last established incarnation ended; "" if none did
	gen        uint64
	info       guard.Info
	remote     netip.AddrPort
	flaps      uint64
	everUp     bool // an incarnation of this process was established
	attempts   uint64
	rebuilt    uint64 // replaced GoBGP servers
	strikes    int    // consecutive offenses
	offenses   uint64
	paused     time.Time // end of the pause after an offense
	advertised int
	carries    uint64 // the established and reported generation that may be sent marks; 0 if none
	expected   uint32 // the newest mark sent to GoBGP, for guard.Mark; 0 if none
	reports    uint64 // the owner's mark that expected represents
}

// heldError reports that the owner has closed the session.
type heldError struct{ reason string }

func (e *heldError) Error() string {
	if e.reason == "" {
		return "held down"
	}
	return "held down: " + e.reason
}

// passiveDelay caps the backoff applied to a peer after more than
// passivePatience consecutive failed connections; before that its connections
// are accepted immediately.
const (
	passiveDelay    = 50 * time.Millisecond
	passivePatience = 8
)

// run runs one incarnation after another until ctx ends.
func (s *session) run(ctx context.Context) {
	defer func() {
		s.unprotect(false)
		s.drain()
		select {
		case conn := <-s.accepted:
			conn.Close()
		default:
		}
	}()
	failures := 0
	for {
		attempt, changed := s.enter(ctx)
		if attempt == nil { // held
			s.unprotect(false)
			select {
			case <-ctx.Done():
				return
			case <-changed:
				failures = 0 // the link is up again: connect immediately, regardless of earlier failures
				continue
			}
		}
		began := time.Now()
		up, err := s.try(attempt, failures)
		pause := s.leave(err, up, time.Since(began))
		if !wait(ctx, pause) {
			return
		}
		// Reconnect immediately after a failure, unless sessions with this peer
		// only come up to fail.
		if up && time.Since(began) >= time.Second {
			failures = 0
		}
		delay := s.backoff(failures)
		if s.conf.Passive {
			delay = min(s.backoff(max(failures-passivePatience, 0)), passiveDelay)
		}
		failures++
		timer := time.NewTimer(delay)
		select {
		case <-ctx.Done():
		case <-changed:
			failures = 0
		case <-timer.C:
		}
		timer.Stop()
	}
}

// try makes one attempt after consecutive failures: it repairs the GoBGP server if needed, connects, and runs the
// incarnation to its end.
func (s *session) try(ctx context.Context, failures int) (up bool, err error) {
	if err := s.repair(); err != nil {
		return false, err
	}
	conn, err := s.connect(ctx, patienceToConnect(failures))
	if err != nil {
		return false, blame(err)
	}
	return s.incarnate(ctx, conn)
}

// patienceToConnect returns the longest wait for a connection after consecutive
// failures: 10 ms, doubling up to 3 s. A leaf is one hop away, and drops a SYN
// that arrives before its end of the link is ready; TCP would repeat the SYN
// only after a second (RFC 6298, Section 2), another connection sends it at once.
func patienceToConnect(failures int) time.Duration {
	return min(10*time.Millisecond<<min(failures, 20), 3*time.Second)
}

// backoff returns the wait after consecutive failures: none after 0, then 1
// ms, doubling up to ConnectRetry, spread by up to a quarter either way so that
// the sessions of a rebooted leaf do not reconnect in step. The spread is a
// function of name and number of failures, not random.
func (s *session) backoff(failures int) time.Duration {
	if failures == 0 {
		return 0
	}
	limit := s.speaker.conf.ConnectRetry
	d := min(time.Millisecond<<min(failures-1, 30), limit)
	h := fnv.New32a()
	fmt.Fprintf(h, "%s %d", s.conf.Name, failures)
	spread := int64(h.Sum32()%1001) - 500 // 1/2000 of d
	return d + time.Duration(int64(d)*spread/2000)
}

// enter begins an attempt. The context is nil while the session is held.
// changed is closed by the next change of the admin state, or when BFD comes up.
func (s *session) enter(ctx context.Context) (attempt context.Context, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held != nil {
		s.set(Held, s.held.Error())
		return nil, s.changed
	}
	attempt, s.cancel = context.WithCancelCause(ctx)
	if s.conf.Passive {
		s.set(Idle, s.reason)
	} else {
		s.set(Connecting, s.reason)
	}
	return attempt, s.changed
}

// wait waits for d, regardless of changes, and reports false if ctx ended.
func wait(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// leave ends an attempt that lasted for a time and returns the pause that the
// peer's conduct requires.
func (s *session) leave(err error, wasUp bool, lasted time.Duration) (pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancel(nil)
	s.cancel, s.current, s.carries = nil, nil, 0
	s.info, s.remote = guard.Info{}, netip.AddrPort{}
	reason := "ended"
	if err != nil {
		reason = err.Error()
	}
	if wasUp {
		s.ended = reason
		s.flaps++
		if pause = s.punish(err, lasted); pause > 0 {
			reason += fmt.Sprintf("; next attempt after %v", pause)
			s.log.Info("session waits after an offense of the peer", "session", s.conf.Name, "next_attempt_after", pause)
		}
	} else if reason != s.reason && !errors.Is(err, context.Canceled) {
		s.log.Info("session not established", "session", s.conf.Name, "reason", reason)
	}
	s.set(Idle, reason)
	return pause
}

// set changes the state. The caller holds mu.
func (s *session) set(state State, reason string) {
	if s.state != state {
		s.state, s.since = state, time.Now()
	}
	s.reason = reason
}

// setAdmin implements SetAdminState.
func (s *session) setAdmin(up bool, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if up == (s.held == nil) {
		if !up && s.held.reason != reason {
			s.held = &heldError{reason: reason}
			if s.state == Held {
				s.reason = s.held.Error()
			}
		}
		return
	}
	close(s.changed)
	s.changed = make(chan struct{})
	if up {
		s.held = nil
		return
	}
	s.held = &heldError{reason: reason}
	if s.cancel != nil {
		// Notify the owner before the connections are closed.
		if s.speaker.queue.sessionDown(SessionDown{Session: s.id, Generation: s.gen, Reason: s.held.Error()}) {
			s.speaker.queue.wake()
		}
		s.cancel(s.held)
	}
}

// retry implements Retry.
func (s *session) retry() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held != nil || s.current != nil {
		return
	}
	close(s.changed)
	s.changed = make(chan struct{})
	if s.stopDial != nil {
		s.stopDial()
	}
}

// clearedError ends an established session that its owner has cleared.
type clearedError struct{ cause string }

func (e *clearedError) Error() string { return e.cause }

// clear implements Clear.
func (s *session) clear(cause string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state != Established || s.current == nil || s.current.over.Load() {
		text := "it is not established but " + s.state.String()
		if s.reason != "" {
			text += ": " + s.reason
		}
		return errors.New(text)
	}
	s.current.stop(&clearedError{cause})
	return nil
}

// begin registers an incarnation and numbers it.
func (s *session) begin(in *incarnation) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gen++
	s.current = in
	s.attempts++
	s.remote = addrPort(in.conn.RemoteAddr())
	s.set(Opening, s.reason)
	return s.gen
}

func (s *session) opened(info guard.Info) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.info = info
}

func (s *session) established(gen uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gen == gen && s.current != nil && !s.current.over.Load() {
		s.set(Established, s.ended)
		s.everUp = true
	}
}

// upReported records that the queue has SessionUp of a generation: from now on marks may be sent.
func (s *session) upReported(gen uint64) {
	s.mu.Lock()
	if s.gen == gen && s.current != nil {
		s.carries = gen
	}
	s.mu.Unlock()
	s.wanted.wake()
}

// carrying returns the generation that may be sent marks, 0 if none, and a family that it carries.
func (s *session) carrying() (gen uint64, family Family) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.info.Families.Has(IPv4) {
		return s.carries, IPv4
	}
	return s.carries, IPv6
}

// expect records that the number of a guard.Mark represents one of the owner's marks.
func (s *session) expect(number uint32, mark uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expected, s.reports = number, mark
}

// written reports the owner's mark that a number represents: the connection of a generation has carried everything
// before it.
func (s *session) written(gen uint64, number uint32) {
	s.mu.Lock()
	mark, current := s.reports, s.expected == number
	s.mu.Unlock()
	if current {
		s.speaker.queue.written(Written{Session: s.id, Generation: gen, Mark: mark})
	}
}

// connect opens the TCP connection of an incarnation within limit, or awaits the connection of a passive session.
func (s *session) connect(ctx context.Context, limit time.Duration) (*net.TCPConn, error) {
	if s.conf.Passive {
		return s.awaitPeer(ctx)
	}
	dialing, stop := context.WithCancel(ctx)
	defer stop()
	s.setStopDial(stop)
	defer s.setStopDial(nil)
	peer, err := s.neighbor(dialing)
	if err != nil {
		return nil, err
	}
	s.meet(peer)
	conn, err := s.dial(dialing, peer, limit)
	if ctx.Err() != nil {
		if conn != nil {
			conn.Close()
		}
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("connect to %v: %w", netip.AddrPortFrom(peer, s.conf.Port), plain(err))
	}
	return conn, nil
}

func (s *session) setStopDial(stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopDial = stop
}

// awaitPeer waits until the peer of a passive session has connected. Meanwhile it finds the peer and begins BFD,
// because the peer may wait for either.
func (s *session) awaitPeer(ctx context.Context) (*net.TCPConn, error) {
	meeting, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() {
		for meeting.Err() == nil {
			if peer, err := s.neighbor(meeting); err == nil {
				s.meet(peer)
			} else if meeting.Err() == nil {
				s.waits(err)
			}
			wait(meeting, s.speaker.conf.ConnectRetry) // then its address may have changed, or ours exists
		}
	})
	select {
	case conn := <-s.accepted:
		return conn, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// neighbor returns the peer's address. That of an unnumbered session is known once the peer has advertised itself.
func (s *session) neighbor(ctx context.Context) (netip.Addr, error) {
	if !s.conf.Unnumbered {
		return s.conf.Peer, nil
	}
	for {
		patient, cancel := context.WithTimeout(ctx, s.speaker.patienceToFind)
		peer, err := s.speaker.deps.Resolver.Peer(patient, s.conf.Device, s.conf.Netns)
		late := patient.Err() != nil
		cancel()
		switch {
		case err == nil:
			return peer, nil
		case ctx.Err() != nil:
			return netip.Addr{}, context.Cause(ctx)
		case !late:
			return netip.Addr{}, fmt.Errorf("find the neighbor on %s: %w", s.conf.Device, err)
		}
		s.waits(fmt.Errorf("find the neighbor on %s: %w", s.conf.Device, err))
	}
}

// waits gives the reason for which an attempt has to wait, in place of the reason for which the previous one ended.
func (s *session) waits(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if reason := err.Error(); s.held == nil && reason != s.reason {
		s.log.Info("session not established", "session", s.conf.Name, "reason", reason)
		s.set(s.state, reason)
	}
}

// refused replaces the end of a connection on which the peer has sent no OPEN by its likely cause: the peer listens,
// but closes our connections. Whether that resets them is a matter of chance.
func (s *session) refused(err error) error {
	if !errors.Is(err, errClosed) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		return err
	}
	s.mu.Lock()
	protected := s.bfd == nil || s.bfd.Status().State == bfd.Up
	s.mu.Unlock()
	hint := ""
	if cable := s.numbered(); cable.IsValid() {
		hint = fmt.Sprintf("; %s has %v, which FRR's \"neighbor interface\" uses unless it has v6only: add that there, or write peer: %v here",
			s.conf.Device, cable, otherEnd(cable))
	} else if !protected {
		hint = "; it may wait for BFD, which is not up"
	}
	return fmt.Errorf("connection to the peer: %w before its OPEN%s", errClosed, hint)
}

// numbered returns the IPv4 address of an unnumbered session's device if it is one end of a cable, else an invalid one.
// FRR's peers-over-interface prefers the IPv4 address at the other end of a /30 or /31 to link-local addresses, and
// closes connections from these.
func (s *session) numbered() (cable netip.Prefix) {
	if !s.conf.Unnumbered {
		return cable
	}
	_ = netns.In(s.conf.Netns, func() error { // without an answer there is no hint
		device, err := link.Interface(s.conf.Device)
		if err != nil {
			return err
		}
		addrs, err := device.Addrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && (p.Bits() == 30 || p.Bits() == 31) {
				cable = p
			}
		}
		return err
	})
	return cable
}

// otherEnd returns the other host address of a /30 or /31 (RFC 3021).
func otherEnd(cable netip.Prefix) netip.Addr {
	other := cable.Addr().As4()
	if cable.Bits() == 31 {
		other[3] ^= 1
	} else {
		other[3] ^= 3
	}
	return netip.AddrFrom4(other)
}

// guardConfig returns the configuration of a connection's guard.
func (s *session) guardConfig(conn *net.TCPConn) guard.Config {
	c := &s.speaker.conf
	g := guard.Config{
		LocalAS: c.AS, PeerAS: s.conf.PeerAS, RouterID: c.RouterID,
		Families: s.conf.Families, ExtendedNextHop: s.conf.ExtendedNextHop,
		Accept: c.Accept, AllowOwnAS: c.AllowOwnAS, MaxPrefixes: c.MaxPrefixes, Carrier: c.Carrier, Counters: &s.counters,
		Deciding: s.conf.Deciding, NonTransitive: s.conf.NonTransitive,
		NextHop:       guard.OneOf(append([]netip.Addr{addrPort(conn.RemoteAddr()).Addr()}, s.conf.PeerNextHops...)...),
		Own:           s.speaker.ownLoopbacks,
		LocalNextHop4: s.conf.NextHop4, LocalNextHop6: s.conf.NextHop6,
	}
	if len(s.conf.Accept) > 0 {
		g.Accept = s.conf.Accept
	}
	if s.conf.SubnetNextHops {
		g.NextHop = s.withSubnet(g.NextHop)
	}
	switch local := addrPort(conn.LocalAddr()).Addr().WithZone(""); {
	case local.Is4():
		if !g.LocalNextHop4.IsValid() {
			g.LocalNextHop4 = local
		}
	case local.IsLinkLocalUnicast():
		g.LocalLinkLocal = local
	case !g.LocalNextHop6.IsValid():
		g.LocalNextHop6 = local
	}
	return g
}

func addrPort(a net.Addr) netip.AddrPort {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := tcp.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
