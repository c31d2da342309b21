package daemon

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	grpcstatus "google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
)

// answering runs the calls of a loop in a separate goroutine until the test ends; the loop itself does not run.
func answering(t *testing.T, l *loop) {
	t.Helper()
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case fn := <-l.calls:
				fn()
			case <-end:
				return
			}
		}
	}()
	t.Cleanup(func() { close(end); <-ended })
}

// TestClearSession clears a session of a running daemon: it comes back in the next generation, and the event of its end
// has the caller. Unknown names are refused with the sessions, a session that is not established with its state.
func TestClearSession(t *testing.T) {
	r := newRig(t, shape{Planes: 2, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	r.wait(destination(0), "1:1")
	call := peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 9), Port: 1234}})
	clear := func(name string) error {
		_, err := r.d.FabricService().ClearSession(call, &farev1.ClearSessionRequest{Session: name})
		return err
	}
	if err := clear("p2/p2.0"); grpcstatus.Code(err) != codes.NotFound || !strings.Contains(err.Error(), "session p2/p2.0: there is none: name one of p0/p0.0, p1/p1.0") {
		t.Errorf("an unknown session: %v", err)
	}
	before := r.d.speaker.Status(1)
	if err := clear("p1/p1.0"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the session is established again", func() bool {
		s := r.d.speaker.Status(1)
		return s.State == speaker.Established && s.Generation > before.Generation
	})
	r.wait(destination(0), "1:1")
	if s := r.d.speaker.Status(1); s.Reason != "administrative reset by 192.0.2.9:1234" {
		t.Errorf("the session ended with %q", s.Reason)
	}
	r.links.change(1, func(e *LinkEvent) { e.Up, e.Reason = false, "no carrier" })
	eventually(t, "the session is held", func() bool { return r.d.speaker.Status(1).State == speaker.Held })
	if err := clear("p1/p1.0"); grpcstatus.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "session p1/p1.0: it is not established but held: held down: no carrier") {
		t.Errorf("a held session: %v", err)
	}
}

// TestCallersAreNamed checks that events of drain, undrain and reload contain the caller of the RPC; a call inside the
// process has none.
func TestCallersAreNamed(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := idle(t, s.Text())
	answering(t, l)
	establish(l, s, 0)
	establish(l, s, 1)
	l.d.deps.ConfigPath = filepath.Join(t.TempDir(), "fared.yaml")
	file := func(text string) {
		t.Helper()
		if err := os.WriteFile(l.d.deps.ConfigPath, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	call := peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 9), Port: 1234}})
	sessions := func(want ...string) func([]string) {
		return func(got []string) {
			if !slices.Equal(got, want) {
				t.Errorf("sessions %q, want %q", got, want)
			}
		}
	}
	drain := func(target status.DrainTarget, on bool, check func([]string)) func(context.Context) error {
		return func(ctx context.Context) error {
			got, names, err := l.d.drain(ctx, status.DrainRequest{Target: target, On: on, Force: true})
			check(names)
			if want := (status.DrainTarget{Plane: target.Plane, SubPort: target.SubPort}); target.Leaf == "" && got != want {
				t.Errorf("drained %+v, want %+v", got, want)
			} else if target.Leaf != "" && got.Leaf != "10.1.0.1" {
				t.Errorf("drained %+v, want the leaf's router ID", got)
			}
			return err
		}
	}
	read := func(ctx context.Context, dry bool) ([]string, error) {
		changes, err := l.d.Reload(ctx, dry)
		return changes, errors.Join(err, l.do(t.Context(), func() {})) // the rest of the reload has ended, too
	}
	reading := func(text string, dry bool) func(context.Context) error {
		return func(ctx context.Context) error {
			file(text)
			_, err := read(ctx, dry)
			return err
		}
	}
	reload := func(text string) func(context.Context) error { return reading(text, false) }
	dryRun := func(text string) func(context.Context) error { return reading(text, true) }
	for _, c := range []struct {
		call func(context.Context) error
		ctx  context.Context
		want string
	}{
		{drain(status.DrainTarget{Plane: "p1"}, true, sessions("p1/p1.0")), call, "drain, plane p1: by 192.0.2.9:1234, forced"},
		{drain(status.DrainTarget{Plane: "p1"}, false, sessions("p1/p1.0")), call, "undrain, plane p1: by 192.0.2.9:1234"},
		{drain(status.DrainTarget{SubPort: "p0.0"}, true, sessions("p0/p0.0")), t.Context(), "drain, sub-port p0.0: forced"},
		{drain(status.DrainTarget{Leaf: "10.1.0.1"}, true, sessions("p0/p0.0")), call, "drain, leaf 10.1.0.1: by 192.0.2.9:1234, forced"},
		{drain(status.DrainTarget{Leaf: s.Defaults().There(0).String()}, false, sessions("p0/p0.0")), t.Context(), "undrain, leaf 10.1.0.1: "},
		{reload("drain_delay: 7s\n" + s.Text()), call, "reload, " + l.d.deps.ConfigPath + ": 1 change by 192.0.2.9:1234"},
		{reload("drain_delay: 7s\n" + s.Text()), call, "reload, " + l.d.deps.ConfigPath + ": 0 changes by 192.0.2.9:1234"},
		{dryRun(s.Text()), call, "reload, " + l.d.deps.ConfigPath + ": dry run: 1 change by 192.0.2.9:1234"},
		{reload(s.Text()), t.Context(), "reload, " + l.d.deps.ConfigPath + ": 1 change"},
	} {
		revision := l.builder.Commit()
		var err error
		if got := during(l, func() { err = c.call(c.ctx) }); got != c.want || err != nil {
			t.Errorf("events %q, %v; want %q", got, err, c.want)
		}
		if again := l.builder.Commit() > revision; again != (c.want != "") {
			t.Errorf("%q: the status has a new revision: %v", c.want, again)
		}
	}
	// The command line's changes are applied each time the file is read.
	l.d.deps.Override = func(cfg *config.Config) { cfg.DrainDelay = 9 * time.Second }
	changes, err := read(t.Context(), false)
	if err != nil || !slices.Equal(changes, []string{"drain_delay: 5s -> 9s"}) || l.core.Config().DrainDelay != 9*time.Second {
		t.Errorf("with a flag: changes %q, %v, delay %v", changes, err, l.core.Config().DrainDelay)
	}
	if changes, err = read(t.Context(), false); err != nil || len(changes) != 0 {
		t.Errorf("the same file and flag: changes %q, %v", changes, err)
	}
}

