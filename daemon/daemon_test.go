package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/dataplane"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/dataplane/memory"
)

var own = netip.MustParsePrefix("10.255.0.1/32")

// TestWeightsFollowTheLeaves: UPDATE, withdrawal, session and link, from the leaf's octets to the data plane's members.
func TestWeightsFollowTheLeaves(t *testing.T) {
	r := newRig(t, shape{planes: 2, subPorts: 1}, rigOptions{leaves: announceAll(400e9, 2)})
	d := destination(0)
	r.wait(d, "1:1")
	r.waitHeard(0, own, "400G")
	r.leaves[1].announce(200e9, d)
	r.wait(d, "2:1")
	if got := r.forwards(d); got != "p0.0=2 p1.0=1" {
		t.Errorf("the data plane forwards by %s", got)
	}
	if got := r.weights(destination(1)); got != "1:1" {
		t.Errorf("another destination has %s", got)
	}
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

// TestFlapInOneEvent: carrier that was lost and found between two looks still ends the session.
func TestFlapInOneEvent(t *testing.T) {
	r := newRig(t, shape{planes: 2, subPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.wait(destination(0), "1:1")
	r.links.change(1, func(e *LinkEvent) { e.Transitions += 2 })
	eventually(t, "the session over it is a new one", func() bool { return r.leaves[1].count() == 2 })
	r.wait(destination(0), "1:1")
	if n := r.leaves[0].count(); n != 1 {
		t.Errorf("the other plane's session came up %d times", n)
	}
}

// TestIncreaseIsHeldUp: a fall counts at once, a rise after increase_hold_up, and after a flap too.
func TestIncreaseIsHeldUp(t *testing.T) {
	const hold = 300 * time.Millisecond
	r := newRig(t, shape{planes: 2, subPorts: 1, noSpeed: true, extra: "path_bandwidth: {increase_hold_up: 300ms}\n"}, rigOptions{leaves: announceAll(400e9, 1)})
	d := destination(0)
	r.wait(d, "1:1") // the first state is no rise
	rise := func(what string, weights string, change func(*LinkEvent)) {
		t.Helper()
		began := time.Now()
		r.links.change(1, change)
		r.wait(d, weights)
		if took := time.Since(began); took < hold {
			t.Errorf("%s: counted after %v, the hold-up is %v", what, took, hold)
		}
	}
	fall := func(what, weights string, change func(*LinkEvent)) {
		t.Helper()
		r.links.change(1, change)
		began := time.Now()
		r.wait(d, weights)
		if took := time.Since(began); took >= hold {
			t.Errorf("%s: took %v, nothing may hold it up", what, took)
		}
	}
	fall("a slower link", "4:1", func(e *LinkEvent) { e.Speed = 100e9 })
	r.waitHeard(1, own, "100G")
	rise("a faster link", "1:1", func(e *LinkEvent) { e.Speed = 400e9 })
	r.waitHeard(1, own, "400G")
	fall("carrier lost", "1:0", func(e *LinkEvent) { e.Up = false })
	rise("carrier found", "1:1", func(e *LinkEvent) { e.Up = true })
	began := time.Now()
	fall("a flap", "1:0", func(e *LinkEvent) { e.Transitions += 2 })
	r.wait(d, "1:1")
	if took := time.Since(began); took < hold {
		t.Errorf("after a flap: counted after %v, the hold-up is %v", took, hold)
	}
}

// TestDrainInOrder: shares, acknowledged; then zero bandwidth; then no route. Back: the route, then shares.
func TestDrainInOrder(t *testing.T) {
	r := newRig(t, shape{planes: 2, subPorts: 1, extra: "drain_delay: 100ms\n"}, rigOptions{leaves: announceAll(400e9, 1)})
	d, target := destination(0), DrainTarget{Plane: "p1"}
	r.wait(d, "1:1")
	r.waitHeard(1, own, "400G")
	n := r.journal.len()
	r.dp.DelayAcks(200 * time.Millisecond)
	r.drain("p1", true)
	eventually(t, "zero shares at the data plane", func() bool { return r.journal.index(n, "dataplane: group p0.0=1") >= 0 })
	// It has arrived, and is not acknowledged: the leaf must know nothing yet.
	if said := r.leaves[1].has(own); said != "400G" || r.stage(target) != "shares" {
		t.Errorf("before the acknowledgement the leaf has %s, the stage is %s", said, r.stage(target))
	}
	r.waitHeard(1, own, "nothing")
	eventually(t, "drained", func() bool { return r.stage(target) == "drained" })
	r.inOrder(n, "dataplane: group p0.0=1", "p1.0: 10.255.0.1/32 0", "p1.0: 10.255.0.1/32 withdrawn")
	if said := r.leaves[0].has(own); said != "400G" {
		t.Errorf("the other plane's leaf has %s", said)
	}
	if resp, err := r.d.FabricService().ListSessions(t.Context(), &farev1.ListSessionsRequest{}); err != nil || resp.Sessions[1].State != "DRAINED" && resp.Sessions[1].State != "drained" {
		t.Errorf("the session is shown as %v, %v", resp.GetSessions(), err)
	}

	n = r.journal.len()
	r.dp.DelayAcks(0)
	r.drain("p1", false)
	r.wait(d, "1:1")
	r.inOrder(n, "p1.0: 10.255.0.1/32 400G", "dataplane: group p0.0=1 p1.0=1")
	if s := r.stage(target); s != "none" {
		t.Errorf("afterwards the stage is %s", s)
	}
	if n := r.leaves[1].count(); n != 1 {
		t.Errorf("the session came up %d times", n)
	}
}

// TestDrainWaitsForTheDataPlane: one that does not acknowledge, or refuses, keeps the drain in its first stage, however
// long the drain delay has passed.
func TestDrainWaitsForTheDataPlane(t *testing.T) {
	for name, spoil := range map[string]func(*memory.Dataplane){
		"silent":  func(dp *memory.Dataplane) { dp.DelayAcks(time.Hour) },
		"refuses": func(dp *memory.Dataplane) { dp.RefuseNext(1, codes.ResourceExhausted, "table full") },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, shape{planes: 2, subPorts: 1, extra: "drain_delay: 0s\n"}, rigOptions{leaves: announceAll(400e9, 1)})
			r.wait(destination(0), "1:1")
			r.waitHeard(1, own, "400G")
			n := r.journal.len()
			spoil(r.dp)
			r.drain("p1", true)
			eventually(t, "zero shares at the data plane", func() bool { return r.journal.index(n, "dataplane: group p0.0=1") >= 0 })
			// Something later goes all the way through the loop and comes out at the leaves: a new speed.
			r.leaves[0].announce(400e9, destination(5))
			eventually(t, "a later UPDATE at the data plane", func() bool { return r.journal.index(n, "dataplane: destination 10.255.1.5/32") >= 0 })
			if s := r.stage(DrainTarget{Plane: "p1"}); s != "shares" {
				t.Errorf("stage %s", s)
			}
			if said := r.leaves[1].has(own); said != "400G" {
				t.Errorf("the leaf has %s", said)
			}
		})
	}
}

