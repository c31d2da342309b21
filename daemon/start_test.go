package daemon

import (
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/daemon/internal/dpclient"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/dataplane/memory"
	"github.com/fared/fared/internal/testkit/testbed"
)

// TestStartTakesNothingAway checks that destinations of an earlier run stay until every leaf has sent End-of-RIB, on
// the planes whose leaf has not.
func TestStartTakesNothingAway(t *testing.T) {
	for name, end := range map[string]struct {
		deadline string
		finish   func(*rig)
	}{
		"end of RIB": {"1h", func(r *rig) { r.leaves[1].endOfRIB() }},
		"deadline":   {"1s", func(*rig) {}},
	} {
		t.Run(name, func(t *testing.T) {
			first := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 3)})
			first.wait(destination(2), "1:1")
			first.stop()
			if got := programmed(first.dp); len(got) != 3 {
				t.Fatalf("after the first run the data plane has %v", got)
			}
			socket := filepath.Join(testbed.ShortDir(t), "s")
			r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "start: {deadline: " + end.deadline + "}\napi: {socket: " + socket + "}\n"}, rigOptions{dp: first.dp, deps: func(d *Deps) { d.Embedded = false }, leaves: func(l *rawLeaf) {
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
			seen := make(chan begun, 1)
			go func() {
				first, err := watch.Recv()
				resp, statusErr := r.d.FabricService().GetStatus(t.Context(), &farev1.GetStatusRequest{})
				seen <- begun{first, resp.GetConverged(), errors.Join(err, statusErr)}
			}()
			r.wait(destination(3), "1:1")
			if got := programmed(r.dp); len(got) != 4 && name != "deadline" {
				t.Errorf("before the end of the start the data plane has %v, want the three and the new one", got)
			}
			if name != "deadline" { // p0's leaf has sent all its routes, and this one is not among them
				eventually(t, "a destination without an announcement goes by the other plane", func() bool { return r.forwards(destination(2)) == "p1.0=1" })
			}
			end.finish(r)
			eventually(t, "destinations without an announcement are gone", func() bool { return len(programmed(r.dp)) == 2 })
			if got := <-seen; got.err != nil || !got.converged || !got.first.Snapshot || !got.first.Complete || len(got.first.Weights) != 2 {
				t.Errorf("a watch begins with %v when converged is %v (%v)", got.first, got.converged, got.err)
			}
		})
	}
}

// TestStartWithADeadLeaf checks the start of a server while a leaf is dead whose cable has a carrier: a withdrawal by
// another leaf is in effect at once. If the leaf was dead before, the data plane sends nothing there, and the start is
// over without it. If it has died since, its plane keeps its third of the traffic, and p0 takes the rest.
func TestStartWithADeadLeaf(t *testing.T) {
	for name, tc := range map[string]struct {
		before    bool
		converged bool
		want      string
	}{
		"dead before": {true, true, "p0.0=1"},
		"dead since":  {false, false, "p0.0=2 p2.0=1"},
	} {
		t.Run(name, func(t *testing.T) {
			die := func(l *rawLeaf) {
				l.ln.Close()
				l.drop()
			}
			s := shape{Planes: 3, SubPorts: 1, Extra: "start: {deadline: 1h}\n"}
			first := newRig(t, s, rigOptions{leaves: announceAll(400e9, 2)})
			first.wait(destination(1), "1:1:1")
			if tc.before {
				die(first.leaves[2])
				first.wait(destination(1), "1:1:0")
				eventually(t, "the data plane leaves p2.0", func() bool {
					return slices.ContainsFunc(first.dp.State().SubPorts, func(sp *farev1.SubPortState) bool { return sp.Device == "p2.0" && !sp.Up })
				})
			}
			first.stop()
			r := newRig(t, s, rigOptions{dp: first.dp, leaves: func(l *rawLeaf) {
				announceAll(400e9, 2)(l)
				if l.name == "p2.0" {
					die(l)
				}
			}})
			eventually(t, "both sessions have sent all", func() bool {
				ended := 0
				r.inside(func(l *loop) {
					for i := range 2 {
						if l.core.SessionState(i).EndOfRIB {
							ended++
						}
					}
				})
				return ended == 2
			})
			r.leaves[1].withdraw(destination(1))
			eventually(t, "the withdrawal is in effect", func() bool { return r.forwards(destination(1)) == tc.want })
			if got := r.status().Converged; got != tc.converged {
				t.Errorf("converged %v, want %v", got, tc.converged)
			}
		})
	}
}

