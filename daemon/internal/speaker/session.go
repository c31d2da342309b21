package speaker

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/fared/fared/daemon/internal/bfd"
	"github.com/fared/fared/daemon/internal/guard"
)

// session is one configured session through all its incarnations. Its
// goroutine, run, owns the connections; the rest is what others may look at.
type session struct {
	speaker  *Speaker
	index    int
	conf     *Session
	log      *slog.Logger
	server   *bgpServer
	counters guard.Counters
	accepted chan *net.TCPConn // one slot: the newest connection of a passive session's peer
	wanted   wanted
	draining *incarnation // the last one, of which GoBGP may not be through; run's

	mu         sync.Mutex // guards what follows
	held       *heldError // why the session must not run; nil: it may
	changed    chan struct{}
	cancel     context.CancelCauseFunc // ends the attempt or incarnation under way
	current    *incarnation            // nil: none
	bfd        *bfd.Session            // the current incarnation's; nil: none
	bfdErr     error                   // why it has none although it should
	state      State
	since      time.Time
	reason     string
	gen        uint64
	info       guard.Info
	local      netip.AddrPort
	remote     netip.AddrPort
	flaps      uint64
	attempts   uint64
	differed   uint64 // differences found by rereading
	advertised int
}

// heldError says that the session was taken down by its owner.
type heldError struct{ reason string }

func (e *heldError) Error() string {
	if e.reason == "" {
		return "held down"
	}
	return "held down: " + e.reason
}

// passiveDelay is the longest that a peer is made to wait that has connected in
// vain more than passivePatience times in a row. Otherwise it sets the pace.
const (
	passiveDelay    = 50 * time.Millisecond
	passivePatience = 8
)

// run opens incarnation after incarnation until ctx ends.
func (s *session) run(ctx context.Context) {
	defer func() {
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
			select {
			case <-ctx.Done():
				return
			case <-changed:
				failures = 0 // the link is back: at once, whatever was before
				continue
			}
		}
		began := time.Now()
		conn, err := s.connect(attempt)
		up := false
		if err == nil {
			up, err = s.incarnate(attempt, conn)
		}
		s.leave(err, up)
		if ctx.Err() != nil {
			return
		}
		// At once after a loss; but a peer with which sessions come up only to
		// fail is not hammered.
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

// backoff is the wait after a number of failures in a row: none, then 50 ms,
// doubling up to ConnectRetry, spread by up to a quarter either way so that
// the sessions of a rebooted leaf do not come in step. The spread is a function
// of name and number: nothing here is random.
func (s *session) backoff(failures int) time.Duration {
	if failures == 0 {
		return 0
	}
	limit := s.speaker.conf.ConnectRetry
	d := min(50*time.Millisecond<<min(failures-1, 20), limit)
	h := fnv.New32a()
	fmt.Fprintf(h, "%s %d", s.conf.Name, failures)
	spread := int64(h.Sum32()%1001) - 500 // 1/2000 of d
	return d + time.Duration(int64(d)*spread/2000)
}

// enter begins an attempt. Its context is nil while the session is held.
// changed is closed when the owner's will changes.
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

// leave ends an attempt.
func (s *session) leave(err error, wasUp bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancel(nil)
	s.cancel, s.current = nil, nil
	s.info, s.local, s.remote = guard.Info{}, netip.AddrPort{}, netip.AddrPort{}
	reason := "ended"
	if err != nil {
		reason = err.Error()
	}
	if wasUp {
		s.flaps++
		s.log.Warn("session lost", "session", s.conf.Name, "reason", reason)
	} else if reason != s.reason {
		s.log.Info("session not established", "session", s.conf.Name, "reason", reason)
	}
	s.set(Idle, reason)
}

// set changes the state. The caller holds mu.
func (s *session) set(state State, reason string) {
	if s.state != state {
		s.state, s.since = state, time.Now()
	}
	s.reason = reason
}

// setAdmin carries out SetAdminState.
func (s *session) setAdmin(up bool, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if up == (s.held == nil) {
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
		// The owner is told before the connections are closed.
		s.speaker.queue.sessionDown(SessionDown{Session: s.index, Generation: s.gen, Reason: s.held.Error()})
		s.cancel(s.held)
	}
}

// begin registers an incarnation and numbers it.
func (s *session) begin(in *incarnation) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gen++
	s.current = in
	s.attempts++
	s.local, s.remote = addrPort(in.conn.LocalAddr()), addrPort(in.conn.RemoteAddr())
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
		s.set(Established, s.reason)
		s.log.Info("session established", "session", s.conf.Name, "generation", gen,
			"node", s.info.RouterID, "as", s.info.PeerAS, "remote", s.remote)
	}
}

