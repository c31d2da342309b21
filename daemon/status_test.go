package daemon

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/coretest"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
)

// establish brings up a link and the session over it in a daemon that does not run.
func establish(l *loop, s shape, i int) {
	l.link(&LinkEvent{SubPort: i, Up: true, Speed: 400e9, SpeedSource: "ethtool", Transitions: 1})
	l.bgp(speaker.SessionUp{Session: i, Generation: 1, Node: leafNode(i / s.SubPorts), PeerAS: s.PeerAS(i), Families: speaker.FamilySet(speaker.IPv4)})
}

// TestLoopbacksAreShown checks that sub-ports name the loopbacks that they serve, unless all serve all.
func TestLoopbacksAreShown(t *testing.T) {
	for _, ports := range []shape{{Planes: 2, SubPorts: 2}, coretest.OwnPorts(2, 2)} {
		l := idle(t, ports.Text())
		for p, plane := range (source{l}).Planes() {
			for i, sp := range plane.SubPorts {
				var want []netip.Prefix
				if sources := l.core.Layout().Sources; len(sources) > 1 {
					want = sources[i].Loopbacks
				}
				if !slices.Equal(sp.Loopbacks, want) {
					t.Errorf("sub-port %d of plane %d serves %v, want %v", i, p, sp.Loopbacks, want)
				}
			}
		}
	}
}

// TestPlanesAreShown checks that every plane and sub-port is listed once, in the order of the configuration, with its
// state, its sessions and the reason if it does not count.
func TestPlanesAreShown(t *testing.T) {
	s := shape{Planes: 4, SubPorts: 2, NoSpeed: true}
	l := idle(t, s.Text())
	establish(l, s, 0)
	l.link(&LinkEvent{SubPort: 1, Up: true, Transitions: 1})
	establish(l, s, 2)
	l.link(&LinkEvent{SubPort: 3, Reason: "no carrier"})
	establish(l, s, 4)
	establish(l, s, 5)
	for i := range 2 {
		establish(l, s, 6+i)
	}
	l.step(core.DrainRequest{Target: core.DrainTarget{SubPort: "p1.0"}, On: true})
	l.step(core.DrainStep{Target: core.DrainTarget{SubPort: "p1.0"}, Confirmed: true})
	l.step(core.DrainStep{Target: core.DrainTarget{SubPort: "p1.0"}, Confirmed: false})
	l.step(core.DrainRequest{Target: core.DrainTarget{Plane: "p2"}, On: true})
	l.step(core.DrainRequest{Target: core.DrainTarget{Leaf: leafNode(3)}, On: true})
	l.step(core.RoutesWritten{Session: 2, Generation: 1, Mark: l.core.Mark(2)}) // the end of this drain; the others begin
	subPort := func(i int, sp status.SubPort) status.SubPort {
		sp.Device, sp.Sessions = s.Device(i), []string{fmt.Sprintf("p%d/%s", i/2, s.Device(i))}
		if sp.Speed != 0 {
			sp.SpeedSource = "ethtool"
		}
		return sp
	}
	want := []status.Plane{
		{Name: "p0", Up: true, SubPorts: []status.SubPort{
			subPort(0, status.SubPort{Carrier: true, Speed: 400e9}),
			subPort(1, status.SubPort{Carrier: true, Reason: "speed unknown: set speed in the configuration", Persistent: true}),
		}},
		{Name: "p1", SubPorts: []status.SubPort{
			subPort(2, status.SubPort{Carrier: true, Speed: 400e9, Drained: true, Reason: "drained"}),
			subPort(3, status.SubPort{Reason: "no carrier"}),
		}},
		{Name: "p2", Draining: true, SubPorts: []status.SubPort{
			subPort(4, status.SubPort{Carrier: true, Speed: 400e9, Draining: true, Reason: "drained"}),
			subPort(5, status.SubPort{Carrier: true, Speed: 400e9, Draining: true, Reason: "drained"}),
		}},
		{Name: "p3", SubPorts: []status.SubPort{
			subPort(6, status.SubPort{Carrier: true, Speed: 400e9, Draining: true, Reason: "drained"}),
			subPort(7, status.SubPort{Carrier: true, Speed: 400e9, Draining: true, Reason: "drained"}),
		}},
	}
	if diff := cmp.Diff(want, source{l}.Planes()); diff != "" {
		t.Errorf("want (-), shown (+):\n%s", diff)
	}
	// A device without a link state has this reason.
	if got := (source{idle(t, s.Text())}).Planes()[0].SubPorts[0].Reason; got != "no link state yet" {
		t.Errorf("before the first link state the reason is %q", got)
	}
}

