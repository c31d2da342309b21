package speaker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/fared/fared/daemon/internal/bfd"
	"github.com/fared/fared/daemon/internal/guard"
)

// Speaker runs all BGP sessions of one server or leaf.
type Speaker struct {
	conf      Config
	deps      Deps
	queue     *queue
	sessions  []*session
	listeners []*listener

	responder   *bfd.Responder
	openTimeout time.Duration // of the exchange of OPENs
	bulk        chan struct{} // as many slots as sessions may pass long UPDATEs at once
}

// New starts a BgpServer for every session; none has a neighbour and nothing
// is connected before Run. It may be called while other Speakers of the process
// run: they stand still meanwhile, for some milliseconds a session.
//
// Run must be called to release what New has started, if need be with a context
// that is already over.
func New(conf Config, deps Deps) (*Speaker, error) {
	if err := conf.validate(deps); err != nil {
		return nil, err
	}
	s := &Speaker{conf: conf.withDefaults(), deps: deps, queue: newQueue(len(conf.Sessions)), openTimeout: openTimeout,
		responder: bfd.NewResponder(inNetns),
		bulk:      make(chan struct{}, bulkers)}
	password := localPassword()
	if password == "" {
		deps.Log.Warn("the connections to gobgp on the loopback have no TCP MD5 signatures; " +
			"start with GODEBUG=multipathtcp=0 on a kernel with CONFIG_TCP_MD5SIG to have them")
	}
	byAddr := make(map[listenAddr]*listener)
	servers := make([]*bgpServer, 0, len(s.conf.Sessions))
	for i := range s.conf.Sessions {
		session := &session{
			speaker: s, index: i, conf: &s.conf.Sessions[i], log: deps.Log,
			accepted: make(chan *net.TCPConn, 1), changed: make(chan struct{}), since: time.Now(),
			wanted: wanted{knock: make(chan struct{}, 1)},
		}
		session.server = newBGPServer(&logger{log: deps.Log, session: session.conf.Name, fatal: deps.Fatal}, password)
		servers = append(servers, session.server)
		s.sessions = append(s.sessions, session)
		if session.conf.Passive {
			key := listenKey(session.conf)
			l := byAddr[key]
			if l == nil {
				l = &listener{speaker: s, key: key}
				byAddr[key] = l
				s.listeners = append(s.listeners, l)
			}
			l.sessions = append(l.sessions, session)
		}
	}
	err := exclusively(servers, func() error {
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

// Run connects all sessions and keeps them until ctx ends, then closes them
// and waits for everything that it has started. It is called once.
//
// With Config.RestartTime the peers are left to find the connections closed,
// so that they keep our routes; without, they are sent Cease.
func (s *Speaker) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, l := range s.listeners {
		wg.Go(func() { l.run(ctx) })
	}
	for _, session := range s.sessions {
		wg.Go(func() { session.run(ctx) })
		wg.Go(func() { session.advertise(ctx) })
	}
	if s.conf.Reread > 0 {
		wg.Go(func() { s.reread(ctx) })
	}
	wg.Wait()
	var errs []error
	for _, session := range s.sessions {
		if err := session.server.stop(); err != nil {
			errs = append(errs, fmt.Errorf("session %s: stop gobgp: %w", session.conf.Name, err))
		}
	}
	return errors.Join(errs...)
}

// Knock has one slot; something in it means that Take will return something.
func (s *Speaker) Knock() <-chan struct{} { return s.queue.knock }

// Take appends to buf all events since the last call, for every session in the
// order in which they happened, with only the last state of each prefix.
func (s *Speaker) Take(buf []Event) []Event { return s.queue.take(buf) }

// Advertise makes routes the whole set that the session announces. nil changes
// nothing; an empty set withdraws all. It never blocks and may be called at any
// time; of sets that follow each other fast, only the newest need go out.
func (s *Speaker) Advertise(session int, routes []Advertisement) {
	s.sessions[session].wanted.set(cloneAdvertisements(routes))
}

// SetAdminState takes a session down at once, for instance because its link is,
// or lets it connect, also at once, without any timer of before. The reason is
// for people. It never blocks.
func (s *Speaker) SetAdminState(session int, up bool, reason string) {
	s.sessions[session].setAdmin(up, reason)
}

// Status returns a picture of a session.
func (s *Speaker) Status(session int) Status {
	x := s.sessions[session]
	received := s.queue.present(session)
	x.mu.Lock()
	defer x.mu.Unlock()
	return Status{
		Name: x.conf.Name, State: x.state, Since: x.since, Reason: x.reason, Generation: x.gen,
		PeerID: x.info.RouterID, PeerAS: x.info.PeerAS, Local: x.local, Remote: x.remote,
		Received: received, Advertised: x.advertised, Flaps: x.flaps, Attempts: x.attempts,
		BFD: x.bfdStatusLocked(), Counters: x.countersLocked(),
	}
}

// countersLocked lists what is not zero, in a fixed order. The caller holds mu.
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
	add("reread_differences", x.differed)
	return list
}