// TestLoopbacksWaitForTheDataPlane checks that no loopback is announced before a data plane forwards; over the real
// socket, with the data plane started last.
func TestLoopbacksWaitForTheDataPlane(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "dp.sock")
	conn, err := dpclient.Open("unix:"+socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{conn: conn, leaves: announceAll(400e9, 1)})
	t.Cleanup(func() { conn.Close() })
	eventually(t, "both sessions have sent all", func() bool {
		resp, err := r.d.FabricService().GetStatus(t.Context(), &farev1.GetStatusRequest{})
		return err == nil && resp.Converged && resp.Destinations == 1
	})
	if a, b := r.leaves[0].has(own), r.leaves[1].has(own); a != "nothing" || b != "nothing" {
		t.Errorf("without a data plane the leaves have %s and %s", a, b)
	}
	eventually(t, "the status has the reason", func() bool { return strings.Contains(r.status().Dataplane.LastError, socket) })
	if got := r.weights(destination(0)); got != "1?:1?" {
		t.Errorf("weights %s, want them not in effect", got)
	}
	testbed.Serve(t, socket, r.dp.Register)
	t.Cleanup(r.stop)
	r.waitAnnounced(0, own, "400G")
	r.waitAnnounced(1, own, "400G")
	r.wait(destination(0), "1:1")
	if last := r.status().Dataplane.LastError; last != "" {
		t.Errorf("connected, with the earlier error %q", last)
	}
}

// TestLeafForwards checks that a leaf with a data plane forwards by bandwidth, passes routes on like any leaf, and
// announces nothing before the data plane is connected.
func TestLeafForwards(t *testing.T) {
	dp := memory.New(memory.Config{})
	socket := filepath.Join(t.TempDir(), "dp.sock")
	conn, err := dpclient.Open("unix:"+socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Two nodes: one announces the destination; the other announces the same destination with half the bandwidth.
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Leaf: true, Extra: coretest.LeafDataplane + "weights: {mode: per-packet}\n"}, rigOptions{dp: dp, conn: conn, leaves: func(l *rawLeaf) {
		if l.as == 65100 {
			l.table[destination(0)] = 400e9
		}
	}})
	t.Cleanup(func() { conn.Close() })
	d := destination(0)
	eventually(t, "the route is known", func() bool { return r.weights(d) == "1?:0?" })
	// The other node's routes are complete once its session has sent End-of-RIB.
	eventually(t, "End-of-RIB at the other node", func() bool { return r.journal.index(0, "p1.0: End-of-RIB") >= 0 })
	if got := r.leaves[1].has(d); got != "nothing" {
		t.Errorf("without a data plane the other node has %s", got)
	}
	testbed.Serve(t, socket, dp.Register)
	t.Cleanup(r.stop)
	r.waitAnnounced(1, d, "400G")
	r.wait(d, "1:0")
	r.leaves[1].announce(200e9, d)
	r.wait(d, "2:1")
	if got := r.forwards(d); got != "p0.0=2 p1.0=1" {
		t.Errorf("the data plane forwards by %s", got)
	}
	for _, g := range dp.State().Vectors {
		if len(g.Slots) != 0 {
			t.Errorf("a group has the slots %v", g.Slots)
		}
	}
	r.inside(func(l *loop) {
		if f := forwardingOf(l.core); len(f.Loopbacks)+len(f.UdpPorts)+len(f.TcpPorts) != 0 || f.Mode != farev1.Mode_MODE_PER_FLOW {
			t.Errorf("the data plane is told %v", f)
		}
	})
	r.links.change(0, func(e *LinkEvent) { e.Up = false })
	r.wait(d, "0:1")
	eventually(t, "the data plane leaves p0.0", func() bool { return r.forwards(d) == "p1.0=1" })
}

// TestRestartSaysEverythingBeforeItsEnd checks graceful restart: a leaf that keeps the routes of a restarting server
// drops those that have not arrived by End-of-RIB (RFC 4724, Section 4.2). So a session with graceful restart waits for
// the data plane, and the loopbacks are announced before End-of-RIB; also by a session that fails and returns.
func TestRestartSaysEverythingBeforeItsEnd(t *testing.T) {
	checkLeaks(t)
	dp := memory.New(memory.Config{})
	server := grpc.NewServer()
	dp.Register(server)
	socket := filepath.Join(t.TempDir(), "dp.sock")
	conn, err := dpclient.Open("unix:"+socket, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "bgp: {restart_time: 60s}\n"},
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
