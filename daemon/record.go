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
	"os"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
)

// A recording is JSON lines: a header with the configuration, then every event in the order the loop took it, and now
// and then a digest of the state, which a replay must reproduce.
type recordLine struct {
	// Header, first line only.
	Fared  string `json:"fared,omitempty"` // version that recorded
	Config string `json:"config,omitempty"`
	// Event, with when it was taken, Unix nanoseconds.
	TimeNS int64           `json:"time_ns,omitempty"`
	Event  json.RawMessage `json:"event,omitempty"`
	// Digest of the state after the events so far.
	Digest string `json:"digest,omitempty"`
}

// digestEvery is how many events lie between two digests: a digest walks the whole state.
const digestEvery = 4096

// ErrRecordingFull says that the recording reached its configured size and ended there.
var ErrRecordingFull = errors.New("recording is full")

// recorder writes a recording. It belongs to the loop.
type recorder struct {
	f       *os.File
	w       *bufio.Writer
	left    int64
	events  int
	pending bool // lines since the last flush
}

// newRecorder creates the file and writes the header. maxBytes 0 is no limit.
func newRecorder(path string, maxBytes int64, version string, cfg *config.Config) (*recorder, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("record.file: %w", err)
	}
	r := &recorder{f: f, w: bufio.NewWriterSize(f, 64<<10), left: maxBytes}
	if maxBytes == 0 {
		r.left = 1<<63 - 1
	}
	return r, r.line(recordLine{Fared: version, Config: cfg.Text()})
}

func (r *recorder) line(l recordLine) error {
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	if r.left -= int64(len(b) + 1); r.left < 0 {
		return ErrRecordingFull
	}
	r.pending = true
	r.w.Write(b)
	return r.w.WriteByte('\n')
}

// event records one event; core is the state before it.
func (r *recorder) event(timeNS int64, ev Event, core *Core) error {
	if r.events > 0 && r.events%digestEvery == 0 {
		if err := r.line(recordLine{Digest: core.Digest()}); err != nil {
			return err
		}
	}
	r.events++
	b, err := marshalEvent(ev)
	if err != nil {
		return err
	}
	return r.line(recordLine{TimeNS: timeNS, Event: b})
}

// flush hands what is buffered to the file; the loop calls it when it is idle.
func (r *recorder) flush() error {
	if !r.pending {
		return nil
	}
	r.pending = false
	return r.w.Flush()
}

// close ends the recording with a digest of the final state.
func (r *recorder) close(core *Core) error {
	err := r.line(recordLine{Digest: core.Digest()})
	if errors.Is(err, ErrRecordingFull) {
		err = nil
	}
	return errors.Join(err, r.w.Flush(), r.f.Close())
}

// Digest returns a fingerprint of everything the core has decided.
func (c *Core) Digest() string {
	h := sha256.New()
	c.Describe(h)
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// Replayed is one event of a recording and what it led to.
type Replayed struct {
	// Line is its line in the recording, from 1; TimeNS is when the recording daemon took it, Unix nanoseconds.
	Line   int
	TimeNS int64
	Event  Event
	// Text is the event as people read it; Changed has a line for everything that it changed.
	Text    string
	Changed []string
}

// Replay runs a recording through a fresh core and calls each, when given, after every event. It verifies every digest in
// the recording. A recording that ends in the middle of a line (the process was killed) is replayed up to there.
func Replay(in io.Reader, each func(Replayed)) (*Core, error) {
	r := bufio.NewReaderSize(in, 64<<10)
	var core *Core
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
		case l.Digest != "":
			if got := core.Digest(); got != l.Digest {
				return nil, fmt.Errorf("line %d: the state differs from the recorded one: digest %s, recorded %s (replay with the version that recorded)", n, got, l.Digest)
			}
		case l.Event != nil:
			ev, err := unmarshalEvent(l.Event)
			if err != nil {
				return nil, fmt.Errorf("line %d: %w", n, err)
			}
			if err := core.check(ev); err != nil {
				return nil, fmt.Errorf("line %d: %w", n, err)
			}
			if err := core.Step(ev); err != nil {
				return nil, fmt.Errorf("line %d: %w", n, err)
			}
			changed := core.settle()
			if each != nil {
				each(Replayed{Line: n, TimeNS: l.TimeNS, Event: ev, Text: core.layout.describe(ev), Changed: changed})
			}
		default:
			return nil, fmt.Errorf("line %d: neither an event nor a digest", n)
		}
	}
}

// settle takes what follows from an event and says what it is: a replay has nobody to program.
func (c *Core) settle() []string {
	c.SubPortOps(nil)
	changed := c.changedWeights(c.Updates())
	c.Advertise(func(int, []Route) {})
	return changed
}

// check refuses an event that names what this core does not have: recordings come from outside.
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
			return fmt.Errorf("%T is made by the core, not recorded", f)
		}
	}
	return nil
}
