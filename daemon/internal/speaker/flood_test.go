package speaker

import (
	"bytes"
	"context"
	"encoding/binary"
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

// bomb returns an UPDATE of one prefix with a message full of attributes: a path, extended communities, and large communities.
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

// TestFloods checks that a leaf that sends without end costs the other sessions little: memory is bounded, few lines are logged, another leaf's
// changes arrive, and the session ends with Cease, Out of Resources, and growing pauses.
func TestFloods(t *testing.T) {
	type stream func(at netip.Addr, i int) []byte // the i-th message
	repeat := func(b []byte) stream { return func(netip.Addr, int) []byte { return b } }
	for _, attack := range []struct {
		name   string
		stream stream
		reads  bool
		routes int // number of routes that remain
	}{
		{"route refresh", repeat(message(5, 0, 1, 0, 1)), true, 0},
		{"route refresh, nothing read", repeat(message(5, 0, 1, 0, 1)), false, 0},
		{"end-of-rib", repeat(endOfRIB), true, 0},
		{"keepalive", repeat(keepalive), true, 0},
		{"distinct bandwidths", func(at netip.Addr, i int) []byte {
			c := fare.Community{0, 4, 0, 1}
			binary.BigEndian.PutUint32(c[4:], uint32(0x51000000+i))
			return rawUpdate(65100, at, c, prefix(i%8000))
		}, true, 8000},
		{"attribute bombs", func(at netip.Addr, i int) []byte { return bomb(at, i%4000) }, true, 4000},
		{"withdrawals of the unknown", repeat(message(2, slices.Concat([]byte{15, 160}, slices.Repeat([]byte{32, 10, 9, 9, 9}, 800), []byte{0, 0})...)), true, 0},
	} {
		t.Run(attack.name, func(t *testing.T) { flood(t, attack.stream, attack.reads, attack.routes) })
	}
}

// attacker is the leaf that floods.
type attacker struct {
	*rawPeer
	notified chan []byte    // code and subcode of each NOTIFICATION
	opened   chan time.Time // start of each connection
	closed   chan time.Time // end of each connection
}

func newAttacker(t *testing.T, at netip.Addr, stream func(netip.Addr, int) []byte, reads bool) *attacker {
	a := &attacker{notified: make(chan []byte, 8), opened: make(chan time.Time, 8), closed: make(chan time.Time, 8)}
	var floods atomic.Int64
	a.rawPeer = newRawPeer(t, at, func(_ int, conn *net.TCPConn) {
		if floods.Load() >= 3 {
			_, _ = io.Copy(io.Discard, conn)
			return
		}
		opened := time.Now()
		if shake(conn, rawOpen(65100, 90, leafID)) != nil {
			return // a slow session gave up the attempt after the kernel had accepted it
		}
		floods.Add(1)
		a.opened <- opened
		defer func() { a.closed <- time.Now() }()
		over := make(chan struct{})
		go func() {
			defer close(over)
			var buf [guard.MaxMessage]byte
			for reads {
				msg, err := guard.ReadMessage(conn, &buf)
				if err != nil {
					return
				}
				if msg[18] == 3 {
					a.notified <- slices.Clone(msg[19:21])
				}
			}
		}()
		var batch []byte
		for i := 0; ; {
			for batch = batch[:0]; len(batch) < 32<<10; i++ {
				batch = append(batch, stream(at, i)...)
			}
			if _, err := conn.Write(batch); err != nil {
				break
			}
		}
		<-over
	})
	return a
}

func flood(t *testing.T, stream func(netip.Addr, int) []byte, reads bool, routes int) {
	at := hosts(2)
	bad := newAttacker(t, at[0], stream, reads)
	goodConn := make(chan *net.TCPConn, 1)
	good := newRawPeer(t, at[1], func(_ int, conn *net.TCPConn) {
		if shake(conn, rawOpen(65100, 90, netip.MustParseAddr("10.255.1.2"))) == nil {
			goodConn <- conn
			keep(conn)
		}
	})
	c := rawConfig(t, bad.rawPeer, good)
	c.MaxPrefixes, c.ConnectRetry = 16384, 200*time.Millisecond
	deps := testDeps(t)
	lines := new(atomic.Int64)
	deps.Log = slog.New(lineCounter{deps.Log.Handler(), lines})
	s, err := New(c, deps)
	if err != nil {
		t.Fatal(err)
	}
	s.budget = budget{capacity: 4 << 20, rate: 2 << 20, patience: time.Second} // a slow machine exceeds this rate, too
	if routes == 0 {
		s.budget.capacity = 32 << 20 // some 270,000 messages at full speed
	} else {
		s.budget.rate /= 32 // under the race detector GoBGP processes routes more slowly than a session's rate
	}
	s.SetAdminState(0, false, "the good leaf first")
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

	// The good leaf changes a route every 5 ms, once the previous change has been taken, until the bad leaf was cut off three times.
	var peak uint64
	var took []time.Duration
	var wrote time.Time
	wanted, taken, cuts := fare.Community{}, false, 0
	next := func() {
		wanted = fare.Community{0, 4, 0, 2, 0x51, byte(len(took) >> 16), byte(len(took) >> 8), byte(len(took))}
		wrote, taken = time.Now(), false
		if _, err := conn.Write(rawUpdate(65100, at[1], wanted, prefix(1<<20))); err != nil {
			t.Fatal(err)
		}
	}
	next()
	r.within(5*deadline, "three ends of the flood", func() bool { // floods are slow under the race detector
		peak = max(peak, heapObjects())
		for _, e := range r.events {
			if e, ok := e.(Routes); ok && e.Session == 1 && e.Changes[0].Attrs.Communities[0] == wanted {
				took, taken = append(took, time.Since(wrote)), true
			}
		}
		if taken && time.Since(wrote) > 5*time.Millisecond {
			next()
		}
		r.events = r.events[:0]
		for {
			select {
			case <-bad.closed:
				cuts++
				continue
			default:
			}
			return cuts == 3
		}
	})
	elapsed := time.Since(began)
	slices.Sort(took)
	grown := int64(peak-min(peak, before)) >> 20
	t.Logf("%v: heap +%d MiB, %d log lines, %d changes of the other leaf, p50 %v p99 %v", elapsed.Round(time.Millisecond), grown, lines.Load(),
		len(took), took[len(took)/2], took[len(took)*99/100])
	// Twice the bound of docs/operations.md, because of uncollected garbage.
	if limit := int64(2 * (8<<20 + routes*boundPerPrefix) >> 20); grown > limit {
		t.Errorf("the heap grew by %d MiB, want at most %d", grown, limit)
	}
	if limit := int64(2*logBurst + logRate*elapsed.Seconds()); lines.Load() > limit {
		t.Errorf("%d log lines, want at most %d", lines.Load(), limit)
	}
	if p99 := took[len(took)*99/100]; p99 > 2*time.Second {
		t.Errorf("another leaf's changes took %v (p99)", p99)
	}
	if r.Status(1).Flaps != 0 {
		t.Error("the other session was lost")
	}
	for i := range 3 {
		if !reads {
			break
		}
		if n := <-bad.notified; !slices.Equal(n, []byte{6, 8}) {
			t.Errorf("connection %d ended with NOTIFICATION %v, want 6/8 (RFC 4486, Out of Resources)", i, n)
		}
	}
	r.until("three offenses are counted", func() bool { return counter(r, 0, "offenses") >= 3 })
}

// TestUnreadPeer keeps a session with a leaf that does not read. Route changes wait for it, only the newest set; a second leaf that reads
// receives all of them meanwhile.
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
		for i := range 4000 {
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
		return in.isUnread()
	})
	stood, mark := done(0), done(1)
	r.until("the other leaf has five more sets", func() bool {
		if done(1) == uint64(serial) {
			change()
		}
		return done(1) >= mark+5
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

// TestPausesGrow checks the pause after each offense, on the wire and in the reason.
func TestPausesGrow(t *testing.T) {
	at := hosts(1)[0]
	opened, closed, offend := make(chan time.Time, 16), make(chan time.Time, 16), make(chan struct{})
	p := newRawPeer(t, at, func(n int, conn *net.TCPConn) {
		if n > 3 {
			_, _ = io.Copy(io.Discard, conn)
			return
		}
		opened <- time.Now()
		if shake(conn, rawOpen(65100, 90, leafID)) == nil {
			<-offend
			_, _ = conn.Write(message(77))
			_, _ = io.Copy(io.Discard, conn)
		}
		closed <- time.Now()
	})
	c := rawConfig(t, p)
	c.ConnectRetry = 100 * time.Millisecond
	r := start(t, create(t, c))
	<-opened
	for i, pause := range []time.Duration{100, 200, 400} {
		pause *= time.Millisecond
		r.until("up", func() bool { return r.state(0).ups == i+1 })
		offend <- struct{}{}
		end := <-closed
		if gap := (<-opened).Sub(end); gap < pause*9/10 {
			t.Errorf("offense %d: connected again after %v, want a pause of %v", i, gap, pause)
		}
	}
	r.until("up", func() bool { return r.state(0).ups == 4 })
	offend <- struct{}{}
	r.until("four offenses", func() bool { return counter(r, 0, "offenses") == 4 })
	if want := "; next attempt after 800ms"; !strings.HasSuffix(r.Status(0).Reason, want) {
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
