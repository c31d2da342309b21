package speaker

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
)

// incarnation is one TCP connection of a session with the objects that belong
// to it: the guard, the connection to GoBGP, GoBGP's neighbor, and a watch
// whose callback knows its generation, so that an event of another incarnation
// is never attributed to this one.
//
//	leaf --conn--> fromPeer --guard--> queue
//	               fromPeer --KEEPALIVE, ROUTE-REFRESH--> local --> GoBGP
//	leaf <--conn-- fromSpeaker <--guard------------------ local <--   | watch
//	               active, settled, idle <---------------------- event
type incarnation struct {
	s      *session
	gen    uint64
	addr   netip.Addr // address of GoBGP's neighbor, our end of local
	conn   *net.TCPConn
	guard  *guard.Guard
	server *bgpServer

	stop    context.CancelCauseFunc
	done    <-chan struct{} // closed by stop
	over    atomic.Bool     // set by fail
	wasUp   atomic.Bool     // both ends have confirmed
	served  atomic.Bool     // GoBGP has established its side
	tooSlow *time.Timer
	pumps   sync.WaitGroup
	peered  bool   // GoBGP has the neighbor; used by serve, and by incarnate after the pumps have ended
	opening []byte // the peer's OPEN for GoBGP; used by fromPeer until it starts serve

	budget    budget    // used only by fromPeer
	costed    uint64    // the session's cost when the budget was last charged; used only by fromPeer
	refreshed time.Time // when ROUTE-REFRESH could last pass; used only by fromPeer
	burst     time.Time // start of the burst whose changes wait in the queue; zero if none does; used only by fromPeer

	active  chan struct{} // closed when GoBGP waits for the connection
	settled chan struct{} // closed when GoBGP has processed the OPENs
	idle    chan struct{} // closed when GoBGP's connection is gone
	phase   int           // number of closed channels among the three above; used only by the watch
	unwatch context.CancelFunc

	heard   atomic.Int64 // when the peer's octets last arrived, Unix nanoseconds
	beating atomic.Bool  // beat is running
	writing atomic.Int64 // start of the current write to the peer, Unix nanoseconds; 0 if none
	sendMu  sync.Mutex   // serializes writes of whole messages to conn
	sent    atomic.Int64 // octets written to conn
	unacked atomic.Int64 // start of a mark's wait for the peer's acknowledgement, Unix nanoseconds; 0 if no mark waits
	acking  atomic.Int64 // number of waiting marks

	mu    sync.Mutex // guards the fields below
	local *net.TCPConn
	beat  *time.Timer // sends GoBGP a KEEPALIVE; nil before there is a connection to it
	ended bool        // no further local connection may be opened
}

// errReplaced ends an incarnation that is not established and whose peer has
// sent an OPEN on another connection: it does so only after losing the first one.
var errReplaced = errors.New("the peer has opened a new connection")

// incarnate runs one incarnation from the OPENs to its end. It returns whether
// the incarnation was established and why it ended. All its goroutines have
// ended then, except GoBGP's, for which drain waits.
func (s *session) incarnate(parent context.Context, conn *net.TCPConn) (bool, error) {
	ctx, stop := context.WithCancelCause(parent)
	in := &incarnation{
		s: s, conn: conn, stop: stop, done: ctx.Done(), server: s.server.Load(),
		active: make(chan struct{}), settled: make(chan struct{}), idle: make(chan struct{}),
		budget: s.speaker.budget, costed: s.cost(), refreshed: time.Now(),
	}
	in.gen = s.begin(in)
	in.addr = localAddr(s.localAddr)
	s.localAddr = in.addr
	in.guard = guard.New(s.guardConfig(conn))

	watching, unwatch := context.WithCancel(context.WithoutCancel(parent))
	in.tooSlow = time.AfterFunc(s.speaker.openTimeout, in.slow)
	in.pumps.Go(func() { in.fail(in.fromPeer(ctx, watching)) })
	in.end(ctx)
	in.fail(context.Cause(ctx)) // no effect if a pump called it
	in.closeLocal()
	in.pumps.Wait()
	in.tooSlow.Stop()
	if in.wasUp.Load() {
		s.unprotect(parent.Err() != nil && s.speaker.conf.RestartTime > 0)
	}
	s.drain()
	s.draining, in.unwatch = in, unwatch
	if in.peered {
		if err := in.server.deletePeer(in.addr); err != nil {
			s.speaker.queue.fault(Fault{Session: s.id, Reason: err.Error()})
		}
	}
	return in.wasUp.Load(), context.Cause(ctx)
}

