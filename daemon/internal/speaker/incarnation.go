package speaker

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/fared/fared/daemon/internal/guard"
)

// All of GoBGP's queues are unbounded, and every queued prefix takes kilobytes.
// After an UPDATE longer than bulk octets, the speaker waits until GoBGP has
// processed it, and at most bulkers sessions of a Speaker pass such UPDATEs at
// a time. Shorter UPDATEs pass without waiting until window octets are in
// GoBGP, at most twice this.
const (
	window  = 4096
	bulk    = 512
	bulkers = 4
)

// incarnation is one TCP connection of a session with the objects that belong
// to it: the guard, the connection to GoBGP, GoBGP's neighbor, and a watch
// whose callback knows its generation, so that an event of another incarnation
// is never attributed to this one.
//
//	leaf <--conn--> fromPeer   --guard--> forward --local--> GoBGP
//	                fromSpeaker <-guard----------- local <--/   | watch
//	                queue <--------------------------------- event
type incarnation struct {
	s      *session
	gen    uint64
	addr   netip.Addr // address of GoBGP's neighbor, our end of local
	conn   *net.TCPConn
	guard  *guard.Guard
	server *bgpServer
	conv   converter

	stop      context.CancelCauseFunc
	over      atomic.Bool // set by fail
	wasUp     atomic.Bool
	handed    atomic.Bool // both ends have confirmed; GoBGP is responsible for the rest
	pumps     sync.WaitGroup
	peered    bool      // GoBGP has the neighbor; used by fromPeer, and by incarnate after fromPeer has returned
	confirmed bool      // the peer's OPEN was answered; used only by fromPeer
	inside    int       // octets of UPDATEs since the last mark; used only by fromPeer
	marked    time.Time // time of the last mark; used only by fromPeer

	budget    budget    // used only by fromPeer
	costed    uint64    // the session's cost when the budget was last charged; used only by fromPeer
	refreshed time.Time // when ROUTE-REFRESH could last pass; used only by fromPeer

	active  chan struct{} // closed when GoBGP waits for the connection
	settled chan struct{} // closed when GoBGP has processed the OPENs
	idle    chan struct{} // closed when GoBGP's connection is gone
	phase   int           // number of closed channels among the three above; used only by the watch
	unwatch context.CancelFunc

	writing atomic.Int64 // start of the current write to the peer, Unix nanoseconds; 0 if none
	sendMu  sync.Mutex   // serializes writes of whole messages to conn
	sent    atomic.Int64 // octets written to conn
	unacked atomic.Int64 // start of a mark's wait for the peer's acknowledgement, Unix nanoseconds; 0 if no mark waits
	acking  atomic.Int64 // number of waiting marks

	mu     sync.Mutex // guards the fields below
	local  *net.TCPConn
	silent uint64        // mark of GoBGP's set at the time its neighbor was added, if that set was empty; else 0
	ended  bool          // no further local connection may be opened
	marks  []bool        // End-of-RIBs inside GoBGP, oldest first; true for the speaker's marks
	credit chan struct{} // one slot, filled when the watch reports one of the speaker's marks
}

// errReplaced ends an incarnation whose peer has opened another connection: it
// does so only after losing the first one (cf. RFC 4724, Section 4.2).
var errReplaced = errors.New("the peer has opened a new connection")

