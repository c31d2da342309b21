package daemon

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/internal/testkit/netnstest"
)

var own = netip.MustParsePrefix("10.255.0.1/32")

// TestWeightsFollowTheLeaves follows an UPDATE, a withdrawal, a session and a link from the leaf's octets to the data
// plane's members.
func TestWeightsFollowTheLeaves(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 2)})
	d := destination(0)
	r.wait(d, "1:1")
	r.waitAnnounced(0, own, "400G")
	r.leaves[1].announce(200e9, d)
	r.wait(d, "2:1")
	if got := r.forwards(d); got != "p0.0=2 p1.0=1" {
		t.Errorf("the data plane forwards by %s", got)
	}
	r.wait(destination(1), "1:1") // another destination keeps its weights
	r.leaves[1].withdraw(d)
	r.wait(d, "1:0")
	r.leaves[1].announce(400e9, d)
	r.wait(d, "1:1")
	r.links.change(0, func(e *LinkEvent) { e.Up = false })
	r.wait(d, "0:1")
	eventually(t, "the data plane leaves p0.0", func() bool { return r.forwards(d) == "p1.0=1" })
	r.links.change(0, func(e *LinkEvent) { e.Up = true })
	r.wait(d, "1:1")
	r.leaves[0].drop()
	eventually(t, "the session is new", func() bool { return r.leaves[0].count() == 3 })
	r.wait(d, "1:1")
}

// TestFlapInOneEvent checks that a carrier that failed and returned between two readings still ends the session.
func TestFlapInOneEvent(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.wait(destination(0), "1:1")
	r.links.change(1, func(e *LinkEvent) { e.Transitions += 2 })
	eventually(t, "the session over it is a new one", func() bool { return r.leaves[1].count() == 2 })
	r.wait(destination(0), "1:1")
	if n := r.leaves[0].count(); n != 1 {
		t.Errorf("the other plane's session came up %d times", n)
	}
}

// TestIncreaseIsHeldUp checks that a decrease counts immediately and an increase after increase_hold_up, also after a
// flap. The hold-up is longer than the test, which ends it.
func TestIncreaseIsHeldUp(t *testing.T) {
	const hold = time.Hour
	r := newRig(t, shape{Planes: 2, SubPorts: 1, NoSpeed: true, Extra: "path_bandwidth: {increase_hold_up: 1h}\n"}, rigOptions{leaves: announceAll(400e9, 1)})
	d := destination(0)
	r.wait(d, "1:1") // the first state is not an increase
	// rises requires that an increase since began is held up, with the weights before, and counts at the end of the
	// hold-up.
	rises := func(what string, began time.Time, before, after string) {
		t.Helper()
		held := func() (held bool) {
			r.inside(func(l *loop) { held = l.links[1].held })
			return held
		}
		eventually(t, what+": held up", held)
		if got := r.weights(d); got != before {
			t.Errorf("%s: weights %s during the hold-up, want %s", what, got, before)
		}
		r.inside(func(l *loop) {
			until := &l.links[1].holdUntil
			if until.Before(began.Add(hold)) || until.After(time.Now().Add(hold)) {
				t.Errorf("%s: held up until %v after its begin, the hold-up is %v", what, until.Sub(began), hold)
			}
			*until = time.Now().Add(time.Millisecond)
		})
		r.wait(d, after)
	}
	rise := func(what, before, after string, change func(*LinkEvent)) {
		t.Helper()
		began := time.Now()
		r.links.change(1, change)
		rises(what, began, before, after)
	}
	fall := func(weights string, change func(*LinkEvent)) {
		t.Helper()
		r.links.change(1, change)
		r.wait(d, weights)
	}
	fall("4:1", func(e *LinkEvent) { e.Speed = 100e9 })
	r.waitAnnounced(1, own, "100G")
	rise("a faster link", "4:1", "1:1", func(e *LinkEvent) { e.Speed = 400e9 })
	r.waitAnnounced(1, own, "400G")
	fall("1:0", func(e *LinkEvent) { e.Up = false })
	rise("carrier found", "1:0", "1:1", func(e *LinkEvent) { e.Up = true })
	began := time.Now()
	fall("1:0", func(e *LinkEvent) { e.Transitions += 2 })
	rises("a flap", began, "1:0", "1:1")
}

