package speaker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"

	"github.com/fared/fared/daemon/internal/guard"
)

// GoBGP's goroutines may end or hang: its listener, for instance, ends with the
// first error of accept. The failure of any of them shows on the local hop:
//
//	listener  GoBGP logs it; no OPEN comes from GoBGP
//	server    a call does not return: an established session makes one occasionally
//	watch     the neighbor does not become active
//	receiver  the hold timer expires although the peer has sent messages
//	sender    no KEEPALIVE comes from GoBGP
//
// The goroutine that detects the failure calls bgpServer.fail. The incarnation
// ends with a localFault, and the session replaces its server before the next
// incarnation.

// localPatience is the limit of an answer that GoBGP normally gives in
// milliseconds. A hung GoBGP is rare and costs one session for this long; a
// false alarm costs a working session, and more work for a machine that is
// already busy: the servers of a fabric of 512 sessions start one after
// another.
const localPatience = 20 * time.Second

// localFault ends an attempt because of this host, not of the peer.
type localFault struct{ cause error }

func (e *localFault) Error() string {
	return "fault of this host, not of the peer: " + e.cause.Error() + remedy(e.cause)
}

func (e *localFault) Unwrap() error { return e.cause }

// remedy returns advice for an operator on an error of a system call, or "".
func remedy(err error) string {
	switch {
	case errors.Is(err, syscall.EMFILE):
		return "; raise the limit of open files (LimitNOFILE of the service)"
	case errors.Is(err, syscall.ENFILE):
		return "; raise fs.file-max"
	case errors.Is(err, syscall.ENOBUFS), errors.Is(err, syscall.ENOMEM):
		return "; the kernel has no memory for sockets"
	}
	return ""
}

// blame returns err as a localFault if it shows that this host has run out of a resource.
func blame(err error) error {
	for _, e := range [...]syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM} {
		if errors.Is(err, e) {
			return &localFault{err}
		}
	}
	return err
}

// errListener reports that only GoBGP's listener has ended: an established
// session does not need it.
var errListener = errors.New("gobgp's listener ended")

// fail marks the server as unusable; only the first cause counts.
func (s *bgpServer) fail(cause error) {
	s.failOnce.Do(func() {
		s.cause = cause
		close(s.failed)
	})
}

// failure returns why the server is unusable, or nil.
func (s *bgpServer) failure() error {
	select {
	case <-s.failed:
		return &localFault{s.cause}
	default:
		return nil
	}
}

// call runs one call of GoBGP's API, which waits for GoBGP's server goroutine
// without limit. If a call does not return within the server's patience, call
// fails the server and abandons the calling goroutine.
func (s *bgpServer) call(f func(*server.BgpServer) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stuck {
		return s.failure()
	}
	done := make(chan error, 1)
	go func() { done <- f(s.bgp) }()
	if err, ok := patiently(s.patience, done); ok {
		return err
	}
	s.stuck = true
	s.fail(fmt.Errorf("gobgp did not answer a call within %v", s.patience))
	return s.failure()
}

// probe makes a call that has no effect.
func (s *bgpServer) probe() {
	_ = s.call(func(b *server.BgpServer) error { // a failure is recorded
		_, err := b.GetBgp(context.Background(), &api.GetBgpRequest{})
		return err
	})
}

// premature fails the server, and returns its failure, if it ends the session
// because of a silent peer that was not silent.
func (in *incarnation) premature(end *spoken) error {
	silence := time.Since(time.Unix(0, in.heard.Load()))
	info, _ := in.guard.Info()
	if end.code != guard.CodeHoldTimerExpired || silence >= info.HoldTime {
		return nil
	}
	in.server.fail(fmt.Errorf("gobgp's hold timer of %v expired %v after a message of the peer", info.HoldTime, silence.Round(time.Millisecond)))
	return in.server.failure()
}

// patiently receives from c, or reports false after d. It waits for d in two
// halves: after a suspension of the process, the timer of the first half has
// expired, and the second half gives the sender a full d/2.
func patiently[T any](d time.Duration, c <-chan T) (v T, ok bool) {
	timer := time.NewTimer(d / 2)
	defer timer.Stop()
	for range 2 {
		select {
		case v = <-c:
			return v, true
		case <-timer.C:
			timer.Reset(d / 2)
		}
	}
	return v, false
}