// drain waits for GoBGP's goroutines of the previous incarnation to exit (GoBGP
// reports this only if a connection was made) and cancels its watch. Teardown
// may overlap the next incarnation, but StopBgp must not run before it is done:
// it overwrites globals that these goroutines read.
func (s *session) drain() {
	in := s.draining
	if in == nil {
		return
	}
	s.draining = nil
	if in.local != nil && !in.abandoned() { // no other goroutine holds a reference to in
		timer := time.NewTimer(2 * time.Second)
		defer timer.Stop()
		select {
		case <-in.idle:
		case <-timer.C:
		}
	}
	in.unwatch()
}

// fail ends the incarnation; only the first cause counts. It notifies the owner
// before any teardown. Only the pumps and incarnate call it, other goroutines
// call stop, so that no part of fail outlives incarnate.
func (in *incarnation) fail(cause error) {
	if in.over.Swap(true) {
		return
	}
	closed := errors.Is(cause, errClosed) || errors.Is(cause, syscall.ECONNRESET) || errors.Is(cause, syscall.EPIPE)
	if in.s.speaker.queue.sessionDown(SessionDown{Session: in.s.id, Generation: in.gen, Reason: cause.Error(), Closed: closed}) {
		in.s.speaker.notify() // the weights before the teardown, which closes sockets for a tenth of a millisecond
	}
	in.stop(cause)
	in.farewell(cause)
	in.conn.Close()
}

// closeLocal closes the connection to GoBGP. A close during the OPEN exchange
// would leak a goroutine of GoBGP, so closeLocal waits until the exchange has
// ended, for at most one second.
func (in *incarnation) closeLocal() {
	in.mu.Lock()
	in.ended = true
	local := in.local
	in.mu.Unlock()
	if local == nil {
		return
	}
	in.beat.Stop()
	if in.abandoned() {
		local.Close()
		return
	}
	in.awaitSettled()
	local.Close()
}

// awaitSettled waits until GoBGP's OPEN exchange has ended, for at most one second.
func (in *incarnation) awaitSettled() {
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-in.settled:
	case <-timer.C:
	}
}

// send writes whole messages to the peer within limit.
func (in *incarnation) send(b []byte, limit time.Duration) error {
	in.sendMu.Lock()
	defer in.sendMu.Unlock()
	if err := in.conn.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	in.writing.Store(time.Now().UnixNano())
	defer in.writing.Store(0)
	n, err := in.conn.Write(b)
	in.sent.Add(int64(n))
	return err
}

// fromPeer sends our OPEN, then processes the peer's messages until an error:
// changes of routes go to the owner's queue, GoBGP receives the rest.
func (in *incarnation) fromPeer(ctx, watching context.Context) error {
	opening, err := in.guard.FromSpeaker(in.s.openMessage(), nil)
	if err != nil {
		return err
	}
	if err := in.send(opening, in.s.speaker.openTimeout); err != nil {
		return in.s.refused(fmt.Errorf("send OPEN: %w", plain(err)))
	}
	chunk := make([]byte, 16<<10)
	var out []byte
	for {
		n, err := in.conn.Read(chunk)
		if n > 0 {
			now := time.Now()
			in.heard.Store(now.UnixNano())
			var bad error
			if out, bad = in.guard.FromPeer(chunk[:n], out[:0]); bad != nil {
				return bad // GoBGP notices when its neighbor is deleted
			}
			if !in.wasUp.Load() {
				if err := in.confirm(ctx, watching, &out); err != nil {
					return err
				}
			}
			in.deliver(now)
			if now.Sub(in.refreshed) > refreshPause && !in.isUnread() {
				out, in.refreshed = in.guard.Refresh(out), now
			}
			if err := in.forward(out); err != nil {
				return err
			}
			if err := in.spend(ctx, now, n); err != nil {
				return err
			}
			in.awaitOwner(ctx)
			if n == len(chunk) {
				// More octets are probably there already, so that the next read would not wait either. The runtime
				// would interrupt this goroutine only after 10 ms, and the goroutines of other sessions, the owner and
				// the data plane's client need the processor in turn.
				runtime.Gosched()
			}
		}
		if err != nil {
			err = fmt.Errorf("connection to the peer: %w", plain(err))
			if in.opening == nil {
				err = in.s.refused(err)
			}
			return err
		}
	}
}

