package speaker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fared/fared/daemon/internal/bfd"
	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/internal/netns"
)

// Speaker runs all BGP sessions of one server or leaf.
type Speaker struct {
	conf      Config
	deps      Deps
	queue     *queue
	sessions  []*session // by the owner's index
	listeners []*listener
	password  string // of the local hops

	mu     sync.Mutex      // guards the fields below, and changes of sessions and listeners
	ctx    context.Context // of Run; nil before it
	over   bool            // Run waits for all goroutines
	active sync.WaitGroup  // of sessions and listeners

	loopbacks atomic.Pointer[[]netip.Prefix] // of this host; nil before SetLoopbacks

	responder      *bfd.Responder
	openTimeout    time.Duration // limit of the OPEN exchange
	patienceToFind time.Duration // see the constant
	takeover       time.Duration // see the constant
	budget         budget        // initial budget of each incarnation
	rereadAfter    time.Duration // see the constant
}

// New starts a BgpServer for every session. The servers have no neighbors, and
// no session connects before Run. New may be called while other Speakers of the
// process run: it pauses them for some milliseconds per session.
//
// The caller must call Run to release the resources that New has acquired, if
// necessary with a context that is already canceled.
func New(conf Config, deps Deps) (*Speaker, error) {
	if err := conf.validate(deps); err != nil {
		return nil, err
	}
	if err := conf.checkAO(); err != nil {
		return nil, err
	}
	password, err := localPassword()
	if err != nil {
		return nil, err
	}
	s := &Speaker{conf: conf.withDefaults(), deps: deps, queue: newQueue(len(conf.Sessions)), openTimeout: openTimeout,
		password: password, responder: bfd.NewResponder(netns.In),
		patienceToFind: patienceToFind, takeover: takeover, budget: newBudget(conf.maxPrefixes()), rereadAfter: rereadAfter}
	servers := make([]*bgpServer, 0, len(s.conf.Sessions))
	for i := range s.conf.Sessions {
		session := s.newSession(i, &s.conf.Sessions[i])
		servers = append(servers, session.server.Load())
		s.sessions = append(s.sessions, session)
	}
	s.listeners = s.listenersOf(s.sessions)
	err = exclusively(servers, func() error {
		for i, server := range servers {
			if err := server.start(s.conf.AS, s.conf.RouterID); err != nil {
				return fmt.Errorf("session %s: %w", s.conf.Sessions[i].Name, err)
			}
		}
		return nil
	})
	if err != nil {
		for _, server := range servers {
			_ = server.stop() // the cause is err
		}
		return nil, err
	}
	return s, nil
}

// Run connects all sessions and maintains them until ctx ends, then closes them
// and waits for every goroutine that it has started. It is called once.
//
// With Config.RestartTime it closes the connections without NOTIFICATION, so
// that the peers keep our routes; without it, the peers receive Cease.
func (s *Speaker) Run(ctx context.Context) error {
	s.mu.Lock()
	s.ctx = ctx
	for _, l := range s.listeners {
		s.launchListener(l)
	}
	for _, session := range s.sessions {
		s.launch(session)
	}
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
	s.active.Wait()
	s.responder.Close()
	var errs []error
	for _, session := range s.sessions {
		if err := session.server.Load().stop(); err != nil {
			errs = append(errs, fmt.Errorf("session %s: stop gobgp: %w", session.conf.Name, err))
		}
	}
	return errors.Join(errs...)
}

// newSession returns a session with a server that is not started.
func (s *Speaker) newSession(id int, conf *Session) *session {
	x := &session{
		speaker: s, id: id, conf: conf, log: limited(s.deps.Log),
		accepted: make(chan *net.TCPConn, 1), changed: make(chan struct{}), since: time.Now(),
		wanted: wanted{ready: make(chan struct{}, 1)}, bfdKeys: conf.BFDAuth.Keys,
	}
	x.server.Store(newBGPServer(x.log, conf.Name, s.deps.Fatal, s.password))
	return x
}

// listenersOf returns the listeners of the passive sessions among all sessions.
func (s *Speaker) listenersOf(sessions []*session) (out []*listener) {
	byAddr := make(map[listenAddr]*listener)
	for _, x := range sessions {
		if !x.conf.Passive {
			continue
		}
		key := listenKey(x.conf)
		l := byAddr[key]
		if l == nil {
			l = &listener{speaker: s, key: key}
			byAddr[key] = l
			out = append(out, l)
		}
		l.sessions = append(l.sessions, x)
	}
	return out
}

// notify has the owner take the pending events now: in this goroutine, or next on this thread. No lock is held.
func (s *Speaker) notify() {
	if s.deps.Attend == nil || !s.deps.Attend() {
		s.queue.wake()
		runtime.Gosched()
	}
}

