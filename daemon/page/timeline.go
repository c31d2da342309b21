package page

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	farev1 "github.com/fared/fared/api/fare/v1"
)

const (
	// incidentGap is the silence after which the next event begins another incident; incidentSpan limits an incident
	// that goes on.
	incidentGap  = time.Second
	incidentSpan = 15 * time.Second
	// maxIncidents and maxLines bound the timeline.
	maxIncidents = 40
	maxLines     = 24
)

// timeline groups events by incidents: a failure, and everything that follows within a second of the previous event.
// Times are those of the daemon's clock for its events, and of the receipt for weights.
type timeline struct {
	incidents []*incident // the oldest first
	numbered  int
	// watching is the time of the first complete weights: the daemon's events of changed weights count until then, the
	// changes themselves after it.
	watching time.Time
	last     uint64 // sequence of the last event of the daemon
}

// incident is a group of events.
type incident struct {
	number       int
	begun, ended time.Time
	title        string
	bad          bool
	lines        []line
	hidden       int // lines beyond maxLines
	weights      reweighing
	row          *Row // cached; nil after a change
}

// line is an event of the daemon.
type line struct {
	at   time.Time
	text string
	bad  bool
}

type incidentLine struct {
	After string `json:"after"`
	Text  string `json:"text"`
	Bad   bool   `json:"bad"`
}

// reweighing sums the changes of weights of an incident.
type reweighing struct {
	rows, moved int
	pending     int            // changed rows that are not in effect
	last        time.Time      // of changed weights
	effective   time.Time      // the last time at which changed weights were reported in effect
	ways        map[string]int // rows by their weights before and after
}

type incidentRow struct {
	Time  int64          `json:"time_ms"`
	Title string         `json:"title"`
	Bad   bool           `json:"bad"`
	Lines []incidentLine `json:"lines"`
	More  int            `json:"more"`
}

// at returns the incident to which an event at a time belongs, a new one if necessary.
func (t *timeline) at(now time.Time, title string, bad bool) *incident {
	if n := len(t.incidents); n > 0 {
		x := t.incidents[n-1]
		worse := bad && !x.bad && len(x.lines) > 0 // a failure after a start or repair is another incident
		if gap := now.Sub(x.ended); !worse && gap <= incidentGap && gap >= -incidentGap && now.Sub(x.begun) <= incidentSpan {
			if now.Before(x.begun) { // the cause has an earlier time than the receipt of changed weights, and may come later
				x.begun, x.title, x.bad = now, title, x.bad || bad
			}
			if now.After(x.ended) {
				x.ended = now
			}
			x.row = nil
			return x
		}
	}
	t.numbered++
	x := &incident{number: t.numbered, begun: now, ended: now, title: title, bad: bad}
	t.incidents = append(t.incidents, x)
	if len(t.incidents) > maxIncidents {
		t.incidents = slices.Delete(t.incidents, 0, len(t.incidents)-maxIncidents)
	}
	return x
}

// event applies a message of WatchEvents.
func (t *timeline) event(e *farev1.FabricEvent) {
	at := time.Unix(0, int64(e.TimeNs))
	if e.Kind == "weights" && !t.watching.IsZero() && at.After(t.watching) {
		return
	}
	text := strings.ReplaceAll(e.Kind, "-", " ")
	if e.Subject != "" && e.Subject != e.Kind {
		text += " " + e.Subject
	}
	bad := strings.HasSuffix(e.Kind, "-down") || e.Kind == "fault"
	x := t.at(at, text, bad)
	x.bad = x.bad || bad
	if e.Detail != "" {
		text += ": " + e.Detail
	}
	if lost := e.Sequence - t.last; t.last != 0 && e.Sequence > t.last && lost > 1 {
		x.hidden += int(lost - 1)
	}
	t.last = e.Sequence
	if len(x.lines) >= maxLines {
		x.hidden++
		return
	}
	x.lines = append(x.lines, line{at, text, bad})
}

// changed applies a changed row: its shapes before and after, nil without one, and the number of slots that moved in
// the change.
func (t *timeline) changed(before, after *shape, moved uint32, at time.Time) {
	var from, to string
	if before != nil {
		from = before.ratio
	}
	if after != nil {
		to = after.ratio
	}
	if from == to && (before == nil || after == nil || before.inEffect == after.inEffect) {
		return
	}
	x := t.at(at, "weights changed", false)
	w := &x.weights
	if from != to {
		w.rows++
		w.moved += int(moved)
		w.last = at
		w.count(from, to)
	}
	switch {
	case after != nil && after.inEffect:
		w.effective = at
		if before != nil && !before.inEffect && w.pending > 0 {
			w.pending--
		}
	case after != nil && (before == nil || before.inEffect):
		w.pending++
	case after == nil && before != nil && !before.inEffect && w.pending > 0:
		w.pending--
	}
}

// count counts a way from one ratio to another. The number of different ways is bounded.
func (w *reweighing) count(from, to string) {
	if w.ways == nil {
		w.ways = map[string]int{}
	}
	name := "from " + from + " to " + to
	switch {
	case from == "":
		name = "new with " + to
	case to == "":
		name = "removed"
	}
	if _, known := w.ways[name]; known || len(w.ways) < 64 {
		w.ways[name]++
	}
}

// lines describes the changes relative to the incident's begin.
func (w *reweighing) lines(begun time.Time) []incidentLine {
	if w.rows == 0 && w.effective.IsZero() {
		return nil
	}
	var out []incidentLine
	if w.rows > 0 {
		most, n := "", 0
		for name, k := range w.ways {
			if k > n || k == n && name < most {
				most, n = name, k
			}
		}
		text := fmt.Sprintf("weights of %s changed: %d %s", number(w.rows, "row"), n, most)
		if rest := len(w.ways) - 1; rest > 0 {
			text += ", and " + number(rest, "other change")
		}
		text += "; " + number(w.moved, "slot") + " moved"
		out = append(out, incidentLine{After: after(w.last.Sub(begun)), Text: text})
	}
	if !w.effective.IsZero() {
		text := "the data plane forwards by the weights"
		if w.pending > 0 {
			text += ", " + number(w.pending, "row") + " not yet in effect"
		}
		out = append(out, incidentLine{After: after(w.effective.Sub(begun)), Text: text})
	}
	return out
}

// number returns a number with its noun.
func number(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

// after returns a time after the begin of an incident, such as +3.4 ms.
func after(d time.Duration) string {
	switch d = max(0, d); {
	case d < 100*time.Millisecond:
		return fmt.Sprintf("+%.1f ms", float64(d)/1e6)
	case d < 10*time.Second:
		return fmt.Sprintf("+%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("+%.1f s", d.Seconds())
}

// table returns the incidents, the latest first.
func (t *timeline) table() (out Table) {
	for _, x := range slices.Backward(t.incidents) {
		if x.row == nil {
			row := NewRow(strconv.Itoa(x.number), x.show())
			x.row = &row
		}
		out = append(out, *x.row)
	}
	return out
}

func (x *incident) show() incidentRow {
	row := incidentRow{Time: x.begun.UnixMilli(), Title: x.title, Bad: x.bad, More: x.hidden, Lines: []incidentLine{}}
	for _, l := range x.lines {
		row.Lines = append(row.Lines, incidentLine{after(l.at.Sub(x.begun)), l.text, l.bad})
	}
	row.Lines = append(row.Lines, x.weights.lines(x.begun)...)
	return row
}
