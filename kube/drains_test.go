package kube

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/testkit/netnstest"
	"github.com/fared/fared/kube/nodestate"
)

func (d *fakeDaemon) Drain(_ context.Context, r *farev1.DrainRequest) (*farev1.DrainResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	target := r.Target
	if target.GetLeaf() == "10.0.0.1" { // an address of its session
		target = &farev1.DrainTarget{Target: &farev1.DrainTarget_Leaf{Leaf: "10.1.0.1"}}
	}
	name := nodestate.Target(target)
	d.calls = append(d.calls, "drain "+name)
	if d.refuses[name] && !r.Force {
		return nil, status.Error(codes.FailedPrecondition, "no plane would be left")
	}
	d.drains[name] = &farev1.DrainStatus{Target: target, Stage: "drained", Reason: r.Reason, By: "uid 7"}
	d.touch()
	return &farev1.DrainResponse{Target: target}, nil
}

func (d *fakeDaemon) Undrain(_ context.Context, r *farev1.UndrainRequest) (*farev1.UndrainResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	name := nodestate.Target(r.Target)
	d.calls = append(d.calls, "undrain "+name)
	if d.refuses[name] {
		return nil, status.Error(codes.Internal, "the disk is full")
	}
	delete(d.drains, name)
	d.touch()
	return &farev1.UndrainResponse{}, nil
}

// wanting returns a drainer with all sources.
func wanting(t *testing.T, daemon *fakeDaemon) *drainer {
	return &drainer{Options: &Options{Drains: true, DrainCordoned: true, Now: time.Now, Log: slog.New(slog.NewTextHandler(t.Output(), nil))},
		client: farev1.NewFabricServiceClient(daemon.serve(t)), named: map[string]string{}}
}

// by adds a drain to a daemon.
func (d *fakeDaemon) by(t *testing.T, target, reason, stage string) {
	t.Helper()
	parsed, err := parseTarget(target)
	if err != nil {
		t.Fatal(err)
	}
	d.drains[target] = &farev1.DrainStatus{Target: parsed, Reason: reason, Stage: stage}
}

// annotated returns the wishes of a node with an annotation.
func annotated(text string) wishes {
	n := &node{}
	n.Metadata.Annotations = map[string]string{drainAnnotation: text, reasonAnnotation: "new optics"}
	return wishes{node: n}
}

// TestDrains checks which calls annotations cause, and that drains of other callers are left alone.
func TestDrains(t *testing.T) {
	daemon := newFakeDaemon()
	daemon.by(t, "plane/p3", "optics", "drained") // by hand
	d := wanting(t, daemon)
	for i, step := range []struct {
		annotation string
		before     func()
		calls      string
		refused    string
	}{
		{"", nil, "", ""},
		{"plane/p2,plane/p3", nil, "drain plane/p2", ""},
		{" plane/p2, plane/p3,plane/p2,", nil, "", ""},
		{"plane/p3", nil, "undrain plane/p2", ""},
		{"", nil, "", ""},
		{"leaf/10.0.0.1", nil, "drain leaf/10.1.0.1", ""},
		{"leaf/10.0.0.1", nil, "", ""},
		{"sub-port/a/b", nil, "drain sub-port/a/b undrain leaf/10.1.0.1", ""},
		{"sub-port/a/b", func() { daemon.drains["sub-port/a/b"].Stage = "undraining" }, "drain sub-port/a/b", ""},
		{"sub-port/a/b", func() { daemon.drains["sub-port/a/b"].Stage = "given-up" }, "", ""},
		{"sub-port/a/b,plane/p9", func() { daemon.refuses["plane/p9"] = true }, "drain plane/p9", "plane/p9: no plane would be left"},
		{"sub-port/a/b,p9", nil, "", `p9: "p9" is no target: use plane/p2, leaf/10.1.0.3, sub-port/eth4 or all`},
		{"", func() { daemon.refuses["sub-port/a/b"] = true }, "undrain sub-port/a/b", "sub-port/a/b: undrain: the disk is full"},
		{"", func() { clear(daemon.refuses) }, "undrain sub-port/a/b", ""},
		{"plane/", nil, "", `plane/: "plane/" is no target: use plane/p2, leaf/10.1.0.3, sub-port/eth4 or all`},
		{"all", func() { daemon.refuses["plane/p1"] = true }, "drain plane/p0 drain plane/p1", "plane/p1: no plane would be left"},
		{"", nil, "undrain plane/p0", ""},
	} {
		if step.before != nil {
			step.before()
		}
		daemon.calls = nil
		r, err := d.reconcile(context.Background(), annotated(step.annotation))
		var texts []string
		for _, r := range r.refused {
			texts = append(texts, r.Target+": "+r.Error)
		}
		if got := strings.Join(daemon.calls, " "); err != nil || got != step.calls || strings.Join(texts, "; ") != step.refused {
			t.Errorf("step %d, %q: calls %q, want %q; refused %q, %v", i, step.annotation, got, step.calls, texts, err)
		}
		if x := daemon.drains["plane/p2"]; x != nil && x.Reason != "annotation fared.io/drain: new optics" {
			t.Errorf("the reason is %q", x.Reason)
		}
	}
}