// Ready returns a channel with one slot; a value in it means that Take will return events.
func (s *Speaker) Ready() <-chan struct{} { return s.queue.ready }

// Take appends to buf the events since the last call, for every session in the
// order in which they happened, with only the last state of each prefix. Of a
// session with thousands of changed prefixes it takes some hundreds per call
// and then refills the channel of Ready.
func (s *Speaker) Take(buf []Event) []Event { return s.queue.take(buf) }

// Advertise replaces the set of routes that the session announces. nil changes
// nothing; an empty set withdraws all routes. It never blocks and may be called
// at any time. Of sets in quick succession, only the newest is certain to be
// sent.
func (s *Speaker) Advertise(session int, routes []Advertisement) {
	s.AdvertiseMarked(session, routes, 0)
}

// AdvertiseMarked is Advertise with a mark, which is not 0: in every
// generation, a Written event reports that the connection has carried the set.
// Subsequent sets with the same mark are not reported again. A set that is
// replaced before the connection has carried it is not reported.
func (s *Speaker) AdvertiseMarked(session int, routes []Advertisement, mark uint64) {
	s.sessions[session].wanted.set(cloneAdvertisements(routes), mark)
}

// SetAdminState closes a session immediately, for instance because its link is
// down, or lets it connect, also immediately and regardless of pending timers.
// The reason is text for people. It never blocks.
func (s *Speaker) SetAdminState(session int, up bool, reason string) {
	s.sessions[session].setAdmin(up, reason)
}

// Retry makes a session that has no connection connect immediately, regardless
// of pending timers: the cause of its failures may be gone. It never blocks.
func (s *Speaker) Retry(session int) { s.sessions[session].retry() }

// Clear closes an established session with Cease, Administrative Reset (RFC 4486); the session connects again at once.
// The cause, text for people, is the reason of SessionDown. An error means that the session is not established, and has
// the state. It never blocks.
func (s *Speaker) Clear(session int, cause string) error {
	return s.sessions[session].clear(cause)
}

// SetBFDKeys replaces the keys of a session's BFD authentication, whose type stays; the session goes on. An error means
// that a key is not valid for the type, and that nothing was changed.
func (s *Speaker) SetBFDKeys(session int, keys []bfd.Key) error {
	return s.sessions[session].setBFDKeys(keys)
}

// SetLoopbacks replaces the loopbacks of this host. Routes to them that peers
// send back are not reported as Refused. It may be called at any time.
func (s *Speaker) SetLoopbacks(loopbacks []netip.Prefix) {
	list := slices.Clone(loopbacks)
	s.loopbacks.Store(&list)
}

// ownLoopbacks returns the loopbacks of this host.
func (s *Speaker) ownLoopbacks() []netip.Prefix {
	if list := s.loopbacks.Load(); list != nil {
		return *list
	}
	return nil
}

// Status returns a snapshot of a session.
func (s *Speaker) Status(session int) Status {
	x := s.sessions[session]
	received := s.queue.present(session)
	x.mu.Lock()
	defer x.mu.Unlock()
	return Status{
		State: x.state, Since: x.since, Reason: x.reason, Generation: x.gen,
		PeerID: x.info.RouterID, PeerAS: x.info.PeerAS, Remote: x.remote,
		Received: received, Advertised: x.advertised, Flaps: x.flaps, Attempts: x.attempts,
		Untaken: x.current != nil && x.current.isUntaken(),
		BFD:     x.bfdStatusLocked(), Counters: x.countersLocked(),
	}
}

// countersLocked lists the counters that are not zero, in a fixed order. The caller holds mu.
func (x *session) countersLocked() []Counter {
	var list []Counter
	add := func(name string, value uint64) {
		if value != 0 {
			list = append(list, Counter{Name: name, Value: value})
		}
	}
	for _, d := range []guard.Direction{guard.Inbound, guard.Outbound} {
		for _, u := range guard.Units() {
			add(fmt.Sprintf("%s_%s_received", d, u), x.counters.Received(d, u))
			add(fmt.Sprintf("%s_%s_passed", d, u), x.counters.Passed(d, u))
		}
		for _, r := range guard.Reasons() {
			add(fmt.Sprintf("%s_dropped_%s", d, r), x.counters.Dropped(d, r))
		}
	}
	for _, r := range bfd.Drops() {
		add(fmt.Sprintf("bfd_dropped_%s", r), x.bfdCounters.Dropped(r))
	}
	add("speaker_replaced", x.rebuilt)
	add("throttled_reads", x.throttled.Load())
	add("offenses", x.offenses)
	return list
}
