package daemon

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/drainfile"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/internal/beat"
	"github.com/fared/fared/internal/grpcserve"
)

// Stages of drains that are not in force; see fare.v1.DrainStatus.stage.
const (
	stageDormant = "dormant"
	stageGivenUp = "given-up"
)

// drainRecords are the drains that last until an undrain, by target. Only the loop's goroutine accesses them.
type drainRecords struct {
	all map[core.DrainTarget]drainfile.Record
	// changes counts the changes of all, and is the version of a copy.
	changes uint64
	// forced are those that may leave a destination without a plane.
	forced map[core.DrainTarget]bool
	// givenUp are drains that have ended by themselves, until the next request for their target.
	givenUp map[core.DrainTarget]givenUp
}

// givenUp is a drain that has ended by itself.
type givenUp struct {
	record drainfile.Record
	why    error
}

func newDrainRecords() drainRecords {
	return drainRecords{all: map[core.DrainTarget]drainfile.Record{}, forced: map[core.DrainTarget]bool{}, givenUp: map[core.DrainTarget]givenUp{}}
}

// note records a request that the core has accepted.
func (r *drainRecords) note(t core.DrainTarget, on bool, caller, reason string, now time.Time) {
	before, found := r.all[t]
	switch {
	case !on && !found, on && found && reason == "":
		return
	case !on:
		delete(r.all, t)
	case found:
		before.By, before.Reason = caller, reason
		r.all[t] = before
	default:
		r.all[t] = drainfile.Record{DrainTarget: t, Since: now.UTC(), By: caller, Reason: reason}
	}
	r.changes++
}

// sorted returns the records, sorted by target.
func (r *drainRecords) sorted() []drainfile.Record {
	out := make([]drainfile.Record, 0, len(r.all))
	for _, record := range r.all {
		out = append(out, record)
	}
	slices.SortFunc(out, func(a, b drainfile.Record) int { return cmp.Compare(a.DrainTarget.String(), b.DrainTarget.String()) })
	return out
}

// dormant returns the records whose target the configuration lacks, sorted by target.
func (l *loop) dormant() []drainfile.Record {
	out := l.drained.sorted()
	l.core.Drains(func(t core.DrainTarget, _ core.DrainStage) {
		out = slices.DeleteFunc(out, func(r drainfile.Record) bool { return r.DrainTarget == t })
	})
	return out
}

// restoreDrains puts the drains of an earlier process in force. It is called before the first turn, so that no session
// advertises anything before.
func (l *loop) restoreDrains(records []drainfile.Record) {
	for _, r := range records {
		l.drained.all[r.DrainTarget] = r
		l.drained.forced[r.DrainTarget] = true // in force when the other end began: nothing of it is given up
		detail := "restored: " + describeDrain(r)
		if err := l.core.CheckRestored(r.DrainTarget); err != nil {
			detail = "dormant: " + err.Error() + "; " + describeDrain(r)
		} else {
			l.step(core.DrainRestored{Target: r.DrainTarget})
		}
		l.event(status.EventDrain, r.DrainTarget.String(), detail)
	}
}

// describeDrain returns when, by whom and why a target was drained.
func describeDrain(r drainfile.Record) string {
	text := "since " + r.Since.Format(time.RFC3339)
	if r.By != "" {
		text += " by " + r.By
	}
	if r.Reason != "" {
		text += fmt.Sprintf(", reason %q", r.Reason)
	}
	return text
}

// drainSaver keeps the records in a file. Its methods may be called from any goroutine.
type drainSaver struct {
	path string

	mu      sync.Mutex
	saved   uint64 // version of the file's content
	records []drainfile.Record
	version uint64 // of records, the newest
	failure error  // of the last attempt to read or write
}

// drainRetry is the longest pause between attempts to write the drains.
const drainRetry = time.Second

// openDrains reads the drains of an earlier process. It returns nil without a file to keep.
func (d *Daemon) openDrains() *drainSaver {
	path := d.cfg.Drains.File
	if d.deps.Embedded || path == config.NoDrains || path == "" {
		return nil
	}
	s := &drainSaver{path: path}
	if s.records, s.failure = drainfile.Load(path); s.failure != nil {
		s.failure = fmt.Errorf("the drains of an earlier process are lost, drain again what must stay out of service: %w", s.failure)
		d.log.Error("the file of the drains cannot be read", "error", s.failure)
	}
	return s
}

// save writes records, unless newer ones are written already. It returns once they are on the disk, or the attempt has
// failed; run repeats it.
func (s *drainSaver) save(version uint64, records []drainfile.Record) error {
	s.later(version, records)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.write()
}

// later leaves newer records to run.
func (s *drainSaver) later(version uint64, records []drainfile.Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if version > s.version {
		s.version, s.records = version, records
	}
}