// TestSources checks what each source drains, that each ends its own drains alone, and none of those whose source is
// unknown or disabled; a process of the program knows the drains of an earlier one by their reasons.
func TestSources(t *testing.T) {
	soon := time.Now().Add(time.Hour)
	object := func(force bool, until *time.Time, targets ...string) wishes {
		x := FaredDrain{Spec: FaredDrainSpec{Targets: targets, Owner: "ada", Reason: strings.Repeat("ö", 200), Force: force, Until: until}}
		x.Metadata.Name, x.Metadata.UID = "optics", "u"
		return wishes{objects: []FaredDrain{x}, known: true}
	}
	cordoned := wishes{node: &node{}, known: true}
	cordoned.node.Spec.Unschedulable = true
	both := object(false, nil, "plane/p0")
	both.node = cordoned.node
	for name, step := range map[string]struct {
		w             wishes
		calls, reason string // of plane p0
		end           time.Duration
		only          bool // Drains is disabled
	}{
		"unknown":        {calls: ""},
		"node":           {w: annotated(""), calls: "undrain plane/a undrain plane/c undrain plane/s"},
		"objects":        {w: wishes{known: true}, calls: "undrain plane/o"},
		"disabled":       {w: wishes{node: &node{}, known: true}, only: true, calls: "undrain plane/c undrain plane/s"},
		"drain":          {w: object(false, &soon, "plane/p0"), calls: "drain plane/p0 undrain plane/o", reason: "FaredDrain optics: ada: öö"},
		"refused":        {w: object(false, nil, "plane/p1"), calls: "drain plane/p1 undrain plane/o"},
		"forced":         {w: object(true, nil, "plane/p1"), calls: "drain plane/p1 undrain plane/o"},
		"over":           {w: object(false, &soon, "plane/p0"), end: time.Hour, calls: "undrain plane/o"},
		"cordon":         {w: cordoned, calls: "drain plane/p0 drain plane/p1 undrain plane/a undrain plane/o undrain plane/s undrain plane/c", reason: "cordoned node"},
		"two want":       {w: both, calls: "drain plane/p0 drain plane/p1 undrain plane/a undrain plane/s undrain plane/o undrain plane/c", reason: "FaredDrain optics: ada: öö"},
		"a plane absent": {w: object(false, nil, "plane/o"), calls: ""},
	} {
		t.Run(name, func(t *testing.T) {
			daemon := newFakeDaemon()
			for target, reason := range map[string]string{"a": annotationMark + ": x", "o": objectMark + "old", "c": cordonMark, "s": shutdownMark, "hand": "optics"} {
				daemon.by(t, "plane/"+target, reason, "drained")
			}
			daemon.refuses["plane/p1"] = true
			d := wanting(t, daemon)
			d.Drains, d.Now = !step.only, func() time.Time { return time.Now().Add(step.end) }
			r, err := d.reconcile(context.Background(), step.w)
			got, want := strings.Split(strings.Join(daemon.calls, " "), " "), strings.Split(step.calls, " ")
			slices.Sort(got)
			if slices.Sort(want); err != nil || !slices.Equal(got, want) {
				t.Errorf("calls %v, want %v, %v", got, want, err)
			}
			if x := daemon.drains["plane/p0"]; !strings.HasPrefix(x.GetReason(), step.reason) || len(x.GetReason()) > 256 {
				t.Errorf("the reason is %q", x.GetReason())
			}
			if drained := daemon.drains["plane/p1"] != nil; drained != (name == "forced") {
				t.Errorf("the last plane is drained: %v; %+v", drained, r)
			}
		})
	}
}

// TestStatusOf checks the states of FaredDrains.
func TestStatusOf(t *testing.T) {
	daemon := newFakeDaemon()
	for target, stage := range map[string]string{"plane/p0": "drained", "plane/p1": "routes", "plane/p2": "given-up"} {
		daemon.by(t, target, "", stage)
	}
	shown, _ := daemon.GetStatus(context.Background(), nil)
	of := func(names ...string) (x objectReport) {
		for _, name := range names {
			asked, err, _ := strings.Cut(name, "!")
			x.targets = append(x.targets, targetReport{asked, asked, err})
		}
		return x
	}
	for want, x := range map[string]objectReport{
		"{Drained [{plane/p0 drained }]}":                      of("plane/p0"),
		"{Draining [{plane/p0 drained } {plane/p1 routes }]}":  of("plane/p0", "plane/p1"),
		"{Refused [{plane/p9  none} {plane/p1 routes }]}":      of("plane/p9!none", "plane/p1"),
		"{Refused [{plane/p2 given-up } {plane/p0 drained }]}": of("plane/p2", "plane/p0"),
		"{Ended []}": {ended: true},
	} {
		if got := fmt.Sprint(statusOf(x, shown.Drains)); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// TestAnnotation checks the way from the node's annotation to the daemon, and back to the status, also of a refusal.
func TestAnnotation(t *testing.T) {
	api, client := serveAPI(t)
	daemon := newFakeDaemon()
	daemon.refuses["plane/p1"] = true
	var c clock
	a := start(t, Options{Daemon: daemon.serve(t), API: client, Drains: true, Now: c.now})
	annotate := func(text string) {
		api.do(func() {
			api.annotations[drainAnnotation] = text
			api.touch()
		})
	}
	annotate("plane/p0,plane/p1")
	daemon.drained(t, "plane/p0")
	api.shows(t, "the drains", "[map[by:uid 7 reason:annotation fared.io/drain stage:drained target:plane/p0] map[error:no plane would be left target:plane/p1]]",
		func() string {
			c.nextHour(a)
			return api.status("drains")
		})
	annotate("")
	daemon.drained(t, "")
}

// drained waits until the daemon has these drains.
func (d *fakeDaemon) drained(t *testing.T, want string) {
	t.Helper()
	netnstest.Eventually(t, limit, func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if got := strings.Join(slices.Sorted(maps.Keys(d.drains)), " "); got != want {
			return fmt.Errorf("drains: %q, want %q", got, want)
		}
		return nil
	})
}

// accept ends refusals.
func (d *fakeDaemon) accept() {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.refuses)
}

