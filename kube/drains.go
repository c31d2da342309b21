package kube

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/status"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/kube/nodestate"
)

// Annotations of a node, by which operators drain.
const (
	// drainAnnotation lists targets: plane/p2, leaf/10.1.0.3, sub-port/eth4, all, separated by commas.
	drainAnnotation  = "fared.io/drain"
	reasonAnnotation = "fared.io/drain-reason"
)

// Beginnings of the reasons of drains, which the daemon keeps over restarts: each names the source that ends the drain.
const (
	annotationMark = "annotation " + drainAnnotation
	objectMark     = "FaredDrain "
	cordonMark     = "cordoned node"
	shutdownMark   = "node is shutting down"
)

// everything is the target of all planes.
const everything = "all"

const (
	// drainPeriod is the time after which drains are compared again, and refused ones repeated.
	drainPeriod = 10 * time.Second
	// maxReason is the greatest length of a daemon's reason, bytes.
	maxReason = 256
)

// wishes are those of the sources of drains. A source that is not known yet has neither drains nor ends any.
type wishes struct {
	node    *node // nil: unknown
	objects []FaredDrain
	known   bool // objects
}

// want is a drain that a source wants.
type want struct {
	object string // the name of the FaredDrain, if it is the source
	target string
	reason string
	force  bool
}

// wanted returns the drains that the enabled sources want, in the order of the sources.
func (o *Options) wanted(w wishes, now time.Time) (all []want) {
	if o.Drains && w.node != nil {
		annotations := w.node.Metadata.Annotations
		reason := annotationMark
		if text := annotations[reasonAnnotation]; text != "" {
			reason += ": " + text
		}
		for _, name := range targets(annotations[drainAnnotation]) {
			all = append(all, want{target: name, reason: reason})
		}
	}
	for i := range w.objects {
		if x := &w.objects[i]; !x.ended(now) {
			for _, name := range x.Spec.Targets {
				all = append(all, want{object: x.Metadata.Name, target: name, reason: x.reason(), force: x.Spec.Force})
			}
		}
	}
	if o.DrainCordoned && w.node != nil && w.node.Spec.Unschedulable {
		all = append(all, want{target: everything, reason: cordonMark})
	}
	return all
}

// ends reports whether the source of a drain with this reason is enabled and known, so that it ends the drain unless
// it wants it.
func (o *Options) ends(w wishes, reason string) bool {
	switch {
	case strings.HasPrefix(reason, annotationMark):
		return o.Drains && w.node != nil
	case strings.HasPrefix(reason, objectMark):
		return o.Drains && w.known
	case strings.HasPrefix(reason, cordonMark):
		return w.node != nil
	}
	return strings.HasPrefix(reason, shutdownMark) && w.node != nil
}

// targets returns the targets of an annotation.
func targets(text string) (all []string) {
	for name := range strings.SplitSeq(text, ",") {
		if name = strings.TrimSpace(name); name != "" && !slices.Contains(all, name) {
			all = append(all, name)
		}
	}
	return all
}

// drainer makes the drains that sources want, and ends those that it has made.
type drainer struct {
	*Options
	client farev1.FabricServiceClient
	// named has the daemon's names of targets, where they differ: a leaf by the address of a session.
	named map[string]string
}

// drainReport is the outcome of wanted drains.
type drainReport struct {
	refused []nodestate.Drain
	objects []objectReport
}

// objectReport is the outcome of a FaredDrain.
type objectReport struct {
	name, uid string
	ended     bool
	targets   []targetReport
}

// targetReport is a target as it was asked for and as the daemon names it, and the reason of its refusal.
type targetReport struct{ asked, named, err string }

// run compares drains with wishes after each change of them, and every ten seconds. It calls report after a change of
// the outcome.
func (d *drainer) run(ctx context.Context, changed <-chan wishes, report func(drainReport)) {
	var now wishes
	var last drainReport
	tick := time.NewTicker(drainPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now = <-changed:
		case <-tick.C:
		}
		// A daemon that does not answer is asked again.
		if r, err := d.reconcile(ctx, now); err == nil && !reflect.DeepEqual(r, last) {
			last = r
			report(r)
		}
	}
}

