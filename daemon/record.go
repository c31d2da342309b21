package daemon

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/daemon/internal/status"
	"github.com/fared/fared/fare"
)

// recordLine is a line of a recording. A recording consists of JSON lines: a header with the configuration, then every event in the order in
// which the loop processed it, and occasionally a digest of the state, which a replay must reproduce. When a file is full, the recording
// continues in the next file, with its own header.
type recordLine struct {
	// Header, the first line of each file.
	Fared  string `json:"fared,omitempty"` // version of the recording daemon
	Config string `json:"config,omitempty"`
	// Continues is the number of events that the recording has in earlier files; 0 means that it begins here.
	Continues uint64 `json:"continues,omitempty"`
	// An event, with the time at which it was processed, Unix nanoseconds.
	TimeNS int64           `json:"time_ns,omitempty"`
	Event  json.RawMessage `json:"event,omitempty"`
	// Digest of the state after the events so far.
	Digest string `json:"digest,omitempty"`
	// Missing is the number of events that could not be written at this place. The state after them differs from the daemon's, and no digest is
	// verified.
	Missing uint64 `json:"missing,omitempty"`
}

// digestEvery is the number of events between two digests: a digest walks the whole state.
const digestEvery = 4096

// recorder writes a recording. Only the loop uses it. It keeps and retries lines that cannot be written (on a full file system, for instance);
// it counts the events beyond its limit, and a line in the recording represents them.
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
func newRecorder(cfg config.Record, version string, core *Core) (*recorder, error) {
	files, err := lockRecording(cfg, version, core)
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
	r.append(recordLine{Fared: r.files.version, Config: r.files.core.Config().Text(), Continues: r.events})
}

// line writes a line, in another file if the current one has no room for it. Lines that wait for room on the file system belong to the full
// file; the recorder leaves that file when they are written.
func (r *recorder) line(l recordLine) error {
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
func (r *recorder) append(l recordLine) {
	b, _ := json.Marshal(l) // cannot fail: strings, numbers, and an event from marshalEvent
	r.buf = append(append(r.buf, b...), '\n')
}

// event records one event; core is the state before it. An error ends the recording.
func (r *recorder) event(now time.Time, ev Event, core *Core) error {
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
		if err := r.line(recordLine{Digest: core.Digest()}); err != nil {
			return err
		}
	}
	b, err := marshalEvent(ev)
	if err != nil {
		return err
	}
	if err := r.line(recordLine{TimeNS: now.UnixNano(), Event: b}); err != nil {
		return err
	}
	r.events++
	return nil
}

// closeGap writes the line that represents missing events.
func (r *recorder) closeGap() error {
	if r.gap == 0 {
		return nil
	}
	missing := r.gap
	r.gap = 0
	return r.line(recordLine{Missing: missing})
}

