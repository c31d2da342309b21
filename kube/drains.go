package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/kube/nodestate"
)

// Annotations of a node, by which operators drain.
const (
	// drainAnnotation lists targets: plane/p2, leaf/10.1.0.3, sub-port/eth4, separated by commas.
	drainAnnotation  = "fared.io/drain"
	reasonAnnotation = "fared.io/drain-reason"
)

// drainMark begins the reason of a drain that an annotation has made: the daemon keeps it over restarts.
const drainMark = "annotation " + drainAnnotation

// drainPeriod is the time after which drains are compared again, and refused ones repeated.
const drainPeriod = 10 * time.Second

// drainer makes the drains of a node's annotations, and ends those that it has made.
type drainer struct {
	client farev1.FabricServiceClient
	// named has the daemon's names of targets, where they differ: a leaf by the address of a session.
	named map[string]string
}

// run compares drains with annotations after each change of them, and every ten seconds. It calls refused for the
// drains that were refused if they have changed.
func (d *drainer) run(ctx context.Context, annotations <-chan map[string]string, refused func([]nodestate.Drain)) {
	var wanted map[string]string // nil until the node is known: nothing is undrained then
	var last []nodestate.Drain
	tick := time.NewTicker(drainPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case wanted = <-annotations:
		case <-tick.C:
		}
		if wanted == nil {
			continue
		}
		// A daemon that does not answer is asked again.
		if now, err := d.reconcile(ctx, wanted); err == nil && !slices.Equal(now, last) {
			last = now
			refused(now)
		}
	}
}

// reconcile makes and ends drains. It returns those that are refused.
func (d *drainer) reconcile(ctx context.Context, annotations map[string]string) (refused []nodestate.Drain, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	now, err := d.client.GetStatus(ctx, &farev1.GetStatusRequest{})
	if err != nil {
		return nil, err
	}
	wanted := map[string]bool{}
	for _, name := range targets(annotations) {
		wanted[name], wanted[d.named[name]] = true, true
		if err := d.drain(ctx, name, annotations[reasonAnnotation], now.GetDrains()); err != nil {
			refused = append(refused, nodestate.Drain{Target: name, Error: status.Convert(err).Message()})
		}
		wanted[d.named[name]] = true
	}
	for _, x := range now.GetDrains() {
		name := nodestate.Target(x.GetTarget())
		if x.GetStage() == "undraining" || wanted[name] || !strings.HasPrefix(x.GetReason(), drainMark) {
			continue
		}
		if _, err := d.client.Undrain(ctx, &farev1.UndrainRequest{Target: x.GetTarget()}); err != nil {
			refused = append(refused, nodestate.Drain{Target: name, Error: "undrain: " + status.Convert(err).Message()})
		}
	}
	return refused, nil
}

// targets returns the targets of annotations.
func targets(annotations map[string]string) (all []string) {
	for name := range strings.SplitSeq(annotations[drainAnnotation], ",") {
		if name = strings.TrimSpace(name); name != "" && !slices.Contains(all, name) {
			all = append(all, name)
		}
	}
	return all
}

// drain makes a drain unless it is present.
func (d *drainer) drain(ctx context.Context, name, reason string, present []*farev1.DrainStatus) error {
	target, err := parseTarget(name)
	if err != nil {
		return err
	}
	for _, x := range present {
		if shown := nodestate.Target(x.GetTarget()); (shown == name || shown == d.named[name]) && x.GetStage() != "undraining" {
			return nil
		}
	}
	text := drainMark
	if reason != "" {
		text += ": " + reason
	}
	answer, err := d.client.Drain(ctx, &farev1.DrainRequest{Target: target, Reason: text})
	if err == nil {
		d.named[name] = nodestate.Target(answer.GetTarget())
	}
	return err
}

// parseTarget returns the target of a name.
func parseTarget(name string) (*farev1.DrainTarget, error) {
	kind, value, _ := strings.Cut(name, "/")
	switch {
	case value == "":
	case kind == "plane":
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_Plane{Plane: value}}, nil
	case kind == "leaf":
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_Leaf{Leaf: value}}, nil
	case kind == "sub-port":
		return &farev1.DrainTarget{Target: &farev1.DrainTarget_SubPort{SubPort: value}}, nil
	}
	return nil, fmt.Errorf("%q in the annotation %s is no target: use plane/p2, leaf/10.1.0.3 or sub-port/eth4", name, drainAnnotation)
}