// TestStartTakesNothingAway: what an earlier run programmed stays until every leaf has said all it has.
func TestStartTakesNothingAway(t *testing.T) {
	for name, end := range map[string]struct {
		deadline string
		finish   func(*rig)
	}{
		"end of RIB": {"1h", func(r *rig) { r.leaves[1].endOfRIB() }},
		"deadline":   {"1s", func(*rig) {}},
	} {
		t.Run(name, func(t *testing.T) {
			first := newRig(t, shape{planes: 2, subPorts: 1}, rigOptions{leaves: announceAll(400e9, 3)})
			first.wait(destination(2), "1:1")
			first.stop()
			if got := programmed(first.dp); len(got) != 3 {
				t.Fatalf("after the first run the data plane has %v", got)
			}
			socket := filepath.Join(shortDir(t), "s")
			r := newRig(t, shape{planes: 2, subPorts: 1, extra: "start: {deadline: " + end.deadline + "}\napi: {socket: " + socket + "}\n"}, rigOptions{dp: first.dp, deps: func(d *Deps) { d.Embedded = false }, leaves: func(l *rawLeaf) {
				l.table[destination(0)] = 400e9
				l.table[destination(3)] = 400e9
				l.holdEOR = l.name == "p1.0"
			}})
			watch, err := farev1.NewWeightServiceClient(dial(t, socket)).WatchWeights(t.Context(), &farev1.WatchWeightsRequest{})
			if err != nil {
				t.Fatal(err)
			}
			type begun struct {
				first     *farev1.WatchWeightsResponse
				converged bool
				err       error
			}
			told := make(chan begun, 1)
			go func() {
				first, err := watch.Recv()
				resp, statusErr := r.d.FabricService().GetStatus(t.Context(), &farev1.GetStatusRequest{})
				told <- begun{first, resp.GetConverged(), errors.Join(err, statusErr)}
			}()
			r.wait(destination(3), "1:1")
			if got := programmed(r.dp); len(got) != 4 && name != "deadline" {
				t.Errorf("before the end of the start the data plane has %v, want the three and the new one", got)
			}
			if got := r.forwards(destination(2)); got != "p0.0=1 p1.0=1" && name != "deadline" {
				t.Errorf("a destination that nobody has announced yet goes by %q", got)
			}
			end.finish(r)
			eventually(t, "what nobody announces is gone", func() bool { return len(programmed(r.dp)) == 2 })
			if got := <-told; got.err != nil || !got.converged || !got.first.Snapshot || !got.first.Complete || len(got.first.Weights) != 2 {
				t.Errorf("a watch begins with %v when converged is %v (%v)", got.first, got.converged, got.err)
			}
		})
	}
}