// A burst is a sequence of changes of routes with at least burstSize of them in
// one read. The owner is not notified before the peer pauses for burstPause, or
// the burst lasts for burstLimit: weights that many routes change alike cost the
// data plane least if it receives them at once.
const (
	burstSize  = 64
	burstPause = 500 * time.Microsecond
	burstLimit = 20 * time.Millisecond
)

// deliver puts the changes of the last read into the queue.
func (in *incarnation) deliver(now time.Time) {
	changes := in.guard.TakeChanges()
	if routes, changed := in.guard.TakeRefused(); changed { // before an End-of-RIB of the same read
		in.s.speaker.queue.refused(Refused{Session: in.s.id, Generation: in.gen, Routes: routes})
	}
	if in.burst.IsZero() && len(changes) >= burstSize {
		in.burst = now
	}
	if len(changes) > 0 {
		if in.s.speaker.queue.change(in.s.id, in.gen, changes) && in.burst.IsZero() {
			in.s.speaker.notify() // before this reader tries to read more
		}
	}
	if !in.burst.IsZero() && (now.Sub(in.burst) >= burstLimit || !readable(in.conn, burstPause)) {
		in.release()
	}
}

// ownerPatience is the longest wait of a reader for the owner between two reads. It is far below the hold time, which
// restarts with each read.
const ownerPatience = 50 * time.Millisecond

// awaitOwner waits while the owner has not taken many earlier changes of this session.
func (in *incarnation) awaitOwner(ctx context.Context) {
	if q := in.s.speaker.queue; q.full(in.s.id) {
		in.release() // the owner takes what it knows of
		q.await(ctx, in.s.id, ownerPatience)
	}
}

// release notifies the owner of the changes of a burst.
func (in *incarnation) release() {
	if !in.burst.IsZero() {
		in.burst = time.Time{}
		if in.s.speaker.queue.change(in.s.id, in.gen, nil) {
			in.s.speaker.queue.wake()
		}
	}
}

// confirm answers an acceptable OPEN, the first of messages, with KEEPALIVE.
// Once the peer has confirmed ours, too, the session is established, and GoBGP
// receives the peer: failures before that never reach GoBGP.
func (in *incarnation) confirm(ctx, watching context.Context, messages *[]byte) error {
	if in.opening == nil {
		if len(*messages) == 0 {
			return nil
		}
		info, _ := in.guard.Info()
		if info.HoldTime == 0 {
			// RFC 4271, Section 6.2: a hold time may be rejected. Without a hold
			// time a silent peer would never be detected.
			return &guard.Notification{Code: guard.CodeOpenMessageError, Subcode: guard.OpenUnacceptableHoldTime, Reason: guard.MessageOpen, Detail: "peer proposes no hold timer"}
		}
		in.s.opened(info)
		b, err := in.guard.FromSpeaker(keepalive, nil)
		if err != nil {
			return err
		}
		if err := in.send(b, in.s.speaker.openTimeout); err != nil {
			return fmt.Errorf("send KEEPALIVE: %w", plain(err))
		}
		length := int(binary.BigEndian.Uint16((*messages)[16:]))
		in.opening = withRestart((*messages)[:length])
		*messages = (*messages)[length:]
	}
	if !in.guard.Established() {
		return nil
	}
	info, _ := in.guard.Info()
	in.wasUp.Store(true)
	in.tooSlow.Reset(in.s.speaker.openTimeout) // from now on the delay is GoBGP's
	in.s.established(in.gen)
	silent := in.s.wanted.silence()
	in.s.speaker.queue.sessionUp(SessionUp{
		Session: in.s.id, Generation: in.gen, Node: info.RouterID, PeerAS: info.PeerAS, Families: info.Families,
	}, silent)
	in.pumps.Go(func() { in.fail(in.serve(ctx, watching, info, silent)) })
	if info.RouteRefresh {
		in.pumps.Go(func() { in.reread(ctx, info.Families) })
	}
	in.s.protect(addrPort(in.conn.LocalAddr()).Addr(), addrPort(in.conn.RemoteAddr()).Addr(), true)
	return nil
}

