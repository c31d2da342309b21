package daemon

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
)

// shown returns plane p1, its sub-port and its session in the status: "drained", "draining" or "in service", and the
// session's state.
func (r *rig) shown() string {
	r.t.Helper()
	word := func(drained, draining bool) string {
		switch {
		case drained && !draining:
			return "drained"
		case draining && !drained:
			return "draining"
		case draining:
			return "drained and draining"
		}
		return "in service"
	}
	planes, err := r.d.FabricService().ListPlanes(r.t.Context(), &farev1.ListPlanesRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	sessions, err := r.d.FabricService().ListSessions(r.t.Context(), &farev1.ListSessionsRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	p := planes.Planes[1]
	return strings.Join([]string{word(p.Drained, p.Draining), word(p.SubPorts[0].Drained, p.SubPorts[0].Draining), sessions.Sessions[1].State}, ", ")
}

// windowClosed reports whether the kernel has octets for a leaf whose window is closed (proc_net_tcp.rst of the
// kernel's documentation): the connection's timer, the number before the colon, is that of zero window probes, 4; or
// that of retransmissions, 1, if the window closed while octets were in flight. Linux does not count the latter as
// retransmissions, but it doubles the timeout, in 10 ms: from 200 ms on loopback to more than 1 s.
func (r *rig) windowClosed(leaf int) bool {
	r.t.Helper()
	table, err := os.ReadFile("/proc/thread-self/net/tcp")
	if err != nil {
		r.t.Fatal(err)
	}
	peer := r.s.There(leaf).As4()
	remote := fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(peer[:]), r.s.Port)
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if f[2] != remote {
			continue
		}
		if strings.HasPrefix(f[5], "04:") {
			return true
		}
		if strings.HasPrefix(f[5], "01:") {
			timeout, err := strconv.Atoi(f[12])
			if err != nil {
				r.t.Fatalf("%q: %v", line, err)
			}
			return timeout > 100
		}
	}
	return false
}

// TestDrainedIsTrue checks that, while the leaf reads nothing and its window is full, a drain is shown as being under
// way, with the session; it completes once the leaf reads.
func TestDrainedIsTrue(t *testing.T) {
	var stalled *rawLeaf
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 0s\n"}, rigOptions{leaves: func(l *rawLeaf) {
		l.table[destination(0)] = 400e9
		if l.name != "p1.0" {
			return
		}
		stalled = l
		raw, err := l.ln.SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) })
		}
		if err != nil {
			t.Fatal(err)
		}
	}})
	target := core.DrainTarget{Plane: "p1"}
	r.wait(destination(0), "1:1")
	r.waitAnnounced(1, own, "400G")
	if got := r.shown(); got != "in service, in service, established" {
		t.Errorf("before the drain: %s", got)
	}
	stalled.stall(true)
	defer stalled.stall(false)
	// Repeat drains until their messages fill the leaf's window.
	full := false
	for cycles := 0; !full; cycles++ {
		if cycles == 200 {
			t.Fatal("the leaf's window does not fill")
		}
		r.drain("p1", true)
		eventually(t, "drained, or the window full", func() bool {
			full = r.windowClosed(1) && r.d.speaker.Status(1).Untaken && r.stage(target) != "drained"
			return full || r.stage(target) == "drained"
		})
		if !full {
			r.drain("p1", false)
			eventually(t, "back", func() bool { return r.stage(target) == "none" })
		}
	}
	d := r.drainStatus()
	if d.Stage != "routes" && d.Stage != "withdrawing" || len(d.WaitsFor) != 1 || !strings.HasPrefix(d.WaitsFor[0], "session p1/p1.0: ") ||
		!strings.HasSuffix(d.WaitsFor[0], "the leaf reads nothing from its connection") {
		t.Errorf("the leaf's window is full, and the drain is shown as %v", d)
	}
	if got := r.shown(); got != "draining, draining, draining" {
		t.Errorf("meanwhile: %s", got)
	}
	stalled.stall(false)
	eventually(t, "drained", func() bool { return r.stage(target) == "drained" })
	if got := r.shown(); got != "drained, drained, drained" {
		t.Errorf("at the end: %s", got)
	}
	r.waitAnnounced(1, own, "nothing")
	if n := stalled.count(); n != 1 {
		t.Errorf("the session came up %d times", n)
	}
}

// TestDrainedSurvivesTheSession checks that a session that comes up during a drain announces nothing, and that the
// drain stays complete; also for a leaf, whose routes depend on the neighbor.
func TestDrainedSurvivesTheSession(t *testing.T) {
	for name, s := range map[string]shape{
		"server": {Planes: 2, SubPorts: 1, Extra: "drain_delay: 0s\n"},
		"leaf":   {Planes: 2, SubPorts: 1, Leaf: true, Extra: "drain_delay: 0s\n"},
	} {
		t.Run(name, func(t *testing.T) {
			announced := own
			r := newRig(t, s, rigOptions{leaves: func(l *rawLeaf) {
				if !s.Leaf || l.name == "p0.0" {
					l.table[destination(0)] = 400e9
				}
			}})
			if s.Leaf {
				announced = destination(0)
			}
			eventually(t, "the neighbor has a route", func() bool {
				return r.leaves[1].has(announced) != "nothing" && r.leaves[1].has(announced) != "no session"
			})
			target := core.DrainTarget{SubPort: r.s.Device(1)}
			drain := func() {
				t.Helper()
				_, err := r.d.FabricService().Drain(t.Context(), &farev1.DrainRequest{Force: true, Target: &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: target.SubPort}}})
				if err != nil {
					t.Fatal(err)
				}
			}
			r.links.change(1, func(ev *LinkEvent) { ev.Up = false })
			eventually(t, "the session is lost", func() bool { return r.leaves[1].has(announced) == "no session" })
			drain()
			eventually(t, "a drain without sessions is at its end", func() bool { return r.stage(target) == "drained" })
			// A session that comes up before GoBGP has removed the routes is withdrawing until then.
			eventually(t, "GoBGP has no route for the session", func() bool { return r.d.speaker.Status(1).Advertised == 0 })
			n := r.journal.len()
			stages := map[string]bool{}
			r.links.change(1, func(ev *LinkEvent) { ev.Up = true })
			eventually(t, "the session is back", func() bool {
				stages[r.stage(target)] = true
				return r.leaves[1].count() == 2 && r.journal.index(n, r.s.Device(1)+": End-of-RIB") >= 0
			})
			if i := r.journal.index(n, r.s.Device(1)+": "+announced.String()); i >= 0 {
				t.Errorf("the session came up with %s", r.journal.since(i)[0])
			}
			if len(stages) != 1 || !stages["drained"] {
				t.Errorf("meanwhile the drain was in stages %v", stages)
			}
		})
	}
}

// TestDrainedLeafThatFails checks that the sub-port of a drained leaf counts as drained while the leaf's session is
// down, as during its maintenance.
func TestDrainedLeafThatFails(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 0s\n"}, rigOptions{leaves: announceAll(400e9, 1)})
	r.wait(destination(0), "1:1")
	target := &farev1.DrainTarget{Target: &farev1.DrainTarget_Leaf{Leaf: leafNode(1).String()}}
	if err := r.request(true, target, ""); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the drain to end", func() bool { return r.shown() == "in service, drained, drained" })
	r.leaves[1].ln.Close()
	r.leaves[1].drop()
	eventually(t, "the session to fail", func() bool { return r.shown() == "in service, drained, connecting" })
	if err := r.request(false, target, ""); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the undrain", func() bool { return r.shown() == "in service, in service, connecting" })
}