// TestLoopbacksWaitForTheDataPlane: nobody is told to send here before there is something that forwards; over the real
// socket, with the data plane started last.
func TestLoopbacksWaitForTheDataPlane(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "dp.sock")
	conn, err := dataplane.Open("unix:"+socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, shape{planes: 2, subPorts: 1}, rigOptions{conn: conn, leaves: announceAll(400e9, 1)})
	t.Cleanup(func() { conn.Close() })
	eventually(t, "both sessions have sent all", func() bool {
		resp, err := r.d.FabricService().GetStatus(t.Context(), &farev1.GetStatusRequest{})
		return err == nil && resp.Converged && resp.Destinations == 1
	})
	if a, b := r.leaves[0].has(own), r.leaves[1].has(own); a != "nothing" || b != "nothing" {
		t.Errorf("without a data plane the leaves have %s and %s", a, b)
	}
	if got := r.weights(destination(0)); got != "1?:1?" {
		t.Errorf("weights %s, want them not in effect", got)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	r.dp.Register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		r.stop()
		server.Stop()
		<-served
	})
	r.waitHeard(0, own, "400G")
	r.waitHeard(1, own, "400G")
	r.wait(destination(0), "1:1")
}

// TestLeafForwards: a leaf that is given a data plane has it forward by bandwidth, passes routes on as any leaf, and announces
// nothing before the data plane is connected.
func TestLeafForwards(t *testing.T) {
	dp := memory.New(memory.Config{})
	socket := filepath.Join(t.TempDir(), "dp.sock")
	conn, err := dataplane.Open("unix:"+socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Two nodes, one of which has the destination; and the same destination half as well behind the other.
	r := newRig(t, shape{planes: 2, subPorts: 1, leaf: true, extra: leafDataplane + "weights: {mode: per-packet}\n"}, rigOptions{dp: dp, conn: conn, leaves: func(l *rawLeaf) {
		if l.as == 65100 {
			l.table[destination(0)] = 400e9
		}
	}})
	t.Cleanup(func() { conn.Close() })
	d := destination(0)
	eventually(t, "the route is known", func() bool { return r.weights(d) == "1?:0?" })
	if got := r.leaves[1].has(d); got != "nothing" {
		t.Errorf("without a data plane the other node has %s", got)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	dp.Register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		r.stop()
		server.Stop()
		<-served
	})
	r.waitHeard(1, d, "400G")
	r.wait(d, "1:0")
	r.leaves[1].announce(200e9, d)
	r.wait(d, "2:1")
	if got := r.forwards(d); got != "p0.0=2 p1.0=1" {
		t.Errorf("the data plane forwards by %s", got)
	}
	for _, g := range dp.State().Groups {
		if len(g.Slots) != 0 {
			t.Errorf("a group has the slots %v", g.Slots)
		}
	}
	r.inside(func(l *loop) {
		if f := l.core.layout.forwarding(l.core.cfg); len(f.Loopbacks)+len(f.UdpPorts)+len(f.TcpPorts) != 0 || f.Mode != farev1.Mode_MODE_PER_FLOW {
			t.Errorf("the data plane is told %v", f)
		}
	})
	r.links.change(0, func(e *LinkEvent) { e.Up = false })
	r.wait(d, "0:1")
	eventually(t, "the data plane leaves p0.0", func() bool { return r.forwards(d) == "p1.0=1" })
}

