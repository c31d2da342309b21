package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

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
	if d.refuses[name] {
		return nil, status.Error(codes.FailedPrecondition, "no plane would be left")
	}
	d.drains[name] = &farev1.DrainStatus{Target: target, Stage: "drained", Reason: r.Reason, By: "uid 7"}
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
	return &farev1.UndrainResponse{}, nil
}

// TestDrains checks which calls annotations cause, and that drains of other callers are left alone.
func TestDrains(t *testing.T) {
	daemon := newFakeDaemon()
	by := func(target, reason, stage string) {
		parsed, err := parseTarget(target)
		if err != nil {
			t.Fatal(err)
		}
		daemon.drains[target] = &farev1.DrainStatus{Target: parsed, Reason: reason, Stage: stage}
	}
	by("plane/p3", "optics", "drained") // by hand
	d := drainer{client: farev1.NewFabricServiceClient(daemon.serve(t)), named: map[string]string{}}
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
		{"sub-port/a/b,p9", nil, "", `p9: "p9" in the annotation fared.io/drain is no target: use plane/p2, leaf/10.1.0.3 or sub-port/eth4`},
		{"", func() { daemon.refuses["sub-port/a/b"] = true }, "undrain sub-port/a/b", "sub-port/a/b: undrain: the disk is full"},
		{"", func() { clear(daemon.refuses) }, "undrain sub-port/a/b", ""},
		{"plane/", nil, "", `plane/: "plane/" in the annotation fared.io/drain is no target: use plane/p2, leaf/10.1.0.3 or sub-port/eth4`},
	} {
		if step.before != nil {
			step.before()
		}
		daemon.calls = nil
		refused, err := d.reconcile(context.Background(), map[string]string{drainAnnotation: step.annotation, reasonAnnotation: "new optics"})
		var texts []string
		for _, r := range refused {
			texts = append(texts, r.Target+": "+r.Error)
		}
		if got := strings.Join(daemon.calls, " "); err != nil || got != step.calls || strings.Join(texts, "; ") != step.refused {
			t.Errorf("step %d, %q: calls %q, want %q; refused %q, %v", i, step.annotation, got, step.calls, texts, err)
		}
		if x := daemon.drains["plane/p2"]; x != nil && x.Reason != "annotation fared.io/drain: new optics" {
			t.Errorf("the reason is %q", x.Reason)
		}
	}
	// Another process of the program knows which drains are its own.
	by("plane/p1", drainMark, "drained")
	d = drainer{client: d.client, named: map[string]string{}}
	daemon.calls = nil
	if _, err := d.reconcile(context.Background(), nil); err != nil || !slices.Equal(daemon.calls, []string{"undrain plane/p1"}) || daemon.drains["plane/p3"] == nil {
		t.Errorf("%v, %v", daemon.calls, err)
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
	drained := func(want string) {
		t.Helper()
		netnstest.Eventually(t, limit, func() error {
			daemon.mu.Lock()
			defer daemon.mu.Unlock()
			if got := fmt.Sprint(len(daemon.drains), daemon.drains["plane/p0"] != nil); got != want {
				return fmt.Errorf("drains: %s", got)
			}
			return nil
		})
	}
	annotate("plane/p0,plane/p1")
	drained("1 true")
	api.shows(t, "the drains", "[map[by:uid 7 reason:annotation fared.io/drain stage:drained target:plane/p0] map[error:no plane would be left target:plane/p1]]",
		func() string {
			c.nextHour(a)
			return api.status("drains")
		})
	annotate("")
	drained("0 false")
}
