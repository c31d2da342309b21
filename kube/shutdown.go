package kube

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
	"github.com/fared/fared/internal/waits"
	"github.com/fared/fared/kube/nodestate"
)

const (
	// leaveTimeout limits the drains of a node that shuts down.
	leaveTimeout = 10 * time.Minute
	// pollPeriod is that of stages and of the file.
	pollPeriod = 100 * time.Millisecond
)

// markShutdown makes or removes the file for which other containers wait by Hold. One of an earlier boot is removed.
func (a *Agent) markShutdown() {
	if a.AtShutdown == "" {
		return
	}
	var err error
	if a.wished.node.leaves() {
		err = os.WriteFile(a.AtShutdown, nil, 0o644)
	} else {
		err = os.Remove(a.AtShutdown)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.Log.Warn("the node's shutdown will not be awaited", "error", err)
	}
}

// Hold waits until the planes of a node that shuts down are drained, at most a time; at other ends of the pod, such as
// an upgrade, it returns at once.
func Hold(ctx context.Context, file string, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		if _, err := os.Stat(file); err != nil || !waits.For(ctx, pollPeriod) {
			return
		}
	}
}

// leave drains all planes of a node that shuts down, also the last ones: by now its pods have ended. It waits for the
// ends of the drains, and removes the file.
func (d *drainer) leave(file string) {
	defer os.Remove(file)
	ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
	defer cancel()
	var log repeated
	for {
		done, err := d.leaving(ctx)
		log.warn(ctx, d.Log, "a plane of the node that shuts down is not drained", err)
		if done || !waits.For(ctx, pollPeriod) {
			return
		}
	}
}

// leaving makes the drains that are absent, and reports whether all have ended.
func (d *drainer) leaving(ctx context.Context) (done bool, err error) {
	all, err := d.expand(ctx, []want{{target: everything, reason: shutdownMark, force: true}})
	if err != nil {
		return false, err
	}
	present, err := d.client.GetStatus(ctx, &farev1.GetStatusRequest{})
	if err != nil {
		return false, err
	}
	drained := map[string]bool{}
	for _, x := range present.GetDrains() {
		drained[nodestate.Target(x.GetTarget())] = x.GetStage() == "drained"
	}
	done = true
	for _, x := range all {
		if !drained[x.target] {
			done = false
			err = errors.Join(err, d.drain(ctx, x, present.GetDrains()))
		}
	}
	return done, err
}