// TestSessionsAreShown checks that a session's names, neighbor, counts and drops are those of its leaf.
func TestSessionsAreShown(t *testing.T) {
	foreign := netip.MustParsePrefix("192.0.2.1/32")
	r := newRig(t, shape{Planes: 2, SubPorts: 1, Extra: "drain_delay: 0s\n"}, rigOptions{leaves: func(l *rawLeaf) {
		for _, d := range coretest.Destinations(3) {
			l.table[d] = 400e9
		}
		if l.name == "p1.0" {
			l.table[own] = 400e9
			l.table[foreign] = 400e9
		}
	}})
	r.settled(3)
	for i := range r.leaves {
		r.waitAnnounced(i, own, "400G")
	}
	shown := func() []string {
		resp, err := r.d.FabricService().ListSessions(t.Context(), &farev1.ListSessionsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, x := range resp.Sessions {
			out = append(out, fmt.Sprintf("%s %s %s, %s AS %d %s, %s generation %d, %d received, %d used, %d advertised, End-of-RIB %v, %q%s %v",
				x.Name, x.Plane, x.Device, x.PeerAddress, x.PeerAs, x.PeerRouterId, x.State, x.Generation, x.RoutesReceived, x.RoutesUsed,
				x.RoutesAdvertised, x.EndOfRib, x.Reason, x.Fault, x.Counters))
		}
		return out
	}
	const dropped = `[name:"guard_dropped{reason=\"route_outside_accept\"}" value:1]`
	r.leaves[0].drop() // the status has the reason of the end from now on
	eventually(t, "the session is complete again", func() bool {
		return r.leaves[0].count() == 2 && strings.Contains(shown()[0], "3 received, 3 used, 1 advertised, End-of-RIB true")
	})
	r.settled(3)
	have := []speaker.Status{r.d.speaker.Status(0), r.d.speaker.Status(1)} // on a busy machine some attempts to connect fail
	first := fmt.Sprintf("p0/p0.0 p0 p0.0, %s AS 65100 10.1.0.1, established generation %d, 3 received, 3 used, 1 advertised, End-of-RIB true, %q []",
		r.s.There(0), have[0].Generation, have[0].Reason)
	second := fmt.Sprintf("p1/p1.0 p1 p1.0, %s AS 65101 10.1.0.2, established generation %d, 3 received, 3 used, 1 advertised, End-of-RIB true, %q ",
		r.s.There(1), have[1].Generation, have[1].Reason)
	spaces := func(lines []string) string { return strings.ReplaceAll(strings.Join(lines, "\n"), "  ", " ") } // protobuf's text varies them
	if got, want := spaces(shown()), first+"\n"+second+dropped; got != want {
		t.Errorf("shown:\n%s\nwant:\n%s", got, want)
	}
	// The leaf announces our loopback as its own: one claim, and one rejected route.
	if got := counters(r); got["conflicts{reason=\"loopbacks\"}"] != 1 || got["inputs_ignored{reason=\"own-loopback\"}"] != 1 {
		t.Errorf("counters: %v", got)
	}
	r.inside(func(l *loop) { l.bgp(speaker.Fault{Session: 0, Reason: "a test of faults"}) })
	r.drain("p1", true)
	eventually(t, "the drain and the fault are shown", func() bool {
		lines := shown()
		return strings.Contains(lines[0], "\"a test of faults\"a test of faults") && strings.Contains(lines[1], ", 0 used,") && strings.Contains(lines[1], fmt.Sprintf(", drained generation %d,", have[1].Generation))
	})
}

// counters returns the status's counters by name.
func counters(r *rig) map[string]uint64 {
	out := map[string]uint64{}
	for _, c := range r.status().Counters {
		out[c.Name] = c.Value
	}
	return out
}

func (r *rig) status() *farev1.GetStatusResponse {
	r.t.Helper()
	resp, err := r.d.FabricService().GetStatus(r.t.Context(), &farev1.GetStatusRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp
}
