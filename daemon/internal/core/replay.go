package core

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/fared/fared/daemon/config"
	"github.com/fared/fared/fare"
)

// RecordLine is a line of a recording. A recording consists of JSON lines: a header with the configuration, then every
// event in the order in which the loop processed it, and occasionally a digest of the state, which a replay must
// reproduce. When a file is full, the recording continues in the next file, with its own header.
type RecordLine struct {
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
	// Effect, with TimeNS, is the data plane's progress with the decisions so far.
	Effect *Effect `json:"effect,omitempty"`
	// Missing is the number of events that could not be written at this place. The state after them differs from the
	// daemon's, and no digest is verified.
	Missing uint64 `json:"missing,omitempty"`
}

// Effect is the data plane's progress with the core's decisions: the numbers of sub-ports, vectors and destinations
// whose last change is not answered, in effect approximately, or refused. No decision depends on it, so it is no event.
type Effect struct {
	Pending     int `json:"pending,omitempty"`
	Approximate int `json:"approximate,omitempty"`
	Refused     int `json:"refused,omitempty"`
	// Problem is the reason of a refusal, of a lost connection, or the damage of the layer below; while there is
	// damage, nothing is in effect.
	Problem string `json:"problem,omitempty"`
	Damaged bool   `json:"damaged,omitempty"`
}

// InEffect reports whether packets follow all decisions.
func (x *Effect) InEffect() bool { return x.Pending+x.Approximate+x.Refused == 0 && !x.Damaged }

// String describes the progress: "in effect", or what is not.
func (x *Effect) String() string {
	if x.InEffect() {
		return "in effect"
	}
	var counts []string
	for _, p := range []struct {
		n    int
		what string
	}{{x.Pending, "pending"}, {x.Approximate, "held approximately"}, {x.Refused, "refused"}} {
		if p.n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", p.n, p.what))
		}
	}
	out := strings.Join(counts, ", ")
	switch {
	case x.Damaged:
		out = "damaged: " + x.Problem
	case x.Problem != "":
		out += "; " + x.Problem
	}
	return "not in effect: " + out
}

// Digest returns a fingerprint of all of the core's decisions.
func (c *Core) Digest() string {
	h := sha256.New()
	c.Describe(h)
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// Replayed is one event of a recording with its results, or a report of the data plane's progress.
type Replayed struct {
	// Line is the event's line in the recording, from 1; TimeNS is the time at which the recording daemon processed it,
	// Unix nanoseconds.
	Line   int
	TimeNS int64
	Event  Event
	// Text is the event in readable form; Changed has a line for each change that it caused.
	Text    string
	Changed []string
	// Effect, if not nil, is a report: there is no Event.
	Effect *Effect
	// Missing, if not 0, is the number of events that could not be recorded at this place; of the other fields only
	// Line and Text are set.
	Missing uint64
}

// Replay runs a recording through a fresh core and calls each, if not nil, after every event, for every report and for
// every gap. It verifies every digest before the first gap. The files of one recording must follow each other, the
// oldest first; without the first file the replay begins with a gap. A recording that ends in the middle of a line
// (because the process was killed) is replayed up to that line.
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
		var l RecordLine
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
			if core, err = New(cfg); err != nil {
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
		case l.Effect != nil:
			if each != nil {
				each(Replayed{Line: n, TimeNS: l.TimeNS, Effect: l.Effect, Text: "weights " + l.Effect.String()})
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

// check returns an error for an event that refers to an index outside the configuration: recordings are untrusted
// input.
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
	case DataplaneReady:
		return c.checkHeld(ev)
	case NextHop:
		return session(ev.Session)
	case Avoid:
		return c.checkAvoid(ev)
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
		case fare.Drain, fare.Avoid, fare.PolicyChange:
			return fmt.Errorf("%T is an event of the core itself and cannot be in a recording", f)
		}
	}
	return nil
}
