package speaker

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fared/fared/daemon/internal/guard"
	"github.com/fared/fared/fare"
)

// lineCounter counts log lines.
type lineCounter struct {
	slog.Handler
	lines *atomic.Int64
}

func (c lineCounter) Handle(ctx context.Context, r slog.Record) error {
	c.lines.Add(1)
	return c.Handler.Handle(ctx, r)
}

func (c lineCounter) WithAttrs(a []slog.Attr) slog.Handler {
	return lineCounter{c.Handler.WithAttrs(a), c.lines}
}
func (c lineCounter) WithGroup(n string) slog.Handler {
	return lineCounter{c.Handler.WithGroup(n), c.lines}
}

func heapObjects() uint64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// bomb returns an UPDATE of one prefix with a message full of attributes: a path, extended communities, and large
// communities.
func bomb(hop netip.Addr, n int) []byte {
	path := []byte{2, guard.MaxASPath}
	for i := range guard.MaxASPath {
		path = binary.BigEndian.AppendUint32(path, uint32(65100+min(i, 1)*(1000+n+i)))
	}
	attrs := append([]byte{0x40, 1, 1, 0, 0x50, 2}, byte(len(path)>>8), byte(len(path)))
	attrs = append(append(attrs, path...), 0x40, 3, 4)
	attrs = append(attrs, hop.AsSlice()...)
	attrs = append(attrs, 0xd0, 16, byte(guard.MaxCommunities*8>>8), byte(guard.MaxCommunities*8&0xff))
	for i := range guard.MaxCommunities {
		attrs = binary.BigEndian.AppendUint32(append(attrs, 0, 4, byte(i), byte(n)), uint32(0x51000000+n*64+i))
	}
	large := 12 * 240
	attrs = append(attrs, 0xd0, 32, byte(large>>8), byte(large&0xff))
	for i := range large / 4 {
		attrs = binary.BigEndian.AppendUint32(attrs, uint32(n*1000+i))
	}
	body := binary.BigEndian.AppendUint16([]byte{0, 0}, uint16(len(attrs)))
	body = append(append(body, attrs...), 32)
	return message(2, append(body, prefix(n).Addr().AsSlice()...)...)
}

// boundPerPrefix is the permitted memory of a prefix, whatever its attributes.
const boundPerPrefix = 4 << 10

// stream returns the i-th message of a flood from an address.
type stream func(at netip.Addr, i int) []byte

// attack is a flood.
type attack struct {
	name     string
	stream   stream
	reads    bool
	messages uint64 // number of messages after which leaked memory would exceed the bound
	routes   int    // number of routes that remain
}

func attacks() []attack {
	repeat := func(b []byte) stream { return func(netip.Addr, int) []byte { return b } }
	return []attack{
		{"route refresh", repeat(message(5, 0, 1, 0, 1)), true, 150_000, 0},
		{"route refresh, nothing read", repeat(message(5, 0, 1, 0, 1)), false, 150_000, 0},
		{"end-of-rib", repeat(endOfRIB), true, 150_000, 0},
		{"keepalive", repeat(keepalive), true, 150_000, 0},
		{"distinct bandwidths", func(at netip.Addr, i int) []byte {
			c := fare.Community{0, 4, 0, 1}
			binary.BigEndian.PutUint32(c[4:], uint32(0x51000000+i))
			return rawUpdate(65100, at, c, prefix(i%8000))
		}, true, 16_000, 8000},
		{"attribute bombs", func(at netip.Addr, i int) []byte { return bomb(at, i%4000) }, true, 4000, 4000},
		{"withdrawals of the unknown", repeat(message(2, slices.Concat([]byte{15, 160}, slices.Repeat([]byte{32, 10, 9, 9, 9}, 800), []byte{0, 0})...)), true, 300, 0},
	}
}

// TestFloods checks that a leaf that sends without end costs the other sessions little: memory is bounded, few lines
// are logged, and another leaf's changes arrive while the flood goes on.
func TestFloods(t *testing.T) {
	for _, a := range attacks() {
		t.Run(a.name, func(t *testing.T) { flood(t, a) })
	}
}