// write writes the newest records if the file lacks them. The caller holds mu.
func (s *drainSaver) write() error {
	if s.saved == s.version {
		return nil
	}
	if err := drainfile.Save(s.path, s.records); err != nil {
		s.failure = fmt.Errorf("a restart would forget changes of drains, fared tries again each second: %w", err)
		return s.failure
	}
	s.saved, s.failure = s.version, nil
	return nil
}

// problem returns the present failure, "" without one.
func (s *drainSaver) problem() string {
	if s == nil {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failure == nil {
		return ""
	}
	return s.failure.Error()
}

// run repeats failed writes until ctx ends.
func (s *drainSaver) run(ctx context.Context) error {
	tick := time.NewTimer(beat.Until(time.Now(), drainRetry))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			s.mu.Lock()
			_ = s.write() // problem has the error
			s.mu.Unlock()
			tick.Reset(beat.Until(time.Now(), drainRetry))
		}
	}
}

// drain implements status.ServiceConfig.Drain. It returns once the change is on the disk, or could not be written.
func (d *Daemon) drain(ctx context.Context, req status.DrainRequest) (status.DrainTarget, []string, error) {
	var sessions []string
	var records []drainfile.Record
	var version uint64
	var err error
	run := func() {
		var t core.DrainTarget
		if t, err = d.loop.drainRequest(req, grpcserve.CallerOf(ctx).String()); err != nil {
			return
		}
		req.Target = shownTarget(t)
		for i := range d.loop.core.Layout().Sessions {
			if d.loop.core.Covers(t, i) {
				sessions = append(sessions, d.loop.core.Layout().Sessions[i].Name)
			}
		}
		records, version = d.loop.drained.sorted(), d.loop.drained.changes
	}
	if derr := d.loop.do(ctx, run); derr != nil {
		return req.Target, nil, derr
	}
	if err == nil && d.drains != nil {
		if serr := d.drains.save(version, records); serr != nil {
			d.log.Error("the drains cannot be written", "error", serr)
		}
	}
	return req.Target, sessions, err
}

// giveUpDrains ends each drain that is not forced, and whose routes are not withdrawn yet, if the other end of a
// destination takes the planes out of service that it left: two operators have drained within the time that zero
// bandwidth needs to reach the other end. The shares return at once, because the leaves still have the routes.
func (l *loop) giveUpDrains() {
	var up []core.DrainTarget
	l.core.Drains(func(t core.DrainTarget, s core.DrainStage) {
		if (s == core.DrainShares || s == core.DrainRoutes) && !l.drained.forced[t] {
			up = append(up, t)
		}
	})
	for _, t := range up {
		err := l.core.CheckOtherEnd(t)
		if err == nil {
			continue
		}
		l.step(core.DrainRequest{Target: t})
		l.step(core.DrainStep{Target: t})
		record := l.drained.all[t]
		l.drained.note(t, false, "", "", time.Now())
		l.drained.givenUp[t] = givenUp{record, err}
		l.report(slog.LevelWarn, status.EventUndrain, t.String(), "given up: "+err.Error())
		l.builder.MarkFabric()
		if l.d.drains != nil {
			l.d.drains.later(l.drained.changes, l.drained.sorted())
		}
	}
}

// drainRequest checks a request and applies it.
func (l *loop) drainRequest(req status.DrainRequest, caller string) (core.DrainTarget, error) {
	t, err := l.drainTarget(req.Target)
	if err == nil {
		err = l.core.CheckTarget(t)
	}
	_, recorded := l.drained.all[t]
	if _, up := l.drained.givenUp[t]; up {
		recorded = true
	}
	dormant := err != nil && recorded
	switch {
	case dormant && !req.On: // the core does not know it
	case err != nil:
		return t, &status.Problem{Kind: status.NotFound, Subject: t.String(), Remedy: "name one of these", Err: err}
	default:
		if req.On && !req.Force {
			err = l.core.CheckStranded(t)
		}
		if err != nil {
			return t, &status.Problem{Kind: status.Refused, Subject: "drain of " + t.String(), Err: err,
				Remedy: "return another plane to service first, or force the drain (fared drain --force)"}
		}
		l.step(core.DrainRequest{Target: t, On: req.On})
	}
	delete(l.drained.givenUp, t)
	if req.On && req.Force {
		l.drained.forced[t] = true
	} else if !req.On {
		delete(l.drained.forced, t)
	}
	l.drained.note(t, req.On, caller, req.Reason, time.Now())
	kind, detail := status.EventUndrain, ""
	if caller != "" {
		detail = "by " + caller
	}
	if req.On {
		kind = status.EventDrain
		if req.Force {
			detail = strings.TrimPrefix(detail+", forced", ", ")
		}
		if req.Reason != "" {
			detail = strings.TrimPrefix(fmt.Sprintf("%s, reason %q", detail, req.Reason), ", ")
		}
	}
	l.event(kind, t.String(), detail)
	return t, nil
}
