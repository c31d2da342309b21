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

	api "github.com/osrg/gobgp/v3/api"

	"github.com/fared/fared/daemon/internal/guard"
)

// All of GoBGP's queues are unbounded, and every prefix in them takes
// kilobytes. An UPDATE longer than bulk octets is waited for until GoBGP is
// done with it, and only bulkers sessions of a Speaker do so at a time. Of
// shorter ones, those that do not come in bulk, window octets may be inside
// before GoBGP's answer is waited for, at most twice this.
const (
	window  = 4096
	bulk    = 512
	bulkers = 4
)

// incarnation is one TCP connection of a session and what hangs on it: the
// guard, the connection to GoBGP, GoBGP's neighbour, and a watch whose
// callback knows its generation, so that nothing GoBGP says of another
// incarnation can be taken for this one's.
//
//	leaf <--conn--> fromPeer   --guard--> forward --local--> GoBGP
//	                fromSpeaker <-guard----------- local <--/   | watch
//	                queue <--------------------------------- event
type incarnation struct {
	s     *session
	gen   uint64
	addr  netip.Addr // GoBGP's neighbour address, our end of local
	conn  *net.TCPConn
	guard *guard.Guard
	conv  converter

	stop      context.CancelCauseFunc
	over      atomic.Bool // fail was called
	wasUp     atomic.Bool
	pumps     sync.WaitGroup
	peered    bool // GoBGP has the neighbour; fromPeer's, in the end incarnate's
	confirmed bool // the peer's OPEN was answered; fromPeer's
	inside    int  // octets of UPDATEs since the last mark; fromPeer's

	active  chan struct{} // closed when GoBGP waits for the connection
	settled chan struct{} // closed when it is through with the OPENs
	idle    chan struct{} // closed when its connection is gone
	phase   int           // how many of the three are closed; the watch's
	unwatch context.CancelFunc

	sendMu sync.Mutex // guards writes to conn, which are of whole messages

	mu     sync.Mutex // guards what follows
	local  *net.TCPConn
	ended  bool          // no local is to be opened any more
	marks  []bool        // End-of-RIBs inside GoBGP, oldest first; true: ours
	credit chan struct{} // one slot: a mark of ours came out
}

// errReplaced ends an incarnation whose peer has connected anew: it would not,
// had it not lost the former connection (cf. RFC 4724, Section 4.2).
var errReplaced = errors.New("the peer has opened a new connection")

// incarnate carries one incarnation from the OPENs to its end and returns why it
// ended, and whether it was up. It returns when nothing of it is left.
func (s *session) incarnate(parent context.Context, conn *net.TCPConn) (bool, error) {
	ctx, stop := context.WithCancelCause(parent)
	in := &incarnation{
		s: s, conn: conn, stop: stop,
		active: make(chan struct{}), settled: make(chan struct{}), idle: make(chan struct{}),
		credit: make(chan struct{}, 1),
		conv:   converter{carrier: s.speaker.conf.Carrier},
	}
	in.gen = s.begin(in)
	in.addr = netip.AddrFrom4([4]byte{127, 255, 0, byte(1 + in.gen%4)})
	in.guard = guard.New(s.guardConfig(conn))

	watching, unwatch := context.WithCancel(context.WithoutCancel(parent))
	tooSlow := time.AfterFunc(s.speaker.openTimeout, func() {
		if !in.wasUp.Load() {
			// RFC 4271, Section 8.2.2: the hold timer of OpenSent and OpenConfirm.
			stop(&guard.Notification{Code: 4, Detail: fmt.Sprintf("not established within %v", s.speaker.openTimeout)})
		}
	})
	in.pumps.Go(func() { in.fail(in.fromPeer(ctx, watching)) })
	<-ctx.Done()
	tooSlow.Stop()
	in.fail(context.Cause(ctx)) // unless a pump did
	if in.wasUp.Load() {
		// GoBGP withdraws route by route. Whoever acts on the loss goes first: there may be no core to spare.
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
		if err := s.server.deletePeer(in.addr); err != nil {
			s.speaker.queue.fault(Fault{Session: s.index, Reason: err.Error()})
		}
	}
	return in.wasUp.Load(), context.Cause(ctx)
}

// drain waits until GoBGP's goroutines of the last incarnation have ended, of
// which there is word only if it got as far as a connection, and ends its watch.
// That goes on beside the next incarnation; but StopBgp would overwrite what
// they read.
func (s *session) drain() {
	in := s.draining
	if in == nil {
		return
	}
	s.draining = nil
	if in.local != nil { // nobody else has in any more
		timer := time.NewTimer(2 * time.Second)
		defer timer.Stop()
		select {
		case <-in.idle:
		case <-timer.C:
		}
	}
	in.unwatch()
}