// reconcile makes and ends drains, and returns the outcome.
func (d *drainer) reconcile(ctx context.Context, w wishes) (r drainReport, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	present, err := d.client.GetStatus(ctx, &farev1.GetStatusRequest{})
	if err != nil {
		return r, err
	}
	now := d.Now()
	for i := range w.objects {
		x := &w.objects[i]
		r.objects = append(r.objects, objectReport{name: x.Metadata.Name, uid: x.Metadata.UID, ended: x.ended(now)})
	}
	all, err := d.expand(ctx, d.wanted(w, now))
	if err != nil {
		return r, err
	}
	made, wanted := map[string]bool{}, map[string]bool{}
	for _, x := range all {
		var err error
		if !made[x.target] { // by another source
			err = d.drain(ctx, x, present.GetDrains())
		}
		made[x.target], wanted[d.name(x.target)] = err == nil, true
		r.add(x, d.name(x.target), err)
	}
	for _, x := range present.GetDrains() {
		name := nodestate.Target(x.GetTarget())
		if x.GetStage() == "undraining" || wanted[name] || !d.ends(w, x.GetReason()) {
			continue
		}
		if _, err := d.client.Undrain(ctx, &farev1.UndrainRequest{Target: x.GetTarget()}); err != nil {
			r.refused = append(r.refused, nodestate.Drain{Target: name, Error: "undrain: " + status.Convert(err).Message()})
		}
	}
	return r, nil
}

// name returns the daemon's name of a target.
func (d *drainer) name(target string) string {
	if name := d.named[target]; name != "" {
		return name
	}
	return target
}

// add records the outcome of a wanted drain.
func (r *drainReport) add(x want, named string, err error) {
	text := ""
	if err != nil {
		text = status.Convert(err).Message()
		if refused := (nodestate.Drain{Target: x.target, Error: text}); !slices.Contains(r.refused, refused) {
			r.refused = append(r.refused, refused)
		}
	}
	for i := range r.objects {
		if o := &r.objects[i]; o.name == x.object {
			o.targets = append(o.targets, targetReport{x.target, named, text})
		}
	}
}

// expand replaces the target of all planes by these, in the daemon's order: nodes that keep their last plane keep the
// same one.
func (d *drainer) expand(ctx context.Context, all []want) (expanded []want, err error) {
	var planes []*farev1.Plane
	for _, x := range all {
		if x.target != everything {
			expanded = append(expanded, x)
			continue
		}
		if planes == nil {
			list, err := d.client.ListPlanes(ctx, &farev1.ListPlanesRequest{})
			if err != nil {
				return nil, err
			}
			planes = list.GetPlanes()
		}
		for _, p := range planes {
			x.target = "plane/" + p.GetPlane()
			expanded = append(expanded, x)
		}
	}
	return expanded, nil
}

// drain makes a drain unless it is present.
func (d *drainer) drain(ctx context.Context, x want, present []*farev1.DrainStatus) error {
	target, err := parseTarget(x.target)
	if err != nil {
		return err
	}
	for _, y := range present {
		if nodestate.Target(y.GetTarget()) == d.name(x.target) && y.GetStage() != "undraining" {
			return nil
		}
	}
	reason := x.reason
	if len(reason) > maxReason {
		reason = strings.ToValidUTF8(reason[:maxReason], "")
	}
	answer, err := d.client.Drain(ctx, &farev1.DrainRequest{Target: target, Reason: reason, Force: x.force})
	if err == nil {
		d.named[x.target] = nodestate.Target(answer.GetTarget())
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
	return nil, fmt.Errorf("%q is no target: use plane/p2, leaf/10.1.0.3, sub-port/eth4 or all", name)
}