// reread requests the peer's routes a second time (RFC 2918), once, rereadAfter to twice as long after the session came
// up. FRR leaves out a route on some sessions if many come up at once, as when a hung bgpd continues, and sends it with
// the next full table (docs/operations/leaves.md). Routes that have not changed cost a comparison. The delay is random,
// so that the answers of many leaves do not coincide.
func (in *incarnation) reread(ctx context.Context, families guard.FamilySet) {
	timer := time.NewTimer(in.s.speaker.rereadAfter + rand.N(in.s.speaker.rereadAfter))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return
	case <-timer.C:
	}
	if err := in.send(guard.RequestRoutes(nil, families), in.s.speaker.conf.HoldTime); err != nil {
		in.stop(fmt.Errorf("connection to the peer: %w", plain(err)))
	}
}

// serve adds the peer to GoBGP, connects to GoBGP, and forwards its messages to
// the peer until an error. silent is the mark that was reported with SessionUp.
func (in *incarnation) serve(ctx, watching context.Context, info guard.Info, silent uint64) error {
	s := in.server
	if err := s.watch(watching, in.event); err != nil {
		return fmt.Errorf("watch gobgp: %w", err)
	}
	// GoBGP sends End-of-RIB behind the routes that it holds when the neighbor is added: a leaf that kept our routes
	// during a restart drops those that have not arrived by then (RFC 4724, Section 4.2).
	mark, err := in.s.wanted.wait(ctx)
	if err != nil {
		return err
	}
	if mark != 0 && mark != silent {
		in.s.speaker.queue.written(Written{Session: in.s.id, Generation: in.gen, Mark: mark})
	}
	if err := s.addPeer(neighbor{
		addr: in.addr, as: info.PeerAS, hold: in.s.speaker.conf.HoldTime,
		keepalive: in.s.speaker.conf.KeepaliveInterval, families: in.s.conf.Families,
	}); err != nil {
		return err
	}
	in.peered = true
	if err := in.await(ctx, in.active, "its neighbor did not become active"); err != nil {
		return err
	}
	local, err := in.dialLocal(ctx)
	if err != nil {
		return in.localFault("connect to gobgp", err)
	}
	// Before the connection is known, the watch takes none for ours.
	in.mu.Lock()
	in.local = local
	if in.ended { // closeLocal has not seen the connection
		in.mu.Unlock()
		defer local.Close()
		if _, err := local.Write(append(in.opening, keepalive...)); err == nil && !in.abandoned() {
			in.awaitSettled()
		}
		return context.Cause(ctx)
	}
	in.beat = time.AfterFunc(time.Hour, func() {
		in.beating.Store(false)
		_, _ = local.Write(keepalive) // the reader notices the end of the connection
	})
	in.beat.Stop()
	in.mu.Unlock()
	if _, err := local.Write(append(in.opening, keepalive...)); err != nil {
		return in.localFault("connection to gobgp", plain(err))
	}
	return in.fromSpeaker(ctx)
}

// lateDial is the time that a connection to GoBGP has when the incarnation ends meanwhile. Without it a connection that
// is just being made would be given up here, while GoBGP accepts it and starts goroutines, for which drain has to wait.
const lateDial = time.Second

