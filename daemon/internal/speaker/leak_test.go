package speaker

import (
	"net"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"
)

// TestFlapsLeaveNothing checks that an incarnation, including GoBGP's part, releases all its resources.
func TestFlapsLeaveNothing(t *testing.T) {
	server, leaf := pairConfig(t, 1)
	a, b := startPair(t, server, leaf)
	p := netip.MustParsePrefix("10.0.0.1/32")
	b.Advertise(0, []Advertisement{{Prefix: p}})
	flap := func(n int) {
		for range n {
			gen := a.state(0).gen
			a.SetAdminState(0, false, "flap")
			a.SetAdminState(0, true, "")
			a.until("up again", func() bool { s := a.state(0); return s.gen > gen && s.routes[p] != nil })
			for i := len(a.events) - 1; i > 0; i-- {
				if _, ok := a.events[i].(SessionUp); ok {
					a.events = slices.Delete(a.events, 0, i) // the log is not part of the measurement
					break
				}
			}
		}
	}
	measure := func() (goroutines int, heap uint64) {
		debug.FreeOSMemory()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return runtime.NumGoroutine(), m.HeapAlloc
	}
	a.until("up", func() bool { return a.state(0).routes[p] != nil })
	flap(10)
	g0, h0 := measure()
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); { // the least, because the last incarnations may still be exiting
		g, h := measure()
		g0, h0 = min(g0, g), min(h0, h)
	}
	const n = 60
	flap(n)
	// A leak has at least one goroutine of each incarnation; sessions that are starting or ending have some. GoBGP
	// takes seconds to end them on a busy machine.
	var g1 int
	var h1 uint64
	left := func() bool { g1, h1 = measure(); return g1 > g0+n/4 || h1 > h0+n*2048 }
	for end := time.Now().Add(deadline); left() && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
	}
	t.Logf("%d flaps: goroutines %d -> %d, heap %d -> %d KiB", n, g0, g1, h0>>10, h1>>10)
	if g1 > g0+n/4 {
		t.Errorf("goroutines %d -> %d", g0, g1)
	}
	if h1 > h0+n*2048 {
		t.Errorf("heap %d -> %d octets", h0, h1)
	}
}

// TestEndWhileConnecting ends speakers while a session's connection to GoBGP is being made, at different times after
// the session came up. GoBGP's goroutines that would outlive its end race with it, which the race detector notices.
func TestEndWhileConnecting(t *testing.T) {
	for i := range 200 {
		t.Run("", func(t *testing.T) {
			server, leaf := pairConfig(t, 1)
			a, b := startPair(t, server, leaf)
			a.Advertise(0, []Advertisement{})
			b.Advertise(0, []Advertisement{})
			a.until("up", func() bool { return a.state(0).gen > 0 })
			for end := time.Now().Add(time.Duration(i%50) * 40 * time.Microsecond); time.Now().Before(end); {
				runtime.Gosched()
			}
		})
	}
}

// TestMessageAfterTheEnd lets the peer's message arrive when the incarnation has ended while its connection to GoBGP
// was being made: nothing forwards it.
func TestMessageAfterTheEnd(t *testing.T) {
	in := &incarnation{local: new(net.TCPConn), ended: true}
	if err := in.forward(keepalive); err != nil {
		t.Error(err)
	}
}