// attacker is the leaf that floods on its first connections.
type attacker struct {
	*rawPeer
	notified chan []byte // code and subcode of each NOTIFICATION
}

func newAttacker(t *testing.T, at netip.Addr, a attack, connections int64) *attacker {
	x := &attacker{notified: make(chan []byte, connections)}
	var floods atomic.Int64
	x.rawPeer = newRawPeer(t, at, func(_ int, conn *net.TCPConn) {
		if floods.Load() >= connections {
			_, _ = io.Copy(io.Discard, conn)
			return
		}
		if shake(conn, rawOpen(65100, 90, leafID)) != nil {
			return // a slow session gave up the attempt after the kernel had accepted it
		}
		floods.Add(1)
		over := make(chan struct{})
		go func() {
			defer close(over)
			var buf [guard.MaxMessage]byte
			for a.reads {
				msg, err := guard.ReadMessage(conn, &buf)
				if err != nil {
					return
				}
				if msg[18] == 3 {
					x.notified <- slices.Clone(msg[19:21])
				}
			}
		}()
		var batch []byte
		for i := 0; ; {
			for batch = batch[:0]; len(batch) < 32<<10; i++ {
				batch = append(batch, a.stream(at, i)...)
			}
			if _, err := conn.Write(batch); err != nil {
				break
			}
		}
		<-over
	})
	return x
}

func flood(t *testing.T, a attack) {
	at := hosts(2)
	bad := newAttacker(t, at[0], a, 1)
	goodConn := make(chan *net.TCPConn, 1)
	good := newRawPeer(t, at[1], func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 90, netip.MustParseAddr("10.255.1.2"))) == nil {
			goodConn <- conn
			keep(conn)
		}
	})
	c := rawConfig(t, bad.rawPeer, good)
	c.MaxPrefixes, c.HoldTime = 16384, 10*deadline // the flood lasts until the test ends it
	deps := testDeps(t)
	lines := new(atomic.Int64)
	deps.Log = slog.New(lineCounter{deps.Log.Handler(), lines})
	s, err := New(c, deps)
	if err != nil {
		t.Fatal(err)
	}
	s.budget.capacity = 1 << 40
	s.SetAdminState(0, false, "first the good leaf")
	r := start(t, s)
	var set []Advertisement
	for i := range 1000 {
		set = append(set, Advertisement{Prefix: prefix(1<<16 + i)})
	}
	r.Advertise(0, set)
	r.until("the good leaf is up", func() bool { return r.state(1).up })
	conn := <-goodConn
	runtime.GC()
	before, began := heapObjects(), time.Now()
	r.SetAdminState(0, true, "")

	// The good leaf changes a route again and again, each time once the previous change has been taken and further
	// messages of the flood have been received.
	var peak uint64
	const changes = 20
	for n := range changes {
		wanted := fare.Community{0, 4, 0, 2, 0x51, 0, 0, byte(n)}
		received := counter(r, 0, "in_messages_received")
		flooded := func() bool {
			peak = max(peak, heapObjects())
			return counter(r, 0, "in_messages_received") >= max(received+1, a.messages*uint64(n)/changes)
		}
		r.until("messages of the flood", func() bool {
			r.events = r.events[:0]
			return flooded()
		})
		if _, err := conn.Write(rawUpdate(65100, at[1], wanted, prefix(1<<20))); err != nil {
			t.Fatal(err)
		}
		r.until("a change of the other leaf", func() bool {
			peak = max(peak, heapObjects())
			taken := slices.ContainsFunc(r.events, func(e Event) bool {
				routes, ok := e.(Routes)
				return ok && routes.Session == 1 && routes.Changes[0].Attrs.Communities[0] == wanted
			})
			r.events = r.events[:0]
			return taken
		})
	}
	r.until("the end of the flood", func() bool {
		peak = max(peak, heapObjects())
		r.events = r.events[:0]
		return counter(r, 0, "in_messages_received") >= a.messages
	})
	logged, elapsed := lines.Load(), time.Since(began) // in this order, because the flood continues
	grown := int64(peak-min(peak, before)) >> 20
	t.Logf("%v, %d messages: heap +%d MiB, %d log lines", elapsed.Round(time.Millisecond), counter(r, 0, "in_messages_received"), grown, logged)
	// Twice the bound of docs/operations/leaves.md, because of uncollected garbage.
	if limit := int64(2 * (8<<20 + a.routes*boundPerPrefix) >> 20); grown > limit {
		t.Errorf("the heap grew by %d MiB, want at most %d", grown, limit)
	}
	if limit := int64(2*logBurst + logRate*elapsed.Seconds()); logged > limit {
		t.Errorf("%d log lines, want at most %d", logged, limit)
	}
	for i := range 2 {
		if r.Status(i).Flaps != 0 {
			t.Errorf("session %d was lost", i)
		}
	}
}