// TestCallsEndWithTheDaemon checks that a call after the end of the loop, or whose caller gives up, ends with that
// reason.
func TestCallsEndWithTheDaemon(t *testing.T) {
	l := idle(t, shape{Planes: 2, SubPorts: 1}.Text())
	gone := errors.New("the caller is gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	if err := l.do(ctx, func() { t.Error("called") }); !errors.Is(err, gone) {
		t.Errorf("a caller that is gone: %v", err)
	}
	close(l.stopped)
	if err := l.do(t.Context(), func() { t.Error("called") }); !errors.Is(err, errStopped) {
		t.Errorf("after the loop's end: %v", err)
	}
	target := status.DrainTarget{Plane: "p1"}
	if got, _, err := l.d.drain(t.Context(), status.DrainRequest{Target: target, On: true}); !errors.Is(err, errStopped) || got != target {
		t.Errorf("a drain after the loop's end: %v, %v", got, err)
	}
}

// TestExplanation checks that an explanation has every route with its communities, every plane with its nodes, and the
// rules, also for two origins and without any plane.
func TestExplanation(t *testing.T) {
	s := shape{Planes: 2, SubPorts: 1}
	l := idle(t, s.Text())
	key := status.Key{Prefix: destination(0)}
	if _, known := l.explain(key); known {
		t.Error("a destination that no leaf announces is explained")
	}
	for i, origin := range []uint32{64001, 64666} {
		if one, known := l.explain(key); i == 1 && (!known || len(one.Rules) != 1) {
			t.Errorf("with one origin: rules %q", one.Rules)
		}
		establish(l, s, i)
		l.bgp(oneRoute(i, 1, destination(0), attributes(100e9*fare.Bandwidth(i+1), s.PeerAS(i), origin)))
	}
	got, known := l.explain(key)
	if !known {
		t.Fatal("not known")
	}
	for i := range 2 {
		raw := attributes(100e9 * fare.Bandwidth(i+1)).Communities[0]
		name, node, value := s.Device(i), leafNode(i).String(), uint64(100e9*(i+1))
		plane := name[:2]
		if diff := cmp.Diff(status.ExplainedRoute{
			Session: plane + "/" + name, Plane: plane, Device: name, Node: node, Advertised: value, Known: true,
			ASPath:      []uint32{s.PeerAS(i), []uint32{64001, 64666}[i]},
			Communities: []status.ExplainedCommunity{{Raw: hex.EncodeToString(raw[:]), Meaning: fmt.Sprintf("link-bandwidth %d00G", i+1)}},
		}, got.Routes[i]); diff != "" {
			t.Errorf("route %d: want (-), got (+)\n%s", i, diff)
		}
		if diff := cmp.Diff(status.ExplainedPlane{
			Plane: plane, Bandwidth: value,
			Nodes: []status.ExplainedNode{{Node: node, Devices: []string{name}, Local: 400e9, Advertised: value, Known: true, Bandwidth: value}},
		}, got.Planes[i]); diff != "" {
			t.Errorf("plane %d: want (-), got (+)\n%s", i, diff)
		}
	}
	if len(got.Routes) != 2 || len(got.Planes) != 2 || len(got.Rules) != 2 ||
		!strings.HasPrefix(got.Rules[1], "2 origins announce it, AS 64001 over p0/p0.0, AS 64666 over p1/p1.0") {
		t.Errorf("%d routes, %d planes, rules %q", len(got.Routes), len(got.Planes), got.Rules)
	}
	for _, device := range []string{"p0.0", "p1.0"} {
		l.step(core.DrainRequest{Target: core.DrainTarget{SubPort: device}, On: true})
	}
	if got, _ = l.explain(key); got.Rules[len(got.Rules)-1] != "unreachable: drained" || got.Planes[0].Rule != "drained" {
		t.Errorf("drained: rules %q, the plane's %q", got.Rules, got.Planes[0].Rule)
	}
}