// connect opens or awaits the TCP connection of an incarnation.
func (s *session) connect(ctx context.Context) (*net.TCPConn, error) {
	if s.conf.Passive {
		select {
		case conn := <-s.accepted:
			return conn, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	peer := s.conf.Peer
	if s.conf.Unnumbered {
		var err error
		if peer, err = s.speaker.deps.Resolver.Peer(ctx, s.conf.Device, s.conf.Netns); err != nil {
			return nil, fmt.Errorf("find the neighbour on %s: %w", s.conf.Device, err)
		}
	}
	conn, err := s.dial(ctx, peer)
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

// offer hands a connection of the peer to a passive session. A newer one
// replaces what is there: see errReplaced.
func (s *session) offer(conn *net.TCPConn) {
	s.mu.Lock()
	held, current := s.held != nil, s.current
	s.mu.Unlock()
	if held {
		conn.Close()
		return
	}
	for {
		select {
		case s.accepted <- conn:
			if current != nil {
				current.stop(errReplaced)
			}
			return
		case old := <-s.accepted:
			old.Close()
		}
	}
}

// guardConfig is what the guard of a connection is to check and rewrite.
func (s *session) guardConfig(conn *net.TCPConn) guard.Config {
	c := &s.speaker.conf
	g := guard.Config{
		LocalAS: c.AS, PeerAS: s.conf.PeerAS, RouterID: c.RouterID,
		Families: s.conf.Families, ExtendedNextHop: s.conf.ExtendedNextHop,
		Accept: c.Accept, MaxPrefixes: c.MaxPrefixes, Carrier: c.Carrier, Counters: &s.counters,
		NextHop:       guard.OneOf(append([]netip.Addr{addrPort(conn.RemoteAddr()).Addr()}, s.conf.PeerNextHops...)...),
		LocalNextHop4: s.conf.NextHop4, LocalNextHop6: s.conf.NextHop6,
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

// openMessage is our OPEN as the guard takes it from GoBGP: the guard fills in
// AS, identifier and families. It goes out before GoBGP's, which is not made
// before the peer's AS is known.
func (s *session) openMessage(gen uint64) []byte {
	c := &s.speaker.conf
	caps := []byte{2, 0, 65, 4} // route refresh, four-octet AS
	caps = binary.BigEndian.AppendUint32(caps, c.AS)
	if c.RestartTime > 0 {
		// RFC 4724, Section 3. The data plane is another process and keeps
		// forwarding: F is set. With the first incarnation this process has
		// just (re)started: R is set.
		flags := uint16(c.RestartTime / time.Second)
		if gen == 1 {
			flags |= 0x8000
		}
		caps = append(caps, 64, byte(2+4*len(s.conf.Families)))
		caps = binary.BigEndian.AppendUint16(caps, flags)
		for _, f := range s.conf.Families {
			afi := byte(1)
			if f == IPv6 {
				afi = 2
			}
			caps = append(caps, 0, afi, 1, 0x80)
		}
	}
	as := uint16(23456) // AS_TRANS, RFC 6793
	if c.AS <= 0xffff {
		as = uint16(c.AS)
	}
	b := append([]byte(nil), endOfRIB[:16]...)
	b = binary.BigEndian.AppendUint16(b, uint16(31+len(caps)))
	b = append(b, 1, 4)
	b = binary.BigEndian.AppendUint16(b, as)
	b = binary.BigEndian.AppendUint16(b, uint16(c.HoldTime/time.Second))
	id := c.RouterID.As4()
	b = append(b, id[:]...)
	b = append(b, byte(2+len(caps)), 2, byte(len(caps)))
	return append(b, caps...)
}

func addrPort(a net.Addr) netip.AddrPort {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := tcp.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
