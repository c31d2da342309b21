package daemon

import (
	stdcmp "cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/speaker"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
	"github.com/fared/fared/internal/testkit/gate"
	"github.com/fared/fared/wecmp"
)

// idle returns a daemon that does not run: the test is the loop's goroutine and makes every input.
func idle(t testing.TB, text string) *loop {
	t.Helper()
	cfg, err := config.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	d, err := New(cfg, Deps{Memory: dialMemory, Links: newTestLinks(0, 0), Embedded: true, LogLevel: &slog.LevelVar{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	d.deps.LogLevel.Set(cfg.Log.Level)
	d.loop.wokenAt = time.Now()
	return d.loop
}

// reloadable returns the paths of the keys that a reload may change, without indexes.
func reloadable(of reflect.Type, path string) (out []string) {
	for of.Kind() == reflect.Slice || of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct {
		return nil
	}
	for f := range of.Fields() {
		key := f.Tag.Get("yaml")
		if key == "" || key == "-" {
			continue
		}
		if path != "" {
			key = path + "." + key
		}
		if reload := f.Tag.Get("reload"); reload != "" && reload != "planes" { // core tests the keys of planes
			out = append(out, key)
		}
		out = append(out, reloadable(f.Type, key)...)
	}
	return out
}

// anyConfig returns a random configuration of one shape, which varies the keys that a reload may change. Owned
// sub-ports serve one of two loopbacks, which stay.
func anyConfig(r *rand.Rand, s shape, owned bool) string {
	pick := func(words ...string) string { return words[r.IntN(len(words))] }
	s.NoSpeed = true
	s.Loopbacks = []string{pick("10.255.0.1/32", "10.255.0.1/32, 10.255.1.0/32", "10.255.0.9/32, 10.255.1.1/32", "10.255.0.1/32, 10.255.0.9/32")}
	s.Extra = fmt.Sprintf("drain_delay: %s\nlog: {level: %s}\npath_bandwidth: {advertise: %s, missing: %s, all_missing: %s, all_zero: %s, conflict: %s, least_preferred: %s, increase_hold_up: %s}\n",
		pick("1s", "5s"), pick("info", "debug"), pick("sub-port", "node"), pick("equal", "local", "skip"), pick("equal", "local"),
		pick("equal", "unreachable"), pick("weigh", "prefer-first", "drop"), pick("[]", "[llgr-stale]", "[graceful-shutdown, prepended]"), pick("0s", "1h"))
	s.Extra += fmt.Sprintf("links: {damping: {failures: %s, hold: %s, longest: %s, quiet: %s}}\n",
		pick("0", "4"), pick("500ms", "1s"), pick("10s", "20s"), pick("30s", "1m"))
	keys := func() string {
		return pick("[{id: 1, key_file: /a}]", "[{key_file: /b}]", "[{id: 1, key_file: /a}, {id: 2, key_file: /b}]", "[{id: 2, key_file: /b}, {id: 1, key_file: /a}]")
	}
	s.Extra += fmt.Sprintf("bfd: {interval: 0s, auth: {keys: %s}}\n", keys())
	s.Extra += fmt.Sprintf("proof: {keys: %s, unproved: %s, avoid_after: %s}\n",
		pick("[]", "[{key_file: /a}]", "[{key_file: /b}, {key_file: /a}]"), pick("report", "avoid"), pick("200ms", "1s"))
	if owned {
		s.Loopbacks = []string{"10.255.0.1/32, 10.255.0.2/32"}
	}
	text := strings.Replace(s.Text(), "- {", fmt.Sprintf("- {bfd_auth: {type: keyed-md5, keys: %s}, ", keys()), 1)
	for i := range s.Planes * s.SubPorts {
		if device := "- device: " + s.Device(i) + "\n"; owned {
			text = strings.Replace(text, device, fmt.Sprintf("%s        loopbacks: [10.255.0.%d/32]\n", device, 1+i%2), 1)
		}
	}
	for i := range s.Planes * s.SubPorts {
		if speed := pick("", "", "100G", "400G"); speed != "" {
			device := "- device: " + s.Device(i) + "\n"
			text = strings.Replace(text, device, device+"        speed: "+speed+"\n", 1)
		}
	}
	return text
}

// anyInputs returns random inputs of a loop: links, sessions, routes (some to a possible own loopback), End-of-RIB,
// avoidances.
func anyInputs(r *rand.Rand, s shape, n int) (out []func(*loop)) {
	count := s.Planes * s.SubPorts
	generation, transitions := make([]uint64, count), make([]uint64, count)
	prefixes := []netip.Prefix{destination(0), destination(1), destination(2), netip.MustParsePrefix("10.255.0.9/32")}
	up := make([]bool, count)
	for range n {
		i := r.IntN(count)
		switch r.IntN(9) {
		case 8:
			ev := core.Avoid{Destination: prefixes[r.IntN(3)], Plane: i / s.SubPorts, On: r.IntN(3) > 0}
			out = append(out, func(l *loop) { l.avoid([]core.Avoid{ev}) })
		case 0, 1:
			ev := LinkEvent{SubPort: i, Up: r.IntN(4) > 0, Speed: []fare.Bandwidth{0, 100e9, 400e9}[r.IntN(3)]}
			if ev.Up != up[i] {
				transitions[i]++
				up[i] = ev.Up
			}
			ev.Transitions = transitions[i]
			out = append(out, func(l *loop) { copied := ev; l.link(&copied) })
		case 2:
			generation[i]++
			ev := speaker.SessionUp{Session: i, Generation: generation[i], Node: leafNode(i / s.SubPorts), PeerAS: s.PeerAS(i), Families: speaker.FamilySet(3)}
			out = append(out, func(l *loop) { l.bgp(ev) })
		case 3:
			if r.IntN(3) == 0 {
				ev := speaker.SessionDown{Session: i, Generation: generation[i]}
				out = append(out, func(l *loop) { l.bgp(ev) })
			}
		case 4:
			ev := oneWithdrawal(i, generation[i], prefixes[r.IntN(len(prefixes))])
			out = append(out, func(l *loop) { l.bgp(ev) })
		default:
			attrs := &fare.Attributes{ASPath: []uint32{s.PeerAS(i), uint32(65001 + r.IntN(2))}, Signals: fare.Signals(r.IntN(8)) & fare.Signals(r.IntN(4))}
			if r.IntN(4) > 0 {
				attrs.Communities = append(attrs.Communities, fare.Codec{}.Encode([]fare.Bandwidth{0, 100e9, 200e9, 800e9}[r.IntN(4)], netip.Addr{}))
			}
			ev := oneRoute(i, generation[i], prefixes[r.IntN(len(prefixes))], attrs)
			out = append(out, func(l *loop) { l.bgp(ev) })
		}
	}
	return out
}

// made returns a loop's results of its inputs.
func made(l *loop) string {
	var b strings.Builder
	for i := range l.core.Layout().SubPorts {
		view := l.core.SubPort(i)
		fmt.Fprintf(&b, "sub-port %d %v %s\n", i, view.Up, view.Speed)
	}
	l.core.Drains(func(t core.DrainTarget, s core.DrainStage) { fmt.Fprintf(&b, "drain %s %s\n", t, s) })
	l.core.Destinations(func(source int, prefix netip.Prefix, vector uint32) {
		if v, ok := l.core.Vector(vector); ok && v.Reachable {
			slots := slices.Clone(v.Slots)
			slices.SortFunc(slots, func(a, b wecmp.Slot) int { // a reload does not move slots for the sake of their order
				return stdcmp.Or(stdcmp.Compare(a.Plane, b.Plane), stdcmp.Compare(a.SubPort, b.SubPort), stdcmp.Compare(a.SharePPB, b.SharePPB))
			})
			fmt.Fprintf(&b, "%d %s %v %v %v %v\n", source, prefix, v.Weights, v.Bandwidths, v.SubPortWeights, slots)
		}
	})
	_ = l.core.Step(core.Reload{Config: l.core.Config().Text()}) // makes all routes due
	l.core.Advertise(func(session int, routes []core.Route) {
		if l.core.SessionState(session).Up {
			fmt.Fprintf(&b, "session %d %v\n", session, routes)
		}
	})
	for i := range l.links {
		fmt.Fprintf(&b, "link %d %v %s %q\n", i, l.links[i].Up, l.links[i].Speed, l.links[i].SpeedSource)
	}
	fmt.Fprintf(&b, "%s\n%v\n%v\n%v\n%v", l.core.Config().Text(), l.d.deps.LogLevel, forwardingOf(l.core), l.loopbacks, l.statusLayout().Groups)
	return b.String()
}

// TestReloadEqualsAFreshStart checks that a daemon that was reloaded to a configuration, at any moment and from any
// other configuration that differs only in reloadable keys, equals a daemon that started with it and had the same
// inputs.
func TestReloadEqualsAFreshStart(t *testing.T) {
	gate.WithoutRaceDetector(t, "has one goroutine, and a tenth of the cases with it")
	seen := map[string]bool{}
	index := regexp.MustCompile(`\[\d+\]`)
	s := shape{Planes: 2, SubPorts: 2}
	for seed := range uint64(gate.Count(t, gate.Models, 60, 500)) {
		r := rand.New(rand.NewPCG(seed, 12))
		from, over, to := anyConfig(r, s, seed%3 == 0), anyConfig(r, s, seed%3 == 0), anyConfig(r, s, seed%3 == 0)
		inputs := anyInputs(r, s, 30+r.IntN(60))
		at := r.IntN(len(inputs) + 1)
		first := r.IntN(at + 1) // an earlier reload to a third configuration
		between, err := config.Parse("over", []byte(over))
		if err != nil {
			t.Fatal(err)
		}
		reloaded, fresh := idle(t, from), idle(t, to)
		for i, input := range inputs {
			if i == first {
				reloaded.reload(between)()
			}
			if i == at {
				reloaded.reload(fresh.core.Config())()
			}
			for _, l := range []*loop{reloaded, fresh} {
				input(l)
				l.wokenAt = l.wokenAt.Add(2 * time.Hour) // longer than any hold-up
				l.timers()
			}
		}
		if at == len(inputs) {
			reloaded.reload(fresh.core.Config())()
		}
		if diff := cmp.Diff(made(fresh), made(reloaded)); diff != "" {
			t.Fatalf("seed %d, reload after %d of %d inputs, from\n%s\nto\n%s\nfresh (-), reloaded (+):\n%s", seed, at, len(inputs), from, to, diff)
		}
		before, err := config.Parse("from", []byte(from))
		if err != nil {
			t.Fatal(err)
		}
		changes, err := config.Diff(before, fresh.core.Config())
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range changes {
			seen[index.ReplaceAllString(c.Path, "")] = true
		}
		reloaded.d.Close()
		fresh.d.Close()
	}
	for _, key := range reloadable(reflect.TypeFor[config.Config](), "") {
		if !seen[key] {
			t.Errorf("no reload of %s was tried", key)
		}
	}
	if len(seen) != len(slices.Compact(reloadable(reflect.TypeFor[config.Config](), ""))) {
		t.Errorf("tried %v", seen)
	}
}

// TestReloadShortensWhatWaits checks that a pending hold-up and drain delay end no later than the new time.
func TestReloadShortensWhatWaits(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 1, NoSpeed: true}
	text := func(hold, delay string) string {
		s := s
		s.Extra = "path_bandwidth: {increase_hold_up: " + hold + "}\ndrain_delay: " + delay + "\n"
		return s.Text()
	}
	l := idle(t, text("1h", "1h"))
	l.link(&LinkEvent{Up: true, Speed: 100e9})
	l.link(&LinkEvent{Up: true, Speed: 400e9})
	l.step(core.DrainRequest{Target: core.DrainTarget{Plane: "p0"}, On: true})
	l.step(core.DrainStep{Target: core.DrainTarget{Plane: "p0"}, Confirmed: true})
	l.timers()
	if !l.links[0].held || len(l.drainTimers) != 1 {
		t.Fatalf("held %v, timers %v", l.links[0].held, l.drainTimers)
	}
	next, err := config.Parse("next", []byte(text("0s", "0s")))
	if err != nil {
		t.Fatal(err)
	}
	l.reload(next)()
	l.wokenAt = time.Now()
	l.timers()
	if l.links[0].held || l.core.SubPort(0).Speed != 400e9 {
		t.Errorf("the faster link is held up until %v", l.links[0].holdUntil)
	}
	if got := stages(l.core); !slices.Equal(got, []core.DrainStage{core.Drained}) {
		t.Errorf("the drain is in stage %v", got)
	}
}

// TestReloadIsSeen checks that a view which is requested after a reload's answer, and before its rest, is not the one
// before: it waits for the loop.
func TestReloadIsSeen(t *testing.T) {
	s := shape{Planes: 1, SubPorts: 1, Loopbacks: []string{"10.255.0.1/32"}}
	l := idle(t, s.Text())
	var rest func()
	reader := l.builder.Reader(func(_ context.Context, fn func()) error {
		if rest != nil {
			rest()
		}
		fn()
		return nil
	})
	before, err := reader.View(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if same, err := reader.View(t.Context()); err != nil || same != before {
		t.Fatalf("another view without a change, %v", err)
	}
	for _, extra := range []string{"10.255.0.2/32", "10.255.0.2/32, 10.255.0.3/32"} {
		s.Loopbacks = []string{"10.255.0.1/32", extra}
		rest = l.reload(s.Config(t))
		after, err := reader.View(t.Context())
		if err != nil || after.Revision() <= before.Revision() {
			t.Errorf("%s: revision %d after %d, %v", extra, after.Revision(), before.Revision(), err)
		}
		before = after
	}
}

// TestRestPrecedesInput checks that begin returns before the rest of its function, which ends before the next one.
func TestRestPrecedesInput(t *testing.T) {
	r := newRig(t, shape{Planes: 1, SubPorts: 1}, rigOptions{leaves: announceAll(400e9, 1)})
	returned, ended := make(chan struct{}), false
	rest := func() { <-returned; ended = true }
	if err := r.d.loop.begin(t.Context(), func() func() { return rest }); err != nil {
		t.Fatal(err)
	}
	close(returned)
	r.inside(func(*loop) {
		if !ended {
			t.Error("a function ran before the rest of the one before")
		}
	})
}

// reloadRig returns a rig whose configuration is a file.
func reloadRig(t *testing.T) (r *rig, write func(func(shape) string)) {
	path := filepath.Join(t.TempDir(), "fared.yaml")
	s := shape{Planes: 2, SubPorts: 1}
	r = newRig(t, s, rigOptions{leaves: announceAll(800e9, 1), deps: func(d *Deps) { d.ConfigPath = path }})
	write = func(text func(shape) string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text(r.s)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(shape.Text)
	r.wait(destination(0), "1:1")
	r.waitAnnounced(1, own, "400G")
	return r, write
}

// slower returns the configuration with another speed of p1.0.
func slower(s shape) string {
	return strings.Replace(s.Text(), "device: p1.0\n        speed: 400G", "device: p1.0\n        speed: 200G", 1)
}

func (r *rig) reload(dryRun bool) (string, error) {
	resp, err := r.d.FabricService().Reload(context.Background(), &farev1.ReloadRequest{DryRun: dryRun})
	return strings.Join(resp.GetChanges(), "; "), err
}

// TestReload checks that a permitted change is applied without closing a session; a dry run only reports it.
func TestReload(t *testing.T) {
	r, write := reloadRig(t)
	if changes, err := r.reload(false); err != nil || changes != "" {
		t.Fatalf("an equal file: %q, %v", changes, err)
	}
	write(func(s shape) string {
		s.Extra += "path_bandwidth: {missing: skip}\ndrain_delay: 1s\n"
		return slower(s)
	})
	want := "drain_delay: 5s -> 1s; path_bandwidth.missing: local -> skip; planes[1].sub_ports[0].speed: 400G -> 200G"
	if changes, err := r.reload(true); err != nil || changes != want {
		t.Fatalf("dry run: %q, %v", changes, err)
	}
	if value := r.leaves[1].has(own); value != "400G" || r.weights(destination(0)) != "1:1" {
		t.Fatalf("after a dry run the leaf has %s, weights %s", value, r.weights(destination(0)))
	}
	if changes, err := r.reload(false); err != nil || changes != want {
		t.Fatalf("reload: %q, %v", changes, err)
	}
	r.waitAnnounced(1, own, "200G")
	r.wait(destination(0), "2:1")
	write(func(s shape) string {
		return strings.Replace(slower(s), "loopbacks: [10.255.0.1/32]", "loopbacks: [10.255.0.1/32, 10.255.0.9/32]", 1)
	})
	if _, err := r.reload(false); err != nil {
		t.Fatal(err)
	}
	r.waitAnnounced(0, netip.MustParsePrefix("10.255.0.9/32"), "400G")
	r.waitAnnounced(1, netip.MustParsePrefix("10.255.0.9/32"), "200G")
	for i := range r.leaves {
		if n := r.leaves[i].count(); n != 1 {
			t.Errorf("leaf %d: %d sessions, a reload loses none", i, n)
		}
	}
}

// TestReloadSeesContents checks that a reload notices a changed content of a file that the configuration names, also
// after another reload, and that its answer does not show the content.
func TestReloadSeesContents(t *testing.T) {
	r, write := reloadRig(t)
	key := filepath.Join(t.TempDir(), "bfd.key")
	file := func(extra string) {
		write(func(s shape) string { s.Extra += extra; return s.Text() })
	}
	secret := func(text string) {
		t.Helper()
		if err := os.WriteFile(key, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	next, err := config.Parse("next", []byte(r.s.Text()))
	if err != nil {
		t.Fatal(err)
	}
	next.BFD.Auth = &config.BFDAuth{Type: config.BFDMeticulousSHA1, Keys: []config.BFDKey{{ID: 1, KeyFile: key, Key: "secret-1"}}}
	r.inside(func(l *loop) { l.config = next })
	auth := "bfd: {auth: {keys: [{id: 1, key_file: " + key + "}]}}\n"
	for _, c := range []struct{ secret, extra, want string }{
		{"secret-1", "", ""},
		{"secret-2", "", "bfd.auth.keys: its keys -> other keys"},
		{"secret-2", "drain_delay: 1s\n", "drain_delay: 5s -> 1s"},
		{"secret-3", "drain_delay: 1s\n", "bfd.auth.keys: its keys -> other keys"},
		{"secret-3", "drain_delay: 1s\n", ""},
	} {
		secret(c.secret)
		file(auth + c.extra)
		for _, dryRun := range []bool{true, false} {
			if got, err := r.reload(dryRun); err != nil || got != c.want {
				t.Errorf("%+v: %q, %v", c, got, err)
			}
		}
	}
}

// TestReloadIsRefusedWhole checks that one key that needs a restart, or one mistake, rejects the whole file.
func TestReloadIsRefusedWhole(t *testing.T) {
	r, write := reloadRig(t)
	unchanged := func() {
		t.Helper()
		if value := r.leaves[1].has(own); value != "400G" || r.weights(destination(0)) != "1:1" {
			t.Errorf("the leaf has %s, weights %s", value, r.weights(destination(0)))
		}
		var text string
		r.inside(func(l *loop) { text = l.core.Config().Text() })
		if text != r.s.Config(t).Text() {
			t.Errorf("the configuration is now\n%s", text)
		}
	}
	once := func(err error) { // the file at each mistake, and the rest
		t.Helper()
		lines := strings.Split(fmt.Sprint(err), "\n")
		for _, line := range lines {
			if strings.Count(line, r.d.deps.ConfigPath) > 1 {
				t.Errorf("a line names the file twice: %s", line)
			}
		}
		if strings.Count(fmt.Sprint(err), "nothing was changed") != 1 || len(lines) > 1 && strings.Contains(lines[len(lines)-1], " -> ") {
			t.Errorf("the remedy is not a line, or given twice:\n%v", err)
		}
	}
	write(func(s shape) string {
		s.Extra += "weights: {slots: 4}\n"
		return strings.NewReplacer("as: 4200001000", "as: 4200001001").Replace(slower(s))
	})
	_, err := r.reload(false)
	if err == nil || !strings.Contains(err.Error(), "as: 4200001000 -> 4200001001") || !strings.Contains(err.Error(), "weights.slots: 0 -> 4") {
		t.Errorf("a forbidden change: %v, want both reasons", err)
	}
	once(err)
	unchanged()
	write(func(s shape) string { return slower(s) + "color: red\ndrain_delay: 5\n" })
	if _, err = r.reload(false); err == nil || !strings.Contains(err.Error(), "color") || !strings.Contains(err.Error(), "drain_delay") {
		t.Errorf("a broken file: %v, want both mistakes", err)
	}
	once(err)
	unchanged()
	if err := os.Remove(r.d.deps.ConfigPath); err != nil {
		t.Fatal(err)
	}
	if _, err = r.reload(false); err == nil || !strings.Contains(err.Error(), r.d.deps.ConfigPath) {
		t.Errorf("no file: %v", err)
	}
	once(err)
	unchanged()
}

// without returns the text of a configuration without the plane of an index.
func without(text string, plane int) string {
	parts := strings.Split(text, "  - name: ")
	return strings.Join(slices.Delete(parts, 1+plane, 2+plane), "  - name: ")
}

// TestReloadOfPlanes checks, on sessions with leaves, that a plane can be removed and added again: its leaf loses the
// session, and later gets the routes on a new one, while the sessions of the other leaves stay.
func TestReloadOfPlanes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fared.yaml")
	r := newRig(t, shape{Planes: 3, SubPorts: 1}, rigOptions{leaves: announceAll(800e9, 2), deps: func(d *Deps) { d.ConfigPath = path }})
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.wait(destination(1), "1:1:1")
	for round := 1; round < 4; round++ {
		for plane := range 3 {
			write(without(r.s.Text(), plane))
			if changes, err := r.reload(false); err != nil || changes != fmt.Sprintf("planes[%d]: p%d -> none", plane, plane) {
				t.Fatalf("%q, %v", changes, err)
			}
			r.wait(destination(1), "1:1")
			eventually(t, "the end of the session", func() bool { return r.leaves[plane].has(own) == "no session" })
			write(r.s.Text())
			if _, err := r.reload(false); err != nil {
				t.Fatal(err)
			}
			r.wait(destination(1), "1:1:1")
			r.waitAnnounced(plane, own, "400G")
		}
		for i, leaf := range r.leaves {
			if n := leaf.count(); n != 1+round {
				t.Errorf("round %d: leaf %d has had %d sessions", round, i, n)
			}
		}
	}
}

// TestReloadMovesFaults checks that the reported faults of sessions follow their sessions: the faults of removed ones
// are forgotten, and the end of another one is reported with its name.
func TestReloadMovesFaults(t *testing.T) {
	s := shape{Planes: 3, SubPorts: 1}
	l := idle(t, s.Text())
	l.faultReport.reported = map[faultKey]bool{{status.FaultRoutesDropped, 0, "of p0"}: true, {status.FaultRoutesDropped, 2, "of p2"}: true}
	next, err := config.Parse("next", []byte(without(s.Text(), 0)))
	if err != nil {
		t.Fatal(err)
	}
	l.reload(next)()
	if want := map[faultKey]bool{{status.FaultRoutesDropped, 1, "of p2"}: true}; !reflect.DeepEqual(l.faultReport.reported, want) {
		t.Errorf("reported %v, want %v", l.faultReport.reported, want)
	}
	l.reportFaults()
	if len(l.faultReport.reported) > 0 {
		t.Errorf("still reported: %v", l.faultReport.reported)
	}
}