// TestFloodsEnd checks that the session of a leaf that floods ends with Cease, Out of Resources, each time, and that
// another session stays up.
func TestFloodsEnd(t *testing.T) {
	all := attacks()
	at := hosts(len(all) + 1)
	var attackers []*attacker
	var peers []*rawPeer
	const cuts = 2
	for i, a := range all {
		x := newAttacker(t, at[i], a, cuts)
		attackers, peers = append(attackers, x), append(peers, x.rawPeer)
	}
	good := newRawPeer(t, at[len(all)], func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 90, netip.MustParseAddr("10.255.1.2"))) == nil {
			keep(conn)
		}
	})
	c := rawConfig(t, append(peers, good)...)
	c.MaxPrefixes, c.HoldTime = 16384, 10*deadline
	s := create(t, c)
	s.budget = budget{capacity: 1 << 20, rate: 1, patience: -1} // the first overdraft is an offense, however fast this machine is
	r := start(t, s)
	for i, a := range all {
		r.until("offenses", func() bool { return counter(r, i, "offenses") >= cuts })
		for n := range cuts {
			if !a.reads {
				break
			}
			if got := <-attackers[i].notified; !slices.Equal(got, []byte{6, 8}) {
				t.Errorf("%s: connection %d ended with NOTIFICATION %v, want 6/8 (RFC 4486, Out of Resources)", a.name, n, got)
			}
		}
	}
	r.until("the good leaf is up", func() bool { return r.state(len(all)).up })
	if r.Status(len(all)).Flaps != 0 {
		t.Error("the other session was lost")
	}
}

// TestThrottled checks that a leaf that exceeds its budget is read at the budget's rate for the patience, and that its
// session ends then, not before. A slow machine only makes it end later.
func TestThrottled(t *testing.T) {
	bad := newAttacker(t, hosts(1)[0], attack{stream: func(netip.Addr, int) []byte { return keepalive }, reads: true}, 1)
	s := create(t, rawConfig(t, bad.rawPeer))
	s.budget = budget{capacity: 64 << 10, rate: 256 << 10, patience: 300 * time.Millisecond} // some 2,000 messages per second, which a slow machine exceeds, too
	began := time.Now()
	r := start(t, s)
	r.until("an offense", func() bool { return counter(r, 0, "offenses") == 1 })
	if took := time.Since(began); took < s.budget.patience {
		t.Errorf("the session ended after %v, want at least the patience of %v", took, s.budget.patience)
	}
	if got := <-bad.notified; !slices.Equal(got, []byte{6, 8}) {
		t.Errorf("NOTIFICATION %v, want 6/8 (RFC 4486, Out of Resources)", got)
	}
	if counter(r, 0, "throttled_reads") == 0 {
		t.Error("no read was throttled")
	}
}

