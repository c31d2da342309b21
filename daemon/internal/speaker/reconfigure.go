package speaker

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"

	"github.com/fared/fared/daemon/internal/bfd"
)

// Check returns an error if Reconfigure cannot apply the sessions.
func (s *Speaker) Check(sessions []Session) error {
	conf := s.conf
	conf.Sessions = sessions
	if err := conf.validate(s.deps); err != nil {
		return err
	}
	return conf.checkAO()
}

// Reconfigure replaces the sessions by others, which Check has accepted. at has, for each of them, the index of the
// session before that continues, or -1. Such a session stays as it is, or starts over with its next generation if its
// password or key is another one. New sessions, and those that start over, are held until SetAdminState. The peers of
// removed sessions receive Cease, Administrative Shutdown. Only the owner, which calls all other methods, may call it.
//
// The GoBGP servers of new sessions are started in the background: that pauses all others for some milliseconds each.
func (s *Speaker) Reconfigure(sessions []Session, at []int) {
	conf := s.conf
	conf.Sessions = sessions
	conf = conf.withDefaults()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return
	}
	var fresh []*session
	kept := make([]bool, len(s.sessions))
	all := make([]*session, len(conf.Sessions))
	for i := range all {
		x, next := (*session)(nil), &conf.Sessions[i]
		if at[i] >= 0 {
			x = s.sessions[at[i]]
		}
		if x != nil && sameSession(x.conf, next) {
			all[i], kept[at[i]] = x, true
			s.queue.own(x.id, i)
			continue
		}
		id := 0
		if x != nil {
			id = x.id
		} else {
			id = s.queue.add()
		}
		all[i] = s.newSession(id, next)
		all[i].held, all[i].succeeds = &heldError{reason: "starting"}, x
		s.queue.own(id, i)
		fresh = append(fresh, all[i])
	}
	var removed []*session
	for i, x := range s.sessions {
		if !kept[i] {
			if !slices.ContainsFunc(fresh, func(o *session) bool { return o.succeeds == x }) {
				s.queue.own(x.id, -1)
			}
			removed = append(removed, x)
		}
	}
	s.sessions = all
	for _, x := range fresh {
		for _, o := range removed {
			if o == x.succeeds || o.conf.Device == x.conf.Device && o.conf.Netns == x.conf.Netns && o.conf.Peer == x.conf.Peer {
				x.before = append(x.before, o)
			}
		}
	}
	s.replaceListeners()
	for _, x := range removed {
		x.remove()
	}
	for _, x := range fresh {
		if s.ctx != nil {
			s.launch(x)
		}
	}
}

// sameSession reports whether two sessions differ in nothing that their goroutines read. The keys of BFD are replaced
// by SetBFDKeys.
func sameSession(a, b *Session) bool {
	x, y := *a, *b
	x.Deciding, y.Deciding = nil, nil
	x.BFDAuth, y.BFDAuth = bfd.Auth{Type: x.BFDAuth.Type}, bfd.Auth{Type: y.BFDAuth.Type}
	return reflect.DeepEqual(x, y)
}

// replaceListeners ends the listeners whose sessions have changed, and starts others. The caller holds mu.
func (s *Speaker) replaceListeners() {
	before := s.listeners
	s.listeners = s.listenersOf(s.sessions)
	for i, l := range s.listeners {
		at := slices.IndexFunc(before, func(o *listener) bool { return o.key == l.key })
		switch {
		case at < 0:
		case slices.Equal(before[at].sessions, l.sessions):
			s.listeners[i] = before[at]
			continue
		default:
			l.before = before[at]
		}
		if s.ctx != nil {
			s.launchListener(l)
		}
	}
	for _, l := range before {
		if !slices.Contains(s.listeners, l) && l.end != nil {
			l.end()
		}
	}
}

// launchListener starts a listener. The caller holds mu.
func (s *Speaker) launchListener(l *listener) {
	ctx, cancel := context.WithCancel(s.ctx)
	l.end, l.done = cancel, make(chan struct{})
	s.active.Go(func() {
		defer close(l.done)
		defer cancel()
		if l.before != nil && l.before.done != nil {
			<-l.before.done
			l.before = nil
		}
		l.run(ctx)
	})
}

// launch starts a session. The caller holds mu.
func (s *Speaker) launch(x *session) {
	ctx, cancel := context.WithCancel(s.ctx)
	x.end, x.done = cancel, make(chan struct{})
	s.active.Go(func() {
		defer close(x.done)
		defer cancel()
		x.follow()
		var advertising sync.WaitGroup
		advertising.Go(func() { x.advertise(ctx) })
		x.run(ctx)
		advertising.Wait()
		if x.removed.Load() { // Run stops the servers of all others
			if err := x.server.Load().stop(); err != nil {
				s.deps.Log.Warn("gobgp of a removed session not stopped", "session", x.conf.Name, "error", err)
			}
		}
	})
}

// follow waits for the end of the sessions that this one replaces, and starts its server. A server that does not start
// is replaced like one that has failed.
func (x *session) follow() {
	for _, o := range x.before {
		if o.done != nil {
			<-o.done
		}
	}
	x.before = nil
	if o := x.succeeds; o != nil {
		o.mu.Lock()
		gen := o.gen
		o.mu.Unlock()
		x.mu.Lock()
		x.gen = gen
		x.mu.Unlock()
		x.succeeds = nil
	}
	server := x.server.Load()
	if server.port != 0 { // started by New
		return
	}
	c := &x.speaker.conf
	err := exclusively([]*bgpServer{server}, func() error { return server.start(c.AS, c.RouterID) })
	if err != nil {
		server.fail(fmt.Errorf("session %s: %w", x.conf.Name, err))
	}
}

// remove ends a session that no longer is in the configuration.
func (x *session) remove() {
	x.removed.Store(true)
	x.setAdmin(false, "removed by a reload")
	if x.end != nil {
		x.end()
		return
	}
	if err := x.server.Load().stop(); err != nil { // before Run
		x.log.Warn("gobgp of a removed session not stopped", "session", x.conf.Name, "error", err)
	}
}