// fail ends the incarnation; the first cause counts. The owner learns of it
// here, before anything is torn down. Only the pumps and incarnate call it, all
// others stop, so that nothing of it outlives incarnate.
func (in *incarnation) fail(cause error) {
	if in.over.Swap(true) {
		return
	}
	in.s.speaker.queue.sessionDown(SessionDown{Session: in.s.index, Generation: in.gen, Reason: cause.Error()})
	in.stop(cause)
	in.farewell(cause)
	in.conn.Close()
}

// farewell tells the peer why, as far as there is something to tell.
func (in *incarnation) farewell(cause error) {
	var n *guard.Notification
	var held *heldError
	var silent *bfdError
	switch {
	case errors.As(cause, &n):
		var ours *guard.SpeakerFault
		if errors.As(cause, &ours) {
			n = &guard.Notification{Code: 6}
		}
	case errors.As(cause, &held):
		n = &guard.Notification{Code: 6, Subcode: 2} // RFC 4486: Administrative Shutdown
	case errors.As(cause, &silent):
		n = &guard.Notification{Code: 6, Subcode: 10} // RFC 9384: BFD Down
	case errors.Is(cause, context.Canceled) && in.s.speaker.conf.RestartTime == 0:
		n = &guard.Notification{Code: 6, Subcode: 2}
	case errors.Is(cause, context.Canceled):
		// RFC 4724, Section 4: a NOTIFICATION would make the peer drop what
		// it is to keep while we restart.
	case errors.Is(cause, errReplaced):
		n = &guard.Notification{Code: 6, Subcode: 7} // RFC 4486: Connection Collision Resolution
	}
	if n == nil {
		return
	}
	// Best effort: a peer that does not read is not waited for, nor is a
	// sender that holds sendMu because of it.
	_ = in.conn.SetWriteDeadline(time.Now().Add(patience))
	if in.send(n.AppendTo(nil), patience) != nil || in.conn.CloseWrite() != nil {
		return
	}
	// Closing with octets unread would reset the connection, and what we sent
	// could be lost on the way. The peer closes as soon as it has read it.
	_ = in.conn.SetReadDeadline(time.Now().Add(patience))
	_, _ = io.CopyN(io.Discard, in.conn, 1<<20)
}

// aftermath is how long GoBGP's own clean-up waits after a loss: some times what it takes until the data plane has
// acted on it.
const aftermath = 3 * time.Millisecond

// patience is how long a peer is waited for to take in our last words.
const patience = 50 * time.Millisecond

// closeLocal closes the connection to GoBGP, which loses a goroutine if that
// happens in the middle of the OPENs; both were written at once, so the middle
// does not last.
func (in *incarnation) closeLocal() {
	in.mu.Lock()
	in.ended = true
	local := in.local
	in.mu.Unlock()
	if local == nil {
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

// send writes whole messages to the peer.
func (in *incarnation) send(b []byte, limit time.Duration) error {
	in.sendMu.Lock()
	defer in.sendMu.Unlock()
	if err := in.conn.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	_, err := in.conn.Write(b)
	return err
}

// fromPeer sends our OPEN, then passes on what the peer sends until something
// ends it. It opens GoBGP's side when the peer's OPEN has been accepted.
func (in *incarnation) fromPeer(ctx, watching context.Context) error {
	opening, err := in.guard.FromSpeaker(in.s.openMessage(in.gen), nil)
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
				return bad // GoBGP learns it by its neighbour being deleted
			}
			if !in.peered && len(out) > 0 {
				if err := in.confirm(); err != nil {
					return err
				}
				// With the KEEPALIVE the peer has taken our OPEN: what fails
				// before never reaches GoBGP.
				if length := int(binary.BigEndian.Uint16(out[16:])); len(out) > length {
					if err := in.open(ctx, watching); err != nil {
						return err
					}
					out = withRestart(out)
					in.s.protect(in)
				}
			}
			if in.peered {
				if err := in.forward(ctx, out); err != nil {
					return err
				}
				out = out[:0]
			}
		}
		if err != nil {
			return fmt.Errorf("connection to the peer: %w", plain(err))
		}
	}
}