// TestUnreadPeer keeps a session with a leaf that does not read. Route changes wait for it, only the newest set; a
// second leaf that reads receives all of them meanwhile.
func TestUnreadPeer(t *testing.T) {
	at := hosts(2)
	reads := make(chan struct{})
	last := make(chan uint32, 1)
	bad := newRawPeer(t, at[0], func(_ int, conn *net.TCPConn) {
		_ = conn.SetReadBuffer(32 << 10)
		if shake(conn, rawOpen(65100, 600, leafID)) != nil {
			return
		}
		<-reads
		_ = conn.SetReadBuffer(4 << 20)
		var buf [guard.MaxMessage]byte
		for {
			msg, err := guard.ReadMessage(conn, &buf)
			if err != nil {
				return
			}
			if route := []byte{32, 10, 0, 0, 1}; msg[18] == 2 && bytes.HasSuffix(msg, route) {
				// The second number of the path, after ORIGIN and the header of AS_PATH.
				select {
				case <-last:
				default:
				}
				last <- binary.BigEndian.Uint32(msg[19+4+4+3+2+4:])
			}
		}
	})
	good := newRawPeer(t, at[1], func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 600, netip.MustParseAddr("10.255.1.2"))) == nil {
			_, _ = io.Copy(io.Discard, conn)
		}
	})
	c := rawConfig(t, bad, good)
	c.HoldTime = 600 * time.Second // the race detector makes the sets slow
	r := start(t, create(t, c))
	r.until("both are up", func() bool { return r.state(0).up && r.state(1).up })
	serial := uint32(0)
	change := func() {
		serial++
		var set []Advertisement
		for i := range 500 { // some 150 kB
			path := slices.Repeat([]uint32{1 << 20}, 60)
			path[0], path[1] = 1<<24+serial, uint32(i+1)
			set = append(set, Advertisement{Prefix: prefix(i), ASPath: path})
		}
		r.Advertise(0, set)
		r.Advertise(1, set)
	}
	s := r.sessions[0]
	s.mu.Lock()
	in := s.current
	s.mu.Unlock()
	if err := in.conn.SetWriteBuffer(32 << 10); err != nil {
		t.Fatal(err)
	}
	done := func(i int) uint64 {
		w := &r.sessions[i].wanted
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.done
	}
	r.until("the leaf's window is full", func() bool {
		if r.Status(1).Advertised > 0 && done(1) == uint64(serial) || serial == 0 {
			change()
		}
		return in.isUnread() && windowClosed(t, in.conn) && !writable(t, in.conn)
	})
	stood, mark := done(0), done(1)
	r.until("the other leaf has three more sets", func() bool {
		if done(1) == uint64(serial) {
			change()
		}
		return done(1) >= mark+3
	})
	if got := done(0); got > stood+1 {
		t.Errorf("%d sets were put behind what the leaf does not read, want at most the one under way", got-stood)
	}
	close(reads)
	r.until("the leaf that reads again has the newest set", func() bool {
		select {
		case got := <-last:
			return got == 1<<24+serial
		default:
			return false
		}
	})
	if r.state(0).downs != 0 {
		t.Error("the session was lost")
	}
}