// TestRemediesOfIgnoredBandwidth checks that an invalid value, one that is out of bounds and a missing one have
// different remedies.
func TestRemediesOfIgnoredBandwidth(t *testing.T) {
	for reason, part := range map[fare.Reason]string{
		fare.ReasonMissingBandwidth: "send extended communities", fare.ReasonBelowMinimum: "path_bandwidth.minimum", fare.ReasonAboveMaximum: "path_bandwidth.minimum",
		fare.ReasonNotANumber: "the value is not a bandwidth", fare.ReasonNegative: "the value is not a bandwidth",
	} {
		if got := remedyFor(reason); !strings.Contains(got, part) {
			t.Errorf("%v: %q, want %q in it", reason, got, part)
		}
	}
}

// TestIgnoredBandwidthNamesFourSessions checks that the text about ignored bandwidth names four sessions and counts the
// others.
func TestIgnoredBandwidthNamesFourSessions(t *testing.T) {
	s := shape{Planes: 6, SubPorts: 1}
	l := idle(t, s.Text())
	var list []fare.IgnoredBandwidth
	for i, want := range []string{
		"below-minimum from p0/p0.0", "below-minimum from p0/p0.0, p1/p1.0", "below-minimum from p0/p0.0, p1/p1.0, p2/p2.0",
		"below-minimum from p0/p0.0, p1/p1.0, p2/p2.0, p3/p3.0", "below-minimum from p0/p0.0, p1/p1.0, p2/p2.0, p3/p3.0 and 1 more",
		"below-minimum from p0/p0.0, p1/p1.0, p2/p2.0, p3/p3.0 and 2 more",
	} {
		list = append(list, fare.IgnoredBandwidth{Session: i, Reason: fare.ReasonBelowMinimum})
		if got := l.ignoredText(0, list); got != want {
			t.Errorf("%d sessions: %q, want %q", i+1, got, want)
		}
	}
}

// TestDecidingCommunity checks that, of a route with too many communities, the guard keeps the one whose bandwidth
// counts.
func TestDecidingCommunity(t *testing.T) {
	target := [8]byte{0, 2, 0xfd, 0xe8, 0, 0, 0, 1} // a route target
	value := [8]byte(fare.Codec{}.Encode(400e9, netip.Addr{}))
	for _, c := range []struct {
		raw  [][8]byte
		want int
	}{{nil, -1}, {[][8]byte{target}, -1}, {[][8]byte{value}, 0}, {[][8]byte{target, target, value}, 2}} {
		if got := deciding(fare.Codec{})(c.raw); got != c.want {
			t.Errorf("of %x number %d decides, want %d", c.raw, got, c.want)
		}
	}
}

// TestSessionOf checks that an event counts toward the allowance of its own session.
func TestSessionOf(t *testing.T) {
	for _, ev := range []speaker.Event{
		speaker.SessionUp{Session: 3}, speaker.SessionDown{Session: 3}, speaker.EndOfRIB{Session: 3}, speaker.Written{Session: 3}, speaker.Fault{Session: 3},
		speaker.Routes{Session: 3},
	} {
		if session := sessionOf(ev); session != 3 {
			t.Errorf("%T: session %d", ev, session)
		}
	}
}