// acceptFailed returns an error with the cause if a log message of GoBGP
// reports the end of its listener, else nil.
func acceptFailed(msg string, fields map[string]any) error {
	if !strings.HasPrefix(msg, "Failed to AcceptTCP") {
		return nil
	}
	cause, _ := fields["Error"].(error)
	return fmt.Errorf("%w: %w", errListener, plain(cause))
}

// abandoned reports whether the server will do nothing more for this
// incarnation.
func (in *incarnation) abandoned() bool {
	err := in.server.failure()
	return err != nil && !(in.served.Load() && errors.Is(err, errListener))
}

// end returns when the incarnation is to end: because of ctx, or because its server has failed.
func (in *incarnation) end(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-in.server.failed:
	}
	if in.abandoned() {
		in.stop(in.server.failure())
	}
	<-ctx.Done()
}

// await waits until c is closed. If the server's patience runs out first, await
// fails the server.
func (in *incarnation) await(ctx context.Context, c <-chan struct{}, what string) error {
	for strikes := 0; ; strikes++ {
		timer := time.NewTimer(in.server.patience / 2)
		select {
		case <-c:
			timer.Stop()
			return nil
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
		if strikes == 1 {
			in.server.fail(fmt.Errorf("gobgp: %s within %v", what, in.server.patience))
			return in.server.failure()
		}
	}
}

// localFault returns the error that ends the incarnation after an error on the
// local hop. It fails the server if that has not even established the
// connection, unless the error is this process's lack of descriptors or memory.
func (in *incarnation) localFault(what string, err error) error {
	if failure := in.server.failure(); failure != nil {
		return failure
	}
	err = fmt.Errorf("%s: %w", what, err)
	var short *localFault
	if !errors.As(blame(err), &short) && !in.served.Load() && !in.over.Load() {
		in.server.fail(err)
	}
	return &localFault{err}
}

// slow ends an incarnation that was not established in time: by the peer, or
// then by GoBGP.
func (in *incarnation) slow() {
	limit := in.s.speaker.openTimeout
	switch {
	case in.served.Load():
	case in.wasUp.Load():
		in.server.fail(fmt.Errorf("gobgp did not establish the session within %v", limit))
	default:
		// RFC 4271, Section 8.2.2: the hold timer of OpenSent and OpenConfirm.
		in.stop(&guard.Notification{Code: guard.CodeHoldTimerExpired, Detail: fmt.Sprintf("not established within %v", limit)})
	}
}

// readLocal reads from GoBGP. Silence for longer than limit plus the server's patience fails the server.
func (in *incarnation) readLocal(b []byte, limit time.Duration) (int, error) {
	for _, d := range [...]time.Duration{limit, in.server.patience} { // the second wait is for a process that was suspended
		if err := in.local.SetReadDeadline(time.Now().Add(d)); err != nil {
			return 0, err
		}
		n, err := in.local.Read(b)
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
	}
	in.server.fail(fmt.Errorf("gobgp has sent nothing for %v", limit+in.server.patience))
	return 0, in.server.failure()
}

// localReader reads from GoBGP with a limit.
type localReader struct {
	in    *incarnation
	limit time.Duration
}

func (r localReader) Read(b []byte) (int, error) { return r.in.readLocal(b, r.limit) }

// repair replaces the session's server if it has failed. It pauses the other
// servers of the process for some milliseconds.
func (s *session) repair() error {
	old := s.server.Load()
	cause := old.failure()
	if cause == nil {
		return nil
	}
	s.drain()
	old.discard()
	c := &s.speaker.conf
	fresh := newBGPServer(s.log, s.conf.Name, s.speaker.deps.Fatal, old.password)
	fresh.patience = old.patience
	err := exclusively([]*bgpServer{fresh}, func() error { return fresh.start(c.AS, c.RouterID) })
	if err != nil {
		fresh.discard()
		return &localFault{err}
	}
	s.server.Store(fresh)
	s.wanted.redo()
	s.mu.Lock()
	s.rebuilt++
	s.mu.Unlock()
	s.log.Warn("gobgp was replaced", "session", s.conf.Name, "reason", cause)
	s.speaker.queue.fault(Fault{Session: s.id, Reason: cause.Error() + "; the session's speaker was replaced"})
	return nil
}

// discard stops a server that may not answer, and waits no longer than its
// patience: a hung server stops if it ever continues.
func (s *bgpServer) discard() {
	s.fail(net.ErrClosed)
	if s.stop() != nil {
		go func() { _ = s.bgp.StopBgp(context.Background(), &api.StopBgpRequest{}) }()
	}
}