// confirm answers an acceptable OPEN with KEEPALIVE, once. GoBGP is not asked:
// it only learns of the peer when that has confirmed our OPEN, too.
func (in *incarnation) confirm() error {
	if in.confirmed {
		return nil
	}
	in.confirmed = true
	info, _ := in.guard.Info()
	if info.HoldTime == 0 {
		// RFC 4271, Section 6.2: a hold time may be rejected. Without one a
		// silent peer would never be noticed.
		return &guard.Notification{Code: 2, Subcode: 6, Reason: guard.MessageOpen, Detail: "peer wants no hold timer"}
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

// open makes GoBGP ready for the peer and connects to it.
func (in *incarnation) open(ctx, watching context.Context) error {
	info, _ := in.guard.Info()
	s := in.s.server
	if err := s.watch(watching, in.event); err != nil {
		return fmt.Errorf("watch gobgp: %w", err)
	}
	// End-of-RIB follows what GoBGP has when the peer is there: a leaf that kept our routes while we restarted drops those
	// that have not come by then (RFC 4724, Section 4.2).
	if err := in.s.wanted.wait(ctx); err != nil {
		return err
	}
	if err := s.addPeer(neighbour{
		addr: in.addr, as: info.PeerAS, hold: in.s.speaker.conf.HoldTime,
		keepalive: in.s.speaker.conf.KeepaliveInterval, families: in.s.conf.Families,
	}); err != nil {
		return err
	}
	in.peered = true
	select {
	case <-in.active:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	local, err := in.dialLocal(ctx)
	if err != nil {
		return fmt.Errorf("connect to gobgp: %w", err)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.ended {
		local.Close()
		return context.Cause(ctx)
	}
	in.local = local
	in.pumps.Go(func() { in.fail(in.fromSpeaker()) })
	return nil
}

func (in *incarnation) dialLocal(ctx context.Context) (*net.TCPConn, error) {
	d := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(in.addr, 0)),
		Timeout:   in.s.speaker.openTimeout,
		KeepAlive: -1,
		Control: func(_, _ string, c syscall.RawConn) error {
			if in.s.server.password == "" {
				return nil
			}
			return controlRaw(c, func(fd int) error { return setMD5(fd, loopback, in.s.server.password) })
		},
	}
	d.SetMultipathTCP(false)
	conn, err := d.DialContext(ctx, "tcp4", netip.AddrPortFrom(loopback, in.s.server.port).String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}

// forward writes canonical messages to GoBGP. After a long UPDATE and after
// every window of others it puts in a mark, an End-of-RIB of its own, which
// comes out of the watch when GoBGP is done with all before it, and waits for
// this one or the one before.
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
// until no more marks than inside are inside.
func (in *incarnation) pass(ctx context.Context, messages []byte, inside int) error {
	if _, err := in.local.Write(messages); err != nil {
		return fmt.Errorf("connection to gobgp: %w", plain(err))
	}
	if inside == unmarked {
		return nil
	}
	if _, err := in.local.Write(endOfRIB); err != nil {
		return fmt.Errorf("connection to gobgp: %w", plain(err))
	}
	for in.outstanding() > inside {
		select {
		case <-in.credit:
		case <-ctx.Done():
			return context.Cause(ctx)
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

// unmarked is more marks than are ever inside: nothing is waited for.
const unmarked = 1 << 30

// cut returns how many octets of out to write next, and how many marks may be
// inside when they have been: none after one of the long UPDATEs, one after a
// window of short ones; else no mark follows. It enters the End-of-RIBs among
// them, and the mark, into marks.
func (in *incarnation) cut(out []byte) (n, inside int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for n < len(out) {
		length, kind := int(binary.BigEndian.Uint16(out[n+16:])), out[n+18]
		if kind == 2 && length > bulk {
			if n > 0 {
				return n, unmarked
			}
			in.inside = 0
			in.marks = append(in.marks, true)
			return length, 0
		}
		n += length
		if kind != 2 {
			continue
		}
		if length == len(endOfRIB) {
			in.marks = append(in.marks, false)
		}
		if in.inside += length; in.inside >= window {
			in.inside = 0
			in.marks = append(in.marks, true)
			return n, 1
		}
	}
	return n, unmarked
}

// outstanding is how many marks of ours are inside GoBGP.
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

// cameOut says that GoBGP has reported an IPv4 End-of-RIB, and returns whether
// it was a mark of ours.
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

// fromSpeaker passes on what GoBGP sends, but its OPEN: ours went out before.
func (in *incarnation) fromSpeaker() error {
	var first [guard.MaxMessage]byte
	if msg, err := guard.ReadMessage(in.local, &first); err != nil || msg[18] != 1 {
		return fmt.Errorf("gobgp did not answer with OPEN: %w", plain(err))
	}
	chunk := make([]byte, 16<<10)
	var out []byte
	var said error
	for {
		n, err := in.local.Read(chunk)
		if n > 0 {
			var bad error
			out, bad = in.guard.FromSpeaker(chunk[:n], out[:0])
			if c := closing(out); c != nil {
				said = c
			}
			if len(out) > 0 {
				if err := in.send(out, in.s.speaker.conf.HoldTime); err != nil {
					return fmt.Errorf("connection to the peer: %w", plain(err))
				}
			}
			if bad != nil {
				return bad
			}
		}
		if said != nil {
			return said
		}
		if err != nil {
			return fmt.Errorf("connection to gobgp: %w", plain(err))
		}
	}
}

// spoken is a NOTIFICATION that GoBGP has sent to the peer.
type spoken struct{ code, subcode byte }

func (s *spoken) Error() string {
	if s.code == 4 {
		return "hold timer expired: the peer was silent"
	}
	return fmt.Sprintf("gobgp ended the session with NOTIFICATION %d/%d", s.code, s.subcode)
}

// closing finds a NOTIFICATION among whole messages.
func closing(out []byte) error {
	for len(out) > 0 {
		length := int(binary.BigEndian.Uint16(out[16:]))
		if out[18] == 3 {
			return &spoken{code: out[19], subcode: out[20]}
		}
		out = out[length:]
	}
	return nil
}

// event takes in what GoBGP reports. It is called by the watch's goroutine and
// only converts and enqueues: GoBGP's queue behind it is unbounded.
func (in *incarnation) event(r *api.WatchEventResponse) {
	switch e := r.Event.(type) {
	case *api.WatchEventResponse_Peer:
		p := e.Peer.GetPeer()
		if p.GetState().GetNeighborAddress() == in.addr.String() {
			in.peerEvent(p)
		}
	case *api.WatchEventResponse_Table:
		if in.over.Load() {
			return
		}
		for _, path := range e.Table.GetPaths() {
			in.path(path)
		}
	}
}

func (in *incarnation) peerEvent(p *api.Peer) {
	state := p.GetState().GetSessionState()
	switch {
	case state == api.PeerState_ACTIVE && in.phase == 0:
		in.phase = 1
		close(in.active)
	case (state == api.PeerState_ESTABLISHED || state == api.PeerState_IDLE) && in.phase == 1:
		in.phase = 2
		close(in.settled)
	}
	if state == api.PeerState_IDLE && in.phase == 2 {
		in.phase = 3
		close(in.idle)
	}
	if state != api.PeerState_ESTABLISHED || in.over.Load() {
		return
	}
	in.mu.Lock()
	local := in.local
	in.mu.Unlock()
	// Whoever else on this host got to GoBGP's port first: it was not us.
	if local == nil || uint32(local.LocalAddr().(*net.TCPAddr).Port) != p.GetTransport().GetRemotePort() {
		in.stop(fmt.Errorf("gobgp's connection is from port %d, not ours", p.GetTransport().GetRemotePort()))
		return
	}
	info, _ := in.guard.Info()
	in.wasUp.Store(true)
	in.s.established(in.gen)
	in.s.speaker.queue.sessionUp(SessionUp{
		Session: in.s.index, Generation: in.gen, Node: info.RouterID, PeerAS: info.PeerAS, Families: info.Families,
	})
}

func (in *incarnation) path(p *api.Path) {
	q, session := in.s.speaker.queue, in.s.index
	switch {
	case p.GetNlri() == nil:
		f := IPv4
		if p.GetFamily().GetAfi() == api.Family_AFI_IP6 {
			f = IPv6
		}
		if f == IPv4 && in.cameOut() {
			return
		}
		q.endOfRIB(EndOfRIB{Session: session, Generation: in.gen, Family: f})
	case p.GetIsWithdraw():
		prefix, err := in.conv.prefix(p)
		if err != nil {
			q.fault(Fault{Session: session, Reason: err.Error()})
			return
		}
		q.withdraw(Withdraw{Session: session, Generation: in.gen, Prefix: prefix})
	default:
		prefix, attrs, err := in.conv.route(p)
		if err != nil {
			// Not known what it says: neither the old value nor none is true
			// of it, and nothing must be sent there (cf. RFC 7606, Section 2).
			q.fault(Fault{Session: session, Reason: err.Error()})
			if prefix.IsValid() {
				q.withdraw(Withdraw{Session: session, Generation: in.gen, Prefix: prefix})
			}
			return
		}
		q.route(Route{Session: session, Generation: in.gen, Prefix: prefix, Attrs: attrs})
	}
}

// withRestart adds a graceful restart capability (RFC 4724, Section 3) without
// families to the OPEN that messages begins with, if it has none. GoBGP sends
// End-of-RIB only to a neighbour that announces it; RFC 4724, Section 2 allows
// it towards all.
func withRestart(messages []byte) []byte {
	length := int(binary.BigEndian.Uint16(messages[16:]))
	const version, params = 19, 28 // offsets; parameters follow their length
	if messages[18] != 1 || length < params+3 || messages[params] > 255-4 {
		return messages
	}
	for caps := messages[params+3 : length]; len(caps) >= 2; caps = caps[2+int(caps[1]):] {
		if caps[0] == 64 {
			return messages
		}
	}
	out := append([]byte(nil), messages[:length]...)
	out = append(out, 64, 2, 0, 0)
	binary.BigEndian.PutUint16(out[16:], uint16(length+4))
	out[params] += 4
	out[params+2] += 4
	return append(out, messages[length:]...)
}

// plain leaves out of a network error what the session knows anyway: the same
// loss gives the same text.
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