// flush writes the pending lines, unless a write failed less than recordRetry ago; the loop calls it when it is idle. A partial write is
// continued at the next call.
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
func (r *recorder) close(core *Core) error {
	err := r.closeGap()
	if err == nil {
		err = r.line(recordLine{Digest: core.Digest()})
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
func (l *loop) record(ev Event) {
	if l.recorder == nil {
		return
	}
	before := l.recorder.failure
	err := l.recorder.event(time.Now(), ev, l.core)
	l.recorded(before)
	if err == nil {
		return
	}
	_ = l.recorder.end() // err is the more useful reason
	l.recorder = nil
	l.log.Warn("recording stopped", "file", l.core.Config().Record.File, "error", err)
	l.event(status.EventFault, "recording", err.Error())
}

// flushRecorder writes the recorded lines; the loop calls it when it is idle.
func (l *loop) flushRecorder() {
	if l.recorder != nil {
		before := l.recorder.failure
		l.recorder.flush(time.Now())
		l.recorded(before)
	}
}

// recorded reports when writing the recording begins to fail or succeeds again; before is the failure before the last attempt.
func (l *loop) recorded(before error) {
	switch now := l.recorder.failure; {
	case before == nil && now != nil:
		l.event(status.EventFault, "recording", now.Error()+"; events are buffered and the write is retried")
	case before != nil && now == nil:
		l.event(status.EventFault, "recording", fmt.Sprintf("continues; %d events are missing", l.recorder.lost))
	}
}

// Digest returns a fingerprint of all of the core's decisions.
func (c *Core) Digest() string {
	h := sha256.New()
	c.Describe(h)
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// Replayed is one event of a recording with its results.
type Replayed struct {
	// Line is the event's line in the recording, from 1; TimeNS is the time at which the recording daemon processed it, Unix nanoseconds.
	Line   int
	TimeNS int64
	Event  Event
	// Text is the event in readable form; Changed has a line for each change that it caused.
	Text    string
	Changed []string
	// Missing, if not 0, is the number of events that could not be recorded at this place; of the other fields only Line and Text are set.
	Missing uint64
}

// Replay runs a recording through a fresh core and calls each, if not nil, after every event and for every gap. It verifies every digest before
// the first gap. The files of one recording must follow each other, the oldest first; without the first file the replay begins with a gap. A
// recording that ends in the middle of a line (because the process was killed) is replayed up to that line.
func Replay(in io.Reader, each func(Replayed)) (*Core, error) {
	r := bufio.NewReaderSize(in, 64<<10)
	var core *Core
	var version string // of the recording daemon
	gaps := false
	events := uint64(0)
	for n := 1; ; n++ {
		raw, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			if core == nil {
				return nil, fmt.Errorf("line %d: no header: this is not a recording made by fared (record.file)", n)
			}
			return core, nil
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		var l recordLine
		dec := json.NewDecoder(bytes.NewReader(raw))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&l); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		switch {
		case core == nil:
			if l.Config == "" {
				return nil, fmt.Errorf("line %d: no header: this is not a recording made by fared (record.file)", n)
			}
			cfg, err := config.Parse("recording", []byte(l.Config))
			if err != nil {
				return nil, fmt.Errorf("line %d: configuration: %w", n, err)
			}
			if core, err = NewCore(cfg); err != nil {
				return nil, fmt.Errorf("line %d: %w", n, err)
			}
			version = l.Fared
			if events = l.Continues; events > 0 {
				gaps = true
				if each != nil {
					each(Replayed{Line: n, Missing: events, Text: fmt.Sprintf("%d events are missing here: they were in earlier files", events)})
				}
			}
		case l.Config != "":
			if l.Continues != events || events == 0 {
				return nil, fmt.Errorf("line %d: this file continues a recording after %d events, but %d come before it (replay each recording alone)", n, l.Continues, events)
			}
		case l.Missing > 0:
			gaps = true
			if each != nil {
				each(Replayed{Line: n, Missing: l.Missing, Text: fmt.Sprintf("%d events are missing here: they could not be written", l.Missing)})
			}
		case l.Digest != "":
			if got := core.Digest(); got != l.Digest && !gaps {
				return nil, fmt.Errorf("line %d: the state differs from the recorded one: digest %s, recorded %s (replay with the fared version that recorded: %s)", n, got, l.Digest, version)
			}
		case l.Event != nil:
			ev, err := unmarshalEvent(l.Event)
			if errors.Is(err, errUnknownEvent) {
				return nil, fmt.Errorf("line %d: %w; the recording was made by fared %s", n, err, version)
			}
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", n, err)
			}
			if err := core.check(ev); err != nil {
				return nil, fmt.Errorf("line %d: %w", n, err)
			}
			if err := core.Step(ev); err != nil && !gaps { // after a gap a drain may name an unknown leaf
				return nil, fmt.Errorf("line %d: %w", n, err)
			}
			events++
			changed := core.settle()
			if each != nil {
				each(Replayed{Line: n, TimeNS: l.TimeNS, Event: ev, Text: core.Layout().describe(ev), Changed: changed})
			}
		default:
			return nil, fmt.Errorf("line %d: neither an event nor a digest", n)
		}
	}
}

// settle drains the outputs of an event and returns the changed weights: a replay programs no data plane.
func (c *Core) settle() []string {
	c.SubPortOps(nil)
	changed := c.changedWeights(c.Updates())
	c.Advertise(func(int, []Route) {})
	return changed
}

// check returns an error for an event that refers to an index outside the configuration: recordings are untrusted input.
func (c *Core) check(ev Event) error {
	session := func(i int) error {
		if i < 0 || i >= len(c.sessions) {
			return fmt.Errorf("session %d: the configuration has %d", i, len(c.sessions))
		}
		return nil
	}
	switch ev := ev.(type) {
	case EndOfRIB:
		return session(ev.Session)
	case RoutesWritten:
		return session(ev.Session)
	case NextHop:
		return session(ev.Session)
	case Fabric:
		switch f := ev.Event.(type) {
		case fare.SessionUp:
			return session(f.Session)
		case fare.SessionDown:
			return session(f.Session)
		case fare.RouteUpdate:
			return session(f.Session)
		case fare.RouteWithdraw:
			return session(f.Session)
		case fare.LinkState:
			if f.SubPort < 0 || f.SubPort >= len(c.subPorts) {
				return fmt.Errorf("sub-port %d: the configuration has %d", f.SubPort, len(c.subPorts))
			}
		case fare.Drain, fare.PolicyChange:
			return fmt.Errorf("%T is an event of the core itself and cannot be in a recording", f)
		}
	}
	return nil
}
