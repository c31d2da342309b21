package pods

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/fared/fared/internal/beat"
)

// interval is the time between looks at the records.
const interval = 5 * time.Second

// Resume attaches and detaches, until ctx ends, for plugins that an agent has not answered: at the start every record,
// and later those that have changed.
func Resume(ctx context.Context, agent *Agent, store Store, log *slog.Logger) {
	r := &resumer{agent: agent, store: store, log: log, done: map[string]time.Time{}}
	for {
		r.look(ctx)
		select {
		case <-ctx.Done():
			return
		case <-time.After(beat.Until(time.Now(), interval)):
		}
	}
}

type resumer struct {
	agent *Agent
	store Store
	log   *slog.Logger
	done  map[string]time.Time // records that the agent has accepted or refused, with the time of their last change
}

func (r *resumer) look(ctx context.Context) {
	all, err := r.store.Containers()
	if err != nil {
		r.log.Warn("cannot read the attachments that network plugins asked for", "error", err)
		return
	}
	left := make(map[string]time.Time, len(all))
	for _, container := range all {
		info, err := os.Stat(filepath.Join(r.store.Dir, container+extension))
		if err != nil {
			continue // the plugin has removed it
		}
		if before, ok := r.done[container]; ok && before.Equal(info.ModTime()) || r.apply(ctx, container) {
			left[container] = info.ModTime()
		}
	}
	r.done = left
}

// apply does what a record asks for, and reports whether that is final.
func (r *resumer) apply(ctx context.Context, container string) bool {
	e, err := r.store.Open(container, false)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			r.log.Warn("cannot read the attachment that a network plugin asked for", "container", container, "error", err)
		}
		return true
	}
	defer e.Close()
	if _, gone := os.Stat(e.Record.Netns); e.New || len(e.Record.Interfaces) == 0 || errors.Is(gone, fs.ErrNotExist) {
		return r.end(ctx, container, e)
	}
	a, err := r.agent.Attach(ctx, e.Record.Request(), 0)
	switch {
	case err == nil:
		r.log.Debug("attached", "container", container, "id", a.GetId(), "in_effect", a.GetInEffect())
	case Absent(err):
		r.log.Debug("cannot attach yet", "container", container, "error", err)
		return false
	default:
		r.log.Warn("cannot attach a pod that started without the agent: correct the cause, then restart the pod", "container", container, "netns", e.Record.Netns, "error", Reason(err))
	}
	return true
}

// end ends an attachment whose pod has ended.
func (r *resumer) end(ctx context.Context, container string, e *Entry) bool {
	if !e.New && !r.store.Shared(container, e.Record.ID) {
		if err := r.agent.Detach(ctx, e.Record.ID); err != nil && Absent(err) {
			r.log.Debug("cannot detach yet", "container", container, "error", err)
			return false
		}
	}
	if err := e.Remove(); err != nil {
		r.log.Warn("a finished attachment stays recorded", "container", container, "error", err)
	}
	return true
}