// TestRestartSaysEverythingBeforeItsEnd: a leaf that keeps the routes of a server that restarts drops those that have not
// come by End-of-RIB (RFC 4724, Section 4.2). So a session with graceful restart waits for the data plane, and the loopbacks
// are said before End-of-RIB; also by a session that is lost and returns.
func TestRestartSaysEverythingBeforeItsEnd(t *testing.T) {
	checkLeaks(t)
	dp := memory.New(memory.Config{})
	server := grpc.NewServer()
	dp.Register(server)
	socket := filepath.Join(t.TempDir(), "dp.sock")
	conn, err := dataplane.Open("unix:"+socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	r := newRig(t, shape{planes: 2, subPorts: 1, extra: "bgp: {restart_time: 60s}\n"},
		rigOptions{dp: dp, conn: conn, leaves: announceAll(400e9, 1), checked: true})
	eventually(t, "the sessions wait", func() bool {
		for i := range r.leaves {
			if s := r.d.speaker.Status(i); s.State != speaker.Held || !strings.Contains(s.Reason, "data plane") {
				return false
			}
		}
		return true
	})
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		r.stop()
		server.Stop()
		<-served
	})
	for _, leaf := range r.leaves {
		for round := range 3 {
			up := func(n int, what string) int { return r.journal.index(n, leaf.name+": "+what) }
			begin, end := 0, -1
			eventually(t, "End-of-RIB", func() bool {
				begin = 0
				for range round + 1 {
					if begin = up(begin, "up") + 1; begin == 0 {
						return false
					}
				}
				end = up(begin, "End-of-RIB")
				return begin > 0 && end >= 0
			})
			if at := up(begin, own.String()+" 400G"); at < 0 || at > end {
				t.Errorf("%s: session %d: the loopback is said at %d, End-of-RIB at %d:\n%s", leaf.name, round, at, end, strings.Join(r.journal.since(begin), "\n"))
			}
			leaf.drop()
		}
	}
}

// TestDataplaneRestarts: after a broken stream, and after one that lost its memory, everything is in effect again.
func TestDataplaneRestarts(t *testing.T) {
	r := newRig(t, shape{planes: 2, subPorts: 2}, rigOptions{leaves: announceAll(800e9, 50)})
	r.settled(50)
	for i := range r.leaves {
		r.waitHeard(i, own, "400G")
	}
	eventually(t, "nothing is left of the way here", func() bool { groups, _ := r.dp.Size(); return groups == 1 })
	n := r.journal.len()
	r.dp.BreakStream()
	r.leaves[0].announce(200e9, destination(7))
	r.wait(destination(7), "1:4")
	if again := r.journal.since(n); len(again) > 10 {
		t.Errorf("after a broken stream %d operations for one change: %q", len(again), again)
	}
	r.dp.Reset()
	eventually(t, "all are programmed again", func() bool { return len(programmed(r.dp)) == 50 })
	r.wait(destination(7), "1:4")
	r.wait(destination(8), "1:1")
	eventually(t, "and forwarded by", func() bool { return r.forwards(destination(8)) == "p0.0=1 p0.1=1 p1.0=1 p1.1=1" })
	for i := range r.leaves {
		if r.leaves[i].count() != 1 || r.leaves[i].has(own) != "400G" {
			t.Errorf("leaf %d noticed: %d sessions, %s", i, r.leaves[i].count(), r.leaves[i].has(own))
		}
	}
}