func (in *incarnation) dialLocal(parent context.Context) (*net.TCPConn, error) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(parent))
	defer cancel(nil)
	stop := context.AfterFunc(parent, func() { time.AfterFunc(lateDial, func() { cancel(context.Cause(parent)) }) })
	defer stop()
	d := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(in.addr, 0)),
		Timeout:   in.s.speaker.openTimeout,
		KeepAlive: -1,
		Control: func(_, _ string, c syscall.RawConn) error {
			return controlRaw(c, func(fd int) error { return setMD5(fd, loopback, in.server.password) })
		},
	}
	d.SetMultipathTCP(false)
	conn, err := d.DialContext(ctx, "tcp4", netip.AddrPortFrom(loopback, in.server.port).String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// forward writes messages to GoBGP, and makes it notice that the peer is alive:
// GoBGP's hold timer, which is the session's, must restart with every message of
// the peer (RFC 4271, Section 8.2.2). One KEEPALIVE stands for all messages of
// an interval, and follows them after that interval.
func (in *incarnation) forward(messages []byte) error {
	in.mu.Lock()
	local, beat := in.local, in.beat
	in.mu.Unlock()
	if beat == nil { // no connection yet, or the incarnation ended while it was being made
		return nil // GoBGP sends all routes to a new neighbor, which no ROUTE-REFRESH needs to request
	}
	if !in.beating.Swap(true) {
		info, _ := in.guard.Info()
		beat.Reset(info.HoldTime / beats)
	}
	if len(messages) == 0 {
		return nil
	}
	if _, err := local.Write(messages); err != nil {
		return in.localFault("connection to gobgp", plain(err))
	}
	return nil
}

// beats is the greatest number of KEEPALIVEs that GoBGP receives in a hold time.
const beats = 30

// keepalive is the whole message (RFC 4271, Section 4.4).
var keepalive = append(bytes.Repeat([]byte{0xff}, 16), 0, guard.HeaderLen, guard.TypeKeepalive)

// fromSpeaker forwards GoBGP's messages to the peer, except its OPEN: ours went out before.
func (in *incarnation) fromSpeaker(ctx context.Context) error {
	probed := time.Now()
	var first [guard.MaxMessage]byte
	if msg, err := guard.ReadMessage(localReader{in, in.server.patience}, &first); err != nil || msg[18] != guard.TypeOpen {
		return in.localFault("gobgp did not answer with OPEN", plain(err))
	}
	limit := in.s.speaker.conf.HoldTime // GoBGP sends KEEPALIVEs at shorter intervals
	chunk := make([]byte, 16<<10)
	var out []byte
	var last error
	var marked uint32
	for {
		n, err := in.readLocal(chunk, limit)
		if n > 0 {
			if now := time.Now(); now.Sub(probed) > in.server.patience {
				probed = now
				in.pumps.Go(in.server.probe)
			}
			var bad error
			out, bad = in.guard.FromSpeaker(chunk[:n], out[:0])
			if c := closing(out); c != nil {
				if err := in.premature(c); err != nil {
					return err
				}
				last = c
			}
			if len(out) > 0 {
				if err := in.send(out, in.s.speaker.conf.HoldTime); err != nil {
					return fmt.Errorf("connection to the peer: %w", plain(err))
				}
			}
			if number := in.guard.Marked(); number != marked {
				marked = number
				sent := in.sent.Load()
				in.pumps.Go(func() { in.awaitTaken(ctx, sent, number) })
			}
			if bad != nil {
				return bad
			}
		}
		if last != nil {
			return last
		}
		if err != nil {
			return in.localFault("connection to gobgp", plain(err))
		}
	}
}

// awaitTaken reports a mark once the peer's TCP has acknowledged the first sent octets: after a write has returned, the
// octets may still be in this host's buffer. The kernel sends no notification of that, so awaitTaken polls, first after
// a millisecond, because a nearby leaf acknowledges sooner.
func (in *incarnation) awaitTaken(ctx context.Context, sent int64, number uint32) {
	in.unacked.CompareAndSwap(0, time.Now().UnixNano())
	in.acking.Add(1)
	defer func() {
		if in.acking.Add(-1) == 0 {
			in.unacked.Store(0)
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for pause := time.Millisecond; ; pause = min(2*pause, unread) {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		written := in.sent.Load() // read first: a write in between only makes the result smaller
		queued, err := sendQueue(in.conn)
		if err != nil {
			in.stop(fmt.Errorf("connection to the peer: %w", plain(err)))
			return
		}
		if written-int64(queued) >= sent {
			in.s.written(in.gen, number)
			return
		}
		timer.Reset(pause)
	}
}

// errClosed replaces io.EOF.
var errClosed = errors.New("closed by the other end")

// plain strips the addresses from a network error: the session knows them, and
// equal failures give equal texts.
func plain(err error) error {
	var op *net.OpError
	switch {
	case err == nil:
		return errors.New("unexpected message")
	case errors.Is(err, io.EOF):
		return errClosed
	case errors.As(err, &op):
		return op.Err
	}
	return err
}
