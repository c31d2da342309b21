package daemon

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/core"
	"github.com/fared/fared/daemon/internal/status"
)

// digestEvery is the number of events between two digests: a digest walks the whole state.
const digestEvery = 4096

// recorder writes a recording. Only the loop uses it. It keeps and retries lines that cannot be written (on a full file
// system, for instance); it counts the events beyond its limit, and a line in the recording represents them.
type recorder struct {
	files  *recordFiles // nil writes to f alone
	f      io.WriteCloser
	buf    []byte // pending lines, the first of them possibly written in part
	keep   int    // limit of buf in bytes while lines cannot be written
	left   int64  // room in f in bytes; a line that does not fit begins another file
	events uint64
	// failure is the error of the last write, nil if it succeeded; the next attempt is due at retry.
	failure error
	retry   time.Time
	// gap counts the missing events since the last line, lost those since the start.
	gap, lost uint64
}

const (
	// recordFlush is the number of bytes that are buffered before a write.
	recordFlush = 64 << 10
	// recordKeep is the value of recorder.keep.
	recordKeep = 8 << 20
	// recordRetry is the pause before the next attempt to write.
	recordRetry = time.Second
)

// newRecorder renames existing recordings, creates the file and writes the header. core is the loop's.
func newRecorder(cfg config.Record, version string, c *core.Core) (*recorder, error) {
	files, err := lockRecording(cfg, version, c)
	if err != nil {
		return nil, err
	}
	f, err := files.rotate()
	if err != nil {
		return nil, errors.Join(err, files.close())
	}
	r := &recorder{files: files, f: f, keep: recordKeep, left: cfg.MaxBytes}
	r.header()
	return r, nil
}

// header writes the first line of a file; it does not count toward the file's limit.
func (r *recorder) header() {
	r.append(core.RecordLine{Fared: r.files.version, Config: r.files.core.Config().Text(), Continues: r.events})
}

// line writes a line, in another file if the current one has no room for it. Lines that wait for room on the file
// system belong to the full file; the recorder leaves that file when they are written.
func (r *recorder) line(l core.RecordLine) error {
	before := len(r.buf)
	r.append(l)
	size := int64(len(r.buf) - before)
	if size <= r.left || r.failure != nil {
		r.left -= size
		return nil
	}
	last := bytes.Clone(r.buf[before:])
	r.buf = r.buf[:before]
	if r.flush(time.Now()); r.failure != nil {
		r.buf = append(r.buf, last...)
		return nil
	}
	f, err := r.files.rotate()
	if err != nil {
		return err
	}
	_ = r.f.Close() // all its lines are written
	r.f, r.left = f, r.files.cfg.MaxBytes-size
	r.header()
	r.buf = append(r.buf, last...)
	return nil
}

// append appends a line to the pending ones.
func (r *recorder) append(l core.RecordLine) {
	b, _ := json.Marshal(l) // cannot fail: strings, numbers, and an event from marshalEvent
	r.buf = append(append(r.buf, b...), '\n')
}

// event records one event; core is the state before it. An error ends the recording.
func (r *recorder) event(now time.Time, ev core.Event, c *core.Core) error {
	if len(r.buf) >= recordFlush {
		r.flush(now)
	}
	if len(r.buf) >= r.keep || r.gap > 0 && r.failure != nil {
		r.gap++
		r.lost++
		return nil
	}
	if err := r.closeGap(); err != nil {
		return err
	}
	if r.events > 0 && r.events%digestEvery == 0 {
		if err := r.line(core.RecordLine{Digest: c.Digest()}); err != nil {
			return err
		}
	}
	b, err := core.MarshalEvent(ev)
	if err != nil {
		return err
	}
	if err := r.line(core.RecordLine{TimeNS: now.UnixNano(), Event: b}); err != nil {
		return err
	}
	r.events++
	return nil
}