// TestRefusalIsShown: what the data plane does not take is not in effect, and the status says what and why.
func TestRefusalIsShown(t *testing.T) {
	r := newRig(t, shape{planes: 2, subPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.wait(destination(0), "1:1")
	r.dp.RefuseNext(1, codes.ResourceExhausted, "table full")
	r.leaves[1].announce(200e9, destination(0))
	r.wait(destination(0), "2?:1?")
	var status *farev1.DataplaneStatus
	eventually(t, "the status has it", func() bool {
		resp, err := r.d.FabricService().GetStatus(t.Context(), &farev1.GetStatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		status = resp.Dataplane
		return status.OperationsRefused == 1 && status.LastError != ""
	})
	if !strings.Contains(status.LastError, "table full") || !strings.Contains(status.LastError, "group") {
		t.Errorf("last error %q", status.LastError)
	}
	r.leaves[1].announce(100e9, destination(0))
	r.wait(destination(0), "4:1")
}

// reloadRig is a rig whose configuration is a file.
func reloadRig(t *testing.T) (r *rig, write func(func(shape) string)) {
	path := filepath.Join(t.TempDir(), "fared.yaml")
	s := shape{planes: 2, subPorts: 1}
	r = newRig(t, s, rigOptions{leaves: announceAll(800e9, 1), deps: func(d *Deps) { d.ConfigPath = path }})
	write = func(text func(shape) string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text(r.s)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(shape.text)
	r.wait(destination(0), "1:1")
	r.waitHeard(1, own, "400G")
	return r, write
}

// slower is the configuration with another speed of p1.0.
func slower(s shape) string {
	return strings.Replace(s.text(), "device: p1.0\n        speed: 400G", "device: p1.0\n        speed: 200G", 1)
}

func (r *rig) reload(dryRun bool) (string, error) {
	resp, err := r.d.FabricService().Reload(context.Background(), &farev1.ReloadRequest{DryRun: dryRun})
	return strings.Join(resp.GetChanges(), "; "), err
}

// TestReload: a change that may be made is, without a session being lost; a dry run only says it.
func TestReload(t *testing.T) {
	r, write := reloadRig(t)
	if changes, err := r.reload(false); err != nil || changes != "" {
		t.Fatalf("an equal file: %q, %v", changes, err)
	}
	write(func(s shape) string {
		s.extra += "path_bandwidth: {missing: skip}\ndrain_delay: 1s\n"
		return slower(s)
	})
	want := "drain_delay: 5s -> 1s; path_bandwidth.missing: equal -> skip; planes[1].sub_ports[0].speed: 400G -> 200G"
	if changes, err := r.reload(true); err != nil || changes != want {
		t.Fatalf("dry run: %q, %v", changes, err)
	}
	if said := r.leaves[1].has(own); said != "400G" || r.weights(destination(0)) != "1:1" {
		t.Fatalf("after a dry run the leaf has %s, weights %s", said, r.weights(destination(0)))
	}
	if changes, err := r.reload(false); err != nil || changes != want {
		t.Fatalf("reload: %q, %v", changes, err)
	}
	r.waitHeard(1, own, "200G")
	r.wait(destination(0), "2:1")
	write(func(s shape) string {
		return strings.Replace(slower(s), "loopbacks: [10.255.0.1/32]", "loopbacks: [10.255.0.1/32, 10.255.0.9/32]", 1)
	})
	if _, err := r.reload(false); err != nil {
		t.Fatal(err)
	}
	r.waitHeard(0, netip.MustParsePrefix("10.255.0.9/32"), "400G")
	r.waitHeard(1, netip.MustParsePrefix("10.255.0.9/32"), "200G")
	for i := range r.leaves {
		if n := r.leaves[i].count(); n != 1 {
			t.Errorf("leaf %d: %d sessions, a reload loses none", i, n)
		}
	}
}

// TestReloadIsRefusedWhole: one key that needs a restart, or one mistake, and nothing of the file counts.
func TestReloadIsRefusedWhole(t *testing.T) {
	r, write := reloadRig(t)
	unchanged := func() {
		t.Helper()
		if said := r.leaves[1].has(own); said != "400G" || r.weights(destination(0)) != "1:1" {
			t.Errorf("the leaf has %s, weights %s", said, r.weights(destination(0)))
		}
		var text string
		r.inside(func(l *loop) { text = l.core.cfg.Text() })
		if text != r.s.config(t).Text() {
			t.Errorf("the configuration is now\n%s", text)
		}
	}
	write(func(s shape) string {
		return strings.NewReplacer("as: 4200001000", "as: 4200001001", "peer_as: 65101", "peer_as: 65102").Replace(slower(s))
	})
	_, err := r.reload(false)
	if err == nil || !strings.Contains(err.Error(), "as: 4200001000 -> 4200001001") || !strings.Contains(err.Error(), "planes[1].sub_ports[0].sessions[0].peer_as: 65101 -> 65102") {
		t.Errorf("a forbidden change: %v, want both reasons", err)
	}
	unchanged()
	write(func(s shape) string { return slower(s) + "colour: red\ndrain_delay: 5\n" })
	if _, err = r.reload(false); err == nil || !strings.Contains(err.Error(), "colour") || !strings.Contains(err.Error(), "drain_delay") {
		t.Errorf("a broken file: %v, want both mistakes", err)
	}
	unchanged()
	if err := os.Remove(r.d.deps.ConfigPath); err != nil {
		t.Fatal(err)
	}
	if _, err = r.reload(false); err == nil || !strings.Contains(err.Error(), r.d.deps.ConfigPath) {
		t.Errorf("no file: %v", err)
	}
	unchanged()
}

// TestDrainOfWhatIsNotThere is an error with what there is, not a drain of nothing.
func TestDrainOfWhatIsNotThere(t *testing.T) {
	r := newRig(t, shape{planes: 2, subPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.wait(destination(0), "1:1")
	for _, target := range []*farev1.DrainTarget{
		{Target: &farev1.DrainTarget_Plane{Plane: "p7"}},
		{Target: &farev1.DrainTarget_SubPort{SubPort: "eth7"}},
		{Target: &farev1.DrainTarget_Leaf{Leaf: "192.0.2.7"}},
		{},
	} {
		if _, err := r.d.FabricService().Drain(t.Context(), &farev1.DrainRequest{Target: target}); err == nil {
			t.Errorf("%v was accepted", target)
		}
	}
	// A leaf is known by its router ID and by the address of a session.
	for _, name := range []string{leafNode(1).String(), r.s.there(1).String()} {
		target := &farev1.DrainTarget{Target: &farev1.DrainTarget_Leaf{Leaf: name}}
		resp, err := r.d.FabricService().Drain(t.Context(), &farev1.DrainRequest{Target: target})
		if err != nil || fmt.Sprint(resp.Sessions) != "[p1/p1.0]" {
			t.Fatalf("leaf %s: %v, %v", name, resp.GetSessions(), err)
		}
		r.wait(destination(0), "1:0")
	}
}

// TestRecordedRunReplays: a daemon that went through failures replays to the state it had at its end.
func TestRecordedRunReplays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "recording")
	r := newRig(t, shape{planes: 2, subPorts: 2, extra: "drain_delay: 0s\nrecord: {file: " + path + "}\n"}, rigOptions{leaves: announceAll(800e9, 20)})
	d := destination(3)
	r.wait(d, "1:1")
	r.links.change(0, func(e *LinkEvent) { e.Up = false })
	r.wait(d, "1:2")
	r.leaves[3].drop()
	r.leaves[2].announce(100e9, d)
	eventually(t, "the session is back", func() bool { return r.leaves[3].count() == 2 })
	r.drain("p0", true)
	r.wait(d, "0:1")
	eventually(t, "drained", func() bool { return r.stage(DrainTarget{Plane: "p0"}) == "drained" })
	r.stop()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	events := 0
	got, err := Replay(f, func(Replayed) { events++ })
	if err != nil {
		t.Fatal(err)
	}
	if got.Digest() != r.d.loop.core.Digest() {
		t.Errorf("replayed\n%s\nrecorded\n%s", describe(got), describe(r.d.loop.core))
	}
	if events < 4+4+4*20+4 {
		t.Errorf("only %d events were recorded", events)
	}
}

// TestStopTakesNothingAway: a daemon that stops closes its sessions, and what that does to them is nothing its data plane
// hears of, however busy it was when it was told to stop.
func TestStopTakesNothingAway(t *testing.T) {
	r := newRig(t, shape{planes: 2, subPorts: 2}, rigOptions{leaves: announceAll(800e9, 4)})
	r.settled(4)
	var digest string
	forwarded := r.forwards(destination(1))
	busy, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		<-busy
		r.stop()
	}()
	r.inside(func(l *loop) {
		digest = l.core.Digest()
		close(busy)
		time.Sleep(300 * time.Millisecond) // many times what closing the sessions takes
	})
	<-stopped
	if r.d.loop.core.Digest() != digest {
		t.Errorf("it stopped as\n%s", describe(r.d.loop.core))
	}
	if now := r.forwards(destination(1)); now != forwarded {
		t.Errorf("it left %s, forwarded before %s", now, forwarded)
	}
}

// TestSecuredSessions: TCP MD5 and GTSM between a server and a leaf, both fared; and a wrong password keeps it down.
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
	port := freePort(t)
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
		d, err := New(cfg, Deps{Links: newTestLinks(2, 400e9), Embedded: true})
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

// TestDeclaredFast is the fast path: one lost sub-port is one operation for it and one for each vector, at any number of
// destinations.
func TestDeclaredFast(t *testing.T) {
	const n = 1000
	r := newRig(t, shape{planes: 2, subPorts: 2}, rigOptions{leaves: announceAll(800e9, n)})
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