// incarnate runs one incarnation from the OPENs to its end. It returns whether
// the incarnation was established and why it ended. All its goroutines have
// ended then, except GoBGP's, for which drain waits.
func (s *session) incarnate(parent context.Context, conn *net.TCPConn) (bool, error) {
	ctx, stop := context.WithCancelCause(parent)
	in := &incarnation{
		s: s, conn: conn, stop: stop, server: s.server.Load(),
		active: make(chan struct{}), settled: make(chan struct{}), idle: make(chan struct{}),
		credit: make(chan struct{}, 1),
		conv:   converter{carrier: s.speaker.conf.Carrier},
		budget: s.speaker.budget, costed: s.cost(), refreshed: time.Now(),
	}
	in.gen = s.begin(in)
	in.addr = netip.AddrFrom4([4]byte{127, 255, 0, byte(1 + in.gen%4)})
	in.guard = guard.New(s.guardConfig(conn))

	watching, unwatch := context.WithCancel(context.WithoutCancel(parent))
	tooSlow := time.AfterFunc(s.speaker.openTimeout, in.slow)
	in.pumps.Go(func() { in.fail(in.fromPeer(ctx, watching)) })
	in.end(ctx)
	tooSlow.Stop()
	in.fail(context.Cause(ctx)) // no effect if a pump called it
	if in.wasUp.Load() {
		// GoBGP withdraws route by route. Reactions to the failure go first, because there may be no spare core.
		timer := time.NewTimer(aftermath)
		select {
		case <-timer.C:
		case <-parent.Done():
			timer.Stop()
		}
	}
	in.closeLocal()
	in.pumps.Wait()
	s.unprotect(parent.Err() != nil && s.speaker.conf.RestartTime > 0)
	s.drain()
	s.draining, in.unwatch = in, unwatch
	if in.peered {
		if err := in.server.deletePeer(in.addr); err != nil {
			s.speaker.queue.fault(Fault{Session: s.index, Reason: err.Error()})
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
	in.s.speaker.queue.sessionDown(SessionDown{Session: in.s.index, Generation: in.gen, Reason: cause.Error()})
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
	if in.abandoned() {
		local.Close()
		return
	}
	timer := time.NewTimer(time.Second)
	defer timer.Stop()
	select {
	case <-in.settled:
	case <-timer.C:
	}
	local.Close()
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

// fromPeer sends our OPEN, then forwards the peer's messages until an error. It
// adds GoBGP's neighbor once the peer has confirmed.
func (in *incarnation) fromPeer(ctx, watching context.Context) error {
	opening, err := in.guard.FromSpeaker(in.s.openMessage(), nil)
	if err != nil {
		return err
	}
	if err := in.send(opening, in.s.speaker.openTimeout); err != nil {
		return fmt.Errorf("send OPEN: %w", plain(err))
	}
	chunk := make([]byte, 16<<10)
	var out []byte
	for {
		n, err := in.conn.Read(chunk)
		if n > 0 {
			var bad error
			if out, bad = in.guard.FromPeer(chunk[:n], out); bad != nil {
				return bad // GoBGP notices when its neighbor is deleted
			}
			if !in.peered && len(out) > 0 {
				if err := in.confirm(); err != nil {
					return err
				}
				// The peer's KEEPALIVE confirms our OPEN: earlier failures
				// never reach GoBGP.
				if length := int(binary.BigEndian.Uint16(out[16:])); len(out) > length {
					if err := in.open(ctx, watching); err != nil {
						return err
					}
					out = withRestart(out)
					in.s.protect(in)
				}
			}
			if in.peered {
				if time.Since(in.refreshed) > refreshPause && !in.isUnread() {
					out, in.refreshed = in.guard.Refresh(out), time.Now()
				}
				if err := in.forward(ctx, out); err != nil {
					return err
				}
				out = out[:0]
			}
			if err := in.spend(ctx, n); err != nil {
				return err
			}
		}
		if err != nil {
			return fmt.Errorf("connection to the peer: %w", plain(err))
		}
	}
}

// confirm answers an acceptable OPEN with KEEPALIVE, once. GoBGP is not
// involved: it receives the peer only after the peer has confirmed our OPEN,
// too.
func (in *incarnation) confirm() error {
	if in.confirmed {
		return nil
	}
	in.confirmed = true
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
	return nil
}

// open adds the peer to GoBGP and connects to GoBGP.
func (in *incarnation) open(ctx, watching context.Context) error {
	in.handed.Store(true)
	info, _ := in.guard.Info()
	s := in.server
	if err := s.watch(watching, in.event); err != nil {
		return fmt.Errorf("watch gobgp: %w", err)
	}
	// GoBGP sends End-of-RIB behind the routes that it holds when the neighbor is added: a leaf that kept our routes during a restart drops
	// those that have not arrived by then (RFC 4724, Section 4.2).
	silent, err := in.s.wanted.wait(ctx)
	if err != nil {
		return err
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
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.ended {
		local.Close()
		return context.Cause(ctx)
	}
	in.local, in.silent, in.marked = local, silent, time.Now()
	in.pumps.Go(func() { in.fail(in.fromSpeaker(ctx)) })
	return nil
}

func (in *incarnation) dialLocal(ctx context.Context) (*net.TCPConn, error) {
	d := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(in.addr, 0)),
		Timeout:   in.s.speaker.openTimeout,
		KeepAlive: -1,
		Control: func(_, _ string, c syscall.RawConn) error {
			if in.server.password == "" {
				return nil
			}
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

// forward writes canonical messages to GoBGP. After a long UPDATE and after
// every window of short ones it inserts a mark, an additional End-of-RIB. The
// watch reports the mark when GoBGP has processed all messages before it;
// forward waits for this mark or the previous one.
func (in *incarnation) forward(ctx context.Context, out []byte) error {
	for len(out) > 0 {
		n, inside := in.cut(out)
		if inside == 0 {
			select {
			case in.s.speaker.bulk <- struct{}{}:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		err := in.pass(ctx, out[:n], inside)
		if inside == 0 {
			<-in.s.speaker.bulk
		}
		if err != nil {
			return err
		}
		out = out[n:]
	}
	return nil
}

// pass writes messages to GoBGP, then a mark if cut has entered one, and waits
// until at most inside marks are outstanding.
func (in *incarnation) pass(ctx context.Context, messages []byte, inside int) error {
	if _, err := in.local.Write(messages); err != nil {
		return in.localFault("connection to gobgp", plain(err))
	}
	if inside == unmarked {
		return nil
	}
	if _, err := in.local.Write(endOfRIB); err != nil {
		return in.localFault("connection to gobgp", plain(err))
	}
	for in.outstanding() > inside {
		if err := in.await(ctx, in.credit, "it did not pass the sent messages on"); err != nil {
			return err
		}
	}
	return nil
}

// endOfRIB is an End-of-RIB of IPv4 unicast (RFC 4724, Section 2).
var endOfRIB = []byte{
	0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
	0, 23, 2, 0, 0, 0, 0,
}

// keepalive is the whole message (RFC 4271, Section 4.4).
var keepalive = append(append([]byte(nil), endOfRIB[:16]...), 0, 19, 4)

// unmarked exceeds the number of outstanding marks at any time: pass does not wait.
const unmarked = 1 << 30

// cut returns the number of octets of out to write next, and the number of
// marks that may be outstanding afterwards: none after a long UPDATE, one after
// a window of short ones, and unmarked if no mark follows. It records the
// End-of-RIBs among these octets, and the mark, in marks.
func (in *incarnation) cut(out []byte) (n, inside int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for n < len(out) {
		length, kind := int(binary.BigEndian.Uint16(out[n+16:])), out[n+18]
		if kind == guard.TypeUpdate && length > bulk {
			if n > 0 {
				return n, unmarked
			}
			in.enterMark()
			return length, 0
		}
		n += length
		if kind != 2 && time.Since(in.marked) > in.server.patience {
			// An idle session: check that GoBGP still processes messages.
			in.enterMark()
			return n, 1
		}
		if kind != 2 {
			continue
		}
		if length == len(endOfRIB) {
			in.marks = append(in.marks, false)
		}
		if in.inside += length; in.inside >= window {
			in.enterMark()
			return n, 1
		}
	}
	return n, unmarked
}

// enterMark records that a mark is written next. The caller holds mu.
func (in *incarnation) enterMark() {
	in.inside, in.marked = 0, time.Now()
	in.marks = append(in.marks, true)
}

// outstanding returns the number of the speaker's marks inside GoBGP.
func (in *incarnation) outstanding() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	count := 0
	for _, ours := range in.marks {
		if ours {
			count++
		}
	}
	return count
}

// cameOut records that GoBGP has reported an IPv4 End-of-RIB, and returns
// whether it was one of the speaker's marks.
func (in *incarnation) cameOut() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(in.marks) == 0 {
		return false
	}
	ours := in.marks[0]
	in.marks = append(in.marks[:0], in.marks[1:]...)
	if ours {
		select {
		case in.credit <- struct{}{}:
		default:
		}
	}
	return ours
}

// fromSpeaker forwards GoBGP's messages to the peer, except its OPEN: ours went out before.
func (in *incarnation) fromSpeaker(ctx context.Context) error {
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
			var bad error
			out, bad = in.guard.FromSpeaker(chunk[:n], out[:0])
			if c := closing(out); c != nil {
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

// awaitTaken reports a mark once the peer's TCP has acknowledged the first sent octets: after a write has returned, the octets may still be in
// this host's buffer. The kernel sends no notification of that, so awaitTaken polls, first after a millisecond, because a nearby leaf
// acknowledges sooner.
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

// plain strips the addresses from a network error: the session knows them, and
// equal failures give equal texts.
func plain(err error) error {
	var op *net.OpError
	switch {
	case err == nil:
		return errors.New("unexpected message")
	case errors.Is(err, io.EOF):
		return errors.New("closed by the other end")
	case errors.As(err, &op):
		return op.Err
	}
	return err
}