// windowClosed reports whether the kernel has probed the closed window of a connection's peer since the window was last
// open. Where the window closed while octets were in flight, Linux retransmits them without counting; it doubles the
// timeout, in µs: from 200 ms on loopback to more than 1 s.
func windowClosed(t *testing.T, conn *net.TCPConn) bool {
	t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	if err := controlRaw(raw, func(fd int) (err error) {
		info, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return info.Backoff > 0 || info.Rto > 1e6
}

// writable reports whether the kernel would buffer more octets of a connection.
func writable(t *testing.T, conn *net.TCPConn) bool {
	t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	polled := []unix.PollFd{{Events: unix.POLLOUT}}
	if err := controlRaw(raw, func(fd int) error { polled[0].Fd = int32(fd); _, err := unix.Poll(polled, 0); return err }); err != nil && !errors.Is(err, unix.EINTR) {
		t.Fatal(err)
	}
	return polled[0].Revents != 0
}

// TestPausesGrow checks the pause after each offense, on the wire and in the reason.
func TestPausesGrow(t *testing.T) {
	at := hosts(1)[0]
	opened, offended, offend := make(chan time.Time, 16), make(chan time.Time, 16), make(chan struct{})
	p := newRawPeer(t, at, func(n int, conn *net.TCPConn) {
		if n > 3 {
			_, _ = io.Copy(io.Discard, conn)
			return
		}
		opened <- time.Now()
		if shake(conn, rawOpen(65100, 90, leafID)) == nil {
			<-offend
			offended <- time.Now() // the pause has not begun
			_, _ = conn.Write(message(77))
			_, _ = io.Copy(io.Discard, conn)
		}
	})
	c := rawConfig(t, p)
	c.ConnectRetry = 200 * time.Millisecond // a session that lasts for 6.4 s would begin with the first pause again
	r := start(t, create(t, c))
	<-opened
	for i, pause := range []time.Duration{200, 400, 800} {
		pause *= time.Millisecond
		r.until("up", func() bool { return r.state(0).ups == i+1 })
		offend <- struct{}{}
		began := <-offended
		if gap := (<-opened).Sub(began); gap < pause {
			t.Errorf("offense %d: connected again after %v, want a pause of %v", i, gap, pause)
		}
	}
	r.until("up", func() bool { return r.state(0).ups == 4 })
	offend <- struct{}{}
	r.until("four offenses", func() bool { return counter(r, 0, "offenses") == 4 })
	if want := "; next attempt after 1.6s"; !strings.HasSuffix(r.Status(0).Reason, want) {
		t.Errorf("reason %q, want %q in it", r.Status(0).Reason, want)
	}
}

// TestBudget compares the budget with values computed by hand.
func TestBudget(t *testing.T) {
	at := time.Unix(1000, 0)
	b := budget{capacity: 1000, rate: 100, patience: 10 * time.Second}
	for i, c := range []struct {
		after time.Duration
		cost  uint64
		wait  time.Duration
		over  bool
	}{
		{0, 1000, 0, false},                        // a burst of the whole capacity
		{0, 50, 500 * time.Millisecond, false},     // 50 too many at 100 a second
		{500 * time.Millisecond, 0, 0, false},      // no debt left
		{10 * time.Second, 1000, 0, false},         // full again at 10.5 s
		{time.Second, 300, 2 * time.Second, false}, // overdrawn since 11.5 s
		{2 * time.Second, 100, time.Second, false}, // 13.5 s
		{4 * time.Second, 500, 2 * time.Second, false},
		{4 * time.Second, 300, time.Second, false}, // 21.5 s: exactly its patience
		{time.Second, 100, time.Second, true},      // longer than its patience
		{7 * time.Second, 700, time.Second, false}, // more than half the capacity was left, which ends the overdraft
		{time.Hour, 2000, 10 * time.Second, false}, // never more than its capacity
		{9 * time.Second, 0, time.Second, false},
		{1100 * time.Millisecond, 0, 0, false}, // no debt and no offense
	} {
		at = at.Add(c.after)
		if wait, over := b.spend(at, c.cost); wait.Round(time.Millisecond) != c.wait || over != c.over {
			t.Errorf("step %d: wait %v, over %v; want %v, %v", i, wait, over, c.wait, c.over)
		}
	}
}

// TestLogLimit counts lines.
func TestLogLimit(t *testing.T) {
	var l logLimit
	at := time.Unix(1000, 0)
	passed := 0
	for range 1000 {
		if ok, _ := l.allow(at); ok {
			passed++
		}
	}
	if passed != 100 {
		t.Errorf("%d of 1000 lines at once, want 100", passed)
	}
	ok, suppressed := l.allow(at.Add(500 * time.Millisecond))
	if !ok || suppressed != 900 {
		t.Errorf("after half a second: %v, %d suppressed; want one line that names 900", ok, suppressed)
	}
	if ok, _ := l.allow(at.Add(600 * time.Millisecond)); ok {
		t.Error("a third line within a second")
	}
	lines := new(atomic.Int64)
	log := limited(slog.New(lineCounter{slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug}), lines}))
	for range 300 {
		log.With("x", 1).WithGroup("g").Info("peer's doing")
		log.Error("broken")
		log.Debug("asked for")
	}
	if n := lines.Load(); n < 700 || n > 710 {
		t.Errorf("%d lines, want 100 of 300 that a peer causes, and 600 others", n)
	}
}