// effect records the data plane's progress, unless lines wait for room: false then, and a later report replaces this
// one. An error ends the recording.
func (r *recorder) effect(now time.Time, x core.Effect) (bool, error) {
	if r.failure != nil {
		return false, nil
	}
	if err := r.closeGap(); err != nil {
		return false, err
	}
	return true, r.line(core.RecordLine{TimeNS: now.UnixNano(), Effect: &x})
}

// closeGap writes the line that represents missing events.
func (r *recorder) closeGap() error {
	if r.gap == 0 {
		return nil
	}
	missing := r.gap
	r.gap = 0
	return r.line(core.RecordLine{Missing: missing})
}

// flush writes the pending lines, unless a write failed less than recordRetry ago; the loop calls it when it is idle. A
// partial write is continued at the next call.
func (r *recorder) flush(now time.Time) {
	if len(r.buf) == 0 || r.failure != nil && now.Before(r.retry) {
		return
	}
	n, err := r.f.Write(r.buf)
	r.buf = append(r.buf[:0], r.buf[n:]...)
	if r.failure = err; err != nil {
		r.retry = now.Add(recordRetry)
	}
}

// close ends the recording with a digest of the final state.
func (r *recorder) close(c *core.Core) error {
	err := r.closeGap()
	if err == nil {
		err = r.line(core.RecordLine{Digest: c.Digest()})
	}
	return errors.Join(err, r.end())
}

// end writes the pending lines and closes the file.
func (r *recorder) end() error {
	r.retry = time.Time{}
	r.flush(time.Now())
	err := errors.Join(r.failure, r.f.Close())
	if r.files != nil {
		err = errors.Join(err, r.files.close())
	}
	return err
}

// record records an event before the core processes it.
func (l *loop) record(ev core.Event) {
	if l.recorder == nil {
		return
	}
	before := l.recorder.failure
	err := l.recorder.event(time.Now(), ev, l.core)
	l.recorded(before)
	l.unrecorded(err)
}

// unrecorded ends a recording with an error.
func (l *loop) unrecorded(err error) {
	if err == nil {
		return
	}
	_ = l.recorder.end() // err is the more useful reason
	l.recorder = nil
	l.log.Warn("recording stopped", "file", l.core.Config().Record.File, "error", err)
	l.event(status.EventFault, "recording", err.Error())
}

// recordedEffect is the last recorded progress of the data plane. Pending counts only as none or some, and events only
// while nothing is pending. It depends on events, not on changes: a replay decides after each event, and the daemon
// after several, which may leave nothing to change.
type recordedEffect struct {
	core.Effect
	events uint64 // recorded and missing ones
}

// recordEffect records the data plane's progress when all changes so far have been answered, or no longer are. At the
// end of the recording it records the number of pending objects too.
func (l *loop) recordEffect(end bool) {
	if l.recorder == nil || l.d.client == nil {
		return
	}
	now := core.Effect{Pending: l.shown.counts[effectPending], Approximate: l.shown.counts[effectApproximate], Refused: l.shown.counts[effectRefused],
		Problem: cmp.Or(l.damage, l.dpError), Damaged: l.damage != ""}
	key := recordedEffect{now, l.recorder.events + l.recorder.lost}
	if now.Pending > 0 {
		key.Pending, key.events = 1, 0
	}
	if key == l.lastEffect && (!end || now.Pending == 0) {
		return
	}
	written, err := l.recorder.effect(time.Now(), now)
	if written {
		l.lastEffect = key
	}
	l.unrecorded(err)
}

// flushRecorder writes the recorded lines; the loop calls it when it is idle.
func (l *loop) flushRecorder() {
	if l.recorder != nil {
		before := l.recorder.failure
		l.recorder.flush(time.Now())
		l.recorded(before)
	}
}

// recorded reports when writing the recording begins to fail or succeeds again; before is the failure before the last
// attempt.
func (l *loop) recorded(before error) {
	switch now := l.recorder.failure; {
	case before == nil && now != nil:
		l.event(status.EventFault, "recording", now.Error()+"; events are buffered and the write is retried")
	case before != nil && now == nil:
		l.event(status.EventFault, "recording", fmt.Sprintf("continues; %d events are missing", l.recorder.lost))
	}
}