// TestFaredDrain checks the way from a FaredDrain to the daemon, and back to its status: a refusal, another target, the
// end by its time and by its deletion; and that drains last while the API server fails.
func TestFaredDrain(t *testing.T) {
	api, client := serveAPI(t)
	daemon := newFakeDaemon()
	daemon.refuses["plane/p1"] = true
	var c clock
	a := start(t, Options{Daemon: daemon.serve(t), API: client, Drains: true, Now: c.now})
	spec := func(spec object) {
		api.do(func() {
			status := api.drains["optics"]["status"]
			api.drains["optics"] = object{"metadata": object{"name": "optics", "uid": "u"}, "spec": spec, "status": status}
			api.touch()
		})
	}
	shows := func(want string) {
		t.Helper()
		api.shows(t, "the status", want, func() string {
			c.nextHour(a)
			return fmt.Sprint(api.drains["optics"]["status"])
		})
	}
	spec(object{"node": "n", "targets": []string{"all"}, "reason": "new optics"})
	daemon.drained(t, "plane/p0")
	shows("map[drains:[map[stage:drained target:plane/p0] map[error:no plane would be left target:plane/p1]] state:Refused]")
	away := func(away bool) {
		api.do(func() {
			api.away = away
			api.touch()
		})
	}
	away(true)
	api.shows(t, "lists of FaredDrains fail", "true", func() string { return fmt.Sprint(api.ended > 2) })
	daemon.drained(t, "plane/p0")
	away(false)
	spec(object{"node": "n", "targets": []string{"plane/p1"}, "force": true, "until": c.now().Add(1e5 * time.Hour).Format(time.RFC3339)})
	daemon.drained(t, "plane/p1")
	shows("map[drains:[map[stage:drained target:plane/p1]] state:Drained]")
	daemon.accept()
	c.hours.Add(1e5)
	spec(api.drains["optics"]["spec"].(object)) // in place of ten seconds
	daemon.drained(t, "")
	shows("map[state:Ended]")
	spec(object{"node": "n", "targets": []string{"plane/p0"}})
	daemon.drained(t, "plane/p0")
	api.do(func() {
		delete(api.drains, "optics")
		api.touch()
	})
	daemon.drained(t, "")
}

// TestShutdown checks that the end of the program drains all planes of a node that shuts down, also the last one, and
// none otherwise; that other containers are held meanwhile; and that the drains end with the next start.
func TestShutdown(t *testing.T) {
	api, client := serveAPI(t)
	daemon := newFakeDaemon()
	daemon.refuses["plane/p1"] = true
	conn, file := daemon.serve(t), filepath.Join(t.TempDir(), "leaving")
	run := func() (end func()) {
		a := New(Options{Node: "n", Daemon: conn, API: client, AtShutdown: file, Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() {
			defer close(done)
			a.Run(ctx)
		}()
		return func() {
			cancel()
			Hold(context.Background(), file, limit)
			<-done
		}
	}
	end := run()
	api.shows(t, "the planes", "2/2", func() string { return api.status("planesUsable") })
	end()
	daemon.drained(t, "")
	end = run()
	api.do(func() {
		api.ready = "container runtime is down, node is shutting down"
		api.touch()
	})
	netnstest.Eventually(t, limit, func() error {
		_, err := os.Stat(file)
		return err
	})
	Hold(context.Background(), file, time.Nanosecond) // at most
	daemon.drained(t, "")
	end()
	daemon.mu.Lock()
	if len(daemon.drains) != 2 || daemon.drains["plane/p1"].GetReason() != shutdownMark {
		t.Errorf("held until the drains %v", daemon.drains)
	}
	daemon.mu.Unlock()
	daemon.accept()
	api.do(func() { api.ready = "" })
	end = run()
	daemon.drained(t, "")
	end()
}