// TestRecordedRunReplays checks that a recording of a daemon with failures replays to the daemon's final state.
func TestRecordedRunReplays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording")
	r := newRig(t, shape{Planes: 2, SubPorts: 2, Extra: "drain_delay: 0s\nrecord: {file: " + path + "}\n"}, rigOptions{leaves: announceAll(800e9, 20)})
	d := destination(3)
	r.wait(d, "1:1")
	r.settled(20)
	r.links.change(0, func(e *LinkEvent) { e.Up = false })
	r.wait(d, "1:2")
	r.leaves[3].drop()
	r.leaves[2].announce(100e9, d)
	eventually(t, "the session is back", func() bool { return r.leaves[3].count() == 2 })
	r.drain("p0", true)
	r.wait(d, "0:1")
	eventually(t, "drained", func() bool { return r.stage(core.DrainTarget{Plane: "p0"}) == "drained" })
	r.stop()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	events, effective := 0, 0
	var effect *core.Effect // of the last change of weights
	got, err := core.Replay(f, func(r core.Replayed) {
		switch {
		case r.Effect != nil:
			if effect = r.Effect; effect.InEffect() {
				effective++
			}
		case len(r.Changed) > 0:
			effect = nil
		}
		if r.Event != nil {
			events++
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if effect == nil || !effect.InEffect() || effective < 2 { // the last is of the end
		t.Errorf("weights are in effect %d times, and at the end %v", effective, effect)
	}
	if got.Digest() != r.d.loop.core.Digest() {
		t.Errorf("replayed\n%s\nrecorded\n%s", coretest.Describe(got), coretest.Describe(r.d.loop.core))
	}
	if events < 4+4+4*20+4 {
		t.Errorf("only %d events were recorded", events)
	}
}

// runLinks is a testLinks that passes on the context of Run.
type runLinks struct {
	*testLinks
	ctx chan context.Context
}

func (l runLinks) Run(ctx context.Context) error {
	l.ctx <- ctx
	return l.testLinks.Run(ctx)
}

// TestStopTakesNothingAway checks that a stopping daemon closes its sessions without any effect on its data plane,
// however busy it was: the sources of events run until the loop has ended.
func TestStopTakesNothingAway(t *testing.T) {
	feeding := make(chan context.Context, 1)
	r := newRig(t, shape{Planes: 2, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, 4), deps: func(d *Deps) { d.Links = runLinks{d.Links.(*testLinks), feeding} }})
	r.settled(4)
	var digest string
	forwarded := r.forwards(destination(1))
	r.inside(func(l *loop) {
		digest = l.core.Digest()
		r.cancel() // ends the contexts derived from that of Run before it returns
		if ctx := <-feeding; ctx.Err() != nil {
			t.Error("the sources of events ended before the loop")
		}
	})
	r.stop()
	if r.d.loop.core.Digest() != digest {
		t.Errorf("it stopped as\n%s", coretest.Describe(r.d.loop.core))
	}
	if now := r.forwards(destination(1)); now != forwarded {
		t.Errorf("it left %s, forwarded before %s", now, forwarded)
	}
}

// TestSecuredSessions runs TCP MD5 and GTSM between a server and a leaf, both fared; a wrong password keeps the session
// down.
func TestSecuredSessions(t *testing.T) {
	dir := t.TempDir()
	password := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good, bad := password("good", "plane one"), password("bad", "plane two")
	port := netnstest.FreePort(t)
	write := func(name, text string) *config.Config {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cfg, err := config.Load(path)
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	checkLeaks(t)
	common := "accept: [10.255.0.0/16]\nplanes:\n  - name: p0\n    sub_ports:\n"
	server := "loopbacks: [10.255.0.1/32]\nas: 65001\ndataplane: {address: \"memory:\"}\n" + common
	leaf := "role: leaf\nrouter_id: 10.1.0.1\nas: 65100\n" + common
	for i := range 2 {
		pw := []string{good, bad}[i]
		server += fmt.Sprintf("      - {device: a%d, speed: 400G, sessions: [{peer: 127.98.0.%d, local: 127.98.1.%d, port: %d, password_file: %s, gtsm_hops: 1}]}\n", i, i+1, i+1, port, good)
		leaf += fmt.Sprintf("      - {device: b%d, speed: 400G, sessions: [{peer: 127.98.1.%d, local: 127.98.0.%d, port: %d, password_file: %s, gtsm_hops: 1, passive: true}]}\n", i, i+1, i+1, port, pw)
	}
	start := func(cfg *config.Config) *Daemon {
		d, err := New(cfg, Deps{Memory: dialMemory, Links: newTestLinks(2, 400e9), Embedded: true})
		if err != nil {
			t.Fatal(err)
		}
		running(t, d)
		return d
	}
	l, s := start(write("leaf.yaml", leaf)), start(write("server.yaml", server))
	sessions := func(d *Daemon) []*farev1.Session {
		resp, err := d.FabricService().ListSessions(t.Context(), &farev1.ListSessionsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return resp.Sessions
	}
	eventually(t, "the session with equal passwords", func() bool {
		return sessions(s)[0].EndOfRib && sessions(l)[0].EndOfRib && sessions(l)[0].RoutesReceived == 1
	})
	for _, d := range []*Daemon{s, l} {
		if state := sessions(d)[1].State; strings.EqualFold(state, "established") {
			t.Error("the session with different passwords was established")
		}
	}
}

// TestDeclaredFast checks the fast path: one failed sub-port causes one operation for it and one for each vector, for
// any number of destinations.
func TestDeclaredFast(t *testing.T) {
	const n = 1000
	r := newRig(t, shape{Planes: 2, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, n)})
	r.settled(n)
	eventually(t, "nothing is left of the way here", func() bool { groups, _ := r.dp.Size(); return groups == 1 })
	before := r.journal.len()
	r.links.change(1, func(e *LinkEvent) { e.Up = false })
	r.wait(destination(0), "1:2")
	eventually(t, "the session is down", func() bool { return r.journal.index(before, "p0.1: down") >= 0 })
	var ops []string
	for _, line := range r.journal.since(before) {
		if strings.HasPrefix(line, "dataplane:") {
			ops = append(ops, line)
		}
	}
	want := "[dataplane: sub-port p0.1 false dataplane: group p0.0=2 p1.0=2 p1.1=2]"
	if got := fmt.Sprint(ops); got != want && got != "[dataplane: sub-port p0.1 false dataplane: group p0.0=1 p1.0=1 p1.1=1]" {
		t.Errorf("operations %s, want %s", got, want)
	}
}

// TestRefusalsAreShown checks that weights that the data plane refused, and those of a plane with a sub-port whose
// state it refused, are shown with the data plane's reason.
func TestRefusalsAreShown(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 2}, rigOptions{leaves: announceAll(800e9, 1)})
	d := destination(0)
	r.wait(d, "1:1")
	shown := func(want string) {
		t.Helper()
		eventually(t, "the reason "+want, func() bool {
			row, err := r.d.WeightService().GetWeights(t.Context(), &farev1.GetWeightsRequest{Destination: d.Addr().String()})
			return err == nil && row.Weights[0].NotInEffect == want
		})
	}
	shown("")
	r.settled(1) // no other operation is refused
	r.dp.RefuseNext(1, codes.PermissionDenied, "the driver is busy")
	r.links.change(3, func(e *LinkEvent) { e.Up = false }) // a sub-port's state precedes groups
	r.wait(d, "2:1?")
	shown("sub-port p1.1 refused: the driver is busy")
	r.links.change(3, func(e *LinkEvent) { e.Up = true })
	r.wait(d, "1:1")
	shown("")
	r.settled(1)
	r.dp.RefuseNext(1, codes.PermissionDenied, "table full")
	r.leaves[2].announce(200e9, d) // one change: a second one would be another operation, and not be refused
	shown("refused: table full")
}
